//! The image store as one part of the world: content, unpacked layers, the built-in image.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use super::content::{self, Content};
use super::garbage::Released;
use super::layers::Layers;
use super::pull::{Locks, Pins};
use super::registry::{self, Registry};
use super::unpack::Limits;
use crate::error::{Class, Error, Result};
use crate::image::manifest::{self, ChainId, Loaded};

pub struct Images {
    store: Arc<Inner>,
    registry: Registry,
}

pub(super) struct Inner {
    pub(super) content: Content,
    pub(super) layers: Layers,
    pub(super) pins: Pins,
    pub(super) locks: Locks,
    pub(super) released: Released,
    shim: PathBuf,
    root: PathBuf,
}

/// An image's failure as an error of a stage.
pub fn failed(image: &str) -> impl Fn(content::Error) -> Error {
    let image = image.to_owned();
    move |e| {
        let class = match e.class() {
            content::Class::Permanent => Class::Permanent,
            content::Class::Transient => Class::Transient,
        };
        Error::Image {
            image: image.clone(),
            problem: e.to_string(),
            class,
        }
    }
}

impl Images {
    pub fn open(root: &Path, shim: PathBuf, registry: registry::Config, boot: &str) -> Result<Images> {
        let registry = Registry::new(registry).map_err(|e| Error::Image {
            image: "registries".to_owned(),
            problem: e.to_string(),
            class: Class::Permanent,
        })?;
        let content = Content::open(root).map_err(failed("store"))?;
        let layers = Layers::begin(root, Limits::default(), boot).map_err(failed("store"))?;
        Ok(Images {
            store: Arc::new(Inner {
                content,
                layers,
                pins: Pins::default(),
                locks: Locks::default(),
                released: Released::default(),
                shim,
                root: root.to_owned(),
            }),
            registry,
        })
    }

    /// Directory of the image store (CRI `FilesystemIdentifier.mountpoint`).
    pub fn dir(&self) -> &Path {
        &self.store.root
    }

    pub fn content(&self) -> &Content {
        &self.store.content
    }

    pub(super) fn inner(&self) -> &Arc<Inner> {
        &self.store
    }

    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    pub fn layers(&self) -> &Layers {
        &self.store.layers
    }

    pub(super) async fn work<T: Send + 'static>(
        &self,
        image: &str,
        work: impl FnOnce(&Inner) -> content::Result<T> + Send + 'static,
    ) -> Result<T> {
        let store = self.store.clone();
        let done = tokio::task::spawn_blocking(move || work(&store)).await;
        done.map_err(|source| Error::Task {
            op: "work on image store",
            source,
        })?
        .map_err(failed(image))
    }

    /// The parsed manifest and configuration, if they are here.
    pub async fn load(&self, digest: &str) -> Result<Option<Loaded>> {
        let wanted = digest.to_owned();
        self.work(digest, move |store| {
            match manifest::by_digest(&store.content, &wanted) {
                Err(content::Error::NotFound(_)) => Ok(None),
                other => other.map(Some),
            }
        })
        .await
    }

    /// Makes sure that the built-in image's content is here; answers its manifest's digest.
    pub async fn builtin(&self) -> Result<String> {
        let made = self.work(crate::image::builtin::REFERENCE, |store| {
            crate::image::builtin::ensure(&store.content, &store.shim)
        });
        Ok(made.await?.to_string())
    }

    /// How many of these layers are not unpacked.
    pub async fn missing(&self, chain_ids: &[String]) -> Result<usize> {
        let chain = parse(chain_ids)?;
        self.work("layers", move |store| {
            Ok(store
                .layers
                .observe(&chain)?
                .iter()
                .filter(|meta| meta.is_none())
                .count())
        })
        .await
    }

    /// How many of these layers have to be looked at before they are used.
    pub async fn doubtful(&self, chain_ids: &[String]) -> Result<usize> {
        let chain = parse(chain_ids)?;
        self.work("layers", move |store| Ok(store.layers.doubtful(&chain)?.len()))
            .await
    }

    /// Looks at them; answers how many were damaged and are gone.
    pub async fn settle_doubts(&self, chain_ids: &[String]) -> Result<usize> {
        let chain = parse(chain_ids)?;
        self.work("layers", move |store| store.layers.settle_doubts(&chain))
            .await
    }

    /// Everything is on disk, and nothing is written any more.
    pub async fn end(&self) -> Result<()> {
        self.work("store", |store| store.layers.end()).await
    }

    /// Unpacks what is missing of the image with this manifest. A blob that proves damaged is removed, so that its
    /// image fetches it again.
    pub async fn unpack(&self, manifest: &str) -> Result<()> {
        let wanted = manifest.to_owned();
        self.work(manifest, move |store| {
            let loaded = manifest::by_digest(&store.content, &wanted)?;
            let missing = store.layers.missing(&loaded.chain_ids)?;
            let Err(e) = store.layers.ensure(&store.content, &loaded) else {
                return Ok(());
            };
            if !e.is_full() {
                for i in missing {
                    let digest = loaded.manifest.layers()[i].digest();
                    if !store.content.sound(digest)? {
                        tracing::warn!(%digest, "the blob is damaged, it is fetched again");
                        store.content.remove_blob(digest)?;
                    }
                }
            }
            Err(e)
        })
        .await
    }

    /// Bytes and inodes of content and unpacked layers.
    pub async fn usage(&self) -> Result<(u64, u64)> {
        self.work("store", |store| {
            let (content, layers) = (store.content.usage()?, store.layers.usage()?);
            Ok((content.bytes + layers.bytes, content.inodes + layers.inodes))
        })
        .await
    }

    /// The trees of these layers, top first, for an overlay.
    pub fn lower(&self, chain_ids: &[String]) -> Result<Vec<PathBuf>> {
        let trees: content::Result<_> = parse(chain_ids)?
            .iter()
            .rev()
            .map(|chain| self.store.layers.fs(chain))
            .collect();
        trees.map_err(failed("layers"))
    }
}

fn parse(chain_ids: &[String]) -> Result<Vec<ChainId>> {
    let parse = |text: &String| {
        ChainId::from_str(text)
            .map_err(|e| content::Error::invalid(text, e))
            .map_err(failed(text))
    };
    chain_ids.iter().map(parse).collect()
}
