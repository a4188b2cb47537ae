//! Losing the store loses no pod: the copies beside the objects are read back.

use std::fs;
use std::path::{Path, PathBuf};

use state::store::Copies;

use crate::engine::record::COPY;

/// Bytes of the longest copy that is believed.
const LIMIT: u64 = 4 << 20;

/// How the store finds the copies of its records under `root`.
pub fn copies(root: &Path) -> Copies {
    let (all, one) = (root.to_owned(), root.to_owned());
    Copies {
        all: Box::new(move || files(&all).iter().filter_map(|path| read(path)).collect()),
        one: Box::new(move |_, uid| {
            let own = files(&one)
                .into_iter()
                .find(|path| path.parent().is_some_and(|dir| dir.ends_with(uid)));
            read(&own?)
        }),
    }
}

/// Every copy: `pods/<uid>`, `pods/<uid>/containers/<uid>`, `images/<uid>`, `declared/<uid>`.
fn files(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for kind in ["pods", "images", "declared"] {
        for dir in children(&root.join(kind)) {
            found.push(dir.join(COPY));
            found.extend(children(&dir.join("containers")).into_iter().map(|dir| dir.join(COPY)));
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

fn read(path: &Path) -> Option<Vec<u8>> {
    let meta = fs::symlink_metadata(path).ok()?;
    (meta.is_file() && meta.len() <= LIMIT)
        .then(|| fs::read(path).ok())
        .flatten()
}
