//! A real kubelet drives the daemon: static pods, judged by the kernel and by what the kubelet says of them.

mod disturbed;
mod endpoints;
mod ends;
mod images;
mod kinds;

use anyhow::{Result, ensure};
use e2e::hub::Hub;
use e2e::kubelet::{self, Kubelet, SLEEP, Settings, shell};
use e2e::leaks::Process;
use e2e::node::{Node, Options};
use futures::future::LocalBoxFuture;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// What a check of one pod needs.
#[derive(Clone, Copy)]
struct Cluster<'a> {
    hub: &'a Hub,
    node: &'a Node,
    kubelet: &'a Kubelet,
}

impl Cluster<'_> {
    /// The pid of a container of a pod that is ready.
    async fn pid(&self, pod: &Value, name: &str) -> Result<i32> {
        kubelet::process_of(self.node, pod, name).await
    }

    /// Waits until a container has written this line.
    async fn wrote(&self, pod: &Value, container: &str, line: &str) -> Result<()> {
        let what = format!("{container} to write {line:?}");
        self.kubelet
            .wait(&what, async |kubelet| {
                let lines = kubelet.lines(pod, container)?;
                ensure!(lines.iter().any(|one| one == line), "{lines:#?}");
                Ok(())
            })
            .await
    }

    /// Waits until a process is gone.
    async fn gone(&self, pid: i32) -> Result<()> {
        self.kubelet
            .wait("a container to end", async |_| {
                ensure!(Process::read(pid).is_none(), "{pid} lives");
                Ok(())
            })
            .await
    }
}

/// Runs all checks side by side and tells of all that failed.
async fn all(checks: Vec<(&'static str, LocalBoxFuture<'_, Result<()>>)>) -> Result<()> {
    let (names, checks): (Vec<_>, Vec<_>) = checks.into_iter().unzip();
    let results = futures::future::join_all(checks).await;
    let failed: Vec<_> = names
        .iter()
        .zip(&results)
        .filter_map(|(name, result)| Some(format!("{name}: {:#}", result.as_ref().err()?)))
        .collect();
    ensure!(failed.is_empty(), "{}", failed.join("\n\n"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_static_pod_runs_and_ends_within_its_grace() -> Result<()> {
    let hub = Hub::start().await?;
    let node = kubelet::node(&hub, Options::default()).await?;
    let Some(mut kubelet) = Kubelet::new(&node, Settings::default()).await? else {
        return node.finish_unused().await;
    };
    kubelet.start().await?;
    let deaf = "trap '' TERM; echo ready; while :; do sleep 0.1; done";
    let deaf = json!({ "containers": [shell("main", deaf, json!({}))], "terminationGracePeriodSeconds": 6 });
    kubelet.apply("deaf", deaf)?;
    kubelet.apply("one", json!({ "containers": [shell("main", SLEEP, json!({}))] }))?;
    let pod = kubelet.ready("one").await?;
    let pid = kubelet::process_of(&node, &pod, "main").await?;
    ensure!(Process::read(pid).is_some_and(|process| process.command.starts_with("/bin/sh -c trap")));
    ensure!(pod["status"]["phase"] == "Running", "{:#}", pod["status"]);
    let deaf = kubelet.ready("deaf").await?;
    let deaf = kubelet::process_of(&node, &deaf, "main").await?;

    let cluster = Cluster {
        hub: &hub,
        node: &node,
        kubelet: &kubelet,
    };
    let start = Instant::now();
    kubelet.delete("one")?;
    kubelet.delete("deaf")?;
    cluster.gone(pid).await?;
    ensure!(
        Process::read(deaf).is_some(),
        "both took a grace: {:?}",
        start.elapsed()
    );
    cluster.gone(deaf).await?;
    let took = start.elapsed();
    ensure!(took >= Duration::from_secs(6), "SIGKILL after {took:?}");
    kubelet.finish(&node).await?;
    node.finish().await
}

/// Pods of every kind side by side, so that it takes no longer than the slowest.
#[tokio::test(flavor = "multi_thread")]
async fn pods_of_every_kind() -> Result<()> {
    let hub = Hub::start().await?;
    let node = kubelet::node(&hub, Options::default()).await?;
    let further = json!({ "containerLogMaxSize": "64Ki", "containerLogMaxFiles": 100, "containerLogMonitorInterval":
        "3s", "crashLoopBackOff": { "maxContainerRestartPeriod": "2s" } });
    let settings = Settings {
        further,
        ..Settings::default()
    };
    let Some(mut kubelet) = Kubelet::new(&node, settings).await? else {
        return node.finish_unused().await;
    };
    kubelet.start().await?;
    let cluster = Cluster {
        hub: &hub,
        node: &node,
        kubelet: &kubelet,
    };
    all(vec![
        ("many", Box::pin(kinds::many(cluster))),
        ("host", Box::pin(kinds::host_namespaces(cluster))),
        ("ports", Box::pin(kinds::host_port(cluster))),
        ("shared", Box::pin(kinds::shared_processes(cluster))),
        ("volumes", Box::pin(kinds::volumes(cluster))),
        ("limits", Box::pin(kinds::limits(cluster))),
        ("secure", Box::pin(kinds::security(cluster))),
        ("changed", Box::pin(kinds::changed(cluster))),
        ("message", Box::pin(ends::messages(cluster))),
        ("probes", Box::pin(ends::probes(cluster))),
        ("hooks", Box::pin(ends::hooks(cluster))),
        ("loop", Box::pin(ends::crash_loop(cluster))),
        ("oom", Box::pin(ends::out_of_memory(cluster))),
        ("logs", Box::pin(ends::rotation(cluster))),
        ("pull", Box::pin(images::policies(cluster))),
    ])
    .await?;
    kubelet.finish(&node).await?;
    node.finish().await
}
