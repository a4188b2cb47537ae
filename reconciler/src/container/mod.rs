//! The container's rungs, and the pure code that they share.

pub mod seccomp;
pub mod spec;
