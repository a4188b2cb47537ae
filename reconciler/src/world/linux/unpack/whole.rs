//! Layers where overlay does not work: each directory holds the whole tree up to its layer.
//!
//! What overlay would show through, this links in: files of the layers below are the same inodes (they are never
//! changed), so a tree of hard links costs directories only. Deletions need no device files and no attributes of
//! overlay, which such file systems refuse; until the tree is settled they are files of the image specification's own
//! names (`.wh.NAME`), which nothing else can have.

use std::ffi::{CStr, OsStr};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{Mode, SFlag, futimens, mkdirat};
use nix::unistd::{UnlinkatFlags, linkat, unlinkat};

use super::super::content::{Error, Result};
use super::settle::{copy_up, like};
use super::tar::printable;
use super::tree::Tree;
use super::whiteout::{OPAQUE, marker};
use super::{confined, kind_of, look, timespec};

const DIRECTORY: OFlag = OFlag::O_RDONLY
    .union(OFlag::O_DIRECTORY)
    .union(OFlag::O_NOFOLLOW)
    .union(OFlag::O_CLOEXEC);

impl Tree {
    /// Links in what the layers below have and this one neither has nor hides; then the marks go.
    pub(super) fn fill(&mut self, below: Option<&OwnedFd>) -> Result<()> {
        if let Some(below) = below
            && !self.opaque
        {
            let failed = |e: io::Error| Error::io("link the layers below into", "the layer")(e);
            let there = openat(below, ".", DIRECTORY, Mode::empty()).map_err(|e| failed(e.into()))?;
            fill(there, self.root.as_fd()).map_err(failed)?;
        }
        let root = self.root.as_fd();
        std::mem::take(&mut self.whiteouts).each(|mark, _| {
            let (dir, name) = super::split(mark);
            let here = match confined(root, dir, OFlag::O_PATH | OFlag::O_DIRECTORY, true) {
                Ok(fd) => fd,
                // Replaced since.
                Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::ENAMETOOLONG) => return Ok(()),
                Err(e) => return Err(Error::io("open the directory of", printable(mark))(e)),
            };
            match unlinkat(&here, OsStr::from_bytes(name), UnlinkatFlags::NoRemoveDir) {
                Ok(()) | Err(Errno::ENOENT) => Ok(()),
                Err(e) => Err(Error::io("remove", printable(mark))(e)),
            }
        })
    }
}

/// `there` is read to its end, so it is taken over.
fn fill(there: OwnedFd, here: BorrowedFd<'_>) -> io::Result<()> {
    if look(here, OPAQUE)?.is_some() {
        return Ok(());
    }
    let mut list = Dir::from_fd(there)?;
    let from = list.as_fd().try_clone_to_owned()?;
    for entry in list.iter() {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." || look(here, &marker(name.to_bytes()))?.is_some() {
            continue;
        }
        one(from.as_fd(), name, here)?;
    }
    Ok(())
}

fn one(from: BorrowedFd<'_>, name: &CStr, here: BorrowedFd<'_>) -> io::Result<()> {
    let Some(stat) = look(from, name.to_bytes())? else {
        return Ok(());
    };
    let below_is_dir = kind_of(&stat) == SFlag::S_IFDIR;
    match look(here, name.to_bytes())? {
        Some(have) if below_is_dir && kind_of(&have) == SFlag::S_IFDIR => {
            let inner = openat(here, name, DIRECTORY, Mode::empty())?;
            fill(openat(from, name, DIRECTORY, Mode::empty())?, inner.as_fd())
        }
        Some(_) => Ok(()),
        None if below_is_dir => {
            mkdirat(here, name, Mode::S_IRWXU)?;
            let inner = openat(here, name, DIRECTORY, Mode::empty())?;
            let source = openat(from, name, DIRECTORY, Mode::empty())?;
            fill(source.try_clone()?, inner.as_fd())?;
            let (seconds, nanos) = like(inner.as_fd(), source.as_fd(), None)?;
            let time = timespec((seconds, nanos));
            Ok(futimens(&inner, &time, &time)?)
        }
        None => match linkat(from, name, here, name, AtFlags::empty()) {
            // As many names as an inode can have, or a file system without hard links.
            Err(Errno::EMLINK | Errno::EPERM | Errno::ENOTSUP) => {
                copy_up(from, name.to_bytes(), &stat, here, name.to_bytes(), None)
            }
            other => Ok(other?),
        },
    }
}
