//! Small files and mount points of a sandbox.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::error::{Error, Result};
use crate::world::paths::make_dir;

/// Is something mounted on `path` itself? Absent is no.
pub fn is_mount_point(path: &Path) -> Result<bool> {
    let own = match fs::symlink_metadata(path) {
        Ok(own) => own,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(Error::io("look at", path)(e)),
    };
    let above = path.parent().unwrap_or(path);
    let above = fs::symlink_metadata(above).map_err(Error::io("look at", above))?;
    Ok(own.dev() != above.dev())
}

/// Mounts a pod's /dev/shm: 64 MiB, mode 1777 (CRI contract: nosuid, nodev, noexec).
pub fn mount_shm(path: &Path) -> Result<()> {
    make_dir(path)?;
    if is_mount_point(path)? {
        return Ok(());
    }
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let options = Some("mode=1777,size=67108864");
    mount(Some("shm"), path, Some("tmpfs"), flags, options).map_err(Error::sys("mount tmpfs on", path))
}

/// Unmounts and removes a mount point; absent is success. Whoever still uses it keeps it until they end.
pub fn unmount(path: &Path) -> Result<()> {
    while is_mount_point(path)? {
        umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW).map_err(Error::sys("unmount", path))?;
    }
    match fs::remove_dir(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", path)(e)),
        _ => Ok(()),
    }
}
