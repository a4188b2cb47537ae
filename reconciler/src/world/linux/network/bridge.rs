//! The built-in network's links: one bridge per instance, one veth pair per pod.
//!
//! ```text
//!   host                                    | pod's netns
//!   rc<instance>  10.88.0.1/16 fd…::1/64    |
//!     +-- rcv<hash of uid> -----------------+-- eth0 10.88.0.7/16 fd…::7/64, default via .1
//! ```

use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use rtnetlink::packet_route::link::{InfoData, InfoKind, InfoVeth};
use rtnetlink::{LinkBridge, LinkBridgePort, LinkMessageBuilder, LinkUnspec, LinkVeth};
use sha2::{Digest, Sha256};

use super::attachment::Attachment;
use super::error::{Error, Result, netlink, system};
use super::ipam::gateway;
use super::links::{Link, Links, present, sysctl};
use super::{Cidr, Config};

/// The bridge of one instance.
#[derive(Debug, Clone)]
pub struct Bridge {
    pub name: String,
    instance: String,
    /// The pods' networks: IPv4, and IPv6 where the host has it.
    pub nets: Vec<Cidr>,
    mtu: Option<u32>,
}

/// The full mark of this instance's bridge, its alias.
pub fn mark(instance: &str) -> String {
    format!("reconcile:{instance}")
}

/// The full mark of a pod's link, its alias.
pub fn pod_mark(instance: &str, uid: &str) -> String {
    format!("reconcile:{instance}:{uid}")
}

/// The host end of a pod's veth pair: unique per pod, since the kernel takes a while to free the name.
pub fn host_link(instance: &str, uid: &str) -> String {
    format!("rcv{}", &hash(&pod_mark(instance, uid))[..12])
}

/// The name of an instance's bridge.
pub fn bridge_name(instance: &str) -> String {
    format!("rc{instance}")
}

fn hash(text: &str) -> String {
    Sha256::digest(text.as_bytes())
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
}

impl Bridge {
    /// Chooses the pods' networks and makes the bridge. A lock keeps two instances from choosing the same.
    pub async fn open(config: &Config, attachments: &[Attachment]) -> Result<Bridge> {
        let locked = tokio::task::spawn_blocking(lock).await;
        let _lock = locked.map_err(|e| system("take", "the lock")(e.into()))??;
        let links = Links::here()?;
        let bridge = Bridge::choose(config, attachments, &links).await?;
        bridge.ensure(&links).await?;
        Ok(bridge)
    }

    /// The bridge as it should be, reading only. The pods' networks are those configured, else those in use, else free
    /// ones.
    pub async fn choose(
        config: &Config,
        attachments: &[Attachment],
        links: &Links,
    ) -> Result<Bridge> {
        let name = bridge_name(&config.instance);
        let in_use = match links.by_name(&name).await? {
            Some(link) => links.addresses(link.index).await?,
            None => Vec::new(),
        };
        let mut in_use: Vec<Cidr> = in_use.into_iter().map(Cidr::network).collect();
        in_use.extend(
            attachments
                .iter()
                .flat_map(|a| &a.addresses)
                .map(|a| a.network()),
        );
        let of_family = |six: bool| in_use.iter().copied().find(|n| n.ip.is_ipv6() == six);
        let mut nets = vec![
            match checked("pod CIDR", config.pod_cidr4, false)?.or(of_family(false)) {
                Some(net) => net,
                None => free_net(links).await?,
            },
        ];
        if has_ipv6() {
            let configured = checked("IPv6 pod CIDR", config.pod_cidr6, true)?;
            nets.push(
                configured
                    .or(of_family(true))
                    .map_or_else(|| derived_net6(&config.instance), Ok)?,
            );
        }
        let mtu = links.default_mtu().await?.map(|mtu| mtu.min(1500));
        let instance = config.instance.clone();
        Ok(Bridge {
            name,
            instance,
            nets,
            mtu,
        })
    }

    /// Makes what is missing of the bridge; its index.
    pub async fn ensure(&self, links: &Links) -> Result<u32> {
        let (index, faults) = self.look(links).await?;
        if let Some(index) = index.filter(|_| faults.is_empty()) {
            return Ok(index);
        }
        tracing::info!(bridge = self.name, ?faults, "making the pods' bridge");
        let handle = links.handle();
        if index.is_none() {
            // A fixed hardware address, or the bridge would change it with its ports and pods would lose it.
            let new = LinkBridge::new(&self.name)
                .address(self.hardware_address())
                .mcast_snooping(false)
                .build();
            present(handle.link().add(new).execute().await)
                .map_err(netlink("make bridge", &self.name))?;
        }
        let up = LinkUnspec::new_with_name(&self.name)
            .alias(mark(&self.instance))
            .up()
            .build();
        handle
            .link()
            .change(up)
            .execute()
            .await
            .map_err(netlink("set up bridge", &self.name))?;
        let link = links
            .by_name(&self.name)
            .await?
            .ok_or_else(|| Error::ForeignLink {
                name: self.name.clone(),
            })?;
        for (path, value) in self.sysctls() {
            sysctl(&path, value)?;
        }
        for net in &self.nets {
            links.add_address(link.index, net.nth(1)).await?;
        }
        forward(self.nets.len() > 1)?;
        Ok(link.index)
    }

    /// The bridge's index, and what is wrong with it.
    pub async fn look(&self, links: &Links) -> Result<(Option<u32>, Vec<String>)> {
        let Some(link) = links.by_name(&self.name).await? else {
            return Ok((None, vec![format!("bridge {} is missing", self.name)]));
        };
        let mut faults = Vec::new();
        match &link.alias {
            Some(alias) if *alias == mark(&self.instance) => {}
            // Made a moment ago; the alias takes a second message.
            None if link.bridge => faults.push(format!("bridge {} has no mark yet", self.name)),
            _ => {
                return Err(Error::ForeignLink {
                    name: self.name.clone(),
                });
            }
        }
        if !link.up {
            faults.push(format!("bridge {} is down", self.name));
        }
        let addresses = links.addresses(link.index).await?;
        for missing in self
            .nets
            .iter()
            .map(|n| n.nth(1))
            .filter(|a| !addresses.contains(a))
        {
            faults.push(format!("bridge {} lacks {missing}", self.name));
        }
        let mut wanted = self.sysctls();
        wanted.push(("net/ipv4/ip_forward".into(), "1"));
        for (path, value) in wanted {
            let text = fs::read_to_string(Path::new("/proc/sys").join(&path));
            if text.is_ok_and(|t| t.trim() != value) {
                faults.push(format!("{} is not {value}", path.replace('/', ".")));
            }
        }
        Ok((Some(link.index), faults))
    }

    fn sysctls(&self) -> Vec<(String, &'static str)> {
        // For host ports on 127.0.0.1; the table's chain `guard` closes what else it opens.
        let mut all = vec![(format!("net/ipv4/conf/{}/route_localnet", self.name), "1")];
        if self.nets.iter().any(|n| n.ip.is_ipv6()) {
            all.push((format!("net/ipv6/conf/{}/accept_dad", self.name), "0"));
            // A pod must not be the host's router (CVE-2020-10749).
            all.push((format!("net/ipv6/conf/{}/accept_ra", self.name), "0"));
        }
        all
    }

    fn hardware_address(&self) -> Vec<u8> {
        let mut address = vec![0x02];
        address.extend(
            Sha256::digest(mark(&self.instance).as_bytes())
                .iter()
                .take(5),
        );
        address
    }
}

/// The pod's end, as the kernel has it.
pub struct Plug {
    inside: Links,
    host: Option<Link>,
    eth0: Option<Link>,
}

impl Plug {
    /// Looks at both ends of a pod's link, reading only.
    pub async fn look(links: &Links, instance: &str, attachment: &Attachment) -> Result<Plug> {
        Plug::open(links, instance, attachment, || Ok(())).await
    }

    /// The same, before something is changed.
    pub async fn take(links: &Links, instance: &str, attachment: &Attachment) -> Result<Plug> {
        Plug::open(links, instance, attachment, no_router_advertisements).await
    }

    async fn open(
        links: &Links,
        instance: &str,
        attachment: &Attachment,
        prepare: fn() -> io::Result<()>,
    ) -> Result<Plug> {
        let inside = Links::inside(&attachment.netns, prepare).await?;
        let host = links.by_name(&host_link(instance, &attachment.uid)).await?;
        let eth0 = inside.by_name(&attachment.ifname).await?;
        Ok(Plug { inside, host, eth0 })
    }

    fn paired(&self) -> Option<(&Link, &Link)> {
        let (host, eth0) = (self.host.as_ref()?, self.eth0.as_ref()?);
        (host.peer == Some(eth0.index) && eth0.peer == Some(host.index)).then_some((host, eth0))
    }

    /// What is wrong, in the order it is repaired.
    pub async fn faults(
        &self,
        instance: &str,
        bridge: Option<u32>,
        attachment: &Attachment,
    ) -> Result<Vec<String>> {
        let Some((host, eth0)) = self.paired() else {
            return Ok(vec![format!(
                "the pair {} - {} is missing",
                host_link(instance, &attachment.uid),
                "eth0"
            )]);
        };
        let mut faults = Vec::new();
        if !host.up
            || !host.hairpin
            || host.alias.as_ref() != Some(&pod_mark(instance, &attachment.uid))
        {
            faults.push(format!("{} is not up, marked and reflecting", host.name));
        }
        if bridge.is_none() || host.controller != bridge {
            faults.push(format!("{} is not on the bridge", host.name));
        }
        if !eth0.up {
            faults.push(format!("{} is down", eth0.name));
        }
        let addresses = self.inside.addresses(eth0.index).await?;
        for missing in attachment
            .addresses
            .iter()
            .filter(|a| !addresses.contains(a))
        {
            faults.push(format!("{} lacks {missing}", eth0.name));
        }
        let gateways = self.inside.gateways().await?;
        for missing in attachment.gateways.iter().filter(|g| !gateways.contains(g)) {
            faults.push(format!("the default route by {missing} is missing"));
        }
        Ok(faults)
    }

    /// Makes what is missing.
    pub async fn ensure(
        mut self,
        links: &Links,
        bridge: &Bridge,
        attachment: &Attachment,
    ) -> Result<()> {
        let index = bridge.ensure(links).await?;
        if self.paired().is_some() {
            let faults = self
                .faults(&bridge.instance, Some(index), attachment)
                .await?;
            if faults.is_empty() {
                return Ok(());
            }
            tracing::info!(uid = attachment.uid, ?faults, "restoring the pod's link");
        }
        self.pair(links, bridge, index, attachment).await?;
        let (inside, ifname) = (&self.inside, &attachment.ifname);
        let eth0 = inside
            .by_name(ifname)
            .await?
            .ok_or_else(|| Error::ForeignLink {
                name: ifname.clone(),
            })?;
        if !eth0.up {
            let up = LinkUnspec::new_with_index(eth0.index).up().build();
            inside
                .handle()
                .link()
                .change(up)
                .execute()
                .await
                .map_err(netlink("bring up", ifname))?;
        }
        let addresses = inside.addresses(eth0.index).await?;
        // An address of ours from an earlier attachment may be another pod's by now.
        let old = addresses
            .iter()
            .filter(|a| bridge.nets.iter().any(|n| n.contains(a.ip)));
        for old in old.filter(|a| !attachment.addresses.contains(a)) {
            inside.delete_address(eth0.index, *old).await?;
        }
        for new in attachment
            .addresses
            .iter()
            .filter(|a| !addresses.contains(a))
        {
            inside.add_address(eth0.index, *new).await?;
        }
        for gateway in &attachment.gateways {
            inside.add_default_route(eth0.index, *gateway).await?;
        }
        Ok(())
    }

    /// Makes or repairs the pair itself.
    async fn pair(
        &mut self,
        links: &Links,
        bridge: &Bridge,
        index: u32,
        attachment: &Attachment,
    ) -> Result<()> {
        let (name, handle) = (host_link(&bridge.instance, &attachment.uid), links.handle());
        let mark = pod_mark(&bridge.instance, &attachment.uid);
        if let Some(host) = self
            .host
            .as_ref()
            .filter(|h| h.alias.as_ref().is_some_and(|a| *a != mark))
        {
            return Err(Error::ForeignLink {
                name: host.name.clone(),
            });
        }
        if self.paired().is_none() {
            if self.eth0.is_some() {
                let name = format!("{} in {}", attachment.ifname, attachment.netns.display());
                return Err(Error::ForeignLink { name });
            }
            // Of an earlier namespace of this pod, on its way out.
            if let Some(host) = &self.host {
                links.delete(host).await?;
            }
            let netns = fs::File::open(&attachment.netns)
                .map_err(system("open", attachment.netns.display()))?;
            let sized = |builder: LinkMessageBuilder<LinkUnspec>| match bridge.mtu {
                Some(mtu) => builder.mtu(mtu),
                None => builder,
            };
            // In one message, since moving a link between namespaces takes tens of milliseconds. Neither end can be
            // up yet: a veth needs its peer for that.
            let peer =
                sized(LinkUnspec::new_with_name(&attachment.ifname).setns_by_fd(netns.as_raw_fd()))
                    .build();
            let mut pair = LinkMessageBuilder::<LinkVeth>::new_with_info_kind(InfoKind::Veth)
                .name(name.clone())
                .set_info_data(InfoData::Veth(InfoVeth::Peer(peer)))
                .controller(index);
            if let Some(mtu) = bridge.mtu {
                pair = pair.mtu(mtu);
            }
            handle
                .link()
                .add(pair.build())
                .execute()
                .await
                .map_err(netlink("make link", &name))?;
        } else if self
            .host
            .as_ref()
            .is_some_and(|h| h.controller != Some(index))
        {
            let port = LinkUnspec::new_with_name(&name).controller(index).build();
            handle
                .link()
                .change(port)
                .execute()
                .await
                .map_err(netlink("put on the bridge", &name))?;
        }
        // The kernel takes neither alias nor port flags with a new link.
        let port = LinkBridgePort::new(0)
            .name(name.clone())
            .alias(mark)
            .hairpin(true)
            .up()
            .build();
        handle
            .link()
            .set_port(port)
            .execute()
            .await
            .map_err(netlink("set up link", &name))
    }
}

/// Takes an instance's bridge away; absent is success.
pub async fn remove(instance: &str) -> Result<()> {
    let links = Links::here()?;
    match links.by_name(&bridge_name(instance)).await? {
        Some(link) if link.alias == Some(mark(instance)) => links.delete(&link).await,
        _ => Ok(()),
    }
}

/// Removes the host end of a pod whose namespace has no pin any more; absent is success.
pub async fn unplug(instance: &str, uid: &str) -> Result<()> {
    let links = Links::here()?;
    match links.by_name(&host_link(instance, uid)).await? {
        Some(link)
            if link
                .alias
                .as_deref()
                .is_none_or(|a| a == pod_mark(instance, uid)) =>
        {
            links.delete(&link).await
        }
        _ => Ok(()),
    }
}

/// The pods of this instance that have a link.
pub async fn list(instance: &str) -> Result<Vec<String>> {
    let prefix = format!("{}:", mark(instance));
    let links = Links::here()?.all().await?;
    let uids = links.iter().filter_map(|l| {
        l.alias
            .as_deref()?
            .strip_prefix(&prefix)
            .map(str::to_string)
    });
    Ok(uids.collect())
}

/// New links of a pod take no router advertisements: a neighbour could send them. Runs inside its namespace.
fn no_router_advertisements() -> io::Result<()> {
    let path = "/proc/sys/net/ipv6/conf/default/accept_ra";
    match fs::read_to_string(path) {
        Ok(value) if value.trim() != "0" => fs::write(path, "0"),
        _ => Ok(()),
    }
}

/// The lock `ip netns` takes too; held while networks are chosen.
fn lock() -> Result<Flock<fs::File>> {
    let dir = PathBuf::from(super::super::netns::NETNS_DIR);
    fs::create_dir_all(&dir).map_err(system("make directory", dir.display()))?;
    let file = fs::File::open(&dir).map_err(system("open", dir.display()))?;
    Flock::lock(file, FlockArg::LockExclusive)
        .map_err(|(_, e)| system("lock", dir.display())(e.into()))
}

fn checked(what: &str, net: Option<Cidr>, six: bool) -> Result<Option<Cidr>> {
    match net {
        Some(net) if net.ip.is_ipv6() != six => Err(Error::PodCidr(format!(
            "{what} {net} is of the other family"
        ))),
        // Network, gateway, one pod, broadcast.
        Some(net) if net.size() < 4 => Err(Error::PodCidr(format!(
            "{what} {net} has no room for a pod"
        ))),
        other => Ok(other.map(Cidr::network)),
    }
}

/// The first of 10.88.0.0/16 … 10.127.0.0/16 that no route of the host overlaps.
async fn free_net(links: &Links) -> Result<Cidr> {
    let taken = links.destinations().await?;
    for second in 88..=127 {
        let net = Cidr {
            ip: [10, second, 0, 0].into(),
            prefix: 16,
        };
        if !taken.iter().any(|(t, _)| t.overlaps(net)) {
            return Ok(net);
        }
    }
    Err(Error::PodCidr(
        "10.88.0.0/16 to 10.127.0.0/16 are all routed elsewhere; configure another".into(),
    ))
}

/// A unique local /64 (RFC 4193) of the instance's own.
fn derived_net6(instance: &str) -> Result<Cidr> {
    let mut bytes = [0u8; 16];
    bytes[0] = 0xfd;
    for (to, from) in bytes[1..8]
        .iter_mut()
        .zip(Sha256::digest(mark(instance).as_bytes()))
    {
        *to = from;
    }
    Ok(Cidr {
        ip: bytes.into(),
        prefix: 64,
    })
}

/// Whether new links of this host get IPv6.
fn has_ipv6() -> bool {
    fs::read_to_string("/proc/sys/net/ipv6/conf/default/disable_ipv6")
        .is_ok_and(|v| v.trim() == "0")
}

/// Lets the host forward packets. A host that forwards IPv6 stops taking router advertisements unless told to go on
/// (`accept_ra` 2), and would lose its default route.
fn forward(six: bool) -> Result<()> {
    sysctl("net/ipv4/ip_forward", "1")?;
    let all = "/proc/sys/net/ipv6/conf/all/forwarding";
    if !six || fs::read_to_string(all).is_ok_and(|v| v.trim() == "1") {
        return Ok(());
    }
    let links = fs::read_dir("/proc/sys/net/ipv6/conf")
        .map_err(system("list", "/proc/sys/net/ipv6/conf"))?;
    for link in links.flatten() {
        let path = link.path().join("accept_ra");
        if fs::read_to_string(&path).is_ok_and(|v| v.trim() == "1") {
            fs::write(&path, "2").map_err(system("write", path.display()))?;
        }
    }
    sysctl("net/ipv6/conf/all/forwarding", "1")
}

/// The default routes of a pod with these networks.
pub fn gateways(nets: &[Cidr]) -> Vec<std::net::IpAddr> {
    nets.iter().copied().map(gateway).collect()
}
