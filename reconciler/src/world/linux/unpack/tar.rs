//! Reads a tar stream: v7, ustar, GNU and pax, with sparse files in all their forms.
//!
//! The `tar` crate's own iterator reads a long name or a pax header of any size into memory and knows no pax sparse
//! files; so only its header layout is used here. Everything the stream says about sizes is bounded before it is
//! believed. What is not understood is refused, never skipped.

use std::io::{self, Read};

use ::tar::Header;

use super::super::content::{Error, Result};
use super::pax::{Extensions, SPARSE_LIMIT, Sparse, decimal, number};

const BLOCK: usize = 512;
/// Bytes of all pax headers and GNU long names of one member together (Go's archive/tar: of each).
const EXTENSION_LIMIT: u64 = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    File,
    HardLink,
    Symlink,
    Char,
    Block,
    Directory,
    Fifo,
}

/// One member, extensions applied.
#[derive(Clone, Debug)]
pub struct Entry {
    /// As written: not cleaned.
    pub path: Vec<u8>,
    /// Target of a link.
    pub link: Vec<u8>,
    pub kind: Kind,
    /// Permission bits with setuid, setgid and sticky.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Seconds and nanoseconds since the epoch.
    pub mtime: (i64, u32),
    pub device: (u32, u32),
    /// Bytes of the file when unpacked.
    pub size: u64,
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// Offset and length of each piece of data, in order; what lies between is a hole. `None`: not sparse.
    pub pieces: Option<Vec<(u64, u64)>>,
}

impl Entry {
    /// For messages.
    pub fn name(&self) -> String {
        printable(&self.path)
    }
}

/// A name from an archive as it may be shown: control characters and broken UTF-8 escaped, cut off at 200 characters.
pub fn printable(name: &[u8]) -> String {
    let text = String::from_utf8_lossy(name);
    let mut shown: String = text.chars().take(200).flat_map(|c| c.escape_debug()).collect();
    if text.chars().count() > 200 {
        shown.push('…');
    }
    format!("\"{shown}\"")
}

pub struct Reader<R> {
    inner: R,
    /// Bytes of the current member's data not yet read, and of the padding behind them.
    left: u64,
    padding: u64,
    /// Longest path, bytes.
    name_limit: usize,
    /// Bytes of the current member's extended headers so far.
    extensions: u64,
    ended: bool,
}

impl<R: Read> Reader<R> {
    pub fn new(inner: R, name_limit: usize) -> Reader<R> {
        Reader {
            inner,
            left: 0,
            padding: 0,
            name_limit,
            extensions: 0,
            ended: false,
        }
    }

    /// The next member; what is left of the one before is skipped. `None` at the end of the archive.
    pub fn next_entry(&mut self) -> Result<Option<Entry>> {
        let mut extensions = Extensions::default();
        let mut extended = false;
        self.extensions = 0;
        loop {
            let Some(header) = self.header()? else {
                return if extended {
                    Err(broken("archive", "ends after an extended header"))
                } else {
                    Ok(None)
                };
            };
            let kind = header.as_old().linkflag[0];
            match kind {
                b'x' | b'X' => self.pax(&header, &mut extensions)?,
                b'g' => self.skip_extension(&header)?,
                b'L' => extensions.path = Some(self.long(&header)?),
                b'K' => extensions.link = Some(self.long(&header)?),
                _ => return self.entry(&header, extensions).map(Some),
            }
            extended |= kind != b'g';
        }
    }

    /// Everything behind the archive's end, so that a hash over the stream is complete.
    pub fn drain(&mut self) -> Result<()> {
        io::copy(&mut self.inner, &mut io::sink())
            .map(drop)
            .map_err(|e| stream("archive", e))
    }

    pub fn into_inner(self) -> R {
        self.inner
    }

    fn header(&mut self) -> Result<Option<Header>> {
        self.skip_data()?;
        if self.ended {
            return Ok(None);
        }
        let mut header = Header::new_old();
        if !self.block(header.as_mut_bytes())? {
            self.ended = true;
            return Ok(None); // no end mark: tolerated, as tar does
        }
        if header.as_bytes().iter().all(|b| *b == 0) {
            self.ended = true;
            return Ok(None);
        }
        let stated = number(&header.as_old().cksum).unwrap_or(-1);
        let (mut unsigned, mut signed) = (0i64, 0i64);
        for (i, byte) in header.as_bytes().iter().enumerate() {
            let byte = if (148..156).contains(&i) { b' ' } else { *byte };
            unsigned += i64::from(byte);
            signed += i64::from(byte as i8);
        }
        if stated != unsigned && stated != signed {
            return Err(broken(
                "archive",
                "a header's checksum is wrong: not a tar archive, or damaged",
            ));
        }
        Ok(Some(header))
    }

    /// Reads one block; `false` at a clean end.
    fn block(&mut self, block: &mut [u8; BLOCK]) -> Result<bool> {
        let mut have = 0;
        while have < BLOCK {
            match self.inner.read(&mut block[have..]) {
                Ok(0) if have == 0 => return Ok(false),
                Ok(0) => return Err(broken("archive", "ends in the middle of a header")),
                Ok(n) => have += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(stream("archive", e)),
            }
        }
        Ok(true)
    }

    fn skip_data(&mut self) -> Result<()> {
        let rest = self.left.saturating_add(self.padding);
        (self.left, self.padding) = (0, 0);
        let skipped = io::copy(&mut (&mut self.inner).take(rest), &mut io::sink()).map_err(|e| stream("archive", e))?;
        if skipped < rest {
            Err(broken("archive", "ends in the middle of a member"))
        } else {
            Ok(())
        }
    }

    fn begin_data(&mut self, size: u64) {
        self.left = size;
        self.padding = size.wrapping_neg() % BLOCK as u64;
    }

    /// All data of an extension header.
    fn extension(&mut self, header: &Header) -> Result<Vec<u8>> {
        let size = header_number(&header.as_old().size, "archive", "size")?;
        // A whole block each: empty ones without end are refused too.
        self.extensions = self.extensions.saturating_add(size).saturating_add(BLOCK as u64);
        if self.extensions > EXTENSION_LIMIT + BLOCK as u64 {
            return Err(Error::TooBig {
                object: "extended header in archive".into(),
                limit: EXTENSION_LIMIT,
            });
        }
        self.begin_data(size);
        let mut bytes = Vec::new();
        self.read_to_end(&mut bytes).map_err(|e| stream("archive", e))?;
        Ok(bytes)
    }

    fn skip_extension(&mut self, header: &Header) -> Result<()> {
        self.extension(header).map(drop)
    }

    fn long(&mut self, header: &Header) -> Result<Vec<u8>> {
        let mut name = self.extension(header)?;
        if let Some(nul) = name.iter().position(|b| *b == 0) {
            name.truncate(nul);
        }
        Ok(name)
    }

    fn pax(&mut self, header: &Header, to: &mut Extensions) -> Result<()> {
        let bytes = self.extension(header)?;
        to.read(&bytes)
    }

    fn entry(&mut self, header: &Header, extensions: Extensions) -> Result<Entry> {
        let Extensions {
            path,
            link,
            size,
            uid,
            gid,
            mtime,
            xattrs,
            sparse,
        } = extensions;
        let path = sparse
            .name
            .clone()
            .or(path)
            .unwrap_or_else(|| header.path_bytes().into_owned());
        let shown = printable(&path);
        let link = link.unwrap_or_else(|| header.link_name_bytes().map_or_else(Vec::new, |l| l.into_owned()));
        for name in [&path, &link] {
            if name.len() > self.name_limit {
                return Err(Error::TooBig {
                    object: format!("the name {shown}"),
                    limit: self.name_limit as u64,
                });
            }
            if name.contains(&0) {
                return Err(broken(&shown, "its name holds a NUL byte"));
            }
        }
        let old = header.as_old();
        let kind = match old.linkflag[0] {
            // v7 had no type for directories.
            0 if path.ends_with(b"/") => Kind::Directory,
            0 | b'0' | b'7' | b'S' => Kind::File,
            b'1' => Kind::HardLink,
            b'2' => Kind::Symlink,
            b'3' => Kind::Char,
            b'4' => Kind::Block,
            b'5' => Kind::Directory,
            b'6' => Kind::Fifo,
            other => {
                return Err(broken(
                    &shown,
                    format!("is of type {:?}, which is not supported", char::from(other)),
                ));
            }
        };
        let field = |bytes: &[u8], what| header_number(bytes, &shown, what);
        let id = |bytes, what| {
            let id = field(bytes, what)?;
            u32::try_from(id).map_err(|_| broken(&shown, format!("its {what} {id} is out of range")))
        };
        let device = match kind {
            Kind::Char | Kind::Block => (
                header
                    .device_major()
                    .ok()
                    .flatten()
                    .ok_or_else(|| broken(&shown, "its device number is malformed"))?,
                header
                    .device_minor()
                    .ok()
                    .flatten()
                    .ok_or_else(|| broken(&shown, "its device number is malformed"))?,
            ),
            _ => (0, 0),
        };
        let mut entry = Entry {
            kind,
            mode: (field(&old.mode, "mode")? & 0o7777) as u32,
            uid: uid.map_or_else(|| id(&old.uid[..], "uid"), Ok)?,
            gid: gid.map_or_else(|| id(&old.gid[..], "gid"), Ok)?,
            mtime: match mtime {
                Some(time) => time,
                None => (
                    number(&old.mtime).ok_or_else(|| broken(&shown, "its mtime is malformed"))?,
                    0,
                ),
            },
            device,
            size: 0,
            xattrs,
            pieces: None,
            path,
            link,
        };
        // Only files have data; the size that some writers state for others stands for nothing.
        if kind == Kind::File {
            let stored = size.map_or_else(|| field(&old.size, "size"), Ok)?;
            self.begin_data(stored);
            entry.size = stored;
            self.sparse(header, sparse, &mut entry)?;
        }
        Ok(entry)
    }

    fn sparse(&mut self, header: &Header, sparse: Sparse, entry: &mut Entry) -> Result<()> {
        let shown = entry.name();
        let bad = || broken(&shown, "its map of holes is malformed");
        let (size, map) = if header.as_old().linkflag[0] == b'S' {
            self.gnu_map(header, &shown)?
        } else if sparse.major == Some(1) {
            let map = self.pax_map(&shown)?;
            (sparse.size.ok_or_else(bad)?, map)
        } else if sparse.has_map {
            (sparse.size.ok_or_else(bad)?, sparse.map)
        } else {
            return Ok(());
        };
        if map.len() % 2 != 0 {
            return Err(bad());
        }
        let (mut end, mut data) = (0u64, 0u64);
        let mut pieces = Vec::with_capacity(map.len() / 2);
        for pair in map.chunks_exact(2) {
            let (offset, length) = (pair[0], pair[1]);
            let next = offset.checked_add(length).ok_or_else(bad)?;
            if offset < end || next > size {
                return Err(bad());
            }
            (end, data) = (next, data + length);
            pieces.push((offset, length));
        }
        if data != self.left {
            return Err(bad());
        }
        entry.size = size;
        entry.pieces = Some(pieces);
        Ok(())
    }

    /// The old GNU form: four pieces in the header, 21 in each block that follows it.
    fn gnu_map(&mut self, header: &Header, shown: &str) -> Result<(u64, Vec<u64>)> {
        let bad = || broken(shown, "its map of holes is malformed");
        let gnu = header.as_gnu().ok_or_else(bad)?;
        let mut map = Vec::new();
        let mut take = |pieces: &[::tar::GnuSparseHeader]| -> Result<()> {
            for piece in pieces.iter().filter(|p| !p.is_empty()) {
                map.push(header_number(&piece.offset, shown, "map of holes")?);
                map.push(header_number(&piece.numbytes, shown, "map of holes")?);
            }
            if map.len() > 2 * SPARSE_LIMIT {
                Err(bad())
            } else {
                Ok(())
            }
        };
        take(&gnu.sparse)?;
        let mut more = gnu.is_extended();
        while more {
            let mut block = ::tar::GnuExtSparseHeader::new();
            if !self.block(block.as_mut_bytes())? {
                return Err(bad());
            }
            take(block.sparse())?;
            more = block.is_extended();
        }
        Ok((header_number(&gnu.realsize, shown, "size")?, map))
    }

    /// The pax 1.0 form: decimal lines ahead of the data, padded to a block.
    fn pax_map(&mut self, shown: &str) -> Result<Vec<u64>> {
        let bad = || broken(shown, "its map of holes is malformed");
        let (mut map, mut count, mut digits) = (Vec::new(), None, Vec::new());
        loop {
            let mut block = [0; BLOCK];
            self.read_exact(&mut block).map_err(|e| stream(shown, e))?;
            for byte in block {
                if count == Some(map.len()) {
                    break;
                }
                if byte != b'\n' {
                    digits.push(byte);
                    if digits.len() > 20 {
                        return Err(bad());
                    }
                    continue;
                }
                let value = decimal(&digits).ok_or_else(bad)?;
                digits.clear();
                match count {
                    Some(_) => map.push(value),
                    None if value > SPARSE_LIMIT as u64 => return Err(bad()),
                    None => count = Some(2 * value as usize),
                }
            }
            if count == Some(map.len()) {
                return Ok(map);
            }
        }
    }
}

/// The data of the current member as stored.
impl<R: Read> Read for Reader<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 || buf.is_empty() {
            return Ok(0);
        }
        let most = buf.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let n = self.inner.read(&mut buf[..most])?;
        if n == 0 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "ends in the middle of a member",
            ));
        }
        self.left -= n as u64;
        Ok(n)
    }
}

pub(super) fn broken(object: &str, problem: impl std::fmt::Display) -> Error {
    Error::invalid(object, problem)
}

/// An error of the stream below: one with an error number comes from this node, any other from the bytes themselves.
pub(crate) fn stream(object: &str, cause: io::Error) -> Error {
    if cause.get_ref().is_some_and(|inner| inner.is::<Error>()) {
        let inner = cause.into_inner().and_then(|e| e.downcast::<Error>().ok());
        return inner.map_or_else(|| Error::invalid(object, "cannot be read"), |e| e.of_member(object));
    }
    match cause.raw_os_error() {
        Some(_) => Error::io("read", object)(cause),
        None => Error::invalid(object, cause),
    }
}

fn header_number(bytes: &[u8], object: &str, what: &str) -> Result<u64> {
    let value = number(bytes).and_then(|n| u64::try_from(n).ok());
    value.ok_or_else(|| broken(object, format!("its {what} is malformed")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_what_it_cannot_bound() {
        let mut header = Header::new_gnu();
        header.set_entry_type(::tar::EntryType::GNULongName);
        header.set_size(1 << 40);
        header.set_cksum();
        let error = Reader::new(&header.as_bytes()[..], 4096).next_entry().unwrap_err();
        assert!(matches!(error, Error::TooBig { .. }), "{error}");

        let mut header = Header::new_gnu();
        header.set_path("f").unwrap();
        header.set_size(700);
        header.set_cksum();
        let mut reader = Reader::new(&header.as_bytes()[..], 4096);
        assert_eq!(reader.next_entry().unwrap().unwrap().size, 700);
        assert!(
            reader
                .next_entry()
                .unwrap_err()
                .to_string()
                .contains("ends in the middle")
        );

        let noise = [7u8; 2048];
        assert!(
            Reader::new(&noise[..], 4096)
                .next_entry()
                .unwrap_err()
                .to_string()
                .contains("checksum")
        );
    }
}
