//! An address with a prefix length.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// An address and its prefix length, `10.88.0.5/16`; as a network, host bits are ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Cidr {
    pub ip: IpAddr,
    pub prefix: u8,
}

impl Cidr {
    /// `None` if the prefix is longer than the address.
    pub fn new(ip: IpAddr, prefix: u8) -> Option<Cidr> {
        (prefix <= bits(ip)).then_some(Cidr { ip, prefix })
    }

    /// The network, host bits zero.
    pub fn network(self) -> Cidr {
        Cidr {
            ip: from_number(self.ip, number(self.ip) & self.mask()),
            prefix: self.prefix,
        }
    }

    pub fn contains(self, ip: IpAddr) -> bool {
        self.ip.is_ipv4() == ip.is_ipv4() && number(ip) & self.mask() == number(self.ip) & self.mask()
    }

    pub fn overlaps(self, other: Cidr) -> bool {
        if self.prefix < other.prefix {
            self.contains(other.ip)
        } else {
            other.contains(self.ip)
        }
    }

    /// The `n`th address of the network, with its prefix length; 0 is the network itself.
    pub fn nth(self, n: u32) -> Cidr {
        let first = self.network();
        Cidr {
            ip: from_number(first.ip, number(first.ip) | u128::from(n)),
            prefix: self.prefix,
        }
    }

    /// Where an address stands in the network, the reverse of [`Cidr::nth`]; `None` beyond 32 bits or outside.
    pub fn index(self, ip: IpAddr) -> Option<u32> {
        if !self.contains(ip) {
            return None;
        }
        u32::try_from(number(ip) & !self.mask() & mask_of_width(bits(ip))).ok()
    }

    /// How many addresses there are, at most 2^32 - 1.
    pub fn size(self) -> u32 {
        let host_bits = bits(self.ip) - self.prefix;
        if host_bits >= 32 { u32::MAX } else { 1 << host_bits }
    }

    /// The netmask in the address's own bytes.
    pub fn mask_bytes(self) -> Vec<u8> {
        octets(from_number(self.ip, self.mask() & mask_of_width(bits(self.ip))))
    }

    fn mask(self) -> u128 {
        let host_bits = u32::from(bits(self.ip) - self.prefix);
        u128::MAX.checked_shl(host_bits).unwrap_or(0)
    }
}

/// The bytes of an address, network order.
pub fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

fn bits(ip: IpAddr) -> u8 {
    if ip.is_ipv4() { 32 } else { 128 }
}

fn mask_of_width(width: u8) -> u128 {
    if width == 128 { u128::MAX } else { (1 << width) - 1 }
}

fn number(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(ip) => u128::from(u32::from(ip)),
        IpAddr::V6(ip) => ip.into(),
    }
}

fn from_number(like: IpAddr, n: u128) -> IpAddr {
    match like {
        IpAddr::V4(_) => IpAddr::V4((n as u32).into()),
        IpAddr::V6(_) => IpAddr::V6(n.into()),
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.ip, self.prefix)
    }
}

impl FromStr for Cidr {
    type Err = String;

    fn from_str(text: &str) -> Result<Cidr, String> {
        let fail = || format!("{text:?} is not an address with a prefix length, such as 10.88.0.0/16");
        let (ip, prefix) = text.split_once('/').ok_or_else(fail)?;
        let ip = ip.parse().map_err(|_| fail())?;
        Cidr::new(ip, prefix.parse().map_err(|_| fail())?).ok_or_else(fail)
    }
}

impl Serialize for Cidr {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Cidr {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Cidr, D::Error> {
        String::deserialize(d)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic() {
        let net: Cidr = "10.88.3.4/16".parse().unwrap();
        assert_eq!(net.network().to_string(), "10.88.0.0/16");
        assert_eq!(net.nth(258).to_string(), "10.88.1.2/16");
        assert_eq!(net.index("10.88.1.2".parse().unwrap()), Some(258));
        assert_eq!(net.index("10.89.1.2".parse().unwrap()), None);
        assert_eq!(net.size(), 65536);
        assert_eq!(net.mask_bytes(), [255, 255, 0, 0]);
        let six: Cidr = "fd00:1::/64".parse().unwrap();
        assert_eq!(six.nth(2).to_string(), "fd00:1::2/64");
        assert_eq!(six.index("fd00:1::2".parse().unwrap()), Some(2));
        assert_eq!(six.size(), u32::MAX);
        assert!(!six.contains("10.88.0.1".parse().unwrap()));
    }

    #[test]
    fn overlap_is_by_the_shorter_prefix() {
        let parse = |s: &str| s.parse::<Cidr>().unwrap();
        assert!(parse("10.0.0.0/8").overlaps(parse("10.88.0.0/16")));
        assert!(parse("10.88.0.0/16").overlaps(parse("10.0.0.0/8")));
        assert!(parse("0.0.0.0/0").overlaps(parse("10.0.0.0/8")));
        assert!(!parse("10.88.0.0/16").overlaps(parse("10.89.0.0/16")));
        for bad in ["10.0.0.0", "10.0.0.0/33", "x/8", "::/129"] {
            assert!(bad.parse::<Cidr>().is_err(), "{bad}");
        }
    }
}
