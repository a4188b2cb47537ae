//! What pulls keep from garbage collection.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Digests of blobs and layers that are needed though no record says so yet.
#[derive(Clone, Debug, Default)]
pub struct Pins(Arc<Mutex<All>>);

#[derive(Debug, Default)]
struct All {
    held: HashMap<String, usize>,
    /// When a digest was held last: whoever held it may have written a record that the collection does not know.
    freed: HashMap<String, Instant>,
}

/// Holds its digests until it is dropped.
#[derive(Debug)]
pub struct Pinned {
    pins: Pins,
    digests: Vec<String>,
}

impl Pins {
    pub fn pin(&self, digests: Vec<String>) -> Pinned {
        let mut all = lock(&self.0);
        for digest in &digests {
            *all.held.entry(digest.clone()).or_default() += 1;
        }
        drop(all);
        Pinned {
            pins: self.clone(),
            digests,
        }
    }

    /// A collection begins that knows the records of that time.
    pub fn forget(&self, before: Option<Instant>) {
        let mut all = lock(&self.0);
        all.freed.retain(|_, at| before.is_some_and(|before| *at >= before));
    }

    /// Removes something unless it is pinned, or was since what [`Pins::forget`] forgot; nobody can pin it meanwhile.
    /// Answers whether it did.
    pub fn unless_pinned<E>(&self, digest: &str, remove: impl FnOnce() -> Result<(), E>) -> Result<bool, E> {
        let all = lock(&self.0);
        if all.held.contains_key(digest) || all.freed.contains_key(digest) {
            return Ok(false);
        }
        remove().map(|()| true)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let mut all = lock(&self.pins.0);
        let now = Instant::now();
        for digest in std::mem::take(&mut self.digests) {
            if let Some(count) = all.held.get_mut(&digest) {
                *count -= 1;
                if *count == 0 {
                    all.held.remove(&digest);
                    all.freed.insert(digest, now);
                }
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_pinned_twice_is_freed_twice() {
        let pins = Pins::default();
        let remove = || Ok::<_, ()>(());
        let (one, two) = (pins.pin(vec!["x".into()]), pins.pin(vec!["x".into()]));
        drop(one);
        assert_eq!(pins.unless_pinned("x", remove), Ok(false));
        assert_eq!(pins.unless_pinned("y", remove), Ok(true));
        let read = Instant::now();
        drop(two);
        pins.forget(Some(read));
        assert_eq!(
            pins.unless_pinned("x", remove),
            Ok(false),
            "a record may have come of it"
        );
        pins.forget(Some(Instant::now()));
        assert_eq!(pins.unless_pinned("x", remove), Ok(true));
    }
}
