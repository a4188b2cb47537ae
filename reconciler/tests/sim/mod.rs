//! A node in memory, under the whole reconciler: real store logic, loop, stages and CRI; another kernel, disk, clock.
//!
//! ```text
//!   client ---CRI---> daemon { cri, state, reconciler }      one incarnation after the other
//!                        |  disk and clock     | world's parts: each change is a numbered step of somebody
//!                        v                     v
//!                   node { records, files and what a power cut leaves of them, processes, mounts, namespaces,
//!                          cgroups, links, leases, shims, images, events }   <--- the knife: before or after a step
//! ```
//!
//! `fs` and `node` are the model, `parts`, `shims`, `images` and `daemon` the ways to it, `client`, `scenarios` and
//! `case` what happens, `check` what must hold. Time is tokio's paused one; chance comes from the case's seed, also
//! that of the libraries (`chance`): a case is the same whenever it is played.

#![allow(dead_code)]

pub mod case;
pub mod chance;
pub mod check;
pub mod client;
pub mod daemon;
pub mod fs;
pub mod images;
pub mod node;
pub mod parts;
pub mod scenarios;
pub mod shims;
