//! Device nodes and the device cgroup's rules (CRI `Device`, OCI config-linux `devices` and `resources.devices`).

use std::path::{Path, PathBuf};

use oci_spec::runtime::{LinuxDevice, LinuxDeviceCgroup, LinuxDeviceType, Mount};
use state::sandbox::NamespaceMode;

use super::Input;
use super::host::{DeviceKind, DeviceNode, ResolvedDevice};
use super::mounts::bind;

/// null, zero, full, random, urandom, tty, console, ptmx and the terminals: what every container may use.
const ALWAYS: [(i64, Option<i64>); 9] = [
    (1, Some(3)),
    (1, Some(5)),
    (1, Some(7)),
    (1, Some(8)),
    (1, Some(9)),
    (5, Some(0)),
    (5, Some(1)),
    (5, Some(2)),
    (136, None),
];

/// The nodes to make, and those that must be bound instead: in a user namespace mknod(2) is refused, and the runtime
/// makes none outside `/dev`.
pub fn nodes(input: &Input) -> (Vec<LinuxDevice>, Vec<Mount>) {
    let user = input.sandbox.spec.namespaces.user.as_ref();
    let userns = user.is_some_and(|user| user.mode == NamespaceMode::Pod);
    let mut made: Vec<LinuxDevice> = Vec::new();
    let mut bound: Vec<Mount> = Vec::new();
    for (node, path) in wanted(input) {
        if userns || !path.starts_with("/dev") {
            bound.retain(|mount| *mount.destination() != path);
            bound.push(bind(&path, &node.path, ["bind", "rprivate", "rw"]));
        } else {
            // Asked for by name: stands for a host node of the same path.
            made.retain(|device| *device.path() != path);
            made.push(linux_device(node, path));
        }
    }
    (made, bound)
}

fn wanted<'a>(input: &'a Input) -> impl Iterator<Item = (&'a DeviceNode, PathBuf)> {
    let all = input.container.spec.security.privileged && !input.handler.privileged_without_host_devices;
    let host = if all { &input.host.devices[..] } else { &[] };
    let given = host.iter().chain(&input.handler.base.devices);
    let given = given.map(|node| (node, node.path.clone()));
    given.chain(asked(input).map(|device| (&device.node, super::mounts::clean(&device.container_path))))
}

/// Named by the request: by CDI name, then by path, which wins.
fn asked<'a>(input: &'a Input) -> impl Iterator<Item = &'a ResolvedDevice> {
    input.cdi.devices.iter().chain(&input.devices)
}

fn linux_device(node: &DeviceNode, path: PathBuf) -> LinuxDevice {
    let mut device = LinuxDevice::default();
    device
        .set_path(path)
        .set_typ(typ(node.kind))
        .set_major(node.major as i64)
        .set_minor(node.minor as i64)
        .set_file_mode(Some(node.mode))
        .set_uid(Some(node.uid))
        .set_gid(Some(node.gid));
    device
}

fn typ(kind: DeviceKind) -> LinuxDeviceType {
    match kind {
        DeviceKind::Char => LinuxDeviceType::C,
        DeviceKind::Block => LinuxDeviceType::B,
    }
}

/// Deny all, then the rules of the handler's base, then allow what every container may use and what was asked for.
/// Privileged: allow all, unless the host's nodes are kept from it, which it could make itself.
pub fn rules(input: &Input) -> Vec<LinuxDeviceCgroup> {
    if input.container.spec.security.privileged && !input.handler.privileged_without_host_devices {
        return vec![rule(true, None, None, None, "rwm")];
    }
    let char = Some(LinuxDeviceType::C);
    let mut rules = vec![rule(false, None, None, None, "rwm")];
    rules.extend(input.handler.base.resources.devices().iter().flatten().cloned());
    // Making a node is harmless as long as it cannot be opened.
    rules.push(rule(true, char, None, None, "m"));
    rules.push(rule(true, Some(LinuxDeviceType::B), None, None, "m"));
    rules.extend(
        ALWAYS
            .iter()
            .map(|(major, minor)| rule(true, char, Some(*major), *minor, "rwm")),
    );
    rules.extend(asked(input).map(|device| {
        let (major, minor) = (device.node.major as i64, device.node.minor as i64);
        rule(
            true,
            Some(typ(device.node.kind)),
            Some(major),
            Some(minor),
            &device.permissions,
        )
    }));
    rules
}

fn rule(
    allow: bool,
    typ: Option<LinuxDeviceType>,
    major: Option<i64>,
    minor: Option<i64>,
    access: &str,
) -> LinuxDeviceCgroup {
    let mut rule = LinuxDeviceCgroup::default();
    rule.set_allow(allow)
        .set_typ(typ)
        .set_major(major)
        .set_minor(minor)
        .set_access(Some(access.into()));
    rule
}

/// Is it a path that holds the container's own device file system?
pub fn below_dev(path: &Path) -> bool {
    path.starts_with("/dev") && path != Path::new("/dev")
}
