//! The owner thread: every change of a durable record, one after the other, many to a commit.
//!
//! `ahead` is how the records will be when the present batch is durable; only then it is published and answered.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Instant;

use crate::clock::{self, now_ns};
use crate::disk::{Disk, Op};
use crate::error::{Error, Result};
use crate::index::Tables;
use crate::kinds::{self, KINDS};
use crate::resource::{Kind, Meta, Object};
use crate::watch::Published;

/// Jobs that share one commit at most.
const GROUP: usize = 256;

/// Stages changes; what it returns is called with the commit's result.
pub(crate) type Job = Box<dyn FnOnce(&mut Writer) -> Answer + Send>;
pub(crate) type Answer = Box<dyn FnOnce(Result<()>) + Send>;

pub(crate) struct Writer {
    pub ahead: Tables,
    pub disk: Box<dyn Disk>,
    pub boot_id: String,
    staged: Vec<Staged>,
    /// Erasures already published, to be written with the next batch.
    later: Vec<Op>,
    published: Arc<Published>,
    last_created: i64,
}

/// A change in the present batch.
struct Staged {
    op: Op,
    /// May its durability wait for the next batch?
    lazy: bool,
    /// It throws away an unreadable record, which otherwise is kept.
    unkeep: bool,
    publish: Box<dyn FnOnce(&Published) + Send>,
    revert: Box<dyn FnOnce(&mut Tables) + Send>,
}

impl Writer {
    pub fn new(disk: Box<dyn Disk>, published: Arc<Published>) -> Writer {
        Writer {
            ahead: Tables::default(),
            disk,
            boot_id: clock::boot_id().unwrap_or_default(),
            staged: Vec::new(),
            later: Vec::new(),
            published,
            last_created: 0,
        }
    }

    /// Serves the queue until all of its senders are gone, then closes the database.
    pub fn run(mut self, queue: &Receiver<Job>) {
        loop {
            let first = match self.disk.mark_due() {
                None => queue.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(due) => queue.recv_timeout(due),
            };
            match first {
                Ok(first) => {
                    let jobs = std::iter::once(first).chain(queue.try_iter().take(GROUP - 1));
                    self.serve(jobs);
                }
                Err(RecvTimeoutError::Timeout) => self.disk.mark(),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        self.close();
    }

    /// Does these jobs in one commit, and answers them.
    pub fn serve(&mut self, jobs: impl Iterator<Item = Job>) {
        let answers: Vec<Answer> = jobs.filter_map(|job| self.stage_job(job)).collect();
        let result = self.commit();
        for answer in answers {
            answer(result.as_ref().map_err(Error::repeat).copied());
        }
    }

    fn stage_job(&mut self, job: Job) -> Option<Answer> {
        // A caller's closure that panics fails its own call only: changes are staged after it has run.
        catch_unwind(AssertUnwindSafe(|| job(self))).ok()
    }

    /// Makes what is staged durable and publishes it; on failure all of it is taken back.
    pub fn commit(&mut self) -> Result<()> {
        if self.staged.iter().all(|staged| staged.lazy) {
            for staged in std::mem::take(&mut self.staged) {
                self.later.push(staged.op);
                (staged.publish)(&self.published);
            }
            return Ok(());
        }
        let ops = self
            .later
            .iter()
            .cloned()
            .chain(self.staged.iter().map(|staged| staged.op.clone()));
        let result = self.write(&ops.collect::<Vec<_>>());
        let staged = std::mem::take(&mut self.staged);
        match result {
            Ok(()) => {
                self.later.clear();
                for staged in staged {
                    (staged.publish)(&self.published);
                }
                Ok(())
            }
            Err(error) => {
                for staged in staged.into_iter().rev() {
                    if staged.unkeep {
                        self.disk.keep(staged.op.key.clone());
                    }
                    (staged.revert)(&mut self.ahead);
                }
                Err(error)
            }
        }
    }

    /// Commits what a rebuild staged: the database is born with its head, be it of nothing.
    pub fn commit_even_if_empty(&mut self) -> Result<()> {
        if self.staged.is_empty() {
            self.write(&[])
        } else {
            self.commit()
        }
    }

    /// Publishes what was loaded.
    pub fn publish_all(&mut self) {
        for kind in KINDS {
            (kind.publish)(&mut self.ahead, &self.published);
        }
    }

    fn write(&mut self, ops: &[Op]) -> Result<()> {
        let Writer { ahead, disk, .. } = self;
        let live = KINDS.iter().map(|kind| (kind.count)(ahead)).sum::<usize>() + disk.kept();
        let ahead = std::cell::RefCell::new(ahead);
        let begun = Instant::now();
        let committed = disk.commit(ops, live as u64, &|| {
            let mut all = Vec::new();
            for kind in KINDS {
                (kind.dump)(&mut ahead.borrow_mut(), &mut all);
            }
            all
        });
        self.published
            .meter
            .time("reconcile_commit_seconds", &[], begun.elapsed());
        committed
    }

    fn close(mut self) {
        if !self.later.is_empty() {
            let ops = std::mem::take(&mut self.later);
            // The records come back as deleted ones and are erased again.
            if let Err(error) = self.write(&ops) {
                tracing::warn!(%error, "erasures were not written");
            }
        }
        self.disk.mark();
    }

    /// Stages a new or changed record.
    pub fn put<K: Kind>(&mut self, object: Object<K>) -> Result<Arc<Object<K>>> {
        let json = object
            .to_json()
            .map_err(|e| Error::invalid("spec", format!("cannot be written: {e}")))?;
        let object = Arc::new(object);
        let before = self.ahead.of::<K>().put(object.clone());
        let (new, uid) = (object.clone(), object.uid().to_owned());
        self.staged.push(Staged {
            op: Op {
                key: kinds::key::<K>(object.uid()),
                value: Some(json),
            },
            lazy: false,
            unkeep: false,
            publish: Box::new(move |published| published.of::<K>().publish(&new)),
            revert: Box::new(move |ahead| revert::<K>(ahead, &uid, before)),
        });
        Ok(object)
    }

    /// Stages the erasure of a record. Only of one marked deleted may it be lost in a crash: its wish stays the same.
    pub fn erase<K: Kind>(&mut self, uid: &str) {
        let Some(before) = self.ahead.of::<K>().remove(uid) else {
            return;
        };
        let (gone, back) = (uid.to_owned(), uid.to_owned());
        self.staged.push(Staged {
            op: Op {
                key: kinds::key::<K>(uid),
                value: None,
            },
            lazy: before.meta.deleted(),
            unkeep: false,
            publish: Box::new(move |published| published.of::<K>().forget(&gone)),
            revert: Box::new(move |ahead| revert::<K>(ahead, &back, Some(before))),
        });
    }

    /// Stages the erasure of an unreadable record.
    pub fn discard(&mut self, key: String) {
        let unkeep = self.disk.release(&key);
        self.staged.push(Staged {
            op: Op { key, value: None },
            lazy: false,
            unkeep,
            publish: Box::new(|_| {}),
            revert: Box::new(|_| {}),
        });
    }

    /// Sets what belongs to the store in a new record's metadata.
    pub fn born(&mut self, meta: &mut Meta) -> Result<()> {
        meta.created = self.created();
        newborn(meta, &self.boot_id)
    }

    /// ns since the epoch, later than any before.
    pub fn created(&mut self) -> i64 {
        self.last_created = now_ns().max(self.last_created + 1);
        self.last_created
    }

    /// A record of that age was read.
    pub fn seen(&mut self, created: i64) {
        self.last_created = self.last_created.max(created);
    }
}

fn revert<K: Kind>(ahead: &mut Tables, uid: &str, before: Option<Arc<Object<K>>>) {
    match before {
        Some(before) => drop(ahead.of::<K>().put(before)),
        None => drop(ahead.of::<K>().remove(uid)),
    }
}

/// Fills what the store sets in a new record, but for `created`.
pub(crate) fn newborn(meta: &mut Meta, boot_id: &str) -> Result<()> {
    meta.uid = clock::random_hex::<32>().map_err(|problem| Error::Storage {
        path: "getrandom".into(),
        problem,
    })?;
    meta.generation = 1;
    meta.boot_id = boot_id.to_owned();
    meta.deletion = None;
    meta.finalizers = vec![crate::resource::FINALIZER.to_owned()];
    Ok(())
}
