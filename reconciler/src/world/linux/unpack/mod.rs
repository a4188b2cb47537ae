//! A layer's tar stream becomes a directory that overlay can use as a lower one.

use std::io::Read;
use std::path::{Path, PathBuf};

use oci_spec::image::Digest;
use serde::{Deserialize, Serialize};

use super::content::Result;

/// What a hostile layer may cost at most.
#[derive(Clone, Debug)]
pub struct Limits {
    pub entries: u64,
    /// Bytes of one path.
    pub name: usize,
    /// Components of one path.
    pub depth: usize,
    /// Bytes of the uncompressed stream.
    pub bytes: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            entries: 1_000_000,
            name: 4096,
            depth: 1024,
            bytes: 128 << 30,
        }
    }
}

/// What is known of an unpacked layer, kept beside it as `meta.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LayerMeta {
    pub diff_id: Digest,
    /// Bytes on disk.
    pub bytes: u64,
    pub inodes: u64,
    /// Hash over names, types, sizes, modes, owners and times, to find damage after a power cut.
    pub tree: String,
}

pub enum Compression {
    None,
    Gzip,
    Zstd,
}

pub fn unpack(
    blob: &mut dyn Read,
    diff_id: &Digest,
    target: &Path,
    lower: &[PathBuf],
    limits: &Limits,
) -> Result<LayerMeta> {
    let _ = (blob, diff_id, target, lower, limits);
    todo!()
}
