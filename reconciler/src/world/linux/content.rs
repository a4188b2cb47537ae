//! The content store: blobs by digest, and the names that point at them.
//!
//! ```text
//! <root>/content/            an OCI image layout (image-spec, image-layout.md)
//!     oci-layout  index.json    reference -> descriptor, as annotation org.opencontainers.image.ref.name
//!     blobs/sha256/<hex>        complete, verified, flushed
//!     ingest/sha256-<hex>       a known digest on its way in; kept when cut off, so that it can be resumed
//!     ingest/tmp-<token>        a digest not yet known; worthless once its writer is gone
//! ```
//!
//! A blob is hashed while it is written, flushed, and renamed into place; so what is under `blobs` is whole. Writers of
//! one digest exclude each other by `flock`, across threads and processes; whoever waited finds the blob there.

use std::collections::HashMap;
use std::fmt::Display;
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
use oci_spec::image::{
    ANNOTATION_REF_NAME, Descriptor, Digest, ImageIndex, ImageIndexBuilder, MediaType, Sha256Digest,
};
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};

/// The largest manifest, index or configuration that is read, in bytes.
pub const DOCUMENT_LIMIT: u64 = 8 << 20;

/// What goes wrong between an image's bytes and a mounted root file system.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{action} {object}: {cause}")]
    Io {
        action: &'static str,
        object: String,
        cause: io::Error,
    },
    /// The bytes are not what the specification asks for; they will not get better.
    #[error("{object}: {problem}")]
    Invalid { object: String, problem: String },
    #[error("{0} is not in the content store; pull or import the image")]
    NotFound(String),
    #[error("{object}: content has digest {got}, expected {want}; the source is damaged, fetch it again")]
    Digest { object: String, want: String, got: String },
    #[error("{object} is larger than the {limit} bytes allowed")]
    TooBig { object: String, limit: u64 },
    #[error("the image has no manifest for {wanted}; it offers {offered}")]
    NoPlatform { wanted: String, offered: String },
    #[error("{target} is busy{}", holder_text(.holder))]
    Busy { target: String, holder: Option<i32> },
}

fn holder_text(holder: &Option<i32>) -> String {
    match holder {
        Some(pid) => format!(": process {pid} holds it open"),
        None => ": a process or mount holds it".into(),
    }
}

/// Whether trying again may help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Not before the image or the request changes.
    Permanent,
    /// Perhaps: a full disk, a busy mount, bytes to fetch again.
    Transient,
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub fn class(&self) -> Class {
        match self {
            Error::Invalid { .. } | Error::TooBig { .. } | Error::NoPlatform { .. } => Class::Permanent,
            Error::Io { cause, .. } => match cause.raw_os_error().map(Errno::from_raw) {
                Some(Errno::ENAMETOOLONG | Errno::EFBIG | Errno::EMLINK | Errno::ELOOP) => Class::Permanent,
                _ => Class::Transient,
            },
            Error::NotFound(_) | Error::Digest { .. } | Error::Busy { .. } => Class::Transient,
        }
    }

    /// Whether a disk or quota is full.
    pub fn is_full(&self) -> bool {
        let full = |e: &io::Error| matches!(e.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT));
        matches!(self, Error::Io { cause, .. } if full(cause))
    }

    /// For `map_err`: what was being done, to what.
    pub(crate) fn io<E: Into<io::Error>>(action: &'static str, object: impl Display) -> impl FnOnce(E) -> Error {
        move |cause| Error::Io {
            action,
            object: object.to_string(),
            cause: cause.into(),
        }
    }

    /// Says which layer a complaint about its bytes belongs to.
    pub(crate) fn of_layer(self, digest: &Digest) -> Error {
        self.of_member(&format!("layer {digest}"))
    }

    pub(crate) fn of_member(self, member: &str) -> Error {
        let of = |object: String| format!("{member}: {object}");
        match self {
            Error::Io { action, object, cause } => Error::Io {
                action,
                object: of(object),
                cause,
            },
            Error::Invalid { object, problem } => Error::Invalid {
                object: of(object),
                problem,
            },
            Error::Digest { object, want, got } => Error::Digest {
                object: of(object),
                want,
                got,
            },
            Error::TooBig { object, limit } => Error::TooBig {
                object: of(object),
                limit,
            },
            other => other,
        }
    }

    pub(crate) fn invalid(object: impl Display, problem: impl Display) -> Error {
        Error::Invalid {
            object: object.to_string(),
            problem: problem.to_string(),
        }
    }
}

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

    /// An index that is not there, or that cannot be read, becomes an empty one: blobs are worth more than names, which
    /// the Image records have too.
    fn mend_index(&self) -> Result<()> {
        let _lock = self.lock_index()?;
        let path = self.dir.join("index.json");
        match self.read_index() {
            Ok(_) => Ok(()),
            Err(Error::Invalid { problem, .. }) => {
                tracing::warn!(%problem, "index.json of the content store is damaged; set aside");
                let aside = self.dir.join("index.json.damaged");
                fs::rename(&path, &aside).map_err(Error::io("set aside", path.display()))?;
                self.write_index(&empty_index()?)
            }
            Err(_) if !path.exists() => self.write_index(&empty_index()?),
            Err(e) => Err(e),
        }
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
        let Some(mut writer) = self.writer(expected, size)? else {
            return self.present(media_type, expected);
        };
        // A reader begins at the blob's beginning, so what an earlier try left is of no use.
        writer.restart()?;
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
    pub fn writer(&self, expected: Option<&Digest>, size: Option<u64>) -> Result<Option<Writer<'_>>> {
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
    pub fn begin(&self, expected: Option<&Digest>, size: Option<u64>, wait: bool) -> Result<Begin<'_>> {
        let name = match expected {
            Some(digest) => format!("sha256-{}", hex_of(digest)?),
            None => format!("tmp-{}", token()),
        };
        let path = self.dir.join("ingest").join(name);
        let object = expected.map_or_else(|| "blob".to_string(), |d| d.to_string());
        loop {
            if let Some(digest) = expected
                && let Some(have) = self.size_of(digest)?
            {
                if size.is_none_or(|want| want == have) {
                    return Ok(Begin::Present);
                }
                // Damage, or a descriptor that lies: which must not cost another image its blob.
                if self.sound(digest)? {
                    return Err(Error::invalid(
                        digest,
                        format!("has {have} bytes, its descriptor says otherwise"),
                    ));
                }
                self.remove_blob(digest)?;
            }
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(&path)
                .map_err(Error::io("create", path.display()))?;
            let how = if wait {
                FlockArg::LockExclusive
            } else {
                FlockArg::LockExclusiveNonblock
            };
            let file = match Flock::lock(file, how) {
                Ok(file) => file,
                Err((_, Errno::EWOULDBLOCK)) => return Ok(Begin::Taken),
                Err((_, Errno::EINTR)) => continue,
                Err((_, errno)) => return Err(Error::io("lock", path.display())(errno)),
            };
            // The one before us may have renamed this very file into place, or removed it.
            let still = fs::metadata(&path).ok().map(|m| m.ino());
            if still != file.metadata().ok().map(|m| m.ino()) {
                continue;
            }
            let mut writer = Writer {
                content: self,
                file,
                path,
                object,
                expected: expected.cloned(),
                size,
                hasher: Sha256::new(),
                offset: 0,
                over: false,
                done: false,
            };
            writer.resume()?;
            return Ok(Begin::Writer(Box::new(writer)));
        }
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

    /// [`Content::read`], parsed.
    pub fn read_json<T: DeserializeOwned>(&self, digest: &Digest) -> Result<T> {
        serde_json::from_slice(&self.read(digest)?).map_err(|e| Error::invalid(digest, e))
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

    // ---- names ----

    /// Makes `reference` name `descriptor`, durably; an older meaning of the name is replaced.
    pub fn tag(&self, reference: &str, descriptor: &Descriptor) -> Result<()> {
        let mut descriptor = descriptor.clone();
        let mut annotations = descriptor.annotations().clone().unwrap_or_default();
        annotations.insert(ANNOTATION_REF_NAME.into(), reference.into());
        descriptor.set_annotations(Some(annotations));
        // The names of the blobs must not be younger than the name that leads to them.
        sync_dir(&self.blobs())?;
        self.change_index(|manifests| {
            manifests.retain(|m| name_of(m) != Some(reference));
            manifests.push(descriptor);
        })
    }

    /// Removes a name; absent is success. The blobs stay.
    pub fn untag(&self, reference: &str) -> Result<()> {
        self.change_index(|manifests| manifests.retain(|m| name_of(m) != Some(reference)))
    }

    /// What `reference` names, exactly as it was given to [`Content::tag`].
    pub fn resolve(&self, reference: &str) -> Result<Option<Descriptor>> {
        Ok(self
            .list()?
            .into_iter()
            .find(|(name, _)| name == reference)
            .map(|(_, descriptor)| descriptor))
    }

    /// Every name with what it means.
    pub fn list(&self) -> Result<Vec<(String, Descriptor)>> {
        let named = |m: &Descriptor| name_of(m).map(|name| (name.to_string(), m.clone()));
        Ok(self.read_index()?.manifests().iter().filter_map(named).collect())
    }

    fn change_index(&self, change: impl FnOnce(&mut Vec<Descriptor>)) -> Result<()> {
        let _lock = self.lock_index()?;
        let mut index = self.read_index()?;
        let mut manifests = index.manifests().clone();
        change(&mut manifests);
        if manifests == *index.manifests() {
            return Ok(());
        }
        index.set_manifests(manifests);
        self.write_index(&index)
    }

    fn lock_index(&self) -> Result<Flock<File>> {
        let path = self.dir.join(".lock");
        loop {
            let file = File::create(&path).map_err(Error::io("create", path.display()))?;
            match Flock::lock(file, FlockArg::LockExclusive) {
                Ok(lock) => return Ok(lock),
                Err((_, Errno::EINTR)) => {}
                Err((_, errno)) => return Err(Error::io("lock", path.display())(errno)),
            }
        }
    }

    fn read_index(&self) -> Result<ImageIndex> {
        let path = self.dir.join("index.json");
        let bytes = fs::read(&path).map_err(Error::io("read", path.display()))?;
        serde_json::from_slice(&bytes).map_err(|e| Error::invalid(path.display(), e))
    }

    fn write_index(&self, index: &ImageIndex) -> Result<()> {
        let bytes = serde_json::to_vec(index).map_err(|e| Error::invalid("index.json", e))?;
        self.replace_file("index.json", &bytes)
    }

    fn replace_file(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let temp = self.dir.join(format!(".{name}.{}", token()));
        let path = self.dir.join(name);
        let write = || {
            let mut file = File::create(&temp)?;
            file.write_all(bytes)?;
            file.sync_data()?;
            fs::rename(&temp, &path)
        };
        write().map_err(|e| {
            let _ = fs::remove_file(&temp);
            Error::io("write", path.display())(e)
        })?;
        sync_dir(&self.dir)
    }
}

/// What [`Content::begin`] found.
#[derive(Debug)]
pub enum Begin<'a> {
    /// The blob is here.
    Present,
    /// Another writer has it.
    Taken,
    Writer(Box<Writer<'a>>),
}

/// A blob on its way in. Dropped without `commit`, one of a known digest stays to be resumed; any other is removed.
#[derive(Debug)]
pub struct Writer<'a> {
    content: &'a Content,
    file: Flock<File>,
    path: PathBuf,
    object: String,
    expected: Option<Digest>,
    size: Option<u64>,
    hasher: Sha256,
    offset: u64,
    over: bool,
    done: bool,
}

impl Writer<'_> {
    /// How many bytes are here already: fetch from there on.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Throws away what is here, e.g. because the source cannot start in the middle.
    pub fn restart(&mut self) -> Result<()> {
        use std::io::Seek;
        if self.offset > 0 {
            self.file
                .set_len(0)
                .and_then(|()| self.file.rewind())
                .map_err(Error::io("truncate", &self.object))?;
            self.hasher = Sha256::new();
            self.offset = 0;
        }
        Ok(())
    }

    /// Hashes what an earlier writer left; more than there should be is thrown away.
    fn resume(&mut self) -> Result<()> {
        let mut buffer = vec![0; 128 << 10];
        loop {
            let n = self.file.read(&mut buffer).map_err(Error::io("read", &self.object))?;
            if n == 0 {
                break;
            }
            self.hasher.update(&buffer[..n]);
            self.offset += n as u64;
        }
        if self.size.is_some_and(|size| self.offset > size) {
            self.restart()
        } else {
            Ok(())
        }
    }

    /// Verifies, flushes and renames into place.
    pub fn commit(mut self, media_type: MediaType) -> Result<Descriptor> {
        if let Some(size) = self.size
            && size != self.offset
        {
            let problem = format!("has {} bytes, its descriptor says {size}", self.offset);
            return Err(Error::invalid(&self.object, problem));
        }
        let got = digest_of(std::mem::take(&mut self.hasher));
        if let Some(want) = &self.expected
            && *want != got
        {
            // Wrong bytes cannot be resumed.
            remove_file(&self.path)?;
            self.done = true;
            return Err(Error::Digest {
                object: self.object.clone(),
                want: want.to_string(),
                got: got.to_string(),
            });
        }
        self.file.sync_data().map_err(Error::io("flush", &self.object))?;
        let blob = self.content.blob_path(&got)?;
        fs::rename(&self.path, &blob).map_err(Error::io("rename into place", blob.display()))?;
        self.done = true;
        Ok(Descriptor::new(media_type, self.offset, got))
    }

    /// Tells a broken size bound from an error of writing.
    fn refusal(&self, cause: io::Error, object: &str) -> Error {
        match (self.over, self.size) {
            (true, Some(limit)) => Error::TooBig {
                object: object.into(),
                limit,
            },
            _ => Error::io("write", object)(cause),
        }
    }
}

impl Write for Writer<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        if self.size.is_some_and(|size| self.offset + buf.len() as u64 > size) {
            self.over = true;
            return Err(io::Error::other("more bytes than the descriptor says"));
        }
        let n = self.file.write(buf)?;
        self.hasher.update(&buf[..n]);
        self.offset += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        if !self.done && (self.expected.is_none() || self.offset == 0 || self.over) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn empty_index() -> Result<ImageIndex> {
    ImageIndexBuilder::default()
        .schema_version(2u32)
        .media_type(MediaType::ImageIndex)
        .manifests(Vec::new())
        .build()
        .map_err(|e| Error::invalid("index.json", e))
}

fn name_of(descriptor: &Descriptor) -> Option<&str> {
    let annotations: Option<&HashMap<String, String>> = descriptor.annotations().as_ref();
    annotations?.get(ANNOTATION_REF_NAME).map(String::as_str)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn fresh() -> (tempfile::TempDir, Content) {
        let root = tempfile::tempdir().unwrap();
        let content = Content::open(root.path()).unwrap();
        (root, content)
    }

    fn of(bytes: &[u8]) -> Digest {
        digest_of(Sha256::new_with_prefix(bytes))
    }

    fn any() -> MediaType {
        MediaType::ImageLayer
    }

    /// Fails the test if it is read.
    struct Untouched;

    impl Read for Untouched {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            panic!("read although the blob is here")
        }
    }

    #[test]
    fn blobs_are_verified_and_kept_once() {
        let (_root, content) = fresh();
        let bytes = vec![7; 300_000];
        let digest = of(&bytes);
        let unknown = content.ingest(any(), &mut &bytes[..], None, None).unwrap();
        assert_eq!((unknown.digest(), unknown.size()), (&digest, 300_000));
        let again = content
            .ingest(any(), &mut Untouched, Some(&digest), Some(300_000))
            .unwrap();
        assert_eq!(again, unknown);
        assert_eq!(content.list_blobs().unwrap(), [(digest.clone(), 300_000)]);
        assert!(content.partials().unwrap().is_empty());
        assert!(content.usage().unwrap().bytes >= 300_000);
        content.remove_blob(&digest).unwrap();
        content.remove_blob(&digest).unwrap();
        assert!(!content.exists(&unknown).unwrap());
        assert!(matches!(content.open_blob(&digest), Err(Error::NotFound(_))));

        let wrong = content
            .ingest(any(), &mut &b"other"[..], Some(&digest), None)
            .unwrap_err();
        assert!(matches!(wrong, Error::Digest { .. }), "{wrong}");
        let long = content
            .ingest(any(), &mut &bytes[..], Some(&digest), Some(1000))
            .unwrap_err();
        assert!(matches!(long, Error::TooBig { limit: 1000, .. }), "{long}");
        let short = content.ingest(any(), &mut &bytes[..], None, Some(300_001)).unwrap_err();
        assert!(short.to_string().contains("300000 bytes"), "{short}");
        assert!(content.list_blobs().unwrap().is_empty());
        assert!(
            content.partials().unwrap().is_empty(),
            "nothing that cannot be resumed stays"
        );
    }

    #[test]
    fn a_cut_off_blob_is_resumed() {
        let (root, content) = fresh();
        let bytes: Vec<u8> = (0..100_000u32).flat_map(u32::to_le_bytes).collect();
        let (digest, size) = (of(&bytes), bytes.len() as u64);
        let mut writer = content.writer(Some(&digest), Some(size)).unwrap().unwrap();
        writer.write_all(&bytes[..150_000]).unwrap();
        assert!(matches!(
            content.begin(Some(&digest), Some(size), false).unwrap(),
            Begin::Taken
        ));
        drop(writer);
        let unknown = content.writer(None, None).unwrap().unwrap();
        std::mem::forget(unknown); // as a crash would leave it, but for the lock
        let content = Content::open(root.path()).unwrap();
        let partials = content.partials().unwrap();
        let known = partials.iter().find(|p| p.name.starts_with("sha256-")).unwrap();
        assert_eq!(known.bytes, 150_000);
        assert!(!content.remove_partial(known, Duration::from_secs(3600)).unwrap());
        let mut writer = content.writer(Some(&digest), Some(size)).unwrap().unwrap();
        assert_eq!(writer.offset(), 150_000);
        writer.write_all(&bytes[150_000..]).unwrap();
        assert_eq!(writer.commit(any()).unwrap().size(), size);
        assert!(content.sound(&digest).unwrap());
        assert!(matches!(
            content.begin(Some(&digest), Some(size), true).unwrap(),
            Begin::Present
        ));
    }

    #[test]
    fn writers_of_one_digest_share() {
        let (_root, content) = fresh();
        let bytes = vec![3; 1 << 20];
        let digest = of(&bytes);
        let reads = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..20 {
                scope.spawn(|| {
                    if let Some(mut writer) = content.writer(Some(&digest), None).unwrap() {
                        reads.fetch_add(1, Ordering::Relaxed);
                        writer.write_all(&bytes).unwrap();
                        writer.commit(any()).unwrap();
                    }
                });
            }
        });
        assert_eq!(reads.into_inner(), 1);
    }

    #[test]
    fn damage_is_fetched_again_but_a_lie_is_not_believed() {
        let (root, content) = fresh();
        let blob = content.ingest_bytes(any(), b"some bytes").unwrap();
        let lie = content
            .ingest(any(), &mut Untouched, Some(blob.digest()), Some(3))
            .unwrap_err();
        assert_eq!(lie.class(), Class::Permanent, "{lie}");
        assert!(content.exists(&blob).unwrap());
        let path = root.path().join("content/blobs/sha256").join(blob.digest().digest());
        fs::write(&path, b"some").unwrap();
        assert!(!content.exists(&blob).unwrap());
        assert!(matches!(content.read(blob.digest()), Err(Error::Digest { .. })));
        assert_eq!(content.ingest_bytes(any(), b"some bytes").unwrap(), blob);
        assert_eq!(content.read(blob.digest()).unwrap(), b"some bytes");
        let big = vec![b' '; DOCUMENT_LIMIT as usize + 1];
        let big = content.ingest_bytes(any(), &big).unwrap();
        assert!(matches!(content.read(big.digest()), Err(Error::TooBig { .. })));
    }

    #[test]
    fn names() {
        let (root, content) = fresh();
        let a = content.ingest_bytes(any(), b"a").unwrap();
        let b = content.ingest_bytes(any(), b"b").unwrap();
        std::thread::scope(|scope| {
            for i in 0..8 {
                let (content, a) = (&content, &a);
                scope.spawn(move || content.tag(&format!("host/image:{i}"), a).unwrap());
            }
        });
        content.tag("host/image:3", &b).unwrap();
        content.untag("host/image:4").unwrap();
        content.untag("host/image:4").unwrap();
        let content = Content::open(root.path()).unwrap();
        assert_eq!(content.list().unwrap().len(), 7);
        assert_eq!(content.resolve("host/image:3").unwrap().unwrap().digest(), b.digest());
        assert_eq!(content.resolve("host/image:4").unwrap(), None);
        fs::write(root.path().join("content/index.json"), "{\"torn").unwrap();
        let content = Content::open(root.path()).unwrap();
        assert!(content.list().unwrap().is_empty());
        content.tag("x", &a).unwrap();
    }
}
