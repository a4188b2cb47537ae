//! How far a pull has come, layer by layer.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use oci_spec::image::Digest;
use state::pull::LayerProgress;

use crate::image::manifest::Loaded;

#[derive(Debug, Default)]
pub struct Progress {
    layers: OnceLock<Vec<Layer>>,
    index: Mutex<HashMap<Digest, usize>>,
}

#[derive(Debug)]
struct Layer {
    digest: String,
    size: u64,
    present: bool,
    done: AtomicU64,
}

impl Progress {
    /// The image is known; `missing` are the places of the layers to be unpacked.
    pub fn begin(&self, image: &Loaded, missing: &[usize]) {
        let layer = |(i, blob): (usize, &oci_spec::image::Descriptor)| {
            let present = missing.binary_search(&i).is_err();
            Layer {
                digest: blob.digest().to_string(),
                size: blob.size(),
                present,
                done: AtomicU64::new(if present { blob.size() } else { 0 }),
            }
        };
        let blobs = image.manifest.layers();
        let _ = self.layers.set(blobs.iter().enumerate().map(layer).collect());
        let mut index = self.index.lock().unwrap_or_else(|e| e.into_inner());
        index.extend(blobs.iter().enumerate().map(|(i, blob)| (blob.digest().clone(), i)));
    }

    /// So many bytes of the blob are here.
    pub fn done(&self, digest: &Digest, bytes: u64) {
        let at = self
            .index
            .lock()
            .unwrap_or_else(|e| e.into_inner())
            .get(digest)
            .copied();
        if let Some(layer) = at.and_then(|i| self.layers.get()?.get(i)) {
            layer.done.store(bytes, Ordering::Relaxed);
        }
    }

    /// Bottom first; empty while the image is not known.
    pub fn layers(&self) -> Vec<LayerProgress> {
        let layer = |l: &Layer| LayerProgress {
            digest: l.digest.clone(),
            done: l.done.load(Ordering::Relaxed),
            size: l.size,
            present: l.present,
        };
        self.layers
            .get()
            .map(|all| all.iter().map(layer).collect())
            .unwrap_or_default()
    }
}
