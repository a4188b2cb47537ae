//! Small files of objects, and mount points as far as a look at their directory tells.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use async_trait::async_trait;
use nix::mount::{MntFlags, umount2};
use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use shim::record::{self, End, RunRecord};

use super::images::failed;
use super::selinux;
use super::shims;
use super::trash::Trash;
use crate::error::{Error, Result};
use crate::world::Entry;

/// The files of this instance's objects.
pub struct Files {
    trash: Trash,
}

impl Files {
    pub fn new(trash: Trash) -> Files {
        Files { trash }
    }
}

#[async_trait]
impl crate::world::Files for Files {
    fn read(&self, path: &Path) -> Result<Option<Vec<u8>>> {
        match fs::read(path) {
            Ok(text) => Ok(Some(text)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::io("read", path)(e)),
        }
    }

    fn replace(&self, path: &Path, text: &[u8]) -> Result<()> {
        self.replace_for(path, text, (0, 0), None)
    }

    fn replace_for(&self, path: &Path, text: &[u8], (uid, gid): (u32, u32), label: Option<&str>) -> Result<()> {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(".new");
        let temp = path.with_file_name(name);
        shim::fault::check("file.replace.before").map_err(Error::io("write", &temp))?;
        fs::write(&temp, text).map_err(Error::io("write", &temp))?;
        if (uid, gid) != (0, 0) {
            std::os::unix::fs::chown(&temp, Some(uid), Some(gid)).map_err(Error::io("chown", &temp))?;
        }
        if let Some(label) = label {
            selinux::set(&temp, label).map_err(Error::io("label", &temp))?;
        }
        shim::fault::check("file.replace.torn").map_err(Error::io("rename", path))?;
        fs::rename(&temp, path).map_err(Error::io("rename", path))
    }

    fn label(&self, path: &Path, label: &str) -> Result<()> {
        selinux::set(path, label).map_err(Error::io("label", path))
    }

    fn unlink(&self, path: &Path) -> Result<()> {
        match fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", path)(e)),
            _ => Ok(()),
        }
    }

    fn exists(&self, path: &Path) -> bool {
        path.exists()
    }

    fn identity(&self, path: &Path) -> (u64, u64) {
        path.metadata().map_or((0, 0), |meta| (meta.dev(), meta.ino()))
    }

    fn make_dir(&self, path: &Path, mode: u32) -> Result<()> {
        let made = fs::DirBuilder::new().recursive(true).mode(mode).create(path);
        made.map_err(Error::io("make directory", path))
    }

    async fn make_their_dir(&self, path: &Path, mode: u32) -> Result<()> {
        let dir = path.to_owned();
        let make = move || fs::DirBuilder::new().recursive(true).mode(mode).create(dir);
        let made = tokio::task::spawn_blocking(make).await.map_err(|source| Error::Task {
            op: "make directory",
            source,
        })?;
        made.map_err(Error::io("make directory", path))
    }

    fn set_mode(&self, path: &Path, mode: u32) -> Result<()> {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(Error::io("set mode of", path))
    }

    fn list(&self, dir: &Path) -> Result<Vec<Entry>> {
        let entries = match fs::read_dir(dir) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(Error::io("list", dir)(e)),
        };
        let mut found: Vec<Entry> = entries
            .flatten()
            .filter_map(|entry| {
                let is_dir = entry.file_type().is_ok_and(|t| t.is_dir());
                let name = entry.file_name().into_string().ok()?;
                Some(Entry { name, is_dir })
            })
            .collect();
        found.sort();
        Ok(found)
    }

    fn remove_dir(&self, path: &Path) -> Result<()> {
        match fs::remove_dir(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", path)(e)),
            _ => Ok(()),
        }
    }

    fn run_record(&self, path: &Path) -> Result<Option<RunRecord>> {
        record::read(path).map_err(shims::fault("read run record", &owner(path)))
    }

    fn write_end(&self, path: &Path, end: End) -> Result<()> {
        let written = record::write_end(path, end).map_err(shims::fault("write run record", &owner(path)));
        written.map(drop)
    }

    fn hold(&self, fifos: &Path) -> Vec<fs::File> {
        let open = |name| {
            let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
            let file = fs::OpenOptions::new()
                .read(true)
                .custom_flags(flags)
                .open(fifos.join(name))
                .ok()?;
            file.metadata()
                .is_ok_and(|meta| meta.file_type().is_fifo())
                .then_some(file)
        };
        ["stdout", "stderr"].into_iter().filter_map(open).collect()
    }

    fn bury(&self, path: &Path) -> Result<()> {
        self.trash.bury(path).map_err(failed("trash"))
    }

    async fn empty_trash(&self) -> Result<usize> {
        let trash = self.trash.clone();
        let emptied = tokio::task::spawn_blocking(move || trash.empty()).await;
        let emptied = emptied.map_err(|source| Error::Task {
            op: "empty the trash",
            source,
        })?;
        emptied.map_err(failed("trash"))
    }

    async fn buried(&self) {
        self.trash.buried().await;
    }
}

/// The object in whose directory a run record lies.
fn owner(record: &Path) -> String {
    let dir = record.parent().and_then(Path::file_name);
    dir.unwrap_or_default().to_string_lossy().into_owned()
}

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
        shim::fault::point("mounts.remove.before");
        unmount_only(path)?;
        shim::fault::point("mounts.remove.torn");
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
