//! The store's face: create, change, delete, list, watch and wait for records of every kind.

use std::collections::HashSet;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, mpsc};
use std::thread::JoinHandle;
use std::time::Instant;

use tokio::sync::oneshot;

pub use crate::clock::boottime_ns;
use crate::clock::now_ns;
use crate::disk::{Disk, Found};
use crate::error::{Error, Result};
use crate::kinds::{self, conflict};
use crate::meter::Meter;
use crate::resource::{Kind, MAX_RECORD, Meta, Object};
use crate::usage;
pub use crate::watch::Event;
use crate::watch::Published;
use crate::writer::{Job, Writer};
use crate::{restore, volatile};

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

/// Raw copies of records that lie beside the objects; asked when the database is damaged.
pub struct Copies {
    /// Every copy.
    pub all: Box<dyn Fn() -> Vec<Copied> + Send>,
    /// The copy of one record, by kind and uid.
    pub one: OneCopy,
}

/// A copy, and whose it is by the place where it lies: its text may be damaged.
#[derive(Clone, Debug)]
pub struct Copied {
    pub kind: &'static str,
    pub uid: String,
    /// The record's JSON as [`Object`] writes it with `apiVersion` and `kind`; empty if it cannot be read.
    pub json: Vec<u8>,
}

/// Finds the copy of one record by kind and uid.
pub type OneCopy = Box<dyn Fn(&str, &str) -> Option<Vec<u8>> + Send>;

/// What opening found.
#[derive(Clone, Debug, Default)]
pub struct Opened {
    /// Why the database was set aside and rebuilt from the copies.
    pub rebuilt: Option<String>,
    /// Records that could not be read and have no copy, `(kind, uid, why)`: their things are left alone.
    pub quarantined: Vec<(String, String, String)>,
}

#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

struct Inner {
    root_id: String,
    published: Arc<Published>,
    quarantined: RwLock<HashSet<String>>,
    boot_id: String,
    usage: usage::Mailbox,
    work: Work,
}

/// Who does the jobs.
enum Work {
    Thread {
        /// `None` while dropped.
        queue: Option<mpsc::Sender<Job>>,
        owner: Option<JoinHandle<()>>,
    },
    /// The caller; see [`Store::open_here`].
    Here(Mutex<Writer>),
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Without senders the owner thread writes the rest and closes the database.
        if let Work::Thread { queue, owner } = &mut self.work {
            *queue = None;
            if let Some(owner) = owner.take() {
                let _ = owner.join();
            }
        }
    }
}

impl Store {
    /// Opens (or makes) the store under `root`; blocking. Its lock allows one process per root. Dropping the last clone
    /// closes it, which blocks until the rest is written.
    pub fn open(root: &Path, copies: Copies) -> Result<(Store, Opened)> {
        let published = Arc::new(Published::default());
        let (send_opened, receive_opened) = mpsc::channel();
        let (queue, jobs) = mpsc::channel::<Job>();
        let (root, tables) = (root.to_owned(), published.clone());
        let path = root.display().to_string();
        let thread = std::thread::Builder::new().name("store".into()).spawn(move || {
            match restore::open(&root, &copies, tables) {
                Ok((writer, opened, lock)) => {
                    let _ = send_opened.send(Ok((opened, writer.disk.root_id().to_owned(), writer.boot_id.clone())));
                    writer.run(&jobs);
                    // By name, for a child between fork and exec still has the descriptor.
                    let _ = lock.unlock();
                }
                Err(error) => drop(send_opened.send(Err(error))),
            }
        });
        let owner = thread.map_err(|e| Error::Storage {
            path,
            problem: format!("cannot start its thread: {e}"),
        })?;
        let (opened, root_id, boot_id) = receive_opened.recv().map_err(|_| Error::Closed)??;
        let inner = Inner {
            root_id,
            published,
            quarantined: RwLock::new(quarantined(&opened)),
            boot_id,
            usage: usage::Mailbox::default(),
            work: Work::Thread {
                queue: Some(queue),
                owner: Some(owner),
            },
        };
        Ok((Store { inner: Arc::new(inner) }, opened))
    }

    /// A store on another disk, without a thread: each change is made within its own call. For simulations; dropping it
    /// writes nothing.
    pub fn open_here(disk: Box<dyn Disk>, found: Found, copies: &Copies) -> Result<(Store, Opened)> {
        let published = Arc::new(Published::default());
        let (writer, opened) = restore::load_all(disk, found, copies, published.clone())?;
        let inner = Inner {
            root_id: writer.disk.root_id().to_owned(),
            published,
            quarantined: RwLock::new(quarantined(&opened)),
            boot_id: writer.boot_id.clone(),
            usage: usage::Mailbox::default(),
            work: Work::Here(Mutex::new(writer)),
        };
        Ok((Store { inner: Arc::new(inner) }, opened))
    }

    /// What this program counts of itself.
    pub fn meter(&self) -> &Meter {
        &self.inner.published.meter
    }

    /// Random id of this root, 32 hex digits, made once. Its first 8 digits are the instance in world names.
    pub fn root_id(&self) -> &str {
        &self.inner.root_id
    }

    /// Has `job` done and waits until what it staged is durable.
    async fn submit<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Writer) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (send, receive) = oneshot::channel();
        let job: Job = Box::new(move |writer| {
            let result = job(writer);
            Box::new(move |committed| drop(send.send(result.and_then(|answer| committed.map(|()| answer)))))
        });
        match &self.inner.work {
            Work::Thread { queue, .. } => {
                let queue = queue.as_ref().ok_or(Error::Closed)?;
                queue.send(job).map_err(|_| Error::Closed)?;
            }
            Work::Here(writer) => writer
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .serve(std::iter::once(job)),
        }
        receive.await.map_err(|_| Error::Closed)?
    }

    /// Writes a new record durably, or joins an equal undelivered one. A changed wish under an undelivered name marks
    /// the old record deleted and takes the name; a delivered name is [`crate::Error::AlreadyExists`].
    ///
    /// The name is unique within its kind, namespace and owner. A child of an owner that is deleted or stopped is
    /// refused ([`Error::Conflict`]), of one that is absent too ([`Error::NotFound`]).
    pub async fn create<K: Kind>(&self, new: New<K>) -> Result<Put<K>> {
        new.meta.validate()?;
        K::validate(&new.meta, &new.spec)?;
        check_size(&new.meta, &new.spec)?;
        if K::VOLATILE {
            return volatile::create(&self.inner.published.of::<K>(), new, &self.inner.boot_id);
        }
        let put = self.submit(move |writer| create(writer, new)).await?;
        let published = |object: Arc<Object<K>>| self.get::<K>(object.uid()).unwrap_or(object);
        Ok(match put {
            Put::Created(object) => Put::Created(published(object)),
            Put::Joined(object) => Put::Joined(published(object)),
        })
    }

    /// Changes a record durably under the store's lock; the generation rises iff the spec changed. Returns it
    /// unchanged, without a write, if nothing differs.
    ///
    /// Of the metadata, labels, annotations, finalizers and `ready_by` can be changed. The spec of a record that is
    /// marked deleted cannot ([`Error::Conflict`]).
    pub async fn update<K, F>(&self, uid: &str, change: F) -> Result<Arc<Object<K>>>
    where
        K: Kind,
        F: FnOnce(&mut Meta, &mut K::Spec) -> Result<()> + Send + 'static,
    {
        if K::VOLATILE {
            return volatile::update(&self.inner.published.of::<K>(), uid, change);
        }
        let uid = uid.to_owned();
        let object = self.submit(move |writer| update::<K>(writer, &uid, change)).await?;
        Ok(self.get::<K>(object.uid()).unwrap_or(object))
    }

    /// Clears `ready_by` durably: the uid is about to be given to its caller.
    pub async fn deliver<K: Kind>(&self, uid: &str) -> Result<Arc<Object<K>>> {
        let clear = |meta: &mut Meta, _: &mut K::Spec| {
            meta.ready_by = None;
            Ok(())
        };
        self.update::<K, _>(uid, clear).await
    }

    /// Marks a record and, in the same batch, everything it owns as deleted. `Ok(None)` if there is none.
    pub async fn delete<K: Kind>(&self, uid: &str) -> Result<Option<Arc<Object<K>>>> {
        if K::VOLATILE {
            return Ok(volatile::delete(&self.inner.published.of::<K>(), uid));
        }
        let known = uid.to_owned();
        let marked = self.submit(move |writer| {
            let Some(object) = writer.ahead.of::<K>().get(&known).cloned() else {
                return Ok(false);
            };
            if !object.meta.deleted() {
                kinds::mark_deleted(writer, &object, now_ns())?;
            }
            Ok(true)
        });
        Ok(if marked.await? { self.get(uid) } else { None })
    }

    /// Marks a record deleted if its trial ended before `now` (CLOCK_BOOTTIME, ns) and nobody was given its uid; true
    /// if it was. One step with the check, so that it never races a delivery.
    pub async fn withdraw<K: Kind>(&self, uid: &str, now: u64) -> Result<bool> {
        let known = uid.to_owned();
        self.submit(move |writer| {
            let Some(object) = writer.ahead.of::<K>().get(&known).cloned() else {
                return Ok(false);
            };
            let over = object.meta.ready_by.is_some_and(|by| by <= now) && !object.meta.deleted();
            if over {
                kinds::mark_deleted(writer, &object, now_ns())?;
            }
            Ok(over)
        })
        .await
    }

    /// Drops the finalizer and the record; its durability waits for the next batch (a record that is not marked deleted
    /// is erased durably). An absent one is a success; one that still owns others is [`Error::Conflict`].
    pub async fn erase<K: Kind>(&self, uid: &str) -> Result<()> {
        if K::VOLATILE {
            self.inner.published.of::<K>().forget(uid);
            return Ok(());
        }
        let uid = uid.to_owned();
        let erased = self.submit(move |writer| {
            let Some(name) = writer.ahead.of::<K>().get(&uid).map(|o| o.meta.name.clone()) else {
                return Ok(());
            };
            if let Some(child) = kinds::KINDS
                .iter()
                .find_map(|kind| (kind.owned)(&mut writer.ahead, &uid))
            {
                return Err(conflict::<K>(
                    &name,
                    format!("still owns {child}, which is erased first"),
                ));
            }
            writer.erase::<K>(&uid);
            Ok(())
        });
        erased.await
    }

    pub fn get<K: Kind>(&self, uid: &str) -> Option<Arc<Object<K>>> {
        self.inner.published.of::<K>().read().get(uid).cloned()
    }

    /// The holder of a name (or `namespace/name`) that is not marked deleted. Of several holders of a bare name, in
    /// different namespaces, the one in `default` or in none is meant, else the newest.
    pub fn by_name<K: Kind>(&self, name: &str) -> Option<Arc<Object<K>>> {
        self.inner.published.of::<K>().read().by_name(name).cloned()
    }

    /// All records, newest first.
    pub fn list<K: Kind>(&self) -> Vec<Arc<Object<K>>> {
        self.inner.published.of::<K>().read().list().cloned().collect()
    }

    /// Records of kind `K` owned by `owner` (a uid), newest first.
    pub fn owned<K: Kind>(&self, owner: &str) -> Vec<Arc<Object<K>>> {
        self.inner.published.of::<K>().read().owned(owner).cloned().collect()
    }

    /// Resolves a full uid or a unique prefix of one. Only delivered records are found by prefix.
    pub fn resolve<K: Kind>(&self, prefix: &str) -> Result<Arc<Object<K>>> {
        let table = self.inner.published.of::<K>();
        let index = table.read();
        if let Some(object) = index.get(prefix) {
            return Ok(object.clone());
        }
        let mut found = index.with_prefix(prefix).filter(|o| o.meta.delivered());
        match (found.next(), found.next()) {
            (Some(object), None) if !prefix.is_empty() => Ok(object.clone()),
            (Some(_), Some(_)) if !prefix.is_empty() => Err(Error::Ambiguous {
                kind: K::KIND,
                prefix: prefix.to_owned(),
            }),
            _ => Err(not_found::<K>(prefix)),
        }
    }

    /// Is this uid quarantined (its record unreadable)? Its things must not be swept.
    pub fn quarantined(&self, uid: &str) -> bool {
        self.quarantine().contains(uid)
    }

    /// Is any?
    pub fn any_quarantined(&self) -> bool {
        !self.quarantine().is_empty()
    }

    /// Throws an unreadable record away; what it owns is nobody's from then on. False if it is not quarantined.
    pub async fn discard(&self, kind: &str, uid: &str) -> Result<bool> {
        if !self.quarantined(uid) {
            return Ok(false);
        }
        let key = format!("{kind}/{uid}");
        self.submit(move |writer| {
            writer.discard(key);
            Ok(())
        })
        .await?;
        let mut quarantined = self.inner.quarantined.write().unwrap_or_else(PoisonError::into_inner);
        Ok(quarantined.remove(uid))
    }

    fn quarantine(&self) -> RwLockReadGuard<'_, HashSet<String>> {
        self.inner.quarantined.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the status in memory and tells watchers, if it differs.
    pub fn set_status<K: Kind>(&self, uid: &str, status: K::Status) {
        self.inner.published.of::<K>().set_status(uid, status);
    }

    /// Every record as `Applied`, oldest first, then every change, in order.
    pub fn watch<K: Kind>(&self) -> tokio::sync::mpsc::UnboundedReceiver<Event<K>> {
        self.inner.published.of::<K>().watch()
    }

    /// The same for a reader that may be slow: once `limit` changes are unread its feed ends, and it has to begin anew.
    pub fn watch_bounded<K: Kind>(&self, limit: usize) -> tokio::sync::mpsc::Receiver<Event<K>> {
        self.inner.published.of::<K>().watch_bounded(limit)
    }

    /// The present records of a kind and then its changes, given to `take` in order, until it answers false. Two kinds
    /// may share what `take` fills: then their changes come in the order in which they were published. `take` is called
    /// under the kind's lock and must neither wait nor call the store.
    pub fn watch_with<K: Kind>(&self, take: impl FnMut(Event<K>) -> bool + Send + 'static) {
        self.inner.published.of::<K>().watch_with(take);
    }

    /// Asks whoever samples the node ([`Store::questions`]) what pods and containers use.
    pub async fn ask(&self, ask: usage::Ask) -> Result<usage::Answer> {
        self.inner.usage.ask(ask).await
    }

    /// The questions of [`Store::ask`]; for one reader, the newest.
    pub fn questions(&self) -> tokio::sync::mpsc::UnboundedReceiver<usage::Question> {
        self.inner.usage.open()
    }

    /// Waits until `done` answers for the record (`None`: it is erased) or the deadline passes. Only the newest state
    /// is shown to `done`; states in between may be skipped.
    pub async fn wait<K, T, F>(&self, uid: &str, deadline: Option<Instant>, done: F) -> Result<T>
    where
        K: Kind,
        F: FnMut(Option<&Object<K>>) -> Option<T> + Send,
    {
        self.inner.published.of::<K>().wait(uid, deadline, done).await
    }
}

pub(crate) fn not_found<K: Kind>(name: &str) -> Error {
    Error::NotFound {
        kind: K::KIND,
        name: name.to_owned(),
    }
}

fn quarantined(opened: &Opened) -> HashSet<String> {
    opened.quarantined.iter().map(|(_, uid, _)| uid.clone()).collect()
}

fn check_size<S: serde::Serialize>(meta: &Meta, spec: &S) -> Result<()> {
    let size = serde_json::to_vec(&(meta, spec))
        .map_err(|e| Error::invalid("spec", e.to_string()))?
        .len();
    if size > MAX_RECORD {
        return Err(Error::invalid(
            "spec",
            format!("the record has {size} bytes, {MAX_RECORD} are allowed"),
        ));
    }
    Ok(())
}

/// What a create does to the holder of its name.
pub(crate) enum Holder<K: Kind> {
    Absent,
    /// An equal undelivered wish; the same record with its trial pushed out, if that changes anything.
    Join(Arc<Object<K>>, Option<Box<Object<K>>>),
    /// A changed undelivered wish: it gives way.
    Replace(Arc<Object<K>>),
}

pub(crate) fn judge<K: Kind>(holder: Option<&Arc<Object<K>>>, new: &New<K>) -> Result<Holder<K>> {
    let Some(holder) = holder else {
        return Ok(Holder::Absent);
    };
    let Some(ready_by) = holder.meta.ready_by else {
        return Err(Error::AlreadyExists {
            kind: K::KIND,
            name: new.meta.name.clone(),
            uid: holder.meta.uid.clone(),
        });
    };
    let equal = K::same_wish(&holder.spec, &new.spec)
        && !K::stopped(&holder.spec)
        && holder.meta.labels == new.meta.labels
        && holder.meta.annotations == new.meta.annotations;
    if !equal {
        return Ok(Holder::Replace(holder.clone()));
    }
    // No end at all is the furthest one.
    let pushed = new.meta.ready_by.map(|new| new.max(ready_by));
    let renewed = (pushed != holder.meta.ready_by).then(|| {
        let mut meta = holder.meta.clone();
        meta.ready_by = pushed;
        Box::new(Object::new(meta, holder.spec.clone(), holder.status.clone()))
    });
    Ok(Holder::Join(holder.clone(), renewed))
}

fn create<K: Kind>(writer: &mut Writer, new: New<K>) -> Result<Put<K>> {
    if let Some(owner) = &new.meta.owner {
        let kind = kinds::find(&owner.kind)
            .ok_or_else(|| Error::invalid("metadata.owner.kind", format!("unknown kind {:?}", owner.kind)))?;
        if !(kind.adopts)(&mut writer.ahead, &owner.uid)? {
            return Err(Error::NotFound {
                kind: kind.kind,
                name: owner.uid.clone(),
            });
        }
    }
    let judged = judge(writer.ahead.of::<K>().holder(&new.meta), &new)?;
    if let Holder::Join(present, None) = judged {
        return Ok(Put::Joined(present));
    }
    if let Holder::Join(_, Some(renewed)) = judged {
        return Ok(Put::Joined(writer.put(*renewed)?));
    }
    writer.disk.room()?;
    let mut meta = new.meta;
    writer.born(&mut meta)?;
    if let Holder::Replace(old) = judged {
        kinds::mark_deleted(writer, &old, now_ns())?;
    }
    let object = Object::new(meta, new.spec, K::Status::default());
    tracing::info!(kind = K::KIND, name = object.meta.name, uid = object.uid(), "created");
    Ok(Put::Created(writer.put(object)?))
}

fn update<K: Kind>(
    writer: &mut Writer,
    uid: &str,
    change: impl FnOnce(&mut Meta, &mut K::Spec) -> Result<()>,
) -> Result<Arc<Object<K>>> {
    let Some(old) = writer.ahead.of::<K>().get(uid).cloned() else {
        return Err(not_found::<K>(uid));
    };
    match changed(&old, change)? {
        None => Ok(old),
        Some(object) => writer.put(object),
    }
}

/// The record after `change`, if that differs.
pub(crate) fn changed<K: Kind>(
    old: &Object<K>,
    change: impl FnOnce(&mut Meta, &mut K::Spec) -> Result<()>,
) -> Result<Option<Object<K>>> {
    let (mut meta, mut spec) = (old.meta.clone(), old.spec.clone());
    change(&mut meta, &mut spec)?;
    let keep = &old.meta;
    let mut meta = Meta {
        labels: meta.labels,
        annotations: meta.annotations,
        finalizers: meta.finalizers,
        ready_by: meta.ready_by,
        ..keep.clone()
    };
    if spec != old.spec {
        if keep.deleted() {
            return Err(conflict::<K>(&keep.name, "is being deleted"));
        }
        K::validate(&meta, &spec)?;
        meta.generation += 1;
    } else if meta == *keep {
        return Ok(None);
    }
    meta.validate()?;
    check_size(&meta, &spec)?;
    Ok(Some(Object::new(meta, spec, old.status.clone())))
}
