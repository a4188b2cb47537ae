//! Container: its life from created to removed, exit codes and reasons, stop with grace, failed and forsaken starts.

use std::fs;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use e2e::client::within;
use e2e::leaks::{Census, Process, mounts};
use e2e::node::Node;
use e2e::pods::{self, HELLO, shell};
use e2e::v1::*;
use tonic::Code;

fn now() -> i64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos() as i64)
}

#[tokio::test(flavor = "multi_thread")]
async fn created_running_exited_removed() -> Result<()> {
    let node = Node::start().await?;
    let pod = pods::host_network(node.pod("life"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let config = pods::container("c", HELLO, &["/hello", "lines", "3"]);
    let id = node.cri.create(&sandbox, &pod, &config).await?;
    let status = node.cri.container(&id).await?;
    assert_eq!(status.state(), ContainerState::ContainerCreated);
    assert!(status.created_at > 0 && status.started_at == 0 && status.finished_at == 0);
    assert_eq!(
        node.processes()?.len(),
        2,
        "shim and pause only: nothing runs before start"
    );

    let before = now();
    node.cri.start(&id).await?;
    let status = node.cri.exited(&id).await?;
    assert_eq!((status.exit_code, status.reason.as_str()), (0, "Completed"));
    assert!(before <= status.started_at && status.started_at <= status.finished_at && status.finished_at <= now());
    assert_eq!(status.metadata, config.metadata);
    assert_eq!(status.labels, config.labels);
    assert!(
        status.image_ref.len() > 10 && status.image_id.starts_with("sha256:"),
        "{status:?}"
    );
    assert_eq!(status.log_path, format!("{}/c.log", pod.log_directory));
    assert_eq!(pods::log_texts(&status.log_path)?.len(), 3);
    let again = node.cri.start(&id).await.map_err(|status| status.code());
    assert_eq!(
        again,
        Err(Code::FailedPrecondition),
        "an ended container never starts again"
    );

    node.cri.remove(&id).await?;
    node.cri.remove(&id).await.context("removed already")?;
    node.cri.stop(&id, 0).await.context("unknown now")?;
    assert_eq!(
        node.cri.container(&id).await.map_err(|status| status.code()).err(),
        Some(Code::NotFound)
    );
    assert!(fs::metadata(&status.log_path).is_ok(), "the log belongs to the caller");
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn exit_codes_and_reasons() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = pods::host_network(node.pod("codes"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    for (n, (script, code, reason)) in [
        ("exit 0", 0, "Completed"),
        ("exit 7", 7, "Error"),
        ("exit 255", 255, "Error"),
        ("sh -c 'kill -SEGV $$'; exit $?", 139, "Error"),
    ]
    .into_iter()
    .enumerate()
    {
        let id = node
            .cri
            .launch(&sandbox, &pod, &shell(&format!("c{n}"), script))
            .await?;
        let status = node.cri.exited(&id).await?;
        assert_eq!((status.exit_code, status.reason.as_str()), (code, reason), "{script}");
        assert!(Census::of(&node.mark())?.kind("process").count() <= 3);
    }
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_sends_the_signal_once_waits_and_kills() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = pods::host_network(node.pod("grace"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let loops = "echo ready; while :; do sleep 0.05; done";
    let polite = node
        .cri
        .launch(
            &sandbox,
            &pod,
            &shell("polite", &format!("trap 'exit 3' TERM; {loops}")),
        )
        .await?;
    let counted = format!("trap 'echo got TERM' TERM; {loops}");
    let deaf = node.cri.launch(&sandbox, &pod, &shell("deaf", &counted)).await?;
    let log = |name: &str| format!("{}/{name}.log", pod.log_directory);
    for name in ["polite", "deaf"] {
        e2e::eventually(Duration::from_secs(10), async || {
            ensure!(
                pods::log_texts(log(name))?.contains(&"ready".to_owned()),
                "{name} is not up"
            );
            Ok(())
        })
        .await?;
    }
    let start = Instant::now();
    node.cri.stop(&polite, 20).await?;
    assert!(start.elapsed() < Duration::from_secs(5), "it ended by itself");
    assert_eq!(node.cri.container(&polite).await?.exit_code, 3);

    let start = Instant::now();
    let cri = node.cri.clone();
    let (first, second) = tokio::join!(node.cri.stop(&deaf, 30), async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        cri.stop(&deaf, 1).await
    });
    first?;
    second?;
    let took = start.elapsed();
    assert!(
        took > Duration::from_millis(900) && took < Duration::from_secs(10),
        "a shorter grace counts: {took:?}"
    );
    let status = node.cri.container(&deaf).await?;
    assert_eq!(
        (status.exit_code, status.state()),
        (137, ContainerState::ContainerExited)
    );
    let got = pods::log_texts(log("deaf"))?
        .into_iter()
        .filter(|text| text == "got TERM")
        .count();
    assert_eq!(got, 1, "the stop signal is sent once");

    let mut ints = shell("ints", &format!("trap 'exit 9' INT; {loops}"));
    ints.stop_signal = Signal::Sigint.into();
    let ints = node.cri.launch(&sandbox, &pod, &ints).await?;
    e2e::eventually(Duration::from_secs(10), async || {
        ensure!(!pods::log_texts(log("ints"))?.is_empty(), "not up");
        Ok(())
    })
    .await?;
    node.cri.stop(&ints, 20).await?;
    let status = node.cri.container(&ints).await?;
    assert_eq!((status.exit_code, status.stop_signal()), (9, Signal::Sigint));
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_fails_says_what_was_looked_up_and_frees_the_name() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = pods::host_network(node.pod("t02"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let id = node
        .cri
        .create(
            &sandbox,
            &pod,
            &pods::container("c", pods::BUSYBOX, &["no-such-program"]),
        )
        .await?;
    let error = node.cri.start(&id).await.expect_err("there is no such program");
    assert!(error.message().contains("no-such-program"), "{error:?}");
    let status = node.cri.container(&id).await?;
    assert_eq!(
        (status.state(), status.exit_code),
        (ContainerState::ContainerExited, 128)
    );
    assert_eq!(status.reason, "StartError");
    assert!(
        status.message.contains("no-such-program") && status.message.contains("/bin"),
        "{}",
        status.message
    );
    assert!(status.finished_at > 0);
    node.cri.remove(&id).await?;
    let id = node
        .cri
        .launch(&sandbox, &pod, &shell("c", "exit 0"))
        .await
        .context("same name, good command")?;
    assert_eq!(node.cri.exited(&id).await?.exit_code, 0);

    let absent = pods::container("d", "localhost/absent:1", &["/x"]);
    let refused = node
        .cri
        .create(&sandbox, &pod, &absent)
        .await
        .expect_err("no such image");
    assert_eq!(refused.code(), Code::NotFound, "{refused:?}");
    assert!(refused.message().contains("localhost/absent:1"), "{refused:?}");
    node.import(e2e::images::Image::busybox("localhost/absent:1")?.oci())
        .await?;
    let mut present = shell("d", "exit 0");
    present.image = absent.image;
    let id = node
        .cri
        .launch(&sandbox, &pod, &present)
        .await
        .context("a failed create leaves its name free")?;
    assert_eq!(node.cri.exited(&id).await?.exit_code, 0);
    assert_eq!(
        node.cri.containers(None).await?.len(),
        2,
        "one record a container, none of the failed create"
    );
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_duplicate_create_joins_while_undelivered_and_is_refused_after() -> Result<()> {
    let node = Node::start().await?;
    let pod = pods::host_network(node.pod("dup"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let config = pods::container("c", HELLO, &["/hello", "exit", "0"]);
    let outcomes = futures::future::join_all((0..4).map(|_| node.cri.create(&sandbox, &pod, &config))).await;
    let ids: Vec<_> = outcomes.iter().flatten().collect();
    assert!(!ids.is_empty() && ids.iter().all(|id| *id == ids[0]), "{outcomes:?}");
    let refused = node.cri.create(&sandbox, &pod, &config).await.expect_err("delivered");
    assert_eq!(refused.code(), Code::AlreadyExists);
    assert!(refused.message().contains(ids[0].as_str()), "{refused:?}");
    let mut next = config.clone();
    next.metadata.get_or_insert_default().attempt = 1;
    assert_ne!(
        &node
            .cri
            .create(&sandbox, &pod, &next)
            .await
            .context("another attempt, another container")?,
        ids[0]
    );
    node.finish().await
}

/// After its call has ended without an answer, a start either happened or never will: no state in between, no later
/// surprise (the caller has gone on to the next attempt by then).
#[tokio::test(flavor = "multi_thread")]
async fn a_start_whose_caller_has_left_runs_at_once_or_never() -> Result<()> {
    let node = Node::start().await?;
    let pod = pods::host_network(node.pod("left"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let (mut ran, mut never) = (0, 0);
    for n in 0..24u64 {
        let config = pods::container(&format!("c{n}"), HELLO, &["/hello", "sleep", "1000"]);
        let id = node.cri.create(&sandbox, &pod, &config).await?;
        let limit = Duration::from_micros(100 + n * 500);
        let request = within(
            limit,
            StartContainerRequest {
                container_id: id.clone(),
            },
        );
        let answer = tokio::time::timeout(limit, node.cri.runtime.clone().start_container(request)).await;
        let answered = matches!(answer, Ok(Ok(_)));
        let settled = e2e::eventually(Duration::from_secs(20), async || {
            let status = node.cri.container(&id).await?;
            ensure!(status.state() != ContainerState::ContainerCreated, "still created");
            Ok(status)
        })
        .await;
        let Ok(status) = settled else {
            // The request may have been dropped before the daemon read it: then nothing was asked, and nothing runs.
            assert!(!answered);
            assert_eq!(node.cri.container(&id).await?.state(), ContainerState::ContainerCreated);
            never += 1;
            continue;
        };
        match status.state() {
            ContainerState::ContainerRunning => {
                assert!(Process::read(node.cri.container_pid(&id).await?).is_some());
                ran += 1;
            }
            ContainerState::ContainerExited => {
                assert!(!answered, "answered, yet never run: {status:?}");
                assert_eq!(
                    (status.exit_code, status.reason.as_str()),
                    (128, "StartError"),
                    "{status:?}"
                );
                never += 1;
            }
            other => bail!("{other:?}"),
        }
    }
    println!("of 24 starts with a caller who left, {ran} ran and {never} never will");
    let before: Vec<_> = states(&node).await?;
    node.cri.version().await?;
    assert_eq!(before, states(&node).await?, "nothing began later");
    node.finish().await
}

async fn states(node: &Node) -> Result<Vec<(String, i32)>> {
    Ok(node
        .cri
        .containers(None)
        .await?
        .into_iter()
        .map(|container| (container.id, container.state))
        .collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_limit_oom_and_update() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = pods::host_network(node.pod("oom"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let limited = |config: ContainerConfig, bytes: i64| {
        let mut config = config;
        let resources = LinuxContainerResources {
            memory_limit_in_bytes: bytes,
            ..Default::default()
        };
        config.linux.get_or_insert_default().resources = Some(resources);
        config
    };
    let hungry = limited(
        shell("hungry", "x=0123456789abcdef; while :; do x=$x$x; done"),
        16 << 20,
    );
    let id = node.cri.launch(&sandbox, &pod, &hungry).await?;
    let status = node.cri.exited(&id).await?;
    assert_eq!(
        (status.exit_code, status.reason.as_str()),
        (137, "OOMKilled"),
        "{status:?}"
    );

    let sleeper = limited(
        pods::container("sleeper", HELLO, &["/hello", "sleep", "1000"]),
        32 << 20,
    );
    let id = node.cri.launch(&sandbox, &pod, &sleeper).await?;
    let pid = node.cri.container_pid(&id).await?;
    assert_eq!(memory_limit(pid)?, 32 << 20);
    let more = LinuxContainerResources {
        memory_limit_in_bytes: 64 << 20,
        ..Default::default()
    };
    node.cri.update(&id, more).await?;
    assert_eq!(memory_limit(pid)?, 64 << 20);
    let linux = node
        .cri
        .container(&id)
        .await?
        .resources
        .and_then(|all| all.linux)
        .unwrap_or_default();
    assert_eq!(linux.memory_limit_in_bytes, 64 << 20);
    assert_eq!(
        Process::read(pid).context("the process")?.pid,
        pid,
        "it was not restarted"
    );
    node.finish().await
}

fn memory_limit(pid: i32) -> Result<u64> {
    let lines = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let v1 = lines.lines().find_map(|line| line.split_once(":memory:"));
    let file = match v1 {
        Some((_, path)) => format!("/sys/fs/cgroup/memory{path}/memory.limit_in_bytes"),
        None => {
            let path = lines
                .lines()
                .find_map(|line| line.strip_prefix("0::"))
                .context("no cgroup v2 path")?;
            format!("/sys/fs/cgroup{path}/memory.max")
        }
    };
    let text = fs::read_to_string(&file).with_context(|| file.clone())?;
    text.trim().parse().with_context(|| format!("{file}: {text:?}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn five_hundred_exited_containers_leave_the_mount_table_as_it_was() -> Result<()> {
    let node = Node::start().await?;
    let pod = pods::host_network(node.pod("many"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let table = |census: Census| -> Vec<String> {
        let mut kinds: Vec<String> = Vec::new();
        for kind in ["mount", "cgroup", "fifo", "socket", "process"] {
            kinds.extend(census.kind(kind).map(str::to_owned));
        }
        kinds
    };
    let before = table(Census::of(&node.mark())?);
    let mut work = tokio::task::JoinSet::new();
    for lane in 0..4 {
        let (cri, pod, sandbox) = (node.cri.clone(), pod.clone(), sandbox.clone());
        work.spawn(async move {
            for n in 0..125 {
                let config = pods::container(&format!("c{lane}-{n}"), HELLO, &["/hello", "exit", "0"]);
                let id = cri.launch(&sandbox, &pod, &config).await?;
                ensure!(cri.exited(&id).await?.exit_code == 0, "{id} failed");
            }
            Ok(())
        });
    }
    for lane in work.join_all().await {
        lane?;
    }
    assert_eq!(node.cri.containers(None).await?.len(), 500);
    let after = e2e::eventually(Duration::from_secs(20), async || {
        let after = table(Census::of(&node.mark())?);
        ensure!(after == before, "before: {before:#?}\nafter: {after:#?}");
        Ok(after)
    })
    .await?;
    assert_eq!(after, before);
    let own = node.path("").display().to_string();
    let ours = mounts(std::path::Path::new("/proc/self/mountinfo"))?
        .into_iter()
        .filter(|mount| mount.contains(&own));
    println!("500 exited containers: {} mounts of this node", ours.count());
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shared_pid_namespace_and_a_target() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = pods::pid_namespace(pods::host_network(node.pod("pids")), NamespaceMode::Pod);
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let with_pid = |mut config: ContainerConfig, mode: NamespaceMode, target: &str| {
        let security = config
            .linux
            .get_or_insert_default()
            .security_context
            .get_or_insert_default();
        let options = security.namespace_options.get_or_insert_default();
        options.pid = mode.into();
        options.target_id = target.into();
        config
    };
    let shared = with_pid(
        shell("shared", "echo $$; cat /proc/1/cmdline; sleep 1000"),
        NamespaceMode::Pod,
        "",
    );
    let shared = node.cri.launch(&sandbox, &pod, &shared).await?;
    let own = with_pid(shell("own", "echo $$; sleep 1000"), NamespaceMode::Container, "");
    let own = node.cri.launch(&sandbox, &pod, &own).await?;
    let look = with_pid(
        shell("target", "cat /proc/1/cmdline | tr '\\0' ' '"),
        NamespaceMode::Target,
        &own,
    );
    let target = node.cri.launch(&sandbox, &pod, &look).await?;
    assert!(pods::log_texts(node.cri.exited(&target).await?.log_path)?[0].contains("sleep 1000"));
    let log = |name: &str| pods::log_texts(format!("{}/{name}.log", pod.log_directory));
    e2e::eventually(Duration::from_secs(20), async || {
        ensure!(log("own")?.first().is_some_and(|pid| pid == "1"), "{:?}", log("own")?);
        let shared = log("shared")?;
        ensure!(
            shared.len() > 1 && shared[0] != "1" && shared[1].contains("pause"),
            "{shared:?}"
        );
        Ok(())
    })
    .await?;
    let escape = node
        .cri
        .exec(&shared, &["/bin/sh", "-c", "cat /proc/1/root/etc/os-release"], 5)
        .await?;
    assert_ne!(escape.exit_code, 0, "the pause's root is not the host's");
    node.finish().await
}
