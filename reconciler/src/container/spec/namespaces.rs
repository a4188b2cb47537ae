//! Which namespaces a container joins and which are its own (CRI `NamespaceOption`, OCI config-linux `namespaces`).

use std::path::PathBuf;

use oci_spec::runtime::{LinuxIdMapping, LinuxIdMappingBuilder, LinuxNamespace, LinuxNamespaceType};
use state::sandbox::{IdMapping, NamespaceMode};

use super::Input;

pub fn namespaces(input: &Input) -> Vec<LinuxNamespace> {
    use LinuxNamespaceType::*;
    let security = &input.container.spec.security;
    let mut all = Vec::new();
    let mut add = |typ, path: Option<PathBuf>| {
        let mut namespace = LinuxNamespace::default();
        namespace.set_typ(typ).set_path(path);
        all.push(namespace);
    };
    // Whether it is new or another process's is known at start: the path is then filled in.
    if security.namespaces.pid != NamespaceMode::Node {
        add(Pid, None);
    }
    for (typ, path) in [
        (Network, &input.netns),
        (Ipc, &input.ipc),
        (Uts, &input.uts),
        (User, &input.userns),
    ] {
        if path.is_some() {
            add(typ, path.clone());
        }
    }
    add(Mount, None);
    if input.host.cgroup_v2 && !security.privileged {
        add(Cgroup, None);
    }
    all
}

/// The id mappings of the pod's user namespace; absent without one.
pub fn mappings(input: &Input) -> (Option<Vec<LinuxIdMapping>>, Option<Vec<LinuxIdMapping>>) {
    let user = input.sandbox.spec.namespaces.user.as_ref();
    match user.filter(|user| user.mode == NamespaceMode::Pod) {
        Some(user) => (Some(oci(&user.uids)), Some(oci(&user.gids))),
        None => (None, None),
    }
}

pub fn oci(mappings: &[IdMapping]) -> Vec<LinuxIdMapping> {
    let one = |from: &IdMapping| {
        let mapping = LinuxIdMappingBuilder::default();
        let mapping = mapping
            .host_id(from.host_id)
            .container_id(from.container_id)
            .size(from.length);
        // Every field has a default: it cannot fail.
        mapping.build().unwrap_or_default()
    };
    mappings.iter().map(one).collect()
}
