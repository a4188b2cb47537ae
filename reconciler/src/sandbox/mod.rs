//! PodSandbox: what the containers of a pod share.
//!
//! ```text
//!   pause                       its first process
//!   network  shim               addresses and ports; the monitor
//!   cgroup   netns   files      what those stand in
//!   record                      the copy of the wish
//! ```

mod cgroup;
mod files;
mod netns;
pub mod network;
mod pause;
pub mod selinux;
mod shim;

use std::path::PathBuf;

use async_trait::async_trait;
use state::container::ContainerPhase;
use state::sandbox::{NamespaceMode, SandboxGoal, SandboxKind, SandboxPhase, SandboxSpec, SandboxStatus};
use state::{Condition, Container, Object, PodSandbox};

pub use cgroup::path as cgroup_path;
pub use files::paths as files;
pub use netns::{pins, user_namespace};

use crate::config::Live;
use crate::config::handlers::Ready;
use crate::engine::pass::{Height, Staged, Summary};
use crate::engine::record::{Placed, Record};
use crate::engine::stage::{AnyStage, Listed, Why};
use crate::engine::{Context, conditions, live};
use crate::error::{Error, Result};
use crate::world::Paths;
use crate::world::paths::DIR_MODE;

/// Rungs that a sandbox keeps when it has stopped: its record.
const STOPPED: usize = 1;

static RUNGS: [&[&'static dyn AnyStage<SandboxKind>]; 4] = [
    &[&Listed(Record)],
    &[&Listed(cgroup::Cgroup), &Listed(netns::Netns), &Listed(files::Files)],
    &[&Listed(network::Network), &Listed(shim::Shim)],
    &[&Listed(pause::Pause)],
];

/// Do the containers share one pid namespace, whose init is the pause?
pub fn shares_pid(spec: &SandboxSpec) -> bool {
    spec.namespaces.pid == NamespaceMode::Pod
}

pub fn host_network(spec: &SandboxSpec) -> bool {
    spec.namespaces.network == NamespaceMode::Node
}

/// The row of the handler table that a sandbox is made by.
///
/// # Errors
/// If its handler is not configured (any more).
pub fn handler<'a>(live: &'a Live, object: &PodSandbox) -> Result<&'a Ready> {
    let name = &object.spec.runtime_handler;
    let missing = || Error::Refused(format!("spec.runtimeHandler: {name:?} is not configured on this node"));
    live.handlers.of(name).ok_or_else(missing)
}

/// What a sandbox's directory tells.
pub struct Facts {
    /// Why it has ended for good, from its receipt.
    ended: Option<String>,
    same_boot: bool,
    /// Its uid was given to a caller, and its pause lives.
    alive: bool,
    containers: Vec<std::sync::Arc<Container>>,
    now: i64,
}

/// The receipt of an end that no record and no kernel object tells.
fn receipt(paths: &Paths, uid: &str) -> PathBuf {
    paths.pod(uid).join("ended")
}

#[async_trait]
impl Staged for SandboxKind {
    type Facts = Facts;

    fn rungs() -> &'static [&'static [&'static dyn AnyStage<Self>]] {
        &RUNGS
    }

    async fn facts(cx: &Context, object: &PodSandbox) -> Result<Facts> {
        let paths = &cx.world.paths;
        let ended = cx.world.files.read(&receipt(paths, object.uid()))?;
        let run = Paths::run_record(&paths.pod(object.uid()));
        let pause = cx.world.files.run_record(&run)?;
        let pid = pause.as_ref().and_then(|pause| live::pid(&cx.world, pause));
        Ok(Facts {
            alive: object.meta.delivered() && pid.is_some(),
            ended: ended.map(|text| String::from_utf8_lossy(&text).into_owned()),
            same_boot: object.meta.boot_id == cx.world.clock.boot_id,
            containers: cx.store.owned(object.uid()),
            now: cx.world.clock.now_ns(),
        })
    }

    fn height(_: &Context, object: &PodSandbox, facts: &Facts) -> Height {
        let deleted = object.meta.deleted();
        let stopped = object.spec.goal == SandboxGoal::Stopped;
        let mut height = Height::keep(RUNGS.len());
        // What is to be stopped needs no receipt, which a full disk would not take.
        if !facts.same_boot && facts.ended.is_none() && !deleted && !stopped {
            height.ended = Some(Why::new("Rebooted", "the node was started anew"));
        }
        if deleted {
            height.keep = 0;
        } else if stopped || facts.ended.is_some() {
            height.keep = STOPPED;
        }
        if height.keep < RUNGS.len() {
            height.hold = users(&facts.containers, deleted);
        }
        height
    }

    async fn ended(cx: &Context, object: &PodSandbox, why: &Why) -> Result<()> {
        tracing::warn!(reason = why.reason, "sandbox has ended: {}", why.message);
        cx.world.files.make_dir(&cx.world.paths.pod(object.uid()), DIR_MODE)?;
        let text = format!("{}: {}", why.reason, why.message);
        cx.world
            .files
            .replace(&receipt(&cx.world.paths, object.uid()), text.as_bytes())
    }

    fn settle(object: &PodSandbox, facts: &Facts, summary: Summary, status: &mut SandboxStatus) {
        let down = object.meta.deleted() || object.spec.goal == SandboxGoal::Stopped || facts.ended.is_some();
        let ready = !down && summary.settled;
        status.phase = match (down, ready) {
            (true, _) => SandboxPhase::NotReady,
            (false, true) => SandboxPhase::Ready,
            // Was ready once and is being repaired in place: it stays Ready, its containers do.
            (false, false) if object.status.phase == SandboxPhase::Ready => SandboxPhase::Ready,
            // The same at the first look of a new daemon: only what was ready once was given to a caller.
            (false, false) if object.status.phase == SandboxPhase::Unknown && facts.alive => SandboxPhase::Ready,
            (false, false) => SandboxPhase::Pending,
        };
        status.torn_down = down && summary.lowered;
        status.observed_generation = object.meta.generation;
        let mut conditions = conditions::with_ready(summary.conditions, ready, &object.status.conditions, facts.now);
        if let (Some(why), Some(first)) = (&facts.ended, conditions.first_mut()) {
            first.reason = "Lost".to_owned();
            first.message = why.clone();
            first.permanent = true;
        }
        status.conditions = conditions;
    }

    fn conditions(status: &SandboxStatus) -> &[Condition] {
        &status.conditions
    }

    fn conditions_mut(status: &mut SandboxStatus) -> &mut Vec<Condition> {
        &mut status.conditions
    }
}

/// Why a sandbox cannot be taken down yet.
fn users(containers: &[std::sync::Arc<Container>], deleted: bool) -> Option<String> {
    let uses = |c: &&std::sync::Arc<Container>| {
        deleted || !matches!(c.status.phase, ContainerPhase::Created | ContainerPhase::Exited)
    };
    let user = containers.iter().find(uses)?;
    let doing = if deleted {
        "is not removed yet"
    } else {
        "has not ended yet"
    };
    Some(format!("container {} {doing}", user.spec.name))
}

impl Placed for SandboxKind {
    fn dir(paths: &Paths, object: &PodSandbox) -> PathBuf {
        paths.pod(object.uid())
    }

    fn state_dir(paths: &Paths, object: &PodSandbox) -> Option<PathBuf> {
        Some(paths.pod_state(object.uid()))
    }
}

/// The sandbox that a container belongs to.
pub fn of(cx: &Context, container: &Object<state::container::ContainerKind>) -> Result<std::sync::Arc<PodSandbox>> {
    cx.store.get(&container.spec.sandbox).ok_or_else(|| {
        Error::Pending(format!(
            "the record of sandbox {} cannot be read; the container is left alone",
            { &container.spec.sandbox }
        ))
    })
}
