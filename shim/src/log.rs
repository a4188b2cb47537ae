//! The container log in CRI's format, and what happens when it cannot be written.
//!
//! ```text
//! 2026-12-01T10:00:00.123456789Z stdout F a line          F: ended by a newline in the output
//! 2026-12-01T10:00:00.123456789Z stderr P the part of ... P: it goes on (over 16,384 bytes, idle, or the end)
//! ```
//!
//! A batch of entries shares one time stamp and one write. While it is written, [`Mark`] says where and how much, so
//! that a shim that takes over after SIGKILL knows whether output still in the FIFO is in the log already.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use shim::fault;

use crate::sys;

/// Longest content of one entry unless told otherwise, bytes (CRI).
pub const LINE: usize = 16 << 10;
/// What it may be. The pipe of the output holds 64 KiB, and an unfinished line stays in it.
const LINES: std::ops::RangeInclusive<usize> = 256..=32 << 10;
/// Bytes of entries at which a batch is written.
const BATCH: usize = 192 << 10;
/// Entries kept in memory while the log cannot be written, bytes; beyond it output is dropped.
const PENDING: usize = 1 << 20;

/// Which stream an entry is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Standard output, or a terminal's one stream.
    Stdout = 1,
    /// Standard error.
    Stderr = 2,
}

impl Kind {
    /// The word in the log, and the FIFO's name.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Stdout => "stdout",
            Kind::Stderr => "stderr",
        }
    }
}

/// Formats entries for the front of `output`, at most about [`BATCH`] bytes, none with more content than `line` bytes;
/// returns how much of it they cover. An unfinished last line is left unless `flush`.
pub fn entries(output: &[u8], line: usize, kind: Kind, flush: bool, now: i64, out: &mut Vec<u8>) -> usize {
    let mut done = 0;
    let mut head = Vec::with_capacity(48);
    stamp(now, &mut head);
    head.push(b' ');
    head.extend(kind.name().bytes());
    while done < output.len() && out.len() < BATCH {
        let rest = &output[done..];
        let window = &rest[..rest.len().min(line + 1)];
        let (content, tag, taken) = match newline(window) {
            Some(end) => (end, b" F ", end + 1),
            None if rest.len() > line => (line, b" P ", line),
            None if flush => (rest.len(), b" P ", rest.len()),
            None => break,
        };
        out.extend_from_slice(&head);
        out.extend_from_slice(tag);
        out.extend_from_slice(&rest[..content]);
        out.push(b'\n');
        done += taken;
    }
    done
}

fn newline(bytes: &[u8]) -> Option<usize> {
    // SAFETY: the pointer and length are those of a live slice.
    let found = unsafe { libc::memchr(bytes.as_ptr().cast(), i32::from(b'\n'), bytes.len()) };
    NonNull::new(found).map(|at| at.as_ptr() as usize - bytes.as_ptr() as usize)
}

/// The output that complete entries of `kind` stand for, and where in `log` they end.
fn output_of(log: &[u8], kind: Kind) -> (Vec<u8>, usize) {
    let (mut output, mut end) = (Vec::new(), 0);
    while let Some(len) = newline(&log[end..]) {
        let mut parts = log[end..end + len].splitn(4, |byte| *byte == b' ');
        let (_, stream, tag, content) = (parts.next(), parts.next(), parts.next(), parts.next());
        if stream == Some(kind.name().as_bytes()) {
            output.extend_from_slice(content.unwrap_or_default());
            if tag == Some(b"F") {
                output.push(b'\n');
            }
        }
        end += len + 1;
    }
    (output, end)
}

/// Appends RFC 3339 in UTC with nine digits of fraction.
fn stamp(now: i64, out: &mut Vec<u8>) {
    let (seconds, ns) = (now.div_euclid(1_000_000_000), now.rem_euclid(1_000_000_000));
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Days since 1 March 0000, in eras of 400 years: leap days then fall at the end.
    let days = days + 719_468;
    let (era, day) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let date = (
        era * 400 + year + i64::from(month >= 10),
        if month < 10 { month + 3 } else { month - 9 },
        day - (153 * month + 2) / 5 + 1,
    );
    let _ = write!(
        out,
        "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{ns:09}Z",
        date.0,
        date.1,
        date.2,
        second / 3600,
        second / 60 % 60,
        second % 60
    );
}

/// One container's log file.
pub struct Log {
    path: PathBuf,
    /// Longest content of one entry, bytes.
    pub line: usize,
    file: Option<File>,
    /// Length of the file after the last whole batch.
    len: u64,
    mark: Option<Mark>,
    /// Whole entries not written yet.
    pending: Vec<u8>,
    /// Bytes of entries dropped since the last write that worked, and ever.
    dropped: u64,
    dropped_ever: u64,
}

impl Log {
    /// Opens (makes) the log. One that cannot be opened is tried again later.
    pub fn open(path: &Path, mark: &Path) -> Log {
        let mark = Mark::open(mark)
            .map_err(|error| crate::note!("{}: {error}", mark.display()))
            .ok();
        let mut log = Log {
            path: path.into(),
            line: LINE,
            file: None,
            len: 0,
            mark,
            pending: Vec::new(),
            dropped: 0,
            dropped_ever: 0,
        };
        if let Err(error) = log.reopen(None) {
            crate::note!("log {}: {error}; output is kept for later", path.display());
        }
        log
    }

    /// Splits lines at `bytes`; 0, and what cannot be, leave the default.
    pub fn limited(mut self, bytes: u32) -> Log {
        let wanted = bytes as usize;
        self.line = if LINES.contains(&wanted) { wanted } else { LINE };
        self
    }

    /// Opens the file anew, then lets go of the old one.
    pub fn reopen(&mut self, path: Option<&Path>) -> io::Result<()> {
        let path = path.unwrap_or(&self.path);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        fault::check("shim.log.before")?;
        // Not blocking: somebody may have put a FIFO there.
        let mut options = OpenOptions::new();
        let file = options
            .append(true)
            .create(true)
            .mode(0o640)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)?;
        fault::check("shim.log.opened")?;
        self.len = file.metadata()?.len();
        self.path = path.into();
        self.file = Some(file);
        self.retry();
        Ok(())
    }

    /// Adds a batch that stands for `content` bytes of output of `kind`. Never fails, never waits for space.
    pub fn write(&mut self, batch: &[u8], kind: Kind, content: usize) {
        if let (Some(mark), Some(file)) = (&self.mark, &self.file) {
            mark.begin(file, self.len, kind, content);
        }
        if self.retry() && self.append(batch).is_ok() {
            return;
        }
        if self.dropped == 0 && self.pending.len() + batch.len() <= PENDING {
            self.pending.extend_from_slice(batch);
        } else {
            self.dropped += batch.len() as u64;
            self.dropped_ever += batch.len() as u64;
        }
    }

    /// The output of the last batch is consumed: a successor would not see it again.
    pub fn consumed(&self) {
        if let Some(mark) = &self.mark {
            mark.end();
        }
    }

    /// Tries to write what is kept; true if nothing is left.
    pub fn retry(&mut self) -> bool {
        if self.pending.is_empty() && self.dropped == 0 {
            return true;
        }
        if self.file.is_none() {
            let path = self.path.clone();
            return self.reopen(Some(&path)).is_ok() && self.pending.is_empty() && self.dropped == 0;
        }
        let kept = std::mem::take(&mut self.pending);
        if self.append(&kept).is_err() {
            self.pending = kept;
            return false;
        }
        if self.dropped > 0 {
            let text = format!(
                "reconcile: {} bytes of log dropped here: it could not be written\n",
                self.dropped
            );
            let mut line = Vec::new();
            entries(text.as_bytes(), LINE, Kind::Stderr, true, sys::now(), &mut line);
            if self.append(&line).is_err() {
                return false;
            }
            self.dropped = 0;
        }
        true
    }

    /// Whether [`Log::retry`] has something to do.
    pub fn is_behind(&self) -> bool {
        !self.pending.is_empty() || self.dropped > 0
    }

    /// Bytes of entries dropped ever.
    pub fn dropped_ever(&self) -> u64 {
        self.dropped_ever
    }

    /// Device and inode of the open file; zeros if none is.
    pub fn file_id(&self) -> (u64, u64) {
        let meta = self.file.as_ref().and_then(|file| file.metadata().ok());
        meta.map_or((0, 0), |meta| (meta.dev(), meta.ino()))
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let file = self
            .file
            .as_mut()
            .ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        match file.write_all(bytes) {
            Ok(()) => {
                self.len += bytes.len() as u64;
                Ok(())
            }
            Err(error) => {
                // Take back the part that went in: entries stay whole.
                let _ = file.set_len(self.len);
                Err(error)
            }
        }
    }

    /// After a takeover: the output of `kind` that the last shim logged but may not have consumed. A line it left
    /// unfinished is cut off (its output is still in the FIFO).
    pub fn unconsumed(&mut self) -> Option<(Kind, Vec<u8>)> {
        let (inode, offset, kind, content) = self.mark.as_ref()?.read()?;
        let file = self.file.as_ref()?;
        if file.metadata().ok()?.ino() != inode || self.len <= offset {
            return None;
        }
        let mut tail = Vec::new();
        let mut reader = File::open(&self.path).ok()?;
        reader.seek(SeekFrom::Start(offset)).ok()?;
        reader.take((PENDING * 8) as u64).read_to_end(&mut tail).ok()?;
        let (mut output, end) = output_of(&tail, kind);
        if offset + (end as u64) < self.len {
            file.set_len(offset + end as u64).ok()?;
            self.len = offset + end as u64;
        }
        // Older entries kept in memory may have been written in front of the batch: the last bytes count.
        output.drain(..output.len().saturating_sub(content));
        Some((kind, output))
    }
}

/// What is being written, in a page shared with whoever comes after.
struct Mark {
    words: NonNull<[AtomicU64; 4]>,
}

impl Mark {
    fn open(path: &Path) -> io::Result<Mark> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)?;
        file.set_len(4096)?;
        let (access, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping, placed by the kernel, of one page the file has.
        let page = unsafe { libc::mmap(std::ptr::null_mut(), 4096, access, shared, file.as_raw_fd(), 0) };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(page.cast())
            .map(|words| Mark { words })
            .ok_or_else(|| io::Error::other("mapped at 0"))
    }

    fn words(&self) -> &[AtomicU64; 4] {
        // SAFETY: the page is mapped as long as `self` lives, aligned, and only accessed as atomics.
        unsafe { self.words.as_ref() }
    }

    fn begin(&self, file: &File, offset: u64, kind: Kind, content: usize) {
        let [state, inode, at, len] = self.words();
        inode.store(file.metadata().map_or(0, |meta| meta.ino()), Ordering::Relaxed);
        at.store(offset, Ordering::Relaxed);
        len.store(content as u64, Ordering::Relaxed);
        state.store(kind as u64, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    fn end(&self) {
        self.words()[0].store(0, Ordering::Release);
    }

    fn read(&self) -> Option<(u64, u64, Kind, usize)> {
        let [state, inode, at, len] = self.words();
        let kind = match state.load(Ordering::Acquire) {
            1 => Kind::Stdout,
            2 => Kind::Stderr,
            _ => return None,
        };
        let word = |word: &AtomicU64| word.load(Ordering::Relaxed);
        Some((word(inode), word(at), kind, usize::try_from(word(len)).ok()?))
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `open`, of this size; nothing refers to it any more.
        unsafe { libc::munmap(self.words.as_ptr().cast(), 4096) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(output: &[u8], flush: bool) -> (String, usize) {
        let mut out = Vec::new();
        let done = entries(output, LINE, Kind::Stdout, flush, 1_764_583_200_000_000_001, &mut out);
        (
            String::from_utf8(out)
                .unwrap()
                .replace("2025-12-01T10:00:00.000000001Z stdout", "T"),
            done,
        )
    }

    #[test]
    fn lines_are_tagged() {
        assert_eq!(text(b"a\n\nb\r\nc", false), ("T F a\nT F \nT F b\r\n".into(), 6));
        assert_eq!(text(b"c", true), ("T P c\n".into(), 1));
        assert_eq!(text(b"", true), (String::new(), 0));
    }

    #[test]
    fn long_lines_are_split_at_the_limit() {
        let line = "x".repeat(LINE);
        assert_eq!(
            text(format!("{line}\n").as_bytes(), false),
            (format!("T F {line}\n"), LINE + 1)
        );
        assert_eq!(text(line.as_bytes(), false).1, 0);
        let (out, done) = text(format!("{line}yz\n").as_bytes(), false);
        assert_eq!((out, done), (format!("T P {line}\nT F yz\n"), LINE + 3));
    }

    #[test]
    fn the_limit_is_the_log_s_own() {
        let dir = tempfile::tempdir().unwrap();
        let log = || Log::open(&dir.path().join("log"), &dir.path().join("mark"));
        let limits = [0, 255, 256, 32_768, 32_769].map(|bytes| log().limited(bytes).line);
        assert_eq!(limits, [LINE, LINE, 256, 32_768, LINE]);
        let mut out = Vec::new();
        let done = entries(&[b'x'; 600], 256, Kind::Stderr, true, 0, &mut out);
        let text = String::from_utf8(out).unwrap();
        let contents: Vec<_> = text
            .lines()
            .map(|line| line.rsplit(' ').next().unwrap_or("").len())
            .collect();
        assert_eq!((done, contents), (600, vec![256, 256, 88]));
    }

    #[test]
    fn dates() {
        for (now, date) in [
            (0, "1970-01-01T00:00:00.000000000Z"),
            (951_782_400, "2000-02-29T00:00:00.000000000Z"),
        ] {
            let mut out = Vec::new();
            stamp(now * 1_000_000_000, &mut out);
            assert_eq!(String::from_utf8(out).unwrap(), date);
        }
    }

    #[test]
    fn a_successor_learns_what_was_in_flight() {
        let dir = tempfile::tempdir().unwrap();
        let (path, mark) = (dir.path().join("log"), dir.path().join("mark"));
        let mut log = Log::open(&path, &mark);
        let mut batch = Vec::new();
        entries(b"old\n", LINE, Kind::Stdout, false, 0, &mut batch);
        log.write(&batch, Kind::Stdout, 4);
        log.consumed();
        assert_eq!(Log::open(&path, &mark).unconsumed(), None);
        batch.clear();
        entries(b"one\ntwo\n", LINE, Kind::Stdout, false, 0, &mut batch);
        log.write(&batch[..batch.len() - 2], Kind::Stdout, 8);
        // Killed here, amid the second line.
        let mut next = Log::open(&path, &mark);
        assert_eq!(next.unconsumed(), Some((Kind::Stdout, b"one\n".to_vec())));
        assert!(fs::read_to_string(&path).unwrap().ends_with(" one\n"));
    }

    #[test]
    fn an_unwritable_log_is_kept_then_dropped_then_marked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("no").join("log");
        fs::write(dir.path().join("no"), "a file where the directory should be").unwrap();
        let mut log = Log::open(&path, &dir.path().join("mark"));
        let batch = vec![b'\n'; PENDING];
        log.write(&batch, Kind::Stdout, 1);
        log.write(b"lost\n", Kind::Stdout, 5);
        assert_eq!((log.is_behind(), log.dropped_ever()), (true, 5));
        fs::remove_file(dir.path().join("no")).unwrap();
        assert!(log.retry());
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.len() > PENDING && text.contains("5 bytes of log dropped") && !text.contains("lost"));
    }
}
