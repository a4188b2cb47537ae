//! Stage `io`: the directory of the FIFOs, and the log's directory. The FIFOs themselves are the shim's.

use std::sync::PoisonError;

use state::Container;
use state::container::ContainerKind;

use super::log;
use crate::engine::Context;
use crate::engine::record::remove_empty_tree;
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::error::Result;
use crate::sandbox;
use crate::world::paths::DIR_MODE;

pub struct Io;

/// Holds the output of a running container open; see [`Context::outputs`]. Again is cheap, and absent FIFOs (a
/// terminal) are nothing to hold.
pub fn hold(cx: &Context, object: &Container) {
    let mut held = cx.outputs.lock().unwrap_or_else(PoisonError::into_inner);
    if held.contains_key(object.uid()) {
        return;
    }
    let dir = cx.world.paths.fifos(&object.spec.sandbox, object.uid());
    let files = cx.world.files.hold(&dir);
    held.insert(object.uid().to_owned(), files);
}

/// Lets the output of an ended container go.
pub fn release(cx: &Context, object: &Container) {
    cx.outputs
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .remove(object.uid());
}

pub struct Have {
    fifos: bool,
}

impl Stage<ContainerKind> for Io {
    type Have = Have;
    const NAME: &'static str = "io";

    async fn observe(cx: &Context, object: &Container) -> Result<Have> {
        Ok(Have {
            fifos: cx
                .world
                .files
                .exists(&cx.world.paths.fifos(&object.spec.sandbox, object.uid())),
        })
    }

    fn diff(_: &Container, have: &Have) -> Step {
        if have.fifos {
            Step::Keep
        } else {
            Step::Make(Why::new("Absent", ""))
        }
    }

    fn present(have: &Have) -> bool {
        have.fifos
    }

    async fn act(cx: &Context, object: &Container, _: &Step) -> Result<()> {
        let sandbox = sandbox::of(cx, object)?;
        if let Some(log) = log::path(&sandbox, object) {
            let dir = log.parent().unwrap_or(&log);
            cx.world.files.make_their_dir(dir, 0o755).await?;
        }
        let fifos = cx.world.paths.fifos(&object.spec.sandbox, object.uid());
        cx.world.files.make_dir(&fifos, DIR_MODE)?;
        // What the shim makes in it has its type.
        match super::selinux::labels(cx, &sandbox, object)?.mount {
            Some(label) => cx.world.files.label(&fifos, &label),
            None => Ok(()),
        }
    }

    async fn undo(cx: &Context, object: &Container) -> Result<Undone> {
        remove_empty_tree(
            &cx.world,
            &cx.world.paths.container_state(&object.spec.sandbox, object.uid()),
        )?;
        Ok(Undone::Done)
    }
}
