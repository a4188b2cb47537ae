//! One kube-runtime applier per kind: single flight per object, coalesced triggers, requeue.
//!
//! The applier polls every reconcile future from one task, so the work of a pass is spawned. Its concurrency is
//! unbounded: a pass may wait for a grace period or a plugin, and must hold up no other object.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::future::BoxFuture;
use kube_runtime::controller::{Action, Config};
use kube_runtime::reflector::store::Writer;
use kube_runtime::{applier, watcher};
use state::store::Event;
use state::{Kind, Object};
use tokio::sync::mpsc;
use tracing::Instrument;

use crate::engine::Context;
use crate::engine::trigger::{Queue, Receiver};
use crate::error::{Class, Error};

/// A look without a reason, in case a trigger was lost.
const RESYNC: Duration = Duration::from_secs(60);
const BACKOFF_FIRST: Duration = Duration::from_millis(100);
const BACKOFF_LAST: Duration = Duration::from_secs(60);

/// What a pass wants next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The next trigger or the resync.
    Await,
    Again(Duration),
    /// The record is erased.
    Gone,
}

/// A kind with a controller.
pub trait Controlled: Kind {
    /// One pass over the newest version of an object.
    fn pass(cx: Arc<Context>, object: Arc<Object<Self>>) -> BoxFuture<'static, Result<Next, Error>>;
    /// Tells those who depend on it that its status changed.
    fn changed(cx: &Context, object: &Object<Self>) {
        let _ = (cx, object);
    }
}

#[derive(Debug, thiserror::Error)]
#[error("{source}")]
struct Failed {
    source: Error,
    uid: String,
}

/// Failures in a row, by uid: the applier's error policy is not told.
type Attempts = Arc<Mutex<HashMap<String, u32>>>;

/// Runs a kind's controller until its queue ends.
pub async fn run<K: Controlled>(cx: Arc<Context>, queue: Queue<K>, mut requests: Receiver<K>) {
    let mut writer = Writer::<Object<K>>::new(());
    let reader = writer.as_reader();
    writer.apply_watcher_event(&watcher::Event::Init);
    writer.apply_watcher_event(&watcher::Event::InitDone);
    let feed = tokio::spawn(feed(cx.clone(), writer, queue));
    let attempts = Attempts::default();
    let passes = attempts.clone();
    let failures = attempts.clone();
    let meter = cx.store.meter().clone();
    let stream = futures::stream::poll_fn(move |task| {
        let request = requests.poll_recv(task);
        meter.set("reconcile_queue_depth", &[("kind", K::KIND)], requests.len() as f64);
        request
    })
    .map(Ok::<_, std::convert::Infallible>);
    let config = Config::default().concurrency(0).debounce(Duration::ZERO);
    let reconcile = move |object: Arc<Object<K>>, cx: Arc<Context>| {
        let attempts = passes.clone();
        Box::pin(async move { reconcile(object, cx, attempts).await })
    };
    let policy = move |object: Arc<Object<K>>, failed: &Failed, cx: Arc<Context>| {
        let mut attempts = failures.lock().unwrap_or_else(PoisonError::into_inner);
        let tries = attempts.entry(failed.uid.clone()).or_default();
        *tries += 1;
        let mut delay = backoff(object.uid(), *tries, failed.source.class());
        // When its trial is over it is withdrawn, however long the pause between tries has grown.
        let left = |by: u64| by.checked_sub(cx.world.clock.boottime_ns());
        if let Some(left) = object.meta.ready_by.and_then(left).filter(|left| *left > 0) {
            delay = delay.min(Duration::from_nanos(left));
        }
        tracing::debug!(kind = K::KIND, uid = failed.uid, ?delay, "trying again: {failed}");
        Action::requeue(delay)
    };
    applier(reconcile, policy, cx, reader, stream, config)
        .for_each(|_| async {})
        .await;
    feed.abort();
}

/// Feeds the reflector, and queues what changed in a way that a pass must see. Statuses are told to dependants.
async fn feed<K: Controlled>(cx: Arc<Context>, mut writer: Writer<Object<K>>, queue: Queue<K>) {
    let mut seen: HashMap<String, (u64, bool, bool)> = HashMap::new();
    let mut events: mpsc::UnboundedReceiver<Event<K>> = cx.store.watch();
    while let Some(event) = events.recv().await {
        match event {
            Event::Applied(object) => {
                let meta = &object.meta;
                let wish = (meta.generation, meta.deleted(), meta.paused());
                let uid = meta.uid.clone();
                writer.apply_watcher_event(&watcher::Event::Apply((*object).clone()));
                if seen.insert(uid.clone(), wish) != Some(wish) {
                    queue.look(&uid, "wish");
                } else {
                    K::changed(&cx, &object);
                }
            }
            Event::Erased(object) => {
                seen.remove(object.uid());
                writer.apply_watcher_event(&watcher::Event::Delete((*object).clone()));
                K::changed(&cx, &object);
            }
        }
    }
}

async fn reconcile<K: Controlled>(
    object: Arc<Object<K>>,
    cx: Arc<Context>,
    attempts: Attempts,
) -> Result<Action, Failed> {
    let uid = object.uid().to_owned();
    let _turn = cx.passes.take(&uid).await;
    // The reflector may lag: the newest wish is the store's.
    let Some(newest) = cx.store.get::<K>(&uid) else {
        return Ok(Action::await_change());
    };
    if newest.meta.paused() && !newest.meta.deleted() {
        return Ok(Action::await_change());
    }
    let span =
        tracing::info_span!(parent: None, "reconcile", kind = K::KIND, name = newest.meta.name, uid = short(&uid));
    let begun = Instant::now();
    let work = tokio::spawn(K::pass(cx.clone(), newest).instrument(span));
    let result = work
        .await
        .unwrap_or_else(|source| Err(Error::Task { op: "pass", source }));
    metered::<K>(&cx, begun, &result);
    match result {
        Ok(next) => {
            attempts.lock().unwrap_or_else(PoisonError::into_inner).remove(&uid);
            Ok(match next {
                Next::Await => Action::requeue(RESYNC),
                Next::Again(delay) => Action::requeue(delay),
                Next::Gone => Action::await_change(),
            })
        }
        Err(source) => Err(Failed { source, uid }),
    }
}

fn metered<K: Kind>(cx: &Context, begun: Instant, result: &Result<Next, Error>) {
    let result = match result {
        Ok(_) => "ok",
        Err(Error::Pending(_)) => "pending",
        Err(e) if e.class() == Class::Permanent => "permanent",
        Err(_) => "failed",
    };
    let meter = cx.store.meter();
    meter.count("reconcile_passes_total", &[("kind", K::KIND), ("result", result)]);
    meter.time("reconcile_pass_seconds", &[("kind", K::KIND)], begun.elapsed());
}

/// The first 13 digits, as crictl prints ids.
pub fn short(uid: &str) -> &str {
    uid.get(..13).unwrap_or(uid)
}

/// 100 ms doubling to a minute, spread by the uid so that many do not come at once. What only a new wish can change
/// waits for the resync.
fn backoff(uid: &str, tries: u32, class: Class) -> Duration {
    if class == Class::Permanent {
        return RESYNC;
    }
    let delay = BACKOFF_FIRST
        .saturating_mul(1 << tries.clamp(1, 10).saturating_sub(1))
        .min(BACKOFF_LAST);
    let spread = uid
        .bytes()
        .fold(0u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(u32::from(byte)))
        % 100;
    delay.mul_f64(0.8 + 0.4 * f64::from(spread) / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_grows_to_a_minute_and_permanent_failures_wait() {
        let delay = |tries| backoff("00", tries, Class::Transient);
        assert!(delay(1) >= Duration::from_millis(80) && delay(1) <= Duration::from_millis(120));
        assert!(delay(3) > delay(2) && delay(2) > delay(1));
        assert!(delay(50) <= Duration::from_secs(72));
        assert_eq!(backoff("00", 1, Class::Permanent), RESYNC);
    }
}
