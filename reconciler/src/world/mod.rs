//! The node, as far as it is ours: everything here is named from (instance, kind, uid), so that it can be found again
//! without being remembered.
//!
//! Must not: know how high an object shall stand. It offers list, observe, ensure and remove; the stages decide.

pub mod linux;
pub mod paths;

use std::path::PathBuf;
use std::sync::Arc;

pub use paths::Paths;

use crate::error::Result;
use linux::cgroup::Cgroups;
use linux::clock::Clock;
use linux::images::Images;
use linux::network::Network;
use linux::shims::Shims;
use linux::trash::Trash;
use linux::unpack::Form;
use linux::watch::RunWatch;

/// Every part of the node that the stages may touch.
pub struct World {
    pub paths: Arc<Paths>,
    pub clock: Clock,
    pub cgroups: Cgroups,
    pub network: Network,
    pub images: Images,
    pub shims: Shims,
    pub runs: RunWatch,
    pub trash: Trash,
    /// Why overlay does not work on the root, if it does not: each root file system is a copy then.
    pub overlay: std::result::Result<(), String>,
}

/// What a world is made from.
pub struct Settings {
    pub paths: Arc<Paths>,
    pub shim: PathBuf,
    pub network: linux::network::Config,
    pub registry: linux::registry::Config,
}

impl World {
    /// Opens the node's parts; makes the directories that must be there. Must be called within a tokio runtime.
    pub fn open(settings: Settings) -> Result<World> {
        let Settings {
            paths,
            shim,
            network,
            registry,
        } = settings;
        paths.make()?;
        let cgroups = Cgroups::detect()?;
        let clock = Clock::read()?;
        let shim_cgroup = format!("/reconcile-{}-shims", paths.instance);
        let overlay = linux::mounts::probe(&paths.root);
        let form = match &overlay {
            Ok(()) => Form::Stacked,
            Err(_) => Form::Whole,
        };
        let images = Images::open(&paths.root, shim.clone(), registry, &clock.boot_id, form)?;
        if let Err(why) = &overlay {
            tracing::warn!("{why}: root file systems are copies of their images");
        }
        Ok(World {
            overlay,
            shims: Shims::new(paths.clone(), shim, shim_cgroup),
            runs: RunWatch::new()?,
            trash: images.layers().trash().clone(),
            images,
            network: Network::new(network)?,
            cgroups,
            clock,
            paths,
        })
    }
}
