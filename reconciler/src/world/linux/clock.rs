//! Time and the identity of the boot.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::{Error, Result};

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

pub struct Clock {
    /// random(4): differs after every boot.
    pub boot_id: String,
}

impl Clock {
    pub fn read() -> Result<Clock> {
        let text = std::fs::read_to_string(BOOT_ID).map_err(Error::io("read", BOOT_ID))?;
        Ok(Clock {
            boot_id: text.trim().to_owned(),
        })
    }

    /// CLOCK_REALTIME, ns since the epoch. For people only: nothing is decided by it.
    pub fn now_ns(&self) -> i64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        i64::try_from(now.as_nanos()).unwrap_or(i64::MAX)
    }

    /// CLOCK_BOOTTIME, ns.
    pub fn boottime_ns(&self) -> u64 {
        state::store::boottime_ns()
    }
}
