//! The costly look: every file of a layer against its blob.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::super::content::{Content, Error, Result};
use super::super::unpack::{Place, apply};
use super::Layers;
use crate::image::manifest::{ChainId, Loaded};

impl Layers {
    /// Layers of an image with files whose bytes are not those of the blob. What has no sound blob here is passed over.
    /// Blocking: each layer is unpacked once more, aside.
    pub fn differing(&self, content: &Content, image: &Loaded) -> Result<Vec<ChainId>> {
        let mut differing = Vec::new();
        for (i, blob) in image.manifest.layers().iter().enumerate() {
            let chain = &image.chain_ids[i];
            if self.meta(chain)?.is_none() || !content.sound(blob.digest())? {
                continue;
            }
            let again = self.aside()?;
            let place = Place {
                target: &again.tree(),
                form: self.form,
                limits: &self.limits,
                memory: &Arc::default(),
            };
            apply(content.open_blob(blob.digest())?, &image.diff_ids[i], place)?;
            if !same_files(&again.tree(), &self.fs(chain)?)? {
                differing.push(chain.clone());
            }
        }
        Ok(differing)
    }
}

/// Whether each regular file below `a` has the same bytes in `b`. Both are ours and nobody else writes them.
fn same_files(a: &Path, b: &Path) -> Result<bool> {
    let mut pending = vec![PathBuf::new()];
    while let Some(dir) = pending.pop() {
        let here = a.join(&dir);
        for entry in fs::read_dir(&here).map_err(Error::io("list", here.display()))? {
            let entry = entry.map_err(Error::io("list", here.display()))?;
            if entry.file_name().as_encoded_bytes().starts_with(b".wh.") {
                continue; // a mark that a settled tree has no more
            }
            let (path, kind) = (dir.join(entry.file_name()), entry.file_type());
            match kind.map_err(Error::io("stat", here.display()))? {
                kind if kind.is_dir() => pending.push(path),
                kind if kind.is_file() && !same_file(&a.join(&path), &b.join(&path))? => return Ok(false),
                _ => {}
            }
        }
    }
    Ok(true)
}

fn same_file(a: &Path, b: &Path) -> Result<bool> {
    let is_file = |path: &Path| path.symlink_metadata().is_ok_and(|meta| meta.is_file());
    if !is_file(b) {
        return Ok(false);
    }
    let open = |path: &Path| File::open(path).map_err(Error::io("open", path.display()));
    let (mut a, mut b) = (open(a)?, open(b)?);
    let (mut left, mut right) = (vec![0; 64 << 10], vec![0; 64 << 10]);
    loop {
        let n = a.read(&mut left).map_err(Error::io("read", "a file of a layer"))?;
        if n == 0 {
            let rest = b.read(&mut right).map_err(Error::io("read", "a file of a layer"))?;
            return Ok(rest == 0);
        }
        if b.read_exact(&mut right[..n]).is_err() || left[..n] != right[..n] {
            return Ok(false);
        }
    }
}
