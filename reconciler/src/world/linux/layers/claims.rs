//! Which layers are being unpacked, and whether somebody waits for them.
//!
//! A layer is claimed when its unpacking begins, not before, so that one image never waits for another's turn. Whoever
//! finds it claimed waits for it, and layers are committed from the bottom up: waiting has an order and cannot go round.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, PoisonError};

use super::lock;
use crate::image::manifest::ChainId;

/// In the making; true: another image waits for it.
pub(super) type Making = HashMap<ChainId, bool>;

#[derive(Debug, Default)]
pub(super) struct Claims {
    all: Mutex<Making>,
    changed: Condvar,
}

/// What one image has claimed; given up when this is dropped.
pub(super) struct Claim<'a> {
    claims: &'a Claims,
    held: Mutex<Vec<ChainId>>,
}

impl Claims {
    pub fn claim(&self) -> Claim<'_> {
        Claim {
            claims: self,
            held: Mutex::default(),
        }
    }

    /// Waits for as long as this holds of the layers in the making. It is looked at again whenever they change, and
    /// after [`Claims::wake`].
    pub fn wait_while(&self, condition: impl FnMut(&mut Making) -> bool) {
        let waited = self.changed.wait_while(lock(&self.all), condition);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Something that conditions look at has changed.
    pub fn wake(&self) {
        // Under the lock: nobody is between its look and its sleep.
        let _all = lock(&self.all);
        self.changed.notify_all();
    }

    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        lock(&self.all).is_empty()
    }
}

impl Claim<'_> {
    /// Takes a layer, unless it is in the making.
    pub fn start(&self, id: &ChainId) -> bool {
        let mut all = lock(&self.claims.all);
        if all.contains_key(id) {
            return false;
        }
        all.insert(id.clone(), false);
        lock(&self.held).push(id.clone());
        true
    }

    /// The layer is there.
    pub fn release(&self, id: &ChainId) {
        let mut all = lock(&self.claims.all);
        lock(&self.held).retain(|held| held != id);
        all.remove(id);
        self.claims.changed.notify_all();
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut all = lock(&self.claims.all);
        for id in lock(&self.held).iter() {
            all.remove(id);
        }
        self.claims.changed.notify_all();
    }
}
