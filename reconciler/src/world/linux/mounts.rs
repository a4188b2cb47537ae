//! Root file systems and other mounts of containers.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use super::content::Result;

/// Mounts an overlay of `lower` (top first) with `upper` and `work` at `target`; a mounted target is left as it is.
pub fn mount_rootfs(lower: &[PathBuf], upper: &Path, work: &Path, target: &Path) -> Result<()> {
    let _ = (lower, upper, work, target);
    todo!()
}

/// The merged, read-only view of `lower` (top first), attached nowhere: gone when the descriptor is closed.
pub fn detached(lower: &[PathBuf]) -> Result<OwnedFd> {
    let _ = lower;
    todo!()
}

/// What is mounted at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mounted {
    pub id: u64,
    pub overlay: bool,
}

/// What is mounted at `target` itself; `None` if nothing, or if it does not exist.
pub fn observe(target: &Path) -> Result<Option<Mounted>> {
    let _ = target;
    todo!()
}

/// Unmounts `target`; not mounted or absent is success.
pub fn unmount(target: &Path) -> Result<()> {
    let _ = target;
    todo!()
}

/// Mounts a tmpfs for /dev/shm of `size` bytes, mode 1777; a mounted target is left as it is.
pub fn mount_shm(target: &Path, size: u64) -> Result<()> {
    let _ = (target, size);
    todo!()
}

/// Every mount of this process's namespace, read once.
#[derive(Clone, Debug, Default)]
pub struct MountTable {
    mounts: Vec<Mount>,
}

#[derive(Clone, Debug)]
pub struct Mount {
    pub id: u64,
    pub target: PathBuf,
    pub fs_type: String,
}

impl MountTable {
    pub fn read() -> Result<MountTable> {
        todo!()
    }

    /// The topmost mount at `target`.
    pub fn get(&self, target: &Path) -> Option<&Mount> {
        self.mounts.iter().rev().find(|m| m.target == target)
    }

    /// Mounts at or below one of `prefixes`, topmost first: the order to unmount them in.
    pub fn ours<'a>(&'a self, prefixes: &'a [PathBuf]) -> impl Iterator<Item = &'a Mount> {
        self.mounts
            .iter()
            .rev()
            .filter(|m| prefixes.iter().any(|p| m.target.starts_with(p)))
    }
}

/// Whether overlay works on the file system of `root`; else why not, for a Node condition.
pub fn probe(root: &Path) -> std::result::Result<(), String> {
    let _ = root;
    todo!()
}
