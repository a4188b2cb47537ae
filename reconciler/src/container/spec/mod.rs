//! The OCI runtime configuration of a container: pure code, record in, `config.json` out.
//!
//! ```text
//! PodSandbox + Container + image config + user        HostFacts::read (once, and when a node is asked)
//!            |                                               |
//!            |     resolve_mounts, resolve_devices, cdi::resolve, Base::read
//!            v                                               v
//!          build ── process namespaces mounts devices security resources ──> oci_spec::runtime::Spec
//! ```
//!
//! `build` reads no file and changes nothing; what it must know of the host stands in its [`Input`]. It leaves
//! open what only the start knows: the path of a shared pid namespace (`{"type":"pid"}` without a path). The seccomp
//! filter is bytes beside the configuration (`super::seccomp`), so `linux.seccomp` stays absent here.
//!
//! The runtime within the shim knows some fields less well than the OCI does. What `build` avoids therefore: the
//! `r`-forms of `rootfsPropagation`, the `cgroup` mount type on cgroup v1 (it would be writable), device nodes
//! outside `/dev` and in a user namespace (bind mounts instead), and a swap limit that comes to zero on cgroup v2
//! (written through `unified`). For another one ([`Foreign`]) it writes the first two, and `linux.seccomp`.

pub mod base;
pub mod capability;
pub mod cdi;
pub mod device_filter;
mod devices;
pub mod host;
mod mounts;
mod namespaces;
mod process;
pub mod resources;
mod security;
pub mod selinux;
pub mod signal;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;

use oci_spec::runtime::{Linux, LinuxSeccomp, Root, Spec};
use state::container::Container;
use state::image::ImageConfig;
use state::sandbox::PodSandbox;

use crate::config::handlers::Features;
use crate::config::values::Rlimits;

pub use base::Base;
pub use host::{DeviceNode, HostFacts, ResolvedDevice, ResolvedMount, resolve_devices, resolve_mounts};
pub use mounts::clean;
pub use selinux::Labels;

/// Version of the OCI runtime specification that is written.
const OCI_VERSION: &str = "1.2.0";
/// The same for other runtimes, some of which refuse what they do not know. No field of a later one is used there.
const OLD_OCI_VERSION: &str = "1.0.2";

/// Everything that a configuration is made from.
pub struct Input<'a> {
    pub sandbox: &'a PodSandbox,
    pub container: &'a Container,
    pub image: &'a ImageConfig,
    /// Name of the image for the annotation `image-name`, as the caller knows it.
    pub image_ref: &'a str,
    pub user: &'a ResolvedUser,
    /// Where the mounted root file system is (`root.path`).
    pub rootfs: PathBuf,
    /// cgroupfs path of the container's own cgroup.
    pub cgroup_path: String,
    /// Pinned namespaces of the sandbox; `None` is the host's.
    pub netns: Option<PathBuf>,
    pub ipc: Option<PathBuf>,
    pub uts: Option<PathBuf>,
    /// Present for a pod with its own user namespace.
    pub userns: Option<PathBuf>,
    pub files: SandboxFiles,
    /// One for each of `container.spec.mounts`, in their order.
    pub mounts: Vec<ResolvedMount>,
    /// From `container.spec.devices`.
    pub devices: Vec<ResolvedDevice>,
    /// What the devices of `container.spec.cdi_devices` add.
    pub cdi: cdi::Edits,
    /// Anonymous volumes for the image's `Volumes`: path in the container to the filled directory.
    pub volumes: BTreeMap<String, PathBuf>,
    /// More annotations, such as those that a handler lets through.
    pub annotations: BTreeMap<String, String>,
    pub handler: Handler,
    /// Limits of the process by name; what is not among them is as the daemon has it.
    pub rlimits: Rlimits,
    pub labels: Labels,
    pub host: &'a HostFacts,
}

/// Options of the runtime handler that shape the configuration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Handler {
    /// A privileged container does not get the host's device nodes.
    pub privileged_without_host_devices: bool,
    /// On cgroup v2, an unprivileged container may write in its own cgroup.
    pub cgroup_writable: bool,
    /// Decides what the request and the rules here leave open.
    pub base: Arc<Base>,
    /// Present for another OCI runtime than the one within the shim.
    pub foreign: Option<Foreign>,
}

/// What a runtime of its own is told, and what it can do.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Foreign {
    pub features: Features,
    pub seccomp: Option<LinuxSeccomp>,
}

/// Who the first process runs as, looked up in the container's own root file system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResolvedUser {
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups, `gid` among them; sorted, unique.
    pub groups: Vec<u32>,
    /// Home directory; empty if the user has none.
    pub home: String,
}

/// The sandbox's own files, bound into each container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SandboxFiles {
    pub hostname: PathBuf,
    pub hosts: PathBuf,
    pub resolv_conf: PathBuf,
    /// The sandbox's tmpfs, or the host's `/dev/shm` with host IPC.
    pub shm: PathBuf,
}

/// Why a configuration could not be made. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The wish itself is wrong.
    #[error("{field}: {reason}")]
    Invalid { field: String, reason: String },
    /// The wish is right, but this node cannot do it.
    #[error("{field}: {reason}")]
    Unsupported { field: String, reason: String },
    /// The host could not be looked at.
    #[error("{doing} {}: {source}", path.display())]
    Host {
        doing: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
}

impl SpecError {
    pub(crate) fn invalid(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Invalid {
            field: field.into(),
            reason: reason.into(),
        }
    }

    pub(crate) fn unsupported(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Unsupported {
            field: field.into(),
            reason: reason.into(),
        }
    }

    pub(crate) fn host(doing: &'static str, path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Host {
            doing,
            path: path.into(),
            source,
        }
    }
}

pub type Result<T> = std::result::Result<T, SpecError>;

/// Makes the runtime configuration (OCI `config.json`) of a container.
///
/// # Errors
/// [`SpecError::Invalid`] names the field of the record that cannot be, [`SpecError::Unsupported`] what this node
/// lacks.
pub fn build(input: &Input) -> Result<Spec> {
    security::check(input)?;
    let mut root = Root::default();
    root.set_path(input.rootfs.clone())
        .set_readonly(Some(input.container.spec.security.readonly_rootfs));
    let (nodes, bound) = devices::nodes(input);

    let mut spec = Spec::default();
    let version = match input.handler.foreign {
        Some(_) => OLD_OCI_VERSION,
        None => OCI_VERSION,
    };
    spec.set_version(version.into())
        .set_root(Some(root))
        .set_process(Some(process::process(input)?))
        .set_mounts(Some(mounts::mounts(input, bound)?))
        .set_hostname(None)
        .set_hooks(input.handler.base.hooks(&input.cdi.hooks))
        .set_annotations(Some(annotations(input)))
        .set_linux(Some(linux(input, nodes)?));
    Ok(spec)
}

fn linux(input: &Input, nodes: Vec<oci_spec::runtime::LinuxDevice>) -> Result<Linux> {
    let spec = &input.container.spec;
    let base = &input.handler.base;
    let mut resources = base.complete(resources::linux_resources(&spec.resources, input.host)?, input.host)?;
    resources.set_devices(Some(devices::rules(input)));
    let (uids, gids) = namespaces::mappings(input);
    let mut linux = Linux::default();
    linux
        .set_uid_mappings(uids)
        .set_gid_mappings(gids)
        .set_resources(Some(resources))
        .set_sysctl(base.sysctls(input))
        .set_cgroups_path(Some(PathBuf::from(&input.cgroup_path)))
        .set_namespaces(Some(namespaces::namespaces(input)))
        .set_devices(Some(nodes))
        .set_seccomp(
            input
                .handler
                .foreign
                .as_ref()
                .and_then(|foreign| foreign.seccomp.clone()),
        )
        .set_mount_label(input.labels.mount.clone())
        .set_rootfs_propagation(Some(mounts::rootfs_propagation(input)))
        .set_masked_paths(Some(security::listed(input, &spec.security.masked_paths)))
        .set_readonly_paths(Some(security::listed(input, &spec.security.readonly_paths)));
    Ok(linux)
}

/// The annotations that hooks and tools look for; containerd's names.
fn annotations(input: &Input) -> HashMap<String, String> {
    let pod = &input.sandbox.spec.pod;
    let ours = [
        ("container-type", "container"),
        ("sandbox-id", &input.sandbox.meta.uid),
        ("sandbox-namespace", &pod.namespace),
        ("sandbox-name", &pod.name),
        ("sandbox-uid", &pod.uid),
        ("container-name", &input.container.spec.name),
        ("image-name", input.image_ref),
    ];
    let mut all = input.handler.base.annotations.clone();
    all.extend(input.annotations.clone());
    all.extend(ours.map(|(key, value)| (format!("io.kubernetes.cri.{key}"), value.to_string())));
    all
}
