//! Starting a process: what is asked is checked, its maker forked, and what the maker tells is heard.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use prost::Message;
use shim::api::{self, Phase, RunRequest, Started, Task};
use shim::record::{self, End};
use shim::{Code, PAUSE, fault};

use super::{Of, Refusal, Service, internal, invalid};
use crate::r#become::message;
use crate::log::Log;
use crate::process::{self, Caller, Needs, Proc};
use crate::runtime::Runtime;
use crate::stdio::Stream;
use crate::{init, pause, sys};

/// Most processes at once.
const PROCESSES: usize = 256;

impl Service {
    pub(super) fn start_pause(&mut self, caller: Caller, request: api::PauseRequest) -> Result<(), Refusal> {
        fault::point("shim.pause.before");
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

    pub(super) fn start_run(&mut self, caller: Caller, request: RunRequest) -> Result<(), Refusal> {
        fault::point("shim.run.before");
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
        if !request.runtime.is_empty() {
            absolute("runtime", &request.runtime)?;
        }
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
        fault::point("shim.run.saved");
        let stdio = match process::make_stdio(&request, needs.owner()) {
            Ok(stdio) => stdio,
            Err(error) => {
                let refusal = broken(format!("fifo_dir {}: {error}", request.fifo_dir));
                self.abandon(task);
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
            .limited(request.max_line)
        });
        let runtime = Runtime::of(&task, &self.dir);
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
                stdio: Some(theirs),
                runtime,
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

    /// Begins to make a process: its maker keeps `keep` and tells through the channel how it went.
    fn start(
        &mut self,
        caller: Caller,
        task: Task,
        keep: &[RawFd],
        maker: impl FnOnce(OwnedFd),
    ) -> Result<u32, Refusal> {
        let key = self.key();
        let (ours, child) = match self.fork_maker(key, &task.id, keep, maker) {
            Ok(forked) => forked,
            Err(error) => {
                self.abandon(task);
                return Err(internal(error));
            }
        };
        fault::point("shim.start.forked");
        let mut proc = Proc::new(key, task);
        proc.channel = Some(ours);
        proc.maker = child;
        proc.is_begun = proc.task.run.as_ref().is_none_or(|run| run.runtime.is_empty());
        proc.run = Some(caller);
        self.procs.push(proc);
        Ok(key)
    }

    /// Answers the channel and the maker's pid.
    fn fork_maker(
        &self,
        key: u32,
        id: &str,
        keep: &[RawFd],
        maker: impl FnOnce(OwnedFd),
    ) -> io::Result<(OwnedFd, u32)> {
        let shim = std::process::id();
        let (ours, theirs) = sys::channel()?;
        self.watch(ours.as_raw_fd(), Of::Channel, key, libc::EPOLLIN)?;
        let making = process::lock_making(&self.dir, id)?;
        let child = sys::fork()?;
        if child == 0 {
            die_with(shim);
            fault::point("shim.maker.before");
            sys::keep_only(&[keep, &[theirs.as_raw_fd(), making.as_raw_fd()]].concat());
            std::mem::forget(making);
            maker(theirs);
            sys::exit(1);
        }
        Ok((ours, child))
    }

    /// Removes what was kept of a process that there will not be.
    fn abandon(&self, task: Task) {
        let _ = std::fs::remove_file(process::task_file(&self.dir, &task.id));
        Proc::new(0, task).remove_files(&self.dir);
    }

    pub(super) fn channel(&mut self, key: u32) {
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
                (Some((&message::STARTED, _)), _) => proc.is_begun = true,
                (Some((_, text)), _) => {
                    proc.error = Some(String::from_utf8_lossy(text).into_owned());
                    // What was made waits to be let go, and holds the channel: without it nothing would end the start.
                    let _ = proc.signal(libc::SIGKILL);
                }
            }
        }
    }

    /// A maker ended. If it was killed, what it made waits for it, and holds the channel, for ever.
    pub(super) fn maker_ended(&mut self, key: u32, status: i32) {
        self.channel(key); // what it said before
        let dir = self.dir.clone();
        let is_waiting = |proc: &&mut Proc| proc.key == key && proc.channel.is_some();
        if let Some(proc) = self.procs.iter_mut().find(is_waiting).filter(|_| status != 0) {
            let killed = || format!("its maker ended with wait status {status:#x} before it was started; see shim.log");
            let why = proc.error.take().unwrap_or_else(killed);
            proc.failed(&dir, &why);
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
        // An OCI runtime's program does not hold the channel: its maker says what execve says else.
        let unmade =
            (proc.pid == 0 || !proc.is_begun).then(|| "its maker died without a word; see shim.log".to_owned());
        let status = self
            .orphans
            .iter()
            .position(|(pid, _)| *pid == proc.pid)
            .map(|at| self.orphans.remove(at).1);
        if let Some(error) = proc.error.take().or(unmade) {
            proc.is_dead |= status.is_some();
            proc.failed(&dir, &error);
        } else {
            fault::point("shim.start.made");
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
}

/// Dies with the shim (`parent`), so that a successor finds nothing half made that goes on being made.
pub fn die_with(parent: u32) {
    let _ = sys::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as u64);
    if std::os::unix::process::parent_id() != parent {
        sys::exit(1);
    }
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
