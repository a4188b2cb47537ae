//! What a layer takes from those below it: files it links to, metadata of directories it does not list.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat, readlinkat};
use nix::sys::stat::{
    FchmodatFlags, FileStat, Mode, SFlag, UtimensatFlags, fchmod, fchmodat, fstat, futimens, mknodat, utimensat,
};
use nix::sys::time::TimeSpec;
use nix::unistd::{Gid, LinkatFlags, Uid, UnlinkatFlags, fchown, fchownat, linkat, symlinkat, unlinkat};

use super::super::content::{Error, Result};
use super::super::{mounts, trash, xattr};
use super::tar::printable;
use super::tree::Tree;
use super::whiteout::{Mark, OPAQUE, is_opaque, is_whiteout, make_opaque, make_whiteout, mark};
use super::{Form, confined, kind_of, look, may_set, split, timespec, tolerate, verify};

impl Tree {
    /// Finishes the tree with the trees of the layers below, top first, each of them settled.
    pub fn settle(&mut self, lower: &[PathBuf]) -> Result<()> {
        let stacked = self.form == Form::Stacked;
        let idle = self.borrowed.is_empty() && self.implicit.is_empty() && self.whiteouts.is_empty() && !self.opaque;
        if !(idle && (stacked || lower.is_empty())) {
            let below = match lower {
                [] => None,
                lower => Some(mounts::detached(lower)?),
            };
            let below = below.as_ref();
            let mut copied = BTreeMap::new();
            let links = std::mem::take(&mut self.borrowed);
            for (path, target) in &links {
                self.borrow(below, path, target, &links, &mut copied)?;
            }
            if stacked
                && let Some(below) = below
                && self.opaque
            {
                self.hide_all(below)?;
            }
            if stacked {
                self.drop_idle_whiteouts(below)?;
            }
            self.adopt_metadata(below)?;
            if !stacked {
                self.own = Some(verify::tree(self.root.as_fd())?.1);
                self.fill(below)?;
            }
        }
        self.set_times()
    }

    /// Copies a file up, then links to the copy, as a container would have done. `copied` says where the copy of each
    /// target is; so a target is copied once, however many links there are. A target that `links` names was replaced by
    /// a link after it was linked to: its own place is not free for the copy.
    fn borrow(
        &mut self,
        below: Option<&OwnedFd>,
        path: &[u8],
        target: &[u8],
        links: &BTreeMap<Vec<u8>, Vec<u8>>,
        copied: &mut BTreeMap<Vec<u8>, Vec<u8>>,
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
            Err(Errno::ENOENT | Errno::ENOTDIR) => return Err(absent()),
            Err(e) => return Err(Error::io("look for", &aim)(e)),
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
        if look(to.as_fd(), name).map_err(Error::io("stat", &shown))?.is_some() {
            return Ok(()); // replaced since, by another way to the same directory
        }
        if !copied.contains_key(target) {
            // Something else of that name here came after the link: it is not what the link meant.
            let shows = self
                .shows(target_dir)
                .map_err(Error::io("look at the directory of", &aim))?;
            let beside = if real && shows && !self.opaque && !links.contains_key(target) {
                Some(self.parent(target_dir, &aim)?)
            } else {
                None
            };
            let vacant = match &beside {
                Some(beside) => {
                    let have = look(beside.as_fd(), target_name).map_err(Error::io("stat", &aim))?;
                    let gone = self.is_gone(beside.as_fd(), target_name, have.as_ref());
                    have.is_none() && !gone.map_err(Error::io("stat", &aim))?
                }
                None => false,
            };
            let (place, copy_dir, copy_name) = match beside {
                Some(beside) if vacant => (target, beside, target_name),
                _ => (path, to.clone(), name),
            };
            copy_up(from.as_fd(), target_name, &stat, copy_dir.as_fd(), copy_name, None)
                .map_err(Error::io("copy up", &aim))?;
            copied.insert(target.to_vec(), place.to_vec());
        }
        match copied.get(target) {
            Some(copy) if copy != path => {
                let (copy_dir, copy_name) = split(copy);
                let from = self.parent(copy_dir, &shown)?;
                let (copy_name, name) = (OsStr::from_bytes(copy_name), OsStr::from_bytes(name));
                linkat(&*from, copy_name, &*to, name, LinkatFlags::empty()).map_err(Error::io("link", &shown))
            }
            _ => Ok(()),
        }
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

    /// A directory that the layer uses but does not list keeps the metadata that it has below. One that is neither
    /// below nor holds more than marks was made for these alone, and goes.
    fn adopt_metadata(&mut self, below: Option<&OwnedFd>) -> Result<()> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        for path in std::mem::take(&mut self.implicit).into_iter().rev() {
            let shown = printable(&path);
            let failed = Error::io::<Errno>("set the metadata of", &shown);
            let here = match confined(self.root.as_fd(), &path, flags, false) {
                Ok(fd) => fd,
                Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::ENAMETOOLONG) => continue,
                Err(e) => return Err(failed(e)),
            };
            let (dir, name) = split(&path);
            let below = match below {
                Some(below) if self.shows(dir).map_err(|e| Error::io("look at", &shown)(e))? => Some(below),
                _ => None,
            };
            let there = below.and_then(|b| confined(b.as_fd(), &path, OFlag::O_PATH | OFlag::O_DIRECTORY, false).ok());
            if there.is_none()
                && self
                    .holds_marks_alone(here.as_fd())
                    .map_err(|e| Error::io("list", &shown)(e))?
            {
                let parent = self.parent(dir, &shown)?;
                trash::remove_tree(parent.as_fd(), name, self.aside.as_fd())?;
                self.cached = None;
                continue;
            }
            let mut time = (0, 0);
            if let Some(there) = there {
                time = like(here.as_fd(), there.as_fd(), None).map_err(failed)?;
            }
            self.time(&path, time)?;
        }
        Ok(())
    }

    fn holds_marks_alone(&self, dir: BorrowedFd<'_>) -> nix::Result<bool> {
        let list = openat(
            dir,
            ".",
            OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC,
            Mode::empty(),
        )?;
        for entry in nix::dir::Dir::from_fd(list)?.iter() {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            let marks = match self.form {
                Form::Whole => mark(name) != Mark::None,
                Form::Stacked => look(dir, name)?.is_some_and(|stat| is_whiteout(&stat)),
            };
            if !matches!(name, b"." | b"..") && !marks {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Overlay shows a whiteout in a directory that is in one layer only, as a name that cannot be looked up. So one
    /// that hides nothing goes.
    fn drop_idle_whiteouts(&mut self, below: Option<&OwnedFd>) -> Result<()> {
        let root = self.root.as_fd();
        std::mem::take(&mut self.whiteouts).each(|path, _| {
            let failed = || Error::io::<Errno>("look at the whiteout of", printable(path));
            let (dir, name) = split(path);
            let here = match confined(root, dir, OFlag::O_PATH | OFlag::O_DIRECTORY, true) {
                Ok(fd) => fd,
                // Replaced since.
                Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::ENAMETOOLONG) => return Ok(()),
                Err(e) => return Err(failed()(e)),
            };
            let mark = look(here.as_fd(), name).map_err(failed())?;
            if mark.is_some_and(|stat| is_whiteout(&stat)) && !self.hides(below, dir, name).map_err(failed())? {
                unlinkat(&here, OsStr::from_bytes(name), UnlinkatFlags::NoRemoveDir).map_err(failed())?;
            }
            Ok(())
        })
    }

    /// Whether the layers below show through at this directory: no entry of this layer on the way there hides them. (An
    /// opaque root does so by marks on each name, see [`Tree::hide_all`].)
    fn shows(&self, dir: &[u8]) -> nix::Result<bool> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let mut at = openat(&self.root, ".", flags, Mode::empty())?;
        for part in dir.split(|byte| *byte == b'/').filter(|part| !part.is_empty()) {
            let have = look(at.as_fd(), part)?;
            if self.is_gone(at.as_fd(), part, have.as_ref())? {
                return Ok(false);
            }
            match have {
                None => return Ok(true),
                Some(have) if kind_of(&have) != SFlag::S_IFDIR => return Ok(false),
                Some(_) => at = openat(&at, OsStr::from_bytes(part), flags, Mode::empty())?,
            }
            let opaque = match self.form {
                Form::Stacked => is_opaque(at.as_fd())?,
                Form::Whole => look(at.as_fd(), OPAQUE)?.is_some(),
            };
            if opaque {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether the layers below have something that a whiteout of `name` in `dir` hides.
    fn hides(&self, below: Option<&OwnedFd>, dir: &[u8], name: &[u8]) -> nix::Result<bool> {
        let Some(below) = below else { return Ok(false) };
        if !self.shows(dir)? {
            return Ok(false);
        }
        match confined(below.as_fd(), dir, OFlag::O_PATH | OFlag::O_DIRECTORY, false) {
            Ok(there) => Ok(look(there.as_fd(), name)?.is_some_and(|stat| !is_whiteout(&stat))),
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::ENAMETOOLONG) => Ok(false),
            Err(e) => Err(e),
        }
    }

    fn set_times(&mut self) -> Result<()> {
        let root = self.root.as_fd();
        std::mem::take(&mut self.times).each(|path, time| {
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW;
            let fd = match confined(root, path, flags, true) {
                Ok(fd) => fd,
                // Replaced since.
                Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::ENAMETOOLONG) => return Ok(()),
                Err(e) => return Err(Error::io("open", printable(path))(e)),
            };
            let time = timespec(time);
            futimens(&fd, &time, &time).map_err(Error::io("set the times of", printable(path)))
        })
    }
}

/// Owners as a user namespace has them on the host.
#[derive(Clone, Debug)]
pub struct Shift {
    /// First id inside, first on the host, length.
    pub uids: Vec<(u32, u32, u32)>,
    pub gids: Vec<(u32, u32, u32)>,
}

/// What an id that the namespace does not have becomes: nobody's, inside and on the host.
const NOBODY: u32 = 65_534;

fn shifted(id: u32, maps: &[(u32, u32, u32)]) -> u32 {
    let map = maps
        .iter()
        .find(|(inside, _, length)| id >= *inside && id - inside < *length);
    map.map_or(NOBODY, |(inside, host, _)| host + (id - inside))
}

impl Shift {
    fn owner(&self, stat: &FileStat) -> (u32, u32) {
        (shifted(stat.st_uid, &self.uids), shifted(stat.st_gid, &self.gids))
    }
}

fn owner(stat: &FileStat, shift: Option<&Shift>) -> (Option<Uid>, Option<Gid>) {
    let (uid, gid) = shift.map_or((stat.st_uid, stat.st_gid), |shift| shift.owner(stat));
    (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))
}

/// A file's capabilities count in a user namespace only if they name its root (linux/capability.h, revision 3).
fn capabilities(mut value: Vec<u8>, shift: &Shift) -> Vec<u8> {
    if value.len() != 20 || value[3] != 2 {
        return value;
    }
    value[3] = 3;
    value.extend(shifted(0, &shift.uids).to_le_bytes());
    value
}

/// Gives `here` owner, mode and attributes of `there`; answers its modification time.
pub(crate) fn like(here: BorrowedFd<'_>, there: BorrowedFd<'_>, shift: Option<&Shift>) -> nix::Result<(i64, u32)> {
    let stat = fstat(there)?;
    let (uid, gid) = owner(&stat, shift);
    fchown(here, uid, gid)?;
    fchmod(here, Mode::from_bits_truncate(stat.st_mode & 0o7777))?;
    for (key, value) in xattr::all(there)? {
        if may_set(key.as_bytes()) {
            let value = match shift {
                Some(shift) if key.as_c_str() == c"security.capability" => capabilities(value, shift),
                _ => value,
            };
            tolerate(xattr::set(here, &key, &value))?;
        }
    }
    Ok((stat.st_mtime, stat.st_mtime_nsec as u32))
}

/// Copies one non-directory of the layers below with all its metadata.
pub(crate) fn copy_up(
    from: BorrowedFd<'_>,
    name: &[u8],
    stat: &FileStat,
    to: BorrowedFd<'_>,
    new: &[u8],
    shift: Option<&Shift>,
) -> io::Result<()> {
    let (name, new_os) = (OsStr::from_bytes(name), OsStr::from_bytes(new));
    let time = TimeSpec::new(stat.st_mtime, stat.st_mtime_nsec);
    let owner = owner(stat, shift);
    match kind_of(stat) {
        SFlag::S_IFREG => {
            let flags = OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            let source = openat(from, name, flags | OFlag::O_RDONLY | OFlag::O_NONBLOCK, Mode::empty())?;
            let create = flags | OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL;
            let mut copy = File::from(openat(to, new_os, create, Mode::S_IRUSR | Mode::S_IWUSR)?);
            let mut source = File::from(source);
            content(&mut source, &mut copy, stat.st_size as u64)?;
            like(copy.as_fd(), source.as_fd(), shift)?;
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

/// The same blocks where the file system can share them; else the data, the holes left out.
fn content(source: &mut File, copy: &mut File, size: u64) -> io::Result<()> {
    if rustix::fs::ioctl_ficlone(&*copy, &*source).is_ok() {
        return Ok(());
    }
    let mut at = 0;
    while at < size {
        let data = match rustix::fs::seek(&*source, rustix::fs::SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(rustix::io::Errno::NXIO) => break, // a hole up to the end
            Err(e) => return Err(e.into()),
        };
        let hole = rustix::fs::seek(&*source, rustix::fs::SeekFrom::Hole(data))?;
        source.seek(SeekFrom::Start(data))?;
        copy.seek(SeekFrom::Start(data))?;
        io::copy(&mut Read::by_ref(source).take(hole - data), copy)?;
        at = hole;
    }
    copy.set_len(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_and_capabilities_are_shifted() {
        let shift = Shift {
            uids: vec![(0, 100_000, 1000), (2000, 500, 1)],
            gids: vec![(0, 7, 1)],
        };
        assert_eq!(
            [0, 999, 1000, 2000, 2001].map(|id| shifted(id, &shift.uids)),
            [100_000, 100_999, NOBODY, 500, NOBODY]
        );
        let mut second = vec![1, 0, 0, 2];
        second.resize(20, 9);
        let third = capabilities(second.clone(), &shift);
        assert_eq!(
            (third[3], third.len(), &third[20..]),
            (3, 24, &100_000u32.to_le_bytes()[..])
        );
        assert_eq!(third[4..20], second[4..]);
        assert_eq!(capabilities(third.clone(), &shift), third);
    }

    #[test]
    fn holes_stay_holes() {
        use std::io::Write;
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let mut source = File::create_new(dir.path().join("a")).unwrap();
        source.seek(SeekFrom::Start(8 << 20)).unwrap();
        source.write_all(b"in the middle").unwrap();
        source.set_len(16 << 20).unwrap();
        let mut source = File::open(dir.path().join("a")).unwrap();
        let mut copy = File::create_new(dir.path().join("b")).unwrap();
        content(&mut source, &mut copy, 16 << 20).unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        assert_eq!(std::fs::read(a).unwrap(), std::fs::read(&b).unwrap());
        assert!(b.metadata().unwrap().blocks() * 512 < 1 << 20);
    }
}
