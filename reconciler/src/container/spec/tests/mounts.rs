//! The mount table; `tests/golden` has whole ones.

use state::container::Propagation;

use super::*;

/// They stand where nothing else is mounted.
#[test]
fn mounts_of_the_base_are_the_least() {
    let tmpfs = |path: &str| json!({"destination": path, "type": "tmpfs", "source": "base"});
    let all: Vec<_> = [
        "/data",
        "/more/deep",
        "/more",
        "/etc/hosts",
        "/dev/x",
        "/vol",
        "/run",
        "/sys/fs/cgroup/x",
    ]
    .map(tmpfs)
    .into();
    let base = json!({"ociVersion": "1.0.2", "mounts": all});
    let base = std::sync::Arc::new(Base::parse(base.to_string().as_bytes()).unwrap());
    let build = |wish: &[&str]| {
        let case = Case::with(|case| {
            case.handler.base = base.clone();
            case.container.mounts = wish.iter().map(|path| mount(path)).collect();
            case.volumes = [("/vol".to_owned(), "/volumes/1".into())].into();
        });
        case.build().unwrap()
    };
    let source = |config: &Value, path: &str| at(config, path).map(|(source, _)| source);
    let config = build(&["/data"]);
    for (path, want) in [
        ("/data", Some("/data")),
        ("/more", Some("base")),
        ("/more/deep", Some("base")),
        ("/etc/hosts", Some("/s/hosts")),
        ("/dev/x", Some("base")),
        ("/vol", Some("/volumes/1")),
        ("/run", None),
        ("/sys/fs/cgroup/x", Some("base")),
    ] {
        assert_eq!(source(&config, path).as_deref(), want, "{path}");
    }
    let place = |path: &str| {
        config["mounts"]
            .as_array()
            .unwrap()
            .iter()
            .position(|m| m["destination"] == path)
    };
    assert!(place("/more") < place("/more/deep"));
    let config = build(&["/dev", "/sys/fs/cgroup"]);
    assert_eq!(
        (source(&config, "/dev/x"), source(&config, "/sys/fs/cgroup/x")),
        (None, None)
    );
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
    let slave = Case::with(|case| {
        case.container.mounts = vec![mount("/m")];
        case.container.mounts[0].propagation = Propagation::HostToContainer;
    });
    slave.gives(&[("/linux/rootfsPropagation", json!("slave"))]);

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
fn destinations_are_compared_without_detours() {
    for (path, want) in [("/a//b/./c/", "/a/b/c"), ("/a/../../b", "/b"), ("/", "/"), ("/..", "/")] {
        assert_eq!(
            super::super::mounts::clean(Path::new(path)),
            PathBuf::from(want),
            "{path}"
        );
    }
}
