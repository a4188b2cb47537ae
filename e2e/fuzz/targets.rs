// What the fuzzer and, on stable Rust, the test `corpus` run: any input gives an answer or an error, never a panic.

use std::fs;
use std::io::Read;
use std::str::FromStr;

use oci_spec::image::Digest;
use reconciler::world::linux::unpack::tar::Reader;
use reconciler::world::linux::unpack::{Limits, unpack};
use sha2::{Digest as _, Sha256};
use state::reference::Reference;

/// Documents of YAML: our kinds and Kubernetes' Pod.
pub fn yaml(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data) {
        let _ = state::yaml::parse(text, "fuzz.yaml");
    }
}

/// An archive's members: at most as many as the bytes have headers for, none longer than what is there.
pub fn tar(data: &[u8]) {
    let mut reader = Reader::new(data, 4096);
    let mut members = 0;
    while let Ok(Some(_)) = reader.next_entry() {
        members += 1;
        assert!(members <= data.len() / 512 + 1, "members from nothing");
        let mut content = Vec::new();
        if (&mut reader).take(1 << 20).read_to_end(&mut content).is_err() {
            break;
        }
        assert!(content.len() <= data.len(), "content from nothing");
    }
}

/// A layer made into files, as root: whatever the archive says, nothing beside its directory is touched.
pub fn layer(data: &[u8]) {
    let jail = tempfile::tempdir().expect("a directory");
    let (outside, target) = (jail.path().join("outside"), jail.path().join("layer/fs"));
    fs::create_dir(&outside).expect("a directory");
    fs::write(outside.join("precious"), "untouched").expect("a file");
    fs::create_dir_all(&target).expect("a directory");
    let hex: String = Sha256::digest(data).iter().map(|byte| format!("{byte:02x}")).collect();
    let id = Digest::from_str(&format!("sha256:{hex}")).expect("a digest");
    let limits = Limits {
        entries: 1000,
        name: 1000,
        depth: 64,
        bytes: 1 << 20,
    };
    let _ = unpack(data, &id, &target, &[], &limits);
    let names = |dir: &std::path::Path| fs::read_dir(dir).expect("list").count();
    assert_eq!(
        (names(jail.path()), names(&jail.path().join("layer")), names(&outside)),
        (2, 1, 1)
    );
    let precious = fs::read(outside.join("precious")).expect("read");
    assert_eq!(precious, b"untouched");
}

/// An image reference: what is accepted is accepted again as it prints.
pub fn reference(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data)
        && let Ok(reference) = Reference::parse(text, "image")
    {
        let shown = reference.to_string();
        let again = Reference::parse(&shown, "image").expect("a normalized reference parses");
        assert_eq!(again.to_string(), shown, "normal form is not stable for {text:?}");
    }
}
