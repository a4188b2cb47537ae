//! The secrets that pods name for their pulls; a pod looks again when one of them comes, changes or goes.

use std::sync::Arc;

use state::pod::PodKind;
use state::secret::{PullSecret, SecretKind};
use state::store::Event;
use state::{Pod, Store};

use crate::engine::Context;

/// A pod's `imagePullSecrets`, as they are now.
pub fn of(store: &Store, pod: &Pod) -> Vec<PullSecret> {
    let secret = |name: &String| {
        let name = format!("{}/{name}", pod.meta.namespace);
        let found = store.by_name::<SecretKind>(&name);
        PullSecret { name, found }
    };
    pod.spec
        .image_pull_secrets
        .iter()
        .map(|one| secret(&one.name))
        .collect()
}

/// Until the loop ends.
pub async fn follow(cx: Arc<Context>) {
    let mut changes = cx.store.watch::<SecretKind>();
    while let Some(Event::Applied(secret) | Event::Erased(secret)) = changes.recv().await {
        for pod in cx.store.list::<PodKind>() {
            let named = pod
                .spec
                .image_pull_secrets
                .iter()
                .any(|one| one.name == secret.meta.name);
            if named && pod.meta.namespace == secret.meta.namespace {
                cx.queues.pods.look(pod.uid(), "secret");
            }
        }
    }
}
