//! Images on the registry that misbehaves ([`crate::registry`]).

use serde_json::{Value, json};

use crate::images::{Compression, Layer};
use crate::registry::{Server, digest};

/// Bytes that do not compress, the same for the same seed.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..len / 8).flat_map(|_| next().to_le_bytes()).collect()
}

/// An image on the server.
pub struct Served {
    pub name: String,
    /// Digests of the layers' blobs and their sizes, bottom first.
    pub blobs: Vec<(String, u64)>,
}

impl Served {
    pub fn size(&self) -> u64 {
        self.blobs.iter().map(|(_, size)| size).sum()
    }
}

/// A layer with one file of so many bytes, `noiseSEED`.
pub fn layer(seed: u64, bytes: usize) -> Layer {
    Layer::new(Compression::Gzip).file(&format!("noise{seed}"), 0o644, noise(seed, bytes))
}

/// Puts an image of these layers on the server, tag `1`.
pub fn serve(server: &Server, path: &str, layers: &[Layer]) -> Served {
    serve_as(server, path, layers, |_, _| {})
}

/// The same, with what `edit` makes of each layer's descriptor.
pub fn serve_as(server: &Server, path: &str, layers: &[Layer], edit: impl Fn(usize, &mut Value)) -> Served {
    let mut blobs = Vec::new();
    let mut listed = Vec::new();
    for layer in layers {
        let (bytes, suffix) = layer.blob();
        let size = bytes.len() as u64;
        let digest = server.blob(path, &bytes);
        let mut descriptor = json!({ "mediaType": format!("application/vnd.oci.image.layer.v1.tar{suffix}"),
            "digest": digest, "size": size });
        edit(listed.len(), &mut descriptor);
        listed.push(descriptor);
        blobs.push((digest, size));
    }
    let arch = if cfg!(target_arch = "aarch64") {
        "arm64"
    } else {
        "amd64"
    };
    let diff_ids: Vec<_> = layers.iter().map(|layer| digest(&layer.tar())).collect();
    let config = json!({ "architecture": arch, "os": "linux", "config": { "User": "7:8" },
        "created": "2024-05-06T07:08:09Z", "author": "the tests", "rootfs": { "type": "layers", "diff_ids": diff_ids },
        "history": layers.iter().map(|_| json!({ "created_by": format!("put into {path}") })).collect::<Vec<_>>() })
    .to_string();
    let config_digest = server.blob(path, config.as_bytes());
    let kind = "application/vnd.oci.image.manifest.v1+json";
    let manifest = json!({ "schemaVersion": 2, "mediaType": kind, "layers": listed,
        "annotations": { "org.example.path": path }, "config": {
        "mediaType": "application/vnd.oci.image.config.v1+json", "digest": config_digest, "size": config.len() } });
    server.manifest(path, "1", kind, manifest.to_string().as_bytes());
    Served {
        name: format!("{}/{path}:1", server.host()),
        blobs,
    }
}

/// Bytes of layers that were sent since the last call.
pub fn fetched(server: &Server, image: &Served) -> u64 {
    let of_layer = |path: &str| image.blobs.iter().any(|(digest, _)| path.contains(digest));
    let seen = server.take_seen();
    seen.iter()
        .filter(|seen| of_layer(&seen.path))
        .map(|seen| seen.sent)
        .sum()
}
