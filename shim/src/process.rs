//! One process of the pod, a container's first or the pause: what is known of it, from before its making to after its
//! end.
//!
//! ```text
//!  Starting ──made, execve done──> Running ──exit seen──> Stopping ──drained, cgroup empty──> record written, gone
//!      └─────────failed──────────────────────────────────────^
//! ```

use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use prost::Message;
use serde::Deserialize;

use crate::attach::{self, Attached};
use crate::log::{Kind, Log};
use crate::runtime::{Removal, Runtime};
use crate::stdio::{self, Pumped, Scratch, Stream};
use crate::{cgroup, init, sys};
use shim::api::{Phase, RunRequest, Started, Task};
use shim::fault;
use shim::record::{self, End, Stop};

/// How long output is waited for after the end if something still holds a pipe, ns.
const DRAIN: u64 = 1_000_000_000;
/// How long a killed cgroup is waited for before the end is told anyway, ns.
const EMPTY: u64 = 5_000_000_000;
/// First pause between looks at a cgroup that is being emptied, ns; doubles.
const LOOK: u64 = 1_000_000;
/// Pause between tries to write a log that cannot be written, ns.
const LOG_RETRY: u64 = 1_000_000_000;

/// Who waits for an answer: connection and stream.
pub type Caller = (u32, u32);

/// One process.
pub struct Proc {
    pub key: u32,
    pub task: Task,
    pub phase: Phase,
    /// 0 before it is made.
    pub pid: u32,
    pub started: Started,
    /// For a process taken over: what tells its end.
    pub pidfd: Option<OwnedFd>,
    /// While it is being made.
    pub channel: Option<OwnedFd>,
    /// The child that makes it; 0 when that has ended.
    pub maker: u32,
    /// The channel's end means that it runs.
    pub is_begun: bool,
    removal: Removal,
    pub error: Option<String>,
    pub streams: Vec<Stream>,
    /// Streams with something to read, in the order of `streams`.
    pub ready: Vec<bool>,
    pub log: Option<Log>,
    log_retry: u64,
    /// CLOCK_BOOTTIME of SIGKILL.
    pub kill_at: Option<u64>,
    pub is_dead: bool,
    /// The kernel had killed for want of memory when the end was seen; systemd may take the cgroup away soon after.
    oom: bool,
    pub end: Option<End>,
    drain_until: u64,
    empty_until: u64,
    look_at: u64,
    look_pause: u64,
    /// Writing end of a stdin that is to end with its first client.
    pub stdin: Option<OwnedFd>,
    pub attached: Vec<Attached>,
    pub run: Option<Caller>,
    pub deletes: Vec<Caller>,
    pub exec_count: u64,
}

impl Proc {
    pub fn new(key: u32, task: Task) -> Proc {
        Proc {
            key,
            task,
            phase: Phase::Starting,
            pid: 0,
            started: Started::default(),
            pidfd: None,
            channel: None,
            maker: 0,
            is_begun: true,
            removal: Removal::Owed,
            error: None,
            streams: Vec::new(),
            ready: Vec::new(),
            log: None,
            log_retry: 0,
            kill_at: None,
            is_dead: false,
            oom: false,
            end: None,
            drain_until: 0,
            empty_until: 0,
            look_at: 0,
            look_pause: LOOK,
            stdin: None,
            attached: Vec::new(),
            run: None,
            deletes: Vec::new(),
            exec_count: 0,
        }
    }

    pub fn id(&self) -> &str {
        &self.task.id
    }

    pub fn record(&self) -> &Path {
        Path::new(&self.task.record)
    }

    pub fn cgroups(&self) -> Vec<PathBuf> {
        self.task.cgroups.iter().map(PathBuf::from).collect()
    }

    /// The controlling end of its terminal.
    pub fn terminal(&self) -> Option<RawFd> {
        let is_terminal = self.task.run.as_ref().is_some_and(|run| run.terminal);
        self.streams.first().filter(|_| is_terminal).map(Stream::fd)
    }

    pub fn add(&mut self, stream: Stream) {
        self.streams.push(stream);
        self.ready.push(true);
    }

    /// Signals the first process.
    pub fn signal(&self, signal: i32) -> io::Result<()> {
        if self.pid == 0 || self.is_dead {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        match &self.pidfd {
            Some(pidfd) => sys::pidfd_signal(pidfd.as_fd(), signal),
            // SAFETY: no pointers. The pid is a child not reaped yet, so nobody else's.
            None => sys::check(unsafe { libc::kill(self.pid as libc::pid_t, signal) }).map(drop),
        }
    }

    /// Kills all of it; true if nothing is left in its cgroup. The pause's cgroup is not its own.
    pub fn kill(&self) -> bool {
        let _ = self.signal(libc::SIGKILL);
        let cgroups = self.cgroups();
        let is_empty = self.task.pause || cgroup::main_dir(&cgroups).is_none_or(|dir| cgroup::kill(dir));
        if !is_empty {
            cgroups.iter().for_each(|dir| cgroup::thaw(dir));
        }
        is_empty
    }

    /// First call: signals, once. Any call: brings the kill nearer.
    pub fn stop(&mut self, signal: i32, grace_ns: i64) -> shim::Result<()> {
        let deadline = sys::boot().saturating_add(u64::try_from(grace_ns).unwrap_or(0));
        let is_first = record::read(self.record())?.is_none_or(|record| record.stop.is_none());
        let stands = record::write_stop(self.record(), Stop { signal, deadline })?;
        self.kill_at = Some(stands.deadline);
        fault::point("shim.stop.recorded");
        if is_first && grace_ns > 0 && signal > 0 {
            let _ = self.signal(signal);
        }
        fault::point("shim.stop.signalled");
        self.cgroups().iter().for_each(|dir| cgroup::thaw(dir));
        Ok(())
    }

    /// The first process ended, or never began.
    pub fn ended(&mut self, dir: &Path, end: End) {
        self.oom |= !self.task.pause && cgroup::oom_kills(&self.cgroups()) > 0;
        self.is_dead = true;
        self.phase = Phase::Stopping;
        let now = sys::boot();
        self.drain_until = now + DRAIN;
        self.empty_until = now + EMPTY;
        self.look_at = 0;
        self.task.ended = Some(end.clone());
        self.end = Some(end);
        fault::point("shim.ended.before");
        // Were the shim killed now, nobody else could know.
        if let Err(error) = save(dir, &self.task) {
            crate::note!("{}: {error}", self.id());
        }
        fault::point("shim.ended.saved");
        self.kill();
    }

    /// It did not start. What was made of it is killed; the end follows when that is gone.
    pub fn failed(&mut self, dir: &Path, why: &str) {
        self.channel = None;
        let is_made = self.pid != 0 && !self.is_dead;
        self.ended(dir, End::start_error(why, sys::now()));
        if is_made {
            self.is_dead = false;
            self.kill();
        }
    }

    /// Moves what its streams have; true if there may be more at once.
    pub fn pump(&mut self, scratch: &mut Scratch) -> bool {
        let mut more = false;
        for at in (0..self.streams.len())
            .rev()
            .filter(|at| self.ready[*at])
            .collect::<Vec<_>>()
        {
            let pumped = (0..4).map(|_| self.streams[at].pump(scratch, &mut self.log, &mut self.attached));
            match pumped.into_iter().find(|pumped| *pumped != Pumped::More) {
                None => more = true,
                Some(Pumped::End) => {
                    attach::end(&mut self.attached, self.streams.remove(at).kind());
                    self.ready.remove(at);
                }
                Some(_) => self.ready[at] = false,
            }
        }
        more
    }

    /// What is due by the clock; true if it is over and may be forgotten.
    pub fn tick(&mut self, dir: &Path, scratch: &mut Scratch) -> bool {
        let now = sys::boot();
        for (stream, ready) in self.streams.iter().zip(&mut self.ready) {
            *ready |= stream.due().is_some_and(|due| due <= now);
        }
        if let Some(log) = self.log.as_mut().filter(|log| log.is_behind() && self.log_retry <= now) {
            log.retry();
            self.log_retry = now + LOG_RETRY;
        }
        if self.phase != Phase::Stopping {
            if self.kill_at.is_some_and(|at| at <= now) {
                // Again until the end is seen: on cgroup v1 a fork can slip through.
                self.kill_at = Some(now + 100_000_000);
                self.kill();
            }
            return false;
        }
        self.is_over(dir, now) && self.finish(dir, scratch)
    }

    fn is_over(&mut self, dir: &Path, now: u64) -> bool {
        if now < self.look_at {
            return false;
        }
        let is_empty = self.kill() && self.is_dead && !is_being_made(dir, self.id());
        if !is_empty && now < self.empty_until {
            self.look_at = now + self.look_pause;
            self.look_pause = (self.look_pause * 2).min(100_000_000);
            return false;
        }
        self.look_at = 0;
        self.streams.is_empty() || now >= self.drain_until
    }

    /// Removes all of it but the run record, whose end is written last.
    fn finish(&mut self, dir: &Path, scratch: &mut Scratch) -> bool {
        for mut stream in std::mem::take(&mut self.streams) {
            // Something outside of its cgroup holds the pipe: take what is there, the unfinished line too.
            for _ in 0..64 {
                stream.flush();
                if stream.pump(scratch, &mut self.log, &mut self.attached) != Pumped::More && stream.due().is_none() {
                    break;
                }
            }
        }
        let cgroups = self.cgroups();
        let oom = self.oom || (!self.task.pause && cgroup::oom_kills(&cgroups) > 0);
        if let Some(end) = self.end.as_mut().filter(|end| oom && end.reason == "Error") {
            end.oom = true;
            end.reason = "OOMKilled".into();
        }
        if !self.is_removed(dir) {
            return false;
        }
        if !cgroup::remove(&cgroups) && sys::boot() < self.empty_until && !self.task.pause {
            self.look_at = sys::boot() + self.look_pause;
            return false;
        }
        self.log = None;
        fault::point("shim.finish.before");
        self.remove_files(dir);
        fault::point("shim.finish.removed");
        let end = self.end.clone().unwrap_or_else(|| End::lost(sys::now()));
        match record::write_end(self.record(), end) {
            Ok(end) => {
                self.end = Some(end);
                fault::point("shim.finish.recorded");
                let _ = fs::remove_file(task_file(dir, self.id()));
                true
            }
            Err(error) => {
                // A full disk: the task file still has it. Tried again, for it is the receipt.
                crate::note!("{}: {error}", self.id());
                self.look_at = sys::boot() + LOG_RETRY;
                false
            }
        }
    }

    /// Has the OCI runtime's program that made it, if one did, removed its state? Else that is begun.
    fn is_removed(&mut self, dir: &Path) -> bool {
        match self.removal {
            Removal::Done => return true,
            Removal::Owed => {
                let Some(runtime) = Runtime::of(&self.task, dir).filter(Runtime::has_state) else {
                    self.removal = Removal::Done;
                    return true;
                };
                // It removes the cgroup, and with that the count of OOM kills.
                self.task.ended.clone_from(&self.end);
                if let Err(error) = save(dir, &self.task) {
                    crate::note!("{}: {error}", self.id());
                }
                fault::point("runtime.delete.before");
                self.removal = runtime.delete().unwrap_or_else(|error| {
                    crate::note!("{}: start its removal: {error}", self.id());
                    Removal::Done
                });
            }
            Removal::Runs(child, until) if until <= sys::boot() => {
                crate::note!("{}: its removal did not end in time and was killed", self.id());
                // SAFETY: no pointers. The pid is a child not reaped yet, so nobody else's.
                unsafe { libc::kill(child as libc::pid_t, libc::SIGKILL) };
                self.removal = Removal::Done;
            }
            Removal::Runs(..) => {}
        }
        if let Removal::Runs(_, until) = self.removal {
            self.look_at = until;
        }
        self.removal == Removal::Done
    }

    pub fn is_removed_by(&self, child: u32) -> bool {
        matches!(self.removal, Removal::Runs(pid, _) if pid == child)
    }

    /// The program that removes its state has ended.
    pub fn removed(&mut self, status: i32) {
        if status != 0 {
            crate::note!("{}: its removal ended with wait status {status:#x}", self.id());
        }
        self.removal = Removal::Done;
        self.look_at = 0;
    }

    pub fn remove_files(&self, dir: &Path) {
        init::forget(dir, self.id());
        let _ = fs::remove_file(mark_file(dir, self.id()));
        let _ = fs::remove_file(making_file(dir, self.id()));
        if let Some(run) = &self.task.run {
            let fifos = Path::new(&run.fifo_dir);
            for name in ["stdin", "stdout", "stderr"] {
                let _ = fs::remove_file(fifos.join(name));
            }
            let _ = fs::remove_dir(fifos);
        }
    }

    /// When something is due next, CLOCK_BOOTTIME ns.
    pub fn due(&self) -> Option<u64> {
        let tails = self.streams.iter().filter_map(Stream::due);
        let log = self.log.as_ref().filter(|log| log.is_behind()).map(|_| self.log_retry);
        let end = (self.phase == Phase::Stopping).then_some(if self.look_at == 0 {
            self.drain_until
        } else {
            self.look_at
        });
        let kill = self.kill_at.filter(|_| self.phase != Phase::Stopping);
        tails.chain(log).chain(end).chain(kill).min()
    }
}

/// Removes what no process has: its task file was never finished, or is gone.
pub fn remove_unowned(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)?.flatten() {
        let path = entry.path();
        let kind = path.extension().and_then(|kind| kind.to_str());
        let is_torn = kind == Some("new");
        let is_left = matches!(kind, Some("mark" | "making")) && !path.with_extension("task").exists();
        if is_torn || is_left {
            crate::note!("{}: nobody's; removed", path.display());
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// What a shim must know of a process, kept for a successor.
pub fn save(dir: &Path, task: &Task) -> io::Result<()> {
    let path = task_file(dir, &task.id);
    let new = path.with_extension("new");
    fault::check("shim.task.before")?;
    fs::write(&new, task.encode_to_vec())?;
    fault::check("shim.task.torn")?;
    fs::rename(new, path)
}

pub fn task_file(dir: &Path, id: &str) -> PathBuf {
    dir.join(format!("{id}.task"))
}

pub fn mark_file(dir: &Path, id: &str) -> PathBuf {
    dir.join(format!("{id}.mark"))
}

fn making_file(dir: &Path, id: &str) -> PathBuf {
    dir.join(format!("{id}.making"))
}

/// A locked file, for a maker to hold until it and all that it forks have ended or become a program (exit and execve
/// close it). Should the shim be killed, its successor so knows that a process half made may yet enter the cgroup.
///
/// Made by the shim, before the fork: a maker that outlives it by a moment must neither be overlooked nor make a file
/// that nobody removes any more.
pub fn lock_making(dir: &Path, id: &str) -> io::Result<fs::File> {
    let file = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(making_file(dir, id))?;
    file.lock()?;
    Ok(file)
}

fn is_being_made(dir: &Path, id: &str) -> bool {
    let file = fs::File::open(making_file(dir, id));
    file.is_ok_and(|file| matches!(file.try_lock_shared(), Err(fs::TryLockError::WouldBlock)))
}

/// The few fields of config.json that the shim itself needs; reading all of it would leave its heap grown.
#[derive(Deserialize)]
pub struct Needs {
    process: NeedsProcess,
    linux: NeedsLinux,
}

#[derive(Deserialize)]
struct NeedsProcess {
    #[serde(default)]
    user: NeedsUser,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct NeedsUser {
    uid: u32,
    gid: u32,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct NeedsLinux {
    cgroups_path: String,
    #[serde(default)]
    uid_mappings: Vec<NeedsMap>,
    #[serde(default)]
    gid_mappings: Vec<NeedsMap>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct NeedsMap {
    #[serde(rename = "containerID")]
    container_id: u32,
    #[serde(rename = "hostID")]
    host_id: u32,
    size: u32,
}

impl Needs {
    pub fn read(bundle: &Path) -> Result<Needs, String> {
        let path = bundle.join("config.json");
        let told = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let bytes = fs::read(&path).map_err(|error| told(&error))?;
        serde_json::from_slice(&bytes).map_err(|error| told(&error))
    }

    /// The container's cgroup directories, in every hierarchy.
    pub fn cgroups(&self) -> Result<Vec<String>, String> {
        let dirs = cgroup::dirs(&self.linux.cgroups_path).map_err(|error| format!("linux.cgroupsPath: {error}"))?;
        Ok(dirs.into_iter().map(|dir| dir.to_string_lossy().into_owned()).collect())
    }

    /// The host's uid and gid of the container's user.
    pub fn owner(&self) -> (u32, u32) {
        let maps = |maps: &[NeedsMap]| -> Vec<_> {
            maps.iter()
                .map(|map| (map.container_id, map.host_id, map.size))
                .collect()
        };
        let NeedsUser { uid, gid } = self.process.user;
        (
            sys::map_id(uid, &maps(&self.linux.uid_mappings)),
            sys::map_id(gid, &maps(&self.linux.gid_mappings)),
        )
    }
}

/// stdin, stdout and stderr for a container, and our ends of them.
pub struct Stdio {
    pub theirs: [OwnedFd; 3],
    pub ours: Vec<Stream>,
    pub stdin: Option<OwnedFd>,
}

/// Makes a container's stdio. With a terminal all three are /dev/null until it exists.
pub fn make_stdio(run: &RunRequest, owner: (u32, u32)) -> io::Result<Stdio> {
    let null = || {
        fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/null")
            .map(OwnedFd::from)
    };
    if run.terminal {
        return Ok(Stdio {
            theirs: [null()?, null()?, null()?],
            ours: Vec::new(),
            stdin: None,
        });
    }
    let dir = Path::new(&run.fifo_dir);
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let (out, their_out) = stdio::make_fifo(dir, Kind::Stdout, owner)?;
    let (err, their_err) = stdio::make_fifo(dir, Kind::Stderr, owner)?;
    let (their_in, stdin) = match (run.stdin, run.stdin_once) {
        (false, _) => (null()?, None),
        // Ends with its first client, so the shim alone holds the writing end.
        (true, true) => sys::pipe(0).map(|(read, write)| (read, Some(write)))?,
        // Never ends: the container holds a writing end itself, and outlives the shim unawares.
        (true, false) => (stdio::make_stdin(dir, owner)?, None),
    };
    let ours = vec![Stream::fifo(out, Kind::Stdout), Stream::fifo(err, Kind::Stderr)];
    Ok(Stdio {
        theirs: [their_in, their_out, their_err],
        ours,
        stdin,
    })
}
