//! SPDY/3.1 as far as Kubernetes' clients use it: streams in both directions, pings, no windows (no client keeps any).
//!
//! ```text
//! |1| version 15 | type 16 | flags 8 | length 24 | ...      control: SYN_STREAM, SYN_REPLY, RST_STREAM, PING, GOAWAY
//! |0| stream id 31         | flags 8 | length 24 | bytes    data; flag 1 ends the sender's side
//! ```

pub mod headers;

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, ReadHalf, WriteHalf};
use tokio::sync::{mpsc, oneshot, watch};

use super::channels::{Activity, Incoming, Link, Out, Outgoing, PIECE, QUEUE, Watcher};
use headers::Headers;

const CONTROL: u32 = 1 << 31;
const VERSION: u32 = 3;
const SYN_STREAM: u16 = 1;
const SYN_REPLY: u16 = 2;
const RST_STREAM: u16 = 3;
const PING: u16 = 6;
const GOAWAY: u16 = 7;
const FLAG_FIN: u8 = 1;
/// Status CANCEL of RST_STREAM.
const CANCEL: u32 = 5;
/// Longest control frame taken: the largest block of headers and what stands before it.
const CONTROL_LIMIT: usize = headers::LIMIT + 16;
/// Streams of one connection at most.
const STREAMS: usize = 1024;
/// Opened streams that may wait to be looked at.
const BACKLOG: usize = 16;

/// Who opened the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Client,
    Server,
}

/// A stream of a connection.
pub struct Stream {
    pub headers: Headers,
    pub incoming: Incoming,
    pub outgoing: Outgoing,
    /// Fires when the peer wants nothing more of it.
    pub reset: oneshot::Receiver<()>,
}

impl Stream {
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str())
    }

    pub fn id(&self) -> u32 {
        self.outgoing.channel
    }
}

/// What the connection knows of a stream.
struct Entry {
    /// `None` once the peer has ended its side.
    data: Option<mpsc::Sender<Bytes>>,
    /// We have not ended ours.
    is_ours_open: bool,
    _reset: oneshot::Sender<()>,
}

type Entries = Arc<Mutex<HashMap<u32, Entry>>>;

/// A connection.
pub struct Connection {
    pub link: Link,
    /// Streams that the peer opens.
    pub opened: mpsc::Receiver<Stream>,
    entries: Entries,
    next: AtomicU32,
}

impl Connection {
    pub fn new<T: AsyncRead + AsyncWrite + Send + 'static>(io: T, role: Role) -> io::Result<Connection> {
        let (read, write) = tokio::io::split(io);
        let (out, queue) = mpsc::channel(QUEUE);
        let (accept, opened) = mpsc::channel(BACKLOG);
        let (alive, gone) = watch::channel(());
        let (entries, activity) = (Entries::default(), Activity::new());
        let reader = Reading {
            from: BufReader::with_capacity(PIECE, read),
            blocks: headers::Reader::default(),
            entries: entries.clone(),
            out: out.clone(),
            accept,
            activity: activity.clone(),
        };
        let reader = tokio::spawn(async move {
            let _alive = alive;
            let mut reader = reader;
            if let Err(error) = reader.run().await
                && error.kind() != io::ErrorKind::UnexpectedEof
            {
                tracing::debug!(%error, "SPDY connection ended");
            }
            // Whoever still reads a stream sees its end.
            lock(&reader.entries).clear();
        });
        let writer = Writing {
            to: write,
            blocks: headers::Writer::new()?,
            entries: entries.clone(),
            activity: activity.clone(),
        };
        let writer = tokio::spawn(async move {
            let mut writer = writer;
            if let Err(error) = writer.run(queue).await {
                tracing::debug!(%error, "SPDY connection cannot be written");
            }
        });
        let link = Link {
            out,
            watcher: Watcher { activity, gone },
            reader,
            writer,
        };
        let next = AtomicU32::new(if role == Role::Client { 1 } else { 2 });
        Ok(Connection {
            link,
            opened,
            entries,
            next,
        })
    }

    /// Opens a stream; the peer's consent is not waited for.
    pub async fn open(&self, headers: Headers) -> io::Result<Stream> {
        let id = self.next.fetch_add(2, Ordering::Relaxed);
        let stream = register(&self.entries, id, headers.clone(), &self.link.out, true);
        let sent = self.link.out.send(Out::Open(id, headers)).await;
        sent.map_err(|_| io::ErrorKind::BrokenPipe)?;
        Ok(stream)
    }
}

fn lock(entries: &Entries) -> std::sync::MutexGuard<'_, HashMap<u32, Entry>> {
    entries.lock().unwrap_or_else(PoisonError::into_inner)
}

fn register(entries: &Entries, id: u32, headers: Headers, out: &mpsc::Sender<Out>, is_open: bool) -> Stream {
    let (data, incoming) = mpsc::channel(QUEUE);
    let (tell, reset) = oneshot::channel();
    let entry = Entry {
        data: is_open.then_some(data),
        is_ours_open: true,
        _reset: tell,
    };
    lock(entries).insert(id, entry);
    Stream {
        headers,
        incoming,
        outgoing: Outgoing {
            channel: id,
            to: out.clone(),
        },
        reset,
    }
}

/// The reading task.
struct Reading<T> {
    from: BufReader<ReadHalf<T>>,
    blocks: headers::Reader,
    entries: Entries,
    out: mpsc::Sender<Out>,
    accept: mpsc::Sender<Stream>,
    activity: Arc<Activity>,
}

impl<T: AsyncRead> Reading<T> {
    async fn run(&mut self) -> io::Result<()> {
        loop {
            let head = self.from.read_u32().await?;
            let sizes = self.from.read_u32().await?;
            let (flags, len) = ((sizes >> 24) as u8, (sizes & 0x00ff_ffff) as usize);
            self.activity.touch();
            if head & CONTROL == 0 {
                self.data(head, flags, len).await?;
                continue;
            }
            if head >> 16 & 0x7fff != VERSION {
                return Err(invalid("another version than 3"));
            }
            if len > CONTROL_LIMIT {
                return Err(invalid("a control frame too long"));
            }
            let mut body = vec![0; len];
            self.from.read_exact(&mut body).await?;
            self.control(head as u16, flags, &body).await?;
        }
    }

    async fn data(&mut self, id: u32, flags: u8, mut len: usize) -> io::Result<()> {
        let to = lock(&self.entries).get(&id).and_then(|entry| entry.data.clone());
        while len > 0 {
            let mut piece = vec![0; len.min(PIECE)];
            self.from.read_exact(&mut piece).await?;
            len -= piece.len();
            if let Some(to) = &to {
                // Nobody there: read on, and forget it.
                let _ = to.send(piece.into()).await;
            }
            self.activity.touch();
        }
        if flags & FLAG_FIN != 0 {
            self.ended(id);
        }
        Ok(())
    }

    /// The peer sends nothing more on a stream.
    fn ended(&self, id: u32) {
        let mut entries = lock(&self.entries);
        if let Some(entry) = entries.get_mut(&id) {
            entry.data = None;
            if !entry.is_ours_open {
                entries.remove(&id);
            }
        }
    }

    async fn control(&mut self, kind: u16, flags: u8, body: &[u8]) -> io::Result<()> {
        let word = |at: usize| {
            let bytes = body.get(at..).and_then(|rest| rest.first_chunk());
            bytes
                .map(|bytes| u32::from_be_bytes(*bytes))
                .ok_or_else(|| invalid("a frame cut short"))
        };
        match kind {
            SYN_STREAM => {
                let id = word(0)? & !CONTROL;
                let block = body.get(10..).ok_or_else(|| invalid("a frame cut short"))?;
                let headers = self.blocks.block(block)?;
                let count = lock(&self.entries).len();
                if count >= STREAMS || lock(&self.entries).contains_key(&id) {
                    return self.say(Out::Reset(id)).await;
                }
                let stream = register(&self.entries, id, headers, &self.out, flags & FLAG_FIN == 0);
                self.say(Out::Accept(id)).await?;
                // Nobody takes any: it stays unread.
                let _ = self.accept.send(stream).await;
            }
            // A reply's headers mean nothing, but the next block builds on them.
            SYN_REPLY => {
                let id = word(0)? & !CONTROL;
                self.blocks.block(body.get(4..).unwrap_or_default())?;
                if flags & FLAG_FIN != 0 {
                    self.ended(id);
                }
            }
            RST_STREAM => drop(lock(&self.entries).remove(&(word(0)? & !CONTROL))),
            // A peer that sends pings and reads no answers gets none.
            PING => drop(self.out.try_send(Out::Pong(word(0)?))),
            GOAWAY => {}
            // SETTINGS, WINDOW_UPDATE; HEADERS are never sent.
            _ => {}
        }
        Ok(())
    }

    async fn say(&mut self, out: Out) -> io::Result<()> {
        self.out.send(out).await.map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("SPDY: {why}"))
}

/// The writing task.
struct Writing<T> {
    to: WriteHalf<T>,
    blocks: headers::Writer,
    entries: Entries,
    activity: Arc<Activity>,
}

impl<T: AsyncWrite> Writing<T> {
    async fn run(&mut self, mut queue: mpsc::Receiver<Out>) -> io::Result<()> {
        while let Some(out) = queue.recv().await {
            let is_last = matches!(out, Out::Close);
            let frame = self.frame(out)?;
            self.to.write_all(&frame).await?;
            self.to.flush().await?;
            self.activity.touch();
            if is_last {
                break;
            }
        }
        self.to.shutdown().await
    }

    fn frame(&mut self, out: Out) -> io::Result<Vec<u8>> {
        Ok(match out {
            Out::Data(id, bytes) => frame(id, 0, &bytes),
            Out::End(id) => {
                self.ended(id, false);
                frame(id, FLAG_FIN, &[])
            }
            Out::Reset(id) => {
                self.ended(id, true);
                control(RST_STREAM, &[id, CANCEL], &[])
            }
            // Priority and slot are 0.
            Out::Open(id, headers) => {
                let block = self.blocks.block(&headers)?;
                control(SYN_STREAM, &[id, 0], &[&[0, 0], &*block].concat())
            }
            Out::Accept(id) => {
                let block = self.blocks.block(&Headers::new())?;
                control(SYN_REPLY, &[id], &block)
            }
            Out::Pong(id) => control(PING, &[id], &[]),
            Out::Close => control(GOAWAY, &[0, 0], &[]),
        })
    }

    fn ended(&self, id: u32, is_reset: bool) {
        let mut entries = lock(&self.entries);
        if let Some(entry) = entries.get_mut(&id) {
            entry.is_ours_open = false;
            if is_reset || entry.data.is_none() {
                entries.remove(&id);
            }
        }
    }
}

fn frame(head: u32, flags: u8, bytes: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(8 + bytes.len());
    frame.extend(head.to_be_bytes());
    // What is sent is never longer than a piece or a block.
    frame.extend((u32::from(flags) << 24 | bytes.len() as u32).to_be_bytes());
    frame.extend(bytes);
    frame
}

fn control(kind: u16, words: &[u32], rest: &[u8]) -> Vec<u8> {
    let mut body: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
    body.extend(rest);
    frame(CONTROL | VERSION << 16 | u32::from(kind), 0, &body)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Connection, Connection) {
        let (a, b) = tokio::io::duplex(1 << 10);
        let client = Connection::new(a, Role::Client).unwrap();
        (client, Connection::new(b, Role::Server).unwrap())
    }

    #[tokio::test]
    async fn streams_carry_bytes_and_half_close() {
        let (client, mut server) = pair();
        let mut near = client.open(vec![("streamtype".into(), "stdin".into())]).await.unwrap();
        let mut far = server.opened.recv().await.unwrap();
        assert_eq!((far.id(), far.header("StreamType")), (1, Some("stdin")));
        let sent = Bytes::from(vec![7; 3 * PIECE + 5]);
        let sending = async {
            near.outgoing.send(sent.clone()).await;
            near.outgoing.end().await;
        };
        let reading = async {
            let mut all = Vec::new();
            while let Some(piece) = far.incoming.recv().await {
                all.extend(piece);
            }
            all
        };
        assert_eq!(tokio::join!(sending, reading).1, sent);
        far.outgoing.send("back".into()).await;
        far.outgoing.end().await;
        assert_eq!(near.incoming.recv().await.as_deref(), Some(&b"back"[..]));
        assert_eq!(near.incoming.recv().await, None);
        assert!(lock(&server.entries).is_empty());
    }

    #[tokio::test]
    async fn a_reset_is_told_and_the_end_of_a_connection_ends_its_streams() {
        let (client, mut server) = pair();
        let near = client.open(Headers::new()).await.unwrap();
        let far = server.opened.recv().await.unwrap();
        far.outgoing.reset().await;
        assert!(near.reset.await.is_err());
        let mut near = client.open(Headers::new()).await.unwrap();
        drop(server);
        assert_eq!(near.incoming.recv().await, None);
        client.link.watcher.gone().await;
    }

    #[tokio::test]
    async fn garbage_ends_the_connection() {
        use tokio::io::AsyncWriteExt;
        for bytes in [
            &[0xff; 64][..],
            &[0x80, 3, 0, 1, 0, 0xff, 0xff, 0xff],
            &[0x80, 3, 0, 3, 0, 0, 0, 1, 9],
        ] {
            let (mut near, far) = tokio::io::duplex(1 << 10);
            let server = Connection::new(far, Role::Server).unwrap();
            near.write_all(bytes).await.unwrap();
            server.link.watcher.gone().await;
        }
    }
}
