//! ExecSync: output, exit codes, the container's own identity, time-outs that leave nothing behind.

use std::time::{Duration, Instant};

use anyhow::Result;
use e2e::node::Node;
use e2e::pods::{self, shell};
use e2e::v1::*;
use futures::{StreamExt, TryStreamExt};
use tonic::Code;

/// A node with one running busybox container, whose shell reaps what is left to it as process 1.
async fn running(change: impl Fn(&mut ContainerConfig)) -> Result<(Node, String)> {
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = pods::host_network(node.pod("exec"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let mut config = shell("c", "while :; do sleep 100000; done");
    change(&mut config);
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    Ok((node, id))
}

#[tokio::test(flavor = "multi_thread")]
async fn output_and_exit_code() -> Result<()> {
    let (node, id) = running(|_| {}).await?;
    let answer = node
        .cri
        .exec(&id, &["/bin/sh", "-c", "echo out; echo err >&2; exit 42"], 0)
        .await?;
    assert_eq!(
        (answer.stdout.as_slice(), answer.stderr.as_slice()),
        (&b"out\n"[..], &b"err\n"[..])
    );
    assert_eq!(answer.exit_code, 42);
    let answer = node.cri.exec(&id, &["cat", "/proc/self/cgroup"], 0).await?;
    assert!(!answer.stdout.is_empty(), "PATH is searched");
    let killed = node.cri.exec(&id, &["/bin/sh", "-c", "kill -9 $$"], 0).await?;
    assert_eq!(killed.exit_code, 137);
    let mebibyte = node
        .cri
        .exec(&id, &["/bin/sh", "-c", "head -c 1048576 /dev/zero"], 0)
        .await?;
    assert_eq!(mebibyte.stdout.len(), 1 << 20);
    let huge = node
        .cri
        .exec(&id, &["/bin/sh", "-c", "head -c 67108864 /dev/zero"], 20)
        .await;
    match huge {
        Ok(answer) => assert!(answer.stdout.len() <= 16 << 20, "{} bytes", answer.stdout.len()),
        Err(status) => assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}"),
    }
    node.cri.version().await?;
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn it_is_the_containers_user_with_its_rights_in_its_namespaces() -> Result<()> {
    let (node, id) = running(|config| {
        let security = config
            .linux
            .get_or_insert_default()
            .security_context
            .get_or_insert_default();
        security.run_as_username = "app".into();
        security.no_new_privs = true;
        security.seccomp = Some(SecurityProfile::default());
        config.envs = vec![KeyValue {
            key: "OURS".into(),
            value: "yes".into(),
        }];
    })
    .await?;
    let show = "id -u; id -G; echo $OURS; grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status; \
                readlink /proc/self/ns/pid; readlink /proc/self/ns/mnt; cat /proc/self/cgroup";
    let answer = node.cri.exec(&id, &["/bin/sh", "-c", show], 0).await?;
    let exec = String::from_utf8(answer.stdout)?;
    let lines: Vec<_> = exec.lines().collect();
    assert_eq!(lines[..3], ["1001", "1001 2002", "yes"], "{exec}");
    let pid = node.cri.container_pid(&id).await?;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    for line in &lines[3..7] {
        assert!(status.contains(line), "init does not have {line:?}");
    }
    for (kind, line) in [("pid", lines[7]), ("mnt", lines[8])] {
        let link = std::fs::read_link(format!("/proc/{pid}/ns/{kind}"))?;
        assert_eq!(link.display().to_string(), line);
    }
    let (node, id) = {
        node.finish().await?;
        running(|_| {}).await?
    };
    let answer = node
        .cri
        .exec(&id, &["/bin/sh", "-c", "ls /proc/self/fd | wc -l"], 0)
        .await?;
    let open: usize = String::from_utf8(answer.stdout)?.trim().parse()?;
    assert!(open <= 4, "descriptors leak into the container: {open}");
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_time_out_ends_the_whole_session() -> Result<()> {
    let (node, id) = running(|_| {}).await?;
    let start = Instant::now();
    let script = "trap '' TERM; setsid sleep 4321 & sleep 4321";
    let late = node
        .cri
        .exec(&id, &["/bin/sh", "-c", script], 1)
        .await
        .expect_err("it takes 4321 s");
    assert_eq!(late.code(), Code::DeadlineExceeded, "{late:?}");
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    e2e::eventually(Duration::from_secs(20), async || {
        let left: Vec<_> = node
            .processes()?
            .into_iter()
            .filter(|line| line.contains("4321"))
            .collect();
        anyhow::ensure!(left.is_empty(), "the session is not gone: {left:#?}");
        Ok(())
    })
    .await?;
    node.finish().await
}

/// Torture case T13: a background child that holds the pipe.
#[tokio::test(flavor = "multi_thread")]
async fn children_left_behind_hold_nothing_up_and_do_not_stay() -> Result<()> {
    let (node, id) = running(|_| {}).await?;
    let descriptors = || -> Result<usize> {
        let mut open = 0;
        for pid in node.shims()?.into_iter().chain([node.pid()?]) {
            open += std::fs::read_dir(format!("/proc/{pid}/fd"))?.count();
        }
        Ok(open)
    };
    let open = descriptors()?;
    let round = async |round: usize| -> Result<()> {
        let start = Instant::now();
        let answer = node.cri.exec(&id, &["/bin/sh", "-c", "sleep 300 & echo hi"], 2).await?;
        let took = start.elapsed();
        anyhow::ensure!(answer.stdout == b"hi\n", "round {round}: {answer:?}");
        anyhow::ensure!(took < Duration::from_secs(60), "round {round}: {took:?}");
        Ok(())
    };
    let rounds = futures::stream::iter((0..200).map(round)).buffer_unordered(4);
    rounds.try_collect::<Vec<()>>().await?;
    e2e::eventually(Duration::from_secs(20), async || {
        let gone = |line: &String| line.contains("sleep 300") || line.contains(", Z)");
        let left: Vec<_> = node.processes()?.into_iter().filter(gone).collect();
        anyhow::ensure!(left.is_empty(), "processes are left: {left:#?}");
        let now = descriptors()?;
        anyhow::ensure!(now <= open + 2, "descriptors: {open} before, {now} after");
        Ok(())
    })
    .await?;
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn only_in_a_running_container_and_only_what_exists() -> Result<()> {
    let (node, id) = running(|_| {}).await?;
    let unknown = node.cri.exec("feed", &["true"], 0).await.expect_err("unknown");
    assert_eq!(unknown.code(), Code::NotFound);
    let empty = node.cri.exec(&id, &[], 0).await.expect_err("nothing to run");
    assert_eq!(empty.code(), Code::InvalidArgument);
    match node.cri.exec(&id, &["no-such-program"], 0).await {
        Err(status) => assert!(status.message().contains("no-such-program"), "{status:?}"),
        Ok(answer) => assert!(answer.exit_code == 126 || answer.exit_code == 127, "{answer:?}"),
    }
    node.cri.stop(&id, 0).await?;
    let ended = node.cri.exec(&id, &["true"], 0).await.expect_err("not running");
    assert_eq!(ended.code(), Code::FailedPrecondition);
    node.finish().await
}
