//! Where the bytes of a layer come from: the content store, or a registry by way of it.

use std::fs::File;
use std::io::Read;

use oci_spec::image::Descriptor;

use super::super::content::{Content, Result};
use super::super::unpack::Tree;

/// Gives each layer's blob as a stream.
pub trait Source: Sync {
    fn open(&self, blob: &Descriptor) -> Result<Box<dyn Stream + '_>>;

    /// Whether reading waits for others than this machine; such layers take no permit while they wait.
    fn slow(&self) -> bool {
        false
    }

    /// Whether nobody waits for the image any more.
    fn stopped(&self) -> bool {
        false
    }
}

/// A blob being read while its layer is unpacked.
pub trait Stream: Read + Send {
    /// The layer was applied or refused: reads what is left and judges the blob as a whole. A damaged blob speaks
    /// before what it did to the layer.
    fn end(&mut self, applied: Result<Tree>) -> Result<Tree> {
        applied
    }

    /// All that was written is on disk: the blob may have its name.
    fn keep(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

impl Source for Content {
    fn open(&self, blob: &Descriptor) -> Result<Box<dyn Stream + '_>> {
        Ok(Box::new(self.open_blob(blob.digest())?))
    }
}

impl Stream for File {}
