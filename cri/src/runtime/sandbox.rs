//! Sandboxes: run, stop, remove, status, resources.

use std::sync::Arc;

use state::container::{Container, ContainerPhase};
use state::sandbox::{NamespaceMode, PodSandbox, SandboxGoal, SandboxKind, SandboxPhase, SandboxSpec, UserNamespace};
use state::{Meta, Store};

use super::{v1, verbose};
use crate::call::Call;
use crate::converge::{create, until, until_erased};
use crate::error::{Error, Result};
use crate::images::Catalog;
use crate::services::{Services, container_visible, pod_of};
use crate::translate;

pub(super) async fn run(
    services: &Services,
    call: &Call,
    request: v1::RunPodSandboxRequest,
) -> Result<v1::RunPodSandboxResponse> {
    let config = translate::present("config", &request.config)?;
    let handler = &request.runtime_handler;
    let unknown = || {
        Error::invalid(
            "runtime_handler",
            format!("{handler:.100?} is not configured on this node"),
        )
    };
    let able = services.told().handler(handler).ok_or_else(unknown)?;
    let new = translate::sandbox::new(config, handler)?;
    let own_users = |user: &UserNamespace| user.mode == NamespaceMode::Pod;
    if !able.user_namespaces && new.spec.namespaces.user.as_ref().is_some_and(own_users) {
        let problem = format!(
            "{:.100?} has no id-mapped mounts, which user namespaces need",
            able.name
        );
        return Err(Error::invalid("runtime_handler", problem));
    }
    let pod = format!("{}/{}", new.spec.pod.namespace, new.spec.pod.name);
    let ready = |sandbox: &PodSandbox| sandbox.status.phase == SandboxPhase::Ready;
    let pod_sandbox_id = create(services, call, &pod, new, ready).await?;
    Ok(v1::RunPodSandboxResponse { pod_sandbox_id })
}

/// Stopped: nothing of the sandbox is left but its record and directory, and none of its containers runs.
pub(super) async fn stop(
    services: &Services,
    call: &Call,
    request: v1::StopPodSandboxRequest,
) -> Result<v1::StopPodSandboxResponse> {
    let done = v1::StopPodSandboxResponse {};
    let Some(sandbox) = known(services.sandbox("pod_sandbox_id", &request.pod_sandbox_id))? else {
        return Ok(done);
    };
    call.about(pod_of(&sandbox), &sandbox.meta.uid);
    if sandbox.meta.deleted() {
        until_erased(services, call, &*sandbox).await?;
        return Ok(done);
    }
    let stop = |_: &mut Meta, spec: &mut SandboxSpec| {
        spec.goal = SandboxGoal::Stopped;
        Ok(())
    };
    let Some(sandbox) = known(services.store.update::<SandboxKind, _>(&sandbox.meta.uid, stop).await)? else {
        return Ok(done);
    };
    let generation = sandbox.meta.generation;
    until(services, call, &*sandbox, |now: Option<&PodSandbox>| match now {
        None => Some(Ok(())),
        Some(now) => {
            let observed = now.status.observed_generation >= generation;
            (observed && now.status.torn_down).then_some(Ok(()))
        }
    })
    .await?;
    for container in services.store.owned(&sandbox.meta.uid) {
        until(services, call, &*container, |now: Option<&Container>| {
            let running =
                now.is_some_and(|now| matches!(now.status.phase, ContainerPhase::Running | ContainerPhase::Unknown));
            (!running).then_some(Ok(()))
        })
        .await?;
    }
    Ok(done)
}

pub(super) async fn remove(
    services: &Services,
    call: &Call,
    request: v1::RemovePodSandboxRequest,
) -> Result<v1::RemovePodSandboxResponse> {
    if let Some(sandbox) = known(services.sandbox("pod_sandbox_id", &request.pod_sandbox_id))? {
        call.about(pod_of(&sandbox), &sandbox.meta.uid);
        services.store.delete::<SandboxKind>(&sandbox.meta.uid).await?;
        until_erased(services, call, &*sandbox).await?;
    }
    Ok(v1::RemovePodSandboxResponse {})
}

pub(super) fn status(
    services: &Services,
    request: v1::PodSandboxStatusRequest,
) -> Result<v1::PodSandboxStatusResponse> {
    let sandbox = services.sandbox("pod_sandbox_id", &request.pod_sandbox_id)?;
    let containers_statuses = container_statuses(&services.store, &sandbox);
    Ok(v1::PodSandboxStatusResponse {
        status: Some(translate::sandbox::status(&sandbox)),
        info: if request.verbose {
            verbose::sandbox(&sandbox, &services.told().sandbox_image)
        } else {
            Default::default()
        },
        containers_statuses,
        // Absent, so that a kubelet with EventedPLEG asks for each container by itself, as it does without. Of an
        // answer with a time it takes the statuses above, but forgets which of them are of this sandbox (1.34 to 1.37:
        // PodStatus.ActiveContainerStatuses), and starts the pod's init containers for ever.
        timestamp: 0,
    })
}

fn container_statuses(store: &Store, sandbox: &PodSandbox) -> Vec<v1::ContainerStatus> {
    let catalog = Catalog::read(store);
    let one = |container: &Arc<Container>| {
        translate::container::status(container, &catalog.names(&container.spec.image.id), Some(sandbox))
    };
    let all = store.owned(&sandbox.meta.uid);
    all.iter()
        .filter(|container| container_visible(container))
        .map(one)
        .collect()
}

/// Replaces overhead and resources: information for the record and for virtual machines. The pod's cgroup is the
/// kubelet's to write, so there is nothing to wait for.
pub(super) async fn update_resources(
    services: &Services,
    call: &Call,
    request: v1::UpdatePodSandboxResourcesRequest,
) -> Result<v1::UpdatePodSandboxResourcesResponse> {
    let sandbox = services.sandbox("pod_sandbox_id", &request.pod_sandbox_id)?;
    call.about(pod_of(&sandbox), &sandbox.meta.uid);
    let amounts = |field: &str, from: &Option<v1::LinuxContainerResources>| match from {
        Some(from) => translate::resources::from_proto(field, from).map(Some),
        None => Ok(None),
    };
    let overhead = amounts("overhead", &request.overhead)?;
    let resources = amounts("resources", &request.resources)?;
    let change = move |_: &mut Meta, spec: &mut SandboxSpec| {
        spec.overhead = overhead;
        spec.resources = resources;
        Ok(())
    };
    services
        .store
        .update::<SandboxKind, _>(&sandbox.meta.uid, change)
        .await?;
    Ok(v1::UpdatePodSandboxResourcesResponse {})
}

/// Stopping and removing what is not there succeeds.
pub(super) fn known<T, E: Into<Error>>(found: Result<T, E>) -> Result<Option<T>> {
    match found.map_err(Into::into) {
        Ok(found) => Ok(Some(found)),
        Err(Error::NotFound { .. } | Error::Record(state::Error::NotFound { .. })) => Ok(None),
        Err(error) => Err(error),
    }
}
