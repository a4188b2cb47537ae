//! Time and the identity of the boot.

use crate::error::{Error, Result};

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

pub struct Clock {
    /// random(4): differs after every boot.
    pub boot_id: String,
}

impl Clock {
    pub fn read() -> Result<Clock> {
        let boot_id = state::clock::boot_id().map_err(Error::io("read", BOOT_ID))?;
        Ok(Clock { boot_id })
    }

    /// CLOCK_REALTIME, ns since the epoch. For people only: nothing is decided by it.
    pub fn now_ns(&self) -> i64 {
        state::clock::now_ns()
    }

    /// CLOCK_BOOTTIME, ns.
    pub fn boottime_ns(&self) -> u64 {
        state::clock::boottime_ns()
    }
}
