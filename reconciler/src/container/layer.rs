//! Stage `layer`: the unpacked layers are here. They are shared, so there is nothing to undo: what no record reaches is
//! collected behind.

use state::Container;
use state::container::ContainerKind;
use state::image::ImageKind;

use super::Stand;
use crate::engine::Context;
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::error::Result;

pub struct Layer;

pub struct Have {
    missing: usize,
    /// Not looked at since an unclean boot.
    doubtful: usize,
}

impl Stage<ContainerKind> for Layer {
    type Have = Have;
    const NAME: &'static str = "layer";

    async fn observe(cx: &Context, object: &Container) -> Result<Have> {
        let mut have = Have {
            missing: 0,
            doubtful: 0,
        };
        let Some(stand) = Stand::read(&cx.world, object)? else {
            return Ok(have);
        };
        // What runs stands on its layers, whatever they are like.
        let running = super::run_record(&cx.world, object)?.is_some_and(|run| run.start.is_some());
        for image in stand.images() {
            have.missing += cx.world.images.missing(image.chain_ids).await?;
            if !running {
                have.doubtful += cx.world.images.doubtful(image.chain_ids).await?;
            }
        }
        Ok(have)
    }

    fn diff(_: &Container, have: &Have) -> Step {
        match (have.missing, have.doubtful) {
            (0, 0) => Step::Keep,
            (0, n) => Step::Change(Why::new(
                "Unverified",
                format!("{n} layers are to be verified after a boot"),
            )),
            (n, _) => Step::Remake(Why::new("LayersMissing", format!("{n} unpacked layers are gone"))),
        }
    }

    fn present(_: &Have) -> bool {
        false
    }

    async fn act(cx: &Context, object: &Container, _: &Step) -> Result<()> {
        let stand = Stand::of(cx, object)?;
        for image in stand.images() {
            cx.world.images.settle_doubts(image.chain_ids).await?;
            let unpacked = cx.world.images.unpack(image.manifest_digest).await;
            if unpacked.is_err() {
                // A damaged blob is gone now; who names it fetches it.
                let images = cx.store.list::<ImageKind>();
                let named = images.iter().filter(|i| i.status.id == image.id);
                named.for_each(|i| cx.queues.images.look(i.uid(), "blob"));
            }
            unpacked?;
        }
        Ok(())
    }

    async fn undo(_: &Context, _: &Container) -> Result<Undone> {
        Ok(Undone::Done)
    }
}
