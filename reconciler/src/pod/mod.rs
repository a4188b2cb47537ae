//! Pod: what a user declares. Its sandbox and containers are records like those that the CRI writes; the Pod's own work
//! ends with them.
//!
//! ```text
//!   children   sandbox, init containers in order, containers, restarts
//!   volumes    emptyDir directories
//!   record     the copy of the wish
//! ```

mod build;
mod children;
mod decide;
mod pulls;
pub mod secrets;
mod users;
mod volumes;

use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use state::pod::{PodKind, PodStatus};
use state::{Condition, Pod};

pub use decide::{Decision, decide};

use crate::engine::pass::{Height, Staged, Summary};
use crate::engine::record::{Placed, Record};
use crate::engine::stage::{AnyStage, Listed, Why};
use crate::engine::{Context, conditions};
use crate::error::Result;
use crate::world::Paths;

static RUNGS: [&[&'static dyn AnyStage<PodKind>]; 3] = [
    &[&Listed(Record)],
    &[&Listed(volumes::Volumes)],
    &[&Listed(children::Children)],
];

pub struct Facts {
    decision: Decision,
    now: i64,
}

/// The pod's durable directory: its copy, logs and volumes.
pub fn dir(paths: &Paths, object: &Pod) -> PathBuf {
    paths.root.join("declared").join(object.uid())
}

/// When the pod wants to be looked at though nothing changes: a restart's back-off is over.
pub fn again(cx: &Context, object: &Pod) -> Option<Duration> {
    children::decision(cx, object).again
}

#[async_trait]
impl Staged for PodKind {
    type Facts = Facts;

    fn rungs() -> &'static [&'static [&'static dyn AnyStage<Self>]] {
        &RUNGS
    }

    async fn facts(cx: &Context, object: &Pod) -> Result<Facts> {
        Ok(Facts {
            decision: children::decision(cx, object),
            now: cx.world.clock.now_ns(),
        })
    }

    fn height(_: &Context, object: &Pod, _: &Facts) -> Height {
        Height::keep(if object.meta.deleted() { 0 } else { RUNGS.len() })
    }

    async fn ended(_: &Context, _: &Pod, _: &Why) -> Result<()> {
        Ok(())
    }

    fn settle(object: &Pod, facts: &Facts, summary: Summary, status: &mut PodStatus) {
        *status = facts.decision.status.clone();
        let ready = summary.settled && status.phase == state::pod::PodPhase::Running;
        status.conditions = conditions::with_ready(summary.conditions, ready, &object.status.conditions, facts.now);
        status.observed_generation = object.meta.generation;
    }

    fn conditions(status: &PodStatus) -> &[Condition] {
        &status.conditions
    }

    fn conditions_mut(status: &mut PodStatus) -> &mut Vec<Condition> {
        &mut status.conditions
    }
}

impl Placed for PodKind {
    fn dir(paths: &Paths, object: &Pod) -> PathBuf {
        dir(paths, object)
    }

    fn state_dir(_: &Paths, _: &Pod) -> Option<PathBuf> {
        None
    }
}
