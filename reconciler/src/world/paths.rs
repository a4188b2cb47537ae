//! Where everything of an instance lies.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// The two directories of an instance and its mark.
#[derive(Clone, Debug)]
pub struct Paths {
    /// Durable: records, content, layers, object directories.
    pub root: PathBuf,
    /// On a tmpfs, gone with the boot: pins, sockets, FIFOs, mount points.
    pub state: PathBuf,
    /// First 8 hex digits of the root's id; part of every global name.
    pub instance: String,
}

impl Paths {
    pub fn make(&self) -> Result<()> {
        for dir in [self.root.join("pods"), self.state.join("pods")] {
            make_dir(&dir)?;
        }
        Ok(())
    }

    pub fn pods(&self) -> PathBuf {
        self.root.join("pods")
    }

    /// A sandbox's durable directory.
    pub fn pod(&self, sandbox: &str) -> PathBuf {
        self.root.join("pods").join(sandbox)
    }

    /// A container's durable directory, inside its sandbox's.
    pub fn container(&self, sandbox: &str, container: &str) -> PathBuf {
        self.pod(sandbox).join("containers").join(container)
    }

    /// The run record in an object's directory.
    pub fn run_record(dir: &Path) -> PathBuf {
        dir.join("run")
    }

    /// A sandbox's volatile directory.
    pub fn pod_state(&self, sandbox: &str) -> PathBuf {
        self.state.join("pods").join(sandbox)
    }

    pub fn shim(&self, sandbox: &str) -> PathBuf {
        self.pod_state(sandbox).join("shim")
    }

    pub fn shm(&self, sandbox: &str) -> PathBuf {
        self.pod_state(sandbox).join("shm")
    }

    /// Where images are mounted as volumes of a pod.
    pub fn image_volumes(&self, sandbox: &str) -> PathBuf {
        self.pod_state(sandbox).join("images")
    }

    /// A container's volatile directory: FIFOs and the mount point of its root file system.
    pub fn container_state(&self, sandbox: &str, container: &str) -> PathBuf {
        self.pod_state(sandbox).join("containers").join(container)
    }

    pub fn rootfs(&self, sandbox: &str, container: &str) -> PathBuf {
        self.container_state(sandbox, container).join("rootfs")
    }

    pub fn fifos(&self, sandbox: &str, container: &str) -> PathBuf {
        self.container_state(sandbox, container).join("io")
    }

    /// The pinned network namespace, where `ip netns exec` finds it.
    pub fn netns(&self, sandbox: &str) -> PathBuf {
        super::linux::netns::net_path(&self.instance, sandbox)
    }

    /// The cgroup under which pods without a `cgroup_parent` stand.
    pub fn default_cgroup(&self) -> String {
        format!("/reconcile-{}", self.instance)
    }

    /// The cgroup of the shims, if no other one was configured.
    pub fn default_shim_cgroup(&self) -> String {
        format!("/reconcile-{}-shims", self.instance)
    }
}

/// Mode of our directories: a container's user must be able to pass through to its rootfs.
pub const DIR_MODE: u32 = 0o711;

/// Makes a directory and its parents.
pub fn make_dir(path: &Path) -> Result<()> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(DIR_MODE)
        .create(path)
        .map_err(Error::io("make directory", path))
}
