//! Replays the fuzz corpus through the fuzz targets, each input also cut short and with bits turned.

#[path = "../fuzz/targets.rs"]
mod targets;

use std::fs;
use std::path::Path;

use e2e::nasty;

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
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
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
    for (case, archive, _) in nasty::archives("/nowhere") {
        println!("{case}");
        variations(&archive, targets::tar);
    }
}
