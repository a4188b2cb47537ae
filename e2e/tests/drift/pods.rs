//! Kinds 7 to 12, 34 and 35: processes, shims, pauses, execs.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use e2e::leaks::Process;
use e2e::node::{Node, answers};
use e2e::pods::{self, shell};
use e2e::v1::*;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::{dry, finding, json, kill9, quiet, repaired, runs, state_dir, up, up_in};

/// A process of the test's own with exactly this pid.
fn reuse(pid: i32) -> Result<Child> {
    for _ in 0..500 {
        // proc_sys_kernel(5): the next process gets the number after this one.
        fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string())?;
        let mut child = Command::new("sleep").arg("1000").spawn()?;
        if child.id() as i32 == pid {
            return Ok(child);
        }
        child.kill()?;
        child.wait()?;
    }
    bail!("pid {pid} was not to be had")
}

/// Another process with the container's pid is not the container, and is never signalled.
#[tokio::test(flavor = "multi_thread")]
async fn drift_07_pid_reused() -> Result<()> {
    let mut node = Node::start().await?;
    let gone = up(&node, "reused").await?;
    node.stop().await?;
    for shim in node.shims()? {
        kill9(shim)?;
    }
    kill9(gone.pid)?;
    e2e::eventually(Duration::from_secs(10), async || {
        ensure!(Process::read(gone.pid).is_none(), "not reaped yet");
        Ok(())
    })
    .await?;
    let mut other = reuse(gone.pid)?;
    let (code, plan) = dry(&node).await?;
    ensure!(code == 10, "{code} {plan:#}");
    crate::step(&plan, "task", "ShimGone").context("it is not taken for its process")?;
    let (code, report) = json(&node, &["--once"]).await?;
    ensure!(code == 10, "{code}: {report:#}");
    node.serve().await?;
    let status = node.cri.exited(&gone.id).await?;
    assert!([137, 255].contains(&status.exit_code), "{status:?}");
    node.cri.stop_sandbox(&gone.sandbox).await?;
    node.cri.remove_sandbox(&gone.sandbox).await?;
    assert!(other.try_wait()?.is_none(), "a stranger was signalled");
    other.kill()?;
    other.wait()?;
    node.finish().await
}

/// Every number of a counting container is in its log once, whoever dies; the new shim has it within a second.
#[tokio::test(flavor = "multi_thread")]
async fn drift_08_shim_dead_container_alive() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = node.pod("counts");
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let script = "trap 'exit 7' TERM; i=0; while :; do echo $i; i=$((i+1)); [ $((i%500)) = 0 ] && sleep 0.01; done";
    let id = node.cri.launch(&sandbox, &pod, &shell("c", script)).await?;
    let pid = node.cri.container_pid(&id).await?;
    let mut adopted = Vec::new();
    for _ in 0..3 {
        let old = node.shims()?.pop().context("a shim")?;
        kill9(old)?;
        let begun = Instant::now();
        e2e::eventually(Duration::from_secs(20), async || {
            let shims = node.shims()?;
            ensure!(shims.len() == 1 && shims[0] != old, "no new shim: {shims:?}");
            let socket = fs::read_dir(node.state().join("pods").join(&sandbox).join("shim"))?.flatten();
            let listening = socket.map(|e| e.path()).any(|path| answers(&path));
            ensure!(listening, "it does not listen");
            Ok(())
        })
        .await?;
        adopted.push(begun.elapsed());
        assert_eq!(node.cri.exec(&id, &["true"], 5).await?.exit_code, 0);
        assert_eq!(node.cri.container_pid(&id).await?, pid);
    }
    // A promise of what it does, not of how busy the machine is: once of three times is enough.
    let fastest = adopted.iter().min().context("it was adopted")?;
    ensure!(*fastest < Duration::from_secs(1), "adopted after {adopted:?}");
    node.cri.stop(&id, 10).await?;
    let status = node.cri.exited(&id).await?;
    assert_eq!(status.exit_code, 7);
    let texts = pods::log_texts(&status.log_path)?;
    for (n, text) in texts.iter().enumerate() {
        ensure!(*text == n.to_string(), "line {n} is {text:?}");
    }
    assert!(texts.len() > 100);
    node.finish().await
}

/// Torture case T07: the monitor of a sleeper is killed, alone and along with it. Within 5 s it is adopted, or told as
/// ended and not as a success; never does it run without its process. Without a daemon it is a step of the plan.
#[tokio::test(flavor = "multi_thread")]
async fn drift_08_a_sleepers_monitor_is_killed() -> Result<()> {
    let mut node = Node::start().await?;
    node.busybox().await?;
    for along in [false, true] {
        let pod = node.pod(if along { "both" } else { "monitor" });
        let sandbox = node.cri.run_sandbox(&pod).await?;
        let id = node.cri.launch(&sandbox, &pod, &shell("c", "sleep 1000")).await?;
        let pid = node.cri.container_pid(&id).await?;
        kill9(shim_of(&node, &sandbox)?)?;
        if along {
            kill9(pid)?;
        }
        e2e::eventually(Duration::from_secs(5), async || {
            let status = node.cri.container(&id).await?;
            if !along {
                let run = node.cri.exec(&id, &["true"], 2).await?;
                ensure!(
                    run.exit_code == 0 && node.cri.container_pid(&id).await? == pid,
                    "{run:?}"
                );
                return Ok(());
            }
            let lost = (255, "Unknown", "exit status lost");
            let told = (status.exit_code, &*status.reason, &*status.message);
            ensure!(status.state() == ContainerState::ContainerExited, "{status:?}");
            ensure!(told == lost || status.exit_code == 137, "{status:?}");
            Ok(())
        })
        .await?;
        // Whoever reaps orphans on this node may take a while.
        let runs = Process::read(pid).is_some_and(|process| process.state != 'Z');
        assert_eq!(runs, !along);
        // The pause lives through it.
        let status = node.cri.sandbox(&sandbox).await?;
        assert_eq!(status.state(), PodSandboxState::SandboxReady, "{status:?}");
    }
    let alone = up(&node, "alone").await?;
    quiet(&node).await?;
    node.stop().await?;
    kill9(shim_of(&node, &alone.sandbox)?)?;
    repaired(&node, "shim", "Dead", "A").await?;
    node.serve().await?;
    runs(&node, &alone).await?;
    assert_eq!(
        node.cri.exec(&alone.id, &["/hello", "echo", "x"], 5).await?.exit_code,
        0
    );
    node.finish().await
}

/// A terminal cannot be handed over: the container gets SIGHUP, and its status says why.
#[tokio::test(flavor = "multi_thread")]
async fn drift_08_shim_dead_terminal() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = node.pod("tty");
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let mut config = shell("c", "trap 'exit 9' HUP; echo ready; while :; do sleep 0.05; done");
    config.tty = true;
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    let log = node.cri.container(&id).await?.log_path;
    e2e::eventually(Duration::from_secs(20), async || {
        ensure!(!pods::log_texts(&log)?.is_empty(), "the trap is not set yet");
        Ok(())
    })
    .await?;
    kill9(node.shims()?.pop().context("a shim")?)?;
    let status = node.cri.exited(&id).await?;
    assert!([9, 255].contains(&status.exit_code), "{status:?}");
    assert!(
        status.message.contains("its terminal ended with its shim"),
        "{status:?}"
    );
    node.finish().await
}

/// A stopped shim sees no exit and is told; let go, it tells the real code. With its pod it ends.
#[tokio::test(flavor = "multi_thread")]
async fn drift_09_shim_alive_but_silent() -> Result<()> {
    let node = Node::start().await?;
    let (stuck, other) = (up(&node, "stuck").await?, up(&node, "other").await?);
    let shim = shim_of(&node, &stuck.sandbox)?;
    kill(Pid::from_raw(shim), Signal::SIGSTOP)?;
    kill9(stuck.pid)?;
    let begun = Instant::now();
    let (code, findings) = json(&node, &["doctor"]).await?;
    assert_eq!(code, 20, "{findings:#}");
    let found = finding(&findings, "shim-stuck")?;
    assert!(
        found["repair"].as_str().is_some_and(|r| r.contains(&shim.to_string())),
        "{found:#}"
    );
    ensure!(
        begun.elapsed() < Duration::from_secs(20),
        "bounded, yet {:?}",
        begun.elapsed()
    );
    runs(&node, &other).await?;
    kill(Pid::from_raw(shim), Signal::SIGCONT)?;
    assert_eq!(node.cri.exited(&stuck.id).await?.exit_code, 137);
    quiet(&node).await?;
    node.cri.stop_sandbox(&stuck.sandbox).await?;
    node.cri.remove_sandbox(&stuck.sandbox).await?;
    e2e::eventually(Duration::from_secs(20), async || {
        ensure!(Process::read(shim).is_none(), "it does not end with its pod");
        Ok(())
    })
    .await?;
    node.finish().await
}

fn shim_of(node: &Node, sandbox: &str) -> Result<i32> {
    let lines = node.processes()?;
    let line = lines
        .iter()
        .find(|l| l.contains("reconcile-shim serve") && l.contains(sandbox));
    line.and_then(|l| l.split(' ').next()?.parse().ok()).context("its shim")
}

/// Sockets that nobody listens on any more are no obstacle: the shim's and the daemon's own.
#[tokio::test(flavor = "multi_thread")]
async fn drift_10_stale_sockets() -> Result<()> {
    let mut node = Node::start().await?;
    let held = up(&node, "held").await?;
    node.kill9().await?;
    kill9(node.shims()?.pop().context("a shim")?)?;
    let shim = state_dir(&node, &held).join("shim");
    let sockets = fs::read_dir(&shim)?.flatten();
    let stale = sockets.filter(|e| e.file_type().is_ok_and(|t| t.is_socket())).count();
    assert!(stale > 0 && node.socket().exists() && !answers(&node.socket()));
    repaired(&node, "shim", "Dead", "A").await?;
    node.serve().await?;
    runs(&node, &held).await?;
    node.finish().await
}

/// The pause is started again in place; with a shared pid namespace its end is the pod's.
#[tokio::test(flavor = "multi_thread")]
async fn drift_12_pause_gone() -> Result<()> {
    let mut node = Node::start().await?;
    let mut config = node.pod("own");
    let linux = config.linux.get_or_insert_default();
    let options = linux
        .security_context
        .get_or_insert_default()
        .namespace_options
        .get_or_insert_default();
    options.pid = NamespaceMode::Container.into();
    let own = up_in(&node, config).await?;
    let mut shared = node.pod("shared");
    let linux = shared.linux.get_or_insert_default();
    let options = linux
        .security_context
        .get_or_insert_default()
        .namespace_options
        .get_or_insert_default();
    options.pid = NamespaceMode::Pod.into();
    let sandbox = node.cri.run_sandbox(&shared).await?;

    let pause = node.cri.sandbox_pid(&own.sandbox).await?;
    kill9(pause)?;
    e2e::eventually(Duration::from_secs(20), async || {
        let now = node.cri.sandbox_pid(&own.sandbox).await?;
        ensure!(now != pause && now > 0, "pause {now}, {pause} before");
        Ok(())
    })
    .await?;
    runs(&node, &own).await?;

    let pause = node.cri.sandbox_pid(&own.sandbox).await?;
    node.stop().await?;
    kill9(pause)?;
    e2e::eventually(Duration::from_secs(20), async || {
        ensure!(Process::read(pause).is_none(), "not reaped");
        Ok(())
    })
    .await?;
    repaired(&node, "pause", "Gone", "A").await?;
    node.serve().await?;
    runs(&node, &own).await?;

    kill9(node.cri.sandbox_pid(&sandbox).await?)?;
    e2e::eventually(Duration::from_secs(20), async || {
        let state = node.cri.sandbox(&sandbox).await?.state();
        ensure!(state == PodSandboxState::SandboxNotready, "{state:?}");
        Ok(())
    })
    .await?;
    node.finish().await
}

/// An exec ends with the daemon that asked for it.
#[tokio::test(flavor = "multi_thread")]
async fn drift_35_exec_outlives_client() -> Result<()> {
    let mut node = Node::start().await?;
    let up = up(&node, "exec").await?;
    let (cri, id) = (node.cri.clone(), up.id.clone());
    let exec = tokio::spawn(async move { cri.exec(&id, &["/hello", "sleep", "987"], 0).await });
    let running = || -> Result<usize> { Ok(node_execs(&node)?.len()) };
    e2e::eventually(Duration::from_secs(20), async || {
        ensure!(running()? == 1, "it does not run");
        Ok(())
    })
    .await?;
    node.kill9().await?;
    assert!(exec.await?.is_err());
    e2e::eventually(Duration::from_secs(20), async || {
        let left = node_execs(&node)?;
        ensure!(left.is_empty(), "{left:?}");
        Ok(())
    })
    .await?;
    node.serve().await?;
    runs(&node, &up).await?;
    quiet(&node).await?;
    node.finish().await
}

fn node_execs(node: &Node) -> Result<Vec<String>> {
    let lines = node.processes()?;
    Ok(lines.into_iter().filter(|line| line.contains("sleep 987")).collect())
}
