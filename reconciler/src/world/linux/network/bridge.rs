//! The bridge of the built-in network, one per instance, and the choice of the pods' networks.
//!
//! ```text
//!   host                                    | pod's netns
//!   rc<instance>  10.88.0.1/16 fd…::1/64    |
//!     +-- rcv<hash of uid> -----------------+-- eth0 10.88.0.7/16 fd…::7/64, default via .1
//! ```

use std::fs;
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use rtnetlink::{LinkBridge, LinkUnspec};
use sha2::{Digest, Sha256};

use super::attachment::Attachment;
use super::error::{Error, Result, netlink, system};
use super::ipam::gateway;
use super::links::{Links, present, sysctl};
use super::{Cidr, Config};

/// The bridge of one instance.
#[derive(Debug, Clone)]
pub struct Bridge {
    pub name: String,
    pub instance: String,
    /// The pods' networks: IPv4, and IPv6 where the host has it.
    pub nets: Vec<Cidr>,
    /// Of the pods' links: the host's way out has no more.
    pub mtu: Option<u32>,
}

/// The full mark of this instance's bridge, its alias.
pub fn mark(instance: &str) -> String {
    format!("reconcile:{instance}")
}

/// The name of an instance's bridge.
pub fn bridge_name(instance: &str) -> String {
    format!("rc{instance}")
}

impl Bridge {
    /// Chooses the pods' networks and makes the bridge. A lock keeps two instances from choosing the same.
    pub async fn open(config: &Config, wished: &[Cidr], attachments: &[Attachment]) -> Result<Bridge> {
        let locked = tokio::task::spawn_blocking(lock).await;
        let _lock = locked.map_err(|e| system("take", "the lock")(e.into()))??;
        let links = Links::here()?;
        let bridge = Bridge::choose(config, wished, attachments, &links).await?;
        bridge.ensure(&links).await?;
        Ok(bridge)
    }

    /// The bridge as it should be, reading only. The pods' networks are those configured, else those in use, else those
    /// that the node was given, else free ones.
    pub async fn choose(config: &Config, wished: &[Cidr], attachments: &[Attachment], links: &Links) -> Result<Bridge> {
        let name = bridge_name(&config.instance);
        let in_use = match links.by_name(&name).await? {
            Some(link) => links.addresses(link.index).await?,
            None => Vec::new(),
        };
        let mut in_use: Vec<Cidr> = in_use.into_iter().map(Cidr::network).collect();
        in_use.extend(attachments.iter().flat_map(|a| &a.addresses).map(|a| a.network()));
        let of_family = |six: bool| {
            let mut all = in_use.iter().chain(wished).copied();
            all.find(|n| n.ip.is_ipv6() == six)
        };
        let mut nets = vec![
            match checked("pod CIDR", config.pod_cidr4.or(of_family(false)), false)? {
                Some(net) => net,
                None => free_net(links).await?,
            },
        ];
        if has_ipv6() {
            let known = checked("IPv6 pod CIDR", config.pod_cidr6.or(of_family(true)), true)?;
            nets.push(known.map_or_else(|| derived_net6(&config.instance), Ok)?);
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
            present(handle.link().add(new).execute().await).map_err(netlink("make bridge", &self.name))?;
        }
        shim::fault::point("bridge.ensure.torn");
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
        let link = links.by_name(&self.name).await?.ok_or_else(|| Error::ForeignLink {
            name: self.name.clone(),
        })?;
        for (path, value) in self.sysctls() {
            sysctl(&path, value)?;
        }
        shim::fault::point("bridge.ensure.up");
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
        for missing in self.nets.iter().map(|n| n.nth(1)).filter(|a| !addresses.contains(a)) {
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
        address.extend(Sha256::digest(mark(&self.instance).as_bytes()).iter().take(5));
        address
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

/// The lock `ip netns` takes too; held while networks are chosen.
fn lock() -> Result<Flock<fs::File>> {
    let dir = PathBuf::from(super::super::netns::NETNS_DIR);
    fs::create_dir_all(&dir).map_err(system("make directory", dir.display()))?;
    let file = fs::File::open(&dir).map_err(system("open", dir.display()))?;
    Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, e)| system("lock", dir.display())(e.into()))
}

fn checked(what: &str, net: Option<Cidr>, six: bool) -> Result<Option<Cidr>> {
    match net {
        Some(net) if net.ip.is_ipv6() != six => Err(Error::PodCidr(format!("{what} {net} is of the other family"))),
        // Network, gateway, one pod, broadcast.
        Some(net) if net.size() < 4 => Err(Error::PodCidr(format!("{what} {net} has no room for a pod"))),
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
    for (to, from) in bytes[1..8].iter_mut().zip(Sha256::digest(mark(instance).as_bytes())) {
        *to = from;
    }
    Ok(Cidr {
        ip: bytes.into(),
        prefix: 64,
    })
}

/// Whether new links of the calling thread's namespace get IPv6.
pub fn has_ipv6() -> bool {
    let off = |scope: &str| {
        let value = fs::read_to_string(format!("/proc/sys/net/ipv6/conf/{scope}/disable_ipv6"));
        value.is_ok_and(|v| v.trim() == "1")
    };
    Path::new("/proc/sys/net/ipv6").exists() && !off("all") && !off("default")
}

/// Lets the host forward packets. A host that forwards IPv6 stops taking router advertisements unless told to go on
/// (`accept_ra` 2), and would lose its default route.
fn forward(six: bool) -> Result<()> {
    sysctl("net/ipv4/ip_forward", "1")?;
    let all = "/proc/sys/net/ipv6/conf/all/forwarding";
    if !six || fs::read_to_string(all).is_ok_and(|v| v.trim() == "1") {
        return Ok(());
    }
    let links = fs::read_dir("/proc/sys/net/ipv6/conf").map_err(system("list", "/proc/sys/net/ipv6/conf"))?;
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
