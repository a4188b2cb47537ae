//! Proof that bytes and trees are what they should be.

use std::ffi::{CStr, CString};
use std::io::{self, BufReader, Read};
use std::os::fd::BorrowedFd;

use flate2::bufread::MultiGzDecoder;
use nix::dir::Dir;
use nix::fcntl::{AtFlags, OFlag, readlinkat};
use nix::sys::stat::{FileStat, SFlag, fstatat};
use oci_spec::image::Digest;
use sha2::{Digest as _, Sha256};

use super::super::content::{Error, Result, Usage, digest_of};
use super::confined;

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

/// Reads what `reader` holds when unpacked, whatever the compression.
pub fn decompress<'a>(mut reader: impl Read + 'a) -> io::Result<(Compression, Box<dyn Read + 'a>)> {
    let mut start = Vec::with_capacity(4);
    reader.by_ref().take(4).read_to_end(&mut start)?;
    let compression = Compression::of(&start);
    let whole = BufReader::with_capacity(128 << 10, io::Cursor::new(start).chain(reader));
    let plain: Box<dyn Read + 'a> = match compression {
        Compression::None => Box::new(whole),
        Compression::Gzip => Box::new(MultiGzDecoder::new(whole)),
        Compression::Zstd => Box::new(zstd::Decoder::with_buffer(whole)?),
    };
    Ok((compression, plain))
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
/// Contents are not read: what a power cut leaves shows in sizes.
pub fn tree(root: BorrowedFd<'_>) -> Result<(String, Usage)> {
    let mut hasher = Sha256::new();
    let mut usage = Usage { bytes: 0, inodes: 1 };
    let mut linked = std::collections::HashSet::new();
    let mut pending = vec![Vec::new()];
    while let Some(path) = pending.pop() {
        let shown = super::tar::printable(&path);
        let name = if path.is_empty() { b"." } else { &path[..] };
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW;
        let fd = confined(root, name, flags, false).map_err(Error::io("open", &shown))?;
        let mut dir = Dir::from_fd(fd).map_err(Error::io("list", &shown))?;
        for name in sorted(&mut dir).map_err(Error::io("list", &shown))? {
            let stat =
                fstatat(&dir, &*name, AtFlags::AT_SYMLINK_NOFOLLOW).map_err(Error::io("stat an entry of", &shown))?;
            let kind = SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT;
            hash(&mut hasher, &path, &name, &stat);
            if kind == SFlag::S_IFLNK {
                let target = readlinkat(&dir, &*name).map_err(Error::io("read a link in", &shown))?;
                hasher.update(target.as_encoded_bytes());
            }
            if kind == SFlag::S_IFDIR {
                let mut child = path.clone();
                if !child.is_empty() {
                    child.push(b'/');
                }
                child.extend(name.to_bytes());
                pending.push(child);
            }
            if stat.st_nlink == 1 || kind == SFlag::S_IFDIR || linked.insert(stat.st_ino) {
                usage.bytes += stat.st_blocks as u64 * 512;
                usage.inodes += 1;
            }
        }
    }
    Ok((digest_of(hasher).to_string(), usage))
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

fn sorted(dir: &mut Dir) -> nix::Result<Vec<CString>> {
    let mut names = Vec::new();
    for entry in dir.iter() {
        let entry = entry?;
        if entry.file_name() != c"." && entry.file_name() != c".." {
            names.push(entry.file_name().to_owned());
        }
    }
    names.sort();
    Ok(names)
}
