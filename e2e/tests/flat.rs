//! Many objects: what they cost is given back, and thousands of dead ones are listed.

use std::fs;
use std::time::Duration;

use anyhow::{Result, ensure};
use e2e::node::Node;
use e2e::pods::{self, HELLO};
use e2e::v1::*;
use futures::{StreamExt, TryStreamExt};

/// What the daemon holds: descriptors, threads, resident kB.
#[derive(Clone, Copy, Debug)]
struct Held {
    fds: usize,
    threads: usize,
    memory: usize,
}

fn held(node: &Node) -> Result<Held> {
    let pid = node.pid()?;
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let value = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key));
        line.and_then(|rest| rest.split_whitespace().next()?.parse().ok())
            .unwrap_or_default()
    };
    Ok(Held {
        fds: fs::read_dir(format!("/proc/{pid}/fd"))?.count(),
        threads: value("Threads:"),
        memory: value("VmRSS:"),
    })
}

/// A pod from its creation to its removal, with an exec on the way.
async fn live(node: &Node, n: usize) -> Result<()> {
    let pod = node.pod(&format!("cycle{n}"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let config = pods::container("c", HELLO, &["/hello", "sleep", "1000"]);
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    let answer = node.cri.exec(&id, &["/hello", "echo", "there"], 10).await?;
    ensure!(answer.stdout == b"there\n", "{answer:?}");
    node.cri.stop(&id, 0).await?;
    node.cri.stop_sandbox(&sandbox).await?;
    Ok(node.cri.remove_sandbox(&sandbox).await?)
}

async fn cycles(node: &Node, count: std::ops::Range<usize>) -> Result<Held> {
    let lives = futures::stream::iter(count.map(|n| live(node, n)));
    lives.buffer_unordered(8).try_collect::<Vec<()>>().await?;
    // Deleting goes on behind the answers.
    e2e::eventually(Duration::from_secs(30), async || {
        let trash = fs::read_dir(node.root().join("trash"))?.count();
        ensure!(trash == 0, "{trash} things in the trash");
        Ok(())
    })
    .await?;
    held(node)
}

/// A thousand pods come and go: no descriptor, thread or memory of them stays with the daemon.
#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_pods_leave_the_daemon_as_it_was() -> Result<()> {
    let node = Node::start().await?;
    let before = cycles(&node, 0..200).await?;
    let after = cycles(&node, 200..1200).await?;
    println!("after 200 cycles {before:?}, after 1200 {after:?}");
    ensure!(after.fds <= before.fds + 4, "descriptors: {before:?}, {after:?}");
    // The pool of blocking threads grows and shrinks.
    ensure!(after.threads <= before.threads + 8, "threads: {before:?}, {after:?}");
    ensure!(after.memory <= before.memory + 4096, "memory: {before:?}, {after:?}");
    node.no_pods().await?;
    node.finish().await
}

/// More than one answer of a list could hold with real annotations; the stream tells each once, in parts.
#[tokio::test(flavor = "multi_thread")]
async fn five_thousand_dead_containers_are_listed() -> Result<()> {
    const ALL: usize = 5000;
    let mut node = Node::start().await?;
    let pod = pods::host_network(node.pod("graveyard"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let dead = async |n: usize| -> Result<String> {
        let mut config = pods::container(&format!("c{n}"), HELLO, &["/hello", "echo", "gone"]);
        config.annotations.insert("padding".into(), "x".repeat(4096));
        node.cri.launch(&sandbox, &pod, &config).await
    };
    let launched = futures::stream::iter((0..ALL).map(dead)).buffer_unordered(8);
    let mut made: Vec<String> = launched.try_collect().await?;
    made.sort_unstable();
    node.crash().await?;
    let mut runtime = node.cri.runtime.clone();
    let mut stream = runtime
        .stream_containers(StreamContainersRequest::default())
        .await?
        .into_inner();
    let (mut listed, mut parts) = (Vec::new(), 0);
    while let Some(part) = stream.message().await? {
        parts += 1;
        for container in part.containers {
            ensure!(container.state() == ContainerState::ContainerExited, "{container:?}");
            listed.push(container.id);
        }
    }
    listed.sort_unstable();
    ensure!(listed == made, "{} of {ALL} are listed", listed.len());
    ensure!(parts > 1, "all in one part");
    let stats = runtime
        .stream_container_stats(StreamContainerStatsRequest::default())
        .await?
        .into_inner();
    let stats: Vec<_> = stats.try_collect().await?;
    ensure!(stats.iter().map(|part| part.container_stats.len()).sum::<usize>() <= ALL);
    node.cri.remove_sandbox(&sandbox).await?;
    ensure!(node.cri.containers(None).await?.is_empty());
    node.no_pods().await?;
    node.finish().await
}
