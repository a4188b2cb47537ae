//! Stage `shim`: the pod's monitor.

use state::PodSandbox;
use state::sandbox::SandboxKind;

use crate::engine::Context;
use crate::engine::record::remove_empty_tree;
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::error::Result;
use crate::world::paths::DIR_MODE;

pub struct Shim;

pub struct Have {
    answers: bool,
    /// It has a directory, so it was there.
    dir: bool,
}

impl Stage<SandboxKind> for Shim {
    type Have = Have;
    const NAME: &'static str = "shim";

    async fn observe(cx: &Context, object: &PodSandbox) -> Result<Have> {
        let dir = cx.world.files.exists(&cx.world.paths.shim(object.uid()));
        let answers = dir && cx.world.shims.find(object.uid()).await.is_some();
        Ok(Have { answers, dir })
    }

    fn diff(_: &PodSandbox, have: &Have) -> Step {
        match (have.answers, have.dir) {
            (true, _) => Step::Keep,
            (false, false) => Step::Make(Why::new("Absent", "")),
            (false, true) => Step::Remake(Why::new("Dead", "the shim is gone; a new one takes its processes over")),
        }
    }

    fn present(have: &Have) -> bool {
        have.dir
    }

    async fn act(cx: &Context, object: &PodSandbox, _: &Step) -> Result<()> {
        cx.world
            .files
            .make_dir(&cx.world.paths.pod_state(object.uid()), DIR_MODE)?;
        let pod = &object.spec.pod;
        cx.world
            .shims
            .ensure(&pod.namespace, &pod.name, object.uid())
            .await
            .map(drop)
    }

    async fn undo(cx: &Context, object: &PodSandbox) -> Result<Undone> {
        cx.world.shims.remove(object.uid()).await?;
        remove_empty_tree(&cx.world, &cx.world.paths.shim(object.uid()))?;
        Ok(Undone::Done)
    }
}
