//! One shim per pod: started, connected to, ended.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use shim::api::{ExecOutput, ExecRequest, PauseRequest, RunRequest, Started, StateResponse, StopRequest};
use shim::{Client, Identity};
use tokio::sync::mpsc;

use super::super::paths::Paths;
use crate::error::{Class, Error, Result};
use crate::world::Shim;

/// What a shim may take to answer a mere question before it counts as stuck.
const ASK: Duration = Duration::from_secs(5);

/// The node's shims of this instance.
pub struct Shims {
    paths: Arc<Paths>,
    exe: PathBuf,
    cgroup: String,
    oom_score: Mutex<Option<i32>>,
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
            oom_score: Mutex::default(),
            pods: Mutex::default(),
            gone,
            deaths: Mutex::new(Some(deaths)),
        }
    }

    fn slot(&self, sandbox: &str) -> Arc<tokio::sync::Mutex<Option<Client>>> {
        let mut pods = self.pods.lock().unwrap_or_else(PoisonError::into_inner);
        pods.entry(sandbox.to_owned()).or_default().clone()
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
}

#[async_trait]
impl crate::world::Shims for Shims {
    async fn find(&self, sandbox: &str) -> Option<Arc<dyn Shim>> {
        let client = self.streams(sandbox).await?;
        Some(Arc::new(client))
    }

    async fn streams(&self, sandbox: &str) -> Option<Client> {
        let slot = self.slot(sandbox);
        let mut slot = slot.lock().await;
        self.connected(sandbox, &mut slot).await
    }

    async fn ensure(&self, namespace: &str, name: &str, sandbox: &str) -> Result<Arc<dyn Shim>> {
        let slot = self.slot(sandbox);
        let mut slot = slot.lock().await;
        if let Some(client) = self.connected(sandbox, &mut slot).await {
            return Ok(Arc::new(client));
        }
        let whose = Identity {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: sandbox.to_owned(),
        };
        let (exe, dir, cgroup) = (self.exe.clone(), self.paths.shim(sandbox), self.cgroup.clone());
        let place = shim::Place {
            cgroup: Some(cgroup),
            oom_score: *self.oom_score.lock().unwrap_or_else(PoisonError::into_inner),
        };
        tokio::task::spawn_blocking(move || shim::spawn(&exe, &whose, &dir, &place))
            .await
            .map_err(|source| Error::Task {
                op: "start shim",
                source,
            })?
            .map_err(fault("start shim", sandbox))?;
        tracing::info!(sandbox, "shim started");
        let found = self.connected(sandbox, &mut slot).await;
        let client = found.ok_or_else(|| Error::Shim {
            op: "connect to shim",
            id: sandbox.to_owned(),
            problem: "it does not listen".to_owned(),
            class: Class::Transient,
        })?;
        Ok(Arc::new(client))
    }

    async fn remove(&self, sandbox: &str) -> Result<()> {
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

    fn deaths(&self) -> Option<mpsc::UnboundedReceiver<String>> {
        self.deaths.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn cgroup(&self) -> &str {
        &self.cgroup
    }

    fn set_oom_score(&self, score: Option<i32>) {
        *self.oom_score.lock().unwrap_or_else(PoisonError::into_inner) = score;
    }

    fn start_ticks(&self, pid: i32) -> Option<u64> {
        start_ticks(pid)
    }
}

#[async_trait]
impl Shim for Client {
    async fn state(&self) -> shim::Result<StateResponse> {
        self.state().await
    }

    async fn pause(&self, request: PauseRequest) -> shim::Result<Started> {
        self.pause(request).await
    }

    async fn run(&self, request: RunRequest) -> shim::Result<Started> {
        self.run(request).await
    }

    async fn stop(&self, request: StopRequest) -> shim::Result<()> {
        self.stop(request).await
    }

    async fn delete(&self, id: &str) -> shim::Result<()> {
        self.delete(id).await
    }

    async fn reopen_log(&self, id: &str, path: &str) -> shim::Result<()> {
        self.reopen_log(id, path).await
    }

    async fn exec(&self, request: ExecRequest) -> shim::Result<ExecOutput> {
        self.exec(request).await
    }

    async fn closed(&self) {
        self.closed().await;
    }
}

/// Field 22 of `/proc/PID/stat` (proc_pid_stat(5)); `None` if there is no such process or it is a zombie.
fn start_ticks(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).ok()?;
    // The second field may hold spaces and parentheses.
    let mut rest = stat.rsplit_once(") ")?.1.split(' ');
    match rest.next()? {
        "Z" | "X" => None,
        _ => rest.nth(18)?.parse().ok(),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_was_waited_for_has_no_start() {
        assert!(start_ticks(std::process::id() as i32).is_some());
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let gone = child.id() as i32;
        child.wait().unwrap();
        assert_eq!(start_ticks(gone), None);
    }
}
