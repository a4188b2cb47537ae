//! Container: one process tree with its root file system, log and exit code.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::check;
use crate::condition::Condition;
use crate::error::{Error, Result};
use crate::resource::{Kind, Meta, Object};
use crate::sandbox::{GroupsPolicy, IdMapping, Namespaces, Profile, SeLinux};

pub type Container = Object<ContainerKind>;

#[derive(Clone, Debug)]
pub struct ContainerKind;

/// How high a container shall stand. It rises only; a restart is a new attempt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ContainerGoal {
    #[default]
    Created,
    Running,
    Stopped,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ContainerSpec {
    #[serde(default)]
    pub goal: ContainerGoal,
    /// uid of the PodSandbox, which also owns the record.
    pub sandbox: String,
    pub name: String,
    #[serde(default)]
    pub attempt: u32,
    pub image: ContainerImage,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub working_dir: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<EnvVar>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<Device>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cdi_devices: Vec<String>,
    /// Relative to the sandbox's `logDirectory`; empty turns logging off.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub log_path: String,
    #[serde(default)]
    pub stdin: bool,
    #[serde(default)]
    pub stdin_once: bool,
    #[serde(default)]
    pub tty: bool,
    #[serde(default)]
    pub resources: Resources,
    #[serde(default)]
    pub security: ContainerSecurity,
    /// e.g. `SIGTERM`, `SIGRTMIN+3`; empty: the image's, else SIGTERM.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub stop_signal: String,
    /// Seconds between the stop signal and SIGKILL once the goal is `Stopped`; ≤ 0 kills at once.
    #[serde(default)]
    pub grace_seconds: i64,
    /// Raised by each ReopenContainerLog.
    #[serde(default)]
    pub log_epoch: u64,
    /// CLOCK_BOOTTIME, ns: a start not begun by then never runs (StartError 128).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_by: Option<u64>,
}

/// What the caller asked for and what it meant when asked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ContainerImage {
    /// As the caller wrote it (CRI `ImageSpec.image`).
    pub requested: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub user_specified: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub runtime_handler: String,
    /// Image id (config digest, `sha256:…`) that `requested` resolved to.
    #[serde(default)]
    pub id: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EnvVar {
    pub name: String,
    #[serde(default)]
    pub value: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Propagation {
    #[default]
    Private,
    HostToContainer,
    Bidirectional,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mount {
    pub container_path: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub host_path: String,
    #[serde(default)]
    pub readonly: bool,
    #[serde(default)]
    pub recursive_read_only: bool,
    #[serde(default)]
    pub selinux_relabel: bool,
    #[serde(default)]
    pub propagation: Propagation,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub uid_mappings: Vec<IdMapping>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gid_mappings: Vec<IdMapping>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ContainerImage>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub image_sub_path: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    pub container_path: String,
    pub host_path: String,
    /// Any of `r`, `w`, `m`.
    #[serde(default)]
    pub permissions: String,
}

/// CRI `LinuxContainerResources`: cgroup v1 units; 0 or empty means not set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Resources {
    /// µs
    #[serde(skip_serializing_if = "is_zero")]
    pub cpu_period: i64,
    /// µs per period; -1 is no limit
    #[serde(skip_serializing_if = "is_zero")]
    pub cpu_quota: i64,
    #[serde(skip_serializing_if = "is_zero")]
    pub cpu_shares: i64,
    /// bytes; -1 is no limit
    #[serde(skip_serializing_if = "is_zero")]
    pub memory_limit: i64,
    /// bytes of memory and swap together; -1 is no limit
    #[serde(skip_serializing_if = "is_zero")]
    pub memory_swap_limit: i64,
    #[serde(skip_serializing_if = "is_zero")]
    pub oom_score_adj: i64,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cpuset_cpus: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cpuset_mems: String,
    /// Page size such as `2MB` to bytes.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub hugepages: BTreeMap<String, u64>,
    /// Raw cgroup v2 files.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub unified: BTreeMap<String, String>,
}

fn is_zero(n: &i64) -> bool {
    *n == 0
}

/// CRI `LinuxContainerSecurityContext`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ContainerSecurity {
    pub privileged: bool,
    pub readonly_rootfs: bool,
    pub no_new_privs: bool,
    pub namespaces: Namespaces,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_as_user: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_as_group: Option<i64>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub run_as_username: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub supplemental_groups: Vec<i64>,
    pub groups_policy: GroupsPolicy,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub add_capabilities: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub drop_capabilities: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub add_ambient_capabilities: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub masked_paths: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub readonly_paths: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selinux: Option<SeLinux>,
    /// Absent: unconfined.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seccomp: Option<Profile>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub apparmor: Option<Profile>,
}

impl ContainerSecurity {
    pub(crate) fn validate(&self, at: &str) -> Result<()> {
        check::namespaces(&format!("{at}.namespaces"), &self.namespaces, true)?;
        let named = !self.run_as_username.is_empty();
        check::identity(
            at,
            self.run_as_user,
            named,
            self.run_as_group,
            &self.supplemental_groups,
        )?;
        for (field, names) in [
            ("addCapabilities", &self.add_capabilities),
            ("dropCapabilities", &self.drop_capabilities),
            ("addAmbientCapabilities", &self.add_ambient_capabilities),
        ] {
            check::capabilities(&format!("{at}.{field}"), names)?;
        }
        for (field, paths) in [
            ("maskedPaths", &self.masked_paths),
            ("readonlyPaths", &self.readonly_paths),
        ] {
            for (i, path) in paths.iter().enumerate() {
                check::absolute(&format!("{at}.{field}[{i}]"), path)?;
            }
        }
        check::profile(&format!("{at}.seccomp"), self.seccomp.as_ref(), true)?;
        check::profile(&format!("{at}.apparmor"), self.apparmor.as_ref(), false)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ContainerPhase {
    /// Not looked at yet.
    #[default]
    Unknown,
    /// Being created.
    Pending,
    Created,
    Running,
    Exited,
}

/// Who the container's first process runs as.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerUser {
    pub uid: u32,
    pub gid: u32,
    /// Includes `gid`; sorted.
    pub groups: Vec<u32>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerStatus {
    pub observed_generation: u64,
    pub phase: ContainerPhase,
    pub conditions: Vec<Condition>,
    /// Pid of init in the host's pid namespace, 0 unless running.
    pub pid: i32,
    /// ns since the epoch, 0 before.
    pub started_at: i64,
    /// ns since the epoch, 0 unless exited.
    pub finished_at: i64,
    pub exit_code: i32,
    /// `Completed`, `Error`, `OOMKilled`, `StartError`, `Unknown`.
    pub reason: String,
    pub message: String,
    /// `logEpoch` up to which the log was reopened.
    pub log_epoch: u64,
    /// Absolute; empty if logging is off.
    pub log_path: String,
    pub user: Option<ContainerUser>,
    /// The effective signal, e.g. `SIGTERM`.
    pub stop_signal: String,
    /// Limits as last applied.
    pub resources: Resources,
    /// The generated OCI runtime configuration's path.
    pub bundle: String,
    /// Its text, for verbose info only.
    #[serde(skip)]
    pub runtime_spec: Option<std::sync::Arc<str>>,
}

impl Kind for ContainerKind {
    const KIND: &'static str = "Container";
    const PLURAL: &'static str = "containers";
    type Spec = ContainerSpec;
    type Status = ContainerStatus;

    fn validate(_: &Meta, spec: &ContainerSpec) -> Result<()> {
        check::text("spec.sandbox", &spec.sandbox)?;
        check::text("spec.name", &spec.name)?;
        check::text("spec.image.requested", &spec.image.requested)?;
        check::arguments("spec.command", &spec.command)?;
        check::arguments("spec.args", &spec.args)?;
        if spec.working_dir.contains('\0') {
            return Err(Error::invalid("spec.workingDir", "must not hold a NUL"));
        }
        check::environment("spec.env", &spec.env)?;
        check::mounts("spec.mounts", &spec.mounts)?;
        check::devices("spec.devices", &spec.devices)?;
        check::inside("spec.logPath", &spec.log_path)?;
        check::resources("spec.resources", &spec.resources)?;
        check::signal("spec.stopSignal", &spec.stop_signal)?;
        spec.security.validate("spec.security")
    }

    fn same_wish(a: &ContainerSpec, b: &ContainerSpec) -> bool {
        let same = ContainerSpec {
            goal: b.goal,
            grace_seconds: b.grace_seconds,
            log_epoch: b.log_epoch,
            start_by: b.start_by,
            ..a.clone()
        };
        same == *b
    }

    fn stopped(spec: &ContainerSpec) -> bool {
        spec.goal == ContainerGoal::Stopped
    }
}
