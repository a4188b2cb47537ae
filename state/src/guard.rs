//! The small files beside the database: lock, root id, watermark and ballast.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::clock;
use crate::error::{Error, Result};

/// Bytes of the ballast: deleted when the disk is full, so that removals can still be written.
const BALLAST: i64 = 8 << 20;
/// Bytes that must be free for a new record.
const ROOM: u64 = 2 << 20;

/// `what` went wrong with a file of the store.
pub(crate) fn failed(path: &Path, what: &str, error: &std::io::Error) -> Error {
    let path = path.display().to_string();
    let problem = format!("{what}: {error}");
    match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => Error::Full { path, problem },
        _ => Error::Storage { path, problem },
    }
}

/// Makes what was created or renamed in `dir` durable.
pub(crate) fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir)
        .and_then(|d| d.sync_all())
        .map_err(|e| failed(dir, "cannot sync the directory", &e))
}

/// Longest wait for the lock of a daemon that was killed: if it was just starting a program, the forked child holds the
/// lock until its execve.
const LOCK_WAIT: Duration = Duration::from_secs(1);

/// Takes the root's lock; it is held as long as the file is open.
pub(crate) fn lock(root: &Path) -> Result<File> {
    let path = root.join("store.lock");
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(&path);
    let file = file.map_err(|e| failed(&path, "cannot open the lock", &e))?;
    let started = Instant::now();
    let mut taken = file.try_lock();
    while matches!(taken, Err(TryLockError::WouldBlock)) && started.elapsed() < LOCK_WAIT {
        std::thread::sleep(Duration::from_millis(20));
        taken = file.try_lock();
    }
    match taken {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(Error::Storage {
            path: path.display().to_string(),
            problem: "another reconcile uses this root; stop it or choose another --root".into(),
        }),
        Err(TryLockError::Error(e)) => Err(failed(&path, "cannot take the lock", &e)),
    }
}

/// The root's id, made once: 32 hex digits. Made before any database, which must bear it.
pub(crate) fn root_id(root: &Path) -> Result<String> {
    let path = root.join("id");
    match std::fs::read_to_string(&path) {
        Ok(id) => {
            let id = id.trim_end();
            if id.len() == 32 && id.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
                return Ok(id.to_owned());
            }
            // Everything that this root made in the kernel is named after its id: guessing another one would orphan it.
            Err(Error::Storage {
                path: path.display().to_string(),
                problem: "is not a root id (32 hex digits); restore it (`ls /run/netns` shows its first eight)".into(),
            })
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let id = clock::random_hex::<16>().map_err(|problem| Error::Storage {
                path: path.display().to_string(),
                problem,
            })?;
            write_new(&path, format!("{id}\n").as_bytes())?;
            Ok(id)
        }
        Err(e) => Err(failed(&path, "cannot read the root's id", &e)),
    }
}

/// Makes a file durably: temporary name, fsync, rename, fsync of the directory.
fn write_new(path: &Path, content: &[u8]) -> Result<()> {
    let temporary = path.with_extension("tmp");
    let write = || {
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .open(&temporary)?;
        file.write_all(content)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)
    };
    write().map_err(|e| failed(path, "cannot write", &e))?;
    sync_dir(path.parent().unwrap_or(Path::new("/")))
}

/// What the database holds at least: written lazily, so it may be behind, never ahead of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mark {
    pub seq: u64,
    pub live: u64,
}

/// Two slots with checksums, written in turn: a torn write leaves the other one.
pub(crate) struct Watermark {
    file: File,
    path: PathBuf,
    /// The newest mark on disk.
    pub mark: Option<Mark>,
    slot: u64,
}

/// The slots lie in different sectors.
const SLOT: u64 = 512;

impl Watermark {
    pub fn open(root: &Path) -> Result<Watermark> {
        let path = root.join("store.watermark");
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .mode(0o600)
            .open(&path);
        let file = file.map_err(|e| failed(&path, "cannot open the watermark", &e))?;
        let mut bytes = Vec::new();
        (&file)
            .take(4 * SLOT)
            .read_to_end(&mut bytes)
            .map_err(|e| failed(&path, "cannot read", &e))?;
        let slots = [0, SLOT].map(|at| bytes.get(at as usize..).and_then(decode));
        let newest = if slots[1].map(|m| m.seq) > slots[0].map(|m| m.seq) {
            1
        } else {
            0
        };
        Ok(Watermark {
            file,
            path,
            mark: slots[newest],
            slot: newest as u64,
        })
    }

    /// Writes the older slot durably, if there is news.
    pub fn set(&mut self, mark: Mark) -> Result<()> {
        if self.mark == Some(mark) {
            return Ok(());
        }
        self.slot = 1 - self.slot;
        let write = self
            .file
            .write_all_at(&encode(mark), self.slot * SLOT)
            .and_then(|()| self.file.sync_data());
        write.map_err(|e| failed(&self.path, "cannot write", &e))?;
        self.mark = Some(mark);
        Ok(())
    }
}

fn encode(mark: Mark) -> [u8; 20] {
    let mut bytes = [0; 20];
    bytes[..8].copy_from_slice(&mark.seq.to_le_bytes());
    bytes[8..16].copy_from_slice(&mark.live.to_le_bytes());
    let crc = crc32fast::hash(&bytes[..16]);
    bytes[16..].copy_from_slice(&crc.to_le_bytes());
    bytes
}

fn decode(bytes: &[u8]) -> Option<Mark> {
    let number = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let mark = Mark {
        seq: number(0)?,
        live: number(8)?,
    };
    // A file of zeros would be a valid mark of nothing.
    (mark.seq > 0 && bytes.get(..20)? == encode(mark)).then_some(mark)
}

/// Disk space kept for removals.
pub(crate) struct Ballast {
    root: PathBuf,
    path: PathBuf,
}

impl Ballast {
    pub fn new(root: &Path) -> Ballast {
        Ballast {
            root: root.to_owned(),
            path: root.join("store.ballast"),
        }
    }

    /// Are `bytes` free beside the ballast?
    fn free(&self, bytes: u64) -> bool {
        let free = nix::sys::statvfs::statvfs(&self.root).map(|v| v.blocks_free() * v.fragment_size());
        // What cannot be measured shows when it is written.
        free.map_or(true, |free| free >= bytes)
    }

    /// Is there room for new records? Also allocates the ballast where it is missing.
    pub fn room(&self) -> bool {
        if self.path.exists() {
            return self.free(ROOM);
        }
        self.free(ROOM + BALLAST as u64) && self.allocate().is_ok()
    }

    /// Sees to it that `bytes` can be written, giving up the ballast if need be.
    pub fn yield_to(&self, bytes: u64) -> bool {
        if self.free(ROOM + bytes) {
            return true;
        }
        if std::fs::remove_file(&self.path).is_ok() {
            tracing::warn!("the disk is full: the store's reserve was given up");
        }
        self.free(ROOM / 2 + bytes)
    }

    fn allocate(&self) -> std::io::Result<()> {
        let temporary = self.path.with_extension("tmp");
        let allocated = || {
            let file = OpenOptions::new()
                .create(true)
                .truncate(true)
                .write(true)
                .mode(0o600)
                .open(&temporary)?;
            nix::fcntl::posix_fallocate(&file, 0, BALLAST)?;
            std::fs::rename(&temporary, &self.path)
        };
        allocated().inspect_err(|_| {
            let _ = std::fs::remove_file(&temporary);
        })
    }
}
