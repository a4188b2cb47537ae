//! Messages of the protocol (`proto/shim/shim.proto`).

#![allow(missing_docs)]

include!(concat!(env!("OUT_DIR"), "/shim.v1.rs"));
