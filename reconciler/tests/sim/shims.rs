//! Shims: what one does for a daemon, and what it takes over from a dead one.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use reconciler::error::{Class, Error, Result};
use reconciler::world::linux::shims::fault;
use reconciler::world::{Shim, Shims};
use shim::api::{
    ExecOutput, ExecRequest, PauseRequest, PidNamespace, Process, RunRequest, Started, StateResponse, StopRequest,
};
use shim::record::{End, RunRecord, Start, Stop};
use shim::{Code, PAUSE};
use tokio::sync::mpsc;

use super::node::{Event, Node, Proc, Program, STATE, Sim, Task, Who};
use super::parts::Part;

/// A connection of one daemon to one life of a shim.
struct Connection {
    part: Part,
    sandbox: String,
    life: u64,
}

fn refused(method: &'static str, code: Code, message: impl Into<String>) -> shim::Error {
    shim::Error::Refused {
        method,
        code,
        message: message.into(),
    }
}

#[async_trait]
impl Shims for Part {
    async fn find(&self, sandbox: &str) -> Option<Arc<dyn Shim>> {
        self.look().ok()?;
        let life = self.sim.lock().shims.get(sandbox).filter(|shim| shim.alive)?.life;
        Some(Arc::new(Connection {
            part: self.clone(),
            sandbox: sandbox.to_owned(),
            life,
        }))
    }

    async fn ensure(&self, _: &str, _: &str, sandbox: &str) -> Result<Arc<dyn Shim>> {
        self.pause().await;
        if let Some(shim) = self.find(sandbox).await {
            return Ok(shim);
        }
        let dir = dir(sandbox);
        self.step("shims: directory made", |node| node.fs.make_dir(&dir))?;
        let life = self.step("shims: started", |node| {
            let shim = node.shims.entry(sandbox.to_owned()).or_default();
            shim.life += 1;
            shim.alive = true;
            let life = shim.life;
            node.fs.write(&dir.join("sock"), b"");
            life
        })?;
        adopt(&self.sim, sandbox, life);
        self.find(sandbox).await.ok_or_else(|| Error::Shim {
            op: "connect to shim",
            id: sandbox.to_owned(),
            problem: "it does not listen".to_owned(),
            class: Class::Transient,
        })
    }

    async fn remove(&self, sandbox: &str) -> Result<()> {
        let Some(shim) = self.sim.lock().shims.get(sandbox).filter(|shim| shim.alive).cloned() else {
            return self.look();
        };
        if let Some(id) = shim.tasks.keys().next() {
            let message = format!("{id} lives");
            return Err(fault("end shim", sandbox)(refused(
                "Shutdown",
                Code::FailedPrecondition,
                message,
            )));
        }
        self.step("shims: shut down", |node| {
            node.shims.remove(sandbox);
        })
    }

    fn deaths(&self) -> Option<mpsc::UnboundedReceiver<String>> {
        self.deaths.lock().expect("never poisoned").take()
    }

    fn cgroup(&self) -> &str {
        "/reconcile-shims"
    }

    fn start_ticks(&self, pid: i32) -> Option<u64> {
        Some(self.sim.lock().procs.get(&pid)?.ticks)
    }

    async fn streams(&self, _: &str) -> Option<shim::Client> {
        None
    }
}

fn dir(sandbox: &str) -> PathBuf {
    Path::new(STATE).join("pods").join(sandbox).join("shim")
}

/// A new shim takes over what the last one left.
fn adopt(sim: &Sim, sandbox: &str, life: u64) {
    let who = Who::Shim(sandbox.to_owned(), life);
    let tasks = sim
        .lock()
        .shims
        .get(sandbox)
        .map(|shim| shim.tasks.clone())
        .unwrap_or_default();
    for (id, task) in tasks {
        let mut node = sim.lock();
        if node.check(&who).is_err() {
            return;
        }
        let record = node.run_record(&task.record).unwrap_or_default();
        let now = node.wall_now();
        if record.end.is_none()
            && node
                .step(&who, "shim: log opened", |node| node.open_log(sandbox, &id))
                .is_err()
        {
            return;
        }
        match (record.end, record.start) {
            (Some(end), _) => node.ended(sandbox, life, &id, &task, end),
            (None, None) => {
                let end = End::start_error("its shim died before the program began", now);
                node.ended(sandbox, life, &id, &task, end);
            }
            (None, Some(start)) => {
                let alive = node
                    .procs
                    .get(&(start.pid as i32))
                    .is_some_and(|p| p.ticks == start.start_ticks);
                if !alive || start.boot_id != node.boot_id() {
                    node.ended(sandbox, life, &id, &task, End::lost(now));
                } else if node.procs.get(&task.pid).is_some_and(|proc| !proc.begun()) {
                    let end = End::start_error("its shim died before the program began", now);
                    node.ended(sandbox, life, &id, &task, end);
                } else if let Some(stop) = record.stop {
                    let _ = node.step(&who, "shim: deadline taken over", |node| {
                        node.deadline(sandbox, &id, stop.deadline);
                    });
                }
            }
        }
    }
    sim.changed.notify_waiters();
    sim.planned.notify_one();
}

impl Proc {
    /// Its program runs; before, it is the shim's own code.
    fn begun(&self) -> bool {
        self.rootfs.is_some() || self.id == self.sandbox
    }
}

impl Node {
    /// The log of that name, whatever was open before.
    fn open_log(&mut self, sandbox: &str, id: &str) {
        let task = self.shims.get_mut(sandbox).and_then(|shim| shim.tasks.get_mut(id));
        if let Some(task) = task
            && let Some(log) = &task.log
        {
            task.log_file = self.fs.open(log);
        }
    }

    fn deadline(&mut self, sandbox: &str, id: &str, at: u64) {
        if let Some(task) = self.shims.get_mut(sandbox).and_then(|shim| shim.tasks.get_mut(id)) {
            task.kill_at = Some(at);
            let id = id.to_owned();
            let sandbox = sandbox.to_owned();
            self.plan(at, Event::Kill { sandbox, id });
        }
    }
}

/// What is to be started.
struct Job {
    id: String,
    record: PathBuf,
    cgroup: String,
    program: Program,
    rootfs: Option<PathBuf>,
    in_pod: bool,
    log: Option<PathBuf>,
}

/// A process of an exec; it goes with its connection.
struct Exec<'a> {
    node: &'a Connection,
    pid: i32,
}

impl Drop for Exec<'_> {
    fn drop(&mut self) {
        let mut node = self.node.part.sim.lock();
        if node
            .procs
            .get(&self.pid)
            .is_some_and(|proc| proc.exec && proc.sandbox == self.node.sandbox)
        {
            node.procs.remove(&self.pid);
        }
    }
}

impl Connection {
    fn who(&self) -> Who {
        Who::Shim(self.sandbox.clone(), self.life)
    }

    /// The request goes out and is heard, if both ends live.
    async fn call(&self, method: &'static str) -> shim::Result<()> {
        self.part.pause().await;
        let node = self.part.sim.lock();
        let both = node.check(&self.part.who).and_then(|()| node.check(&self.who()));
        both.map_err(|_| shim::Error::Disconnected { method })
    }

    fn step<T>(
        &self,
        method: &'static str,
        name: &'static str,
        change: impl FnOnce(&mut Node) -> T,
    ) -> shim::Result<T> {
        self.part.sim.step(&self.who(), name, change).map_err(|why| match why {
            super::node::Stopped::Dead => shim::Error::Disconnected { method },
            super::node::Stopped::Failed(errno) => refused(method, Code::Internal, format!("errno {errno}")),
        })
    }

    fn start(&self, method: &'static str, job: Job) -> shim::Result<Started> {
        let (sandbox, id) = (self.sandbox.clone(), job.id.clone());
        let broken = |node: &mut Node, why: &str| {
            let now = node.wall_now();
            node.write_end(&job.record, End::start_error(why, now));
            let _ = node.runs.send(job.record.parent().unwrap_or(Path::new("/")).to_owned());
        };
        let task = Task {
            record: job.record.clone(),
            cgroup: job.cgroup.clone(),
            pid: 0,
            kill_at: None,
            log: job.log.clone(),
            log_file: None,
        };
        self.step(method, "shim: task noted", |node| {
            if let Some(shim) = node.shims.get_mut(&sandbox) {
                shim.tasks.insert(id.clone(), task.clone());
            }
            node.open_log(&sandbox, &id);
        })?;
        let begun = || {
            self.step(method, "shim: cgroup made", |node| {
                (0..super::node::HIERARCHIES).for_each(|h| node.make_cgroup(h, &job.cgroup));
            })?;
            let (pid, ticks) = self.step(method, "shim: process forked", |node| self.fork(node, &job))?;
            let started_at = self.part.sim.lock().wall_now();
            let boot_id = self.part.sim.lock().boot_id();
            let start = Start {
                pid: pid as u32,
                start_ticks: ticks,
                boot_id,
                started_at,
            };
            let record = RunRecord {
                start: Some(start),
                ..RunRecord::default()
            };
            let written = self.step(method, "shim: start written", |node| {
                node.write_record(&job.record, &record)
            })?;
            if !written {
                return Err(refused(method, Code::StartFailed, "the run record cannot be written"));
            }
            self.step(method, "shim: program begins", |node| self.begin(node, &job, pid))?;
            Ok(Started {
                pid: pid as u32,
                start_ticks: ticks,
                started_at,
            })
        };
        begun().inspect_err(|why| {
            if let shim::Error::Refused { message, .. } = why {
                let _ = self.step(method, "shim: failed start cleared", |node| {
                    node.kill_cgroup(&job.cgroup);
                    broken(node, message);
                    if let Some(shim) = node.shims.get_mut(&sandbox) {
                        shim.tasks.remove(&id);
                    }
                });
            }
        })
    }

    fn fork(&self, node: &mut Node, job: &Job) -> (i32, u64) {
        let ticks = node.now() / 10_000_000;
        let pod = job.id == PAUSE;
        let id = if pod { self.sandbox.clone() } else { job.id.clone() };
        if node.procs.values().any(|proc| proc.id == id) {
            node.problems.push(format!("6: {id} has a process tree already"));
        }
        let pid = node.fork(Proc {
            id,
            sandbox: self.sandbox.clone(),
            ticks,
            cgroup: job.cgroup.clone(),
            program: job.program,
            life: self.life,
            in_pod: job.in_pod,
            rootfs: None,
            first: true,
            exec: false,
        });
        if let Some(task) = node
            .shims
            .get_mut(&self.sandbox)
            .and_then(|shim| shim.tasks.get_mut(&job.id))
        {
            task.pid = pid;
        }
        (pid, ticks)
    }

    fn begin(&self, node: &mut Node, job: &Job, pid: i32) {
        let Some(proc) = node.procs.get_mut(&pid) else { return };
        proc.rootfs.clone_from(&job.rootfs);
        let (proc, now) = (proc.clone(), node.now());
        if job.id != PAUSE {
            let count = node.starts.entry(job.id.clone()).or_default();
            *count += 1;
            if *count > 1 {
                let why = format!("6: container {} started {count} times", job.id);
                node.problems.push(why);
            }
            if !job.rootfs.as_ref().is_some_and(|root| node.mounts.contains(root)) {
                node.problems
                    .push(format!("8: container {} began without its root file system", job.id));
            }
        }
        if let Program::Exit(code, ms) | Program::Fork(code, ms) = job.program {
            let exit = Event::Exit {
                pid,
                ticks: proc.ticks,
                code,
                signal: 0,
            };
            node.plan(now + ms * super::node::MS, exit);
        }
        if let Program::Fork(..) = job.program {
            node.fork(Proc { first: false, ..proc });
        }
    }
}

#[async_trait]
impl Shim for Connection {
    async fn state(&self) -> shim::Result<StateResponse> {
        self.call("State").await?;
        let node = self.part.sim.lock();
        let tasks = node
            .shims
            .get(&self.sandbox)
            .map(|shim| shim.tasks.clone())
            .unwrap_or_default();
        let process = |(id, task): (String, Task)| Process {
            id,
            pid: task.pid as u32,
            log_dev: 1,
            log_ino: task.log_file.unwrap_or(0),
            ..Process::default()
        };
        Ok(StateResponse {
            uid: self.sandbox.clone(),
            processes: tasks.into_iter().map(process).collect(),
            ..StateResponse::default()
        })
    }

    async fn pause(&self, request: PauseRequest) -> shim::Result<Started> {
        self.call("Pause").await?;
        let record = PathBuf::from(&request.record);
        self.is_new("Pause", PAUSE, &record, false)?;
        self.start(
            "Pause",
            Job {
                id: PAUSE.to_owned(),
                record,
                cgroup: request.cgroup,
                program: Program::Run,
                rootfs: None,
                in_pod: false,
                log: None,
            },
        )
    }

    async fn run(&self, request: RunRequest) -> shim::Result<Started> {
        self.call("Run").await?;
        let record = PathBuf::from(&request.record);
        self.is_new("Run", &request.id, &record, true)?;
        let (program, late) = {
            let node = self.part.sim.lock();
            let late = request.start_by != 0 && request.start_by < node.now();
            (node.program(Path::new(&request.bundle)), late)
        };
        let program = if late {
            Err("not started before the caller's deadline".to_owned())
        } else {
            program
        };
        let (program, cgroup, rootfs) = match program {
            Ok(program) => program,
            Err(why) => {
                self.step("Run", "shim: start refused", |node| {
                    let now = node.wall_now();
                    node.write_end(&record, End::start_error(why.clone(), now));
                })?;
                return Err(refused("Run", Code::StartFailed, why));
            }
        };
        let in_pod = request.pid() == PidNamespace::Pod;
        let id = request.id;
        self.start(
            "Run",
            Job {
                id,
                record,
                cgroup,
                program,
                rootfs: Some(rootfs),
                in_pod,
                log: (!request.log_path.is_empty()).then(|| request.log_path.into()),
            },
        )
    }

    async fn stop(&self, request: StopRequest) -> shim::Result<()> {
        self.call("Stop").await?;
        let (task, now) = {
            let node = self.part.sim.lock();
            let task = node
                .shims
                .get(&self.sandbox)
                .and_then(|shim| shim.tasks.get(&request.id))
                .cloned();
            (task, node.now())
        };
        let task = task.ok_or_else(|| refused("Stop", Code::NotFound, "no such process"))?;
        let wanted = now + u64::try_from(request.grace_ns).unwrap_or(0);
        let (first, deadline) = self.step("Stop", "shim: stop written", |node| {
            let mut record = node.run_record(&task.record).unwrap_or_default();
            let first = record.stop.is_none();
            let deadline = record.stop.as_ref().map_or(wanted, |old| old.deadline.min(wanted));
            record.stop = Some(Stop {
                signal: record.stop.map_or(request.signal, |old| old.signal),
                deadline,
            });
            node.write_record(&task.record, &record);
            (first, deadline)
        })?;
        if first {
            self.step("Stop", "shim: signal sent", |node| {
                node.signal(task.pid, request.signal)
            })?;
        }
        self.step("Stop", "shim: deadline set", |node| {
            node.deadline(&self.sandbox, &request.id, deadline)
        })
    }

    async fn delete(&self, id: &str) -> shim::Result<()> {
        self.call("Delete").await?;
        let task = {
            let node = self.part.sim.lock();
            node.shims
                .get(&self.sandbox)
                .and_then(|shim| shim.tasks.get(id))
                .cloned()
        };
        let Some(task) = task else { return Ok(()) };
        self.step("Delete", "shim: killed", |node| {
            node.kill_cgroup(&task.cgroup);
            node.end(task.pid, 137, 9);
        })?;
        let left = self
            .part
            .sim
            .lock()
            .shims
            .get(&self.sandbox)
            .is_some_and(|shim| shim.tasks.contains_key(id));
        if left {
            return Err(shim::Error::Disconnected { method: "Delete" });
        }
        Ok(())
    }

    async fn reopen_log(&self, id: &str, _: &str) -> shim::Result<()> {
        self.call("ReopenLog").await?;
        self.step("ReopenLog", "shim: log opened anew", |node| {
            let known = node
                .shims
                .get(&self.sandbox)
                .is_some_and(|shim| shim.tasks.contains_key(id));
            node.open_log(&self.sandbox, id);
            known
        })?
        .then_some(())
        .ok_or_else(|| refused("ReopenLog", Code::NotFound, "no such process"))
    }

    async fn exec(&self, request: ExecRequest) -> shim::Result<ExecOutput> {
        self.call("Exec").await?;
        let refuse = || refused("Exec", Code::FailedPrecondition, "it does not run");
        let work: u64 = request.args.get(1).and_then(|ms| ms.parse().ok()).unwrap_or(0);
        let limit = u64::try_from(request.timeout_ns).unwrap_or(0);
        let (work, limit) = (Duration::from_millis(work), Duration::from_nanos(limit));
        let pid = self.step("Exec", "shim: exec begins", |node| {
            let first = node.procs.values().find(|proc| proc.id == request.id && proc.begun());
            let joined = Proc {
                first: false,
                exec: true,
                ..first?.clone()
            };
            Some(node.fork(joined))
        })?;
        let pid = pid.ok_or_else(refuse)?;
        // Dropped with its caller, it ends the process.
        let process = Exec { node: self, pid };
        tokio::time::sleep(work.min(limit)).await;
        if self.part.sim.lock().check(&self.who()).is_err() {
            return Err(shim::Error::Disconnected { method: "Exec" });
        }
        let timed_out = work > limit;
        let alive = self.part.sim.lock().procs.get(&pid).is_some_and(|proc| proc.exec);
        drop(process);
        Ok(ExecOutput {
            exit_code: if alive && !timed_out { 0 } else { 137 },
            timed_out,
            ..ExecOutput::default()
        })
    }

    async fn closed(&self) {
        loop {
            let changed = self.part.sim.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.part.sim.lock().check(&self.who()).is_err() {
                return;
            }
            changed.await;
        }
    }
}

impl Connection {
    fn is_new(&self, method: &'static str, id: &str, record: &Path, once: bool) -> shim::Result<()> {
        let node = self.part.sim.lock();
        let known = node
            .shims
            .get(&self.sandbox)
            .is_some_and(|shim| shim.tasks.contains_key(id));
        let run = node.run_record(record).unwrap_or_default();
        let begun = run.end.is_some() || (once && run.start.is_some());
        if node.mutation == Some("starts twice") {
            return Ok(());
        }
        if known || begun {
            return Err(refused(
                method,
                Code::FailedPrecondition,
                format!("{id} was started before"),
            ));
        }
        Ok(())
    }
}
