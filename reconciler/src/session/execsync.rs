//! ExecSync: a program in a running container, its output returned (CRI ExecSync).

use std::sync::Arc;

use shim::Code;
use shim::api::ExecRequest;
use state::Session;
use state::container::{ContainerKind, ContainerPhase};
use state::session::{Outcome, SessionKind, SessionStatus};

use crate::engine::Context;
use crate::engine::controller::Next;
use crate::error::Result;

/// Claims the session before acting, so that no second pass runs it again.
pub async fn pass(cx: &Arc<Context>, object: &Arc<Session>) -> Result<Next> {
    if object.meta.deleted() {
        cx.store.erase::<SessionKind>(object.uid()).await?;
        return Ok(Next::Gone);
    }
    if object.status.claimed {
        return Ok(Next::Await);
    }
    cx.store.set_status::<SessionKind>(
        object.uid(),
        SessionStatus {
            claimed: true,
            outcome: None,
        },
    );
    let dropped = cx.store.wait::<SessionKind, (), _>(object.uid(), None, |now| {
        now.is_none_or(|now| now.meta.deleted()).then_some(())
    });
    let outcome = tokio::select! {
        outcome = run(cx, object) => outcome,
        // The caller has left: dropping the call kills the program.
        _ = dropped => return Ok(Next::Again(std::time::Duration::ZERO)),
    };
    cx.store.set_status::<SessionKind>(
        object.uid(),
        SessionStatus {
            claimed: true,
            outcome: Some(outcome),
        },
    );
    Ok(Next::Await)
}

async fn run(cx: &Context, object: &Session) -> Outcome {
    let spec = &object.spec;
    let Some(container) = cx.store.get::<ContainerKind>(&spec.container) else {
        return Outcome::NotRunning(format!("container {} is gone", spec.container));
    };
    if container.status.phase != ContainerPhase::Running {
        return Outcome::NotRunning(format!("container {} is not running", container.spec.name));
    }
    let Some(client) = cx.world.shims.find(&container.spec.sandbox).await else {
        return Outcome::Failed("the pod's shim is being replaced, try again".to_owned());
    };
    let request = ExecRequest {
        id: spec.container.clone(),
        args: spec.command.clone(),
        env: Vec::new(),
        cwd: String::new(),
        timeout_ns: spec.timeout_seconds.max(0).saturating_mul(1_000_000_000),
        limit: 0,
    };
    match client.exec(request).await {
        Ok(output) if output.timed_out => Outcome::TimedOut,
        Ok(output) => Outcome::Done {
            stdout: output.stdout,
            stderr: output.stderr,
            exit_code: output.exit_code,
        },
        Err(e) => match e.code() {
            Some(Code::NotFound | Code::FailedPrecondition) => Outcome::NotRunning(e.to_string()),
            Some(Code::DeadlineExceeded) => Outcome::TimedOut,
            _ => Outcome::Failed(e.to_string()),
        },
    }
}
