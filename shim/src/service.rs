//! The shim's one thread: a poll loop over the socket, its clients, the pod's processes and their output.

mod clients;
mod ending;
mod requests;
mod starting;

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use shim::{Code, Identity, SOCKET};

use crate::process::Proc;
use crate::session::Exec;
use crate::stdio::Scratch;
use crate::sys;

use clients::Client;
use ending::child_signals;
pub use starting::{die_with, started};

/// How long the buffers for output stay after it, ms.
const WARM: i32 = 100;

/// A refusal.
pub type Refusal = (Code, String);
/// An answer's message, or the refusal.
pub type Answer = Result<Vec<u8>, Refusal>;

/// What an event is of; packed into epoll's 64 bits with the key of its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Of {
    Listener,
    Signals,
    Client,
    Channel,
    Output,
    Pidfd,
    ExecChannel,
    ExecOutput,
}

/// The shim.
pub struct Service {
    pub dir: PathBuf,
    identity: Identity,
    epoll: OwnedFd,
    listener: UnixListener,
    signals: OwnedFd,
    clients: Vec<Client>,
    pub procs: Vec<Proc>,
    pub execs: Vec<Exec>,
    pub scratch: Scratch,
    last_key: u32,
    /// Ends of children not known yet: a container's first process may end before its maker tells of it.
    orphans: Vec<(u32, i32)>,
    is_ending: bool,
}

impl Service {
    /// Binds the socket. The caller holds the directory's lock.
    pub fn new(dir: &Path, identity: Identity) -> io::Result<Service> {
        let handle = File::open(dir)?;
        let _ = std::fs::remove_file(dir.join(SOCKET));
        // Through the descriptor: a socket's path ends at 108 bytes.
        let listener = UnixListener::bind(format!("/proc/self/fd/{}/{SOCKET}", handle.as_raw_fd()))?;
        listener.set_nonblocking(true)?;
        // SAFETY: a flag and no pointers; then a descriptor the kernel just gave us.
        let epoll = unsafe { OwnedFd::from_raw_fd(sys::check(libc::epoll_create1(libc::EPOLL_CLOEXEC))? as RawFd) };
        let service = Service {
            dir: dir.into(),
            identity,
            epoll,
            listener,
            signals: child_signals()?,
            clients: Vec::new(),
            procs: Vec::new(),
            execs: Vec::new(),
            scratch: Scratch::new()?,
            last_key: 0,
            orphans: Vec::new(),
            is_ending: false,
        };
        service.watch(service.listener.as_raw_fd(), Of::Listener, 0, libc::EPOLLIN)?;
        service.watch(service.signals.as_raw_fd(), Of::Signals, 0, libc::EPOLLIN)?;
        Ok(service)
    }

    /// Serves until told to shut down.
    pub fn run(mut self) -> io::Result<()> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 32];
        loop {
            let mut timeout = self.timeout();
            if self.scratch.is_held() {
                timeout = if timeout < 0 { WARM } else { timeout.min(WARM) };
            }
            // SAFETY: pointer and length of a live array.
            let count = unsafe {
                libc::epoll_wait(
                    self.epoll.as_raw_fd(),
                    events.as_mut_ptr(),
                    events.len() as i32,
                    timeout,
                )
            };
            if count == 0 && timeout == WARM {
                self.scratch.release();
            }
            for event in &events[..count.max(0) as usize] {
                self.handle(event.u64);
            }
            self.pump();
            self.tick();
            if self.is_ending && self.clients.iter().all(Client::is_served) {
                shim::fault::point("shim.shutdown.answered");
                let _ = std::fs::remove_file(self.dir.join(SOCKET));
                return Ok(());
            }
        }
    }

    pub fn key(&mut self) -> u32 {
        self.last_key = self.last_key.wrapping_add(1).max(1);
        self.last_key
    }

    /// Adds a descriptor to the poll set; it leaves by being closed.
    pub fn watch(&self, fd: RawFd, of: Of, key: u32, events: i32) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, of, key, events)
    }

    fn control(&self, what: i32, fd: RawFd, of: Of, key: u32, events: i32) -> io::Result<()> {
        let mut event = libc::epoll_event {
            events: events as u32,
            u64: u64::from(key) << 8 | of as u64,
        };
        // SAFETY: a live event.
        sys::check(unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), what, fd, &mut event) }).map(drop)
    }

    /// ms until something is due; -1 for never.
    fn timeout(&self) -> i32 {
        if self.procs.iter().any(|proc| proc.ready.contains(&true)) {
            return 0;
        }
        let due = self
            .procs
            .iter()
            .filter_map(Proc::due)
            .chain(self.execs.iter().filter_map(Exec::due))
            .min();
        due.map_or(-1, |due| {
            let ms = due.saturating_sub(sys::boot()).div_ceil(1_000_000);
            i32::try_from(ms).unwrap_or(i32::MAX)
        })
    }

    fn handle(&mut self, what: u64) {
        let key = (what >> 8) as u32;
        let at = |of: Of| what as u8 == of as u8;
        if at(Of::Listener) {
            self.accept();
        } else if at(Of::Signals) {
            self.reap();
        } else if at(Of::Client) {
            self.client(key);
        } else if at(Of::Channel) {
            self.channel(key);
        } else if at(Of::Output) {
            // Edge-triggered: which of its streams, pump finds out.
            if let Some(proc) = self.procs.iter_mut().find(|proc| proc.key == key) {
                proc.ready.fill(true);
            }
        } else if at(Of::Pidfd) {
            self.adopted_ended(key);
        } else if at(Of::ExecChannel) {
            self.exec_channel(key);
        } else if at(Of::ExecOutput)
            && let Some(exec) = self.execs.iter_mut().find(|exec| exec.key == key)
        {
            exec.pump();
        }
    }

    fn pump(&mut self) {
        for proc in &mut self.procs {
            proc.pump(&mut self.scratch);
        }
        self.cut_off_laggards();
    }

    fn tick(&mut self) {
        let mut at = 0;
        while at < self.procs.len() {
            if self.procs[at].tick(&self.dir, &mut self.scratch) {
                let proc = self.procs.remove(at);
                self.over(proc);
            } else {
                at += 1;
            }
        }
        self.tick_execs();
    }

    /// A process is gone, its record written: those who waited for that are told.
    fn over(&mut self, proc: Proc) {
        if let Some(run) = proc.run {
            let why = proc.end.as_ref().map(|end| end.message.clone()).unwrap_or_default();
            self.answer(run, Err((Code::StartFailed, why)));
        }
        for attached in proc.attached {
            self.answer(attached.caller, Ok(Vec::new()));
        }
        for delete in proc.deletes {
            self.answer(delete, Ok(Vec::new()));
        }
    }
}

pub fn invalid(field: &str, why: impl std::fmt::Display) -> Refusal {
    (Code::InvalidArgument, format!("{field}: {why}"))
}

pub fn internal(error: impl std::fmt::Display) -> Refusal {
    (Code::Internal, error.to_string())
}
