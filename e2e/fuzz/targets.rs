// What the fuzzer and, on stable Rust, the test `corpus` run: any input gives an answer or an error, never a panic.

use std::io::Read;

use reconciler::world::linux::unpack::tar::Reader;
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
