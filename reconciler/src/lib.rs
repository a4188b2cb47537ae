//! The loop that makes the node match its records.
//!
//! ```text
//!   records --(change feed)--> engine: one applier per kind, passes of stages
//!                                |  observe, diff, act, undo
//!        sandbox  container  image  pod  node  session  debt
//!                                |
//!        streaming: exec, attach and port-forward, over HTTP on loopback
//!                                |
//!   world: netns network cgroup, archive content unpack layers images, mounts files passwd, shims watch trash clock,
//!          criu diff
//! ```
//!
//! To find code, ask "which noun?" (the folder), then "which step?" (the file). [`runtime`] opens and starts the whole;
//! the program `reconcile` (`bin/`) is the only part that names `cri`. The wished state of the node is made here and by
//! the shims that are started from here, nowhere else: [`world`] has the mechanics, while a stage by itself reads the
//! host, writes files of its own object and makes a pod's volumes. A status is computed from what is there, never
//! remembered. It must not answer callers (that is `cri`) nor keep records (that is `state`).

pub mod config;
pub mod container;
pub mod debt;
pub mod engine;
pub mod error;
pub mod image;
pub mod node;
pub mod pod;
pub mod repair;
pub mod runtime;
pub mod sandbox;
pub mod session;
pub mod streaming;
#[cfg(test)]
mod tests;
pub mod world;

pub use error::{Class, Error, Result};
