//! Exec, Attach and PortForward: each writes a grant and answers the URL under which the streaming server redeems it.

use std::sync::atomic::{AtomicU64, Ordering};

use state::container::ContainerPhase;
use state::grant::{self, GrantKind, GrantSpec, Streams, Wish};
use state::sandbox::{SandboxGoal, SandboxKind, SandboxPhase};
use state::{Meta, New, Put};

use super::v1;
use crate::call::Call;
use crate::error::{Error, Result};
use crate::services::{Services, pod_of};
use crate::translate;

pub(super) async fn exec(services: &Services, call: &Call, request: v1::ExecRequest) -> Result<v1::ExecResponse> {
    if request.cmd.is_empty() {
        return Err(Error::invalid("cmd", "must not be empty"));
    }
    for (i, word) in request.cmd.iter().enumerate() {
        translate::no_nul(&format!("cmd[{i}]"), word)?;
    }
    let container = running(services, call, &request.container_id)?;
    let wish = Wish::Exec {
        container,
        command: request.cmd,
        streams: Streams {
            stdin: request.stdin,
            stdout: request.stdout,
            stderr: request.stderr,
            tty: request.tty,
        },
    };
    let url = grant(services, wish).await?;
    Ok(v1::ExecResponse { url })
}

pub(super) async fn attach(services: &Services, call: &Call, request: v1::AttachRequest) -> Result<v1::AttachResponse> {
    let container = running(services, call, &request.container_id)?;
    let wish = Wish::Attach {
        container,
        streams: Streams {
            stdin: request.stdin,
            stdout: request.stdout,
            stderr: request.stderr,
            tty: request.tty,
        },
    };
    let url = grant(services, wish).await?;
    Ok(v1::AttachResponse { url })
}

pub(super) async fn port_forward(
    services: &Services,
    call: &Call,
    request: v1::PortForwardRequest,
) -> Result<v1::PortForwardResponse> {
    let mut ports = Vec::with_capacity(request.port.len());
    for (i, port) in request.port.into_iter().enumerate() {
        match u16::try_from(port) {
            Ok(port) if port > 0 => ports.push(port),
            _ => return Err(Error::invalid(format!("port[{i}]"), "must be 1 to 65535")),
        }
    }
    let sandbox = services.sandbox("pod_sandbox_id", &request.pod_sandbox_id)?;
    call.about(pod_of(&sandbox), &sandbox.meta.uid);
    if sandbox.status.phase != SandboxPhase::Ready || sandbox.spec.goal == SandboxGoal::Stopped {
        return Err(Error::precondition(
            format!("sandbox {}", pod_of(&sandbox)),
            "is not ready",
        ));
    }
    let wish = Wish::PortForward {
        sandbox: sandbox.meta.uid.clone(),
        ports,
    };
    let url = grant(services, wish).await?;
    Ok(v1::PortForwardResponse { url })
}

/// The id of a container that runs.
fn running(services: &Services, call: &Call, id: &str) -> Result<String> {
    let container = services.container("container_id", id)?;
    let pod = services.store.get::<SandboxKind>(&container.spec.sandbox);
    call.about(pod.map(|p| pod_of(&p)).unwrap_or_default(), &container.meta.uid);
    if container.status.phase != ContainerPhase::Running {
        return Err(Error::precondition(
            format!("container {}", container.spec.name),
            "is not running",
        ));
    }
    Ok(container.meta.uid.clone())
}

async fn grant(services: &Services, wish: Wish) -> Result<String> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let Some(base) = &services.config.streaming_url else {
        return Err(Error::Unavailable("the streaming server does not run".to_owned()));
    };
    if grant::waiting(&services.store).await? >= grant::WAITING {
        return Err(Error::Busy(format!(
            "{} streams were asked for and not opened yet; wait a minute",
            grant::WAITING
        )));
    }
    let verb = wish.verb();
    let meta = Meta {
        name: format!("{verb}-{}", NUMBER.fetch_add(1, Ordering::Relaxed)),
        ..Meta::default()
    };
    let spec = GrantSpec::new(wish);
    let record = match services.store.create(New::<GrantKind> { meta, spec }).await? {
        Put::Created(record) | Put::Joined(record) => record,
    };
    Ok(format!("{base}/{verb}/{}", record.meta.uid))
}
