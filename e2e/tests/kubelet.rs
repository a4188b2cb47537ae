//! A real kubelet drives the daemon: static pods, judged by the kernel and by what the kubelet says of them.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use e2e::hub::Hub;
use e2e::kubelet::{self, Kubelet, SLEEP, Settings, shell};
use e2e::leaks::Process;
use e2e::node::Options;
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn a_static_pod_runs_and_ends_within_its_grace() -> Result<()> {
    let hub = Hub::start().await?;
    let node = kubelet::node(&hub, Options::default()).await?;
    let Some(mut kubelet) = Kubelet::new(&node, Settings::default()).await? else {
        return node.finish_unused().await;
    };
    kubelet.start().await?;
    kubelet.apply("one", json!({ "containers": [shell("main", SLEEP, json!({}))] }))?;
    let pod = kubelet.ready("one").await?;
    let pid = kubelet::process_of(&node, &pod, "main").await?;
    ensure!(Process::read(pid).is_some_and(|process| process.command.starts_with("/bin/sh -c trap")));
    ensure!(pod["status"]["phase"] == "Running", "{:#}", pod["status"]);

    let start = Instant::now();
    kubelet.delete("one")?;
    kubelet
        .wait("the container to end", async |_| {
            ensure!(Process::read(pid).is_none(), "it lives");
            Ok(())
        })
        .await?;
    ensure!(start.elapsed() < Duration::from_secs(10), "it took {:?}", start.elapsed());
    kubelet.finish(&node).await?;
    node.finish().await
}
