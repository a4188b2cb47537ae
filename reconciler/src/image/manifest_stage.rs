//! Stage `manifest`: manifest and configuration are in the content store.

use state::Image;
use state::image::{ImageKind, ImageSource, ImageStatus};

use super::manifest::Loaded;
use super::pull;
use crate::engine::Context;
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::error::{Class, Error, Result};

pub struct Manifest;

pub struct Have {
    loaded: Option<Loaded>,
    /// What the reference resolves to.
    digest: String,
    /// The image is being removed and its content was not given up yet.
    held: bool,
}

/// The manifest or index that a source stands for, if it is known.
pub async fn digest(cx: &Context, object: &Image) -> Result<Option<String>> {
    Ok(match &object.spec.source {
        ImageSource::Archive { manifest_digest } => Some(manifest_digest.clone()),
        ImageSource::BuiltIn => cx.world.images.find_builtin()?,
        ImageSource::Registry => Some(object.spec.digest.clone()).filter(|digest| !digest.is_empty()),
    })
}

/// What the documents say, as far as they are here.
pub async fn loaded(cx: &Context, object: &Image) -> Result<Option<Loaded>> {
    match digest(cx, object).await? {
        Some(digest) => cx.world.images.load(&digest).await,
        None => Ok(None),
    }
}

/// Brings back what is missing of an image, from where it came.
pub async fn restore(cx: &Context, object: &Image) -> Result<()> {
    match &object.spec.source {
        ImageSource::BuiltIn => cx.world.images.builtin().await.map(drop),
        ImageSource::Registry => pull::again(cx, object).await,
        ImageSource::Archive { manifest_digest } => Err(Error::Image {
            image: object.meta.name.clone(),
            problem: format!("blobs of {manifest_digest} are gone from the content store; import the archive again"),
            class: Class::Permanent,
        }),
    }
}

impl Stage<ImageKind> for Manifest {
    type Have = Have;
    const NAME: &'static str = "manifest";

    async fn observe(cx: &Context, object: &Image) -> Result<Have> {
        let digest = digest(cx, object).await?.unwrap_or_default();
        Ok(Have {
            loaded: loaded(cx, object).await?,
            digest,
            held: object.meta.deleted() && !object.status.digest.is_empty(),
        })
    }

    fn diff(object: &Image, have: &Have) -> Step {
        match &have.loaded {
            Some(_) => Step::Keep,
            None => Step::Make(Why::new("Absent", format!("{} is not here", object.meta.name))),
        }
    }

    /// Content is shared: what no record reaches is collected behind.
    fn present(have: &Have) -> bool {
        have.held
    }

    fn report(have: &Have, status: &mut ImageStatus) {
        let Some(loaded) = &have.loaded else { return };
        status.id = loaded.id().to_string();
        status.digest = have.digest.clone();
        status.manifest_digest = loaded.descriptor.digest().to_string();
        status.size = loaded.size();
        status.chain_ids = loaded.chain_ids.iter().map(ToString::to_string).collect();
        status.config = loaded.config();
        // A new one only if it is another: statuses are compared.
        let origin = loaded.origin();
        if *status.origin != origin {
            status.origin = origin.into();
        }
    }

    async fn act(cx: &Context, object: &Image, _: &Step) -> Result<()> {
        restore(cx, object).await
    }

    async fn undo(cx: &Context, object: &Image) -> Result<Undone> {
        cx.world.images.release(&object.status.digest).await?;
        Ok(Undone::Done)
    }
}
