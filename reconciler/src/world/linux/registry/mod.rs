//! The registry client (OCI distribution specification): manifests and blobs by way of mirrors and credentials.
//!
//! ```text
//!  Access ──> hosts (certs.d: endpoints in order) ──> auth (Basic, Bearer; each credential, then nothing)
//!                                                        │
//!             manifest  blob  push  <── transport (retries, redirects, TLS) <──┘
//! ```
//!
//! It knows neither records nor the content store. Nothing of a credential leaves it but to the host it is for.

mod credentials;
mod error;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use oci_spec::image::{Descriptor, Digest};
use serde::Serialize;
use state::Reference;

pub use self::credentials::{AuthConfig, Credential, CredentialKind, Keyring};
pub use self::error::{Answer, Class, Error, Result};

#[derive(Clone, Debug)]
pub struct Config {
    /// Roots of `certs.d` directories, in order.
    pub hosts_roots: Vec<PathBuf>,
    /// Fewer bytes/s than this over a whole window, and the transfer has failed.
    pub rate_floor: u64,
    pub window: Duration,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            hosts_roots: Vec::new(),
            rate_floor: 1 << 10,
            window: Duration::from_secs(60),
        }
    }
}

/// What is asked for, and with what in hand: the credentials are tried in order, then none.
#[derive(Clone, Debug)]
pub struct Access {
    pub reference: Reference,
    pub credentials: Vec<Credential>,
}

/// What a reference stands for right now.
#[derive(Clone, Debug)]
pub struct Resolved {
    pub digest: Digest,
    pub media_type: String,
    /// Bytes.
    pub size: u64,
    /// The verified document, if it was fetched anyway.
    pub body: Option<Bytes>,
    /// `host[:port]` that answered.
    pub host: String,
}

/// Cheap to clone: clones share connections and tokens.
#[derive(Clone)]
pub struct Registry {
    inner: Arc<Config>,
}

/// A blob on its way. Dropping it closes the connection.
pub struct Blob {
    _private: (),
}

/// How a reference would be reached, for people.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    pub reference: String,
}

impl Registry {
    pub fn new(config: Config) -> Result<Registry> {
        Ok(Registry {
            inner: Arc::new(config),
        })
    }

    /// Tag or digest to descriptor, by one HEAD where the registry allows it.
    pub async fn resolve(&self, access: &Access) -> Result<Resolved> {
        Err(Error::setup(&access.reference, "not there yet"))
    }

    /// A manifest, index or the like of at most 8 MiB, its digest (and `size`) verified.
    pub async fn manifest(&self, access: &Access, digest: &Digest, size: Option<u64>) -> Result<Bytes> {
        let _ = size;
        Err(Error::setup(&access.reference, digest))
    }

    /// A blob from `offset` on. Reconnects and resumes inside; hashing is the caller's.
    pub async fn blob(&self, access: &Access, descriptor: &Descriptor, offset: u64) -> Result<Blob> {
        let _ = (descriptor, offset);
        Err(Error::setup(&access.reference, &self.inner.window.as_secs()))
    }

    /// Sends a blob from a file, unless the registry has it. True: it was sent.
    pub async fn upload_blob(&self, access: &Access, descriptor: &Descriptor, file: &std::path::Path) -> Result<bool> {
        let _ = (descriptor, file);
        Err(Error::setup(&access.reference, "not there yet"))
    }

    /// Puts a manifest or index under the reference's tag or digest.
    pub async fn put_manifest(&self, access: &Access, media_type: &str, body: Bytes) -> Result<()> {
        let _ = (media_type, body);
        Err(Error::setup(&access.reference, "not there yet"))
    }

    /// The endpoints for a reference in order, and where each setting came from.
    pub fn explain(&self, reference: &Reference) -> Explanation {
        Explanation {
            reference: reference.to_string(),
        }
    }
}

impl Blob {
    /// The next bytes; `None` at the end, which comes only after exactly the descriptor's size.
    pub async fn next(&mut self) -> Result<Option<Bytes>> {
        Ok(None)
    }

    /// `host[:port]` that sends now, for messages.
    pub fn host(&self) -> &str {
        ""
    }
}
