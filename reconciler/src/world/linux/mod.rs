//! The node itself.

pub mod archive;
pub mod content;
pub mod layers;
pub mod mounts;
pub mod passwd;
pub mod trash;
pub mod unpack;
mod xattr;
