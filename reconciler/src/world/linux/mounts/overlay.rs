//! Overlays, by the mount API of descriptors, or by mount(2) where the kernel is older.

use std::ffi::{CStr, CString};
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use super::{
    FSCONFIG_CMD_CREATE, FSOPEN_CLOEXEC, MOUNT_ATTR_RDONLY, attach, configure, fd_from, made, open_path, token,
};

/// Layers must not redirect look-ups (`redirect_dir`, `metacopy`) nor depend on what lay below before (`index`).
const OPTIONS: [(&CStr, &CStr); 3] = [
    (c"index", c"off"),
    (c"metacopy", c"off"),
    (c"redirect_dir", c"nofollow"),
];
/// Longest string that fsconfig(2) takes.
const STRING: usize = 255;

const FSCONFIG_SET_STRING: libc::c_uint = 1;

/// An overlay to be made.
pub struct Overlay<'a> {
    /// Top first.
    pub lower: &'a [PathBuf],
    /// Its upper and its work directory; read-only without them.
    pub upper: Option<(&'a Path, &'a Path)>,
    /// The SELinux label of all files in it.
    pub label: Option<&'a str>,
}

/// A path that fits, and the descriptor that it may lean on.
fn short(path: &Path) -> nix::Result<(CString, Option<OwnedFd>)> {
    if path.as_os_str().len() <= STRING {
        return Ok((
            CString::new(path.as_os_str().as_bytes()).map_err(|_| Errno::EINVAL)?,
            None,
        ));
    }
    let fd = open_path(path)?;
    let name = CString::new(format!("/proc/self/fd/{}", fd.as_raw_fd())).map_err(|_| Errno::EINVAL)?;
    Ok((name, Some(fd)))
}

/// An overlay attached nowhere. EINVAL: this kernel does not know `lowerdir+`, or really something else; mount(2),
/// which is tried then, tells.
pub fn overlay(want: &Overlay<'_>, attributes: libc::c_uint) -> nix::Result<OwnedFd> {
    // SAFETY: the name is NUL-terminated; a descriptor that the kernel answers is ours.
    let fs = unsafe { fd_from(libc::syscall(libc::SYS_fsopen, c"overlay".as_ptr(), FSOPEN_CLOEXEC))? };
    let mut kept = Vec::new();
    let mut set_path = |key: &CStr, path: &Path| {
        let (path, fd) = short(path)?;
        kept.extend(fd);
        configure(&fs, FSCONFIG_SET_STRING, Some((key, &path)))
    };
    for layer in want.lower {
        set_path(c"lowerdir+", layer)?;
    }
    if let Some((upper, work)) = want.upper {
        set_path(c"upperdir", upper)?;
        set_path(c"workdir", work)?;
    }
    configure(&fs, FSCONFIG_SET_STRING, Some((c"source", c"overlay")))?;
    for (key, value) in OPTIONS {
        configure(&fs, FSCONFIG_SET_STRING, Some((key, value)))?;
    }
    if let Some(label) = want.label {
        let label = CString::new(label).map_err(|_| Errno::EINVAL)?;
        configure(&fs, FSCONFIG_SET_STRING, Some((c"context", &label)))?;
    }
    configure(&fs, FSCONFIG_CMD_CREATE, None)?;
    made(&fs, attributes)
}

/// Mounts an overlay at `target`, read-only without an upper layer.
pub fn mount_overlay(want: &Overlay<'_>, target: &Path) -> nix::Result<()> {
    let attributes = if want.upper.is_none() { MOUNT_ATTR_RDONLY } else { 0 };
    match overlay(want, attributes) {
        Ok(fd) => attach(&fd, target),
        Err(Errno::EINVAL | Errno::ENOSYS) => mount_by_options(want, target),
        Err(e) => Err(e),
    }
}

/// For kernels before 6.5.
pub fn mount_by_options(want: &Overlay<'_>, target: &Path) -> nix::Result<()> {
    let mut kept = Vec::new();
    let mut link = |path: &Path| -> nix::Result<String> {
        let fd = open_path(path)?;
        let text = format!("/proc/self/fd/{}", fd.as_raw_fd());
        kept.push(fd);
        Ok(text)
    };
    let layers = want.lower.iter().map(|l| link(l)).collect::<nix::Result<Vec<_>>>()?;
    let mut options = format!("lowerdir={}", layers.join(":"));
    let mut flags = MsFlags::empty();
    match want.upper {
        Some((upper, work)) => {
            options.push_str(&format!(",upperdir={},workdir={}", link(upper)?, link(work)?));
        }
        None => flags |= MsFlags::MS_RDONLY,
    }
    for (key, value) in OPTIONS {
        options.push_str(&format!(",{}={}", key.to_string_lossy(), value.to_string_lossy()));
    }
    options.push_str(&context(want.label));
    mount(Some("overlay"), target, Some("overlay"), flags, Some(options.as_str()))
}

/// The mount option for a SELinux label, which may hold commas.
pub fn context(label: Option<&str>) -> String {
    label.map_or_else(String::new, |label| format!(",context=\"{label}\""))
}

pub fn detached_by_options(layers: &Overlay<'_>) -> nix::Result<OwnedFd> {
    let point = std::env::temp_dir().join(format!("reconcile-view-{}", token()));
    fs::DirBuilder::new()
        .create(&point)
        .map_err(|e| Errno::from_raw(e.raw_os_error().unwrap_or(libc::EIO)))?;
    let view = mount_by_options(layers, &point).and_then(|()| {
        // The descriptor keeps the file system when the mount point is gone.
        let view = open_path(&point);
        umount2(&point, MntFlags::MNT_DETACH).and(view)
    });
    let _ = fs::remove_dir(&point);
    view
}
