//! Root file systems and other mounts of containers, and what is mounted where.
//!
//! An overlay is made by the mount API of descriptors (fsopen(2)), which takes one layer at a time, so that neither
//! their number nor odd characters in paths matter. Kernels before 6.5 lack `lowerdir+`: there mount(2) gets the layers
//! as `/proc/self/fd/N`, which keeps the option string within its one page.

mod overlay;
mod probe;
mod table;

use std::ffi::{CStr, CString};
use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use async_trait::async_trait;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::Mode;
use shim::fault;

use super::content::{Error, Result, token};
use super::files;
use super::images::failed;
use super::unpack::settle::Shift;
use crate::world::Rootfs;

use overlay::{Overlay, context, detached_by_options, mount_overlay, overlay};
pub use probe::{UserFiles, probe, user_files};
pub use table::{Mount, MountTable};

const FSCONFIG_CMD_CREATE: libc::c_uint = 6;
const FSOPEN_CLOEXEC: libc::c_uint = 1;
const FSMOUNT_CLOEXEC: libc::c_uint = 1;
const MOVE_MOUNT_F_EMPTY_PATH: libc::c_uint = 4;
const MOUNT_ATTR_RDONLY: libc::c_uint = 1;

/// Mounts an overlay of `lower` (top first) with `upper` and `work` at `target`, making these directories if need be;
/// all its files have the SELinux `label`. An overlay that is mounted there already is left as it is: a second one on a
/// live upper directory would damage it.
pub fn mount_rootfs(lower: &[PathBuf], upper: &Path, work: &Path, target: &Path, label: Option<&str>) -> Result<()> {
    match observe(target)? {
        Some(Mounted {
            kind: FsKind::Overlay, ..
        }) => return Ok(()),
        Some(_) => {
            return Err(Error::Busy {
                target: target.display().to_string(),
                holder: None,
            });
        }
        None => {}
    }
    for dir in [upper, work, target] {
        fs::create_dir_all(dir).map_err(Error::io("create directory", dir.display()))?;
    }
    let empty;
    let mut lower = lower;
    if lower.is_empty() {
        // An image may have no layers; overlay wants one.
        empty = [work.with_file_name("empty")];
        fs::create_dir_all(&empty[0]).map_err(Error::io("create directory", empty[0].display()))?;
        lower = &empty;
    }
    fault::point("mounts.rootfs.before");
    let upper = Some((upper, work));
    mount_overlay(&Overlay { lower, upper, label }, target)
        .map_err(Error::io("mount the root file system at", target.display()))?;
    fault::point("mounts.rootfs.after");
    Ok(())
}

/// The user namespace that a root file system is shown to.
#[derive(Clone, Copy, Debug)]
pub struct Mapping<'a> {
    pub userns: BorrowedFd<'a>,
    /// Host ids of the namespace's root, who owns `/` of the container.
    pub root: (u32, u32),
}

/// As [`mount_rootfs`], for a container in a user namespace: the layers' files belong to the ids that `mapping` gives
/// them, without any being changed on disk (idmapped layers, Linux 5.19). New files are stored with their host ids.
/// False, and nothing is made, if the kernel cannot map the owners on this file system.
pub fn mount_rootfs_mapped(
    lower: &[PathBuf],
    upper: &Path,
    work: &Path,
    target: &Path,
    label: Option<&str>,
    mapping: Mapping<'_>,
) -> Result<bool> {
    if observe(target)?.is_some() {
        return Ok(true);
    }
    let scratch = target.with_file_name("mapped");
    let mapped = match map_all(lower, &scratch, mapping) {
        Err(e) if no_mapping(&e) => {
            clear_scratch(&scratch)?;
            return Ok(false);
        }
        other => other,
    };
    let outcome = mapped.and_then(|mapped| {
        fs::create_dir_all(upper).map_err(Error::io("create directory", upper.display()))?;
        let (uid, gid) = mapping.root;
        std::os::unix::fs::chown(upper, Some(uid), Some(gid)).map_err(Error::io("chown", upper.display()))?;
        mount_rootfs(&mapped, upper, work, target, label)
    });
    // Overlay has its own clones by now.
    let cleared = clear_scratch(&scratch);
    outcome.and(cleared).map(|()| true)
}

/// A file system without FS_ALLOW_IDMAP, or a kernel before 5.12.
fn no_mapping(e: &Error) -> bool {
    let code = |cause: &std::io::Error| cause.raw_os_error();
    matches!(e, Error::Io { cause, .. } if matches!(code(cause), Some(libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP)))
}

/// As [`mount_view`], with the owners that `mapping` gives. `target`'s directory is used for what this takes.
pub fn mount_view_mapped(lower: &[PathBuf], target: &Path, label: Option<&str>, mapping: Mapping<'_>) -> Result<()> {
    if observe(target)?.is_some() {
        return Ok(());
    }
    let empty = empty_beside(target)?;
    let scratch = target.with_file_name("mapped");
    let outcome = map_all(lower, &scratch, mapping).and_then(|mut lower| {
        lower.push(empty);
        view(&lower, label, target).map_err(Error::io("mount an image at", target.display()))
    });
    outcome.and(clear_scratch(&scratch))
}

/// Overlay wants two layers: makes a mount point and, beside it, an empty one.
fn empty_beside(target: &Path) -> Result<PathBuf> {
    let empty = target.with_file_name("empty");
    for dir in [target, &empty] {
        fs::create_dir_all(dir).map_err(Error::io("create directory", dir.display()))?;
    }
    Ok(empty)
}

/// A read-only overlay.
fn view(lower: &[PathBuf], label: Option<&str>, target: &Path) -> nix::Result<()> {
    let upper = None;
    mount_overlay(&Overlay { lower, upper, label }, target)
}

/// Mounts of the layers that show mapped owners. They must be attached somewhere while overlay takes its clones: it
/// refuses detached ones before Linux 6.15.
fn map_all(lower: &[PathBuf], scratch: &Path, mapping: Mapping<'_>) -> Result<Vec<PathBuf>> {
    clear_scratch(scratch)?;
    let mut mapped = Vec::new();
    for (i, layer) in lower.iter().enumerate() {
        let point = scratch.join(i.to_string());
        fs::create_dir_all(&point).map_err(Error::io("create directory", point.display()))?;
        map_one(layer, &point, mapping.userns).map_err(Error::io("map the owners of", layer.display()))?;
        mapped.push(point);
    }
    Ok(mapped)
}

fn map_one(layer: &Path, point: &Path, userns: BorrowedFd<'_>) -> nix::Result<()> {
    attach(&mapped(layer, userns)?, point)
}

/// A directory's mount with mapped owners, attached nowhere.
fn mapped(layer: &Path, userns: BorrowedFd<'_>) -> nix::Result<OwnedFd> {
    let path = CString::new(layer.as_os_str().as_bytes()).map_err(|_| Errno::EINVAL)?;
    let flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC;
    // SAFETY: the path is NUL-terminated; a descriptor that the kernel answers is ours.
    let tree = unsafe { fd_from(libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, path.as_ptr(), flags))? };
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP,
        attr_clr: 0,
        propagation: libc::MS_PRIVATE,
        userns_fd: userns.as_raw_fd() as u64,
    };
    let size = std::mem::size_of::<libc::mount_attr>();
    // SAFETY: the path is NUL-terminated, the structure as long as stated; both outlive the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &attributes as *const libc::mount_attr,
            size,
        )
    };
    Errno::result(result).map(|_| tree)
}

/// Unmounts and removes what [`mount_rootfs_mapped`] made beside its target, if it was cut short.
pub fn clear_scratch(scratch: &Path) -> Result<()> {
    let failed = |e: std::io::Error| Error::io("clear", scratch.display())(e);
    let points = match fs::read_dir(scratch) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(failed)?,
    };
    for point in points {
        let point = point.map_err(failed)?.path();
        unmount(&point)?;
        fs::remove_dir(&point).map_err(failed)?;
    }
    fs::remove_dir(scratch).map_err(failed)
}

/// The merged, read-only view of `lower` (top first), attached nowhere: gone when the descriptor is closed.
pub fn detached(lower: &[PathBuf]) -> Result<OwnedFd> {
    let shown = lower
        .first()
        .map_or_else(|| "no layers".into(), |top| top.display().to_string());
    let failed = |e: Errno| Error::io("mount a view of", &shown)(e);
    let layers = Overlay {
        lower,
        upper: None,
        label: None,
    };
    match lower {
        [] => nothing().map_err(failed),
        // Overlay wants two. (A whiteout may show here as the device that it is.)
        [one] => open_path(one).map_err(failed),
        _ => match overlay(&layers, MOUNT_ATTR_RDONLY) {
            Ok(fd) => Ok(fd),
            Err(Errno::EINVAL | Errno::ENOSYS) => detached_by_options(&layers).map_err(failed),
            Err(e) => Err(failed(e)),
        },
    }
}

/// For a file system that overlay or id-mapped mounts do not work on: a copy of the layers, made once at `copy`, shown
/// at `target`; with a shift, its owners are those of a user namespace, with a SELinux label its files have that.
pub fn mount_copy(
    lower: &[PathBuf],
    copy: &Path,
    target: &Path,
    shift: Option<&Shift>,
    label: Option<&str>,
) -> Result<()> {
    if observe(target)?.is_some() {
        return Ok(());
    }
    super::copy::merge(lower, copy, shift)?;
    if let Some(label) = label {
        super::selinux::set_all(copy, label).map_err(Error::io("label", copy.display()))?;
    }
    fs::create_dir_all(target).map_err(Error::io("create directory", target.display()))?;
    mount(Some(copy), target, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .map_err(Error::io("mount the root file system at", target.display()))
}

/// Mounts the merged, read-only view of `lower` (top first) at `target`, which is made if need be. What is mounted
/// there already stays. With a SELinux label all its files have that.
pub fn mount_view(lower: &[PathBuf], target: &Path, label: Option<&str>) -> Result<()> {
    if observe(target)?.is_some() {
        return Ok(());
    }
    if label.is_some() && !lower.is_empty() {
        // A bind mount has no label of its own.
        let lower = [lower, &[empty_beside(target)?]].concat();
        return view(&lower, label, target).map_err(Error::io("mount an image at", target.display()));
    }
    fs::create_dir_all(target).map_err(Error::io("create directory", target.display()))?;
    let failed = |e: Errno| Error::io("mount an image at", target.display())(e);
    let bind =
        |one: &Path, flags: MsFlags| mount(Some(one), target, None::<&str>, MsFlags::MS_BIND | flags, None::<&str>);
    let mounted = match lower {
        [] => nothing().and_then(|fd| attach(&fd, target)),
        [one] => bind(one, MsFlags::empty()).and_then(|()| {
            let flags = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY | MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
            bind(one, flags)
        }),
        _ => view(lower, None, target),
    };
    mounted.map_err(failed)
}

/// An empty, read-only file system attached nowhere.
fn nothing() -> nix::Result<OwnedFd> {
    // SAFETY: the name is NUL-terminated; a descriptor that the kernel answers is ours.
    let fs = unsafe { fd_from(libc::syscall(libc::SYS_fsopen, c"tmpfs".as_ptr(), FSOPEN_CLOEXEC))? };
    configure(&fs, FSCONFIG_CMD_CREATE, None)?;
    made(&fs, MOUNT_ATTR_RDONLY)
}

/// The file system that was configured, attached nowhere.
fn made(fs: &OwnedFd, attributes: libc::c_uint) -> nix::Result<OwnedFd> {
    let (call, fs) = (libc::SYS_fsmount, fs.as_raw_fd());
    // SAFETY: only numbers are passed; a descriptor that the kernel answers is ours.
    unsafe { fd_from(libc::syscall(call, fs, FSMOUNT_CLOEXEC, attributes)) }
}

fn open_path(path: &Path) -> nix::Result<OwnedFd> {
    nix::fcntl::open(
        path,
        OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC,
        Mode::empty(),
    )
}

fn configure(fs: &OwnedFd, command: libc::c_uint, pair: Option<(&CStr, &CStr)>) -> nix::Result<()> {
    let (key, value) = pair.map_or((std::ptr::null(), std::ptr::null()), |(k, v)| (k.as_ptr(), v.as_ptr()));
    // SAFETY: both pointers are null or NUL-terminated strings that outlive the call.
    let result = unsafe { libc::syscall(libc::SYS_fsconfig, fs.as_raw_fd(), command, key, value, 0) };
    Errno::result(result).map(drop)
}

/// # Safety
/// `result` must come from a system call that answers a new descriptor or -1.
unsafe fn fd_from(result: libc::c_long) -> nix::Result<OwnedFd> {
    let fd = Errno::result(result)?;
    // SAFETY: the caller's promise.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

fn attach(mount: &OwnedFd, target: &Path) -> nix::Result<()> {
    let path = CString::new(target.as_os_str().as_bytes()).map_err(|_| Errno::EINVAL)?;
    // SAFETY: both strings are NUL-terminated and outlive the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_FDCWD,
            path.as_ptr(),
            MOVE_MOUNT_F_EMPTY_PATH,
        )
    };
    Errno::result(result).map(drop)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FsKind {
    Overlay,
    Tmpfs,
    Other,
}

/// What is mounted at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mounted {
    /// The kernel's mount id, as in mountinfo.
    pub id: u64,
    pub kind: FsKind,
}

/// What is mounted at `target` itself; `None` if nothing, or if it does not exist.
pub fn observe(target: &Path) -> Result<Option<Mounted>> {
    let failed = |e: Errno| Error::io("look at the mount", target.display())(e);
    let path = CString::new(target.as_os_str().as_bytes()).map_err(|_| failed(Errno::EINVAL))?;
    let flags = libc::AT_SYMLINK_NOFOLLOW | libc::AT_NO_AUTOMOUNT;
    // SAFETY: statx is plain numbers, for which zeroes are valid.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path is NUL-terminated, `stat` is writable; both outlive the call.
    let result = unsafe { libc::statx(libc::AT_FDCWD, path.as_ptr(), flags, libc::STATX_MNT_ID, &mut stat) };
    match Errno::result(result) {
        Err(Errno::ENOENT | Errno::ENOTDIR) => return Ok(None),
        other => other.map_err(failed)?,
    };
    if stat.stx_attributes & libc::STATX_ATTR_MOUNT_ROOT as u64 == 0 {
        return Ok(None);
    }
    let kind = match nix::sys::statfs::statfs(target).map_err(failed)?.filesystem_type() {
        nix::sys::statfs::OVERLAYFS_SUPER_MAGIC => FsKind::Overlay,
        nix::sys::statfs::TMPFS_MAGIC => FsKind::Tmpfs,
        _ => FsKind::Other,
    };
    Ok(Some(Mounted {
        id: stat.stx_mnt_id,
        kind,
    }))
}

/// Unmounts all that is mounted at `target`; not mounted or absent is success. Busy names a process that holds it, if
/// one is found.
pub fn unmount(target: &Path) -> Result<()> {
    for _ in 0..64 {
        match umount2(target, MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) => {}
            // Not a mount point (any more), or no such path.
            Err(Errno::EINVAL | Errno::ENOENT | Errno::ENOTDIR) => return Ok(()),
            Err(Errno::EBUSY) => {
                return Err(Error::Busy {
                    target: target.display().to_string(),
                    holder: holder(target),
                });
            }
            Err(e) => return Err(Error::io("unmount", target.display())(e)),
        }
    }
    Err(Error::Busy {
        target: target.display().to_string(),
        holder: None,
    })
}

/// A process with its root, working directory or an open file below `target`. Links are only read, never followed, so
/// that a hung file system does not hang us.
fn holder(target: &Path) -> Option<i32> {
    let below = |link: PathBuf| fs::read_link(link).is_ok_and(|to| to.starts_with(target));
    for entry in fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<i32>().ok()) else {
            continue;
        };
        let proc = entry.path();
        let open = fs::read_dir(proc.join("fd")).into_iter().flatten().flatten();
        if ["cwd", "root", "exe"].iter().any(|l| below(proc.join(l))) || open.into_iter().any(|fd| below(fd.path())) {
            return Some(pid);
        }
    }
    None
}

/// Mounts a tmpfs for /dev/shm of `size` bytes, mode 1777, with a SELinux label; one that is mounted
/// there already is left as it is.
pub fn mount_shm(target: &Path, size: u64, label: Option<&str>) -> Result<()> {
    match observe(target)? {
        Some(Mounted {
            kind: FsKind::Tmpfs, ..
        }) => return Ok(()),
        Some(_) => {
            return Err(Error::Busy {
                target: target.display().to_string(),
                holder: None,
            });
        }
        None => {}
    }
    fs::create_dir_all(target).map_err(Error::io("create directory", target.display()))?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let options = format!("mode=1777,size={size}{}", context(label));
    mount(Some("shm"), target, Some("tmpfs"), flags, Some(options.as_str()))
        .map_err(Error::io("mount shared memory at", target.display()))
}

/// The mounts of this instance.
pub struct Mounts {
    root: PathBuf,
    shim: PathBuf,
    overlay: std::result::Result<(), String>,
    user_files: OnceLock<UserFiles>,
}

impl Mounts {
    /// Tries whether overlay works on the root. `shim` makes user namespaces.
    pub fn open(root: &Path, shim: PathBuf) -> Mounts {
        Mounts {
            root: root.to_owned(),
            shim,
            overlay: probe(root),
            user_files: OnceLock::new(),
        }
    }
}

#[async_trait]
impl crate::world::Mounts for Mounts {
    fn is_mounted(&self, path: &Path) -> crate::Result<bool> {
        files::is_mount_point(path)
    }

    fn below(&self, dirs: &[PathBuf]) -> crate::Result<Vec<PathBuf>> {
        let table = MountTable::read().map_err(failed("mounts"))?;
        Ok(table.ours(dirs).map(|mount| mount.target.clone()).collect())
    }

    fn unmount(&self, path: &Path) -> crate::Result<()> {
        files::unmount(path)
    }

    fn unmount_only(&self, path: &Path) -> crate::Result<()> {
        files::unmount_only(path)
    }

    fn shm(&self, path: &Path, bytes: u64, label: Option<&str>) -> crate::Result<()> {
        mount_shm(path, bytes, label).map_err(failed("/dev/shm"))
    }

    fn tmpfs(&self, path: &Path, bytes: u64) -> crate::Result<()> {
        if files::is_mount_point(path)? {
            return Ok(());
        }
        let size = if bytes > 0 {
            format!(",size={bytes}")
        } else {
            String::new()
        };
        let options = format!("mode=1777{size}");
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        let mounted = mount(Some("tmpfs"), path, Some("tmpfs"), flags, Some(options.as_str()));
        mounted.map_err(crate::Error::sys("mount tmpfs on", path))
    }

    async fn rootfs(&self, want: Rootfs) -> crate::Result<()> {
        if want.user.is_some() {
            lets_through(&want.target)?;
        }
        let (overlay, image) = (self.overlay.is_ok(), want.image.clone());
        let mounted = tokio::task::spawn_blocking(move || mount_as(&want, overlay)).await;
        let mounted = mounted.map_err(|source| crate::Error::Task {
            op: "mount rootfs",
            source,
        })?;
        mounted.map_err(failed(&image))
    }

    fn clear_scratch(&self, path: &Path) -> crate::Result<()> {
        clear_scratch(path).map_err(failed("mounts"))
    }

    fn overlay(&self) -> std::result::Result<(), String> {
        self.overlay.clone()
    }

    async fn user_files(&self) -> UserFiles {
        if let Some(known) = self.user_files.get() {
            return *known;
        }
        let (dir, shim) = (self.root.clone(), self.shim.clone());
        let tried = tokio::task::spawn_blocking(move || user_files(&dir, &shim));
        let found = tried.await.unwrap_or(UserFiles::None);
        *self.user_files.get_or_init(|| found)
    }
}

fn mount_as(want: &Rootfs, overlay: bool) -> Result<()> {
    let Rootfs {
        lower,
        upper,
        work,
        target,
        ..
    } = want;
    let label = want.label.as_deref();
    let Some(user) = &want.user else {
        return match overlay {
            true => mount_rootfs(lower, upper, work, target, label),
            false => mount_copy(lower, upper, target, None, label),
        };
    };
    let pin = fs::File::open(&user.path).map_err(Error::io("open", user.path.display()))?;
    let mapping = Mapping {
        userns: pin.as_fd(),
        root: user.root(),
    };
    if overlay && mount_rootfs_mapped(lower, upper, work, target, label, mapping)? {
        return Ok(());
    }
    let shift = Shift {
        uids: user.uids.clone(),
        gids: user.gids.clone(),
    };
    mount_copy(lower, upper, target, Some(&shift), label)
}

/// Root of a user namespace is another user on the host, and must reach its root file system.
fn lets_through(target: &Path) -> crate::Result<()> {
    for dir in target.ancestors().skip(1) {
        let mode = dir.metadata().map_err(crate::Error::io("look at", dir))?.mode();
        if mode & 0o001 == 0 {
            return Err(crate::Error::Refused(format!(
                "directory {}: a pod with a user namespace needs it open to other users (chmod o+x)",
                dir.display()
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
