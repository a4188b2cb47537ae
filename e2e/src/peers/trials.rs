//! What is done to a runtime, and what is looked at afterwards.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::runtime::Runtime;
use crate::client::Cri;
use crate::eventually;
use crate::leaks::Process;
use crate::pods::{self, shell};
use crate::v1::*;

pub type Rows = Vec<(&'static str, String)>;

/// On the host's network: CNI is not what is compared.
fn pod(runtime: &Runtime, name: &str) -> PodSandboxConfig {
    let mut pod = pods::host_network(pods::sandbox(name, &runtime.dir().join("logs")));
    let security = pod
        .linux
        .get_or_insert_default()
        .security_context
        .get_or_insert_default();
    security.namespace_options.get_or_insert_default().pid = NamespaceMode::Container.into();
    pod
}

async fn launched(runtime: &Runtime, name: &str, script: &str) -> Result<(String, String, PodSandboxConfig)> {
    let pod = pod(runtime, name);
    // Tried again as the kubelet does: after a fault the first try of a peer may fail.
    let sandbox = eventually(Duration::from_secs(30), async || {
        Ok(runtime.cri().run_sandbox(&pod).await?)
    })
    .await?;
    let mut config = shell("c", script);
    let gate = runtime.dir().join(format!("gate-{name}"));
    fs::create_dir_all(&gate)?;
    config.mounts = vec![Mount {
        host_path: gate.display().to_string(),
        container_path: "/gate".into(),
        ..Default::default()
    }];
    let id = runtime.cri().launch(&sandbox, &pod, &config).await?;
    Ok((sandbox, id, pod))
}

/// Five times: the daemon is killed while 20 pods are made.
pub async fn amid_creates(runtime: &mut Runtime) -> Result<Rows> {
    let (mut answered, mut lost, mut unasked) = (0, 0, 0);
    let before: BTreeSet<_> = runtime.things()?.into_iter().collect();
    for (round, moment) in [60, 120, 200, 350, 500].into_iter().enumerate() {
        let mut lanes = tokio::task::JoinSet::new();
        for n in 0..20 {
            let (cri, pod) = (runtime.cri().clone(), pod(runtime, &format!("amid{round}-{n}")));
            lanes.spawn(async move { cri.run_sandbox(&pod).await.ok() });
        }
        // Not a wait for anything: the moment of the kill is the point.
        tokio::time::sleep(Duration::from_millis(moment)).await;
        runtime.kill9().await?;
        let told: BTreeSet<_> = lanes.join_all().await.into_iter().flatten().collect();
        runtime.serve().await?;
        let listed = runtime.cri().sandboxes(None).await?;
        let ready = listed
            .iter()
            .filter(|sandbox| sandbox.state() == PodSandboxState::SandboxReady);
        let ready: BTreeSet<_> = ready.map(|sandbox| sandbox.id.clone()).collect();
        answered += told.len();
        lost += told.difference(&ready).count();
        unasked += ready.difference(&told).count();
        eventually(Duration::from_secs(60), async || {
            runtime.clear().await?;
            ensure!(runtime.cri().sandboxes(None).await?.is_empty(), "sandboxes are left");
            Ok(())
        })
        .await?;
    }
    let leaks = async || -> Result<Vec<String>> {
        runtime.clear().await?;
        Ok(runtime
            .things()?
            .into_iter()
            .filter(|thing| !before.contains(thing))
            .collect())
    };
    let start = Instant::now();
    let mut left = leaks().await?;
    while !left.is_empty() && start.elapsed() < Duration::from_secs(60) {
        tokio::time::sleep(Duration::from_millis(500)).await;
        left = leaks().await?;
    }
    let of = |kind: &str| left.iter().filter(|thing| thing.starts_with(kind)).count();
    Ok(vec![
        (
            "daemon killed amid 5 × 20 creates: answered, of these lost",
            format!("{answered}, {lost}"),
        ),
        ("… listed READY at once though nobody was told", unasked.to_string()),
        (
            "… left a minute after all was removed: processes, mounts, cgroups",
            format!("{}, {}, {}", of("process"), of("mount"), of("cgroup")),
        ),
    ])
}

async fn ended(cri: &Cri, id: &str) -> Result<Option<ContainerStatus>> {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(15) {
        let status = cri.container(id).await?;
        if status.state() == ContainerState::ContainerExited {
            return Ok(Some(status));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(None)
}

/// 16 containers end while nobody is there to see it.
pub async fn away(runtime: &mut Runtime) -> Result<Rows> {
    let mut all = Vec::new();
    for n in 0..16 {
        let name = format!("away{n}");
        let script = format!(
            "echo first; while [ ! -e /gate/go ]; do sleep 0.05; done; echo last; exit {}",
            n + 3
        );
        let (_, id, pod) = launched(runtime, &name, &script).await?;
        let pid = runtime.cri().container_pid(&id).await?;
        all.push((n + 3, id, pid, runtime.dir().join(format!("gate-{name}/go")), pod));
    }
    runtime.kill9().await?;
    for (_, _, _, gate, _) in &all {
        fs::write(gate, "")?;
    }
    eventually(Duration::from_secs(20), async || {
        let alive = all
            .iter()
            .filter(|(_, _, pid, ..)| Process::read(*pid).is_some_and(|p| p.state != 'Z'));
        ensure!(alive.count() == 0, "some still run");
        Ok(())
    })
    .await?;
    runtime.serve().await?;
    let (mut wrong, mut lines) = (0, 0);
    for (code, id, _, _, pod) in &all {
        let status = ended(runtime.cri(), id).await?;
        wrong += u32::from(status.is_none_or(|status| status.exit_code != *code));
        let texts = pods::log_texts(format!("{}/c.log", pod.log_directory)).unwrap_or_default();
        lines += u32::from(texts != ["first", "last"]);
    }
    runtime.clear().await?;
    Ok(vec![
        (
            "daemon away while 16 containers end: wrong exit codes",
            wrong.to_string(),
        ),
        ("… logs without their last line", lines.to_string()),
    ])
}

/// The shim of a running container is killed.
pub async fn shim(runtime: &mut Runtime) -> Result<Rows> {
    let (sandbox, id, _) = launched(
        runtime,
        "shim",
        "trap 'exit 6' TERM; echo up; while :; do sleep 0.05; done",
    )
    .await?;
    let pid = runtime.cri().container_pid(&id).await?;
    let shim = runtime.shim(&sandbox)?.context("no shim")?;
    let start = Instant::now();
    kill(Pid::from_raw(shim), Signal::SIGKILL)?;
    let mut fate = "still said RUNNING after 15 s, and no exec".to_owned();
    while start.elapsed() < Duration::from_secs(15) {
        let status = runtime.cri().container(&id).await?;
        let runs = Process::read(pid).is_some_and(|process| process.state != 'Z');
        let works = runtime
            .cri()
            .exec(&id, &["true"], 2)
            .await
            .is_ok_and(|answer| answer.exit_code == 0);
        if runs && works {
            fate = format!("runs on, exec works again after {:.2} s", start.elapsed().as_secs_f64());
            break;
        }
        if !runs && status.state() == ContainerState::ContainerExited {
            let took = start.elapsed().as_secs_f64();
            fate = format!(
                "dies; told so after {took:.2} s as {} {}",
                status.exit_code, status.reason
            );
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    runtime.clear().await?;
    Ok(vec![("shim killed: the container", fate)])
}

/// The pause of a pod without a shared pid namespace is killed.
pub async fn pause(runtime: &mut Runtime) -> Result<Rows> {
    let (sandbox, id, _) = launched(runtime, "pause", "while :; do sleep 0.05; done").await?;
    let pid = runtime.cri().container_pid(&id).await?;
    let pause = runtime.cri().sandbox_pid(&sandbox).await?;
    kill(Pid::from_raw(pause), Signal::SIGKILL)?;
    let start = Instant::now();
    let mut fate = "no change seen".to_owned();
    while start.elapsed() < Duration::from_secs(5) {
        let state = runtime.cri().sandbox(&sandbox).await?.state();
        let now = runtime.cri().sandbox_pid(&sandbox).await.unwrap_or(0);
        if state != PodSandboxState::SandboxReady {
            fate = format!(
                "NotReady after {:.2} s: the pod is made anew",
                start.elapsed().as_secs_f64()
            );
            break;
        }
        if now != pause && Process::read(now).is_some() {
            fate = format!("stays Ready, replaced after {:.2} s", start.elapsed().as_secs_f64());
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let runs = Process::read(pid).is_some_and(|process| process.state != 'Z');
    runtime.clear().await?;
    let then = if runs {
        "its container runs on"
    } else {
        "its container died"
    };
    Ok(vec![("pause killed: the sandbox", format!("{fate}; {then}"))])
}

/// 300,000 numbered lines while the daemon is killed six times.
pub async fn logs(runtime: &mut Runtime) -> Result<Rows> {
    const LINES: usize = 300_000;
    let script = format!("while [ ! -e /gate/go ]; do sleep 0.01; done; seq 1 {LINES}; exit 9");
    let (_, id, pod) = launched(runtime, "logs", &script).await?;
    let log = format!("{}/c.log", pod.log_directory);
    fs::write(runtime.dir().join("gate-logs/go"), "")?;
    for _ in 0..6 {
        tokio::time::sleep(Duration::from_millis(30)).await;
        runtime.kill9().await?;
        runtime.serve().await?;
    }
    let status = ended(runtime.cri(), &id).await?;
    let texts = pods::log_texts(&log).unwrap_or_default();
    let found: BTreeSet<usize> = texts.iter().filter_map(|text| text.parse().ok()).collect();
    runtime.clear().await?;
    let code = status.map_or("never ended".to_owned(), |status| status.exit_code.to_string());
    Ok(vec![(
        "daemon killed 6 times under 300,000 log lines: lines lost, twice; exit code (9)",
        format!("{}, {}; {code}", LINES - found.len(), texts.len() - found.len()),
    )])
}
