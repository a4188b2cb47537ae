//! Replays the corpus of `e2e/fuzz` through its targets, each input also cut short and with bits turned.

#[path = "../../e2e/fuzz/targets.rs"]
mod targets;

use std::fs;
use std::path::Path;

use tar::{EntryType, Header};

/// The input, every prefix of it (at most 200), and itself with one bit turned in 200 places.
fn variations(input: &[u8], target: fn(&[u8])) {
    target(input);
    let step = input.len() / 200 + 1;
    for at in (0..input.len()).step_by(step) {
        target(&input[..at]);
        let mut turned = input.to_vec();
        turned[at] ^= 1 << (at % 8);
        target(&turned);
    }
}

fn replay(name: &str, target: fn(&[u8])) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../e2e/fuzz/corpus")
        .join(name);
    let mut inputs = 0;
    for entry in fs::read_dir(&dir).expect("the corpus").flatten() {
        variations(&fs::read(entry.path()).expect("an input"), target);
        inputs += 1;
    }
    assert!(inputs > 5, "{inputs} inputs in {}", dir.display());
}

#[test]
fn yaml() {
    replay("yaml", targets::yaml);
}

#[test]
fn references() {
    replay("reference", targets::reference);
}

/// Archives are made, not kept: no binaries in the repository.
#[test]
fn tar() {
    let mut archive = tar::Builder::new(Vec::new());
    for (kind, path, link, data) in [
        (EntryType::Directory, "d/".to_owned(), "", &b""[..]),
        (EntryType::Regular, "d/file".to_owned(), "", &[7; 1000]),
        (
            EntryType::Regular,
            "long/".repeat(60),
            "",
            b"a name by a long-name member",
        ),
        (EntryType::Symlink, "link".to_owned(), "/etc/passwd", b""),
        (EntryType::Link, "hard".to_owned(), "../../d/file", b""),
        (EntryType::Fifo, "fifo".to_owned(), "", b""),
    ] {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0o644);
        header.set_size(data.len() as u64);
        let appended = match link {
            "" => archive.append_data(&mut header, path, data),
            link => archive.append_link(&mut header, path, link),
        };
        appended.expect("write to memory");
    }
    let plain = archive.into_inner().expect("write to memory");
    variations(&plain, targets::tar);
    variations(&plain, targets::layer);
    variations(&hostile(), targets::layer);
    // Numbers in every field that a header has, among them sizes beyond the archive and beyond 64 bits.
    for at in (100..157).chain(257..345) {
        for value in [b'7', 0x80, 0xff, 0] {
            let mut turned = plain.clone();
            turned[512..][at] = value;
            let sum: u32 = turned[512..1024].iter().map(|byte| u32::from(*byte)).sum();
            let old: u32 = turned[512 + 148..512 + 156].iter().map(|byte| u32::from(*byte)).sum();
            let checksum = format!("{:06o}\0 ", sum - old + 8 * 32);
            turned[512 + 148..512 + 156].copy_from_slice(checksum.as_bytes());
            targets::tar(&turned);
        }
    }
}

/// Each way out of a layer that is known, one after the other: those that are refused end the archive, so each comes
/// first once, by the cuts and turned bits.
fn hostile() -> Vec<u8> {
    let mut archive = Vec::new();
    for (kind, path, link) in [
        (b'2', "way", "/"),
        (b'0', "way/tmp/evil", ""),
        (b'2', "up", "../../outside"),
        (b'0', "up/evil", ""),
        (b'5', "up", ""),
        (b'2', "up", "../../outside"),
        (b'0', "up/.wh.precious", ""),
        (b'0', "up/.wh..wh..opq", ""),
        (b'1', "hard", "up/precious"),
        (b'0', "hard", ""),
        (b'3', "null", ""),
        (b'2', "device", "null"),
        (b'0', "device", ""),
        (b'2', "loop", "loop"),
        (b'0', "loop/x", ""),
        (b'0', "../outside/evil", ""),
        (b'1', "hard", "../outside/precious"),
    ] {
        let mut header = Header::new_gnu();
        let old = header.as_old_mut();
        old.name[..path.len()].copy_from_slice(path.as_bytes());
        old.linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(EntryType::new(kind));
        header.set_mode(0o777);
        for set in [Header::set_uid, Header::set_gid, Header::set_mtime, Header::set_size] {
            set(&mut header, 0);
        }
        header.set_cksum();
        archive.extend(header.as_bytes());
    }
    archive.extend([0; 1024]);
    archive
}
