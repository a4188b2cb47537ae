//! What a directory takes of its file system, and that file system.

use std::collections::HashSet;
use std::ffi::CStr;
use std::fs;
use std::os::fd::AsFd;
use std::path::Path;

use nix::dir::Dir;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat, major, minor};
use state::usage::FileSystem;

/// Directories within directories that are followed: each takes a descriptor while it is walked.
const DEEPEST: usize = 128;

/// Bytes of blocks and number of inodes of a tree, its root included. A file with several names counts once, another
/// file system that is mounted inside does not count, links are not followed. `None` if the root cannot be read.
pub fn usage(root: &Path) -> Option<(u64, u64)> {
    let dir = Dir::open(root, directory(), Mode::empty()).ok()?;
    let stat = fstat(dir.as_fd()).ok()?;
    let mut walk = Walk {
        device: stat.st_dev,
        seen: HashSet::new(),
        bytes: blocks(&stat),
        inodes: 1,
    };
    walk.below(dir, 0);
    Some((walk.bytes, walk.inodes))
}

fn directory() -> OFlag {
    OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC
}

/// Bytes: a block is 512 of them, whatever the file system's own size (stat(2)).
fn blocks(stat: &FileStat) -> u64 {
    u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512)
}

struct Walk {
    device: libc::dev_t,
    /// Inodes with more than one name that were counted.
    seen: HashSet<libc::ino_t>,
    bytes: u64,
    inodes: u64,
}

impl Walk {
    /// Whatever goes away meanwhile is not there.
    fn below(&mut self, mut dir: Dir, depth: usize) {
        let names: Vec<_> = dir.iter().flatten().map(|entry| entry.file_name().to_owned()).collect();
        for name in names.iter().filter(|name| !matches!(name.to_bytes(), b"." | b"..")) {
            self.entry(&dir, name, depth);
        }
    }

    fn entry(&mut self, dir: &Dir, name: &CStr, depth: usize) {
        let Ok(stat) = fstatat(dir.as_fd(), name, AtFlags::AT_SYMLINK_NOFOLLOW) else {
            return;
        };
        if stat.st_dev != self.device {
            return;
        }
        let is_dir = SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT == SFlag::S_IFDIR;
        if !is_dir && stat.st_nlink > 1 && !self.seen.insert(stat.st_ino) {
            return;
        }
        self.bytes = self.bytes.saturating_add(blocks(&stat));
        self.inodes += 1;
        if is_dir
            && depth < DEEPEST
            && let Ok(inner) = Dir::openat(dir.as_fd(), name, directory(), Mode::empty())
        {
            self.below(inner, depth + 1);
        }
    }
}

/// The file system that holds a path.
pub fn file_system(path: &Path) -> Option<FileSystem> {
    let stat = nix::sys::statvfs::statvfs(path).ok()?;
    let device = nix::sys::stat::stat(path).ok()?.st_dev;
    Some(FileSystem {
        device: device_name(major(device) as u32, minor(device) as u32),
        bytes: stat.blocks().saturating_mul(stat.fragment_size()),
        inodes: stat.files(),
        inodes_free: stat.files_free(),
    })
}

/// How full the file system of a path is for who is not root, percent, as df(1) counts.
pub fn used_percent(path: &Path) -> Option<u8> {
    let stat = nix::sys::statvfs::statvfs(path).ok()?;
    let used = stat.blocks().saturating_sub(stat.blocks_free());
    let usable = used.saturating_add(stat.blocks_available()).max(1);
    u8::try_from(used.saturating_mul(100).div_ceil(usable)).ok()
}

/// `/dev/NAME` of a block device, else its numbers.
pub fn device_name(major: u32, minor: u32) -> String {
    let link = fs::read_link(format!("/sys/dev/block/{major}:{minor}")).ok();
    let name = link.as_deref().and_then(Path::file_name).and_then(|name| name.to_str());
    name.map_or_else(|| format!("{major}:{minor}"), |name| format!("/dev/{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::mount::{MntFlags, MsFlags, mount, umount2};

    #[test]
    fn counts_each_file_once_and_neither_links_nor_mounts() {
        let root = tempfile::tempdir_in("/var/tmp").unwrap();
        let outside = tempfile::tempdir_in("/var/tmp").unwrap();
        fs::write(outside.path().join("large"), vec![1; 1 << 20]).unwrap();
        let at = |name: &str| root.path().join(name);
        fs::create_dir_all(at("a/b")).unwrap();
        fs::write(at("a/file"), vec![1; 64 << 10]).unwrap();
        let (bytes, inodes) = usage(root.path()).unwrap();
        assert_eq!(inodes, 4);
        assert!((64 << 10..200 << 10).contains(&bytes), "{bytes}");
        fs::hard_link(at("a/file"), at("a/b/same")).unwrap();
        assert_eq!(usage(root.path()).unwrap(), (bytes, inodes));
        std::os::unix::fs::symlink(outside.path(), at("a/link")).unwrap();
        fs::create_dir(at("mounted")).unwrap();
        let tmpfs = Some("tmpfs");
        mount(tmpfs, &at("mounted"), tmpfs, MsFlags::empty(), None::<&str>).unwrap();
        fs::write(at("mounted/large"), vec![1; 1 << 20]).unwrap();
        let more = usage(root.path()).unwrap();
        umount2(&at("mounted"), MntFlags::MNT_DETACH).unwrap();
        assert_eq!(more.1, inodes + 1, "the link; what is mounted there is not ours");
        assert!(more.0 <= bytes + (8 << 10), "{} {bytes}", more.0);
        assert!(usage(&at("absent")).is_none());
        assert!(usage(&at("a/link")).is_none(), "the root is no link either");
    }

    #[test]
    fn a_deep_tree_ends() {
        let root = tempfile::tempdir_in("/var/tmp").unwrap();
        let deep = (0..DEEPEST + 50).fold(root.path().to_owned(), |path, _| path.join("d"));
        fs::create_dir_all(deep).unwrap();
        assert_eq!(usage(root.path()).unwrap().1, DEEPEST as u64 + 2);
    }
}
