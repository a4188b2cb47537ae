//! The sweep: what bears our mark and belongs to no record is taken down.
//!
//! The names are listed first, then the records are read, so that what is being made is never taken for an orphan. A
//! daemon looks twice, half a minute apart.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use state::container::ContainerKind;
use state::image::ImageKind;
use state::pod::PodKind;
use state::sandbox::SandboxKind;

use crate::engine::Context;
use crate::engine::plan::{Action, Planned};
use crate::engine::record::remove_empty_tree;
use crate::engine::stage::Risk;
use crate::error::Result;
use crate::world::linux::netns::Pin;

/// Something of ours without a record.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Orphan {
    /// Anything of a sandbox: namespaces, network, shim, directories.
    Sandbox(String),
    /// A container's directories or cgroup: sandbox, container.
    Container(String, String),
    /// A cgroup below the default parent.
    Cgroup(String),
    /// `images/<uid>` or `declared/<uid>`.
    Directory(String),
}

impl Orphan {
    pub fn plan(&self) -> Planned {
        let (kind, uid, stage) = match self {
            Orphan::Sandbox(uid) => ("PodSandbox", uid.clone(), "all"),
            Orphan::Container(_, uid) => ("Container", uid.clone(), "all"),
            Orphan::Cgroup(path) => ("Cgroup", path.clone(), "cgroup"),
            Orphan::Directory(path) => ("Directory", path.clone(), "record"),
        };
        Planned {
            kind: kind.to_owned(),
            name: uid.clone(),
            uid,
            stage: stage.to_owned(),
            action: Action::Sweep,
            reason: "NoRecord".to_owned(),
            message: "it bears our mark and no record knows it".to_owned(),
            risk: Risk::A,
        }
    }
}

/// Lists what has no record.
pub async fn orphans(cx: &Context) -> Result<BTreeSet<Orphan>> {
    let paths = &cx.world.paths;
    let mut sandboxes: BTreeSet<String> = BTreeSet::new();
    sandboxes.extend(cx.world.netns.list().unwrap_or_default());
    sandboxes.extend(cx.world.network.list().await?);
    sandboxes.extend(names(cx, &paths.pods()));
    sandboxes.extend(names(cx, &paths.state.join("pods")));
    let mut containers = BTreeSet::new();
    for sandbox in &sandboxes {
        for dir in [paths.pod(sandbox), paths.pod_state(sandbox)] {
            containers.extend(
                names(cx, &dir.join("containers"))
                    .into_iter()
                    .map(|c| (sandbox.clone(), c)),
            );
        }
    }
    let cgroups = cx.world.cgroups.children(&paths.default_cgroup());
    let images = names(cx, &paths.root.join("images"));
    let declared = names(cx, &paths.root.join("declared"));
    // From here on the records are read.
    let known = |uid: &str| {
        cx.store.get::<SandboxKind>(uid).is_some()
            || cx.store.get::<ContainerKind>(uid).is_some()
            || cx.store.quarantined(uid)
    };
    let mut found: BTreeSet<Orphan> = sandboxes
        .iter()
        .filter(|u| !known(u))
        .cloned()
        .map(Orphan::Sandbox)
        .collect();
    let orphaned = containers
        .into_iter()
        .filter(|(sandbox, uid)| known(sandbox) && !known(uid));
    found.extend(orphaned.map(|(sandbox, uid)| Orphan::Container(sandbox, uid)));
    let stray = cgroups.into_iter().filter(|name| !known(name));
    found.extend(stray.map(|name| Orphan::Cgroup(format!("{}/{name}", paths.default_cgroup()))));
    let gone = images
        .into_iter()
        .filter(|u| cx.store.get::<ImageKind>(u).is_none() && !cx.store.quarantined(u));
    found.extend(gone.map(|uid| Orphan::Directory(format!("images/{uid}"))));
    let gone = declared
        .into_iter()
        .filter(|u| cx.store.get::<PodKind>(u).is_none() && !cx.store.quarantined(u));
    found.extend(gone.map(|uid| Orphan::Directory(format!("declared/{uid}"))));
    Ok(found)
}

/// The children of a directory that look like uids.
fn names(cx: &Context, dir: &Path) -> Vec<String> {
    let entries = cx.world.files.list(dir).unwrap_or_default();
    let names = entries.into_iter().map(|entry| entry.name);
    names.filter(|name| !name.starts_with('.')).collect()
}

/// Takes one orphan down.
pub async fn sweep(cx: &Context, orphan: &Orphan) -> Result<()> {
    tracing::warn!(?orphan, "sweeping: no record knows it");
    cx.store.meter().count("reconcile_orphans_swept_total", &[]);
    let paths = &cx.world.paths;
    match orphan {
        Orphan::Sandbox(uid) => sweep_sandbox(cx, uid).await,
        Orphan::Container(sandbox, uid) => {
            let state = paths.container_state(sandbox, uid);
            if let Some(client) = cx.world.shims.find(sandbox).await {
                let _ = client.delete(uid).await;
            }
            unmount_below(cx, &[state.clone(), paths.container(sandbox, uid)])?;
            remove_empty_tree(&cx.world, &state)?;
            cx.world.files.bury(&paths.container(sandbox, uid))
        }
        Orphan::Cgroup(path) => {
            cx.world.cgroups.kill(path)?;
            cx.world.cgroups.remove(path)
        }
        Orphan::Directory(path) => cx.world.files.bury(&paths.root.join(path)),
    }
}

/// Unmounts what is mounted below directories of ours, deepest first.
fn unmount_below(cx: &Context, dirs: &[PathBuf]) -> Result<()> {
    for mount in cx.world.mounts.below(dirs)? {
        cx.world.mounts.unmount_only(&mount)?;
    }
    Ok(())
}

async fn sweep_sandbox(cx: &Context, uid: &str) -> Result<()> {
    let paths = &cx.world.paths;
    if let Some(client) = cx.world.shims.find(uid).await {
        if let Ok(state) = client.state().await {
            for process in state.processes {
                let _ = client.delete(&process.id).await;
            }
        }
        cx.world.shims.remove(uid).await?;
    }
    for name in cx.world.cgroups.children(&paths.default_cgroup()) {
        let inside = cx.world.files.exists(&paths.pod(uid).join("containers").join(&name)) || name == uid;
        if inside {
            let path = format!("{}/{name}", paths.default_cgroup());
            cx.world.cgroups.kill(&path)?;
            cx.world.cgroups.remove(&path)?;
        }
    }
    let pin = paths.netns(uid);
    let live = matches!(cx.world.netns.observe(&pin), Ok(Pin::Ns { .. }));
    cx.world
        .network
        .remove(uid, &paths.pod(uid), live.then_some(pin.as_path()))
        .await?;
    cx.world.network.sweep_links(uid).await?;
    for pin in [
        pin,
        paths.pod_state(uid).join("ns/ipc"),
        paths.pod_state(uid).join("ns/uts"),
    ] {
        cx.world.netns.remove(&pin)?;
    }
    unmount_below(cx, &[paths.pod(uid), paths.pod_state(uid)])?;
    remove_empty_tree(&cx.world, &paths.pod_state(uid))?;
    cx.world.files.bury(&paths.pod(uid))
}
