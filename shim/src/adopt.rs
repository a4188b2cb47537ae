//! Taking over after a shim was killed: its processes live on, as children of init, their output in FIFOs.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use prost::Message;
use shim::api::{Phase, Started, Task};
use shim::fault;
use shim::record::{self, End, Start};

use crate::log::{Kind, Log};
use crate::process::{self, Proc};
use crate::runtime::Runtime;
use crate::service::{Of, Service};
use crate::stdio::{self, Stream};
use crate::{cgroup, sys};

/// What libcontainer calls a first process that has not become its program; execve gives it another name.
const UNBORN: &str = "youki:[2:INIT]";

impl Service {
    /// Takes over every process whose task file the last shim left.
    pub fn adopt(&mut self) -> io::Result<()> {
        process::remove_unowned(&self.dir)?;
        for entry in fs::read_dir(&self.dir)?.flatten() {
            let path = entry.path();
            if path.extension().is_none_or(|extension| extension != "task") {
                continue;
            }
            match fs::read(&path).map(|bytes| Task::decode(&*bytes)) {
                Ok(Ok(task)) => self.adopt_one(task),
                Ok(Err(error)) => crate::note!("{}: {error}; ignored", path.display()),
                Err(error) => crate::note!("{}: {error}; ignored", path.display()),
            }
        }
        Ok(())
    }

    fn adopt_one(&mut self, task: Task) {
        let key = self.key();
        let dir = self.dir.clone();
        let mut proc = Proc::new(key, task);
        crate::note!("taking over {}", proc.id());
        fault::point("shim.adopt.before");
        kill_execs(&proc);
        let record = record::read(proc.record()).unwrap_or_else(|error| {
            crate::note!("{error}");
            None
        });
        let record = record.unwrap_or_default();
        let known = record.end.or_else(|| proc.task.ended.clone());
        match (known, record.start) {
            (Some(end), _) => {
                self.reopen(&mut proc);
                proc.ended(&dir, end);
            }
            (None, None) => proc.failed(&dir, "its shim died before the program began"),
            (None, Some(start)) => match living(&start) {
                Some(pidfd) => self.take(&mut proc, start, pidfd, record.stop.map(|stop| stop.deadline)),
                None => {
                    self.reopen(&mut proc);
                    proc.ended(&dir, End::lost(sys::now()));
                }
            },
        }
        fault::point("shim.adopt.after");
        self.procs.push(proc);
    }

    fn take(&mut self, proc: &mut Proc, start: Start, pidfd: OwnedFd, kill_at: Option<u64>) {
        proc.pid = start.pid;
        proc.started = Started {
            pid: start.pid,
            start_ticks: start.start_ticks,
            started_at: start.started_at,
        };
        proc.kill_at = kill_at;
        // Edge-triggered: a zombie first, later (hung up) reaped.
        if let Err(error) = self.watch(pidfd.as_raw_fd(), Of::Pidfd, proc.key, libc::EPOLLIN | libc::EPOLLET) {
            crate::note!("watch {}: {error}", proc.id());
        }
        proc.pidfd = Some(pidfd);
        let name = fs::read_to_string(format!("/proc/{}/comm", start.pid)).unwrap_or_default();
        let unborn = |runtime: Runtime| runtime.is_unborn();
        if name.trim_end() == UNBORN || Runtime::of(&proc.task, &self.dir).is_some_and(unborn) {
            return proc.failed(&self.dir.clone(), "its shim died before the program began");
        }
        proc.phase = Phase::Running;
        self.reopen(proc);
    }

    /// Opens its log and FIFOs; takes out of the FIFOs what the log has already.
    fn reopen(&mut self, proc: &mut Proc) {
        let Some(run) = proc.task.run.clone().filter(|run| !run.terminal) else {
            return;
        };
        let mut log = (!run.log_path.is_empty()).then(|| {
            Log::open(Path::new(&run.log_path), &process::mark_file(&self.dir, &run.id)).limited(run.max_line)
        });
        let mut logged = log.as_mut().and_then(Log::unconsumed);
        for kind in [Kind::Stdout, Kind::Stderr] {
            match stdio::open_fifo(&Path::new(&run.fifo_dir).join(kind.name())) {
                Ok(fd) => {
                    let mut stream = Stream::fifo(fd, kind);
                    if let Some((_, output)) = logged.take_if(|(of, _)| *of == kind) {
                        stream.skip(&mut self.scratch, &output);
                    }
                    self.watch_output(stream.fd(), proc.key);
                    proc.add(stream);
                }
                Err(error) => crate::note!("{} {}: {error}", proc.id(), kind.name()),
            }
        }
        fault::point("shim.adopt.reopened");
        if let Some(log) = &log {
            log.consumed();
        }
        proc.log = log;
    }
}

/// The end of a process that was taken over: with a terminal, the shim's own death is the cause (SIGHUP).
pub fn told(proc: &Proc, end: End) -> End {
    const WHY: &str = "its terminal ended with its shim";
    let terminal = proc.task.run.as_ref().is_some_and(|run| run.terminal);
    if !terminal || proc.kill_at.is_some() {
        return end;
    }
    let message = match end.message.as_str() {
        "" => WHY.to_owned(),
        message => format!("{message}; {WHY}"),
    };
    End { message, ..end }
}

/// Execs died with the connections of the last shim.
fn kill_execs(proc: &Proc) {
    let cgroups = proc.cgroups();
    let Some(dir) = cgroup::main_dir(&cgroups).filter(|_| !proc.task.pause) else {
        return;
    };
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("exec-") {
            cgroup::kill(&entry.path());
            cgroup::remove(&[entry.path()]);
        }
    }
}

/// A descriptor of the very process that the record names, if it is still there (or a zombie).
fn living(start: &Start) -> Option<OwnedFd> {
    if start.boot_id != sys::boot_id() {
        return None;
    }
    let pidfd = sys::pidfd(start.pid).ok()?;
    // Looked at after the descriptor is held: the number cannot change its owner in between.
    (sys::start_ticks(start.pid) == Some(start.start_ticks)).then_some(pidfd)
}

/// The wait status of a process that is not our child, if it has ended and anybody knows.
pub fn exit_status(pid: u32, start_ticks: u64, pidfd: &OwnedFd) -> Option<i32> {
    // While it is a zombie, its parent (init) having not looked yet, the status is in field 52.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    if let Some((_, rest)) = stat.rsplit_once(") ") {
        let field = |n: usize| rest.split_ascii_whitespace().nth(n - 3);
        let is_it = field(22).and_then(|ticks| ticks.parse().ok()) == Some(start_ticks);
        if is_it && matches!(field(3), Some("Z" | "X")) {
            return field(52)?.parse().ok();
        }
    }
    sys::pidfd_exit(pidfd.as_fd())
}
