//! The first stage of every kind: a copy of the record beside the object, so that losing the database loses no pod.
//!
//! It is made before anything else of the object and renewed before a changed wish is acted on. It is not flushed: the
//! store is the promise. Its undo comes last and is one rename of the whole directory into the trash.

use std::path::{Path, PathBuf};

use state::{Kind, Object};

use crate::engine::Context;
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::error::{Error, Result};
use crate::world::paths::DIR_MODE;
use crate::world::{Paths, World};

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
        Ok(match cx.world.files.read(&path)? {
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
        cx.world.files.make_dir(&dir, DIR_MODE)?;
        cx.world.files.replace(&dir.join(COPY), &text(object))
    }

    async fn undo(cx: &Context, object: &Object<K>) -> Result<Undone> {
        if let Some(dir) = K::state_dir(&cx.world.paths, object) {
            remove_empty_tree(&cx.world, &dir)?;
        }
        cx.world.files.bury(&K::dir(&cx.world.paths, object))?;
        Ok(Undone::Done)
    }
}

/// Removes a small tree of ours on the tmpfs without crossing into a mount: a directory that is still a mount point
/// refuses with EBUSY, and nothing below it was touched.
pub fn remove_empty_tree(world: &World, dir: &Path) -> Result<()> {
    for entry in world.files.list(dir)? {
        let path = dir.join(&entry.name);
        if !entry.is_dir {
            world.files.unlink(&path)?;
        } else if world.mounts.is_mounted(&path)? {
            return Err(Error::Pending(format!("{} is still mounted", path.display())));
        } else {
            remove_empty_tree(world, &path)?;
        }
    }
    world.files.remove_dir(dir)
}
