//! A root file system without overlay: the layers copied one over the other, where the kernel or the disk allows no
//! better. Files share their blocks with the layer where the file system can (copy_file_range).

use std::collections::HashMap;
use std::ffi::{CString, OsStr};
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat, futimens, mkdirat};
use nix::sys::time::TimeSpec;
use nix::unistd::linkat;

use super::content::{Error, Result};
use super::trash::remove_tree;
use super::unpack::settle::{Shift, copy_up, like};
use super::unpack::whiteout::{is_opaque, is_whiteout};

/// Makes `target` the merged tree of `lower` (top first); complete, or not there. What an earlier try left beside it is
/// removed first. With a shift, every owner is what a user namespace makes of it on the host.
pub fn merge(lower: &[PathBuf], target: &Path, shift: Option<&Shift>) -> Result<()> {
    if target.exists() {
        return Ok(());
    }
    let failed = |e: io::Error| Error::io("copy layers to", target.display())(e);
    let temp = target.with_extension("new");
    let parent = open(temp.parent().unwrap_or(Path::new("/"))).map_err(|e| failed(e.into()))?;
    let name = temp.file_name().unwrap_or_default();
    remove_tree(parent.as_fd(), name.as_bytes(), parent.as_fd())?;
    fs::create_dir(&temp).map_err(failed)?;
    let to = open(&temp).map_err(|e| failed(e.into()))?;
    for layer in lower.iter().rev() {
        let from = open(layer).map_err(|e| failed(e.into()))?;
        let mut lay = Lay {
            root: to.as_fd(),
            links: HashMap::new(),
            shift,
        };
        lay.directory(from.as_fd(), to.as_fd(), &[]).map_err(failed)?;
    }
    fs::rename(&temp, target).map_err(failed)
}

/// One layer being laid over those below.
struct Lay<'a> {
    root: BorrowedFd<'a>,
    /// Where the first name of a file with several is, below `root`.
    links: HashMap<u64, Vec<u8>>,
    shift: Option<&'a Shift>,
}

impl Lay<'_> {
    fn directory(&mut self, from: BorrowedFd<'_>, to: BorrowedFd<'_>, path: &[u8]) -> io::Result<()> {
        if is_opaque(from)? {
            for name in names(to)? {
                remove(to, &name)?;
            }
        }
        for name in names(from)? {
            let os = OsStr::from_bytes(name.to_bytes());
            let stat = fstatat(from, os, AtFlags::AT_SYMLINK_NOFOLLOW)?;
            let path = [path, b"/", name.to_bytes()].concat();
            if is_whiteout(&stat) {
                remove(to, &name)?;
            } else if kind(&stat) == SFlag::S_IFDIR {
                let child = below(from, os)?;
                let place = match fstatat(to, os, AtFlags::AT_SYMLINK_NOFOLLOW) {
                    Ok(have) if kind(&have) == SFlag::S_IFDIR => below(to, os)?,
                    Ok(_) | Err(Errno::ENOENT) => {
                        remove(to, &name)?;
                        mkdirat(to, os, Mode::S_IRWXU)?;
                        below(to, os)?
                    }
                    Err(e) => return Err(e.into()),
                };
                self.directory(child.as_fd(), place.as_fd(), &path)?;
            } else {
                remove(to, &name)?;
                self.file(from, to, (os, &stat), path)?;
            }
        }
        let stat = fstat(from)?;
        let time = TimeSpec::new(stat.st_mtime, stat.st_mtime_nsec);
        like(to, from, self.shift)?;
        Ok(futimens(to, &time, &time)?)
    }

    fn file(
        &mut self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        (name, stat): (&OsStr, &FileStat),
        path: Vec<u8>,
    ) -> io::Result<()> {
        if stat.st_nlink > 1 {
            if let Some(first) = self.links.get(&stat.st_ino) {
                let first = OsStr::from_bytes(first.strip_prefix(b"/").unwrap_or(first));
                return Ok(linkat(self.root, first, to, name, AtFlags::empty())?);
            }
            self.links.insert(stat.st_ino, path);
        }
        copy_up(from, name.as_bytes(), stat, to, name.as_bytes(), self.shift)
    }
}

fn kind(stat: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT
}

fn remove(dir: BorrowedFd<'_>, name: &CString) -> io::Result<()> {
    remove_tree(dir, name.to_bytes(), dir).map_err(io::Error::other)
}

const DIRECTORY: OFlag = OFlag::O_RDONLY
    .union(OFlag::O_DIRECTORY)
    .union(OFlag::O_NOFOLLOW)
    .union(OFlag::O_CLOEXEC);

fn open(path: &Path) -> nix::Result<OwnedFd> {
    nix::fcntl::open(path, DIRECTORY, Mode::empty())
}

fn below(dir: BorrowedFd<'_>, name: &OsStr) -> nix::Result<OwnedFd> {
    openat(dir, name, DIRECTORY, Mode::empty())
}

fn names(dir: BorrowedFd<'_>) -> nix::Result<Vec<CString>> {
    let mut list = Vec::new();
    for entry in Dir::from_fd(below(dir, OsStr::new("."))?)?.iter() {
        let entry = entry?;
        if entry.file_name() != c"." && entry.file_name() != c".." {
            list.push(entry.file_name().to_owned());
        }
    }
    list.sort();
    Ok(list)
}
