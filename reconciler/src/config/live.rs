//! What a reload changes under a running loop.

use std::time::Duration;

use state::sandbox::Profile;

use super::Config;
use super::handlers::Handlers;
use super::values::Rlimits;
use crate::world::linux::registry;

/// Read anew for each container, shim and round of garbage collection.
#[derive(Clone, Debug, PartialEq)]
pub struct Live {
    /// For containers that ask for no seccomp profile.
    pub seccomp: Profile,
    pub rlimits: Rlimits,
    /// Bytes of a log entry at most.
    pub max_line: u32,
    pub handlers: Handlers,
    /// Age at which content that nothing needs is garbage.
    pub gc_grace: Duration,
    /// Above it the images' file system is too full to wait for that, percent; 100 is never.
    pub gc_high: u8,
}

impl Default for Live {
    fn default() -> Live {
        Live {
            seccomp: Profile::Unconfined,
            rlimits: Rlimits::new(),
            max_line: 16 << 10,
            handlers: Handlers::default(),
            gc_grace: Duration::from_secs(600),
            gc_high: 100,
        }
    }
}

impl Config {
    /// With the handlers that [`handlers::probe`](super::handlers::probe) found.
    pub fn live(&self, handlers: Handlers) -> Live {
        Live {
            seccomp: self.containers.seccomp.0.clone(),
            rlimits: self.containers.rlimits.clone(),
            max_line: self.logs.max_line_bytes.0,
            handlers,
            gc_grace: Duration::from_secs(self.images.gc_grace_seconds.0),
            gc_high: self.images.gc_high_percent.0,
        }
    }

    pub fn registries(&self) -> registry::Config {
        registry::Config {
            hosts_roots: self.registry.certs_dirs.iter().map(|dir| dir.0.clone()).collect(),
            rate_floor: self.registry.rate_floor,
            window: self.registry.window_seconds.duration(),
        }
    }
}
