//! Specs that a newer version wrote: the fields that this one does not know are set aside when a record is read, and
//! put back when it is written, so that neither a downgrade nor the upgrade after it loses them.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_path_to_error::{Path, Segment};

use crate::resource::{Kind, Meta, Object};

/// Where they wait, among the metadata's unknown fields; never written under this name.
const ASIDE: &str = "reconcile/later";
/// More unknown fields than this, and the record is not one of ours.
const MOST: usize = 256;

#[derive(Serialize, Deserialize)]
struct Later {
    /// JSON pointer of the map within the spec.
    within: String,
    field: String,
    value: Value,
}

/// Reads a record without the fields of its spec that are not known.
pub(crate) fn read<K: Kind>(json: &[u8]) -> serde_json::Result<Object<K>> {
    let mut record: Value = serde_json::from_slice(json)?;
    let mut spec = record.get_mut("spec").map(Value::take).unwrap_or_default();
    let mut aside = Vec::new();
    loop {
        let error = match serde_path_to_error::deserialize::<_, K::Spec>(spec.clone()) {
            Ok(spec) => {
                let metadata = record.get_mut("metadata").map(Value::take).unwrap_or_default();
                let mut meta: Meta = serde_json::from_value(metadata)?;
                meta.unknown.insert(ASIDE.to_owned(), serde_json::to_value(aside)?);
                return Ok(Object::new(meta, spec, K::Status::default()));
            }
            Err(error) => error,
        };
        let message = error.inner().to_string();
        let field = message
            .strip_prefix("unknown field `")
            .and_then(|rest| rest.split('`').next());
        match field.and_then(|field| take(&mut spec, error.path(), field)) {
            Some(later) if aside.len() < MOST => aside.push(later),
            _ => return Err(error.into_inner()),
        }
    }
}

/// Takes `field` out of the map that `path` names or leads into.
fn take(spec: &mut Value, path: &Path, field: &str) -> Option<Later> {
    let (mut here, mut within) = (spec, String::new());
    for segment in path {
        let step = match segment {
            Segment::Map { key } if key == field && here.get(field).is_some() => break,
            Segment::Map { key } => key.replace('~', "~0").replace('/', "~1"),
            Segment::Seq { index } => index.to_string(),
            _ => return None,
        };
        within = format!("{within}/{step}");
        here = match segment {
            Segment::Seq { index } => here.get_mut(index)?,
            Segment::Map { key } => here.get_mut(key.as_str())?,
            _ => return None,
        };
    }
    let value = here.as_object_mut()?.remove(field)?;
    Some(Later {
        within,
        field: field.to_owned(),
        value,
    })
}

/// The metadata and spec to be written, if something waits to be put back.
pub(crate) fn write<K: Kind>(object: &Object<K>) -> serde_json::Result<Option<(Meta, Value)>> {
    let Some(aside) = object.meta.unknown.get(ASIDE) else {
        return Ok(None);
    };
    let aside: Vec<Later> = serde_json::from_value(aside.clone())?;
    let mut meta = object.meta.clone();
    meta.unknown.remove(ASIDE);
    let mut spec = serde_json::to_value(&object.spec)?;
    // The last taken was innermost.
    for later in aside.into_iter().rev() {
        // What it belonged to may be gone.
        if let Some(map) = spec.pointer_mut(&later.within).and_then(Value::as_object_mut) {
            map.entry(later.field).or_insert(later.value);
        }
    }
    Ok(Some((meta, spec)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::{ContainerGoal, ContainerKind, ContainerSpec};

    #[test]
    fn unknown_fields_wait_while_the_rest_changes() {
        let mut spec = serde_json::to_value(ContainerSpec::default()).unwrap();
        spec["later"] = serde_json::json!({"a": [1]});
        spec["resources"] = serde_json::json!({"cpuShares": 7, "alsoLater": true});
        let record = serde_json::json!({"apiVersion": "reconcile/v1", "kind": "Container",
            "metadata": {"name": "c", "uid": "a".repeat(64), "soon": 1}, "spec": spec});
        let mut object = Object::<ContainerKind>::from_json(record.to_string().as_bytes()).unwrap();
        assert_eq!(object.spec.resources.cpu_shares, 7);
        object.spec.goal = ContainerGoal::Stopped;
        let written: Value = serde_json::from_slice(&object.to_json().unwrap()).unwrap();
        assert_eq!(written["spec"]["later"], record["spec"]["later"]);
        assert_eq!(written["spec"]["resources"]["alsoLater"], true);
        assert_eq!(
            (&written["metadata"]["soon"], &written["spec"]["goal"]),
            (&1.into(), &"Stopped".into())
        );
        assert!(!written.to_string().contains(ASIDE));
        let again = Object::<ContainerKind>::from_json(&object.to_json().unwrap()).unwrap();
        assert_eq!(again.to_json().unwrap(), object.to_json().unwrap());
    }

    #[test]
    fn a_wrong_type_is_still_an_error() {
        let record = br#"{"metadata": {"name": "c"}, "spec": {"goal": 7, "later": 1}}"#;
        assert!(Object::<ContainerKind>::from_json(record).is_err());
    }
}
