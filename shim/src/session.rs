//! Execs whose output is collected: from the request over the joined process to the answer.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use prost::Message;
use shim::api::{ExecOutput, ExecRequest, Phase};
use shim::{Code, EXEC_OUTPUT_LIMIT};

use crate::r#become::{fail, message};
use crate::process::Caller;
use crate::service::{Of, Refusal, Service, die_with, internal, invalid, started};
use crate::stdio::Collected;
use crate::{cgroup, init, join, sys};

/// How long output is waited for after the end while something holds a pipe, ns.
const DRAIN: u64 = 10_000_000_000;
/// How long the killed are waited for, ns.
const EMPTY: u64 = 1_000_000_000;
const LOOK: u64 = 2_000_000;
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
    /// Stdout and stderr until their ends.
    open: [bool; 2],
    output: [Collected; 2],
    room: usize,
    is_truncated: bool,
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
        self.deadline = Some(0);
        self.kill();
    }

    pub fn pump(&mut self) {
        for (open, output) in self.open.iter_mut().zip(&mut self.output).filter(|(open, _)| **open) {
            let (is_end, dropped) = output.pump(&mut self.room);
            *open = !is_end;
            self.is_truncated |= dropped;
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
        let is_drained = self.open == [false; 2];
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
        let [stdout, stderr] = &mut self.output;
        let output = ExecOutput {
            stdout: std::mem::take(&mut stdout.bytes),
            stderr: std::mem::take(&mut stderr.bytes),
            exit_code,
            truncated: self.is_truncated,
            timed_out: self.is_late,
        };
        Ok(output.encode_to_vec())
    }
}

impl Service {
    pub fn start_exec(&mut self, caller: Caller, request: ExecRequest) -> Result<(), Refusal> {
        let key = self.key();
        if request.args.is_empty() {
            return Err(invalid("args", "empty"));
        }
        if let Some(entry) = request.env.iter().find(|entry| !entry.contains('=')) {
            return Err(invalid("env", format!("{entry:?} is not KEY=VALUE")));
        }
        if self.execs.len() >= EXECS {
            return Err((Code::ResourceExhausted, format!("{EXECS} execs in this pod")));
        }
        let proc = self.find(&request.id)?;
        let bundle = proc.task.run.as_ref().map(|run| PathBuf::from(&run.bundle));
        let (Phase::Running, Some(bundle)) = (proc.phase, bundle) else {
            return Err((
                Code::FailedPrecondition,
                format!("{} is not a running container", request.id),
            ));
        };
        proc.exec_count += 1;
        let (pid, container, number, cgroups) = (proc.pid, proc.key, proc.exec_count, proc.cgroups());
        let pidfd = sys::pidfd(pid).map_err(internal)?;
        let null = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/null")
            .map_err(internal)?;
        let (out, their_out) = sys::pipe(0).map_err(internal)?;
        let (err, their_err) = sys::pipe(0).map_err(internal)?;
        let (channel, their_channel) = sys::channel().map_err(internal)?;
        for (fd, of) in [
            (&out, Of::ExecOutput),
            (&err, Of::ExecOutput),
            (&channel, Of::ExecChannel),
        ] {
            // SAFETY: no pointers.
            unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
            self.watch(fd.as_raw_fd(), of, key, libc::EPOLLIN).map_err(internal)?;
        }
        let session = join::session(&cgroups, number);
        let shim = std::process::id();
        let deadline = u64::try_from(request.timeout_ns).ok().filter(|ns| *ns > 0);
        let limit = if request.limit == 0 {
            EXEC_OUTPUT_LIMIT
        } else {
            request.limit.min(EXEC_OUTPUT_LIMIT)
        };
        let exec = Exec {
            key,
            container,
            caller,
            pid: 0,
            channel: Some(channel),
            error: None,
            open: [true; 2],
            output: [Collected::new(out), Collected::new(err)],
            room: limit as usize,
            is_truncated: false,
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
            let null = OwnedFd::from(null);
            let kept = [&null, &their_out, &their_err, &their_channel, &pidfd];
            sys::keep_only(&kept.map(|fd| fd.as_raw_fd()));
            let told = their_channel.as_raw_fd();
            let (process, seccomp) = process_of(&bundle, &request).unwrap_or_else(|error| fail(told, &error));
            let stdio = [null, their_out, their_err];
            join::Plan {
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
        self.execs.push(exec);
        Ok(())
    }

    pub fn exec_channel(&mut self, key: u32) {
        let mut bytes = [0; 4096];
        while let Some(exec) = self.execs.iter_mut().find(|exec| exec.key == key)
            && let Some(channel) = &exec.channel
        {
            let len = match sys::receive(channel.as_raw_fd(), &mut bytes) {
                Ok((len, _)) => len,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => 0,
            };
            match bytes[..len].split_first() {
                None => {
                    exec.channel = None;
                    if exec.pid == 0 && exec.error.is_none() {
                        exec.error = Some("the process that joins died without a word".into());
                    }
                    let pid = exec.pid;
                    if pid != 0
                        && let Some(status) = self.take_orphan(pid)
                        && let Some(exec) = self.execs.iter_mut().find(|exec| exec.key == key)
                    {
                        exec.ended(status);
                    }
                    return;
                }
                Some((&message::MADE, rest)) => exec.pid = started(rest).pid,
                Some((_, text)) => exec.error = Some(String::from_utf8_lossy(text).into_owned()),
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

/// The container's process with the exec's program.
fn process_of(bundle: &Path, request: &ExecRequest) -> Result<(oci_spec::runtime::Process, Option<Vec<u8>>), String> {
    let (spec, seccomp) = init::load(bundle)?;
    let mut process = spec.process().clone().ok_or("config.json: process: missing")?;
    let mut env = process.env().clone().unwrap_or_default();
    for entry in &request.env {
        let key = entry.split_once('=').map_or(entry.as_str(), |(key, _)| key);
        env.retain(|old| old.split_once('=').is_none_or(|(old, _)| old != key));
        env.push(entry.clone());
    }
    process
        .set_env(Some(env))
        .set_args(Some(request.args.clone()))
        .set_terminal(Some(false));
    if !request.cwd.is_empty() {
        process.set_cwd(request.cwd.clone().into());
    }
    Ok((process, seccomp))
}
