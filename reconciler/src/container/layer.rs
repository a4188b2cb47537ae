//! Stage `layer`: the unpacked layers are here. They are shared, so there is nothing to undo: what no record reaches is
//! collected behind.

use state::Container;
use state::container::ContainerKind;

use super::Stand;
use crate::engine::Context;
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::error::Result;

pub struct Layer;

pub struct Have {
    missing: usize,
}

impl Stage<ContainerKind> for Layer {
    type Have = Have;
    const NAME: &'static str = "layer";

    async fn observe(cx: &Context, object: &Container) -> Result<Have> {
        let mut missing = 0;
        if let Some(stand) = Stand::read(&cx.world.paths, object)? {
            for (_, chain_ids) in stand.images() {
                missing += cx.world.images.missing(chain_ids).await?;
            }
        }
        Ok(Have { missing })
    }

    fn diff(_: &Container, have: &Have) -> Step {
        match have.missing {
            0 => Step::Keep,
            n => Step::Remake(Why::new("LayersMissing", format!("{n} unpacked layers are gone"))),
        }
    }

    fn present(_: &Have) -> bool {
        false
    }

    async fn act(cx: &Context, object: &Container, _: &Step) -> Result<()> {
        for (manifest, _) in Stand::of(cx, object)?.images() {
            cx.world.images.unpack(manifest).await?;
        }
        Ok(())
    }

    async fn undo(_: &Context, _: &Container) -> Result<Undone> {
        Ok(Undone::Done)
    }
}
