//! Namespaces, devices, limits, privileged.

use state::sandbox::{IdMapping, NamespaceMode, UserNamespace};

use super::*;

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
    bare.gives(&[
        ("/linux/devices", json!([])),
        ("/linux/resources/devices/0", json!({"allow": false, "access": "rwm"})),
    ]);
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
    Case::with(|case| case.container.cdi_devices = strings(&["v/x=1"])).fails("spec.cdiDevices[v/x=1]: was not");
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
fn devices_by_name() {
    let mut hook = oci_spec::runtime::Hook::default();
    hook.set_path("/bin/hook".into());
    let mut hooks = Hooks::default();
    hooks.set_create_runtime(Some(vec![hook]));
    let device = |path: &str, minor| ResolvedDevice {
        node: node("/dev/gpu", host::DeviceKind::Char, 195, minor),
        container_path: path.into(),
        permissions: "rw".into(),
    };
    let case = Case::with(|case| {
        case.container.cdi_devices = strings(&["v/gpu=0"]);
        case.container.mounts = vec![mount("/lib/b")];
        case.user.groups = vec![5];
        case.devices = vec![device("/dev/b", 1)];
        case.cdi = cdi::Edits {
            names: ["v/gpu=0".to_string()].into(),
            env: strings(&["GPU=0"]),
            devices: vec![device("/dev/a", 0)],
            mounts: ["/lib/a", "/lib/b"]
                .map(|path| super::super::mounts::bind(Path::new(path), Path::new("/gpu"), ["ro"]))
                .into(),
            hooks,
            groups: vec![44, 5],
        };
    });
    let config = case.build().unwrap();
    assert_eq!(config["process"]["env"].as_array().unwrap()[2], "GPU=0");
    assert_eq!(config["process"]["user"]["additionalGids"], json!([5, 44]));
    assert_eq!(config["hooks"]["createRuntime"][0]["path"], "/bin/hook");
    assert_eq!(config["linux"]["devices"][0]["path"], "/dev/a");
    assert_eq!(config["linux"]["devices"][1]["path"], "/dev/b");
    let rule = json!({"allow": true, "type": "c", "major": 195, "minor": 0, "access": "rw"});
    assert!(
        config["linux"]["resources"]["devices"]
            .as_array()
            .unwrap()
            .contains(&rule)
    );
    assert_eq!(at(&config, "/lib/a").unwrap().0, "/gpu");
    assert_eq!(
        at(&config, "/lib/b").unwrap().0,
        "/data",
        "the request's own mount stands"
    );
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

/// A runtime of its own gets what the OCI says in the OCI's words, and is asked for nothing that it cannot do.
#[test]
fn a_foreign_runtime() {
    let foreign = |change: fn(&mut Case)| {
        Case::with(|case| {
            case.handler.foreign = Some(Foreign {
                seccomp: Some(Default::default()),
                ..Default::default()
            });
            change(case);
        })
    };
    foreign(|_| ()).gives(&[
        ("/ociVersion", json!("1.0.2")),
        ("/linux/rootfsPropagation", json!("rprivate")),
        ("/linux/seccomp/defaultAction", json!("SCMP_ACT_KILL")),
    ]);
    let v1 = foreign(|case| {
        case.host.cgroup_v2 = false;
        case.host.cgroup_v1 = vec!["/sys/fs/cgroup/memory".into()];
        case.handler.cgroup_writable = true;
    });
    let config = v1.build().unwrap();
    assert_eq!(
        at(&config, "/sys/fs/cgroup").unwrap().1,
        ["nosuid", "noexec", "nodev", "relatime", "ro"]
    );
    assert_eq!(at(&config, "/sys/fs/cgroup/memory"), None);
    let v2 = Case::with(|case| case.handler.cgroup_writable = true).build().unwrap();
    assert!(at(&v2, "/sys/fs/cgroup").unwrap().1.contains(&"rw".to_owned()));
    assert!(at(&v2, "/sys").unwrap().1.contains(&"ro".to_owned()));

    let recursive = |case: &mut Case| {
        let mut mount = mount("/data");
        (mount.readonly, mount.recursive_read_only) = (true, true);
        case.container.mounts = vec![mount];
    };
    foreign(recursive).fails("spec.mounts[0].recursiveReadOnly: RROUnsupported");
    let mut able = foreign(recursive);
    if let Some(foreign) = &mut able.handler.foreign {
        foreign.features.recursive_read_only = true;
    }
    assert!(
        at(&able.build().unwrap(), "/data")
            .unwrap()
            .1
            .contains(&"rro".to_owned())
    );
}
