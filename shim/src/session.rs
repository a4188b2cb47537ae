//! Execs, from the request over the joined process to the answer. Either the output is collected here, or the caller
//! gets the other ends of stdin, stdout and stderr (or of a terminal) and reads and writes them itself.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use prost::Message;
use shim::api::{ExecOutput, ExecRequest, ExecStreamRequest, Phase, StreamKind, Streams};
use shim::{Code, EXEC_OUTPUT_LIMIT, fault};

use crate::r#become::{fail, message};
use crate::process::{Caller, Needs};
use crate::service::{Of, Refusal, Service, die_with, internal, invalid, started};
use crate::stdio::{self, Collected};
use crate::{cgroup, init, join, sys};

/// How long output is waited for after the end while something holds a pipe, ns.
const DRAIN: u64 = 10_000_000_000;
/// How long the killed are waited for, ns.
const EMPTY: u64 = 1_000_000_000;
const LOOK: u64 = 2_000_000;
/// Time between the hang-up that an exec sees when its caller has left and SIGKILL, ns.
const HANG_UP: u64 = 1_000_000_000;
/// Most execs at once in one pod.
const EXECS: usize = 128;

/// One exec.
pub struct Exec {
    pub key: u32,
    /// Key of its container.
    pub container: u32,
    pub caller: Caller,
    /// 0 until known.
    pub pid: u32,
    pub channel: Option<OwnedFd>,
    error: Option<String>,
    io: Io,
    /// CLOCK_BOOTTIME at which all of it is killed.
    deadline: Option<u64>,
    is_late: bool,
    status: Option<i32>,
    drain_until: u64,
    /// Its own cgroup.
    session: Option<PathBuf>,
    /// Since when (plus [`EMPTY`]) it is being killed, and the next look.
    empty_until: u64,
    look_at: u64,
    is_answered: bool,
}

/// Our ends of an exec's stdio.
enum Io {
    Collected(Box<Output>),
    /// The caller's. Kept here to see when nobody holds the other end any more; stdin only until it is handed over.
    Passed(Vec<(StreamKind, OwnedFd)>),
}

/// Output kept for the answer.
struct Output {
    /// Stdout and stderr until their ends.
    open: [bool; 2],
    streams: [Collected; 2],
    room: usize,
    is_truncated: bool,
}

/// What both kinds of exec ask for.
struct Wish {
    id: String,
    args: Vec<String>,
    env: Vec<String>,
    cwd: String,
    terminal: bool,
    timeout_ns: i64,
}

impl Exec {
    pub fn ended(&mut self, status: i32) {
        self.status = Some(status);
        let drain = sys::boot() + DRAIN;
        self.drain_until = self.deadline.map_or(drain, |deadline| deadline.min(drain));
        self.pump();
    }

    /// Its caller is gone.
    pub fn abandon(&mut self) {
        self.is_answered = true;
        match &mut self.io {
            // Its end of a terminal or pipe hears of it first.
            Io::Passed(ends) => {
                ends.clear();
                self.deadline = Some(sys::boot() + HANG_UP);
            }
            Io::Collected(_) => {
                self.deadline = Some(0);
                self.kill();
            }
        }
    }

    pub fn pump(&mut self) {
        match &mut self.io {
            Io::Collected(output) => output.pump(),
            Io::Passed(ends) if self.channel.is_none() => ends.retain(|(_, fd)| !stdio::is_hung_up(fd.as_raw_fd())),
            Io::Passed(_) => {}
        }
    }

    fn is_drained(&self) -> bool {
        match &self.io {
            Io::Collected(output) => output.open == [false; 2],
            Io::Passed(ends) => ends.is_empty(),
        }
    }

    /// True if nobody is left.
    fn kill(&self) -> bool {
        if self.pid != 0 && self.status.is_none() {
            // SAFETY: no pointers; a child not reaped yet.
            unsafe { libc::kill(self.pid as libc::pid_t, libc::SIGKILL) };
        }
        self.session.as_deref().is_none_or(cgroup::kill)
    }

    /// When something is due next.
    pub fn due(&self) -> Option<u64> {
        let kill = (self.empty_until > 0).then_some(self.look_at);
        let drain = self.status.map(|_| self.drain_until);
        let late = self.deadline.filter(|_| !self.is_late && self.status.is_none());
        kill.or(drain).into_iter().chain(late).min()
    }

    /// True once it is over and its cgroup gone.
    fn tick(&mut self) -> bool {
        let now = sys::boot();
        if self.deadline.is_some_and(|deadline| deadline <= now) && self.status.is_none() && !self.is_late {
            self.is_late = true;
            self.kill();
        }
        // The channel is open until the program runs, whatever became of the process that joins.
        if self.channel.is_some() || (self.status.is_none() && self.pid != 0) {
            return false;
        }
        let is_drained = self.is_drained();
        if !is_drained && self.pid != 0 && now < self.drain_until && !self.is_late {
            return false;
        }
        if self.empty_until == 0 {
            self.empty_until = now + EMPTY;
        }
        if now < self.look_at {
            return false;
        }
        // What let go of the output by itself is a daemon meant to stay; what holds it on is not.
        if is_drained && !self.is_late && !self.is_answered {
            self.release();
        } else if !self.kill() && now < self.empty_until {
            self.look_at = now + LOOK;
            return false;
        }
        self.pump();
        let gone = self.session.clone().is_none_or(|session| cgroup::remove(&[session]));
        self.look_at = now + LOOK;
        gone || now >= self.empty_until
    }

    /// Hands those who stay to the container's own cgroup.
    fn release(&self) {
        let Some(session) = &self.session else { return };
        for pid in cgroup::pids(session) {
            if let Some(container) = session.parent() {
                let _ = fs::write(container.join("cgroup.procs"), pid.to_string());
            }
        }
    }

    fn answer(&mut self) -> Result<Vec<u8>, Refusal> {
        if let Some(error) = self.error.take() {
            return Err((Code::StartFailed, error));
        }
        let status = self.status.unwrap_or(libc::SIGKILL);
        let signal = libc::WTERMSIG(status);
        let exit_code = if libc::WIFSIGNALED(status) {
            128 + signal
        } else {
            libc::WEXITSTATUS(status)
        };
        let mut answer = ExecOutput {
            exit_code,
            timed_out: self.is_late,
            ..ExecOutput::default()
        };
        if let Io::Collected(output) = &mut self.io {
            let [stdout, stderr] = &mut output.streams;
            answer.stdout = std::mem::take(&mut stdout.bytes);
            answer.stderr = std::mem::take(&mut stderr.bytes);
            answer.truncated = output.is_truncated;
        }
        Ok(answer.encode_to_vec())
    }
}

impl Output {
    fn pump(&mut self) {
        for (open, stream) in self.open.iter_mut().zip(&mut self.streams).filter(|(open, _)| **open) {
            let (is_end, dropped) = stream.pump(&mut self.room);
            *open = !is_end;
            self.is_truncated |= dropped;
        }
    }
}

impl Service {
    /// An exec whose output is collected.
    pub fn start_exec(&mut self, caller: Caller, request: ExecRequest) -> Result<(), Refusal> {
        let null = null().map_err(internal)?;
        let (out, their_out) = sys::pipe(0).map_err(internal)?;
        let (err, their_err) = sys::pipe(0).map_err(internal)?;
        for fd in [&out, &err] {
            // SAFETY: no pointers.
            unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        }
        let limit = match request.limit {
            0 => EXEC_OUTPUT_LIMIT,
            limit => limit.min(EXEC_OUTPUT_LIMIT),
        };
        let ours = [out.as_raw_fd(), err.as_raw_fd()];
        let io = Io::Collected(Box::new(Output {
            open: [true; 2],
            streams: [Collected::new(out), Collected::new(err)],
            room: limit as usize,
            is_truncated: false,
        }));
        let wish = Wish {
            id: request.id,
            args: request.args,
            env: request.env,
            cwd: request.cwd,
            terminal: false,
            timeout_ns: request.timeout_ns,
        };
        let key = self.start_session(caller, wish, io, [null, their_out, their_err])?;
        for fd in ours {
            self.watch(fd, Of::ExecOutput, key, libc::EPOLLIN).map_err(internal)?;
        }
        Ok(())
    }

    /// An exec whose stdio its caller gets.
    pub fn start_exec_stream(&mut self, caller: Caller, request: ExecStreamRequest) -> Result<(), Refusal> {
        let mut ends = Vec::new();
        let mut theirs = [null(), null(), null()];
        let wanted = [
            (StreamKind::Stdin, request.stdin),
            (StreamKind::Stdout, request.stdout),
            (StreamKind::Stderr, request.stderr),
        ];
        for (at, (kind, is_wanted)) in wanted.into_iter().enumerate() {
            if is_wanted && !request.terminal {
                let (read, write) = sys::pipe(0).map_err(internal)?;
                let (our, their) = if at == 0 { (write, read) } else { (read, write) };
                ends.push((kind, our));
                theirs[at] = Ok(their);
            }
        }
        let [stdin, stdout, stderr] = theirs;
        let theirs = [
            stdin.map_err(internal)?,
            stdout.map_err(internal)?,
            stderr.map_err(internal)?,
        ];
        let wish = Wish {
            id: request.id,
            args: request.args,
            env: request.env,
            cwd: String::new(),
            terminal: request.terminal,
            timeout_ns: 0,
        };
        self.start_session(caller, wish, Io::Passed(ends), theirs).map(drop)
    }

    /// Forks the process that joins; answers the exec's key.
    fn start_session(&mut self, caller: Caller, wish: Wish, io: Io, stdio: [OwnedFd; 3]) -> Result<u32, Refusal> {
        let key = self.key();
        if wish.args.is_empty() {
            return Err(invalid("args", "empty"));
        }
        if let Some(entry) = wish.env.iter().find(|entry| !entry.contains('=')) {
            return Err(invalid("env", format!("{entry:?} is not KEY=VALUE")));
        }
        if self.execs.len() >= EXECS {
            return Err((Code::ResourceExhausted, format!("{EXECS} execs in this pod")));
        }
        let proc = self.find(&wish.id)?;
        let bundle = proc.task.run.as_ref().map(|run| PathBuf::from(&run.bundle));
        let (Phase::Running, Some(bundle)) = (proc.phase, bundle) else {
            let why = format!("{} is not a running container", wish.id);
            return Err((Code::FailedPrecondition, why));
        };
        proc.exec_count += 1;
        let (pid, container, number, cgroups) = (proc.pid, proc.key, proc.exec_count, proc.cgroups());
        let pidfd = sys::pidfd(pid).map_err(internal)?;
        let (channel, their_channel) = sys::channel().map_err(internal)?;
        self.watch(channel.as_raw_fd(), Of::ExecChannel, key, libc::EPOLLIN)
            .map_err(internal)?;
        let session = join::session(&cgroups, number);
        let shim = std::process::id();
        let deadline = u64::try_from(wish.timeout_ns).ok().filter(|ns| *ns > 0);
        let exec = Exec {
            key,
            container,
            caller,
            pid: 0,
            channel: Some(channel),
            error: None,
            io,
            deadline: deadline.map(|ns| sys::boot().saturating_add(ns)),
            is_late: false,
            status: None,
            drain_until: 0,
            session: session.clone(),
            empty_until: 0,
            look_at: 0,
            is_answered: false,
        };
        if sys::fork().map_err(internal)? == 0 {
            die_with(shim);
            fault::point("shim.exec.joining");
            let kept = [&stdio[0], &stdio[1], &stdio[2], &their_channel, &pidfd];
            sys::keep_only(&kept.map(|fd| fd.as_raw_fd()));
            let told = their_channel.as_raw_fd();
            let (process, seccomp) = process_of(&bundle, &wish).unwrap_or_else(|error| fail(told, &error));
            let owner = Needs::read(&bundle).map_or((0, 0), |needs| needs.owner());
            join::Plan {
                owner,
                pid,
                pidfd,
                cgroups,
                session,
                process,
                seccomp,
                stdio,
            }
            .run(&their_channel);
        }
        fault::point("shim.exec.forked");
        self.execs.push(exec);
        Ok(key)
    }

    pub fn exec_channel(&mut self, key: u32) {
        let mut bytes = [0; 4096];
        while let Some(exec) = self.execs.iter_mut().find(|exec| exec.key == key)
            && let Some(channel) = &exec.channel
        {
            let (len, fd) = match sys::receive(channel.as_raw_fd(), &mut bytes) {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => (0, None),
            };
            match (bytes[..len].split_first(), fd) {
                (None, _) => return self.exec_runs(key),
                (Some((&message::MADE, rest)), _) => exec.pid = started(rest).pid,
                (Some((&message::TERMINAL, _)), Some(fd)) => {
                    if let Io::Passed(ends) = &mut exec.io {
                        ends.push((StreamKind::Terminal, fd));
                    }
                }
                (Some((_, text)), _) => exec.error = Some(String::from_utf8_lossy(text).into_owned()),
            }
        }
    }

    /// All who held the channel are gone: the program runs, or they failed.
    fn exec_runs(&mut self, key: u32) {
        let Some(exec) = self.execs.iter_mut().find(|exec| exec.key == key) else {
            return;
        };
        exec.channel = None;
        if exec.pid == 0 && exec.error.is_none() {
            exec.error = Some("the process that joins died without a word".into());
        }
        let (pid, is_running) = (exec.pid, exec.error.is_none() && !exec.is_answered);
        if let (Io::Passed(ends), true) = (&exec.io, is_running) {
            let caller = exec.caller;
            let fds: Vec<RawFd> = ends.iter().map(|(_, fd)| fd.as_raw_fd()).collect();
            let kinds = ends.iter().map(|(kind, _)| *kind as i32).collect();
            self.hand_over(caller, &Streams { kinds }, &fds);
            self.watch_ends(key);
        }
        if pid != 0
            && let Some(status) = self.take_orphan(pid)
            && let Some(exec) = self.execs.iter_mut().find(|exec| exec.key == key)
        {
            exec.ended(status);
        }
    }

    /// What was handed over is only looked at: for the end of its last holder.
    fn watch_ends(&mut self, key: u32) {
        let Some(exec) = self.execs.iter_mut().find(|exec| exec.key == key) else {
            return;
        };
        let Io::Passed(ends) = &mut exec.io else { return };
        ends.retain(|(kind, _)| *kind != StreamKind::Stdin);
        let fds: Vec<RawFd> = ends.iter().map(|(_, fd)| fd.as_raw_fd()).collect();
        for fd in fds {
            if let Err(error) = self.watch(fd, Of::ExecOutput, key, libc::EPOLLET) {
                crate::note!("watch an exec's output: {error}");
            }
        }
    }

    pub fn tick_execs(&mut self) {
        let mut at = 0;
        while at < self.execs.len() {
            if !self.execs[at].tick() {
                at += 1;
                continue;
            }
            let mut exec = self.execs.remove(at);
            if !exec.is_answered {
                let answer = exec.answer();
                self.answer(exec.caller, answer);
            }
        }
    }
}

fn null() -> io::Result<OwnedFd> {
    let null = fs::OpenOptions::new().read(true).write(true).open("/dev/null");
    null.map(OwnedFd::from)
}

/// The container's process with the exec's program.
fn process_of(bundle: &Path, wish: &Wish) -> Result<(oci_spec::runtime::Process, Option<Vec<u8>>), String> {
    let (spec, seccomp) = init::load(bundle)?;
    let mut process = spec.process().clone().ok_or("config.json: process: missing")?;
    let mut env = process.env().clone().unwrap_or_default();
    for entry in &wish.env {
        let key = entry.split_once('=').map_or(entry.as_str(), |(key, _)| key);
        env.retain(|old| old.split_once('=').is_none_or(|(old, _)| old != key));
        env.push(entry.clone());
    }
    if wish.terminal && !env.iter().any(|entry| entry.starts_with("TERM=")) {
        env.push("TERM=xterm".into());
    }
    process
        .set_env(Some(env))
        .set_args(Some(wish.args.clone()))
        .set_terminal(Some(wish.terminal));
    if !wish.cwd.is_empty() {
        process.set_cwd(wish.cwd.clone().into());
    }
    Ok((process, seccomp))
}
