//! Images: what their documents say, and the one that is built in.

pub mod builtin;
pub mod manifest;
