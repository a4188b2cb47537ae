//! The injector: one fault after the other, each followed until it is repaired.

use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use fastrand::Rng;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::task::JoinSet;

use super::drift::{self, Drift};
use super::{Pod, Shared, count};
use crate::eventually;
use crate::leaks::{Process, processes};
use crate::v1::PodSandboxState;

/// Longest a repair may take that needs no second look.
const SOON: Duration = Duration::from_secs(20);

pub async fn until(shared: &Rc<Shared>, mut dice: Rng, end: Instant) -> Result<()> {
    let mut drifts = JoinSet::new();
    while Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(dice.u64(200..2500))).await;
        match dice.u8(0..10) {
            0..=3 => daemon(shared, &mut dice).await.context("kill the daemon")?,
            4 | 5 => shim(shared, &mut dice).await.context("kill a shim")?,
            6 => pause(shared, &mut dice).await.context("kill a pause")?,
            _ => {
                let kind = Drift::any(&mut dice);
                let caused = drift::cause(shared, kind, &mut dice).await;
                if let Some(caused) = caused.with_context(|| format!("{kind:?}"))? {
                    let shared = shared.clone();
                    drifts.spawn_local(async move { drift::repaired(&shared, caused, end).await });
                }
            }
        }
    }
    // What belongs to nobody is looked for when a daemon starts, and then seldom.
    daemon(shared, &mut dice).await.context("kill the daemon")?;
    while let Some(done) = drifts.join_next().await {
        done?.context("drift")?;
    }
    Ok(())
}

/// A living pod.
pub fn pick(shared: &Shared, dice: &mut Rng) -> Option<Pod> {
    dice.choice(shared.pods.borrow().iter()).cloned()
}

/// SIGKILL, and a new one at once or after a while in which containers end unseen.
async fn daemon(shared: &Shared, dice: &mut Rng) -> Result<()> {
    let mut node = shared.node.lock().await;
    count(&shared.tally.daemon_kills);
    node.kill9().await?;
    if dice.bool() {
        tokio::time::sleep(Duration::from_millis(dice.u64(1..2500))).await;
    }
    let start = Instant::now();
    node.serve().await?;
    shared.tally.repaired("daemon", start);
    Ok(())
}

/// Pid of the pod's shim: its command line names the pod's directory.
fn shim_of(sandbox: &str) -> Result<Option<i32>> {
    let is = |process: &Process| process.command.contains("reconcile-shim serve") && process.command.contains(sandbox);
    Ok(processes()?.into_iter().find(is).map(|process| process.pid))
}

async fn shim(shared: &Shared, dice: &mut Rng) -> Result<()> {
    let _node = shared.node.lock().await;
    let Some(Pod { sandbox, calm }) = pick(shared, dice) else {
        return Ok(());
    };
    let Ok(_alone) = tokio::time::timeout(SOON, calm.write()).await else {
        return Ok(());
    };
    let Some(pid) = shim_of(&sandbox)? else { return Ok(()) };
    count(&shared.tally.shim_kills);
    let start = Instant::now();
    kill(Pid::from_raw(pid), Signal::SIGKILL)?;
    let adopted = eventually(SOON, async || match shim_of(&sandbox)? {
        Some(new) if new != pid => Ok(true),
        _ if gone(shared, &sandbox) => Ok(false),
        _ => bail!("no new shim for {sandbox}"),
    });
    match adopted.await? {
        true => shared.tally.repaired("shim", start),
        false => count(&shared.tally.moot),
    }
    Ok(())
}

/// Its life is over, or being ended: then nothing is repaired any more.
pub fn gone(shared: &Shared, sandbox: &str) -> bool {
    !shared.pods.borrow().iter().any(|pod| pod.sandbox == sandbox)
}

async fn pause(shared: &Shared, dice: &mut Rng) -> Result<()> {
    let _node = shared.node.lock().await;
    let Some(Pod { sandbox, .. }) = pick(shared, dice) else {
        return Ok(());
    };
    let Ok(pid) = shared.cri.sandbox_pid(&sandbox).await else {
        return Ok(());
    };
    if pid <= 0 || gone(shared, &sandbox) {
        return Ok(());
    }
    count(&shared.tally.pause_kills);
    let start = Instant::now();
    match kill(Pid::from_raw(pid), Signal::SIGKILL) {
        // It went by itself.
        Err(nix::errno::Errno::ESRCH) => return Ok(()),
        other => other?,
    }
    let back = eventually(SOON, async || {
        if gone(shared, &sandbox) {
            return Ok(false);
        }
        let status = shared.cri.sandbox(&sandbox).await?;
        ensure!(status.state() == PodSandboxState::SandboxReady, "{status:?}");
        let new = shared.cri.sandbox_pid(&sandbox).await?;
        ensure!(new != pid && Process::read(new).is_some(), "pause is {new}, was {pid}");
        Ok(true)
    });
    match back.await? {
        true => shared.tally.repaired("pause", start),
        false => count(&shared.tally.moot),
    }
    Ok(())
}
