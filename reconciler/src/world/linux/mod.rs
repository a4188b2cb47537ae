//! The world of a real Linux node.

pub mod apparmor;
pub mod archive;
pub mod cgroup;
pub mod clock;
pub mod content;
pub mod copy;
pub mod dial;
pub mod files;
pub mod garbage;
pub mod images;
pub mod layers;
pub mod mounts;
pub mod netns;
pub mod network;
pub mod passwd;
pub mod pull;
pub mod registry;
pub mod seed;
pub mod shims;
pub mod systemd;
pub mod trash;
pub mod unpack;
pub mod usage;
pub mod watch;
mod xattr;
