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

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

pub mod attachment;
pub mod bridge;
mod builtin;
mod cidr;
mod cni;
mod conflist;
mod conntrack;
mod error;
mod hostport;
mod ipam;
mod links;
mod netfilter;
mod nft;
mod plug;
mod plugin;
mod relay;
mod template;
#[cfg(test)]
mod tests;
mod watch;

pub use attachment::Attachment;
pub use cidr::Cidr;
pub use error::{Class, Error, Result};
pub use watch::Drift;

use attachment::Kind;
use builtin::Builtin;
use cni::Cni;
use conflist::{Loaded, Watched};
use plugin::Runner;

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
    /// Written to the CNI directory with the node's pod CIDRs, where no configuration is loaded.
    pub cni_template: Option<PathBuf>,
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
            cni_template: None,
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
    /// The CNI directory of the sandbox's runtime handler, if it has its own: CNI then gives the network, whatever the
    /// mode. It counts for a sandbox that has no attachment yet.
    pub cni_conf_dir: Option<PathBuf>,
    /// The sandbox was asked for through CRI, so `auto` must not give it the bridge.
    pub from_cri: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Default)]
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

/// The network of one node.
pub struct Network {
    config: Config,
    /// The node's CNI configuration.
    configured: Watched,
    /// Those of runtime handlers, by directory.
    of_handlers: RwLock<BTreeMap<PathBuf, Watched>>,
    /// Rises whenever another CNI configuration counts.
    changes: tokio::sync::watch::Sender<u64>,
    cni: Cni,
    builtin: Builtin,
    /// Why the plugins' STATUS said no, the last time it was asked.
    refusal: RwLock<Option<String>>,
}

impl Network {
    /// Loads the CNI configuration and watches it. Must be called within a tokio runtime.
    pub fn new(config: Config) -> Result<Network> {
        let changes = tokio::sync::watch::Sender::new(0);
        let configured = Watched::new(config.cni_conf_dir.clone(), changes.clone())?;
        let runner = Runner {
            dirs: config.cni_bin_dirs.clone(),
            timeout: config.cni_timeout,
        };
        let builtin = Builtin::new(config.clone());
        Ok(Network {
            config,
            configured,
            of_handlers: RwLock::default(),
            changes,
            cni: Cni::new(runner),
            builtin,
            refusal: RwLock::default(),
        })
    }

    /// The CNI configuration that counts for a sandbox which has no network yet.
    fn today(&self, want: &Want) -> Loaded {
        let Some(dir) = &want.cni_conf_dir else {
            return self.configured.get();
        };
        let watched = self.of_handlers.read().unwrap_or_else(PoisonError::into_inner);
        match watched.get(dir) {
            Some(watched) => watched.get(),
            // A reload has just taken it from the table.
            None => conflist::load(dir).map(Arc::new),
        }
    }

    /// Who gives a sandbox its network: who gave it, else as configured.
    fn kind(&self, want: &Want, have: Option<&Attachment>, today: &Loaded) -> Result<Kind> {
        let own = want.cni_conf_dir.is_some();
        match (have, self.config.mode, today) {
            (Some(have), ..) => Ok(have.kind),
            (None, Mode::Builtin, _) if !own => Ok(Kind::Builtin),
            (None, _, Ok(_)) => Ok(Kind::Cni),
            (None, Mode::Auto, Err(_)) if !own && !want.from_cri => Ok(Kind::Builtin),
            (None, _, Err(why)) => Err(Error::NotReady(why.clone())),
        }
    }

    /// The loaded CNI configuration, or why there is none; for verbose status.
    pub fn cni_config(&self) -> std::result::Result<serde_json::Value, String> {
        self.configured.get().map(|list| list.raw.clone())
    }
}

#[async_trait]
impl crate::world::Network for Network {
    fn describe(&self) -> serde_json::Value {
        fn told(watched: &Watched) -> serde_json::Value {
            match watched.get() {
                Ok(list) => serde_json::json!({ "conflist": list.raw }),
                Err(why) => serde_json::json!({ "lastCNILoadStatus": why }),
            }
        }
        let mut all = told(&self.configured);
        all["mode"] = format!("{:?}", self.config.mode).into();
        for (dir, watched) in &*self.of_handlers.read().unwrap_or_else(PoisonError::into_inner) {
            all["ofHandlers"][dir.display().to_string()] = told(watched);
        }
        all
    }

    fn use_conf_dirs(&self, dirs: &BTreeSet<PathBuf>) -> Result<()> {
        let mut all = self.of_handlers.write().unwrap_or_else(PoisonError::into_inner);
        let new = dirs.iter().filter(|dir| !all.contains_key(*dir));
        let watch = |dir: &PathBuf| Ok((dir.clone(), Watched::new(dir.clone(), self.changes.clone())?));
        let new = new.map(watch).collect::<Result<Vec<_>>>()?;
        let before = all.len();
        all.retain(|dir, _| dirs.contains(dir));
        if !new.is_empty() || all.len() < before {
            all.extend(new);
            self.changes.send_modify(|n| *n += 1);
        }
        Ok(())
    }

    fn use_pod_cidrs(&self, cidrs: &str) -> Result<()> {
        let cidrs = cidrs.split(',').map(str::trim).filter(|cidr| !cidr.is_empty());
        let cidrs = cidrs.map(str::parse).collect::<std::result::Result<Vec<Cidr>, _>>();
        let cidrs = cidrs.map_err(|why| Error::PodCidr(why.to_string()))?;
        match &self.config.cni_template {
            Some(template) if !cidrs.is_empty() && self.configured.get().is_err() => {
                template::render(template, &cidrs, &self.config.cni_conf_dir)?;
            }
            _ => {}
        }
        self.builtin.wish(cidrs);
        Ok(())
    }

    async fn sync_node(&self) -> Result<()> {
        self.builtin.sync().await
    }

    async fn ensure(&self, want: &Want) -> Result<Attachment> {
        let have = Attachment::read(&want.dir)?;
        let today = self.today(want);
        match self.kind(want, have.as_ref(), &today)? {
            Kind::Builtin => self.builtin.ensure(want, have).await,
            Kind::Cni => self.cni.ensure(want, have, today).await,
        }
    }

    async fn observe(&self, want: &Want) -> Result<State> {
        match Attachment::read(&want.dir) {
            Ok(None) => Ok(State::Absent),
            Ok(Some(have)) if have.kind == Kind::Cni => self.cni.observe(&have).await,
            Ok(Some(have)) => self.builtin.observe(have).await,
            Err(error @ Error::NewerAttachment { .. }) => Err(error),
            Err(error) => Ok(State::Partial(error.to_string())),
        }
    }

    async fn remove(&self, uid: &str, dir: &Path, netns: Option<&Path>) -> Result<()> {
        let have = Attachment::read(dir);
        if let Err(error @ Error::NewerAttachment { .. }) = have {
            return Err(error);
        }
        let have = have.unwrap_or_else(|error| {
            // Only the bridge's is ever cut short (CNI's is made durable first), and the bridge needs none.
            tracing::warn!(uid, %error, "removing a network without its attachment");
            None
        });
        match have {
            Some(have) if have.kind == Kind::Cni => {
                self.cni.delete(&have, netns).await?;
                Attachment::remove(dir)
            }
            have => self.builtin.remove(have, uid, netns, || Attachment::remove(dir)).await,
        }
    }

    async fn detach(&self, attachment: &Attachment, netns: Option<&Path>) -> Result<()> {
        match attachment.kind {
            Kind::Cni => self.cni.delete(attachment, netns).await,
            Kind::Builtin => {
                let uid = attachment.uid.clone();
                self.builtin
                    .remove(Some(attachment.clone()), &uid, netns, || Ok(()))
                    .await
            }
        }
    }

    async fn list(&self) -> Result<Vec<String>> {
        let mut uids: BTreeSet<String> = plug::list(&self.config.instance).await?.into_iter().collect();
        uids.extend(self.builtin.with_attachment().await?);
        Ok(uids.into_iter().collect())
    }

    async fn sweep_links(&self, uid: &str) -> Result<()> {
        plug::sweep(&self.config.instance, uid).await
    }

    async fn sweep_node(&self) -> Result<()> {
        self.builtin.sweep().await
    }

    async fn stale(&self) -> Result<Vec<String>> {
        self.builtin.stale().await
    }

    async fn mend(&self) -> Result<()> {
        self.builtin.mend().await
    }

    /// A directory without a configuration is wrong only where CNI was asked for, by the mode or for a handler; one
    /// that cannot be used is always.
    fn misconfigured(&self) -> Vec<(PathBuf, String)> {
        let mut all = Vec::new();
        let ready = self.ready();
        let dir = &self.config.cni_conf_dir;
        let asked = self.config.mode == Mode::Cni;
        if !ready.ok && self.config.mode != Mode::Builtin && (asked || conflist::has_files(dir)) {
            all.push((dir.clone(), ready.message));
        }
        let of_handlers = self.of_handlers.read().unwrap_or_else(PoisonError::into_inner);
        let bad = of_handlers
            .iter()
            .filter_map(|(dir, watched)| Some((dir.clone(), watched.get().err()?)));
        all.extend(bad);
        all
    }

    fn ready(&self) -> Ready {
        let refusal = self.refusal.read().unwrap_or_else(PoisonError::into_inner).clone();
        let why = match (self.config.mode, self.configured.get()) {
            (Mode::Builtin, _) => None,
            (_, Err(why)) => Some(why),
            (_, Ok(_)) => refusal,
        };
        match why {
            None => Ready {
                ok: true,
                reason: String::new(),
                message: String::new(),
            },
            Some(message) => Ready {
                ok: false,
                reason: "NetworkPluginNotReady".into(),
                message,
            },
        }
    }

    async fn probe(&self) {
        let refusal = match self.configured.get() {
            Ok(list) => self.cni.status(&list).await.err().map(|e| e.to_string()),
            Err(_) => None,
        };
        *self.refusal.write().unwrap_or_else(PoisonError::into_inner) = refusal;
    }

    fn drift(&self) -> Result<tokio::sync::mpsc::Receiver<Drift>> {
        watch::drift(&self.config.instance)
    }

    fn changes(&self) -> tokio::sync::watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn attachment(&self, dir: &Path) -> Result<Option<Attachment>> {
        Attachment::read(dir)
    }

    fn forget(&self, dir: &Path) -> Result<()> {
        Attachment::remove(dir)
    }
}

/// The addresses of an attachment: the primary (the first IPv4, else the first), and the rest in order.
pub fn ips(attachment: &Attachment) -> (Option<IpAddr>, Vec<IpAddr>) {
    attachment.ips()
}
