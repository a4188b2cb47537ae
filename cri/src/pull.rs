//! A pull as a call: its record in memory, its outcome, and its end with the call.

use std::sync::atomic::{AtomicU64, Ordering};

use state::pull::{Auth, PullFailure, PullKind, PullOutcome, PullSpec, PullStatus};
use state::{Meta, New, Put, Reference, Store};

use crate::call::Call;
use crate::error::{Error, Result};
use crate::services::Services;

/// The pull's record; dropping it (also because the client left) takes the wish back, which stops the traffic.
pub(crate) struct Pull {
    store: Store,
    uid: String,
    image: String,
}

impl Pull {
    pub(crate) async fn begin(
        store: &Store,
        image: &Reference,
        credentials: Vec<Auth>,
        progress: bool,
    ) -> Result<Pull> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let image = image.to_string();
        let meta = Meta {
            name: format!("pull-{}", NUMBER.fetch_add(1, Ordering::Relaxed)),
            ..Meta::default()
        };
        let spec = PullSpec {
            image: image.clone(),
            credentials,
            progress,
            ..PullSpec::default()
        };
        let (Put::Created(record) | Put::Joined(record)) = store.create(New::<PullKind> { meta, spec }).await?;
        Ok(Pull {
            store: store.clone(),
            uid: record.meta.uid.clone(),
            image,
        })
    }

    /// Waits for the outcome; the image's id. A call without a limit waits as long as bytes flow.
    pub(crate) async fn done(&self, services: &Services, call: &Call) -> Result<String> {
        let outcome = tokio::select! {
            outcome = self.store.wait::<PullKind, _, _>(&self.uid, call.client_answer_by(), |now| match now {
                Some(now) => now.status.outcome.clone().map(Some),
                None => Some(None),
            }) => outcome,
            () = services.closed() => {
                return Err(Error::Unavailable(format!("image {}: shutting down", self.image)));
            }
        };
        match outcome {
            Ok(Some(outcome)) => self.answer(outcome),
            Ok(None) => Err(Error::Aborted {
                what: format!("image {}", self.image),
                problem: "its pull was taken back".to_owned(),
            }),
            Err(state::Error::Deadline { .. }) => Err(Error::Deadline {
                what: format!("image {}", self.image),
                stage: "pull".to_owned(),
                age: call.started.elapsed(),
                message: self.progress(),
            }),
            Err(error) => Err(error.into()),
        }
    }

    fn progress(&self) -> String {
        let status = self.store.get::<PullKind>(&self.uid).map(|pull| pull.status.clone());
        let layers = status.unwrap_or_default().layers;
        if layers.is_empty() {
            return "the registry has not answered yet, or layers are under way".to_owned();
        }
        let (done, size) = layers.iter().fold((0, 0), |(d, s), l| (d + l.done, s + l.size));
        format!("{done} of {size} bytes are here")
    }

    /// The status as it changes, until there is an outcome.
    pub(crate) async fn changed(&self, seen: &PullStatus) -> Result<PullStatus> {
        let seen = seen.clone();
        let next = self
            .store
            .wait::<PullKind, _, _>(&self.uid, None, move |now| match now {
                Some(now) => (now.status != seen).then(|| Some(now.status.clone())),
                None => Some(None),
            });
        next.await?.ok_or_else(|| Error::Aborted {
            what: format!("image {}", self.image),
            problem: "its pull was taken back".to_owned(),
        })
    }

    pub(crate) fn answer(&self, outcome: PullOutcome) -> Result<String> {
        match outcome {
            PullOutcome::Done { id, .. } => Ok(id),
            PullOutcome::Failed { why, message } => Err(Error::Pull {
                image: self.image.clone(),
                why,
                message,
            }),
        }
    }
}

impl Drop for Pull {
    fn drop(&mut self) {
        let (store, uid) = (self.store.clone(), std::mem::take(&mut self.uid));
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                if let Err(error) = store.delete::<PullKind>(&uid).await {
                    tracing::warn!(%error, pull = %uid, "pull not taken back");
                }
            });
        }
    }
}

/// What the kubelet reads at the beginning of a message to tell why (its ErrRegistryUnavailable). It sees it only with
/// the code Unknown, whose text its client passes on unchanged.
pub(crate) fn prefix(why: PullFailure) -> &'static str {
    match why {
        PullFailure::RegistryUnavailable => "RegistryUnavailable: ",
        _ => "",
    }
}
