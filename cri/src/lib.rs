//! The container runtime interface: both CRI services and the records service on one socket.
//!
//! ```text
//!  request -> server.rs -> runtime/ images.rs records.rs      a change is logged at its begin and its end
//!                              |
//!                    translate/ (pure)  proto -> wish, status -> proto
//!                              |
//!                        converge.rs    write the record, wait for its status, map the outcome (error.rs)
//!                              |
//!                            state      memory and disk; the reconciler, which cri cannot name, does the work
//! ```
//!
//! It writes wishes and reads statuses. It must not touch the node: no files (its own socket apart), no processes, no
//! network. Whatever a call leaves behind is a record, so a call may be cut at any instant.

mod answer;
mod call;
mod converge;
mod error;
mod filter;
mod images;
mod pull;
pub mod records;
pub mod runtime;
mod server;
mod services;
mod subject;
pub mod translate;

pub use error::{Error, Result};
pub use server::{MESSAGE_LIMIT, bind, serve};
pub use services::{Config, Handler, OnceHook, OnceReport, ReloadHook, Services, Told};
