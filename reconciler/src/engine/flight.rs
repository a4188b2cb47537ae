//! One pass over an object at a time, whoever runs it: the loop, or a repair that is asked for meanwhile.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{Mutex as Turn, OwnedMutexGuard};

/// The objects (by uid) over which a pass runs.
#[derive(Default)]
pub struct Flights(Mutex<HashMap<String, Weak<Turn<()>>>>);

/// Whoever holds it may run a pass over the object; dropping it lets the next one.
pub struct Flight {
    _turn: OwnedMutexGuard<()>,
}

impl Flights {
    /// Waits until no other pass over the object runs. What was known of it before may be out of date then.
    pub async fn take(&self, uid: &str) -> Flight {
        let turn = self.turn(uid);
        Flight {
            _turn: turn.lock_owned().await,
        }
    }

    fn turn(&self, uid: &str) -> Arc<Turn<()>> {
        let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(turn) = turns.get(uid).and_then(Weak::upgrade) {
            return turn;
        }
        turns.retain(|_, turn| turn.strong_count() > 0);
        let turn = Arc::new(Turn::new(()));
        turns.insert(uid.to_owned(), Arc::downgrade(&turn));
        turn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_at_a_time_for_each_object() {
        let flights = Flights::default();
        let first = flights.take("a").await;
        let _other = flights.take("b").await;
        {
            let mut second = std::pin::pin!(flights.take("a"));
            assert!(futures::poll!(&mut second).is_pending());
            drop(first);
            second.await;
        }
        flights.take("c").await;
        assert_eq!(
            flights.0.lock().unwrap().len(),
            2,
            "those of which none runs are forgotten"
        );
    }
}
