//! The registry client against registries: one that misbehaves on demand, and Debian's.

#[path = "../../../e2e/src/registry.rs"]
#[allow(dead_code)] // Others use the rest.
mod server;

mod auth;
mod blobs;
mod common;
mod debian;
mod manifests;
mod mirrors;
