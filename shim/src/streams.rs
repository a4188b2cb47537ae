//! Live streams that a shim hands over: the descriptors of an exec's stdio or of what follows a container's output, and
//! the news of their end.

use std::fs::File;
use std::io::{ErrorKind, IoSliceMut, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use prost::Message;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::UnixStream;

use crate::api::{AttachRequest, ExecOutput, ExecStreamRequest, Request, Response, StreamKind};
use crate::frame::{self, HEADER, Header, Kind};
use crate::{Client, Code, Error, Result, SERVICE};

/// Descriptors taken with one message at most.
const DESCRIPTORS: usize = 4;

/// One end of a pipe or terminal, which is read or written without blocking.
pub struct Pipe(AsyncFd<File>);

impl Pipe {
    fn new(fd: OwnedFd) -> std::io::Result<Pipe> {
        let flags = OFlag::from_bits_retain(fcntl(&fd, FcntlArg::F_GETFL)?);
        fcntl(&fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        // SAFETY: a File is one open descriptor for all its life, and nothing takes it out of the AsyncFd.
        let registered = unsafe { AsyncFd::register(File::from(fd)) };
        registered.map(Pipe).map_err(|error| error.into_parts().1)
    }

    /// Reads what is there; 0 is the end.
    pub async fn read(&self, into: &mut [u8]) -> std::io::Result<usize> {
        let read = self.0.async_io(Interest::READABLE, |mut file| file.read(into)).await;
        match read {
            // A terminal that no process holds any more.
            Err(error) if error.raw_os_error() == Some(nix::libc::EIO) => Ok(0),
            read => read,
        }
    }

    /// Writes all.
    pub async fn write_all(&self, mut bytes: &[u8]) -> std::io::Result<()> {
        while !bytes.is_empty() {
            let written = self
                .0
                .async_io(Interest::WRITABLE, |mut file| file.write(bytes))
                .await?;
            if written == 0 {
                return Err(ErrorKind::WriteZero.into());
            }
            bytes = bytes.get(written..).unwrap_or_default();
        }
        Ok(())
    }

    /// The descriptor, for what is asked of a terminal.
    pub fn file(&self) -> &File {
        self.0.get_ref()
    }
}

/// What a shim handed over. Absent: it was not asked for, or there is none.
#[derive(Default)]
pub struct Streams {
    pub stdin: Option<Pipe>,
    pub stdout: Option<Pipe>,
    pub stderr: Option<Pipe>,
    /// The controlling end of the terminal. It is the output too if there is no stdout.
    pub terminal: Option<Pipe>,
}

/// A running exec or attachment; dropping it ends that.
pub struct Live {
    stream: UnixStream,
    input: Vec<u8>,
    fds: Vec<OwnedFd>,
    method: &'static str,
}

impl Client {
    /// Runs a program in a container with stdio of its own; returns once it runs.
    ///
    /// # Errors
    /// [`Code::Unimplemented`]: the pod's shim is older than this call.
    pub async fn exec_stream(&self, request: ExecStreamRequest) -> Result<(Live, Streams)> {
        self.live("ExecStream", &request).await
    }

    /// Follows a running container's output and writes its stdin.
    ///
    /// # Errors
    /// [`Code::Unimplemented`]: the pod's shim is older than this call.
    pub async fn attach(&self, request: AttachRequest) -> Result<(Live, Streams)> {
        self.live("Attach", &request).await
    }

    async fn live(&self, method: &'static str, message: &impl Message) -> Result<(Live, Streams)> {
        let mut live = Live {
            stream: self.another().await?,
            input: Vec::new(),
            fds: Vec::new(),
            method,
        };
        let request = Request {
            service: SERVICE.into(),
            method: method.into(),
            payload: message.encode_to_vec(),
            timeout_nano: 0,
        };
        let frame = frame::encode(1, Kind::Request, &request);
        let lost = |_| Error::Disconnected { method };
        live.stream.write_all(&frame).await.map_err(lost)?;
        let (kind, body) = live.frame().await?;
        if kind == Kind::Response {
            // A refusal; one without a status would be a shim that does not know what it does.
            live.outcome(&body)?;
            return Err(Error::Protocol(format!("{method} was answered without its streams")));
        }
        let kinds = crate::api::Streams::decode(&*body).map_err(|error| Error::Protocol(error.to_string()))?;
        let mut streams = Streams::default();
        for (kind, fd) in kinds.kinds().zip(live.fds.drain(..)) {
            let pipe = Pipe::new(fd).map_err(|error| Error::Protocol(format!("{kind:?}: {error}")))?;
            *match kind {
                StreamKind::Stdin => &mut streams.stdin,
                StreamKind::Stdout => &mut streams.stdout,
                StreamKind::Stderr => &mut streams.stderr,
                StreamKind::Terminal => &mut streams.terminal,
            } = Some(pipe);
        }
        Ok((live, streams))
    }
}

impl Live {
    /// Waits for the end: of the program with its exit code, or of the container.
    ///
    /// # Errors
    /// [`Code::ResourceExhausted`]: the output was read too slowly. [`Error::Disconnected`]: the shim died.
    pub async fn ended(&mut self) -> Result<ExecOutput> {
        loop {
            let (kind, body) = self.frame().await?;
            if kind == Kind::Response {
                return self.outcome(&body);
            }
        }
    }

    fn outcome(&self, body: &[u8]) -> Result<ExecOutput> {
        let broken = |error: prost::DecodeError| Error::Protocol(format!("answer to {}: {error}", self.method));
        let response = Response::decode(body).map_err(broken)?;
        match response.status {
            Some(status) if status.code != 0 => Err(Error::Refused {
                method: self.method,
                code: Code::from(status.code),
                message: status.message,
            }),
            _ => ExecOutput::decode(&*response.payload).map_err(broken),
        }
    }

    /// The next frame. Cancelling loses nothing.
    async fn frame(&mut self) -> Result<(Kind, Vec<u8>)> {
        loop {
            if let Some(header) = Header::read(&self.input)?
                && let Some(body) = self.input.get(HEADER..HEADER + header.len)
            {
                let body = body.to_vec();
                self.input.drain(..HEADER + header.len);
                return Ok((header.kind, body));
            }
            let method = self.method;
            let mut chunk = [0; 4096];
            let socket = self.stream.as_raw_fd();
            let received = self
                .stream
                .async_io(Interest::READABLE, || receive(socket, &mut chunk))
                .await;
            let (len, fds) = received.map_err(|_| Error::Disconnected { method })?;
            if len == 0 {
                return Err(Error::Disconnected { method });
            }
            self.fds.extend(fds);
            self.input.extend_from_slice(chunk.get(..len).unwrap_or_default());
        }
    }
}

/// Bytes and the descriptors that came with them.
fn receive(socket: RawFd, into: &mut [u8]) -> std::io::Result<(usize, Vec<OwnedFd>)> {
    let mut parts = [IoSliceMut::new(into)];
    let mut space = nix::cmsg_space!([RawFd; DESCRIPTORS]);
    let flags = MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_DONTWAIT;
    let message = recvmsg::<()>(socket, &mut parts, Some(&mut space), flags)?;
    let mut fds = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = control {
            // SAFETY: the kernel just gave us these descriptors, and nobody else knows them.
            fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    Ok((message.bytes, fds))
}
