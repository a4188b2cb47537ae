//! The one way from a command to the records: through the daemon, or, where none runs, by being it for a while.
//!
//! Without a daemon this process takes the store's lock, serves the same socket and uses it like any other client. So a
//! command has one implementation, and `logs` or `exec` in another terminal reach what `run` runs in this one.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use cri::Services;
use reconciler::runtime::{Running, Runtime};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::client::Client;
use crate::options::Global;
use crate::serve;

/// How long another process may hold the root without serving the socket.
const BUSY: Duration = Duration::from_secs(10);
const AGAIN: Duration = Duration::from_millis(50);

/// What a command needs of a process that is its own daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Records and statuses as they are; nothing is repaired.
    Look,
    /// The loop.
    Act,
}

/// A connection, and this process's own service if there is no daemon.
pub struct Session {
    pub client: Client,
    own: Option<Own>,
}

struct Own {
    socket: PathBuf,
    close: watch::Sender<bool>,
    server: JoinHandle<Result<(), tonic::transport::Error>>,
    streams: JoinHandle<()>,
    work: Work,
}

/// Dropped last: it holds the store's lock.
enum Work {
    Looked(Box<Runtime>),
    Loop(Running),
}

impl Session {
    pub async fn open(global: &Global, need: Need) -> Result<Session> {
        let begun = Instant::now();
        let runtime = loop {
            if let Some(client) = Client::connect(&global.socket).await? {
                client.ready().await?;
                return Ok(Session { client, own: None });
            }
            match Runtime::open(global.runtime()?).await {
                Ok(runtime) => break runtime,
                // Another command, or a daemon that does not serve yet.
                Err(_) if begun.elapsed() < BUSY && locked(&global.root) => tokio::time::sleep(AGAIN).await,
                Err(e) => {
                    let socket = global.socket.display();
                    return Err(e).with_context(|| format!("no daemon serves {socket}, and this process cannot be it"));
                }
            }
        };
        let cx = runtime.cx.clone();
        let work = match need {
            Need::Look => {
                runtime.prepare().await?;
                Work::Looked(Box::new(runtime))
            }
            Need::Act => Work::Loop(runtime.start().await?),
        };
        let listener = cri::bind(&global.socket)?;
        let (close, closing) = watch::channel(false);
        let (streaming_url, streams) = serve::streaming(cx.clone(), global.streaming()?, closing.clone()).await?;
        let config = cri::Config {
            once: Some(serve::once_hook(cx.clone())),
            streaming_url: Some(streaming_url),
            ..cri::Config::default()
        };
        let services = Services::new(cx.store.clone(), config, closing);
        let server = tokio::spawn(cri::serve(listener, services));
        let client = Client::connect(&global.socket)
            .await?
            .context("this process does not answer itself")?;
        let socket = global.socket.clone();
        Ok(Session {
            client,
            own: Some(Own {
                socket,
                close,
                server,
                streams,
                work,
            }),
        })
    }

    /// Is this process its own daemon? Then nothing converges once it ends.
    pub fn own(&self) -> bool {
        self.own.is_some()
    }

    /// Ends what this process serves; pods go on.
    pub async fn close(self) -> Result<()> {
        let Session { client, own } = self;
        drop(client);
        let Some(own) = own else { return Ok(()) };
        // Before the lock is given up, so that no other process's socket is taken away.
        let _ = std::fs::remove_file(&own.socket);
        let _ = own.close.send(true);
        own.server.await.context("server task")??;
        own.streams.await.context("streaming task")?;
        match own.work {
            Work::Looked(runtime) => drop(runtime),
            Work::Loop(running) => running.stop().await,
        }
        Ok(())
    }
}

/// Does a process hold the store's lock? Read from proc_locks(5): trying the lock could fail somebody else's try.
fn locked(root: &Path) -> bool {
    let (Ok(lock), Ok(locks)) = (fs::metadata(root.join("store.lock")), fs::read_to_string("/proc/locks")) else {
        return false;
    };
    let inode = format!(":{}", lock.ino());
    let held = |line: &str| line.contains("FLOCK") && line.split_whitespace().any(|word| word.ends_with(&inode));
    locks.lines().any(held)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sees_who_holds_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!locked(dir.path()));
        let lock = fs::File::create(dir.path().join("store.lock")).unwrap();
        assert!(!locked(dir.path()));
        lock.lock().unwrap();
        assert!(locked(dir.path()));
        lock.unlock().unwrap();
        assert!(!locked(dir.path()));
    }
}
