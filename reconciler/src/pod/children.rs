//! Stage `children`: the records that a pod is made of.

use state::container::{ContainerGoal, ContainerKind};
use state::image::ImageKind;
use state::pod::PodKind;
use state::pull::PullKind;
use state::sandbox::{SandboxGoal, SandboxKind};
use state::store::New;
use state::{Kind, Owner, Pod, Reference};

use super::decide::{Child, Decision, View, Wish, decide};
use super::{build, pulls, secrets, users};
use crate::engine::Context;
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::error::{Error, Result};
use crate::image::pull;

pub struct Children;

pub struct Have {
    decision: Decision,
    owned: usize,
}

/// Decides from the records as they are now.
pub fn decision(cx: &Context, object: &Pod) -> Decision {
    decide(object, &view(cx, object))
}

fn view(cx: &Context, object: &Pod) -> View {
    let sandboxes = cx.store.owned::<SandboxKind>(object.uid());
    let mut containers: Vec<_> = sandboxes
        .iter()
        .flat_map(|s| cx.store.owned::<ContainerKind>(s.uid()))
        .collect();
    containers.sort_by_key(|c| std::cmp::Reverse(c.meta.created));
    let wished = object.spec.init_containers.iter().chain(&object.spec.containers);
    let record = |image: &String| {
        let reference = Reference::parse(image, "image").ok()?;
        let record = cx.store.by_name::<ImageKind>(&reference.to_string())?;
        Some((image.clone(), record))
    };
    View {
        sandboxes,
        containers,
        images: wished.filter_map(|c| record(&c.image)).collect(),
        pulls: cx.store.owned::<PullKind>(object.uid()),
        secrets: secrets::of(&cx.store, object),
        now: cx.world.clock.now_ns(),
    }
}

impl Stage<PodKind> for Children {
    type Have = Have;
    const NAME: &'static str = "children";

    async fn observe(cx: &Context, object: &Pod) -> Result<Have> {
        let pulls = cx.store.owned::<PullKind>(object.uid());
        let owned = cx.store.owned::<SandboxKind>(object.uid()).len() + pulls.len();
        Ok(Have {
            decision: decision(cx, object),
            owned,
        })
    }

    fn diff(_: &Pod, have: &Have) -> Step {
        let decision = &have.decision;
        match (decision.wishes.first(), &decision.waiting) {
            (Some(wish), _) => Step::Change(Why::new("ChildrenDiffer", describe(wish))),
            (None, Some(what)) => Step::Wait(Why::new("Waiting", what.clone())),
            (None, None) => Step::Keep,
        }
    }

    fn present(have: &Have) -> bool {
        have.owned > 0
    }

    async fn act(cx: &Context, object: &Pod, _: &Step) -> Result<()> {
        for wish in decision(cx, object).wishes {
            tracing::info!("{}", describe(&wish));
            fulfil(cx, object, wish).await?;
        }
        Ok(())
    }

    /// The sandboxes were marked with the pod, in one batch; if one was written since, it is marked here.
    async fn undo(cx: &Context, object: &Pod) -> Result<Undone> {
        pull::stop(cx, object.uid()).await?;
        for sandbox in cx.store.owned::<SandboxKind>(object.uid()) {
            if !sandbox.meta.deleted() {
                cx.store.delete::<SandboxKind>(sandbox.uid()).await?;
            }
        }
        match cx.store.owned::<SandboxKind>(object.uid()).len() {
            0 => Ok(Undone::Done),
            n => Ok(Undone::Pending(format!("{n} sandboxes are being removed"))),
        }
    }
}

fn describe(wish: &Wish) -> String {
    match wish {
        Wish::Sandbox { attempt } => format!("make sandbox, attempt {attempt}"),
        Wish::Container { name, attempt } => format!("start container {name}, attempt {attempt}"),
        Wish::Pull { image, tries: 0, .. } => format!("pull image {image}"),
        Wish::Pull { image, tries, .. } => format!("pull image {image}, try {}", tries + 1),
        Wish::Refuse { why } => why.clone(),
        Wish::StopContainer { uid } => format!("stop container {uid}"),
        Wish::StopSandbox { uid } => format!("stop sandbox {uid}"),
        Wish::Delete { uid, .. } => format!("remove ended {uid}"),
    }
}

async fn fulfil(cx: &Context, pod: &Pod, wish: Wish) -> Result<()> {
    match wish {
        Wish::Sandbox { attempt } => {
            // Until the record is written: nobody else takes the same range.
            let _ranges = users::CHOICE.lock().await;
            let user = (pod.spec.host_users == Some(false))
                .then(|| users::choose(cx))
                .transpose()?;
            let (meta, spec) = build::sandbox(&cx.world.paths, pod, attempt, user);
            written(cx.store.create::<SandboxKind>(New { meta, spec }).await.map(drop))
        }
        Wish::Container { name, attempt } => {
            let sandbox = cx
                .store
                .owned::<SandboxKind>(pod.uid())
                .into_iter()
                .find(|s| !s.meta.deleted());
            let Some(sandbox) = sandbox else { return Ok(()) };
            let (meta, spec) = build::container(cx, pod, &sandbox, &name, attempt)?;
            written(cx.store.create::<ContainerKind>(New { meta, spec }).await.map(drop))?;
            forget_pull(cx, pod, &pulls::name(&name, attempt)).await
        }
        Wish::Pull {
            container,
            attempt,
            image,
            tries,
        } => {
            let name = pulls::name(&container, attempt);
            forget_pull(cx, pod, &name).await?;
            let secrets = secrets::of(&cx.store, pod);
            pull::start(cx, owner(pod), name, &image, tries, secrets).await
        }
        Wish::Refuse { why } => Err(Error::Refused(why)),
        Wish::StopContainer { uid } => {
            let stop = |_: &mut state::Meta, spec: &mut state::container::ContainerSpec| {
                spec.goal = ContainerGoal::Stopped;
                Ok(())
            };
            Ok(cx.store.update::<ContainerKind, _>(&uid, stop).await.map(drop)?)
        }
        Wish::StopSandbox { uid } => {
            let stop = |_: &mut state::Meta, spec: &mut state::sandbox::SandboxSpec| {
                spec.goal = SandboxGoal::Stopped;
                Ok(())
            };
            Ok(cx.store.update::<SandboxKind, _>(&uid, stop).await.map(drop)?)
        }
        Wish::Delete {
            kind: Child::Sandbox,
            uid,
        } => Ok(cx.store.delete::<SandboxKind>(&uid).await.map(drop)?),
        Wish::Delete {
            kind: Child::Container,
            uid,
        } => Ok(cx.store.delete::<ContainerKind>(&uid).await.map(drop)?),
    }
}

fn owner(pod: &Pod) -> Owner {
    Owner {
        kind: PodKind::KIND.to_owned(),
        uid: pod.uid().to_owned(),
    }
}

async fn forget_pull(cx: &Context, pod: &Pod, name: &str) -> Result<()> {
    let pulls = cx.store.owned::<PullKind>(pod.uid());
    for pull in pulls
        .iter()
        .filter(|pull| pull.meta.name == name && !pull.meta.deleted())
    {
        cx.store.delete::<PullKind>(pull.uid()).await?;
    }
    Ok(())
}

/// A child that is there already is what was wanted: the pass before was cut after its write.
fn written(result: std::result::Result<(), state::Error>) -> Result<()> {
    match result {
        Err(state::Error::AlreadyExists { .. }) => Ok(()),
        other => other.map_err(Error::from),
    }
}
