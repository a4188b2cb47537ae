//! The controller's pass for kinds that stand on stages.

use std::sync::Arc;
use std::time::Duration;

use state::Object;

use crate::engine::Context;
use crate::engine::controller::Next;
use crate::engine::pass::{self, Mode, Passed, Staged};
use crate::error::{Class, Result};

/// Runs one pass, publishes its status, and erases what is wholly gone.
pub async fn pass<K: Staged>(cx: &Arc<Context>, object: &Arc<Object<K>>) -> Result<Next> {
    let passed = pass::run(cx, object, Mode::Act).await?;
    let Passed {
        status,
        settled,
        lowered,
        error,
        ..
    } = passed;
    cx.store.set_status::<K>(object.uid(), status);
    if object.meta.deleted() {
        if lowered {
            cx.store.erase::<K>(object.uid()).await?;
            tracing::info!("removed");
            return Ok(Next::Gone);
        }
        return error.map_or(Ok(Next::Await), Err);
    }
    if let Some(by) = object.meta.ready_by.filter(|_| !settled) {
        let left = by.saturating_sub(cx.world.clock.boottime_ns());
        if left == 0 {
            if cx
                .store
                .withdraw::<K>(object.uid(), cx.world.clock.boottime_ns())
                .await?
            {
                tracing::info!("withdrawn: nobody waited for it and it did not become ready in time");
            }
            return Ok(Next::Await);
        }
        if error.as_ref().is_none_or(|e| e.class() == Class::Permanent) {
            return Ok(Next::Again(Duration::from_nanos(left)));
        }
    }
    match error {
        Some(e) => Err(e),
        None => Ok(Next::Await),
    }
}
