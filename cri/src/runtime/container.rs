//! Containers: create, start, stop, remove, status, resources, log.

use std::sync::Arc;

use state::container::{Container, ContainerGoal, ContainerKind, ContainerPhase, ContainerSpec, Resources};
use state::sandbox::{NamespaceMode, PodSandbox, SandboxGoal, SandboxKind, SandboxPhase};
use state::{Meta, Truth};

use super::sandbox::known;
use super::{v1, verbose};
use crate::call::Call;
use crate::converge::{create as create_record, reached, until, until_erased};
use crate::error::{Error, Result};
use crate::images::Catalog;
use crate::services::{Services, pod_of};
use crate::translate;

/// The stage that applies cgroup limits.
const LIMITS: &str = "limits";
/// CRI reason of a container that never ran.
const START_ERROR: &str = "StartError";

pub(super) async fn create(
    services: &Services,
    call: &Call,
    request: v1::CreateContainerRequest,
) -> Result<v1::CreateContainerResponse> {
    let config = translate::present("config", &request.config)?;
    translate::sandbox::check_copy(&request.sandbox_config)?;
    let sandbox = services.sandbox("pod_sandbox_id", &request.pod_sandbox_id)?;
    let mut new = translate::container::new(config, &sandbox)?;
    serves(&sandbox)?;
    target_runs(services, &mut new.spec, &sandbox)?;
    resolve_images(&Catalog::read(&services.store), &mut new.spec)?;
    let made = |container: &Container| {
        !matches!(
            container.status.phase,
            ContainerPhase::Unknown | ContainerPhase::Pending
        )
    };
    let container_id = create_record(services, call, &pod_of(&sandbox), new, made).await?;
    Ok(v1::CreateContainerResponse { container_id })
}

/// Only a live sandbox takes containers and starts.
fn serves(sandbox: &PodSandbox) -> Result<()> {
    let what = || format!("sandbox {}", pod_of(sandbox));
    if sandbox.meta.deleted() || sandbox.spec.goal != SandboxGoal::Ready {
        return Err(Error::precondition(what(), "is stopped"));
    }
    match sandbox.status.phase {
        SandboxPhase::Ready => Ok(()),
        SandboxPhase::Unknown => Err(Error::Unavailable(format!("{}: was not looked at yet", what()))),
        _ => Err(Error::precondition(what(), "is not ready")),
    }
}

/// A TARGET pid namespace is that of a running container of the same sandbox; its full id is kept.
fn target_runs(services: &Services, spec: &mut ContainerSpec, sandbox: &PodSandbox) -> Result<()> {
    if spec.security.namespaces.pid != NamespaceMode::Target {
        return Ok(());
    }
    let field = "config.linux.security_context.namespace_options.target_id";
    let target = services.container(field, &spec.security.namespaces.target_id)?;
    if target.spec.sandbox != sandbox.meta.uid {
        return Err(Error::invalid(field, "is a container of another sandbox"));
    }
    if target.status.phase != ContainerPhase::Running {
        return Err(Error::precondition(field, "the container does not run"));
    }
    spec.security.namespaces.target_id.clone_from(&target.meta.uid);
    Ok(())
}

/// Ids of the container's image and of image volumes. Nothing is pulled here.
fn resolve_images(catalog: &Catalog, spec: &mut ContainerSpec) -> Result<()> {
    spec.image.id = catalog.require("config.image.image", &spec.image.requested)?;
    for (i, mount) in spec.mounts.iter_mut().enumerate() {
        if let Some(image) = &mut mount.image {
            image.id = catalog.require(&format!("config.mounts[{i}].image.image"), &image.requested)?;
        }
    }
    Ok(())
}

/// Raises the goal. Not begun by the time this call answers, the container never runs.
pub(super) async fn start(
    services: &Services,
    call: &Call,
    request: v1::StartContainerRequest,
) -> Result<v1::StartContainerResponse> {
    let container = services.container("container_id", &request.container_id)?;
    about(services, call, &container);
    let what = format!("container {}", container.spec.name);
    live(&container)?;
    match container.status.phase {
        ContainerPhase::Created => {}
        ContainerPhase::Running => return Err(Error::precondition(what, "is running already")),
        ContainerPhase::Exited => return Err(Error::precondition(what, "has ended; create a new one")),
        ContainerPhase::Unknown | ContainerPhase::Pending => {
            return Err(Error::Unavailable(format!(
                "{what}: is not created yet, or was not looked at yet"
            )));
        }
    }
    let sandbox = services.store.get::<SandboxKind>(&container.spec.sandbox);
    serves(&*sandbox.ok_or_else(|| Error::precondition(&what, "its sandbox is gone"))?)?;
    let start_by = call.start_by();
    let subject = container.spec.name.clone();
    let raise = move |meta: &mut Meta, spec: &mut ContainerSpec| {
        let problem = match spec.goal {
            _ if meta.deleted() => "is being removed",
            ContainerGoal::Running => "is being started already",
            ContainerGoal::Stopped => "is stopped",
            ContainerGoal::Created => {
                spec.goal = ContainerGoal::Running;
                spec.start_by = Some(start_by);
                return Ok(());
            }
        };
        Err(conflict(subject, problem))
    };
    let container = services
        .store
        .update::<ContainerKind, _>(&container.meta.uid, raise)
        .await?;
    let generation = container.meta.generation;
    let mut fallback = reached(&container, |now: &Container| {
        now.status.phase == ContainerPhase::Running
    });
    until(services, call, &container, move |now: Option<&Container>| match now {
        Some(now) if now.status.phase == ContainerPhase::Exited && now.status.observed_generation >= generation => {
            Some(begun(now))
        }
        now => fallback(now),
    })
    .await?;
    Ok(v1::StartContainerResponse {})
}

fn conflict(name: String, problem: &str) -> state::Error {
    state::Error::Conflict {
        kind: "container",
        name,
        problem: problem.to_owned(),
    }
}

/// A container that has ended: did it run before?
fn begun(container: &Container) -> Result<()> {
    let status = &container.status;
    if status.reason != START_ERROR && status.started_at > 0 {
        return Ok(());
    }
    Err(Error::Failed {
        what: format!("container {}", container.spec.name),
        stage: "start".to_owned(),
        reason: status.reason.clone(),
        message: status.message.clone(),
    })
}

/// Lowers the goal and waits for the exit. A later call may shorten the grace, never lengthen it.
pub(super) async fn stop(
    services: &Services,
    call: &Call,
    request: v1::StopContainerRequest,
) -> Result<v1::StopContainerResponse> {
    let done = v1::StopContainerResponse {};
    let Some(container) = known(services.container("container_id", &request.container_id))? else {
        return Ok(done);
    };
    about(services, call, &container);
    let never_started = container.spec.goal == ContainerGoal::Created;
    match container.status.phase {
        ContainerPhase::Exited => return Ok(done),
        ContainerPhase::Created | ContainerPhase::Pending if never_started => return Ok(done),
        _ => {}
    }
    let grace = request.timeout.max(0);
    let lower = move |meta: &mut Meta, spec: &mut ContainerSpec| {
        // A removal kills at once: nothing is left to ask for.
        if !meta.deleted() {
            let stopping = spec.goal == ContainerGoal::Stopped;
            spec.grace_seconds = if stopping { spec.grace_seconds.min(grace) } else { grace };
            spec.goal = ContainerGoal::Stopped;
        }
        Ok(())
    };
    let Some(container) = known(
        services
            .store
            .update::<ContainerKind, _>(&container.meta.uid, lower)
            .await,
    )?
    else {
        return Ok(done);
    };
    until(services, call, &container, |now: Option<&Container>| {
        let ended = now.is_none_or(|now| now.status.phase == ContainerPhase::Exited);
        ended.then_some(Ok(()))
    })
    .await?;
    Ok(done)
}

pub(super) async fn remove(
    services: &Services,
    call: &Call,
    request: v1::RemoveContainerRequest,
) -> Result<v1::RemoveContainerResponse> {
    if let Some(container) = known(services.container("container_id", &request.container_id))? {
        about(services, call, &container);
        services.store.delete::<ContainerKind>(&container.meta.uid).await?;
        until_erased(services, call, &*container).await?;
    }
    Ok(v1::RemoveContainerResponse {})
}

pub(super) fn status(services: &Services, request: v1::ContainerStatusRequest) -> Result<v1::ContainerStatusResponse> {
    let container = services.container("container_id", &request.container_id)?;
    let sandbox = services.store.get::<SandboxKind>(&container.spec.sandbox);
    let names = Catalog::read(&services.store).names(&container.spec.image.id);
    Ok(v1::ContainerStatusResponse {
        status: Some(translate::container::status(&container, &names, sandbox.as_deref())),
        info: if request.verbose {
            verbose::container(&container)
        } else {
            Default::default()
        },
    })
}

/// Zero and empty values leave what was. A failed change puts the old values back before its error is answered.
pub(super) async fn update_resources(
    services: &Services,
    call: &Call,
    request: v1::UpdateContainerResourcesRequest,
) -> Result<v1::UpdateContainerResourcesResponse> {
    if request.windows.is_some() {
        return Err(Error::invalid("windows", "this node runs Linux"));
    }
    let container = services.container("container_id", &request.container_id)?;
    about(services, call, &container);
    live(&container)?;
    let update = translate::resources::from_proto("linux", &request.linux.unwrap_or_default())?;
    let old = container.spec.resources.clone();
    let merge = move |_: &mut Meta, spec: &mut ContainerSpec| {
        spec.resources = translate::resources::merge(&spec.resources, &update);
        Ok(())
    };
    let changed = services
        .store
        .update::<ContainerKind, _>(&container.meta.uid, merge)
        .await?;
    if changed.spec.resources == old {
        return Ok(v1::UpdateContainerResourcesResponse {});
    }
    let applied = until(services, call, &changed, reached(&changed, limits_hold)).await;
    if matches!(applied, Err(Error::Failed { .. } | Error::Deadline { .. })) {
        put_back(services, &changed, old).await?;
    }
    applied.map(|()| v1::UpdateContainerResourcesResponse {})
}

/// Limits bind processes: a container that does not run takes them at its start.
fn limits_hold(container: &Container) -> bool {
    let limits = container.status.conditions.iter().find(|c| c.stage == LIMITS);
    container.status.phase != ContainerPhase::Running || limits.is_none_or(|c| c.status == Truth::True)
}

async fn put_back(services: &Services, changed: &Container, old: Resources) -> Result<()> {
    let ours = changed.spec.resources.clone();
    let restore = move |_: &mut Meta, spec: &mut ContainerSpec| {
        // Another update that came meanwhile stands.
        if spec.resources == ours {
            spec.resources = old;
        }
        Ok(())
    };
    known(
        services
            .store
            .update::<ContainerKind, _>(&changed.meta.uid, restore)
            .await,
    )
    .map(drop)
}

pub(super) async fn reopen_log(
    services: &Services,
    call: &Call,
    request: v1::ReopenContainerLogRequest,
) -> Result<v1::ReopenContainerLogResponse> {
    let container = services.container("container_id", &request.container_id)?;
    about(services, call, &container);
    live(&container)?;
    if container.status.phase != ContainerPhase::Running {
        let what = format!("container {}", container.spec.name);
        return Err(Error::precondition(what, "is not running"));
    }
    let raise = |_: &mut Meta, spec: &mut ContainerSpec| {
        spec.log_epoch += 1;
        Ok(())
    };
    let raised = services
        .store
        .update::<ContainerKind, _>(&container.meta.uid, raise)
        .await?;
    let epoch = raised.spec.log_epoch;
    let mut fallback = reached(&raised, move |now: &Container| now.status.log_epoch >= epoch);
    until(services, call, &raised, move |now: Option<&Container>| match now {
        Some(now) if now.status.log_epoch >= epoch => Some(Ok(())),
        Some(now) if now.status.phase == ContainerPhase::Exited => {
            let what = format!("container {}", now.spec.name);
            Some(Err(Error::precondition(what, "ended before its log was reopened")))
        }
        now => fallback(now),
    })
    .await?;
    Ok(v1::ReopenContainerLogResponse {})
}

/// A container that is being removed takes no new wish.
fn live(container: &Container) -> Result<()> {
    if container.meta.deleted() {
        return Err(Error::Aborted {
            what: format!("container {}", container.spec.name),
            problem: "is being removed".to_owned(),
        });
    }
    Ok(())
}

fn about(services: &Services, call: &Call, container: &Arc<Container>) {
    let sandbox = services.store.get::<SandboxKind>(&container.spec.sandbox);
    call.about(sandbox.map(|s| pod_of(&s)).unwrap_or_default(), &container.meta.uid);
}
