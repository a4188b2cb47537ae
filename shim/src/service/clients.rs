//! Who talks to the shim: connections, their requests in and their answers out.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;

use prost::Message;
use shim::api::{Request, Response, Status, Streams};
use shim::frame::{self, HEADER, Header, Kind};

use super::{Answer, Of, Service};
use crate::process::Caller;
use crate::sys;

/// Bytes that may wait for a client to read them before it is cut off.
const LAG: usize = 1 << 20;
/// Most clients at once.
const CLIENTS: usize = 256;

/// A connection.
pub(super) struct Client {
    key: u32,
    stream: UnixStream,
    input: Vec<u8>,
    output: VecDeque<u8>,
    wants_write: bool,
}

impl Client {
    /// All that it was told is on its way.
    pub(super) fn is_served(&self) -> bool {
        self.output.is_empty()
    }
}

impl Service {
    pub(super) fn accept(&mut self) {
        while let Ok((stream, _)) = self.listener.accept() {
            let key = self.key();
            let is_set = stream.set_nonblocking(true).is_ok();
            if !is_set || self.clients.len() >= CLIENTS {
                continue;
            }
            if self.watch(stream.as_raw_fd(), Of::Client, key, libc::EPOLLIN).is_ok() {
                let (input, output) = (Vec::new(), VecDeque::new());
                self.clients.push(Client {
                    key,
                    stream,
                    input,
                    output,
                    wants_write: false,
                });
            }
        }
    }

    pub(super) fn client(&mut self, key: u32) {
        let Some(client) = self.clients.iter_mut().find(|client| client.key == key) else {
            return;
        };
        let mut is_open = true;
        let mut chunk = [0; 4096];
        loop {
            match client.stream.read(&mut chunk) {
                Ok(0) => is_open = false,
                Ok(len) => {
                    client.input.extend_from_slice(&chunk[..len]);
                    // Requests are small; what is more than one and a bit is handled in the next round.
                    if client.input.len() < LAG {
                        continue;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => is_open = error.kind() == io::ErrorKind::WouldBlock,
            }
            break;
        }
        loop {
            let Some(client) = self.clients.iter_mut().find(|client| client.key == key) else {
                return;
            };
            match next_request(&mut client.input) {
                Ok(Some((stream, request))) => self.request((key, stream), request),
                Ok(None) => break,
                Err(error) => {
                    crate::note!("client: {error}");
                    is_open = false;
                    break;
                }
            }
        }
        if !is_open || !self.flush(key) {
            self.hang_up(key);
        }
    }

    fn hang_up(&mut self, key: u32) {
        self.clients.retain(|client| client.key != key);
        for exec in self.execs.iter_mut().filter(|exec| exec.caller.0 == key) {
            exec.abandon();
        }
        for proc in &mut self.procs {
            proc.attached.retain(|attached| attached.caller.0 != key);
        }
    }

    /// Gives descriptors to a caller, in front of the answer. One who does not take them at once is cut off.
    pub fn hand_over(&mut self, (key, stream): Caller, streams: &Streams, fds: &[RawFd]) -> bool {
        let frame = frame::encode(stream, Kind::Data, streams);
        let is_sent = self
            .clients
            .iter()
            .find(|client| client.key == key)
            .is_some_and(|client| {
                let sent = || sys::send(client.stream.as_raw_fd(), &frame, fds);
                client.output.is_empty() && sent().is_ok_and(|sent| sent == frame.len())
            });
        if !is_sent {
            self.hang_up(key);
        }
        is_sent
    }

    /// Sends an answer, if the caller is still there.
    pub fn answer(&mut self, (key, stream): Caller, answer: Answer) {
        let Some(client) = self.clients.iter_mut().find(|client| client.key == key) else {
            return;
        };
        let response = match answer {
            Ok(payload) => Response { status: None, payload },
            Err((code, message)) => Response {
                status: Some(Status {
                    code: code as i32,
                    message,
                }),
                payload: Vec::new(),
            },
        };
        let lags = client.output.len() > LAG;
        client.output.extend(frame::encode(stream, Kind::Response, &response));
        if lags || !self.flush(key) {
            self.hang_up(key);
        }
    }

    fn flush(&mut self, key: u32) -> bool {
        let Some(client) = self.clients.iter_mut().find(|client| client.key == key) else {
            return true;
        };
        while !client.output.is_empty() {
            match client.stream.write(client.output.as_slices().0) {
                Ok(0) => return false,
                Ok(len) => drop(client.output.drain(..len)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        let wants_write = !client.output.is_empty();
        if !wants_write {
            client.output = VecDeque::new();
        }
        if wants_write != client.wants_write {
            client.wants_write = wants_write;
            let events = libc::EPOLLIN | if wants_write { libc::EPOLLOUT } else { 0 };
            let fd = client.stream.as_raw_fd();
            return self.control(libc::EPOLL_CTL_MOD, fd, Of::Client, key, events).is_ok();
        }
        true
    }
}

fn next_request(input: &mut Vec<u8>) -> shim::Result<Option<(u32, Request)>> {
    let Some(header) = Header::read(input)? else {
        return Ok(None);
    };
    let Some(body) = input.get(HEADER..HEADER + header.len) else {
        return Ok(None);
    };
    let request = Request::decode(body).map_err(|error| shim::Error::Protocol(error.to_string()))?;
    if header.kind != Kind::Request {
        return Err(shim::Error::Protocol(format!("{:?} from a client", header.kind)));
    }
    input.drain(..HEADER + header.len);
    if input.is_empty() {
        *input = Vec::new();
    }
    Ok(Some((header.stream, request)))
}
