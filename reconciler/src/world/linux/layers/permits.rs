//! A counting semaphore for threads.

use std::sync::{Condvar, Mutex, PoisonError};

use super::lock;

#[derive(Debug)]
pub(super) struct Permits {
    pub(super) most: usize,
    free: Mutex<usize>,
    freed: Condvar,
}

impl Permits {
    pub(super) fn new(most: usize) -> Permits {
        Permits {
            most,
            free: Mutex::new(most),
            freed: Condvar::new(),
        }
    }

    pub(super) fn take(&self) -> Permit<'_> {
        let free = lock(&self.free);
        let mut free = self
            .freed
            .wait_while(free, |free| *free == 0)
            .unwrap_or_else(PoisonError::into_inner);
        *free -= 1;
        Permit(self)
    }
}

pub(super) struct Permit<'a>(&'a Permits);

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        *lock(&self.0.free) += 1;
        self.0.freed.notify_one();
    }
}
