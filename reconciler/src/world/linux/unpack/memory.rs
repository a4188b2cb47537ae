//! What unpacking one image may hold in memory, counted; however large, deep or odd the image is.
//!
//! | what | bytes at most |
//! |---|---|
//! | zstd windows of the layers in flight ([`Memory::window`]) | 36 MiB, others wait |
//! | paths that wait for the layers below ([`Memory::remember`]) | 12 MiB, more is refused |
//! | headers and map of holes of a member, a layer in flight | 2 MiB + 2 MiB |
//! | buffers, a layer in flight | 1 MiB |
//!
//! Three layers are in flight at once, so all is below 64 MiB. Lists that grow with the layer lie in files
//! ([`super::spool`]).

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::super::content::{Error, Result};

/// Paths of directories without an entry and of hard links to the layers below.
const PATHS: usize = 12 << 20;
/// All zstd windows at once.
const WINDOWS: usize = 36 << 20;
/// The largest single one: what zstd's levels up to 21 and the best of Go's encoders use.
pub const WINDOW: usize = 32 << 20;
/// What each decoder may have whatever the first frame says (RFC 8878 asks for it).
const LEAST_WINDOW: usize = 8 << 20;

/// One image's budget.
#[derive(Debug, Default)]
pub struct Memory {
    used: Mutex<Used>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct Used {
    paths: usize,
    windows: usize,
}

impl Memory {
    /// Counts a path that is kept until the layer is settled.
    pub(super) fn remember(&self, bytes: usize) -> Result<()> {
        let mut used = self.used();
        used.paths += bytes + 128;
        if used.paths > PATHS {
            return Err(Error::TooBig {
                object: "the list of directories without entries and of hard links to lower layers".into(),
                limit: PATHS as u64,
            });
        }
        Ok(())
    }

    /// Room for a decoder whose first frame asks for this window; waits until others have ended. Blocking.
    ///
    /// # Errors
    /// If the window is larger than any layer may have.
    pub(super) fn window(self: &Arc<Memory>, wanted: u64) -> Result<Window> {
        if wanted > WINDOW as u64 {
            return Err(Error::TooBig {
                object: format!("the zstd window of {wanted} bytes"),
                limit: WINDOW as u64,
            });
        }
        // A small layer may be one frame of just its size; a later frame may then not be larger than that.
        let bytes = (wanted as usize).clamp(LEAST_WINDOW, WINDOW).next_power_of_two();
        let fits = |used: &mut Used| used.windows + bytes > WINDOWS;
        let mut used = self
            .freed
            .wait_while(self.used(), fits)
            .unwrap_or_else(PoisonError::into_inner);
        used.windows += bytes;
        Ok(Window {
            memory: self.clone(),
            bytes,
        })
    }

    fn used(&self) -> MutexGuard<'_, Used> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Room that is given back when this is dropped.
#[derive(Debug)]
pub(super) struct Window {
    memory: Arc<Memory>,
    bytes: usize,
}

impl Window {
    /// Base-two logarithm, as zstd wants its limit.
    pub(super) fn log(&self) -> u32 {
        self.bytes.ilog2()
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.memory.used().windows -= self.bytes;
        self.memory.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn windows_wait_for_each_other() {
        let memory = Arc::new(Memory::default());
        let (now, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..12 {
                let (memory, now, most) = (&memory, &now, &most);
                scope.spawn(move || {
                    for wanted in [100, 9 << 20, 32 << 20] {
                        let window = memory.window(wanted).unwrap();
                        let sum = now.fetch_add(window.bytes, Ordering::SeqCst) + window.bytes;
                        most.fetch_max(sum, Ordering::SeqCst);
                        std::thread::yield_now();
                        now.fetch_sub(window.bytes, Ordering::SeqCst);
                    }
                });
            }
        });
        assert!(most.into_inner() <= WINDOWS);
        assert_eq!(memory.used().windows, 0);
    }

    #[test]
    fn too_much_is_refused() {
        let memory = Arc::new(Memory::default());
        assert!(matches!(memory.window(33 << 20), Err(Error::TooBig { .. })));
        let paths = (0..).take_while(|_| memory.remember(900).is_ok()).count();
        assert!(paths * 900 < PATHS && paths > 10_000, "{paths}");
    }
}
