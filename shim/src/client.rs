//! The daemon's end of the protocol.

use std::collections::HashMap;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, oneshot, watch};

use crate::api::{
    DeleteRequest, Empty, ExecOutput, ExecRequest, KillRequest, PauseRequest, ReopenLogRequest, Request, Response,
    RunRequest, Started, StateResponse, StopRequest,
};
use crate::frame::{self, HEADER, Header, Kind};
use crate::{Code, Error, Result, SERVICE, SOCKET};

/// How long a call may take unless told otherwise.
const DEADLINE: Duration = Duration::from_secs(10);
/// Making a container mounts and forks; a busy node may take long.
const START_DEADLINE: Duration = Duration::from_secs(120);
/// What an exec may take past its own timeout: kill, drain, answer.
const EXEC_MARGIN: Duration = Duration::from_secs(15);

type Waiting = Arc<Mutex<Option<HashMap<u32, oneshot::Sender<Response>>>>>;

/// A connection to one shim. Cloning is cheap; calls run concurrently over the one connection.
///
/// Dropping a call's future forgets the answer; only an exec is ended by it (it dies with its connection, so each
/// exec has one of its own).
#[derive(Clone)]
pub struct Client {
    dir: Arc<Path>,
    out: mpsc::UnboundedSender<Vec<u8>>,
    waiting: Waiting,
    next: Arc<AtomicU32>,
    gone: watch::Receiver<()>,
}

impl Client {
    /// Connects to the shim that serves `dir`.
    ///
    /// # Errors
    /// [`Error::Io`] with NotFound or ConnectionRefused: no shim lives there.
    pub async fn connect(dir: &Path) -> Result<Client> {
        let (read, write) = open(dir).await?.into_split();
        let (out, messages) = mpsc::unbounded_channel();
        let (alive, gone) = watch::channel(());
        let waiting = Waiting::new(Mutex::new(Some(HashMap::new())));
        tokio::spawn(send(write, messages));
        tokio::spawn(receive(read, waiting.clone(), alive));
        Ok(Client {
            dir: dir.into(),
            out,
            waiting,
            next: Arc::new(AtomicU32::new(1)),
            gone,
        })
    }

    /// A further connection, for a call whose answer does not come by itself alone.
    pub(crate) async fn another(&self) -> Result<UnixStream> {
        open(&self.dir).await
    }

    /// Has the connection ended?
    pub fn is_closed(&self) -> bool {
        self.gone.has_changed().is_err()
    }

    /// Waits until the connection ends: the shim has died or shut down.
    pub async fn closed(&self) {
        let mut gone = self.gone.clone();
        while gone.changed().await.is_ok() {}
    }

    /// Whose shim it is and what it runs.
    pub async fn state(&self) -> Result<StateResponse> {
        self.call("State", &Empty {}, DEADLINE).await
    }

    /// Starts the pod's pause process; its id is [`crate::PAUSE`].
    pub async fn pause(&self, request: PauseRequest) -> Result<Started> {
        self.call("Pause", &request, START_DEADLINE).await
    }

    /// Creates and starts a container; returns once its program runs. A failure is in its run record too.
    pub async fn run(&self, request: RunRequest) -> Result<Started> {
        self.call("Run", &request, START_DEADLINE).await
    }

    /// Asks a process to end and kills its cgroup at the deadline; returns at once, the run record tells the end.
    /// The signal is sent once per life; a later call may only bring the deadline nearer.
    pub async fn stop(&self, request: StopRequest) -> Result<()> {
        self.call("Stop", &request, DEADLINE).await.map(|Empty {}| ())
    }

    /// Signals the first process of a container (0 only asks whether it lives).
    pub async fn kill(&self, id: &str, signal: i32) -> Result<()> {
        self.call("Kill", &KillRequest { id: id.into(), signal }, DEADLINE)
            .await
            .map(|Empty {}| ())
    }

    /// Kills a container's cgroup and returns once nothing of it is left but its run record. Absent is success.
    pub async fn delete(&self, id: &str) -> Result<()> {
        self.call("Delete", &DeleteRequest { id: id.into() }, START_DEADLINE)
            .await
            .map(|Empty {}| ())
    }

    /// Opens the log anew, at `path` ("" = the path of the start); then nothing more goes to the old file.
    pub async fn reopen_log(&self, id: &str, path: &str) -> Result<()> {
        let request = ReopenLogRequest {
            id: id.into(),
            path: path.into(),
        };
        self.call("ReopenLog", &request, DEADLINE).await.map(|Empty {}| ())
    }

    /// Runs a program in a container and collects its output. Dropping the future kills it and all it started.
    pub async fn exec(&self, request: ExecRequest) -> Result<ExecOutput> {
        let own = Client::connect(&self.dir).await?;
        let deadline = match u64::try_from(request.timeout_ns) {
            Ok(ns) if ns > 0 => Duration::from_nanos(ns) + EXEC_MARGIN,
            _ => Duration::MAX,
        };
        own.call("Exec", &request, deadline).await
    }

    /// Ends the shim. Refused (FailedPrecondition) while processes live.
    pub async fn shutdown(&self) -> Result<()> {
        self.call("Shutdown", &Empty {}, DEADLINE).await.map(|Empty {}| ())
    }

    async fn call<M: Message, A: Message + Default>(
        &self,
        method: &'static str,
        message: &M,
        deadline: Duration,
    ) -> Result<A> {
        let stream = self.next.fetch_add(2, Ordering::Relaxed);
        let (answer, wait) = oneshot::channel();
        match &mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(waiting) => drop(waiting.insert(stream, answer)),
            None => return Err(Error::Disconnected { method }),
        }
        let _forget = Forget {
            waiting: &self.waiting,
            stream,
        };
        let request = Request {
            service: SERVICE.into(),
            method: method.into(),
            payload: message.encode_to_vec(),
            timeout_nano: i64::try_from(deadline.as_nanos()).unwrap_or(0),
        };
        let lost = |_| Error::Disconnected { method };
        self.out
            .send(frame::encode(stream, Kind::Request, &request))
            .map_err(|_| Error::Disconnected { method })?;
        let response = if deadline == Duration::MAX {
            wait.await.map_err(lost)?
        } else {
            let late = |_| Error::Deadline {
                method,
                after_ms: deadline.as_millis(),
            };
            tokio::time::timeout(deadline, wait)
                .await
                .map_err(late)?
                .map_err(lost)?
        };
        match response.status {
            Some(status) if status.code != 0 => Err(Error::Refused {
                method,
                code: Code::from(status.code),
                message: status.message,
            }),
            _ => A::decode(&*response.payload).map_err(|error| Error::Protocol(format!("answer to {method}: {error}"))),
        }
    }
}

async fn open(dir: &Path) -> Result<UnixStream> {
    let handle = std::fs::File::open(dir).map_err(Error::io("open shim directory", dir))?;
    let short = format!("/proc/self/fd/{}/{SOCKET}", handle.as_raw_fd());
    let connected = UnixStream::connect(short).await;
    connected.map_err(Error::io("connect to shim", &dir.join(SOCKET)))
}

/// Takes a dropped call off the list.
struct Forget<'a> {
    waiting: &'a Waiting,
    stream: u32,
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        if let Some(waiting) = &mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) {
            waiting.remove(&self.stream);
        }
    }
}

async fn send(mut write: OwnedWriteHalf, mut messages: mpsc::UnboundedReceiver<Vec<u8>>) {
    while let Some(message) = messages.recv().await {
        if write.write_all(&message).await.is_err() {
            return;
        }
    }
}

async fn receive(mut read: OwnedReadHalf, waiting: Waiting, alive: watch::Sender<()>) {
    while let Ok((stream, response)) = next(&mut read).await {
        let waiter = waiting
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .as_mut()
            .and_then(|all| all.remove(&stream));
        if let Some(waiter) = waiter {
            let _ = waiter.send(response);
        }
    }
    // Dropping the senders wakes every waiter with Disconnected.
    waiting.lock().unwrap_or_else(PoisonError::into_inner).take();
    drop(alive);
}

async fn next(read: &mut OwnedReadHalf) -> Result<(u32, Response)> {
    let broken = |error: std::io::Error| Error::Protocol(error.to_string());
    let mut head = [0; HEADER];
    read.read_exact(&mut head).await.map_err(broken)?;
    let header = Header::read(&head)?.ok_or_else(|| Error::Protocol("short header".into()))?;
    let mut body = vec![0; header.len];
    read.read_exact(&mut body).await.map_err(broken)?;
    let response = Response::decode(&*body).map_err(|error| Error::Protocol(error.to_string()))?;
    Ok((header.stream, response))
}
