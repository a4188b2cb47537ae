//! The systemd cgroup driver: cgroups are scopes in slices, made by systemd, which so knows their limits and keeps them
//! when it reads its units anew.
//!
//! ```text
//! kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice    the caller's, CRI `cgroup_parent`
//!   reconcile-UID.scope     a container or a pause: Delegate=yes, limits as properties and as files
//! reconcile.slice/reconcile-INSTANCE.slice                                 of pods without a parent
//! ```
//!
//! On v1 systemd makes a scope's directories in some hierarchies and follows it by its own (in a hybrid layout by
//! v2's); the directories in the others (freezer, cpuset, hugetlb…) are made and removed here, and who enters the scope
//! enters all.
//!
//! A scope is made with its first process and ends with its last. What is to live in it comes a moment later, so a
//! holder (`reconcile-shim hold`) keeps the scope until [`world::Cgroups::settled`]; it ends with the daemon, too.

mod bus;

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use bus::{Property, Value};

use super::cgroup::Cgroups;
use crate::error::{Error, Result};
use crate::world;

/// There while systemd is the init (sd_booted(3)).
const BOOTED: &str = "/run/systemd/system";
const PREFIX: &str = "reconcile-";
const SCOPE: &str = ".scope";
const SLICE: &str = ".slice";

/// Is systemd the init, and does it keep these cgroups?
pub fn usable(cgroups: &Cgroups) -> bool {
    cgroups.of_systemd() && Path::new(BOOTED).is_dir()
}

/// The node's cgroups through systemd.
pub struct Systemd {
    files: Arc<Cgroups>,
    shim: PathBuf,
    /// What stands for "no parent" (as with cgroupfs), and the slice that it is.
    default: String,
    slice: String,
    /// By path.
    holders: Mutex<HashMap<String, Child>>,
    /// Held for writing while a slice is ended: a scope that began in it meanwhile would end with it.
    slices: RwLock<()>,
}

impl Systemd {
    pub fn new(files: Arc<Cgroups>, shim: PathBuf, default: String) -> Result<Systemd> {
        if !usable(&files) {
            return Err(Error::Refused(format!(
                "cgroup.driver: systemd: needs systemd as init ({BOOTED}) and its cgroups; set cgroupfs"
            )));
        }
        let slice = format!("{}{SLICE}", default.trim_start_matches('/'));
        Ok(Systemd {
            files,
            shim,
            slice: expand(&slice),
            default,
            holders: Mutex::default(),
            slices: RwLock::default(),
        })
    }

    /// The cgroup that a path of the other parts means.
    fn real<'a>(&'a self, path: &'a str) -> &'a str {
        match path == self.default {
            true => &self.slice,
            false => path,
        }
    }

    fn holders(&self) -> std::sync::MutexGuard<'_, HashMap<String, Child>> {
        self.holders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a scope with a holder in it, or has the one that is there.
    fn start(&self, path: &str) -> Result<()> {
        let (slice, unit) = units(path).ok_or_else(|| {
            Error::Refused(format!(
                "cgroup_parent: {path} is in no slice; cgroup.driver is systemd here, and the kubelet's cgroupDriver \
                 must be, too"
            ))
        })?;
        if world::Cgroups::observe(&*self.files, path).0 > 0 && !self.files.processes(path).is_empty() {
            return self.complete(path);
        }
        let mut holder = Command::new(&self.shim)
            .arg("hold")
            .env_clear()
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(Error::io("run holder", &self.shim))?;
        let properties = properties(slice, unit, holder.id());
        let in_use = self.slices.read().unwrap_or_else(PoisonError::into_inner);
        let started = bus::start(unit, &properties).or_else(|e| {
            if !e.is("UnitExists") {
                return Err(e);
            }
            // Its processes have ended, and systemd has not seen it yet or calls it failed.
            bus::stop(unit)?;
            bus::reset(unit)?;
            bus::start(unit, &properties)
        });
        drop(in_use);
        match started {
            Ok(()) => {
                self.holders().insert(path.to_owned(), holder);
                self.complete(path)
            }
            Err(e) => {
                end(&mut holder);
                Err(failed(path)(e))
            }
        }
    }

    /// v1: makes a scope's directories in the hierarchies that systemd leaves alone.
    fn complete(&self, path: &str) -> Result<()> {
        match self.files.v2 {
            true => Ok(()),
            false => world::Cgroups::ensure(&*self.files, path),
        }
    }

    /// Ends a scope, or a slice that nobody uses.
    fn stop(&self, path: &str, unit: &str) -> Result<()> {
        if let Some(mut holder) = self.holders().remove(path) {
            end(&mut holder);
        }
        bus::stop(unit).and_then(|()| bus::reset(unit)).map_err(failed(path))
    }

    /// Ends a slice without processes, and the one that it is in; systemd removes its cgroups of them.
    fn end_slices(&self, real: &str) {
        let _alone = self.slices.write().unwrap_or_else(PoisonError::into_inner);
        let mut next = Some(real);
        while let Some(slice) = next.filter(|slice| !slice.is_empty()) {
            // A scope has a process from its begin on. One that has none any more systemd has yet to see and remove.
            if !self.files.processes(slice).is_empty() {
                return;
            }
            let Some((above, unit)) = slice.rsplit_once('/') else {
                return;
            };
            next = Some(above);
            if world::Cgroups::observe(&*self.files, slice).0 == 0 {
                continue;
            }
            if let Err(e) = bus::stop(unit) {
                tracing::debug!("{e}");
            }
            if !self.files.v2 {
                world::Cgroups::remove_if_empty(&*self.files, slice);
            }
        }
    }
}

fn failed(path: &str) -> impl FnOnce(bus::Error) -> Error {
    let told = Error::io("change cgroup", path);
    move |e| told(io::Error::other(e))
}

/// Lets a holder go. It has nothing to lose.
fn end(holder: &mut Child) {
    let _ = holder.kill();
    let _ = holder.wait();
}

/// Runs what waits for systemd, off the runtime's other tasks.
fn blocking<T>(work: impl FnOnce() -> T) -> T {
    use tokio::runtime::{Handle, RuntimeFlavor};
    match Handle::try_current().map(|handle| handle.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        _ => work(),
    }
}

/// The slice's and the scope's names in a path of [`world::Cgroups::path`]; `None` if its parent is no slice.
fn units(path: &str) -> Option<(&str, &str)> {
    let (parent, unit) = path.rsplit_once('/')?;
    let slice = parent.rsplit('/').next()?;
    (slice.ends_with(SLICE) && unit.ends_with(SCOPE)).then_some((slice, unit))
}

/// Where a slice is: `a-b.slice` is in `a.slice` (systemd.slice(5)).
fn expand(slice: &str) -> String {
    let stem = slice.trim_end_matches(SLICE);
    let dashes = stem.match_indices('-').map(|(at, _)| &stem[..at]);
    let all = dashes.chain([stem]).filter(|name| !name.is_empty());
    all.map(|name| format!("/{name}{SLICE}")).collect()
}

fn properties(slice: &str, unit: &str, holder: u32) -> Vec<Property> {
    let id = unit.trim_start_matches(PREFIX).trim_end_matches(SCOPE);
    let mut all = vec![
        ("Description", Value::Text(format!("reconcile container {id}"))),
        ("Slice", Value::Text(slice.to_owned())),
        ("PIDs", Value::Pids(vec![holder])),
        ("Delegate", Value::Bool(true)),
        // At shutdown the kubelet ends pods in its order.
        ("DefaultDependencies", Value::Bool(false)),
        ("CollectMode", Value::Text("inactive-or-failed".into())),
    ];
    let accounting = ["CPUAccounting", "MemoryAccounting", "IOAccounting", "TasksAccounting"];
    all.extend(accounting.map(|name| (name, Value::Bool(true))));
    all
}

/// The properties that keep the values of cgroup files; none for files that systemd does not write.
fn kept(limits: &[(&str, &str)]) -> Vec<Property> {
    let period = limits.iter().find(|(file, _)| *file == "cpu.cfs_period_us");
    let period = period.map_or("100000", |(_, period)| period);
    let of = |(file, value): &(&str, &str)| match *file {
        // v1 has in two files what v2 has in one.
        "cpu.cfs_quota_us" => property("cpu.max", &format!("{value} {period}")),
        file => property(file, value),
    };
    limits.iter().flat_map(of).collect()
}

fn property(file: &str, value: &str) -> Vec<Property> {
    let number = |text: &str| match text {
        "max" | "-1" => Some(u64::MAX),
        text => text.parse().ok(),
    };
    let one = |name| number(value).map(|n| (name, Value::Number(n))).into_iter().collect();
    match file {
        "memory.max" => one("MemoryMax"),
        "memory.high" => one("MemoryHigh"),
        "memory.low" => one("MemoryLow"),
        "memory.min" => one("MemoryMin"),
        "memory.swap.max" => one("MemorySwapMax"),
        "memory.limit_in_bytes" => one("MemoryLimit"),
        "pids.max" => one("TasksMax"),
        "cpu.shares" => one("CPUShares"),
        "cpu.weight" => one("CPUWeight"),
        "cpu.max" => {
            let (quota, period) = value.split_once(' ').unwrap_or((value, "100000"));
            let Some(period) = period.parse::<u64>().ok().filter(|period| *period > 0) else {
                return Vec::new();
            };
            let quota = match quota.parse::<u64>() {
                // systemd counts in percents: µs a second, up to the next 10 ms.
                Ok(quota) => (quota.saturating_mul(1_000_000).div_ceil(period)).next_multiple_of(10_000),
                Err(_) => u64::MAX,
            };
            vec![
                ("CPUQuotaPeriodUSec", Value::Number(period)),
                ("CPUQuotaPerSecUSec", Value::Number(quota)),
            ]
        }
        "cpuset.cpus" => bits(value)
            .map(|b| ("AllowedCPUs", Value::Bits(b)))
            .into_iter()
            .collect(),
        "cpuset.mems" => bits(value)
            .map(|b| ("AllowedMemoryNodes", Value::Bits(b)))
            .into_iter()
            .collect(),
        _ => Vec::new(),
    }
}

/// A list such as `0-2,7` as bytes of bits, the lowest first; `None` if it is no list.
fn bits(list: &str) -> Option<Vec<u8>> {
    const MAX: usize = 8192;
    let mut bytes = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        for bit in first..=last.min(MAX) {
            bytes.resize(bytes.len().max(bit / 8 + 1), 0);
            bytes[bit / 8] |= 1 << (bit % 8);
        }
    }
    Some(bytes)
}

impl world::Cgroups for Systemd {
    fn v2(&self) -> bool {
        self.files.v2
    }

    fn before_container(&self) -> bool {
        true
    }

    fn path(&self, parent: &str, uid: &str) -> String {
        let parent = match self.real(parent) {
            real if real == self.slice => real.to_owned(),
            given => match given.rsplit('/').next() {
                Some(name) if name.ends_with(SLICE) => expand(name),
                _ => given.to_owned(),
            },
        };
        format!("{parent}/{PREFIX}{uid}{SCOPE}")
    }

    fn observe(&self, path: &str) -> (usize, usize) {
        self.files.observe(self.real(path))
    }

    fn ensure(&self, path: &str) -> Result<()> {
        shim::fault::point("cgroup.ensure.before");
        blocking(|| self.start(path))
    }

    fn settled(&self, path: &str) {
        let holder = self.holders().remove(path);
        if let Some(mut holder) = holder {
            blocking(|| end(&mut holder));
        }
    }

    fn keep(&self, path: &str, limits: &[(&str, &str)]) -> Result<()> {
        let Some((_, unit)) = units(path) else { return Ok(()) };
        let properties = kept(limits);
        match properties.is_empty() {
            true => Ok(()),
            false => blocking(|| bus::set(unit, &properties)).map_err(failed(path)),
        }
    }

    fn kill(&self, path: &str) -> Result<()> {
        self.files.kill(self.real(path))
    }

    fn remove(&self, path: &str) -> Result<()> {
        if let Some((_, unit)) = units(path) {
            blocking(|| self.stop(path, unit))?;
        }
        self.files.remove(self.real(path))
    }

    fn remove_if_empty(&self, path: &str) {
        let real = self.real(path);
        if real == path {
            return self.files.remove_if_empty(path);
        }
        blocking(|| self.end_slices(real));
    }

    fn children(&self, parent: &str) -> Vec<String> {
        let own = |name: String| Some(name.strip_prefix(PREFIX)?.strip_suffix(SCOPE)?.to_owned());
        let names = self.files.children(self.real(parent));
        match self.real(parent) == parent {
            true => names,
            false => names.into_iter().filter_map(own).collect(),
        }
    }

    fn get(&self, controller: &str, path: &str, file: &str) -> io::Result<String> {
        self.files.get(controller, path, file)
    }

    fn set(&self, controller: &str, path: &str, file: &str, value: &str) -> io::Result<()> {
        self.files.set(controller, path, file, value)
    }

    fn v2_dir(&self, path: &str) -> Option<PathBuf> {
        self.files.v2_dir(self.real(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_in_slices() {
        assert_eq!(expand("test.slice"), "/test.slice");
        assert_eq!(
            expand("kubepods-burstable-pod1_2.slice"),
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice"
        );
        assert_eq!(
            units("/a.slice/a-b.slice/reconcile-1.scope"),
            Some(("a-b.slice", "reconcile-1.scope"))
        );
        assert_eq!(units("/kubepods/pod1/reconcile-1.scope"), None);
    }

    #[test]
    fn limits_are_properties() {
        let number = |name, n| vec![(name, Value::Number(n))];
        assert_eq!(property("memory.max", "4096"), number("MemoryMax", 4096));
        assert_eq!(property("memory.max", "max"), number("MemoryMax", u64::MAX));
        assert_eq!(property("pids.max", "5"), number("TasksMax", 5));
        let quota = |period, quota| {
            vec![
                ("CPUQuotaPeriodUSec", Value::Number(period)),
                ("CPUQuotaPerSecUSec", Value::Number(quota)),
            ]
        };
        assert_eq!(property("cpu.max", "50000 100000"), quota(100_000, 500_000));
        assert_eq!(property("cpu.max", "12345 100000"), quota(100_000, 130_000));
        assert_eq!(property("cpu.max", "max 100000"), quota(100_000, u64::MAX));
        assert_eq!(property("cpu.max", "1 0"), []);
        assert_eq!(property("memory.limit_in_bytes", "-1"), number("MemoryLimit", u64::MAX));
        let v1 = [
            ("cpu.cfs_quota_us", "20000"),
            ("cpu.cfs_period_us", "50000"),
            ("cpu.shares", "512"),
        ];
        assert_eq!(kept(&v1), [quota(50_000, 400_000), number("CPUShares", 512)].concat());
        assert_eq!(kept(&[("cpu.cfs_quota_us", "-1")]), quota(100_000, u64::MAX));
        assert_eq!(
            property("cpuset.cpus", "0-2,9"),
            [("AllowedCPUs", Value::Bits(vec![0b111, 0b10]))]
        );
        assert_eq!(property("cpuset.cpus", "x"), []);
        assert_eq!(property("hugetlb.2MB.max", "1"), []);
    }
}
