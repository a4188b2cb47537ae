//! Stage `rootfs`: the overlay of the image's layers and the container's writable one.

use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use state::Container;
use state::container::ContainerKind;

use super::{Stand, dir};
use crate::engine::Context;
use crate::engine::record::unlink;
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::error::{Error, Result};
use crate::sandbox;
use crate::world::linux::files::{is_mount_point, unmount};
use crate::world::linux::mounts::Mapping;
use crate::world::linux::unpack::settle::Shift;
use crate::world::linux::{content, images, mounts};
use crate::world::paths::make_dir;

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
        let mounted = is_mount_point(&cx.world.paths.rootfs(&object.spec.sandbox, object.uid()))?;
        let running = super::run_record(&cx.world.paths, object)?.is_some_and(|run| run.start.is_some());
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
        make_dir(&target)?;
        let image = object.spec.image.requested.clone();
        let sandbox = sandbox::of(cx, object)?;
        let user = sandbox::pins(&cx.world.paths, &sandbox).user;
        if user.is_some() {
            lets_through(&target)?;
        }
        let overlay = cx.world.overlay.is_ok();
        tokio::task::spawn_blocking(move || {
            let (upper, work) = (own.join("upper"), own.join("work"));
            let Some(user) = user else {
                return match overlay {
                    true => mounts::mount_rootfs(&lower, &upper, &work, &target),
                    false => mounts::mount_copy(&lower, &upper, &target, None),
                };
            };
            let root = |maps: &[(u32, u32, u32)]| maps.first().map_or(0, |(_, host, _)| *host);
            let pin = std::fs::File::open(&user.path).map_err(content::Error::io("open", user.path.display()))?;
            let mapping = Mapping {
                userns: pin.as_fd(),
                root: (root(&user.uids), root(&user.gids)),
            };
            if overlay && mounts::mount_rootfs_mapped(&lower, &upper, &work, &target, mapping)? {
                return Ok(());
            }
            let shift = Shift {
                uids: user.uids,
                gids: user.gids,
            };
            mounts::mount_copy(&lower, &upper, &target, Some(&shift))
        })
        .await
        .map_err(|source| Error::Task {
            op: "mount rootfs",
            source,
        })?
        .map_err(|e| images::failed(&image)(e))
    }

    async fn undo(cx: &Context, object: &Container) -> Result<Undone> {
        let target = cx.world.paths.rootfs(&object.spec.sandbox, object.uid());
        unmount(&target)?;
        unlink(&target.with_extension("new"))?;
        mounts::clear_scratch(&target.with_file_name("mapped"))
            .map_err(images::failed(&object.spec.image.requested))?;
        Ok(Undone::Done)
    }
}

/// Root of a user namespace is another user on the host, and must reach its root file system.
fn lets_through(target: &Path) -> Result<()> {
    for dir in target.ancestors().skip(1) {
        let mode = dir.metadata().map_err(Error::io("look at", dir))?.mode();
        if mode & 0o001 == 0 {
            return Err(Error::Refused(format!(
                "directory {}: a pod with a user namespace needs it open to other users (chmod o+x)",
                dir.display()
            )));
        }
    }
    Ok(())
}
