//! Forgets tracked UDP flows, which else keep going to a pod that is gone.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::netfilter::{Attrs, Message, Socket, attr};

const SUBSYS_CTNETLINK: u16 = 1;
const GET: u16 = 1;
const DELETE: u16 = 2;
const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_ID: u16 = 12;

/// A tracked UDP flow, as its first packet had it and as its answers come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flow {
    pub destination: IpAddr,
    pub destination_port: u16,
    /// Who answers: the pod, when the flow was sent there by a host port.
    pub answers_from: IpAddr,
}

/// Forgets the UDP flows that `gone` picks; returns how many.
pub fn forget_udp(gone: impl Fn(&Flow) -> bool) -> io::Result<usize> {
    let socket = Socket::open()?;
    let mut picked: Vec<(u8, Attrs)> = Vec::new();
    let dump = Message {
        kind: SUBSYS_CTNETLINK << 8 | GET,
        flags: 0,
        family: 0,
        attrs: Attrs::new(),
    };
    socket.dump(&dump, |family, entry| {
        if parse(entry).is_some_and(|flow| gone(&flow)) {
            let mut name = Attrs::new();
            for kind in [CTA_TUPLE_ORIG | 0x8000, CTA_ID] {
                if let Some(data) = attr(entry, kind & 0x7fff) {
                    name = name.raw(kind, data);
                }
            }
            picked.push((family, name));
        }
    })?;
    let count = picked.len();
    for (family, attrs) in picked {
        let delete = Message {
            kind: SUBSYS_CTNETLINK << 8 | DELETE,
            flags: 0,
            family,
            attrs,
        };
        match socket.request(&delete) {
            // Ended by itself meanwhile.
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => {}
            other => other?,
        }
    }
    Ok(count)
}

fn parse(entry: &[u8]) -> Option<Flow> {
    let original = attr(entry, CTA_TUPLE_ORIG)?;
    let (_, destination) = addresses(original)?;
    let (answers_from, _) = addresses(attr(entry, CTA_TUPLE_REPLY)?)?;
    let protocol = attr(original, 2)?;
    if *attr(protocol, 1)?.first()? != libc::IPPROTO_UDP as u8 {
        return None;
    }
    let destination_port = u16::from_be_bytes(attr(protocol, 3)?.try_into().ok()?);
    Some(Flow {
        destination,
        destination_port,
        answers_from,
    })
}

/// CTA_TUPLE_IP: source and destination.
fn addresses(tuple: &[u8]) -> Option<(IpAddr, IpAddr)> {
    let ip = attr(tuple, 1)?;
    let four = |n| Some(IpAddr::from(Ipv4Addr::from(<[u8; 4]>::try_from(attr(ip, n)?).ok()?)));
    let six = |n| Some(IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(attr(ip, n)?).ok()?)));
    four(1).zip(four(2)).or_else(|| six(3).zip(six(4)))
}
