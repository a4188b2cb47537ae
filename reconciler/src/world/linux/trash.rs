//! Deleting big trees behind everyone's back: rename now, delete later.
//!
//! The trash lies on the file system of what is buried, so burying is one rename. Deleting walks by descriptors, never
//! follows a link, and never goes through a mount point (`RESOLVE_NO_XDEV` sees bind mounts too): a file behind a
//! volume that is still mounted is not ours to delete.

use std::ffi::{CString, OsStr};
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::dir::{Dir, Type};
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2, renameat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, unlinkat};
use shim::fault;

use super::content::{Error, Result, private_dir, token};
use super::unpack::tar::printable;

/// Directories open at once. Deeper ones are renamed up instead of descended into.
const DEPTH: usize = 64;
/// Names of one directory held in memory.
const SOME: usize = 2048;

/// Clones share the bell: whoever buries, the one who empties hears it.
#[derive(Clone, Debug)]
pub struct Trash {
    dir: PathBuf,
    bell: Arc<tokio::sync::Notify>,
}

impl Trash {
    /// Opens `<root>/trash`, making it if need be.
    pub fn open(root: &Path) -> Result<Trash> {
        let dir = root.join("trash");
        private_dir(&dir)?;
        Ok(Trash {
            dir,
            bell: Arc::default(),
        })
    }

    /// Renames `path` into the trash; absent is success.
    pub fn bury(&self, path: &Path) -> Result<()> {
        fault::point("trash.bury.before");
        match fs::rename(path, self.dir.join(token())) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other
                .map(|()| {
                    fault::point("trash.bury.after");
                    self.bell.notify_one();
                })
                .map_err(Error::io("move into the trash", path.display())),
        }
    }

    /// Until something was buried since the last call.
    pub async fn buried(&self) {
        self.bell.notified().await;
    }

    /// Deletes what is in the trash; answers how many trees are gone. A tree that cannot go wholly (it holds a mount
    /// point) does not keep the others; the first such is the error, after all have been tried.
    pub fn empty(&self) -> Result<usize> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let top = nix::fcntl::open(&self.dir, flags, Mode::empty()).map_err(Error::io("open", self.dir.display()))?;
        let (mut gone, mut first) = (0, None);
        for (name, _) in names(&top, usize::MAX).map_err(Error::io("list", self.dir.display()))? {
            fault::point("trash.empty.before");
            match remove_tree(top.as_fd(), name.as_bytes(), top.as_fd()) {
                Ok(()) => gone += 1,
                Err(e) => first = first.or(Some(e)),
            }
        }
        first.map_or(Ok(gone), Err)
    }
}

/// Removes `name` in `parent` with all below; absent is success. Parts that lie too deep to be walked are renamed into
/// `aside`, on the same file system, and removed from there.
pub(crate) fn remove_tree(parent: BorrowedFd<'_>, name: &[u8], aside: BorrowedFd<'_>) -> Result<()> {
    let mut deep = Vec::new();
    remove(parent, name, aside, 0, &mut deep)?;
    while let Some(name) = deep.pop() {
        remove(aside, name.as_bytes(), aside, 0, &mut deep)?;
    }
    Ok(())
}

fn remove(
    parent: BorrowedFd<'_>,
    name: &[u8],
    aside: BorrowedFd<'_>,
    depth: usize,
    deep: &mut Vec<String>,
) -> Result<()> {
    let os = OsStr::from_bytes(name);
    match unlinkat(parent, os, UnlinkatFlags::NoRemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => return Ok(()),
        Err(Errno::EISDIR) => {}
        Err(e) => return Err(refused(name, e)),
    }
    let dir = match descend(parent, os) {
        Err(Errno::ENOENT) => return Ok(()),
        other => other.map_err(|e| refused(name, e))?,
    };
    if depth == DEPTH {
        let place = format!("deep-{}", token());
        renameat(parent, os, aside, place.as_str()).map_err(|e| refused(name, e))?;
        deep.push(place);
        return Ok(());
    }
    // Some at a time: a directory may hold more names than should be in memory. What cannot go ends this.
    loop {
        let some = names(&dir, SOME).map_err(|e| refused(name, e))?;
        if some.is_empty() {
            break;
        }
        empty_of(&dir, some, aside, depth, deep)?;
    }
    drop(dir);
    fault::point("trash.empty.torn");
    match unlinkat(parent, os, UnlinkatFlags::RemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => Ok(()),
        Err(e) => Err(refused(name, e)),
    }
}

fn empty_of(
    dir: &OwnedFd,
    names: Vec<(CString, Option<Type>)>,
    aside: BorrowedFd<'_>,
    depth: usize,
    deep: &mut Vec<String>,
) -> Result<()> {
    for (child, kind) in names {
        if kind == Some(Type::Directory) || kind.is_none() {
            remove(dir.as_fd(), child.as_bytes(), aside, depth + 1, deep)?;
        } else {
            match unlinkat(dir, &*child, UnlinkatFlags::NoRemoveDir) {
                Ok(()) | Err(Errno::ENOENT) => {}
                Err(e) => return Err(refused(child.as_bytes(), e)),
            }
        }
    }
    Ok(())
}

fn descend(parent: BorrowedFd<'_>, name: &OsStr) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let resolve = ResolveFlag::RESOLVE_NO_XDEV | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_BENEATH;
    openat2(parent, name, OpenHow::new().flags(flags).resolve(resolve))
}

/// At most so many names of a directory.
fn names(dir: &OwnedFd, most: usize) -> nix::Result<Vec<(CString, Option<Type>)>> {
    let mut list = Vec::new();
    let again = descend(dir.as_fd(), OsStr::new("."))?;
    for entry in Dir::from_fd(again)?.iter() {
        let entry = entry?;
        if entry.file_name() != c"." && entry.file_name() != c".." {
            list.push((entry.file_name().to_owned(), entry.file_type()));
        }
        if list.len() == most {
            break;
        }
    }
    Ok(list)
}

fn refused(name: &[u8], errno: Errno) -> Error {
    match errno {
        Errno::EXDEV | Errno::EBUSY => Error::Busy {
            target: format!("{} in the trash: a mount point", printable(name)),
            holder: None,
        },
        errno => Error::io("delete", printable(name))(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::mount::{MsFlags, mount, umount};

    #[test]
    fn deletes_deep_trees_and_hostile_names() {
        let root = tempfile::tempdir().unwrap();
        let trash = Trash::open(root.path()).unwrap();
        let victim = root.path().join("victim");
        fs::create_dir(&victim).unwrap();
        // Deeper than any path can name.
        let mut at: OwnedFd = fs::File::open(&victim).unwrap().into();
        let name = "n".repeat(200);
        for _ in 0..150 {
            nix::sys::stat::mkdirat(&at, name.as_str(), Mode::S_IRWXU).unwrap();
            at = descend(at.as_fd(), OsStr::new(&name)).unwrap();
        }
        let outside = root.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("kept"), "x").unwrap();
        std::os::unix::fs::symlink(&outside, victim.join("link")).unwrap();
        trash.bury(&victim).unwrap();
        trash.bury(&victim).unwrap();
        assert_eq!(trash.empty().unwrap(), 1);
        assert_eq!(fs::read_dir(root.path().join("trash")).unwrap().count(), 0);
        assert!(outside.join("kept").exists());
    }

    #[test]
    fn never_crosses_a_mount() {
        let root = tempfile::tempdir().unwrap();
        let trash = Trash::open(root.path()).unwrap();
        let volume = root.path().join("volume");
        let victim = root.path().join("victim");
        let other = root.path().join("other");
        for dir in [&volume, &victim.join("sub/mnt"), &other] {
            fs::create_dir_all(dir).unwrap();
        }
        fs::write(volume.join("precious"), "x").unwrap();
        fs::write(victim.join("sub/file"), "x").unwrap();
        let point = victim.join("sub/mnt");
        mount(Some(&volume), &point, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        mount(
            Some(&volume.join("precious")),
            &victim.join("sub/file"),
            None::<&str>,
            MsFlags::MS_BIND,
            None::<&str>,
        )
        .unwrap();
        trash.bury(&victim).unwrap();
        trash.bury(&other).unwrap();
        let error = trash.empty().unwrap_err();
        assert!(matches!(error, Error::Busy { .. }), "{error}");
        assert_eq!(fs::read_to_string(volume.join("precious")).unwrap(), "x");
        assert_eq!(
            fs::read_dir(root.path().join("trash")).unwrap().count(),
            1,
            "the other tree is gone"
        );
        let left = fs::read_dir(root.path().join("trash"))
            .unwrap()
            .next()
            .unwrap()
            .unwrap()
            .path();
        umount(&left.join("sub/mnt")).unwrap();
        umount(&left.join("sub/file")).unwrap();
        assert_eq!(trash.empty().unwrap(), 1);
        assert!(volume.join("precious").exists());
    }
}
