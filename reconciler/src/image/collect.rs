//! Garbage of the image store: blobs and layers that no Image and no container reaches, past a grace.

use std::collections::BTreeSet;
use std::time::Duration;

use state::container::ContainerKind;
use state::image::{ImageKind, ImagePhase};

use crate::container::Stand;
use crate::engine::Context;
use crate::error::Result;

/// An import writes blobs before its record; younger than this, nothing is garbage.
const GRACE: Duration = Duration::from_secs(600);

/// Collects once. Nothing is collected while any image is unknown or being made: its roots cannot be told.
pub async fn garbage(cx: &Context) -> Result<usize> {
    let images = cx.store.list::<ImageKind>();
    let unsure = |i: &std::sync::Arc<state::Image>| {
        !i.meta.deleted() && matches!(i.status.phase, ImagePhase::Unknown | ImagePhase::Pending)
    };
    if images.iter().any(unsure) || !cx.opened.quarantined.is_empty() {
        return Ok(0);
    }
    let mut manifests: BTreeSet<String> = BTreeSet::new();
    let mut layers: BTreeSet<String> = BTreeSet::new();
    for image in images.iter().filter(|i| !i.meta.deleted()) {
        manifests.extend([image.status.digest.clone(), image.status.manifest_digest.clone()]);
        layers.extend(image.status.chain_ids.iter().cloned());
    }
    for container in cx.store.list::<ContainerKind>() {
        if let Some(stand) = Stand::read(&cx.world.paths, &container)? {
            for (manifest, chain_ids) in stand.images() {
                manifests.insert(manifest.to_owned());
                layers.extend(chain_ids.iter().cloned());
            }
        }
    }
    let removed = cx.world.images.collect(manifests, layers, GRACE).await?;
    if removed > 0 {
        tracing::info!(removed, "unused image content removed");
    }
    Ok(removed)
}
