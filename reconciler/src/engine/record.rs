//! The first stage of every kind: a copy of the record beside the object, so that losing the database loses no pod.
//!
//! It is made before anything else of the object and renewed before a changed wish is acted on. It is not flushed: the
//! store is the promise. Its undo comes last and is one rename of the whole directory into the trash.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use shim::fault;
use state::{Kind, Object};

use crate::engine::Context;
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::error::{Error, Result};
use crate::world::linux::images;
use crate::world::{Paths, paths};

/// Name of the copy in an object's directory.
pub const COPY: &str = "record.json";

/// A kind whose objects have a durable directory.
pub trait Placed: Kind {
    fn dir(paths: &Paths, object: &Object<Self>) -> PathBuf;
    /// The directory that the object has on the tmpfs, if it has one; removed together.
    fn state_dir(paths: &Paths, object: &Object<Self>) -> Option<PathBuf>;
}

/// The copy's text: the record as delivered, since nobody waits for a trial whose store is lost, and so that giving the
/// uid to its caller leaves the copy true.
pub fn text<K: Kind>(object: &Object<K>) -> Vec<u8> {
    let mut delivered = object.clone();
    delivered.meta.ready_by = None;
    delivered.to_json().unwrap_or_default()
}

/// Writes a file under a temporary name and renames it.
pub fn replace(path: &Path, text: &[u8]) -> Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let temp = path.with_file_name(name);
    fault::check("file.replace.before").map_err(Error::io("write", &temp))?;
    fs::write(&temp, text).map_err(Error::io("write", &temp))?;
    fault::check("file.replace.torn").map_err(Error::io("rename", path))?;
    fs::rename(&temp, path).map_err(Error::io("rename", path))
}

/// Reads a small file of ours; absent is `None`.
pub fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io("read", path)(e)),
    }
}

/// Unlinks a file; absent is success.
pub fn unlink(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", path)(e)),
        _ => Ok(()),
    }
}

/// The stage `record`.
pub struct Record;

pub enum Have {
    Absent,
    Same,
    Other,
}

impl<K: Placed> Stage<K> for Record {
    type Have = Have;
    const NAME: &'static str = "record";

    async fn observe(cx: &Context, object: &Object<K>) -> Result<Have> {
        let path = K::dir(&cx.world.paths, object).join(COPY);
        Ok(match read(&path)? {
            None => Have::Absent,
            Some(old) if old == text(object) => Have::Same,
            Some(_) => Have::Other,
        })
    }

    fn diff(_: &Object<K>, have: &Have) -> Step {
        match have {
            Have::Same => Step::Keep,
            Have::Absent => Step::Make(Why::new("Absent", "the object's directory has no copy of its record")),
            Have::Other => Step::Change(Why::new("Changed", "the copy is of another generation")),
        }
    }

    fn present(have: &Have) -> bool {
        !matches!(have, Have::Absent)
    }

    async fn act(cx: &Context, object: &Object<K>, _: &Step) -> Result<()> {
        let dir = K::dir(&cx.world.paths, object);
        paths::make_dir(&dir)?;
        replace(&dir.join(COPY), &text(object))
    }

    async fn undo(cx: &Context, object: &Object<K>) -> Result<Undone> {
        if let Some(dir) = K::state_dir(&cx.world.paths, object) {
            remove_empty_tree(&dir)?;
        }
        cx.world
            .trash
            .bury(&K::dir(&cx.world.paths, object))
            .map_err(images::failed("trash"))?;
        Ok(Undone::Done)
    }
}

/// Removes a small tree of ours on the tmpfs without crossing into a mount: a directory that is still a mount point
/// refuses with EBUSY, and nothing below it was touched.
pub fn remove_empty_tree(dir: &Path) -> Result<()> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(Error::io("list", dir)(e)),
    };
    for entry in entries.flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            if crate::world::linux::files::is_mount_point(&path)? {
                return Err(Error::Pending(format!("{} is still mounted", path.display())));
            }
            remove_empty_tree(&path)?;
        } else {
            unlink(&path)?;
        }
    }
    match fs::remove_dir(dir) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", dir)(e)),
        _ => Ok(()),
    }
}
