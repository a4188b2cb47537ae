//! Image: the wish that what a reference names is here, unpacked.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::check;
use crate::condition::Condition;
use crate::error::{Error, Result};
use crate::resource::{Kind, Meta, Object};

/// `metadata.name` is the normalized reference, `host/path:tag` or `host/path@sha256:…`.
pub type Image = Object<ImageKind>;

#[derive(Clone, Debug)]
pub struct ImageKind;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ImageSpec {
    pub source: ImageSource,
    /// Raised by each pull, so that a tag is resolved again.
    #[serde(default)]
    pub pull_epoch: u64,
    /// What the name was resolved to when it was last pulled (an index's digest for multi-arch); empty before.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub digest: String,
    /// Not to be collected as garbage.
    #[serde(default)]
    pub pinned: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum ImageSource {
    /// Fetched from the registry that the name says.
    #[default]
    Registry,
    /// Imported: the content store holds this manifest.
    #[serde(rename_all = "camelCase")]
    Archive { manifest_digest: String },
    /// Made from this program's own shim binary.
    BuiltIn,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ImagePhase {
    #[default]
    Unknown,
    Pending,
    Ready,
    Failed,
}

/// What an image's configuration says about running it (OCI image-spec, config).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ImageConfig {
    pub entrypoint: Vec<String>,
    pub cmd: Vec<String>,
    pub env: Vec<String>,
    pub working_dir: String,
    pub user: String,
    pub stop_signal: String,
    pub volumes: Vec<String>,
    pub labels: std::collections::BTreeMap<String, String>,
}

/// Where an image comes from, by its own word (OCI image-spec, config). Bounded: it is for people.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ImageOrigin {
    /// RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub author: Option<String>,
    pub architecture: String,
    pub os: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
    /// Digests of the layers' tars, bottom first.
    #[serde(skip)]
    pub diff_ids: Vec<String>,
    /// Oldest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub history: Vec<ImageStep>,
    /// Those of the manifest.
    #[serde(skip)]
    pub annotations: std::collections::BTreeMap<String, String>,
}

/// One step of how an image was built.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ImageStep {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created_by: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub author: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub comment: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub empty_layer: Option<bool>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageStatus {
    pub observed_generation: u64,
    pub phase: ImagePhase,
    pub conditions: Vec<Condition>,
    /// Config digest, `sha256:…`: the image id everywhere.
    pub id: String,
    /// Digest of what the reference resolves to (an index's own digest for multi-arch).
    pub digest: String,
    /// Digest of the manifest for this platform.
    pub manifest_digest: String,
    /// Bytes of manifest, config and layers as transported.
    pub size: u64,
    /// Chain IDs of the layers, bottom first.
    pub chain_ids: Vec<String>,
    pub config: ImageConfig,
    /// For the CRI's verbose answers.
    #[serde(skip)]
    pub origin: Arc<ImageOrigin>,
    pub pull_epoch: u64,
}

impl Kind for ImageKind {
    const KIND: &'static str = "Image";
    const PLURAL: &'static str = "images";
    type Spec = ImageSpec;
    type Status = ImageStatus;

    fn validate(meta: &Meta, spec: &ImageSpec) -> Result<()> {
        check::text("metadata.name", &meta.name)?;
        if meta.name.contains(char::is_whitespace) {
            return Err(Error::invalid(
                "metadata.name",
                "must be an image reference, without spaces",
            ));
        }
        if let ImageSource::Archive { manifest_digest } = &spec.source {
            sha256("spec.source.archive.manifestDigest", manifest_digest)?;
        }
        if !spec.digest.is_empty() {
            sha256("spec.digest", &spec.digest)?;
        }
        Ok(())
    }

    fn same_wish(a: &ImageSpec, b: &ImageSpec) -> bool {
        a.source == b.source
    }
}

fn sha256(field: &str, digest: &str) -> Result<()> {
    let hex = digest.strip_prefix("sha256:").unwrap_or_default();
    if hex.len() != 64 || !hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
        return Err(Error::invalid(
            field,
            format!("{digest:?} is not sha256: and 64 hex digits"),
        ));
    }
    Ok(())
}
