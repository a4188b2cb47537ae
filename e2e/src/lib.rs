//! Harness of the end-to-end tests: the real daemon on a directory of its own, the real kernel as the judge.
//!
//! ```text
//!   test --> node   starts, kills, restarts `reconcile serve`; the command line beside it
//!        --> client speaks CRI to its socket         <-- pods  builds the requests
//!        --> images makes the archives it imports    <-- nasty makes those that lie, corpus odd ones from seeds
//!        --> hub    a real registry that skopeo fills; registry: one that misbehaves, served: images on it;
//!                   proxy: on the way to both
//!        --> boot   reboots, as far as a daemon can tell
//!        --> faults arms failpoints in the programs, asks again as a kubelet does
//!        --> cni    a CNI plugin that fails and hangs when told
//!        --> kubelet runs Kubernetes' own kubelet on its socket
//!        --> tools  runs other programs of the node; crictl: that one
//!        --> disk   file systems that lack something, for its root; hung: those that never answer
//!        --> leaks  reads /proc, mountinfo, cgroups, links, nft: what is there, what was left behind
//!        --> scrub  takes away what a failed test left
//!   peers     the same faults on another runtime, side by side
//!   chaos     pods live through CRI while everything is killed at random
//! ```
//!
//! Nothing here may ask the daemon what the daemon did to the node: `leaks` reads the kernel alone, and shares no
//! code with the crates under test. Tests run in parallel, each on its own root, state directory and socket.

pub mod boot;
pub mod chaos;
pub mod client;
pub mod cni;
pub mod corpus;
pub mod crictl;
pub mod disk;
pub mod faults;
pub mod hub;
pub mod hung;
pub mod images;
pub mod kubelet;
pub mod leaks;
pub mod nasty;
pub mod netns;
pub mod node;
pub mod peers;
pub mod pods;
pub mod port;
pub mod proxy;
pub mod registry;
pub mod scrub;
pub mod served;
pub mod tools;

/// The CRI's messages and clients.
#[allow(clippy::all, missing_docs)]
pub mod v1 {
    tonic::include_proto!("runtime.v1");
}

use std::time::{Duration, Instant};

/// Asks `look` until it answers `Ok`, at most for `limit`; then fails with its last answer.
///
/// For facts of the kernel that nobody announces (a link that goes after its namespace, a directory deleted behind).
pub async fn eventually<T>(limit: Duration, mut look: impl AsyncFnMut() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let start = Instant::now();
    loop {
        match look().await {
            Ok(found) => return Ok(found),
            Err(why) if start.elapsed() > limit => {
                return Err(why.context(format!("not so within {limit:?}")));
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}
