//! PodSandbox: the namespaces, cgroup, files and network that the containers of one pod share.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::check;
use crate::condition::Condition;
use crate::container::Resources;
use crate::error::{Error, Result};
use crate::resource::{Kind, Meta, Object};

pub type PodSandbox = Object<SandboxKind>;

#[derive(Clone, Debug)]
pub struct SandboxKind;

/// How high a sandbox shall stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum SandboxGoal {
    #[default]
    Ready,
    Stopped,
}

/// Which pod a sandbox belongs to (CRI `PodSandboxMetadata`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PodRef {
    pub name: String,
    pub namespace: String,
    pub uid: String,
    #[serde(default)]
    pub attempt: u32,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SandboxSpec {
    #[serde(default)]
    pub goal: SandboxGoal,
    pub pod: PodRef,
    /// UTS hostname; empty means the host's.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub hostname: String,
    /// Absolute directory of the container logs; empty turns logging off.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub log_directory: String,
    /// Absent: the host's resolv.conf. Present: exactly this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dns: Option<Dns>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<PortMapping>,
    /// cgroupfs-style path; it belongs to the caller and is never removed. Empty: the runtime's default.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub cgroup_parent: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sysctls: BTreeMap<String, String>,
    #[serde(default)]
    pub namespaces: Namespaces,
    #[serde(default)]
    pub security: SandboxSecurity,
    /// Name in the handler table; empty is the default handler.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub runtime_handler: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overhead: Option<Resources>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Dns {
    #[serde(default)]
    pub servers: Vec<String>,
    #[serde(default)]
    pub searches: Vec<String>,
    #[serde(default)]
    pub options: Vec<String>,
}

impl Dns {
    /// Each entry becomes a word of resolv.conf(5).
    pub(crate) fn validate(&self, at: &str) -> Result<()> {
        for (field, list) in [
            ("servers", &self.servers),
            ("searches", &self.searches),
            ("options", &self.options),
        ] {
            for (i, word) in list.iter().enumerate() {
                let at = format!("{at}.{field}[{i}]");
                check::text(&at, word)?;
                if word.contains(char::is_whitespace) {
                    return Err(Error::invalid(at, "must not hold spaces"));
                }
            }
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Protocol {
    #[default]
    Tcp,
    Udp,
    Sctp,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PortMapping {
    #[serde(default)]
    pub protocol: Protocol,
    pub container_port: u16,
    /// 0: the port is only told, not mapped.
    #[serde(default)]
    pub host_port: u16,
    /// Empty: every address of the host.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub host_ip: String,
}

/// CRI `NamespaceMode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum NamespaceMode {
    #[default]
    Pod,
    Container,
    Node,
    Target,
}

/// CRI `NamespaceOption`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Namespaces {
    #[serde(default)]
    pub network: NamespaceMode,
    #[serde(default)]
    pub pid: NamespaceMode,
    #[serde(default)]
    pub ipc: NamespaceMode,
    /// Container whose pid namespace is joined when `pid` is `Target`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub target_id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<UserNamespace>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct UserNamespace {
    #[serde(default)]
    pub mode: NamespaceMode,
    #[serde(default)]
    pub uids: Vec<IdMapping>,
    #[serde(default)]
    pub gids: Vec<IdMapping>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct IdMapping {
    pub host_id: u32,
    pub container_id: u32,
    pub length: u32,
}

impl IdMapping {
    /// Has the container's `id` a host id?
    pub fn maps(&self, id: u32) -> bool {
        id.checked_sub(self.container_id).is_some_and(|at| at < self.length)
    }
}

/// CRI `LinuxSandboxSecurityContext`, for the pause process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SandboxSecurity {
    #[serde(default)]
    pub privileged: bool,
    #[serde(default)]
    pub readonly_rootfs: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_as_user: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_as_group: Option<i64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub supplemental_groups: Vec<i64>,
    #[serde(default)]
    pub groups_policy: GroupsPolicy,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selinux: Option<SeLinux>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seccomp: Option<Profile>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub apparmor: Option<Profile>,
}

/// CRI `SupplementalGroupsPolicy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum GroupsPolicy {
    #[default]
    Merge,
    Strict,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SeLinux {
    #[serde(default)]
    pub user: String,
    #[serde(default)]
    pub role: String,
    #[serde(default, rename = "type")]
    pub kind: String,
    #[serde(default)]
    pub level: String,
}

/// CRI `SecurityProfile`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, tag = "type")]
pub enum Profile {
    RuntimeDefault,
    Unconfined,
    /// An absolute path of a seccomp profile, or the name of a loaded AppArmor profile.
    Localhost {
        #[serde(rename = "localhostRef")]
        reference: String,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum SandboxPhase {
    /// Not looked at yet.
    #[default]
    Unknown,
    /// Being made.
    Pending,
    Ready,
    /// Stopped, or lost for good: `NOTREADY` in the CRI. Never returns to `Ready`.
    NotReady,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SandboxStatus {
    pub observed_generation: u64,
    pub phase: SandboxPhase,
    pub conditions: Vec<Condition>,
    /// Primary address; empty for host network and after the network is gone.
    pub ip: String,
    pub additional_ips: Vec<String>,
    /// Path of the pinned network namespace; empty for host network.
    pub netns: String,
    /// Pid of the pause process, 0 if there is none.
    pub pid: i32,
    /// Everything that a stopped sandbox holds is gone (or owed as a Debt).
    pub torn_down: bool,
    /// Raw CNI result or the built-in network's counterpart, for verbose info.
    pub network_result: Option<serde_json::Value>,
}

impl Kind for SandboxKind {
    const KIND: &'static str = "PodSandbox";
    const PLURAL: &'static str = "podsandboxes";
    type Spec = SandboxSpec;
    type Status = SandboxStatus;

    fn validate(_: &Meta, spec: &SandboxSpec) -> Result<()> {
        for (field, value) in [
            ("name", &spec.pod.name),
            ("namespace", &spec.pod.namespace),
            ("uid", &spec.pod.uid),
        ] {
            check::text(&format!("spec.pod.{field}"), value)?;
        }
        // HOST_NAME_MAX of the kernel.
        if spec.hostname.len() > 64
            || spec
                .hostname
                .contains(|c: char| c.is_whitespace() || c.is_control() || c == '/')
        {
            return Err(Error::invalid(
                "spec.hostname",
                "must have 64 bytes at most, no spaces and no /",
            ));
        }
        if !spec.log_directory.is_empty() {
            check::absolute("spec.logDirectory", &spec.log_directory)?;
        }
        spec.dns.as_ref().map_or(Ok(()), |dns| dns.validate("spec.dns"))?;
        check::ports("spec.ports", &spec.ports)?;
        let parent = &spec.cgroup_parent;
        if !parent.is_empty() {
            check::text("spec.cgroupParent", parent)?;
            check::inside("spec.cgroupParent", parent.trim_start_matches('/'))?;
        }
        let host = |mode| mode == NamespaceMode::Node;
        for (name, value) in &spec.sysctls {
            check::sysctl(
                "spec.sysctls",
                name,
                value,
                host(spec.namespaces.network),
                host(spec.namespaces.ipc),
            )?;
        }
        check::namespaces("spec.namespaces", &spec.namespaces, false)?;
        let security = &spec.security;
        check::identity(
            "spec.security",
            security.run_as_user,
            false,
            security.run_as_group,
            &security.supplemental_groups,
        )?;
        check::profile("spec.security.seccomp", security.seccomp.as_ref(), true)?;
        check::profile("spec.security.apparmor", security.apparmor.as_ref(), false)?;
        if !spec.runtime_handler.is_empty() {
            check::text("spec.runtimeHandler", &spec.runtime_handler)?;
        }
        for (field, resources) in [("overhead", &spec.overhead), ("resources", &spec.resources)] {
            if let Some(resources) = resources {
                check::resources(&format!("spec.{field}"), resources)?;
            }
        }
        Ok(())
    }

    fn same_wish(a: &SandboxSpec, b: &SandboxSpec) -> bool {
        SandboxSpec {
            goal: b.goal,
            ..a.clone()
        } == *b
    }

    fn stopped(spec: &SandboxSpec) -> bool {
        spec.goal == SandboxGoal::Stopped
    }
}
