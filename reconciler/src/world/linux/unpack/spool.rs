//! A list that grows with the layer: short ones in memory, the rest in a file that nobody else sees.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, Write};
use std::os::fd::BorrowedFd;

use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::super::content::{Error, Result, token};

/// Bytes held in memory.
const BUFFER: usize = 16 << 10;

/// Paths with a time each, in the order in which they came.
#[derive(Debug, Default)]
pub struct Spool {
    buffer: Vec<u8>,
    file: Option<File>,
}

impl Spool {
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty() && self.file.is_none()
    }

    /// Adds a path; `dir` is where a file may be made.
    pub fn push(&mut self, dir: BorrowedFd<'_>, path: &[u8], (seconds, nanos): (i64, u32)) -> io::Result<()> {
        self.buffer.extend((path.len() as u32).to_le_bytes());
        self.buffer.extend(path);
        self.buffer.extend(seconds.to_le_bytes());
        self.buffer.extend(nanos.to_le_bytes());
        if self.buffer.len() < BUFFER {
            return Ok(());
        }
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(nameless(dir)?),
        };
        file.write_all(&self.buffer)?;
        self.buffer.clear();
        Ok(())
    }

    /// Gives each path, in order.
    pub fn each(self, mut take: impl FnMut(&[u8], (i64, u32)) -> Result<()>) -> Result<()> {
        let failed = || Error::io::<io::Error>("read back", "a list of the layer's paths");
        let head: Box<dyn Read> = match self.file {
            Some(mut file) => {
                file.rewind().map_err(failed())?;
                Box::new(BufReader::with_capacity(BUFFER, file))
            }
            None => Box::new(io::empty()),
        };
        let mut list = head.chain(&self.buffer[..]);
        let mut path = Vec::new();
        loop {
            let mut length = [0; 4];
            match list.read_exact(&mut length) {
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                other => other.map_err(failed())?,
            }
            path.resize(u32::from_le_bytes(length) as usize, 0);
            let (mut seconds, mut nanos) = ([0; 8], [0; 4]);
            for field in [&mut path[..], &mut seconds, &mut nanos] {
                list.read_exact(field).map_err(failed())?;
            }
            take(&path, (i64::from_le_bytes(seconds), u32::from_le_bytes(nanos)))?;
        }
    }
}

/// Not by O_TMPFILE, which not every file system has.
fn nameless(dir: BorrowedFd<'_>) -> io::Result<File> {
    let name = format!("spool-{}", token());
    let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
    let file = openat(dir, name.as_str(), flags, Mode::S_IRUSR | Mode::S_IWUSR)?;
    unlinkat(dir, name.as_str(), UnlinkatFlags::NoRemoveDir)?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn all_comes_back_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let at = File::open(dir.path()).unwrap();
        for count in [0, 1, 5000] {
            let mut spool = Spool::default();
            for n in 0..count {
                spool
                    .push(at.as_fd(), format!("path/{n}").as_bytes(), (-n, n as u32))
                    .unwrap();
            }
            assert_eq!(spool.is_empty(), count == 0);
            let mut next = 0;
            spool
                .each(|path, time| {
                    assert_eq!((path, time), (format!("path/{next}").as_bytes(), (-next, next as u32)));
                    next += 1;
                    Ok(())
                })
                .unwrap();
            assert_eq!(next, count);
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
