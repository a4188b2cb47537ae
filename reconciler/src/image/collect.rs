//! Garbage of the image store: blobs and layers that no Image and no container reaches, past a grace.

use std::sync::Arc;
use std::time::{Duration, Instant};

use state::container::ContainerKind;
use state::image::{ImageKind, ImagePhase, ImageSource};
use state::node::NodeKind;

use crate::container::Stand;
use crate::engine::Context;
use crate::error::Result;
use crate::world::linux::garbage::Roots;
use crate::world::linux::usage::disk;

/// Layers and blobs of a removed image go after so long, several removals at once.
const SOON: Duration = Duration::from_millis(100);
/// An import has most likely written the record of its blobs after so long.
const LEAST: Duration = Duration::from_secs(180);

/// Collects once. An import writes blobs before its record, so what is younger than the grace is no garbage. Nothing
/// is collected before every image was looked at, nor while a record cannot be read.
pub async fn garbage(cx: &Context) -> Result<usize> {
    let mut roots = Roots {
        read: Some(Instant::now()),
        ..Roots::default()
    };
    let images = cx.store.list::<ImageKind>();
    let unsure = |i: &Arc<state::Image>| {
        let made = i.spec.source == ImageSource::BuiltIn && i.status.phase == ImagePhase::Pending;
        !i.meta.deleted() && (i.status.phase == ImagePhase::Unknown || made)
    };
    if images.iter().any(unsure) || cx.store.any_quarantined() {
        return Ok(0);
    }
    for image in images.iter().filter(|i| !i.meta.deleted()) {
        let (spec, status) = (&image.spec, &image.status);
        roots
            .manifests
            .extend([&spec.digest, &status.digest, &status.manifest_digest].map(Clone::clone));
        if let ImageSource::Archive { manifest_digest } = &spec.source {
            roots.manifests.insert(manifest_digest.clone());
        }
        roots.layers.extend(status.chain_ids.iter().cloned());
    }
    for container in cx.store.list::<ContainerKind>() {
        if let Some(stand) = Stand::read(&cx.world, &container)? {
            for image in stand.images() {
                roots.manifests.insert(image.manifest_digest.to_owned());
                roots.layers.extend(image.chain_ids.iter().cloned());
            }
        }
    }
    roots.manifests.remove("");
    let removed = cx.world.images.collect(roots, grace(cx)).await?;
    if removed > 0 {
        tracing::info!(removed, "unused image content removed");
        // Who waits for space asks for the usage.
        cx.store
            .list::<NodeKind>()
            .iter()
            .for_each(|node| cx.queues.nodes.look(node.uid(), "garbage"));
    }
    Ok(removed)
}

/// How old garbage is at least. A disk that fills up waits for imports only.
fn grace(cx: &Context) -> Duration {
    let live = cx.live();
    let full =
        live.gc_high < 100 && disk::used_percent(&cx.world.paths.root).is_some_and(|percent| percent > live.gc_high);
    if full { live.gc_grace.min(LEAST) } else { live.gc_grace }
}

/// Collects behind every removal of an image.
pub async fn follow(cx: Arc<Context>) {
    loop {
        cx.world.images.released().await;
        tokio::time::sleep(SOON).await;
        if let Err(e) = garbage(&cx).await {
            tracing::warn!("image garbage: {e}");
        }
    }
}
