//! Desired-state records: what should be, durably; and what is, in memory.
//!
//! ```text
//!   put / update / delete          watch, wait
//!        |                             ^
//!        v                             |  published only after fsync
//!   +---------+   batch + fdatasync  +--------+     set_status (memory only)
//!   |  store  | -------------------> | memory | <------------------- controllers
//!   +---------+    durable.rs        +--------+
//! ```
//!
//! It holds the kinds (`sandbox`, `container`, `image`, `pod`, `node`, `session`, `pull`, `secret`, `debt`), validates
//! their wishes, keeps them on disk (`durable`; sessions, pulls and secrets in memory only, `volatile`; questions about
//! usage pass through, `usage`), rebuilds them from copies (`restore`), indexes them by name and owner, tells watchers of every
//! change, and parses the YAML forms. It must not do work: no process, mount or socket is touched here, and no other
//! crate of the workspace is named. A status is never stored: it is recomputed from the node by the kind's controller.

pub mod clock;
pub mod condition;
pub mod container;
pub mod debt;
pub mod disk;
pub mod error;
pub mod grant;
pub mod image;
pub mod meter;
pub mod node;
pub mod pod;
pub mod pull;
pub mod reference;
pub mod resource;
pub mod sandbox;
pub mod secret;
pub mod session;
pub mod store;
pub mod usage;
pub mod yaml;

mod check;
mod durable;
pub mod fault;
mod grown;
mod guard;
mod index;
mod kinds;
mod restore;
mod volatile;
mod watch;
mod writer;

pub use condition::{Condition, Truth};
pub use container::Container;
pub use debt::Debt;
pub use error::{Error, Result};
pub use grant::Grant;
pub use image::Image;
pub use node::Node;
pub use pod::Pod;
pub use pull::Pull;
pub use reference::Reference;
pub use resource::{Kind, Meta, Object, Owner};
pub use sandbox::PodSandbox;
pub use secret::Secret;
pub use session::Session;
pub use store::{New, Put, Store};
