//! Mount points, as far as a look at their directory tells.

use std::fs;
use std::io;
use std::path::Path;

use nix::mount::{MntFlags, umount2};
use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use shim::fault;

use crate::error::{Error, Result};

/// Is something mounted on `path` itself? Absent is no.
pub fn is_mount_point(path: &Path) -> Result<bool> {
    // Not by comparing devices: a bind of the same file system has its parent's.
    match rustix::fs::statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::TYPE) {
        Ok(stat) => Ok(stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)),
        Err(Errno::NOENT) => Ok(false),
        Err(e) => Err(Error::io("look at", path)(e.into())),
    }
}

/// Unmounts and removes a mount point; absent is success. Whoever still uses it keeps it until they end.
pub fn unmount(path: &Path) -> Result<()> {
    while is_mount_point(path)? {
        fault::point("mounts.remove.before");
        unmount_only(path)?;
        fault::point("mounts.remove.torn");
    }
    match fs::remove_dir(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", path)(e)),
        _ => Ok(()),
    }
}

/// Takes the topmost mount off a path and leaves the path.
pub fn unmount_only(path: &Path) -> Result<()> {
    umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW).map_err(Error::sys("unmount", path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::mount::{MsFlags, mount};

    #[test]
    fn a_bind_within_one_file_system_is_a_mount_too() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        fs::create_dir_all(&from).unwrap();
        fs::create_dir_all(&to).unwrap();
        assert!(!is_mount_point(&to).unwrap());
        let nothing = None::<&str>;
        mount(Some(&from), &to, nothing, MsFlags::MS_BIND, nothing).unwrap();
        assert!(is_mount_point(&to).unwrap());
        unmount(&to).unwrap();
        assert!(!to.exists() && from.exists());
    }
}
