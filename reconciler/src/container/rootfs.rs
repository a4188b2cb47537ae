//! Stage `rootfs`: the overlay of the image's layers and the container's writable one.

use state::Container;
use state::container::ContainerKind;

use super::{Stand, dir};
use crate::engine::Context;
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::error::Result;
use crate::sandbox;
use crate::world::paths::DIR_MODE;

pub struct Rootfs;

pub struct Have {
    mounted: bool,
    /// The task runs: its own mount namespace holds the file system, whatever the host unmounts.
    running: bool,
}

impl Stage<ContainerKind> for Rootfs {
    type Have = Have;
    const NAME: &'static str = "rootfs";

    async fn observe(cx: &Context, object: &Container) -> Result<Have> {
        let mounted = cx
            .world
            .mounts
            .is_mounted(&cx.world.paths.rootfs(&object.spec.sandbox, object.uid()))?;
        let running = super::run_record(&cx.world, object)?.is_some_and(|run| run.start.is_some());
        Ok(Have { mounted, running })
    }

    fn diff(_: &Container, have: &Have) -> Step {
        match (have.mounted, have.running) {
            // Never a second overlay on a live upper directory.
            (true, _) | (false, true) => Step::Keep,
            (false, false) => Step::Make(Why::new("Absent", "")),
        }
    }

    fn present(have: &Have) -> bool {
        have.mounted
    }

    async fn act(cx: &Context, object: &Container, _: &Step) -> Result<()> {
        let stand = Stand::of(cx, object)?;
        let lower = cx.world.images.lower(&stand.chain_ids)?;
        let own = dir(&cx.world.paths, object);
        let target = cx.world.paths.rootfs(&object.spec.sandbox, object.uid());
        cx.world.files.make_dir(&target, DIR_MODE)?;
        let sandbox = sandbox::of(cx, object)?;
        let label = super::selinux::labels(cx, &sandbox, object)?.mount;
        let want = crate::world::Rootfs {
            label,
            image: object.spec.image.requested.clone(),
            lower,
            upper: own.join("upper"),
            work: own.join("work"),
            target,
            user: sandbox::pins(&cx.world.paths, &sandbox).user,
        };
        cx.world.mounts.rootfs(want).await
    }

    async fn undo(cx: &Context, object: &Container) -> Result<Undone> {
        let target = cx.world.paths.rootfs(&object.spec.sandbox, object.uid());
        cx.world.mounts.unmount(&target)?;
        cx.world.files.unlink(&target.with_extension("new"))?;
        cx.world.mounts.clear_scratch(&target.with_file_name("mapped"))?;
        Ok(Undone::Done)
    }
}
