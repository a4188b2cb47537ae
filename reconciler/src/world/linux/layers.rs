//! Unpacked layers, shared between images.

use std::path::{Path, PathBuf};

use super::content::{Content, Result, Usage};
pub use super::unpack::LayerMeta;
use super::unpack::Limits;
use crate::image::manifest::{ChainId, Loaded};

#[derive(Debug)]
pub struct Layers {
    dir: PathBuf,
}

/// Whether what is on disk is what was unpacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Soundness {
    Sound,
    Damaged,
    Absent,
}

impl Layers {
    /// Opens `<root>/layers`; what a crash left half done is buried.
    pub fn open(root: &Path, limits: Limits) -> Result<Layers> {
        let _ = limits;
        Ok(Layers {
            dir: root.join("layers"),
        })
    }

    /// Unpacks what is missing; all blobs must be in `content`. Blocking and CPU-bound.
    pub fn ensure(&self, content: &Content, image: &Loaded) -> Result<Vec<ChainId>> {
        let _ = (content, image);
        todo!()
    }

    /// The layer's tree, to be mounted.
    pub fn fs(&self, chain: &ChainId) -> PathBuf {
        self.dir.join(chain.digest()).join("fs")
    }

    /// For each chain ID its layer's meta data, `None` if it is not (wholly) here.
    pub fn observe(&self, chain: &[ChainId]) -> Result<Vec<Option<LayerMeta>>> {
        let _ = chain;
        todo!()
    }

    pub fn list(&self) -> Result<Vec<(ChainId, LayerMeta)>> {
        todo!()
    }

    /// Renames the layer into the trash; absent is success.
    pub fn remove(&self, chain: &ChainId) -> Result<()> {
        let _ = chain;
        todo!()
    }

    /// Compares the tree with the hash of its meta data (names, types, sizes, modes, owners, times).
    pub fn verify(&self, chain: &ChainId) -> Result<Soundness> {
        let _ = chain;
        todo!()
    }

    pub fn usage(&self) -> Result<Usage> {
        todo!()
    }
}
