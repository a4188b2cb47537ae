//! Mount points, as far as a look at their directory tells.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::mount::{MntFlags, umount2};

use crate::error::{Error, Result};

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

/// Unmounts and removes a mount point; absent is success. Whoever still uses it keeps it until they end.
pub fn unmount(path: &Path) -> Result<()> {
    while is_mount_point(path)? {
        unmount_only(path)?;
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
