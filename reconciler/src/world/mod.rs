//! The node, as far as it is ours: everything here is named from (instance, kind, uid), so that it can be found again
//! without being remembered.
//!
//! ```text
//!   stages, sweep, loop -> World { files mounts netns cgroups network images shims runs }
//!                            linux/   the real node
//!                            tests/sim: a node in memory, for every cut at every side effect
//! ```
//!
//! Must not: know how high an object shall stand. It offers list, observe, ensure and remove; the stages decide.

pub mod linux;
pub mod paths;

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
pub use paths::Paths;
use shim::api::{ExecOutput, ExecRequest, PauseRequest, RunRequest, Started, StateResponse, StopRequest};
use shim::record::{End, RunRecord};
use tokio::sync::{broadcast, mpsc, watch};

use crate::error::Result;
use crate::image::manifest::Loaded;
use linux::clock::Clock;
use linux::garbage::Roots;
use linux::mounts::UserFiles;
use linux::netns::{Kind, Pin, Pins, UserPin};
use linux::network::{self, Attachment, Drift, Ready, State, Want};
use linux::passwd::{ResolvedUser, UserRequest};
use linux::pull::{Failure, Progress, Pulled};
use linux::registry::{Access, Ignored};
use linux::unpack::Form;

/// Every part of the node that the stages may touch.
pub struct World {
    pub paths: Arc<Paths>,
    pub clock: Clock,
    pub files: Arc<dyn Files>,
    pub mounts: Arc<dyn Mounts>,
    pub netns: Arc<dyn Netns>,
    pub cgroups: Arc<dyn Cgroups>,
    /// Are they systemd's scopes (CRI RuntimeConfig `cgroup_driver`)?
    pub systemd: bool,
    /// Are processes and files labelled for SELinux?
    pub selinux: bool,
    pub network: Arc<dyn Network>,
    pub images: Arc<dyn Images>,
    pub shims: Arc<dyn Shims>,
    pub runs: Arc<dyn Runs>,
    /// Where usage is read; a simulated node has none.
    pub usage: Option<Arc<linux::cgroup::Cgroups>>,
}

/// A child of a directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    pub name: String,
    pub is_dir: bool,
}

/// Small files of ours, in the directories of objects.
#[async_trait]
pub trait Files: Send + Sync {
    /// Absent is `None`.
    fn read(&self, path: &Path) -> Result<Option<Vec<u8>>>;
    /// Writes under a temporary name and renames. Not flushed.
    fn replace(&self, path: &Path, text: &[u8]) -> Result<()>;
    /// The same, for a file that belongs to this user and group and has this SELinux label.
    fn replace_for(&self, path: &Path, text: &[u8], owner: (u32, u32), label: Option<&str>) -> Result<()> {
        let _ = (owner, label); // only a real node has them
        self.replace(path, text)
    }
    /// Absent is success.
    fn unlink(&self, path: &Path) -> Result<()>;
    fn exists(&self, path: &Path) -> bool;
    /// Device and inode of the file of that name; zeros if there is none.
    fn identity(&self, path: &Path) -> (u64, u64);
    /// Makes a directory and its parents; one that is there stays as it is.
    fn make_dir(&self, path: &Path, mode: u32) -> Result<()>;
    /// The same in a tree of the caller's, whose file system may hang.
    async fn make_their_dir(&self, path: &Path, mode: u32) -> Result<()> {
        self.make_dir(path, mode)
    }
    fn set_mode(&self, path: &Path, mode: u32) -> Result<()>;
    /// Gives a file a SELinux label.
    fn label(&self, _path: &Path, _label: &str) -> Result<()> {
        Ok(()) // only a real node has them
    }
    /// The children of a directory, by name; an absent one has none.
    fn list(&self, dir: &Path) -> Result<Vec<Entry>>;
    /// Removes an empty directory; absent is success.
    fn remove_dir(&self, path: &Path) -> Result<()>;
    /// Absent is `None`.
    fn run_record(&self, path: &Path) -> Result<Option<RunRecord>>;
    /// Writes a run record's end durably, unless it has one.
    fn write_end(&self, path: &Path, end: End) -> Result<()>;
    /// Opens the read ends of a running container's output, to be held: a pipe keeps its bytes only while someone has
    /// it open, and shim and container may die in the same moment. Absent FIFOs (a terminal) are nothing to hold.
    fn hold(&self, fifos: &Path) -> Vec<File>;
    /// Renames a tree into the trash; absent is success.
    fn bury(&self, path: &Path) -> Result<()>;
    /// Deletes what is in the trash; answers how many trees are gone.
    async fn empty_trash(&self) -> Result<usize>;
    /// Until something was buried since the last call.
    async fn buried(&self);
}

/// A container's root file system as it shall be mounted.
#[derive(Clone, Debug)]
pub struct Rootfs {
    /// As the caller asked for it; for messages.
    pub image: String,
    /// Trees of the layers, top first.
    pub lower: Vec<PathBuf>,
    pub upper: PathBuf,
    pub work: PathBuf,
    pub target: PathBuf,
    /// The pod's own user namespace.
    pub user: Option<UserPin>,
    /// The SELinux label of its files.
    pub label: Option<String>,
}

/// Mounts below our directories.
#[async_trait]
pub trait Mounts: Send + Sync {
    /// Is something mounted on `path` itself? Absent is no.
    fn is_mounted(&self, path: &Path) -> Result<bool>;
    /// Mount points below these directories, deepest first.
    fn below(&self, dirs: &[PathBuf]) -> Result<Vec<PathBuf>>;
    /// Unmounts and removes a mount point; absent is success. Whoever still uses it keeps it until they end.
    fn unmount(&self, path: &Path) -> Result<()>;
    /// Takes the topmost mount off a path and leaves the path.
    fn unmount_only(&self, path: &Path) -> Result<()>;
    /// Mounts a pod's shared memory, `bytes` big, unless it is; its files have the SELinux label.
    fn shm(&self, path: &Path, bytes: u64, label: Option<&str>) -> Result<()>;
    /// Mounts a tmpfs for a volume, `bytes` big (0: no bound), unless it is.
    fn tmpfs(&self, path: &Path, bytes: u64) -> Result<()>;
    async fn rootfs(&self, want: Rootfs) -> Result<()>;
    /// Takes down what an interrupted mount with mapped ids left there; absent is success.
    fn clear_scratch(&self, path: &Path) -> Result<()>;
    /// Why overlay does not work on the root, if it does not: each root file system is a copy then.
    fn overlay(&self) -> std::result::Result<(), String>;
    /// What pods with a user namespace get on the root.
    async fn user_files(&self) -> UserFiles;
}

/// Namespaces, pinned by bind mounts.
#[async_trait]
pub trait Netns: Send + Sync {
    /// Sandboxes of this instance that have a net pin.
    fn list(&self) -> Result<Vec<String>>;
    fn observe(&self, pin: &Path) -> Result<Pin>;
    /// Makes and pins what is missing; a whole set is left as it is.
    async fn ensure(&self, want: Pins) -> Result<()>;
    /// Pins the namespace of a living process again.
    fn rebind(&self, pin: &Path, kind: Kind, pid: u32) -> Result<()>;
    /// Absent is success.
    fn remove(&self, pin: &Path) -> Result<()>;
}

/// Cgroups, in every hierarchy of the node. Paths are absolute within each (`/kubepods/pod1/<uid>`).
pub trait Cgroups: Send + Sync {
    fn v2(&self) -> bool;
    /// The cgroup of an object with this uid below `parent`.
    fn path(&self, parent: &str, uid: &str) -> String {
        format!("{parent}/{uid}")
    }
    /// How many of the hierarchies have the directory, of how many.
    fn observe(&self, path: &str) -> (usize, usize);
    fn ensure(&self, path: &str) -> Result<()>;
    /// Must a container's be there before whoever makes the container? On v1 that one makes it.
    fn before_container(&self) -> bool {
        self.v2()
    }
    /// What a cgroup was made for lives in it now.
    fn settled(&self, _path: &str) {}
    /// Tells whoever else writes the files (name and value) of limits, so that they stay.
    fn keep(&self, _path: &str, _limits: &[(&str, &str)]) -> Result<()> {
        Ok(())
    }
    /// SIGKILLs everything in a cgroup and below it; absent is success.
    fn kill(&self, path: &str) -> Result<()>;
    /// Removes a cgroup and those below it. Busy ones are an error; absent is success.
    fn remove(&self, path: &str) -> Result<()>;
    /// Removes a cgroup of ours that groups others, where nothing is in it any more.
    fn remove_if_empty(&self, path: &str);
    /// Children of `parent` in any hierarchy, by their uids where they have such.
    fn children(&self, parent: &str) -> Vec<String>;
    /// The text of one file of a controller (v2: of the only hierarchy).
    fn get(&self, controller: &str, path: &str, file: &str) -> io::Result<String>;
    fn set(&self, controller: &str, path: &str, file: &str, value: &str) -> io::Result<()>;
    /// v2: the directory, to which programs can be attached; v1 has other means.
    fn v2_dir(&self, path: &str) -> Option<PathBuf>;
}

/// Addresses, routes and host ports of sandboxes. What one was given is in its attachment.
#[async_trait]
pub trait Network: Send + Sync {
    /// Gives a sandbox its network, or restores it. Idempotent.
    async fn ensure(&self, want: &Want) -> network::Result<Attachment>;
    /// Compares the attachment with the kernel. Reads only.
    async fn observe(&self, want: &Want) -> network::Result<State>;
    /// Takes a sandbox's network away. `netns` is its pin if it still has one; remove that only afterwards, and remove
    /// it then: the pod's link goes with it. Absent is success.
    async fn remove(&self, uid: &str, dir: &Path, netns: Option<&Path>) -> network::Result<()>;
    /// Pays a debt: takes back what an attachment says, wherever that is kept now.
    async fn detach(&self, attachment: &Attachment, netns: Option<&Path>) -> network::Result<()>;
    /// The attachment in a sandbox's directory.
    fn attachment(&self, dir: &Path) -> network::Result<Option<Attachment>>;
    /// Unlinks the attachment: what it says is owed elsewhere now. Absent is success.
    fn forget(&self, dir: &Path) -> network::Result<()>;
    /// The sandboxes that have a link or an attachment of this instance's.
    async fn list(&self) -> network::Result<Vec<String>>;
    /// Deletes links that still bear the mark of a sandbox without a record. For the sweep.
    async fn sweep_links(&self, uid: &str) -> network::Result<()>;
    /// Takes away what pods share (bridge, table) when none is left. For the sweep.
    async fn sweep_node(&self) -> network::Result<()>;
    /// Host ports of ours that no pod has asked for, `PORT/PROTOCOL`. Reads only.
    async fn stale(&self) -> network::Result<Vec<String>> {
        Ok(Vec::new())
    }
    /// Takes such rules away.
    async fn mend(&self) -> network::Result<()> {
        Ok(())
    }
    /// The directories of CNI configurations that cannot be used, and why.
    fn misconfigured(&self) -> Vec<(PathBuf, String)> {
        Vec::new()
    }
    /// The CNI directories that runtime handlers have of their own, from now on: those and no others are followed. Must
    /// run within the runtime.
    ///
    /// # Errors
    /// If one cannot be watched; then nothing has changed.
    fn use_conf_dirs(&self, _: &BTreeSet<PathBuf>) -> network::Result<()> {
        Ok(())
    }
    /// At start, once: makes what pods share anew from the attachments on disk.
    async fn sync_node(&self) -> network::Result<()>;
    /// The pod CIDRs that the node was given (CRI UpdateRuntimeConfig), comma-separated.
    fn use_pod_cidrs(&self, cidrs: &str) -> network::Result<()>;
    /// CRI condition `NetworkReady`, from memory.
    fn ready(&self) -> Ready;
    /// Asks the plugins for their STATUS, for [`Network::ready`].
    async fn probe(&self);
    /// Follows what happens to this instance's links on the host. Must run within the runtime.
    fn drift(&self) -> network::Result<mpsc::Receiver<Drift>>;
    /// Rises whenever another CNI configuration counts.
    fn changes(&self) -> watch::Receiver<u64>;
    /// The configuration in use, for verbose status.
    fn describe(&self) -> serde_json::Value;
}

/// The image store: content, unpacked layers, pulls.
#[async_trait]
pub trait Images: Send + Sync {
    /// Directory of the image store (CRI `FilesystemIdentifier.mountpoint`).
    fn dir(&self) -> &Path;
    /// The parsed manifest and configuration, if they are here.
    async fn load(&self, digest: &str) -> Result<Option<Loaded>>;
    /// How many blobs of an image are not here.
    fn missing_blobs(&self, image: &Loaded) -> usize;
    /// Makes sure that the built-in image's content is here; answers its manifest's digest.
    async fn builtin(&self) -> Result<String>;
    /// The manifest's digest of the built-in image, if it was made.
    fn find_builtin(&self) -> Result<Option<String>>;
    /// How many of these layers are not unpacked.
    async fn missing(&self, chain_ids: &[String]) -> Result<usize>;
    /// How many of these layers have to be looked at before they are used.
    async fn doubtful(&self, chain_ids: &[String]) -> Result<usize>;
    /// Looks at them; answers how many were damaged and are gone.
    async fn settle_doubts(&self, chain_ids: &[String]) -> Result<usize>;
    /// Unpacks what is missing of the image with this manifest. A blob that proves damaged is removed, so that its
    /// image fetches it again.
    async fn unpack(&self, manifest: &str) -> Result<()>;
    /// Fetches and unpacks what is missing of an image. Dropping the future stops the traffic.
    async fn pull(&self, access: &Access, progress: &Arc<Progress>) -> Result<Pulled, Failure>;
    /// The trees of these layers, top first, for an overlay.
    fn lower(&self, chain_ids: &[String]) -> Result<Vec<PathBuf>>;
    /// Who runs a container of the image with these layers; `image` is for messages.
    async fn user(&self, image: &str, chain_ids: &[String], request: UserRequest) -> Result<ResolvedUser>;
    /// Bytes and inodes of content and unpacked layers.
    async fn usage(&self) -> Result<(u64, u64)>;
    /// An image's record goes, and with it perhaps the last need of its content.
    async fn release(&self, manifest: &str) -> Result<()>;
    /// A container that may have been the last to need something is gone.
    fn look_for_garbage(&self);
    /// Until something was released since the last call.
    async fn released(&self);
    /// Removes what these roots do not reach, unless it is younger than `grace` or a pull in flight needs it. Answers
    /// how many blobs and layers went.
    async fn collect(&self, roots: Roots, grace: Duration) -> Result<usize>;
    /// Until nothing is being unpacked.
    async fn quiet(&self);
    /// Lines of registry configuration that are not used, each with a reference of its host.
    fn ignored_settings(&self) -> Vec<(String, Ignored)> {
        Vec::new()
    }
    /// How registries are found and waited for, from the next request on.
    fn reconfigure(&self, _: linux::registry::Config) {}
    /// Everything is on disk, and nothing is written any more.
    async fn end(&self) -> Result<()>;
}

/// The shims of this instance, one a pod, and the processes that they started.
#[async_trait]
pub trait Shims: Send + Sync {
    /// The shim, if it lives.
    async fn find(&self, sandbox: &str) -> Option<Arc<dyn Shim>>;
    /// A living shim; starts one (which takes over what a dead one left) if need be.
    async fn ensure(&self, namespace: &str, name: &str, sandbox: &str) -> Result<Arc<dyn Shim>>;
    /// Ends the shim, by force if it does not answer. Its processes must have ended before.
    async fn remove(&self, sandbox: &str) -> Result<()>;
    /// Sandboxes whose shim's connection ended, since the first one was made. Only the first caller has them.
    fn deaths(&self) -> Option<mpsc::UnboundedReceiver<String>>;
    /// The cgroup that all shims of this instance share, outside any pod's limits.
    fn cgroup(&self) -> &str;
    /// The `oom_score_adj` of shims that are started from now on; `None`: the daemon's.
    fn set_oom_score(&self, _: Option<i32>) {}
    /// When a living process started, in ticks since the boot; `None` if there is none, or it is a zombie.
    fn start_ticks(&self, pid: i32) -> Option<u64>;
    /// A connection for streams, which only a real shim has.
    async fn streams(&self, sandbox: &str) -> Option<shim::Client>;
}

/// One pod's shim. The verbs are those of [`shim::Client`].
#[async_trait]
pub trait Shim: Send + Sync {
    async fn state(&self) -> shim::Result<StateResponse>;
    async fn pause(&self, request: PauseRequest) -> shim::Result<Started>;
    async fn run(&self, request: RunRequest) -> shim::Result<Started>;
    async fn stop(&self, request: StopRequest) -> shim::Result<()>;
    async fn delete(&self, id: &str) -> shim::Result<()>;
    async fn reopen_log(&self, id: &str, path: &str) -> shim::Result<()>;
    async fn exec(&self, request: ExecRequest) -> shim::Result<ExecOutput>;
    /// Waits until the connection ends: the shim has died or shut down.
    async fn closed(&self);
}

/// Tells when a run record was written. A lost event costs time only: every pass reads the record itself.
pub trait Runs: Send + Sync {
    /// Watches the run record in `dir`; again is harmless.
    fn add(&self, dir: &Path) -> Result<()>;
    /// Directories whose record was written from now on. A lagging receiver must look at all of them.
    fn subscribe(&self) -> broadcast::Receiver<PathBuf>;
}

/// What a world is made from.
pub struct Settings {
    pub paths: Arc<Paths>,
    pub shim: PathBuf,
    pub network: linux::network::Config,
    pub registry: linux::registry::Config,
    /// Cgroup above the shims' own; `None`: theirs is at the top, named after the instance.
    pub shim_cgroup: Option<String>,
    /// Cgroups are made by systemd; `None`: if it can.
    pub systemd: Option<bool>,
}

impl World {
    /// Opens the real node's parts; makes the directories that must be there. Must be called within a tokio runtime.
    pub fn open(settings: Settings) -> Result<World> {
        let Settings {
            paths,
            shim,
            network,
            registry,
            shim_cgroup,
            systemd,
        } = settings;
        paths.make()?;
        let cgroups = Arc::new(linux::cgroup::Cgroups::detect()?);
        let systemd = systemd.unwrap_or_else(|| linux::systemd::usable(&cgroups));
        let driver: Arc<dyn Cgroups> = match systemd {
            true => Arc::new(linux::systemd::Systemd::new(
                cgroups.clone(),
                shim.clone(),
                paths.default_cgroup(),
            )?),
            false => cgroups.clone(),
        };
        let clock = Clock::read()?;
        // Never the given one itself: others' shims may be there.
        let shim_cgroup = match shim_cgroup {
            Some(parent) => format!("{parent}/{}", paths.instance),
            None => paths.default_shim_cgroup(),
        };
        let mounts = linux::mounts::Mounts::open(&paths.root, shim.clone());
        let form = match mounts.overlay() {
            Ok(()) => Form::Stacked,
            Err(_) => Form::Whole,
        };
        let images = linux::images::Images::open(&paths.root, shim.clone(), registry, &clock.boot_id, form)?;
        if let Err(why) = mounts.overlay() {
            tracing::warn!("{why}: root file systems are copies of their images");
        }
        Ok(World {
            files: Arc::new(linux::files::Files::new(images.layers().trash().clone())),
            mounts: Arc::new(mounts),
            netns: Arc::new(linux::netns::Namespaces {
                instance: paths.instance.clone(),
                shim: shim.clone(),
            }),
            shims: Arc::new(linux::shims::Shims::new(paths.clone(), shim, shim_cgroup)),
            runs: Arc::new(linux::watch::RunWatch::new()?),
            images: Arc::new(images),
            network: Arc::new(linux::network::Network::new(network)?),
            usage: Some(cgroups),
            cgroups: driver,
            systemd,
            selinux: linux::selinux::is_on(),
            clock,
            paths,
        })
    }
}
