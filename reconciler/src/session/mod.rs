//! One-shot wishes, done at most once: a program run inside a container, a container's checkpoint.

mod archive;
pub mod checkpoint;
mod execsync;
mod turns;

use std::sync::Arc;
use std::time::Duration;

use state::Session;
use state::container::{ContainerKind, ContainerPhase};
use state::session::{Outcome, SessionKind, SessionStatus, Wish};

pub use turns::Turns;

use crate::engine::Context;
use crate::engine::controller::Next;
use crate::error::Result;

/// Claims the session before acting, so that no second pass does it again.
pub async fn pass(cx: &Arc<Context>, object: &Arc<Session>) -> Result<Next> {
    if object.meta.deleted() {
        cx.store.erase::<SessionKind>(object.uid()).await?;
        return Ok(Next::Gone);
    }
    if object.status.claimed {
        return Ok(Next::Await);
    }
    let tell = |outcome| {
        let status = SessionStatus { claimed: true, outcome };
        cx.store.set_status::<SessionKind>(object.uid(), status);
    };
    tell(None);
    let left = async {
        let left = cx.store.wait::<SessionKind, (), _>(object.uid(), None, |now| {
            now.is_none_or(|now| now.meta.deleted()).then_some(())
        });
        let _ = left.await;
    };
    let outcome = match (&object.spec.wish, running(cx, object)) {
        (_, Err(outcome)) => Some(outcome),
        (Wish::Exec(command), Ok(container)) => tokio::select! {
            outcome = execsync::run(cx, object, &container, command) => Some(outcome),
            // Dropping the call kills the program.
            () = left => None,
        },
        (Wish::Checkpoint(archive), Ok(container)) => {
            let work = checkpoint::Work {
                session: object,
                container: &container,
                archive: archive.as_ref(),
            };
            checkpoint::run(cx, work, left).await
        }
    };
    match outcome {
        // The caller has left.
        None => Ok(Next::Again(Duration::ZERO)),
        outcome => {
            tell(outcome);
            Ok(Next::Await)
        }
    }
}

/// The session's container, while it runs.
fn running(cx: &Context, object: &Session) -> Result<Arc<state::Container>, Outcome> {
    let uid = &object.spec.container;
    let Some(container) = cx.store.get::<ContainerKind>(uid) else {
        return Err(Outcome::NotRunning(format!("container {uid} is gone")));
    };
    match container.status.phase {
        ContainerPhase::Running => Ok(container),
        _ => Err(Outcome::NotRunning(format!(
            "container {} is not running",
            container.spec.name
        ))),
    }
}
