//! Index, manifest and configuration: small, verified, kept in the content store.

use oci_spec::image::{Descriptor, MediaType};

use super::super::content::{self, DOCUMENT_LIMIT};
use super::super::images::Images;
use super::super::registry::Access;
use super::Failure;
use super::flights::Turn;
use super::pins::Pinned;
use crate::image::manifest::{self, Document, Loaded, Platform};

/// How deep indexes may nest.
const NESTING: usize = 4;

/// What the reference resolves to, and the image for this platform, whose layers may be missing. One request if its
/// documents are here. Each of them is held before it is looked for: what an earlier image left may be garbage that is
/// being collected.
pub async fn fetch(images: &Images, access: &Access) -> Result<(Descriptor, Loaded, Vec<Pinned>), Failure> {
    let resolved = images.registry().resolve(access).await?;
    let root = Descriptor::new(
        MediaType::from(resolved.media_type.as_str()),
        resolved.size,
        resolved.digest.clone(),
    );
    let mut body = resolved.body;
    let (mut at, platform) = (root.clone(), Platform::host());
    let hold = |document: &Descriptor| images.inner().pins.pin(vec![document.digest().to_string()]);
    let mut held = Vec::new();
    for _ in 0..NESTING {
        held.push(hold(&at));
        let bytes = match images.document(&at).await? {
            Some(bytes) => bytes,
            None => {
                let bytes = match body.take() {
                    Some(bytes) => bytes,
                    None => images.registry().manifest(access, at.digest(), Some(at.size())).await?,
                };
                images.keep(&at, bytes.to_vec()).await?;
                bytes.to_vec()
            }
        };
        body = None;
        match manifest::parse(at.digest().as_ref(), Some(at.media_type()), &bytes)? {
            Document::Index(index) => at = platform.choose(index.manifests())?.clone(),
            Document::Manifest(manifest) => {
                held.push(hold(manifest.config()));
                configuration(images, access, manifest.config()).await?;
                let image = images.loaded(&root).await?;
                return Ok((root, image, held));
            }
        }
    }
    let problem = format!("indexes nest deeper than {NESTING}");
    Err(content::Error::invalid(root.digest(), problem).into())
}

async fn configuration(images: &Images, access: &Access, config: &Descriptor) -> Result<(), Failure> {
    let _turn = loop {
        if images.document(config).await?.is_some() {
            return Ok(());
        }
        match images.inner().flights.turn(config.digest()) {
            Turn::Mine(flight) => break flight,
            // Until that fetch has ended.
            Turn::Theirs(mut theirs) => while theirs.changed().await.is_ok() {},
        }
    };
    if config.size() > DOCUMENT_LIMIT {
        return Err(Failure::Content(content::Error::TooBig {
            object: format!("configuration {}", config.digest()),
            limit: DOCUMENT_LIMIT,
        }));
    }
    let mut blob = images.registry().blob(access, config, 0).await?;
    let mut bytes = Vec::new();
    while let Some(chunk) = blob.next().await? {
        bytes.extend_from_slice(&chunk);
    }
    images.keep(config, bytes).await
}

impl Images {
    /// A document that is here and whole.
    async fn document(&self, descriptor: &Descriptor) -> Result<Option<Vec<u8>>, Failure> {
        let (store, descriptor) = (self.inner().clone(), descriptor.clone());
        let read = tokio::task::spawn_blocking(move || {
            if !store.content.exists(&descriptor)? {
                return Ok(None);
            }
            match store.content.read(descriptor.digest()) {
                // Damaged on disk: fetched again in its place.
                Err(content::Error::Digest { .. }) => store.content.remove_blob(descriptor.digest()).map(|()| None),
                other => other.map(Some),
            }
        });
        Ok(read.await??)
    }

    async fn keep(&self, descriptor: &Descriptor, bytes: Vec<u8>) -> Result<(), Failure> {
        let (store, descriptor) = (self.inner().clone(), descriptor.clone());
        let kept = tokio::task::spawn_blocking(move || {
            let media_type = descriptor.media_type().clone();
            let (digest, size) = (descriptor.digest().clone(), descriptor.size());
            store
                .content
                .ingest(media_type, &mut &bytes[..], Some(&digest), Some(size))
        });
        kept.await??;
        Ok(())
    }

    async fn loaded(&self, root: &Descriptor) -> Result<Loaded, Failure> {
        let (store, root) = (self.inner().clone(), root.clone());
        let loaded = tokio::task::spawn_blocking(move || manifest::load(&store.content, &root, &Platform::host()));
        Ok(loaded.await??)
    }
}
