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

pub mod tar;
pub mod verify;
pub mod whiteout;

#[cfg(test)]
pub(crate) mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, openat, openat2, readlinkat};
use nix::sys::stat::{
    FchmodatFlags, FileStat, Mode, SFlag, UtimensatFlags, fchmod, fchmodat, fstat, fstatat, futimens, makedev, mkdirat,
    mknodat, utimensat,
};
use nix::sys::time::TimeSpec;
use nix::unistd::{Gid, LinkatFlags, Uid, UnlinkatFlags, fchown, fchownat, linkat, symlinkat, unlinkat};
use oci_spec::image::Digest;
use serde::{Deserialize, Serialize};

use self::tar::{Entry, Kind, printable};
use self::whiteout::{Mark, is_whiteout, make_opaque, make_whiteout, mark};
use super::content::{Error, Result};
use super::{mounts, trash, xattr};

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
            depth: 1024,
            bytes: 128 << 30,
        }
    }
}

/// Bytes of paths that may be remembered while a layer is unpacked.
const MEMORY: usize = 128 << 20;
/// Symbolic links followed while directories are made, as the kernel's own bound.
const LINKS: usize = 40;

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
    blob: impl Read,
    diff_id: &Digest,
    target: &Path,
    lower: &[PathBuf],
    limits: &Limits,
) -> Result<LayerMeta> {
    let mut tree = apply(blob, diff_id, target, limits)?;
    tree.settle(lower)?;
    tree.meta()
}

/// The half of [`unpack`] that needs no other layer. The diff ID is verified.
pub fn apply(blob: impl Read, diff_id: &Digest, target: &Path, limits: &Limits) -> Result<Tree> {
    let mut tree = Tree::open(target, diff_id, limits)?;
    let (_, plain) = verify::decompress(blob).map_err(|e| tar::stream("layer", e))?;
    let mut reader = tar::Reader::new(verify::Metered::new(plain, limits.bytes), limits.name);
    let mut entries = 0;
    while let Some(entry) = reader.next()? {
        entries += 1;
        if entries > limits.entries {
            return Err(Error::invalid(
                "layer",
                format!("has more than {} entries", limits.entries),
            ));
        }
        tree.apply(&entry, &mut reader)?;
    }
    reader.drain()?;
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

/// A layer's tree in the making.
#[derive(Debug)]
pub struct Tree {
    root: OwnedFd,
    /// The directory `root` lies in: a place for what is being removed.
    aside: OwnedFd,
    diff_id: Digest,
    limits: Limits,
    /// Last parent used.
    cached: Option<(Vec<u8>, Arc<OwnedFd>)>,
    /// Directories with an entry of their own; times are set when nothing is added to them any more.
    times: HashMap<Vec<u8>, (i64, u32)>,
    /// Real paths of directories made because something lies in them.
    implicit: BTreeSet<Vec<u8>>,
    /// Hard links to files that this layer does not have: path to target.
    borrowed: BTreeMap<Vec<u8>, Vec<u8>>,
    opaque: bool,
    remembered: usize,
    buffer: Vec<u8>,
}

impl Tree {
    fn open(target: &Path, diff_id: &Digest, limits: &Limits) -> Result<Tree> {
        let open = |path: &Path| {
            let fd = nix::fcntl::open(
                path,
                OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC,
                Mode::empty(),
            );
            fd.map_err(Error::io("open", path.display()))
        };
        let aside = open(target.parent().unwrap_or(Path::new("/")))?;
        let root = open(target)?;
        fchmod(&root, Mode::from_bits_truncate(0o755)).map_err(Error::io("set the mode of", target.display()))?;
        Ok(Tree {
            root,
            aside,
            diff_id: diff_id.clone(),
            limits: limits.clone(),
            cached: None,
            times: HashMap::new(),
            implicit: BTreeSet::new(),
            borrowed: BTreeMap::new(),
            opaque: false,
            remembered: 0,
            buffer: vec![0; 128 << 10],
        })
    }

    /// Hash and size of the settled tree.
    pub fn meta(&self) -> Result<LayerMeta> {
        let (tree, usage) = verify::tree(self.root.as_fd())?;
        Ok(LayerMeta {
            diff_id: self.diff_id.clone(),
            bytes: usage.bytes,
            inodes: usage.inodes,
            tree,
        })
    }

    fn remember(&mut self, bytes: usize) -> Result<()> {
        self.remembered += bytes + 64;
        if self.remembered > MEMORY {
            return Err(Error::TooBig {
                object: "the layer's list of directories".into(),
                limit: MEMORY as u64,
            });
        }
        Ok(())
    }

    fn apply(&mut self, entry: &Entry, data: &mut dyn Read) -> Result<()> {
        let shown = entry.name();
        let path = clean(&entry.path).ok_or_else(|| Error::invalid(&shown, "leads out of the layer by `..`"))?;
        if path.iter().filter(|b| **b == b'/').count() >= self.limits.depth {
            return Err(Error::invalid(
                &shown,
                format!("lies deeper than {} directories", self.limits.depth),
            ));
        }
        let (dir, name) = split(&path);
        if name.is_empty() {
            return Ok(()); // the root itself: overlay takes the upper directory's metadata
        }
        let marked = dir.split(|b| *b == b'/').map(mark).find(|m| *m != Mark::None);
        match (marked, mark(name)) {
            (Some(Mark::Ignored), _) | (None, Mark::Ignored) => Ok(()),
            (Some(_), _) | (None, Mark::Malformed) => Err(Error::invalid(&shown, "is not a valid whiteout")),
            (None, Mark::None) => self.make(entry, &path, dir, name, data),
            (None, Mark::Opaque) if dir.is_empty() => {
                self.opaque = true;
                Ok(())
            }
            (None, Mark::Opaque) => {
                let parent = self.parent(dir, &shown)?;
                make_opaque(parent.as_fd()).map_err(Error::io("mark as opaque the directory of", &shown))
            }
            (None, Mark::Whiteout(gone)) => self.whiteout(dir, gone, &shown),
        }
    }

    /// A whiteout speaks of the layers below only: what this layer has under that name stays.
    fn whiteout(&mut self, dir: &[u8], gone: &[u8], shown: &str) -> Result<()> {
        let parent = self.parent(dir, shown)?;
        let done = match look(parent.as_fd(), gone).map_err(Error::io("stat", shown))? {
            None => make_whiteout(parent.as_fd(), gone),
            Some(stat) if kind_of(&stat) == SFlag::S_IFDIR => {
                let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
                self.implicit.remove(&join(dir, gone));
                openat(&*parent, OsStr::from_bytes(gone), flags, Mode::empty()).and_then(|d| make_opaque(d.as_fd()))
            }
            Some(_) => Ok(()),
        };
        done.map_err(Error::io("make the whiteout", shown))
    }

    // ---- making one member ----

    fn make(&mut self, entry: &Entry, path: &[u8], dir: &[u8], name: &[u8], data: &mut dyn Read) -> Result<()> {
        let shown = entry.name();
        let parent = self.parent(dir, &shown)?;
        let at = parent.as_fd();
        if !self.borrowed.is_empty() {
            self.borrowed.remove(path);
        }
        match entry.kind {
            Kind::Directory => return self.directory(entry, at, path, name, &shown),
            Kind::HardLink => return self.hard_link(entry, at, path, name, &shown),
            _ => {}
        }
        let failed = |e: Errno| Error::io("create", &shown)(e);
        if entry.kind == Kind::File {
            let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            let os = OsStr::from_bytes(name);
            let fd = match openat(at, os, flags, Mode::S_IRUSR | Mode::S_IWUSR) {
                Err(Errno::EEXIST) => {
                    self.clear(at, path, name, &shown)?;
                    openat(at, os, flags, Mode::S_IRUSR | Mode::S_IWUSR).map_err(failed)?
                }
                other => other.map_err(failed)?,
            };
            return fill(File::from(fd), entry, data, &mut self.buffer, &shown);
        }
        self.clear(at, path, name, &shown)?;
        self.special(entry, at, name, &shown)
    }

    fn directory(&mut self, entry: &Entry, at: BorrowedFd<'_>, path: &[u8], name: &[u8], shown: &str) -> Result<()> {
        let os = OsStr::from_bytes(name);
        let mut opaque = false;
        match mkdirat(at, os, Mode::S_IRWXU) {
            Err(Errno::EEXIST) => {
                let have = look(at, name).map_err(Error::io("stat", shown))?;
                if !have.is_some_and(|h| kind_of(&h) == SFlag::S_IFDIR) {
                    // `.wh.d` and then `d`: a new directory, without what was below.
                    opaque = have.is_some_and(|h| is_whiteout(&h));
                    self.clear(at, path, name, shown)?;
                    mkdirat(at, os, Mode::S_IRWXU).map_err(Error::io("create", shown))?;
                }
            }
            other => other.map_err(Error::io("create", shown))?,
        }
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let fd = openat(at, os, flags, Mode::empty()).map_err(Error::io("open", shown))?;
        if opaque {
            make_opaque(fd.as_fd()).map_err(Error::io("mark as opaque", shown))?;
        }
        dress(fd.as_fd(), entry).map_err(Error::io("set the metadata of", shown))?;
        self.implicit.remove(path);
        self.remember(path.len())?;
        self.times.insert(path.to_vec(), entry.mtime);
        Ok(())
    }

    fn special(&mut self, entry: &Entry, at: BorrowedFd<'_>, name: &[u8], shown: &str) -> Result<()> {
        let os = OsStr::from_bytes(name);
        let mode = Mode::from_bits_truncate(entry.mode);
        let (major, minor) = entry.device;
        let (kind, device) = match entry.kind {
            Kind::Char => (SFlag::S_IFCHR, makedev(u64::from(major), u64::from(minor))),
            Kind::Block => (SFlag::S_IFBLK, makedev(u64::from(major), u64::from(minor))),
            _ => (SFlag::S_IFIFO, 0),
        };
        let symlink = entry.kind == Kind::Symlink;
        let make = || {
            if symlink {
                symlinkat(OsStr::from_bytes(&entry.link), at, os)?;
            } else {
                mknodat(at, os, kind, Mode::empty(), device)?;
            }
            let (uid, gid) = (Uid::from_raw(entry.uid), Gid::from_raw(entry.gid));
            fchownat(at, os, Some(uid), Some(gid), AtFlags::AT_SYMLINK_NOFOLLOW)?;
            for (key, value) in entry.xattrs.iter().filter(|(key, _)| may_set(key)) {
                tolerate(CString::new(&key[..]).map_err(|_| Errno::EINVAL).and_then(|k| {
                    // user.* is for files and directories only (xattr(7)).
                    if key.starts_with(b"user.") {
                        Ok(())
                    } else {
                        xattr::set_at(at, name, &k, value)
                    }
                }))?;
            }
            if !symlink {
                // Just made by us, in a directory nobody else reaches: it is not a link.
                fchmodat(at, os, mode, FchmodatFlags::FollowSymlink)?;
            }
            let time = timespec(entry.mtime);
            utimensat(at, os, &time, &time, UtimensatFlags::NoFollowSymlink)
        };
        make().map_err(Error::io("create", shown))
    }

    fn hard_link(&mut self, entry: &Entry, at: BorrowedFd<'_>, path: &[u8], name: &[u8], shown: &str) -> Result<()> {
        let aim = printable(&entry.link);
        let target = clean(&entry.link)
            .filter(|t| !t.is_empty())
            .ok_or_else(|| Error::invalid(shown, format!("is a hard link to {aim}, which is outside of the layer")))?;
        let (dir, target_name) = split(&target);
        let found = match confined(self.root.as_fd(), dir, OFlag::O_PATH | OFlag::O_DIRECTORY, true) {
            Ok(from) => look(from.as_fd(), target_name)
                .map_err(Error::io("stat", &aim))?
                .map(|stat| (from, stat)),
            Err(Errno::ENOENT | Errno::ENOTDIR) => None,
            Err(e) => return Err(Error::io("look for", &aim)(e)),
        };
        match found {
            Some((_, stat)) if kind_of(&stat) == SFlag::S_IFDIR => {
                Err(Error::invalid(shown, format!("is a hard link to the directory {aim}")))
            }
            Some((from, stat)) if !is_whiteout(&stat) => {
                let have = look(at, name).map_err(Error::io("stat", shown))?;
                if have.is_some_and(|h| (h.st_ino, h.st_dev) == (stat.st_ino, stat.st_dev)) {
                    return Ok(()); // itself, or linked before
                }
                self.clear(at, path, name, shown)?;
                linkat(
                    &from,
                    OsStr::from_bytes(target_name),
                    at,
                    OsStr::from_bytes(name),
                    LinkatFlags::empty(),
                )
                .map_err(Error::io("link", shown))
            }
            // A file of a layer below, which may not be here yet.
            _ => {
                self.clear(at, path, name, shown)?;
                let target = self.borrowed.get(&target).cloned().unwrap_or(target);
                self.remember(path.len() + target.len())?;
                self.borrowed.insert(path.to_vec(), target);
                Ok(())
            }
        }
    }

    /// Makes room for a new thing under a name.
    fn clear(&mut self, at: BorrowedFd<'_>, path: &[u8], name: &[u8], shown: &str) -> Result<()> {
        let Some(stat) = look(at, name).map_err(Error::io("stat", shown))? else {
            return Ok(());
        };
        // The cached parent may have led through what goes now.
        self.cached = None;
        if kind_of(&stat) != SFlag::S_IFDIR {
            return unlinkat(at, OsStr::from_bytes(name), UnlinkatFlags::NoRemoveDir)
                .map_err(Error::io("replace", shown));
        }
        let below = |p: &[u8]| p == path || p.starts_with(path) && p.get(path.len()) == Some(&b'/');
        self.implicit.retain(|p| !below(p));
        self.times.retain(|p, _| !below(p));
        self.borrowed.retain(|p, _| !below(p));
        trash::remove_tree(at, name, self.aside.as_fd())
    }

    // ---- directories ----

    /// Opens (O_PATH) a directory of the layer, making what is missing.
    fn parent(&mut self, dir: &[u8], shown: &str) -> Result<Arc<OwnedFd>> {
        if let Some((cached, fd)) = &self.cached
            && cached == dir
        {
            return Ok(fd.clone());
        }
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
        let fd = match confined(self.root.as_fd(), dir, flags, true) {
            Ok(fd) => fd,
            Err(Errno::ENOENT | Errno::ENOTDIR) => self.make_directories(dir, shown)?,
            Err(e) => return Err(Error::io("open the directory of", shown)(e)),
        };
        let fd = Arc::new(fd);
        self.cached = Some((dir.to_vec(), fd.clone()));
        Ok(fd)
    }

    /// Walks `dir` name by name, following links within the root (dangling ones too), and makes what is not there.
    fn make_directories(&mut self, dir: &[u8], shown: &str) -> Result<OwnedFd> {
        let parts = |path: &[u8]| path.split(|b| *b == b'/').map(<[u8]>::to_vec).collect::<Vec<_>>();
        let mut todo: VecDeque<Vec<u8>> = parts(dir).into();
        // Where we are: real directories only, so `..` is dropping the last one.
        let mut at: Vec<Vec<u8>> = Vec::new();
        let mut links = 0;
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
        let open = |root: BorrowedFd<'_>, at: &[Vec<u8>]| {
            confined(root, &at.join(&b'/'), flags, false).map_err(Error::io("open the directory of", shown))
        };
        while let Some(part) = todo.pop_front() {
            match &part[..] {
                b"" | b"." => continue,
                b".." => {
                    at.pop();
                    continue;
                }
                _ => {}
            }
            let fd = open(self.root.as_fd(), &at)?;
            let have = look(fd.as_fd(), &part).map_err(Error::io("stat the directory of", shown))?;
            let os = OsStr::from_bytes(&part);
            match have.as_ref().map(kind_of) {
                Some(SFlag::S_IFDIR) => at.push(part),
                Some(SFlag::S_IFLNK) => {
                    links += 1;
                    if links > LINKS {
                        return Err(Error::invalid(shown, "its directory is behind too many links"));
                    }
                    let target = readlinkat(&fd, os).map_err(Error::io("read a link on the way to", shown))?;
                    if target.as_bytes().starts_with(b"/") {
                        at.clear();
                    }
                    for part in parts(target.as_bytes()).into_iter().rev() {
                        todo.push_front(part);
                    }
                }
                None => {
                    make_directory(fd.as_fd(), os).map_err(Error::io("create the directory of", shown))?;
                    at.push(part);
                    self.imply(&at)?;
                }
                Some(_) if have.as_ref().is_some_and(is_whiteout) => {
                    let remade = unlinkat(&fd, os, UnlinkatFlags::NoRemoveDir)
                        .and_then(|()| make_directory(fd.as_fd(), os))
                        .and_then(|()| openat(&fd, os, flags | OFlag::O_CLOEXEC, Mode::empty()))
                        .and_then(|made| make_opaque(made.as_fd()));
                    remade.map_err(Error::io("create the directory of", shown))?;
                    at.push(part);
                }
                Some(_) => {
                    let file = printable(&at.join(&b'/'));
                    return Err(Error::invalid(shown, format!("lies below a file of {file}")));
                }
            }
            if at.len() > self.limits.depth {
                return Err(Error::invalid(
                    shown,
                    format!("lies deeper than {} directories", self.limits.depth),
                ));
            }
        }
        open(self.root.as_fd(), &at)
    }

    fn imply(&mut self, at: &[Vec<u8>]) -> Result<()> {
        let path = at.join(&b'/');
        self.remember(path.len())?;
        self.implicit.insert(path);
        Ok(())
    }

    // ---- what depends on the layers below ----

    /// Finishes the tree with the trees of the layers below, top first, each of them settled.
    pub fn settle(&mut self, lower: &[PathBuf]) -> Result<()> {
        if !(self.borrowed.is_empty() && self.implicit.is_empty() && !self.opaque) {
            let below = if lower.is_empty() {
                None
            } else {
                Some(mounts::detached(lower)?)
            };
            let mut copied = BTreeSet::new();
            for (path, target) in std::mem::take(&mut self.borrowed) {
                self.borrow(below.as_ref(), &path, &target, &mut copied)?;
            }
            if let Some(below) = &below
                && self.opaque
            {
                self.hide_all(below)?;
            }
            self.adopt_metadata(below.as_ref())?;
        }
        self.set_times()
    }

    /// Copies a file up, then links to the copy, as a container would have done. `copied` are the targets so far.
    fn borrow(
        &mut self,
        below: Option<&OwnedFd>,
        path: &[u8],
        target: &[u8],
        copied: &mut BTreeSet<Vec<u8>>,
    ) -> Result<()> {
        let (shown, aim) = (printable(path), printable(target));
        let absent = || {
            Error::invalid(
                &shown,
                format!("is a hard link to {aim}, which neither this layer nor one below has"),
            )
        };
        let below = below.ok_or_else(absent)?.as_fd();
        let (target_dir, target_name) = split(target);
        let (from, real) = match confined(below, target_dir, OFlag::O_PATH | OFlag::O_DIRECTORY, false) {
            Ok(fd) => (fd, true),
            // Behind a link: making its directory here would hide that link.
            Err(Errno::ELOOP) => {
                let fd = confined(below, target_dir, OFlag::O_PATH | OFlag::O_DIRECTORY, true);
                (fd.map_err(|_| absent())?, false)
            }
            Err(_) => return Err(absent()),
        };
        let stat = look(from.as_fd(), target_name)
            .map_err(Error::io("stat", &aim))?
            .ok_or_else(absent)?;
        if kind_of(&stat) == SFlag::S_IFDIR {
            return Err(Error::invalid(&shown, format!("is a hard link to the directory {aim}")));
        }
        if is_whiteout(&stat) {
            return Err(absent());
        }
        let (dir, name) = split(path);
        let to = self.parent(dir, &shown)?;
        if real {
            let beside = self.parent(target_dir, &aim)?;
            // What else has that name here came after the link: it is not what the link meant.
            if look(beside.as_fd(), target_name)
                .map_err(Error::io("stat", &aim))?
                .is_none()
            {
                copy_up(from.as_fd(), target_name, &stat, beside.as_fd(), target_name)
                    .map_err(Error::io("copy up", &aim))?;
                copied.insert(target.to_vec());
            }
            if copied.contains(target) {
                let (from, to_name) = (OsStr::from_bytes(target_name), OsStr::from_bytes(name));
                return linkat(&*beside, from, &*to, to_name, LinkatFlags::empty()).map_err(Error::io("link", &shown));
            }
        }
        copy_up(from.as_fd(), target_name, &stat, to.as_fd(), name).map_err(Error::io("copy", &aim))
    }

    /// Overlay merges roots whatever their marks, so an opaque root hides each name below on its own.
    fn hide_all(&mut self, below: &OwnedFd) -> Result<()> {
        let failed = || Error::io::<Errno>("hide the layers below at", "the root of the layer");
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        let mut dir = confined(below.as_fd(), b".", flags, false)
            .and_then(nix::dir::Dir::from_fd)
            .map_err(failed())?;
        for entry in dir.iter() {
            let entry = entry.map_err(failed())?;
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            let root = self.root.as_fd();
            match look(root, name).map_err(failed())? {
                None => make_whiteout(root, name).map_err(failed())?,
                Some(stat) if kind_of(&stat) == SFlag::S_IFDIR => {
                    let made = confined(root, name, OFlag::O_PATH | OFlag::O_DIRECTORY, false);
                    made.and_then(|d| make_opaque(d.as_fd())).map_err(failed())?;
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// A directory that the layer uses but does not list keeps the metadata that it has below.
    fn adopt_metadata(&mut self, below: Option<&OwnedFd>) -> Result<()> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        for path in std::mem::take(&mut self.implicit) {
            let shown = printable(&path);
            let failed = Error::io::<Errno>("set the metadata of", &shown);
            let here = match confined(self.root.as_fd(), &path, flags, false) {
                Ok(fd) => fd,
                Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => continue,
                Err(e) => return Err(failed(e)),
            };
            let there = below.and_then(|b| confined(b.as_fd(), &path, OFlag::O_PATH | OFlag::O_DIRECTORY, false).ok());
            let mut time = (0, 0);
            if let Some(there) = there {
                time = like(here.as_fd(), there.as_fd()).map_err(failed)?;
            }
            self.times.insert(path, time);
        }
        Ok(())
    }

    fn set_times(&mut self) -> Result<()> {
        for (path, time) in std::mem::take(&mut self.times) {
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW;
            let fd = match confined(self.root.as_fd(), &path, flags, true) {
                Ok(fd) => fd,
                // Replaced since.
                Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => continue,
                Err(e) => return Err(Error::io("open", printable(&path))(e)),
            };
            let time = timespec(time);
            futimens(&fd, &time, &time).map_err(Error::io("set the times of", printable(&path)))?;
        }
        Ok(())
    }
}

fn make_directory(parent: BorrowedFd<'_>, name: &OsStr) -> nix::Result<()> {
    mkdirat(parent, name, Mode::from_bits_truncate(0o755))?;
    fchownat(
        parent,
        name,
        Some(Uid::from_raw(0)),
        Some(Gid::from_raw(0)),
        AtFlags::AT_SYMLINK_NOFOLLOW,
    )?;
    // The umask is the daemon's, not the image's.
    fchmodat(
        parent,
        name,
        Mode::from_bits_truncate(0o755),
        FchmodatFlags::FollowSymlink,
    )
}

/// Writes a file's data, its holes left out, then its metadata.
fn fill(mut file: File, entry: &Entry, data: &mut dyn Read, buffer: &mut [u8], shown: &str) -> Result<()> {
    match &entry.pieces {
        None => copy(data, &mut file, buffer, shown)?,
        Some(pieces) => {
            for (offset, length) in pieces {
                file.seek(SeekFrom::Start(*offset))
                    .map_err(Error::io("seek in", shown))?;
                copy(&mut (&mut *data).take(*length), &mut file, buffer, shown)?;
            }
            file.set_len(entry.size).map_err(Error::io("set the size of", shown))?;
        }
    }
    dress(file.as_fd(), entry).map_err(Error::io("set the metadata of", shown))?;
    let time = timespec(entry.mtime);
    futimens(&file, &time, &time).map_err(Error::io("set the times of", shown))
}

/// Like `io::copy`, but keeps errors of reading and of writing apart.
fn copy(from: &mut dyn Read, to: &mut File, buffer: &mut [u8], shown: &str) -> Result<()> {
    loop {
        match from.read(buffer) {
            Ok(0) => return Ok(()),
            Ok(n) => to.write_all(&buffer[..n]).map_err(Error::io("write", shown))?,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(tar::stream(shown, e)),
        }
    }
}

/// Owner, mode, attributes; in this order, since a change of owner clears setuid bits and capabilities.
fn dress(fd: BorrowedFd<'_>, entry: &Entry) -> nix::Result<()> {
    fchown(fd, Some(Uid::from_raw(entry.uid)), Some(Gid::from_raw(entry.gid)))?;
    fchmod(fd, Mode::from_bits_truncate(entry.mode))?;
    for (key, value) in entry.xattrs.iter().filter(|(key, _)| may_set(key)) {
        let key = CString::new(&key[..]).map_err(|_| Errno::EINVAL)?;
        tolerate(xattr::set(fd, &key, value))?;
    }
    Ok(())
}

/// A file system without such attributes, or a value it cannot hold, does not make an image unusable.
fn tolerate(set: nix::Result<()>) -> nix::Result<()> {
    match set {
        Err(Errno::ENOTSUP | Errno::EPERM | Errno::EINVAL) => Ok(()),
        other => other,
    }
}

/// Gives `here` owner, mode and attributes of `there`; answers its modification time.
fn like(here: BorrowedFd<'_>, there: BorrowedFd<'_>) -> nix::Result<(i64, u32)> {
    let stat = fstat(there)?;
    fchown(here, Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid)))?;
    fchmod(here, Mode::from_bits_truncate(stat.st_mode & 0o7777))?;
    for (key, value) in xattr::all(there)? {
        if may_set(key.as_bytes()) {
            tolerate(xattr::set(here, &key, &value))?;
        }
    }
    Ok((stat.st_mtime, stat.st_mtime_nsec as u32))
}

/// Copies one non-directory of the layers below with all its metadata.
fn copy_up(from: BorrowedFd<'_>, name: &[u8], stat: &FileStat, to: BorrowedFd<'_>, new: &[u8]) -> io::Result<()> {
    let (name, new_os) = (OsStr::from_bytes(name), OsStr::from_bytes(new));
    let time = TimeSpec::new(stat.st_mtime, stat.st_mtime_nsec);
    let owner = (Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid)));
    match kind_of(stat) {
        SFlag::S_IFREG => {
            let flags = OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            let source = openat(from, name, flags | OFlag::O_RDONLY | OFlag::O_NONBLOCK, Mode::empty())?;
            let create = flags | OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL;
            let mut copy = File::from(openat(to, new_os, create, Mode::S_IRUSR | Mode::S_IWUSR)?);
            let mut source = File::from(source);
            io::copy(&mut source, &mut copy)?;
            like(copy.as_fd(), source.as_fd())?;
            futimens(&copy, &time, &time)?;
        }
        SFlag::S_IFLNK => {
            symlinkat(&*readlinkat(from, name)?, to, new_os)?;
            fchownat(to, new_os, owner.0, owner.1, AtFlags::AT_SYMLINK_NOFOLLOW)?;
            utimensat(to, new_os, &time, &time, UtimensatFlags::NoFollowSymlink)?;
        }
        kind => {
            mknodat(to, new_os, kind, Mode::empty(), stat.st_rdev)?;
            fchownat(to, new_os, owner.0, owner.1, AtFlags::AT_SYMLINK_NOFOLLOW)?;
            fchmodat(
                to,
                new_os,
                Mode::from_bits_truncate(stat.st_mode & 0o7777),
                FchmodatFlags::FollowSymlink,
            )?;
            utimensat(to, new_os, &time, &time, UtimensatFlags::NoFollowSymlink)?;
        }
    }
    Ok(())
}
