//! Stage `layers`: every layer is unpacked.

use state::Image;
use state::image::ImageKind;

use crate::engine::Context;
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::error::Result;

pub struct Layers;

pub struct Have {
    missing: usize,
}

/// The manifest stage's finding, as far as this pass may know it.
async fn manifest(cx: &Context, object: &Image) -> Result<Option<super::manifest::Loaded>> {
    match super::manifest_stage::digest(cx, object).await? {
        Some(digest) => cx.world.images.load(&digest).await,
        None => Ok(None),
    }
}

impl Stage<ImageKind> for Layers {
    type Have = Have;
    const NAME: &'static str = "layers";

    async fn observe(cx: &Context, object: &Image) -> Result<Have> {
        let missing = match manifest(cx, object).await? {
            Some(loaded) => {
                let chain: Vec<String> = loaded.chain_ids.iter().map(ToString::to_string).collect();
                cx.world.images.missing(&chain).await?
            }
            None => 0,
        };
        Ok(Have { missing })
    }

    fn diff(_: &Image, have: &Have) -> Step {
        match have.missing {
            0 => Step::Keep,
            n => Step::Make(Why::new("NotUnpacked", format!("{n} layers are not unpacked"))),
        }
    }

    fn present(_: &Have) -> bool {
        false
    }

    async fn act(cx: &Context, object: &Image, _: &Step) -> Result<()> {
        let Some(loaded) = manifest(cx, object).await? else {
            return Ok(());
        };
        cx.world.images.unpack(loaded.descriptor.digest().as_ref()).await?;
        tracing::info!(layers = loaded.chain_ids.len(), "image unpacked");
        Ok(())
    }

    async fn undo(_: &Context, _: &Image) -> Result<Undone> {
        Ok(Undone::Done)
    }
}
