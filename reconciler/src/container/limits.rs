//! Stage `limits`: a running container's cgroup says what its record says (CRI UpdateContainerResources).

use std::io;

use oci_spec::runtime::LinuxResources;
use state::Container;
use state::container::{ContainerKind, Resources};

use super::cgroup_path;
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::engine::{Context, live};
use crate::error::{Error, Result};
use crate::sandbox;
use crate::world::Cgroups;

pub struct Limits;

/// One cgroup file and what it shall hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// v1 controller; ignored on v2.
    pub controller: &'static str,
    pub file: String,
    pub value: String,
}

fn limit(controller: &'static str, file: impl Into<String>, value: impl ToString) -> Limit {
    Limit {
        controller,
        file: file.into(),
        value: value.to_string(),
    }
}

/// What the record's resources are in cgroup files (contract: CRI, OCI and cgroup v2 names of the same limits).
pub fn wanted(r: &Resources, v2: bool) -> Vec<Limit> {
    if v2 { wanted_v2(r) } else { wanted_v1(r) }
}

fn wanted_v1(r: &Resources) -> Vec<Limit> {
    let mut limits = Vec::new();
    if r.cpu_shares != 0 {
        limits.push(limit("cpu", "cpu.shares", r.cpu_shares));
    }
    if r.cpu_period != 0 {
        limits.push(limit("cpu", "cpu.cfs_period_us", r.cpu_period));
    }
    if r.cpu_quota != 0 {
        limits.push(limit("cpu", "cpu.cfs_quota_us", r.cpu_quota));
    }
    if r.memory_limit != 0 {
        limits.push(limit("memory", "memory.limit_in_bytes", r.memory_limit));
    }
    let swap = if r.memory_swap_limit == 0 {
        r.memory_limit
    } else {
        r.memory_swap_limit
    };
    if swap != 0 {
        limits.push(limit("memory", "memory.memsw.limit_in_bytes", swap));
    }
    if !r.cpuset_cpus.is_empty() {
        limits.push(limit("cpuset", "cpuset.cpus", &r.cpuset_cpus));
    }
    if !r.cpuset_mems.is_empty() {
        limits.push(limit("cpuset", "cpuset.mems", &r.cpuset_mems));
    }
    limits
}

fn wanted_v2(r: &Resources) -> Vec<Limit> {
    let mut limits = Vec::new();
    if r.cpu_shares != 0 {
        limits.push(limit("", "cpu.weight", weight(r.cpu_shares)));
    }
    if r.cpu_quota != 0 || r.cpu_period != 0 {
        let quota = if r.cpu_quota > 0 {
            r.cpu_quota.to_string()
        } else {
            "max".to_owned()
        };
        let period = if r.cpu_period == 0 { 100_000 } else { r.cpu_period };
        limits.push(limit("", "cpu.max", format!("{quota} {period}")));
    }
    let max = |n: i64| if n < 0 { "max".to_owned() } else { n.to_string() };
    if r.memory_limit != 0 {
        limits.push(limit("", "memory.max", max(r.memory_limit)));
    }
    match (r.memory_limit, r.memory_swap_limit) {
        (_, -1) => limits.push(limit("", "memory.swap.max", "max")),
        (memory, 0) if memory > 0 => limits.push(limit("", "memory.swap.max", 0)),
        (memory, swap) if swap > 0 && swap >= memory => limits.push(limit("", "memory.swap.max", swap - memory.max(0))),
        _ => {}
    }
    if !r.cpuset_cpus.is_empty() {
        limits.push(limit("", "cpuset.cpus", &r.cpuset_cpus));
    }
    if !r.cpuset_mems.is_empty() {
        limits.push(limit("", "cpuset.mems", &r.cpuset_mems));
    }
    limits.retain(|l| !r.unified.contains_key(&l.file));
    limits.extend(r.unified.iter().map(|(file, value)| limit("", file, value)));
    limits
}

/// cpu.shares (2…262144) to cpu.weight (1…10000) by the quadratic formula that maps 1024 to 100.
fn weight(shares: i64) -> u64 {
    match shares {
        ..=2 => 1,
        262_144.. => 10_000,
        shares => {
            let l = (shares as f64).log2();
            let exponent = (l * l + 125.0 * l) / 612.0 - 7.0 / 34.0;
            10f64.powf(exponent).ceil() as u64
        }
    }
}

/// Which limits do not hold, and how the processes are kept from them.
pub struct Have {
    differing: Vec<Limit>,
    /// Nobody of ours freezes what runs, but a checkpoint while it is taken.
    frozen: bool,
    /// Controllers in whose cgroup the first process is not.
    astray: Vec<&'static str>,
}

impl Stage<ContainerKind> for Limits {
    type Have = Have;
    const NAME: &'static str = "limits";

    async fn observe(cx: &Context, object: &Container) -> Result<Have> {
        let cgroups = &*cx.world.cgroups;
        let path = cgroup_path(cx, &*sandbox::of(cx, object)?, object);
        let mut differing = wanted(&object.spec.resources, cgroups.v2());
        differing.retain(|limit| !holds(cgroups, &path, limit));
        // Frozen is read first: a checkpoint that has thawed it since has also let go of it.
        let frozen = frozen(cgroups, &path) && !cx.checkpoints.holds(object.uid());
        let astray = match (pid(cx, object)?, &cx.world.usage) {
            (Some(pid), Some(real)) => real.astray(&path, pid),
            _ => Vec::new(),
        };
        Ok(Have {
            differing,
            frozen,
            astray,
        })
    }

    fn diff(_: &Container, have: &Have) -> Step {
        if have.frozen {
            return Step::Change(Why::new("Frozen", "its cgroup is frozen and it is to run"));
        }
        if !have.astray.is_empty() {
            let what = format!("its first process is not in its cgroup {}", have.astray.join(" "));
            return Step::Change(Why::risky("Astray", what));
        }
        match have.differing.first() {
            None => Step::Keep,
            Some(limit) => Step::Change(Why::new(
                "LimitDiffers",
                format!("{} is not {}", limit.file, limit.value),
            )),
        }
    }

    fn present(_: &Have) -> bool {
        false
    }

    async fn act(cx: &Context, object: &Container, _: &Step) -> Result<()> {
        let path = cgroup_path(cx, &*sandbox::of(cx, object)?, object);
        let Have {
            differing,
            frozen,
            astray,
        } = Self::observe(cx, object).await?;
        if frozen {
            let thaw = || freeze(&*cx.world.cgroups, &path, false);
            let thawed = cx.checkpoints.unless_held(object.uid(), thaw).unwrap_or(Ok(()));
            thawed.map_err(Error::io("thaw cgroup", &path))?;
        }
        // Asked again: only the very process of the run record is moved.
        if let (Some(pid), false) = (pid(cx, object)?, astray.is_empty()) {
            tracing::warn!(pid, "moving the container's process back into its cgroup");
            for controller in astray {
                let moved = cx
                    .world
                    .cgroups
                    .set(controller, &path, "cgroup.procs", &pid.to_string());
                moved.map_err(Error::io("move process into cgroup", &path))?;
            }
        }
        keep(cx, &path, object)?;
        // Memory alone and memory with swap bound each other: what is refused in one order is taken in the other.
        let failed: Vec<Limit> = differing
            .into_iter()
            .rev()
            .filter(|l| set(cx, &path, l).is_err())
            .collect();
        for limit in failed.iter().rev() {
            set(cx, &path, limit).map_err(|e| Error::Refused(format!("{}: {e}", limit.file)))?;
        }
        Ok(())
    }

    async fn undo(_: &Context, _: &Container) -> Result<Undone> {
        Ok(Undone::Done)
    }
}

/// Has whoever else writes the files of a cgroup know the container's limits.
fn keep(cx: &Context, path: &str, object: &Container) -> Result<()> {
    keep_all(cx, path, &wanted(&object.spec.resources, cx.world.cgroups.v2()))
}

/// The same before its first process: those too that only its handler's base names, `bundle`. The record's come last:
/// it may have been updated since the bundle was made.
pub fn keep_first(cx: &Context, path: &str, object: &Container, bundle: &LinuxResources) -> Result<()> {
    let v2 = cx.world.cgroups.v2();
    let mut all = wanted(&of_bundle(bundle), v2);
    if let Some(max) = pids_max(bundle).filter(|_| !v2) {
        all.push(limit("pids", "pids.max", max));
    }
    let own = wanted(&object.spec.resources, v2);
    all.retain(|limit| !own.iter().any(|own| own.file == limit.file));
    all.extend(own);
    keep_all(cx, path, &all)
}

fn keep_all(cx: &Context, path: &str, all: &[Limit]) -> Result<()> {
    let pairs: Vec<_> = all.iter().map(|l| (l.file.as_str(), l.value.as_str())).collect();
    cx.world.cgroups.keep(path, &pairs)
}

/// The limits of a bundle (OCI config-linux `resources`), as a record would have them.
fn of_bundle(bundle: &LinuxResources) -> Resources {
    let signed = |n: Option<u64>| n.and_then(|n| i64::try_from(n).ok()).unwrap_or_default();
    let mut all = Resources::default();
    if let Some(cpu) = bundle.cpu() {
        all.cpu_shares = signed(cpu.shares());
        all.cpu_quota = cpu.quota().unwrap_or_default();
        all.cpu_period = signed(cpu.period());
        all.cpuset_cpus = cpu.cpus().clone().unwrap_or_default();
        all.cpuset_mems = cpu.mems().clone().unwrap_or_default();
    }
    if let Some(memory) = bundle.memory() {
        all.memory_limit = memory.limit().unwrap_or_default();
        all.memory_swap_limit = memory.swap().unwrap_or_default();
        if let Some(low) = memory.reservation().filter(|low| *low > 0) {
            all.unified.insert("memory.low".into(), low.to_string());
        }
    }
    if let Some(max) = pids_max(bundle) {
        all.unified.insert("pids.max".into(), max);
    }
    all.unified.extend(bundle.unified().clone().unwrap_or_default());
    all
}

fn pids_max(bundle: &LinuxResources) -> Option<String> {
    Some(match bundle.pids().as_ref()?.limit() {
        ..=0 => "max".to_owned(),
        limit => limit.to_string(),
    })
}

/// The first process, while it lives.
fn pid(cx: &Context, object: &Container) -> Result<Option<i32>> {
    let run = super::run_record(&cx.world, object)?;
    Ok(run.and_then(|run| live::pid(&cx.world, &run)))
}

/// Was this very cgroup frozen (not one above it)?
fn frozen(cgroups: &dyn Cgroups, path: &str) -> bool {
    let text = match cgroups.v2() {
        true => cgroups.get("", path, "cgroup.freeze"),
        false => cgroups.get("freezer", path, "freezer.self_freezing"),
    };
    text.is_ok_and(|text| text.trim() == "1")
}

/// Asks for the processes of a cgroup to be stopped, or lets them go on. When all have stopped, [`is_still`] says.
pub fn freeze(cgroups: &dyn Cgroups, path: &str, stop: bool) -> io::Result<()> {
    match (cgroups.v2(), stop) {
        (true, true) => cgroups.set("", path, "cgroup.freeze", "1"),
        (true, false) => cgroups.set("", path, "cgroup.freeze", "0"),
        (false, true) => cgroups.set("freezer", path, "freezer.state", "FROZEN"),
        (false, false) => cgroups.set("freezer", path, "freezer.state", "THAWED"),
    }
}

/// Have all processes of a frozen cgroup stopped? (cgroup v2 `cgroup.events`; v1 `freezer.state`, FREEZING till then.)
pub fn is_still(cgroups: &dyn Cgroups, path: &str) -> io::Result<bool> {
    match cgroups.v2() {
        true => Ok(cgroups
            .get("", path, "cgroup.events")?
            .lines()
            .any(|line| line == "frozen 1")),
        false => Ok(cgroups.get("freezer", path, "freezer.state")?.trim() == "FROZEN"),
    }
}

fn set(cx: &Context, path: &str, limit: &Limit) -> io::Result<()> {
    cx.world.cgroups.set(limit.controller, path, &limit.file, &limit.value)
}

fn holds(cgroups: &dyn Cgroups, path: &str, limit: &Limit) -> bool {
    match cgroups.get(limit.controller, path, &limit.file) {
        Ok(text) => same(text.trim(), &limit.value),
        // Swap accounting may be off; then the limit on memory is all there is.
        Err(_) => limit.file.starts_with("memory.memsw") || limit.file == "memory.swap.max",
    }
}

/// Equal, but for the kernel's rounding of bytes to pages and its spelling of "no limit".
fn same(have: &str, want: &str) -> bool {
    const PAGE: u64 = 4096;
    match (have.parse::<u64>(), want.parse::<i64>()) {
        _ if have == want => true,
        (Ok(have), Ok(-1)) => have >= i64::MAX as u64 / PAGE * PAGE,
        (Ok(have), Ok(want)) => want.unsigned_abs() / PAGE * PAGE == have && have > 0,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_follow_the_quadratic_formula() {
        assert_eq!([2, 1024, 262_144].map(weight), [1, 100, 10_000]);
    }

    #[test]
    fn swap_is_memory_plus_swap_in_the_record_and_swap_alone_in_v2() {
        let r = Resources {
            memory_limit: 100 << 20,
            memory_swap_limit: 150 << 20,
            ..Resources::default()
        };
        assert!(wanted(&r, true).contains(&limit("", "memory.swap.max", 50 << 20)));
        assert!(wanted(&r, false).contains(&limit("memory", "memory.memsw.limit_in_bytes", 150 << 20)));
        let r = Resources {
            memory_limit: 100 << 20,
            ..Resources::default()
        };
        assert!(wanted(&r, true).contains(&limit("", "memory.swap.max", 0)));
    }

    #[test]
    fn a_bundle_s_limits_are_a_record_s() {
        let bundle = serde_json::json!({
            "cpu": {"shares": 1024, "quota": 20_000, "period": 100_000, "cpus": "0"},
            "memory": {"limit": 64 << 20, "swap": 64 << 20, "reservation": 8 << 20},
            "pids": {"limit": 9},
            "unified": {"memory.high": "32000000"},
        });
        let mut all = wanted(&of_bundle(&serde_json::from_value(bundle).unwrap()), true);
        all.sort_by(|a, b| a.file.cmp(&b.file));
        let have: Vec<_> = all.iter().map(|l| (&*l.file, &*l.value)).collect();
        let want = [
            ("cpu.max", "20000 100000"),
            ("cpu.weight", "100"),
            ("cpuset.cpus", "0"),
            ("memory.high", "32000000"),
            ("memory.low", "8388608"),
            ("memory.max", "67108864"),
            ("memory.swap.max", "0"),
            ("pids.max", "9"),
        ];
        assert_eq!(have, want);
        assert_eq!(of_bundle(&LinuxResources::default()), Resources::default());
    }

    #[test]
    fn the_kernel_rounds_to_pages() {
        assert!(same("4096", "5000"));
        assert!(!same("4096", "9000"));
        assert!(same("9223372036854771712", "-1"));
        assert!(!same("100", "200"));
        assert!(same("20000 100000", "20000 100000"));
    }
}
