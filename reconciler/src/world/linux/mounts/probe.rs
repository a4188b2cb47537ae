//! What the file system of the root can do, tried with real mounts.

use std::fs;
use std::os::fd::AsFd;
use std::path::Path;

use nix::mount::{MntFlags, umount2};

use super::{mapped, mount_rootfs, open_path};
use crate::world::linux::content::{Error, Result};
use crate::world::linux::unpack::whiteout::{make_opaque, make_whiteout};

/// What the kernel can do for a user namespace's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UserFiles {
    /// No user namespaces can be made.
    None,
    /// They can, but a copy must be made for each: the file system's owners cannot be mapped.
    Copied,
    /// Its files can be shown with other owners.
    Mapped,
}

/// Tries it on the file system of `dir`.
pub fn user_files(dir: &Path, shim: &Path) -> UserFiles {
    let one = [(0, 100_000, 1)];
    let made = || {
        let held = shim::Held::make(shim, &["user"]).ok()?;
        held.map(&one, &one).ok()?;
        Some((fs::File::open(held.namespace("user")).ok()?, held))
    };
    let Some((user, _held)) = made() else {
        return UserFiles::None;
    };
    match mapped(dir, user.as_fd()) {
        Ok(_) => UserFiles::Mapped,
        Err(_) => UserFiles::Copied,
    }
}

/// Whether overlay works on the file system of `root`, with device whiteouts and opaque marks; else why not, for a
/// condition of the Node.
pub fn probe(root: &Path) -> std::result::Result<(), String> {
    // One name, so that what a crash amid it left is found.
    let dir = root.join("probe");
    let clear = || {
        let _ = umount2(&dir.join("merged"), MntFlags::MNT_DETACH);
        let _ = fs::remove_dir_all(&dir);
    };
    clear();
    let outcome = try_overlay(&dir);
    clear();
    match outcome {
        // A bad day, which says nothing of the file system.
        Err(Error::Io { cause, .. }) if is_passing(&cause) => Ok(()),
        other => other.map_err(|e| format!("overlay does not work on {}: {e}", root.display())),
    }
}

fn is_passing(cause: &std::io::Error) -> bool {
    let passing = [
        libc::ENOSPC,
        libc::EDQUOT,
        libc::ENOMEM,
        libc::EMFILE,
        libc::ENFILE,
        libc::EIO,
        libc::EROFS,
        libc::EBUSY,
    ];
    cause.raw_os_error().is_some_and(|code| passing.contains(&code))
}

fn try_overlay(dir: &Path) -> Result<()> {
    let lower = [dir.join("top"), dir.join("base")];
    let failed = |doing: &'static str| move |e: std::io::Error| Error::io(doing, "a trial overlay")(e);
    for dir in &lower {
        fs::create_dir_all(dir.join("opaque")).map_err(failed("make directories for"))?;
    }
    for name in ["gone", "opaque/gone"] {
        fs::write(lower[1].join(name), "").map_err(failed("write to"))?;
    }
    let open = |path: &Path| open_path(path).map_err(|e| failed("open")(e.into()));
    make_whiteout(open(&lower[0])?.as_fd(), b"gone").map_err(|e| failed("make a whiteout for")(e.into()))?;
    make_opaque(open(&lower[0].join("opaque"))?.as_fd())
        .map_err(|e| failed("mark a directory as opaque for")(e.into()))?;
    let merged = dir.join("merged");
    mount_rootfs(&lower, &dir.join("upper"), &dir.join("work"), &merged, None)?;
    fs::write(merged.join("new"), "").map_err(failed("write to"))?;
    let seen = |name: &str| fs::symlink_metadata(merged.join(name)).is_ok();
    if seen("gone") || seen("opaque/gone") {
        return Err(Error::invalid("overlay", "ignores whiteouts"));
    }
    Ok(())
}
