//! Tells when a run record was written: one inotify instance, one watch per object directory.
//!
//! The shim closes a record only after it is durable, so IN_CLOSE_WRITE is the signal (inotify(7)). A lost event costs
//! time only: every pass reads the record itself.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use tokio::io::unix::AsyncFd;
use tokio::sync::broadcast;

use crate::error::{Error, Result};

/// Whose record changed: the directory that was watched.
pub struct RunWatch {
    inotify: Arc<Inotify>,
    watches: Arc<Mutex<HashMap<WatchDescriptor, PathBuf>>>,
    changed: broadcast::Sender<PathBuf>,
}

impl RunWatch {
    /// Must be called within a tokio runtime.
    pub fn new() -> Result<RunWatch> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK);
        let inotify = Arc::new(inotify.map_err(Error::sys("start", "inotify"))?);
        let watches = Arc::<Mutex<HashMap<_, _>>>::default();
        let (changed, _) = broadcast::channel(1024);
        tokio::spawn(pump(inotify.clone(), watches.clone(), changed.clone()));
        Ok(RunWatch {
            inotify,
            watches,
            changed,
        })
    }
}

impl crate::world::Runs for RunWatch {
    /// The kernel drops the watch with the directory.
    fn add(&self, dir: &Path) -> Result<()> {
        let mut watches = self.watches.lock().unwrap_or_else(PoisonError::into_inner);
        let flags = AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_ONLYDIR;
        let wd = self.inotify.add_watch(dir, flags).map_err(Error::sys("watch", dir))?;
        watches.insert(wd, dir.to_owned());
        Ok(())
    }

    fn subscribe(&self) -> broadcast::Receiver<PathBuf> {
        self.changed.subscribe()
    }
}

async fn pump(
    inotify: Arc<Inotify>,
    watches: Arc<Mutex<HashMap<WatchDescriptor, PathBuf>>>,
    changed: broadcast::Sender<PathBuf>,
) {
    // SAFETY: the descriptor is a fresh duplicate that the AsyncFd owns for as long as it is registered.
    let register = |fd| unsafe { AsyncFd::register(fd) }.map_err(std::io::Error::from);
    let Ok(fd) = inotify.as_fd().try_clone_to_owned().and_then(register) else {
        tracing::error!("cannot watch run records: exits are noticed at the next resync only");
        return;
    };
    loop {
        let Ok(mut ready) = fd.readable().await else { return };
        let events = match inotify.read_events() {
            Ok(events) => events,
            Err(_) => {
                ready.clear_ready();
                continue;
            }
        };
        let mut watches = watches.lock().unwrap_or_else(PoisonError::into_inner);
        for event in events {
            if event.mask.contains(AddWatchFlags::IN_IGNORED) {
                watches.remove(&event.wd);
            } else if event.name.as_deref().is_some_and(|name| name == "run")
                && let Some(dir) = watches.get(&event.wd)
            {
                let _ = changed.send(dir.clone());
            }
        }
    }
}
