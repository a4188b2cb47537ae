//! What of the image store may go: content that no root reaches, past a grace, or at once if its image was removed.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::Notify;

use super::content;
use super::images::Inner;
use crate::image::manifest::{self, Loaded};

/// What an interrupted pull left is kept so long for the next one.
const PARTIAL: Duration = Duration::from_secs(24 * 3600);

/// What must stay.
#[derive(Clone, Debug, Default)]
pub struct Roots {
    /// When the records were read: what a pull has freed since then may be named by one of today.
    pub read: Option<Instant>,
    /// Digests of manifests and indexes.
    pub manifests: BTreeSet<String>,
    /// Chain IDs of layers, beside those of the manifests' images.
    pub layers: BTreeSet<String>,
}

/// Content whose image was removed, and when: it waits for no grace, but for whoever has touched it since.
#[derive(Debug, Default)]
pub struct Released {
    since: Mutex<HashMap<String, SystemTime>>,
    bell: Notify,
}

impl Released {
    /// What was released so far. Only what is still needed, by a container, is kept in mind for the next time.
    fn still(&self, needed: &BTreeSet<String>) -> HashMap<String, SystemTime> {
        let mut since = self.since.lock().unwrap_or_else(PoisonError::into_inner);
        let all = since.clone();
        since.retain(|digest, _| needed.contains(digest));
        all
    }

    /// An image's record goes, and with it perhaps the last need of its content.
    pub(super) fn note(&self, manifest: &str, image: &Loaded) {
        let mut since = self.since.lock().unwrap_or_else(PoisonError::into_inner);
        for digest in image.needs().chain([manifest.to_owned()]) {
            since.insert(digest, SystemTime::now());
        }
        self.ring();
    }

    /// Something may not be needed any more.
    pub(super) fn ring(&self) {
        self.bell.notify_one();
    }

    /// Until the bell rang since the last call.
    pub(super) async fn rung(&self) {
        self.bell.notified().await;
    }
}

impl Inner {
    /// Removes what these roots do not reach; see `Images::collect`.
    pub(super) fn collect(&self, roots: Roots, grace: Duration) -> content::Result<usize> {
        let mut needed = roots.layers;
        for digest in &roots.manifests {
            match manifest::by_digest(&self.content, digest) {
                Ok(image) => needed.extend(image.needs()),
                Err(content::Error::NotFound(_)) => {}
                // No descriptor is free, or the like: that says nothing of the image.
                Err(e @ content::Error::Io { .. }) if !e.is_damage() => return Err(e),
                // What cannot be read keeps nothing; its image is fetched again or reported, by its own controller.
                Err(e) => tracing::warn!(digest, "while collecting garbage: {e}"),
            }
        }
        needed.extend(roots.manifests);
        // An import, which may come by a slow pipe, writes its record at its end.
        let alone = self.content.collecting()?;
        let grace = if alone.is_some() { grace } else { PARTIAL.max(grace) };
        let released = self.released.still(&needed);
        self.pins.forget(roots.read);
        let over = |digest: &str, path: &Path| {
            let touched = path.metadata().and_then(|meta| meta.modified()).ok();
            touched.is_some_and(|at| {
                let unwanted = released.get(digest).is_some_and(|since| at < *since);
                unwanted || at.elapsed().is_ok_and(|age| age > grace)
            })
        };
        let mut removed = 0;
        for (digest, _) in self.content.list_blobs()? {
            if !needed.contains(digest.as_ref()) && over(digest.as_ref(), &self.content.blob_path(&digest)?) {
                let remove = || self.content.remove_blob(&digest);
                removed += usize::from(self.pins.unless_pinned(digest.as_ref(), remove)?);
            }
        }
        for (chain, _) in self.layers.list()? {
            let place = self.layers.fs(&chain)?;
            if !needed.contains(chain.as_ref()) && over(chain.as_ref(), place.parent().unwrap_or(&place)) {
                let remove = || self.layers.remove(&chain);
                removed += usize::from(self.pins.unless_pinned(chain.as_ref(), remove)?);
            }
        }
        for partial in self.content.partials()? {
            removed += usize::from(self.content.remove_partial(&partial, PARTIAL.max(grace))?);
        }
        Ok(removed)
    }
}
