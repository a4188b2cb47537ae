//! Containers made by an OCI runtime's program (`runc`, `crun`, …) instead of libcontainer. The program makes and
//! starts; everything after that is the shim's own, as ever: output, signals, execs, the end.
//!
//! ```text
//! maker: create ──pid──> tell the shim, write the start ── start ── tell the shim      the process comes to the shim,
//! shim:  ... the end, the cgroup empty ── delete ── record written                     which is its subreaper
//! adoption, if it is not known to have been started: state
//! ```
//!
//! Its state is in `DIR/c`, its bundle in `DIR/b/ID`, with the pid file, which is there from `create` until `start` is
//! over, the log and the socket for the terminal.

use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use oci_spec::runtime::{Linux, PosixRlimit, PosixRlimitBuilder, Spec};
use serde::Deserialize;

use crate::r#become::message;
use crate::init::{self, PidNs, Plan};
use crate::sys;
use shim::api::Task;
use shim::fault;

/// How long making a container may take, ns; less if its call's deadline is before.
const CREATE: u64 = 120_000_000_000;
/// How long a start may take, ns.
const START: u64 = 30_000_000_000;
/// How long removing its state may take, ns.
pub const DELETE: u64 = 10_000_000_000;
/// How long a question may take, ns.
const STATE: u64 = 5_000_000_000;
/// What of its log is read, bytes.
const LOG: u64 = 64 << 10;
/// Longest error told, bytes.
const ERROR: usize = 2000;
/// For its hooks and helpers.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

type Step<T = ()> = Result<T, String>;

/// The program that makes a container.
#[derive(Debug, Clone)]
pub struct Runtime {
    program: PathBuf,
    options: Vec<String>,
    root: PathBuf,
    bundle: PathBuf,
    id: String,
}

/// How far the removal of its state is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    Owed,
    /// Child, and when it is given up (CLOCK_BOOTTIME ns).
    Runs(u32, u64),
    Done,
}

/// What of `state`'s answer (OCI runtime spec, State) counts.
#[derive(Deserialize)]
struct State {
    status: String,
}

/// A line of its log.
#[derive(Deserialize)]
struct Line {
    #[serde(default)]
    level: String,
    #[serde(default)]
    msg: String,
}

impl Runtime {
    /// `None`: the container is libcontainer's.
    pub fn of(task: &Task, dir: &Path) -> Option<Runtime> {
        let run = task.run.as_ref().filter(|run| !run.runtime.is_empty())?;
        let (root, bundle) = init::state_dirs(dir, &task.id);
        Some(Runtime {
            program: run.runtime.clone().into(),
            options: run.runtime_options.clone(),
            root,
            bundle,
            id: task.id.clone(),
        })
    }

    /// Was it ever asked to make the container?
    pub fn has_state(&self) -> bool {
        self.bundle.join("config.json").exists()
    }

    fn pid_file(&self) -> PathBuf {
        self.bundle.join("pid")
    }

    fn log(&self) -> PathBuf {
        self.bundle.join("log.json")
    }

    /// The program with its global arguments, ready to have nothing of ours.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command
            .arg("--root")
            .arg(&self.root)
            .arg("--log")
            .arg(self.log())
            .args(["--log-format", "json"])
            .args(&self.options)
            .env_clear()
            .env("PATH", PATH)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let parent = std::process::id();
        let prepare = move || {
            sys::reset_signals();
            // SAFETY: no pointers.
            sys::check(unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) })?;
            // Nobody is to go on making what nobody waits for.
            sys::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as u64)?;
            if std::os::unix::process::parent_id() != parent {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            Ok(())
        };
        // SAFETY: system calls only, in a child of a process of one thread.
        unsafe { command.pre_exec(prepare) };
        command
    }

    /// Runs it to its end, which is its death at `until` (CLOCK_BOOTTIME ns).
    fn finish(&self, verb: &str, mut command: Command, until: u64) -> Step {
        let told = |error: &dyn std::fmt::Display| format!("{} {verb}: {error}", self.program.display());
        match wait(&mut command, until) {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(told(&self.last_error().unwrap_or_else(|| status.to_string()))),
            Err(error) => Err(told(&error)),
        }
    }

    /// What it complained of last.
    fn last_error(&self) -> Option<String> {
        let mut bytes = Vec::new();
        fs::File::open(self.log())
            .ok()?
            .take(LOG)
            .read_to_end(&mut bytes)
            .ok()?;
        // Some put each on a line, some one behind the other.
        let lines = serde_json::Deserializer::from_slice(&bytes).into_iter::<Line>();
        let is_error = |line: &Line| ["error", "fatal", "panic"].contains(&line.level.as_str());
        let error = lines.map_while(Result::ok).filter(is_error).last().map(|line| line.msg);
        let other = || String::from_utf8_lossy(&bytes).trim().to_owned();
        let mut found = error.unwrap_or_else(other);
        found.truncate(found.floor_char_boundary(ERROR));
        Some(found).filter(|found| !found.is_empty())
    }

    /// Makes the container and tells its first process.
    fn create(&self, stdio: [OwnedFd; 3], console: Option<&Console>, systemd: bool, until: u64) -> Step<u32> {
        let mut command = self.command();
        let [stdin, stdout, stderr] = stdio;
        command.stdin(stdin).stdout(stdout).stderr(stderr);
        if systemd {
            command.arg("--systemd-cgroup");
        }
        command.arg("create").arg("--bundle").arg(&self.bundle);
        command.arg("--pid-file").arg(self.pid_file());
        if let Some(console) = console {
            command.arg("--console-socket").arg(&console.path);
        }
        command.arg(&self.id);
        self.finish("create", command, until)?;
        let text = fs::read_to_string(self.pid_file()).unwrap_or_default();
        let pid = text.trim().parse().ok().filter(|pid| *pid > 1);
        pid.ok_or_else(|| format!("{} create: it wrote no pid file", self.program.display()))
    }

    fn start(&self) -> Step {
        let mut command = self.command();
        command.arg("start").arg(&self.id);
        self.finish("start", command, sys::boot() + START)?;
        let _ = fs::remove_file(self.pid_file());
        Ok(())
    }

    /// May its first process still wait for a start that nobody will give? The maker was killed.
    pub fn is_unborn(&self) -> bool {
        if !self.pid_file().exists() {
            return false;
        }
        let answer = self.bundle.join("state.json");
        let asked = fs::File::create(&answer)
            .map_err(|error| error.to_string())
            .and_then(|file| {
                let mut command = self.command();
                command.arg("state").arg(&self.id).stdout(file);
                self.finish("state", command, sys::boot() + STATE)
            });
        let state = asked.and_then(|()| {
            let bytes = fs::read(&answer).map_err(|error| error.to_string())?;
            serde_json::from_slice::<State>(&bytes).map_err(|error| error.to_string())
        });
        match state {
            Ok(state) => state.status != "running",
            Err(error) => {
                crate::note!("{}: {error}; taken for not started", self.id);
                true
            }
        }
    }

    /// Starts the removal of its state. The shim reaps the child.
    pub fn delete(&self) -> io::Result<Removal> {
        let mut command = self.command();
        let child = command.args(["delete", "--force"]).arg(&self.id).spawn()?;
        Ok(Removal::Runs(child.id(), sys::boot() + DELETE))
    }
}

fn wait(command: &mut Command, until: u64) -> io::Result<ExitStatus> {
    let mut child = command.spawn()?;
    let pidfd = sys::pidfd(child.id())?;
    let mut poll = libc::pollfd {
        fd: pidfd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    loop {
        let left = until.saturating_sub(sys::boot()).div_ceil(1_000_000);
        // SAFETY: one live pollfd.
        let ended = unsafe { libc::poll(&mut poll, 1, i32::try_from(left).unwrap_or(i32::MAX)) };
        if ended > 0 {
            return child.wait();
        }
        if sys::boot() >= until {
            child.kill()?;
            child.wait()?;
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "it did not end in time and was killed",
            ));
        }
    }
}

/// Where the program sends the terminal's controlling end.
struct Console {
    listener: UnixListener,
    /// Through this process's descriptor of the directory: a socket's path ends at 108 bytes.
    path: String,
    _dir: fs::File,
}

impl Console {
    fn listen(bundle: &Path) -> io::Result<Console> {
        let dir = fs::File::open(bundle)?;
        let path = format!("/proc/{}/fd/{}/tty", std::process::id(), dir.as_raw_fd());
        let _ = fs::remove_file(bundle.join("tty"));
        let listener = UnixListener::bind(&path)?;
        listener.set_nonblocking(true)?;
        Ok(Console {
            listener,
            path,
            _dir: dir,
        })
    }

    /// What was sent, once the program has ended.
    fn take(self) -> io::Result<OwnedFd> {
        let (sender, _) = self.listener.accept()?;
        let (_, fd) = sys::receive(sender.as_raw_fd(), &mut [0; 4096])?;
        fd.ok_or_else(|| io::Error::other("a message without a descriptor came"))
    }
}

/// The steps of a maker; see the module's picture.
pub fn make(mut plan: Plan, runtime: &Runtime, channel: RawFd) -> Step {
    let mut spec = whole(&plan.spec, &plan.pid)?;
    let systemd = spec.linux_mut().as_mut().is_some_and(by_systemd);
    let text = serde_json::to_vec(&spec).map_err(|error| error.to_string())?;
    fault::point("shim.maker.derived");
    let told = |error: io::Error| format!("{}: {error}", runtime.bundle.display());
    fs::write(runtime.bundle.join("config.json"), text).map_err(told)?;
    let terminal = spec
        .process()
        .as_ref()
        .is_some_and(|process| process.terminal() == Some(true));
    let console = terminal
        .then(|| Console::listen(&runtime.bundle))
        .transpose()
        .map_err(|error| format!("socket for the terminal: {error}"))?;
    let mut until = sys::boot() + CREATE;
    if plan.start_by != 0 {
        until = until.min(plan.start_by);
    }
    let stdio = plan.stdio.take().ok_or("no stdio")?;
    let pid = runtime.create(stdio, console.as_ref(), systemd, until)?;
    let start = init::made(pid, channel)?;
    if let Some(console) = console {
        let fd = console.take().map_err(|error| format!("terminal: {error}"))?;
        sys::send(channel, &[message::TERMINAL], &[fd.as_raw_fd()]).map_err(|error| format!("terminal: {error}"))?;
    }
    plan.begin(&start)?;
    runtime.start()?;
    fault::point("shim.maker.after");
    let told = |error: io::Error| format!("tell the shim: {error}");
    sys::send(channel, &[message::STARTED], &[]).map(drop).map_err(told)
}

/// The spec that the program gets: the bundle's, with what only the start knows, and without what this process may
/// not give it.
fn whole(spec: &Spec, pid: &PidNs) -> Step<Spec> {
    let mut spec = spec.clone();
    let mut process = spec.process().clone().ok_or("config.json: process: missing")?;
    // Set on this process already, as far as allowed, and inherited.
    process.set_oom_score_adj(None);
    let limits = process
        .rlimits()
        .iter()
        .flatten()
        .map(clamped)
        .collect::<Step<Vec<_>>>()?;
    process.set_rlimits(Some(limits).filter(|limits| !limits.is_empty()));
    spec.set_process(Some(process));
    let mut linux = spec.linux().clone().ok_or("config.json: linux: missing")?;
    linux.set_namespaces(Some(init::namespaces(&linux, pid)?));
    spec.set_linux(Some(linux));
    Ok(spec)
}

/// A cgroup that is a systemd scope is written as runtimes want it then, `SLICE:PREFIX:NAME`; they make it themselves.
fn by_systemd(linux: &mut Linux) -> bool {
    let path = linux.cgroups_path().clone().unwrap_or_default();
    let name = |path: &Path| path.file_name()?.to_str().map(str::to_owned);
    let scope = name(&path).and_then(|name| name.strip_suffix(".scope").map(str::to_owned));
    let slice = path.parent().and_then(name).filter(|name| name.ends_with(".slice"));
    let (Some(scope), Some(slice)) = (scope, slice) else {
        return false;
    };
    let Some((prefix, id)) = scope.split_once('-') else {
        return false;
    };
    linux.set_cgroups_path(Some(format!("{slice}:{prefix}:{id}").into()));
    true
}

/// A limit as far as it can be had.
fn clamped(limit: &PosixRlimit) -> Step<PosixRlimit> {
    let most = init::raise_limit(limit)?;
    let hard = limit.hard().min(most);
    PosixRlimitBuilder::default()
        .typ(limit.typ())
        .soft(limit.soft().min(hard))
        .hard(hard)
        .build()
        .map_err(|error| format!("process.rlimits: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runtime(dir: &Path, program: &str) -> Runtime {
        let run = shim::api::RunRequest {
            runtime: program.into(),
            runtime_options: vec!["--debug".into()],
            ..Default::default()
        };
        let task = Task {
            id: "x".into(),
            run: Some(run),
            ..Task::default()
        };
        let runtime = Runtime::of(&task, dir).unwrap();
        fs::create_dir_all(&runtime.bundle).unwrap();
        runtime
    }

    #[test]
    fn its_last_error_is_what_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = runtime(dir.path(), "/bin/false");
        assert_eq!(runtime.last_error(), None);
        let log = "{\"level\":\"warning\",\"msg\":\"w\"}\n{\"level\":\"error\",\"msg\":\"first\"}\n\
                   {\"level\":\"error\",\"msg\":\"exec: \\\"x\\\": not found\"}{\"level\":\"info\",\"msg\":\"i\"}\n";
        fs::write(runtime.log(), log).unwrap();
        assert_eq!(runtime.last_error().as_deref(), Some("exec: \"x\": not found"));
        let told = runtime.start().unwrap_err();
        assert_eq!(told, "/bin/false start: exec: \"x\": not found");
        fs::write(runtime.log(), "é".repeat(100_000)).unwrap();
        let len = runtime.last_error().unwrap().len();
        assert!((ERROR - 3..=ERROR).contains(&len), "{len}");
    }

    #[test]
    fn what_does_not_end_is_ended() {
        let mut command = Command::new("sleep");
        let error = wait(command.arg("100"), sys::boot() + 20_000_000).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let status = wait(&mut Command::new("true"), sys::boot() + START).unwrap();
        assert!(status.success());
    }

    #[test]
    fn a_scope_is_systemds() {
        let of = |path: &str| {
            let mut linux = Linux::default();
            linux.set_cgroups_path(Some(path.into()));
            let systemd = by_systemd(&mut linux);
            (systemd, linux.cgroups_path().clone().unwrap().display().to_string())
        };
        let scope = "/kubepods.slice/kubepods-pod1.slice/reconcile-abc.scope";
        assert_eq!(of(scope), (true, "kubepods-pod1.slice:reconcile:abc".to_owned()));
        for path in ["/kubepods/pod1/abc", "/kubepods/reconcile-abc.scope", "/a.slice/abc"] {
            assert_eq!(of(path), (false, path.to_owned()));
        }
    }

    #[test]
    fn it_gets_the_whole_spec() {
        let spec: Spec = serde_json::from_value(serde_json::json!({
            "ociVersion": "1.0.2",
            "root": { "path": "/r", "readonly": true },
            "process": { "cwd": "/w", "args": ["a"], "user": { "uid": 7, "gid": 8 }, "oomScoreAdj": 5,
                "noNewPrivileges": true, "rlimits": [{ "type": "RLIMIT_CORE", "soft": 9, "hard": 3 }] },
            "linux": { "maskedPaths": ["/proc/kcore"], "namespaces": [{ "type": "pid" }, { "type": "mount" }] },
        }))
        .unwrap();
        let whole = serde_json::to_value(whole(&spec, &PidNs::Of(7)).unwrap()).unwrap();
        assert_eq!(whole["process"]["user"]["uid"], 7);
        assert_eq!(whole["process"]["noNewPrivileges"], true);
        assert_eq!(whole["process"].get("oomScoreAdj"), None);
        assert_eq!(whole["process"]["rlimits"][0]["soft"], 3);
        assert_eq!(whole["root"]["readonly"], true);
        assert_eq!(whole["linux"]["maskedPaths"][0], "/proc/kcore");
        let namespaces = whole["linux"]["namespaces"].to_string();
        assert!(
            namespaces.contains("/proc/7/ns/pid") && namespaces.contains("mount"),
            "{namespaces}"
        );
    }
}
