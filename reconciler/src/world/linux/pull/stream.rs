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
use super::super::images::Inner;
use super::super::layers::{Source, Stream};
use super::super::registry::{self, Access, Blob, Registry};
use super::super::unpack::Tree;
use super::flights::{Flight, Flights, Turn};
use super::{Failure, Progress};

/// Fetches for the blocking threads of one pull.
pub struct Fetch<'a> {
    content: &'a Content,
    flights: &'a Flights,
    registry: &'a Registry,
    access: &'a Access,
    progress: &'a Progress,
    handle: Handle,
    /// True once nobody waits any more, or a part has failed.
    stop: watch::Sender<bool>,
    failure: Mutex<Option<Failure>>,
    /// Something that an earlier pull had left was built upon.
    resumed: AtomicBool,
}

/// How a blob is come by.
enum Begun<'a> {
    /// It is here.
    Present,
    Tee(Box<Tee<'a>>),
    /// Another pull has fetched all of it, and has not given it its name yet.
    Shared(Shared<'a>),
}

impl<'a> Fetch<'a> {
    pub fn new(
        store: &'a Inner,
        (registry, access): (&'a Registry, &'a Access),
        progress: &'a Progress,
        handle: Handle,
        stop: watch::Sender<bool>,
    ) -> Fetch<'a> {
        Fetch {
            content: &store.content,
            flights: &store.flights,
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
        match self.begin(blob)? {
            Begun::Present => Ok(()),
            Begun::Tee(mut tee) => {
                io::copy(&mut tee, &mut io::sink()).map_err(Error::io("fetch", blob.digest()))?;
                tee.writer.commit(MediaType::from(blob.media_type().as_ref())).map(drop)
            }
            Begun::Shared(shared) => {
                shared.file.sync_data().map_err(Error::io("flush", blob.digest()))?;
                self.content.place(blob.digest())
            }
        }
    }

    /// Waits for another pull that fetches the same blob, but no longer than until that is whole.
    fn begin(&'a self, descriptor: &Descriptor) -> Result<Begun<'a>> {
        loop {
            let mut theirs = match self.flights.turn(descriptor.digest()) {
                Turn::Mine(flight) => {
                    let tee = Tee::open(self, descriptor, flight)?;
                    return Ok(tee.map_or(Begun::Present, |tee| Begun::Tee(Box::new(tee))));
                }
                Turn::Theirs(theirs) => theirs,
            };
            let failed = Error::io("wait for", descriptor.digest());
            if !self
                .block(async { theirs.wait_for(|whole| *whole).await.is_ok() })
                .map_err(failed)?
            {
                continue;
            }
            if let Some(file) = self.content.sealed(descriptor)? {
                return Ok(Begun::Shared(Shared {
                    fetch: self,
                    digest: descriptor.digest().clone(),
                    file,
                    read: 0,
                }));
            }
            if self.content.exists(descriptor)? {
                return Ok(Begun::Present);
            }
            // Taken away between its end and our look; whoever has it must end before it can be had again.
            let failed = Error::io("wait for", descriptor.digest());
            self.block(async { while theirs.changed().await.is_ok() {} })
                .map_err(failed)?;
        }
    }

    /// Waits, but not once nobody waits for this pull.
    fn block<T>(&self, future: impl Future<Output = T>) -> io::Result<T> {
        let mut stop = self.stop.subscribe();
        let outcome = self.handle.block_on(async {
            tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => None,
                outcome = future => Some(outcome),
            }
        });
        outcome.ok_or_else(|| self.fail(Failure::Cancelled))
    }

    /// Runs a request to its end, or until nobody waits.
    fn wait<T>(&self, request: impl Future<Output = registry::Result<T>>) -> io::Result<T> {
        self.block(request)?.map_err(|e| self.fail(Failure::Registry(e)))
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
        match self.begin(blob)? {
            Begun::Tee(tee) => Ok(tee),
            Begun::Shared(shared) => Ok(Box::new(shared)),
            Begun::Present => {
                self.progress.done(blob.digest(), blob.size());
                self.content.open(blob)
            }
        }
    }

    fn slow(&self) -> bool {
        true
    }

    fn stopped(&self) -> bool {
        *self.stop.borrow()
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
    /// Dropped after the writer, whose lock the next one takes.
    flight: Flight<'a>,
}

impl<'a> Tee<'a> {
    /// `None`: the blob is here.
    fn open(fetch: &'a Fetch<'a>, descriptor: &Descriptor, flight: Flight<'a>) -> Result<Option<Tee<'a>>> {
        let Some(writer) = fetch.content.writer(descriptor.digest(), Some(descriptor.size()))? else {
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
            flight,
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
        self.flight.whole();
        applied
    }

    fn keep(mut self: Box<Self>) -> Result<()> {
        match self.sealed.take() {
            Some(digest) => self.writer.place(&digest),
            None => Ok(()),
        }
    }
}

/// A blob that another pull has fetched, read while that is still at work.
struct Shared<'a> {
    fetch: &'a Fetch<'a>,
    digest: Digest,
    file: File,
    read: u64,
}

impl Read for Shared<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read(buf)?;
        self.read += n as u64;
        self.fetch.progress.done(&self.digest, self.read);
        Ok(n)
    }
}

impl Stream for Shared<'_> {
    fn keep(self: Box<Self>) -> Result<()> {
        self.fetch.content.place(&self.digest)
    }
}
