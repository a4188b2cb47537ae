//! The image that needs no registry: one layer with this program's own static shim as `/hello`.
//!
//! Its bytes depend on the shim alone, so two nodes with one build have one image.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::str::FromStr;

use oci_spec::image::{Arch, Descriptor, Digest, MediaType};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::world::linux::content::{Content, Error, Result};

pub const REFERENCE: &str = "localhost/hello:latest";
/// Where `/hello serve` listens unless told otherwise.
pub const PORT: u16 = 8080;
/// A shim is a few megabytes.
const LIMIT: u64 = 256 << 20;

/// What the image was last made from.
#[derive(Debug, Deserialize, Serialize, PartialEq, Eq)]
struct Record {
    size: u64,
    /// ns since the epoch.
    mtime: i128,
    inode: u64,
    manifest: String,
    manifest_size: u64,
    blobs: Vec<(String, u64)>,
}

/// Makes sure the image is in the content store and named [`REFERENCE`]; answers its manifest's digest. A few system
/// calls when the shim has not changed.
pub fn ensure(content: &Content, shim: &Path) -> Result<Digest> {
    let meta = fs::metadata(shim).map_err(Error::io("look at the shim", shim.display()))?;
    let stamp = (
        meta.len(),
        i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec()),
        meta.ino(),
    );
    let note = content.dir().join("builtin.json");
    let record = fs::read(&note)
        .ok()
        .and_then(|bytes| serde_json::from_slice::<Record>(&bytes).ok());
    if let Some(record) = record
        && stamp == (record.size, record.mtime, record.inode)
        && let Some(digest) = here(content, &record)?
    {
        return Ok(digest);
    }
    let (manifest, blobs) = make(content, shim)?;
    content.tag(REFERENCE, &manifest)?;
    let (size, mtime, inode) = stamp;
    let blobs = blobs.iter().map(|b| (b.digest().to_string(), b.size())).collect();
    let digest = manifest.digest().clone();
    let record = Record {
        size,
        mtime,
        inode,
        manifest: digest.to_string(),
        manifest_size: manifest.size(),
        blobs,
    };
    let bytes = serde_json::to_vec(&record).map_err(|e| Error::invalid(note.display(), e))?;
    // Only a short cut: lost or torn, the image is made again.
    fs::write(&note, bytes).map_err(Error::io("write", note.display()))?;
    tracing::info!(image = REFERENCE, digest = %digest, "built-in image made");
    Ok(digest)
}

/// The manifest's digest, if all blobs and the name are there.
fn here(content: &Content, record: &Record) -> Result<Option<Digest>> {
    let Ok(digest) = Digest::from_str(&record.manifest) else {
        return Ok(None);
    };
    let mut all = vec![(record.manifest.clone(), record.manifest_size)];
    all.extend(record.blobs.iter().cloned());
    for (blob, size) in all {
        let Ok(blob) = Digest::from_str(&blob) else {
            return Ok(None);
        };
        if content.size_of(&blob)? != Some(size) {
            return Ok(None);
        }
    }
    let named = content.resolve(REFERENCE)?.is_some_and(|d| *d.digest() == digest);
    Ok(named.then_some(digest))
}

fn make(content: &Content, shim: &Path) -> Result<(Descriptor, Vec<Descriptor>)> {
    let failed = |e: std::io::Error| Error::io("pack the shim", shim.display())(e);
    let mut binary = Vec::new();
    File::open(shim)
        .map_err(failed)?
        .take(LIMIT + 1)
        .read_to_end(&mut binary)
        .map_err(failed)?;
    if binary.len() as u64 > LIMIT {
        return Err(Error::TooBig {
            object: shim.display().to_string(),
            limit: LIMIT,
        });
    }
    let tar = layer(&binary).map_err(failed)?;
    let layer = content.ingest_bytes(MediaType::ImageLayer, &tar)?;
    let config = json!({
        "architecture": Arch::default(),
        "os": "linux",
        "config": {
            "Entrypoint": ["/hello"],
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "ExposedPorts": { format!("{PORT}/tcp"): {} },
            "WorkingDir": "/",
        },
        "rootfs": { "type": "layers", "diff_ids": [layer.digest()] },
        "history": [{ "created_by": "built in" }],
    });
    let document = |media_type: MediaType, value: &serde_json::Value| {
        let bytes = serde_json::to_vec(value).map_err(|e| Error::invalid(REFERENCE, e))?;
        content.ingest_bytes(media_type, &bytes)
    };
    let config = document(MediaType::ImageConfig, &config)?;
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MediaType::ImageManifest,
        "config": config,
        "layers": [layer],
    });
    Ok((document(MediaType::ImageManifest, &manifest)?, vec![config, layer]))
}

const PASSWD: &str = "root:x:0:0:root:/:/hello\nnobody:x:65534:65534:nobody:/:/hello\n";
const GROUP: &str = "root:x:0:\nnobody:x:65534:\n";

fn layer(binary: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut tar = tar::Builder::new(Vec::with_capacity(binary.len() + (16 << 10)));
    let directories = [
        ("dev", 0o755),
        ("etc", 0o755),
        ("proc", 0o555),
        ("sys", 0o555),
        ("tmp", 0o1777),
    ];
    for (name, mode) in directories {
        let mut header = member(tar::EntryType::Directory, mode, 0);
        tar.append_data(&mut header, format!("{name}/"), std::io::empty())?;
    }
    let files = [
        ("etc/passwd", 0o644, PASSWD.as_bytes()),
        ("etc/group", 0o644, GROUP.as_bytes()),
        ("hello", 0o755, binary),
    ];
    for (name, mode, bytes) in files {
        let mut header = member(tar::EntryType::Regular, mode, bytes.len() as u64);
        tar.append_data(&mut header, name, bytes)?;
    }
    tar.into_inner()
}

fn member(kind: tar::EntryType, mode: u32, size: u64) -> tar::Header {
    let mut header = tar::Header::new_ustar();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    for zero in [tar::Header::set_uid, tar::Header::set_gid, tar::Header::set_mtime] {
        zero(&mut header, 0);
    }
    header
}
