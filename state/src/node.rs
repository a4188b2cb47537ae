//! Node: what is true of this machine as a whole; one record, named `local`.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::condition::Condition;
use crate::error::{Error, Result};
use crate::resource::{Kind, Meta, Object};

pub type Node = Object<NodeKind>;

/// The only Node's name.
pub const LOCAL: &str = "local";

#[derive(Clone, Debug)]
pub struct NodeKind;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeSpec {
    /// Comma-separated CIDRs from UpdateRuntimeConfig.
    #[serde(default)]
    pub pod_cidr: String,
}

/// Conditions: `Ready` (first look done), `NetworkReady`, `StoreRebuilt`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    pub observed_generation: u64,
    pub conditions: Vec<Condition>,
    /// cgroupfs is used (the only driver for now).
    pub cgroup_v2: bool,
    /// Root directory of this instance, for verbose info.
    pub root: String,
    pub state: String,
    /// Directory of the image store (CRI `FilesystemIdentifier.mountpoint`).
    pub image_store: String,
    /// Bytes and inodes of all blobs and layers, without what containers write, and when they were counted (ns since the epoch).
    pub image_bytes: u64,
    pub image_inodes: u64,
    pub image_sampled: i64,
    /// Network configuration in use, for verbose info.
    pub network: serde_json::Value,
    pub recursive_read_only: bool,
    pub user_namespaces: bool,
}

impl Kind for NodeKind {
    const KIND: &'static str = "Node";
    const PLURAL: &'static str = "nodes";
    type Spec = NodeSpec;
    type Status = NodeStatus;

    fn validate(meta: &Meta, spec: &NodeSpec) -> Result<()> {
        if meta.name != LOCAL {
            return Err(Error::invalid("metadata.name", format!("the only node is {LOCAL:?}")));
        }
        for cidr in spec.pod_cidr.split(',').map(str::trim).filter(|cidr| !cidr.is_empty()) {
            let valid = cidr
                .split_once('/')
                .is_some_and(|(ip, bits)| match (ip.parse(), bits.parse::<u8>()) {
                    (Ok(IpAddr::V4(_)), Ok(bits)) => bits <= 32,
                    (Ok(IpAddr::V6(_)), Ok(bits)) => bits <= 128,
                    _ => false,
                });
            if !valid {
                return Err(Error::invalid(
                    "spec.podCidr",
                    format!("{cidr:?} is not a CIDR such as 10.1.0.0/24"),
                ));
            }
        }
        Ok(())
    }
}
