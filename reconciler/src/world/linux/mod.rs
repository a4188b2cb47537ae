//! The world of a real Linux node.
pub mod netns;
pub mod network;
