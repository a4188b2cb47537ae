//! Pod: what a user writes; its controller makes a sandbox and containers from it.

use std::collections::{BTreeMap, HashSet};

use serde::{Deserialize, Serialize};

use crate::check;
use crate::condition::Condition;
use crate::container::{ContainerSecurity, EnvVar, Resources};
use crate::error::{Error, Result};
use crate::resource::{Kind, Meta, Object};
use crate::sandbox::{Dns, Protocol};

pub type Pod = Object<PodKind>;

#[derive(Clone, Debug)]
pub struct PodKind;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RestartPolicy {
    #[default]
    Always,
    OnFailure,
    Never,
}

/// When an image is asked of its registry though it is here, or at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PullPolicy {
    Always,
    IfNotPresent,
    Never,
}

/// Field names and meanings follow Kubernetes' v1 PodSpec, of which this is the supported part; resources are already
/// in the CRI's units.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PodSpec {
    #[serde(default)]
    pub restart_policy: RestartPolicy,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub init_containers: Vec<PodContainer>,
    pub containers: Vec<PodContainer>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<Volume>,
    /// Secrets of the pod's namespace, for its pulls.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub image_pull_secrets: Vec<SecretRef>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub hostname: String,
    /// The runtime handler's own name: there are no RuntimeClass objects here.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub runtime_class_name: String,
    #[serde(default)]
    pub host_network: bool,
    #[serde(default, rename = "hostPID")]
    pub host_pid: bool,
    #[serde(default, rename = "hostIPC")]
    pub host_ipc: bool,
    /// False: the pod gets a user namespace of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_users: Option<bool>,
    #[serde(default)]
    pub share_process_namespace: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dns: Option<Dns>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sysctls: BTreeMap<String, String>,
    #[serde(default = "default_grace")]
    pub termination_grace_period_seconds: i64,
}

/// Names a [`crate::Secret`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SecretRef {
    pub name: String,
}

fn default_grace() -> i64 {
    30
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PodContainer {
    pub name: String,
    pub image: String,
    /// Absent: `Always` for the tag `latest`, else `IfNotPresent`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<PullPolicy>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub working_dir: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<EnvVar>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<ContainerPort>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volume_mounts: Vec<VolumeMount>,
    #[serde(default)]
    pub resources: Resources,
    #[serde(default)]
    pub security: ContainerSecurity,
    #[serde(default)]
    pub stdin: bool,
    #[serde(default)]
    pub stdin_once: bool,
    #[serde(default)]
    pub tty: bool,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub stop_signal: String,
    /// `Always` on an init container makes it a sidecar.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_policy: Option<RestartPolicy>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ContainerPort {
    pub container_port: u16,
    #[serde(default)]
    pub host_port: u16,
    #[serde(default, rename = "hostIP", skip_serializing_if = "String::is_empty")]
    pub host_ip: String,
    #[serde(default)]
    pub protocol: Protocol,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VolumeMount {
    pub name: String,
    pub mount_path: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub sub_path: String,
    #[serde(default)]
    pub read_only: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Volume {
    pub name: String,
    #[serde(flatten)]
    pub source: VolumeSource,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum VolumeSource {
    EmptyDir {
        /// tmpfs instead of a directory
        #[serde(default)]
        memory: bool,
        /// bytes, 0 is no limit
        #[serde(default)]
        size_limit: u64,
    },
    HostPath {
        path: String,
        /// `DirectoryOrCreate`, `Directory`, `FileOrCreate`, `File`, or empty (no check), as in Kubernetes.
        #[serde(default, rename = "type")]
        kind: String,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PodPhase {
    #[default]
    Unknown,
    Pending,
    Running,
    Succeeded,
    Failed,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodStatus {
    pub observed_generation: u64,
    pub phase: PodPhase,
    pub conditions: Vec<Condition>,
    pub ip: String,
    /// uid of the current sandbox.
    pub sandbox: String,
    pub containers: Vec<PodContainerStatus>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodContainerStatus {
    pub name: String,
    pub init: bool,
    /// uid of the newest attempt, empty before the first.
    pub uid: String,
    pub restarts: u32,
    pub running: bool,
    /// Exit code of the newest attempt once it has ended.
    pub exit_code: Option<i32>,
    pub reason: String,
    pub message: String,
}

impl Kind for PodKind {
    const KIND: &'static str = "Pod";
    const PLURAL: &'static str = "pods";
    type Spec = PodSpec;
    type Status = PodStatus;

    fn validate(meta: &Meta, spec: &PodSpec) -> Result<()> {
        check::dns_subdomain("metadata.name", &meta.name)?;
        if !meta.namespace.is_empty() {
            check::dns_label("metadata.namespace", &meta.namespace)?;
        }
        if spec.containers.is_empty() {
            return Err(Error::invalid("spec.containers", "at least one container is required"));
        }
        if !spec.hostname.is_empty() {
            check::dns_label("spec.hostname", &spec.hostname)?;
        }
        if !spec.runtime_class_name.is_empty() {
            check::dns_label("spec.runtimeClassName", &spec.runtime_class_name)?;
        }
        if spec.termination_grace_period_seconds < 0 {
            return Err(Error::invalid(
                "spec.terminationGracePeriodSeconds",
                "must not be negative",
            ));
        }
        for (field, host) in [("hostPID", spec.host_pid), ("hostIPC", spec.host_ipc)] {
            if host && spec.host_users == Some(false) {
                let problem = "cannot be true where hostUsers is false";
                return Err(Error::invalid(format!("spec.{field}"), problem));
            }
        }
        spec.dns.as_ref().map_or(Ok(()), |dns| dns.validate("spec.dns"))?;
        for (name, value) in &spec.sysctls {
            check::sysctl("spec.sysctls", name, value, spec.host_network, spec.host_ipc)?;
        }
        for (i, secret) in spec.image_pull_secrets.iter().enumerate() {
            check::dns_subdomain(&format!("spec.imagePullSecrets[{i}].name"), &secret.name)?;
        }
        spec.validate_volumes()?;
        spec.validate_containers()
    }
}

impl PodSpec {
    fn validate_volumes(&self) -> Result<()> {
        let mut names = HashSet::new();
        for (i, volume) in self.volumes.iter().enumerate() {
            let at = format!("spec.volumes[{i}]");
            check::dns_label(&format!("{at}.name"), &volume.name)?;
            if !names.insert(&volume.name) {
                let problem = format!("{:?} is the name of another volume", volume.name);
                return Err(Error::invalid(format!("{at}.name"), problem));
            }
            if let VolumeSource::HostPath { path, kind } = &volume.source {
                check::absolute(&format!("{at}.hostPath.path"), path)?;
                if !["", "DirectoryOrCreate", "Directory", "FileOrCreate", "File"].contains(&kind.as_str()) {
                    let problem = format!("{kind:?} is none of DirectoryOrCreate, Directory, FileOrCreate, File");
                    return Err(Error::invalid(format!("{at}.hostPath.type"), problem));
                }
            }
        }
        Ok(())
    }

    fn validate_containers(&self) -> Result<()> {
        let (mut names, mut host_ports) = (HashSet::new(), HashSet::new());
        let lists = [
            ("initContainers", &self.init_containers),
            ("containers", &self.containers),
        ];
        for (list, containers) in lists {
            for (i, container) in containers.iter().enumerate() {
                let at = format!("spec.{list}[{i}]");
                container.validate(&at, &self.volumes)?;
                if !names.insert(&container.name) {
                    let problem = format!("{:?} is the name of another container", container.name);
                    return Err(Error::invalid(format!("{at}.name"), problem));
                }
                let restart = container.restart_policy;
                if restart.is_some_and(|policy| list == "containers" || policy != RestartPolicy::Always) {
                    let problem = "only Always is known, for an init container that goes on as a sidecar";
                    return Err(Error::invalid(format!("{at}.restartPolicy"), problem));
                }
                for (j, port) in container.ports.iter().enumerate() {
                    let field = format!("{at}.ports[{j}].hostPort");
                    if port.host_port > 0 && !host_ports.insert((port.protocol, port.host_port, &port.host_ip)) {
                        return Err(Error::invalid(field, format!("{} is asked for twice", port.host_port)));
                    }
                    if self.host_network && port.host_port > 0 && port.host_port != port.container_port {
                        return Err(Error::invalid(field, "must equal containerPort in the host's network"));
                    }
                }
            }
        }
        Ok(())
    }
}

impl PodContainer {
    fn validate(&self, at: &str, volumes: &[Volume]) -> Result<()> {
        let field = |name: &str| format!("{at}.{name}");
        check::dns_label(&field("name"), &self.name)?;
        if self.image.is_empty() {
            return Err(Error::invalid(field("image"), "is missing"));
        }
        check::text(&field("image"), &self.image)?;
        check::arguments(&field("command"), &self.command)?;
        check::arguments(&field("args"), &self.args)?;
        if !self.working_dir.is_empty() {
            check::absolute(&field("workingDir"), &self.working_dir)?;
        }
        check::environment(&field("env"), &self.env)?;
        for (i, port) in self.ports.iter().enumerate() {
            if port.container_port == 0 {
                return Err(Error::invalid(
                    field(&format!("ports[{i}].containerPort")),
                    "must be 1 to 65535",
                ));
            }
            check::host_ip(&field(&format!("ports[{i}].hostIP")), &port.host_ip)?;
        }
        let mut paths = HashSet::new();
        for (i, mount) in self.volume_mounts.iter().enumerate() {
            let field = |name: &str| format!("{at}.volumeMounts[{i}].{name}");
            if !volumes.iter().any(|volume| volume.name == mount.name) {
                return Err(Error::invalid(
                    field("name"),
                    format!("no volume is named {:?}", mount.name),
                ));
            }
            check::absolute(&field("mountPath"), &mount.mount_path)?;
            if !paths.insert(&mount.mount_path) {
                return Err(Error::invalid(field("mountPath"), "another volume is mounted there"));
            }
            check::inside(&field("subPath"), &mount.sub_path)?;
        }
        check::resources(&field("resources"), &self.resources)?;
        check::signal(&field("stopSignal"), &self.stop_signal)?;
        self.security.validate(&field("security"))
    }
}
