//! Opening: from the database, else from the copies beside the objects.

use std::collections::HashSet;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use crate::clock::now_ns;
use crate::disk::{Disk, Found};
use crate::durable;
use crate::error::Result;
use crate::guard;
use crate::kinds::{self, KINDS};
use crate::resource::Owner;
use crate::store::{Copied, Copies, Opened};
use crate::watch::Published;
use crate::writer::Writer;

/// Opens the store under `root` and publishes its records. The file is the root's lock.
pub(crate) fn open(root: &Path, copies: &Copies, published: Arc<Published>) -> Result<(Writer, Opened, File)> {
    std::fs::create_dir_all(root).map_err(|e| guard::failed(root, "cannot make the directory", &e))?;
    let lock = guard::lock(root)?;
    let id = guard::root_id(root)?;
    let (disk, found) = durable::Disk::open(root, &id)?;
    let (writer, opened) = load_all(Box::new(disk), found, copies, published)?;
    Ok((writer, opened, lock))
}

/// Takes what opening found, or rebuilds it, and publishes it.
pub(crate) fn load_all(
    disk: Box<dyn Disk>,
    found: Found,
    copies: &Copies,
    published: Arc<Published>,
) -> Result<(Writer, Opened)> {
    let mut opened = Opened::default();
    let mut writer = Writer::new(disk, published);
    match found {
        Found::Records(records) => load(&mut writer, records, copies, &mut opened)?,
        Found::Nothing { gone } => {
            let copies = (copies.all)();
            if gone || !copies.is_empty() {
                opened.rebuilt = Some("the database is missing".into());
            }
            rebuild(&mut writer, copies, &mut opened)?;
        }
        Found::Damaged(why) => {
            tracing::error!(why, "the database is damaged, rebuilding it from the copies");
            opened.rebuilt = Some(why);
            rebuild(&mut writer, (copies.all)(), &mut opened)?;
        }
    }
    for (kind, uid, why) in &opened.quarantined {
        tracing::error!(kind, uid, why, "record quarantined");
    }
    writer.publish_all();
    Ok((writer, opened))
}

type Records = Vec<(String, Result<Vec<u8>, String>)>;

/// Takes what the database holds; a bad record comes from its copy or is quarantined.
fn load(writer: &mut Writer, records: Records, copies: &Copies, opened: &mut Opened) -> Result<()> {
    for (key, value) in records {
        let (kind, uid) = key.split_once('/').unwrap_or((&key, ""));
        let Some(known) = kinds::find(kind) else {
            quarantine(writer, opened, &key, "its kind is unknown".into());
            continue;
        };
        let loaded = value.and_then(|json| (known.load)(&mut writer.ahead, &json));
        let why = match loaded {
            Ok((read, created)) if read == uid => {
                writer.seen(created);
                continue;
            }
            Ok((read, _)) => {
                (known.unload)(&mut writer.ahead, &read);
                format!("it says that it is {read}")
            }
            Err(why) => why,
        };
        let copy = (copies.one)(kind, uid).ok_or("and there is no copy".to_owned());
        match copy.and_then(|json| (known.import)(writer, uid, &json).map_err(|why| format!("its copy {why}"))) {
            Ok(()) => tracing::warn!(kind, uid, why, "record read from its copy"),
            Err(copy) => quarantine(writer, opened, &key, format!("{why}; {copy}")),
        }
    }
    writer.commit()
}

/// An unreadable record stays in the database as it is.
fn quarantine(writer: &mut Writer, opened: &mut Opened, key: &str, why: String) {
    let (kind, uid) = key.split_once('/').unwrap_or((key, ""));
    writer.disk.keep(key.to_owned());
    opened.quarantined.push((kind.to_owned(), uid.to_owned(), why));
}

/// Imports every copy as delivered, in one batch. One that cannot be used is reported, and its things stay.
fn rebuild(writer: &mut Writer, copies: Vec<Copied>, opened: &mut Opened) -> Result<()> {
    let mut exist = HashSet::new();
    for Copied { kind, uid, json } in copies {
        let imported = match kinds::find(kind) {
            Some(known) => (known.import)(writer, &uid, &json),
            None => Err(format!("is of an unknown kind, {kind:?}")),
        };
        if let Err(why) = imported {
            let why = format!("its copy {why}");
            opened.quarantined.push((kind.to_owned(), uid.clone(), why));
        }
        exist.insert((kind, uid));
    }
    // A child without its owner goes with it; an owner whose copy cannot be read is one.
    let exists = |owner: &Owner| exist.iter().any(|(kind, uid)| *kind == owner.kind && *uid == owner.uid);
    for kind in KINDS {
        (kind.settle)(writer, &exists, now_ns())?;
    }
    writer.commit_even_if_empty()
}
