//! Unpacked layers, shared between images.
//!
//! ```text
//! <root>/layers/sha256-<chain hex>/{fs/, meta.json}    whole, flushed, never changed again
//! <root>/layers/tmp-<token>/                           in the making, locked by its maker
//! ```
//!
//! A layer is committed by one rename, after its data is on disk. What a crash leaves is a `tmp-` directory that nobody
//! locks; it is buried at the next start and the work is done again.

mod deep;
mod fence;
mod permits;
mod source;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use nix::fcntl::{Flock, FlockArg, OFlag};
use nix::sys::stat::Mode;
use oci_spec::image::{Descriptor, Digest};
use shim::fault;
use tokio::sync::watch;

use self::fence::Fence;
use self::permits::Permits;
pub use self::source::{Source, Stream};
use super::content::{Error, Result, Usage, hex_of, private_dir, sync_dir, token};
use super::trash::Trash;
pub use super::unpack::LayerMeta;
use super::unpack::{Limits, Tree, apply, verify};
use crate::image::manifest::{ChainId, Loaded};

/// Layers of one image unpacked at a time, at most; more only fight for the disk.
const WORKERS: usize = 3;

#[derive(Debug)]
pub struct Layers {
    dir: PathBuf,
    trash: Trash,
    limits: Limits,
    flights: Mutex<HashMap<ChainId, Arc<Mutex<()>>>>,
    permits: Permits,
    unpacking: watch::Sender<usize>,
    /// Of the daemon alone; other users of the store doubt nothing.
    fence: Option<Fence>,
}

/// Whether what is on disk is what was unpacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Soundness {
    Sound,
    Damaged,
    Absent,
}

/// A layer to be unpacked.
struct Job<'a> {
    chain: &'a ChainId,
    diff_id: &'a Digest,
    blob: &'a Descriptor,
}

/// A directory in the making. Dropped, it is buried, unless it has got a name.
struct Aside<'a> {
    layers: &'a Layers,
    path: PathBuf,
    _lock: Flock<File>,
}

/// A layer in the making.
struct Making<'a> {
    aside: Aside<'a>,
    tree: Tree,
    stream: Option<Box<dyn Stream + 'a>>,
}

impl Layers {
    /// Opens `<root>/layers`; what a crash left half done is buried.
    pub fn open(root: &Path, limits: Limits) -> Result<Layers> {
        let dir = root.join("layers");
        private_dir(&dir)?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let layers = Layers {
            dir,
            trash: Trash::open(root)?,
            limits,
            flights: Mutex::default(),
            permits: Permits::new(cores.min(WORKERS)),
            unpacking: watch::Sender::new(0),
            fence: None,
        };
        layers.bury_leftovers()?;
        Ok(layers)
    }

    /// The same for the store's one user whose end a boot may follow.
    pub fn begin(root: &Path, limits: Limits, boot: &str) -> Result<Layers> {
        let mut layers = Layers::open(root, limits)?;
        layers.fence = Some(Fence::begin(&layers.dir, boot)?);
        Ok(layers)
    }

    /// Where removed layers go.
    pub fn trash(&self) -> &Trash {
        &self.trash
    }

    /// The end of that use: all is flushed, so that the next boot needs to doubt nothing.
    pub fn end(&self) -> Result<()> {
        self.flush()?;
        self.fence.as_ref().map_or(Ok(()), Fence::end)
    }

    fn flush(&self) -> Result<()> {
        let dir = File::open(&self.dir).map_err(Error::io("open", self.dir.display()))?;
        nix::unistd::syncfs(&dir).map_err(Error::io("flush", self.dir.display()))
    }

    fn bury_leftovers(&self) -> Result<()> {
        for name in self.names()?.iter().filter(|n| n.starts_with("tmp-")) {
            let path = self.dir.join(name);
            // Its maker, if it lives, holds the lock.
            if let Ok(file) = File::open(&path)
                && Flock::lock(file, FlockArg::LockExclusiveNonblock).is_ok()
            {
                self.trash.bury(&path)?;
            }
        }
        Ok(())
    }

    fn names(&self) -> Result<Vec<String>> {
        let failed = |e: io::Error| Error::io("list", self.dir.display())(e);
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.dir).map_err(failed)? {
            names.extend(entry.map_err(failed)?.file_name().into_string());
        }
        Ok(names)
    }

    /// Unpacks what is missing, out of what `source` gives. Answers the chain IDs, bottom first. Blocking. Concurrent
    /// calls unpack a shared layer once.
    pub fn ensure(&self, source: &dyn Source, image: &Loaded) -> Result<Vec<ChainId>> {
        if self.missing(&image.chain_ids)?.is_empty() {
            return Ok(image.chain_ids.clone());
        }
        // Images share layers from the bottom up, so all callers lock what they share in the same order.
        let flights: Vec<_> = image.chain_ids.iter().map(|c| self.flight(c)).collect();
        let guards: Vec<_> = flights.iter().map(|f| lock(f)).collect();
        let missing = self.missing(&image.chain_ids)?;
        self.unpacking.send_modify(|count| *count += 1);
        let outcome = self.unpack(source, image, &missing);
        self.unpacking.send_modify(|count| *count -= 1);
        drop(guards);
        self.land(&image.chain_ids, flights);
        outcome.map(|()| image.chain_ids.clone())
    }

    /// Until nothing is being unpacked: the time to empty the trash, as deleting slows unpacking down.
    pub async fn quiet(&self) {
        // The sender is ours, so it cannot be gone.
        let _ = self.unpacking.subscribe().wait_for(|count| *count == 0).await;
    }

    /// Which of these layers are not here.
    pub fn missing(&self, chain: &[ChainId]) -> Result<Vec<usize>> {
        let have = self.observe(chain)?;
        Ok(have
            .iter()
            .enumerate()
            .filter(|(_, meta)| meta.is_none())
            .map(|(i, _)| i)
            .collect())
    }

    fn flight(&self, chain: &ChainId) -> Arc<Mutex<()>> {
        lock(&self.flights).entry(chain.clone()).or_default().clone()
    }

    /// Forgets the locks that nobody else waits for.
    fn land(&self, chain: &[ChainId], held: Vec<Arc<Mutex<()>>>) {
        let mut flights = lock(&self.flights);
        drop(held);
        for id in chain {
            if flights.get(id).is_some_and(|f| Arc::strong_count(f) == 1) {
                flights.remove(id);
            }
        }
    }

    fn unpack(&self, source: &dyn Source, image: &Loaded, missing: &[usize]) -> Result<()> {
        let layers = image.manifest.layers();
        let job = |&i: &usize| Job {
            chain: &image.chain_ids[i],
            diff_id: &image.diff_ids[i],
            blob: &layers[i],
        };
        let jobs: Vec<Job> = missing.iter().map(job).collect();
        if jobs.is_empty() {
            return Ok(());
        }
        fault::point("layers.unpack.before");
        let mut made = self.apply_all(source, &jobs)?;
        fault::point("layers.unpack.applied");
        self.settle(image, missing, &mut made)?;
        let mut metas = Vec::new();
        for making in &made {
            let meta = making.tree.meta()?;
            let bytes = serde_json::to_vec(&meta).map_err(|e| Error::invalid("meta.json", e))?;
            let path = making.aside.path.join("meta.json");
            fs::write(&path, bytes).map_err(Error::io("write", path.display()))?;
            metas.push(meta);
        }
        // One flush for the whole image; only then may a layer have its name.
        self.flush()?;
        fault::point("layers.unpack.flushed");
        for (mut making, job) in made.into_iter().zip(&jobs) {
            if let Some(stream) = making.stream.take() {
                stream.keep()?;
            }
            making.commit(job.chain)?;
            fault::point("layers.unpack.torn");
        }
        sync_dir(&self.dir)?;
        let (bytes, inodes) = metas.iter().fold((0, 0), |(b, i), m| (b + m.bytes, i + m.inodes));
        tracing::info!(image = %image.id(), layers = jobs.len(), bytes, inodes, "layers unpacked");
        Ok(())
    }

    /// Unpacks each layer on its own, some at a time, the largest first.
    fn apply_all<'a>(&'a self, source: &'a dyn Source, jobs: &[Job]) -> Result<Vec<Making<'a>>> {
        let mut order: Vec<usize> = (0..jobs.len()).collect();
        order.sort_by_key(|i| std::cmp::Reverse(jobs[*i].blob.size()));
        let todo = Mutex::new(order.into_iter());
        let done: Mutex<Vec<Option<Result<Making>>>> = Mutex::new(jobs.iter().map(|_| None).collect());
        let work = || {
            loop {
                let Some(i) = lock(&todo).next() else { return };
                let _permit = (!source.slow()).then(|| self.permits.take());
                let outcome = self.apply_one(source, &jobs[i]);
                if outcome.is_err() {
                    lock(&todo).by_ref().for_each(drop); // the image has failed
                }
                lock(&done)[i] = Some(outcome);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..self.permits.most.min(jobs.len()) {
                // A thread that cannot be had leaves its work to this one.
                let _ = std::thread::Builder::new()
                    .name("unpack".into())
                    .spawn_scoped(scope, work);
            }
            work();
        });
        let outcomes = done.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut made = Vec::new();
        let mut skipped = false;
        for outcome in outcomes {
            match outcome {
                Some(outcome) => made.push(outcome?),
                None => skipped = true, // the error comes later in the list
            }
        }
        if skipped {
            Err(Error::invalid("image", "a layer was not unpacked"))
        } else {
            Ok(made)
        }
    }

    fn apply_one<'a>(&'a self, source: &'a dyn Source, job: &Job) -> Result<Making<'a>> {
        let mut stream = source.open(job.blob)?;
        let aside = self.aside()?;
        let applied = apply(&mut *stream, job.diff_id, &aside.path.join("fs"), &self.limits);
        let tree = stream.end(applied).map_err(|e| e.of_layer(job.blob.digest()))?;
        Ok(Making {
            aside,
            tree,
            stream: Some(stream),
        })
    }

    /// A new directory with an empty `fs`, locked.
    fn aside(&self) -> Result<Aside<'_>> {
        let path = self.dir.join(format!("tmp-{}", token()));
        let fs_dir = path.join("fs");
        fs::create_dir_all(&fs_dir).map_err(Error::io("create directory", fs_dir.display()))?;
        let file = File::open(&path).map_err(Error::io("open", path.display()))?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock);
        let _lock = lock.map_err(|(_, e)| Error::io("lock", path.display())(e))?;
        Ok(Aside {
            layers: self,
            path,
            _lock,
        })
    }

    /// Bottom-up, each layer gets what it takes from those below.
    fn settle(&self, image: &Loaded, missing: &[usize], made: &mut [Making]) -> Result<()> {
        let mut below: Vec<PathBuf> = Vec::new(); // top first
        for (i, chain) in image.chain_ids.iter().enumerate() {
            let fs = match missing.binary_search(&i) {
                Ok(at) => {
                    let digest = image.manifest.layers()[i].digest();
                    made[at].tree.settle(&below).map_err(|e| e.of_layer(digest))?;
                    made[at].aside.path.join("fs")
                }
                Err(_) => self.fs(chain)?,
            };
            below.insert(0, fs);
        }
        Ok(())
    }

    // ---- what is here ----

    fn layer(&self, chain: &ChainId) -> Result<PathBuf> {
        Ok(self.dir.join(format!("sha256-{}", hex_of(chain)?)))
    }

    /// The layer's tree, to be mounted.
    pub fn fs(&self, chain: &ChainId) -> Result<PathBuf> {
        Ok(self.layer(chain)?.join("fs"))
    }

    /// The trees of an image's layers, top first, as overlay wants them.
    pub fn lower(&self, chain: &[ChainId]) -> Result<Vec<PathBuf>> {
        chain.iter().rev().map(|c| self.fs(c)).collect()
    }

    /// For each chain ID its layer's metadata, `None` if it is not (wholly) here.
    pub fn observe(&self, chain: &[ChainId]) -> Result<Vec<Option<LayerMeta>>> {
        chain.iter().map(|c| self.meta(c)).collect()
    }

    fn meta(&self, chain: &ChainId) -> Result<Option<LayerMeta>> {
        let path = self.layer(chain)?.join("meta.json");
        match fs::read(&path) {
            // Unreadable metadata: the layer is made again, as if it were not here.
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::io("read", path.display())(e)),
        }
    }

    /// Every layer, whole or damaged.
    pub fn list(&self) -> Result<Vec<(ChainId, Option<LayerMeta>)>> {
        let mut list = Vec::new();
        for name in self.names()? {
            let chain = name
                .strip_prefix("sha256-")
                .and_then(|hex| Digest::from_str(&format!("sha256:{hex}")).ok());
            if let Some(chain) = chain {
                let meta = self.meta(&chain)?;
                list.push((chain, meta));
            }
        }
        Ok(list)
    }

    /// Renames the layer into the trash; absent is success.
    pub fn remove(&self, chain: &ChainId) -> Result<()> {
        self.trash.bury(&self.layer(chain)?)
    }

    /// Compares the tree with the hash in its metadata (names, types, sizes, modes, owners, times). A damaged layer
    /// should be removed, if no container uses it, and ensured again.
    pub fn verify(&self, chain: &ChainId) -> Result<Soundness> {
        let Some(meta) = self.meta(chain)? else {
            let here = self.layer(chain)?.exists();
            return Ok(if here { Soundness::Damaged } else { Soundness::Absent });
        };
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let Ok(fs) = nix::fcntl::open(&self.fs(chain)?, flags, Mode::empty()) else {
            return Ok(Soundness::Damaged);
        };
        use std::os::fd::AsFd;
        let (tree, _) = verify::tree(fs.as_fd())?;
        Ok(if tree == meta.tree {
            Soundness::Sound
        } else {
            Soundness::Damaged
        })
    }

    /// Those of the layers that an unclean boot has put in doubt.
    pub fn doubtful(&self, chain: &[ChainId]) -> Result<Vec<ChainId>> {
        let Some(fence) = &self.fence else {
            return Ok(Vec::new());
        };
        let mut doubtful = Vec::new();
        for id in chain {
            let committed = fs::metadata(self.layer(id)?).and_then(|meta| meta.modified());
            if committed.is_ok_and(|at| fence.doubts(at)) {
                doubtful.push(id.clone());
            }
        }
        Ok(doubtful)
    }

    /// Looks at the doubtful among these layers; what is damaged goes away, to be made again. Answers how many went.
    pub fn settle_doubts(&self, chain: &[ChainId]) -> Result<usize> {
        let mut damaged = 0;
        for id in self.doubtful(chain)? {
            let place = self.layer(&id)?;
            if self.verify(&id)? == Soundness::Sound {
                // As good as one just written.
                let dir = File::open(&place).map_err(Error::io("open", place.display()))?;
                dir.set_modified(SystemTime::now())
                    .map_err(Error::io("touch", place.display()))?;
            } else {
                tracing::warn!(layer = %id, "damaged since the last boot, it is made again");
                self.remove(&id)?;
                damaged += 1;
            }
        }
        Ok(damaged)
    }

    /// Disk used by all layers, from their metadata.
    pub fn usage(&self) -> Result<Usage> {
        let metas = self.list()?.into_iter().filter_map(|(_, meta)| meta);
        Ok(metas.fold(Usage::default(), |sum, m| Usage {
            bytes: sum.bytes + m.bytes,
            inodes: sum.inodes + m.inodes,
        }))
    }
}

impl Making<'_> {
    fn commit(self, chain: &ChainId) -> Result<()> {
        let Aside { layers, path, .. } = &self.aside;
        let place = layers.layer(chain)?;
        // Here with unreadable metadata, or it would not have been made again.
        layers.trash.bury(&place)?;
        fs::rename(path, &place).map_err(Error::io("rename into place", place.display()))
    }
}

impl Drop for Aside<'_> {
    fn drop(&mut self) {
        if let Err(e) = self.layers.trash.bury(&self.path) {
            tracing::warn!("{e}");
        }
    }
}

/// A mutex whose data cannot be left broken by a panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
