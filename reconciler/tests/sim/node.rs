//! The node: what a kernel, its disks and its neighbours would hold, and the one knife.
//!
//! Every change of it is a numbered *step* of somebody (a daemon's incarnation, a shim's life, the kernel). A cut names
//! one step, whether it falls before or after it, and what dies there. A dead somebody changes nothing any more.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use reconciler::image::manifest::Loaded;
use serde_json::{Value, json};
use shim::record::{End, RunRecord, Start, Stop};
use tokio::sync::{Notify, broadcast, mpsc};
use tokio::time::Instant;

use super::fs::{Fs, Loss};

pub const ROOT: &str = "/sim/root";
pub const STATE: &str = "/sim/run";
pub const LOGS: &str = "/sim/logs";
pub const ROOT_ID: &str = "51510000515100005151000051510000";
/// Hierarchies of cgroups.
pub const HIERARCHIES: usize = 2;
/// ns
pub const MS: u64 = 1_000_000;
pub const SECOND: u64 = 1_000 * MS;

/// Steps that a full disk does not take. Commits have a reserve, run records are small and of one block.
const TAKES_ROOM: [&str; 6] = [
    "files: temporary written",
    "files: directory made",
    "images: blob fetched",
    "images: layer unpacked",
    "mounts: upper and work made",
    "network: attachment's temporary written",
];

/// Who makes a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Who {
    Daemon(u64),
    /// Sandbox and life of its shim.
    Shim(String, u64),
    Kernel,
}

/// What dies at a cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blow {
    Daemon,
    /// Every shim; the daemon lives.
    Shims,
    /// Daemon and shims at once; containers live on.
    Both,
    Power(Loss),
    /// The daemon, and the database is gone afterwards.
    Store,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Number of the step, from 1.
    pub step: u64,
    pub after: bool,
    pub blow: Blow,
}

/// What a program does; told by its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// Until it is told to end.
    Run,
    /// Code, and after how many ms.
    Exit(i32, u64),
    /// Ignores every signal that can be ignored.
    Stubborn,
    /// Leaves a child behind.
    Fork(i32, u64),
}

impl Program {
    fn parse(args: &[String]) -> Program {
        let number = |i: usize| args.get(i).and_then(|n| n.parse().ok()).unwrap_or(0);
        match args.first().map(String::as_str) {
            Some("exit") => Program::Exit(number(1) as i32, number(2)),
            Some("stubborn") => Program::Stubborn,
            Some("fork") => Program::Fork(number(1) as i32, number(2)),
            _ => Program::Run,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Proc {
    /// Container or sandbox.
    pub id: String,
    pub sandbox: String,
    pub ticks: u64,
    pub cgroup: String,
    pub program: Program,
    /// Its parent is the shim of this life; another shim does not get its exit status.
    pub life: u64,
    /// It stands in the pid namespace of its pod's pause.
    pub in_pod: bool,
    pub rootfs: Option<PathBuf>,
    /// The first process of its container.
    pub first: bool,
    /// It was asked for by exec.
    pub exec: bool,
}

/// What a shim keeps of a process; on a tmpfs, so that the next shim finds it.
#[derive(Clone, Debug)]
pub struct Task {
    pub record: PathBuf,
    pub cgroup: String,
    pub pid: i32,
    pub kill_at: Option<u64>,
    /// Where its output goes, and the file that is open for it.
    pub log: Option<PathBuf>,
    pub log_file: Option<u64>,
}

#[derive(Clone, Debug, Default)]
pub struct Shim {
    /// Rises with each shim of the sandbox; `alive` says whether this one is.
    pub life: u64,
    pub alive: bool,
    pub tasks: BTreeMap<String, Task>,
}

#[derive(Clone, Debug)]
pub enum Event {
    /// A process ends with this code (or by this signal).
    Exit {
        pid: i32,
        ticks: u64,
        code: i32,
        signal: i32,
    },
    /// The grace of a process is over.
    Kill { sandbox: String, id: String },
    /// The disk has room again.
    Room,
}

/// Deterministic chance.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 11) % n.max(1)
    }

    /// True `n` times of a thousand.
    pub fn chance(&mut self, n: u64) -> bool {
        self.below(1000) < n
    }
}

/// How unreliable the node is, a thousandth each step or call.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unrest {
    /// A step fails with EIO or ENOSPC.
    pub fail: u64,
    /// A step kills someone.
    pub crash: u64,
    /// Most ms that an asynchronous verb takes.
    pub delay: u64,
    /// CNI fails.
    pub cni: u64,
    /// CNI hangs until its bound.
    pub hang: u64,
    /// The disk is full for a while.
    pub full: u64,
}

pub struct Node {
    pub fs: Fs,
    /// The database's durable content; `None` if it is gone.
    pub records: Option<BTreeMap<String, Vec<u8>>>,
    pub born: bool,
    /// The disk takes nothing new.
    pub full: bool,
    /// The database was lost once.
    pub lost_records: bool,
    pub boot: u64,
    /// ns since the boot, at `origin`.
    base: u64,
    origin: Option<Instant>,
    /// ns from boot time to the wall clock.
    pub wall: i64,
    pub procs: BTreeMap<i32, Proc>,
    last_pid: i32,
    pub mounts: BTreeSet<PathBuf>,
    pub pins: BTreeMap<PathBuf, u64>,
    last_ns: u64,
    pub cgroups: BTreeSet<(usize, String)>,
    pub limits: BTreeMap<(String, String), String>,
    /// Addresses given by CNI, by sandbox; they outlive a boot.
    pub leases: BTreeMap<String, u8>,
    /// Links, by sandbox.
    pub links: BTreeSet<String>,
    pub shims: BTreeMap<String, Shim>,
    pub registry: BTreeMap<String, Loaded>,
    pub blobs: BTreeSet<String>,
    pub layers: BTreeSet<String>,
    pub events: BTreeMap<(u64, u64), Event>,
    last_event: u64,
    pub rng: Rng,
    pub unrest: Unrest,
    /// The living daemon; 0 is none.
    pub daemon: u64,
    pub last_daemon: u64,
    /// Blows so far.
    pub blows: u64,
    pub steps: u64,
    pub cut: Option<Cut>,
    pub trace: Vec<String>,
    /// Broken rules.
    pub problems: Vec<String>,
    pub starts: BTreeMap<String, u32>,
    /// Breaks a rule on purpose; for tests of the checks.
    pub mutation: Option<&'static str>,
    pub runs: broadcast::Sender<PathBuf>,
    pub deaths: Option<mpsc::UnboundedSender<String>>,
}

/// The node and what wakes those who wait for it.
pub struct Sim {
    node: Mutex<Node>,
    /// Something happened to shims or processes.
    pub changed: Notify,
    /// An event was planned.
    pub planned: Notify,
    /// The daemon was killed.
    pub crashed: Notify,
}

/// Why a step was not made.
#[derive(Debug)]
pub enum Stopped {
    Dead,
    Failed(i32),
}

impl From<Stopped> for std::io::Error {
    fn from(why: Stopped) -> std::io::Error {
        match why {
            Stopped::Dead => std::io::Error::other("simulated: whoever asked is dead"),
            Stopped::Failed(errno) => std::io::Error::from_raw_os_error(errno),
        }
    }
}

impl Sim {
    pub fn new(seed: u64) -> Arc<Sim> {
        let node = Node {
            fs: Fs::new(Path::new(STATE)),
            records: None,
            born: false,
            full: false,
            lost_records: false,
            boot: 1,
            base: 1000 * SECOND,
            origin: None,
            wall: 1_700_000_000 * SECOND as i64,
            procs: BTreeMap::new(),
            last_pid: 100,
            mounts: BTreeSet::new(),
            pins: BTreeMap::new(),
            last_ns: 0,
            cgroups: BTreeSet::new(),
            limits: BTreeMap::new(),
            leases: BTreeMap::new(),
            links: BTreeSet::new(),
            shims: BTreeMap::new(),
            registry: super::images::registry(),
            blobs: BTreeSet::new(),
            layers: BTreeSet::new(),
            events: BTreeMap::new(),
            last_event: 0,
            rng: Rng::new(seed),
            unrest: Unrest::default(),
            daemon: 0,
            last_daemon: 0,
            blows: 0,
            steps: 0,
            cut: None,
            trace: Vec::new(),
            problems: Vec::new(),
            starts: BTreeMap::new(),
            mutation: None,
            runs: broadcast::channel(1024).0,
            deaths: None,
        };
        Arc::new(Sim {
            node: Mutex::new(node),
            changed: Notify::new(),
            planned: Notify::new(),
            crashed: Notify::new(),
        })
    }

    pub fn lock(&self) -> MutexGuard<'_, Node> {
        self.node.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One change by `who`, if they live and nothing strikes.
    pub fn step<T>(&self, who: &Who, name: &str, change: impl FnOnce(&mut Node) -> T) -> Result<T, Stopped> {
        let mut node = self.lock();
        let done = node.step(who, name, change);
        let dead = node.daemon == 0;
        drop(node);
        self.changed.notify_waiters();
        self.planned.notify_one();
        if dead {
            self.crashed.notify_one();
        }
        done
    }

    /// Plays what the kernel does by itself, as tokio's time goes.
    pub async fn kernel(self: Arc<Sim>) {
        loop {
            let next = {
                let mut node = self.lock();
                let now = node.now();
                node.happen(now);
                let next = node.events.keys().next().map(|(at, _)| at - now);
                if node.daemon == 0 {
                    self.crashed.notify_one();
                }
                next
            };
            self.changed.notify_waiters();
            let planned = self.planned.notified();
            match next {
                Some(ns) => {
                    tokio::select! {
                        biased;
                        () = planned => {}
                        () = tokio::time::sleep(std::time::Duration::from_nanos(ns)) => {}
                    }
                }
                None => planned.await,
            }
        }
    }
}

impl Node {
    pub fn now(&self) -> u64 {
        self.base + self.origin.map_or(0, |origin| origin.elapsed().as_nanos() as u64)
    }

    /// Time runs with tokio's from here on, or (`false`) stands.
    pub fn run(&mut self, runs: bool) {
        self.base = self.now();
        self.origin = runs.then(Instant::now);
    }

    /// Time goes by while no daemon is there.
    pub fn idle(&mut self, ns: u64) {
        let end = self.base + ns;
        while let Some((at, _)) = self.events.keys().next().copied().filter(|(at, _)| *at <= end) {
            self.base = at;
            self.happen(at);
        }
        self.base = end;
    }

    pub fn boot_id(&self) -> String {
        format!("boot-{}", self.boot)
    }

    fn lives(&self, who: &Who) -> bool {
        match who {
            Who::Daemon(n) => self.daemon == *n,
            Who::Shim(sandbox, life) => self.shims.get(sandbox).is_some_and(|s| s.alive && s.life == *life),
            Who::Kernel => true,
        }
    }

    pub fn check(&self, who: &Who) -> Result<(), Stopped> {
        if self.lives(who) { Ok(()) } else { Err(Stopped::Dead) }
    }

    pub fn step<T>(&mut self, who: &Who, name: &str, change: impl FnOnce(&mut Node) -> T) -> Result<T, Stopped> {
        self.check(who)?;
        self.steps += 1;
        let number = self.steps;
        self.trace.push(format!(
            "{number} {:.1}s {who:?} {name}",
            self.now() as f64 / SECOND as f64
        ));
        let mut strike = self.cut.filter(|cut| cut.step == number);
        if strike.is_none() && self.rng.chance(self.unrest.crash) {
            strike = Some(self.chosen_cut(number));
        }
        if let Some(cut) = strike.filter(|cut| !cut.after) {
            self.strike(cut.blow);
            self.check(who)?;
        }
        // What a shim does about a failing write is not modelled.
        if matches!(who, Who::Daemon(_)) && self.rng.chance(self.unrest.fail) {
            let errno = if self.rng.chance(500) { libc::EIO } else { libc::ENOSPC };
            self.trace.push(format!("    fails: {errno}"));
            return Err(Stopped::Failed(errno));
        }
        if matches!(who, Who::Daemon(_)) && self.rng.chance(self.unrest.full) && !self.full {
            self.full = true;
            let end = self.now() + (1 + self.rng.below(40)) * SECOND;
            self.plan(end, Event::Room);
            self.trace.push("---- disk full".to_owned());
        }
        if self.full && TAKES_ROOM.contains(&name) {
            self.trace.push(format!("    fails: {}", libc::ENOSPC));
            return Err(Stopped::Failed(libc::ENOSPC));
        }
        let done = change(self);
        if let Some(cut) = strike.filter(|cut| cut.after) {
            self.strike(cut.blow);
            self.check(who)?;
        }
        Ok(done)
    }

    fn chosen_cut(&mut self, step: u64) -> Cut {
        let blow = match self.rng.below(10) {
            0..=3 => Blow::Daemon,
            4..=5 => Blow::Shims,
            6 => Blow::Both,
            // The copies are not flushed: power and database lost together is more than is promised.
            7.. if self.lost_records => Blow::Daemon,
            9 if self.boot > 1 => Blow::Daemon,
            7 => Blow::Power(Loss::Names),
            8 => Blow::Power(Loss::Bytes),
            _ => Blow::Store,
        };
        let after = self.rng.chance(500);
        Cut { step, after, blow }
    }

    pub fn strike(&mut self, blow: Blow) {
        self.trace.push(format!("==== {blow:?}"));
        self.blows += 1;
        if blow != Blow::Shims {
            self.daemon = 0;
            self.deaths = None;
            // An exec dies with the connection that asked for it.
            self.end_execs(None);
        }
        // A new database, or copies that power took along, need room: a person makes it first.
        self.full &= !matches!(blow, Blow::Store | Blow::Power(_));
        if blow == Blow::Store {
            self.records = None;
            self.lost_records = true;
        }
        if matches!(blow, Blow::Shims | Blow::Both) {
            self.kill_shims();
        }
        if let Blow::Power(loss) = blow {
            self.power_cut(loss);
        }
    }

    /// Ends what was asked for by exec: all of it, or of one shim's pod.
    pub fn end_execs(&mut self, sandbox: Option<&str>) {
        self.procs
            .retain(|_, proc| !proc.exec || sandbox.is_some_and(|sandbox| sandbox != proc.sandbox));
    }

    fn kill_shims(&mut self) {
        self.end_execs(None);
        for (sandbox, shim) in &mut self.shims {
            if std::mem::take(&mut shim.alive)
                && let Some(deaths) = &self.deaths
            {
                let _ = deaths.send(sandbox.clone());
            }
        }
    }

    fn power_cut(&mut self, loss: Loss) {
        self.fs.power_cut(loss);
        self.procs.clear();
        self.mounts.clear();
        self.pins.clear();
        self.cgroups.clear();
        self.limits.clear();
        self.links.clear();
        self.shims.clear();
        self.events.clear();
        self.boot += 1;
    }

    pub fn plan(&mut self, at: u64, event: Event) {
        self.last_event += 1;
        self.events.insert((at, self.last_event), event);
    }

    /// Plays the events that are due.
    fn happen(&mut self, now: u64) {
        while let Some(entry) = self.events.first_entry().filter(|entry| entry.key().0 <= now) {
            match entry.remove() {
                Event::Exit {
                    pid,
                    ticks,
                    code,
                    signal,
                } => {
                    if self.procs.get(&pid).is_some_and(|proc| proc.ticks == ticks) {
                        let _ = self.step(&Who::Kernel, "process ends", |node| node.end(pid, code, signal));
                    }
                }
                Event::Kill { sandbox, id } => {
                    let shim = self.shims.get(&sandbox);
                    let task = shim.filter(|shim| shim.alive).and_then(|shim| shim.tasks.get(&id));
                    if let Some(task) = task.filter(|task| task.kill_at.is_some_and(|at| at <= now)).cloned() {
                        self.kill_cgroup(&task.cgroup);
                        self.end(task.pid, 137, 9);
                    }
                }
                Event::Room => self.full = false,
            }
        }
    }

    pub fn fork(&mut self, proc: Proc) -> i32 {
        // Numbers come back soon: whoever trusts a number alone is found out.
        self.last_pid = if self.last_pid >= 108 { 101 } else { self.last_pid + 1 };
        while self.procs.contains_key(&self.last_pid) {
            self.last_pid += 1;
        }
        self.procs.insert(self.last_pid, proc);
        self.last_pid
    }

    /// A process ends; its shim, if it is its own, writes how.
    pub fn end(&mut self, pid: i32, code: i32, signal: i32) {
        let Some(proc) = self.procs.remove(&pid) else { return };
        if proc.id == proc.sandbox {
            let members: Vec<i32> = self.in_pod(&proc.sandbox);
            members.into_iter().for_each(|pid| self.end(pid, 137, 9));
        }
        let Some(shim) = self.shims.get(&proc.sandbox).filter(|shim| shim.alive) else {
            return;
        };
        let life = shim.life;
        let id = if proc.id == proc.sandbox {
            shim::PAUSE
        } else {
            proc.id.as_str()
        };
        let Some(task) = shim.tasks.get(id).filter(|task| task.pid == pid).cloned() else {
            return;
        };
        let now = self.wall_now();
        // A process that was taken over is nobody's child: only half of the kernels tell its status.
        let end = if proc.life == life || self.rng.chance(500) {
            End {
                code,
                signal,
                finished_at: now,
                reason: if code == 0 { "Completed" } else { "Error" }.into(),
                ..End::default()
            }
        } else {
            End::lost(now)
        };
        self.ended(&proc.sandbox.clone(), life, id, &task, end);
    }

    /// The shim writes a process's end down and forgets it.
    pub fn ended(&mut self, sandbox: &str, life: u64, id: &str, task: &Task, end: End) {
        let who = Who::Shim(sandbox.to_owned(), life);
        self.kill_cgroup(&task.cgroup);
        let record = task.record.clone();
        if self
            .step(&who, "shim: end written", |node| node.write_end(&record, end))
            .is_err()
        {
            return;
        }
        if let Some(dir) = task.record.parent() {
            let _ = self.runs.send(dir.to_owned());
        }
        let _ = self.step(&who, "shim: task forgotten", |node| {
            if let Some(shim) = node.shims.get_mut(sandbox) {
                shim.tasks.remove(id);
            }
        });
    }

    /// Is what a container's output goes to another file than the one of that name?
    pub fn writes_elsewhere(&self, id: &str) -> bool {
        let tasks = self.shims.values().filter_map(|shim| shim.tasks.get(id));
        let mut logs = tasks.filter_map(|task| Some((task.log_file, self.fs.inode(task.log.as_ref()?))));
        logs.any(|(open, named)| open.is_none() || open != named)
    }

    fn in_pod(&self, sandbox: &str) -> Vec<i32> {
        let all = self.procs.iter().filter(|(_, p)| p.sandbox == sandbox && p.in_pod);
        all.map(|(pid, _)| *pid).collect()
    }

    /// Ends everything in a cgroup and below it.
    pub fn kill_cgroup(&mut self, path: &str) {
        let inside = |proc: &Proc| proc.cgroup == path || proc.cgroup.starts_with(&format!("{path}/"));
        let pids: Vec<i32> = self
            .procs
            .iter()
            .filter(|(_, p)| inside(p))
            .map(|(pid, _)| *pid)
            .collect();
        pids.into_iter().for_each(|pid| self.end(pid, 137, 9));
    }

    /// Sends a stop signal.
    pub fn signal(&mut self, pid: i32, signal: i32) {
        let Some(proc) = self.procs.get(&pid).cloned() else {
            return;
        };
        match (proc.program, signal) {
            (_, libc::SIGKILL) => self.end(pid, 137, 9),
            (Program::Stubborn, _) => {}
            _ => {
                let at = self.now() + 20 * MS;
                self.plan(
                    at,
                    Event::Exit {
                        pid,
                        ticks: proc.ticks,
                        code: 128 + signal,
                        signal,
                    },
                );
            }
        }
    }

    pub fn wall_now(&self) -> i64 {
        self.wall + self.now() as i64
    }

    pub fn new_ns(&mut self) -> u64 {
        self.last_ns += 1;
        self.last_ns
    }

    /// The program of a bundle; an error as the shim words it.
    pub fn program(&self, bundle: &Path) -> Result<(Program, String, PathBuf), String> {
        let text = self
            .fs
            .read(&bundle.join("config.json"))
            .ok_or("config.json is not there")?;
        let spec: Value = serde_json::from_slice(text).map_err(|e| format!("config.json: {e}"))?;
        let args: Vec<String> = serde_json::from_value(spec["process"]["args"].clone()).map_err(|e| e.to_string())?;
        let cgroup = spec["linux"]["cgroupsPath"].as_str().ok_or("no cgroupsPath")?;
        let root = spec["root"]["path"].as_str().ok_or("no root")?;
        Ok((Program::parse(&args), cgroup.to_owned(), root.into()))
    }

    pub fn run_record(&self, path: &Path) -> Option<RunRecord> {
        let text = self.fs.read(path)?;
        let value: Value = serde_json::from_slice(text).unwrap_or_default();
        let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
        let int = |v: &Value| v.as_i64().unwrap_or_default();
        let slot = |name: &str| value.get(name).filter(|v| !v.is_null());
        Some(RunRecord {
            start: slot("start").map(|s| Start {
                pid: int(&s["pid"]) as u32,
                start_ticks: int(&s["ticks"]) as u64,
                boot_id: text(&s["boot"]),
                started_at: int(&s["at"]),
            }),
            stop: slot("stop").map(|s| Stop {
                signal: int(&s["signal"]) as i32,
                deadline: int(&s["deadline"]) as u64,
            }),
            end: slot("end").map(|e| End {
                code: int(&e["code"]) as i32,
                signal: int(&e["signal"]) as i32,
                finished_at: int(&e["at"]),
                reason: text(&e["reason"]),
                message: text(&e["message"]),
                ..End::default()
            }),
        })
    }

    /// Not flushed.
    pub fn write_record(&mut self, path: &Path, record: &RunRecord) -> bool {
        let start = record
            .start
            .as_ref()
            .map(|s| json!({ "pid": s.pid, "ticks": s.start_ticks, "boot": s.boot_id, "at": s.started_at }));
        let stop = record
            .stop
            .as_ref()
            .map(|s| json!({ "signal": s.signal, "deadline": s.deadline }));
        let end = record.end.as_ref().map(|e| {
            json!({ "code": e.code, "signal": e.signal, "at": e.finished_at, "reason": e.reason, "message": e.message })
        });
        let value = json!({ "start": start, "stop": stop, "end": end });
        self.fs.write(path, value.to_string().as_bytes())
    }

    /// Durably, unless there is one.
    pub fn write_end(&mut self, path: &Path, end: End) -> bool {
        let mut record = self.run_record(path).unwrap_or_default();
        if record.end.is_none() || self.mutation == Some("end overwritten") {
            record.end = Some(end);
        }
        let written = self.write_record(path, &record);
        if self.mutation != Some("end not flushed") {
            self.fs.sync(path);
        }
        written
    }
}
