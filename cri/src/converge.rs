//! The one path of mutating calls: write the wish, wait until its status says done or never, map the outcome.
//!
//! The waiting happens in the call's own future, so a client that leaves drops a waiter and nothing else.

use std::sync::Arc;
use std::time::{Duration, Instant};

use state::container::ContainerKind;
use state::image::ImageKind;
use state::pod::PodKind;
use state::sandbox::SandboxKind;
use state::{Condition, Kind, New, Object, Put, Truth};

use crate::call::Call;
use crate::error::{Error, Result};
use crate::services::Services;

/// Name of the conjunction of all stages.
const READY: &str = "Ready";

/// Kinds that calls wait for.
pub(crate) trait Observed: Kind {
    /// Subject of an error's sentence.
    fn what(object: &Object<Self>) -> String;
    fn observed(status: &Self::Status) -> u64;
    fn conditions(status: &Self::Status) -> &[Condition];
}

macro_rules! observed {
    ($kind:ty, $object:ident => $what:expr) => {
        impl Observed for $kind {
            fn what($object: &Object<Self>) -> String {
                $what
            }
            fn observed(status: &Self::Status) -> u64 {
                status.observed_generation
            }
            fn conditions(status: &Self::Status) -> &[Condition] {
                &status.conditions
            }
        }
    };
}

observed!(SandboxKind, sandbox => {
    format!("sandbox {}/{}", sandbox.spec.pod.namespace, sandbox.spec.pod.name)
});
observed!(ContainerKind, container => format!("container {}", container.spec.name));
observed!(ImageKind, image => format!("image {}", image.meta.name));
observed!(PodKind, pod => format!("pod {}/{}", pod.meta.namespace, pod.meta.name));

/// Writes a record (or joins an equal one under way) for `pod` (`namespace/name`), waits for `done`, delivers its uid.
///
/// A create that failed for good is withdrawn before its error is answered, so that a retry starts clean. One that
/// outlives its call stays on trial, for the retry to join.
pub(crate) async fn create<K, F>(
    services: &Services,
    call: &Call,
    pod: &str,
    mut new: New<K>,
    done: F,
) -> Result<String>
where
    K: Observed,
    F: FnMut(&Object<K>) -> bool + Send,
{
    new.meta.ready_by = Some(call.ready_by());
    let (Put::Created(record) | Put::Joined(record)) = services.store.create(new).await.map_err(in_request)?;
    call.about(pod, &record.meta.uid);
    let uid = record.meta.uid.as_str();
    match until(services, call, &record, reached(&record, done)).await {
        Ok(()) => deliver(services, &record).await?,
        Err(error @ Error::Failed { .. }) => {
            withdraw::<K>(services, uid).await?;
            return Err(error);
        }
        Err(error) => return Err(error),
    }
    Ok(uid.to_owned())
}

/// The record's metadata are the configuration's in the request.
fn in_request(error: state::Error) -> Error {
    match error {
        state::Error::Invalid { field, problem } => {
            let field = field
                .strip_prefix("metadata.")
                .map(|part| format!("config.{part}"))
                .unwrap_or(field);
            Error::Invalid { field, problem }
        }
        error => error.into(),
    }
}

async fn deliver<K: Observed>(services: &Services, record: &Object<K>) -> Result<()> {
    let _shared = services.settle.read().await;
    let uid = record.meta.uid.as_str();
    match services.store.get::<K>(uid) {
        Some(now) if !now.meta.deleted() => {}
        _ => return Err(replaced(record)),
    }
    if services.store.deliver::<K>(uid).await?.meta.deleted() {
        return Err(replaced(record));
    }
    Ok(())
}

/// Marks an undelivered record deleted; a delivered one belongs to its caller.
async fn withdraw<K: Observed>(services: &Services, uid: &str) -> Result<()> {
    let _alone = services.settle.write().await;
    match services.store.get::<K>(uid) {
        Some(now) if !now.meta.delivered() && !now.meta.deleted() => services.store.delete::<K>(uid).await.map(drop)?,
        _ => {}
    }
    Ok(())
}

fn replaced<K: Observed>(record: &Object<K>) -> Error {
    Error::Aborted {
        what: K::what(record),
        problem: "was removed, or replaced by a changed request, before it was done".into(),
    }
}

/// Judges a record by its wish: done, failed for good, taken back, or (`None`) still converging. A status that speaks
/// of an older generation than `record`'s says nothing.
pub(crate) fn reached<K, F>(
    record: &Object<K>,
    mut done: F,
) -> impl FnMut(Option<&Object<K>>) -> Option<Result<()>> + Send
where
    K: Observed,
    F: FnMut(&Object<K>) -> bool + Send,
{
    let generation = record.meta.generation;
    let gone = record.clone();
    move |now| match now {
        None => Some(Err(replaced(&gone))),
        Some(now) if now.meta.deleted() => Some(Err(replaced(now))),
        Some(now) if K::observed(&now.status) < generation => None,
        Some(now) if done(now) => Some(Ok(())),
        Some(now) => failed_for_good(now).map(|condition| Err(Error::failed(K::what(now), condition))),
    }
}

fn failed_for_good<K: Observed>(object: &Object<K>) -> Option<&Condition> {
    let never = |c: &&Condition| c.status == Truth::False && c.permanent;
    let mut all = K::conditions(&object.status).iter().filter(never);
    let first = all.next();
    match first {
        Some(ready) if ready.stage == READY => all.next().or(first),
        other => other,
    }
}

/// Waits for `judge` to answer. At the call's deadline the error names the stage that is not done.
pub(crate) async fn until<K, J>(services: &Services, call: &Call, record: &Object<K>, judge: J) -> Result<()>
where
    K: Observed,
    J: FnMut(Option<&Object<K>>) -> Option<Result<()>> + Send,
{
    let uid = record.meta.uid.as_str();
    tokio::select! {
        answer = services.store.wait::<K, _, _>(uid, Some(call.answer_by()), judge) => match answer {
            Ok(verdict) => verdict,
            Err(state::Error::Deadline { .. }) => Err(late(services.store.get::<K>(uid), record, call.started)),
            Err(error) => Err(error.into()),
        },
        () = services.closed() => {
            Err(Error::Unavailable(format!("{}: shutting down; what was asked for is recorded", K::what(record))))
        }
    }
}

/// Waits until the record is erased; a removal may take any number of looks, so nothing is permanent here.
pub(crate) async fn until_erased<K: Observed>(services: &Services, call: &Call, record: &Object<K>) -> Result<()> {
    until(services, call, record, |now| now.is_none().then_some(Ok(()))).await
}

/// The deadline's error: which stage is not done, for how long, and what it waits for.
fn late<K: Observed>(now: Option<Arc<Object<K>>>, record: &Object<K>, started: Instant) -> Error {
    let conditions = now.as_ref().map(|now| K::conditions(&now.status)).unwrap_or_default();
    let open = |c: &&Condition| c.status != Truth::True && c.stage != READY;
    let telling = conditions
        .iter()
        .filter(open)
        .find(|c| c.status == Truth::False && !c.message.is_empty());
    let (stage, age, message) = match telling.or_else(|| conditions.iter().find(open)) {
        Some(c) => (c.stage.clone(), since(c.since), what_for(c)),
        None => (
            "all".to_owned(),
            crate::call::now().saturating_duration_since(started),
            "it was not looked at yet".to_owned(),
        ),
    };
    Error::Deadline {
        what: K::what(record),
        stage,
        age,
        message,
    }
}

fn what_for(condition: &Condition) -> String {
    match (condition.reason.as_str(), condition.message.as_str()) {
        ("", "") => "still under way".to_owned(),
        (reason, "") => reason.to_owned(),
        (_, message) => message.to_owned(),
    }
}

fn since(ns: i64) -> Duration {
    Duration::from_nanos(u64::try_from(state::clock::now_ns().saturating_sub(ns)).unwrap_or_default())
}
