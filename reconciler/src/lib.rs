//! The loop that makes the node match its records.
//!
//! ```text
//!   records --(change feed)--> engine: one applier per kind, passes of stages
//!                                |  observe, diff, act, undo
//!        sandbox  container  image  pod  node  session  debt
//!                                |
//!   world: netns network cgroups content layers mounts files shims watch trash
//! ```
//!
//! To find code, ask "which noun?" (the folder), then "which step?" (the file). Only this crate touches the node, and
//! only through [`world`]; a status is computed from what is there, never remembered. It must not answer callers (that
//! is `cri`) nor keep records (that is `state`).

pub mod container;
pub mod debt;
pub mod engine;
pub mod error;
pub mod image;
pub mod node;
pub mod pod;
pub mod runtime;
pub mod sandbox;
pub mod session;
pub mod world;

pub use error::{Class, Error, Result};
