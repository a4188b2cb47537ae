//! Reading a container's log file in the CRI's format, from some place on, to its end or as it grows and is rotated.
//!
//! ```text
//!   2016-10-06T00:17:09.669794202Z stdout F a whole line
//!   2016-10-06T00:17:09.669794203Z stderr P the beginning of a long one, or one without a newline
//! ```

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

/// Bytes read at a time.
const BLOCK: usize = 64 << 10;
/// A longer line is passed on in pieces.
const LINE: usize = 1 << 20;

/// One entry of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// RFC 3339 with nanoseconds, as written.
    pub time: &'a str,
    pub stderr: bool,
    /// No newline follows.
    pub partial: bool,
    pub content: &'a [u8],
}

impl<'a> Entry<'a> {
    /// Parses a line without its newline; one in another format is content as a whole.
    fn parse(line: &'a [u8]) -> Entry<'a> {
        let whole = Entry {
            time: "",
            stderr: false,
            partial: false,
            content: line,
        };
        let mut parts = line.splitn(4, |b| *b == b' ');
        let (Some(time), Some(stream), Some(tags), Some(content)) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return whole;
        };
        let stderr = match stream {
            b"stdout" => false,
            b"stderr" => true,
            _ => return whole,
        };
        let Ok(time) = std::str::from_utf8(time) else {
            return whole;
        };
        Entry {
            time,
            stderr,
            partial: tags.split(|b| *b == b':').next() == Some(b"P"),
            content,
        }
    }
}

/// Where to begin.
#[derive(Clone, Copy, Debug, Default)]
pub struct Start {
    /// The last so many entries only.
    pub last: Option<usize>,
    /// Nothing older (ns since the epoch).
    pub since: Option<i64>,
}

/// Takes entries; an error ends the reading.
pub trait Sink: FnMut(Entry<'_>) -> io::Result<()> {}
impl<T: FnMut(Entry<'_>) -> io::Result<()>> Sink for T {}

/// Passes on what is in the file now.
pub fn read(path: &Path, start: Start, sink: impl Sink) -> io::Result<()> {
    let mut tail = Tail::new(path, start, sink);
    tail.open()?;
    tail.drain()?;
    tail.rest()
}

/// Passes on what is in the file, then what is added, until `ended`'s other end is closed: then the file is complete.
/// Blocking. A file that is not there yet is waited for; its directory must be there.
pub fn follow(path: &Path, start: Start, ended: &OwnedFd, sink: impl Sink) -> io::Result<()> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
    let flags = AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO;
    inotify.add_watch(dir, flags | AddWatchFlags::IN_ONLYDIR)?;
    let mut tail = Tail::new(path, start, sink);
    loop {
        match tail.advance() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            other => other?,
        }
        let mut fds = [
            PollFd::new(inotify.as_fd(), PollFlags::POLLIN),
            PollFd::new(ended.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut fds, PollTimeout::NONE) {
            Err(nix::Error::EINTR) => continue,
            other => other?,
        };
        let over = fds[1].revents().is_some_and(|r| !r.is_empty());
        while inotify.read_events().is_ok_and(|events| !events.is_empty()) {}
        if over {
            match tail.advance() {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                other => other?,
            }
            return tail.rest();
        }
    }
}

struct Tail<'a, S> {
    path: &'a Path,
    start: Start,
    sink: S,
    file: Option<File>,
    /// Bytes of the file passed on.
    offset: u64,
    /// Of an entry whose newline is not there yet.
    pending: Vec<u8>,
}

impl<'a, S: Sink> Tail<'a, S> {
    fn new(path: &'a Path, start: Start, sink: S) -> Tail<'a, S> {
        Tail {
            path,
            start,
            sink,
            file: None,
            offset: 0,
            pending: Vec::new(),
        }
    }

    /// Reads on, in the new file too if the log was rotated.
    fn advance(&mut self) -> io::Result<()> {
        if self.file.is_none() {
            self.open()?;
        }
        self.drain()?;
        while self.rotated()? {
            // Written to the old file until the new one was opened.
            self.drain()?;
            self.rest()?;
            self.start.last = None;
            self.open()?;
            self.drain()?;
        }
        Ok(())
    }

    fn open(&mut self) -> io::Result<()> {
        let mut file = File::open(self.path)?;
        self.offset = match self.start.last {
            Some(count) => last(&file, count)?,
            None => 0,
        };
        file.seek(SeekFrom::Start(self.offset))?;
        self.file = Some(file);
        Ok(())
    }

    /// Does the path name another file by now? While it names none, the old one goes on.
    fn rotated(&self) -> io::Result<bool> {
        let Some(file) = &self.file else { return Ok(false) };
        let own = file.metadata()?;
        match std::fs::metadata(self.path) {
            Ok(now) => Ok((now.dev(), now.ino()) != (own.dev(), own.ino())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// To the present end of the open file.
    fn drain(&mut self) -> io::Result<()> {
        let Some(mut file) = self.file.take() else {
            return Ok(());
        };
        if file.metadata()?.len() < self.offset {
            // It was cut short in place.
            file.seek(SeekFrom::Start(0))?;
            self.offset = 0;
            self.pending.clear();
        }
        let mut block = vec![0; BLOCK];
        loop {
            let count = match file.read(&mut block) {
                Ok(0) => break,
                Ok(count) => count,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            };
            self.offset += count as u64;
            self.take(&block[..count])?;
        }
        self.file = Some(file);
        Ok(())
    }

    fn take(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while let Some(at) = bytes.iter().position(|b| *b == b'\n') {
            self.pending.extend_from_slice(&bytes[..at]);
            bytes = &bytes[at + 1..];
            let line = std::mem::take(&mut self.pending);
            self.pass(&line)?;
        }
        self.pending.extend_from_slice(bytes);
        if self.pending.len() > LINE {
            self.rest()?;
        }
        Ok(())
    }

    /// Passes on an entry that has no newline and gets none any more.
    fn rest(&mut self) -> io::Result<()> {
        match std::mem::take(&mut self.pending) {
            line if line.is_empty() => Ok(()),
            line => self.pass(&line),
        }
    }

    fn pass(&mut self, line: &[u8]) -> io::Result<()> {
        let entry = Entry::parse(line);
        if let Some(since) = self.start.since {
            match entry.time.parse::<jiff::Timestamp>() {
                Ok(time) if time.as_nanosecond() < i128::from(since) => return Ok(()),
                _ => self.start.since = None,
            }
        }
        (self.sink)(entry)
    }
}

/// Where the last `count` lines begin.
fn last(file: &File, count: usize) -> io::Result<u64> {
    let mut end = file.metadata()?.len();
    let mut left = count + 1;
    let mut block = vec![0; BLOCK];
    let mut first = true;
    while end > 0 {
        let from = end.saturating_sub(BLOCK as u64);
        let part = &mut block[..usize::try_from(end - from).unwrap_or(BLOCK)];
        file.read_exact_at(part, from)?;
        for (at, byte) in part.iter().enumerate().rev() {
            // A last line without a newline counts as well.
            if first && *byte != b'\n' {
                left = left.saturating_sub(1);
            }
            first = false;
            if *byte == b'\n' {
                left = left.saturating_sub(1);
                if left == 0 {
                    return Ok(from + at as u64 + 1);
                }
            }
        }
        end = from;
    }
    Ok(0)
}

/// The file of the attempt before that of `path`, which is `<name>/<attempt>.log`.
pub fn previous(path: &Path) -> Option<PathBuf> {
    let attempt: u64 = path.file_stem()?.to_str()?.parse().ok()?;
    Some(path.with_file_name(format!("{}.log", attempt.checked_sub(1)?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::sync::mpsc;

    fn line(n: u32) -> String {
        format!("2024-01-01T00:00:0{}.5Z stdout F line {n}\n", n % 10)
    }

    fn lines(path: &Path, start: Start) -> Vec<String> {
        let mut all = Vec::new();
        read(path, start, |entry| {
            all.push(String::from_utf8_lossy(entry.content).into_owned());
            Ok(())
        })
        .unwrap();
        all
    }

    #[test]
    fn parses_entries() {
        let entry = Entry::parse(b"2024-01-01T00:00:00.5Z stderr P a  b ");
        assert_eq!(
            (entry.stderr, entry.partial, entry.content),
            (true, true, &b"a  b "[..])
        );
        let entry = Entry::parse(b"2024-01-01T00:00:00.5Z stdout F ");
        assert_eq!((entry.partial, entry.content), (false, &b""[..]));
        assert!(Entry::parse(b"2024-01-01T00:00:00.5Z stdout P:x:y a").partial);
        for other in [&b"no log line"[..], b"", b"a b c d", b"\xff stdout F"] {
            assert_eq!(Entry::parse(other).content, other);
        }
    }

    #[test]
    fn begins_where_asked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        std::fs::write(&path, (0..8).map(line).collect::<String>()).unwrap();
        let with = |last, since: Option<&str>| {
            let since = since.map(|s| s.parse::<jiff::Timestamp>().unwrap().as_nanosecond() as i64);
            lines(&path, Start { last, since })
        };
        assert_eq!(with(None, None).len(), 8);
        assert_eq!(with(Some(2), None), ["line 6", "line 7"]);
        assert_eq!(with(Some(0), None).len(), 0);
        assert_eq!(with(Some(100), None).len(), 8);
        assert_eq!(with(None, Some("2024-01-01T00:00:06Z")), ["line 6", "line 7"]);
        std::fs::write(
            &path,
            "2024-01-01T00:00:00.5Z stdout F a\n2024-01-01T00:00:00.5Z stdout P cut",
        )
        .unwrap();
        assert_eq!(with(Some(1), None), ["cut"]);
    }

    #[test]
    fn the_last_lines_of_a_file_of_many_blocks() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        std::fs::write(&path, (0..20_000).map(line).collect::<String>()).unwrap();
        let all = lines(
            &path,
            Start {
                last: Some(5000),
                since: None,
            },
        );
        assert_eq!((all.len(), all[0].as_str()), (5000, "line 15000"));
    }

    #[test]
    fn follows_through_a_rotation_to_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        let (send, receive) = mpsc::channel();
        let (ended, end) = nix::unistd::pipe().unwrap();
        let follower = {
            let path = path.clone();
            std::thread::spawn(move || {
                follow(&path, Start::default(), &ended, |entry| {
                    send.send(String::from_utf8_lossy(entry.content).into_owned())
                        .map_err(io::Error::other)
                })
            })
        };
        // The file comes later than the follower, or not: both must work.
        let mut file = File::create(&path).unwrap();
        write!(file, "{}", line(0)).unwrap();
        assert_eq!(receive.recv().unwrap(), "line 0");
        file.write_all(b"2024-01-01T00:00:00.5Z stdout F ha").unwrap();
        file.write_all(b"lf\n").unwrap();
        assert_eq!(receive.recv().unwrap(), "half");
        std::fs::rename(&path, dir.path().join("0.log.old")).unwrap();
        write!(file, "{}", line(1)).unwrap();
        let mut file = File::create(&path).unwrap();
        write!(file, "{}", line(2)).unwrap();
        assert_eq!(receive.recv().unwrap(), "line 1");
        assert_eq!(receive.recv().unwrap(), "line 2");
        write!(file, "2024-01-01T00:00:00.5Z stdout P no newline").unwrap();
        drop(end);
        follower.join().unwrap().unwrap();
        assert_eq!(receive.recv().unwrap(), "no newline");
        assert!(receive.recv().is_err(), "nothing more");
    }

    #[test]
    fn the_attempt_before() {
        assert_eq!(previous(Path::new("/l/web/3.log")), Some("/l/web/2.log".into()));
        assert_eq!(previous(Path::new("/l/web/0.log")), None);
        assert_eq!(previous(Path::new("/l/web.log")), None);
    }
}
