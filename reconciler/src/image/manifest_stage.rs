//! Stage `manifest`: manifest, configuration and blobs are in the content store.

use state::Image;
use state::image::{ImageKind, ImageSource, ImageStatus};

use super::builtin;
use super::manifest::Loaded;
use crate::engine::Context;
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::error::{Class, Error, Result};

pub struct Manifest;

pub struct Have {
    loaded: Option<Loaded>,
    /// What the reference resolves to.
    digest: String,
    missing_blobs: usize,
}

/// The manifest that a source stands for, if the content store can tell.
pub async fn digest(cx: &Context, object: &Image) -> Result<Option<String>> {
    Ok(match &object.spec.source {
        ImageSource::Archive { manifest_digest } => Some(manifest_digest.clone()),
        ImageSource::BuiltIn => {
            let found = cx.world.images.content().resolve(builtin::REFERENCE);
            let found = found.map_err(crate::world::linux::images::failed(builtin::REFERENCE))?;
            found.map(|descriptor| descriptor.digest().to_string())
        }
        ImageSource::Registry => None,
    })
}

impl Stage<ImageKind> for Manifest {
    type Have = Have;
    const NAME: &'static str = "manifest";

    async fn observe(cx: &Context, object: &Image) -> Result<Have> {
        let Some(digest) = digest(cx, object).await? else {
            return Ok(Have {
                loaded: None,
                digest: String::new(),
                missing_blobs: 0,
            });
        };
        let loaded = cx.world.images.load(&digest).await?;
        let content = cx.world.images.content();
        let missing = |l: &Loaded| l.blobs().filter(|blob| !content.exists(blob).unwrap_or(false)).count();
        let missing_blobs = loaded.as_ref().map_or(0, missing);
        Ok(Have {
            loaded,
            digest,
            missing_blobs,
        })
    }

    fn diff(object: &Image, have: &Have) -> Step {
        match (&have.loaded, have.missing_blobs) {
            (Some(_), 0) => Step::Keep,
            (Some(_), n) => Step::Remake(Why::new("BlobsMissing", format!("{n} blobs are gone"))),
            (None, _) => Step::Make(Why::new("Absent", format!("{} is not here", object.meta.name))),
        }
    }

    /// Content is shared: what no record reaches is collected behind.
    fn present(_: &Have) -> bool {
        false
    }

    fn report(have: &Have, status: &mut ImageStatus) {
        let Some(loaded) = &have.loaded else { return };
        status.id = loaded.id().to_string();
        status.digest = have.digest.clone();
        status.manifest_digest = loaded.descriptor.digest().to_string();
        status.size = loaded.size();
        status.chain_ids = loaded.chain_ids.iter().map(ToString::to_string).collect();
        status.config = loaded.config();
    }

    async fn act(cx: &Context, object: &Image, _: &Step) -> Result<()> {
        let problem = match &object.spec.source {
            ImageSource::BuiltIn => {
                cx.world.images.builtin().await?;
                return Ok(());
            }
            ImageSource::Archive { manifest_digest } => {
                format!("blobs of {manifest_digest} are gone from the content store; import the archive again")
            }
            ImageSource::Registry => "pulling from registries is not implemented yet; import an archive".to_owned(),
        };
        Err(Error::Image {
            image: object.meta.name.clone(),
            problem,
            class: Class::Permanent,
        })
    }

    async fn undo(_: &Context, _: &Image) -> Result<Undone> {
        Ok(Undone::Done)
    }
}
