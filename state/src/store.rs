//! The store's face: create, change, delete, list, watch and wait for records of every kind.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use crate::error::Result;
use crate::resource::{Kind, Meta, Object};

/// A record to be written: `meta` carries name, namespace, owner, labels, annotations and `ready_by`; the rest of it is
/// set by the store.
#[derive(Clone, Debug)]
pub struct New<K: Kind> {
    pub meta: Meta,
    pub spec: K::Spec,
}

/// What became of a [`New`].
#[derive(Debug)]
pub enum Put<K: Kind> {
    Created(Arc<Object<K>>),
    /// An equal wish under the same name was still undelivered: this call waits for the same uid.
    Joined(Arc<Object<K>>),
}

/// A change of one record, published after it is durable (statuses: at once).
#[derive(Debug)]
pub enum Event<K: Kind> {
    Applied(Arc<Object<K>>),
    Erased(Arc<Object<K>>),
}

/// Raw copies of records that lie beside the objects; asked when the database is damaged.
pub struct Copies {
    /// Every copy: the record's JSON as [`Object`] writes it with `apiVersion` and `kind`.
    pub all: Box<dyn Fn() -> Vec<Vec<u8>> + Send>,
    /// The copy of one record, by kind and uid.
    pub one: Box<dyn Fn(&str, &str) -> Option<Vec<u8>> + Send>,
}

/// What opening found.
#[derive(Clone, Debug, Default)]
pub struct Opened {
    /// Why the database was set aside and rebuilt from the copies.
    pub rebuilt: Option<String>,
    /// Records that could not be read and have no copy, `(kind, uid, why)`: their things are left alone.
    pub quarantined: Vec<(String, String, String)>,
}

#[derive(Clone)]
pub struct Store {}

impl Store {
    /// Opens (or makes) the store under `root`; blocking. Its lock allows one process per root.
    pub fn open(root: &Path, copies: Copies) -> Result<(Store, Opened)> {
        let _ = (root, copies);
        todo!()
    }
    /// Random id of this root, 32 hex digits, made once. Its first 8 digits are the instance in world names.
    pub fn root_id(&self) -> &str {
        todo!()
    }
    /// Writes a new record durably, or joins an equal undelivered one. A changed wish under an undelivered name marks
    /// the old record deleted and takes the name; a delivered name is [`crate::Error::AlreadyExists`].
    pub async fn create<K: Kind>(&self, new: New<K>) -> Result<Put<K>> {
        let _ = new;
        todo!()
    }
    /// Changes a record durably under the store's lock; the generation rises iff the spec changed. Returns it unchanged,
    /// without a write, if nothing differs.
    pub async fn update<K, F>(&self, uid: &str, change: F) -> Result<Arc<Object<K>>>
    where
        K: Kind,
        F: FnOnce(&mut Meta, &mut K::Spec) -> Result<()> + Send + 'static,
    {
        let _ = (uid, change);
        todo!()
    }
    /// Clears `ready_by` durably: the uid is about to be given to its caller.
    pub async fn deliver<K: Kind>(&self, uid: &str) -> Result<Arc<Object<K>>> {
        let _ = uid;
        todo!()
    }
    /// Marks a record and, in the same batch, everything it owns as deleted. `Ok(None)` if there is none.
    pub async fn delete<K: Kind>(&self, uid: &str) -> Result<Option<Arc<Object<K>>>> {
        let _ = uid;
        todo!()
    }
    /// Drops the finalizer and the record; its durability waits for the next batch.
    pub async fn erase<K: Kind>(&self, uid: &str) -> Result<()> {
        let _ = uid;
        todo!()
    }
    pub fn get<K: Kind>(&self, uid: &str) -> Option<Arc<Object<K>>> {
        let _ = uid;
        todo!()
    }
    /// The holder of a name that is not marked deleted.
    pub fn by_name<K: Kind>(&self, name: &str) -> Option<Arc<Object<K>>> {
        let _ = name;
        todo!()
    }
    /// All records, newest first.
    pub fn list<K: Kind>(&self) -> Vec<Arc<Object<K>>> {
        todo!()
    }
    /// Records of kind `K` owned by `owner` (a uid), newest first.
    pub fn owned<K: Kind>(&self, owner: &str) -> Vec<Arc<Object<K>>> {
        let _ = owner;
        todo!()
    }
    /// Resolves a full uid or a unique prefix of one. Only delivered records are found by prefix.
    pub fn resolve<K: Kind>(&self, prefix: &str) -> Result<Arc<Object<K>>> {
        let _ = prefix;
        todo!()
    }
    /// Is this uid quarantined (its record unreadable)? Its things must not be swept.
    pub fn quarantined(&self, uid: &str) -> bool {
        let _ = uid;
        todo!()
    }
    /// Replaces the status in memory and tells watchers, if it differs.
    pub fn set_status<K: Kind>(&self, uid: &str, status: K::Status) {
        let _ = (uid, status);
        todo!()
    }
    /// Every record as `Applied`, then every change, in order. A receiver that lags is told to start again by the
    /// stream's end.
    pub fn watch<K: Kind>(&self) -> tokio::sync::mpsc::UnboundedReceiver<Event<K>> {
        todo!()
    }
    /// Waits until `done` answers for the record (`None`: it is erased) or the deadline passes.
    pub async fn wait<K, T, F>(&self, uid: &str, deadline: Option<Instant>, done: F) -> Result<T>
    where
        K: Kind,
        F: FnMut(Option<&Object<K>>) -> Option<T> + Send,
    {
        let _ = (uid, deadline, done);
        todo!()
    }
}

/// Now on CLOCK_BOOTTIME, ns: for `ready_by` and `start_by`.
pub fn boottime_ns() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME);
    now.map_or(0, |t| t.tv_sec() as u64 * 1_000_000_000 + t.tv_nsec() as u64)
}
