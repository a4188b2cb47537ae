//! Stage `image`: which layers and which configuration the container stands on, written down once, so that removing
//! or moving the image's names changes nothing for it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use state::container::{ContainerImage, ContainerKind};
use state::image::{ImageConfig, ImageKind, ImagePhase};
use state::{Container, Image as ImageObject};

use super::dir;
use crate::engine::Context;
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::error::{Error, Result};
use crate::world::World;

pub struct Image;

/// The receipt `image.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Stand {
    pub id: String,
    pub manifest_digest: String,
    /// Bottom first.
    pub chain_ids: Vec<String>,
    pub config: ImageConfig,
    /// Images that are mounted as volumes, by their place among the container's mounts.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub volumes: BTreeMap<usize, VolumeImage>,
}

/// An image mounted as a volume.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VolumeImage {
    pub id: String,
    pub manifest_digest: String,
    /// Bottom first.
    pub chain_ids: Vec<String>,
}

/// What of an image a container needs.
pub struct Needed<'a> {
    pub id: &'a str,
    pub manifest_digest: &'a str,
    /// Bottom first.
    pub chain_ids: &'a [String],
}

impl Stand {
    fn path(world: &World, object: &Container) -> std::path::PathBuf {
        dir(&world.paths, object).join("image.json")
    }

    /// `None` before the stage has run.
    pub fn read(world: &World, object: &Container) -> Result<Option<Stand>> {
        let path = Stand::path(world, object);
        let Some(text) = world.files.read(&path)? else {
            return Ok(None);
        };
        let stand = serde_json::from_slice(&text);
        // It is not flushed: a power cut may leave it empty, and then it is made again.
        Ok(stand
            .inspect_err(|e| tracing::warn!(path = %path.display(), "unreadable: {e}"))
            .ok())
    }

    /// Every image that the container needs.
    pub fn images(&self) -> impl Iterator<Item = Needed<'_>> {
        let own = Needed {
            id: &self.id,
            manifest_digest: &self.manifest_digest,
            chain_ids: &self.chain_ids,
        };
        std::iter::once(own).chain(self.volumes.values().map(|image| Needed {
            id: &image.id,
            manifest_digest: &image.manifest_digest,
            chain_ids: &image.chain_ids,
        }))
    }

    /// The receipt, for a stage above this one.
    pub fn of(cx: &Context, object: &Container) -> Result<Stand> {
        Stand::read(&cx.world, object)?.ok_or_else(|| Error::Pending("the image is not known yet".to_owned()))
    }
}

/// A ready image with this id (config digest).
pub fn by_id(cx: &Context, id: &str) -> Option<std::sync::Arc<ImageObject>> {
    let images = cx.store.list::<ImageKind>();
    images
        .into_iter()
        .find(|i| i.status.id == id && i.status.phase == ImagePhase::Ready)
}

pub struct Have {
    receipt: bool,
    /// Reference of the first image that is not here.
    missing: Option<String>,
}

/// The images of a container's volumes, by their place among its mounts.
fn volumes(object: &Container) -> impl Iterator<Item = (usize, &ContainerImage)> {
    let mounts = object.spec.mounts.iter().enumerate();
    mounts.filter_map(|(i, mount)| Some((i, mount.image.as_ref()?)))
}

impl Stage<ContainerKind> for Image {
    type Have = Have;
    const NAME: &'static str = "image";

    async fn observe(cx: &Context, object: &Container) -> Result<Have> {
        let receipt = Stand::read(&cx.world, object)?.is_some();
        let mut images = std::iter::once(&object.spec.image).chain(volumes(object).map(|(_, image)| image));
        let missing = match receipt {
            true => None,
            false => images.find(|image| by_id(cx, &image.id).is_none()),
        };
        Ok(Have {
            receipt,
            missing: missing.map(|image| image.requested.clone()),
        })
    }

    fn diff(_: &Container, have: &Have) -> Step {
        match (have.receipt, &have.missing) {
            (true, _) => Step::Keep,
            (false, None) => Step::Make(Why::new("Absent", "")),
            (false, Some(image)) => Step::Wait(Why::new("ImageNotReady", format!("image {image} is not here"))),
        }
    }

    fn present(have: &Have) -> bool {
        have.receipt
    }

    async fn act(cx: &Context, object: &Container, _: &Step) -> Result<()> {
        let Some(image) = by_id(cx, &object.spec.image.id) else {
            return Ok(());
        };
        let mut mounted = BTreeMap::new();
        for (i, wish) in volumes(object) {
            let Some(image) = by_id(cx, &wish.id) else {
                return Ok(());
            };
            let volume = VolumeImage {
                id: image.status.id.clone(),
                manifest_digest: image.status.manifest_digest.clone(),
                chain_ids: image.status.chain_ids.clone(),
            };
            mounted.insert(i, volume);
        }
        let stand = Stand {
            id: image.status.id.clone(),
            manifest_digest: image.status.manifest_digest.clone(),
            chain_ids: image.status.chain_ids.clone(),
            config: image.status.config.clone(),
            volumes: mounted,
        };
        let text = serde_json::to_vec(&stand).unwrap_or_default();
        cx.world.files.replace(&Stand::path(&cx.world, object), &text)
    }

    async fn undo(cx: &Context, object: &Container) -> Result<Undone> {
        cx.world.files.unlink(&Stand::path(&cx.world, object))?;
        cx.world.images.look_for_garbage();
        Ok(Undone::Done)
    }
}
