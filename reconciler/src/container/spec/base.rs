//! The base of a handler's containers (`handlers.NAME.baseSpec`): an OCI `config.json` that decides what neither the
//! CRI request nor we do. containerd has the same as `base_runtime_spec`.
//!
//! ```text
//! process.env           before all others: PATH, HOSTNAME, the image's and the request's replace it
//! process.cwd           if neither the request nor the image names one
//! process.rlimits       in place of the same one of `containers.rlimits`
//! mounts                where nothing else is mounted; not /run, as in containerd
//! hooks                 before those of CDI devices
//! annotations           below all others
//! linux.sysctl          if the request does not set it, and its namespace is the pod's own
//! linux.devices         below those of the request, which stand for one of the same path
//! linux.resources       each limit that the request leaves open; rules for devices before those of the request
//! ```
//!
//! Everything else is ours or the request's: program, user, capabilities, no-new-privileges, root, namespaces, cgroup,
//! masked and read-only paths, seccomp and labels. What would be missed of that is told ([`Base::ignored`]).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use oci_spec::runtime::{Hook, Hooks, LinuxResources, Mount, PosixRlimit};
use serde::Deserialize;
use serde_json::Value;

use super::host::{DeviceKind, DeviceNode};
use super::{HostFacts, Input, Result, SpecError, mounts, resources};

/// Bytes of a file.
const LIMIT: u64 = 1 << 20;

/// What is set there, does not count, and would be missed.
const MISSED: [&str; 13] = [
    "/domainname",
    "/process/apparmorProfile",
    "/process/selinuxLabel",
    "/process/scheduler",
    "/process/ioPriority",
    "/process/execCPUAffinity",
    "/linux/seccomp",
    "/linux/mountLabel",
    "/linux/intelRdt",
    "/linux/personality",
    "/linux/memoryPolicy",
    "/linux/timeOffsets",
    "/linux/netDevices",
];

/// Besides `net.*` and `fs.mqueue.*`, what runtimes know to be of a namespace (all of ipc).
const IPC_SYSCTLS: [&str; 8] = [
    "kernel.msgmax",
    "kernel.msgmnb",
    "kernel.msgmni",
    "kernel.sem",
    "kernel.shmall",
    "kernel.shmmax",
    "kernel.shmmni",
    "kernel.shm_rmid_forced",
];

/// What counts of a base, checked. The default is no base.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Base {
    /// `KEY=value`.
    pub env: Vec<String>,
    pub cwd: Option<String>,
    pub rlimits: Vec<PosixRlimit>,
    /// Their destinations are [clean](mounts::clean).
    pub mounts: Vec<Mount>,
    pub hooks: Hooks,
    pub annotations: HashMap<String, String>,
    pub sysctls: BTreeMap<String, String>,
    pub devices: Vec<DeviceNode>,
    /// With the rules for devices.
    pub resources: LinuxResources,
    /// Fields that were set and do not count.
    pub ignored: Vec<String>,
}

/// The file, as far as it is read. A field may be null, as Go writes an empty list.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    oci_version: String,
    process: Option<Process>,
    mounts: Option<Vec<Mount>>,
    hooks: Option<Hooks>,
    annotations: Option<HashMap<String, String>>,
    linux: Option<Linux>,
}

#[derive(Default, Deserialize)]
struct Process {
    env: Option<Vec<String>>,
    cwd: Option<String>,
    rlimits: Option<Vec<PosixRlimit>>,
}

#[derive(Default, Deserialize)]
struct Linux {
    sysctl: Option<BTreeMap<String, String>>,
    devices: Option<Vec<Node>>,
    resources: Option<LinuxResources>,
}

/// OCI config-linux, `devices`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Node {
    path: PathBuf,
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    major: u64,
    #[serde(default)]
    minor: u64,
    file_mode: Option<u32>,
    #[serde(default)]
    uid: u32,
    #[serde(default)]
    gid: u32,
}

type Checked<T = ()> = std::result::Result<T, String>;

impl Base {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// If it cannot be read, is larger than 1 MiB, is not an OCI configuration of version 1, or a field of it cannot
    /// be; the field is named.
    pub fn read(path: &Path) -> Checked<Base> {
        // Non-blocking, for it may be a FIFO.
        let mut options = OpenOptions::new();
        let file = options.read(true).custom_flags(libc::O_NONBLOCK).open(path);
        let file = file.map_err(|e| e.to_string())?;
        if !file.metadata().map_err(|e| e.to_string())?.is_file() {
            return Err("it is not a file".to_owned());
        }
        let mut text = Vec::new();
        let read = file.take(LIMIT + 1).read_to_end(&mut text);
        match read.map_err(|e| e.to_string())? as u64 > LIMIT {
            true => Err(format!("it is larger than {LIMIT} bytes")),
            false => Base::parse(&text),
        }
    }

    /// The same of a file's text.
    pub fn parse(text: &[u8]) -> Checked<Base> {
        let no_spec = |why: String| format!("it is not an OCI configuration: {why}");
        let whole: Value = serde_json::from_slice(text).map_err(|e| no_spec(e.to_string()))?;
        let file: File = serde_path_to_error::deserialize(&whole).map_err(|e| {
            let (path, why) = (e.path().to_string(), e.inner().to_string());
            no_spec(if path == "." { why } else { format!("{path}: {why}") })
        })?;
        if !file.oci_version.starts_with("1.") {
            return Err(no_spec(format!("ociVersion {:?} is not 1.x", file.oci_version)));
        }
        let (process, linux) = (file.process.unwrap_or_default(), file.linux.unwrap_or_default());
        let base = Base {
            env: process.env.unwrap_or_default(),
            cwd: process.cwd.filter(|cwd| !cwd.is_empty()),
            rlimits: process.rlimits.unwrap_or_default(),
            mounts: checked_mounts(file.mounts.unwrap_or_default())?,
            hooks: file.hooks.unwrap_or_default(),
            annotations: file.annotations.unwrap_or_default(),
            sysctls: linux.sysctl.unwrap_or_default(),
            devices: nodes(linux.devices.unwrap_or_default())?,
            resources: linux.resources.unwrap_or_default(),
            ignored: missed(&whole),
        };
        base.check()?;
        Ok(base)
    }

    fn check(&self) -> Checked {
        for (i, pair) in self.env.iter().enumerate() {
            if pair.split_once('=').is_none_or(|(name, _)| name.is_empty()) || pair.contains('\0') {
                return Err(format!("process.env[{i}]: {pair:?} is not NAME=VALUE"));
            }
        }
        if let Some(cwd) = self
            .cwd
            .as_ref()
            .filter(|cwd| !cwd.starts_with('/') || cwd.contains('\0'))
        {
            return Err(format!("process.cwd: {cwd:?} is not an absolute path"));
        }
        for (i, limit) in self.rlimits.iter().enumerate() {
            if limit.soft() > limit.hard() {
                return Err(format!("process.rlimits[{i}]: the soft limit is above the hard one"));
            }
            if self.rlimits[..i].iter().any(|other| other.typ() == limit.typ()) {
                return Err(format!("process.rlimits[{i}]: its type is here twice"));
            }
        }
        self.each_hook().try_for_each(|(list, hook)| {
            let bad = |why: &str| Err(format!("hooks.{list}: {}: {why}", hook.path().display()));
            match hook.timeout() {
                _ if !hook.path().is_absolute() => bad("must be an absolute path"),
                Some(..=0) => bad("a timeout is in seconds, above 0"),
                _ => Ok(()),
            }
        })?;
        self.sysctls.iter().try_for_each(|(name, value)| sysctl(name, value))?;
        self.check_resources()
    }

    fn check_resources(&self) -> Checked {
        for (i, rule) in self.resources.devices().iter().flatten().enumerate() {
            let access = rule.access().as_deref().unwrap_or_default();
            if access.is_empty() || !access.bytes().all(|b| b"rwm".contains(&b)) {
                return Err(format!(
                    "linux.resources.devices[{i}].access: {access:?} is not made of r, w, m"
                ));
            }
        }
        let files = self.resources.unified().iter().flatten();
        let bad = files.map(|(name, _)| name).find(|name| !resources::is_limit_file(name));
        bad.map_or(Ok(()), |name| {
            Err(format!(
                "linux.resources.unified[{name}]: is not the name of a controller's file, such as memory.high"
            ))
        })
    }

    #[allow(deprecated, reason = "configurations of today have prestart")]
    fn each_hook(&self) -> impl Iterator<Item = (&'static str, &Hook)> {
        let hooks = &self.hooks;
        [
            ("prestart", hooks.prestart()),
            ("createRuntime", hooks.create_runtime()),
            ("createContainer", hooks.create_container()),
            ("startContainer", hooks.start_container()),
            ("poststart", hooks.poststart()),
            ("poststop", hooks.poststop()),
        ]
        .into_iter()
        .flat_map(|(name, list)| list.iter().flatten().map(move |hook| (name, hook)))
    }

    /// Hooks that only another runtime's program runs.
    pub fn has_late_hooks(&self) -> bool {
        self.each_hook().any(|(list, _)| list.starts_with("post"))
    }

    /// The hooks, with those of devices behind them; `None` if there is none at all.
    #[allow(deprecated, reason = "configurations of today have prestart")]
    pub fn hooks(&self, then: &Hooks) -> Option<Hooks> {
        fn joined(first: &Option<Vec<Hook>>, then: &Option<Vec<Hook>>) -> Option<Vec<Hook>> {
            let all: Vec<Hook> = [first, then].into_iter().flatten().flatten().cloned().collect();
            Some(all).filter(|all| !all.is_empty())
        }
        let (first, mut all) = (&self.hooks, Hooks::default());
        all.set_prestart(joined(first.prestart(), then.prestart()))
            .set_create_runtime(joined(first.create_runtime(), then.create_runtime()))
            .set_create_container(joined(first.create_container(), then.create_container()))
            .set_start_container(joined(first.start_container(), then.start_container()))
            .set_poststart(joined(first.poststart(), then.poststart()))
            .set_poststop(joined(first.poststop(), then.poststop()));
        Some(all).filter(|all| *all != Hooks::default())
    }

    /// The limits of the request, with what they leave open from here; without rules for devices.
    ///
    /// # Errors
    /// If a raw file of cgroup v2 is named and this node runs v1.
    pub fn complete(&self, wish: LinuxResources, host: &HostFacts) -> Result<LinuxResources> {
        let mut of_base = self.resources.clone();
        of_base.set_devices(None);
        if of_base == LinuxResources::default() {
            return Ok(wish);
        }
        if of_base.unified().as_ref().is_some_and(|files| !files.is_empty()) && !host.cgroup_v2 {
            let reason = "raw cgroup files need cgroup v2; this node runs v1";
            let field = "the handler's baseSpec: linux.resources.unified";
            return Err(SpecError::unsupported(field, reason));
        }
        let mut pages = of_base.hugepage_limits().clone().unwrap_or_default();
        let asked = wish.hugepage_limits().clone().unwrap_or_default();
        let open = |size: &String| !asked.iter().any(|limit| limit.page_size() == size);
        pages.retain(|limit| host.hugepages.contains(limit.page_size()) && open(limit.page_size()));
        pages.extend(asked.iter().cloned());
        let told = |e: serde_json::Error| SpecError::invalid("the handler's baseSpec: linux.resources", e.to_string());
        let mut whole = serde_json::to_value(&of_base).map_err(told)?;
        let wish = serde_json::to_value(&wish).map_err(told)?;
        // Each bounds the other: they are decided together.
        for (part, fields) in [("memory", ["limit", "swap"]), ("cpu", ["quota", "period"])] {
            let decided = fields.iter().any(|field| wish[part].get(field).is_some());
            if let Some(part) = whole[part].as_object_mut().filter(|_| decided) {
                fields.iter().for_each(|field| drop(part.remove(*field)));
            }
        }
        if let Some(memory) = whole["memory"].as_object_mut().filter(|_| !host.swap_accounting) {
            memory.remove("swap");
        }
        overlay(&mut whole, wish);
        let mut whole: LinuxResources = serde_json::from_value(whole).map_err(told)?;
        whole.set_hugepage_limits(Some(pages).filter(|pages| !pages.is_empty()));
        Ok(whole)
    }

    /// The sysctls that a container of this sandbox gets.
    pub fn sysctls(&self, input: &Input) -> Option<HashMap<String, String>> {
        let own = |name: &str| match name.starts_with("net.") {
            true => input.netns.is_some(),
            false => input.ipc.is_some(),
        };
        let open = |name: &str| !input.sandbox.spec.sysctls.contains_key(name);
        let of_base = self.sysctls.iter().filter(|(name, _)| own(name) && open(name));
        let all: HashMap<_, _> = of_base.map(|(name, value)| (name.clone(), value.clone())).collect();
        Some(all).filter(|all| !all.is_empty())
    }
}

/// Lays one tree over another; lists are plain values.
fn overlay(below: &mut Value, above: Value) {
    match (below, above) {
        (Value::Object(below), Value::Object(above)) => {
            for (key, value) in above {
                overlay(below.entry(key).or_insert(Value::Null), value);
            }
        }
        (below, above) => *below = above,
    }
}

fn missed(whole: &Value) -> Vec<String> {
    let set = |pointer: &&&str| {
        let value = whole.pointer(pointer).unwrap_or(&Value::Null);
        !value.is_null() && value != "" && *value != Value::Object(Default::default())
    };
    let name = |pointer: &&str| pointer[1..].replace('/', ".");
    MISSED.iter().filter(set).map(name).collect()
}

fn checked_mounts(all: Vec<Mount>) -> Checked<Vec<Mount>> {
    let mut kept = Vec::new();
    for (i, mut mount) in all.into_iter().enumerate() {
        let field = |name: &str, why: &str| Err(format!("mounts[{i}].{name}: {why}"));
        let path = mounts::clean(mount.destination());
        if !mount.destination().is_absolute() || path == Path::new("/") {
            return field("destination", "must be an absolute path below the root");
        }
        let source = mount.source().clone().unwrap_or_default();
        // The kernel's own file systems are mounted anyway.
        if path != Path::new("/proc")
            && let Err(why) = mounts::check_proc(&path, &source)
        {
            return field("destination", &why);
        }
        let bound = |option: &String| option == "bind" || option == "rbind";
        let bind = mount.typ().as_deref() == Some("bind") || mount.options().iter().flatten().any(bound);
        if bind && !source.is_absolute() {
            return field("source", "must be an absolute path for a bind mount");
        }
        if path != Path::new("/run") {
            mount.set_destination(path);
            kept.push(mount);
        }
    }
    Ok(kept)
}

fn nodes(all: Vec<Node>) -> Checked<Vec<DeviceNode>> {
    let mut nodes = Vec::new();
    let mut paths = BTreeSet::new();
    for (i, node) in all.into_iter().enumerate() {
        let path = mounts::clean(&node.path);
        if !node.path.starts_with("/dev") || path == Path::new("/dev") || !path.starts_with("/dev") {
            return Err(format!("linux.devices[{i}].path: must be below /dev"));
        }
        if !paths.insert(path.clone()) {
            return Err(format!("linux.devices[{i}].path: {} is here twice", path.display()));
        }
        let kind = match node.kind.as_str() {
            "c" | "u" => DeviceKind::Char,
            "b" => DeviceKind::Block,
            other => return Err(format!("linux.devices[{i}].type: {other:?} is none of c, u, b")),
        };
        nodes.push(DeviceNode {
            path,
            kind,
            major: node.major,
            minor: node.minor,
            mode: node.file_mode.unwrap_or(0o666) & 0o7777,
            uid: node.uid,
            gid: node.gid,
        });
    }
    Ok(nodes)
}

fn sysctl(name: &str, value: &str) -> Checked {
    let why = |why: &str| Err(format!("linux.sysctl[{name}]: {why}"));
    let namespaced = name.starts_with("net.") || name.starts_with("fs.mqueue.") || IPC_SYSCTLS.contains(&name);
    if !namespaced {
        return why(
            "not a sysctl of a pod's namespaces; allowed are net.*, fs.mqueue.*, kernel.msg{max,mnb,mni}, \
             kernel.sem and kernel.shm{all,max,mni,_rmid_forced}",
        );
    }
    if name.contains("..") || name.ends_with('.') || name.contains('\0') || value.contains('\0') {
        return why("not a sysctl's name and value");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(value: Value) -> Checked<Base> {
        Base::parse(value.to_string().as_bytes())
    }

    #[test]
    fn a_file_that_is_no_spec_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("base.json");
        let told = |text: &[u8]| {
            std::fs::write(&path, text).unwrap();
            Base::read(&path).unwrap_err()
        };
        assert!(Base::read(&path).unwrap_err().contains("No such file"));
        assert_eq!(Base::read(dir.path()).unwrap_err(), "it is not a file");
        for (text, why) in [
            ("", "it is not an OCI configuration: EOF"),
            ("[]", "not an OCI configuration: invalid"),
            ("{}", "missing field `ociVersion`"),
            (r#"{"ociVersion": "2.0.0"}"#, "ociVersion \"2.0.0\" is not 1.x"),
            (r#"{"ociVersion": 1}"#, "ociVersion: invalid type"),
            (r#"{"ociVersion": "1.0.2", "mounts": {}}"#, "mounts: invalid type"),
            (
                r#"{"ociVersion": "1.0.2", "process": {"rlimits": [{"type": "NOFILE"}]}}"#,
                "process.rlimits[0].type: unknown variant",
            ),
        ] {
            let error = told(text.as_bytes());
            assert!(error.contains(why), "{text}: {error}");
        }
        assert_eq!(
            told(&vec![b' '; (LIMIT + 1) as usize]),
            "it is larger than 1048576 bytes"
        );
        std::fs::write(&path, r#"{"ociVersion": "1.2.0", "process": null, "mounts": null}"#).unwrap();
        assert_eq!(Base::read(&path), Ok(Base::default()));
    }

    #[test]
    fn a_field_that_cannot_be_is_named() {
        let process = |field: &str, value: Value| json!({"process": {field: value}});
        let linux = |field: &str, value: Value| json!({"linux": {field: value}});
        let mount = |mount: Value| json!({"mounts": [mount]});
        let limit = |soft: u64| json!({"type": "RLIMIT_CORE", "soft": soft, "hard": 1});
        for (mut part, why) in [
            (process("env", json!(["A=1", "B"])), "process.env[1]: \"B\" is not"),
            (process("env", json!(["=1"])), "process.env[0]"),
            (process("cwd", json!("tmp")), "process.cwd: \"tmp\""),
            (process("rlimits", json!([limit(2)])), "process.rlimits[0]: the soft"),
            (
                process("rlimits", json!([limit(0), limit(1)])),
                "process.rlimits[1]: its type",
            ),
            (mount(json!({"destination": "x"})), "mounts[0].destination"),
            (mount(json!({"destination": "/x/.."})), "mounts[0].destination"),
            (
                mount(json!({"destination": "/proc/sys", "type": "tmpfs"})),
                "/proc/sys must not",
            ),
            (
                mount(json!({"destination": "/x", "source": "y", "options": ["rbind"]})),
                "mounts[0].source: must be an absolute path",
            ),
            (
                json!({"hooks": {"poststop": [{"path": "bin"}]}}),
                "hooks.poststop: bin: ",
            ),
            (
                json!({"hooks": {"createRuntime": [{"path": "/bin/x", "timeout": 0}]}}),
                "hooks.createRuntime: /bin/x: a timeout",
            ),
            (
                linux("sysctl", json!({"vm.swappiness": "1"})),
                "linux.sysctl[vm.swappiness]: not a",
            ),
            (linux("sysctl", json!({"net...x": "1"})), "linux.sysctl[net...x]"),
            (
                linux("devices", json!([{"path": "/x", "type": "c"}])),
                "linux.devices[0].path",
            ),
            (
                linux("devices", json!([{"path": "/dev/../x", "type": "c"}])),
                "linux.devices[0].path",
            ),
            (
                linux("devices", json!([{"path": "/dev/x", "type": "p"}])),
                "linux.devices[0].type: \"p\"",
            ),
            (
                linux("resources", json!({"devices": [{"allow": true, "access": "x"}]})),
                "linux.resources.devices[0].access: \"x\"",
            ),
            (
                linux("resources", json!({"unified": {"cgroup.procs": "1"}})),
                "linux.resources.unified[cgroup.procs]",
            ),
        ] {
            part["ociVersion"] = "1.0.2".into();
            let error = parse(part.clone()).unwrap_err();
            assert!(error.contains(why), "{part}: {error}");
        }
    }

    #[test]
    fn what_would_be_missed_is_told() {
        let base = parse(json!({
            "ociVersion": "1.1.0", "hostname": "x", "root": {"path": "rootfs"},
            "process": {"args": ["sh"], "capabilities": {}, "apparmorProfile": "mine", "selinuxLabel": ""},
            "linux": {"seccomp": {"defaultAction": "SCMP_ACT_ERRNO"}, "maskedPaths": ["/proc/kcore"], "intelRdt": {}},
        }));
        assert_eq!(base.unwrap().ignored, ["process.apparmorProfile", "linux.seccomp"]);
    }

    #[test]
    fn the_request_decides_limits_that_belong_together() {
        let base = parse(json!({"ociVersion": "1.0.2", "linux": {"resources": {
            "memory": {"limit": 100, "swap": 50, "swappiness": 3}, "cpu": {"quota": 5, "period": 10, "cpus": "0"},
            "pids": {"limit": 7}, "hugepageLimits": [{"pageSize": "2MB", "limit": 1}, {"pageSize": "1GB", "limit": 1}],
        }}}))
        .unwrap();
        let host = HostFacts {
            hugepages: vec!["2MB".into()],
            swap_accounting: true,
            ..HostFacts::default()
        };
        let complete = |wish: Value, host: &HostFacts| {
            let wish = serde_json::from_value(wish).unwrap();
            serde_json::to_value(base.complete(wish, host).unwrap()).unwrap()
        };
        let pages = |limit: i64| json!([{"pageSize": "2MB", "limit": limit}]);
        assert_eq!(
            complete(
                json!({"memory": {"limit": 9}, "cpu": {"quota": 1}, "hugepageLimits": pages(9)}),
                &host
            ),
            json!({"memory": {"limit": 9, "swappiness": 3}, "cpu": {"quota": 1, "cpus": "0"}, "pids": {"limit": 7},
                   "hugepageLimits": pages(9)})
        );
        let no_swap = HostFacts {
            hugepages: Vec::new(),
            ..HostFacts::default()
        };
        assert_eq!(
            complete(json!({"cpu": {"shares": 2}}), &no_swap),
            json!({"memory": {"limit": 100, "swappiness": 3}, "pids": {"limit": 7},
                   "cpu": {"shares": 2, "quota": 5, "period": 10, "cpus": "0"}})
        );
        let raw = parse(json!({"ociVersion": "1.0.2", "linux": {"resources": {"unified": {"memory.high": "1"}}}}));
        let error = raw
            .unwrap()
            .complete(LinuxResources::default(), &host)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("baseSpec: linux.resources.unified: raw cgroup files"),
            "{error}"
        );
    }
}
