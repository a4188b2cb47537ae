//! Pull: one caller's wish to have an image fetched now, in memory only, as what it may show to a registry must never
//! reach the disk. It ends with its caller: a deleted pull stops, and leaves no Image record behind.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::check;
use crate::error::{Error, Result};
use crate::resource::{Kind, Meta, Object};
use crate::secret::PullSecret;

/// `metadata.name` only tells pulls apart; `metadata.owner` is the Pod or Image that waits, if one does.
pub type Pull = Object<PullKind>;

#[derive(Clone, Debug)]
pub struct PullKind;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PullSpec {
    /// The full reference, as Image records are named.
    pub image: String,
    /// Tried in order, then none. Never written anywhere.
    #[serde(skip)]
    pub credentials: Vec<Auth>,
    /// Tried after them. Never written anywhere.
    #[serde(skip)]
    pub secrets: Vec<PullSecret>,
    /// Also look in the files of this node (`/etc/reconcile/auth.json` and those of the daemon's user).
    #[serde(default)]
    pub node_credentials: bool,
    /// Somebody looks at `status.layers`.
    #[serde(default)]
    pub progress: bool,
    /// How often it was tried before in vain; spaces the tries.
    #[serde(default)]
    pub tries: u32,
}

/// What may be shown to a registry (CRI `AuthConfig`). Its `Debug` shows no secret.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Auth {
    /// For messages: a file's path, `the request`.
    pub source: String,
    pub username: String,
    pub password: String,
    /// Base64 of `user:password`.
    pub auth: String,
    pub server_address: String,
    pub identity_token: String,
    pub registry_token: String,
}

impl fmt::Debug for Auth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Auth")
            .field("source", &self.source)
            .field("server_address", &self.server_address)
            .finish_non_exhaustive()
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PullStatus {
    /// Set by the controller before it acts.
    pub claimed: bool,
    /// Bottom first; only if `spec.progress`.
    pub layers: Vec<LayerProgress>,
    pub outcome: Option<PullOutcome>,
    /// ns since the epoch; 0 until there is an outcome.
    pub finished_at: i64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LayerProgress {
    /// Digest of the blob.
    pub digest: String,
    /// Bytes here, of all.
    pub done: u64,
    pub size: u64,
    /// Unpacked before this pull.
    pub present: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum PullOutcome {
    /// The Image record is written and the image is ready.
    #[serde(rename_all = "camelCase")]
    Done { id: String, digest: String },
    #[serde(rename_all = "camelCase")]
    Failed { why: PullFailure, message: String },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum PullFailure {
    /// No registry has it, or not for this platform.
    NotFound,
    PermissionDenied,
    /// Not to be reached, overloaded, or too slow.
    RegistryUnavailable,
    /// What came is not what it should be.
    Invalid,
    /// This node's disk is full.
    NoSpace,
    /// Anything else.
    Failed,
}

impl Kind for PullKind {
    const KIND: &'static str = "Pull";
    const PLURAL: &'static str = "pulls";
    const VOLATILE: bool = true;
    type Spec = PullSpec;
    type Status = PullStatus;

    fn validate(_: &Meta, spec: &PullSpec) -> Result<()> {
        check::text("spec.image", &spec.image)?;
        if spec.image.is_empty() {
            return Err(Error::invalid("spec.image", "must not be empty"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_secret_is_shown_or_written() {
        let spec = PullSpec {
            image: "r.example/a:b".into(),
            credentials: vec![Auth {
                source: "the request".into(),
                username: "hugo".into(),
                password: "hunter2".into(),
                auth: "aHVudGVyMg==".into(),
                identity_token: "hunter2".into(),
                registry_token: "hunter2".into(),
                ..Auth::default()
            }],
            ..PullSpec::default()
        };
        let texts = format!("{spec:?} {}", serde_json::to_string(&spec).unwrap());
        assert!(texts.contains("the request") && texts.contains("r.example"));
        assert!(!texts.contains("hunter2") && !texts.contains("aHVud"), "{texts}");
    }
}
