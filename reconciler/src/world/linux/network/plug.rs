//! A pod's link: a veth pair between the bridge and `eth0` in the pod's namespace.

use std::fs;
use std::io;
use std::os::fd::AsRawFd;

use rtnetlink::packet_route::link::{InfoData, InfoKind, InfoVeth};
use rtnetlink::{LinkBridgePort, LinkMessageBuilder, LinkUnspec, LinkVeth};
use sha2::{Digest, Sha256};
use shim::fault;

use super::attachment::Attachment;
use super::bridge::{Bridge, mark};
use super::error::{Error, Result, netlink, system};
use super::links::{Link, Links};

/// The full mark of a pod's link, its alias.
pub fn pod_mark(instance: &str, uid: &str) -> String {
    format!("reconcile:{instance}:{uid}")
}

/// The host end of a pod's veth pair: unique per pod, since the kernel takes a while to free the name.
pub fn host_link(instance: &str, uid: &str) -> String {
    format!("rcv{}", &hash(&pod_mark(instance, uid))[..12])
}

fn hash(text: &str) -> String {
    Sha256::digest(text.as_bytes())
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
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
    pub async fn faults(&self, instance: &str, bridge: Option<u32>, attachment: &Attachment) -> Result<Vec<String>> {
        let Some((host, eth0)) = self.paired() else {
            return Ok(vec![format!(
                "the pair {} - {} is missing",
                host_link(instance, &attachment.uid),
                "eth0"
            )]);
        };
        let mut faults = Vec::new();
        if !host.up || !host.hairpin || host.alias.as_ref() != Some(&pod_mark(instance, &attachment.uid)) {
            faults.push(format!("{} is not up, marked and reflecting", host.name));
        }
        if bridge.is_none() || host.controller != bridge {
            faults.push(format!("{} is not on the bridge", host.name));
        }
        if !eth0.up {
            faults.push(format!("{} is down", eth0.name));
        }
        let addresses = self.inside.addresses(eth0.index).await?;
        for missing in attachment.addresses.iter().filter(|a| !addresses.contains(a)) {
            faults.push(format!("{} lacks {missing}", eth0.name));
        }
        let gateways = self.inside.gateways().await?;
        for missing in attachment.gateways.iter().filter(|g| !gateways.contains(g)) {
            faults.push(format!("the default route by {missing} is missing"));
        }
        Ok(faults)
    }

    /// Makes what is missing.
    pub async fn ensure(mut self, links: &Links, bridge: &Bridge, attachment: &Attachment) -> Result<()> {
        let index = bridge.ensure(links).await?;
        if self.paired().is_some() {
            let faults = self.faults(&bridge.instance, Some(index), attachment).await?;
            if faults.is_empty() {
                return Ok(());
            }
            tracing::info!(uid = attachment.uid, ?faults, "restoring the pod's link");
        }
        fault::point("plug.ensure.before");
        self.pair(links, bridge, index, attachment).await?;
        fault::point("plug.ensure.paired");
        let (inside, ifname) = (&self.inside, &attachment.ifname);
        let eth0 = inside
            .by_name(ifname)
            .await?
            .ok_or_else(|| Error::ForeignLink { name: ifname.clone() })?;
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
        for new in attachment.addresses.iter().filter(|a| !addresses.contains(a)) {
            inside.add_address(eth0.index, *new).await?;
        }
        fault::point("plug.ensure.addressed");
        for gateway in &attachment.gateways {
            inside.add_default_route(eth0.index, *gateway).await?;
        }
        Ok(())
    }

    /// Makes or repairs the pair itself.
    async fn pair(&mut self, links: &Links, bridge: &Bridge, index: u32, attachment: &Attachment) -> Result<()> {
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
            let netns = fs::File::open(&attachment.netns).map_err(system("open", attachment.netns.display()))?;
            let sized = |builder: LinkMessageBuilder<LinkUnspec>| match bridge.mtu {
                Some(mtu) => builder.mtu(mtu),
                None => builder,
            };
            // In one message, since moving a link between namespaces takes tens of milliseconds. Neither end can be
            // up yet: a veth needs its peer for that.
            let peer = sized(LinkUnspec::new_with_name(&attachment.ifname).setns_by_fd(netns.as_raw_fd())).build();
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
        } else if self.host.as_ref().is_some_and(|h| h.controller != Some(index)) {
            let port = LinkUnspec::new_with_name(&name).controller(index).build();
            handle
                .link()
                .change(port)
                .execute()
                .await
                .map_err(netlink("put on the bridge", &name))?;
        }
        fault::point("plug.ensure.unmarked");
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

/// Removes the host end of a pod whose namespace has no pin any more; absent is success.
pub async fn unplug(instance: &str, uid: &str) -> Result<()> {
    fault::point("plug.remove.before");
    let links = Links::here()?;
    match links.by_name(&host_link(instance, uid)).await? {
        Some(link) if link.alias.as_deref().is_none_or(|a| a == pod_mark(instance, uid)) => links.delete(&link).await,
        _ => Ok(()),
    }
}

/// Deletes every link that bears a pod's mark, whatever it is called by now.
pub async fn sweep(instance: &str, uid: &str) -> Result<()> {
    let links = Links::here()?;
    let mark = pod_mark(instance, uid);
    for link in links
        .all()
        .await?
        .iter()
        .filter(|link| link.alias.as_deref() == Some(&mark))
    {
        links.delete(link).await?;
    }
    Ok(())
}

/// The pods of this instance that have a link.
pub async fn list(instance: &str) -> Result<Vec<String>> {
    let prefix = format!("{}:", mark(instance));
    let links = Links::here()?.all().await?;
    let uids = links
        .iter()
        .filter_map(|l| l.alias.as_deref()?.strip_prefix(&prefix).map(str::to_string));
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
