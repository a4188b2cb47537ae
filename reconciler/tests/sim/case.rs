//! One case: a list of calls against a node, cut or unquiet, from the first boot to the empty node at the end.

use std::sync::{Arc, Once};
use std::time::Duration;

use state::clock;
use state::container::ContainerKind;
use state::image::ImageKind;
use state::pod::PodKind;
use state::sandbox::SandboxKind;

use super::chance;
use super::check::{self, Exits};
use super::client::{Client, Op};
use super::daemon::{Daemon, SimClock};
use super::node::{Cut, SECOND, Sim, Unrest};
use super::parts::census;

/// Longer than a debt's patience, a restart's back-off, two looks of the sweep and a resync together.
const REST: Duration = Duration::from_secs(400);
/// Tries of one call.
const TRIES: u32 = 80;

#[derive(Clone, Debug, Default)]
pub struct Case {
    pub name: String,
    pub ops: Vec<Op>,
    pub cut: Option<Cut>,
    pub unrest: Unrest,
    pub seed: u64,
    pub mutation: Option<&'static str>,
}

/// What came of it.
#[derive(Debug)]
pub struct Outcome {
    pub steps: u64,
    pub problems: Vec<String>,
    pub trace: Vec<String>,
    /// Errors that the client was answered.
    pub errors: Vec<String>,
    pub boots: u64,
}

impl Outcome {
    /// Everything that helps to understand what went wrong.
    pub fn report(&self, case: &Case) -> String {
        let mut text = format!("{} {:?} seed {}\n", case.name, case.cut, case.seed);
        for line in &self.trace {
            text += &format!("    {line}\n");
        }
        let mut told = self.errors.clone();
        told.dedup();
        told.iter().for_each(|e| text += &format!("  answered: {e}\n"));
        self.problems.iter().for_each(|p| text += &format!("  BROKEN {p}\n"));
        text
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Calls,
    /// The daemon was killed at rest: all must read the same.
    Again,
    Remove,
    Done,
}

struct Course<'a> {
    case: &'a Case,
    sim: Arc<Sim>,
    client: Client,
    at: usize,
    tries: u32,
    stage: Stage,
    exits: Exits,
    problems: Vec<String>,
    errors: Vec<String>,
    before: Option<Vec<String>>,
    seen: std::collections::BTreeMap<String, String>,
    blows: u64,
}

/// Plays a case to its end; the same case has the same course each time.
pub fn play(case: &Case) -> Outcome {
    static WARM: Once = Once::new();
    WARM.call_once(|| {
        // What is made once in a program's life must not draw from the first play's chance.
        for (_, ops) in super::scenarios::all() {
            let first = Case { ops, ..Case::default() };
            chance::from_seed(0, || act(&first));
        }
    });
    chance::from_seed(case.seed, || act(case))
}

fn act(case: &Case) -> Outcome {
    let sim = Sim::new(case.seed);
    {
        let mut node = sim.lock();
        node.cut = case.cut;
        node.unrest = case.unrest;
        node.mutation = case.mutation;
    }
    clock::set(Some(Arc::new(SimClock(sim.clone()))));
    let mut course = Course {
        case,
        sim: sim.clone(),
        client: Client::default(),
        at: 0,
        tries: 0,
        stage: Stage::Calls,
        exits: Exits::default(),
        problems: Vec::new(),
        errors: Vec::new(),
        before: None,
        seen: Default::default(),
        blows: 0,
    };
    let mut boots = 0;
    while course.stage != Stage::Done && boots < 200 {
        boots += 1;
        incarnation(&mut course);
        let mut node = sim.lock();
        let away = node.rng.below(5) * SECOND;
        node.idle(away + SECOND / 10);
        if case.unrest.crash > 0 {
            // Up to an hour, to and fro: the wall clock is for people only.
            node.wall += (node.rng.below(7200) as i64 - 3600) * SECOND as i64;
        }
    }
    if course.stage != Stage::Done {
        course.problems.push(format!("2: it came to no end in {boots} lives"));
    }
    clock::set(None);
    let mut node = sim.lock();
    let mut problems = std::mem::take(&mut node.problems);
    problems.append(&mut course.problems);
    problems.dedup();
    Outcome {
        steps: node.steps,
        problems,
        trace: std::mem::take(&mut node.trace),
        errors: course.errors,
        boots,
    }
}

/// One life of the daemon, from its boot to its end.
fn incarnation(course: &mut Course<'_>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build();
    let runtime = runtime.expect("a runtime needs nothing");
    let sim = course.sim.clone();
    runtime.block_on(async {
        sim.lock().run(true);
        let kernel = tokio::spawn(sim.clone().kernel());
        tokio::select! {
            biased;
            () = course.live() => {}
            () = dead(&sim) => {}
        }
        kernel.abort();
        let mut node = sim.lock();
        node.daemon = 0;
        node.deaths = None;
        node.run(false);
    });
}

/// Until the daemon is killed.
async fn dead(sim: &Sim) {
    while sim.lock().daemon != 0 {
        sim.crashed.notified().await;
    }
}

impl Course<'_> {
    async fn live(&mut self) {
        let daemon = match Daemon::boot(&self.sim).await {
            Ok(daemon) => daemon,
            Err(why) => {
                // With an unquiet node a start may fail; the service manager starts it again.
                self.errors.push(format!("boot: {why}"));
                return self.quieten_after_failed_boot();
            }
        };
        check::boot(&self.sim, &daemon.running.cx, &mut self.problems);
        if self.before.is_none() {
            self.before = Some(census(&self.sim.lock()).into_keys().collect());
        }
        match self.stage {
            Stage::Calls => self.calls(&daemon).await,
            Stage::Again => self.again(&daemon).await,
            Stage::Remove => self.remove(&daemon).await,
            Stage::Done => {}
        }
    }

    fn quieten_after_failed_boot(&mut self) {
        let mut node = self.sim.lock();
        if self.errors.len() > 50 {
            node.unrest = Unrest::default();
        }
    }

    /// Does the calls that are left, then rests.
    async fn calls(&mut self, daemon: &Daemon) {
        while let Some(op) = self.case.ops.get(self.at).cloned() {
            let answer = self.client.call(daemon, &op).await;
            if self.sim.lock().daemon == 0 {
                // The dead answer nobody.
                return std::future::pending().await;
            }
            match answer {
                Ok(()) => {
                    self.at += 1;
                    self.tries = 0;
                }
                Err(e) => {
                    self.errors.push(format!("{op:?}: {:?} {}", e.code(), e.message()));
                    self.tries += 1;
                    if self.tries > TRIES {
                        // A lost database may take a changed wish with it that nothing was done for yet.
                        let lost = self.sim.lock().lost_records && matches!(op, Op::AwaitDeclared(..));
                        if !lost {
                            self.problems.push(format!("2: {op:?} never succeeds: {e}"));
                        }
                        self.at += 1;
                        self.tries = 0;
                    }
                    tokio::time::sleep(Duration::from_secs(2)).await;
                }
            }
            check::always(&daemon.running.cx, &mut self.exits, &mut self.problems);
        }
        self.rest(daemon).await;
        self.seen = check::statuses(&daemon.running.cx);
        self.blows = self.sim.lock().blows;
        self.stage = Stage::Again;
    }

    async fn rest(&mut self, daemon: &Daemon) {
        {
            let mut node = self.sim.lock();
            node.unrest = Unrest::default();
            node.full = false;
        }
        tokio::time::sleep(REST).await;
        check::always(&daemon.running.cx, &mut self.exits, &mut self.problems);
        check::at_rest(&self.sim, &daemon.running.cx, &self.client.promised, &mut self.problems).await;
    }

    /// After another start all reads as before (5).
    async fn again(&mut self, daemon: &Daemon) {
        self.rest(daemon).await;
        let now = check::statuses(&daemon.running.cx);
        if self.sim.lock().blows == self.blows {
            for (name, before) in &self.seen {
                let now = now.get(name);
                if now != Some(before) {
                    self.problems.push(format!("5: {name} read {before} and reads {now:?}"));
                }
            }
        }
        self.stage = Stage::Remove;
        self.remove(daemon).await;
    }

    /// Everything is removed; the node must be as it was (4).
    async fn remove(&mut self, daemon: &Daemon) {
        self.client.promised.clear();
        let deadline = tokio::time::Instant::now() + Duration::from_secs(3600);
        while tokio::time::Instant::now() < deadline {
            let store = &daemon.store;
            for pod in store.list::<PodKind>() {
                let _ = store.delete::<PodKind>(pod.uid()).await;
            }
            for sandbox in store.list::<SandboxKind>() {
                let _ = store.delete::<SandboxKind>(sandbox.uid()).await;
            }
            for image in store.list::<ImageKind>() {
                if !image.spec.pinned {
                    let _ = store.delete::<ImageKind>(image.uid()).await;
                }
            }
            let left = store.list::<PodKind>().len() + store.list::<SandboxKind>().len();
            if left + store.list::<ContainerKind>().len() == 0 {
                break;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        self.rest(daemon).await;
        let before = self.before.clone().unwrap_or_default();
        let after: Vec<String> = census(&self.sim.lock()).into_keys().collect();
        for name in after.iter().filter(|name| !before.contains(name)) {
            self.problems.push(format!("4: left over: {name}"));
        }
        self.stage = Stage::Done;
    }
}
