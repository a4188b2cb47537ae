//! Time, the boot and chance, as the store and all above it tell them.
//!
//! They are ambient, as tokio's time is: free functions ask the system, unless this thread was given another clock.
//! Only a simulation does that, which runs store, loop and node on one thread.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Another source of time, boot and chance.
pub trait Clock {
    /// ns since the epoch; may jump.
    fn now_ns(&self) -> i64;
    /// ns since the boot; never jumps.
    fn boottime_ns(&self) -> u64;
    /// Differs after every boot.
    fn boot_id(&self) -> String;
    fn random(&self, bytes: &mut [u8]);
}

thread_local! {
    static OTHER: RefCell<Option<Arc<dyn Clock>>> = const { RefCell::new(None) };
}

/// Gives this thread another clock, or (`None`) the system's again.
pub fn set(clock: Option<Arc<dyn Clock>>) {
    OTHER.set(clock);
}

fn other() -> Option<Arc<dyn Clock>> {
    OTHER.with_borrow(Clone::clone)
}

/// CLOCK_REALTIME, ns since the epoch.
pub fn now_ns() -> i64 {
    other().map_or_else(
        || {
            let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            i64::try_from(since.as_nanos()).unwrap_or(i64::MAX - (1 << 32))
        },
        |clock| clock.now_ns(),
    )
}

/// CLOCK_BOOTTIME, ns: for `ready_by` and `start_by`.
pub fn boottime_ns() -> u64 {
    other().map_or_else(
        || {
            let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME);
            now.map_or(0, |t| t.tv_sec() as u64 * 1_000_000_000 + t.tv_nsec() as u64)
        },
        |clock| clock.boottime_ns(),
    )
}

/// random(4): differs after every boot.
///
/// # Errors
/// If it cannot be read.
pub fn boot_id() -> std::io::Result<String> {
    match other() {
        Some(clock) => Ok(clock.boot_id()),
        None => Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?
            .trim()
            .to_owned()),
    }
}

/// `N` random bytes as hex.
pub(crate) fn random_hex<const N: usize>() -> Result<String, String> {
    let mut bytes = [0; N];
    match other() {
        Some(clock) => clock.random(&mut bytes),
        None => getrandom::fill(&mut bytes).map_err(|e| format!("no random numbers: {e}"))?,
    }
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}
