//! A layer's members become files.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat, readlinkat};
use nix::sys::stat::{
    FchmodatFlags, FileStat, Mode, SFlag, UtimensatFlags, fchmod, fchmodat, futimens, makedev, mkdirat, mknodat,
    utimensat,
};
use nix::unistd::{Gid, LinkatFlags, Uid, UnlinkatFlags, fchown, fchownat, linkat, symlinkat, unlinkat};
use oci_spec::image::Digest;

use super::super::content::{Error, Result, Usage};
use super::super::{trash, xattr};
use super::memory::Memory;
use super::spool::Spool;
use super::tar::{self, Entry, Kind, printable};
use super::whiteout::{Mark, OPAQUE, is_whiteout, make_opaque, make_whiteout, mark, marker};
use super::{
    Form, LayerMeta, Limits, Place, clean, confined, join, kind_of, look, may_set, split, timespec, tolerate, verify,
};

/// Symbolic links followed while directories are made, as the kernel's own bound.
const LINKS: usize = 40;
const LISTED: OFlag = OFlag::O_RDONLY
    .union(OFlag::O_DIRECTORY)
    .union(OFlag::O_NOFOLLOW)
    .union(OFlag::O_CLOEXEC);

/// A layer's tree in the making.
#[derive(Debug)]
pub struct Tree {
    pub(super) root: OwnedFd,
    /// The directory `root` lies in: a place for what is being removed.
    pub(super) aside: OwnedFd,
    diff_id: Digest,
    limits: Limits,
    /// Last parent used.
    pub(super) cached: Option<(Vec<u8>, Arc<OwnedFd>)>,
    /// Directories with an entry of their own; times are set when nothing is added to them any more.
    pub(super) times: Spool,
    /// Marks that hide one name below; those that hide nothing go again.
    pub(super) whiteouts: Spool,
    /// Real paths of directories made because something lies in them.
    pub(super) implicit: BTreeSet<Vec<u8>>,
    /// Hard links to files that this layer does not have: path to target.
    pub(super) borrowed: BTreeMap<Vec<u8>, Vec<u8>>,
    pub(super) opaque: bool,
    pub(super) form: Form,
    /// What the layer itself takes, if its tree holds more.
    pub(super) own: Option<Usage>,
    memory: Arc<Memory>,
    buffer: Vec<u8>,
}

impl Tree {
    pub(super) fn open(diff_id: &Digest, place: Place<'_>) -> Result<Tree> {
        let Place {
            target,
            form,
            limits,
            memory,
        } = place;
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
            times: Spool::default(),
            whiteouts: Spool::default(),
            implicit: BTreeSet::new(),
            borrowed: BTreeMap::new(),
            opaque: false,
            form,
            own: None,
            memory: memory.clone(),
            buffer: vec![0; 128 << 10],
        })
    }

    /// Hash and size of the settled tree.
    pub fn meta(&self) -> Result<LayerMeta> {
        let (tree, all) = verify::tree(self.root.as_fd())?;
        let usage = self.own.unwrap_or(all);
        Ok(LayerMeta {
            diff_id: self.diff_id.clone(),
            bytes: usage.bytes,
            inodes: usage.inodes,
            tree,
        })
    }

    /// Nothing is written any more until the tree is settled.
    pub(super) fn applied(&mut self) {
        self.buffer = Vec::new();
        self.cached = None;
    }

    pub(super) fn time(&mut self, path: &[u8], time: (i64, u32)) -> Result<()> {
        let kept = self.times.push(self.aside.as_fd(), path, time);
        kept.map_err(Error::io("remember the time of", printable(path)))
    }

    pub(super) fn apply(&mut self, entry: &Entry, data: &mut dyn Read) -> Result<()> {
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
                self.mark_opaque(parent.as_fd(), dir)
                    .map_err(Error::io("mark as opaque the directory of", &shown))
            }
            (None, Mark::Whiteout(gone)) => self.whiteout(dir, gone, &shown),
        }
    }

    /// A whiteout speaks of the layers below only: what this layer has under that name stays.
    fn whiteout(&mut self, dir: &[u8], gone: &[u8], shown: &str) -> Result<()> {
        let parent = self.parent(dir, shown)?;
        let path = join(dir, gone);
        if self.borrowed.contains_key(&path) {
            return Ok(());
        }
        let done = match look(parent.as_fd(), gone).map_err(Error::io("stat", shown))? {
            None => self.mark_gone(parent.as_fd(), dir, gone),
            Some(stat) if kind_of(&stat) == SFlag::S_IFDIR => {
                let inner = openat(&*parent, OsStr::from_bytes(gone), LISTED, Mode::empty());
                let inner = inner.map_err(Error::io("open", shown))?;
                let only_marks = self.only_marks(inner.as_fd(), &path);
                if only_marks.map_err(Error::io("list", shown))? {
                    self.clear(parent.as_fd(), &path, gone, shown)?;
                    self.mark_gone(parent.as_fd(), dir, gone)
                } else {
                    if self.implicit.remove(&path) {
                        self.time(&path, (0, 0))?;
                    }
                    self.mark_opaque(inner.as_fd(), &path)
                }
            }
            Some(_) => Ok(()),
        };
        done.map_err(Error::io("make the whiteout", shown))
    }

    /// Whether a directory is here for marks in it alone, and this layer has nothing at or below its path.
    fn only_marks(&self, dir: BorrowedFd<'_>, path: &[u8]) -> nix::Result<bool> {
        let below = [path, b"/"].concat()..[path, b"0"].concat();
        if !self.implicit.contains(path) || self.borrowed.range(below).next().is_some() {
            return Ok(false);
        }
        for entry in Dir::from_fd(openat(dir, ".", LISTED, Mode::empty())?)?.iter() {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if matches!(name, b"." | b"..") || self.form == Form::Whole && mark(name) != Mark::None {
                continue;
            }
            let Some(stat) = look(dir, name)? else { continue };
            let inner = match kind_of(&stat) {
                SFlag::S_IFDIR => openat(dir, OsStr::from_bytes(name), LISTED, Mode::empty())?,
                _ if is_whiteout(&stat) => continue,
                _ => return Ok(false),
            };
            if !self.only_marks(inner.as_fd(), &join(path, name))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Notes that the layers below have nothing of this name.
    fn mark_gone(&mut self, parent: BorrowedFd<'_>, dir: &[u8], gone: &[u8]) -> io::Result<()> {
        if self.form == Form::Whole {
            return self.mark_by_name(parent, dir, &marker(gone));
        }
        self.whiteouts.push(self.aside.as_fd(), &join(dir, gone), (0, 0))?;
        Ok(make_whiteout(parent, gone)?)
    }

    /// Notes that the layers below have nothing in this directory.
    pub(super) fn mark_opaque(&mut self, at: BorrowedFd<'_>, dir: &[u8]) -> io::Result<()> {
        match self.form {
            Form::Whole => self.mark_by_name(at, dir, OPAQUE),
            Form::Stacked => Ok(make_opaque(at)?),
        }
    }

    fn mark_by_name(&mut self, at: BorrowedFd<'_>, dir: &[u8], name: &[u8]) -> io::Result<()> {
        self.whiteouts.push(self.aside.as_fd(), &join(dir, name), (0, 0))?;
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        openat(at, OsStr::from_bytes(name), flags, Mode::empty())?;
        Ok(())
    }

    /// Whether this layer says that those below have nothing of this name.
    pub(super) fn is_gone(&self, at: BorrowedFd<'_>, name: &[u8], have: Option<&FileStat>) -> nix::Result<bool> {
        match self.form {
            Form::Whole => Ok(have.is_none() && look(at, &marker(name))?.is_some()),
            Form::Stacked => Ok(have.is_some_and(is_whiteout)),
        }
    }

    // ---- making one member ----

    fn make(&mut self, entry: &Entry, path: &[u8], dir: &[u8], name: &[u8], data: &mut dyn Read) -> Result<()> {
        let shown = entry.name();
        let parent = self.parent(dir, &shown)?;
        let at = parent.as_fd();
        let linked = !self.borrowed.is_empty() && self.borrowed.remove(path).is_some();
        match entry.kind {
            Kind::Directory => return self.directory(entry, at, path, linked, &shown),
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

    /// In place of anything but a directory it is a new one, without what the layers below have there: of a whiteout,
    /// of a file that hid it, or of a link (`linked`) that would have.
    fn directory(&mut self, entry: &Entry, at: BorrowedFd<'_>, path: &[u8], linked: bool, shown: &str) -> Result<()> {
        let (_, name) = split(path);
        let os = OsStr::from_bytes(name);
        let gone = self.form == Form::Whole && self.is_gone(at, name, None).map_err(Error::io("stat", shown))?;
        let mut opaque = linked || gone;
        match mkdirat(at, os, Mode::S_IRWXU) {
            Err(Errno::EEXIST) => {
                let have = look(at, name).map_err(Error::io("stat", shown))?;
                let dir = have.is_some_and(|h| kind_of(&h) == SFlag::S_IFDIR);
                if dir {
                    opaque = false; // made after the mark, and marked itself then
                    undress(at, os).map_err(Error::io("clear the attributes of", shown))?;
                } else {
                    opaque = true;
                    self.clear(at, path, name, shown)?;
                    mkdirat(at, os, Mode::S_IRWXU).map_err(Error::io("create", shown))?;
                }
            }
            other => other.map_err(Error::io("create", shown))?,
        }
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let fd = openat(at, os, flags, Mode::empty()).map_err(Error::io("open", shown))?;
        if opaque {
            self.mark_opaque(fd.as_fd(), path)
                .map_err(Error::io("mark as opaque", shown))?;
        }
        dress(fd.as_fd(), entry).map_err(Error::io("set the metadata of", shown))?;
        self.implicit.remove(path);
        self.time(path, entry.mtime)
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
                let (from_name, to_name) = (OsStr::from_bytes(target_name), OsStr::from_bytes(name));
                match linkat(&from, from_name, at, to_name, LinkatFlags::empty()) {
                    // It was in the directory that has just made way for the link.
                    Err(Errno::ENOENT) => Err(Error::invalid(shown, format!("is a hard link to {aim} below it"))),
                    other => other.map_err(Error::io("link", shown)),
                }
            }
            // A file of a layer below, which may not be here yet.
            _ => {
                self.clear(at, path, name, shown)?;
                let target = self.borrowed.get(&target).cloned().unwrap_or(target);
                self.memory.remember(path.len() + target.len())?;
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
        self.forget(path);
        trash::remove_tree(at, name, self.aside.as_fd())
    }

    /// Drops what was to be done at and below a path. (Times of what is gone are left out at the end.)
    fn forget(&mut self, path: &[u8]) {
        let below = [path, b"/"].concat()..[path, b"0"].concat(); // `0` follows `/`
        self.implicit.remove(path);
        for gone in self.implicit.range(below.clone()).cloned().collect::<Vec<_>>() {
            self.implicit.remove(&gone);
        }
        for gone in self.borrowed.range(below).map(|(p, _)| p.clone()).collect::<Vec<_>>() {
            self.borrowed.remove(&gone);
        }
    }

    // ---- directories ----

    /// Opens (O_PATH) a directory of the layer, making what is missing.
    pub(super) fn parent(&mut self, dir: &[u8], shown: &str) -> Result<Arc<OwnedFd>> {
        if let Some((cached, fd)) = &self.cached
            && cached == dir
        {
            return Ok(fd.clone());
        }
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
        // Without links the path is as deep as it looks; behind one (ELOOP) the walk tells how deep it is.
        let fd = match confined(self.root.as_fd(), dir, flags, false) {
            Ok(fd) => fd,
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => self.make_directories(dir, shown)?,
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
            let gone = self.is_gone(fd.as_fd(), &part, have.as_ref());
            let gone = gone.map_err(Error::io("stat the directory of", shown))?;
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
                None if !gone => {
                    make_directory(fd.as_fd(), os).map_err(Error::io("create the directory of", shown))?;
                    at.push(part);
                    self.imply(&at)?;
                }
                _ if gone => {
                    let path = join(&at.join(&b'/'), &part);
                    self.remake(fd.as_fd(), os, &path)
                        .map_err(Error::io("create the directory of", shown))?;
                    at.push(part);
                    // Nothing below it counts, so its metadata is final but for the time.
                    self.time(&path, (0, 0))?;
                }
                _ => {
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

    /// A directory in place of a whiteout.
    fn remake(&mut self, parent: BorrowedFd<'_>, name: &OsStr, path: &[u8]) -> io::Result<()> {
        if self.form == Form::Stacked {
            unlinkat(parent, name, UnlinkatFlags::NoRemoveDir)?;
        }
        make_directory(parent, name)?;
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let made = openat(parent, name, flags, Mode::empty())?;
        self.mark_opaque(made.as_fd(), path)
    }

    fn imply(&mut self, at: &[Vec<u8>]) -> Result<()> {
        let path = at.join(&b'/');
        self.memory.remember(path.len())?;
        self.implicit.insert(path);
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

/// The attributes of an earlier entry of this directory go: the last one tells all.
fn undress(parent: BorrowedFd<'_>, name: &OsStr) -> nix::Result<()> {
    let dir = openat(parent, name, LISTED, Mode::empty())?;
    for (key, _) in xattr::all(dir.as_fd())?
        .into_iter()
        .filter(|(key, _)| may_set(key.as_bytes()))
    {
        xattr::remove(dir.as_fd(), &key)?;
    }
    Ok(())
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
