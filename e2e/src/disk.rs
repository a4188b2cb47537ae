//! File systems of the tests' own below a node's root: those that lack something that a usual disk has.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use nix::mount::{MntFlags, umount2};
use tempfile::TempDir;

use crate::tools;

/// A mounted file system; unmounted when dropped.
#[derive(Debug)]
pub struct Disk {
    target: PathBuf,
    _store: TempDir,
}

impl Disk {
    /// An overlay: another one cannot have its upper layer there, and its owners cannot be mapped.
    pub fn overlay(target: &Path) -> Result<Disk> {
        let store = store()?;
        for name in ["lower", "upper", "work"] {
            std::fs::create_dir(store.path().join(name))?;
        }
        let at = |name: &str| store.path().join(name).display().to_string();
        let options = format!(
            "lowerdir={},upperdir={},workdir={}",
            at("lower"),
            at("upper"),
            at("work")
        );
        Disk::mount(store, target, &["-t", "overlay", "-o", &options, "overlay"])
    }

    /// A disk of this type and of so many MiB, in a file, mounted as `kind`.
    pub fn looped(target: &Path, make: &[&str], kind: &str, mebibytes: u64) -> Result<Disk> {
        let store = store()?;
        let file = store.path().join("disk");
        std::fs::File::create_new(&file)?.set_len(mebibytes << 20)?;
        let (program, options) = make.split_first().context("a program that makes it")?;
        tools::check(Command::new(program).args(options).arg(&file))?;
        let file = file.display().to_string();
        Disk::mount(store, target, &["-t", kind, "-o", "loop", &file])
    }

    fn mount(store: TempDir, target: &Path, args: &[&str]) -> Result<Disk> {
        tools::check(Command::new("mount").args(args).arg(target))?;
        Ok(Disk {
            target: target.to_owned(),
            _store: store,
        })
    }
}

fn store() -> Result<TempDir> {
    Ok(tempfile::Builder::new().prefix("rc-disk-").tempdir_in("/var/tmp")?)
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = umount2(&self.target, MntFlags::MNT_DETACH);
    }
}
