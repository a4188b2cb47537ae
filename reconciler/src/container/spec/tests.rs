//! Records in, pieces of `config.json` out, field by field.

use std::path::{Path, PathBuf};

use oci_spec::runtime::Capability;
use serde_json::{Value, json};
use state::container::{ContainerKind, ContainerSpec, EnvVar, Mount, Propagation};
use state::resource::{Meta, Object};
use state::sandbox::{IdMapping, NamespaceMode, PodRef, Profile, SandboxKind, SandboxSpec, SeLinux, UserNamespace};

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
    volumes: BTreeMap<String, PathBuf>,
    handler: Handler,
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
            volumes: BTreeMap::new(),
            handler: Handler::default(),
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
    let options = serde_json::from_value(mount["options"].clone()).unwrap();
    Some((mount["source"].as_str().unwrap().into(), options))
}

#[test]
fn a_plain_container() {
    let default = json!([
        "CAP_AUDIT_WRITE",
        "CAP_CHOWN",
        "CAP_DAC_OVERRIDE",
        "CAP_FOWNER",
        "CAP_FSETID",
        "CAP_KILL",
        "CAP_MKNOD",
        "CAP_NET_BIND_SERVICE",
        "CAP_NET_RAW",
        "CAP_SETFCAP",
        "CAP_SETGID",
        "CAP_SETPCAP",
        "CAP_SETUID",
        "CAP_SYS_CHROOT"
    ]);
    Case::default().gives(&[
        ("/ociVersion", json!("1.2.0")),
        ("/hostname", Value::Null),
        ("/root", json!({"path": "/run/r/rootfs", "readonly": false})),
        ("/process/args", json!(["/bin/app"])),
        ("/process/cwd", json!("/")),
        ("/process/terminal", json!(false)),
        ("/process/noNewPrivileges", json!(false)),
        ("/process/oomScoreAdj", json!(0)),
        ("/process/rlimits", Value::Null),
        ("/process/apparmorProfile", Value::Null),
        ("/process/selinuxLabel", Value::Null),
        ("/process/capabilities/bounding", default.clone()),
        ("/process/capabilities/permitted", default.clone()),
        ("/process/capabilities/effective", default),
        ("/process/capabilities/inheritable", json!([])),
        ("/process/capabilities/ambient", json!([])),
        (
            "/linux/namespaces",
            json!([
                {"type": "pid"}, {"type": "network", "path": "/run/netns/n"}, {"type": "ipc", "path": "/run/ipc"},
                {"type": "uts", "path": "/run/uts"}, {"type": "mount"}, {"type": "cgroup"}
            ]),
        ),
        ("/linux/cgroupsPath", json!("/pods/u-1/c")),
        ("/linux/seccomp", Value::Null),
        ("/linux/sysctl", Value::Null),
        ("/linux/uidMappings", Value::Null),
        ("/linux/maskedPaths", json!([])),
        ("/linux/readonlyPaths", json!([])),
        ("/linux/rootfsPropagation", json!("private")),
        ("/linux/devices", json!([])),
        ("/linux/resources/memory", Value::Null),
        ("/linux/resources/cpu", Value::Null),
        ("/linux/resources/pids", Value::Null),
        (
            "/annotations",
            json!({
                "io.kubernetes.cri.container-type": "container",
                "io.kubernetes.cri.sandbox-id": "s".repeat(64),
                "io.kubernetes.cri.sandbox-namespace": "shop",
                "io.kubernetes.cri.sandbox-name": "web",
                "io.kubernetes.cri.sandbox-uid": "u-1",
                "io.kubernetes.cri.container-name": "app",
                "io.kubernetes.cri.image-name": "registry.test/app:1",
            }),
        ),
    ]);
}

#[test]
fn arguments() {
    for (command, args, entrypoint, cmd, want) in [
        (&["c"][..], &["a"][..], &["e"][..], &["m"][..], &["c", "a"][..]),
        (&["c"], &[], &["e"], &["m"], &["c"]),
        (&[], &["a"], &["e"], &["m"], &["e", "a"]),
        (&[], &[], &["e"], &["m"], &["e", "m"]),
        (&[], &[], &[""], &["m"], &["m"]),
        (&[], &["a"], &[], &["m"], &["a"]),
    ] {
        let case = Case::with(|case| {
            (case.container.command, case.container.args) = (strings(command), strings(args));
            (case.image.entrypoint, case.image.cmd) = (strings(entrypoint), strings(cmd));
        });
        case.gives(&[("/process/args", json!(want))]);
    }
    Case::with(|case| case.image.cmd.clear()).fails("spec.command: no command");
    Case::with(|case| case.container.args = strings(&["a\0b"])).fails("spec.command: contains a NUL");
}

#[test]
fn environment_cwd_and_user() {
    let path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    Case::default().gives(&[("/process/env", json!([path, "HOSTNAME=web", "HOME=/"]))]);
    let env = |name: &str, value: &str| EnvVar {
        name: name.into(),
        value: value.into(),
    };
    Case::with(|case| {
        case.sandbox.hostname.clear();
        case.container.tty = true;
        case.image.env = strings(&["PATH=/bin", "A=image", "B=image"]);
        case.container.env = vec![env("B", "own"), env("C", "x=y"), env("C", "")];
        case.user = ResolvedUser {
            uid: 7,
            gid: 8,
            groups: vec![8, 9],
            home: "/home/u".into(),
        };
        case.image.working_dir = "/srv".into();
    })
    .gives(&[
        (
            "/process/env",
            json!([
                "PATH=/bin",
                "TERM=xterm",
                "HOSTNAME=node",
                "A=image",
                "B=own",
                "C=",
                "HOME=/home/u"
            ]),
        ),
        ("/process/terminal", json!(true)),
        ("/process/user", json!({"uid": 7, "gid": 8, "additionalGids": [8, 9]})),
        ("/process/cwd", json!("/srv")),
    ]);
    Case::with(|case| {
        case.image.working_dir = "/srv".into();
        case.container.working_dir = "/own".into();
        case.container.env = vec![env("HOME", "/h")];
    })
    .gives(&[
        ("/process/cwd", json!("/own")),
        ("/process/env", json!([path, "HOSTNAME=web", "HOME=/h"])),
    ]);
    Case::with(|case| case.container.working_dir = "own".into()).fails("spec.workingDir: must be an absolute path");
    Case::with(|case| case.container.env = vec![env("A=", "")]).fails("spec.env[0].name: ");
    Case::with(|case| case.container.security.run_as_group = Some(1)).fails("spec.security.runAsGroup: needs");
    Case::with(|case| case.container.resources.oom_score_adj = 1001).fails("spec.resources.oomScoreAdj: ");
    Case::with(|case| {
        case.container.resources.oom_score_adj = -998;
        case.container.security.no_new_privs = true;
        case.container.security.readonly_rootfs = true;
        case.container.security.masked_paths = strings(&["/proc/kcore"]);
        case.container.security.readonly_paths = strings(&["/proc/sys"]);
    })
    .gives(&[
        ("/process/oomScoreAdj", json!(-998)),
        ("/process/noNewPrivileges", json!(true)),
        ("/root/readonly", json!(true)),
        ("/linux/maskedPaths", json!(["/proc/kcore"])),
        ("/linux/readonlyPaths", json!(["/proc/sys"])),
    ]);
}

#[test]
fn base_mounts_and_the_sandbox_files() {
    let config = Case::default().build().unwrap();
    for (path, source, options) in [
        ("/proc", "proc", &["nosuid", "noexec", "nodev"][..]),
        ("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
        (
            "/dev/pts",
            "devpts",
            &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"],
        ),
        ("/dev/mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
        ("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
        (
            "/sys/fs/cgroup",
            "cgroup",
            &["nosuid", "noexec", "nodev", "relatime", "ro"],
        ),
        ("/etc/hostname", "/s/hostname", &["rbind", "rprivate", "rw"]),
        ("/etc/hosts", "/s/hosts", &["rbind", "rprivate", "rw"]),
        ("/etc/resolv.conf", "/s/resolv.conf", &["rbind", "rprivate", "rw"]),
        ("/dev/shm", "/s/shm", &["rbind", "rprivate", "rw"]),
    ] {
        assert_eq!(at(&config, path), Some((source.into(), strings(options))), "{path}");
    }
    assert_eq!(config["mounts"].as_array().unwrap().len(), 10);
    let read_only = Case::with(|case| case.container.security.readonly_rootfs = true)
        .build()
        .unwrap();
    assert_eq!(at(&read_only, "/etc/hosts").unwrap().1, ["rbind", "rprivate", "ro"]);
    assert_eq!(at(&read_only, "/dev/shm").unwrap().1, ["rbind", "rprivate", "rw"]);
}

#[test]
fn the_requests_mounts_replace_and_are_sorted() {
    let config = Case::with(|case| {
        case.container.mounts = vec![
            mount("/a/b/c"),
            mount("/etc/hosts/"),
            mount("/dev/shm"),
            mount("/a"),
            mount("/x/../sys/fs/cgroup"),
        ];
        case.volumes = [("/a".to_string(), "/v/a".into()), ("/v".to_string(), "/v/v".into())].into();
    })
    .build()
    .unwrap();
    for path in ["/etc/hosts", "/dev/shm", "/a", "/a/b/c", "/sys/fs/cgroup"] {
        assert_eq!(
            at(&config, path),
            Some(("/data".into(), strings(&["rbind", "rprivate", "rw"]))),
            "{path}"
        );
    }
    assert_eq!(at(&config, "/v").unwrap().0, "/v/v");
    let paths: Vec<_> = config["mounts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| m["destination"].as_str().unwrap())
        .collect();
    let depths: Vec<_> = paths.iter().map(|path| path.split('/').count()).collect();
    assert!(depths.is_sorted(), "{paths:?}");

    let dev = Case::with(|case| case.container.mounts = vec![mount("/dev")])
        .build()
        .unwrap();
    assert_eq!(at(&dev, "/dev").unwrap().0, "/data");
    assert!(at(&dev, "/dev/pts").is_none() && at(&dev, "/dev/mqueue").is_none());
    assert_eq!(at(&dev, "/dev/shm").unwrap().0, "/s/shm");
}

#[test]
fn options_of_a_mount() {
    let rro = |m: &mut Mount| (m.readonly, m.recursive_read_only) = (true, true);
    type Change = fn(&mut Mount);
    let changes: [(Change, &[&str], &str); 5] = [
        (|m| m.readonly = true, &["rbind", "rprivate", "ro"], "private"),
        (rro, &["rbind", "rprivate", "rro"], "private"),
        (
            |m| m.propagation = Propagation::HostToContainer,
            &["rbind", "rslave", "rw"],
            "slave",
        ),
        (
            |m| m.propagation = Propagation::Bidirectional,
            &["rbind", "rshared", "rw"],
            "shared",
        ),
        (
            |m| m.options = strings(&["noexec", "rnosuid"]),
            &["rbind", "rprivate", "rw", "noexec", "rnosuid"],
            "private",
        ),
    ];
    for (change, options, rootfs) in changes {
        let case = Case::with(|case| {
            case.container.mounts = vec![mount("/m")];
            change(&mut case.container.mounts[0]);
        });
        let config = case.build().unwrap();
        assert_eq!(at(&config, "/m").unwrap().1, options);
        assert_eq!(config["linux"]["rootfsPropagation"], rootfs);
    }
    let mixed = Case::with(|case| {
        let shared = Mount {
            propagation: Propagation::Bidirectional,
            ..mount("/s")
        };
        let slave = Mount {
            propagation: Propagation::HostToContainer,
            ..mount("/h")
        };
        case.container.mounts = vec![slave, shared, mount("/p")];
    });
    mixed.gives(&[("/linux/rootfsPropagation", json!("shared"))]);

    let image = |m: &mut Mount| {
        (m.image, m.readonly) = (Some(Default::default()), true);
        m.host_path.clear();
    };
    type Spoil<'a> = &'a dyn Fn(&mut Mount);
    let bad: [(&str, Spoil); 11] = [
        ("containerPath: must be", &|m| m.container_path = "/".into()),
        ("containerPath: /proc/self must not", &|m| {
            m.container_path = "/proc/self".into()
        }),
        ("containerPath: /proc must not", &|m| {
            m.container_path = "/x/../proc".into()
        }),
        ("options[0]: `bind`", &|m| m.options = strings(&["bind"])),
        ("recursiveReadOnly: needs", &|m| m.recursive_read_only = true),
        ("recursiveReadOnly: needs", &|m| {
            rro(m);
            m.propagation = Propagation::HostToContainer;
        }),
        ("imageSubPath: needs an image", &|m| m.image_sub_path = "x".into()),
        ("hostPath: must be empty", &|m| {
            image(m);
            m.host_path = "/x".into();
        }),
        ("readonly: must be true", &|m| {
            image(m);
            m.readonly = false;
        }),
        ("propagation: must be Private", &|m| {
            image(m);
            m.propagation = Propagation::Bidirectional;
        }),
        ("containerPath: /proc/sys must not", &|m| {
            m.container_path = "/proc/sys".into()
        }),
    ];
    for (text, change) in bad {
        let case = Case::with(|case| {
            case.container.mounts = vec![mount("/m")];
            change(&mut case.container.mounts[0]);
        });
        case.fails(&format!("spec.mounts[0].{text}"));
    }
}

#[test]
fn cgroup_v1_shows_the_containers_part_read_only() {
    let v1 = |privileged| {
        Case::with(|case| {
            case.host.cgroup_v2 = false;
            case.host.cgroup_v1 = vec!["/sys/fs/cgroup/cpu,cpuacct".into(), "/sys/fs/cgroup/memory".into()];
            case.sandbox.security.privileged = privileged;
            case.container.security.privileged = privileged;
        })
    };
    let config = v1(false).build().unwrap();
    let options = |access| strings(&["rbind", "rprivate", "nosuid", "noexec", "nodev", access]);
    assert_eq!(at(&config, "/sys/fs/cgroup").unwrap().0, "tmpfs");
    let memory = Some(("/sys/fs/cgroup/memory/pods/u-1/c".into(), options("ro")));
    assert_eq!(at(&config, "/sys/fs/cgroup/memory"), memory);
    assert_eq!(
        at(&v1(true).build().unwrap(), "/sys/fs/cgroup/cpu,cpuacct").unwrap().1,
        options("rw")
    );
    let types: Vec<_> = config["linux"]["namespaces"]
        .as_array()
        .unwrap()
        .iter()
        .map(|n| n["type"].clone())
        .collect();
    assert_eq!(types, ["pid", "network", "ipc", "uts", "mount"]);
    let mut own = v1(false);
    own.container.mounts = vec![mount("/sys/fs/cgroup")];
    assert!(at(&own.build().unwrap(), "/sys/fs/cgroup/memory").is_none());
}

#[test]
fn privileged() {
    let wish = |case: &mut Case| {
        case.container.security.privileged = true;
        case.sandbox.security.privileged = true;
        case.container.security.masked_paths = strings(&["/proc/kcore"]);
        case.container.security.readonly_paths = strings(&["/proc/sys"]);
        case.container.security.drop_capabilities = strings(&["ALL"]);
    };
    let case = Case::with(wish);
    let config = Case::with(wish).build().unwrap();
    assert_eq!(at(&config, "/sys").unwrap().1, ["nosuid", "noexec", "nodev", "rw"]);
    assert_eq!(
        at(&config, "/sys/fs/cgroup").unwrap().1,
        ["nosuid", "noexec", "nodev", "relatime", "rw"]
    );
    case.gives(&[
        ("/root/readonly", json!(false)),
        ("/process/capabilities/bounding", json!(["CAP_CHOWN", "CAP_SYS_ADMIN"])),
        ("/process/capabilities/ambient", json!([])),
        ("/linux/maskedPaths", json!([])),
        ("/linux/readonlyPaths", json!([])),
        ("/linux/namespaces/4/type", json!("mount")),
        ("/linux/namespaces/5", Value::Null),
        ("/linux/resources/devices", json!([{"allow": true, "access": "rwm"}])),
        (
            "/linux/devices",
            json!([{"path": "/dev/sda", "type": "b", "major": 8, "minor": 0, "fileMode": 0o660, "uid": 0, "gid": 6}]),
        ),
    ]);
    let bare = Case::with(|case| {
        wish(case);
        case.handler.privileged_without_host_devices = true;
    });
    bare.gives(&[("/linux/devices", json!([]))]);
    Case::with(|case| case.container.security.privileged = true).fails("spec.security.privileged: needs a sandbox");
}

#[test]
fn devices() {
    let fuse = |path: &str| ResolvedDevice {
        node: node("/dev/fuse", host::DeviceKind::Char, 10, 229),
        container_path: path.into(),
        permissions: "rw".into(),
    };
    let rules = [json!({"allow": false, "access": "rwm"})]
        .into_iter()
        .chain(["c", "b"].map(|t| json!({"allow": true, "type": t, "access": "m"})))
        .chain(
            [(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 1), (5, 2)]
                .map(|(a, b)| json!({"allow": true, "type": "c", "major": a, "minor": b, "access": "rwm"})),
        )
        .chain([json!({"allow": true, "type": "c", "major": 136, "access": "rwm"})])
        .chain([json!({"allow": true, "type": "c", "major": 10, "minor": 229, "access": "rw"})]);
    Case::with(|case| case.devices = vec![fuse("/dev/a/b")]).gives(&[
        ("/linux/resources/devices", Value::Array(rules.collect())),
        ("/linux/devices/0/path", json!("/dev/a/b")),
        ("/linux/devices/0/major", json!(10)),
        ("/linux/devices/1", Value::Null),
    ]);
    let outside = Case::with(|case| case.devices = vec![fuse("/opt/fuse")])
        .build()
        .unwrap();
    assert_eq!(outside["linux"]["devices"], json!([]));
    assert_eq!(
        at(&outside, "/opt/fuse"),
        Some(("/dev/fuse".into(), strings(&["bind", "rprivate", "rw"])))
    );
    let mut userns = in_userns();
    userns.devices = vec![fuse("/dev/fuse")];
    assert_eq!(at(&userns.build().unwrap(), "/dev/fuse").unwrap().0, "/dev/fuse");
    Case::with(|case| case.container.cdi_devices = strings(&["v/x=1"])).fails("spec.cdiDevices[0]: `v/x=1`");
}

fn in_userns() -> Case {
    Case::with(|case| {
        let one = vec![IdMapping {
            host_id: 65536,
            container_id: 0,
            length: 65536,
        }];
        let user = UserNamespace {
            mode: NamespaceMode::Pod,
            uids: one.clone(),
            gids: one,
        };
        case.sandbox.namespaces.user = Some(user.clone());
        case.container.security.namespaces.user = Some(user);
        case.userns = Some("/run/userns".into());
    })
}

#[test]
fn namespaces() {
    let types = |case: Case| -> Vec<String> {
        let config = case.build().unwrap();
        let all = config["linux"]["namespaces"].as_array().unwrap().clone();
        all.iter().map(|n| n["type"].as_str().unwrap().into()).collect()
    };
    let host = Case::with(|case| {
        case.host_network = true;
        case.container.security.namespaces.pid = NamespaceMode::Node;
    });
    assert_eq!(types(host), ["ipc", "mount", "cgroup"]);
    assert_eq!(
        types(in_userns()),
        ["pid", "network", "ipc", "uts", "user", "mount", "cgroup"]
    );
    let mapping = json!([{"containerID": 0, "hostID": 65536, "size": 65536}]);
    in_userns().gives(&[
        ("/linux/uidMappings", mapping.clone()),
        ("/linux/gidMappings", mapping.clone()),
        ("/linux/namespaces/4", json!({"type": "user", "path": "/run/userns"})),
    ]);
    let mut host_network = in_userns();
    host_network.sandbox.namespaces.network = NamespaceMode::Node;
    let sys = at(&host_network.build().unwrap(), "/sys").unwrap();
    assert_eq!(
        sys,
        (
            "/sys".into(),
            strings(&["rbind", "rprivate", "nosuid", "noexec", "nodev", "rro"])
        )
    );

    let mut mapped = in_userns();
    let one = vec![IdMapping {
        host_id: 65536,
        container_id: 0,
        length: 65536,
    }];
    mapped.container.mounts = vec![Mount {
        uid_mappings: one.clone(),
        gid_mappings: one,
        ..mount("/m")
    }];
    let config = mapped.build().unwrap();
    let mounts = config["mounts"].as_array().unwrap();
    let found = mounts.iter().find(|m| m["destination"] == "/m").unwrap();
    assert_eq!((&found["uidMappings"], &found["gidMappings"]), (&mapping, &mapping));

    type Change = fn(&mut Case);
    let changes: [(&str, Change); 6] = [
        ("user: must equal", |case| {
            case.container.security.namespaces.user = None
        }),
        ("user: the sandbox's user namespace is not", |case| case.userns = None),
        ("user.uids: must be exactly one", |case| {
            both(case, |user| user.uids.push(IdMapping::default()))
        }),
        ("user.gids: must map id 0", |case| {
            both(case, |user| user.gids[0].container_id = 1)
        }),
        ("user.mode: must be Pod", |case| {
            both(case, |user| user.mode = NamespaceMode::Container)
        }),
        ("targetId: must name", |case| {
            case.container.security.namespaces.pid = NamespaceMode::Target
        }),
    ];
    for (text, change) in changes {
        let mut case = in_userns();
        change(&mut case);
        case.fails(&format!("spec.security.namespaces.{text}"));
    }
}

fn both(case: &mut Case, change: fn(&mut UserNamespace)) {
    for namespaces in [&mut case.sandbox.namespaces, &mut case.container.security.namespaces] {
        namespaces.user.as_mut().map(change);
    }
}

#[test]
fn limits() {
    Case::with(|case| {
        let r = &mut case.container.resources;
        (r.cpu_shares, r.cpu_quota, r.cpu_period) = (1024, 50000, 100000);
        (r.cpuset_cpus, r.cpuset_mems) = ("0-1".into(), "0".into());
        r.hugepages = [("2MB".to_string(), 4 << 20), ("1GB".to_string(), 1 << 30)].into();
        r.unified = [("memory.high".to_string(), "max".to_string())].into();
    })
    .gives(&[
        (
            "/linux/resources/cpu",
            json!({"shares": 1024, "quota": 50000, "period": 100000, "cpus": "0-1", "mems": "0"}),
        ),
        (
            "/linux/resources/hugepageLimits",
            json!([{"pageSize": "2MB", "limit": 4 << 20}]),
        ),
        ("/linux/resources/unified", json!({"memory.high": "max"})),
    ]);
    // limit, swap limit, swap accounting, v2: memory, unified
    for (limit, swap, accounting, v2, memory, unified) in [
        (
            100,
            0,
            true,
            true,
            json!({"limit": 100, "swap": 100}),
            json!({"memory.swap.max": "0"}),
        ),
        (100, 0, true, false, json!({"limit": 100, "swap": 100}), Value::Null),
        (100, 0, false, true, json!({"limit": 100}), Value::Null),
        (100, 300, true, true, json!({"limit": 100, "swap": 300}), Value::Null),
        (100, 300, false, true, json!({"limit": 100}), Value::Null),
        (100, -1, true, true, json!({"limit": 100, "swap": -1}), Value::Null),
        (-1, 0, true, true, json!({"limit": -1, "swap": -1}), Value::Null),
        (-1, 0, false, true, Value::Null, Value::Null),
        (0, -1, true, true, Value::Null, Value::Null),
        (0, 0, true, true, Value::Null, Value::Null),
    ] {
        let case = Case::with(|case| {
            (case.host.swap_accounting, case.host.cgroup_v2) = (accounting, v2);
            (
                case.container.resources.memory_limit,
                case.container.resources.memory_swap_limit,
            ) = (limit, swap);
        });
        case.gives(&[
            ("/linux/resources/memory", memory),
            ("/linux/resources/unified", unified),
        ]);
    }
    let own = Case::with(|case| {
        case.container.resources.memory_limit = 100;
        case.container.resources.unified = [("memory.swap.max".to_string(), "5".to_string())].into();
    });
    own.gives(&[("/linux/resources/unified", json!({"memory.swap.max": "5"}))]);

    type Change = fn(&mut state::container::Resources);
    let bad: [(&str, Change); 8] = [
        ("memorySwapLimit: needs", |r| r.memory_swap_limit = 5),
        ("memorySwapLimit: 5 is below", |r| {
            (r.memory_limit, r.memory_swap_limit) = (6, 5)
        }),
        ("memorySwapLimit: must", |r| r.memory_swap_limit = -2),
        ("memoryLimit: must", |r| r.memory_limit = -2),
        ("cpuQuota: must", |r| r.cpu_quota = -2),
        ("cpuShares: must", |r| r.cpu_shares = -1),
        ("unified[a/b.c]: is not", |r| {
            r.unified = [("a/b.c".to_string(), String::new())].into()
        }),
        ("unified[cgroup.kill]: is not", |r| {
            r.unified = [("cgroup.kill".to_string(), "1".into())].into()
        }),
    ];
    for (text, change) in bad {
        let case = Case::with(|case| change(&mut case.container.resources));
        case.fails(&format!("spec.resources.{text}"));
    }
    let v1 = Case::with(|case| {
        case.host.cgroup_v2 = false;
        case.container.resources.unified = [("memory.high".to_string(), "1".to_string())].into();
    });
    v1.fails("spec.resources.unified: raw cgroup files need cgroup v2");
}

#[test]
fn security_modules() {
    let localhost = |name: &str| Some(Profile::Localhost { reference: name.into() });
    let default = Some(Profile::RuntimeDefault);
    let loaded = Some(strings(&["reconcile-default", "mine"]));
    // loaded, wish, privileged: profile or the error's text
    for (host, wish, privileged, want) in [
        (&None, None, false, Ok(Value::Null)),
        (&None, Some(Profile::Unconfined), false, Ok(Value::Null)),
        (&None, default.clone(), false, Err("AppArmor is off")),
        (&None, localhost("mine"), false, Err("AppArmor is off")),
        (&loaded, None, false, Ok(json!("reconcile-default"))),
        (&loaded, default.clone(), false, Ok(json!("reconcile-default"))),
        (&loaded, None, true, Ok(Value::Null)),
        (&loaded, default.clone(), true, Ok(Value::Null)),
        (&loaded, localhost("mine"), true, Ok(json!("mine"))),
        (&loaded, localhost("other"), false, Err("`other` is not loaded")),
        (&loaded, Some(Profile::Unconfined), false, Ok(Value::Null)),
        (&Some(Vec::new()), None, false, Ok(Value::Null)),
        (
            &Some(Vec::new()),
            default.clone(),
            false,
            Err("reconcile-default is not loaded"),
        ),
    ] {
        let case = Case::with(|case| {
            case.host.apparmor = host.clone();
            case.container.security.apparmor = wish;
            (case.container.security.privileged, case.sandbox.security.privileged) = (privileged, privileged);
        });
        match want {
            Ok(profile) => case.gives(&[("/process/apparmorProfile", profile)]),
            Err(text) => case.fails(text),
        }
    }
    let selinux = |level: &str| {
        Some(SeLinux {
            level: level.into(),
            ..Default::default()
        })
    };
    let case = |on: bool, privileged: bool, level: &str| {
        Case::with(|case| {
            case.host.selinux = on;
            case.container.security.selinux = selinux(level);
            (case.container.security.privileged, case.sandbox.security.privileged) = (privileged, privileged);
        })
    };
    let label = json!("system_u:system_r:container_t:s0:c1,c2");
    case(true, false, "s0:c1,c2").gives(&[("/process/selinuxLabel", label.clone())]);
    case(true, true, "s0:c1,c2").gives(&[("/process/selinuxLabel", Value::Null)]);
    case(false, false, "s0:c1,c2").gives(&[("/process/selinuxLabel", Value::Null)]);
    case(false, false, "high").fails("spec.security.selinux.level: `high`");
    let inherited = Case::with(|case| {
        case.host.selinux = true;
        case.sandbox.security.selinux = selinux("s0:c1,c2");
    });
    inherited.gives(&[("/process/selinuxLabel", label)]);
}

#[test]
fn destinations_are_compared_without_detours() {
    for (path, want) in [("/a//b/./c/", "/a/b/c"), ("/a/../../b", "/b"), ("/", "/"), ("/..", "/")] {
        assert_eq!(mounts::clean(Path::new(path)), PathBuf::from(want), "{path}");
    }
}
