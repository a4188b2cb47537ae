//! Records in, pieces of `config.json` out, field by field.

mod linux;
mod mounts;
mod process;

use std::path::{Path, PathBuf};

use oci_spec::runtime::Capability;
use serde_json::{Value, json};
use state::container::{ContainerKind, ContainerSpec, Mount};
use state::resource::{Meta, Object};
use state::sandbox::{PodRef, SandboxKind, SandboxSpec};

use super::capability::CapabilitySet;
use super::*;

/// All that a configuration is made from, owned, with the answers of a small pod.
struct Case {
    sandbox: SandboxSpec,
    container: ContainerSpec,
    image: ImageConfig,
    user: ResolvedUser,
    userns: Option<PathBuf>,
    host_network: bool,
    devices: Vec<ResolvedDevice>,
    cdi: cdi::Edits,
    volumes: BTreeMap<String, PathBuf>,
    handler: Handler,
    rlimits: Rlimits,
    /// The sandbox's SELinux level.
    level: Option<&'static str>,
    host: HostFacts,
}

fn node(path: &str, kind: host::DeviceKind, major: u64, minor: u64) -> DeviceNode {
    DeviceNode {
        path: path.into(),
        kind,
        major,
        minor,
        mode: 0o660,
        uid: 0,
        gid: 6,
    }
}

impl Default for Case {
    fn default() -> Self {
        let pod = PodRef {
            name: "web".into(),
            namespace: "shop".into(),
            uid: "u-1".into(),
            attempt: 0,
        };
        let host = HostFacts {
            hostname: "node".into(),
            capabilities: CapabilitySet::of([Capability::Chown, Capability::SysAdmin]),
            kernel: (6, 1),
            cgroup_v2: true,
            swap_accounting: true,
            hugepages: vec!["2MB".into()],
            devices: vec![node("/dev/sda", host::DeviceKind::Block, 8, 0)],
            ..Default::default()
        };
        Self {
            sandbox: SandboxSpec {
                pod,
                hostname: "web".into(),
                ..Default::default()
            },
            container: ContainerSpec {
                name: "app".into(),
                ..Default::default()
            },
            image: ImageConfig {
                cmd: vec!["/bin/app".into()],
                ..Default::default()
            },
            user: ResolvedUser::default(),
            userns: None,
            host_network: false,
            devices: Vec::new(),
            cdi: cdi::Edits::default(),
            volumes: BTreeMap::new(),
            handler: Handler::default(),
            rlimits: Rlimits::new(),
            level: None,
            host,
        }
    }
}

impl Case {
    fn with(change: impl FnOnce(&mut Case)) -> Case {
        let mut case = Case::default();
        change(&mut case);
        case
    }

    fn build(self) -> Result<Value> {
        let meta = Meta {
            uid: "s".repeat(64),
            ..Default::default()
        };
        let sandbox: Object<SandboxKind> = Object::new(meta, self.sandbox, Default::default());
        let container: Object<ContainerKind> = Object::new(Meta::default(), self.container, Default::default());
        let mounts = container
            .spec
            .mounts
            .iter()
            .map(|m| ResolvedMount {
                source: PathBuf::from(&m.host_path),
            })
            .collect();
        let spec = build(&Input {
            rlimits: self.rlimits,
            labels: super::selinux::labels(&sandbox, &container, self.level)?,
            sandbox: &sandbox,
            container: &container,
            image: &self.image,
            image_ref: "registry.test/app:1",
            user: &self.user,
            rootfs: "/run/r/rootfs".into(),
            cgroup_path: "/pods/u-1/c".into(),
            netns: (!self.host_network).then(|| "/run/netns/n".into()),
            ipc: Some("/run/ipc".into()),
            uts: (!self.host_network).then(|| "/run/uts".into()),
            userns: self.userns,
            files: SandboxFiles {
                hostname: "/s/hostname".into(),
                hosts: "/s/hosts".into(),
                resolv_conf: "/s/resolv.conf".into(),
                shm: "/s/shm".into(),
            },
            mounts,
            devices: self.devices,
            cdi: self.cdi,
            volumes: self.volumes,
            annotations: BTreeMap::new(),
            handler: self.handler,
            host: &self.host,
        })?;
        Ok(serde_json::to_value(spec).unwrap())
    }

    /// Checks pieces by JSON pointer; `null` means absent.
    fn gives(self, pieces: &[(&str, Value)]) {
        let got = self.build().unwrap();
        for (pointer, want) in pieces {
            let mut have = got.pointer(pointer).cloned().unwrap_or(Value::Null);
            if pointer.contains("/capabilities/")
                && let Some(list) = have.as_array_mut()
            {
                list.sort_by_key(|name| name.to_string());
            }
            assert_eq!(have, *want, "{pointer} in {got:#}");
        }
    }

    fn fails(self, text: &str) {
        let error = self.build().unwrap_err().to_string();
        assert!(error.contains(text), "{error} / {text}");
    }
}

fn strings(list: &[&str]) -> Vec<String> {
    list.iter().map(|s| s.to_string()).collect()
}

fn mount(path: &str) -> Mount {
    Mount {
        container_path: path.into(),
        host_path: "/data".into(),
        ..Default::default()
    }
}

/// Options of the mount at a path, and its source.
fn at(config: &Value, path: &str) -> Option<(String, Vec<String>)> {
    let mut found = config["mounts"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|m| m["destination"] == path);
    let mount = found.next()?;
    assert!(found.next().is_none(), "{path} twice");
    // A base may have left them out.
    let options: Option<_> = serde_json::from_value(mount["options"].clone()).unwrap();
    Some((mount["source"].as_str().unwrap().into(), options.unwrap_or_default()))
}
