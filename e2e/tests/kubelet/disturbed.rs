//! What is killed, restarted, taken away and rebooted below and above running pods: nothing runs twice, nothing is
//! started again that need not be, nothing is left.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result, ensure};
use e2e::boot::Boot;
use e2e::cni;
use e2e::hub::Hub;
use e2e::images::{Compression, Image, busybox_layer};
use e2e::kubelet::{self, IMAGE, Kubelet, SLEEP, Settings, container, restarts, shell};
use e2e::leaks::Process;
use e2e::node::{Node, Options};
use e2e::v1::*;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

/// A pod with two containers and a sidecar.
fn three() -> Value {
    json!({ "initContainers": [shell("side", SLEEP, json!({ "restartPolicy": "Always" }))],
        "containers": [shell("one", SLEEP, json!({})), shell("two", SLEEP, json!({}))] })
}

/// Every running container by the kubelet, with its process.
async fn running(node: &Node, kubelet: &Kubelet) -> Result<Vec<String>> {
    let mut all = kubelet::started(&kubelet.pods().await?);
    for line in &mut all {
        let id = line
            .split_once("://")
            .and_then(|(_, rest)| rest.split('"').next())
            .context("an id")?;
        let pid = node.cri.container_pid(id).await?;
        *line += &format!(" {pid} {:?}", Process::start_time(pid));
    }
    Ok(all)
}

/// No pod has two sandboxes that are ready, no container of a pod two that run, no attempt was made twice.
async fn nothing_twice(node: &Node) -> Result<()> {
    let mut counts = BTreeMap::<String, usize>::new();
    for sandbox in node.cri.sandboxes(None).await? {
        let meta = sandbox.metadata.clone().unwrap_or_default();
        *counts
            .entry(format!("{} {} attempt {}", meta.name, meta.uid, meta.attempt))
            .or_default() += 1;
        if sandbox.state() == PodSandboxState::SandboxReady {
            *counts.entry(format!("{} {} ready", meta.name, meta.uid)).or_default() += 1;
        }
    }
    for container in node.cri.containers(None).await? {
        let meta = container.metadata.clone().unwrap_or_default();
        let uid = &container.labels["io.kubernetes.pod.uid"];
        *counts
            .entry(format!("{uid} {} attempt {}", meta.name, meta.attempt))
            .or_default() += 1;
        if container.state() == ContainerState::ContainerRunning {
            *counts.entry(format!("{uid} {} running", meta.name)).or_default() += 1;
        }
    }
    counts.retain(|_, times| *times > 1);
    ensure!(counts.is_empty(), "twice: {counts:#?}");
    Ok(())
}

/// The node is as it was: same containers, same processes, and a kubelet that finds it healthy.
async fn same(node: &Node, kubelet: &Kubelet, before: &[String]) -> Result<()> {
    // A change would come with one of the next looks of the kubelet.
    let syncs = kubelet.syncs().await?;
    kubelet
        .wait("the kubelet to look again", async |kubelet| {
            ensure!(kubelet.syncs().await? >= syncs + 3.0, "not yet");
            Ok(())
        })
        .await?;
    kubelet
        .wait("the same containers", async |kubelet| {
            let now = running(node, kubelet).await?;
            ensure!(now == before, "before: {before:#?}\nnow: {now:#?}");
            Ok(())
        })
        .await?;
    ensure!(kubelet.get("/healthz").await? == "ok");
    nothing_twice(node).await
}

fn kill_one(pid: i32) -> Result<()> {
    Ok(kill(Pid::from_raw(pid), Signal::SIGKILL)?)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_killed_under_pods_disturbs_none() -> Result<()> {
    let hub = Hub::start().await?;
    let mut node = kubelet::node(&hub, Options::default()).await?;
    let gates = vec![("EventedPLEG", true), ("CRIListStreaming", true)];
    let settings = Settings {
        gates,
        ..Settings::default()
    };
    let Some(mut kubelet) = Kubelet::new(&node, settings).await? else {
        return node.finish_unused().await;
    };
    kubelet.start().await?;
    kubelet.apply("three", three())?;
    let once = json!({ "restartPolicy": "OnFailure", "containers": [shell("main", "echo done", json!({}))] });
    kubelet.apply("once", once)?;
    kubelet.ready("three").await?;
    let succeeded = async |kubelet: &Kubelet| {
        let pod = kubelet.pod("once").await?;
        ensure!(
            pod["status"]["phase"] == "Succeeded" && restarts(&pod, "main")? == 0,
            "{:#}",
            pod["status"]
        );
        Ok(())
    };
    kubelet.wait("the one to end", succeeded).await?;
    let before = running(&node, &kubelet).await?;
    ensure!(before.len() == 3, "{before:#?}");

    let skipped = kubelet.unready();
    node.crash().await?;
    same(&node, &kubelet, &before).await.context("the daemon killed")?;
    node.stop().await?;
    node.serve().await?;
    same(&node, &kubelet, &before).await.context("the daemon restarted")?;
    ensure!(kubelet.unready() == skipped, "the node was not ready for a while");

    kubelet.kill9()?;
    kubelet.start().await?;
    kubelet.ready("three").await?;
    same(&node, &kubelet, &before).await.context("the kubelet killed")?;
    kubelet.kill9()?;
    node.kill9().await?;
    node.serve().await?;
    kubelet.start().await?;
    kubelet.ready("three").await?;
    same(&node, &kubelet, &before).await.context("both killed")?;

    for shim in node.shims()? {
        kill_one(shim)?;
    }
    same(&node, &kubelet, &before).await.context("the shims killed")?;
    let sandboxes = node.cri.sandboxes(None).await?;
    let three = sandboxes
        .iter()
        .find(|one| one.metadata.as_ref().is_some_and(|meta| meta.name == "three-n1"));
    let three = &three.context("no sandbox")?.id;
    kill_one(node.cri.sandbox_pid(three).await?)?;
    same(&node, &kubelet, &before).await.context("the pause killed")?;
    succeeded(&kubelet).await?;

    // What the kubelet must see, it sees: once.
    let pod = kubelet.pod("three").await?;
    kill_one(kubelet::process_of(&node, &pod, "one").await?)?;
    kubelet
        .wait("it to be started again", async |kubelet| {
            let pod = kubelet.ready("three").await?;
            ensure!(
                restarts(&pod, "one")? == 1 && restarts(&pod, "two")? == 0,
                "{:#}",
                pod["status"]
            );
            let last = &container(&pod, "one")?["lastState"]["terminated"];
            ensure!(last["exitCode"] == 137 && last["reason"] == "Error", "{last:#}");
            Ok(())
        })
        .await?;
    let after = running(&node, &kubelet).await?;
    same(&node, &kubelet, &after).await?;
    unused_images(&hub, &node, &mut kubelet)
        .await
        .context("image garbage collection")?;
    same(&node, &kubelet, &after).await?;
    kubelet.finish(&node).await?;
    node.finish().await
}

/// A kubelet that finds the disk too full removes the images that no container uses; static pods it does not evict.
async fn unused_images(hub: &Hub, node: &Node, kubelet: &mut Kubelet) -> Result<()> {
    let mut unused = Vec::new();
    for word in ["first", "second"] {
        let layer = busybox_layer(Compression::Gzip)?.file(word, 0o644, word.repeat(1000));
        let image = Image::new(word, vec![layer], json!({ "Cmd": ["/bin/sh"] }));
        hub.push(&image, &format!("{word}:1"), &[])?;
        unused.push(format!("registry.example/{word}:1"));
        node.cri.pull(&unused[unused.len() - 1]).await?;
    }
    kubelet.stop()?;
    let full = json!({ "nodefs.available": "99%", "imagefs.available": "99%" });
    kubelet.settings.further = json!({ "evictionHard": full, "imageMinimumGCAge": "1ms" });
    kubelet.start().await?;
    kubelet
        .wait("unused images to go", async |_| {
            for name in &unused {
                ensure!(node.cri.image(name).await?.is_none(), "{name} is there");
            }
            Ok(())
        })
        .await?;
    ensure!(node.cri.image(IMAGE).await?.is_some(), "an image in use is gone");
    Ok(())
}

/// Without a network, pods wait that need one.
#[tokio::test(flavor = "multi_thread")]
async fn pods_wait_for_a_network() -> Result<()> {
    let hub = Hub::start().await?;
    let options = Options {
        network: "auto",
        ..Options::default()
    };
    let node = kubelet::node(&hub, options).await?;
    let Some(mut kubelet) = Kubelet::new(&node, Settings::default()).await? else {
        return node.finish_unused().await;
    };
    kubelet.start().await?;
    let spec = |host: bool| json!({ "hostNetwork": host, "containers": [shell("main", SLEEP, json!({}))] });
    kubelet.apply("before", spec(false))?;
    kubelet.ready("before").await?;
    let before = running(&node, &kubelet).await?;

    fs::remove_file(node.path("net.d/10-test.conflist"))?;
    kubelet
        .wait("the kubelet to miss the network", async |kubelet| {
            let log = kubelet.log();
            ensure!(log.contains("container runtime network not ready"), "not yet");
            Ok(())
        })
        .await?;
    kubelet.apply("waiting", spec(false))?;
    kubelet.apply("host", spec(true))?;
    kubelet.ready("host").await?;
    let pod = kubelet.pod("waiting").await?;
    ensure!(pod["status"]["phase"] == "Pending", "{:#}", pod["status"]);
    let now = running(&node, &kubelet).await?;
    ensure!(before.iter().all(|line| now.contains(line)), "{before:#?} {now:#?}");

    cni::restore(&node)?;
    let pod = kubelet.ready("waiting").await?;
    ensure!(
        pod["status"]["podIP"]
            .as_str()
            .is_some_and(|ip| ip.starts_with("192.0.2.")),
        "{:#}",
        pod["status"]
    );
    ensure!(cni::leases(&node) == 2);
    nothing_twice(&node).await?;
    kubelet.finish(&node).await?;
    ensure!(cni::leases(&node) == 0, "addresses are leased to nobody");
    node.finish().await
}

/// After a reboot every pod is there again, one attempt later.
#[tokio::test(flavor = "multi_thread")]
async fn a_reboot_starts_each_pod_once() -> Result<()> {
    let hub = Hub::start().await?;
    let mut node = kubelet::prepared(&hub, Options::default())?;
    let Some(mut kubelet) = Kubelet::new(&node, Settings::default()).await? else {
        return node.finish_unused().await;
    };
    let mut boot = Boot::first(&mut node)?;
    node.serve().await?;
    kubelet.start().await?;
    kubelet.apply("three", three())?;
    let once = json!({ "restartPolicy": "OnFailure", "containers": [shell("main", "echo done", json!({}))] });
    kubelet.apply("once", once)?;
    let old = kubelet.ready("three").await?;
    kubelet
        .wait("the one to end", async |kubelet| {
            ensure!(kubelet.pod("once").await?["status"]["phase"] == "Succeeded");
            Ok(())
        })
        .await?;

    kubelet.reboot(&mut node).await?;
    boot.again(&mut node).await?;
    kubelet.start().await?;
    let pod = kubelet
        .wait("all to be started again", async |kubelet| {
            let pod = kubelet.ready("three").await?;
            for name in ["one", "two", "side"] {
                ensure!(restarts(&pod, name)? == 1, "{:#}", pod["status"]);
            }
            Ok(pod)
        })
        .await?;
    ensure!(pod["metadata"]["uid"] == old["metadata"]["uid"]);
    let last = &container(&pod, "one")?["lastState"]["terminated"];
    ensure!(last["exitCode"] == 255 && last["reason"] == "Unknown", "{last:#}");
    let now = running(&node, &kubelet).await?;
    ensure!(now.len() == 3, "{now:#?}");
    same(&node, &kubelet, &now).await?;
    kubelet.finish(&node).await?;
    node.finish().await
}
