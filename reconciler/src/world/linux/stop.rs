//! Ending long work early: whoever asked for it has left, or its time is over.

use std::io::{self, Read};

use tokio::sync::watch;

/// Told to the work; clones are told together. It also ends when the teller is gone.
#[derive(Clone, Debug)]
pub struct Stop(watch::Receiver<bool>);

impl Stop {
    /// Sending `true` ends the work.
    pub fn new() -> (watch::Sender<bool>, Stop) {
        let (teller, told) = watch::channel(false);
        (teller, Stop(told))
    }

    pub fn told(&self) -> bool {
        *self.0.borrow() || self.0.has_changed().is_err()
    }

    /// Until it is told.
    pub async fn wait(&self) {
        // An error means that the teller is gone.
        let _ = self.0.clone().wait_for(|told| *told).await;
    }

    /// An error once it is told.
    pub fn check(&self) -> io::Result<()> {
        match self.told() {
            true => Err(Stop::error()),
            false => Ok(()),
        }
    }

    /// What work fails with that was ended.
    pub fn error() -> io::Error {
        // Not `ErrorKind::Interrupted`: the library tries that again for ever.
        io::Error::other("was ended early")
    }

    /// The same bytes, until it is told.
    pub fn reader<R: Read>(&self, inner: R) -> impl Read + use<R> {
        Reader {
            stop: self.clone(),
            inner,
        }
    }
}

struct Reader<R> {
    stop: Stop,
    inner: R,
}

impl<R: Read> Read for Reader<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.stop.check()?;
        self.inner.read(into)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_ends_when_it_is_told_and_when_nobody_can_tell_it_any_more() {
        let (teller, stop) = Stop::new();
        let mut reader = stop.reader(io::repeat(7));
        assert!(!stop.told());
        reader.read_exact(&mut [0; 8]).unwrap();
        teller.send(true).unwrap();
        stop.wait().await;
        assert!(reader.read_exact(&mut [0; 8]).is_err());
        let (teller, stop) = Stop::new();
        drop(teller);
        stop.wait().await;
        assert!(stop.check().is_err());
    }
}
