//! The registry client (OCI distribution specification): manifests and blobs by way of mirrors and credentials.
//!
//! ```text
//!  Access ──> hosts (certs.d: endpoints in order) ──> ask (each endpoint, each credential, then none; retries)
//!                                                      │
//!             manifest  blob  push  explain            ├─ auth (challenges, tokens)
//!                                                      └─ transport (TLS, proxies, redirects)
//! ```
//!
//! It knows neither records nor the content store. Nothing of a credential leaves it but to the host it is for.

mod ask;
mod auth;
mod blob;
mod challenge;
pub mod credentials;
mod error;
mod explain;
mod hosts;
mod identity;
mod manifest;
mod meter;
mod push;
mod transport;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use bytes::Bytes;
use oci_spec::image::Digest;
use state::Reference;

pub use self::blob::Blob;
pub use self::credentials::{AuthConfig, Credential, CredentialKind, Keyring};
pub use self::error::{Answer, Class, Error, Result};
pub use self::explain::{EndpointSeen, Explanation};
pub use self::hosts::Ignored;
use self::hosts::{Endpoint, Hosts};

/// Host that serves the references of [`state::reference::DEFAULT_HOST`]; a `hosts.toml` may name another.
pub(crate) const DOCKER_ENDPOINT: &str = "registry-1.docker.io";
/// Problems of files that are remembered as told.
const REPORTS: usize = 256;

#[derive(Clone, Debug)]
pub struct Config {
    /// Roots of `certs.d` directories, in order.
    pub hosts_roots: Vec<PathBuf>,
    /// Fewer bytes/s than this over a whole window, and the transfer has failed.
    pub rate_floor: u64,
    /// Also how long the first bytes of an answer are waited for.
    pub window: Duration,
}

impl Default for Config {
    fn default() -> Config {
        let roots = [
            "/etc/reconcile/certs.d",
            "/etc/containerd/certs.d",
            "/etc/docker/certs.d",
        ];
        Config {
            hosts_roots: roots.map(PathBuf::from).to_vec(),
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
    inner: Arc<Inner>,
}

struct Inner {
    config: RwLock<Arc<Config>>,
    transport: transport::Transport,
    grants: auth::Grants,
    /// Loopback hosts that were seen to speak http.
    plain: Mutex<HashSet<String>>,
    reports: Mutex<HashSet<String>>,
}

impl Registry {
    /// Reads and connects nothing yet.
    pub fn new(config: Config) -> Result<Registry> {
        Ok(Registry {
            inner: Arc::new(Inner {
                config: RwLock::new(Arc::new(config)),
                transport: transport::Transport::default(),
                grants: auth::Grants::default(),
                plain: Mutex::default(),
                reports: Mutex::default(),
            }),
        })
    }

    /// Where `hosts.toml` files are looked for.
    pub fn hosts_roots(&self) -> Vec<PathBuf> {
        self.config().hosts_roots.clone()
    }

    /// From the next request on.
    pub fn reconfigure(&self, config: Config) {
        *self.inner.config.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(config);
    }

    fn config(&self) -> Arc<Config> {
        self.inner.config.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn look_up(&self, reference: &Reference) -> Hosts {
        let host = reference.host();
        let alias = (host == state::reference::DEFAULT_HOST).then_some(DOCKER_ENDPOINT);
        let plain = self
            .inner
            .plain
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .contains(host);
        hosts::look_up(&self.config().hosts_roots, reference, alias, plain)
    }

    /// Whether a host whose scheme is a guess answered; the next request begins with what did.
    fn learn(&self, endpoint: &Endpoint, answered: bool) {
        let http = endpoint.url.scheme() == "http";
        let mut plain = self.inner.plain.lock().unwrap_or_else(PoisonError::into_inner);
        if answered && http {
            plain.insert(endpoint.host());
        } else if answered || http {
            plain.remove(&endpoint.host());
        }
    }

    /// True the first time, so that a log names a problem once.
    fn reported(&self, problem: &str) -> bool {
        let mut reports = self.inner.reports.lock().unwrap_or_else(PoisonError::into_inner);
        if reports.len() >= REPORTS {
            reports.clear();
        }
        reports.insert(problem.to_owned())
    }
}
