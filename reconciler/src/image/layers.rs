//! Stage `layers`: every layer is unpacked.

use state::Image;
use state::image::ImageKind;

use super::manifest_stage::loaded;
use crate::engine::Context;
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::error::Result;

pub struct Layers;

pub struct Have {
    missing: usize,
}

impl Stage<ImageKind> for Layers {
    type Have = Have;
    const NAME: &'static str = "layers";

    async fn observe(cx: &Context, object: &Image) -> Result<Have> {
        let missing = match loaded(cx, object).await? {
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
        let Some(loaded) = loaded(cx, object).await? else {
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
