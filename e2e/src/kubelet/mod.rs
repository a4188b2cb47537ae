//! Kubernetes' own kubelet on a node's socket: no API server, pods from a directory of manifests.
//!
//! ```text
//!   manifests/NAME.json --> kubelet --CRI--> reconcile
//!                             |  read-only port: /pods, /stats/summary, /metrics…   (Kubelet::get)
//!                             |  main port, TLS: exec, attach, port-forward, logs   (Kubelet::url, Kubelet::fetch)
//! ```
//!
//! It runs in a mount namespace of its own, where the kernel's settings that it wants already read so and `/var/log`
//! and `/var/lib` are directories of the test: it changes nothing of the machine but the cgroups below its own. What it
//! mounts for volumes the daemon sees, by a mount of its directory that both share.

mod process;
mod status;

pub use process::{Kubelet, Settings};
pub use status::{container, container_id, process_of, restarts, started};

use std::fs;

use anyhow::Result;
use serde_json::{Value, json};

use crate::cni;
use crate::hub::Hub;
use crate::images::Image;
use crate::node::{Node, Options};

/// The name by which the tests' pods ask for busybox; a mirror of the test's registry serves it.
pub const IMAGE: &str = "registry.example/busybox:1";

/// A container of [`IMAGE`] that runs a shell script, with these further fields.
pub fn shell(name: &str, script: &str, further: Value) -> Value {
    let mut container = json!({ "name": name, "image": IMAGE, "imagePullPolicy": "IfNotPresent",
        "command": ["/bin/sh", "-c", script] });
    merge(&mut container, further);
    container
}

/// A script that says `ready`, then sleeps until SIGTERM, which it obeys at once.
pub const SLEEP: &str = "trap 'exit 0' TERM; echo ready; while :; do sleep 0.1; done";

/// Adds the fields of `further`.
pub fn merge(object: &mut Value, further: Value) {
    if let (Some(object), Value::Object(further)) = (object.as_object_mut(), further) {
        object.extend(further);
    }
}

/// A running node whose pulls of `registry.example` go to the hub, which gets busybox.
pub async fn node(hub: &Hub, options: Options) -> Result<Node> {
    let mut node = prepared(hub, options)?;
    node.serve().await?;
    Ok(node)
}

/// The same before its daemon is started; with the tests' CNI plugin unless its network is the built-in one.
pub fn prepared(hub: &Hub, options: Options) -> Result<Node> {
    hub.push(&Image::busybox("busybox:1")?, "busybox:1", &[])?;
    let builtin = options.network == "builtin";
    let node = Node::new(options)?;
    let certs = node.path("certs.d");
    fs::create_dir_all(certs.join("registry.example"))?;
    let hosts = format!(
        "[host.\"http://{}\"]\ncapabilities = [\"pull\", \"resolve\"]\n",
        hub.host()
    );
    fs::write(certs.join("registry.example/hosts.toml"), hosts)?;
    fs::create_dir_all(node.path("etc"))?;
    let mut config = format!("registry: {{certsDirs: ['{}']}}\n", certs.display());
    if !builtin {
        cni::install(&node)?;
        config += &fs::read_to_string(node.path("etc/config.yaml"))?;
    }
    node.file("etc/config.yaml", config)?;
    Ok(node)
}
