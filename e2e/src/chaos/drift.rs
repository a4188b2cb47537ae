//! The node is changed behind the daemon's back; each change must be undone.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use fastrand::Rng;

use super::inject::{gone, pick};
use super::{Pod, Shared, count};
use crate::leaks::{self, nft_tables};
use crate::netns::{connected, inside};
use crate::{eventually, tools};

/// A round of resync takes 60 s, two looks for what belongs to nobody take 30 s from a daemon's start.
const REPAIR: Duration = Duration::from_secs(240);

#[derive(Clone, Copy, Debug)]
pub enum Drift {
    /// The pod's address is flushed.
    Address,
    /// The pod's end of the link is set down.
    LinkDown,
    /// The table of the built-in network is deleted.
    Table,
    /// The pin of the network namespace is unmounted and its file removed.
    Pin,
    /// A network namespace bears our mark and belongs to no pod.
    OrphanNetns,
    /// The same of a cgroup.
    OrphanCgroup,
    /// The same of a directory of a pod.
    OrphanDirectory,
}

impl Drift {
    pub fn any(dice: &mut Rng) -> Drift {
        let all = [
            Drift::Address,
            Drift::LinkDown,
            Drift::Table,
            Drift::Pin,
            Drift::OrphanNetns,
            Drift::OrphanCgroup,
            Drift::OrphanDirectory,
        ];
        all[dice.usize(..all.len())]
    }

    fn name(self) -> &'static str {
        match self {
            Drift::Address => "address",
            Drift::LinkDown => "link down",
            Drift::Table => "nft table",
            Drift::Pin => "netns pin",
            Drift::OrphanNetns => "orphaned netns",
            Drift::OrphanCgroup => "orphaned cgroup",
            Drift::OrphanDirectory => "orphaned directory",
        }
    }
}

/// A change that was made, and what must be so again.
pub struct Caused {
    kind: Drift,
    since: Instant,
    whole: Whole,
}

enum Whole {
    Absent(PathBuf),
    /// A table of this instance, as long as there is a pod.
    Table(String),
    /// Address and link of this sandbox, behind this pin.
    Network(String, PathBuf),
}

/// Makes the change; nothing where there is nothing to change.
pub async fn cause(shared: &Shared, kind: Drift, dice: &mut Rng) -> Result<Option<Caused>> {
    let (instance, root) = {
        let node = shared.node.lock().await;
        (node.instance(), node.root())
    };
    let netns = |uid: &str| PathBuf::from(format!("/run/netns/rc-{instance}-{uid}"));
    let orphan: String = (0..4).map(|_| format!("{:016x}", dice.u64(..))).collect();
    let since = Instant::now();
    let whole = match kind {
        Drift::Table => {
            let Some(name) = table(&instance)? else { return Ok(None) };
            tools::check(Command::new("nft").args(["delete", "table", "inet", &name]))?;
            Whole::Table(instance)
        }
        Drift::OrphanNetns => {
            let name = format!("rc-{instance}-{orphan}");
            tools::check(Command::new("ip").args(["netns", "add", &name]))?;
            Whole::Absent(netns(&orphan))
        }
        Drift::OrphanCgroup => {
            let cgroup = leaks::hierarchy().join(format!("reconcile-{instance}")).join(&orphan);
            fs::create_dir_all(&cgroup).with_context(|| cgroup.display().to_string())?;
            Whole::Absent(cgroup)
        }
        Drift::OrphanDirectory => {
            let dir = root.join("pods").join(&orphan);
            fs::create_dir_all(dir.join("containers"))?;
            Whole::Absent(dir)
        }
        Drift::Address | Drift::LinkDown | Drift::Pin => {
            let Some(Pod { sandbox, .. }) = pick(shared, dice) else {
                return Ok(None);
            };
            let pin = netns(&sandbox);
            // A pod on the host's network has none.
            if !pin.exists() || !disturb(shared, kind, &sandbox, &pin)? {
                return Ok(None);
            }
            Whole::Network(sandbox, pin)
        }
    };
    count(&shared.tally.drifts);
    Ok(Some(Caused { kind, since, whole }))
}

/// Waits until it is repaired, or its pod has gone.
pub async fn repaired(shared: &Shared, caused: Caused, end: Instant) -> Result<()> {
    let Caused { kind, since, whole } = caused;
    let patience = match whole {
        // One daemon must live for both looks, and few do while they are being killed.
        Whole::Absent(_) => end.saturating_duration_since(Instant::now()) + REPAIR,
        _ => REPAIR,
    };
    let done = eventually(patience, async || match &whole {
        Whole::Absent(path) => {
            ensure!(!path.exists(), "{} is still there", path.display());
            Ok(true)
        }
        Whole::Table(instance) if table(instance)?.is_some() => Ok(true),
        // Without a pod on the bridge nobody needs it.
        Whole::Table(_) if shared.pods.borrow().is_empty() => Ok(false),
        Whole::Table(_) => bail!("the nft table is still gone"),
        Whole::Network(sandbox, pin) => match connected(pin) {
            Ok(()) => Ok(true),
            Err(_) if gone(shared, sandbox) => Ok(false),
            Err(not_yet) => Err(not_yet),
        },
    });
    match done.await.context(kind.name())? {
        true => shared.tally.repaired(kind.name(), since),
        false => count(&shared.tally.moot),
    }
    Ok(())
}

fn table(instance: &str) -> Result<Option<String>> {
    Ok(nft_tables()?.into_iter().find(|table| table.contains(instance)))
}

/// False if the pod went meanwhile.
fn disturb(shared: &Shared, kind: Drift, sandbox: &str, netns: &Path) -> Result<bool> {
    let name = netns.file_name().context("netns")?.to_string_lossy().into_owned();
    let done = match kind {
        Drift::Address => inside(netns, &["addr", "flush", "dev", "eth0", "scope", "global"]).map(drop),
        Drift::LinkDown => inside(netns, &["link", "set", "eth0", "down"]).map(drop),
        _ => tools::check(Command::new("ip").args(["netns", "delete", &name])).map(drop),
    };
    match done {
        Ok(()) => Ok(true),
        Err(_) if gone(shared, sandbox) => Ok(false),
        Err(error) => Err(error),
    }
}
