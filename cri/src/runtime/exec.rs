//! ExecSync: a session record, its outcome, and its end. It is never done twice, and it dies with its call.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use state::container::ContainerPhase;
use state::session::{Outcome, SessionKind, SessionSpec};
use state::{Meta, New, Put, Store};

use super::v1;
use crate::call::Call;
use crate::error::{Error, Result};
use crate::services::{Services, pod_of};
use crate::translate;

/// Time for killing the processes and reading their last output, beyond the session's own limit.
const GRACE: Duration = Duration::from_secs(10);

pub(super) async fn sync(
    services: &Services,
    call: &Call,
    request: v1::ExecSyncRequest,
) -> Result<v1::ExecSyncResponse> {
    if request.cmd.is_empty() {
        return Err(Error::invalid("cmd", "must not be empty"));
    }
    for (i, word) in request.cmd.iter().enumerate() {
        translate::no_nul(&format!("cmd[{i}]"), word)?;
    }
    let timeout = match u64::try_from(request.timeout) {
        Ok(seconds) => Some(Duration::from_secs(seconds)).filter(|t| !t.is_zero()),
        Err(_) => return Err(Error::invalid("timeout", "must be 0 (no limit) or a number of seconds")),
    };
    let container = services.container("container_id", &request.container_id)?;
    let pod = services
        .store
        .get::<state::sandbox::SandboxKind>(&container.spec.sandbox);
    call.about(pod.map(|p| pod_of(&p)).unwrap_or_default(), &container.meta.uid);
    let what = format!("container {}", container.spec.name);
    if container.status.phase != ContainerPhase::Running {
        return Err(Error::precondition(what, "is not running"));
    }
    let spec = SessionSpec {
        container: container.meta.uid.clone(),
        command: request.cmd,
        timeout_seconds: request.timeout,
    };
    let session = Session::begin(&services.store, spec).await?;
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
        Ok(Some(Outcome::Done {
            stdout,
            stderr,
            exit_code,
        })) => Ok(v1::ExecSyncResponse {
            stdout,
            stderr,
            exit_code,
        }),
        Ok(Some(Outcome::TimedOut)) | Err(state::Error::Deadline { .. }) => Err(Error::TimedOut {
            what: format!("{what}: command"),
            limit: timeout.unwrap_or_else(|| call.started.elapsed()),
        }),
        Ok(Some(Outcome::NotRunning(problem))) => Err(Error::precondition(what, problem)),
        Ok(Some(Outcome::Failed(message))) => Err(Error::Failed {
            what,
            stage: "exec".to_owned(),
            reason: String::new(),
            message,
        }),
        Ok(None) => Err(Error::precondition(what, "ended before the command did")),
        Err(error) => Err(error.into()),
    }
}

/// The session's record; dropping it (also because the client left) takes the wish back, which kills what runs.
struct Session {
    store: Store,
    uid: String,
}

impl Session {
    async fn begin(store: &Store, spec: SessionSpec) -> Result<Session> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let meta = Meta {
            name: format!("exec-{}", NUMBER.fetch_add(1, Ordering::Relaxed)),
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
