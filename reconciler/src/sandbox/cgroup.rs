//! Stage `cgroup`: `<parent>/<uid>`, in which the pause lives. The parent belongs to the caller.

use state::PodSandbox;
use state::sandbox::SandboxKind;

use crate::engine::Context;
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::error::Result;

pub struct Cgroup;

/// The cgroup of an object with this uid, below the sandbox's parent.
pub fn path(cx: &Context, sandbox: &PodSandbox, uid: &str) -> String {
    let parent = match sandbox.spec.cgroup_parent.trim_end_matches('/') {
        "" => cx.world.paths.default_cgroup(),
        parent => parent.to_owned(),
    };
    cx.world.cgroups.path(&parent, uid)
}

/// In how many hierarchies it is, of how many.
pub struct Have {
    there: usize,
    wanted: usize,
}

impl Stage<SandboxKind> for Cgroup {
    type Have = Have;
    const NAME: &'static str = "cgroup";

    async fn observe(cx: &Context, object: &PodSandbox) -> Result<Have> {
        let (there, wanted) = cx.world.cgroups.observe(&path(cx, object, object.uid()));
        Ok(Have { there, wanted })
    }

    fn diff(_: &PodSandbox, have: &Have) -> Step {
        match have.there {
            n if n == have.wanted => Step::Keep,
            0 => Step::Make(Why::new("Absent", "")),
            n => Step::Remake(Why::new(
                "Incomplete",
                format!("it is in {n} of {} hierarchies", have.wanted),
            )),
        }
    }

    fn present(have: &Have) -> bool {
        have.there > 0
    }

    async fn act(cx: &Context, object: &PodSandbox, _: &Step) -> Result<()> {
        cx.world.cgroups.ensure(&path(cx, object, object.uid()))
    }

    async fn undo(cx: &Context, object: &PodSandbox) -> Result<Undone> {
        let path = path(cx, object, object.uid());
        cx.world.cgroups.kill(&path)?;
        cx.world.cgroups.remove(&path)?;
        cx.world.cgroups.remove_if_empty(&cx.world.paths.default_cgroup());
        cx.world.cgroups.remove_if_empty(cx.world.shims.cgroup());
        Ok(Undone::Done)
    }
}
