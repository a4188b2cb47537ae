//! Pull: an image for the command line, with progress.

use futures::StreamExt;
use state::Reference;
use state::pull::{Auth, PullOutcome, PullStatus};
use tonic::Status;

use super::v1;
use crate::answer::Answers;
use crate::error::Result;
use crate::pull::Pull;
use crate::services::Services;

/// The stream owns the pull: a client that leaves takes it back.
pub(super) async fn pull(services: &Services, request: v1::PullRequest) -> Result<Answers<v1::PullResponse>> {
    let reference = Reference::parse(&request.image, "image")?;
    let credentials = request.credentials.into_iter().map(credential).collect();
    let pull = Pull::begin(&services.store, &reference, credentials, true).await?;
    let changes = futures::stream::unfold(Some((pull, PullStatus::default())), async |state| {
        let (pull, seen) = state?;
        match pull.changed(&seen).await {
            Ok(now) => match response(&pull, &now) {
                Ok((answer, true)) => Some((Ok(answer), None)),
                Ok((answer, false)) => Some((Ok(answer), Some((pull, now)))),
                Err(error) => Some((Err(Status::from(error)), None)),
            },
            Err(error) => Some((Err(Status::from(error)), None)),
        }
    });
    let closing = services.clone();
    Ok(Box::pin(changes.take_until(async move { closing.closed().await })))
}

/// What to tell of a status, and whether it is the last.
fn response(pull: &Pull, status: &PullStatus) -> Result<(v1::PullResponse, bool)> {
    let layer = |l: &state::pull::LayerProgress| v1::LayerProgress {
        digest: l.digest.clone(),
        done: l.done,
        size: l.size,
        present: l.present,
    };
    let mut answer = v1::PullResponse {
        layers: status.layers.iter().map(layer).collect(),
        ..v1::PullResponse::default()
    };
    let Some(outcome) = status.outcome.clone() else {
        return Ok((answer, false));
    };
    if let PullOutcome::Done { digest, .. } = &outcome {
        answer.digest.clone_from(digest);
    }
    answer.id = pull.answer(outcome)?;
    Ok((answer, true))
}

fn credential(from: v1::Credential) -> Auth {
    Auth {
        source: from.source,
        username: from.username,
        password: from.password,
        auth: from.auth,
        server_address: from.server_address,
        identity_token: from.identity_token,
        registry_token: from.registry_token,
    }
}
