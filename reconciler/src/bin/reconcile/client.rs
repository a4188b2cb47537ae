//! A client of whoever serves the socket: the daemon, or this very process (see `local`).

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use cri::records::v1;
use cri::records::v1::records_client::RecordsClient;
use cri::runtime::v1::runtime_service_client::RuntimeServiceClient;
use cri::runtime::v1::{AttachRequest, ExecRequest, ExecSyncRequest, ExecSyncResponse, PortForwardRequest};
use cri::runtime::v1::{ContainerEventResponse, ContainerStats, GetEventsRequest, StreamContainerStatsRequest};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Request, Status, Streaming};

/// How long a daemon that starts may take for its first look at the node.
const FIRST_LOOK: Duration = Duration::from_secs(30);

#[derive(Clone)]
pub struct Client {
    records: RecordsClient<Channel>,
    runtime: RuntimeServiceClient<Channel>,
}

/// What a failed call says to a person: the server's message, which names object and problem.
fn said(status: Status) -> anyhow::Error {
    match status.code() {
        Code::Unavailable if status.message().contains("transport") || status.message().contains("connect") => {
            anyhow!(
                "the daemon's connection broke: {}; look at its log, then repeat the command",
                status.message()
            )
        }
        _ => anyhow!("{}", status.message()),
    }
}

impl Client {
    /// `None` if nobody serves the socket.
    pub async fn connect(socket: &Path) -> Result<Option<Client>> {
        match UnixStream::connect(socket).await {
            Ok(_) => Ok(Some(Client::to(socket.to_owned()))),
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => Ok(None),
            Err(e) => {
                Err(e).with_context(|| format!("cannot reach the daemon at {} (are you root?)", socket.display()))
            }
        }
    }

    fn to(socket: PathBuf) -> Client {
        let connect = tower::service_fn(move |_: Uri| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        let channel = Endpoint::from_static("http://localhost").connect_with_connector_lazy(connect);
        Client {
            records: RecordsClient::new(channel.clone()).max_decoding_message_size(cri::MESSAGE_LIMIT),
            runtime: RuntimeServiceClient::new(channel).max_decoding_message_size(cri::MESSAGE_LIMIT),
        }
    }

    /// Waits until the node was looked at: before, nothing but reading is answered.
    pub async fn ready(&self) -> Result<()> {
        let looked = async {
            let mut nodes = self.watch("Node", "").await?;
            while let Some((node, _)) = nodes.next().await? {
                let mut conditions = list(&node["status"]["conditions"]).iter();
                if conditions.any(|c| c["type"] == "Ready" && c["status"] == "True") {
                    return Ok(());
                }
            }
            bail!("the daemon stopped")
        };
        match tokio::time::timeout(FIRST_LOOK, looked).await {
            Ok(looked) => looked,
            Err(_) => bail!(
                "the daemon is still looking at the node after {} s",
                FIRST_LOOK.as_secs()
            ),
        }
    }

    /// Every record of a kind, newest first.
    pub async fn list(&self, kind: &str) -> Result<Vec<Value>> {
        let request = v1::GetRequest {
            kind: kind.to_owned(),
            ..v1::GetRequest::default()
        };
        let answer = self.records.clone().get(request).await.map_err(said)?.into_inner();
        answer.documents.iter().map(value).collect()
    }

    /// The record of a uid, if it is there.
    pub async fn get(&self, kind: &str, uid: &str) -> Result<Option<Value>> {
        let request = v1::GetRequest {
            kind: kind.to_owned(),
            uid: uid.to_owned(),
            ..v1::GetRequest::default()
        };
        let answer = self.records.clone().get(request).await.map_err(said)?.into_inner();
        answer.documents.first().map(value).transpose()
    }

    pub async fn apply(&self, documents: Vec<v1::Document>, dry_run: bool) -> Result<Vec<v1::Applied>> {
        let request = v1::ApplyRequest { documents, dry_run };
        Ok(self
            .records
            .clone()
            .apply(request)
            .await
            .map_err(said)?
            .into_inner()
            .applied)
    }

    /// Marks a record deleted; `wait`: until it is erased, `limit` at most.
    pub async fn delete(&self, kind: &str, uid: &str, grace: Option<i64>, wait: bool, limit: Duration) -> Result<()> {
        let mut request = Request::new(v1::DeleteRequest {
            kind: kind.to_owned(),
            uid: uid.to_owned(),
            grace_seconds: grace,
            wait,
            ..v1::DeleteRequest::default()
        });
        request.set_timeout(limit);
        self.records.clone().delete(request).await.map(drop).map_err(said)
    }

    /// The records of a kind (or the one with this uid), then their changes.
    pub async fn watch(&self, kind: &str, uid: &str) -> Result<Changes> {
        let request = v1::WatchRequest {
            kind: kind.to_owned(),
            uid: uid.to_owned(),
        };
        Ok(Changes(
            self.records.clone().watch(request).await.map_err(said)?.into_inner(),
        ))
    }

    /// Pulls an image; dropping the answer stops it.
    pub async fn pull(&self, image: String, credentials: Vec<v1::Credential>) -> Result<Pulling> {
        let request = v1::PullRequest { image, credentials };
        let stream = self.records.clone().pull(request).await.map_err(said)?.into_inner();
        Ok(Pulling(stream))
    }

    /// Asks for a pass over everything; the report or plan as JSON, and the exit code for it.
    pub async fn once(&self, request: v1::OnceRequest) -> Result<(Vec<u8>, i32)> {
        let answer = self.records.clone().once(request).await.map_err(said)?.into_inner();
        Ok((answer.json, answer.exit_code))
    }

    /// Lets the daemon read its configuration anew; what changed.
    pub async fn reload(&self) -> Result<Vec<v1::Changed>> {
        let answer = self.records.clone().reload(v1::ReloadRequest {}).await.map_err(said)?;
        Ok(answer.into_inner().changes)
    }

    /// What every running container uses.
    pub async fn stats(&self) -> Result<Vec<ContainerStats>> {
        let request = StreamContainerStatsRequest::default();
        let mut runtime = self.runtime.clone();
        let mut stream = runtime
            .stream_container_stats(request)
            .await
            .map_err(said)?
            .into_inner();
        let mut all = Vec::new();
        while let Some(part) = stream.message().await.map_err(said)? {
            all.extend(part.container_stats);
        }
        Ok(all)
    }

    /// What happens to sandboxes and containers from now on.
    pub async fn events(&self) -> Result<Happenings> {
        let stream = self
            .runtime
            .clone()
            .get_container_events(GetEventsRequest::default())
            .await;
        Ok(Happenings(stream.map_err(said)?.into_inner()))
    }

    /// Runs a program in a container; `timeout` in seconds, 0 for none.
    pub async fn exec(&self, container: &str, command: Vec<String>, timeout: i64) -> Result<ExecSyncResponse> {
        let request = ExecSyncRequest {
            container_id: container.to_owned(),
            cmd: command,
            timeout,
        };
        Ok(self
            .runtime
            .clone()
            .exec_sync(request)
            .await
            .map_err(said)?
            .into_inner())
    }
}

impl Client {
    /// Where a program in a container can be started with streams of its own.
    pub async fn exec_url(&self, container: &str, command: Vec<String>, stdin: bool, tty: bool) -> Result<String> {
        let request = ExecRequest {
            container_id: container.to_owned(),
            cmd: command,
            tty,
            stdin,
            stdout: true,
            stderr: !tty,
        };
        Ok(self.runtime.clone().exec(request).await.map_err(said)?.into_inner().url)
    }

    /// Where the streams of a container's first process can be opened.
    pub async fn attach_url(&self, container: &str, stdin: bool, tty: bool) -> Result<String> {
        let request = AttachRequest {
            container_id: container.to_owned(),
            stdin,
            tty,
            stdout: true,
            stderr: !tty,
        };
        let answer = self.runtime.clone().attach(request).await.map_err(said)?;
        Ok(answer.into_inner().url)
    }

    /// Where connections to ports in a sandbox can be opened.
    pub async fn port_forward_url(&self, sandbox: &str, ports: Vec<u16>) -> Result<String> {
        let request = PortForwardRequest {
            pod_sandbox_id: sandbox.to_owned(),
            port: ports.into_iter().map(i32::from).collect(),
        };
        let answer = self.runtime.clone().port_forward(request).await.map_err(said)?;
        Ok(answer.into_inner().url)
    }
}

/// A pull's progress.
pub struct Pulling(Streaming<v1::PullResponse>);

impl Pulling {
    /// `None` if the server stopped.
    pub async fn next(&mut self) -> Result<Option<v1::PullResponse>> {
        self.0.message().await.map_err(said)
    }
}

/// The stream of events.
pub struct Happenings(Streaming<ContainerEventResponse>);

impl Happenings {
    /// `None` if the server stopped.
    pub async fn next(&mut self) -> Result<Option<ContainerEventResponse>> {
        self.0.message().await.map_err(said)
    }
}

/// A watch's stream.
pub struct Changes(Streaming<v1::WatchResponse>);

impl Changes {
    /// The next record and whether it was erased; `None` if the server stopped.
    pub async fn next(&mut self) -> Result<Option<(Value, bool)>> {
        let Some(change) = self.0.message().await.map_err(said)? else {
            return Ok(None);
        };
        let document = change.document.unwrap_or_default();
        Ok(Some((value(&document)?, change.erased)))
    }
}

fn value(document: &v1::Document) -> Result<Value> {
    serde_json::from_slice(&document.json).with_context(|| format!("the daemon's {} record", document.kind))
}

/// A JSON list's items, none if it is no list.
pub fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// A JSON string, empty if it is none.
pub fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
