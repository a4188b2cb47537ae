//! GetContainerEvents: every step of a life, in order, with full statuses; slow readers harm nobody.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::client::within;
use e2e::node::Node;
use e2e::pods::{self, HELLO, shell};
use e2e::v1::ContainerEventType::{
    ContainerCreatedEvent as Created, ContainerDeletedEvent as Deleted, ContainerStartedEvent as Started,
    ContainerStoppedEvent as Stopped,
};
use e2e::v1::*;
use serde_json::Value;
use tonic::Streaming;

type Events = Streaming<ContainerEventResponse>;

async fn subscribe(node: &Node) -> Result<Events> {
    let mut runtime = node.cri.runtime.clone();
    Ok(runtime.get_container_events(GetEventsRequest {}).await?.into_inner())
}

/// Reads until `id` is deleted.
async fn until_deleted(events: &mut Events, id: &str) -> Result<Vec<ContainerEventResponse>> {
    let mut all = Vec::new();
    let read = async {
        while let Some(event) = events.message().await? {
            let last = event.container_id == id && event.container_event_type() == Deleted;
            all.push(event);
            if last {
                return Ok(());
            }
        }
        anyhow::bail!("the stream ended")
    };
    tokio::time::timeout(Duration::from_secs(30), read)
        .await
        .context("no DELETED came")??;
    Ok(all)
}

fn of(events: &[ContainerEventResponse], id: &str) -> Vec<ContainerEventType> {
    let own = events.iter().filter(|event| event.container_id == id);
    own.map(ContainerEventResponse::container_event_type).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_life_is_told_step_by_step() -> Result<()> {
    let node = Node::start().await?;
    let (mut events, mut other) = (subscribe(&node).await?, subscribe(&node).await?);
    let pod = pods::host_network(node.pod("told"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let config = pods::container("quick", HELLO, &["/hello", "lines", "1"]);
    let quick = node.cri.launch(&sandbox, &pod, &config).await?;
    node.cri.exited(&quick).await?;
    let never = node
        .cri
        .create(&sandbox, &pod, &pods::container("never", HELLO, &[]))
        .await?;
    node.cri.remove(&quick).await?;
    node.cri.stop_sandbox(&sandbox).await?;
    node.cri.remove_sandbox(&sandbox).await?;
    let all = until_deleted(&mut events, &sandbox).await?;
    assert_eq!(of(&all, &sandbox), [Created, Started, Stopped, Deleted]);
    assert_eq!(of(&all, &quick), [Created, Started, Stopped, Deleted]);
    assert_eq!(of(&all, &never), [Created, Deleted]);
    assert!(
        all.windows(2).all(|pair| pair[0].created_at < pair[1].created_at),
        "time rises"
    );
    for event in &all {
        let status = event
            .pod_sandbox_status
            .as_ref()
            .context("every event has the sandbox's status")?;
        assert_eq!(status.id, sandbox);
        assert_eq!(status.metadata, pod.metadata);
    }
    let at = |id: &str, kind: ContainerEventType| {
        let found = all
            .iter()
            .position(|e| e.container_id == id && e.container_event_type() == kind);
        found.context("told")
    };
    assert!(at(&sandbox, Started)? < at(&quick, Created)?, "first the sandbox");
    assert!(at(&never, Deleted)? < at(&sandbox, Deleted)?, "last the sandbox");
    let stopped = &all[at(&quick, Stopped)?];
    let status = stopped
        .containers_statuses
        .iter()
        .find(|s| s.id == quick)
        .context("its status")?;
    assert_eq!(status.state(), ContainerState::ContainerExited);
    assert_eq!(status.reason, "Completed");
    let deleted = &all[at(&sandbox, Deleted)?];
    assert!(deleted.containers_statuses.is_empty());

    let told = |all: &[ContainerEventResponse]| -> Vec<_> {
        all.iter()
            .map(|e| (e.container_id.clone(), e.container_event_type, e.created_at))
            .collect()
    };
    assert_eq!(
        told(&until_deleted(&mut other, &sandbox).await?),
        told(&all),
        "the same for every subscriber"
    );
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn order_holds_in_a_crowd() -> Result<()> {
    let node = Node::start().await?;
    let mut events = subscribe(&node).await?;
    const PODS: usize = 8;
    let lives = (0..PODS).map(|n| {
        let (cri, pod) = (node.cri.clone(), pods::host_network(node.pod(&format!("crowd{n}"))));
        async move {
            let sandbox = cri.run_sandbox(&pod).await?;
            let config = pods::container("c", HELLO, &["/hello", "lines", "1"]);
            let id = cri.launch(&sandbox, &pod, &config).await?;
            cri.exited(&id).await?;
            cri.stop_sandbox(&sandbox).await?;
            cri.remove_sandbox(&sandbox).await?;
            anyhow::Ok((sandbox, id))
        }
    });
    let lives = futures::future::join_all(lives)
        .await
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    let mut all: HashMap<String, Vec<ContainerEventType>> = HashMap::new();
    let read = async {
        while all.values().flatten().count() < PODS * 8 {
            let event = events.message().await?.context("the stream ended")?;
            all.entry(event.container_id.clone())
                .or_default()
                .push(event.container_event_type());
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(Duration::from_secs(30), read)
        .await
        .context("events are missing")??;
    for id in lives.iter().flat_map(|(sandbox, id)| [sandbox, id]) {
        assert_eq!(all[id], [Created, Started, Stopped, Deleted], "{id}");
    }
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_left_is_told_what_it_missed_and_a_stopping_daemon_ends_the_stream() -> Result<()> {
    let mut node = Node::start().await?;
    drop(subscribe(&node).await?);
    let pod = pods::host_network(node.pod("missed"));
    // The server notices the end of a stream with what it next sends there.
    let sandbox = node.cri.run_sandbox(&pod).await?;
    node.cri.stop_sandbox(&sandbox).await?;
    node.cri.remove_sandbox(&sandbox).await?;
    let mut events = subscribe(&node).await?;
    let second = node.cri.run_sandbox(&pod).await?;
    let first = events.message().await?.context("the stream ended")?;
    assert!([&sandbox, &second].contains(&&first.container_id));
    let ended = async { while let Ok(Some(_)) = events.message().await {} };
    let (stopped, ended) = tokio::join!(node.stop(), tokio::time::timeout(Duration::from_secs(10), ended));
    stopped?;
    ended.context("the stream goes on")?;
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_reader_holds_up_nobody() -> Result<()> {
    let node = Node::start().await?;
    let slow = subscribe(&node).await?;
    let pod = pods::host_network(node.pod("slow"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    for n in 0..5 {
        let config = pods::container(&format!("c{n}"), HELLO, &["/hello", "lines", "1"]);
        let id = node.cri.launch(&sandbox, &pod, &config).await?;
        node.cri.exited(&id).await?;
        let request = ListContainersRequest { filter: None };
        node.cri
            .runtime
            .clone()
            .list_containers(within(Duration::from_secs(2), request))
            .await?;
    }
    drop(slow);
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_line_shows_them() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = pods::host_network(node.pod("cli"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let id = node.cri.launch(&sandbox, &pod, &shell("c", "exit 3")).await?;
    node.cri.exited(&id).await?;
    let text = node.ok(&["events"]).await?;
    let words: Vec<_> = text.lines().filter_map(|line| line.split_whitespace().nth(1)).collect();
    assert_eq!(words, ["EVENT", "CREATED", "CREATED", "STARTED", "STOPPED"], "{text}");
    assert!(
        text.contains("Error, exit code 3") && text.contains("e2e/cli"),
        "{text}"
    );
    let json: Value = serde_json::from_str(&node.ok(&["events", "cli", "-o", "json"]).await?)?;
    assert_eq!(json["events"].as_array().map(Vec::len), Some(4));
    assert_eq!(json["events"][3]["id"], id.as_str());

    let mut follow = tokio::process::Command::from(node.command(&["events", "-f", "-o", "json"])?);
    let mut follow = follow
        .stdout(std::process::Stdio::piped())
        .stdin(std::process::Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    let out = follow.stdout.take().context("its output")?;
    let mut lines = tokio::io::AsyncBufReadExt::lines(tokio::io::BufReader::new(out));
    for _ in 0..4 {
        lines.next_line().await?.context("the past comes first")?;
    }
    node.cri.remove(&id).await?;
    let line = tokio::time::timeout(Duration::from_secs(10), lines.next_line()).await??;
    let event: Value = serde_json::from_str(&line.context("it ended")?)?;
    ensure!(event["event"] == "DELETED" && event["id"] == id.as_str(), "{event}");
    follow.kill().await?;
    node.finish().await
}
