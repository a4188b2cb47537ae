//! Writes tar streams byte by byte, in every dialect that a layer may come in: no library of the tests decides what
//! is odd enough to be left out.

use std::fmt::Write as _;

/// How a stream says what a plain header has no room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    Gnu,
    Pax,
}

/// The three ways in which pax headers tell of holes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holes {
    V00,
    V01,
    V10,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    Dir,
    File(Vec<u8>),
    /// Size when unpacked, and the pieces of data with their offsets.
    Sparse(u64, Vec<(u64, Vec<u8>)>, Holes),
    Symlink(Vec<u8>),
    Link(Vec<u8>),
    Char(u32, u32),
    Block(u32, u32),
    Fifo,
}

#[derive(Clone, Debug)]
pub struct Member {
    pub path: Vec<u8>,
    pub body: Body,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Seconds, nanoseconds; the latter only in pax.
    pub mtime: (i64, u32),
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Member {
    /// The same with its holes as bytes.
    pub fn filled(&self) -> Member {
        let Body::Sparse(size, pieces, _) = &self.body else {
            return self.clone();
        };
        let mut bytes = vec![0; *size as usize];
        for (at, piece) in pieces {
            bytes[*at as usize..][..piece.len()].copy_from_slice(piece);
        }
        Member {
            body: Body::File(bytes),
            ..self.clone()
        }
    }

    pub fn told(&self) -> String {
        let what = match &self.body {
            Body::File(bytes) => format!("file of {}", bytes.len()),
            Body::Sparse(size, pieces, holes) => format!("sparse {holes:?} of {size} in {} pieces", pieces.len()),
            Body::Symlink(to) => format!("symlink to {}", to.escape_ascii()),
            Body::Link(to) => format!("hard link to {}", to.escape_ascii()),
            other => format!("{other:?}"),
        };
        format!("  {}: {what}", self.path.escape_ascii())
    }
}

const BLOCK: usize = 512;

/// The whole archive.
pub fn write(members: &[Member], dialect: Dialect) -> Vec<u8> {
    let mut out = Vec::new();
    for member in members {
        match dialect {
            Dialect::Gnu => gnu(&mut out, member),
            Dialect::Pax => pax(&mut out, member),
        }
    }
    out.extend([0; 2 * BLOCK]);
    out
}

fn gnu(out: &mut Vec<u8>, member: &Member) {
    let mut path = member.path.clone();
    if member.body == Body::Dir {
        path.push(b'/');
    }
    let link = target(member);
    for (long, kind) in [(&link, b'K'), (&path, b'L')] {
        if long.len() > 100 {
            let mut header = Header::new(b"././@LongLink", kind, true);
            header.number(124, 12, long.len() as i64 + 1);
            header.end(out);
            data(out, &[&long[..], &[0]].concat());
        }
    }
    let mut header = Header::new(&path[..path.len().min(100)], kind(member), true);
    header.metadata(member);
    header.number(136, 12, member.mtime.0);
    header.text(157, 100, &link[..link.len().min(100)]);
    let Body::Sparse(size, pieces, _) = &member.body else {
        let body = content(member);
        header.number(124, 12, body.len() as i64);
        header.end(out);
        return data(out, &body);
    };
    header.0[156] = b'S';
    let stored: usize = pieces.iter().map(|(_, piece)| piece.len()).sum();
    header.number(124, 12, stored as i64);
    header.number(483, 12, *size as i64);
    let mut map: Vec<(u64, u64)> = pieces.iter().map(|(at, piece)| (*at, piece.len() as u64)).collect();
    map.push((*size, 0)); // as GNU tar ends it
    let (first, more) = map.split_at(map.len().min(4));
    for (i, piece) in first.iter().enumerate() {
        header.piece(386 + 24 * i, *piece);
    }
    header.0[482] = u8::from(!more.is_empty());
    header.end(out);
    let blocks: Vec<_> = more.chunks(21).collect();
    for (n, chunk) in blocks.iter().enumerate() {
        let mut block = Header([0; BLOCK]);
        for (i, piece) in chunk.iter().enumerate() {
            block.piece(24 * i, *piece);
        }
        block.0[504] = u8::from(n + 1 < blocks.len());
        out.extend(block.0);
    }
    data(out, &content(member));
}

fn pax(out: &mut Vec<u8>, member: &Member) {
    let mut records = Vec::new();
    let mut path = member.path.clone();
    if member.body == Body::Dir {
        path.push(b'/');
    }
    let link = target(member);
    let mut shown = path.clone();
    let mut ahead = Vec::new();
    if let Body::Sparse(size, pieces, holes) = &member.body {
        let map: Vec<String> = pieces
            .iter()
            .map(|(at, piece)| format!("{at},{}", piece.len()))
            .collect();
        let size = size.to_string();
        match holes {
            Holes::V00 => {
                record(&mut records, b"GNU.sparse.size", size.as_bytes());
                record(
                    &mut records,
                    b"GNU.sparse.numblocks",
                    pieces.len().to_string().as_bytes(),
                );
                for (at, piece) in pieces {
                    record(&mut records, b"GNU.sparse.offset", at.to_string().as_bytes());
                    record(&mut records, b"GNU.sparse.numbytes", piece.len().to_string().as_bytes());
                }
            }
            Holes::V01 => {
                record(&mut records, b"GNU.sparse.size", size.as_bytes());
                record(
                    &mut records,
                    b"GNU.sparse.numblocks",
                    pieces.len().to_string().as_bytes(),
                );
                record(&mut records, b"GNU.sparse.map", map.join(",").as_bytes());
                record(&mut records, b"GNU.sparse.name", &path);
                shown = b"GNUSparseFile.0/x".to_vec();
            }
            Holes::V10 => {
                record(&mut records, b"GNU.sparse.major", b"1");
                record(&mut records, b"GNU.sparse.minor", b"0");
                record(&mut records, b"GNU.sparse.realsize", size.as_bytes());
                record(&mut records, b"GNU.sparse.name", &path);
                shown = b"GNUSparseFile.0/x".to_vec();
                let mut text = format!("{}\n", pieces.len());
                for (at, piece) in pieces {
                    let _ = writeln!(text, "{at}\n{}", piece.len());
                }
                ahead = text.into_bytes();
                ahead.resize(ahead.len().next_multiple_of(BLOCK), 0);
            }
        }
    }
    let mut prefix = Vec::new();
    if shown.len() > 100 {
        match split(&shown) {
            // Every other one by the header's prefix, where that can be.
            Some((dir, name)) if shown.len() % 2 == 0 => (prefix, shown) = (dir, name),
            _ => {
                record(&mut records, b"path", &shown);
                shown.truncate(100);
            }
        }
    }
    if link.len() > 100 {
        record(&mut records, b"linkpath", &link);
    }
    let (seconds, nanos) = member.mtime;
    if seconds < 0 || nanos > 0 {
        record(&mut records, b"mtime", time(seconds, nanos).as_bytes());
    }
    for (key, id) in [("uid", member.uid), ("gid", member.gid)] {
        if id > 0o7_777_777 {
            record(&mut records, key.as_bytes(), id.to_string().as_bytes());
        }
    }
    for (key, value) in &member.xattrs {
        record(&mut records, &[b"SCHILY.xattr.", &key[..]].concat(), value);
    }
    if !records.is_empty() {
        let mut header = Header::new(b"PaxHeaders/x", b'x', false);
        header.number(124, 12, records.len() as i64);
        header.end(out);
        data(out, &records);
    }
    let mut header = Header::new(&shown, kind(member), false);
    header.text(345, 155, &prefix);
    header.metadata(&Member {
        uid: if member.uid > 0o7_777_777 { 0 } else { member.uid },
        gid: if member.gid > 0o7_777_777 { 0 } else { member.gid },
        ..member.clone()
    });
    header.number(136, 12, seconds.max(0));
    header.text(157, 100, &link[..link.len().min(100)]);
    let body = [ahead, content(member)].concat();
    header.number(124, 12, body.len() as i64);
    header.end(out);
    data(out, &body);
}

/// A prefix of at most 155 bytes and a name of at most 100.
fn split(path: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let slash = |at: &usize| path[*at] == b'/' && *at <= 155 && (1..=100).contains(&(path.len() - at - 1));
    let at = (1..path.len() - 1).find(slash)?;
    Some((path[..at].to_vec(), path[at + 1..].to_vec()))
}

/// `-1.25` is a second and a quarter before the epoch.
fn time(seconds: i64, nanos: u32) -> String {
    if nanos == 0 {
        return seconds.to_string();
    }
    if seconds >= 0 {
        return format!("{seconds}.{nanos:09}");
    }
    format!("-{}.{:09}", -(seconds + 1), 1_000_000_000 - nanos)
}

fn record(to: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    to.extend(format!("{length} ").bytes());
    to.extend([key, b"=", value, b"\n"].concat());
}

fn kind(member: &Member) -> u8 {
    match member.body {
        Body::Dir => b'5',
        Body::File(_) | Body::Sparse(..) => b'0',
        Body::Symlink(_) => b'2',
        Body::Link(_) => b'1',
        Body::Char(..) => b'3',
        Body::Block(..) => b'4',
        Body::Fifo => b'6',
    }
}

fn target(member: &Member) -> Vec<u8> {
    match &member.body {
        Body::Symlink(to) | Body::Link(to) => to.clone(),
        _ => Vec::new(),
    }
}

fn content(member: &Member) -> Vec<u8> {
    match &member.body {
        Body::File(bytes) => bytes.clone(),
        Body::Sparse(_, pieces, _) => pieces.iter().flat_map(|(_, piece)| piece).copied().collect(),
        _ => Vec::new(),
    }
}

fn data(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend(bytes);
    out.resize(out.len().next_multiple_of(BLOCK), 0);
}

struct Header([u8; BLOCK]);

impl Header {
    fn new(name: &[u8], kind: u8, gnu: bool) -> Header {
        let mut header = Header([0; BLOCK]);
        header.text(0, 100, name);
        header.0[156] = kind;
        header.text(257, 8, if gnu { b"ustar  \0" } else { b"ustar\x0000" });
        for (at, length) in [(100, 8), (108, 8), (116, 8), (124, 12), (136, 12)] {
            header.number(at, length, 0);
        }
        header
    }

    fn text(&mut self, at: usize, most: usize, text: &[u8]) {
        assert!(text.len() <= most);
        self.0[at..at + text.len()].copy_from_slice(text);
    }

    /// Octal, or base 256 where that has no room.
    fn number(&mut self, at: usize, length: usize, value: i64) {
        let field = &mut self.0[at..at + length];
        let octal = format!("{value:0width$o}", width = length - 1);
        if value >= 0 && octal.len() < length {
            field[..length - 1].copy_from_slice(octal.as_bytes());
            field[length - 1] = 0;
            return;
        }
        field.fill(if value < 0 { 0xff } else { 0 });
        let bytes = value.to_be_bytes();
        let take = bytes.len().min(length);
        field[length - take..].copy_from_slice(&bytes[bytes.len() - take..]);
        field[0] |= 0x80;
    }

    fn piece(&mut self, at: usize, (offset, length): (u64, u64)) {
        self.number(at, 12, offset as i64);
        self.number(at + 12, 12, length as i64);
    }

    fn metadata(&mut self, member: &Member) {
        self.number(100, 8, i64::from(member.mode));
        self.number(108, 8, i64::from(member.uid));
        self.number(116, 8, i64::from(member.gid));
        if let Body::Char(major, minor) | Body::Block(major, minor) = member.body {
            self.number(329, 8, i64::from(major));
            self.number(337, 8, i64::from(minor));
        }
    }

    fn end(mut self, out: &mut Vec<u8>) {
        self.0[148..156].fill(b' ');
        let sum: u32 = self.0.iter().map(|byte| u32::from(*byte)).sum();
        self.0[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        out.extend(self.0);
    }
}
