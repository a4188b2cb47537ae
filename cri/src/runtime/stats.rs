//! Stats of containers and sandboxes: a question to whoever samples the node, put into the CRI's words.

use std::sync::Arc;

use state::container::{Container, ContainerKind, ContainerPhase};
use state::sandbox::{PodSandbox, SandboxPhase};
use state::usage::{Answer, Ask};

use super::lists::{chosen, chosen_sandboxes};
use super::v1;
use crate::error::{Error, Result};
use crate::filter::selects;
use crate::services::{Services, container_visible, pod_of};
use crate::translate;

pub(super) async fn container(
    services: &Services,
    request: v1::ContainerStatsRequest,
) -> Result<v1::ContainerStatsResponse> {
    let container = services.container("container_id", &request.container_id)?;
    let ask = Ask {
        containers: vec![container.meta.uid.clone()],
        ..Ask::default()
    };
    let answer = services.store.ask(ask).await?;
    Ok(v1::ContainerStatsResponse {
        stats: Some(one(&container, &answer, &store(services))),
    })
}

fn one(container: &Container, answer: &Answer, store: &str) -> v1::ContainerStats {
    translate::stats::container(container, answer.containers.get(container.uid()), store)
}

/// Directory of the image store, where writable layers are too.
fn store(services: &Services) -> String {
    services
        .node()
        .map(|node| node.status.image_store.clone())
        .unwrap_or_default()
}

/// One entry for each container that runs.
pub(super) async fn containers(
    services: &Services,
    filter: Option<v1::ContainerStatsFilter>,
) -> Result<Vec<v1::ContainerStats>> {
    let filter = filter.unwrap_or_default();
    let mut all = chosen(services, &filter.id, &filter.pod_sandbox_id);
    all.retain(|c| c.status.phase == ContainerPhase::Running && selects(&filter.label_selector, &c.meta.labels));
    let ask = Ask {
        containers: all.iter().map(|c| c.meta.uid.clone()).collect(),
        ..Ask::default()
    };
    let answer = services.store.ask(ask).await?;
    let store = store(services);
    // Without a sample it has ended meanwhile.
    let sampled = all.iter().filter(|c| answer.containers.contains_key(c.uid()));
    Ok(sampled.map(|c| one(c, &answer, &store)).collect())
}

pub(super) async fn sandbox(
    services: &Services,
    request: v1::PodSandboxStatsRequest,
) -> Result<v1::PodSandboxStatsResponse> {
    let sandbox = services.sandbox("pod_sandbox_id", &request.pod_sandbox_id)?;
    let not_ready = || {
        Error::Unavailable(format!(
            "sandbox {}: is not ready, so it has no stats",
            pod_of(&sandbox)
        ))
    };
    if sandbox.status.phase != SandboxPhase::Ready {
        return Err(not_ready());
    }
    let stats = of_sandboxes(services, vec![sandbox.clone()]).await?.pop();
    Ok(v1::PodSandboxStatsResponse {
        stats: Some(stats.ok_or_else(not_ready)?),
    })
}

/// Of the sandboxes that are ready.
pub(super) async fn sandboxes(
    services: &Services,
    filter: Option<v1::PodSandboxStatsFilter>,
) -> Result<Vec<v1::PodSandboxStats>> {
    let filter = filter.unwrap_or_default();
    let mut all = chosen_sandboxes(services, &filter.id);
    all.retain(|s| s.status.phase == SandboxPhase::Ready && selects(&filter.label_selector, &s.meta.labels));
    of_sandboxes(services, all).await
}

async fn of_sandboxes(services: &Services, all: Vec<Arc<PodSandbox>>) -> Result<Vec<v1::PodSandboxStats>> {
    let (all, answer) = ask(services, all, false).await?;
    let store = store(services);
    let stats = |(sandbox, containers): &(Arc<PodSandbox>, Vec<Arc<Container>>)| {
        let usage = answer.sandboxes.get(sandbox.uid())?;
        let sampled = containers.iter().filter(|c| answer.containers.contains_key(c.uid()));
        let containers = sampled.map(|c| one(c, &answer, &store)).collect();
        Some(translate::stats::sandbox(sandbox, usage, containers))
    };
    Ok(all.iter().filter_map(stats).collect())
}

/// Sandboxes, each with its containers.
pub(super) type Pods = Vec<(Arc<PodSandbox>, Vec<Arc<Container>>)>;

/// What sandboxes and all of their containers use, in one question.
pub(super) async fn ask(services: &Services, all: Vec<Arc<PodSandbox>>, detail: bool) -> Result<(Pods, Answer)> {
    let with_containers = |sandbox: Arc<PodSandbox>| {
        let mut containers = services.store.owned::<ContainerKind>(sandbox.uid());
        containers.retain(|container| container_visible(container));
        (sandbox, containers)
    };
    let all: Pods = all.into_iter().map(with_containers).collect();
    let ask = Ask {
        sandboxes: all.iter().map(|(sandbox, _)| sandbox.meta.uid.clone()).collect(),
        containers: all.iter().flat_map(|(_, c)| c).map(|c| c.meta.uid.clone()).collect(),
        detail,
        writable: false,
    };
    let answer = services.store.ask(ask).await?;
    Ok((all, answer))
}
