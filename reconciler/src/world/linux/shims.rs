//! One shim per pod: started, connected to, ended.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use shim::{Client, Identity};
use tokio::sync::mpsc;

use super::super::paths::Paths;
use crate::error::{Class, Error, Result};

/// What a shim may take to answer a mere question before it counts as stuck.
const ASK: Duration = Duration::from_secs(5);

/// The node's shims of this instance.
pub struct Shims {
    paths: Arc<Paths>,
    exe: PathBuf,
    cgroup: String,
    pods: Mutex<HashMap<String, Arc<tokio::sync::Mutex<Option<Client>>>>>,
    /// Told the sandbox whose shim's connection ended; from the very first connection on.
    gone: mpsc::UnboundedSender<String>,
    deaths: Mutex<Option<mpsc::UnboundedReceiver<String>>>,
}

impl Shims {
    pub fn new(paths: Arc<Paths>, exe: PathBuf, cgroup: String) -> Shims {
        let (gone, deaths) = mpsc::unbounded_channel();
        Shims {
            paths,
            exe,
            cgroup,
            pods: Mutex::default(),
            gone,
            deaths: Mutex::new(Some(deaths)),
        }
    }

    /// The shim program.
    pub fn exe(&self) -> &std::path::Path {
        &self.exe
    }

    /// The cgroup that all shims of this instance share, outside any pod's limits.
    pub fn cgroup(&self) -> &str {
        &self.cgroup
    }

    /// Sandboxes whose shim's connection ended, since the first one was made. Only the first caller has them.
    pub fn deaths(&self) -> Option<mpsc::UnboundedReceiver<String>> {
        self.deaths.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn slot(&self, sandbox: &str) -> Arc<tokio::sync::Mutex<Option<Client>>> {
        let mut pods = self.pods.lock().unwrap_or_else(PoisonError::into_inner);
        pods.entry(sandbox.to_owned()).or_default().clone()
    }

    /// The shim's client, if the shim lives.
    pub async fn find(&self, sandbox: &str) -> Option<Client> {
        let slot = self.slot(sandbox);
        let mut slot = slot.lock().await;
        self.connected(sandbox, &mut slot).await
    }

    async fn connected(&self, sandbox: &str, slot: &mut Option<Client>) -> Option<Client> {
        if let Some(client) = slot.as_ref() {
            if !client.is_closed() {
                return Some(client.clone());
            }
            *slot = None;
        }
        let dir = self.paths.shim(sandbox);
        let client = tokio::time::timeout(ASK, Client::connect(&dir)).await.ok()?.ok()?;
        self.watch(sandbox, client.clone());
        *slot = Some(client.clone());
        Some(client)
    }

    fn watch(&self, sandbox: &str, client: Client) {
        let gone = self.gone.clone();
        let sandbox = sandbox.to_owned();
        tokio::spawn(async move {
            client.closed().await;
            let _ = gone.send(sandbox);
        });
    }

    /// The client of a living shim; starts one (which takes over what a dead one left) if need be.
    pub async fn ensure(&self, namespace: &str, name: &str, sandbox: &str) -> Result<Client> {
        let slot = self.slot(sandbox);
        let mut slot = slot.lock().await;
        if let Some(client) = self.connected(sandbox, &mut slot).await {
            return Ok(client);
        }
        let whose = Identity {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: sandbox.to_owned(),
        };
        let (exe, dir, cgroup) = (self.exe.clone(), self.paths.shim(sandbox), self.cgroup.clone());
        tokio::task::spawn_blocking(move || shim::spawn(&exe, &whose, &dir, Some(&cgroup)))
            .await
            .map_err(|source| Error::Task {
                op: "start shim",
                source,
            })?
            .map_err(fault("start shim", sandbox))?;
        tracing::info!(sandbox, "shim started");
        let found = self.connected(sandbox, &mut slot).await;
        found.ok_or_else(|| Error::Shim {
            op: "connect to shim",
            id: sandbox.to_owned(),
            problem: "it does not listen".to_owned(),
            class: Class::Transient,
        })
    }

    /// Ends the shim, by force if it does not answer. Its processes must have ended before.
    pub async fn remove(&self, sandbox: &str) -> Result<()> {
        let slot = self.slot(sandbox);
        let mut slot = slot.lock().await;
        if let Some(client) = self.connected(sandbox, &mut slot).await {
            shim::fault::point("shims.remove.before");
            let closed = client.clone();
            client.shutdown().await.map_err(fault("end shim", sandbox))?;
            let _ = tokio::time::timeout(ASK, closed.closed()).await;
        }
        shim::fault::point("shims.remove.after");
        *slot = None;
        self.pods.lock().unwrap_or_else(PoisonError::into_inner).remove(sandbox);
        Ok(())
    }
}

/// A shim's answer as an error of a stage.
pub fn fault(op: &'static str, id: &str) -> impl FnOnce(shim::Error) -> Error {
    let id = id.to_owned();
    move |e| {
        let class = match e.code() {
            Some(shim::Code::InvalidArgument | shim::Code::StartFailed) => Class::Permanent,
            _ => Class::Transient,
        };
        Error::Shim {
            op,
            id,
            problem: e.to_string(),
            class,
        }
    }
}
