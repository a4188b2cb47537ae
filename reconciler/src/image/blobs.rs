//! Stage `blobs`: the layers as they were transported are in the content store.

use state::Image;
use state::image::ImageKind;
use state::pull::PullKind;

use super::manifest_stage::{loaded, restore};
use super::pull;
use crate::engine::Context;
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::error::Result;

pub struct Blobs;

pub struct Have {
    missing: usize,
    /// Pulls of its own that are under way.
    pulls: usize,
}

impl Stage<ImageKind> for Blobs {
    type Have = Have;
    const NAME: &'static str = "blobs";

    async fn observe(cx: &Context, object: &Image) -> Result<Have> {
        let loaded = loaded(cx, object).await?;
        let missing = loaded.map_or(0, |image| cx.world.images.missing_blobs(&image));
        let pulls = cx.store.owned::<PullKind>(object.uid()).len();
        Ok(Have { missing, pulls })
    }

    fn diff(_: &Image, have: &Have) -> Step {
        match have.missing {
            0 => Step::Keep,
            n => Step::Remake(Why::new("BlobsMissing", format!("{n} blobs are gone"))),
        }
    }

    /// Content is shared: what no record reaches is collected behind.
    fn present(have: &Have) -> bool {
        have.pulls > 0
    }

    async fn act(cx: &Context, object: &Image, _: &Step) -> Result<()> {
        restore(cx, object).await
    }

    async fn undo(cx: &Context, object: &Image) -> Result<Undone> {
        pull::stop(cx, object.uid()).await?;
        Ok(Undone::Done)
    }
}
