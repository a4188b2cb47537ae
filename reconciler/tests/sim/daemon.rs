//! One incarnation of the daemon, whole but for the node: store, loop, CRI; and its disk and clock.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cri::Services;
use reconciler::runtime::{Running, Runtime};
use state::clock::Clock;
use state::disk::{Disk, Found, Op};
use state::store::Copies;
use state::{Error, Result, Store};
use tokio::sync::watch;

use super::node::{ROOT, ROOT_ID, Sim, Who};
use super::parts;

pub struct SimClock(pub Arc<Sim>);

impl Clock for SimClock {
    fn now_ns(&self) -> i64 {
        self.0.lock().wall_now()
    }

    fn boottime_ns(&self) -> u64 {
        self.0.lock().now()
    }

    fn boot_id(&self) -> String {
        self.0.lock().boot_id()
    }

    fn random(&self, bytes: &mut [u8]) {
        let mut node = self.0.lock();
        bytes.fill_with(|| node.rng.next() as u8);
    }
}

/// The database's twin: it has what was committed, and nothing else.
struct SimDisk {
    sim: Arc<Sim>,
    who: Who,
    kept: usize,
}

impl Disk for SimDisk {
    fn root_id(&self) -> &str {
        ROOT_ID
    }

    fn keep(&mut self, _: String) {
        self.kept += 1;
    }

    fn kept(&self) -> usize {
        self.kept
    }

    fn room(&self) -> Result<()> {
        Ok(())
    }

    fn commit(&mut self, ops: &[Op], _: u64, _: &dyn Fn() -> Vec<Op>) -> Result<()> {
        let lost = self.sim.lock().mutation == Some("answered before it is durable");
        let committed = self.sim.step(&self.who, "store: committed", |node| {
            node.born = true;
            let records = node.records.get_or_insert_with(BTreeMap::new);
            for op in ops {
                match &op.value {
                    Some(_) if lost && op.key.starts_with("Container/") => {}
                    Some(value) => drop(records.insert(op.key.clone(), value.clone())),
                    None => drop(records.remove(&op.key)),
                }
            }
        });
        committed.map_err(|why| Error::Storage {
            path: ROOT.to_owned(),
            problem: std::io::Error::from(why).to_string(),
        })
    }

    fn mark_due(&self) -> Option<Duration> {
        None
    }

    fn mark(&mut self) {}
}

fn found(sim: &Sim) -> Found {
    let node = sim.lock();
    match &node.records {
        None => Found::Nothing { gone: node.born },
        Some(records) => {
            let all = records.iter().map(|(key, json)| (key.clone(), Ok(json.clone())));
            Found::Records(all.collect())
        }
    }
}

/// The copies beside the objects, as `engine::restore` finds them.
fn copies(sim: &Arc<Sim>) -> Copies {
    let read = |sim: &Sim| -> Vec<(String, Vec<u8>)> {
        let node = sim.lock();
        let kinds = ["pods", "images", "declared"].map(|kind| Path::new(ROOT).join(kind));
        let all = node
            .fs
            .all()
            .into_iter()
            .filter(|path| path.ends_with("record.json") && kinds.iter().any(|kind| path.starts_with(kind)));
        all.filter_map(|path| {
            let uid = path.parent()?.file_name()?.to_str()?.to_owned();
            Some((uid, node.fs.read(&path)?.to_vec()))
        })
        .collect()
    };
    let (all, one) = (sim.clone(), sim.clone());
    Copies {
        all: Box::new(move || read(&all).into_iter().map(|(_, text)| text).collect()),
        one: Box::new(move |_, uid| read(&one).into_iter().find(|(of, _)| of == uid).map(|(_, text)| text)),
    }
}

pub struct Daemon {
    pub store: Store,
    pub services: Services,
    pub running: Running,
    _closing: watch::Sender<bool>,
}

impl Daemon {
    /// Starts one; the error is of the start.
    pub async fn boot(sim: &Arc<Sim>) -> std::result::Result<Daemon, String> {
        let (world, part) = parts::world(sim);
        let disk = SimDisk {
            sim: sim.clone(),
            who: part.who.clone(),
            kept: 0,
        };
        let opened = Store::open_here(Box::new(disk), found(sim), &copies(sim));
        let (store, opened) = opened.map_err(|e| format!("open store: {e}"))?;
        let runtime = Runtime::on(store.clone(), opened, world);
        let running = runtime.start().await.map_err(|e| format!("start: {e}"))?;
        let (closing, closed) = watch::channel(false);
        let services = Services::new(store.clone(), cri::Config::default(), closed);
        Ok(Daemon {
            store,
            services,
            running,
            _closing: closing,
        })
    }
}
