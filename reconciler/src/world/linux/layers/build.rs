//! The making of one image's missing layers: each is unpacked on its own, some at a time, the largest first. They are
//! committed together at the end, from the bottom up; what another image waits for is committed as soon as it can be.
//!
//! ```text
//!   todo --start--> worker: fetch, inflate, untar --> made --commit--> there
//!     |                                                      (conductor)
//!     +--- another image makes it: wait ------------------------------^
//! ```

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::Scope;

use shim::fault;

use super::claims::{self, Claim};
use super::{Layers, Making, Source, holds_all, lock, sync_dir};
use crate::image::manifest::{ChainId, Loaded};
use crate::world::linux::content::{Error, Result};
use crate::world::linux::unpack::Memory;

/// What became of a layer so far.
enum Part<'a> {
    Missing,
    Made(Box<Making<'a>>),
    There,
}

pub(super) struct Build<'a, 'b> {
    layers: &'a Layers,
    source: &'a dyn Source,
    image: &'b Loaded,
    claim: Claim<'a>,
    /// By place in the image, bottom first.
    parts: Mutex<Vec<Part<'a>>>,
    /// Places of what was not begun, the smallest first: it is taken from the end.
    todo: Mutex<Vec<usize>>,
    /// Threads that unpack.
    workers: AtomicUsize,
    /// What the whole image may use for unpacking.
    memory: Arc<Memory>,
    /// The first failure.
    failure: Mutex<Option<Error>>,
}

/// What the conductor has to do next.
#[derive(Default)]
struct Next {
    /// Others wait for these, and they can be committed.
    wanted: Vec<ChainId>,
    /// There is something to unpack and room for a worker.
    hire: bool,
    /// Nothing is left to do, or to be waited for.
    over: bool,
}

impl<'a, 'b> Build<'a, 'b> {
    pub fn new(layers: &'a Layers, source: &'a dyn Source, image: &'b Loaded, missing: Vec<usize>) -> Build<'a, 'b> {
        let mut parts: Vec<_> = image.chain_ids.iter().map(|_| Part::There).collect();
        for i in &missing {
            parts[*i] = Part::Missing;
        }
        let mut todo = missing;
        let blobs = image.manifest.layers();
        todo.sort_by_key(|i| (blobs[*i].size(), std::cmp::Reverse(*i)));
        Build {
            layers,
            source,
            image,
            claim: layers.claims.claim(),
            parts: Mutex::new(parts),
            todo: Mutex::new(todo),
            workers: AtomicUsize::new(0),
            memory: Arc::default(),
            failure: Mutex::default(),
        }
    }

    /// Until all layers are there, or one cannot be had.
    pub fn run(&self) -> Result<()> {
        fault::point("layers.unpack.before");
        std::thread::scope(|scope| {
            loop {
                let next = self.wait();
                if next.over {
                    return;
                }
                if !next.wanted.is_empty()
                    && let Err(e) = self.commit(|id| next.wanted.contains(id))
                {
                    self.fail(e);
                }
                if next.hire {
                    self.hire(scope);
                }
            }
        });
        if let Some(error) = lock(&self.failure).take() {
            return Err(error);
        }
        fault::point("layers.unpack.applied");
        self.commit(|_| true)
    }

    /// Waits until there is something to do for the conductor.
    fn wait(&self) -> Next {
        let mut next = Next::default();
        let most = self.layers.permits.most;
        self.layers.claims.wait_while(|making| {
            next = Next::default();
            let workers = self.workers.load(Ordering::SeqCst);
            if self.source.stopped() {
                self.fail(Error::invalid(self.image.id(), "nobody waits for it any more"));
            }
            if lock(&self.failure).is_some() {
                next.over = workers == 0;
                return !next.over;
            }
            let free = self.free(making);
            next.hire = free && workers < most;
            next.wanted = self.wanted(making);
            next.over = workers == 0 && lock(&self.todo).is_empty();
            !next.hire && next.wanted.is_empty() && !next.over
        });
        next
    }

    /// Is there a layer to unpack that nobody has begun? Whoever makes the others is told that they are waited for.
    fn free(&self, making: &mut claims::Making) -> bool {
        let mut free = false;
        for i in lock(&self.todo).iter() {
            match making.get_mut(&self.image.chain_ids[*i]) {
                Some(wanted) => *wanted = true,
                None => free = true,
            }
        }
        free
    }

    fn wanted(&self, making: &claims::Making) -> Vec<ChainId> {
        let wanted = |id: &ChainId| making.get(id).copied() == Some(true);
        if !making.values().any(|wanted| *wanted) {
            return Vec::new();
        }
        self.ready().into_iter().filter(wanted).collect()
    }

    fn hire<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        self.workers.fetch_add(1, Ordering::SeqCst);
        let thread = std::thread::Builder::new().name("unpack".into());
        if thread.spawn_scoped(scope, || self.work()).is_err() {
            // A thread that cannot be had leaves its work to this one.
            self.work();
        }
    }

    fn work(&self) {
        while let Some(i) = self.begin() {
            match self.make(i) {
                Ok(part) => lock(&self.parts)[i] = part,
                Err(e) => self.fail(e),
            }
            self.layers.claims.wake();
        }
        self.workers.fetch_sub(1, Ordering::SeqCst);
        self.layers.claims.wake();
    }

    /// Takes the largest layer that nobody has begun.
    fn begin(&self) -> Option<usize> {
        let id = |i: usize| &self.image.chain_ids[i];
        loop {
            let todo = lock(&self.todo).clone();
            let i = todo.into_iter().rev().find(|i| self.claim.start(id(*i)))?;
            let taken = {
                let mut todo = lock(&self.todo);
                let at = todo.iter().position(|other| *other == i);
                at.map(|at| todo.remove(at)).is_some()
            };
            if taken {
                return Some(i);
            }
            // Another worker of this image was through with it before it was claimed here: kept, the claim would have
            // other images wait for what nobody makes.
            self.claim.release(id(i));
        }
    }

    fn make(&self, i: usize) -> Result<Part<'a>> {
        let id = &self.image.chain_ids[i];
        // Another image may have made it meanwhile.
        if self.layers.meta(id)?.is_some() {
            self.claim.release(id);
            return Ok(Part::There);
        }
        let _permit = (!self.source.slow()).then(|| self.layers.permits.take());
        let (diff_id, blob) = (&self.image.diff_ids[i], &self.image.manifest.layers()[i]);
        let made = self.layers.apply_one(self.source, diff_id, blob, &self.memory);
        made.map(|making| Part::Made(Box::new(making)))
    }

    /// The image has failed: nothing more is begun.
    fn fail(&self, error: Error) {
        lock(&self.failure).get_or_insert(error);
        lock(&self.todo).clear();
    }

    /// Unpacked layers all of whose lower ones are there or unpacked too, bottom first.
    fn ready(&self) -> Vec<ChainId> {
        let parts = lock(&self.parts);
        let run = parts.iter().zip(&self.image.chain_ids);
        let run = run.take_while(|(part, _)| !matches!(part, Part::Missing));
        let made = run.filter(|(part, _)| matches!(part, Part::Made(_)));
        made.map(|(_, id)| id.clone()).collect()
    }

    /// Commits what is ready, up to the highest that is `wanted`. Bottom-up, each layer gets what it takes from those
    /// below; then one flush for all, and only then may a layer have its name.
    fn commit(&self, wanted: impl Fn(&ChainId) -> bool) -> Result<()> {
        let Some(top) = self.ready().iter().rposition(wanted) else {
            return Ok(());
        };
        let mut below = Vec::new(); // top first
        let mut made = Vec::new();
        for (i, id) in self.image.chain_ids.iter().enumerate() {
            let part = std::mem::replace(&mut lock(&self.parts)[i], Part::There);
            let fs = match part {
                Part::Made(mut making) => {
                    let digest = self.image.manifest.layers()[i].digest();
                    making.tree.settle(&below).map_err(|e| e.of_layer(digest))?;
                    let fs = making.aside.tree();
                    made.push((id, making));
                    fs
                }
                Part::There | Part::Missing => self.layers.fs(id)?,
            };
            if made.len() > top {
                break;
            }
            if holds_all(&fs) {
                below.clear();
            }
            below.insert(0, fs);
        }
        let (mut bytes, mut inodes) = (0, 0);
        for (_, making) in &made {
            let meta = making.tree.meta()?;
            let json = serde_json::to_vec(&meta).map_err(|e| Error::invalid("meta.json", e))?;
            let path = making.aside.path.join("meta.json");
            fs::write(&path, json).map_err(Error::io("write", path.display()))?;
            (bytes, inodes) = (bytes + meta.bytes, inodes + meta.inodes);
        }
        self.layers.flush()?;
        fault::point("layers.unpack.flushed");
        let mut committed = Vec::new();
        for (id, mut making) in made {
            if let Some(stream) = making.stream.take() {
                stream.keep()?;
            }
            (*making).commit(id)?;
            fault::point("layers.unpack.torn");
            committed.push(id);
        }
        sync_dir(&self.layers.dir)?;
        let count = committed.len();
        committed.into_iter().for_each(|id| self.claim.release(id));
        tracing::info!(image = %self.image.id(), layers = count, bytes, inodes, "layers unpacked");
        Ok(())
    }
}
