//! Turns: of one object, one at a time does something. Of a container, take its checkpoint, which nobody else thaws
//! meanwhile; of any, run a pass.

use std::collections::BTreeSet;

use tokio::sync::watch;

/// The objects (by uid) that somebody's turn holds.
pub struct Turns(watch::Sender<BTreeSet<String>>);

impl Default for Turns {
    fn default() -> Turns {
        Turns(watch::Sender::new(BTreeSet::new()))
    }
}

/// An object's turn; dropping it gives it to the next.
pub struct Turn<'a> {
    turns: &'a Turns,
    uid: String,
}

impl Turns {
    pub fn holds(&self, uid: &str) -> bool {
        self.0.borrow().contains(uid)
    }

    /// Acts while no turn of the object can begin; `None`, and nothing done, if one is taken.
    pub fn unless_held<T>(&self, uid: &str, act: impl FnOnce() -> T) -> Option<T> {
        let mut done = None;
        self.0.send_if_modified(|held| {
            if !held.contains(uid) {
                done = Some(act());
            }
            false
        });
        done
    }

    /// Waits until nobody else has the object's turn. What was known of it before may be out of date then.
    pub async fn take(&self, uid: &str) -> Turn<'_> {
        let mut changes = self.0.subscribe();
        while !self.0.send_if_modified(|held| held.insert(uid.to_owned())) {
            // It cannot fail: the sender is here.
            let _ = changes.wait_for(|held| !held.contains(uid)).await;
        }
        Turn {
            turns: self,
            uid: uid.to_owned(),
        }
    }

    /// Until no turn is taken.
    pub async fn idle(&self) {
        let _ = self.0.subscribe().wait_for(BTreeSet::is_empty).await;
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.turns.0.send_modify(|held| {
            held.remove(&self.uid);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[tokio::test]
    async fn one_at_a_time_of_a_container() {
        let turns = Turns::default();
        let first = turns.take("a").await;
        let _other = turns.take("b").await;
        assert!(turns.holds("a") && turns.unless_held("a", || ()).is_none());
        assert!(turns.take("a").now_or_never().is_none());
        drop(first);
        assert_eq!(turns.unless_held("a", || 7), Some(7));
        drop(turns.take("a").now_or_never().unwrap());
        assert!(turns.idle().now_or_never().is_none());
    }
}
