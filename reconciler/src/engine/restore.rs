//! Losing the store loses no pod: the copies beside the objects are read back.

use std::path::{Path, PathBuf};
use std::{fs, io};

use state::Kind;
use state::container::ContainerKind;
use state::image::ImageKind;
use state::pod::PodKind;
use state::sandbox::SandboxKind;
use state::store::{Copied, Copies};

use crate::engine::record::COPY;

/// Bytes of the longest copy that is believed.
const LIMIT: u64 = 4 << 20;

/// How the store finds the copies of its records under `root`.
pub fn copies(root: &Path) -> Copies {
    let (all, one) = (root.to_owned(), root.to_owned());
    Copies {
        all: Box::new(move || files(&all).into_iter().filter_map(copied).collect()),
        one: Box::new(move |kind, uid| {
            let own = files(&one)
                .into_iter()
                .find(|(of, dir)| *of == kind && dir.ends_with(uid))?;
            copied(own).map(|copy| copy.json)
        }),
    }
}

/// The directories of objects that have copies: `pods/<uid>`, `pods/<uid>/containers/<uid>`, `images/<uid>`,
/// `declared/<uid>`.
fn files(root: &Path) -> Vec<(&'static str, PathBuf)> {
    let mut found = Vec::new();
    for (kind, place) in [
        (SandboxKind::KIND, "pods"),
        (ImageKind::KIND, "images"),
        (PodKind::KIND, "declared"),
    ] {
        for dir in children(&root.join(place)) {
            let containers = children(&dir.join("containers")).into_iter();
            found.extend(containers.map(|dir| (ContainerKind::KIND, dir)));
            found.push((kind, dir));
        }
    }
    found
}

fn children(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
        .map(|e| e.path())
        .collect()
}

/// The copy in an object's directory. One that is there but cannot be read is empty: its object is not to be taken for
/// one that never was.
fn copied((kind, dir): (&'static str, PathBuf)) -> Option<Copied> {
    let path = dir.join(COPY);
    let meta = match fs::symlink_metadata(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return None,
        other => other.ok().filter(|meta| meta.is_file() && meta.len() <= LIMIT),
    };
    let json = meta.and_then(|_| fs::read(&path).ok()).unwrap_or_default();
    let uid = dir.file_name()?.to_str()?.to_owned();
    Some(Copied { kind, uid, json })
}
