//! Reboots and clocks that jump: what CRI made has ended and is told so for ever, what is owed to the network is paid,
//! pods of YAML start anew.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use e2e::boot::Boot;
use e2e::node::{Node, Options};
use e2e::pods::{self, HELLO, shell};
use e2e::v1::*;
use e2e::{cni, eventually, tools};

const LIMIT: Duration = Duration::from_secs(20);

fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_nanos() as i64
}

fn sleeper(name: &str) -> ContainerConfig {
    pods::container(name, HELLO, &["/hello", "sleep", "1000"])
}

/// What must read the same for ever: state, code, reason, times.
async fn told(node: &Node, ids: &[String]) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for id in ids {
        let c = node.cri.container(id).await?;
        all.push(format!(
            "{:?} {} {} {} {} {}",
            c.state(),
            c.exit_code,
            c.reason,
            c.created_at,
            c.started_at,
            c.finished_at
        ));
    }
    Ok(all)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_ran_has_ended_and_reads_the_same_ever_after() -> Result<()> {
    let mut node = Node::new(Options::default())?;
    let mut boot = Boot::first(&mut node)?;
    node.serve().await?;
    let pod = node.pod("rebooted");
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let running = node.cri.launch(&sandbox, &pod, &sleeper("run")).await?;
    let config = pods::container("end", HELLO, &["/hello", "exit", "4"]);
    let ended = node.cri.launch(&sandbox, &pod, &config).await?;
    let ending = node.cri.exited(&ended).await?;
    let created = node.cri.create(&sandbox, &pod, &sleeper("made")).await?;
    let stopped = node.cri.run_sandbox(&node.pod("stopped")).await?;
    node.cri.stop_sandbox(&stopped).await?;

    let before = now();
    let mut more = Vec::new();
    for n in 0..20 {
        more.push(node.cri.create(&sandbox, &pod, &sleeper(&format!("more{n}"))).await?);
    }
    boot.again(&mut node).await?;
    // Asked for before a daemon can have done anything but look.
    for id in [&sandbox, &stopped] {
        let status = node.cri.sandbox(id).await?;
        assert_eq!(status.state(), PodSandboxState::SandboxNotready, "{status:?}");
    }
    let at_once = told(&node, &more).await?;
    ensure!(
        at_once.iter().all(|c| c.starts_with("ContainerExited 255 Unknown")),
        "{at_once:#?}"
    );
    let status = node.cri.container(&running).await?;
    assert_eq!(status.state(), ContainerState::ContainerExited, "{status:?}");
    assert_eq!(
        (status.exit_code, status.reason.as_str()),
        (255, "Unknown"),
        "{status:?}"
    );
    assert!(status.message.contains("exit status lost"), "{status:?}");
    assert!(
        status.started_at > 0 && status.started_at <= status.finished_at && status.finished_at <= now(),
        "rebooted at {before}: {status:?}"
    );
    let status = node.cri.container(&ended).await?;
    assert_eq!(
        (status.exit_code, status.started_at, status.finished_at),
        (4, ending.started_at, ending.finished_at)
    );
    let status = node.cri.container(&created).await?;
    assert_ne!(status.state(), ContainerState::ContainerRunning);
    node.cri.start(&created).await.expect_err("its sandbox has ended");
    assert!(node.shims()?.is_empty(), "nothing is started for what has ended");

    let ids = [vec![running, ended, created], more].concat();
    let first = told(&node, &ids).await?;
    assert_eq!(first[3..], at_once, "told once, told for ever");
    node.crash().await?;
    assert_eq!(told(&node, &ids).await?, first, "after SIGKILL");
    boot.again(&mut node).await?;
    assert_eq!(told(&node, &ids).await?, first, "after another boot");

    // The kubelet's next attempt.
    let mut next = pod.clone();
    next.metadata.get_or_insert_default().attempt = 1;
    let again = node.cri.run_sandbox(&next).await?;
    node.cri.launch(&again, &next, &sleeper("run")).await?;
    node.finish().await
}

/// Its deadline counted from a boot that is over: hidden and kept, it would have waited for a caller for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_nobody_was_given_before_the_reboot_is_withdrawn() -> Result<()> {
    let mut node = Node::new(Options::default())?;
    let mut boot = Boot::first(&mut node)?;
    node.serve().await?;
    let pods = node.root().join("pods");
    let (cri, pod) = (node.cri.clone(), node.pod("cut"));
    let call = tokio::spawn(async move { cri.run_sandbox(&pod).await });
    while fs::read_dir(&pods)?.count() == 0 {
        ensure!(!call.is_finished(), "it was answered before anything was made");
        tokio::task::yield_now().await;
    }
    boot.again(&mut node).await?;
    let answered = call.await?.is_ok();
    eventually(LIMIT, async || {
        let (listed, left) = (node.cri.sandboxes(None).await?.len(), fs::read_dir(&pods)?.count());
        ensure!(
            listed == usize::from(answered) && left == listed,
            "{listed} listed, {left} left"
        );
        Ok(())
    })
    .await?;
    node.finish().await
}

/// Torture case T08 with a reboot: an end that nobody read, written down by the shim.
#[tokio::test(flavor = "multi_thread")]
async fn an_exit_code_of_the_last_boot_is_told() -> Result<()> {
    let mut node = Node::new(Options::default())?;
    let mut boot = Boot::first(&mut node)?;
    node.serve().await?;
    node.busybox().await?;
    let pod = pods::host_network(node.pod("last"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let id = node
        .cri
        .launch(&sandbox, &pod, &shell("c", "sleep 0.5; exit 42"))
        .await?;
    node.kill9().await?;
    let shim = node.state().join("pods").join(&sandbox).join("shim");
    eventually(LIMIT, async || {
        let left = node.processes()?;
        ensure!(left.len() == 2, "shim and pause: {left:#?}");
        // The last that the shim does of it. Until then only this file knows, and a reboot empties the tmpfs.
        ensure!(!shim.join(format!("{id}.task")).exists(), "not written down yet");
        Ok(())
    })
    .await?;
    let ended = now();
    boot.again(&mut node).await?;
    let status = node.cri.container(&id).await?;
    assert_eq!((status.exit_code, status.reason.as_str()), (42, "Error"), "{status:?}");
    assert!(
        (ended - status.finished_at).abs() < 2_000_000_000,
        "{ended}: {status:?}"
    );
    node.finish().await
}

/// Torture case T06: an address pool outlives reboots only if every boot's attachments get their DEL.
#[tokio::test(flavor = "multi_thread")]
async fn addresses_of_earlier_boots_are_given_back() -> Result<()> {
    let mut node = Node::new(Options {
        network: "cni",
        ..Options::default()
    })?;
    cni::install(&node)?;
    let mut boot = Boot::first(&mut node)?;
    node.serve().await?;
    let pods: Vec<_> = (0..4).map(|n| node.pod(&format!("p{n}"))).collect();
    for attempt in 0..4 {
        let mut ids = BTreeSet::new();
        for pod in &pods {
            let mut pod = pod.clone();
            pod.metadata.get_or_insert_default().attempt = attempt;
            let id = node.cri.run_sandbox(&pod).await;
            ids.insert(id.with_context(|| format!("boot {attempt}, {} leases", cni::leases(&node)))?);
        }
        assert_eq!((ids.len(), cni::leases(&node)), (4, 4), "boot {attempt}");
        boot.again(&mut node).await?;
        eventually(LIMIT, async || {
            ensure!(cni::leases(&node) == 0, "{} leases are kept", cni::leases(&node));
            Ok(())
        })
        .await
        .context("nobody asked for it: the loop owes it")?;
        for id in &ids {
            let dels: Vec<_> = cni::journal(&node)
                .into_iter()
                .filter(|call| call.contains(id))
                .collect();
            let del = dels.last().context("no call for it")?;
            assert!(
                del.starts_with("DEL") && del.contains(" none "),
                "no netns is left: {dels:?}"
            );
        }
    }
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_of_yaml_start_anew() -> Result<()> {
    let mut node = Node::new(Options::default())?;
    let mut boot = Boot::first(&mut node)?;
    node.serve().await?;
    let text = "apiVersion: v1\nkind: Pod\nmetadata: {name: kept}\nspec:\n  restartPolicy: Always\n  containers:\n  \
        - {name: main, image: localhost/hello, command: [/hello, sleep, '1000']}\n";
    let file = node.file("pod.yaml", text)?;
    node.ok(&["apply", "-f", &file]).await?;
    let running = async |node: &Node| {
        eventually(LIMIT, async || {
            let all = node.cri.containers(None).await?;
            let mut running = all.iter().filter(|c| c.state() == ContainerState::ContainerRunning);
            let one = running.next().with_context(|| format!("none runs: {all:#?}"))?;
            ensure!(running.next().is_none(), "two run: {all:#?}");
            Ok(one.id.clone())
        })
        .await
    };
    let first = running(&node).await?;
    boot.again(&mut node).await?;
    let second = running(&node).await?;
    assert_ne!(first, second, "an incarnation of another boot never runs again");
    node.ok(&["delete", "pod", "kept"]).await?;
    node.no_pods().await?;
    node.finish().await
}

/// Torture case T16: no order is taken from the wall clock.
#[tokio::test(flavor = "multi_thread")]
async fn a_clock_set_back_and_forward_changes_no_order() -> Result<()> {
    let mut node = Node::start().await?;
    let mut pod = node.pod("clocked");
    let mut ids = vec![node.cri.run_sandbox(&pod).await?];
    for (attempt, shift) in [(1, Some("-365d")), (2, None), (3, Some("+365d")), (4, None)] {
        node.stop().await?;
        node.options.env = shift.map(tools::clock).transpose()?.unwrap_or_default();
        node.serve().await?;
        let old = ids.last().context("one before")?;
        let status = node.cri.sandbox(old).await?;
        assert_eq!(
            status.state(),
            PodSandboxState::SandboxReady,
            "attempt {attempt}: {status:?}"
        );
        node.cri.stop_sandbox(old).await?;
        pod.metadata.get_or_insert_default().attempt = attempt;
        let started = std::time::Instant::now();
        let id = node.cri.run_sandbox(&pod).await?;
        let container = node.cri.launch(&id, &pod, &sleeper("c")).await?;
        node.cri.exec(&container, &["/hello", "echo", "x"], 5).await?;
        assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
        ids.push(id);
        let mut listed = node.cri.sandboxes(None).await?;
        listed.sort_by_key(|sandbox| sandbox.created_at);
        let order: Vec<_> = listed.into_iter().map(|sandbox| sandbox.id).collect();
        assert_eq!(order, ids, "attempt {attempt}");
    }
    node.finish().await
}
