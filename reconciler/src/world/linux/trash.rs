//! Deleting big trees behind everyone's back.

use std::path::{Path, PathBuf};

use super::content::Result;

#[derive(Clone, Debug)]
pub struct Trash {
    dir: PathBuf,
}

impl Trash {
    /// Opens `<root>/trash`.
    pub fn open(root: &Path) -> Result<Trash> {
        Ok(Trash {
            dir: root.join("trash"),
        })
    }

    /// Renames `path` into the trash; absent is success.
    pub fn bury(&self, path: &Path) -> Result<()> {
        let _ = path;
        todo!()
    }

    /// Deletes what is in the trash, answering how many trees are gone. Never crosses a mount point or follows a link;
    /// a tree that holds a mount stays, and is named in the error.
    pub fn empty(&self) -> Result<usize> {
        let _ = &self.dir;
        todo!()
    }
}
