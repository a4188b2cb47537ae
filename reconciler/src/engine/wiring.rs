//! Which kind's change makes which other kind's objects be looked at again.

use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use state::container::{ContainerGoal, ContainerKind, ContainerPhase};
use state::debt::DebtKind;
use state::image::ImageKind;
use state::node::NodeKind;
use state::pod::PodKind;
use state::pull::PullKind;
use state::sandbox::{SandboxGoal, SandboxKind, SandboxPhase};
use state::session::SessionKind;
use state::{Container, Debt, Image, Kind, Node, Pod, PodSandbox, Pull, Session};

use crate::engine::Context;
use crate::engine::controller::{Controlled, Next};
use crate::engine::staged;
use crate::error::Error;
use crate::{debt, image, node, session};

impl Controlled for SandboxKind {
    fn pass(cx: Arc<Context>, object: Arc<PodSandbox>) -> BoxFuture<'static, Result<Next, Error>> {
        async move { staged::pass(&cx, &object).await }.boxed()
    }

    fn changed(cx: &Context, object: &PodSandbox) {
        for container in cx.store.owned::<ContainerKind>(object.uid()) {
            if container.spec.goal != ContainerGoal::Created || container.status.phase != ContainerPhase::Created {
                cx.queues.containers.look(container.uid(), "sandbox");
            }
        }
        look_at_pod(cx, object.meta.owner.as_ref());
    }
}

impl Controlled for ContainerKind {
    fn pass(cx: Arc<Context>, object: Arc<Container>) -> BoxFuture<'static, Result<Next, Error>> {
        async move { staged::pass(&cx, &object).await }.boxed()
    }

    fn changed(cx: &Context, object: &Container) {
        let Some(sandbox) = cx.store.get::<SandboxKind>(&object.spec.sandbox) else {
            return;
        };
        let ending = sandbox.spec.goal == SandboxGoal::Stopped || sandbox.status.phase == SandboxPhase::NotReady;
        if sandbox.meta.deleted() || (ending && !sandbox.status.torn_down) {
            cx.queues.sandboxes.look(sandbox.uid(), "container");
        }
        look_at_pod(cx, sandbox.meta.owner.as_ref());
    }
}

fn look_at_pod(cx: &Context, owner: Option<&state::Owner>) {
    if let Some(owner) = owner.filter(|owner| owner.kind == PodKind::KIND) {
        cx.queues.pods.look(&owner.uid, "child");
    }
}

impl Controlled for ImageKind {
    fn pass(cx: Arc<Context>, object: Arc<Image>) -> BoxFuture<'static, Result<Next, Error>> {
        async move { staged::pass(&cx, &object).await }.boxed()
    }

    fn changed(cx: &Context, _: &Image) {
        for container in cx.store.list::<ContainerKind>() {
            if container.status.phase == ContainerPhase::Pending {
                cx.queues.containers.look(container.uid(), "image");
            }
        }
        for pod in cx.store.list::<PodKind>() {
            cx.queues.pods.look(pod.uid(), "image");
        }
    }
}

impl Controlled for PodKind {
    fn pass(cx: Arc<Context>, object: Arc<Pod>) -> BoxFuture<'static, Result<Next, Error>> {
        async move {
            let next = staged::pass(&cx, &object).await?;
            Ok(match (next, crate::pod::again(&cx, &object)) {
                (Next::Await, Some(delay)) => Next::Again(delay),
                (next, _) => next,
            })
        }
        .boxed()
    }
}

impl Controlled for NodeKind {
    fn pass(cx: Arc<Context>, object: Arc<Node>) -> BoxFuture<'static, Result<Next, Error>> {
        async move { node::pass(&cx, &object).await }.boxed()
    }
}

impl Controlled for SessionKind {
    fn pass(cx: Arc<Context>, object: Arc<Session>) -> BoxFuture<'static, Result<Next, Error>> {
        async move { session::pass(&cx, &object).await }.boxed()
    }
}

impl Controlled for PullKind {
    fn pass(cx: Arc<Context>, object: Arc<Pull>) -> BoxFuture<'static, Result<Next, Error>> {
        async move { image::pull::pass(&cx, &object).await }.boxed()
    }

    /// Whose pull it is looks again once it has an outcome.
    fn changed(cx: &Context, object: &Pull) {
        let Some(owner) = object.meta.owner.as_ref().filter(|_| object.status.outcome.is_some()) else {
            return;
        };
        match owner.kind.as_str() {
            PodKind::KIND => cx.queues.pods.look(&owner.uid, "pull"),
            ImageKind::KIND => cx.queues.images.look(&owner.uid, "pull"),
            _ => {}
        }
    }
}

impl Controlled for DebtKind {
    fn pass(cx: Arc<Context>, object: Arc<Debt>) -> BoxFuture<'static, Result<Next, Error>> {
        async move { debt::pass(&cx, &object).await }.boxed()
    }
}
