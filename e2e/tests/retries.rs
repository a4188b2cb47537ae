//! Calls that are repeated, given up, doubled or cut: one object comes of them, its id is told once, nothing is left.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::client::within;
use e2e::faults::{Faults, persist, revive};
use e2e::node::{Node, Options};
use e2e::pods::{self, HELLO};
use e2e::v1::*;
use e2e::{cni, eventually};
use tonic::{Code, Status};

fn sleeper(name: &str) -> ContainerConfig {
    pods::container(name, HELLO, &["/hello", "sleep", "1000"])
}

/// Torture case T01: work slower than its callers.
#[tokio::test(flavor = "multi_thread")]
async fn a_create_slower_than_its_deadline_is_joined_by_its_retries() -> Result<()> {
    let (mut node, faults) = Faults::node(Options::default())?;
    node.serve().await?;
    let pod = pods::host_network(node.pod("slow"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    faults.arm("stage.Container.bundle.act.before=sleep:4s")?;
    let request = CreateContainerRequest {
        pod_sandbox_id: sandbox.clone(),
        config: Some(sleeper("c")),
        sandbox_config: Some(pod.clone()),
    };
    let mut refusals = Vec::new();
    let id = loop {
        let mut client = node.cri.runtime.clone();
        match client
            .create_container(within(Duration::from_secs(1), request.clone()))
            .await
        {
            Ok(made) => break made.into_inner().container_id,
            Err(status) => refusals.push(status),
        }
        ensure!(refusals.len() < 20, "never made: {refusals:#?}");
    };
    println!("made at try {}", refusals.len() + 1);
    ensure!(refusals.len() >= 2, "it was not slow");
    for status in &refusals {
        let aged = status.message().contains("not done after");
        ensure!(status.code() == Code::DeadlineExceeded && aged, "its age: {status:?}");
        let named = status.message().contains("bundle not done");
        ensure!(named, "the stage that is under way: {status:?}");
    }
    let again = node
        .cri
        .create(&sandbox, &pod, &sleeper("c"))
        .await
        .expect_err("told already");
    ensure!(
        again.code() == Code::AlreadyExists && again.message().contains(&id),
        "{again:?}"
    );
    let all = node.cri.containers(None).await?;
    ensure!(all.len() == 1 && all[0].id == id, "{all:#?}");
    faults.disarm();
    node.cri.start(&id).await?;
    node.finish().await
}

/// Torture case T02: what failed for good leaves its name free at once.
#[tokio::test(flavor = "multi_thread")]
async fn what_failed_for_good_does_not_stand_in_the_way() -> Result<()> {
    let node = Node::start().await?;
    let pod = pods::host_network(node.pod("wreck"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let image = "localhost/busybox:1";
    let missing = pods::container("c", image, &["/bin/sh"]);
    let refused = node
        .cri
        .create(&sandbox, &pod, &missing)
        .await
        .expect_err("no such image");
    ensure!(refused.message().contains("busybox"), "{refused:?}");
    node.busybox().await?;
    let bad = pods::container("c", image, &["/no/such/program"]);
    let id = node
        .cri
        .create(&sandbox, &pod, &bad)
        .await
        .context("the image is there now")?;
    let refused = node.cri.start(&id).await.expect_err("no such program");
    ensure!(refused.message().contains("/no/such/program"), "{refused:?}");
    let status = node.cri.container(&id).await?;
    assert_eq!(
        (status.state(), status.exit_code, status.reason.as_str()),
        (ContainerState::ContainerExited, 128, "StartError")
    );
    node.cri.remove(&id).await?;
    let start = Instant::now();
    node.cri
        .launch(&sandbox, &pod, &pods::container("c", image, &["/bin/sleep", "99"]))
        .await?;
    ensure!(
        start.elapsed() < Duration::from_secs(9),
        "it waited: {:?}",
        start.elapsed()
    );
    assert_eq!(node.cri.containers(None).await?.len(), 1);
    node.finish().await
}

/// Answers of identical calls: one id, told or named by each.
fn one_id(answers: &[Result<String, Status>]) -> Result<String> {
    let told: BTreeSet<_> = answers.iter().flatten().collect();
    ensure!(told.len() == 1, "ids told: {told:?} of {answers:#?}");
    let id = told.first().context("none was told")?.to_string();
    for status in answers.iter().filter_map(|answer| answer.as_ref().err()) {
        let named = status.code() == Code::AlreadyExists && status.message().contains(&id);
        ensure!(named, "{status:?}");
    }
    Ok(id)
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_identical_calls_at_once_make_one() -> Result<()> {
    let node = Node::start().await?;
    let pod = node.pod("twenty");
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let (cri, pod) = (node.cri.clone(), pod.clone());
        calls.spawn(async move { cri.run_sandbox(&pod).await });
    }
    let sandbox = one_id(&calls.join_all().await)?;
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let (cri, pod, sandbox) = (node.cri.clone(), pod.clone(), sandbox.clone());
        calls.spawn(async move { cri.create(&sandbox, &pod, &sleeper("c")).await });
    }
    let container = one_id(&calls.join_all().await)?;
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let (cri, container) = (node.cri.clone(), container.clone());
        calls.spawn(async move { cri.start(&container).await });
    }
    let started = calls.join_all().await;
    ensure!(started.iter().any(Result::is_ok), "{started:#?}");
    let processes = node.processes()?;
    ensure!(processes.len() == 3, "shim, pause, container: {processes:#?}");
    assert_eq!(node.cri.sandboxes(None).await?.len(), 1);
    assert_eq!(node.cri.containers(None).await?.len(), 1);
    node.finish().await
}

/// Callers leave at random moments, in half of the rounds the daemon dies too; then one asks and waits.
#[tokio::test(flavor = "multi_thread")]
async fn callers_that_leave_and_a_daemon_that_dies_leave_one() -> Result<()> {
    let mut node = Node::start().await?;
    let seed = u64::from(std::process::id()) | 1;
    let mut dice = fastrand::Rng::with_seed(seed);
    println!("seed {seed}");
    for round in 0..10 {
        let pod = node.pod("left");
        let mut calls = tokio::task::JoinSet::new();
        for _ in 0..20 {
            let (cri, pod, patience) = (node.cri.clone(), pod.clone(), dice.u64(..60));
            calls.spawn(async move {
                // A caller's patience, not a wait for anything.
                tokio::time::timeout(Duration::from_millis(patience), cri.run_sandbox(&pod)).await
            });
        }
        if round % 2 == 1 {
            tokio::time::sleep(Duration::from_millis(dice.u64(..60))).await;
            node.kill9().await?;
        }
        let told: BTreeSet<String> = calls.join_all().await.into_iter().flatten().flatten().collect();
        ensure!(told.len() <= 1, "seed {seed} round {round}: {told:?}");
        if node.has_ended()? {
            revive(&mut node).await?;
        }
        let id = match persist(&mut node, async |cri| cri.run_sandbox(&pod).await).await? {
            Ok(id) => {
                // Who left between delivery and answer was told nothing; then it is joined no more.
                ensure!(
                    told.is_empty() || told.contains(&id),
                    "seed {seed} round {round}: {told:?}, {id}"
                );
                id
            }
            Err(status) => {
                let all = node.cri.sandboxes(None).await?;
                ensure!(
                    status.code() == Code::AlreadyExists && all.len() == 1 && status.message().contains(&all[0].id),
                    "seed {seed} round {round}: {status:?} {all:#?}"
                );
                all[0].id.clone()
            }
        };
        ensure!(
            node.shims()?.len() == 1,
            "seed {seed} round {round}: {:?}",
            node.shims()?
        );
        node.cri.stop_sandbox(&id).await?;
        node.cri.remove_sandbox(&id).await?;
        node.no_pods()
            .await
            .with_context(|| format!("seed {seed} round {round}"))?;
    }
    node.finish().await
}

/// Promise P1.4: nobody comes back for it, and it does not become ready.
#[tokio::test(flavor = "multi_thread")]
async fn what_nobody_retries_goes_away_by_itself() -> Result<()> {
    let mut node = Node::new(Options {
        network: "cni",
        ..Options::default()
    })?;
    cni::install(&node)?;
    node.file("fail-ADD", "")?;
    node.serve().await?;
    let request = RunPodSandboxRequest {
        config: Some(node.pod("given-up")),
        ..Default::default()
    };
    let asked = Instant::now();
    let mut client = node.cri.runtime.clone();
    let late = client.run_pod_sandbox(within(Duration::from_secs(1), request)).await;
    let status = late.map(|_| ()).expect_err("ADD fails");
    ensure!(
        status.message().contains("told to fail"),
        "what it waits for: {status:?}"
    );
    let hidden = node.ok(&["get", "sandboxes"]).await?;
    ensure!(hidden.contains("given-up"), "it is shown meanwhile: {hidden}");
    assert!(
        node.cri.sandboxes(None).await?.is_empty(),
        "it is not the kubelet's yet"
    );
    eventually(Duration::from_secs(80), async || {
        let left = node.ok(&["get", "sandboxes"]).await?;
        ensure!(!left.contains("given-up"), "{left}");
        Ok(())
    })
    .await?;
    println!("gone after {:?}", asked.elapsed());
    assert_eq!(cni::leases(&node), 0);
    node.no_pods().await?;
    node.finish().await
}
