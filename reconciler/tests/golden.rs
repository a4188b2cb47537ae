//! CRI requests in, the whole OCI `config.json` out: each case equals a file of `golden/`.
//!
//! The files say what the CRI and the OCI runtime specification ask for and were written by them, not by what the code
//! gives; so a difference is a fault until the file is shown to be wrong. Where we differ on purpose, they follow
//! [`reconciler::container::spec`]: `slave` and `shared` for the recursive `rootfsPropagation`, HOME always set, the
//! seccomp filter beside the configuration, one read-only bind mount for each controller of cgroup v1, a swap limit of
//! zero through `unified`, bind mounts for nodes outside `/dev` and in a user namespace, `{"type": "pid"}` for a shared
//! one.

use std::collections::BTreeMap;
use std::path::PathBuf;

use cri::runtime::v1::security_profile::ProfileType;
use cri::runtime::v1::*;
use cri::translate;
use oci_spec::runtime::{Capability as Cap, Hook, Hooks, Mount as OciMount};
use reconciler::config::values::{Rlimit, Rlimits};
use reconciler::container::seccomp;
use reconciler::container::spec::capability::CapabilitySet;
use reconciler::container::spec::host::DeviceKind;
use reconciler::container::spec::{
    Base, DeviceNode, Handler, HostFacts, Input, ResolvedDevice, ResolvedMount, ResolvedUser, SandboxFiles, build, cdi,
    selinux,
};
use serde_json::Value;
use state::image::ImageConfig;
use state::{Container as Record, Meta, Object, PodSandbox as SandboxRecord};

/// A request, and what the node has.
struct Case {
    pod: PodSandboxConfig,
    config: ContainerConfig,
    image: ImageConfig,
    user: ResolvedUser,
    /// Where the mounts of the request were found; else at their host path.
    found: BTreeMap<usize, &'static str>,
    devices: Vec<ResolvedDevice>,
    cdi: cdi::Edits,
    volumes: BTreeMap<String, PathBuf>,
    base: Base,
    rlimits: Rlimits,
    /// The sandbox's SELinux level.
    level: Option<&'static str>,
    host: HostFacts,
}

fn strings(list: &[&str]) -> Vec<String> {
    list.iter().map(|text| text.to_string()).collect()
}

fn node(path: &str, kind: DeviceKind, (major, minor): (u64, u64), mode: u32) -> DeviceNode {
    DeviceNode {
        path: path.into(),
        kind,
        major,
        minor,
        mode,
        uid: 0,
        gid: 6,
    }
}

/// A small pod on cgroup v2, of which nothing is asked.
fn plain() -> Case {
    Case {
        pod: PodSandboxConfig {
            metadata: Some(PodSandboxMetadata {
                name: "web".into(),
                namespace: "shop".into(),
                uid: "u-1".into(),
                attempt: 0,
            }),
            hostname: "web".into(),
            ..Default::default()
        },
        config: ContainerConfig {
            metadata: Some(ContainerMetadata {
                name: "app".into(),
                attempt: 0,
            }),
            image: Some(ImageSpec {
                image: "registry.test/app:1".into(),
                ..Default::default()
            }),
            ..Default::default()
        },
        image: ImageConfig {
            entrypoint: strings(&["/bin/app"]),
            cmd: strings(&["serve"]),
            env: strings(&["LANG=C"]),
            ..Default::default()
        },
        user: ResolvedUser {
            groups: vec![0],
            home: "/root".into(),
            ..Default::default()
        },
        found: BTreeMap::new(),
        devices: Vec::new(),
        cdi: cdi::Edits::default(),
        volumes: BTreeMap::new(),
        base: Base::default(),
        rlimits: Rlimits::new(),
        level: None,
        host: HostFacts {
            hostname: "node".into(),
            capabilities: CapabilitySet::of([Cap::Chown, Cap::SysAdmin, Cap::NetAdmin]),
            kernel: (6, 1),
            cgroup_v2: true,
            swap_accounting: true,
            hugepages: strings(&["2MB"]),
            devices: vec![
                node("/dev/kmsg", DeviceKind::Char, (1, 11), 0o644),
                node("/dev/sda", DeviceKind::Block, (8, 0), 0o660),
            ],
            ..Default::default()
        },
    }
}

impl Case {
    fn with(change: impl FnOnce(&mut Case)) -> Case {
        let mut case = plain();
        change(&mut case);
        case
    }

    fn of_pod(&mut self) -> &mut LinuxPodSandboxConfig {
        self.pod.linux.get_or_insert_default()
    }

    fn security(&mut self) -> &mut LinuxContainerSecurityContext {
        let linux = self.config.linux.get_or_insert_default();
        linux.security_context.get_or_insert_default()
    }

    fn resources(&mut self) -> &mut LinuxContainerResources {
        self.config
            .linux
            .get_or_insert_default()
            .resources
            .get_or_insert_default()
    }

    /// The same namespaces for the sandbox and the container, as the kubelet sends them.
    fn namespaces(&mut self, options: NamespaceOption) {
        let sandbox = self.of_pod().security_context.get_or_insert_default();
        sandbox.namespace_options = Some(options.clone());
        self.security().namespace_options = Some(options);
    }

    fn records(&self) -> (SandboxRecord, Record) {
        let wish = translate::sandbox::new(&self.pod, "").unwrap();
        let meta = Meta {
            uid: "s".repeat(64),
            ..wish.meta
        };
        let sandbox: SandboxRecord = Object::new(meta, wish.spec, Default::default());
        let wish = translate::container::new(&self.config, &sandbox).unwrap();
        let container = Object::new(wish.meta, wish.spec, Default::default());
        (sandbox, container)
    }

    fn build(self) -> Value {
        let (sandbox, container) = self.records();
        let own = |mode: state::sandbox::NamespaceMode, path: &str| {
            (mode != state::sandbox::NamespaceMode::Node).then(|| PathBuf::from(path))
        };
        let namespaces = &sandbox.spec.namespaces;
        let host_ipc = namespaces.ipc == state::sandbox::NamespaceMode::Node;
        let source = |i: usize, path: &str| self.found.get(&i).copied().unwrap_or(path).into();
        let mounts = container.spec.mounts.iter().enumerate();
        let spec = build(&Input {
            sandbox: &sandbox,
            container: &container,
            image: &self.image,
            image_ref: &container.spec.image.requested,
            user: &self.user,
            rootfs: "/run/r/rootfs".into(),
            cgroup_path: "/pods/u-1/c".into(),
            netns: own(namespaces.network, "/run/netns/n"),
            ipc: own(namespaces.ipc, "/run/ipc"),
            uts: own(namespaces.network, "/run/uts"),
            userns: namespaces.user.as_ref().map(|_| "/run/userns".into()),
            files: SandboxFiles {
                hostname: "/s/hostname".into(),
                hosts: "/s/hosts".into(),
                resolv_conf: "/s/resolv.conf".into(),
                shm: if host_ipc { "/dev/shm" } else { "/s/shm" }.into(),
            },
            mounts: mounts
                .map(|(i, mount)| ResolvedMount {
                    source: source(i, &mount.host_path),
                })
                .collect(),
            devices: self.devices,
            cdi: self.cdi,
            volumes: self.volumes,
            annotations: BTreeMap::new(),
            handler: Handler {
                base: self.base.into(),
                ..Handler::default()
            },
            rlimits: self.rlimits,
            labels: selinux::labels(&sandbox, &container, self.level).unwrap(),
            host: &self.host,
        });
        serde_json::to_value(spec.unwrap()).unwrap()
    }

    /// The configuration is that of the file, to the last field.
    fn is(self, file: &str) {
        let path = format!("{}/tests/golden/{file}.json", env!("CARGO_MANIFEST_DIR"));
        let want: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let got = self.build();
        let depths = got["mounts"].as_array().unwrap().iter();
        let depths = depths.map(|mount| mount["destination"].as_str().unwrap().matches('/').count());
        assert!(
            depths.is_sorted(),
            "{file}: a mount stands before its parent: {:#}",
            got["mounts"]
        );
        let mut differences = Vec::new();
        compare("", &in_order(want), &in_order(got), &mut differences);
        assert!(differences.is_empty(), "{file}.json:\n{}", differences.join("\n"));
    }
}

/// What has no order of its own, in one.
fn in_order(mut config: Value) -> Value {
    if let Some(mounts) = config["mounts"].as_array_mut() {
        mounts.sort_by_key(|mount| mount["destination"].to_string());
    }
    for (_, set) in config["process"]["capabilities"].as_object_mut().into_iter().flatten() {
        set.as_array_mut().unwrap().sort_by_key(Value::to_string);
    }
    config
}

/// One line for each field that differs.
fn compare(path: &str, want: &Value, got: &Value, differences: &mut Vec<String>) {
    match (want, got) {
        (Value::Object(a), Value::Object(b)) => {
            let keys: std::collections::BTreeSet<_> = a.keys().chain(b.keys()).collect();
            for key in keys {
                let of = |map: &serde_json::Map<_, _>| map.get(key).cloned().unwrap_or(Value::Null);
                compare(&format!("{path}/{key}"), &of(a), &of(b), differences);
            }
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            for (i, (a, b)) in a.iter().zip(b).enumerate() {
                compare(&format!("{path}/{i}"), a, b, differences);
            }
        }
        (a, b) if a == b => {}
        (a, b) => differences.push(format!("{path}: must be {a}, is {b}")),
    }
}

#[test]
fn a_plain_container() {
    plain().is("plain");
}

#[test]
fn privileged() {
    let wish = |case: &mut Case| {
        case.of_pod().security_context.get_or_insert_default().privileged = true;
        let security = case.security();
        security.privileged = true;
        security.masked_paths = strings(&["/proc/kcore"]);
        security.readonly_paths = strings(&["/proc/sys"]);
        security.seccomp = Some(SecurityProfile::default());
        security.capabilities = Some(Capability {
            drop_capabilities: strings(&["ALL"]),
            ..Default::default()
        });
    };
    let case = Case::with(wish);
    assert!(filter(&case).is_none(), "whatever profile is asked for");
    case.is("privileged");
}

#[test]
fn namespaces_of_the_host() {
    let node = NamespaceMode::Node.into();
    let case = |hostname: &str| {
        Case::with(|case| {
            case.pod.hostname = hostname.into();
            case.namespaces(NamespaceOption {
                network: node,
                pid: node,
                ipc: node,
                ..Default::default()
            });
        })
    };
    case("").is("host-namespaces");
}

#[test]
fn processes_of_another_container() {
    Case::with(|case| {
        case.security().namespace_options = Some(NamespaceOption {
            pid: NamespaceMode::Target.into(),
            target_id: "c".repeat(64),
            ..Default::default()
        });
    })
    .is("target-pid");
}

#[test]
fn a_user_namespace() {
    Case::with(|case| {
        let one = vec![IdMapping {
            host_id: 65536,
            container_id: 0,
            length: 65536,
        }];
        case.namespaces(NamespaceOption {
            userns_options: Some(UserNamespace {
                mode: NamespaceMode::Pod.into(),
                uids: one.clone(),
                gids: one.clone(),
            }),
            ..Default::default()
        });
        case.config.mounts = vec![Mount {
            uid_mappings: one.clone(),
            gid_mappings: one,
            ..mount("/data", "/srv/data")
        }];
        case.devices = vec![device("/dev/fuse", "rwm")];
    })
    .is("user-namespace");
}

fn filter(case: &Case) -> Option<seccomp::Filter> {
    let (_, container) = case.records();
    let security = &container.spec.security;
    let cx = seccomp::Context {
        capabilities: case.host.capabilities,
        kernel: case.host.kernel,
        arch: seccomp::Arch::NATIVE,
        deny_socketcall: false,
    };
    seccomp::filter(security.seccomp.as_ref(), security.privileged, &cx).unwrap()
}

/// The filter is compiled and kept beside the configuration, which is the same for each profile.
#[test]
fn seccomp_profiles() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(
        file.path(),
        r#"{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["chmod"], "action": "SCMP_ACT_ERRNO"}]}"#,
    )
    .unwrap();
    let path = file.path().display().to_string();
    let with = |profile: Option<(ProfileType, &str)>, text: &str| {
        Case::with(|case| {
            let security = case.security();
            security.no_new_privs = true;
            security.seccomp = profile.map(|(kind, reference)| SecurityProfile {
                profile_type: kind.into(),
                localhost_ref: reference.into(),
            });
            #[allow(deprecated, reason = "old clients send it")]
            security.seccomp_profile_path.push_str(text);
        })
    };
    let default = filter(&with(Some((ProfileType::RuntimeDefault, "")), "")).unwrap();
    let local = filter(&with(Some((ProfileType::Localhost, &path)), "")).unwrap();
    assert!(default.len() > local.len(), "a list of hundreds, and one of one");
    for (profile, text, want) in [
        (Some((ProfileType::RuntimeDefault, "")), "", Some(&default)),
        (None, "runtime/default", Some(&default)),
        (None, "docker/default", Some(&default)),
        (Some((ProfileType::Localhost, path.as_str())), "", Some(&local)),
        (None, &*format!("localhost/{path}"), Some(&local)),
        (Some((ProfileType::Unconfined, "")), "runtime/default", None),
        (None, "unconfined", None),
        (None, "", None),
    ] {
        let case = with(profile, text);
        assert_eq!(filter(&case).as_ref(), want, "{profile:?} {text}");
        case.is("seccomp");
    }
}

fn device(path: &str, permissions: &str) -> ResolvedDevice {
    ResolvedDevice {
        node: node("/dev/fuse", DeviceKind::Char, (10, 229), 0o666),
        container_path: path.into(),
        permissions: permissions.into(),
    }
}

#[test]
fn devices() {
    Case::with(|case| {
        let disk = ResolvedDevice {
            node: node("/dev/sda", DeviceKind::Block, (8, 0), 0o660),
            container_path: "/dev/disk/data".into(),
            permissions: "r".into(),
        };
        case.devices = vec![device("/dev/fuse", "rwm"), disk, device("/opt/fuse", "rw")];
    })
    .is("devices");
}

#[test]
fn devices_by_name() {
    Case::with(|case| {
        case.config.cdi_devices = vec![CdiDevice {
            name: "vendor.test/gpu=0".into(),
        }];
        case.config.mounts = vec![mount("/opt/gpu/own", "/srv/own")];
        let bind = |path: &str, source: &str| {
            let mut mount = OciMount::default();
            mount
                .set_destination(path.into())
                .set_typ(Some("bind".into()))
                .set_source(Some(source.into()))
                .set_options(Some(strings(&["rbind", "ro", "nosuid"])));
            mount
        };
        let mut hook = Hook::default();
        hook.set_path("/usr/bin/gpu-hook".into())
            .set_args(Some(strings(&["gpu-hook", "make"])));
        let mut hooks = Hooks::default();
        hooks.set_create_runtime(Some(vec![hook]));
        case.cdi = cdi::Edits {
            names: ["vendor.test/gpu=0".to_owned()].into(),
            env: strings(&["GPU=0"]),
            devices: vec![ResolvedDevice {
                node: node("/dev/gpu0", DeviceKind::Char, (195, 0), 0o660),
                container_path: "/dev/gpu0".into(),
                permissions: "rw".into(),
            }],
            // The request's own mount stands in place of the second.
            mounts: vec![
                bind("/opt/gpu/lib", "/usr/lib/gpu"),
                bind("/opt/gpu/own", "/usr/lib/gpu"),
            ],
            hooks,
            groups: vec![44],
        };
    })
    .is("cdi");
}

/// Of it counts what the request, the node's configuration and our own rules leave open.
#[test]
fn the_base_of_a_handler() {
    Case::with(|case| {
        let file = format!("{}/tests/golden/base-spec.json", env!("CARGO_MANIFEST_DIR"));
        case.base = Base::read(file.as_ref()).unwrap();
        case.config.envs = vec![KeyValue {
            key: "LANG".into(),
            value: "own".into(),
        }];
        case.config.mounts = vec![mount("/data", "/srv/own")];
        case.resources().memory_limit_in_bytes = 64 << 20;
        case.of_pod().sysctls = [("kernel.sem".to_owned(), "5 6 7 8".to_owned())].into();
        let limit = |name: &str| (name.to_owned(), Rlimit { soft: 1024, hard: 4096 });
        case.rlimits = [limit("memlock"), limit("nofile")].into();
    })
    .is("base");
}

#[test]
fn all_limits_on_cgroup_v1() {
    Case::with(|case| {
        case.host.cgroup_v2 = false;
        case.host.cgroup_v1 = vec!["/sys/fs/cgroup/cpu,cpuacct".into(), "/sys/fs/cgroup/memory".into()];
        let page = |size: &str, limit| HugepageLimit {
            page_size: size.into(),
            limit,
        };
        *case.resources() = LinuxContainerResources {
            cpu_period: 100_000,
            cpu_quota: 50_000,
            cpu_shares: 1024,
            memory_limit_in_bytes: 64 << 20,
            memory_swap_limit_in_bytes: 96 << 20,
            oom_score_adj: -998,
            cpuset_cpus: "0-1".into(),
            cpuset_mems: "0".into(),
            // The node has no pages of the second size: ignored.
            hugepage_limits: vec![page("2MB", 4 << 20), page("1GB", 1 << 30)],
            ..Default::default()
        };
    })
    .is("limits-v1");
}

#[test]
fn limits_and_raw_files_on_cgroup_v2() {
    Case::with(|case| {
        *case.resources() = LinuxContainerResources {
            cpu_shares: 2,
            cpu_quota: -1,
            memory_limit_in_bytes: 64 << 20,
            oom_score_adj: 1000,
            unified: [("memory.high", "60000000"), ("memory.oom.group", "1")]
                .map(|(file, text)| (file.to_owned(), text.to_owned()))
                .into(),
            ..Default::default()
        };
    })
    .is("limits-v2");
}

fn mount(path: &str, source: &str) -> Mount {
    Mount {
        container_path: path.into(),
        host_path: source.into(),
        ..Default::default()
    }
}

#[test]
fn mounts() {
    Case::with(|case| {
        let readonly = |path: &str, source: &str| Mount {
            readonly: true,
            ..mount(path, source)
        };
        let propagated = |path: &str, source: &str, propagation: MountPropagation| Mount {
            propagation: propagation.into(),
            ..mount(path, source)
        };
        case.config.mounts = vec![
            mount("/m/a/deep", "/srv/deep"),
            mount("/etc/hosts/", "/srv/hosts"),
            mount("/dev/termination-log", "/srv/end"),
            mount("/x/../dev/shm", "/srv/shm"),
            readonly("/m/private", "/link"),
            propagated("/m/slave", "/srv/slave", MountPropagation::PropagationHostToContainer),
            propagated("/m/shared", "/srv/shared", MountPropagation::PropagationBidirectional),
            Mount {
                recursive_read_only: true,
                ..readonly("/m/rro", "/srv/rro")
            },
            Mount {
                mount_options: strings(&["noexec", "nosuid"]),
                ..readonly("/m/options", "/srv/options")
            },
        ];
        // A symlink of the host.
        case.found = [(4, "/srv/private")].into();
        case.volumes = [("/vol/anonymous", "/volumes/1"), ("/m/private", "/volumes/2")]
            .map(|(path, source)| (path.to_owned(), source.into()))
            .into();
    })
    .is("mounts");
}

#[test]
fn an_image_as_a_volume() {
    Case::with(|case| {
        case.config.mounts = vec![Mount {
            container_path: "/models".into(),
            readonly: true,
            image: Some(ImageSpec {
                image: "registry.test/models:1".into(),
                ..Default::default()
            }),
            image_sub_path: "weights".into(),
            ..Default::default()
        }];
        case.found = [(0, "/pods/u-1/images/1/weights")].into();
    })
    .is("image-volume");
}

#[test]
fn a_terminal_for_a_user() {
    Case::with(|case| {
        let env = |key: &str, value: &str| KeyValue {
            key: key.into(),
            value: value.into(),
        };
        (case.config.tty, case.config.stdin) = (true, true);
        case.config.command = strings(&["/bin/sh", "-c"]);
        case.config.args = strings(&["exec top"]);
        case.image.working_dir = "/image".into();
        case.config.working_dir = "/srv".into();
        case.config.envs = vec![env("LANG", "en"), env("EMPTY", ""), env("PAIR", "a=b")];
        case.security().run_as_user = Some(Int64Value { value: 1000 });
        case.user = ResolvedUser {
            uid: 1000,
            gid: 1001,
            groups: vec![1001, 2000],
            home: "/home/u".into(),
        };
        let limit = Rlimit { soft: 1024, hard: 4096 };
        case.rlimits = [("nofile".to_owned(), limit)].into();
    })
    .is("tty");
}

#[test]
fn sysctls_are_the_sandbox_s() {
    Case::with(|case| {
        case.of_pod().sysctls = [("net.core.somaxconn", "99"), ("kernel.shm_rmid_forced", "1")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into();
    })
    .is("sysctls");
}

#[test]
fn masked_and_read_only_paths() {
    Case::with(|case| {
        let security = case.security();
        security.readonly_rootfs = true;
        security.masked_paths = strings(&["/proc/kcore", "/sys/firmware"]);
        security.readonly_paths = strings(&["/proc/sys", "/proc/sysrq-trigger"]);
    })
    .is("paths");
}

#[test]
fn capabilities() {
    Case::with(|case| {
        case.security().capabilities = Some(Capability {
            add_capabilities: strings(&["net_admin", "KILL"]),
            drop_capabilities: strings(&["ALL", "KILL"]),
            add_ambient_capabilities: strings(&["NET_BIND_SERVICE"]),
        });
    })
    .is("capabilities");
}

#[test]
fn labels_of_security_modules() {
    Case::with(|case| {
        case.host.apparmor = Some(strings(&["k8s-app"]));
        case.level = Some("s0:c3,c4");
        let security = case.security();
        security.apparmor = Some(SecurityProfile {
            profile_type: ProfileType::Localhost.into(),
            localhost_ref: "k8s-app".into(),
        });
        security.selinux_options = Some(SeLinuxOption {
            level: "s0:c1,c2".into(),
            ..Default::default()
        });
    })
    .is("labels");
}
