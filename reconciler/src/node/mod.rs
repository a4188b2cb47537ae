//! Node: what is true of the machine as a whole; and, in [`sample`], what pods use of it.

pub mod sample;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use state::Node;
use state::node::{LOCAL, NodeKind, NodeSpec, NodeStatus};
use state::store::{New, Opened};
use state::{Condition, Meta};

use crate::container::spec::HostFacts;
use crate::engine::controller::Next;
use crate::engine::{Context, conditions};
use crate::error::{Error, Result};

/// How often disk usage of the image store is counted while somebody runs the daemon.
const SAMPLE: Duration = Duration::from_secs(60);

/// Makes the one Node record if there is none.
pub async fn ensure(cx: &Context) -> Result<()> {
    if cx.store.by_name::<NodeKind>(LOCAL).is_some() {
        return Ok(());
    }
    let meta = Meta {
        name: LOCAL.to_owned(),
        ..Meta::default()
    };
    match cx
        .store
        .create::<NodeKind>(New {
            meta,
            spec: NodeSpec::default(),
        })
        .await
    {
        Ok(_) | Err(state::Error::AlreadyExists { .. }) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// Tells the network which pod CIDRs the node was given.
pub fn tell_network(cx: &Context) {
    let Some(node) = cx.store.by_name::<NodeKind>(LOCAL) else {
        return;
    };
    if let Err(error) = cx.world.network.use_pod_cidrs(&node.spec.pod_cidr) {
        tracing::warn!(%error, "the node's pod CIDRs are of no use");
    }
}

/// Looks at the node; `Ready` becomes true once the first look at all objects is done.
pub async fn pass(cx: &Arc<Context>, object: &Arc<Node>) -> Result<Next> {
    let old = &object.status;
    let ready = cx.looked.get().is_some();
    tell_network(cx);
    let network = cx.world.network.ready();
    let now = cx.world.clock.now_ns();
    let mut all = vec![match ready {
        true => conditions::holds("Ready"),
        false => conditions::fails(
            "Ready",
            "FirstLook",
            "the first look at all objects is not finished",
            false,
        ),
    }];
    all.push(match network.ok {
        true => conditions::holds("NetworkReady"),
        false => conditions::fails("NetworkReady", &network.reason, network.message, false),
    });
    all.push(match cx.world.mounts.overlay() {
        Ok(()) => conditions::holds("OverlayWorks"),
        Err(why) => conditions::fails("OverlayWorks", "RootFileSystemsAreCopies", why, false),
    });
    all.extend(store_conditions(cx.opened.clone()));
    conditions::keep_since(&mut all, &old.conditions, now);
    let host = HostFacts::read()
        .map_err(std::io::Error::other)
        .map_err(Error::io("look at", "the host"))?;
    let user_namespaces = user_namespaces(cx, host.kernel).await?;
    let (bytes, inodes) = cx.world.images.usage().await?;
    let status = NodeStatus {
        observed_generation: object.meta.generation,
        conditions: all,
        cgroup_v2: cx.world.cgroups.v2(),
        root: cx.world.paths.root.display().to_string(),
        state: cx.world.paths.state.display().to_string(),
        image_store: cx.world.images.dir().display().to_string(),
        image_bytes: bytes,
        image_inodes: inodes,
        image_sampled: now,
        network: cx.world.network.describe(),
        recursive_read_only: host.recursive_read_only(),
        user_namespaces,
    };
    let same = NodeStatus {
        image_sampled: old.image_sampled,
        ..status.clone()
    } == *old;
    if !same || now - old.image_sampled > 50_000_000_000 {
        cx.store.set_status::<NodeKind>(object.uid(), status);
    }
    Ok(Next::Again(SAMPLE))
}

/// Can pods have user namespaces? It takes overlay with id-mapped layers (Linux 5.19), and the store's file system.
async fn user_namespaces(cx: &Context, kernel: (u32, u32)) -> Result<bool> {
    static KNOWN: OnceLock<bool> = OnceLock::new();
    if let Some(known) = KNOWN.get() {
        return Ok(*known);
    }
    let found = kernel >= (5, 19) && cx.world.mounts.can_map().await;
    Ok(*KNOWN.get_or_init(|| found))
}

fn store_conditions(opened: Opened) -> Vec<Condition> {
    let mut all = Vec::new();
    if let Some(why) = opened.rebuilt {
        all.push(Condition {
            reason: "Damaged".to_owned(),
            message: why,
            ..conditions::holds("StoreRebuilt")
        });
    }
    if !opened.quarantined.is_empty() {
        let names: Vec<String> = opened
            .quarantined
            .iter()
            .map(|(kind, uid, why)| format!("{kind} {uid}: {why}"))
            .collect();
        all.push(conditions::fails(
            "RecordsReadable",
            "Quarantined",
            names.join("; "),
            false,
        ));
    }
    all
}
