//! Stage `log`: the log file was opened anew as often as asked (CRI ReopenContainerLog).

use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::time::Duration;

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
    /// `logEpoch` up to which this process has reopened it; a new daemon does not know.
    epoch: Option<u64>,
    /// Whether what the shim writes to is the file of that name; unknown if it did not tell.
    same: Option<bool>,
}

/// What a shim may take to say which file it writes to.
const ASK: Duration = Duration::from_secs(1);

impl Stage<ContainerKind> for Log {
    type Have = Have;
    const NAME: &'static str = "log";

    async fn observe(cx: &Context, object: &Container) -> Result<Have> {
        let epoch = {
            let epochs = cx.log_epochs.lock().unwrap_or_else(PoisonError::into_inner);
            epochs.get(object.uid()).copied()
        };
        let same = match path(&*sandbox::of(cx, object)?, object) {
            Some(path) => written(cx, object)
                .await
                .map(|file| file == cx.world.files.identity(&path)),
            None => None,
        };
        Ok(Have { epoch, same })
    }

    fn diff(object: &Container, have: &Have) -> Step {
        let wanted = object.spec.log_epoch;
        match (have.same, have.epoch) {
            (Some(false), _) => Step::Remake(Why::new("LogMissing", "the shim writes to a file that lost its name")),
            (Some(true), None) => Step::Keep,
            (_, epoch) if epoch.unwrap_or(0) >= wanted => Step::Keep,
            _ => Step::Change(Why::new("LogRotated", "the log is to be opened anew")),
        }
    }

    fn present(_: &Have) -> bool {
        false
    }

    async fn act(cx: &Context, object: &Container, _: &Step) -> Result<()> {
        let sandbox = sandbox::of(cx, object)?;
        if let Some(dir) = path(&sandbox, object).as_deref().and_then(Path::parent) {
            cx.world.files.make_dir(dir, 0o755)?;
        }
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

/// Those of the file that the shim writes a container's log to, if it has one open and says so.
async fn written(cx: &Context, object: &Container) -> Option<(u64, u64)> {
    let client = cx.world.shims.find(&object.spec.sandbox).await?;
    let state = tokio::time::timeout(ASK, client.state()).await.ok()?.ok()?;
    let process = state.processes.into_iter().find(|process| process.id == object.uid())?;
    (process.log_ino != 0).then_some((process.log_dev, process.log_ino))
}
