//! A blob on its way in.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::path::PathBuf;

use nix::fcntl::Flock;
use oci_spec::image::{Descriptor, Digest, MediaType};
use sha2::{Digest as _, Sha256};
use shim::fault;

use super::{Content, Error, Result, digest_of, remove_file};

/// What [`Content::begin`] found.
#[derive(Debug)]
pub enum Begin<'a> {
    /// The blob is here.
    Present,
    /// Another writer has it.
    Taken,
    Writer(Box<Writer<'a>>),
}

/// A blob on its way in. Dropped without `commit`, one that others may resume stays; any other is removed.
#[derive(Debug)]
pub struct Writer<'a> {
    content: &'a Content,
    file: Flock<File>,
    path: PathBuf,
    pub(super) object: String,
    expected: Option<Digest>,
    size: Option<u64>,
    /// Its file is that of the digest, for whoever comes next.
    shared: bool,
    hasher: Sha256,
    offset: u64,
    over: bool,
    done: bool,
}

impl<'a> Writer<'a> {
    /// Takes over what an earlier writer left in `file`.
    pub(super) fn new(
        content: &'a Content,
        file: Flock<File>,
        path: PathBuf,
        expected: Option<Digest>,
        size: Option<u64>,
        shared: bool,
    ) -> Result<Writer<'a>> {
        let object = expected.as_ref().map_or_else(|| "blob".to_string(), |d| d.to_string());
        let hasher = Sha256::new();
        let mut writer = Writer {
            content,
            file,
            path,
            object,
            expected,
            size,
            shared,
            hasher,
            offset: 0,
            over: false,
            done: false,
        };
        writer.resume()?;
        Ok(writer)
    }
    /// How many bytes are here already: fetch from there on.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Throws away what is here, e.g. because the source cannot start in the middle.
    pub fn restart(&mut self) -> Result<()> {
        if self.offset > 0 {
            self.file
                .set_len(0)
                .and_then(|()| self.file.rewind())
                .map_err(Error::io("truncate", &self.object))?;
            self.hasher = Sha256::new();
            self.offset = 0;
        }
        Ok(())
    }

    /// Hashes what an earlier writer left; more than there should be is thrown away.
    fn resume(&mut self) -> Result<()> {
        let mut buffer = vec![0; 128 << 10];
        loop {
            let n = self.file.read(&mut buffer).map_err(Error::io("read", &self.object))?;
            if n == 0 {
                break;
            }
            self.hasher.update(&buffer[..n]);
            self.offset += n as u64;
        }
        if self.size.is_some_and(|size| self.offset > size) {
            self.restart()
        } else {
            Ok(())
        }
    }

    /// Verifies, flushes and renames into place.
    pub fn commit(mut self, media_type: MediaType) -> Result<Descriptor> {
        let digest = self.seal()?;
        self.file.sync_data().map_err(Error::io("flush", &self.object))?;
        self.place(&digest)?;
        Ok(Descriptor::new(media_type, self.offset, digest))
    }

    /// Verifies size and digest. Wrong bytes are removed, as they cannot be resumed.
    pub fn seal(&mut self) -> Result<Digest> {
        if let Some(size) = self.size
            && size != self.offset
        {
            let problem = format!("has {} bytes, its descriptor says {size}", self.offset);
            return Err(Error::invalid(&self.object, problem));
        }
        let got = digest_of(std::mem::take(&mut self.hasher));
        if let Some(want) = &self.expected
            && *want != got
        {
            remove_file(&self.path)?;
            self.done = true;
            return Err(Error::Digest {
                object: self.object.clone(),
                want: want.to_string(),
                got: got.to_string(),
            });
        }
        Ok(got)
    }

    /// Gives a sealed blob its name. Its data must be on disk.
    pub fn place(&mut self, digest: &Digest) -> Result<()> {
        fault::point("content.place.before");
        if self.shared {
            self.content.place(digest)?;
        } else {
            let blob = self.content.blob_path(digest)?;
            fs::rename(&self.path, &blob).map_err(Error::io("rename into place", blob.display()))?;
        }
        fault::point("content.place.after");
        self.done = true;
        Ok(())
    }

    /// What an earlier writer left, from its beginning: [`Writer::offset`] bytes.
    pub fn left(&self) -> Result<io::Take<File>> {
        let file = File::open(&self.path).map_err(Error::io("open", self.path.display()))?;
        Ok(file.take(self.offset))
    }

    /// Tells a broken size bound from an error of writing.
    pub(crate) fn refusal(&self, cause: io::Error, object: &str) -> Error {
        match (self.over, self.size) {
            (true, Some(limit)) => Error::TooBig {
                object: object.into(),
                limit,
            },
            _ => Error::io("write", object)(cause),
        }
    }
}

impl Write for Writer<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        if self.size.is_some_and(|size| self.offset + buf.len() as u64 > size) {
            self.over = true;
            return Err(io::Error::other("more bytes than the descriptor says"));
        }
        let n = self.file.write(buf)?;
        self.hasher.update(&buf[..n]);
        self.offset += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        if !self.done && (!self.shared || self.offset == 0 || self.over) {
            let _ = fs::remove_file(&self.path);
        }
    }
}
