//! Stage `log`: the log file was opened anew as often as asked (CRI ReopenContainerLog).

use std::path::{Path, PathBuf};
use std::sync::PoisonError;

use state::container::ContainerKind;
use state::{Container, PodSandbox};

use crate::engine::Context;
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::error::Result;
use crate::sandbox;
use crate::world::linux::shims::fault;

pub struct Log;

/// The log file; `None` turns logging off.
pub fn path(sandbox: &PodSandbox, object: &Container) -> Option<PathBuf> {
    let (dir, file) = (&sandbox.spec.log_directory, &object.spec.log_path);
    (!dir.is_empty() && !file.is_empty()).then(|| Path::new(dir).join(file))
}

pub struct Have {
    epoch: u64,
}

impl Stage<ContainerKind> for Log {
    type Have = Have;
    const NAME: &'static str = "log";

    async fn observe(cx: &Context, object: &Container) -> Result<Have> {
        let epochs = cx.log_epochs.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Have {
            epoch: epochs.get(object.uid()).copied().unwrap_or(0),
        })
    }

    fn diff(object: &Container, have: &Have) -> Step {
        if have.epoch >= object.spec.log_epoch {
            return Step::Keep;
        }
        Step::Change(Why::new("LogRotated", "the log is to be opened anew"))
    }

    fn present(_: &Have) -> bool {
        false
    }

    async fn act(cx: &Context, object: &Container, _: &Step) -> Result<()> {
        let sandbox = sandbox::of(cx, object)?;
        let pod = &sandbox.spec.pod;
        let client = cx.world.shims.ensure(&pod.namespace, &pod.name, sandbox.uid()).await?;
        client
            .reopen_log(object.uid(), "")
            .await
            .map_err(fault("reopen log", object.uid()))?;
        let mut epochs = cx.log_epochs.lock().unwrap_or_else(PoisonError::into_inner);
        epochs.insert(object.uid().to_owned(), object.spec.log_epoch);
        Ok(())
    }

    async fn undo(_: &Context, _: &Container) -> Result<Undone> {
        Ok(Undone::Done)
    }
}
