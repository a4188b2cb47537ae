//! Stage `netns`: the network, ipc and uts namespaces, and the user namespace, pinned by bind mounts.

use std::path::{Path, PathBuf};

use state::PodSandbox;
use state::sandbox::{IdMapping, NamespaceMode, SandboxKind, SandboxSpec, SandboxStatus, UserNamespace};

use super::host_network;
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::engine::{Context, live};
use crate::error::Result;
use crate::world::Paths;
use crate::world::linux::netns::{self, Pin, Pins, UserPin};
use crate::world::paths::DIR_MODE;

pub struct Netns;

/// Where a sandbox's namespaces are pinned; `None` is the host's.
pub fn pins(paths: &Paths, object: &PodSandbox) -> Pins {
    let dir = paths.pod_state(object.uid()).join("ns");
    let own_net = !host_network(&object.spec);
    Pins {
        net: own_net.then(|| paths.netns(object.uid())),
        ipc: (object.spec.namespaces.ipc != NamespaceMode::Node).then(|| dir.join("ipc")),
        uts: own_net.then(|| dir.join("uts")),
        hostname: object.spec.hostname.clone(),
        sysctls: object.spec.sysctls.clone(),
        user: user_namespace(&object.spec).map(|user| UserPin {
            path: dir.join("user"),
            uids: triples(&user.uids),
            gids: triples(&user.gids),
        }),
    }
}

/// The pod's own user namespace, if it has one.
pub fn user_namespace(spec: &SandboxSpec) -> Option<&UserNamespace> {
    let user = spec.namespaces.user.as_ref();
    user.filter(|user| user.mode == NamespaceMode::Pod)
}

fn triples(maps: &[IdMapping]) -> Vec<(u32, u32, u32)> {
    maps.iter()
        .map(|map| (map.container_id, map.host_id, map.length))
        .collect()
}

fn kinds(pins: &Pins) -> Vec<(netns::Kind, PathBuf)> {
    let user = pins.user.as_ref().map(|user| user.path.clone());
    let all = [
        (netns::Kind::Net, &pins.net),
        (netns::Kind::Ipc, &pins.ipc),
        (netns::Kind::Uts, &pins.uts),
        (netns::Kind::User, &user),
    ];
    all.into_iter()
        .filter_map(|(kind, path)| Some((kind, path.clone()?)))
        .collect()
}

/// Tells a lost pin from one not yet made.
fn marker(paths: &Paths, uid: &str) -> PathBuf {
    paths.pod_state(uid).join("pinned")
}

pub struct Have {
    wanted: usize,
    missing: Vec<(netns::Kind, PathBuf)>,
    made: bool,
    /// A living process of the pod, from which a pin can be had again.
    donor: Option<i32>,
    net: Option<PathBuf>,
}

impl Stage<SandboxKind> for Netns {
    type Have = Have;
    const NAME: &'static str = "netns";

    async fn observe(cx: &Context, object: &PodSandbox) -> Result<Have> {
        let paths = &cx.world.paths;
        let pins = pins(paths, object);
        let wanted = kinds(&pins);
        let mut missing = Vec::new();
        for (kind, path) in &wanted {
            if !matches!(cx.world.netns.observe(path)?, Pin::Ns { .. }) {
                missing.push((*kind, path.clone()));
            }
        }
        let made = cx.world.files.exists(&marker(paths, object.uid()));
        let donor = if made && !missing.is_empty() {
            donor(cx, object)?
        } else {
            None
        };
        Ok(Have {
            wanted: wanted.len(),
            missing,
            made,
            donor,
            net: pins.net,
        })
    }

    fn diff(_: &PodSandbox, have: &Have) -> Step {
        match (have.missing.is_empty(), have.made, have.donor) {
            (true, true, _) => Step::Keep,
            (_, false, _) => Step::Make(Why::new("Absent", "")),
            (false, true, Some(pid)) => Step::Remake(Why::risky(
                "PinLost",
                format!("a pin is gone; process {pid} still has the namespace"),
            )),
            (false, true, None) => Step::Lost(Why::risky("PinLost", "a namespace is gone with its processes")),
        }
    }

    fn present(have: &Have) -> bool {
        have.made || have.missing.len() < have.wanted
    }

    fn report(have: &Have, status: &mut SandboxStatus) {
        if let (Some(net), true) = (&have.net, have.missing.is_empty()) {
            status.netns = net.display().to_string();
        }
    }

    async fn act(cx: &Context, object: &PodSandbox, step: &Step) -> Result<()> {
        let pins = pins(&cx.world.paths, object);
        let marker = marker(&cx.world.paths, object.uid());
        if let Step::Remake(_) = step {
            let have = Self::observe(cx, object).await?;
            let Some(pid) = have.donor else { return Ok(()) };
            for (kind, path) in have.missing {
                cx.world.netns.rebind(&path, kind, pid.unsigned_abs())?;
            }
            return Ok(());
        }
        let dir = marker.parent().unwrap_or(Path::new("/"));
        cx.world.files.make_dir(dir, DIR_MODE)?;
        cx.world.netns.ensure(pins).await?;
        cx.world.files.replace(&marker, b"")
    }

    async fn undo(cx: &Context, object: &PodSandbox) -> Result<Undone> {
        for (_, path) in kinds(&pins(&cx.world.paths, object)) {
            cx.world.netns.remove(&path)?;
        }
        cx.world.files.unlink(&marker(&cx.world.paths, object.uid()))?;
        Ok(Undone::Done)
    }
}

fn donor(cx: &Context, object: &PodSandbox) -> Result<Option<i32>> {
    let paths = &cx.world.paths;
    let mut dirs = vec![paths.pod(object.uid())];
    let containers = cx.store.owned::<state::container::ContainerKind>(object.uid());
    dirs.extend(containers.iter().map(|c| paths.container(object.uid(), c.uid())));
    for dir in dirs {
        let run = cx.world.files.run_record(&Paths::run_record(&dir))?;
        if let Some(pid) = run.and_then(|run| live::pid(&cx.world, &run)) {
            return Ok(Some(pid));
        }
    }
    Ok(None)
}
