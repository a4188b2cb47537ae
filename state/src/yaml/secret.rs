//! A Kubernetes `v1` Secret, as far as it holds credentials of registries. What is in it is neither quoted nor shown.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use serde_yaml::Value;

use super::Reader;
use super::kubernetes::{Given, ObjectMeta};
use super::locate::At;
use crate::error::{Error, Result as StateResult};
use crate::resource::{API_VERSION, Kind, Meta};
use crate::secret::{Opened, Sealed, SecretKind, SecretSpec, SecretType};
use crate::store::New;

/// kubectl's copy of the whole document, data included.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Form {
    #[serde(rename = "apiVersion")]
    _api_version: String,
    #[serde(rename = "kind")]
    _kind: String,
    metadata: ObjectMeta,
    #[serde(rename = "type")]
    kind: String,
    /// Base64.
    data: Option<BTreeMap<String, String>>,
    /// Wins over `data`.
    string_data: Option<BTreeMap<String, String>>,
    #[serde(rename = "immutable")]
    _immutable: Given,
}

impl Reader<'_> {
    pub(super) fn kubernetes_secret(&mut self, value: Value) -> Option<New<SecretKind>> {
        let before = self.problems.len();
        let form: Form = self.typed(value)?;
        let Some((_, kind)) = SecretType::ALL.into_iter().find(|(name, _)| *name == form.kind) else {
            let known = SecretType::ALL.map(|(name, _)| name).join(" and ");
            self.at(
                "type",
                At::Value,
                format!("only {known} have a use here, for imagePullSecrets"),
            );
            return None;
        };
        let config = self.configuration(
            kind,
            form.data.unwrap_or_default(),
            form.string_data.unwrap_or_default(),
        );
        let mut meta = self.pod_meta(form.metadata);
        meta.annotations.remove(LAST_APPLIED);
        if self.problems.len() > before {
            return None;
        }
        let spec = SecretSpec { kind, config: config? };
        self.validated(New { meta, spec })
    }

    fn configuration(
        &mut self,
        kind: SecretType,
        mut data: BTreeMap<String, String>,
        mut strings: BTreeMap<String, String>,
    ) -> Option<Sealed> {
        let key = kind.key();
        let (plain, encoded) = (strings.remove(key), data.remove(key));
        for (map, rest) in [("stringData", strings), ("data", data)] {
            if !rest.is_empty() {
                self.warn(map, format!("only its key {key} has a use here"));
            }
        }
        match (plain, encoded) {
            (Some(text), _) => Some(Sealed::new(text)),
            (None, Some(text)) => {
                let bytes: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
                let decoded = STANDARD
                    .decode(bytes)
                    .ok()
                    .and_then(|bytes| String::from_utf8(bytes).ok());
                if decoded.is_none() {
                    self.at("data", At::Key, format!("{key} is not base64 of text"));
                }
                decoded.map(Sealed::new)
            }
            (None, None) => {
                self.at("data", At::Key, format!("{key} is missing, here or in stringData"));
                None
            }
        }
    }
}

/// As [`super::Record::to_json`], the secret included: for the daemon's ears only.
pub(super) fn to_json(new: &New<SecretKind>) -> serde_json::Result<Vec<u8>> {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Sent<'a> {
        api_version: &'a str,
        kind: &'a str,
        metadata: &'a Meta,
        spec: Opened,
    }
    serde_json::to_vec(&Sent {
        api_version: API_VERSION,
        kind: SecretKind::KIND,
        metadata: &new.meta,
        spec: Opened::from(&new.spec),
    })
}

/// Reads what [`to_json`] wrote.
pub(super) fn from_json(json: &[u8]) -> StateResult<New<SecretKind>> {
    #[derive(Deserialize)]
    struct Sent {
        metadata: Meta,
        spec: Opened,
    }
    // serde's own message may quote it.
    let sent: Sent = serde_json::from_slice(json).map_err(|_| Error::invalid("spec", "is no secret's"))?;
    let (meta, spec) = (sent.metadata, SecretSpec::from(sent.spec));
    meta.validate()?;
    SecretKind::validate(&meta, &spec)?;
    Ok(New { meta, spec })
}
