//! Blobs on their way from the registry: each is hashed, kept in the content store, and read by who unpacks it, all at
//! once.

use std::fs::File;
use std::io::{self, Read, Take, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use oci_spec::image::{Descriptor, Digest, MediaType};
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::super::content::{Content, Error, Result, Writer};
use super::super::layers::{Source, Stream};
use super::super::registry::{self, Access, Blob, Registry};
use super::super::unpack::Tree;
use super::{Failure, Progress};

/// Fetches for the blocking threads of one pull.
pub struct Fetch<'a> {
    pub content: &'a Content,
    pub registry: &'a Registry,
    pub access: &'a Access,
    pub progress: &'a Progress,
    pub handle: Handle,
    /// True once nobody waits any more, or a part has failed.
    pub stop: watch::Sender<bool>,
    failure: Mutex<Option<Failure>>,
    /// Something that an earlier pull had left was built upon.
    resumed: AtomicBool,
}

impl<'a> Fetch<'a> {
    pub fn new(
        content: &'a Content,
        (registry, access): (&'a Registry, &'a Access),
        progress: &'a Progress,
        handle: Handle,
        stop: watch::Sender<bool>,
    ) -> Fetch<'a> {
        Fetch {
            content,
            registry,
            access,
            progress,
            handle,
            stop,
            failure: Mutex::default(),
            resumed: AtomicBool::new(false),
        }
    }

    /// Why it failed first, in the words of who was asked; else what its reader made of it.
    pub fn failed(&self, seen: Error) -> Failure {
        let mut first = self.failure.lock().unwrap_or_else(|e| e.into_inner());
        first.take().unwrap_or(Failure::Content(seen))
    }

    pub fn resumed(&self) -> bool {
        self.resumed.load(Ordering::Relaxed)
    }

    /// A blob that nobody unpacks.
    pub fn blob(&self, blob: &Descriptor) -> Result<()> {
        let Some(mut tee) = Tee::open(self, blob)? else {
            return Ok(());
        };
        io::copy(&mut tee, &mut io::sink()).map_err(Error::io("fetch", blob.digest()))?;
        tee.writer.commit(MediaType::from(blob.media_type().as_ref())).map(drop)
    }

    /// Runs a request to its end, or until nobody waits.
    fn wait<T>(&self, request: impl Future<Output = registry::Result<T>>) -> io::Result<T> {
        let mut stop = self.stop.subscribe();
        let outcome = self.handle.block_on(async {
            tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => Err(Failure::Cancelled),
                outcome = request => outcome.map_err(Failure::Registry),
            }
        });
        outcome.map_err(|failure| self.fail(failure))
    }

    /// Notes the first failure and stops the others.
    fn fail(&self, failure: Failure) -> io::Error {
        let said = io::Error::other(failure.to_string());
        self.failure
            .lock()
            .unwrap_or_else(|e| e.into_inner())
            .get_or_insert(failure);
        self.stop.send_replace(true);
        said
    }
}

impl Source for Fetch<'_> {
    fn open(&self, blob: &Descriptor) -> Result<Box<dyn Stream + '_>> {
        match Tee::open(self, blob)? {
            Some(tee) => Ok(Box::new(tee)),
            None => {
                self.progress.done(blob.digest(), blob.size());
                self.content.open(blob)
            }
        }
    }

    fn slow(&self) -> bool {
        true
    }
}

/// One blob: what an earlier pull left of it, then the registry.
struct Tee<'a> {
    fetch: &'a Fetch<'a>,
    descriptor: Descriptor,
    left: Option<Take<File>>,
    writer: Writer<'a>,
    blob: Option<Blob>,
    chunk: Bytes,
    sealed: Option<Digest>,
    read: u64,
}

impl<'a> Tee<'a> {
    /// `None`: the blob is here.
    fn open(fetch: &'a Fetch<'a>, descriptor: &Descriptor) -> Result<Option<Tee<'a>>> {
        let Some(writer) = fetch
            .content
            .writer(Some(descriptor.digest()), Some(descriptor.size()))?
        else {
            return Ok(None);
        };
        let left = match writer.offset() {
            0 => None,
            _ => {
                fetch.resumed.store(true, Ordering::Relaxed);
                Some(writer.left()?)
            }
        };
        Ok(Some(Tee {
            fetch,
            descriptor: descriptor.clone(),
            left,
            writer,
            blob: None,
            chunk: Bytes::new(),
            sealed: None,
            read: 0,
        }))
    }

    fn next(&mut self) -> io::Result<Option<Bytes>> {
        let offset = self.writer.offset();
        if offset == self.descriptor.size() {
            return Ok(None);
        }
        let fetch = self.fetch;
        let blob = match &mut self.blob {
            Some(blob) => blob,
            none => {
                let request = fetch.registry.blob(fetch.access, &self.descriptor, offset);
                none.insert(fetch.wait(request)?)
            }
        };
        fetch.wait(blob.next())
    }
}

impl Read for Tee<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if let Some(left) = &mut self.left {
            let n = left.read(buf)?;
            self.read += n as u64;
            if n > 0 {
                self.fetch.progress.done(self.descriptor.digest(), self.read);
                return Ok(n);
            }
            self.left = None;
        }
        if self.chunk.is_empty() {
            let Some(bytes) = self.next()? else { return Ok(0) };
            self.writer.write_all(&bytes).map_err(|e| {
                let object = self.descriptor.digest().to_string();
                let failure = Failure::Content(self.writer.refusal(e, &object));
                self.fetch.fail(failure)
            })?;
            self.chunk = bytes;
            self.fetch.progress.done(self.descriptor.digest(), self.writer.offset());
        }
        let n = self.chunk.len().min(buf.len());
        buf[..n].copy_from_slice(&self.chunk.split_to(n));
        Ok(n)
    }
}

impl Stream for Tee<'_> {
    fn end(&mut self, applied: Result<Tree>) -> Result<Tree> {
        if let Err(e) = io::copy(self, &mut io::sink()) {
            return Err(applied
                .err()
                .unwrap_or_else(|| Error::io("fetch", self.descriptor.digest())(e)));
        }
        // The connection is not held while others are still under way.
        self.blob = None;
        match self.writer.seal() {
            Ok(digest) => self.sealed = Some(digest),
            Err(e) => return Err(e),
        }
        applied
    }

    fn keep(mut self: Box<Self>) -> Result<()> {
        match self.sealed.take() {
            Some(digest) => self.writer.place(&digest),
            None => Ok(()),
        }
    }
}
