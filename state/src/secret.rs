//! Secret: what a pod may show to registries (`imagePullSecrets`), in memory only: neither the disk nor a log ever holds
//! it, and it ends with the daemon. Pods name it; it is read when one of them pulls.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::check;
use crate::error::{Error, Result};
use crate::resource::{Kind, Meta, Object};

/// `metadata.name` is unique within its namespace, that of the pods that name it.
pub type Secret = Object<SecretKind>;

/// Bytes of a secret, as Kubernetes bounds them.
const LIMIT: usize = 1 << 20;

#[derive(Clone, Debug)]
pub struct SecretKind;

/// The types of Kubernetes' `v1` Secret that hold credentials of registries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SecretType {
    /// Docker's `config.json`.
    #[serde(rename = "kubernetes.io/dockerconfigjson")]
    DockerConfigJson,
    /// Docker's older `.dockercfg`: the entries alone.
    #[serde(rename = "kubernetes.io/dockercfg")]
    DockerCfg,
}

impl SecretType {
    pub const ALL: [(&'static str, SecretType); 2] = [
        ("kubernetes.io/dockerconfigjson", SecretType::DockerConfigJson),
        ("kubernetes.io/dockercfg", SecretType::DockerCfg),
    ];

    /// The one key of `data` or `stringData`.
    pub fn key(self) -> &'static str {
        match self {
            SecretType::DockerConfigJson => ".dockerconfigjson",
            SecretType::DockerCfg => ".dockercfg",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SecretSpec {
    #[serde(rename = "type")]
    pub kind: SecretType,
    /// Never written: a record that is shown or sent to others is without it.
    #[serde(skip)]
    pub config: Sealed,
}

/// A Docker configuration. It has no form in which it could be written by mistake.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Sealed(Arc<str>);

impl Sealed {
    pub fn new(text: impl Into<Arc<str>>) -> Sealed {
        Sealed(text.into())
    }

    /// The secret itself.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Sealed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(sealed)")
    }
}

/// The spec on its way from the command line to the daemon, the one place where the secret is written out.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Opened {
    #[serde(rename = "type")]
    pub kind: SecretType,
    pub config: String,
}

impl From<&SecretSpec> for Opened {
    fn from(spec: &SecretSpec) -> Opened {
        Opened {
            kind: spec.kind,
            config: spec.config.reveal().to_owned(),
        }
    }
}

impl From<Opened> for SecretSpec {
    fn from(opened: Opened) -> SecretSpec {
        SecretSpec {
            kind: opened.kind,
            config: Sealed::new(opened.config),
        }
    }
}

/// A secret as a pull was given it.
#[derive(Clone, Debug)]
pub struct PullSecret {
    /// `namespace/name`.
    pub name: String,
    /// `None`: nobody has told this daemon.
    pub found: Option<Arc<Secret>>,
}

impl PullSecret {
    fn version(&self) -> Option<(&str, u64)> {
        self.found.as_ref().map(|secret| (secret.uid(), secret.meta.generation))
    }
}

/// The same version of the same secret.
impl PartialEq for PullSecret {
    fn eq(&self, other: &PullSecret) -> bool {
        self.name == other.name && self.version() == other.version()
    }
}

impl Eq for PullSecret {}

impl Kind for SecretKind {
    const KIND: &'static str = "Secret";
    const PLURAL: &'static str = "secrets";
    const VOLATILE: bool = true;
    type Spec = SecretSpec;
    type Status = ();

    /// The errors never quote the secret.
    fn validate(meta: &Meta, spec: &SecretSpec) -> Result<()> {
        check::dns_subdomain("metadata.name", &meta.name)?;
        check::dns_label("metadata.namespace", &meta.namespace)?;
        let text = spec.config.reveal();
        let invalid = |problem: String| Err(Error::invalid(format!("data[{}]", spec.kind.key()), problem));
        if text.len() > LIMIT {
            return invalid(format!("has {} bytes, {LIMIT} are allowed", text.len()));
        }
        let value: Value = match serde_json::from_str(text) {
            Ok(value) => value,
            Err(e) => return invalid(format!("is not JSON (line {}, column {} of it)", e.line(), e.column())),
        };
        let entries = match spec.kind {
            SecretType::DockerConfigJson => value.get("auths"),
            SecretType::DockerCfg => Some(&value),
        };
        match entries.and_then(Value::as_object) {
            None => invalid("is no Docker configuration: it has no map of registries (auths)".to_owned()),
            Some(entries) if entries.is_empty() => invalid("names no registry".to_owned()),
            Some(entries) if entries.values().any(|entry| !entry.is_object()) => {
                invalid("an entry is no map of username, password or auth".to_owned())
            }
            Some(_) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(kind: SecretType, text: &str) -> SecretSpec {
        SecretSpec {
            kind,
            config: Sealed::new(text),
        }
    }

    fn problem(kind: SecretType, text: &str) -> Option<String> {
        let meta = Meta {
            name: "s".into(),
            namespace: "default".into(),
            ..Meta::default()
        };
        SecretKind::validate(&meta, &spec(kind, text))
            .err()
            .map(|e| e.to_string())
    }

    #[test]
    fn what_is_no_configuration_is_told_without_its_content() {
        use SecretType::{DockerCfg, DockerConfigJson};
        let entry = r#"{"r.example":{"password":"hunter2"}}"#;
        assert_eq!(problem(DockerConfigJson, &format!(r#"{{"auths":{entry}}}"#)), None);
        assert_eq!(problem(DockerCfg, entry), None);
        for (kind, text) in [
            (DockerConfigJson, "hunter2"),
            (DockerConfigJson, "\"hunter2\""),
            (DockerConfigJson, entry),
            (DockerConfigJson, r#"{"auths":{}}"#),
            (DockerConfigJson, r#"{"auths":{"r.example":"hunter2"}}"#),
            (DockerCfg, "[\"hunter2\"]"),
            (DockerCfg, ""),
        ] {
            let problem = problem(kind, text).unwrap_or_else(|| panic!("{text} passed"));
            assert!(
                problem.starts_with("data[.docker") && !problem.contains("hunter2"),
                "{problem}"
            );
        }
    }

    #[test]
    fn it_is_neither_shown_nor_written() {
        let spec = spec(SecretType::DockerConfigJson, "hunter2");
        let object = Secret::new(Meta::default(), spec.clone(), ());
        let shown = PullSecret {
            name: "a/b".into(),
            found: Some(Arc::new(object.clone())),
        };
        let json = String::from_utf8(object.to_json().unwrap()).unwrap();
        let all = format!("{spec:?} {object:?} {shown:?} {json}");
        assert!(!all.contains("hunter2"), "{all}");
        let sent = serde_json::to_string(&Opened::from(&spec)).unwrap();
        let read: Opened = serde_json::from_str(&sent).unwrap();
        assert_eq!(SecretSpec::from(read), spec);
    }
}
