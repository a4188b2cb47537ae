//! Image: what a reference names is in the content store, and its layers are unpacked.
//!
//! ```text
//!   layers     unpacked by chain ID
//!   blobs      in the content store, so that layers can be made again
//!   manifest   manifest and configuration in the content store
//!   record     the copy of the wish
//! ```
//!
//! An image is built in, comes from an archive, or is pulled. A pull fetches first and writes its Image records last
//! ([`pull`]), so these stages find it whole; what goes missing later they bring back.

mod blobs;
pub mod builtin;
pub mod collect;
mod layers;
mod manifest_stage;

pub mod manifest;
pub mod pull;

use std::path::PathBuf;

use async_trait::async_trait;
use state::image::{ImageKind, ImagePhase, ImageStatus};
use state::{Condition, Image};

use crate::engine::pass::{Height, Staged, Summary};
use crate::engine::record::{Placed, Record};
use crate::engine::stage::{AnyStage, Listed, Why};
use crate::engine::{Context, conditions};
use crate::error::Result;
use crate::world::Paths;

static RUNGS: [&[&'static dyn AnyStage<ImageKind>]; 4] = [
    &[&Listed(Record)],
    &[&Listed(manifest_stage::Manifest)],
    &[&Listed(blobs::Blobs)],
    &[&Listed(layers::Layers)],
];

pub struct Facts {
    now: i64,
}

#[async_trait]
impl Staged for ImageKind {
    type Facts = Facts;

    fn rungs() -> &'static [&'static [&'static dyn AnyStage<Self>]] {
        &RUNGS
    }

    async fn facts(cx: &Context, _: &Image) -> Result<Facts> {
        Ok(Facts {
            now: cx.world.clock.now_ns(),
        })
    }

    fn height(_: &Context, object: &Image, _: &Facts) -> Height {
        Height::keep(if object.meta.deleted() { 0 } else { RUNGS.len() })
    }

    async fn ended(_: &Context, _: &Image, _: &Why) -> Result<()> {
        Ok(())
    }

    fn settle(object: &Image, facts: &Facts, summary: Summary, status: &mut ImageStatus) {
        let ready = summary.settled && !object.meta.deleted();
        let failed = summary.conditions.iter().any(|c| c.permanent);
        status.phase = match (ready, failed) {
            (true, _) => ImagePhase::Ready,
            (false, true) => ImagePhase::Failed,
            (false, false) => ImagePhase::Pending,
        };
        status.pull_epoch = if ready {
            object.spec.pull_epoch
        } else {
            object.status.pull_epoch
        };
        status.conditions = conditions::with_ready(summary.conditions, ready, &object.status.conditions, facts.now);
        status.observed_generation = object.meta.generation;
    }

    fn conditions(status: &ImageStatus) -> &[Condition] {
        &status.conditions
    }

    fn conditions_mut(status: &mut ImageStatus) -> &mut Vec<Condition> {
        &mut status.conditions
    }
}

impl Placed for ImageKind {
    fn dir(paths: &Paths, object: &Image) -> PathBuf {
        paths.root.join("images").join(object.uid())
    }

    fn state_dir(_: &Paths, _: &Image) -> Option<PathBuf> {
        None
    }
}
