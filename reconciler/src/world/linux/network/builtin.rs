//! The built-in network as a whole: addresses, then links, then host ports.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Map;
use tokio::sync::{OnceCell, RwLock};

use super::attachment::{self, Attachment, Kind, boot_id};
use super::bridge::{self, Bridge};
use super::error::{Error, Result, system};
use super::hostport::HostPorts;
use super::ipam::Ipam;
use super::links::{Links, run_inside};
use super::nft::Table;
use super::plug::{self, Plug};
use super::{Cidr, Config, State, Want};
use crate::world::linux::netns::{self, Pin};

/// The built-in network; its bridge is opened when the first pod needs it.
pub struct Builtin {
    config: Config,
    open: OnceCell<Open>,
    /// Read by whoever works on a pod, written by the sweep.
    busy: RwLock<()>,
    /// Networks to take where none are configured or in use.
    wished: Mutex<Vec<Cidr>>,
}

struct Open {
    bridge: Bridge,
    ipam: Mutex<Ipam>,
    ports: Arc<HostPorts>,
}

impl Open {
    fn ipam(&self) -> MutexGuard<'_, Ipam> {
        self.ipam.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Builtin {
    pub fn new(config: Config) -> Builtin {
        Builtin {
            config,
            open: OnceCell::new(),
            busy: RwLock::new(()),
            wished: Mutex::default(),
        }
    }

    fn wished(&self) -> Vec<Cidr> {
        self.wished.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Counts for a bridge that is not open yet.
    pub fn wish(&self, nets: Vec<Cidr>) {
        *self.wished.lock().unwrap_or_else(PoisonError::into_inner) = nets;
    }

    /// Opens the bridge and, from the attachments on disk, the leases and the table.
    async fn open(&self) -> Result<&Open> {
        self.open
            .get_or_try_init(|| async { self.open_with(self.attachments().await?).await })
            .await
    }

    async fn open_with(&self, attachments: Vec<Attachment>) -> Result<Open> {
        let bridge = Bridge::open(&self.config, &self.wished(), &attachments).await?;
        let mut ipam = Ipam::default();
        for attachment in &attachments {
            ipam.hold(&bridge.nets, attachment);
        }
        let ports = Arc::new(HostPorts::new(self.table(bridge.nets.clone())));
        blocking({
            let ports = ports.clone();
            move || ports.sync(&attachments)
        })
        .await?;
        Ok(Open {
            bridge,
            ipam: ipam.into(),
            ports,
        })
    }

    fn table(&self, pods: Vec<Cidr>) -> Table {
        let (name, bridge) = (
            Table::name_of(&self.config.instance),
            bridge::bridge_name(&self.config.instance),
        );
        Table { name, bridge, pods }
    }

    async fn attachments(&self) -> Result<Vec<Attachment>> {
        let pods = self.config.root.join("pods");
        blocking(move || attachments(&pods)).await
    }

    /// At start: if any pod is on the bridge, everything they share is made anew.
    pub async fn sync(&self) -> Result<()> {
        let attachments = self.attachments().await?;
        if !attachments.is_empty() {
            self.open.get_or_try_init(|| self.open_with(attachments)).await?;
        }
        Ok(())
    }

    pub async fn ensure(&self, want: &Want, have: Option<Attachment>) -> Result<Attachment> {
        let _busy = self.busy.read().await;
        let open = self.open().await?;
        let mut attachment = match have.filter(Attachment::of_this_boot) {
            Some(attachment) => attachment,
            None => self.begin(open, want).await?,
        };
        // The pin's name never changes, but a root may move.
        attachment.netns.clone_from(&want.netns);
        let links = Links::here()?;
        let plug = Plug::take(&links, &self.config.instance, &attachment).await?;
        plug.ensure(&links, &open.bridge, &attachment).await?;
        let (ports, ported) = (open.ports.clone(), attachment.clone());
        blocking(move || ports.ensure(&ported)).await?;
        if !attachment.complete {
            attachment.complete = true;
            attachment.write(&want.dir)?;
            tracing::info!(uid = want.uid, addresses = ?attachment.ips(), "attached to the bridge");
        }
        Ok(attachment)
    }

    /// Gives addresses and writes them down before they are used.
    async fn begin(&self, open: &Open, want: &Want) -> Result<Attachment> {
        let nets = &open.bridge.nets;
        let six = run_inside(&want.netns, || Ok(bridge::has_ipv6())).await?;
        let usable = |ip: IpAddr| ip.is_ipv4() || six;
        let mut addresses = open.ipam().allocate(nets, &want.uid)?;
        addresses.retain(|address| usable(address.ip));
        let gateways = bridge::gateways(nets).into_iter().filter(|g| usable(*g)).collect();
        let attachment = Attachment {
            version: 1,
            uid: want.uid.clone(),
            namespace: want.namespace.clone(),
            name: want.name.clone(),
            pod_uid: want.pod_uid.clone(),
            kind: Kind::Builtin,
            complete: false,
            boot_id: boot_id()?,
            netns: want.netns.clone(),
            ifname: "eth0".into(),
            addresses,
            gateways,
            ports: want.ports.iter().filter(|p| p.host_port != 0).cloned().collect(),
            cni: None,
            unknown: Map::new(),
        };
        attachment.write(&want.dir)?;
        Ok(attachment)
    }

    pub async fn observe(&self, attachment: Attachment) -> Result<State> {
        if !attachment.of_this_boot() {
            return Ok(State::Partial("made before the machine restarted".into()));
        }
        let links = Links::here()?;
        let (bridge, ports) = match self.open.get() {
            Some(open) => (open.bridge.clone(), open.ports.clone()),
            // Looking must not make anything.
            None => {
                let bridge = Bridge::choose(&self.config, &self.wished(), &self.attachments().await?, &links).await?;
                let ports = HostPorts::new(self.table(bridge.nets.clone()));
                (bridge, Arc::new(ports))
            }
        };
        let (index, mut faults) = bridge.look(&links).await?;
        match Plug::look(&links, &self.config.instance, &attachment).await {
            Ok(plug) => faults.extend(plug.faults(&self.config.instance, index, &attachment).await?),
            Err(Error::NetnsGone(path)) => faults.push(format!("the network namespace {} is gone", path.display())),
            Err(error) => return Err(error),
        }
        let ported = attachment.clone();
        faults.extend(blocking(move || ports.fault(&ported)).await?);
        Ok(match (attachment.complete, faults.is_empty()) {
            (true, true) => State::Attached(Box::new(attachment)),
            (true, false) => State::Drifted(faults.join("; ")),
            (false, true) => State::Partial("made, but not noted as made".into()),
            (false, false) => State::Partial(faults.join("; ")),
        })
    }

    /// Takes back rules and ports; the link goes with the namespace. `forget` removes the attachment, after which the
    /// addresses are free.
    pub async fn remove(
        &self,
        attachment: Option<Attachment>,
        uid: &str,
        netns: Option<&Path>,
        forget: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let _busy = self.busy.read().await;
        if let Some(attachment) = attachment.filter(Attachment::of_this_boot) {
            // Opened first, so that what an earlier daemon left of it is known.
            let ports = self.open().await?.ports.clone();
            blocking(move || ports.remove(&attachment)).await?;
        }
        let pinned = |path| matches!(netns::observe(path), Ok(Pin::Ns { .. }));
        if !netns.is_some_and(pinned) {
            plug::unplug(&self.config.instance, uid).await?;
        }
        forget()?;
        if let Some(open) = self.open.get() {
            open.ipam().release(uid);
        }
        Ok(())
    }

    /// The sandboxes with an attachment of any kind in the root.
    pub async fn with_attachment(&self) -> Result<Vec<String>> {
        let pods = self.config.root.join("pods");
        blocking(move || {
            let dirs = directories(&pods)?
                .into_iter()
                .filter(|d| d.join(attachment::FILE).exists());
            Ok(dirs
                .filter_map(|d| d.file_name()?.to_str().map(str::to_string))
                .collect())
        })
        .await
    }

    /// Mapped host ports of no attachment. The rules are read first: an attachment is written before its rule is made.
    pub async fn stale(&self) -> Result<Vec<String>> {
        let _alone = self.busy.write().await;
        let (table, pods) = (self.table(Vec::new()), self.config.root.join("pods"));
        blocking(move || HostPorts::new(table).stale(|| attachments(&pods))).await
    }

    /// Makes the table anew from memory if it has rules of no attachment.
    pub async fn mend(&self) -> Result<()> {
        if self.stale().await?.is_empty() {
            return Ok(());
        }
        let _alone = self.busy.write().await;
        match self.open.get() {
            Some(open) => {
                let ports = open.ports.clone();
                blocking(move || ports.mend()).await
            }
            None if self.attachments().await?.is_empty() => {
                let table = self.table(Vec::new());
                blocking(move || table.delete().map_err(|e| system("delete", "the nftables table")(e))).await
            }
            // Whoever opens the bridge makes it anew.
            None => Ok(()),
        }
    }

    /// Removes bridge and table when no pod is on them.
    pub async fn sweep(&self) -> Result<()> {
        let _alone = self.busy.write().await;
        if let Some(open) = self.open.get() {
            let ports = open.ports.clone();
            let idle = open.ipam().is_empty();
            if !idle || !blocking(move || ports.remove_if_idle()).await? {
                return Ok(());
            }
        } else if self.attachments().await?.is_empty() {
            let table = self.table(Vec::new());
            blocking(move || table.delete().map_err(|e| system("delete", "the nftables table")(e))).await?;
        } else {
            return Ok(());
        }
        bridge::remove(&self.config.instance).await
    }
}

/// This boot's attachments to the bridge. Unreadable ones hold nothing: they were cut short by a power failure, and
/// what they described went with it.
fn attachments(pods: &Path) -> Result<Vec<Attachment>> {
    let mut attachments = Vec::new();
    for path in directories(pods)? {
        match Attachment::read(&path) {
            Ok(Some(a)) if a.kind == Kind::Builtin && a.of_this_boot() => attachments.push(a),
            Ok(_) => {}
            Err(error) => tracing::warn!(%error, "an attachment cannot be read"),
        }
    }
    Ok(attachments)
}

fn directories(pods: &Path) -> Result<Vec<PathBuf>> {
    match fs::read_dir(pods) {
        Ok(dir) => Ok(dir.flatten().map(|entry| entry.path()).collect()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(system("list", pods.display())(e)),
    }
}

/// Runs short work that may block in the kernel off the async threads.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let joined = tokio::task::spawn_blocking(work).await;
    joined.map_err(|e| system("finish", "work on host ports")(std::io::Error::other(e)))?
}
