//! The image store as one part of the world: content, unpacked layers, the built-in image.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::content::{self, Content};
use super::garbage::{Released, Roots};
use super::layers::Layers;
use super::mounts;
use super::passwd::{self, ResolvedUser, UserRequest};
use super::pull::{Failure, Flights, Pins, Progress, Pulled};
use super::registry::{self, Access, Ignored, Registry};
use super::unpack::{Form, Limits};
use crate::error::{Class, Error, Result};
use crate::image::manifest::{self, ChainId, Loaded};
use state::reference::Reference;

pub struct Images {
    store: Arc<Inner>,
    registry: Registry,
}

pub(super) struct Inner {
    pub(super) content: Content,
    pub(super) layers: Layers,
    pub(super) pins: Pins,
    pub(super) flights: Flights,
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
    pub fn open(root: &Path, shim: PathBuf, registry: registry::Config, boot: &str, form: Form) -> Result<Images> {
        let registry = Registry::new(registry).map_err(|e| Error::Image {
            image: "registries".to_owned(),
            problem: e.to_string(),
            class: Class::Permanent,
        })?;
        let content = Content::open(root).map_err(failed("store"))?;
        let layers = Layers::begin(root, Limits::default(), boot, form).map_err(failed("store"))?;
        Ok(Images {
            store: Arc::new(Inner {
                content,
                layers,
                pins: Pins::default(),
                flights: Flights::default(),
                released: Released::default(),
                shim,
                root: root.to_owned(),
            }),
            registry,
        })
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
}

#[async_trait]
impl crate::world::Images for Images {
    fn dir(&self) -> &Path {
        &self.store.root
    }

    async fn load(&self, digest: &str) -> Result<Option<Loaded>> {
        let wanted = digest.to_owned();
        self.work(digest, move |store| {
            match manifest::by_digest(&store.content, &wanted) {
                Err(content::Error::NotFound(_)) => Ok(None),
                other => other.map(Some),
            }
        })
        .await
    }

    async fn builtin(&self) -> Result<String> {
        let made = self.work(crate::image::builtin::REFERENCE, |store| {
            crate::image::builtin::ensure(&store.content, &store.shim)
        });
        Ok(made.await?.to_string())
    }

    async fn missing(&self, chain_ids: &[String]) -> Result<usize> {
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

    async fn doubtful(&self, chain_ids: &[String]) -> Result<usize> {
        let chain = parse(chain_ids)?;
        self.work("layers", move |store| Ok(store.layers.doubtful(&chain)?.len()))
            .await
    }

    async fn settle_doubts(&self, chain_ids: &[String]) -> Result<usize> {
        let chain = parse(chain_ids)?;
        self.work("layers", move |store| store.layers.settle_doubts(&chain))
            .await
    }

    fn ignored_settings(&self) -> Vec<(String, Ignored)> {
        let roots = self.registry.hosts_roots();
        let entries = roots
            .iter()
            .flat_map(|root| std::fs::read_dir(root).into_iter().flatten().flatten().take(1000));
        let mut found: Vec<(String, Ignored)> = Vec::new();
        for entry in entries {
            let name = entry.file_name().to_string_lossy().into_owned();
            let host = match name.strip_suffix('_').and_then(|n| n.rsplit_once('_')) {
                Some((host, port)) => format!("{host}:{port}"),
                None if name == "_default" => "example.invalid".to_owned(),
                None => name,
            };
            let Ok(reference) = Reference::parse(&format!("{host}/x:1"), "certs.d") else {
                continue;
            };
            for line in self.registry.explain(&reference).ignored {
                if !found.iter().any(|(_, told)| *told == line) {
                    found.push((format!("{host}/x:1"), line));
                }
            }
        }
        found
    }

    fn reconfigure(&self, registry: registry::Config) {
        self.registry.reconfigure(registry);
    }

    async fn end(&self) -> Result<()> {
        self.work("store", |store| store.layers.end()).await
    }

    async fn unpack(&self, manifest: &str) -> Result<()> {
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

    async fn usage(&self) -> Result<(u64, u64)> {
        self.work("store", |store| {
            let (content, layers) = (store.content.usage()?, store.layers.usage()?);
            Ok((content.bytes + layers.bytes, content.inodes + layers.inodes))
        })
        .await
    }

    fn lower(&self, chain_ids: &[String]) -> Result<Vec<PathBuf>> {
        self.store.layers.lower(&parse(chain_ids)?).map_err(failed("layers"))
    }

    fn missing_blobs(&self, image: &Loaded) -> usize {
        let content = &self.store.content;
        image
            .blobs()
            .filter(|blob| !content.exists(blob).unwrap_or(false))
            .count()
    }

    fn find_builtin(&self) -> Result<Option<String>> {
        let found = self.store.content.resolve(crate::image::builtin::REFERENCE);
        let found = found.map_err(failed(crate::image::builtin::REFERENCE))?;
        Ok(found.map(|descriptor| descriptor.digest().to_string()))
    }

    async fn pull(&self, access: &Access, progress: &Arc<Progress>) -> Result<Pulled, Failure> {
        self.fetch(access, progress).await
    }

    async fn user(&self, image: &str, chain_ids: &[String], request: UserRequest) -> Result<ResolvedUser> {
        let lower = self.lower(chain_ids)?;
        let found = tokio::task::spawn_blocking(move || {
            let root = mounts::detached(&lower)?;
            passwd::lookup(root.as_fd(), &request)
        });
        let found = found.await.map_err(|source| Error::Task {
            op: "look up user",
            source,
        })?;
        found.map_err(failed(image))
    }

    async fn release(&self, manifest: &str) -> Result<()> {
        if let Some(image) = self.load(manifest).await? {
            self.store.released.note(manifest, &image);
        }
        Ok(())
    }

    fn look_for_garbage(&self) {
        self.store.released.ring();
    }

    async fn released(&self) {
        self.store.released.rung().await;
    }

    async fn collect(&self, roots: Roots, grace: Duration) -> Result<usize> {
        self.work("store", move |store| store.collect(roots, grace)).await
    }

    async fn quiet(&self) {
        self.store.layers.quiet().await;
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
