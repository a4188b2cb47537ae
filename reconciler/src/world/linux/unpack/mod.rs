//! A layer's tar stream becomes a directory that overlay can use as a lower one.
//!
//! ```text
//! blob -> decompress -> hash (diff ID) -> tar::Reader -> Tree::apply -> <target>/…        any layer, in any order
//!                                                        Tree::settle(layers below)      then bottom-up
//! ```
//!
//! `apply` needs nothing but the layer itself. What depends on the layers below waits for `settle`: hard links to their
//! files, the metadata of directories that the layer uses but does not list, and an opaque root.
//!
//! The stream is hostile. Each path is resolved by the kernel below the target (openat2 RESOLVE_IN_ROOT), once per
//! directory; then only single names are made, with O_EXCL and without following links.

mod ahead;
mod memory;
mod pax;
pub(crate) mod settle;
mod spool;
pub mod tar;
mod tree;
pub mod verify;
pub mod whiteout;
mod whole;

#[cfg(test)]
pub(crate) mod tests;

use std::ffi::OsStr;
use std::io::Read;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::{FileStat, SFlag, fstatat};
use nix::sys::time::TimeSpec;
use oci_spec::image::Digest;
use serde::{Deserialize, Serialize};

use super::content::{Error, Result};

pub use self::memory::Memory;
pub use self::tree::Tree;

/// What a hostile layer may cost at most.
#[derive(Clone, Debug)]
pub struct Limits {
    pub entries: u64,
    /// Bytes of one path.
    pub name: usize,
    /// Components of one path.
    pub depth: usize,
    /// Bytes of the uncompressed stream.
    pub bytes: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            entries: 1_000_000,
            name: 4096,
            depth: 256,
            bytes: 128 << 30,
        }
    }
}

/// What the directory of a layer holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// What the layer itself says, with overlay's marks.
    #[default]
    Stacked,
    /// The tree up to this layer.
    Whole,
}

/// Where a layer goes, and what it may cost.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// An empty directory; the one it lies in is used too.
    pub target: &'a Path,
    pub form: Form,
    pub limits: &'a Limits,
    pub memory: &'a Arc<Memory>,
}

/// What is known of an unpacked layer, kept beside it as `meta.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LayerMeta {
    pub diff_id: Digest,
    /// Bytes on disk.
    pub bytes: u64,
    pub inodes: u64,
    /// Hash over names, types, sizes, modes, owners and times, to find damage after a power cut.
    pub tree: String,
}

/// Unpacks one layer into the empty directory `target`, with `lower`, the trees of the layers below, top first.
pub fn unpack(
    blob: impl Read + Send,
    diff_id: &Digest,
    target: &Path,
    lower: &[PathBuf],
    limits: &Limits,
) -> Result<LayerMeta> {
    let place = Place {
        target,
        form: Form::Stacked,
        limits,
        memory: &Arc::default(),
    };
    let mut tree = apply(blob, diff_id, place)?;
    tree.settle(lower)?;
    tree.meta()
}

/// The half of [`unpack`] that needs no other layer. The diff ID is verified.
pub fn apply(blob: impl Read + Send, diff_id: &Digest, place: Place<'_>) -> Result<Tree> {
    let tree = Tree::open(diff_id, place)?;
    let (_, plain) = verify::decompress(blob, place.memory).map_err(|e| tar::stream("layer", e))?;
    ahead::read_ahead(plain, |plain| untar(plain, tree, diff_id, place.limits))
}

fn untar(plain: &mut dyn Read, mut tree: Tree, diff_id: &Digest, limits: &Limits) -> Result<Tree> {
    let mut reader = tar::Reader::new(verify::Metered::new(plain, limits.bytes), limits.name);
    let mut entries = 0;
    while let Some(entry) = reader.next_entry()? {
        entries += 1;
        if entries > limits.entries {
            let problem = format!("is one entry too many: a layer has {} at most", limits.entries);
            return Err(Error::invalid(entry.name(), problem));
        }
        tree.apply(&entry, &mut reader)?;
    }
    reader.drain()?;
    tree.applied();
    let got = reader.into_inner().digest();
    if got != *diff_id {
        return Err(Error::Digest {
            object: "layer".into(),
            want: diff_id.to_string(),
            got: got.to_string(),
        });
    }
    Ok(tree)
}

/// Opens `path` below `root` as if `root` were `/`. Without `links`, a symbolic link anywhere is an error (ELOOP).
pub(crate) fn confined(root: BorrowedFd<'_>, path: &[u8], flags: OFlag, links: bool) -> nix::Result<OwnedFd> {
    let mut resolve = ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS;
    if !links {
        resolve |= ResolveFlag::RESOLVE_NO_SYMLINKS;
    }
    let path = if path.is_empty() { b"." } else { path };
    for _ in 0..128 {
        let how = OpenHow::new().flags(flags | OFlag::O_CLOEXEC).resolve(resolve);
        match openat2(root, OsStr::from_bytes(path), how) {
            // `..` raced with a rename somewhere on the machine.
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            other => return other,
        }
    }
    Err(Errno::EAGAIN)
}

/// `/a/./b/` becomes `a/b`, the root itself is empty; `None` if `..` leads above the root.
fn clean(path: &[u8]) -> Option<Vec<u8>> {
    let mut parts: Vec<&[u8]> = Vec::new();
    for part in path.split(|b| *b == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join(&b'/'))
}

fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|b| *b == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (b"", path),
    }
}

fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    if dir.is_empty() {
        name.to_vec()
    } else {
        [dir, b"/", name].concat()
    }
}

fn kind_of(stat: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT
}

fn timespec((seconds, nanos): (i64, u32)) -> TimeSpec {
    TimeSpec::new(seconds, i64::from(nanos))
}

/// What a name in a directory is, `None` if nothing.
fn look(parent: BorrowedFd<'_>, name: &[u8]) -> nix::Result<Option<FileStat>> {
    match fstatat(parent, OsStr::from_bytes(name), AtFlags::AT_SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::ENOENT) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Attributes that a layer may set. Overlay's own would let an image redirect look-ups within other layers; labels of
/// the security modules belong to the machine that built it.
fn may_set(name: &[u8]) -> bool {
    name == b"security.capability"
        || name.starts_with(b"system.posix_acl_")
        || name.starts_with(b"user.") && !name.starts_with(b"user.overlay.")
        || name.starts_with(b"trusted.") && !name.starts_with(b"trusted.overlay.")
}

/// A file system without such attributes, or a value it cannot hold, does not make an image unusable.
fn tolerate(set: nix::Result<()>) -> nix::Result<()> {
    match set {
        Err(Errno::ENOTSUP | Errno::EPERM | Errno::EINVAL) => Ok(()),
        other => other,
    }
}
