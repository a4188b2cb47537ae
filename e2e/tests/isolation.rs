//! Trouble with one thing delays that thing alone: lists and status answer from memory, other pods go on, and what is
//! owed is written down, shown and paid.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::client::{Cri, within};
use e2e::faults::Faults;
use e2e::hung::Hung;
use e2e::node::{Node, Options};
use e2e::pods::{self, HELLO};
use e2e::v1::*;
use e2e::{cni, eventually};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const LIMIT: Duration = Duration::from_secs(30);

fn sleeper(name: &str) -> ContainerConfig {
    pods::container(name, HELLO, &["/hello", "sleep", "1000"])
}

/// How long reads took, while `until` has not come.
async fn reads(cri: Cri, id: String, until: tokio::sync::watch::Receiver<bool>) -> Result<Vec<Duration>> {
    let mut took = Vec::new();
    while !*until.borrow() {
        let start = Instant::now();
        let listed = cri.sandboxes(None).await?;
        ensure!(listed.iter().any(|sandbox| sandbox.id == id), "{id} is not listed");
        cri.containers(None).await?;
        cri.sandbox(&id).await?;
        took.push(start.elapsed());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    took.sort();
    Ok(took)
}

fn quick(took: &[Duration], limit: Duration) -> Result<()> {
    let p99 = took.get(took.len() * 99 / 100).context("nothing was read")?;
    println!("{} reads, p99 {p99:?}, longest {:?}", took.len(), took.last());
    ensure!(*p99 < limit, "p99 of {} reads is {p99:?}", took.len());
    Ok(())
}

/// Lives of other pods, one after the other; how long each call took.
async fn others(node: &Node, lanes: usize, rounds: usize) -> Result<Vec<Duration>> {
    let mut set = tokio::task::JoinSet::new();
    for lane in 0..lanes {
        let cri = node.cri.clone();
        let pods: Vec<_> = (0..rounds)
            .map(|n| pods::host_network(node.pod(&format!("other{lane}-{n}"))))
            .collect();
        set.spawn(async move {
            let mut took = Vec::new();
            let mut start = Instant::now();
            let mut lap = |took: &mut Vec<Duration>| {
                took.push(start.elapsed());
                start = Instant::now();
            };
            for pod in pods {
                let sandbox = cri.run_sandbox(&pod).await?;
                lap(&mut took);
                let id = cri.create(&sandbox, &pod, &sleeper("c")).await?;
                lap(&mut took);
                cri.start(&id).await?;
                lap(&mut took);
                cri.stop(&id, 0).await?;
                lap(&mut took);
                cri.stop_sandbox(&sandbox).await?;
                lap(&mut took);
                cri.remove_sandbox(&sandbox).await?;
                lap(&mut took);
            }
            anyhow::Ok(took)
        });
    }
    let mut all = Vec::new();
    for took in set.join_all().await {
        all.extend(took?);
    }
    all.sort();
    Ok(all)
}

/// Torture case T15.
#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_shim_and_a_hanging_del_delay_one_pod() -> Result<()> {
    let mut node = Node::new(Options {
        network: "cni",
        ..Options::default()
    })?;
    cni::install(&node)?;
    node.serve().await?;
    let pod = node.pod("stuck");
    let stuck = node.cri.run_sandbox(&pod).await?;
    let container = node.cri.launch(&stuck, &pod, &sleeper("c")).await?;
    let shim = Pid::from_raw(node.shims()?.pop().context("a shim")?);
    kill(shim, Signal::SIGSTOP)?;
    node.file("hang-DEL", "")?;
    let request = StopPodSandboxRequest {
        pod_sandbox_id: stuck.clone(),
    };
    let mut client = node.cri.runtime.clone();
    let stopping = tokio::spawn(async move { client.stop_pod_sandbox(within(Duration::from_secs(4), request)).await });
    let (done, until) = tokio::sync::watch::channel(false);
    let reading = tokio::spawn(reads(node.cri.clone(), stuck.clone(), until));
    let took = others(&node, 4, 5).await.context("other pods")?;
    let status = stopping.await?.expect_err("its shim is stopped");
    let _ = done.send(true);
    quick(&reading.await??, Duration::from_secs(1))?;
    println!("calls for other pods: {:?} to {:?}", took.first(), took.last());
    let p99 = took[took.len() * 99 / 100];
    ensure!(p99 < Duration::from_secs(5), "p99 of other pods' calls is {p99:?}");
    ensure!(
        status.code() == tonic::Code::DeadlineExceeded,
        "it says that time is up: {status:?}"
    );
    println!("the stuck one's answer: {}", status.message());
    let told = node.ok(&["describe", "container", &container]).await?;
    ensure!(told.contains("task"), "it names the stage: {told}");

    kill(shim, Signal::SIGCONT)?;
    eventually(LIMIT, async || {
        let calls = cni::journal(&node);
        ensure!(
            calls.iter().any(|c| c.starts_with("DEL")),
            "no DEL was begun: {calls:?}"
        );
        Ok(())
    })
    .await?;
    fs::remove_file(node.path("hang-DEL"))?;
    node.cri.stop_sandbox(&stuck).await.context("after it was let go")?;
    node.cri.remove_sandbox(&stuck).await?;
    assert_eq!(cni::leases(&node), 0);
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hung_volume_delays_the_containers_that_want_it() -> Result<()> {
    let node = Node::start().await?;
    let mut hung = Hung::mount(node.path("hung"))?;
    let pod = pods::host_network(node.pod("hung"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let mut waiting = tokio::task::JoinSet::new();
    // More than there are threads of the daemon's runtime.
    for n in 0..8 {
        let mut config = sleeper(&format!("c{n}"));
        config.mounts = vec![Mount {
            host_path: node.path("hung").join("volume").display().to_string(),
            container_path: "/volume".into(),
            ..Default::default()
        }];
        let request = CreateContainerRequest {
            pod_sandbox_id: sandbox.clone(),
            config: Some(config),
            sandbox_config: Some(pod.clone()),
        };
        let mut client = node.cri.runtime.clone();
        waiting.spawn(async move {
            let made = client.create_container(within(Duration::from_secs(4), request)).await;
            let id = made?.into_inner().container_id;
            let start = StartContainerRequest { container_id: id };
            client
                .start_container(within(Duration::from_secs(4), start))
                .await
                .map(drop)
        });
    }
    let (done, until) = tokio::sync::watch::channel(false);
    let reading = tokio::spawn(reads(node.cri.clone(), sandbox.clone(), until));
    let took = others(&node, 2, 4).await.context("other pods")?;
    for outcome in waiting.join_all().await {
        let status = outcome.expect_err("its volume hangs");
        ensure!(status.code() == tonic::Code::DeadlineExceeded, "{status:?}");
    }
    let _ = done.send(true);
    quick(&reading.await??, Duration::from_secs(1))?;
    println!("calls for other pods: {:?} to {:?}", took.first(), took.last());
    hung.let_go();
    node.cri.stop_sandbox(&sandbox).await?;
    node.cri.remove_sandbox(&sandbox).await?;
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_disk_slows_no_read() -> Result<()> {
    let (mut node, faults) = Faults::node(Options::default())?;
    node.serve().await?;
    let pod = pods::host_network(node.pod("slow"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    faults.arm("store.commit.before=sleep:700ms")?;
    let (done, until) = tokio::sync::watch::channel(false);
    let reading = tokio::spawn(reads(node.cri.clone(), sandbox.clone(), until));
    let start = Instant::now();
    let id = node.cri.launch(&sandbox, &pod, &sleeper("c")).await?;
    ensure!(start.elapsed() > Duration::from_secs(1), "the disk is not slow");
    node.cri.remove(&id).await?;
    let _ = done.send(true);
    quick(&reading.await??, Duration::from_millis(500))?;
    faults.disarm();
    node.finish().await
}

/// Torture case T05: plugin and configuration are gone for good; the pod leaves, the debt stays, is shown, and is paid
/// once they are back. Cut where it is written down and where it is paid, nothing is lost.
#[tokio::test(flavor = "multi_thread")]
async fn an_owed_del_survives_everything_and_is_paid_once() -> Result<()> {
    let (mut node, faults) = Faults::node(Options {
        network: "cni",
        ..Options::default()
    })?;
    cni::install(&node)?;
    node.serve().await?;
    let id = node.cri.run_sandbox(&node.pod("debtor")).await?;
    fs::remove_file(node.path("bin/fake"))?;
    fs::remove_file(node.path("net.d/10-test.conflist"))?;
    faults.arm("debt.owe.before=abort")?;
    let start = Instant::now();
    let sandbox = id.clone();
    e2e::faults::persist(&mut node, async |cri| cri.stop_sandbox(&sandbox).await)
        .await?
        .context("Stop is no hostage of the network")?;
    ensure!(faults.hit(), "it was not cut while the debt was written down");
    println!("stopped after {:?}", start.elapsed());
    node.cri.remove_sandbox(&id).await?;
    assert!(node.cri.sandboxes(None).await?.is_empty());
    for _ in 0..2 {
        node.crash().await?;
        let debts = node.ok(&["get", "debts"]).await?;
        ensure!(debts.contains(&id[..12]), "it is shown: {debts}");
    }
    assert_eq!(cni::leases(&node), 1, "it is owed");
    faults.arm("debt.pay.after=abort")?;
    let before = cni::journal(&node).len();
    cni::restore(&node)?;
    eventually(Duration::from_secs(90), async || {
        if node.has_ended()? {
            e2e::faults::revive(&mut node).await?;
        }
        let debts = node.ok(&["get", "debts"]).await?;
        ensure!(faults.hit() && !debts.contains(&id[..12]), "still owed: {debts}");
        Ok(())
    })
    .await?;
    let calls = cni::journal(&node);
    let paid = &calls[before..];
    assert!(
        paid.iter().all(|call| call.starts_with(&format!("DEL {id}"))) && (1..=2).contains(&paid.len()),
        "once, and once more for the cut in between: {paid:#?}"
    );
    assert_eq!(cni::leases(&node), 0);
    node.finish().await
}
