//! Paths below a root, as its own processes would see them: links lead only inside of it, magic links (proc(5))
//! nowhere.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use crate::sys;

/// As many links as the kernel follows, path_resolution(7).
const LINKS: usize = 40;

/// A root file system.
pub struct Root(OwnedFd);

impl Root {
    pub fn open(path: &Path) -> io::Result<Root> {
        Ok(Root(File::open(path)?.into()))
    }

    /// What a path leads to; its content cannot be read through it (`O_PATH`).
    pub fn find(&self, path: &Path) -> io::Result<OwnedFd> {
        open(self.0.as_fd(), path, libc::O_PATH, libc::RESOLVE_IN_ROOT)
    }

    /// The directory at a path, made with its parents (0755) where it is missing.
    pub fn make_dir(&self, path: &Path) -> io::Result<OwnedFd> {
        self.make(path, true)
    }

    /// The same for an empty file (0644).
    pub fn make_file(&self, path: &Path) -> io::Result<OwnedFd> {
        self.make(path, false)
    }

    fn make(&self, path: &Path, last_is_dir: bool) -> io::Result<OwnedFd> {
        let mut rest: Vec<OsString> = names(path);
        let mut at = PathBuf::from("/");
        let mut links = 0;
        while let Some(name) = rest.pop() {
            if name == ".." {
                at.pop();
                continue;
            }
            let parent = self.find(&at)?;
            at.push(&name);
            match self.find(&at) {
                Ok(_) => continue,
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                Err(_) => {}
            }
            // A link to what is not there yet: that is made.
            if let Some(to) = read_link(parent.as_fd(), &name)? {
                links += 1;
                if links > LINKS {
                    return Err(io::Error::from_raw_os_error(libc::ELOOP));
                }
                at.pop();
                if to.is_absolute() {
                    at = PathBuf::from("/");
                }
                rest.extend(names(&to));
                continue;
            }
            let name = sys::cpath(name.as_ref())?;
            let (raw, name) = (parent.as_raw_fd(), name.as_ptr());
            // SAFETY: a live directory and a single name, which neither call follows.
            unsafe {
                if rest.is_empty() && !last_is_dir {
                    sys::check(libc::mknodat(raw, name, libc::S_IFREG | 0o644, 0))?;
                } else {
                    sys::check(libc::mkdirat(raw, name, 0o755))?;
                }
            }
        }
        self.find(&at)
    }
}

/// Names of a path, the last one first.
fn names(path: &Path) -> Vec<OsString> {
    let name = |part| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        _ => None,
    };
    path.components().rev().filter_map(name).collect()
}

fn open(dir: BorrowedFd, path: &Path, flags: i32, resolve: u64) -> io::Result<OwnedFd> {
    let path = sys::cpath(path)?;
    // SAFETY: all zero is a valid open_how; then a valid path and the structure with its size.
    let fd = unsafe {
        let mut how: libc::open_how = std::mem::zeroed();
        how.flags = (flags | libc::O_CLOEXEC) as u64;
        how.resolve = resolve | libc::RESOLVE_NO_MAGICLINKS;
        sys::check(libc::syscall(
            libc::SYS_openat2,
            dir.as_raw_fd(),
            path.as_ptr(),
            &how,
            size_of_val(&how),
        ))?
    };
    // SAFETY: the kernel just gave us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Where a link leads; `None` if there is nothing, or no link.
fn read_link(dir: BorrowedFd, name: &OsString) -> io::Result<Option<PathBuf>> {
    let name = sys::cpath(name.as_ref())?;
    let mut to = vec![0u8; libc::PATH_MAX as usize];
    // SAFETY: a live directory, a valid name, room as long as stated.
    let read = sys::check(unsafe {
        libc::readlinkat(dir.as_raw_fd(), name.as_ptr(), to.as_mut_ptr().cast(), to.len()) as i64
    });
    match read {
        Ok(len) => {
            to.truncate(len as usize);
            Ok(Some(OsString::from_vec(to).into()))
        }
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINVAL)) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn what_is_made_stays_below_the_root() {
        let dir = tempfile::tempdir().unwrap();
        let (path, outside) = (dir.path().join("root"), dir.path().join("outside"));
        fs::create_dir_all(path.join("real")).unwrap();
        fs::create_dir(&outside).unwrap();
        symlink("/real", path.join("link")).unwrap();
        symlink(&outside, path.join("escape")).unwrap();
        symlink("../../../../new/place", path.join("real/dangling")).unwrap();
        symlink("loop", path.join("loop")).unwrap();
        let root = Root::open(&path).unwrap();
        root.make_dir(Path::new("/link/a/b")).unwrap();
        assert!(path.join("real/a/b").is_dir());
        root.make_file(Path::new("/link/a/file")).unwrap();
        assert!(path.join("real/a/file").is_file());
        root.make_dir(Path::new("/real/dangling/deep")).unwrap();
        assert!(
            path.join("new/place/deep").is_dir(),
            "a dangling link's target is made inside"
        );
        root.make_dir(Path::new("/escape/a")).unwrap();
        assert!(path.join(outside.strip_prefix("/").unwrap()).join("a").is_dir());
        root.make_dir(Path::new("/../../outside/a")).unwrap();
        assert!(root.make_dir(Path::new("/loop/a")).is_err());
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    }
}
