//! Ranges of user and group ids for pods with a user namespace of their own (`hostUsers: false`).
//!
//! A range is not remembered anywhere but in the sandbox's record; the next one is whatever no record has.

use std::sync::Arc;

use state::PodSandbox;
use state::sandbox::{IdMapping, NamespaceMode, SandboxKind, UserNamespace};
use tokio::sync::Mutex;

use crate::engine::Context;
use crate::error::{Error, Result};

/// One choice at a time, its record included.
pub static CHOICE: Mutex<()> = Mutex::const_new(());

/// Ids of one pod: as many as Kubernetes gives.
const LENGTH: u32 = 1 << 16;
/// Ids that systemd's table of ranges (UIDS-GIDS) leaves free: 0x7000_0000 to 0x7fff_ffff.
const FIRST: u32 = 0x7000_0000;
const RANGES: u32 = 4096;

/// A range that no sandbox of this instance has.
pub fn choose(cx: &Context) -> Result<UserNamespace> {
    let taken = cx.store.list::<SandboxKind>();
    let from = u32::from_str_radix(&cx.world.paths.instance, 16).unwrap_or(0) % RANGES;
    // Not every instance at the same end: two of them on a node rarely meet.
    let host = (0..RANGES)
        .map(|i| FIRST + (from + i) % RANGES * LENGTH)
        .find(|host| !is_taken(*host, &taken));
    let host_id = host.ok_or_else(|| Error::Refused(format!("all {RANGES} ranges of user ids are in use")))?;
    let map = IdMapping {
        host_id,
        container_id: 0,
        length: LENGTH,
    };
    Ok(UserNamespace {
        mode: NamespaceMode::Pod,
        uids: vec![map],
        gids: vec![map],
    })
}

fn is_taken(host: u32, sandboxes: &[Arc<PodSandbox>]) -> bool {
    let overlaps = |map: &IdMapping| {
        let (start, end) = (u64::from(map.host_id), u64::from(map.host_id) + u64::from(map.length));
        start < u64::from(host) + u64::from(LENGTH) && u64::from(host) < end
    };
    let users = sandboxes
        .iter()
        .filter_map(|sandbox| sandbox.spec.namespaces.user.as_ref());
    users.flat_map(|user| user.uids.iter().chain(&user.gids)).any(overlaps)
}
