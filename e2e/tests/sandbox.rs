//! PodSandbox: what a ready one has, how it stops, what its name and id mean.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use e2e::leaks::{Census, Process};
use e2e::node::Node;
use e2e::pods::{self, HELLO};
use e2e::v1::*;
use e2e::{tools, v1};
use tonic::Code;

fn namespace(pid: i32, kind: &str) -> Result<String> {
    let link = fs::read_link(format!("/proc/{pid}/ns/{kind}")).with_context(|| format!("{kind} of {pid}"))?;
    Ok(link.display().to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ready_sandbox_has_what_the_status_says() -> Result<()> {
    let node = Node::start().await?;
    let pod = node.pod("first");
    let id = node.cri.run_sandbox(&pod).await?;
    assert_eq!(id.len(), 64);
    let status = node.cri.sandbox(&id).await?;
    assert_eq!(status.state(), PodSandboxState::SandboxReady);
    assert!(status.created_at > 0);
    assert_eq!(status.metadata, pod.metadata);
    assert_eq!(status.labels, pod.labels);
    assert!(
        node.cri.ip(&id).await?.is_ipv4(),
        "the primary address is the first IPv4"
    );
    let list = node.cri.sandboxes(None).await?;
    assert_eq!(list.len(), 1);
    assert_eq!((&list[0].id, list[0].created_at), (&id, status.created_at));

    let pause = node.cri.sandbox_pid(&id).await?;
    let host = std::process::id() as i32;
    for kind in ["net", "ipc", "uts", "mnt"] {
        assert_ne!(namespace(pause, kind)?, namespace(host, kind)?, "{kind}");
    }
    let census = Census::of(&node.mark())?;
    let pins: Vec<_> = census.kind("netns").collect();
    assert_eq!(pins, [format!("/run/netns/rc-{}-{id}", node.instance())]);
    let name = pins[0].rsplit('/').next().unwrap_or_default();
    let out = tools::check(Command::new("ip").args(["netns", "exec", name, "ip", "-o", "addr", "show", "eth0"]))?;
    let ip = node.cri.ip(&id).await?.to_string();
    assert!(String::from_utf8_lossy(&out.stdout).contains(&ip));
    let out = tools::check(Command::new("ip").args(["netns", "exec", name, "hostname"]))?;
    ensure!(!out.stdout.is_empty(), "a netns has a shell");
    let lo = tools::check(Command::new("ip").args(["-n", name, "-o", "link", "show", "lo"]))?;
    assert!(String::from_utf8_lossy(&lo.stdout).contains("UP"), "loopback is up");

    let shim = node.shims()?;
    assert_eq!(shim.len(), 1, "one shim a pod");
    let line = Process::read(shim[0]).context("the shim")?;
    for word in ["e2e", "first", &id] {
        assert!(
            line.command.split(' ').any(|arg| arg == word),
            "{word} in {}",
            line.command
        );
    }
    assert_eq!(line.parent, 1, "the shim belongs to init, not to the daemon");

    node.cri.stop_sandbox(&id).await?;
    let status = node.cri.sandbox(&id).await?;
    assert_eq!(status.state(), PodSandboxState::SandboxNotready);
    assert_eq!(
        status.network.unwrap_or_default().ip,
        "",
        "no address once the network is gone"
    );
    let census = Census::of(&node.mark())?;
    assert_eq!(
        census.kind("netns").count() + node.shims()?.len(),
        0,
        "a stopped sandbox holds nothing: {census}"
    );
    node.cri.remove_sandbox(&id).await?;
    assert_eq!(
        node.cri.sandbox(&id).await.map_err(|status| status.code()).err(),
        Some(Code::NotFound)
    );
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn host_network_has_no_netns_and_no_address() -> Result<()> {
    let node = Node::start().await?;
    let id = node.cri.run_sandbox(&pods::host_network(node.pod("host"))).await?;
    let status = node.cri.sandbox(&id).await?;
    assert_eq!(status.network.unwrap_or_default().ip, "");
    let options = status
        .linux
        .and_then(|linux| linux.namespaces)
        .and_then(|all| all.options)
        .unwrap_or_default();
    assert_eq!(options.network(), NamespaceMode::Node);
    let host = std::process::id() as i32;
    let pause = node.cri.sandbox_pid(&id).await?;
    assert_eq!(namespace(pause, "net")?, namespace(host, "net")?);
    assert_eq!(
        namespace(pause, "uts")?,
        namespace(host, "uts")?,
        "host network has the host's name too"
    );
    assert_ne!(namespace(pause, "ipc")?, namespace(host, "ipc")?);
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_kills_running_containers_and_both_stop_and_remove_repeat() -> Result<()> {
    let node = Node::start().await?;
    let pod = node.pod("busy");
    let id = node.cri.run_sandbox(&pod).await?;
    let mut pids = Vec::new();
    for name in ["a", "b", "c"] {
        let container = node
            .cri
            .launch(&id, &pod, &pods::container(name, HELLO, &["/hello", "sleep", "1000"]))
            .await?;
        pids.push((container.clone(), node.cri.container_pid(&container).await?));
    }
    node.cri.stop_sandbox(&id).await?;
    for (container, pid) in &pids {
        assert!(
            Process::read(*pid).is_none_or(|process| process.state == 'Z'),
            "{pid} survived"
        );
        let status = node.cri.container(container).await?;
        assert_eq!(
            (status.state(), status.exit_code),
            (ContainerState::ContainerExited, 137)
        );
    }
    node.cri.stop_sandbox(&id).await.context("stopped already")?;
    let starts = node.cri.start(&pids[0].0).await.map_err(|status| status.code());
    assert_eq!(
        starts,
        Err(Code::FailedPrecondition),
        "nothing starts in a stopped sandbox"
    );
    let created = node.cri.create(&id, &pod, &pods::container("late", HELLO, &[])).await;
    assert_eq!(created.map_err(|status| status.code()), Err(Code::FailedPrecondition));
    node.cri.remove_sandbox(&id).await?;
    node.cri.remove_sandbox(&id).await.context("removed already")?;
    node.cri.stop_sandbox(&id).await.context("unknown now")?;
    node.cri.remove_sandbox(&"0".repeat(64)).await.context("never known")?;
    assert!(node.cri.containers(None).await?.is_empty());
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn create_racing_stop_leaves_no_process_and_no_container_above_its_sandbox() -> Result<()> {
    let node = Node::start().await?;
    for round in 0..10 {
        let pod = node.pod("race");
        let id = node.cri.run_sandbox(&pod).await?;
        let mut racers = tokio::task::JoinSet::new();
        for n in 0..4 {
            let (cri, pod, id) = (node.cri.clone(), pod.clone(), id.clone());
            racers.spawn(async move {
                let config = pods::container(&format!("c{n}"), HELLO, &["/hello", "sleep", "1000"]);
                let container = cri.create(&id, &pod, &config).await?;
                cri.start(&container).await
            });
        }
        if round % 2 == 1 {
            tokio::time::sleep(std::time::Duration::from_millis(round)).await;
        }
        node.cri.stop_sandbox(&id).await?;
        for outcome in racers.join_all().await {
            let expected = [Code::FailedPrecondition, Code::Aborted, Code::NotFound];
            if let Err(status) = outcome {
                assert!(expected.contains(&status.code()), "round {round}: {status:?}");
            }
        }
        for container in node.cri.containers(None).await? {
            let status = node.cri.container(&container.id).await?;
            assert_ne!(
                status.state(),
                ContainerState::ContainerRunning,
                "runs in a stopped sandbox"
            );
        }
        node.cri.remove_sandbox(&id).await?;
    }
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_sandbox_twice_joins_or_is_refused_with_the_id() -> Result<()> {
    let node = Node::start().await?;
    let pod = node.pod("twice");
    let (a, b, c) = tokio::join!(
        node.cri.run_sandbox(&pod),
        node.cri.run_sandbox(&pod),
        node.cri.run_sandbox(&pod)
    );
    let outcomes = [a, b, c];
    let ids: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().ok()).collect();
    assert!(!ids.is_empty(), "{outcomes:?}");
    assert!(ids.iter().all(|id| *id == ids[0]), "one tuple, one sandbox: {ids:?}");
    let refused = node.cri.run_sandbox(&pod).await.expect_err("delivered already");
    assert_eq!(refused.code(), Code::AlreadyExists);
    assert!(
        refused.message().contains(ids[0].as_str()),
        "names the holder: {}",
        refused.message()
    );
    assert_eq!(node.cri.sandboxes(None).await?.len(), 1);
    assert_eq!(node.shims()?.len(), 1);
    node.cri.stop_sandbox(ids[0]).await?;
    node.cri.remove_sandbox(ids[0]).await?;
    let again = node.cri.run_sandbox(&pod).await.context("the name is free again")?;
    assert_ne!(&again, ids[0]);
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn prefixes_filters_and_unknown_ids() -> Result<()> {
    let node = Node::start().await?;
    let mut ids = Vec::new();
    for name in ["one", "two"] {
        let mut pod = pods::host_network(node.pod(name));
        pod.labels.insert("app".into(), name.into());
        ids.push(node.cri.run_sandbox(&pod).await?);
    }
    let shortest = (1..64).find(|&n| ids[0][..n] != ids[1][..n]).unwrap_or(64);
    assert_eq!(node.cri.sandbox(&ids[0][..shortest]).await?.id, ids[0]);
    for (id, code) in [
        ("", Code::InvalidArgument),
        ("zz", Code::NotFound),
        (&"f".repeat(63), Code::NotFound),
    ] {
        assert_eq!(
            node.cri.sandbox(id).await.map_err(|status| status.code()).err(),
            Some(code),
            "{id:?}"
        );
    }
    let mut filter = PodSandboxFilter {
        id: ids[1][..shortest.max(13)].into(),
        ..Default::default()
    };
    assert_eq!(node.cri.sandboxes(Some(filter.clone())).await?[0].id, ids[1]);
    filter.label_selector.insert("app".into(), "one".into());
    assert!(node.cri.sandboxes(Some(filter)).await?.is_empty(), "filters are ANDed");
    let by_label = PodSandboxFilter {
        label_selector: [("app".into(), "one".into())].into(),
        ..Default::default()
    };
    assert_eq!(node.cri.sandboxes(Some(by_label)).await?[0].id, ids[0]);
    node.cri.stop_sandbox(&ids[0]).await?;
    let state = Some(PodSandboxStateValue {
        state: PodSandboxState::SandboxReady.into(),
    });
    let ready = node
        .cri
        .sandboxes(Some(PodSandboxFilter {
            state,
            ..Default::default()
        }))
        .await?;
    assert_eq!(ready.iter().map(|sandbox| &sandbox.id).collect::<Vec<_>>(), [&ids[1]]);
    let all = node.cri.sandboxes(None).await?;
    assert!(all[0].created_at > all[1].created_at, "newest first");
    node.finish().await
}

/// Directories of one cgroup path in all hierarchies, made here as kubelet makes a pod's.
fn make_parent(path: &str) -> Result<Vec<PathBuf>> {
    let base = PathBuf::from("/sys/fs/cgroup");
    let unified = base.join("cgroup.controllers").exists();
    let hierarchies = if unified {
        vec![base]
    } else {
        fs::read_dir(base)?.flatten().map(|e| e.path()).collect()
    };
    let mut made = Vec::new();
    for hierarchy in hierarchies.iter().filter(|path| path.join("cgroup.procs").exists()) {
        let dir = hierarchy.join(path);
        fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if let Ok(value) = fs::read(hierarchy.join(file)) {
                let _ = fs::write(dir.join(file), value);
            }
        }
        made.push(dir);
    }
    Ok(made)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cgroup_parent_stays_the_callers() -> Result<()> {
    let node = Node::start().await?;
    let parent = format!("e2e-{}-{}", std::process::id(), line!());
    let made = make_parent(&parent)?;
    let mut pod = pods::host_network(node.pod("parent"));
    pod.linux.get_or_insert_default().cgroup_parent = format!("/{parent}");
    let id = node.cri.run_sandbox(&pod).await?;
    let container = node
        .cri
        .launch(&id, &pod, &pods::container("c", HELLO, &["/hello", "sleep", "1000"]))
        .await?;
    let pid = node.cri.container_pid(&container).await?;
    let lines = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let placed = lines
        .lines()
        .filter(|line| line.contains(&format!("/{parent}/")))
        .count();
    assert!(placed >= made.len().min(2), "{lines}");
    let shim = fs::read_to_string(format!("/proc/{}/cgroup", node.shims()?[0]))?;
    assert!(!shim.contains(&parent), "the shim is outside the pod's limits: {shim}");
    node.cri.remove_sandbox(&id).await?;
    for dir in &made {
        let below = fs::read_dir(dir)?
            .flatten()
            .filter(|entry| entry.path().is_dir())
            .count();
        assert_eq!(below, 0, "something is left below {}", dir.display());
        fs::remove_dir(dir).with_context(|| format!("{} is not empty", dir.display()))?;
    }
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn files_hostname_and_sysctls_reach_the_containers() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let mut pod = node.pod("files");
    pod.hostname = "box".into();
    pod.dns_config = Some(DnsConfig {
        servers: vec!["192.0.2.53".into()],
        searches: vec!["a.test".into(), "b.test".into()],
        options: vec!["ndots:2".into()],
    });
    let linux = pod.linux.get_or_insert_default();
    linux.sysctls.insert("kernel.shm_rmid_forced".into(), "1".into());
    let id = node.cri.run_sandbox(&pod).await?;
    let script = "cat /etc/resolv.conf; hostname; cat /etc/hostname; echo $HOSTNAME; \
                  cat /proc/sys/kernel/shm_rmid_forced; cat /proc/sys/net/ipv4/ip_unprivileged_port_start; \
                  grep ' /dev/shm ' /proc/mounts; grep -c localhost /etc/hosts";
    let container = node.cri.launch(&id, &pod, &pods::shell("show", script)).await?;
    let status = node.cri.exited(&container).await?;
    let lines = pods::log_texts(&status.log_path)?;
    let expected = [
        "search a.test b.test",
        "nameserver 192.0.2.53",
        "options ndots:2",
        "box",
        "box",
        "box",
        "1",
        "0",
    ];
    assert_eq!(lines[..8], expected, "{lines:#?}");
    assert!(
        lines[8].contains("tmpfs") && lines[8].contains("65536k"),
        "{}",
        lines[8]
    );
    assert_ne!(lines[9], "0", "the host's /etc/hosts is there");

    let mut bad = node.pod("bad-sysctl");
    bad.linux
        .get_or_insert_default()
        .sysctls
        .insert("vm.swappiness".into(), "1".into());
    let refused = node.cri.run_sandbox(&bad).await.expect_err("not namespaced");
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(refused.message().contains("vm.swappiness"), "{}", refused.message());
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn version_status_and_runtime_config() -> Result<()> {
    let node = Node::start().await?;
    let version = node.cri.version().await?;
    assert_eq!(
        (version.version.as_str(), version.runtime_api_version.as_str()),
        ("0.1.0", "v1")
    );
    assert_eq!(version.runtime_name, "reconcile");
    assert!(!version.runtime_version.is_empty());
    let mut runtime = node.cri.runtime.clone();
    let status = runtime.status(StatusRequest { verbose: true }).await?.into_inner();
    let conditions = status.status.context("status")?.conditions;
    for kind in ["RuntimeReady", "NetworkReady"] {
        let found = conditions
            .iter()
            .find(|condition| condition.r#type == kind)
            .context(kind)?;
        assert!(found.status, "{found:?}");
    }
    let names: Vec<_> = status
        .runtime_handlers
        .iter()
        .map(|handler| handler.name.as_str())
        .collect();
    assert!(names.contains(&""), "the default handler: {names:?}");
    let config = runtime.runtime_config(RuntimeConfigRequest {}).await?.into_inner();
    assert_eq!(
        config.linux.context("linux")?.cgroup_driver(),
        v1::CgroupDriver::Cgroupfs
    );
    let network = NetworkConfig {
        pod_cidr: "10.9.0.0/24".into(),
    };
    let config = v1::RuntimeConfig {
        network_config: Some(network),
    };
    runtime
        .update_runtime_config(UpdateRuntimeConfigRequest {
            runtime_config: Some(config),
        })
        .await?;
    let config = v1::RuntimeConfig {
        network_config: Some(NetworkConfig { pod_cidr: "ten".into() }),
    };
    let refused = runtime
        .update_runtime_config(UpdateRuntimeConfigRequest {
            runtime_config: Some(config),
        })
        .await;
    assert_eq!(
        refused.map_err(|status| status.code()).err(),
        Some(Code::InvalidArgument)
    );
    let events = runtime
        .get_container_events(GetEventsRequest {})
        .await
        .map_err(|status| (status.code(), status.message().to_owned()));
    if let Err((code, message)) = events {
        assert_eq!(code, Code::Unimplemented);
        assert!(message.contains("GetContainerEvents"), "it names itself: {message}");
    }
    node.finish().await
}
