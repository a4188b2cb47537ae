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
use crate::engine::live;
use crate::engine::plan::{Action, Planned};
use crate::engine::record::{COPY, remove_empty_tree};
use crate::engine::stage::Risk;
use crate::error::Result;
use crate::world::Paths;
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
    /// A mount on what was thrown away.
    Mount(PathBuf),
    /// The record of a container whose sandbox has none: sandbox, container.
    Record(String, String),
}

/// What is to be done about an orphan, with its proof.
pub struct Judged {
    pub risk: Risk,
    pub reason: &'static str,
    pub message: String,
}

impl Orphan {
    pub fn plan(&self, judged: Judged) -> Planned {
        let (kind, uid, stage) = match self {
            Orphan::Sandbox(uid) => ("PodSandbox", uid.clone(), "all"),
            Orphan::Container(_, uid) => ("Container", uid.clone(), "all"),
            Orphan::Record(_, uid) => ("Container", uid.clone(), "record"),
            Orphan::Cgroup(path) => ("Cgroup", path.clone(), "cgroup"),
            Orphan::Directory(path) => ("Directory", path.clone(), "record"),
            Orphan::Mount(path) => ("Mount", path.display().to_string(), "mount"),
        };
        Planned {
            kind: kind.to_owned(),
            name: uid.clone(),
            uid,
            stage: stage.to_owned(),
            action: Action::Sweep,
            reason: judged.reason.to_owned(),
            message: judged.message,
            risk: judged.risk,
            undo: Action::Sweep.way_back().to_owned(),
        }
    }
}

/// Says how dangerous it is to take an orphan down. With a record's copy beside it, what lives may be wanted: its
/// record was lost. A cgroup with processes that nothing explains holds somebody else's.
pub async fn judge(cx: &Context, orphan: &Orphan) -> Judged {
    let paths = &cx.world.paths;
    let (dir, lives) = match orphan {
        Orphan::Sandbox(uid) | Orphan::Record(uid, _) => {
            let mut dirs = vec![paths.pod(uid)];
            dirs.extend(
                names(cx, &paths.pod(uid).join("containers"))
                    .iter()
                    .map(|c| paths.container(uid, c)),
            );
            let lives = dirs.iter().find_map(|dir| pid(cx, dir));
            (paths.pod(uid), lives)
        }
        Orphan::Container(sandbox, uid) => {
            let dir = paths.container(sandbox, uid);
            let lives = pid(cx, &dir);
            (dir, lives)
        }
        Orphan::Cgroup(path) => {
            let real = cx.world.usage.as_ref();
            if let Some(pid) = real.and_then(|real| real.processes(path).first().copied()) {
                return Judged {
                    risk: Risk::C,
                    reason: "ForeignProcesses",
                    message: format!("process {pid} is in it and nothing of ours explains that; it is left alone"),
                };
            }
            return Judged::plain(Risk::A);
        }
        Orphan::Directory(_) | Orphan::Mount(_) => return Judged::plain(Risk::A),
    };
    match lives {
        None => Judged::plain(Risk::A),
        Some(pid) if cx.world.files.exists(&dir.join(COPY)) => Judged {
            risk: Risk::C,
            reason: "RecordLost",
            message: format!("process {pid} lives and {COPY} lies beside it, but the database does not know it"),
        },
        Some(pid) => Judged {
            message: format!("process {pid} lives, bears our mark, and no record knows it"),
            ..Judged::plain(Risk::B)
        },
    }
}

impl Judged {
    fn plain(risk: Risk) -> Judged {
        Judged {
            risk,
            reason: "NoRecord",
            message: "it bears our mark and no record knows it".to_owned(),
        }
    }
}

/// The living process of the run record in a directory.
fn pid(cx: &Context, dir: &Path) -> Option<i32> {
    let run = cx.world.files.run_record(&Paths::run_record(dir)).ok()??;
    live::pid(&cx.world, &run)
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
    // What stands in an orphan's cgroups goes with it.
    let of_orphan = |name: &String| {
        sandboxes
            .iter()
            .any(|s| s == name || cx.world.files.exists(&paths.pod(s).join("containers").join(name)))
    };
    let stray = cgroups.into_iter().filter(|name| !known(name) && !of_orphan(name));
    found.extend(stray.map(|name| Orphan::Cgroup(cx.world.cgroups.path(&paths.default_cgroup(), &name))));
    let gone = images
        .into_iter()
        .filter(|u| cx.store.get::<ImageKind>(u).is_none() && !cx.store.quarantined(u));
    found.extend(gone.map(|uid| Orphan::Directory(format!("images/{uid}"))));
    let gone = declared
        .into_iter()
        .filter(|u| cx.store.get::<PodKind>(u).is_none() && !cx.store.quarantined(u));
    found.extend(gone.map(|uid| Orphan::Directory(format!("declared/{uid}"))));
    found.extend(
        trashed_mounts(cx, &paths.root.join("trash"))
            .into_iter()
            .map(Orphan::Mount),
    );
    let containers = cx.store.list::<ContainerKind>();
    let lone = containers.iter().filter(|c| !known(&c.spec.sandbox));
    found.extend(lone.map(|c| Orphan::Record(c.spec.sandbox.clone(), c.uid().to_owned())));
    Ok(found)
}

/// Mounts below the trash, deepest first: they keep it from being emptied.
fn trashed_mounts(cx: &Context, trash: &Path) -> Vec<PathBuf> {
    let mut below = cx.world.mounts.below(&[trash.to_owned()]).unwrap_or_default();
    below.retain(|mount| mount != trash);
    below
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
        Orphan::Mount(path) => cx.world.mounts.unmount_only(path),
        Orphan::Record(sandbox, uid) => {
            // Its things went with those of its sandbox.
            let files = &cx.world.files;
            if files.exists(&paths.pod(sandbox)) || files.exists(&paths.pod_state(sandbox)) {
                sweep_sandbox(cx, sandbox).await?;
            }
            cx.store.delete::<ContainerKind>(uid).await?;
            Ok(cx.store.erase::<ContainerKind>(uid).await?)
        }
    }
}

/// Unmounts what is mounted below directories of ours, deepest first.
fn unmount_below(cx: &Context, dirs: &[PathBuf]) -> Result<()> {
    for mount in cx.world.mounts.below(dirs)? {
        cx.world.mounts.unmount_only(&mount)?;
    }
    Ok(())
}

/// The cgroup that its sandbox's copy gives as parent, for one that is gone from the database.
fn parent(cx: &Context, dir: &Path) -> Option<String> {
    let copy = cx.world.files.read(&dir.join(COPY)).ok()??;
    let copy: serde_json::Value = serde_json::from_slice(&copy).ok()?;
    let parent = copy.pointer("/spec/cgroupParent")?.as_str()?.trim_end_matches('/');
    (parent.starts_with('/') && !parent.contains("..")).then(|| parent.to_owned())
}

async fn sweep_sandbox(cx: &Context, uid: &str) -> Result<()> {
    let paths = &cx.world.paths;
    if let Some(parent) = parent(cx, &paths.pod(uid)) {
        let mut below = names(cx, &paths.pod(uid).join("containers"));
        below.push(uid.to_owned());
        for name in below {
            let path = cx.world.cgroups.path(&parent, &name);
            cx.world.cgroups.kill(&path)?;
            cx.world.cgroups.remove(&path)?;
        }
    }
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
            let path = cx.world.cgroups.path(&paths.default_cgroup(), &name);
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
