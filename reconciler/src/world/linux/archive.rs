//! Images from archives: an OCI layout or a `docker save` file, from a file or a pipe.

use std::io::Read;

use oci_spec::image::Descriptor;

use super::content::{Content, Result};

/// One image of an archive. Not tagged yet: the caller writes its record, then tags.
#[derive(Clone, Debug)]
pub struct Imported {
    /// As the archive or the caller wrote it, not normalized; `None` if neither names it.
    pub reference: Option<String>,
    /// What the name resolves to: an index or a manifest, with its blobs in the content store.
    pub target: Descriptor,
    /// The manifest for this machine.
    pub manifest: Descriptor,
}

pub fn import(reader: impl Read, content: &Content, name: Option<&str>) -> Result<Vec<Imported>> {
    let _ = (reader, content, name);
    todo!()
}
