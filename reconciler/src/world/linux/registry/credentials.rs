//! Credentials: what they are, and where they are looked for.

use std::fmt;
use std::path::PathBuf;

use state::Reference;

use super::error::Result;

/// One credential and where it came from. Its `Debug` shows no secret.
#[derive(Clone, Default)]
pub struct Credential {
    /// For messages: `imagePullSecrets[0]`, `/etc/reconcile/auth.json`, `the request`.
    pub source: String,
    /// Host it is for, `host[:port]` or a URL; empty: the registry of the reference.
    pub server_address: String,
    pub kind: CredentialKind,
}

/// The secret itself.
#[derive(Clone, Default)]
pub enum CredentialKind {
    /// Nothing to show.
    #[default]
    Anonymous,
    Basic {
        username: String,
        password: String,
    },
    /// A refresh token, changed for an access token at the realm.
    IdentityToken(String),
    /// An access token, sent as it is.
    RegistryToken(String),
}

/// The fields of the CRI's `AuthConfig`.
#[derive(Clone, Default)]
pub struct AuthConfig {
    pub username: String,
    pub password: String,
    pub auth: String,
    pub server_address: String,
    pub identity_token: String,
    pub registry_token: String,
}

impl Credential {
    /// Out of a CRI `AuthConfig`; `None` if all of its secrets are empty.
    pub fn from_auth_config(source: &str, config: &AuthConfig) -> Result<Option<Credential>> {
        let _ = (source, config);
        Ok(None)
    }
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credential")
            .field("source", &self.source)
            .finish_non_exhaustive()
    }
}

/// Places where credentials are looked for.
#[derive(Clone, Default)]
pub struct Keyring {
    /// Docker configurations (`.dockerconfigjson` or the older `.dockercfg`) with their names, e.g. `imagePullSecrets[0]`.
    pub secrets: Vec<(String, Vec<u8>)>,
    /// Files of the same form, in order; those that are not there are passed over.
    pub files: Vec<PathBuf>,
}

impl Keyring {
    /// `/etc/reconcile/auth.json`, then the files of the user that this process runs as.
    pub fn of_user(secrets: Vec<(String, Vec<u8>)>) -> Keyring {
        Keyring {
            secrets,
            files: Vec::new(),
        }
    }

    /// Credentials for the reference: place by place, the longest matching path first. The second half says what could
    /// not be read.
    pub async fn matching(&self, reference: &Reference) -> (Vec<Credential>, Vec<String>) {
        let _ = reference;
        (Vec::new(), Vec::new())
    }
}
