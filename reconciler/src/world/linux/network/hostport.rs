//! Host ports of the built-in network: elements in the table's maps, a socket that holds each port, a relay for
//! `[::1]`, and stale UDP flows forgotten.
//!
//! Memory has every pod's ports; the table is made from it, never the other way round.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, listen, setsockopt, socket,
    sockopt,
};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::attachment::Attachment;
use super::error::{Error, Result, system};
use super::nft::{Element, Table};
use super::{PortMapping, Protocol, conntrack, relay};

/// The host ports of all pods.
pub struct HostPorts {
    table: Table,
    memory: Mutex<Memory>,
}

#[derive(Default)]
struct Memory {
    pods: HashMap<String, Pod>,
    /// The table is there, as far as this daemon knows.
    made: bool,
}

struct Pod {
    /// Namespace and name, for errors.
    who: String,
    ips: Vec<IpAddr>,
    ports: Vec<PortMapping>,
    elements: Vec<Element>,
    /// Dropped to free the ports.
    held: Vec<Held>,
}

enum Held {
    Socket { _fd: OwnedFd },
    Relay(JoinHandle<()>),
}

impl Held {
    /// Lets go of the port, and returns when it is free: an aborted task keeps its socket a moment longer. Not for the
    /// runtime's own threads.
    fn release(mut self) {
        if let Held::Relay(task) = &mut self {
            task.abort();
            let _ = Handle::current().block_on(task);
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Held::Relay(task) = self {
            task.abort();
        }
    }
}

impl HostPorts {
    pub fn new(table: Table) -> HostPorts {
        HostPorts {
            table,
            memory: Mutex::default(),
        }
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refused(&self) -> impl FnOnce(io::Error) -> Error {
        let name = format!("inet {}", self.table.name);
        system("change nftables table", name)
    }

    /// At start: the table and all ports anew. A port that another process has taken meanwhile still leads to its pod.
    pub fn sync(&self, attachments: &[Attachment]) -> Result<()> {
        let mut memory = self.memory();
        for attachment in attachments {
            let mut pod = Pod::new(attachment);
            for port in &pod.ports {
                match hold(port, &pod.ips) {
                    Ok(held) => pod.held.extend(held),
                    Err(error) => {
                        tracing::warn!(pod = pod.who, %error, "a host port cannot be held")
                    }
                }
            }
            memory.pods.insert(attachment.uid.clone(), pod);
        }
        self.rebuild(&mut memory)
    }

    fn rebuild(&self, memory: &mut Memory) -> Result<()> {
        let elements: Vec<Element> = memory.pods.values().flat_map(|p| p.elements.clone()).collect();
        self.table.rebuild(&elements).map_err(self.refused())?;
        memory.made = true;
        Ok(())
    }

    /// Maps a pod's ports, or restores them.
    pub fn ensure(&self, attachment: &Attachment) -> Result<()> {
        let mut memory = self.memory();
        if memory.pods.contains_key(&attachment.uid) {
            let fault = self.fault_of(&memory, attachment)?;
            return if fault.is_some() {
                self.rebuild(&mut memory)
            } else {
                Ok(())
            };
        }
        let mut pod = Pod::new(attachment);
        for port in &pod.ports {
            if let Some(other) = memory.pods.values().find(|p| p.ports.iter().any(|q| clash(port, q))) {
                return Err(taken(port, format!("pod {}", other.who)));
            }
        }
        for port in &pod.ports {
            pod.held.extend(hold(port, &pod.ips)?);
        }
        shim::fault::point("hostport.ensure.held");
        let elements = pod.elements.clone();
        memory.pods.insert(attachment.uid.clone(), pod);
        let made = if memory.made {
            self.table.change(&[], &elements)
        } else {
            Err(io::Error::from_raw_os_error(libc::ENOENT))
        };
        let made = match made {
            // Left by an earlier life, for memory has no such port; or the table is gone.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EEXIST | libc::ENOENT)) => self.rebuild(&mut memory),
            other => other.map_err(self.refused()),
        };
        if let Err(error) = made {
            memory.pods.remove(&attachment.uid);
            return Err(error);
        }
        drop(memory);
        shim::fault::point("hostport.ensure.torn");
        forget_before(&elements)
    }

    /// Takes a pod's ports away. Absent is success.
    pub fn remove(&self, attachment: &Attachment) -> Result<()> {
        let mut memory = self.memory();
        if let Some(pod) = memory.pods.get_mut(&attachment.uid) {
            let elements = std::mem::take(&mut pod.elements);
            let removed = match self.table.change(&elements, &[]) {
                // One of them is gone, or all.
                Err(e) if e.raw_os_error() == Some(libc::ENOENT) => self.rebuild(&mut memory),
                other => other.map_err(self.refused()),
            };
            if let Err(error) = removed {
                if let Some(pod) = memory.pods.get_mut(&attachment.uid) {
                    pod.elements = elements;
                }
                return Err(error);
            }
            if let Some(pod) = memory.pods.remove(&attachment.uid) {
                pod.held.into_iter().for_each(Held::release);
            }
        }
        drop(memory);
        if attachment.ports.iter().all(|p| p.protocol != Protocol::Udp) {
            return Ok(());
        }
        let ips: Vec<IpAddr> = attachment.addresses.iter().map(|a| a.ip).collect();
        // Such a flow is answered by the pod, though it was sent elsewhere.
        forget(|flow| ips.contains(&flow.answers_from) && flow.destination != flow.answers_from)
    }

    /// What is wrong with a pod's ports, by the kernel and, once this daemon serves any, by memory.
    pub fn fault(&self, attachment: &Attachment) -> Result<Option<String>> {
        self.fault_of(&self.memory(), attachment)
    }

    fn fault_of(&self, memory: &Memory, attachment: &Attachment) -> Result<Option<String>> {
        if memory.made && !memory.pods.contains_key(&attachment.uid) {
            return Ok(Some("the host ports are not held".into()));
        }
        let table = format!("inet {}", self.table.name);
        let Some(elements) = self.table.elements().map_err(system("read nftables table", &table))? else {
            return Ok(Some(format!("nftables table {table} is not whole")));
        };
        let missing = Pod::new(attachment)
            .elements
            .into_iter()
            .find(|e| !elements.contains(e));
        Ok(missing.map(|e| format!("host port {}/{} is not mapped", e.host_port, e.protocol.name())))
    }

    /// Mapped host ports that none of these attachments has; they are read after the rules.
    pub fn stale(&self, attachments: impl FnOnce() -> Result<Vec<Attachment>>) -> Result<Vec<String>> {
        let table = format!("inet {}", self.table.name);
        let found = self.table.mapped().map_err(system("read nftables table", table))?;
        let Some(found) = found.filter(|elements| !elements.is_empty()) else {
            return Ok(Vec::new());
        };
        let wanted: Vec<Element> = attachments()?.iter().flat_map(|a| Pod::new(a).elements).collect();
        let stale = found.iter().filter(|element| !wanted.contains(element));
        Ok(stale
            .map(|e| format!("{}/{}", e.host_port, e.protocol.name()))
            .collect())
    }

    /// The table anew, from memory.
    pub fn mend(&self) -> Result<()> {
        self.rebuild(&mut self.memory())
    }

    /// Takes the table away if no pod is left; whether it did.
    pub fn remove_if_idle(&self) -> Result<bool> {
        let mut memory = self.memory();
        if !memory.pods.is_empty() {
            return Ok(false);
        }
        memory.made = false;
        self.table.delete().map_err(self.refused())?;
        Ok(true)
    }
}

impl Pod {
    fn new(attachment: &Attachment) -> Pod {
        let ips: Vec<IpAddr> = attachment.addresses.iter().map(|a| a.ip).collect();
        let mut ports: Vec<PortMapping> = Vec::new();
        for port in attachment.ports.iter().filter(|p| p.host_port != 0) {
            if !ports.contains(port) {
                ports.push(port.clone());
            }
        }
        let elements = ports.iter().flat_map(|p| elements_of(p, &ips)).collect();
        let who = format!("{}/{}", attachment.namespace, attachment.name);
        Pod {
            who,
            ips,
            ports,
            elements,
            held: Vec::new(),
        }
    }
}

/// The elements of one port: one for each family that both it and the pod have.
fn elements_of(port: &PortMapping, ips: &[IpAddr]) -> Vec<Element> {
    let first = |six: bool| ips.iter().copied().find(|ip| ip.is_ipv6() == six);
    let pods: Vec<IpAddr> = match port.host_ip {
        None => first(false).into_iter().chain(first(true)).collect(),
        // The relay's.
        Some(ip) if ip == IpAddr::from(Ipv6Addr::LOCALHOST) => Vec::new(),
        Some(ip) => first(ip.is_ipv6()).into_iter().collect(),
    };
    let host_ip = port.host_ip.filter(|ip| !ip.is_unspecified());
    let (protocol, host_port, pod_port) = (port.protocol, port.host_port, port.container_port);
    pods.into_iter()
        .map(|pod_ip| Element {
            protocol,
            host_ip,
            host_port,
            pod_ip,
            pod_port,
        })
        .collect()
}

/// Whether two ports want the same place on the host.
fn clash(a: &PortMapping, b: &PortMapping) -> bool {
    let meet =
        |a: IpAddr, b: IpAddr| a == b || a.is_ipv4() == b.is_ipv4() && (a.is_unspecified() || b.is_unspecified());
    (a.protocol, a.host_port) == (b.protocol, b.host_port) && a.host_ip.zip(b.host_ip).is_none_or(|(a, b)| meet(a, b))
}

fn taken(port: &PortMapping, holder: String) -> Error {
    let address = port.host_ip.map_or("every address".into(), |ip| ip.to_string());
    Error::PortTaken {
        port: port.host_port,
        protocol: port.protocol.name(),
        address,
        holder,
    }
}

/// Binds a port's sockets, so that no other process gets the port: packets are led away before they reach them. Bound
/// is enough to hold; only where `[::1]` is meant they listen, for the relay.
fn hold(port: &PortMapping, ips: &[IpAddr]) -> Result<Vec<Held>> {
    let mut held = Vec::new();
    let addresses: Vec<IpAddr> = match port.host_ip {
        Some(ip) => vec![ip],
        None => vec![Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()],
    };
    for address in addresses {
        let place = SocketAddr::new(address, port.host_port);
        let loopback6 = address == IpAddr::from(Ipv6Addr::LOCALHOST) || address == IpAddr::from(Ipv6Addr::UNSPECIFIED);
        let relayed = loopback6 && port.protocol != Protocol::Sctp;
        let fd = match bound(port.protocol, place, relayed) {
            Ok(fd) => fd,
            Err(nix::Error::EADDRINUSE) => match holder(port.protocol, port.host_port) {
                Some(holder) => return Err(taken(port, holder)),
                // They go on: only what begins is led to the pod.
                None => {
                    tracing::info!(%place, "only connections of this host use the host port: mapped, but not held");
                    continue;
                }
            },
            // The host has no IPv6, or no SCTP: nothing to hold there.
            Err(nix::Error::EAFNOSUPPORT | nix::Error::EPROTONOSUPPORT | nix::Error::ESOCKTNOSUPPORT) => continue,
            Err(nix::Error::EADDRNOTAVAIL) if address.is_ipv6() => continue,
            Err(e) => return Err(system("bind host port", place)(e.into())),
        };
        let pod = ips.iter().find(|ip| ip.is_ipv6()).or(ips.first());
        held.push(match pod.filter(|_| relayed) {
            Some(ip) => {
                let pod = SocketAddr::new(*ip, port.container_port);
                relay(port.protocol, fd, pod).map_err(system("relay host port", place))?
            }
            None => Held::Socket { _fd: fd },
        });
    }
    Ok(held)
}

fn bound(protocol: Protocol, place: SocketAddr, relayed: bool) -> nix::Result<OwnedFd> {
    let family = if place.is_ipv6() {
        AddressFamily::Inet6
    } else {
        AddressFamily::Inet
    };
    let (kind, number) = match protocol {
        Protocol::Tcp => (SockType::Stream, SockProtocol::Tcp),
        Protocol::Udp => (SockType::Datagram, SockProtocol::Udp),
        Protocol::Sctp => (SockType::SeqPacket, SockProtocol::Sctp),
    };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = socket(family, kind, flags, number)?;
    // No SO_REUSEADDR: a socket that does not listen would share its port with any other that has it. An address need
    // not be there yet (virtual addresses come and go).
    if place.is_ipv6() {
        setsockopt(&fd, sockopt::Ipv6V6Only, &true)?;
    }
    // A listener shares with none, and must not wait for the last connections of the one before it.
    setsockopt(&fd, sockopt::ReuseAddr, &(relayed && protocol == Protocol::Tcp))?;
    setsockopt(&fd, sockopt::IpFreebind, &true)?;
    bind(fd.as_raw_fd(), &SockaddrStorage::from(place))?;
    Ok(fd)
}

/// Must run within the runtime.
fn relay(protocol: Protocol, fd: OwnedFd, pod: SocketAddr) -> io::Result<Held> {
    let task = if protocol == Protocol::Udp {
        let socket = tokio::net::UdpSocket::from_std(UdpSocket::from(fd))?;
        tokio::spawn(relay::udp(socket, pod))
    } else {
        listen(&fd, Backlog::new(128).unwrap_or(Backlog::MAXCONN))?;
        let listener = tokio::net::TcpListener::from_std(TcpListener::from(fd))?;
        tokio::spawn(relay::tcp(listener, pod))
    };
    Ok(Held::Relay(task))
}

/// Says who has a port that cannot be bound, as well as `/proc/net` knows. `None` if there are but connections, open
/// ones that began at this port by chance or such that were closed a moment ago: what is new does not come to them.
fn holder(protocol: Protocol, port: u16) -> Option<String> {
    let states = states(protocol, port);
    if states.is_empty() {
        // Bound sockets that do not listen are not in the tables.
        return Some("a socket of this host that does not listen, such as another instance's".to_string());
    }
    // A TCP socket that listens, a UDP socket that has no peer (include/net/tcp_states.h).
    let (listen, no_peer) = ("0A", "07");
    let receives = states.iter().any(|state| state == listen || state == no_peer);
    receives.then(|| format!("a process of this host (`ss -lnp sport = :{port}` names it)"))
}

/// The states of the sockets at a local port, by proc_pid_net(5).
fn states(protocol: Protocol, port: u16) -> Vec<String> {
    let tables = ["", "6"].map(|six| {
        let table = format!("/proc/thread-self/net/{}{six}", protocol.name());
        std::fs::read_to_string(table).unwrap_or_default()
    });
    let local = format!(":{port:04X}");
    let state = |line: &str| {
        let mut columns = line.split_whitespace().skip(1);
        columns
            .next()?
            .ends_with(&local)
            .then(|| columns.nth(1).map(str::to_owned))?
    };
    tables
        .iter()
        .flat_map(|table| table.lines().filter_map(state))
        .collect()
}

/// Forgets the UDP flows that were sent to these ports before they were mapped; they would stay as they are.
fn forget_before(elements: &[Element]) -> Result<()> {
    let ours: Vec<&Element> = elements.iter().filter(|e| e.protocol == Protocol::Udp).collect();
    if ours.is_empty() {
        return Ok(());
    }
    let interfaces = nix::ifaddrs::getifaddrs().map_err(|e| system("list", "addresses")(e.into()))?;
    let local: Vec<IpAddr> = interfaces
        .filter_map(|i| {
            let address = i.address?;
            let four = address.as_sockaddr_in().map(|a| IpAddr::from(a.ip()));
            four.or_else(|| address.as_sockaddr_in6().map(|a| IpAddr::from(a.ip())))
        })
        .collect();
    forget(|flow| {
        let here = flow.destination.is_loopback() || local.contains(&flow.destination);
        here && ours.iter().any(|e| {
            e.host_port == flow.destination_port
                && e.pod_ip != flow.answers_from
                && e.host_ip.is_none_or(|ip| ip == flow.destination)
        })
    })
}

fn forget(gone: impl Fn(&conntrack::Flow) -> bool) -> Result<()> {
    match conntrack::forget_udp(gone) {
        Ok(0) => {}
        Ok(count) => tracing::info!(count, "forgot UDP flows of a host port"),
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            tracing::warn!("this kernel lacks nf_conntrack_netlink: UDP clients may keep talking to a removed pod");
        }
        Err(e) => return Err(system("forget", "UDP flows")(e)),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(host_port: u16, host_ip: Option<&str>) -> PortMapping {
        let host_ip = host_ip.map(|ip| ip.parse().unwrap());
        PortMapping {
            protocol: Protocol::Tcp,
            container_port: 80,
            host_port,
            host_ip,
        }
    }

    #[test]
    fn clashes() {
        let all = port(1, None);
        assert!(clash(&all, &port(1, Some("10.0.0.1"))));
        assert!(clash(&port(1, Some("0.0.0.0")), &port(1, Some("10.0.0.1"))));
        assert!(clash(&port(1, Some("::")), &all));
        assert!(!clash(&port(1, Some("::")), &port(1, Some("10.0.0.1"))));
        assert!(!clash(&port(1, Some("10.0.0.2")), &port(1, Some("10.0.0.1"))));
        assert!(!clash(&all, &port(2, None)));
        assert!(!clash(
            &all,
            &PortMapping {
                protocol: Protocol::Udp,
                ..port(1, None)
            }
        ));
    }

    #[test]
    fn elements_by_family() {
        let ips: Vec<IpAddr> = ["10.0.0.2", "fd00::2"].map(|ip| ip.parse().unwrap()).into();
        assert_eq!(elements_of(&port(1, None), &ips).len(), 2);
        let four = elements_of(&port(1, Some("0.0.0.0")), &ips);
        assert_eq!((four.len(), four[0].pod_ip, four[0].host_ip), (1, ips[0], None));
        let one = elements_of(&port(1, Some("192.0.2.1")), &ips);
        assert_eq!((one.len(), one[0].host_ip), (1, Some("192.0.2.1".parse().unwrap())));
        assert!(elements_of(&port(1, Some("::1")), &ips).is_empty());
        assert!(elements_of(&port(1, Some("fd00::9")), &ips[..1]).is_empty());
    }
}
