//! The loop: one applier per kind, passes made of stages, triggers that only say "look again".

pub mod conditions;
pub mod controller;
pub mod live;
pub mod pass;
pub mod plan;
pub mod record;
pub mod restore;
pub mod stage;
pub mod staged;
pub mod sweep;
pub mod trigger;
mod wiring;

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use state::Store;
use state::store::Opened;

use crate::config::Live;
use crate::error::Result;
use crate::session::Turns;
use crate::world::World;
use trigger::Queues;

/// What every pass is given: the records, the node, and a way to say "look again".
pub struct Context {
    pub store: Store,
    pub world: World,
    pub queues: Queues,
    /// Over which objects a pass runs: one at a time, the loop's or a repair's that is asked for meanwhile.
    pub passes: Turns,
    /// What opening the store found.
    pub opened: Opened,
    /// Set once every object was looked at.
    pub looked: OnceLock<()>,
    /// The read ends of each running container's output, held open: a pipe keeps its bytes only while someone has it
    /// open, and shim and container may die in the same moment.
    pub outputs: Mutex<HashMap<String, Vec<File>>>,
    /// `logEpoch` up to which this process has reopened each container's log.
    pub log_epochs: Mutex<HashMap<String, u64>>,
    /// Of which containers a checkpoint is being taken.
    pub checkpoints: Turns,
    /// When the doctor first saw what it finds, ns since the epoch.
    pub seen: Mutex<BTreeMap<String, i64>>,
    /// What a reload may change.
    live: RwLock<Arc<Live>>,
}

impl Context {
    pub fn new(store: Store, opened: Opened, world: World, queues: Queues) -> Context {
        Context {
            store,
            world,
            queues,
            passes: Turns::default(),
            opened,
            looked: OnceLock::new(),
            outputs: Mutex::default(),
            log_epochs: Mutex::default(),
            checkpoints: Turns::default(),
            seen: Mutex::default(),
            live: RwLock::default(),
        }
    }

    /// Records that cannot be read and were not thrown away: kind, uid, why.
    pub fn quarantined(&self) -> Vec<(String, String, String)> {
        let all = self.opened.quarantined.iter();
        all.filter(|(_, uid, _)| self.store.quarantined(uid)).cloned().collect()
    }

    /// The settings in force right now.
    pub fn live(&self) -> Arc<Live> {
        self.live.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// From here on these settings are in force. Must run within the runtime.
    ///
    /// # Errors
    /// If a handler's CNI directory cannot be watched; then the old ones are.
    pub fn set_live(&self, live: Live) -> Result<()> {
        self.world.network.use_conf_dirs(&live.handlers.cni_conf_dirs())?;
        *self.live.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(live);
        Ok(())
    }
}
