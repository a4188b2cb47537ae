//! The image that needs no registry: made from this program's own shim.

use std::path::Path;

use oci_spec::image::Digest;

use crate::world::linux::content::{Content, Result};

pub const REFERENCE: &str = "localhost/hello:latest";

/// Makes sure the image is in the content store and named [`REFERENCE`]; answers its manifest's digest.
pub fn ensure(content: &Content, shim: &Path) -> Result<Digest> {
    let _ = (content, shim);
    todo!()
}
