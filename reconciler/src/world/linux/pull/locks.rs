//! What pulls keep from each other and from garbage collection.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use oci_spec::image::Digest;
use tokio::sync::OwnedMutexGuard;

/// One fetch per blob, however many pulls want it: who comes second waits, then finds it there or goes on with what is
/// left of it.
#[derive(Debug, Default)]
pub struct Locks(Mutex<HashMap<Digest, Arc<tokio::sync::Mutex<()>>>>);

/// The blobs are the holder's to fetch.
pub struct Held<'a> {
    locks: &'a Locks,
    digests: Vec<Digest>,
    guards: Vec<OwnedMutexGuard<()>>,
}

impl Locks {
    /// Takes all of them, in one order for all callers.
    pub async fn take(&self, mut digests: Vec<Digest>) -> Held<'_> {
        digests.sort_by(|a, b| a.as_ref().cmp(b.as_ref()));
        digests.dedup();
        let mut held = Held {
            locks: self,
            digests,
            guards: Vec::new(),
        };
        for digest in held.digests.clone() {
            let mutex = lock(&self.0).entry(digest).or_default().clone();
            held.guards.push(mutex.lock_owned().await);
        }
        held
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut all = lock(&self.locks.0);
        self.guards.clear();
        for digest in &self.digests {
            if all.get(digest).is_some_and(|mutex| Arc::strong_count(mutex) == 1) {
                all.remove(digest);
            }
        }
    }
}

/// Digests of blobs and layers that are needed though no record says so yet.
#[derive(Clone, Debug, Default)]
pub struct Pins(Arc<Mutex<HashMap<String, usize>>>);

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
            *all.entry(digest.clone()).or_default() += 1;
        }
        drop(all);
        Pinned {
            pins: self.clone(),
            digests,
        }
    }

    /// Removes something unless it is pinned; nobody can pin it meanwhile. Answers whether it did.
    pub fn unless_pinned<E>(&self, digest: &str, remove: impl FnOnce() -> Result<(), E>) -> Result<bool, E> {
        let all = lock(&self.0);
        if all.contains_key(digest) {
            return Ok(false);
        }
        remove().map(|()| true)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let mut all = lock(&self.pins.0);
        for digest in &self.digests {
            if let Some(count) = all.get_mut(digest) {
                *count -= 1;
                if *count == 0 {
                    all.remove(digest);
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
    use std::str::FromStr;

    fn digest(c: char) -> Digest {
        Digest::from_str(&format!("sha256:{}", c.to_string().repeat(64))).unwrap()
    }

    #[tokio::test]
    async fn the_second_waits_for_the_first_and_nothing_is_left() {
        let locks = Locks::default();
        let first = locks.take(vec![digest('a'), digest('b')]).await;
        {
            let second = locks.take(vec![digest('b'), digest('c')]);
            tokio::pin!(second);
            assert!(futures::poll!(second.as_mut()).is_pending());
            drop(first);
            drop(second.await);
        }
        assert!(lock(&locks.0).is_empty());
    }

    #[test]
    fn what_is_pinned_twice_is_freed_twice() {
        let pins = Pins::default();
        let remove = || Ok::<_, ()>(());
        let (one, two) = (pins.pin(vec!["x".into()]), pins.pin(vec!["x".into()]));
        drop(one);
        assert_eq!(pins.unless_pinned("x", remove), Ok(false));
        assert_eq!(pins.unless_pinned("y", remove), Ok(true));
        drop(two);
        assert_eq!(pins.unless_pinned("x", remove), Ok(true));
    }
}
