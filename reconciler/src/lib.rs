//! The loop that makes the node match its records.

pub mod image;
pub mod world;
