//! Chance of the libraries: hash maps in kube-runtime order what is due together, tokio orders the branches of a
//! `select!`. Both draw the keys of a thread's first hash map, which std asks libc for, by a weak symbol. So a play has
//! a thread of its own, on which libc answers from the seed; then it is the same whenever it is played.

use std::cell::Cell;
use std::ffi::{c_uint, c_void};

/// As a program's main thread has it.
const STACK: usize = 8 << 20;

thread_local! {
    /// `None`: the thread is not a play's.
    static SEED: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Does `work` on a new thread, on which chance is the seed's.
pub fn from_seed<T: Send>(seed: u64, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let seeded = || {
            SEED.set(Some(seed));
            work()
        };
        let thread = std::thread::Builder::new()
            .stack_size(STACK)
            .spawn_scoped(scope, seeded);
        let done = thread.expect("a thread for the play").join();
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// getrandom(2), in place of libc's.
///
/// # Safety
/// As there: `buffer` has room for `len` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn getrandom(buffer: *mut c_void, len: usize, flags: c_uint) -> isize {
    let Some(seed) = SEED.try_with(Cell::get).ok().flatten() else {
        // SAFETY: the caller's promise, passed on.
        return unsafe { libc::syscall(libc::SYS_getrandom, buffer, len, flags) as isize };
    };
    let mut rng = super::node::Rng::new(seed ^ 0xC4A9CE);
    for at in 0..len {
        // SAFETY: `at` is below `len`.
        unsafe { buffer.cast::<u8>().add(at).write(rng.next() as u8) };
    }
    len as isize
}
