//! Proof that bytes and trees are what they should be.

use std::collections::HashSet;
use std::ffi::CStr;
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use flate2::bufread::MultiGzDecoder;
use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat, readlinkat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstatat};
use oci_spec::image::Digest;
use sha2::{Digest as _, Sha256};

use super::super::content::{Error, Result, Usage, digest_of};
use super::memory::{Memory, Window};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Compression {
    /// By magic number.
    pub fn of(start: &[u8]) -> Compression {
        match start {
            [0x1f, 0x8b, ..] => Compression::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Compression::Zstd,
            // A skippable frame may come first.
            [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Compression::Zstd,
            _ => Compression::None,
        }
    }
}

/// Longest header of a zstd frame: magic number, descriptor, window, dictionary, size.
const FRAME_HEADER: u64 = 4 + 1 + 1 + 4 + 8;

/// Reads what `reader` holds when unpacked, whatever the compression. May wait for room in `memory`.
pub fn decompress<'a>(
    mut reader: impl Read + Send + 'a,
    memory: &Arc<Memory>,
) -> io::Result<(Compression, Box<dyn Read + Send + 'a>)> {
    let mut start = Vec::new();
    reader.by_ref().take(FRAME_HEADER).read_to_end(&mut start)?;
    let compression = Compression::of(&start);
    let wanted = window(&start);
    let whole = BufReader::with_capacity(128 << 10, io::Cursor::new(start).chain(reader));
    let plain: Box<dyn Read + Send + 'a> = match compression {
        Compression::None => Box::new(whole),
        Compression::Gzip => Box::new(MultiGzDecoder::new(whole)),
        Compression::Zstd => {
            let room = memory.window(wanted).map_err(io::Error::other)?;
            let mut decoder = zstd::Decoder::with_buffer(whole)?;
            decoder.window_log_max(room.log())?;
            Box::new(Roomy { decoder, _room: room })
        }
    };
    Ok((compression, plain))
}

/// The window that the frame at the beginning asks for (RFC 8878, 3.1.1.1); 0 if it is none.
fn window(start: &[u8]) -> u64 {
    let [0x28, 0xb5, 0x2f, 0xfd, descriptor, rest @ ..] = start else {
        return 0;
    };
    let single_segment = descriptor & 0x20 != 0;
    if !single_segment {
        let Some(byte) = rest.first() else { return 0 };
        let base = 1u64 << (10 + (byte >> 3));
        return base + base / 8 * u64::from(byte & 7);
    }
    // The content itself is the window.
    let dictionary = [0, 1, 2, 4][usize::from(descriptor & 3)];
    let length = [1, 2, 4, 8][usize::from(descriptor >> 6)];
    let Some(field) = rest.get(dictionary..dictionary + length) else {
        return 0;
    };
    let size = field.iter().rev().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
    if length == 2 { size + 256 } else { size }
}

/// A decoder with the room that its window takes.
struct Roomy<R> {
    decoder: zstd::Decoder<'static, R>,
    _room: Window,
}

impl<R: BufRead> Read for Roomy<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.decoder.read(buf)
    }
}

/// Hashes and counts what passes, up to a limit.
pub struct Metered<R> {
    inner: R,
    hasher: Sha256,
    count: u64,
    limit: u64,
}

impl<R: Read> Metered<R> {
    pub fn new(inner: R, limit: u64) -> Metered<R> {
        Metered {
            inner,
            hasher: Sha256::new(),
            count: 0,
            limit,
        }
    }

    pub fn digest(self) -> Digest {
        digest_of(self.hasher)
    }
}

impl<R: Read> Read for Metered<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buf)?;
        self.hasher.update(&buf[..n]);
        self.count += n as u64;
        if self.count > self.limit {
            return Err(io::Error::other(Error::TooBig {
                object: "the unpacked layer".into(),
                limit: self.limit,
            }));
        }
        Ok(n)
    }
}

/// Hash over names, types, sizes, modes, owners, times and link targets below `root`, and what it all uses on disk.
/// Contents are not read: what a power cut leaves shows in sizes. In memory is one entry of each directory on the way:
/// so the entries' hashes are added up, in whatever order they come.
pub fn tree(root: BorrowedFd<'_>) -> Result<(String, Usage)> {
    let mut walk = Walk {
        sum: [0; 4],
        usage: Usage { bytes: 0, inodes: 1 },
        linked: HashSet::new(),
    };
    let here = openat(root, ".", DIRECTORY, Mode::empty()).map_err(Error::io("open", "the root of the layer"))?;
    walk.directory(here, &mut Vec::new())?;
    let mut hasher = Sha256::new();
    for lane in walk.sum {
        hasher.update(lane.to_le_bytes());
    }
    Ok((digest_of(hasher).to_string(), walk.usage))
}

const DIRECTORY: OFlag = OFlag::O_RDONLY
    .union(OFlag::O_DIRECTORY)
    .union(OFlag::O_NOFOLLOW)
    .union(OFlag::O_CLOEXEC);

struct Walk {
    sum: [u64; 4],
    usage: Usage,
    /// Inodes of several names that were counted.
    linked: HashSet<u64>,
}

impl Walk {
    fn directory(&mut self, dir: OwnedFd, path: &mut Vec<u8>) -> Result<()> {
        let list = |path: &[u8]| Error::io::<Errno>("list", super::tar::printable(path));
        let mut dir = Dir::from_fd(dir).map_err(list(path))?;
        let at = dir
            .as_fd()
            .try_clone_to_owned()
            .map_err(Error::io("list", super::tar::printable(path)))?;
        for entry in dir.iter() {
            let entry = entry.map_err(list(path))?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let length = path.len();
            self.entry(at.as_fd(), name, path)?;
            path.truncate(length);
        }
        Ok(())
    }

    fn entry(&mut self, at: BorrowedFd<'_>, name: &CStr, path: &mut Vec<u8>) -> Result<()> {
        let stat = fstatat(at, name, AtFlags::AT_SYMLINK_NOFOLLOW)
            .map_err(Error::io("stat an entry of", super::tar::printable(path)))?;
        let kind = super::kind_of(&stat);
        let mut hasher = Sha256::new();
        hash(&mut hasher, path, name, &stat);
        if kind == SFlag::S_IFLNK {
            let target = readlinkat(at, name).map_err(Error::io("read a link in", super::tar::printable(path)))?;
            hasher.update(target.as_encoded_bytes());
        }
        let hashed = hasher.finalize();
        for (lane, bytes) in self.sum.iter_mut().zip(hashed.chunks_exact(8)) {
            let mut word = [0; 8];
            word.copy_from_slice(bytes);
            *lane = lane.wrapping_add(u64::from_le_bytes(word));
        }
        if stat.st_nlink == 1 || kind == SFlag::S_IFDIR || self.linked.insert(stat.st_ino) {
            self.usage.bytes += stat.st_blocks as u64 * 512;
            self.usage.inodes += 1;
        }
        if kind != SFlag::S_IFDIR {
            return Ok(());
        }
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend(name.to_bytes());
        let below =
            openat(at, name, DIRECTORY, Mode::empty()).map_err(Error::io("open", super::tar::printable(path)))?;
        self.directory(below, path)
    }
}

fn hash(hasher: &mut Sha256, path: &[u8], name: &CStr, stat: &FileStat) {
    hasher.update(path);
    hasher.update(b"/");
    hasher.update(name.to_bytes_with_nul());
    // A directory's size is the file system's own affair.
    let size = if stat.st_mode & libc::S_IFMT == libc::S_IFDIR {
        0
    } else {
        stat.st_size
    };
    for number in [
        i64::from(stat.st_mode),
        i64::from(stat.st_uid),
        i64::from(stat.st_gid),
        size,
    ] {
        hasher.update(number.to_le_bytes());
    }
    for number in [stat.st_mtime, stat.st_mtime_nsec] {
        hasher.update(number.to_le_bytes());
    }
    hasher.update(stat.st_rdev.to_le_bytes());
}
