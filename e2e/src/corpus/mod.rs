//! Images that no builder would make, each from a seed: one to five layers of everything that tar and overlay know.
//!
//! What a seed makes is valid: its meaning follows from the image specification (layer.md) alone, and any judge must
//! see the same tree. Left out is what judges answer differently, each with its reason:
//!
//! * sockets: tar has no type for them;
//! * paths through a symbolic link of a lower layer: a layer is unpacked without those below it (as Docker and containerd
//!   do), so a directory takes the link's place; umoci unpacks over them and follows it;
//! * a hard link to one of several names of a file of a lower layer: overlay copies up one name, never the group;
//! * a file of the layer in a directory that it does not list, before a whiteout of that directory: umoci removes both;
//! * what directories look like that no layer lists, and when something last changed in a directory: umoci leaves its
//!   own clock and the host's set-group-id bits there;
//! * attributes without a value: a pax record without one deletes what came before, says Go's reader; GNU tar writes
//!   them;
//! * character devices 0:0: overlay's own whiteouts.

pub mod judge;
pub mod tar;
pub mod tree;

use std::collections::BTreeMap;
use std::io::Write;

use serde_json::json;

use self::tar::{Body, Dialect, Holes, Member};
use crate::images::{Compression, Image, Layer};

/// SplitMix64: small, and the same everywhere for ever.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    /// True in so many of a hundred cases.
    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    pub fn pick<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())].clone()
    }

    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.next() as u8).collect()
    }
}

/// What a seed makes.
pub struct Made {
    pub image: Image,
    /// The same layers as umoci can read them: it knows no zstd.
    pub judged: Image,
    /// Directories that no layer lists, as [`tree::read`] writes them: their metadata is nowhere said.
    pub implied: Vec<String>,
    /// Its members, layer by layer, for who has to understand a difference.
    pub told: Vec<String>,
}

pub fn image(seed: u64, name: &str) -> Made {
    let mut maker = Maker {
        random: Random::new(seed),
        tree: BTreeMap::new(),
        layer: 0,
        dialect: Dialect::Pax,
        members: Vec::new(),
    };
    let layers = 1 + maker.random.below(5);
    let (mut ours, mut theirs, mut told) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..layers {
        let tar = maker.layer();
        told.push(format!("layer {} ({:?})", maker.layer, maker.dialect));
        told.extend(maker.members.iter().map(tar::Member::told));
        let (blob, suffix) = stored(&mut maker.random, &tar);
        ours.push(Layer::stored(tar.clone(), blob, suffix));
        // umoci knows pax headers' sparse files, not GNU's older ones.
        let tar = match maker.dialect {
            Dialect::Gnu => tar::write(
                &maker.members.iter().map(Member::filled).collect::<Vec<_>>(),
                Dialect::Gnu,
            ),
            Dialect::Pax => tar,
        };
        let gzip = compress(&tar, Compression::Gzip);
        theirs.push(Layer::stored(tar, gzip, "+gzip"));
    }
    let of = |name: &str, layers| Image::new(name, layers, json!({ "Cmd": ["/none"] }));
    let implied = maker.tree.iter().filter(|(_, node)| node.kind == Kind::Implied);
    Made {
        image: of(name, ours),
        judged: of("judged", theirs),
        told,
        implied: implied.map(|(path, _)| path.escape_ascii().to_string()).collect(),
    }
}

/// One of the ways to store a layer: plain, gzip, zstd, the latter two also in several members or frames.
fn stored(random: &mut Random, tar: &[u8]) -> (Vec<u8>, &'static str) {
    let kind = random.pick(&[Compression::Plain, Compression::Gzip, Compression::Zstd]);
    let suffix = match kind {
        Compression::Plain => return (tar.to_vec(), ""),
        Compression::Gzip => "+gzip",
        Compression::Zstd => "+zstd",
    };
    let (mut blob, mut rest) = (Vec::new(), tar);
    while random.chance(50) && rest.len() > 1 {
        let (part, more) = rest.split_at(1 + random.below(rest.len() - 1));
        blob.extend(compress(part, kind));
        if kind == Compression::Zstd && random.chance(50) {
            // A skippable frame (RFC 8878, 3.1.2).
            blob.extend([0x52, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3]);
        }
        rest = more;
    }
    blob.extend(compress(rest, kind));
    (blob, suffix)
}

fn compress(bytes: &[u8], kind: Compression) -> Vec<u8> {
    match kind {
        Compression::Plain => bytes.to_vec(),
        Compression::Gzip => {
            let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            gzip.write_all(bytes).expect("write to memory");
            gzip.finish().expect("write to memory")
        }
        Compression::Zstd => zstd::encode_all(bytes, 1).expect("write to memory"),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Dir,
    /// Not listed by the layer that made it.
    Implied,
    Symlink,
    Other,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    kind: Kind,
    /// The layer that set it last.
    layer: usize,
    /// Has other names.
    shared: bool,
}

struct Maker {
    random: Random,
    /// The merged tree so far.
    tree: BTreeMap<Vec<u8>, Node>,
    layer: usize,
    dialect: Dialect,
    members: Vec<Member>,
}

impl Maker {
    fn layer(&mut self) -> Vec<u8> {
        self.layer += 1;
        self.members.clear();
        self.dialect = self.random.pick(&[Dialect::Pax, Dialect::Pax, Dialect::Gnu]);
        if self.random.chance(30) {
            self.push(b".".to_vec(), Body::Dir); // overlay shows the container's own root directory
        }
        let steps = match self.random.below(12) {
            0 => 0,
            n => 4 + 2 * n,
        };
        for _ in 0..steps {
            match self.random.below(100) {
                0..30 => self.add_new(),
                30..45 => self.add_dir(),
                45..55 => self.replace(),
                55..65 => self.link(),
                65..73 => self.list_again(),
                73..85 => self.whiteout(),
                85..88 => self.whiteout_nothing(),
                88..95 => self.opaque(),
                _ => self.duplicate(),
            }
        }
        tar::write(&self.members, self.dialect)
    }

    fn push(&mut self, path: Vec<u8>, body: Body) {
        let file = matches!(body, Body::File(_) | Body::Sparse(..));
        let dir = body == Body::Dir;
        let random = &mut self.random;
        let mut xattrs = Vec::new();
        if self.dialect == Dialect::Pax && random.chance(30) && (file || dir) {
            let length = 1 + random.below(40);
            xattrs.push((b"user.note".to_vec(), random.bytes(length)));
            if file && random.chance(50) {
                let mut capability = vec![1, 0, 0, 2];
                capability.extend(random.bytes(4));
                capability.extend([0; 12]);
                xattrs.push((b"security.capability".to_vec(), capability));
            }
            if random.chance(30) {
                xattrs.push((b"trusted.kept".to_vec(), b"yes\0no\n=".to_vec()));
            }
        }
        let nanos = match self.dialect {
            Dialect::Pax => random.pick(&[0, 1, 123_456_789, 999_999_999]),
            Dialect::Gnu => 0,
        };
        let seconds = random.pick(&[
            0,
            1,
            1_000_000_000,
            1_700_000_000,
            4_000_000_000,
            -1,
            -86_400,
            -1_000_000_000,
        ]);
        let mode = random.pick(&[
            0o644, 0o755, 0o600, 0o4755, 0o2755, 0o6711, 0o1777, 0o000, 0o444, 0o2750,
        ]);
        let member = Member {
            mode: if matches!(body, Body::Symlink(_)) { 0o777 } else { mode },
            uid: random.pick(&[0, 0, 1, 1000, 65_534, 3_000_000]),
            gid: random.pick(&[0, 0, 5, 1000, 65_534, 3_000_000]),
            mtime: (seconds, nanos),
            path,
            body,
            xattrs,
        };
        self.members.push(member);
    }

    fn name(&mut self) -> Vec<u8> {
        let n = self.random.below(40);
        match self.random.below(12) {
            0 => format!("new\nline{n}").into_bytes(),
            1 => [b"\xff\xfe", &[b'a' + n as u8 % 26][..]].concat(),
            2 => format!(" sp ace{n} ").into_bytes(),
            3 => format!("ünï{n}").into_bytes(),
            4 => format!("-dash{n}.wh.x").into_bytes(),
            5 => format!("{n}{}", "l".repeat(100 + n)).into_bytes(),
            6 => format!("{n}{}", "m".repeat(200)).into_bytes(),
            _ => format!("n{n}").into_bytes(),
        }
    }

    /// Directories of the merged tree, the root among them.
    fn dirs(&self) -> Vec<Vec<u8>> {
        let real =
            |(path, node): (&Vec<u8>, &Node)| matches!(node.kind, Kind::Dir | Kind::Implied).then(|| path.clone());
        let short = |path: &Vec<u8>| path.len() < 1500;
        self.tree
            .iter()
            .filter_map(real)
            .filter(short)
            .chain([Vec::new()])
            .collect()
    }

    /// A path where nothing is, perhaps below directories that are not there either.
    fn fresh(&mut self) -> Option<Vec<u8>> {
        let dirs = self.dirs();
        let mut path = self.random.pick(&dirs);
        for _ in 0..self.random.pick(&[1, 1, 1, 2, 3]) {
            let name = self.name();
            path = join(&path, &name);
            if self.tree.contains_key(&path) {
                return None;
            }
        }
        Some(path)
    }

    /// Something that is no directory.
    fn body(&mut self) -> Body {
        let random = &mut self.random;
        match random.below(14) {
            0 => Body::Symlink(
                random
                    .pick(&[
                        &b"/etc/passwd"[..],
                        b"nowhere",
                        b"../..",
                        b".",
                        b"/",
                        b"loop",
                        &[b'x'; 300],
                    ])
                    .to_vec(),
            ),
            1 => Body::Char(1, 3),
            2 => Body::Block(7, 300),
            3 => Body::Fifo,
            4 | 5 => self.sparse(),
            n => {
                let length = random.pick(&[0, 1, 511, 512, 513, 5000, 70_000]);
                Body::File(random.bytes(if n == 6 { 0 } else { length }))
            }
        }
    }

    fn sparse(&mut self) -> Body {
        let random = &mut self.random;
        let (mut at, mut pieces) = (0, Vec::new());
        for _ in 0..random.pick(&[0, 1, 3, 4, 5, 30, 60]) {
            at += random.pick(&[0, 4096, 10_000, 100_000]) as u64;
            let length = random.pick(&[1, 512, 4096]);
            pieces.push((at, random.bytes(length)));
            at += length as u64;
        }
        at += random.pick(&[0, 1, 1_000_000]) as u64;
        let holes = match pieces.is_empty() {
            true => Holes::V10, // the older ones cannot say it
            false => random.pick(&[Holes::V00, Holes::V01, Holes::V10]),
        };
        Body::Sparse(at, pieces, holes)
    }

    /// Sets a path and what it implies; what it replaces goes with all below.
    fn set(&mut self, path: &[u8], kind: Kind) {
        self.forget(path, |_| true);
        let own = Node {
            kind,
            layer: self.layer,
            shared: false,
        };
        let slashes = path.iter().enumerate().filter(|(_, byte)| **byte == b'/');
        for (at, _) in slashes.collect::<Vec<_>>() {
            let implied = Node {
                kind: Kind::Implied,
                ..own
            };
            self.tree.entry(path[..at].to_vec()).or_insert(implied);
        }
        self.tree.insert(path.to_vec(), own);
    }

    /// Drops what is at and below a path, as far as `which` says.
    fn forget(&mut self, path: &[u8], which: impl Fn(&Node) -> bool) {
        let below = |other: &[u8]| other == path || is_below(other, path);
        self.tree.retain(|other, node| !below(other) || !which(node));
    }

    fn put(&mut self, path: Vec<u8>, body: Body) {
        let kind = match body {
            Body::Dir => Kind::Dir,
            Body::Symlink(_) => Kind::Symlink,
            _ => Kind::Other,
        };
        self.set(&path, kind);
        self.push(path, body);
    }

    fn add_new(&mut self) {
        if let Some(path) = self.fresh() {
            let body = self.body();
            self.put(path, body);
        }
    }

    fn add_dir(&mut self) {
        if let Some(path) = self.fresh() {
            self.put(path, Body::Dir);
        }
    }

    fn any(&mut self, which: impl Fn(&Node) -> bool) -> Option<(Vec<u8>, Node)> {
        let all: Vec<_> = self
            .tree
            .iter()
            .filter(|(_, node)| which(node))
            .map(|(p, n)| (p.clone(), *n))
            .collect();
        (!all.is_empty()).then(|| self.random.pick(&all))
    }

    /// A file where a directory was, a directory where a file was, anything where anything was.
    fn replace(&mut self) {
        let Some((path, node)) = self.any(|_| true) else { return };
        let dir = matches!(node.kind, Kind::Dir | Kind::Implied);
        let body = if !dir && self.random.chance(40) {
            Body::Dir
        } else {
            self.body()
        };
        self.put(path, body);
    }

    fn list_again(&mut self) {
        let Some((path, _)) = self.any(|node| matches!(node.kind, Kind::Dir | Kind::Implied)) else {
            return;
        };
        let own = Node {
            kind: Kind::Dir,
            layer: self.layer,
            shared: false,
        };
        self.tree.insert(path.clone(), own);
        self.push(path, Body::Dir);
    }

    /// An entry that the layer has already, once more or changed.
    fn duplicate(&mut self) {
        let layer = self.layer;
        let Some((path, node)) = self.any(|node| node.layer == layer && node.kind == Kind::Other) else {
            return;
        };
        let body = self.body();
        self.put(path, if node.shared { Body::Fifo } else { body });
    }

    fn link(&mut self) {
        let layer = self.layer;
        let alone =
            |node: &Node| matches!(node.kind, Kind::Other | Kind::Symlink) && (!node.shared || node.layer == layer);
        let Some((target, node)) = self.any(alone) else { return };
        let path = match self.random.chance(20) {
            true => self.any(|_| true).map(|(path, _)| path),
            false => self.fresh(),
        };
        // Not in place of a directory that the target is in.
        let Some(path) = path.filter(|path| *path != target && !is_below(&target, path)) else {
            return;
        };
        self.put(path.clone(), Body::Link(target.clone()));
        let shared = Node {
            shared: true,
            layer,
            ..node
        };
        self.tree.insert(path, shared);
        // The target stays of the layer it is of: a whiteout that comes after the link means it.
        self.tree.insert(target, Node { shared: true, ..node });
    }

    /// Whether a whiteout at or below `path` leaves no question: what this layer has there is listed all the way.
    fn clear(&self, path: &[u8]) -> bool {
        let at = self.tree.get(path).is_none_or(|node| node.layer == self.layer);
        let mut own = self
            .tree
            .iter()
            .filter(|(other, node)| is_below(other, path) && node.layer == self.layer);
        let listed = |other: &[u8]| {
            let up = |at: usize| {
                self.tree
                    .get(&other[..at])
                    .is_some_and(|n| n.layer == self.layer && n.kind == Kind::Dir)
            };
            other
                .iter()
                .enumerate()
                .filter(|(at, byte)| **byte == b'/' && *at > path.len())
                .all(|(at, _)| up(at))
        };
        own.all(|(other, node)| at && node.kind != Kind::Implied && listed(other))
    }

    fn whiteout(&mut self) {
        let Some((path, node)) = self.any(|_| true) else { return };
        if node.kind == Kind::Implied && node.layer == self.layer || !self.clear(&path) {
            return;
        }
        let layer = self.layer;
        self.forget(&path, |node| node.layer != layer);
        let (dir, name) = split(&path);
        self.mark(join(dir, &[b".wh.", name].concat()));
    }

    fn whiteout_nothing(&mut self) {
        let dirs = self.dirs();
        let dir = self.random.pick(&dirs);
        self.mark(join(&dir, b".wh.never-was"));
    }

    fn opaque(&mut self) {
        let Some((path, _)) = self.any(|node| node.kind == Kind::Dir) else {
            return;
        };
        let path = if self.random.chance(5) { Vec::new() } else { path };
        let layer = self.layer;
        let own = self
            .tree
            .iter()
            .filter(|(other, node)| is_below(other, &path) && node.layer == layer);
        let listed = own.clone().all(|(other, node)| {
            let up = |at: usize| {
                self.tree
                    .get(&other[..at])
                    .is_some_and(|n| n.layer == layer && n.kind == Kind::Dir)
            };
            let slashes = other
                .iter()
                .enumerate()
                .filter(|(at, byte)| **byte == b'/' && *at > path.len());
            node.kind != Kind::Implied && slashes.map(|(at, _)| at).all(up)
        });
        if !listed {
            return;
        }
        let inside = |other: &[u8]| is_below(other, &path);
        self.tree.retain(|other, node| !inside(other) || node.layer == layer);
        self.mark(join(&path, b".wh..wh..opq"));
    }

    fn mark(&mut self, path: Vec<u8>) {
        self.push(path, Body::File(Vec::new()));
        if let Some(mark) = self.members.last_mut() {
            mark.xattrs.clear();
        }
    }
}

fn is_below(path: &[u8], dir: &[u8]) -> bool {
    dir.is_empty() || path.len() > dir.len() && path.starts_with(dir) && path[dir.len()] == b'/'
}

fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    if dir.is_empty() {
        name.to_vec()
    } else {
        [dir, b"/", name].concat()
    }
}

fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (b"", path),
    }
}
