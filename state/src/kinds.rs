//! The durable kinds as a table, for what concerns all of them: loading, owners, cascades.

use crate::disk::Op;
use crate::error::{Error, Result};
use crate::index::Tables;
use crate::resource::{Kind, Object, Owner};
use crate::watch::Published;
use crate::writer::Writer;
use crate::{container, debt, image, node, pod, sandbox};

/// What can be done with a kind without naming its type.
pub(crate) struct Erased {
    pub kind: &'static str,
    pub count: fn(&mut Tables) -> usize,
    /// Every record, as it is written.
    pub dump: fn(&mut Tables, &mut Vec<Op>),
    /// Reads a record into the tables; its uid and age.
    pub load: Load,
    /// Takes a misread record out again.
    pub unload: fn(&mut Tables, &str),
    pub publish: fn(&mut Tables, &Published),
    /// The same for the copy of the record `uid`, as delivered; staged.
    pub import: fn(&mut Writer, uid: &str, &[u8]) -> Result<(), String>,
    /// May a record get new children? (`Ok(false)`: there is no such record.)
    pub adopts: fn(&mut Tables, &str) -> Result<bool>,
    /// Stages the deletion mark on all that `owner` owns, and on theirs.
    pub delete_owned: fn(&mut Writer, &str, i64) -> Result<()>,
    /// Any record that `owner` owns.
    pub owned: fn(&mut Tables, &str) -> Option<String>,
    /// Stages the deletion of what imported copies contradict.
    pub settle: Settle,
}

type Load = fn(&mut Tables, &[u8]) -> Result<(String, i64), String>;
type Settle = fn(&mut Writer, &dyn Fn(&Owner) -> bool, i64) -> Result<()>;

pub(crate) const KINDS: &[Erased] = &[
    erased::<node::NodeKind>(),
    erased::<pod::PodKind>(),
    erased::<sandbox::SandboxKind>(),
    erased::<container::ContainerKind>(),
    erased::<image::ImageKind>(),
    erased::<debt::DebtKind>(),
];

const fn erased<K: Kind>() -> Erased {
    Erased {
        kind: K::KIND,
        count: |tables| tables.of::<K>().len(),
        dump: dump::<K>,
        load: load::<K>,
        unload: |tables, uid| drop(tables.of::<K>().remove(uid)),
        publish: publish::<K>,
        import: import::<K>,
        adopts: adopts::<K>,
        delete_owned: delete_owned::<K>,
        owned: |tables, owner| {
            tables
                .of::<K>()
                .owned(owner)
                .next()
                .map(|o| format!("{} {}", K::KIND, o.meta.name))
        },
        settle: settle::<K>,
    }
}

pub(crate) fn find(kind: &str) -> Option<&'static Erased> {
    KINDS.iter().find(|known| known.kind == kind)
}

/// A record's key in the database.
pub(crate) fn key<K: Kind>(uid: &str) -> String {
    format!("{}/{uid}", K::KIND)
}

fn dump<K: Kind>(tables: &mut Tables, ops: &mut Vec<Op>) {
    // What was read or staged can be written again.
    ops.extend(tables.of::<K>().list().filter_map(|object| {
        Some(Op {
            key: key::<K>(object.uid()),
            value: Some(object.to_json().ok()?),
        })
    }));
}

fn parse<K: Kind>(json: &[u8]) -> Result<Object<K>, String> {
    let object = Object::<K>::from_json(json).map_err(|e| format!("cannot be read: {e}"))?;
    let uid = object.uid();
    if uid.len() != 64 || !uid.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
        return Err(format!("metadata.uid: {uid:?} is not 64 hex digits"));
    }
    Ok(object)
}

fn load<K: Kind>(tables: &mut Tables, json: &[u8]) -> Result<(String, i64), String> {
    let object = parse::<K>(json)?;
    let read = (object.meta.uid.clone(), object.meta.created);
    tables.of::<K>().put(object.into());
    Ok(read)
}

fn publish<K: Kind>(tables: &mut Tables, published: &Published) {
    let live = published.of::<K>();
    for object in tables.of::<K>().list() {
        live.publish(object);
    }
}

/// Copies have no format of their own: their `apiVersion` says who can read them.
fn own_version(json: &[u8]) -> Result<(), String> {
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Versioned {
        api_version: String,
    }
    let known = "reconcile/v1";
    match serde_json::from_slice::<Versioned>(json) {
        Ok(copy) if copy.api_version != known => Err(format!(
            "is of {}, this program reads {known}; upgrade it",
            copy.api_version
        )),
        // Others are told by whoever reads the rest.
        _ => Ok(()),
    }
}

fn import<K: Kind>(writer: &mut Writer, uid: &str, json: &[u8]) -> Result<(), String> {
    own_version(json)?;
    let mut object = parse::<K>(json)?;
    if object.uid() != uid {
        return Err(format!("is another record's, {}", object.uid()));
    }
    object.meta.ready_by = None;
    writer.seen(object.meta.created);
    let known = writer
        .ahead
        .of::<K>()
        .get(object.uid())
        .map(|known| known.meta.generation);
    if known.is_none_or(|known| known < object.meta.generation) {
        writer.put(object).map_err(|e| e.to_string())?;
    }
    Ok(())
}

fn adopts<K: Kind>(tables: &mut Tables, uid: &str) -> Result<bool> {
    let Some(owner) = tables.of::<K>().get(uid) else {
        return Ok(false);
    };
    let problem = match (owner.meta.deleted(), K::stopped(&owner.spec)) {
        (true, _) => "is being deleted",
        (_, true) => "is stopped",
        _ => return Ok(true),
    };
    Err(conflict::<K>(
        &owner.meta.name,
        format!("{problem} and takes no new children"),
    ))
}

pub(crate) fn conflict<K: Kind>(name: &str, problem: impl Into<String>) -> Error {
    Error::Conflict {
        kind: K::KIND,
        name: name.to_owned(),
        problem: problem.into(),
    }
}

fn delete_owned<K: Kind>(writer: &mut Writer, owner: &str, now: i64) -> Result<()> {
    let owned: Vec<_> = writer
        .ahead
        .of::<K>()
        .owned(owner)
        .filter(|o| !o.meta.deleted())
        .cloned()
        .collect();
    for object in owned {
        mark_deleted(writer, &object, now)?;
    }
    Ok(())
}

/// Stages the deletion mark on a record and on everything that it owns.
pub(crate) fn mark_deleted<K: Kind>(writer: &mut Writer, object: &Object<K>, now: i64) -> Result<()> {
    let mut meta = object.meta.clone();
    meta.deletion = Some(now);
    writer.put(Object::<K>::new(meta, object.spec.clone(), K::Status::default()))?;
    for kind in KINDS {
        (kind.delete_owned)(writer, object.uid(), now)?;
    }
    Ok(())
}

fn settle<K: Kind>(writer: &mut Writer, exists: &dyn Fn(&Owner) -> bool, now: i64) -> Result<()> {
    let living: Vec<_> = writer
        .ahead
        .of::<K>()
        .list()
        .filter(|o| !o.meta.deleted())
        .cloned()
        .collect();
    for object in living {
        // Copies are renewed after the record: of two holders of a name the older is one whose end it does not know.
        let replaced = writer
            .ahead
            .of::<K>()
            .holder(&object.meta)
            .is_some_and(|o| o.meta.created > object.meta.created);
        if replaced || object.meta.owner.as_ref().is_some_and(|owner| !exists(owner)) {
            mark_deleted(writer, &object, now)?;
        }
    }
    Ok(())
}
