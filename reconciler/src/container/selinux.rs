//! SELinux labels of a container, as far as the node's policy knows them.

use std::io;
use std::path::Path;

use state::container::Mount;
use state::{Container, PodSandbox};

use super::spec::{self, Labels, ResolvedMount, SpecError};
use crate::engine::Context;
use crate::error::{Error, Result};
use crate::sandbox;
use crate::world::linux::selinux;

/// Trees of the host that no container's label is put on: much else would find its files closed.
const HOSTS: [&str; 19] = [
    "/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib64", "/opt", "/proc", "/root", "/run", "/sbin", "/srv",
    "/sys", "/tmp", "/usr", "/var", "/var/lib",
];

/// The labels that a container gets.
pub fn labels(cx: &Context, sandbox: &PodSandbox, object: &Container) -> Result<Labels> {
    let own = sandbox::selinux::level(&cx.world, sandbox)?;
    let labels = spec::selinux::labels(sandbox, object, own.as_deref()).map_err(|e| Error::Refused(e.to_string()))?;
    let security = &object.spec.security;
    let wish = security.selinux.as_ref().or(sandbox.spec.security.selinux.as_ref());
    sandbox::selinux::known(labels, sandbox::selinux::asked(wish, security.privileged))
}

/// Labels what is mounted for those wishes that ask for it (CRI `Mount.selinux_relabel`).
pub fn relabel(wishes: &[Mount], found: &[ResolvedMount], label: &str) -> Result<(), SpecError> {
    for (i, (wish, found)) in wishes.iter().zip(found).enumerate() {
        if !wish.selinux_relabel || wish.image.is_some() {
            continue;
        }
        if HOSTS.iter().any(|dir| found.source == Path::new(dir)) {
            let reason = format!("{} is the host's and is not labelled", found.source.display());
            return Err(SpecError::invalid(format!("spec.mounts[{i}].selinuxRelabel"), reason));
        }
        match selinux::set_all(&found.source, label) {
            Err(e) if e.kind() != io::ErrorKind::ReadOnlyFilesystem => {
                return Err(SpecError::host("labelling the mount source", &found.source, e));
            }
            // What nobody can write has the label that it has.
            _ => {}
        }
    }
    Ok(())
}
