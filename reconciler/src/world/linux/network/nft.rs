//! The instance's nftables table: masquerading of the pods, and maps of host ports.
//!
//! ```text
//! table inet rc-<instance> {
//!   map hp4, hp6 { protocol . port : address . port }             every address of the host
//!   map hi4, hi6 { protocol . address . port : address . port }   one address of the host
//!   chain guard prerouting -300: from the bridge to or from 127.0.0.0/8 drop
//!   chain pre   prerouting -100: fib daddr type local jump hostports
//!   chain out   output     -100: ip6 daddr ::1 accept; fib daddr type local jump hostports
//!   chain hostports            : tcp flags other than syn return; dnat by hi4, hi6, hp4, hp6
//!   chain post  postrouting 100: masquerade loopback, pods to elsewhere, and pods to pods through a host port
//! }
//! ```
//!
//! `guard` is needed because 127.0.0.1 host ports take `route_localnet` on the bridge, which else would open the
//! host's loopback services to pods (CVE-2020-8558). A verdict of ours cannot overrule a drop in another table: a host
//! whose firewall drops forwarded packets must allow the bridge itself.
//!
//! Only a TCP connection's first packet is led to a pod: one that began before connections were tracked here, and has
//! by chance the host port as its own, goes on.
//!
//! The table is rebuilt whole in one transaction, so there is no moment without rules; a pod adds only elements.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::cidr::octets;
use super::netfilter::{Attrs, Message, Socket, attr, attrs};
use super::{Cidr, Protocol};

const NEWTABLE: u16 = 0;
const DELTABLE: u16 = 2;
const NEWCHAIN: u16 = 3;
const NEWRULE: u16 = 6;
const GETRULE: u16 = 7;
const NEWSET: u16 = 9;
const NEWSETELEM: u16 = 12;
const GETSETELEM: u16 = 13;
const DELSETELEM: u16 = 14;

const CREATE: u16 = 0x400;
const CREATE_APPEND: u16 = 0xc00;
const CREATE_EXCL: u16 = 0x600;

const NFPROTO_INET: u8 = 1;
const NFPROTO_IPV4: u8 = 2;
const NFPROTO_IPV6: u8 = 10;

const META_IIFNAME: u32 = 6;
const META_OIFNAME: u32 = 7;
const META_NFPROTO: u32 = 15;
const META_L4PROTO: u32 = 16;
/// First of the 4-byte registers; 1 is the first of 16 bytes.
const REG32: u32 = 8;

/// One host port: what it is on the host and in the pod. Both addresses are of one family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Element {
    pub protocol: Protocol,
    /// `None`: every address of the host.
    pub host_ip: Option<IpAddr>,
    pub host_port: u16,
    pub pod_ip: IpAddr,
    pub pod_port: u16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Map {
    Hi4,
    Hi6,
    Hp4,
    Hp6,
}

const MAPS: [Map; 4] = [Map::Hi4, Map::Hi6, Map::Hp4, Map::Hp6];

impl Map {
    fn name(self) -> &'static str {
        match self {
            Map::Hi4 => "hi4",
            Map::Hi6 => "hi6",
            Map::Hp4 => "hp4",
            Map::Hp6 => "hp6",
        }
    }

    fn six(self) -> bool {
        matches!(self, Map::Hi6 | Map::Hp6)
    }

    fn by_address(self) -> bool {
        matches!(self, Map::Hi4 | Map::Hi6)
    }

    /// Key type and length, data type and length. Types are those of nft (6 bits each when concatenated): ipv4_addr 7,
    /// ipv6_addr 8, inet_proto 12, inet_service 13; each part fills whole 4-byte registers.
    fn types(self) -> [u32; 4] {
        let (address, length) = if self.six() { (8, 16) } else { (7, 4) };
        let (key, key_length) = if self.by_address() {
            (12 << 12 | address << 6 | 13, 8 + length)
        } else {
            (12 << 6 | 13, 8)
        };
        [key, key_length, address << 6 | 13, length + 4]
    }

    fn id(self) -> u32 {
        self as u32 + 1
    }
}

impl Element {
    fn map(&self) -> Map {
        match (self.host_ip.is_some(), self.pod_ip.is_ipv6()) {
            (true, false) => Map::Hi4,
            (true, true) => Map::Hi6,
            (false, false) => Map::Hp4,
            (false, true) => Map::Hp6,
        }
    }

    fn key(&self) -> Vec<u8> {
        let mut key = vec![self.protocol.number(), 0, 0, 0];
        key.extend(self.host_ip.map(octets).unwrap_or_default());
        key.extend(padded_port(self.host_port));
        key
    }

    fn value(&self) -> Vec<u8> {
        let mut value = octets(self.pod_ip);
        value.extend(padded_port(self.pod_port));
        value
    }

    fn parse(map: Map, key: &[u8], value: &[u8]) -> Option<Element> {
        let address = if map.six() { 16 } else { 4 };
        let key_address = if map.by_address() { address } else { 0 };
        let protocol = match *key.first()? {
            6 => Protocol::Tcp,
            17 => Protocol::Udp,
            132 => Protocol::Sctp,
            _ => return None,
        };
        let host_ip = if map.by_address() {
            Some(ip(key.get(4..4 + address)?)?)
        } else {
            None
        };
        Some(Element {
            protocol,
            host_ip,
            host_port: port(key.get(4 + key_address..)?)?,
            pod_ip: ip(value.get(..address)?)?,
            pod_port: port(value.get(address..)?)?,
        })
    }
}

fn padded_port(port: u16) -> [u8; 4] {
    let [high, low] = port.to_be_bytes();
    [high, low, 0, 0]
}

fn port(bytes: &[u8]) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(..2)?.try_into().ok()?))
}

fn ip(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => Some(Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?).into()),
        _ => Some(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?).into()),
    }
}

/// The table of one instance.
#[derive(Debug, Clone)]
pub struct Table {
    pub name: String,
    pub bridge: String,
    /// The pods' networks, at most one of each family.
    pub pods: Vec<Cidr>,
}

impl Table {
    /// The name of an instance's table.
    pub fn name_of(instance: &str) -> String {
        format!("rc-{instance}")
    }

    /// Makes the table with exactly these elements, in the place of what was there.
    pub fn rebuild(&self, elements: &[Element]) -> io::Result<()> {
        let mut batch = vec![self.table(NEWTABLE), self.table(DELTABLE), self.table(NEWTABLE)];
        batch.extend(MAPS.map(|map| self.map(map)));
        for (name, hook) in CHAINS {
            batch.push(self.chain(name, *hook));
        }
        batch.extend(self.rules().into_iter().map(|(chain, rule)| {
            let attrs = Attrs::new().text(1, &self.name).text(2, chain).nest(4, rule.0);
            message(NEWRULE, CREATE_APPEND, attrs)
        }));
        batch.extend(elements.iter().map(|e| self.element(NEWSETELEM, CREATE_EXCL, e)));
        Socket::open()?.batch(&batch)
    }

    /// Takes some elements away and adds others, in one transaction. EEXIST: a key to add is there; ENOENT: one to
    /// take away is not, or the table is gone.
    pub fn change(&self, delete: &[Element], add: &[Element]) -> io::Result<()> {
        let mut batch: Vec<Message> = delete.iter().map(|e| self.element(DELSETELEM, 0, e)).collect();
        batch.extend(add.iter().map(|e| self.element(NEWSETELEM, CREATE_EXCL, e)));
        if batch.is_empty() {
            Ok(())
        } else {
            Socket::open()?.batch(&batch)
        }
    }

    /// All elements, or `None` if the table or a part of it is missing.
    pub fn elements(&self) -> io::Result<Option<Vec<Element>>> {
        let socket = Socket::open()?;
        let mut rules = 0;
        let all_rules = message(GETRULE, 0, Attrs::new().text(1, &self.name));
        match socket.dump(&all_rules, |_, rule| rules += usize::from(is_table(rule, &self.name))) {
            Err(e) if e.raw_os_error() != Some(libc::ENOENT) => Err(e),
            _ if rules != self.rules().len() => Ok(None),
            _ => self.mapped(),
        }
    }

    /// The same, whatever the table's rules are.
    pub fn mapped(&self) -> io::Result<Option<Vec<Element>>> {
        let socket = Socket::open()?;
        let mut elements = Vec::new();
        for map in MAPS {
            let wanted = message(GETSETELEM, 0, Attrs::new().text(1, &self.name).text(2, map.name()));
            let dumped = socket.dump(&wanted, |_, entry| {
                for (_, element) in attr(entry, 3).into_iter().flat_map(attrs) {
                    let data = |n| attr(element, n).and_then(|d| attr(d, 1));
                    elements.extend(data(1).zip(data(2)).and_then(|(k, v)| Element::parse(map, k, v)));
                }
            });
            match dumped {
                Err(e) if e.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
                other => other?,
            }
        }
        Ok(Some(elements))
    }

    /// Removes the table; absent is success.
    pub fn delete(&self) -> io::Result<()> {
        match Socket::open()?.batch(&[self.table(DELTABLE)]) {
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            other => other,
        }
    }

    fn table(&self, kind: u16) -> Message {
        message(
            kind,
            if kind == NEWTABLE { CREATE } else { 0 },
            Attrs::new().text(1, &self.name),
        )
    }

    fn map(&self, map: Map) -> Message {
        const NFT_SET_MAP: u32 = 8;
        let [key, key_length, data, data_length] = map.types();
        let attrs = Attrs::new()
            .text(1, &self.name)
            .text(2, map.name())
            .be32(3, NFT_SET_MAP);
        let attrs = attrs
            .be32(4, key)
            .be32(5, key_length)
            .be32(6, data)
            .be32(7, data_length)
            .be32(10, map.id());
        message(NEWSET, CREATE, attrs)
    }

    fn chain(&self, name: &str, hook: Option<(u32, i32, &str)>) -> Message {
        const ACCEPT: u32 = 1;
        let mut attrs = Attrs::new().text(1, &self.name).text(3, name);
        if let Some((hook, priority, kind)) = hook {
            let place = Attrs::new().be32(1, hook).be32(2, priority as u32);
            attrs = attrs.nest(4, place).be32(5, ACCEPT).text(7, kind);
        }
        message(NEWCHAIN, CREATE, attrs)
    }

    fn element(&self, kind: u16, flags: u16, element: &Element) -> Message {
        let mut one = Attrs::new().nest(1, Attrs::new().raw(1, &element.key()));
        if kind == NEWSETELEM {
            one = one.nest(2, Attrs::new().raw(1, &element.value()));
        }
        let list = Attrs::new().nest(1, one);
        let attrs = Attrs::new()
            .text(1, &self.name)
            .text(2, element.map().name())
            .nest(3, list);
        message(kind, flags, attrs)
    }

    fn rules(&self) -> Vec<(&'static str, Rule)> {
        let from_bridge = || {
            Rule::new()
                .meta(META_IIFNAME, 1)
                .equal(1, &interface(&self.bridge))
                .family(false)
        };
        let mut rules = vec![
            (
                "guard",
                from_bridge().payload(1, 16, 1, 1).equal(1, &[127]).verdict(DROP, None),
            ),
            (
                "guard",
                from_bridge().payload(1, 12, 1, 1).equal(1, &[127]).verdict(DROP, None),
            ),
            ("pre", Rule::new().local().verdict(JUMP, Some("hostports"))),
            // The answer to ::1 would be dropped; the daemon's relay listens there instead.
            (
                "out",
                Rule::new()
                    .family(true)
                    .address(true, DESTINATION)
                    .equal(1, &loopback6())
                    .verdict(ACCEPT, None),
            ),
            ("out", Rule::new().local().verdict(JUMP, Some("hostports"))),
        ];
        rules.push(("hostports", Rule::new().amid_connection().verdict(RETURN, None)));
        rules.extend(MAPS.map(|map| ("hostports", Rule::new().dnat(map))));
        let loopback = Rule::new().family(false).payload(1, 12, 1, 1).equal(1, &[127]);
        rules.push((
            "post",
            loopback
                .meta(META_OIFNAME, 1)
                .equal(1, &interface(&self.bridge))
                .masquerade(),
        ));
        for net in &self.pods {
            let from_pods = || Rule::new().family(net.ip.is_ipv6()).within(*net, SOURCE, true);
            rules.push(("post", from_pods().within(*net, DESTINATION, false).masquerade()));
            rules.push((
                "post",
                from_pods().within(*net, DESTINATION, true).translated().masquerade(),
            ));
        }
        rules
    }
}

type Hook = (u32, i32, &'static str);
const PREROUTING: u32 = 0;
const OUTPUT: u32 = 3;
const POSTROUTING: u32 = 4;
/// Name; hook, priority and type of a base chain.
const CHAINS: &[(&str, Option<Hook>)] = &[
    ("hostports", None),
    ("guard", Some((PREROUTING, -300, "filter"))),
    ("pre", Some((PREROUTING, -100, "nat"))),
    ("out", Some((OUTPUT, -100, "nat"))),
    ("post", Some((POSTROUTING, 100, "nat"))),
];

fn message(kind: u16, flags: u16, attrs: Attrs) -> Message {
    const SUBSYS_NFTABLES: u16 = 10;
    Message {
        kind: SUBSYS_NFTABLES << 8 | kind,
        flags,
        family: NFPROTO_INET,
        attrs,
    }
}

/// Old kernels ignore the table in a dump of rules.
fn is_table(rule: &[u8], name: &str) -> bool {
    attr(rule, 1).is_some_and(|t| t.strip_suffix(&[0]) == Some(name.as_bytes()))
}

fn interface(name: &str) -> [u8; 16] {
    let mut bytes = [0; 16];
    for (to, from) in bytes.iter_mut().zip(name.bytes()) {
        *to = from;
    }
    bytes
}

fn loopback6() -> [u8; 16] {
    Ipv6Addr::LOCALHOST.octets()
}

const DROP: i32 = 0;
const ACCEPT: i32 = 1;
const JUMP: i32 = -3;
const RETURN: i32 = -5;
const SOURCE: bool = true;
const DESTINATION: bool = false;

/// A list of expressions; attribute numbers are those of linux/netfilter/nf_tables.h.
struct Rule(Attrs);

impl Rule {
    fn new() -> Rule {
        Rule(Attrs::new())
    }

    fn expression(self, name: &str, data: Attrs) -> Rule {
        Rule(self.0.nest(1, Attrs::new().text(1, name).nest(2, data)))
    }

    fn meta(self, key: u32, register: u32) -> Rule {
        self.expression("meta", Attrs::new().be32(2, key).be32(1, register))
    }

    /// `base` 1 is the network header, 2 the transport header.
    fn payload(self, base: u32, offset: u32, length: u32, register: u32) -> Rule {
        self.expression(
            "payload",
            Attrs::new()
                .be32(1, register)
                .be32(2, base)
                .be32(3, offset)
                .be32(4, length),
        )
    }

    fn compare(self, register: u32, different: bool, value: &[u8]) -> Rule {
        let operator = u32::from(different);
        self.expression(
            "cmp",
            Attrs::new()
                .be32(1, register)
                .be32(2, operator)
                .nest(3, Attrs::new().raw(1, value)),
        )
    }

    fn equal(self, register: u32, value: &[u8]) -> Rule {
        self.compare(register, false, value)
    }

    fn mask(self, register: u32, mask: &[u8]) -> Rule {
        let zero = vec![0; mask.len()];
        let data = Attrs::new()
            .be32(1, register)
            .be32(2, register)
            .be32(3, mask.len() as u32);
        self.expression(
            "bitwise",
            data.nest(4, Attrs::new().raw(1, mask))
                .nest(5, Attrs::new().raw(1, &zero)),
        )
    }

    fn verdict(self, code: i32, chain: Option<&str>) -> Rule {
        let mut verdict = Attrs::new().be32(1, code as u32);
        if let Some(chain) = chain {
            verdict = verdict.text(2, chain);
        }
        self.expression(
            "immediate",
            Attrs::new().be32(1, 0).nest(2, Attrs::new().nest(2, verdict)),
        )
    }

    fn family(self, six: bool) -> Rule {
        self.meta(META_NFPROTO, 1)
            .equal(1, &[if six { NFPROTO_IPV6 } else { NFPROTO_IPV4 }])
    }

    fn address(self, six: bool, source: bool) -> Rule {
        let (offset, length) = match (six, source) {
            (false, true) => (12, 4),
            (false, false) => (16, 4),
            (true, true) => (8, 16),
            (true, false) => (24, 16),
        };
        self.payload(1, offset, length, 1)
    }

    fn within(self, net: Cidr, source: bool, inside: bool) -> Rule {
        let net = net.network();
        self.address(net.ip.is_ipv6(), source)
            .mask(1, &net.mask_bytes())
            .compare(1, !inside, &octets(net.ip))
    }

    /// `tcp flags & (fin | syn | rst | ack) != syn`.
    fn amid_connection(self) -> Rule {
        const TCP: u8 = 6;
        let (syn, of) = (0x02, 0x17);
        self.meta(META_L4PROTO, 1)
            .equal(1, &[TCP])
            .payload(2, 13, 1, 1)
            .mask(1, &[of])
            .compare(1, true, &[syn])
    }

    /// `fib daddr type local`.
    fn local(self) -> Rule {
        const RTN_LOCAL: u32 = 2;
        const ADDRTYPE: u32 = 3;
        const DADDR: u32 = 2;
        let data = Attrs::new().be32(1, 1).be32(2, ADDRTYPE).be32(3, DADDR);
        self.expression("fib", data).equal(1, &RTN_LOCAL.to_ne_bytes())
    }

    /// `ct status dnat`.
    fn translated(self) -> Rule {
        const STATUS: u32 = 2;
        const IPS_DST_NAT: u32 = 0x20;
        let loaded = self.expression("ct", Attrs::new().be32(1, 1).be32(2, STATUS));
        loaded.mask(1, &IPS_DST_NAT.to_ne_bytes()).compare(1, true, &[0; 4])
    }

    fn masquerade(self) -> Rule {
        self.expression("masq", Attrs::new())
    }

    fn dnat(self, map: Map) -> Rule {
        let (address, length, family, result) = if map.six() {
            (24, 16, NFPROTO_IPV6, (1, 2))
        } else {
            (16, 4, NFPROTO_IPV4, (REG32, REG32 + 1))
        };
        let mut rule = self.family(map.six()).meta(META_L4PROTO, REG32);
        let mut port_register = REG32 + 1;
        if map.by_address() {
            rule = rule.payload(1, address, length, REG32 + 1);
            port_register += length / 4;
        }
        let rule = rule.payload(2, 2, 2, port_register);
        let lookup = Attrs::new()
            .text(1, map.name())
            .be32(2, REG32)
            .be32(3, result.0)
            .be32(4, map.id());
        let nat = Attrs::new()
            .be32(1, 1)
            .be32(2, family.into())
            .be32(3, result.0)
            .be32(5, result.1);
        rule.expression("lookup", lookup).expression("nat", nat)
    }
}
