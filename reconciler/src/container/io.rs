//! Stage `io`: the directory of the FIFOs, and the log's directory. The FIFOs themselves are the shim's.

use std::fs;
use std::os::unix::fs::DirBuilderExt;

use state::Container;
use state::container::ContainerKind;

use super::log;
use crate::engine::Context;
use crate::engine::record::remove_empty_tree;
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::error::{Error, Result};
use crate::sandbox;
use crate::world::paths::make_dir;

pub struct Io;

pub struct Have {
    fifos: bool,
}

impl Stage<ContainerKind> for Io {
    type Have = Have;
    const NAME: &'static str = "io";

    async fn observe(cx: &Context, object: &Container) -> Result<Have> {
        Ok(Have {
            fifos: cx.world.paths.fifos(&object.spec.sandbox, object.uid()).exists(),
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
            let made = fs::DirBuilder::new().recursive(true).mode(0o755).create(dir);
            made.map_err(Error::io("make log directory", dir))?;
        }
        make_dir(&cx.world.paths.fifos(&object.spec.sandbox, object.uid()))
    }

    async fn undo(cx: &Context, object: &Container) -> Result<Undone> {
        remove_empty_tree(&cx.world.paths.container_state(&object.spec.sandbox, object.uid()))?;
        Ok(Undone::Done)
    }
}
