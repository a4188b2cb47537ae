//! One fetch per blob, however many pulls want it: who comes second waits for that blob and for nothing else.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use oci_spec::image::Digest;
use tokio::sync::watch;

/// The blobs that are being fetched.
#[derive(Debug, Default)]
pub struct Flights(Mutex<HashMap<Digest, watch::Receiver<bool>>>);

/// Whose turn it is to fetch a blob.
#[derive(Debug)]
pub enum Turn<'a> {
    Mine(Flight<'a>),
    /// Another's. It turns true when all bytes are here and are what they should be, and closes when that fetch has
    /// ended: the blob has its name then, or it was given up.
    Theirs(watch::Receiver<bool>),
}

/// The right to fetch a blob, until this is dropped.
#[derive(Debug)]
pub struct Flight<'a> {
    flights: &'a Flights,
    digest: Digest,
    whole: watch::Sender<bool>,
}

impl Flights {
    pub fn turn(&self, digest: &Digest) -> Turn<'_> {
        let mut all = self.lock();
        if let Some(theirs) = all.get(digest) {
            return Turn::Theirs(theirs.clone());
        }
        let (whole, watched) = watch::channel(false);
        all.insert(digest.clone(), watched);
        Turn::Mine(Flight {
            flights: self,
            digest: digest.clone(),
            whole,
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Digest, watch::Receiver<bool>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Flight<'_> {
    /// All bytes are here and verified: whoever waits may read them, though the blob has no name yet.
    pub fn whole(&self) {
        self.whole.send_replace(true);
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        self.flights.lock().remove(&self.digest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::str::FromStr;

    fn digest(c: char) -> Digest {
        Digest::from_str(&format!("sha256:{}", c.to_string().repeat(64))).unwrap()
    }

    fn mine(flights: &Flights, c: char) -> Flight<'_> {
        match flights.turn(&digest(c)) {
            Turn::Mine(flight) => flight,
            Turn::Theirs(_) => panic!("{c} is another's"),
        }
    }

    #[tokio::test]
    async fn the_second_waits_for_one_blob_and_may_take_over() {
        let flights = Flights::default();
        let (a, _b) = (mine(&flights, 'a'), mine(&flights, 'b'));
        let Turn::Theirs(mut second) = flights.turn(&digest('a')) else {
            panic!()
        };
        assert!(!*second.borrow());
        a.whole();
        assert!(second.wait_for(|whole| *whole).await.is_ok());
        drop(a);
        assert!(second.changed().await.is_err(), "it has ended");
        drop(mine(&flights, 'a'));
        assert_eq!(flights.lock().len(), 1);
    }
}
