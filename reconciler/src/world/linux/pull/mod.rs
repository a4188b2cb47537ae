//! An image from a registry into the stores.
//!
//! ```text
//! reference -> resolve -> index, manifest, configuration -> content store
//!                              │
//!        each missing layer:   socket -> hash -> ingest file
//!                                          └---> inflate -> hash -> untar -> its own directory
//!                              │
//!                one flush, then blobs and layers get their names
//! ```
//!
//! Pulls share: a blob that one of them fetches is waited for by the others, which read it as soon as it is whole; a
//! layer that one of them unpacks likewise, once it has its name.
//!
//! Nothing here writes a record: without one, what was fetched is garbage that a further pull may still use. A half
//! fetched blob stays in the content store's `ingest` and is resumed, by a later process too.

mod documents;
mod flights;
mod pins;
mod progress;
mod stream;

use std::sync::Arc;

use oci_spec::image::Digest;
use state::pull::PullFailure;
use tokio::runtime::Handle;
use tokio::sync::watch;

pub use self::flights::Flights;
pub use self::pins::{Pinned, Pins};
pub use self::progress::Progress;
use self::stream::Fetch;
use super::content;
use super::images::{Images, Inner};
use super::registry::{self, Access};
use crate::image::manifest::Loaded;

/// A pulled image. While this lives, nothing of it is collected as garbage.
#[derive(Debug)]
pub struct Pulled {
    /// What the reference resolved to.
    pub digest: Digest,
    pub image: Loaded,
    pub pinned: Pinned,
}

/// Why a pull failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error(transparent)]
    Registry(registry::Error),
    #[error(transparent)]
    Content(content::Error),
    #[error("nobody waits for it any more")]
    Cancelled,
    #[error("a background task ended early: {0}")]
    Task(#[from] tokio::task::JoinError),
}

impl From<content::Error> for Failure {
    fn from(e: content::Error) -> Failure {
        Failure::Content(e)
    }
}

impl From<registry::Error> for Failure {
    fn from(e: registry::Error) -> Failure {
        Failure::Registry(e)
    }
}

impl Failure {
    pub fn why(&self) -> PullFailure {
        use registry::Class;
        match self {
            Failure::Registry(e) => match e.class() {
                Class::Absent => PullFailure::NotFound,
                Class::Refused => PullFailure::PermissionDenied,
                Class::Unavailable => PullFailure::RegistryUnavailable,
                Class::Bad => PullFailure::Invalid,
                Class::Setup => PullFailure::Failed,
            },
            Failure::Content(content::Error::NoPlatform { .. }) => PullFailure::NotFound,
            Failure::Content(e) if e.is_full() => PullFailure::NoSpace,
            Failure::Content(content::Error::Io { .. }) => PullFailure::Failed,
            Failure::Content(_) => PullFailure::Invalid,
            Failure::Cancelled | Failure::Task(_) => PullFailure::Failed,
        }
    }
}

/// Stops the blocking half of a pull when its asynchronous half is dropped.
struct Stopper(watch::Sender<bool>, Arc<Inner>);

impl Drop for Stopper {
    fn drop(&mut self) {
        self.0.send_replace(true);
        self.1.layers.wake();
    }
}

impl Images {
    /// Fetches and unpacks what is missing of an image. Dropping the future stops the traffic.
    pub(super) async fn fetch(&self, access: &Access, progress: &Arc<Progress>) -> Result<Pulled, Failure> {
        let (root, image, held) = documents::fetch(self, access).await?;
        let pinned = self
            .inner()
            .pins
            .pin(image.needs().chain([root.digest().to_string()]).collect());
        drop(held);
        // A partial blob may prove damaged only at its end; from its beginning it is fetched once more, then.
        let image = match self.layers_of(access, image.clone(), progress).await {
            Err((failure, true)) if matches!(failure, Failure::Content(content::Error::Digest { .. })) => {
                tracing::warn!(image = %access.reference, "an earlier pull left damage, fetching again: {failure}");
                self.layers_of(access, image, progress).await
            }
            other => other,
        };
        Ok(Pulled {
            digest: root.digest().clone(),
            image: image.map_err(|(failure, _)| failure)?,
            pinned,
        })
    }

    /// The error says whether anything was resumed.
    async fn layers_of(
        &self,
        access: &Access,
        image: Loaded,
        progress: &Arc<Progress>,
    ) -> Result<Loaded, (Failure, bool)> {
        let (store, registry) = (self.inner().clone(), self.registry().clone());
        let stop = Stopper(watch::Sender::new(false), store.clone());
        let (access, progress, stopping) = (access.clone(), progress.clone(), stop.0.clone());
        let handle = Handle::current();
        let work = tokio::task::spawn_blocking(move || {
            let fetch = Fetch::new(&store, (&registry, &access), &progress, handle, stopping);
            let work = || {
                progress.begin(&image, &store.layers.missing(&image.chain_ids)?);
                store.layers.ensure(&fetch, &image)?;
                // A layer may be here without its blob; both are kept.
                image.manifest.layers().iter().try_for_each(|blob| fetch.blob(blob))
            };
            match work() {
                Ok(()) => Ok(image),
                Err(e) => Err((fetch.failed(e), fetch.resumed())),
            }
        });
        let done = work.await.map_err(|e| (Failure::Task(e), false))?;
        drop(stop);
        done
    }
}
