//! Namespaces, limits, what cannot be; `tests/golden` has whole configurations.

use state::sandbox::{IdMapping, NamespaceMode, UserNamespace};

use super::*;

#[test]
fn privileged_without_devices() {
    let bare = Case::with(|case| {
        case.container.security.privileged = true;
        case.sandbox.security.privileged = true;
        case.handler.privileged_without_host_devices = true;
    });
    bare.gives(&[
        ("/linux/devices", json!([])),
        ("/linux/resources/devices/0", json!({"allow": false, "access": "rwm"})),
    ]);
    Case::with(|case| case.container.security.privileged = true).fails("spec.security.privileged: needs a sandbox");
}

#[test]
fn devices_by_name_are_looked_up_first() {
    Case::with(|case| case.container.cdi_devices = strings(&["v/x=1"])).fails("spec.cdiDevices[v/x=1]: was not");
}

#[test]
fn hooks_that_nobody_runs_are_refused() {
    let hooked = |foreign: Option<Foreign>| {
        Case::with(|case| {
            let mut hook = oci_spec::runtime::Hook::default();
            hook.set_path("/bin/hook".into());
            case.cdi.hooks.set_poststop(Some(vec![hook]));
            case.handler.foreign = foreign;
        })
    };
    hooked(None).fails("spec.cdiDevices: hooks of poststart and poststop");
    hooked(Some(Foreign::default())).gives(&[("/hooks/poststop/0/path", json!("/bin/hook"))]);
}

fn base(part: Value) -> std::sync::Arc<Base> {
    let mut whole = part;
    whole["ociVersion"] = "1.0.2".into();
    Base::parse(whole.to_string().as_bytes()).unwrap().into()
}

#[test]
fn hooks_of_the_base_come_first() {
    Case::with(|case| {
        let mut hook = oci_spec::runtime::Hook::default();
        hook.set_path("/bin/device".into());
        case.cdi.hooks.set_poststop(Some(vec![hook]));
        case.handler.base = base(json!({"hooks": {"poststop": [{"path": "/b"}], "prestart": [{"path": "/p"}]}}));
        case.handler.foreign = Some(Foreign::default());
    })
    .gives(&[
        ("/hooks/poststop", json!([{"path": "/b"}, {"path": "/bin/device"}])),
        ("/hooks/prestart", json!([{"path": "/p"}])),
    ]);
}

/// A namespace of the host's is not the base's to change.
#[test]
fn sysctls_of_the_base_need_a_namespace_of_the_pod() {
    let sysctls = json!({"linux": {"sysctl": {"net.core.somaxconn": "7", "kernel.sem": "1 2 3 4"}}});
    let host = Case::with(|case| {
        case.handler.base = base(sysctls.clone());
        case.host_network = true;
    });
    host.gives(&[("/linux/sysctl", json!({"kernel.sem": "1 2 3 4"}))]);
    let asked = Case::with(|case| {
        case.handler.base = base(sysctls);
        case.sandbox.sysctls = [
            ("net.core.somaxconn".into(), "8".into()),
            ("kernel.sem".into(), "9".into()),
        ]
        .into();
    });
    asked.gives(&[("/linux/sysctl", Value::Null)]);
}

#[test]
fn devices_of_the_base() {
    let device = json!({"path": "/dev/b", "type": "b", "major": 8, "minor": 1});
    let rule = json!({"allow": true, "type": "b", "major": 8, "minor": 1, "access": "r"});
    let given = base(json!({"linux": {"devices": [device], "resources": {"devices": [rule]}}}));
    let node = json!({"path": "/dev/b", "type": "b", "major": 8, "minor": 1, "fileMode": 0o666, "uid": 0, "gid": 0});
    Case::with(|case| case.handler.base = given.clone()).gives(&[
        ("/linux/devices", json!([node])),
        ("/linux/resources/devices/0/allow", json!(false)),
        ("/linux/resources/devices/1", rule),
        ("/linux/resources/devices/2/access", json!("m")),
    ]);
    let privileged = Case::with(|case| {
        case.handler.base = given.clone();
        (case.container.security.privileged, case.sandbox.security.privileged) = (true, true);
    });
    let all = json!([{"allow": true, "access": "rwm"}]);
    privileged.gives(&[
        ("/linux/devices/1/path", json!("/dev/b")),
        ("/linux/resources/devices", all),
    ]);
    let mut mapped = in_userns();
    mapped.handler.base = given;
    let config = mapped.build().unwrap();
    assert_eq!(config["linux"]["devices"], json!([]));
    assert_eq!(at(&config, "/dev/b").unwrap().0, "/dev/b");
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
        ("/linux/seccomp", serde_json::to_value(LinuxSeccomp::default()).unwrap()),
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
