//! Placeholder.

pub mod container;
