//! What these tests share.

use std::str::FromStr;
use std::time::Duration;

use oci_spec::image::{Descriptor, Digest, MediaType};
use reconciler::world::linux::registry::{Access, Config, Credential, CredentialKind, Registry, Result};
use state::Reference;

use crate::server::Server;

pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// A client that loses patience early and looks for no configuration.
pub fn client() -> Registry {
    client_with(Vec::new())
}

pub fn client_with(hosts_roots: Vec<std::path::PathBuf>) -> Registry {
    Registry::new(Config {
        hosts_roots,
        rate_floor: 10_000,
        window: Duration::from_millis(500),
    })
    .unwrap()
}

pub fn access(reference: &str) -> Access {
    Access {
        reference: Reference::parse(reference, "image").unwrap(),
        credentials: Vec::new(),
    }
}

pub fn basic(source: &str, username: &str, password: &str) -> Credential {
    Credential {
        source: source.into(),
        server_address: String::new(),
        kind: CredentialKind::Basic {
            username: username.into(),
            password: password.into(),
        },
    }
}

/// `a/b:t` on the server, asked for with these credentials.
pub fn with(server: &Server, credentials: Vec<Credential>) -> Access {
    let mut access = access(&format!("{}/a/b:t", server.host()));
    access.credentials = credentials;
    access
}

pub fn descriptor(digest: &str, size: usize) -> Descriptor {
    Descriptor::new(
        MediaType::ImageLayerGzip,
        size as u64,
        Digest::from_str(digest).unwrap(),
    )
}

/// Bytes that do not repeat.
pub fn noise(size: usize) -> Vec<u8> {
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(size + 8);
    while bytes.len() < size {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        bytes.extend_from_slice(&seed.to_le_bytes());
    }
    bytes.truncate(size);
    bytes
}

/// Everything of a blob from an offset on.
pub async fn fetch(registry: &Registry, access: &Access, descriptor: &Descriptor, offset: u64) -> Result<Vec<u8>> {
    let mut blob = registry.blob(access, descriptor, offset).await?;
    let mut bytes = Vec::new();
    while let Some(chunk) = blob.next().await? {
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}
