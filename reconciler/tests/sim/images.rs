//! The image store in memory, and a registry of two images.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oci_spec::image::{Descriptor, Digest, MediaType};
use reconciler::error::{Class, Error, Result};
use reconciler::image::builtin;
use reconciler::image::manifest::{Loaded, chain_ids};
use reconciler::world::Images;
use reconciler::world::linux::content;
use reconciler::world::linux::garbage::Roots;
use reconciler::world::linux::passwd::{ResolvedUser, UserRequest};
use reconciler::world::linux::pull::{Failure, Pins, Progress, Pulled};
use reconciler::world::linux::registry::Access;
use serde_json::json;
use sha2::{Digest as _, Sha256};

use super::node::ROOT;
use super::parts::Part;

fn digest(text: &str) -> Digest {
    let hex: String = Sha256::digest(text).iter().map(|b| format!("{b:02x}")).collect();
    Digest::from_str(&format!("sha256:{hex}")).expect("a digest")
}

fn image(name: &str, layers: usize) -> Loaded {
    let diff_ids: Vec<Digest> = (0..layers).map(|n| digest(&format!("{name} layer {n}"))).collect();
    let configuration = json!({
        "architecture": "amd64", "os": "linux",
        "config": { "Cmd": ["run"] },
        "rootfs": { "type": "layers", "diff_ids": diff_ids },
    });
    let blob = |media: MediaType, digest: &Digest| Descriptor::new(media, 10, digest.clone());
    let manifest = json!({
        "schemaVersion": 2,
        "config": blob(MediaType::ImageConfig, &digest(&format!("{name} config"))),
        "layers": diff_ids.iter().map(|d| blob(MediaType::ImageLayer, d)).collect::<Vec<_>>(),
    });
    Loaded {
        descriptor: blob(MediaType::ImageManifest, &digest(&format!("{name} manifest"))),
        indexes: Vec::new(),
        manifest: serde_json::from_value(manifest).expect("a manifest"),
        configuration: serde_json::from_value(configuration).expect("a configuration"),
        chain_ids: chain_ids(&diff_ids),
        diff_ids,
    }
}

/// By reference.
pub fn registry() -> BTreeMap<String, Loaded> {
    [
        ("registry.sim/app:1", 3),
        ("registry.sim/other:1", 1),
        (builtin::REFERENCE, 1),
    ]
    .map(|(name, layers)| (name.to_owned(), image(name, layers)))
    .into()
}

impl Part {
    fn by_digest(&self, digest: &str) -> Option<Loaded> {
        let node = self.sim.lock();
        node.registry
            .values()
            .find(|i| i.descriptor.digest().as_ref() == digest)
            .cloned()
    }

    async fn fetch(&self, image: &Loaded) -> Result<()> {
        for blob in image.blobs() {
            self.pause().await;
            let digest = blob.digest().to_string();
            if !self.sim.lock().blobs.contains(&digest) {
                self.step("images: blob fetched", |node| node.blobs.insert(digest))?;
            }
        }
        Ok(())
    }

    async fn lay(&self, image: &Loaded) -> Result<()> {
        for chain in &image.chain_ids {
            self.pause().await;
            let chain = chain.to_string();
            if !self.sim.lock().layers.contains(&chain) {
                self.step("images: layer unpacked", |node| node.layers.insert(chain))?;
            }
        }
        Ok(())
    }
}

fn absent(digest: &str) -> Error {
    Error::Image {
        image: digest.to_owned(),
        problem: "it is not here".to_owned(),
        class: Class::Transient,
    }
}

#[async_trait]
impl Images for Part {
    fn dir(&self) -> &Path {
        Path::new(ROOT)
    }

    async fn load(&self, digest: &str) -> Result<Option<Loaded>> {
        self.look()?;
        let here = self.sim.lock().blobs.contains(digest);
        Ok(self.by_digest(digest).filter(|_| here))
    }

    fn missing_blobs(&self, image: &Loaded) -> usize {
        let node = self.sim.lock();
        image
            .blobs()
            .filter(|blob| !node.blobs.contains(blob.digest().as_ref()))
            .count()
    }

    async fn builtin(&self) -> Result<String> {
        let image = self.sim.lock().registry[builtin::REFERENCE].clone();
        self.fetch(&image).await?;
        Ok(image.descriptor.digest().to_string())
    }

    fn find_builtin(&self) -> Result<Option<String>> {
        self.look()?;
        let node = self.sim.lock();
        let digest = node.registry[builtin::REFERENCE].descriptor.digest().to_string();
        Ok(node.blobs.contains(&digest).then_some(digest))
    }

    async fn missing(&self, chain_ids: &[String]) -> Result<usize> {
        self.look()?;
        let node = self.sim.lock();
        Ok(chain_ids.iter().filter(|chain| !node.layers.contains(*chain)).count())
    }

    async fn doubtful(&self, _: &[String]) -> Result<usize> {
        self.look()?;
        Ok(0)
    }

    async fn settle_doubts(&self, _: &[String]) -> Result<usize> {
        Ok(0)
    }

    async fn unpack(&self, manifest: &str) -> Result<()> {
        let image = self.by_digest(manifest).ok_or_else(|| absent(manifest))?;
        if Images::missing_blobs(self, &image) > 0 {
            return Err(absent(manifest));
        }
        self.lay(&image).await
    }

    async fn pull(&self, access: &Access, _: &Arc<Progress>) -> Result<Pulled, Failure> {
        let name = access.reference.to_string();
        let known = {
            let node = self.sim.lock();
            let by_name = node.registry.get(&name).cloned();
            by_name.or_else(|| {
                let digest = name.split_once('@')?.1;
                node.registry
                    .values()
                    .find(|i| i.descriptor.digest().as_ref() == digest)
                    .cloned()
            })
        };
        let image = known.ok_or(Failure::Content(content::Error::NotFound(name)))?;
        let failed = |e: Error| Failure::Content(content::Error::NotFound(e.to_string()));
        self.fetch(&image).await.map_err(failed)?;
        self.lay(&image).await.map_err(failed)?;
        Ok(Pulled {
            digest: image.descriptor.digest().clone(),
            image,
            pinned: Pins::default().pin(Vec::new()),
        })
    }

    fn lower(&self, chain_ids: &[String]) -> Result<Vec<PathBuf>> {
        Ok(chain_ids
            .iter()
            .map(|chain| Path::new(ROOT).join("layers").join(chain))
            .collect())
    }

    async fn user(&self, _: &str, _: &[String], _: UserRequest) -> Result<ResolvedUser> {
        self.look()?;
        Ok(ResolvedUser::default())
    }

    async fn usage(&self) -> Result<(u64, u64)> {
        self.look()?;
        Ok((0, 0))
    }

    async fn release(&self, _: &str) -> Result<()> {
        self.garbage.notify_one();
        Ok(())
    }

    fn look_for_garbage(&self) {
        self.garbage.notify_one();
    }

    async fn released(&self) {
        self.garbage.notified().await;
    }

    async fn collect(&self, roots: Roots, _: Duration) -> Result<usize> {
        let (mut blobs, mut layers) = (roots.manifests.clone(), roots.layers.clone());
        for digest in &roots.manifests {
            if let Some(image) = self.by_digest(digest) {
                blobs.extend(image.blobs().map(|blob| blob.digest().to_string()));
                layers.extend(image.chain_ids.iter().map(ToString::to_string));
            }
        }
        let stray = {
            let node = self.sim.lock();
            // What a pull is just bringing is young.
            node.blobs.iter().any(|b| !blobs.contains(b)) || node.layers.iter().any(|l| !layers.contains(l))
        };
        if stray && !self.pulling() {
            self.step("images: garbage collected", |node| {
                node.blobs.retain(|b| blobs.contains(b));
                node.layers.retain(|l| layers.contains(l));
            })?;
        }
        Ok(usize::from(stray))
    }

    async fn quiet(&self) {}

    async fn end(&self) -> Result<()> {
        Ok(())
    }
}
