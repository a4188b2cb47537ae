//! One incarnation of the daemon, whole but for the node: store, loop, CRI; and its disk and clock.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cri::Services;
use reconciler::runtime::{Running, Runtime};
use state::clock::Clock;
use state::container::ContainerKind;
use state::disk::{Disk, Found, Op};
use state::image::ImageKind;
use state::pod::PodKind;
use state::sandbox::SandboxKind;
use state::store::{Copied, Copies};
use state::{Error, Kind, Result, Store};
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

    fn release(&mut self, _: &str) -> bool {
        let kept = self.kept > 0;
        self.kept -= usize::from(kept);
        kept
    }

    fn kept(&self) -> usize {
        self.kept
    }

    fn room(&self) -> Result<()> {
        if self.sim.lock().full {
            return Err(Error::Full {
                path: ROOT.to_owned(),
                problem: "only changes and removals are taken".to_owned(),
            });
        }
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
    let read = |sim: &Sim| -> Vec<Copied> {
        let node = sim.lock();
        let kinds = [
            (SandboxKind::KIND, "pods"),
            (ImageKind::KIND, "images"),
            (PodKind::KIND, "declared"),
        ];
        let kind = |path: &Path| {
            let (kind, _) = kinds
                .iter()
                .find(|(_, place)| path.starts_with(Path::new(ROOT).join(place)))?;
            let is_container = path.parent()?.parent()?.ends_with("containers");
            Some(if is_container { ContainerKind::KIND } else { *kind })
        };
        let all = node.fs.all().into_iter().filter(|path| path.ends_with("record.json"));
        all.filter_map(|path| {
            Some(Copied {
                kind: kind(&path)?,
                uid: path.parent()?.file_name()?.to_str()?.to_owned(),
                json: node.fs.read(&path)?.to_vec(),
            })
        })
        .collect()
    };
    let (all, one) = (sim.clone(), sim.clone());
    Copies {
        all: Box::new(move || read(&all)),
        one: Box::new(move |_, uid| {
            read(&one)
                .into_iter()
                .find(|copy| copy.uid == uid)
                .map(|copy| copy.json)
        }),
    }
}

pub struct Daemon {
    pub sim: Arc<Sim>,
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
            sim: sim.clone(),
            store,
            services,
            running,
            _closing: closing,
        })
    }
}
