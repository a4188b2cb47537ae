//! Unpacked layers, shared between images.
//!
//! ```text
//! <root>/layers/sha256-<chain hex>/{fs/, meta.json}    complete, flushed, never changed again; `whole/` in place of
//!                                                      `fs/` where overlay does not work: the tree up to this layer
//! <root>/layers/tmp-<token>/                           in the making, locked by its maker
//! ```
//!
//! A layer is committed by one rename, after its data is on disk. What a crash leaves is a `tmp-` directory that nobody
//! locks; it is buried at the next start and the work is done again.

mod build;
mod claims;
mod deep;
mod fence;
mod permits;
mod source;
#[cfg(test)]
mod tests;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use nix::fcntl::{Flock, FlockArg, OFlag};
use nix::sys::stat::Mode;
use oci_spec::image::{Descriptor, Digest};
use tokio::sync::watch;

use self::build::Build;
use self::claims::Claims;
use self::fence::Fence;
use self::permits::Permits;
pub use self::source::{Source, Stream};
use super::content::{Error, Result, Usage, hex_of, private_dir, sync_dir, token};
use super::trash::Trash;
pub use super::unpack::LayerMeta;
use super::unpack::{Form, Limits, Memory, Place, Tree, apply, verify};
use crate::image::manifest::{ChainId, Loaded};

/// Layers of one image unpacked at a time, at most; more only fight for the disk.
const WORKERS: usize = 3;

#[derive(Debug)]
pub struct Layers {
    dir: PathBuf,
    trash: Trash,
    limits: Limits,
    claims: Claims,
    /// Doubtful layers that are being looked at.
    looks: Claims,
    permits: Permits,
    unpacking: watch::Sender<usize>,
    /// Of the daemon alone; other users of the store doubt nothing.
    fence: Option<Fence>,
    /// What is made, and what counts as being here.
    form: Form,
}

/// Whether what is on disk is what was unpacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Soundness {
    Sound,
    Damaged,
    Absent,
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
            claims: Claims::default(),
            looks: Claims::default(),
            permits: Permits::new(cores.min(WORKERS)),
            unpacking: watch::Sender::new(0),
            fence: None,
            form: Form::Stacked,
        };
        layers.bury_leftovers()?;
        Ok(layers)
    }

    /// The same for the store's one user whose end a boot may follow.
    pub fn begin(root: &Path, limits: Limits, boot: &str, form: Form) -> Result<Layers> {
        let mut layers = Layers::open(root, limits)?;
        layers.form = form;
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
    /// calls unpack a shared layer once, and wait for no more of each other's images than for such layers. Nothing is
    /// built upon a layer in doubt.
    pub fn ensure(&self, source: &dyn Source, image: &Loaded) -> Result<Vec<ChainId>> {
        self.settle_doubts(&image.chain_ids)?;
        let missing = self.missing(&image.chain_ids)?;
        if !missing.is_empty() {
            self.unpacking.send_modify(|count| *count += 1);
            let outcome = Build::new(self, source, image, missing).run();
            self.unpacking.send_modify(|count| *count -= 1);
            outcome?;
        }
        Ok(image.chain_ids.clone())
    }

    /// A source may have stopped.
    pub fn wake(&self) {
        self.claims.wake();
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

    fn apply_one<'a>(
        &'a self,
        source: &'a dyn Source,
        diff_id: &Digest,
        blob: &Descriptor,
        memory: &Arc<Memory>,
    ) -> Result<Making<'a>> {
        let mut stream = source.open(blob)?;
        let aside = self.aside()?;
        let place = Place {
            target: &aside.tree(),
            form: self.form,
            limits: &self.limits,
            memory,
        };
        let applied = apply(&mut *stream, diff_id, place);
        let tree = stream.end(applied).map_err(|e| e.of_layer(blob.digest()))?;
        Ok(Making {
            aside,
            tree,
            stream: Some(stream),
        })
    }

    /// A new directory with an empty tree, locked.
    fn aside(&self) -> Result<Aside<'_>> {
        let path = self.dir.join(format!("tmp-{}", token()));
        let fs_dir = path.join(name_of(self.form));
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

    // ---- what is here ----

    fn layer(&self, chain: &ChainId) -> Result<PathBuf> {
        Ok(self.dir.join(format!("sha256-{}", hex_of(chain)?)))
    }

    /// The layer's tree, to be mounted.
    pub fn fs(&self, chain: &ChainId) -> Result<PathBuf> {
        let layer = self.layer(chain)?;
        let whole = layer.join(WHOLE);
        Ok(if whole.is_dir() { whole } else { layer.join(STACKED) })
    }

    /// The trees of an image's layers, top first, as overlay wants them. Nothing shows through one that holds all.
    pub fn lower(&self, chain: &[ChainId]) -> Result<Vec<PathBuf>> {
        let mut lower = Vec::new();
        for id in chain.iter().rev() {
            lower.push(self.fs(id)?);
            if lower.last().is_some_and(|fs| holds_all(fs)) {
                break;
            }
        }
        Ok(lower)
    }

    /// For each chain ID its layer's metadata, `None` if it is not (wholly) here.
    pub fn observe(&self, chain: &[ChainId]) -> Result<Vec<Option<LayerMeta>>> {
        chain.iter().map(|c| self.meta(c)).collect()
    }

    fn meta(&self, chain: &ChainId) -> Result<Option<LayerMeta>> {
        if self.form == Form::Whole && !holds_all(&self.fs(chain)?) {
            return Ok(None); // of another time, when overlay worked here
        }
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
    /// One look at a layer at a time: a second one would take away what was made in its place meanwhile.
    pub fn settle_doubts(&self, chain: &[ChainId]) -> Result<usize> {
        let mut damaged = 0;
        for id in self.doubtful(chain)? {
            let look = self.looks.claim();
            while !look.start(&id) {
                self.looks.wait_while(|others| others.contains_key(&id));
            }
            if self.doubtful(std::slice::from_ref(&id))?.is_empty() {
                continue;
            }
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

/// Names of a layer's tree.
const STACKED: &str = "fs";
const WHOLE: &str = "whole";

fn name_of(form: Form) -> &'static str {
    match form {
        Form::Stacked => STACKED,
        Form::Whole => WHOLE,
    }
}

fn holds_all(tree: &Path) -> bool {
    tree.ends_with(WHOLE)
}

impl Aside<'_> {
    fn tree(&self) -> PathBuf {
        self.path.join(name_of(self.layers.form))
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
