//! The content store: blobs by digest, and the names that point at them.
//!
//! ```text
//! <root>/content/            an OCI image layout (image-spec, image-layout.md)
//!     oci-layout  index.json    reference -> descriptor, as annotation org.opencontainers.image.ref.name
//!     blobs/sha256/<hex>        complete, verified, flushed
//!     ingest/sha256-<hex>       a known digest on its way in; kept when cut off, so that it can be resumed
//!     ingest/tmp-<token>        of one writer alone; worthless once that is gone
//!     importing                 locked by who writes blobs that no record names yet; alone by who removes blobs
//! ```
//!
//! A blob is hashed while it is written, flushed, and renamed into place; so what is under `blobs` is whole. Those who
//! fetch one digest exclude each other by `flock`, across threads and processes; whoever waited finds the blob there.
//! Who reads from a pipe, which may stall, has its file alone.

mod error;
mod index;
#[cfg(test)]
mod tests;
mod writer;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use oci_spec::image::{Descriptor, Digest, MediaType, Sha256Digest};
use sha2::{Digest as _, Sha256};
use shim::fault;

pub use self::error::{Class, Error, Result};
pub use self::writer::{Begin, Writer};

/// The largest manifest, index or configuration that is read, in bytes.
pub const DOCUMENT_LIMIT: u64 = 8 << 20;

/// A name no other caller of this machine has, for files about to be renamed.
pub(crate) fn token() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or(Duration::ZERO);
    format!(
        "{}-{:x}-{}",
        std::process::id(),
        now.as_nanos(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    )
}

/// `sha256:<hex>` of what was hashed.
pub(crate) fn digest_of(hasher: Sha256) -> Digest {
    let hex = hasher.finalize().iter().map(|b| format!("{b:02x}")).collect::<String>();
    // 32 bytes always make a valid SHA-256 digest, so the fallback is never taken.
    Sha256Digest::from_str(&hex)
        .map(Digest::from)
        .unwrap_or_else(|_| unreachable!("hex of 32 bytes"))
}

/// The hex half; only SHA-256 names a blob here.
pub(crate) fn hex_of(digest: &Digest) -> Result<&str> {
    match digest.algorithm() {
        oci_spec::image::DigestAlgorithm::Sha256 => Ok(digest.digest()),
        other => Err(Error::invalid(
            digest,
            format!("digest algorithm {other} is not supported, only sha256"),
        )),
    }
}

/// Opens a file and locks it; `None`: try again. [`Error::Busy`] if another has it and `how` does not wait.
fn locked(path: &Path, how: FlockArg) -> Result<Option<Flock<File>>> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(Error::io("create", path.display()))?;
    let file = match Flock::lock(file, how) {
        Ok(file) => file,
        Err((_, Errno::EINTR)) => return Ok(None),
        Err((_, Errno::EWOULDBLOCK)) => {
            return Err(Error::Busy {
                target: path.display().to_string(),
                holder: None,
            });
        }
        Err((_, errno)) => return Err(Error::io("lock", path.display())(errno)),
    };
    // The one before us may have renamed this very file into place, or removed it.
    let still = fs::metadata(path).ok().map(|m| m.ino());
    Ok((still == file.metadata().ok().map(|m| m.ino())).then_some(file))
}

/// Bytes and inodes on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub bytes: u64,
    pub inodes: u64,
}

/// Something in `ingest/` that is not a blob yet.
#[derive(Clone, Debug)]
pub struct Partial {
    pub name: String,
    pub bytes: u64,
    /// Since its last write.
    pub age: Duration,
}

#[derive(Debug)]
pub struct Content {
    dir: PathBuf,
}

impl Content {
    /// Opens `<root>/content`, making what is missing.
    pub fn open(root: &Path) -> Result<Content> {
        let content = Content {
            dir: root.join("content"),
        };
        private_dir(&content.dir)?;
        for sub in ["blobs/sha256", "ingest"] {
            let path = content.dir.join(sub);
            fs::create_dir_all(&path).map_err(Error::io("create directory", path.display()))?;
        }
        let layout = content.dir.join("oci-layout");
        if !layout.exists() {
            content.replace_file("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        }
        content.mend_index()?;
        for partial in content.partials()?.iter().filter(|p| p.name.starts_with("tmp-")) {
            content.remove_partial(partial, Duration::ZERO)?;
        }
        Ok(content)
    }

    /// The directory itself: an OCI image layout, for `statfs` and tools.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn blobs(&self) -> PathBuf {
        self.dir.join("blobs/sha256")
    }

    pub fn blob_path(&self, digest: &Digest) -> Result<PathBuf> {
        Ok(self.blobs().join(hex_of(digest)?))
    }

    // ---- blobs in ----

    /// Reads all of `reader` into a blob. `expected` and `size`, when given, must be met. If a blob of the expected
    /// digest is there already, nothing is read. The answer's media type is `media_type`.
    pub fn ingest(
        &self,
        media_type: MediaType,
        reader: &mut dyn Read,
        expected: Option<&Digest>,
        size: Option<u64>,
    ) -> Result<Descriptor> {
        if self.is_here(expected, size)? {
            return self.present(media_type, expected);
        }
        let path = self.dir.join("ingest").join(format!("tmp-{}", token()));
        let mut writer = loop {
            if let Some(file) = locked(&path, FlockArg::LockExclusive)? {
                break Writer::new(self, file, path.clone(), expected.cloned(), size, false)?;
            }
        };
        let object = writer.object.clone();
        let mut buffer = vec![0; 128 << 10];
        loop {
            match reader.read(&mut buffer) {
                Ok(0) => return writer.commit(media_type),
                Ok(n) => writer.write_all(&buffer[..n]).map_err(|e| writer.refusal(e, &object))?,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(super::unpack::tar::stream(&object, e)),
            }
        }
    }

    /// Stores a small document.
    pub fn ingest_bytes(&self, media_type: MediaType, bytes: &[u8]) -> Result<Descriptor> {
        let digest = digest_of(Sha256::new_with_prefix(bytes));
        self.ingest(media_type, &mut &bytes[..], Some(&digest), Some(bytes.len() as u64))
    }

    fn present(&self, media_type: MediaType, expected: Option<&Digest>) -> Result<Descriptor> {
        let digest = expected.ok_or_else(|| Error::NotFound("a blob without digest".into()))?;
        let size = self
            .size_of(digest)?
            .ok_or_else(|| Error::NotFound(digest.to_string()))?;
        Ok(Descriptor::new(media_type, size, digest.clone()))
    }

    /// A writer that resumes where an earlier one for the same digest was cut off (see [`Writer::offset`]); waits while
    /// another is at it. `None`: the blob is there.
    pub fn writer(&self, expected: &Digest, size: Option<u64>) -> Result<Option<Writer<'_>>> {
        match self.begin(expected, size, true)? {
            Begin::Present => Ok(None),
            Begin::Writer(writer) => Ok(Some(*writer)),
            Begin::Taken => Err(Error::Busy {
                target: "ingest".into(),
                holder: None,
            }),
        }
    }

    /// Like [`Content::writer`], but answers [`Begin::Taken`] instead of waiting.
    pub fn begin(&self, expected: &Digest, size: Option<u64>, wait: bool) -> Result<Begin<'_>> {
        let path = self.sealed_path(expected)?;
        let how = if wait {
            FlockArg::LockExclusive
        } else {
            FlockArg::LockExclusiveNonblock
        };
        loop {
            if self.is_here(Some(expected), size)? {
                return Ok(Begin::Present);
            }
            match locked(&path, how) {
                Ok(Some(file)) => {
                    let writer = Writer::new(self, file, path, Some(expected.clone()), size, true)?;
                    return Ok(Begin::Writer(Box::new(writer)));
                }
                Ok(None) => {}
                Err(Error::Busy { .. }) => return Ok(Begin::Taken),
                Err(e) => return Err(e),
            }
        }
    }

    /// Whether the blob is here, and now not older than this; damage in its place is removed.
    fn is_here(&self, expected: Option<&Digest>, size: Option<u64>) -> Result<bool> {
        let Some(digest) = expected else {
            return Ok(false);
        };
        let Some(have) = self.size_of(digest)? else {
            return Ok(false);
        };
        if size.is_none_or(|want| want == have) {
            return self.freshen(digest).map(|()| true);
        }
        // Damage, or a descriptor that lies: which must not cost another image its blob.
        if self.sound(digest)? {
            return Err(Error::invalid(
                digest,
                format!("has {have} bytes, its descriptor says otherwise"),
            ));
        }
        self.remove_blob(digest).map(|()| false)
    }

    /// Held by who writes blobs before the record that keeps them; waits while garbage is collected. Blocking.
    pub fn importing(&self) -> Result<Flock<File>> {
        let path = self.dir.join("importing");
        loop {
            if let Some(lock) = locked(&path, FlockArg::LockShared)? {
                return Ok(lock);
            }
        }
    }

    /// Held by who removes blobs; `None` while somebody imports.
    pub fn collecting(&self) -> Result<Option<Flock<File>>> {
        match locked(&self.dir.join("importing"), FlockArg::LockExclusiveNonblock) {
            Err(Error::Busy { .. }) => Ok(None),
            other => other,
        }
    }

    /// A blob that its writer has sealed, though it has no name yet; `None` if it is not here so.
    pub fn sealed(&self, descriptor: &Descriptor) -> Result<Option<File>> {
        let path = self.sealed_path(descriptor.digest())?;
        match File::open(&path) {
            Ok(file) => Ok(Some(file)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::io("open", path.display())(e)),
        }
    }

    /// Gives a sealed blob its name, unless it has it. Its data must be on disk.
    pub fn place(&self, digest: &Digest) -> Result<()> {
        let blob = self.blob_path(digest)?;
        match fs::rename(self.sealed_path(digest)?, &blob) {
            // Another who read it was first.
            Err(e) if e.kind() == io::ErrorKind::NotFound && blob.exists() => Ok(()),
            other => other.map_err(Error::io("rename into place", blob.display())),
        }
    }

    fn sealed_path(&self, digest: &Digest) -> Result<PathBuf> {
        Ok(self.dir.join("ingest").join(format!("sha256-{}", hex_of(digest)?)))
    }

    // ---- blobs out ----

    /// Whether the descriptor's blob is here with the size it states.
    pub fn exists(&self, descriptor: &Descriptor) -> Result<bool> {
        Ok(self.size_of(descriptor.digest())? == Some(descriptor.size()))
    }

    /// Bytes of a blob; `None` if it is not here.
    pub fn size_of(&self, digest: &Digest) -> Result<Option<u64>> {
        let path = self.blob_path(digest)?;
        match fs::symlink_metadata(&path) {
            Ok(meta) if meta.is_file() => Ok(Some(meta.len())),
            Ok(_) => Err(Error::invalid(path.display(), "is not a regular file")),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::io("stat", path.display())(e)),
        }
    }

    /// Opens a blob for reading. Its bytes are not verified again here.
    pub fn open_blob(&self, digest: &Digest) -> Result<File> {
        let path = self.blob_path(digest)?;
        File::open(&path).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => Error::NotFound(digest.to_string()),
            _ => Error::io("open", path.display())(e),
        })
    }

    /// Reads a document of at most [`DOCUMENT_LIMIT`] bytes and verifies its digest.
    pub fn read(&self, digest: &Digest) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let file = self.open_blob(digest)?;
        file.take(DOCUMENT_LIMIT + 1)
            .read_to_end(&mut bytes)
            .map_err(Error::io("read", digest))?;
        if bytes.len() as u64 > DOCUMENT_LIMIT {
            return Err(Error::TooBig {
                object: digest.to_string(),
                limit: DOCUMENT_LIMIT,
            });
        }
        let got = digest_of(Sha256::new_with_prefix(&bytes));
        if got != *digest {
            return Err(Error::Digest {
                object: "blob".into(),
                want: digest.to_string(),
                got: got.to_string(),
            });
        }
        Ok(bytes)
    }

    /// Hashes a whole blob; absent is unsound.
    pub fn sound(&self, digest: &Digest) -> Result<bool> {
        let mut file = match self.open_blob(digest) {
            Err(Error::NotFound(_)) => return Ok(false),
            other => other?,
        };
        let mut hasher = Sha256::new();
        let mut buffer = vec![0; 128 << 10];
        loop {
            match file.read(&mut buffer).map_err(Error::io("read", digest))? {
                0 => return Ok(digest_of(hasher) == *digest),
                n => hasher.update(&buffer[..n]),
            }
        }
    }

    /// Every blob with its bytes, for sweeping.
    pub fn list_blobs(&self) -> Result<Vec<(Digest, u64)>> {
        let dir = self.blobs();
        let mut blobs = Vec::new();
        for entry in fs::read_dir(&dir).map_err(Error::io("list", dir.display()))? {
            let entry = entry.map_err(Error::io("list", dir.display()))?;
            let name = entry.file_name();
            let digest = name.to_str().and_then(|hex| Sha256Digest::from_str(hex).ok());
            if let (Some(digest), Ok(meta)) = (digest, entry.metadata()) {
                blobs.push((digest.into(), meta.len()));
            }
        }
        Ok(blobs)
    }

    /// Blobs that nobody ingested, or found present while ingesting, for `age`. What is younger may belong to a pull or
    /// an import whose record is still to be written.
    pub fn list_older(&self, age: Duration) -> Result<Vec<(Digest, u64)>> {
        let mut blobs = self.list_blobs()?;
        blobs.retain(|(digest, _)| {
            let modified = self
                .blob_path(digest)
                .ok()
                .and_then(|p| fs::metadata(p).ok())
                .and_then(|m| m.modified().ok());
            modified.and_then(|t| t.elapsed().ok()).is_some_and(|past| past >= age)
        });
        Ok(blobs)
    }

    /// Makes a blob as young as one just written.
    pub(super) fn freshen(&self, digest: &Digest) -> Result<()> {
        let file = self.open_blob(digest)?;
        file.set_modified(SystemTime::now()).map_err(Error::io("touch", digest))
    }

    /// Forgets a blob; absent is success.
    pub fn remove_blob(&self, digest: &Digest) -> Result<()> {
        remove_file(&self.blob_path(digest)?)
    }

    /// What is in `ingest/`, whether being written or left behind.
    pub fn partials(&self) -> Result<Vec<Partial>> {
        let dir = self.dir.join("ingest");
        let mut partials = Vec::new();
        for entry in fs::read_dir(&dir).map_err(Error::io("list", dir.display()))? {
            let entry = entry.map_err(Error::io("list", dir.display()))?;
            let (Ok(meta), Ok(name)) = (entry.metadata(), entry.file_name().into_string()) else {
                continue;
            };
            let age = meta
                .modified()
                .ok()
                .and_then(|t| t.elapsed().ok())
                .unwrap_or(Duration::ZERO);
            partials.push(Partial {
                name,
                bytes: meta.len(),
                age,
            });
        }
        Ok(partials)
    }

    /// Removes what an interrupted ingest left, if nobody writes it and it is older than `age`. Answers whether it did.
    pub fn remove_partial(&self, partial: &Partial, age: Duration) -> Result<bool> {
        let path = self.dir.join("ingest").join(&partial.name);
        if partial.age < age || partial.name.contains('/') {
            return Ok(false);
        }
        let Ok(file) = OpenOptions::new().write(true).open(&path) else {
            return Ok(false);
        };
        let Ok(_lock) = Flock::lock(file, FlockArg::LockExclusiveNonblock) else {
            return Ok(false);
        };
        remove_file(&path).map(|()| true)
    }

    /// Disk used by blobs, complete and partial.
    pub fn usage(&self) -> Result<Usage> {
        let mut usage = Usage::default();
        for dir in [self.blobs(), self.dir.join("ingest")] {
            for entry in fs::read_dir(&dir).map_err(Error::io("list", dir.display()))? {
                if let Ok(meta) = entry.and_then(|e| e.metadata()) {
                    usage.bytes += meta.blocks() * 512;
                    usage.inodes += 1;
                }
            }
        }
        Ok(usage)
    }

    fn replace_file(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let temp = self.dir.join(format!(".{name}.{}", token()));
        let path = self.dir.join(name);
        let write = || {
            fault::check("content.index.before")?;
            let mut file = File::create(&temp)?;
            file.write_all(bytes)?;
            file.sync_data()?;
            fault::check("content.index.torn")?;
            fs::rename(&temp, &path)?;
            fault::check("content.index.after")
        };
        write().map_err(|e| {
            let _ = fs::remove_file(&temp);
            Error::io("write", path.display())(e)
        })?;
        sync_dir(&self.dir)
    }
}

/// Makes a directory, with its parents, that only root may enter: images hold setuid programs and secrets.
pub(crate) fn private_dir(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::create_dir_all(path).map_err(Error::io("create directory", path.display()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o700)).map_err(Error::io("set the mode of", path.display()))
}

fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", path.display())(e)),
        _ => Ok(()),
    }
}

/// Makes the names in a directory durable.
pub(crate) fn sync_dir(path: &Path) -> Result<()> {
    let dir: OwnedFd = File::open(path).map_err(Error::io("open", path.display()))?.into();
    nix::unistd::fsync(dir).map_err(Error::io("flush", path.display()))
}
