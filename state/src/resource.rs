//! The form that every record shares: `apiVersion`, `kind`, `metadata`, `spec` and, in memory, `status`.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Debug;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::grown;

/// `apiVersion` of every kind here.
pub const API_VERSION: &str = "reconcile/v1";
/// The finalizer that every record is born with; dropped after teardown.
pub const FINALIZER: &str = "reconcile/world";
/// Annotation that pauses reconciling of one object (its value is ignored).
pub const PAUSED: &str = "reconcile/paused";

/// Bytes of a record's JSON at most.
pub const MAX_RECORD: usize = 1 << 20;

/// One kind of record.
pub trait Kind: Clone + Debug + Send + Sync + Sized + 'static {
    /// CamelCase singular, e.g. `PodSandbox`.
    const KIND: &'static str;
    /// Lower-case plural for paths and the command line, e.g. `podsandboxes`.
    const PLURAL: &'static str;
    /// Kept in memory only (sessions).
    const VOLATILE: bool = false;
    type Spec: Clone + Debug + PartialEq + Serialize + DeserializeOwned + Send + Sync + 'static;
    type Status: Clone + Debug + Default + PartialEq + Serialize + Send + Sync + 'static;

    /// Checks a wish; the error names the field (`spec.…`).
    fn validate(meta: &Meta, spec: &Self::Spec) -> Result<()>;

    /// Is `spec` the same wish, as far as joining a running create goes? Fields that later calls change (goal, grace,
    /// epochs) are not compared.
    fn same_wish(a: &Self::Spec, b: &Self::Spec) -> bool {
        a == b
    }

    /// Does the wish say "stopped"? Then it takes no new children and is never joined.
    fn stopped(_: &Self::Spec) -> bool {
        false
    }
}

/// Who owns a record: it is erased after its children.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Owner {
    pub kind: String,
    pub uid: String,
}

/// Identity and life of a record.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Meta {
    /// Unique within the kind among records that are not marked deleted: the identity tuple.
    pub name: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// 64 lower-case hex digits; the id in the CRI.
    #[serde(default)]
    pub uid: String,
    /// Rises when the spec changes, and only then.
    #[serde(default)]
    pub generation: u64,
    /// ns since the epoch, strictly rising over all records of a store.
    #[serde(default)]
    pub created: i64,
    /// Boot id of the kernel under which the record was written.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub boot_id: String,
    /// ns since the epoch of the wish to be gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deletion: Option<i64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub finalizers: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<Owner>,
    /// On trial until this instant (CLOCK_BOOTTIME, ns): nobody was given the uid yet. `None` once delivered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_by: Option<u64>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Fields of a newer version, kept as they came.
    #[serde(flatten)]
    pub unknown: BTreeMap<String, serde_json::Value>,
}

impl Meta {
    pub fn deleted(&self) -> bool {
        self.deletion.is_some()
    }

    /// Was the uid given to a caller (so that the record is listed and its name refused)?
    pub fn delivered(&self) -> bool {
        self.ready_by.is_none()
    }

    /// Checks what a caller sets: name, namespace, labels and annotations (sizes only: the CRI sets no other bounds).
    pub fn validate(&self) -> Result<()> {
        if self.name.is_empty() || self.name.len() > 1024 {
            return Err(Error::invalid("metadata.name", "must have 1 to 1024 bytes"));
        }
        if self.name.contains(|c: char| c.is_control()) {
            return Err(Error::invalid("metadata.name", "must not hold control characters"));
        }
        if self.namespace.len() > 253 {
            return Err(Error::invalid("metadata.namespace", "must have 253 bytes at most"));
        }
        let size = |map: &BTreeMap<String, String>| map.iter().map(|(k, v)| k.len() + v.len()).sum::<usize>();
        for (field, map) in [("labels", &self.labels), ("annotations", &self.annotations)] {
            if size(map) > MAX_RECORD / 4 {
                let problem = format!("must have {} bytes at most", MAX_RECORD / 4);
                return Err(Error::invalid(format!("metadata.{field}"), problem));
            }
        }
        Ok(())
    }

    pub fn paused(&self) -> bool {
        self.annotations.contains_key(PAUSED)
    }
}

/// A record with its status.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Object<K: Kind> {
    #[serde(rename = "metadata")]
    pub meta: Meta,
    pub spec: K::Spec,
    /// Computed from the node, never stored.
    #[serde(skip)]
    pub status: K::Status,
    /// The same identity in kube-runtime's form: its `name` is our uid, since two incarnations may share a name.
    #[serde(skip)]
    key: ObjectMeta,
}

impl<K: Kind> Object<K> {
    pub fn new(meta: Meta, spec: K::Spec, status: K::Status) -> Self {
        let mut object = Object {
            meta,
            spec,
            status,
            key: ObjectMeta::default(),
        };
        object.rekey();
        object
    }

    /// Renews the kube-runtime key after `meta.uid` was set or the object was parsed.
    pub fn rekey(&mut self) {
        self.key = ObjectMeta {
            name: Some(self.meta.uid.clone()),
            uid: Some(self.meta.uid.clone()),
            generation: i64::try_from(self.meta.generation).ok(),
            ..ObjectMeta::default()
        };
    }

    pub fn uid(&self) -> &str {
        &self.meta.uid
    }

    /// The record without its status, with `apiVersion` and `kind`: what is kept on disk and in the copies.
    pub fn to_json(&self) -> serde_json::Result<Vec<u8>> {
        #[derive(Serialize)]
        struct Record<'a, S: Serialize> {
            #[serde(rename = "apiVersion")]
            api_version: &'a str,
            kind: &'a str,
            metadata: &'a Meta,
            spec: &'a S,
        }
        let (api_version, kind) = (API_VERSION, K::KIND);
        match grown::write(self)? {
            None => serde_json::to_vec(&Record {
                api_version,
                kind,
                metadata: &self.meta,
                spec: &self.spec,
            }),
            Some((metadata, spec)) => serde_json::to_vec(&Record {
                api_version,
                kind,
                metadata: &metadata,
                spec: &spec,
            }),
        }
    }

    /// Reads what [`Object::to_json`] wrote, in this version or a newer one.
    pub fn from_json(json: &[u8]) -> serde_json::Result<Self> {
        let mut object: Self = match serde_json::from_slice(json) {
            Ok(object) => object,
            Err(_) => grown::read(json)?,
        };
        object.rekey();
        Ok(object)
    }
}

impl<K: Kind> kube_core::Resource for Object<K> {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind(_: &()) -> Cow<'_, str> {
        K::KIND.into()
    }
    fn group(_: &()) -> Cow<'_, str> {
        "reconcile".into()
    }
    fn version(_: &()) -> Cow<'_, str> {
        "v1".into()
    }
    fn plural(_: &()) -> Cow<'_, str> {
        K::PLURAL.into()
    }
    fn meta(&self) -> &ObjectMeta {
        &self.key
    }
    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.key
    }
}
