//! Addresses of the built-in network. The attachments on disk are the leases; memory only mirrors them.
//!
//! A pod gets one number, which is its place in each of the pods' networks: 10.88.0.7 and fd…::7.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use super::Cidr;
use super::attachment::{Attachment, Kind};
use super::error::{Error, Result};

/// The numbers in use. 0 is the network, 1 the gateway.
#[derive(Debug, Default)]
pub struct Ipam {
    by_uid: HashMap<String, u32>,
    used: HashSet<u32>,
    last: u32,
}

impl Ipam {
    /// Holds the addresses of an attachment, where they are of these networks.
    pub fn hold(&mut self, nets: &[Cidr], attachment: &Attachment) {
        let number = attachment
            .addresses
            .iter()
            .find_map(|a| nets.iter().find_map(|n| n.index(a.ip)));
        if let Some(number) = number.filter(|_| attachment.kind == Kind::Builtin) {
            self.by_uid.insert(attachment.uid.clone(), number);
            self.used.insert(number);
            self.last = self.last.max(number);
        }
    }

    /// Gives a sandbox its addresses, the same ones if it has some. The attachment must be written before they are
    /// used. Numbers go round, so a free one rests as long as it can before its next owner.
    pub fn allocate(&mut self, nets: &[Cidr], uid: &str) -> Result<Vec<Cidr>> {
        let give = |number| Ok(nets.iter().map(|net| net.nth(number)).collect());
        if let Some(number) = self.by_uid.get(uid) {
            return give(*number);
        }
        // The last number of an IPv4 network is its broadcast address.
        let end = nets
            .iter()
            .map(|n| {
                if n.ip.is_ipv4() {
                    n.size().saturating_sub(1)
                } else {
                    n.size()
                }
            })
            .min();
        let end = end.unwrap_or(0);
        let number = (self.last.saturating_add(1)..end)
            .chain(2..end)
            .find(|n| *n >= 2 && !self.used.contains(n));
        let Some(number) = number else {
            let names: Vec<String> = nets.iter().map(|n| n.network().to_string()).collect();
            return Err(Error::NoAddress(names.join(", ")));
        };
        self.last = number;
        self.used.insert(number);
        self.by_uid.insert(uid.to_string(), number);
        give(number)
    }

    pub fn is_empty(&self) -> bool {
        self.by_uid.is_empty()
    }

    pub fn release(&mut self, uid: &str) {
        if let Some(number) = self.by_uid.remove(uid) {
            self.used.remove(&number);
        }
    }
}

/// The gateway of a pods' network: its first address.
pub fn gateway(net: Cidr) -> IpAddr {
    net.nth(1).ip
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nets() -> Vec<Cidr> {
        vec!["10.0.0.0/29".parse().unwrap(), "fd00::/64".parse().unwrap()]
    }

    #[test]
    fn numbers_go_round_and_end() {
        let (nets, mut ipam) = (nets(), Ipam::default());
        let first = ipam.allocate(&nets, "a").unwrap();
        assert_eq!(first, ["10.0.0.2/29".parse().unwrap(), "fd00::2/64".parse().unwrap()]);
        assert_eq!(ipam.allocate(&nets, "a").unwrap(), first, "a sandbox keeps its own");
        ipam.release("a");
        assert_eq!(
            ipam.allocate(&nets, "b").unwrap()[0].ip.to_string(),
            "10.0.0.3",
            "not the one just freed"
        );
        for uid in ["c", "d", "e", "f"] {
            ipam.allocate(&nets, uid).unwrap();
        }
        let error = ipam.allocate(&nets, "g").unwrap_err().to_string();
        assert!(error.contains("10.0.0.0/29"), "{error}");
        ipam.release("d");
        assert_eq!(ipam.allocate(&nets, "g").unwrap()[0].ip.to_string(), "10.0.0.5");
    }

    #[test]
    fn attachments_are_leases() {
        let (nets, mut ipam) = (nets(), Ipam::default());
        let mut attachment = crate::world::linux::network::attachment::tests::example();
        attachment.addresses = vec!["10.0.0.2/29".parse().unwrap()];
        ipam.hold(&nets, &attachment);
        assert_eq!(ipam.allocate(&nets, "other").unwrap()[0].ip.to_string(), "10.0.0.3");
        assert_eq!(
            ipam.allocate(&nets, &attachment.uid).unwrap()[0].ip.to_string(),
            "10.0.0.2"
        );
    }
}
