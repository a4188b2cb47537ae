//! Which layers an unclean boot puts in doubt.
//!
//! `<root>/layers/mark.json` says under which boot the store is in use, whether the last use ended well, and up to when
//! its layers are known to be good. Layers are flushed before they get their name, but disks have been known to say so
//! too early: after a boot that no clean end preceded, those of the doubtful time are compared with their hash before
//! their first use, each on its own, while everything else goes on.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::super::content::{Error, Result, sync_dir, token};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Mark {
    /// Boot id of the last use.
    boot: String,
    /// The last use ended with all on disk.
    clean: bool,
    /// ns since the epoch: layers up to then are good.
    good_until: i64,
    /// From then on they are good again; 0: none is in doubt.
    doubt_until: i64,
}

#[derive(Debug)]
pub struct Fence {
    path: PathBuf,
    mark: Mutex<Mark>,
}

impl Fence {
    /// Begins a use under this boot.
    pub fn begin(dir: &Path, boot: &str) -> Result<Fence> {
        let path = dir.join("mark.json");
        let read = fs::read(&path).ok();
        let old: Option<Mark> = read.as_ref().and_then(|bytes| serde_json::from_slice(bytes).ok());
        let now = now();
        let mark = match old {
            // A torn mark says nothing, so all is in doubt; no mark at all is a store without layers.
            None if read.is_some() => Mark {
                doubt_until: now,
                ..Mark::default()
            },
            None => Mark {
                good_until: now,
                ..Mark::default()
            },
            Some(old) if old.boot != boot && !old.clean => Mark {
                doubt_until: now,
                ..old
            },
            Some(old) => old,
        };
        let fence = Fence {
            path,
            mark: Mutex::new(Mark {
                boot: boot.to_owned(),
                clean: false,
                ..mark
            }),
        };
        fence.write()?;
        Ok(fence)
    }

    /// All is on disk and the use is over.
    pub fn end(&self) -> Result<()> {
        let mut mark = self.mark.lock().unwrap_or_else(PoisonError::into_inner);
        mark.clean = true;
        if mark.doubt_until == 0 {
            mark.good_until = now();
        }
        drop(mark);
        self.write()
    }

    /// Is what was committed at that time in doubt?
    pub fn doubts(&self, committed: SystemTime) -> bool {
        let mark = self.mark.lock().unwrap_or_else(PoisonError::into_inner);
        let at = ns(committed);
        mark.good_until < at && at < mark.doubt_until
    }

    fn write(&self) -> Result<()> {
        let mark = self.mark.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let bytes = serde_json::to_vec(&mark).map_err(|e| Error::invalid(self.path.display(), e))?;
        let temp = self.path.with_extension(token());
        let write = || {
            let mut file = File::create(&temp)?;
            file.write_all(&bytes)?;
            file.sync_data()?;
            fs::rename(&temp, &self.path)
        };
        write().map_err(|e| {
            let _ = fs::remove_file(&temp);
            Error::io("write", self.path.display())(e)
        })?;
        self.path.parent().map_or(Ok(()), sync_dir)
    }
}

fn now() -> i64 {
    ns(SystemTime::now())
}

fn ns(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_unclean_boot_puts_in_doubt_what_came_after_the_last_clean_end() {
        let dir = tempfile::tempdir().unwrap();
        let begin = |boot| Fence::begin(dir.path(), boot).unwrap();
        let first = begin("one");
        let old = SystemTime::now();
        assert!(!first.doubts(old), "a new store");
        first.end().unwrap();
        let second = begin("two");
        assert!(!second.doubts(old), "the end was clean");
        let young = SystemTime::now();
        drop(second);
        let again = begin("two");
        assert!(!again.doubts(young), "the daemon died, the machine did not");
        drop(again);
        let third = begin("three");
        assert!(third.doubts(young) && !third.doubts(old));
        assert!(!third.doubts(SystemTime::now()), "written since");
        third.end().unwrap();
        assert!(begin("four").doubts(young), "still nobody has looked at it");
        fs::write(dir.path().join("mark.json"), "{").unwrap();
        assert!(begin("four").doubts(old), "a torn mark");
    }
}
