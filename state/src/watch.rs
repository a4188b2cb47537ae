//! What the rest of the program sees: published records with their statuses, watchers and waiters.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Instant;

use tokio::sync::Notify;
use tokio::sync::mpsc::{Receiver, UnboundedReceiver, channel, unbounded_channel};

use crate::error::{Error, Result};
use crate::index::Index;
use crate::meter::Meter;
use crate::resource::{Kind, Object};

/// A change of one record, published after it is durable (statuses: at once).
#[derive(Debug)]
pub enum Event<K: Kind> {
    Applied(Arc<Object<K>>),
    Erased(Arc<Object<K>>),
}

impl<K: Kind> Clone for Event<K> {
    fn clone(&self) -> Self {
        match self {
            Event::Applied(object) => Event::Applied(object.clone()),
            Event::Erased(object) => Event::Erased(object.clone()),
        }
    }
}

impl<K: Kind> Event<K> {
    fn uid(&self) -> &str {
        match self {
            Event::Applied(object) | Event::Erased(object) => object.uid(),
        }
    }
}

/// Takes a change; false once nobody reads it any more.
type Watcher<K> = Box<dyn FnMut(Event<K>) -> bool + Send>;

/// The published records of one kind. Its locks are held for a look-up or a replacement, never across a wait.
pub(crate) struct Live<K: Kind> {
    index: RwLock<Index<K>>,
    watchers: Mutex<Vec<Watcher<K>>>,
    waiters: Mutex<HashMap<String, Arc<Notify>>>,
}

impl<K: Kind> Default for Live<K> {
    fn default() -> Self {
        Live {
            index: RwLock::default(),
            watchers: Mutex::default(),
            waiters: Mutex::default(),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<K: Kind> Live<K> {
    pub fn read(&self) -> RwLockReadGuard<'_, Index<K>> {
        self.index.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// For the memory tier, which decides and publishes under this lock; [`Live::tell`] takes it.
    pub fn write(&self) -> RwLockWriteGuard<'_, Index<K>> {
        self.index.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes a record as it now is on disk; its status stays.
    pub fn publish(&self, object: &Arc<Object<K>>) {
        let mut index = self.write();
        let object = match index.get(object.uid()) {
            Some(old) => Arc::new(Object::new(
                object.meta.clone(),
                object.spec.clone(),
                old.status.clone(),
            )),
            None => object.clone(),
        };
        index.put(object.clone());
        self.tell(index, Event::Applied(object));
    }

    pub fn forget(&self, uid: &str) {
        let mut index = self.write();
        if let Some(object) = index.remove(uid) {
            self.tell(index, Event::Erased(object));
        }
    }

    pub fn set_status(&self, uid: &str, status: K::Status) {
        let mut index = self.write();
        let Some(old) = index.get(uid).filter(|old| old.status != status) else {
            return;
        };
        let object = Arc::new(Object::new(old.meta.clone(), old.spec.clone(), status));
        index.put(object.clone());
        self.tell(index, Event::Applied(object));
    }

    /// Tells watchers and waiters; the caller's lock on the index keeps the order.
    pub fn tell(&self, index: RwLockWriteGuard<'_, Index<K>>, event: Event<K>) {
        lock(&self.watchers).retain_mut(|watcher| watcher(event.clone()));
        drop(index);
        if let Some(waiter) = lock(&self.waiters).get(event.uid()) {
            waiter.notify_waiters();
        }
    }

    /// The present records, oldest first, then every change.
    pub fn watch(&self) -> UnboundedReceiver<Event<K>> {
        let (sender, receiver) = unbounded_channel();
        self.watch_with(move |event| sender.send(event).is_ok());
        receiver
    }

    /// The same; a reader that leaves `limit` changes unread is cut off.
    pub fn watch_bounded(&self, limit: usize) -> Receiver<Event<K>> {
        // Held until the watcher stands, so that no record comes between.
        let index = self.read();
        let (sender, receiver) = channel(index.len() + limit.max(1));
        self.begin(&index, move |event| sender.try_send(event).is_ok());
        receiver
    }

    pub fn watch_with(&self, take: impl FnMut(Event<K>) -> bool + Send + 'static) {
        self.begin(&self.read(), take);
    }

    fn begin(&self, index: &Index<K>, mut take: impl FnMut(Event<K>) -> bool + Send + 'static) {
        let mut present: Vec<_> = index.list().cloned().collect();
        present.reverse();
        if present.into_iter().all(|object| take(Event::Applied(object))) {
            lock(&self.watchers).push(Box::new(take));
        }
    }

    pub async fn wait<T>(
        &self,
        uid: &str,
        deadline: Option<Instant>,
        mut done: impl FnMut(Option<&Object<K>>) -> Option<T> + Send,
    ) -> Result<T> {
        let waiter = Waiter::new(self, uid);
        loop {
            let notified = waiter.notify.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            let object = self.read().get(uid).cloned();
            if let Some(answer) = done(object.as_deref()) {
                return Ok(answer);
            }
            match deadline {
                None => notified.await,
                Some(deadline) => {
                    if tokio::time::timeout_at(deadline.into(), notified).await.is_err() {
                        let name = object.map_or_else(|| uid.to_owned(), |o| o.meta.name.clone());
                        return Err(Error::Deadline { kind: K::KIND, name });
                    }
                }
            }
        }
    }
}

/// One wait's share in the notification of a uid; the last to leave takes it away.
struct Waiter<'a, K: Kind> {
    live: &'a Live<K>,
    uid: &'a str,
    notify: Arc<Notify>,
}

impl<'a, K: Kind> Waiter<'a, K> {
    fn new(live: &'a Live<K>, uid: &'a str) -> Self {
        let notify = lock(&live.waiters).entry(uid.to_owned()).or_default().clone();
        Waiter { live, uid, notify }
    }
}

impl<K: Kind> Drop for Waiter<'_, K> {
    fn drop(&mut self) {
        let mut waiters = lock(&self.live.waiters);
        // One reference is the map's, one is ours.
        if Arc::strong_count(&self.notify) <= 2 {
            waiters.remove(self.uid);
        }
    }
}

/// A [`Live`] a kind.
#[derive(Default)]
pub(crate) struct Published {
    tables: RwLock<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>,
    pub meter: Meter,
}

impl Published {
    pub fn of<K: Kind>(&self) -> Arc<Live<K>> {
        let key = TypeId::of::<K>();
        let known = self
            .tables
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&key)
            .cloned();
        let table = known.unwrap_or_else(|| {
            let mut tables = self.tables.write().unwrap_or_else(PoisonError::into_inner);
            tables
                .entry(key)
                .or_insert_with(|| Arc::new(Live::<K>::default()))
                .clone()
        });
        table.downcast().expect("a table is keyed by its type")
    }
}
