//! Node: what is true of the machine as a whole; and, in [`sample`], what pods use of it.

pub mod sample;

use std::sync::Arc;
use std::time::Duration;

use state::Node;
use state::node::{LOCAL, NodeKind, NodeSpec, NodeStatus};
use state::store::New;
use state::{Condition, Meta};

use crate::container::spec::HostFacts;
use crate::engine::controller::Next;
use crate::engine::{Context, conditions};
use crate::error::{Error, Result};
use crate::world::linux::mounts::UserFiles;

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
    let host = HostFacts::read()
        .map_err(std::io::Error::other)
        .map_err(Error::io("look at", "the host"))?;
    let user_files = user_files(cx, host.kernel).await;
    all.push(match user_files {
        UserFiles::Mapped => conditions::holds("OwnersMappable"),
        UserFiles::Copied => {
            let why = "the root's file system has no id-mapped mounts: the root file system of a pod with a user \
                       namespace is a copy with other owners";
            conditions::fails("OwnersMappable", "RootFileSystemsAreCopies", why, false)
        }
        UserFiles::None => {
            let why = "this kernel makes no user namespaces, or lacks id-mapped mounts (Linux 5.19)";
            conditions::fails("OwnersMappable", "NoUserNamespaces", why, false)
        }
    });
    all.extend(store_conditions(cx));
    conditions::keep_since(&mut all, &old.conditions, now);
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
        user_namespaces: user_files != UserFiles::None,
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

/// What pods with user namespaces get. Their volumes take id-mapped mounts whatever the root lies on (Linux 5.19).
async fn user_files(cx: &Context, kernel: (u32, u32)) -> UserFiles {
    match kernel >= (5, 19) {
        true => cx.world.mounts.user_files().await,
        false => UserFiles::None,
    }
}

fn store_conditions(cx: &Context) -> Vec<Condition> {
    let mut all = Vec::new();
    if let Some(why) = cx.opened.rebuilt.clone() {
        all.push(Condition {
            reason: "Damaged".to_owned(),
            message: why,
            ..conditions::holds("StoreRebuilt")
        });
    }
    let quarantined = cx.quarantined();
    if !quarantined.is_empty() {
        let names: Vec<String> = quarantined
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
