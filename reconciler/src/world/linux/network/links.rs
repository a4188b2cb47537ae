//! Links, addresses and routes of one net namespace, by rtnetlink.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use futures::TryStreamExt;
use nix::sched::{CloneFlags, setns};
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags, AddressMessage, AddressScope};
use rtnetlink::packet_route::link::{
    InfoBridgePort, InfoKind, InfoPortData, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
};
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute, RouteMessage};
use rtnetlink::{Handle, RouteMessageBuilder};

use super::Cidr;
use super::error::{Error, Result, netlink, system};

/// `RT_TABLE_MAIN`.
const MAIN_TABLE: u8 = 254;

/// An open connection to one namespace's rtnetlink.
pub struct Links {
    handle: Handle,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Links {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What is worth knowing of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    pub index: u32,
    pub name: String,
    pub alias: Option<String>,
    pub up: bool,
    /// Index of the bridge it is a port of.
    pub controller: Option<u32>,
    /// Index of a veth's other end, in its namespace.
    pub peer: Option<u32>,
    pub bridge: bool,
    /// The bridge sends packets back out of this port.
    pub hairpin: bool,
    pub mtu: Option<u32>,
}

impl Links {
    /// The daemon's own namespace.
    pub fn here() -> Result<Links> {
        let (connection, handle, _) = rtnetlink::new_connection().map_err(system("open", "a netlink socket"))?;
        Ok(Links {
            handle,
            task: tokio::spawn(connection),
        })
    }

    /// A sandbox's namespace. A netlink socket stays in the namespace of the thread that opened it, so only opening
    /// needs a thread there; `prepare` runs in it too.
    pub async fn inside(netns: &Path, prepare: impl FnOnce() -> io::Result<()> + Send + 'static) -> Result<Links> {
        let (runtime, shown) = (tokio::runtime::Handle::current(), netns.display().to_string());
        let open = move || {
            let _runtime = runtime.enter();
            prepare().map_err(system("prepare", &shown))?;
            rtnetlink::new_connection().map_err(system("open a netlink socket in", shown))
        };
        let (connection, handle, _) = run_inside(netns, open).await?;
        Ok(Links {
            handle,
            task: tokio::spawn(connection),
        })
    }

    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    pub async fn by_name(&self, name: &str) -> Result<Option<Link>> {
        match self.handle.link().get().match_name(name).execute().try_next().await {
            Ok(message) => Ok(message.map(link)),
            Err(e) if errno(&e) == Some(libc::ENODEV) => Ok(None),
            Err(e) => Err(netlink("look up link", name)(e)),
        }
    }

    pub async fn all(&self) -> Result<Vec<Link>> {
        let links = self.handle.link().get().execute().map_ok(link).try_collect().await;
        links.map_err(netlink("list", "links"))
    }

    /// Brings about `index`'s removal; absent is success.
    pub async fn delete(&self, link: &Link) -> Result<()> {
        match self.handle.link().del(link.index).execute().await {
            Err(e) if errno(&e) != Some(libc::ENODEV) => Err(netlink("delete link", &link.name)(e)),
            _ => Ok(()),
        }
    }

    /// The addresses of a link but for link-local ones.
    pub async fn addresses(&self, index: u32) -> Result<Vec<Cidr>> {
        let all = self.handle.address().get().set_link_index_filter(index).execute();
        let all: Vec<AddressMessage> = all.try_collect().await.map_err(netlink("list addresses of", index))?;
        Ok(all
            .iter()
            .filter(|m| m.header.scope != AddressScope::Link)
            .filter_map(address)
            .collect())
    }

    /// Adds an address, ready at once (no duplicate detection); there already is success.
    pub async fn add_address(&self, index: u32, address: Cidr) -> Result<()> {
        let mut request = self.handle.address().add(index, address.ip, address.prefix);
        if address.ip.is_ipv6() {
            request
                .message_mut()
                .attributes
                .push(AddressAttribute::Flags(AddressFlags::Nodad));
        }
        present(request.execute().await).map_err(netlink("add address", address))
    }

    pub async fn delete_address(&self, index: u32, address: Cidr) -> Result<()> {
        let all = self
            .handle
            .address()
            .get()
            .set_link_index_filter(index)
            .set_address_filter(address.ip)
            .execute();
        let all: Vec<AddressMessage> = all.try_collect().await.map_err(netlink("look up address", address))?;
        for message in all {
            self.handle
                .address()
                .del(message)
                .execute()
                .await
                .map_err(netlink("delete address", address))?;
        }
        Ok(())
    }

    /// The gateways of the default routes.
    pub async fn gateways(&self) -> Result<Vec<IpAddr>> {
        let mut gateways = Vec::new();
        for route in self.routes().await? {
            if route.header.destination_prefix_length == 0 && route.header.table == MAIN_TABLE {
                gateways.extend(route.attributes.iter().find_map(|a| match a {
                    RouteAttribute::Gateway(address) => ip(address),
                    _ => None,
                }));
            }
        }
        Ok(gateways)
    }

    /// The destinations of all routes but defaults, and the links they lead to.
    pub async fn destinations(&self) -> Result<Vec<(Cidr, Option<u32>)>> {
        let destinations = self.routes().await?.into_iter().filter_map(|route| {
            let out = route.attributes.iter().find_map(|a| match a {
                RouteAttribute::Oif(index) => Some(*index),
                _ => None,
            });
            let to = route.attributes.iter().find_map(|a| match a {
                RouteAttribute::Destination(address) => ip(address),
                _ => None,
            })?;
            Some((Cidr::new(to, route.header.destination_prefix_length)?, out))
        });
        Ok(destinations.collect())
    }

    /// The smallest MTU of the links that default routes leave by.
    pub async fn default_mtu(&self) -> Result<Option<u32>> {
        let mut by_index: BTreeMap<u32, u32> = BTreeMap::new();
        for link in self.all().await? {
            by_index.extend(link.mtu.map(|mtu| (link.index, mtu)));
        }
        let routes = self.routes().await?;
        let defaults = routes.iter().filter(|r| r.header.destination_prefix_length == 0);
        let leaving = defaults.flat_map(|r| &r.attributes).filter_map(|a| match a {
            RouteAttribute::Oif(index) => by_index.get(index).copied(),
            _ => None,
        });
        Ok(leaving.min())
    }

    async fn routes(&self) -> Result<Vec<RouteMessage>> {
        let mut routes = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut filter = RouteMessage::default();
            filter.header.address_family = family;
            let some = self.handle.route().get(filter).execute().try_collect::<Vec<_>>().await;
            routes.extend(some.map_err(netlink("list", "routes"))?);
        }
        Ok(routes)
    }

    /// Adds a default route; there already is success.
    pub async fn add_default_route(&self, index: u32, gateway: IpAddr) -> Result<()> {
        let route = match gateway {
            IpAddr::V4(ip) => RouteMessageBuilder::<Ipv4Addr>::new()
                .gateway(ip)
                .output_interface(index)
                .build(),
            IpAddr::V6(ip) => RouteMessageBuilder::<Ipv6Addr>::new()
                .gateway(ip)
                .output_interface(index)
                .build(),
        };
        present(self.handle.route().add(route).execute().await).map_err(netlink("add default route by", gateway))
    }
}

/// Runs something in a namespace, in a thread of its own.
pub async fn run_inside<T: Send + 'static>(
    netns: &Path,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let path = netns.to_owned();
    let (send, done) = tokio::sync::oneshot::channel();
    let work = move || drop(send.send(enter(&path).and_then(|()| work())));
    let thread = std::thread::Builder::new().name("netns-links".into()).spawn(work);
    thread.map_err(system("start", "a thread"))?;
    let died = |_| system("work in", netns.display())(io::Error::other("the thread died"));
    done.await.map_err(died)?
}

/// Moves the calling thread into a namespace; the thread must end with its work.
pub fn enter(netns: &Path) -> Result<()> {
    let file = File::open(netns).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => Error::NetnsGone(netns.to_owned()),
        _ => system("open", netns.display())(e),
    })?;
    match setns(&file, CloneFlags::CLONE_NEWNET) {
        // A pin without its namespace is an empty file.
        Err(nix::Error::EINVAL) => Err(Error::NetnsGone(netns.to_owned())),
        other => other.map_err(|e| system("enter", netns.display())(e.into())),
    }
}

/// Writes a kernel parameter if it differs.
pub fn sysctl(path: &str, value: &str) -> Result<()> {
    let path = Path::new("/proc/sys").join(path);
    let old = fs::read_to_string(&path).map_err(system("read", path.display()))?;
    if old.trim() == value {
        Ok(())
    } else {
        fs::write(&path, value).map_err(system("write", path.display()))
    }
}

/// The kernel's error number in a netlink error.
pub fn errno(error: &rtnetlink::Error) -> Option<i32> {
    match error {
        rtnetlink::Error::NetlinkError(message) => Some(-message.raw_code()),
        _ => None,
    }
}

/// EEXIST is what was wanted.
pub fn present(result: std::result::Result<(), rtnetlink::Error>) -> std::result::Result<(), rtnetlink::Error> {
    match result {
        Err(e) if errno(&e) == Some(libc::EEXIST) => Ok(()),
        other => other,
    }
}

/// What is worth knowing of a link, from its message.
pub fn link(message: LinkMessage) -> Link {
    let mut link = Link {
        index: message.header.index,
        name: String::new(),
        alias: None,
        up: message.header.flags.contains(LinkFlags::Up),
        controller: None,
        peer: None,
        bridge: false,
        hairpin: false,
        mtu: None,
    };
    for attribute in message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name = name,
            LinkAttribute::IfAlias(alias) => link.alias = Some(alias),
            LinkAttribute::Controller(index) => link.controller = Some(index),
            LinkAttribute::Link(index) => link.peer = Some(index),
            LinkAttribute::Mtu(mtu) => link.mtu = Some(mtu),
            LinkAttribute::LinkInfo(infos) => {
                link.bridge = infos.iter().any(|i| matches!(i, LinkInfo::Kind(InfoKind::Bridge)));
                link.hairpin = infos.iter().any(|i| match i {
                    LinkInfo::PortData(InfoPortData::BridgePort(port)) => {
                        port.contains(&InfoBridgePort::HairpinMode(true))
                    }
                    _ => false,
                });
            }
            _ => {}
        }
    }
    link
}

fn address(message: &AddressMessage) -> Option<Cidr> {
    // IFA_LOCAL is the address itself where it differs from IFA_ADDRESS (point-to-point).
    let local = message.attributes.iter().find_map(|a| match a {
        AddressAttribute::Local(ip) => Some(*ip),
        _ => None,
    });
    let plain = message.attributes.iter().find_map(|a| match a {
        AddressAttribute::Address(ip) => Some(*ip),
        _ => None,
    });
    Cidr::new(local.or(plain)?, message.header.prefix_len)
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(ip) => Some((*ip).into()),
        RouteAddress::Inet6(ip) => Some((*ip).into()),
        _ => None,
    }
}
