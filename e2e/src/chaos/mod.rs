//! Chaos: pods live their whole lives through CRI while the daemon, shims and pauses are killed at random and the node
//! is disturbed behind the daemon's back. Then everything settles, and nothing may be lost or left.
//!
//! ```text
//!   lane  lane  lane ...   run, create, start, rotate logs, exec, exit or stop, check, remove     (lane)
//!      \    |    /
//!      node under test  <---- injector: SIGKILL daemon | shim | pause, drift                      (inject, drift)
//!      bystander node   <---- its pods must not notice
//! ```
//!
//! One seed gives the same lives and the same faults in the same order; what they hit depends on the machine's timing.

mod drift;
mod inject;
mod lane;
mod retry;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tokio::sync::{Mutex, RwLock};
use tokio::task::JoinSet;

use crate::client::Cri;
use crate::node::Node;
use crate::pods::{self, HELLO};

/// Pods that live at the same time.
const LANES: u64 = 6;

#[derive(Clone, Copy, Debug)]
pub struct Options {
    pub seed: u64,
    /// How long faults are injected.
    pub time: Duration,
}

/// What happened. There is none of a run in which anything was lost or left behind.
#[derive(Debug, Default)]
pub struct Tally {
    pub pods: Cell<u64>,
    pub containers: Cell<u64>,
    pub lines: Cell<u64>,
    pub daemon_kills: Cell<u64>,
    pub shim_kills: Cell<u64>,
    pub pause_kills: Cell<u64>,
    pub drifts: Cell<u64>,
    /// Faults whose object was removed before its repair was due.
    pub moot: Cell<u64>,
    /// Time from a fault (or from the daemon's start after it) to its repair.
    pub repairs: RefCell<Vec<(&'static str, Duration)>>,
}

impl Tally {
    pub(crate) fn repaired(&self, what: &'static str, since: Instant) {
        self.repairs.borrow_mut().push((what, since.elapsed()));
    }
}

pub(crate) fn count(counter: &Cell<u64>) {
    counter.set(counter.get() + 1);
}

impl std::fmt::Display for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "{} pods, {} containers, {} log lines; killed: daemon {}, shims {}, pauses {}; drift {}; moot {}",
            self.pods.get(),
            self.containers.get(),
            self.lines.get(),
            self.daemon_kills.get(),
            self.shim_kills.get(),
            self.pause_kills.get(),
            self.drifts.get(),
            self.moot.get()
        )?;
        let mut kinds: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (what, took) in self.repairs.borrow().iter() {
            kinds.entry(*what).or_default().push(*took);
        }
        for (kind, mut times) in kinds {
            times.sort_unstable();
            let at = |part: usize| times[(times.len() - 1) * part / 100];
            writeln!(
                f,
                "  {kind}: repaired {}, median {:.2?}, p99 {:.2?}",
                times.len(),
                at(50),
                at(99)
            )?;
        }
        write!(f, "  lost exit codes 0, lost log lines 0, leaks 0")
    }
}

/// A pod as the injector sees it.
#[derive(Clone)]
pub(crate) struct Pod {
    pub sandbox: String,
    /// Held for reading while a container's end is awaited: a shim that is killed in the very instant in which its
    /// container ends cannot have seen how, so the injector, which writes, does not kill shims then.
    pub calm: Rc<RwLock<()>>,
}

/// What lanes and injector share.
pub(crate) struct Shared {
    pub cri: Cri,
    pub node: Mutex<Node>,
    pub pods: RefCell<Vec<Pod>>,
    pub tally: Tally,
    pub dir: std::path::PathBuf,
}

/// The whole run: fails on the first thing that is lost or left behind.
pub async fn run(options: Options) -> Result<Tally> {
    // Futures of async closures are not `Send`: all of it runs on one thread.
    tokio::task::LocalSet::new()
        .run_until(inner(options))
        .await
        .with_context(|| {
            format!(
                "replay: cargo chaos --seed {} --seconds {}",
                options.seed,
                options.time.as_secs()
            )
        })
}

async fn inner(options: Options) -> Result<Tally> {
    let node = Node::start().await?;
    node.busybox().await?;
    let bystander = Node::start().await?;
    let seen = bystanders(&bystander).await?;
    let shared = Rc::new(Shared {
        cri: node.cri.clone(),
        dir: node.path("gates"),
        node: Mutex::new(node),
        pods: RefCell::default(),
        tally: Tally::default(),
    });
    std::fs::create_dir(&shared.dir)?;
    let mut dice = fastrand::Rng::with_seed(options.seed);
    let end = Instant::now() + options.time;
    let mut lanes = JoinSet::new();
    for n in 0..LANES {
        let (shared, dice) = (shared.clone(), dice.fork());
        lanes.spawn_local(async move { lane::live(&shared, dice, n, end).await });
    }
    inject::until(&shared, dice, end).await.context("injector")?;
    while let Some(done) = lanes.join_next().await {
        done?.context("lane")?;
    }
    let shared = Rc::into_inner(shared).context("a lane or the injector still runs")?;
    shared.node.into_inner().finish().await.context("after the chaos")?;
    let now = bystander.picture().await?;
    ensure!(
        now == seen,
        "the node beside it noticed:\nbefore {seen:#?}\nnow {now:#?}"
    );
    bystander.finish().await.context("the node beside it")?;
    Ok(shared.tally)
}

/// Two pods on the second node.
async fn bystanders(node: &Node) -> Result<BTreeMap<String, String>> {
    for n in 0..2 {
        let pod = node.pod(&format!("bystander{n}"));
        let sandbox = node.cri.run_sandbox(&pod).await?;
        let config = pods::container("c", HELLO, &["/hello", "sleep", "100000"]);
        node.cri.launch(&sandbox, &pod, &config).await?;
    }
    node.picture().await
}
