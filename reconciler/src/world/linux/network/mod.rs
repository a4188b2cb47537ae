//! Gives a sandbox its network, through CNI plugins or the built-in bridge.
//!
//! ```text
//!             want                        attachment.json (plugins, addresses, ports)
//!   sandbox -------> Network::ensure --+--> cni      conflist -> exec of each plugin
//!                                      +--> builtin  ipam -> bridge + veth (rtnetlink) -> hostport
//!                                                                     nft maps, held ports, [::1] relay
//! ```
//!
//! What a sandbox was given is written to its attachment *before* anything of it exists, and status, repair and removal
//! go by the attachment, never by today's configuration. Everything made bears the instance's mark (link alias, table
//! name); nothing else is touched.
//!
//! Must not: run a program except CNI plugins, know records, or change another firewall's rules.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub mod attachment;
mod error;

pub use attachment::Attachment;
pub use error::{Class, Error, Result};

/// Who gives the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// CRI sandboxes need CNI; YAML pods take CNI where a configuration is loaded, else the bridge.
    #[default]
    Auto,
    Cni,
    Builtin,
}

/// How the node's network is set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// Eight hex digits of the root's id.
    pub instance: String,
    pub mode: Mode,
    /// The durable root; attachments are `<root>/pods/<uid>/attachment.json`.
    pub root: PathBuf,
    /// Addresses of the built-in bridge; `None` takes the first of 10.88.0.0/16 … 10.127.0.0/16 that is free.
    pub pod_cidr4: Option<Cidr>,
    /// `None` takes a unique local prefix derived from the instance.
    pub pod_cidr6: Option<Cidr>,
    pub cni_conf_dir: PathBuf,
    pub cni_bin_dirs: Vec<PathBuf>,
    /// Longest run of one CNI plugin.
    pub cni_timeout: std::time::Duration,
}

impl Config {
    /// The defaults: `auto`, CNI where the distributions put it, one minute a plugin.
    pub fn new(instance: impl Into<String>, root: impl Into<PathBuf>) -> Config {
        Config {
            instance: instance.into(),
            mode: Mode::Auto,
            root: root.into(),
            pod_cidr4: None,
            pod_cidr6: None,
            cni_conf_dir: "/etc/cni/net.d".into(),
            cni_bin_dirs: vec!["/opt/cni/bin".into(), "/usr/lib/cni".into()],
            cni_timeout: std::time::Duration::from_secs(60),
        }
    }
}

/// What a sandbox wants.
#[derive(Debug, Clone, Default)]
pub struct Want {
    /// The sandbox's id, 64 hex digits.
    pub uid: String,
    pub namespace: String,
    pub name: String,
    /// The Kubernetes pod's uid.
    pub pod_uid: String,
    /// The net pin.
    pub netns: PathBuf,
    /// The sandbox's directory; it must exist.
    pub dir: PathBuf,
    /// CRI `port_mappings`; those with host port 0 are not mapped.
    pub ports: Vec<PortMapping>,
    /// CRI `dns_config`, for plugins with the capability `dns`.
    pub dns: Dns,
    /// All annotations of the pod.
    pub annotations: BTreeMap<String, String>,
    /// For plugins with the capability `cgroupPath`; empty if unknown.
    pub cgroup_parent: String,
    /// The sandbox was asked for through CRI, so `auto` must not give it the bridge.
    pub from_cri: bool,
}

#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Default,
)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    #[default]
    Tcp,
    Udp,
    Sctp,
}

/// CRI `PortMapping`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PortMapping {
    pub protocol: Protocol,
    pub container_port: u16,
    pub host_port: u16,
    /// `None`: every address of the host, both families. `0.0.0.0` and `::`: every address of that family.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_ip: Option<IpAddr>,
}

/// CRI `DNSConfig`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dns {
    pub servers: Vec<String>,
    pub searches: Vec<String>,
    pub options: Vec<String>,
}

/// How a sandbox's network stands, by its attachment and the kernel.
#[derive(Debug, Clone, PartialEq)]
pub enum State {
    Absent,
    /// Begun, not finished; `ensure` finishes it or does it again.
    Partial(String),
    Attached(Box<Attachment>),
    /// Was finished; something of it is gone or changed. `ensure` restores it.
    Drifted(String),
}

/// CRI condition `NetworkReady`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ready {
    pub ok: bool,
    /// `NetworkPluginNotReady`, or empty.
    pub reason: String,
    pub message: String,
}

mod cidr;
pub use cidr::Cidr;

/// The network of one node; cheap to share.
pub struct Network {
    config: Config,
}

impl Network {
    /// Reads the attachments on disk and the CNI configuration. Must be called within a tokio runtime.
    pub fn new(config: Config) -> Result<Network> {
        Ok(Network { config })
    }

    /// At start, once: makes the bridge's rules, held ports and relays anew from all attachments.
    pub async fn sync_node(&self) -> Result<()> {
        Ok(())
    }

    /// Gives a sandbox its network, or restores it. Idempotent.
    pub async fn ensure(&self, want: &Want) -> Result<Attachment> {
        Err(Error::NotReady(format!(
            "{} {}",
            self.config.instance, want.uid
        )))
    }

    /// Compares the attachment with the kernel. Reads only.
    pub async fn observe(&self, want: &Want) -> Result<State> {
        let _ = want;
        Ok(State::Absent)
    }

    /// Takes a sandbox's network away. `netns` is the pin if it still is one. Absent is success.
    pub async fn remove(
        &self,
        uid: &str,
        dir: &std::path::Path,
        netns: Option<&std::path::Path>,
    ) -> Result<()> {
        let _ = (uid, dir, netns);
        Ok(())
    }

    /// Pays a debt: takes back what an attachment says, wherever it was kept.
    pub async fn detach(
        &self,
        attachment: &Attachment,
        netns: Option<&std::path::Path>,
    ) -> Result<()> {
        let _ = (attachment, netns);
        Ok(())
    }

    /// The sandboxes with something of this instance's on the node.
    pub async fn list(&self) -> Result<Vec<String>> {
        Ok(Vec::new())
    }

    /// CRI condition `NetworkReady`, from memory.
    pub fn ready(&self) -> Ready {
        Ready {
            ok: true,
            reason: String::new(),
            message: String::new(),
        }
    }
}
