//! Decompression on a thread of its own, a little ahead of who unpacks: one big layer keeps two cores busy too.

use std::io::{self, Read};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread;

/// Bytes of a chunk, and how many there are: half a MiB a layer in all.
const CHUNK: usize = 128 << 10;
const CHUNKS: usize = 4;

/// Runs `work` over what `source` holds. It is read on another thread, which has ended when this returns, however much
/// of it `work` wanted.
///
/// # Errors
/// Those of `work`; if there is no thread to be had, reading fails.
pub fn read_ahead<T>(source: impl Read + Send, work: impl FnOnce(&mut dyn Read) -> T) -> T {
    let left = AtomicBool::new(false);
    let (filled, chunks) = sync_channel(CHUNKS);
    let (back, empty) = channel();
    thread::scope(|scope| {
        let _left = Leave(&left);
        let (failed, left) = (filled.clone(), &left);
        let reader = thread::Builder::new().name("inflate".into());
        // It owns its ends of both channels: that they are gone is how the other side learns of the end.
        if let Err(e) = reader.spawn_scoped(scope, move || fill(source, filled, empty, left)) {
            // There is room: nothing was sent before.
            let _ = failed.send(Err(e));
        }
        drop(failed);
        work(&mut Ahead {
            chunks,
            back,
            chunk: Vec::new(),
            at: 0,
        })
    })
}

/// Tells the other thread that nobody reads any more, also if `work` panics.
struct Leave<'a>(&'a AtomicBool);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn fill(mut source: impl Read, filled: SyncSender<io::Result<Vec<u8>>>, empty: Receiver<Vec<u8>>, left: &AtomicBool) {
    let mut made = 0;
    loop {
        let next = if made < CHUNKS {
            made += 1;
            Ok(Vec::new())
        } else {
            empty.recv()
        };
        let Ok(mut chunk) = next else { return };
        let outcome = fill_one(&mut source, &mut chunk, left);
        let over = outcome.is_err() || chunk.is_empty();
        if !chunk.is_empty() && filled.send(Ok(chunk)).is_err() {
            return;
        }
        if let Err(e) = outcome {
            // Nobody to be told is as good.
            let _ = filled.send(Err(e));
        }
        if over {
            return;
        }
    }
}

/// As much as there is room for; less only at the end, or once nobody reads any more.
fn fill_one(source: &mut impl Read, chunk: &mut Vec<u8>, left: &AtomicBool) -> io::Result<()> {
    chunk.resize(CHUNK, 0);
    let mut have = 0;
    let outcome = loop {
        if have == CHUNK || left.load(Ordering::Relaxed) {
            break Ok(());
        }
        match source.read(&mut chunk[have..]) {
            Ok(0) => break Ok(()),
            Ok(n) => have += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => break Err(e),
        }
    };
    chunk.truncate(have);
    outcome
}

/// What the other thread has read.
struct Ahead {
    chunks: Receiver<io::Result<Vec<u8>>>,
    back: Sender<Vec<u8>>,
    chunk: Vec<u8>,
    at: usize,
}

impl Read for Ahead {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if self.at == self.chunk.len() {
            let Ok(next) = self.chunks.recv() else { return Ok(0) };
            let used = std::mem::replace(&mut self.chunk, next?);
            self.at = 0;
            // The other thread may have come to its end.
            let _ = self.back.send(used);
        }
        let n = (self.chunk.len() - self.at).min(buf.len());
        buf[..n].copy_from_slice(&self.chunk[self.at..self.at + n]);
        self.at += n;
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives a few bytes at a time, then fails or ends.
    struct Source {
        left: usize,
        fails: bool,
    }

    impl Read for Source {
        fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
            if self.left == 0 && self.fails {
                return Err(io::Error::other("broken off"));
            }
            let n = self.left.min(buf.len()).min(1000);
            for (i, byte) in buf[..n].iter_mut().enumerate() {
                *byte = ((self.left - i) % 251) as u8;
            }
            self.left -= n;
            Ok(n)
        }
    }

    #[test]
    fn every_byte_comes_once_and_in_order() {
        for size in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 10 * CHUNK + 7] {
            let source = |fails| Source { left: size, fails };
            let mut want = Vec::new();
            source(false).read_to_end(&mut want).unwrap();
            let mut got = Vec::new();
            read_ahead(source(false), |plain| plain.read_to_end(&mut got)).unwrap();
            assert!(got == want, "{size} bytes");
            got.clear();
            let error = read_ahead(source(true), |plain| plain.read_to_end(&mut got)).unwrap_err();
            assert_eq!(error.to_string(), "broken off");
            assert!(got == want, "{size} bytes, then an error");
        }
    }

    #[test]
    fn who_wants_no_more_ends_the_reading() {
        let endless = io::repeat(7);
        let first = read_ahead(endless, |plain| {
            let mut first = [0; 10];
            plain.read_exact(&mut first).map(|()| first)
        });
        assert_eq!(first.unwrap(), [7; 10]);
    }
}
