//! The controller's pass for kinds that stand on stages.

use std::sync::Arc;
use std::time::Duration;

use state::{Object, Truth};

use crate::engine::Context;
use crate::engine::controller::Next;
use crate::engine::pass::{self, Mode, Passed, Staged, truth};
use crate::error::{Class, Result};

/// Times the way of a new object to its being ready, once.
fn meter_ready<K: Staged>(cx: &Context, object: &Object<K>, status: &K::Status) {
    let ready = |status: &K::Status| truth(K::conditions(status), "Ready") == Truth::True;
    // On trial: somebody waits for it. Of a changed wish the time of writing is not known.
    let new = object.meta.generation == 1 && !object.meta.delivered();
    if new && ready(status) && !ready(&object.status) {
        let took = cx.world.clock.now_ns().saturating_sub(object.meta.created);
        let took = Duration::from_nanos(u64::try_from(took).unwrap_or(0));
        cx.store
            .meter()
            .time("reconcile_ready_seconds", &[("kind", K::KIND)], took);
    }
}

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
    meter_ready(cx, object, &status);
    // Nobody of an earlier boot waits any more, and `ready_by` says nothing in this one: it counts from the boot.
    let forsaken = !object.meta.delivered()
        && object.meta.boot_id != cx.world.clock.boot_id
        && truth(K::conditions(&status), "Ready") != Truth::True;
    cx.store.set_status::<K>(object.uid(), status);
    if object.meta.deleted() {
        if lowered {
            cx.store.erase::<K>(object.uid()).await?;
            tracing::info!("removed");
            return Ok(Next::Gone);
        }
        return error.map_or(Ok(Next::Await), Err);
    }
    if forsaken {
        if cx.store.withdraw::<K>(object.uid(), u64::MAX).await? {
            tracing::info!("withdrawn: the node was started anew, and nobody waits for it");
        }
        return Ok(Next::Await);
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
