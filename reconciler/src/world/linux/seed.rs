//! Fills a volume: copies a tree of an image into a directory, as it is: owners, modes, times,
//! attributes, hard links, devices.

use std::collections::HashMap;
use std::ffi::{CStr, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, openat, openat2, readlinkat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstatat, mkdirat, mknodat};
use nix::unistd::{Gid, Uid, fchownat, linkat, symlinkat};

use super::xattr;

/// Deeper trees than this are a mistake or an attack: each level holds two descriptors.
const DEPTH: usize = 200;

/// Copies the directory `path` below `root`, where links lead only inside, to `target`, which must not be there. An
/// empty one (0755, root's) if the root has nothing there; false, and nothing made, if it has no directory there.
pub fn tree(root: BorrowedFd<'_>, path: &Path, target: &Path) -> io::Result<bool> {
    let how = OpenHow::new()
        .flags(OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let source = match openat2(root, path, how) {
        Ok(source) => Some(source),
        Err(Errno::ENOENT) => None,
        Err(Errno::ENOTDIR) => return Ok(false),
        Err(e) => return Err(e.into()),
    };
    std::fs::create_dir(target)?;
    let made = File::open(target)?;
    let Some(source) = source else {
        return nix::sys::stat::fchmod(&made, Mode::from_bits_truncate(0o755))
            .map(|()| true)
            .map_err(Into::into);
    };
    let mut links = HashMap::new();
    directory(
        &source,
        made.as_fd(),
        Path::new(""),
        &mut Copy {
            links: &mut links,
            target: made.as_fd(),
        },
        0,
    )?;
    Ok(true)
}

struct Copy<'a> {
    /// Where the first name of a file with several was made, by device and inode.
    links: &'a mut HashMap<(u64, u64), PathBuf>,
    target: BorrowedFd<'a>,
}

fn directory(from: &OwnedFd, to: BorrowedFd<'_>, at: &Path, copy: &mut Copy<'_>, depth: usize) -> io::Result<()> {
    if depth > DEPTH {
        return Err(Errno::ENAMETOOLONG.into());
    }
    let meta = nix::sys::stat::fstat(from)?;
    let mut list = Dir::from_fd(from.try_clone()?)?;
    for entry in list.iter() {
        let entry = entry?;
        let name = entry.file_name();
        if name != c"." && name != c".." {
            let at = at.join(OsStr::from_bytes(name.to_bytes()));
            one(from, to, name, &at, copy, depth)?;
        }
    }
    attributes(from.as_fd(), to)?;
    finish(to, c"", AtFlags::AT_EMPTY_PATH, &meta)?;
    nix::sys::stat::fchmod(to, permissions(&meta)).map_err(Into::into)
}

fn one(
    from: &OwnedFd,
    to: BorrowedFd<'_>,
    name: &CStr,
    at: &Path,
    copy: &mut Copy<'_>,
    depth: usize,
) -> io::Result<()> {
    let meta = fstatat(from, name, AtFlags::AT_SYMLINK_NOFOLLOW)?;
    let kind = SFlag::from_bits_truncate(meta.st_mode & SFlag::S_IFMT.bits());
    let open =
        |dir: BorrowedFd<'_>, flags| openat(dir, name, flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, Mode::empty());
    if kind == SFlag::S_IFDIR {
        let inner = open(from.as_fd(), OFlag::O_RDONLY | OFlag::O_DIRECTORY)?;
        mkdirat(to, name, Mode::S_IRWXU)?;
        let made = open(to, OFlag::O_RDONLY | OFlag::O_DIRECTORY)?;
        return directory(&inner, made.as_fd(), at, copy, depth + 1);
    }
    if meta.st_nlink > 1 {
        match copy.links.get(&(meta.st_dev, meta.st_ino)) {
            Some(first) => return linkat(copy.target, first, to, name, AtFlags::empty()).map_err(Into::into),
            None => copy.links.insert((meta.st_dev, meta.st_ino), at.to_owned()),
        };
    }
    match kind {
        SFlag::S_IFREG => {
            let source = File::from(open(from.as_fd(), OFlag::O_RDONLY | OFlag::O_NONBLOCK)?);
            let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            let mut made = File::from(openat(to, name, flags, Mode::S_IRUSR | Mode::S_IWUSR)?);
            io::copy(&mut &source, &mut made)?;
            attributes(source.as_fd(), made.as_fd())?;
        }
        SFlag::S_IFLNK => symlinkat(readlinkat(from, name)?.as_os_str(), to, name)?,
        // Overlay's mark of a removed file is no file.
        SFlag::S_IFCHR if meta.st_rdev == 0 => return Ok(()),
        SFlag::S_IFCHR | SFlag::S_IFBLK | SFlag::S_IFIFO => mknodat(to, name, kind, Mode::empty(), meta.st_rdev)?,
        // A socket without who listened.
        _ => return Ok(()),
    }
    finish(to, name, AtFlags::AT_SYMLINK_NOFOLLOW, &meta)?;
    if kind != SFlag::S_IFLNK {
        let mode = nix::sys::stat::FchmodatFlags::FollowSymlink;
        nix::sys::stat::fchmodat(to, name, permissions(&meta), mode)?;
    }
    if kind == SFlag::S_IFREG {
        // A change of owner drops a file's capabilities.
        let (source, made) = (open(from.as_fd(), OFlag::O_PATH)?, open(to, OFlag::O_PATH)?);
        capability(source.as_fd(), made.as_fd())?;
    }
    Ok(())
}

fn permissions(meta: &FileStat) -> Mode {
    Mode::from_bits_truncate(meta.st_mode & 0o7777)
}

/// Owner and times.
fn finish(dir: BorrowedFd<'_>, name: &CStr, flags: AtFlags, meta: &FileStat) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(meta.st_uid), Gid::from_raw(meta.st_gid));
    fchownat(dir, name, Some(uid), Some(gid), flags)?;
    let time = |seconds, nanos| libc::timespec {
        tv_sec: seconds,
        tv_nsec: nanos,
    };
    let times = [
        time(meta.st_atime, meta.st_atime_nsec),
        time(meta.st_mtime, meta.st_mtime_nsec),
    ];
    // SAFETY: a live directory, a valid name and two times.
    let result = unsafe { libc::utimensat(dir.as_raw_fd(), name.as_ptr(), times.as_ptr(), flags.bits()) };
    Errno::result(result).map(drop).map_err(Into::into)
}

const CAPABILITY: &CStr = c"security.capability";

/// Not SELinux's label, which the new place has its own of, nor overlay's own marks.
fn attributes(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<()> {
    for (name, value) in xattr::all(from)? {
        let bytes = name.to_bytes();
        if bytes == b"security.selinux" || bytes.starts_with(b"trusted.overlay.") || name.as_c_str() == CAPABILITY {
            continue;
        }
        match xattr::set(to, &name, &value) {
            Ok(()) | Err(Errno::ENOTSUP) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn capability(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<()> {
    let all = xattr::all(from)?;
    let Some((name, value)) = all.iter().find(|(name, _)| name.as_c_str() == CAPABILITY) else {
        return Ok(());
    };
    xattr::set(to, name, value).map_err(Into::into)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_tree_is_copied_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let (root, out) = (dir.path().join("root"), dir.path().join("out"));
        fs::create_dir_all(root.join("data/sub")).unwrap();
        fs::write(root.join("data/file"), "text").unwrap();
        fs::hard_link(root.join("data/file"), root.join("data/sub/again")).unwrap();
        symlink("/etc/passwd", root.join("data/link")).unwrap();
        symlink("/data", root.join("to-data")).unwrap();
        std::os::unix::fs::chown(root.join("data/sub"), Some(1234), Some(55)).unwrap();
        fs::set_permissions(root.join("data/sub"), fs::Permissions::from_mode(0o2750)).unwrap();
        let past = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
        File::open(root.join("data/file")).unwrap().set_modified(past).unwrap();
        let view = File::open(&root).unwrap();
        assert!(tree(view.as_fd(), Path::new("/to-data"), &out).unwrap());
        let (file, again) = (
            out.join("file").metadata().unwrap(),
            out.join("sub/again").metadata().unwrap(),
        );
        assert_eq!(fs::read_to_string(out.join("file")).unwrap(), "text");
        assert_eq!((file.ino(), file.modified().unwrap()), (again.ino(), past));
        let sub = out.join("sub").metadata().unwrap();
        assert_eq!((sub.uid(), sub.gid(), sub.mode() & 0o7777), (1234, 55, 0o2750));
        assert_eq!(fs::read_link(out.join("link")).unwrap(), Path::new("/etc/passwd"));

        assert!(tree(view.as_fd(), Path::new("/none"), &dir.path().join("empty")).unwrap());
        assert_eq!(fs::read_dir(dir.path().join("empty")).unwrap().count(), 0);
        assert!(!tree(view.as_fd(), Path::new("/data/file"), &dir.path().join("no")).unwrap());
        assert!(!dir.path().join("no").exists());
    }
}
