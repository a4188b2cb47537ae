//! A process's output: from its FIFOs (or terminal) into the log.
//!
//! ```text
//! container ──write──> FIFO ──tee──> scratch ──read──> entries ──write──> log
//!              │        └──────────splice──> /dev/null   only then
//!              └── what is new also into the pipe of each that is attached, which never holds the rest up
//! ```
//!
//! What is in a FIFO survives a killed shim, so nothing is consumed before it is in the log, not even the unfinished
//! last line: it waits in the FIFO (edge-triggered, so without spinning) until it is ended or has been idle for a
//! second. The container opens its end read-write: without a reader it blocks instead of getting SIGPIPE.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::attach::{self, Attached};
use crate::log::{self, Kind, Log};
use crate::sys;

/// Read at once: what a FIFO holds.
const CHUNK: usize = 64 << 10;
/// How long an unfinished line waits for its end, ns.
const IDLE: u64 = 1_000_000_000;

/// What the streams of a shim share.
pub struct Scratch {
    pipe: (OwnedFd, OwnedFd),
    null: File,
    chunk: Vec<u8>,
    batch: Vec<u8>,
}

impl Scratch {
    pub fn new() -> io::Result<Scratch> {
        let null = OpenOptions::new().write(true).open("/dev/null")?;
        Ok(Scratch {
            pipe: sys::pipe(libc::O_NONBLOCK)?,
            null,
            chunk: Vec::new(),
            batch: Vec::new(),
        })
    }

    /// Gives the buffers' memory back while nothing is written.
    pub fn release(&mut self) {
        self.chunk = Vec::new();
        self.batch = Vec::new();
    }

    /// Whether [`Scratch::release`] would free something.
    pub fn is_held(&self) -> bool {
        self.chunk.capacity() > 0
    }

    /// Copies what `fifo` holds, without consuming it. `None`: nothing now; 0 bytes: no writer is left.
    fn peek(&mut self, fifo: RawFd) -> io::Result<Option<usize>> {
        let (read, write) = (self.pipe.0.as_raw_fd(), self.pipe.1.as_raw_fd());
        // SAFETY: two live pipes.
        let len = match sys::check(unsafe { libc::tee(fifo, write, CHUNK, libc::SPLICE_F_NONBLOCK) } as i64) {
            Ok(len) => len as usize,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error),
        };
        self.chunk.resize(CHUNK.max(len), 0);
        let mut filled = 0;
        while filled < len {
            // SAFETY: `chunk` has at least `len` bytes.
            let got = unsafe { libc::read(read, self.chunk[filled..].as_mut_ptr().cast(), len - filled) };
            filled += sys::check(got as i64)? as usize;
        }
        Ok(Some(len))
    }

    /// Consumes `len` bytes that were peeked at.
    fn consume(&self, fifo: RawFd, mut len: usize) -> io::Result<()> {
        while len > 0 {
            let (to, null) = (self.null.as_raw_fd(), std::ptr::null_mut());
            // SAFETY: live descriptors; null offsets are allowed.
            let gone = unsafe { libc::splice(fifo, null, to, null, len, libc::SPLICE_F_NONBLOCK) };
            match sys::check(gone as i64)? as usize {
                0 => return Ok(()),
                gone => len -= gone,
            }
        }
        Ok(())
    }
}

/// What a pump found.
#[derive(Debug, PartialEq, Eq)]
pub enum Pumped {
    /// There may be more.
    More,
    /// Nothing now; the next edge tells.
    Waiting,
    /// The last writer is gone and all is in the log.
    End,
}

/// One output stream.
pub struct Stream {
    fd: OwnedFd,
    kind: Kind,
    /// A terminal's output cannot be peeked at; its unfinished line is held here.
    held: Option<Vec<u8>>,
    /// Length of the unfinished line, and when (CLOCK_BOOTTIME) it is written as it is.
    tail: Option<(usize, u64)>,
    /// How much of the front of the FIFO the attached have seen.
    shown: usize,
}

impl Stream {
    /// From the reading end of a FIFO.
    pub fn fifo(fd: OwnedFd, kind: Kind) -> Stream {
        Stream {
            fd,
            kind,
            held: None,
            tail: None,
            shown: 0,
        }
    }

    /// From the controlling end of a terminal.
    pub fn terminal(fd: OwnedFd) -> Stream {
        Stream {
            fd,
            kind: Kind::Stdout,
            held: Some(Vec::new()),
            tail: None,
            shown: 0,
        }
    }

    pub fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// When the unfinished line is due.
    pub fn due(&self) -> Option<u64> {
        self.tail.map(|(_, due)| due)
    }

    /// Moves one chunk of output into the log, and to the attached.
    pub fn pump(&mut self, scratch: &mut Scratch, log: &mut Option<Log>, attached: &mut [Attached]) -> Pumped {
        let result = match self.held.is_some() {
            true => self.pump_terminal(scratch, log, attached),
            false => self.pump_fifo(scratch, log, attached),
        };
        result.unwrap_or_else(|error| {
            crate::note!("{}: {error}; given up", self.kind.name());
            Pumped::End
        })
    }

    fn pump_fifo(
        &mut self,
        scratch: &mut Scratch,
        log: &mut Option<Log>,
        attached: &mut [Attached],
    ) -> io::Result<Pumped> {
        let fd = self.fd.as_raw_fd();
        let len = match scratch.peek(fd)? {
            None => {
                self.tail = None;
                return Ok(Pumped::Waiting);
            }
            // No writer and nothing to read.
            Some(0) => return Ok(Pumped::End),
            Some(len) => len,
        };
        attach::spread(attached, self.kind, &scratch.chunk[self.shown.min(len)..len]);
        self.shown = len;
        let Some(log) = log else {
            scratch.consume(fd, len)?;
            self.shown = 0;
            return Ok(Pumped::More);
        };
        let now = sys::boot();
        let flush = self.tail.is_some_and(|(tail, due)| tail == len && now >= due);
        let mut done = 0;
        loop {
            scratch.batch.clear();
            let batch = &mut scratch.batch;
            batch.reserve(256 << 10);
            let taken = log::entries(&scratch.chunk[done..len], log.line, self.kind, flush, sys::now(), batch);
            if taken == 0 {
                break;
            }
            log.write(batch, self.kind, taken);
            scratch.consume(fd, taken)?;
            self.shown -= taken;
            log.consumed();
            done += taken;
        }
        if done > 0 {
            self.tail = None;
            return Ok(Pumped::More);
        }
        // Only an unfinished line: the end of the output, or idle.
        if is_hung_up(fd) {
            self.tail = Some((len, 0));
            return Ok(Pumped::More);
        }
        if self.tail.is_none_or(|(tail, _)| tail != len) {
            self.tail = Some((len, now + IDLE));
        }
        Ok(Pumped::Waiting)
    }

    fn pump_terminal(
        &mut self,
        scratch: &mut Scratch,
        log: &mut Option<Log>,
        attached: &mut [Attached],
    ) -> io::Result<Pumped> {
        let Some(held) = &mut self.held else {
            return Ok(Pumped::End);
        };
        scratch.chunk.resize(CHUNK, 0);
        // SAFETY: `chunk` has CHUNK bytes.
        let got = unsafe { libc::read(self.fd.as_raw_fd(), scratch.chunk.as_mut_ptr().cast(), CHUNK) };
        let (len, state) = match sys::check(got as i64) {
            Ok(len) if len > 0 => (len as usize, Pumped::More),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => (0, Pumped::Waiting),
            // EIO: the last process has closed the terminal.
            _ => (0, Pumped::End),
        };
        attach::spread(attached, self.kind, &scratch.chunk[..len]);
        held.extend_from_slice(&scratch.chunk[..len]);
        let now = sys::boot();
        let flush = state == Pumped::End || (len == 0 && self.tail.is_some_and(|(_, due)| now >= due));
        let mut done = 0;
        while let Some(log) = log {
            scratch.batch.clear();
            let taken = log::entries(
                &held[done..],
                log.line,
                self.kind,
                flush,
                sys::now(),
                &mut scratch.batch,
            );
            if taken == 0 {
                break;
            }
            log.write(&scratch.batch, self.kind, taken);
            log.consumed();
            done += taken;
        }
        held.drain(..if log.is_some() { done } else { held.len() });
        if held.is_empty() {
            self.tail = None;
        } else if len > 0 || self.tail.is_none() {
            self.tail = Some((held.len(), now + IDLE));
        }
        Ok(state)
    }

    /// Lets the next pump write an unfinished line as it is.
    pub fn flush(&mut self) {
        if let Some((_, due)) = &mut self.tail {
            *due = 0;
        }
    }

    /// After a takeover: consumes `logged` if the FIFO still begins with it.
    pub fn skip(&mut self, scratch: &mut Scratch, logged: &[u8]) {
        let fd = self.fd.as_raw_fd();
        match scratch.peek(fd) {
            Ok(Some(len)) if scratch.chunk[..len].starts_with(logged) => {
                let _ = scratch.consume(fd, logged.len());
            }
            _ => {}
        }
    }
}

/// True if nobody holds the other end of a pipe or terminal any more.
pub fn is_hung_up(fd: RawFd) -> bool {
    let mut poll = libc::pollfd {
        fd,
        events: 0,
        revents: 0,
    };
    // SAFETY: one pollfd, no waiting.
    unsafe { libc::poll(&mut poll, 1, 0) == 1 && poll.revents & libc::POLLHUP != 0 }
}

/// Makes a FIFO that `owner` (uid, gid) may reopen through /dev/stdout; returns (our reading end, theirs).
pub fn make_fifo(dir: &Path, kind: Kind, owner: (u32, u32)) -> io::Result<(OwnedFd, OwnedFd)> {
    let path = dir.join(kind.name());
    make(&path, owner)?;
    let ours = open_fifo(&path)?;
    let theirs = OpenOptions::new().read(true).write(true).open(&path)?;
    Ok((ours, theirs.into()))
}

/// Makes the FIFO of a stdin that stays open; returns the container's end.
pub fn make_stdin(dir: &Path, owner: (u32, u32)) -> io::Result<OwnedFd> {
    let path = dir.join("stdin");
    make(&path, owner)?;
    OpenOptions::new().read(true).write(true).open(&path).map(OwnedFd::from)
}

fn make(path: &Path, owner: (u32, u32)) -> io::Result<()> {
    let _ = fs::remove_file(path);
    // SAFETY: a valid path.
    sys::check(unsafe { libc::mkfifo(sys::cpath(path)?.as_ptr(), 0o600) })?;
    std::os::unix::fs::lchown(path, Some(owner.0), Some(owner.1))
}

/// The reading end of a FIFO, without waiting for a writer.
pub fn open_fifo(path: &Path) -> io::Result<OwnedFd> {
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
    OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)
        .map(OwnedFd::from)
}

/// Output of an exec, kept in memory up to a limit shared by its streams.
pub struct Collected {
    fd: File,
    /// What was kept.
    pub bytes: Vec<u8>,
}

impl Collected {
    pub fn new(fd: OwnedFd) -> Collected {
        Collected {
            fd: fd.into(),
            bytes: Vec::new(),
        }
    }

    /// Reads what is there; takes what was kept off `room`. Returns (at its end, something was dropped).
    pub fn pump(&mut self, room: &mut usize) -> (bool, bool) {
        let mut chunk = [0; 16 << 10];
        let mut dropped = false;
        loop {
            match self.fd.read(&mut chunk) {
                Ok(0) => return (true, dropped),
                Ok(len) => {
                    let kept = len.min(*room);
                    self.bytes.extend_from_slice(&chunk[..kept]);
                    *room -= kept;
                    dropped |= kept < len;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return (error.kind() != io::ErrorKind::WouldBlock, dropped),
            }
        }
    }
}
