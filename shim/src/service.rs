//! The shim's one thread: a poll loop over the socket, its clients, the pod's processes and their output.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use prost::Message;
use shim::api::{self, Phase, Request, Response, RunRequest, Started, Status, Task};
use shim::frame::{self, HEADER, Header, Kind};
use shim::record::{self, End};
use shim::{Code, Identity, PAUSE, SOCKET};

use crate::r#become::message;
use crate::log::Log;
use crate::process::{self, Caller, Needs, Proc};
use crate::session::Exec;
use crate::stdio::{Scratch, Stream};
use crate::{init, pause, sys};

/// Bytes that may wait for a client to read them before it is cut off.
const LAG: usize = 1 << 20;
/// How long the buffers for output stay after it, ms.
const WARM: i32 = 100;
/// Most clients and processes at once.
const CLIENTS: usize = 256;
const PROCESSES: usize = 256;

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

struct Client {
    key: u32,
    stream: UnixStream,
    input: Vec<u8>,
    output: VecDeque<u8>,
    wants_write: bool,
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
            if self.is_ending && self.clients.iter().all(|client| client.output.is_empty()) {
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
        for delete in proc.deletes {
            self.answer(delete, Ok(Vec::new()));
        }
    }

    // ---- clients

    fn accept(&mut self) {
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

    fn client(&mut self, key: u32) {
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

    fn request(&mut self, caller: Caller, request: Request) {
        let answer = match request.method.as_str() {
            "State" => Ok(Some(self.state().encode_to_vec())),
            "Pause" => decode(&request)
                .and_then(|message| self.start_pause(caller, message))
                .map(|()| None),
            "Run" => decode(&request)
                .and_then(|message| self.start_run(caller, message))
                .map(|()| None),
            "Stop" => decode(&request).and_then(|message| self.stop(message)).map(Some),
            "Kill" => decode(&request).and_then(|message| self.kill(message)).map(Some),
            "Delete" => decode(&request).map(|message| self.delete(caller, message)),
            "ReopenLog" => decode(&request).and_then(|message| self.reopen_log(message)).map(Some),
            "Exec" => decode(&request)
                .and_then(|message| self.start_exec(caller, message))
                .map(|()| None),
            "Shutdown" => self.shutdown().map(Some),
            other => Err((Code::Unimplemented, format!("method {other:?} is unknown to this shim"))),
        };
        match answer {
            Ok(None) => {}
            Ok(Some(payload)) => self.answer(caller, Ok(payload)),
            Err(refusal) => self.answer(caller, Err(refusal)),
        }
    }

    pub fn find(&mut self, id: &str) -> Result<&mut Proc, Refusal> {
        let known = self.procs.iter_mut().find(|proc| proc.id() == id);
        known.ok_or_else(|| (Code::NotFound, format!("no process {id:?} in this shim")))
    }

    fn state(&self) -> api::StateResponse {
        let process = |proc: &Proc| api::Process {
            id: proc.id().into(),
            pid: proc.pid,
            phase: proc.phase as i32,
            adopted: proc.pidfd.is_some(),
            dropped_bytes: proc.log.as_ref().map_or(0, Log::dropped_ever),
            execs: self.execs.iter().filter(|exec| exec.container == proc.key).count() as u32,
            started_at: proc.started.started_at,
        };
        api::StateResponse {
            pid: std::process::id(),
            namespace: self.identity.namespace.clone(),
            name: self.identity.name.clone(),
            uid: self.identity.uid.clone(),
            version: env!("CARGO_PKG_VERSION").into(),
            processes: self.procs.iter().map(process).collect(),
        }
    }

    fn stop(&mut self, request: api::StopRequest) -> Result<Vec<u8>, Refusal> {
        if !(0..=64).contains(&request.signal) {
            return Err(invalid("signal", format!("{} is none", request.signal)));
        }
        let proc = self.find(&request.id)?;
        if proc.phase == Phase::Running {
            proc.stop(request.signal, request.grace_ns).map_err(internal)?;
        } else if proc.phase == Phase::Starting {
            return Err((
                Code::FailedPrecondition,
                format!("{} is still being started", request.id),
            ));
        }
        Ok(Vec::new())
    }

    fn kill(&mut self, request: api::KillRequest) -> Result<Vec<u8>, Refusal> {
        let proc = self.find(&request.id)?;
        proc.signal(request.signal).map_err(internal)?;
        Ok(Vec::new())
    }

    fn delete(&mut self, caller: Caller, request: api::DeleteRequest) -> Option<Vec<u8>> {
        let Ok(proc) = self.find(&request.id) else {
            return Some(Vec::new());
        };
        proc.deletes.push(caller);
        if proc.phase != Phase::Stopping {
            proc.kill_at = Some(0);
        }
        None
    }

    fn reopen_log(&mut self, request: api::ReopenLogRequest) -> Result<Vec<u8>, Refusal> {
        let proc = self.find(&request.id)?;
        let path = Some(Path::new(&request.path)).filter(|path| !path.as_os_str().is_empty());
        if path.is_some_and(|path| !path.is_absolute()) {
            return Err(invalid("path", format!("{:?} is not absolute", request.path)));
        }
        let Some(log) = proc.log.as_mut().filter(|_| proc.phase == Phase::Running) else {
            return Err((
                Code::FailedPrecondition,
                format!("{} is not running with a log", request.id),
            ));
        };
        log.reopen(path)
            .map_err(|error| (Code::Internal, format!("open log {:?}: {error}", request.path)))?;
        if let (Some(run), true) = (&mut proc.task.run, path.is_some()) {
            run.log_path = request.path;
            let task = proc.task.clone();
            process::save(&self.dir, &task).map_err(internal)?;
        }
        Ok(Vec::new())
    }

    fn shutdown(&mut self) -> Result<Vec<u8>, Refusal> {
        if let Some(proc) = self.procs.first() {
            let (id, count) = (proc.id(), self.procs.len());
            return Err((Code::FailedPrecondition, format!("{count} processes live, {id} first")));
        }
        self.is_ending = true;
        Ok(Vec::new())
    }

    // ---- starting

    fn start_pause(&mut self, caller: Caller, request: api::PauseRequest) -> Result<(), Refusal> {
        absolute("record", &request.record)?;
        self.is_new(PAUSE, &request.record, false)?;
        let task = Task {
            id: PAUSE.into(),
            pause: true,
            record: request.record.clone(),
            ..Task::default()
        };
        // Only directories that its start makes are its to remove.
        let made = if request.cgroup.is_empty() {
            Vec::new()
        } else {
            self.absent_dirs(&request.cgroup)?
        };
        let task = Task { cgroups: made, ..task };
        process::save(&self.dir, &task).map_err(internal)?;
        self.start(caller, task, &[], move |channel| pause::run(&request, &channel))
            .map(drop)
    }

    fn absent_dirs(&self, cgroup: &str) -> Result<Vec<String>, Refusal> {
        let dirs = crate::cgroup::dirs(cgroup).map_err(|error| invalid("cgroup", error))?;
        Ok(dirs
            .iter()
            .filter(|dir| !dir.exists())
            .map(|dir| dir.to_string_lossy().into_owned())
            .collect())
    }

    fn start_run(&mut self, caller: Caller, request: RunRequest) -> Result<(), Refusal> {
        for (name, path) in [
            ("bundle", &request.bundle),
            ("record", &request.record),
            ("fifo_dir", &request.fifo_dir),
        ] {
            absolute(name, path)?;
        }
        if !request.log_path.is_empty() {
            absolute("log_path", &request.log_path)?;
        }
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-.+".contains(c);
        let id = &request.id;
        if id.is_empty() || id.len() > 128 || id.starts_with('.') || !id.chars().all(is_plain) {
            return Err(invalid("id", format!("{id:?} is not 1-128 of a-z A-Z 0-9 _ - . +")));
        }
        self.is_new(id, &request.record, true)?;
        let pid = self.pid_namespace(&request)?;
        let bundle = PathBuf::from(&request.bundle);
        let broken = |error: String| self.not_started(&request.record, error);
        let needs = Needs::read(&bundle).map_err(broken)?;
        let cgroups = needs.cgroups().map_err(broken)?;
        let task = Task {
            id: id.clone(),
            record: request.record.clone(),
            cgroups,
            run: Some(request.clone()),
            ..Task::default()
        };
        // Before anything of it exists: a successor must know what to remove.
        process::save(&self.dir, &task).map_err(internal)?;
        let stdio = match process::make_stdio(&request, needs.owner()) {
            Ok(stdio) => stdio,
            Err(error) => {
                let refusal = broken(format!("fifo_dir {}: {error}", request.fifo_dir));
                let _ = std::fs::remove_file(process::task_file(&self.dir, &task.id));
                Proc::new(0, task).remove_files(&self.dir);
                return Err(refusal);
            }
        };
        drop(needs);
        let (dir, theirs) = (self.dir.clone(), stdio.theirs);
        let log = (!request.log_path.is_empty()).then(|| {
            Log::open(
                Path::new(&request.log_path),
                &process::mark_file(&self.dir, &request.id),
            )
        });
        let kept = theirs.each_ref().map(|fd| fd.as_raw_fd());
        let key = self.start(caller, task, &kept, move |channel| {
            let told = channel.as_raw_fd();
            let (spec, seccomp) = init::load(&bundle).unwrap_or_else(|error| crate::r#become::fail(told, &error));
            let plan = init::Plan {
                id: request.id,
                dir,
                spec,
                pid,
                record: request.record.into(),
                start_by: request.start_by,
                seccomp,
                stdio: theirs,
            };
            plan.run(&channel)
        })?;
        for stream in &stdio.ours {
            self.watch_output(stream.fd(), key);
        }
        if let Some(proc) = self.procs.iter_mut().find(|proc| proc.key == key) {
            proc.log = log;
            proc.stdin = stdio.stdin;
            stdio.ours.into_iter().for_each(|stream| proc.add(stream));
        }
        Ok(())
    }

    pub fn watch_output(&self, fd: RawFd, key: u32) {
        if let Err(error) = self.watch(fd, Of::Output, key, libc::EPOLLIN | libc::EPOLLET) {
            crate::note!("watch output: {error}");
        }
    }

    fn pid_namespace(&mut self, request: &RunRequest) -> Result<init::PidNs, Refusal> {
        let target = match request.pid() {
            api::PidNamespace::Own => return Ok(init::PidNs::Own),
            api::PidNamespace::Host => return Ok(init::PidNs::Host),
            api::PidNamespace::Pod => PAUSE,
            api::PidNamespace::Target => request.pid_target.as_str(),
        };
        let proc = self.find(target)?;
        match proc.phase {
            Phase::Running => Ok(init::PidNs::Of(proc.pid)),
            _ => Err((
                Code::FailedPrecondition,
                format!("pid namespace of {target}: it is not running"),
            )),
        }
    }

    fn is_new(&mut self, id: &str, record: &str, is_once: bool) -> Result<(), Refusal> {
        if self.find(id).is_ok() {
            return Err((Code::AlreadyExists, format!("process {id:?} exists")));
        }
        if self.procs.len() >= PROCESSES {
            return Err((Code::ResourceExhausted, format!("{PROCESSES} processes in this pod")));
        }
        let old = record::read(Path::new(record)).map_err(internal)?.unwrap_or_default();
        if old.end.is_some() || (is_once && old.start.is_some()) {
            return Err((Code::FailedPrecondition, format!("record {record}: it has run before")));
        }
        Ok(())
    }

    /// A start that fails before there is a process.
    fn not_started(&self, record: &str, error: String) -> Refusal {
        if let Err(error) = record::write_end(Path::new(record), End::start_error(&error, sys::now())) {
            crate::note!("{error}");
        }
        (Code::StartFailed, error)
    }

    /// Forks the maker of a process, which keeps `keep` and tells through the channel how it went.
    fn start(
        &mut self,
        caller: Caller,
        task: Task,
        keep: &[RawFd],
        maker: impl FnOnce(OwnedFd),
    ) -> Result<u32, Refusal> {
        let shim = std::process::id();
        let (ours, theirs) = sys::channel().map_err(internal)?;
        let (key, dir, id) = (self.key(), self.dir.clone(), task.id.clone());
        self.watch(ours.as_raw_fd(), Of::Channel, key, libc::EPOLLIN)
            .map_err(internal)?;
        if sys::fork().map_err(internal)? == 0 {
            die_with(shim);
            sys::keep_only(&[keep, &[theirs.as_raw_fd()]].concat());
            if let Err(error) = process::hold_making(&dir, &id) {
                crate::r#become::fail(theirs.as_raw_fd(), &format!("{}: {error}", dir.display()));
            }
            maker(theirs);
            sys::exit(1);
        }
        let mut proc = Proc::new(key, task);
        proc.channel = Some(ours);
        proc.run = Some(caller);
        self.procs.push(proc);
        Ok(key)
    }

    fn channel(&mut self, key: u32) {
        let mut bytes = [0; 4096];
        while let Some(proc) = self.procs.iter_mut().find(|proc| proc.key == key)
            && let Some(channel) = &proc.channel
        {
            let (len, fd) = match sys::receive(channel.as_raw_fd(), &mut bytes) {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    proc.error.get_or_insert(error.to_string());
                    (0, None)
                }
            };
            match (bytes[..len].split_first(), fd) {
                (None, _) => return self.made(key),
                (Some((&message::MADE, rest)), _) => {
                    proc.started = started(rest);
                    proc.pid = proc.started.pid;
                }
                (Some((&message::TERMINAL, _)), Some(fd)) => self.add_terminal(key, fd),
                (Some((_, text)), _) => proc.error = Some(String::from_utf8_lossy(text).into_owned()),
            }
        }
    }

    fn add_terminal(&mut self, key: u32, fd: OwnedFd) {
        // SAFETY: no pointers.
        unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK | libc::O_RDWR) };
        self.watch_output(fd.as_raw_fd(), key);
        if let Some(proc) = self.procs.iter_mut().find(|proc| proc.key == key) {
            proc.add(Stream::terminal(fd));
        }
    }

    /// All who held the channel are gone: execve closed it, or they failed.
    fn made(&mut self, key: u32) {
        let dir = self.dir.clone();
        let Some(proc) = self.procs.iter_mut().find(|proc| proc.key == key) else {
            return;
        };
        proc.channel = None;
        let unmade = (proc.pid == 0).then(|| "its maker died without a word; see shim.log".to_owned());
        let status = self
            .orphans
            .iter()
            .position(|(pid, _)| *pid == proc.pid)
            .map(|at| self.orphans.remove(at).1);
        if let Some(error) = proc.error.take().or(unmade) {
            proc.is_dead |= status.is_some();
            proc.failed(&dir, &error);
        } else {
            proc.phase = Phase::Running;
            if let Some(status) = status {
                proc.ended(&dir, End::from_wait(status, false, sys::now()));
            }
            let (caller, answer) = (proc.run.take(), proc.started.encode_to_vec());
            if let Some(caller) = caller {
                self.answer(caller, Ok(answer));
            }
        }
    }

    // ---- ending

    /// Children that ended: the pod's processes, makers, and orphans that came to this subreaper.
    fn reap(&mut self) {
        let mut info = [0u8; 128];
        // SAFETY: a live buffer, as long as a signalfd_siginfo.
        while unsafe { libc::read(self.signals.as_raw_fd(), info.as_mut_ptr().cast(), info.len()) } > 0 {}
        loop {
            let mut status = 0;
            // SAFETY: a live int.
            let pid = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) };
            if pid <= 0 {
                break;
            }
            self.child_ended(pid as u32, status);
        }
        let is_starting = self.procs.iter().any(|proc| proc.channel.is_some())
            || self.execs.iter().any(|exec| exec.channel.is_some());
        if !is_starting {
            self.orphans.clear();
        }
    }

    fn child_ended(&mut self, pid: u32, status: i32) {
        let dir = self.dir.clone();
        if let Some(proc) = self.procs.iter_mut().find(|proc| proc.pid == pid && !proc.is_dead) {
            match proc.phase {
                Phase::Running => proc.ended(&dir, End::from_wait(status, false, sys::now())),
                // Its channel may still hold why.
                Phase::Starting => {
                    proc.is_dead = true;
                    self.orphans.push((pid, status));
                }
                Phase::Stopping => proc.is_dead = true,
            }
        } else if let Some(exec) = self.execs.iter_mut().find(|exec| exec.pid == pid) {
            exec.ended(status);
        } else {
            self.orphans.push((pid, status));
        }
    }

    /// The status of an exec's process that ended before it was known.
    pub fn take_orphan(&mut self, pid: u32) -> Option<i32> {
        let at = self.orphans.iter().position(|(orphan, _)| *orphan == pid)?;
        Some(self.orphans.remove(at).1)
    }

    /// A process taken over ended: it is no child, so the kernel is asked in other ways.
    fn adopted_ended(&mut self, key: u32) {
        let dir = self.dir.clone();
        let Some(proc) = self.procs.iter_mut().find(|proc| proc.key == key && !proc.is_dead) else {
            return;
        };
        let Some(pidfd) = &proc.pidfd else { return };
        match crate::adopt::exit_status(proc.pid, proc.started.start_ticks, pidfd) {
            Some(_) | None if proc.phase == Phase::Stopping => proc.is_dead = true,
            Some(status) => proc.ended(&dir, End::from_wait(status, false, sys::now())),
            // Reaped, and the kernel (before 6.15) does not tell.
            None if sys::start_ticks(proc.pid) != Some(proc.started.start_ticks) => {
                proc.ended(&dir, End::lost(sys::now()))
            }
            None => {}
        }
    }
}

/// Dies with the shim (`parent`), so that a successor finds nothing half made that goes on being made.
pub fn die_with(parent: u32) {
    let _ = sys::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as u64);
    if std::os::unix::process::parent_id() != parent {
        sys::exit(1);
    }
}

fn child_signals() -> io::Result<OwnedFd> {
    // SAFETY: a zeroed set is valid; SIGCHLD exists; the descriptor is the kernel's answer.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&mut set, libc::SIGCHLD);
        sys::check(libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()))?;
        let fd = sys::check(libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK))?;
        Ok(OwnedFd::from_raw_fd(fd as RawFd))
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

fn decode<M: Message + Default>(request: &Request) -> Result<M, Refusal> {
    M::decode(&*request.payload).map_err(|error| (Code::InvalidArgument, format!("request: {error}")))
}

pub fn started(bytes: &[u8]) -> Started {
    let word = |at: usize| {
        bytes
            .get(at..)
            .and_then(|rest| rest.first_chunk())
            .map_or(0, |raw| u64::from_le_bytes(*raw))
    };
    let pid = bytes.first_chunk().map_or(0, |raw| u32::from_le_bytes(*raw));
    Started {
        pid,
        start_ticks: word(4),
        started_at: word(12) as i64,
    }
}

fn absolute(name: &str, path: &str) -> Result<(), Refusal> {
    if path.starts_with('/') {
        Ok(())
    } else {
        Err(invalid(name, format!("{path:?} is not absolute")))
    }
}

pub fn invalid(field: &str, why: impl std::fmt::Display) -> Refusal {
    (Code::InvalidArgument, format!("{field}: {why}"))
}

pub fn internal(error: impl std::fmt::Display) -> Refusal {
    (Code::Internal, error.to_string())
}
