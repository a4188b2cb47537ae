//! One lane: pods one after the other, each with containers whose exit code and output are known beforehand.

use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fastrand::Rng;
use tokio::sync::RwLock;

use super::retry::{self, Started, again};
use super::{Pod, Shared, count};
use crate::pods::{self, shell};
use crate::v1::*;

/// How a container's life shall end.
#[derive(Clone, Copy, Debug)]
enum End {
    /// By itself, with this code.
    Exit(i32),
    /// By SIGTERM, upon which it says goodbye and exits with this code.
    Term(i32),
    /// By SIGKILL.
    Kill,
}

impl End {
    fn any(dice: &mut Rng) -> End {
        match dice.u8(0..4) {
            0 | 1 => End::Exit(dice.i32(0..120)),
            2 => End::Term(dice.i32(1..120)),
            _ => End::Kill,
        }
    }

    fn code(self) -> i32 {
        match self {
            End::Exit(code) | End::Term(code) => code,
            End::Kill => 137,
        }
    }
}

/// A running container and what is expected of it.
struct Life {
    id: String,
    end: End,
    /// A directory that it sees as `/gate`: it ends when the file `go` is in it.
    gate: PathBuf,
    /// Its log's files, oldest first.
    logs: Vec<PathBuf>,
}

pub async fn live(shared: &Shared, mut dice: Rng, lane: u64, end: Instant) -> Result<()> {
    let mut round = 0;
    while Instant::now() < end {
        round += 1;
        let name = format!("lane{lane}-{round}");
        one_pod(shared, &mut dice, &name, end)
            .await
            .with_context(|| name.clone())?;
    }
    Ok(())
}

async fn one_pod(shared: &Shared, dice: &mut Rng, name: &str, end: Instant) -> Result<()> {
    let cri = &shared.cri;
    let mut pod = pods::sandbox(name, &shared.dir.with_file_name("logs"));
    if dice.u8(0..3) == 0 {
        pod = pods::host_network(pod);
    }
    // Else the pause's death would be that of all containers.
    pod = pods::pid_namespace(pod, NamespaceMode::Container);
    let sandbox = retry::run_sandbox(cri, &pod).await?;
    count(&shared.tally.pods);
    let calm = Rc::new(RwLock::new(()));
    shared.pods.borrow_mut().push(Pod {
        sandbox: sandbox.clone(),
        calm: calm.clone(),
    });
    let mut lives = Vec::new();
    for n in 0..dice.u8(1..3) {
        lives.extend(born(shared, dice, &sandbox, &pod, &format!("c{n}")).await?);
    }
    pause_a_moment(dice, 200..3000, end).await;
    for life in &mut lives {
        disturb(shared, dice, life).await?;
    }
    let quiet = calm.read().await;
    for life in lives {
        die(shared, dice, &sandbox, life).await?;
    }
    drop(quiet);
    shared.pods.borrow_mut().retain(|pod| pod.sandbox != sandbox);
    if dice.bool() {
        again("StopPodSandbox", async || cri.stop_sandbox(&sandbox).await).await?;
    }
    again("RemovePodSandbox", async || cri.remove_sandbox(&sandbox).await).await
}

async fn pause_a_moment(dice: &mut Rng, millis: std::ops::Range<u64>, end: Instant) {
    let moment = Duration::from_millis(dice.u64(millis));
    // Life goes on for a while: this is the load, nothing is waited for.
    tokio::time::sleep(moment.min(end.saturating_duration_since(Instant::now()))).await;
}

/// Numbered lines, until it is told to end.
fn script(end: End) -> String {
    let last = match end {
        End::Exit(code) => format!("echo last $i; exit {code}"),
        // Only a signal ends these.
        _ => "while :; do sleep 0.05; done".to_owned(),
    };
    let trap = match end {
        End::Term(code) => format!("trap 'echo last $i; exit {code}' TERM; "),
        _ => String::new(),
    };
    format!("i=0; {trap}while [ ! -e /gate/go ]; do echo line $i; i=$((i+1)); sleep 0.02; done; {last}")
}

async fn born(
    shared: &Shared,
    dice: &mut Rng,
    sandbox: &str,
    pod: &PodSandboxConfig,
    name: &str,
) -> Result<Option<Life>> {
    let cri = &shared.cri;
    let end = End::any(dice);
    let gate = shared.dir.join(format!("{}-{name}", &sandbox[..16]));
    fs::create_dir(&gate).with_context(|| gate.display().to_string())?;
    let mut config = shell(name, &script(end));
    config.mounts = vec![Mount {
        host_path: gate.display().to_string(),
        container_path: "/gate".into(),
        ..Default::default()
    }];
    let id = retry::create(cri, sandbox, pod, &config).await?;
    count(&shared.tally.containers);
    if retry::start(cri, &id).await? == Started::Never {
        again("RemoveContainer", async || cri.remove(&id).await).await?;
        return Ok(None);
    }
    let log = Path::new(&pod.log_directory).join(&config.log_path);
    // Before its first line a shell has set no trap, and the first process of a pid namespace is deaf to SIGTERM then.
    crate::eventually(Duration::from_secs(60), async || {
        ensure!(!pods::log_texts(&log)?.is_empty(), "container {id} says nothing");
        Ok(())
    })
    .await?;
    Ok(Some(Life {
        id,
        end,
        gate,
        logs: vec![log],
    }))
}

/// What a kubelet does with a container that runs: rotates its log, runs a command in it.
async fn disturb(shared: &Shared, dice: &mut Rng, life: &mut Life) -> Result<()> {
    let cri = &shared.cri;
    if dice.bool() {
        let current = life.logs.last().context("a log")?.clone();
        let old = current.with_extension(format!("{}", life.logs.len()));
        fs::rename(&current, &old).with_context(|| format!("rotate {}", current.display()))?;
        again("ReopenContainerLog", async || cri.reopen_log(&life.id).await).await?;
        life.logs.insert(life.logs.len() - 1, old);
    }
    if dice.bool() {
        let answer = again("ExecSync", async || cri.exec(&life.id, &["echo", "hi"], 20).await).await?;
        ensure!(
            (answer.exit_code, &*answer.stdout) == (0, b"hi\n"),
            "exec in {}: {answer:?}",
            life.id
        );
    }
    Ok(())
}

async fn die(shared: &Shared, dice: &mut Rng, sandbox: &str, life: Life) -> Result<()> {
    let cri = &shared.cri;
    let id = &life.id;
    match life.end {
        End::Exit(_) => fs::write(life.gate.join("go"), "")?,
        End::Term(_) => again("StopContainer", async || cri.stop(id, 30).await).await?,
        End::Kill => again("StopContainer", async || cri.stop(id, 0).await).await?,
    }
    let status = retry::exited(cri, id).await?;
    ensure!(
        status.exit_code == life.end.code(),
        "container {id} of {sandbox} should end with {:?}: {status:?}",
        life.end
    );
    whole(shared, &life).with_context(|| format!("container {id} of {sandbox}, {:?}", life.end))?;
    let later = again("ContainerStatus", async || cri.container(id).await).await?;
    ensure!(later == status, "told otherwise later: {status:?}, then {later:?}");
    if dice.bool() {
        again("RemoveContainer", async || cri.remove(id).await).await?;
    }
    Ok(())
}

/// Every line is there, once, in order.
fn whole(shared: &Shared, life: &Life) -> Result<()> {
    let mut texts = Vec::new();
    for log in &life.logs {
        texts.extend(pods::log_texts(log)?);
    }
    let last = match life.end {
        End::Kill => None,
        _ => texts.pop(),
    };
    for (n, text) in texts.iter().enumerate() {
        ensure!(
            *text == format!("line {n}"),
            "line {n} of {} reads {text:?}",
            texts.len()
        );
    }
    if let Some(last) = last {
        let lines = texts.len();
        // A trap may run between a line and the next number.
        let amid = matches!(life.end, End::Term(_)) && lines > 0 && last == format!("last {}", lines - 1);
        ensure!(last == format!("last {lines}") || amid, "after {lines} lines: {last:?}");
    }
    let lines = &shared.tally.lines;
    lines.set(lines.get() + texts.len() as u64);
    Ok(())
}
