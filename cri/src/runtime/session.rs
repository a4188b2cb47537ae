//! Calls that are a session: a record written, its outcome waited for, and its end. It is never done twice, and it
//! dies with its call.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use state::container::ContainerPhase;
use state::session::{Outcome, SessionKind, SessionSpec, Wish};
use state::{Meta, New, Put, Store};

use crate::call::Call;
use crate::error::{Error, Result};
use crate::services::{Services, pod_of};

/// Time for ending what runs and reading its last output, beyond the session's own limit.
const GRACE: Duration = Duration::from_secs(10);

/// One wish for a running container.
pub(super) struct Ask<'a> {
    /// The request's `container_id`.
    pub(super) container: &'a str,
    pub(super) wish: Wish,
    /// Seconds; 0 is no limit.
    pub(super) timeout: i64,
    /// The wish in a word, for messages: `exec`, `checkpoint`.
    pub(super) noun: &'static str,
}

/// Writes the wish down and waits for what became of it. What every wish may fail by is an error already.
pub(super) async fn outcome(services: &Services, call: &Call, ask: Ask<'_>) -> Result<Outcome> {
    let container = services.container("container_id", ask.container)?;
    let pod = services
        .store
        .get::<state::sandbox::SandboxKind>(&container.spec.sandbox);
    call.about(pod.map(|p| pod_of(&p)).unwrap_or_default(), &container.meta.uid);
    let what = format!("container {}", container.spec.name);
    if container.status.phase != ContainerPhase::Running {
        return Err(Error::precondition(what, "is not running"));
    }
    let timeout = u64::try_from(ask.timeout).map_err(|_| Error::invalid("timeout", "must not be negative"))?;
    let timeout = Some(Duration::from_secs(timeout)).filter(|t| !t.is_zero());
    let spec = SessionSpec {
        container: container.meta.uid.clone(),
        wish: ask.wish,
        timeout_seconds: ask.timeout,
    };
    let session = Session::begin(&services.store, ask.noun, spec).await?;
    let own_limit = timeout.and_then(|timeout| Instant::now().checked_add(timeout + GRACE));
    let limit = [own_limit, call.client_answer_by()].into_iter().flatten().min();
    let outcome = tokio::select! {
        outcome = services.store.wait::<SessionKind, _, _>(&session.uid, limit, |now| match now {
            Some(now) => now.status.outcome.clone().map(Some),
            None => Some(None),
        }) => outcome,
        () = services.closed() => return Err(Error::Unavailable(format!("{what}: shutting down"))),
    };
    match outcome {
        Ok(Some(Outcome::TimedOut)) | Err(state::Error::Deadline { .. }) => Err(Error::TimedOut {
            what: format!("{what}: {}", ask.noun),
            limit: timeout.unwrap_or_else(|| call.started.elapsed()),
        }),
        Ok(Some(Outcome::NotRunning(problem))) => Err(Error::precondition(what, problem)),
        Ok(Some(Outcome::Failed(message))) => Err(Error::Failed {
            what,
            stage: ask.noun.to_owned(),
            reason: String::new(),
            message,
        }),
        Ok(Some(outcome)) => Ok(outcome),
        Ok(None) => Err(Error::precondition(what, format!("ended before the {} did", ask.noun))),
        Err(error) => Err(error.into()),
    }
}

/// The session's record; dropping it (also because the client left) takes the wish back, which ends what runs.
struct Session {
    store: Store,
    uid: String,
}

impl Session {
    async fn begin(store: &Store, noun: &str, spec: SessionSpec) -> Result<Session> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let meta = Meta {
            name: format!("{noun}-{}", NUMBER.fetch_add(1, Ordering::Relaxed)),
            ..Meta::default()
        };
        let record = match store.create(New::<SessionKind> { meta, spec }).await? {
            Put::Created(record) | Put::Joined(record) => record,
        };
        Ok(Session {
            store: store.clone(),
            uid: record.meta.uid.clone(),
        })
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let (store, uid) = (self.store.clone(), std::mem::take(&mut self.uid));
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                if let Err(error) = store.delete::<SessionKind>(&uid).await {
                    tracing::warn!(%error, session = %uid, "session not taken back");
                }
            });
        }
    }
}
