//! The socket: bound for root alone, all services on it, limits; calls are counted, timed and logged.

use std::future::Future;
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::Stream;
use state::meter::Labels;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::body::Body;
use tonic::codegen::http::{HeaderValue, Request, Response};
use tonic::transport::server::{Connected, UdsConnectInfo};
use tonic::{Code, Status};
use tower::{Layer, Service};

use crate::records::v1::records_server::RecordsServer;
use crate::runtime::v1::image_service_server::ImageServiceServer;
use crate::runtime::v1::runtime_service_server::RuntimeServiceServer;
use crate::services::Services;
use crate::subject::Subject;

/// Bytes of one message at most, both ways: what the kubelet's client accepts.
pub const MESSAGE_LIMIT: usize = 16 << 20;
/// Streams of one connection at a time.
const STREAMS: u32 = 1000;
/// Connections at a time; more wait in the socket's queue.
const CONNECTIONS: usize = 512;
/// Pause after a failed accept (no descriptor is free, say).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// For so long open calls may end after the end signal.
const DRAIN: Duration = Duration::from_secs(5);

/// Binds the API socket at `path`, for its owner only. What is left of a dead daemon is replaced; a socket that
/// somebody serves is not (`AddrInUse`), nor is anything that is no socket. A missing parent directory is made.
pub fn bind(path: &Path) -> std::io::Result<UnixListener> {
    let named = |action: &str, error: std::io::Error| {
        std::io::Error::new(error.kind(), format!("{action} {}: {error}", path.display()))
    };
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        std::fs::create_dir_all(parent).map_err(|error| named("make the directory of", error))?;
    }
    match std::fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            let error = std::io::Error::new(ErrorKind::AlreadyExists, "it is no socket; move it away");
            return Err(named("bind", error));
        }
        Ok(_) if std::os::unix::net::UnixStream::connect(path).is_ok() => {
            let error = std::io::Error::new(ErrorKind::AddrInUse, "another process serves it");
            return Err(named("bind", error));
        }
        _ => {}
    }
    // Under another name until its mode is right; the rename replaces the stale one.
    let mut temporary = path.as_os_str().to_owned();
    temporary.push("~");
    let temporary = Path::new(&temporary);
    match std::fs::remove_file(temporary) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(named("clear the way of", error)),
        _ => {}
    }
    let listener = UnixListener::bind(temporary).map_err(|error| named("bind", error))?;
    std::fs::set_permissions(temporary, std::fs::Permissions::from_mode(0o600))
        .and_then(|()| std::fs::rename(temporary, path))
        .map_err(|error| named("bind", error))?;
    Ok(listener)
}

/// Serves until `services`' end signal; then no new call is taken, streams and waits end, and what is still open
/// after a few seconds is dropped. Every wish that was answered or is under way is on disk.
pub async fn serve(listener: UnixListener, services: Services) -> Result<(), tonic::transport::Error> {
    let closing = {
        let services = services.clone();
        async move { services.closed().await }
    };
    let drained = {
        let services = services.clone();
        async move {
            services.closed().await;
            tokio::time::sleep(DRAIN).await;
        }
    };
    let runtime = RuntimeServiceServer::new(services.clone())
        .max_decoding_message_size(MESSAGE_LIMIT)
        .max_encoding_message_size(MESSAGE_LIMIT);
    let images = ImageServiceServer::new(services.clone())
        .max_decoding_message_size(MESSAGE_LIMIT)
        .max_encoding_message_size(MESSAGE_LIMIT);
    let records = RecordsServer::new(services.clone())
        .max_decoding_message_size(MESSAGE_LIMIT)
        .max_encoding_message_size(MESSAGE_LIMIT);
    let server = tonic::transport::Server::builder()
        .max_concurrent_streams(STREAMS)
        .layer(Observe { services })
        .add_service(runtime)
        .add_service(images)
        .add_service(records)
        .serve_with_incoming_shutdown(connections(listener), closing);
    tokio::select! {
        ended = server => ended,
        () = drained => Ok(()),
    }
}

/// The connections of clients, never more than [`CONNECTIONS`] open.
fn connections(listener: UnixListener) -> impl Stream<Item = std::io::Result<Connection>> {
    let seats = Arc::new(Semaphore::new(CONNECTIONS));
    futures::stream::unfold((listener, seats), async |(listener, seats)| {
        let seat = seats.clone().acquire_owned().await.ok()?;
        let connection = loop {
            match listener.accept().await {
                Ok((stream, _)) => break Connection { stream, _seat: seat },
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        };
        Some((Ok(connection), (listener, seats)))
    })
}

/// A connection and its seat.
struct Connection {
    stream: UnixStream,
    _seat: OwnedSemaphorePermit,
}

impl Connected for Connection {
    type ConnectInfo = UdsConnectInfo;

    fn connect_info(&self) -> UdsConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// Wraps every call: refuses it before the first look at the node, counts and times it, logs its end. (That a change
/// begins is logged where its request is read.)
#[derive(Clone)]
struct Observe {
    services: Services,
}

impl<S> Layer<S> for Observe {
    type Service = Observed<S>;

    fn layer(&self, inner: S) -> Observed<S> {
        Observed {
            inner,
            services: self.services.clone(),
        }
    }
}

#[derive(Clone)]
struct Observed<S> {
    inner: S,
    services: Services,
}

impl<S> Service<Request<Body>> for Observed<S>
where
    S: Service<Request<Body>, Response = Response<Body>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let method = request.uri().path().to_owned();
        let rpc = method.rsplit('/').next().unwrap_or_default();
        let subject = Subject::new(self.services.clone(), rpc);
        request.extensions_mut().insert(subject.clone());
        let end = End {
            services: self.services.clone(),
            method,
            subject,
            started: Instant::now(),
            code: Code::Cancelled,
        };
        if needs_first_look(&end.method)
            && let Err(error) = self.services.ready()
        {
            end.finish(error.code());
            return Box::pin(std::future::ready(Ok(Status::from(error).into_http())));
        }
        let answer = self.inner.call(request);
        Box::pin(async move {
            let mut response = answer.await?;
            end.finish(final_code(&mut response));
            Ok(response)
        })
    }
}

/// Version tells whom the client speaks to, and records can be looked at while the first look is under way.
fn needs_first_look(method: &str) -> bool {
    !matches!(
        method,
        "/runtime.v1.RuntimeService/Version"
            | "/reconcile.records.v1.Records/Get"
            | "/reconcile.records.v1.Records/Watch"
    )
}

/// The code that a response bears in its headers; one without is OK so far. A message over the limit is
/// RESOURCE_EXHAUSTED in the CRI's convention, where tonic says OUT_OF_RANGE.
fn final_code(response: &mut Response<Body>) -> Code {
    let Some(value) = response.headers_mut().get_mut("grpc-status") else {
        return Code::Ok;
    };
    let code = Code::from_bytes(value.as_bytes());
    if code != Code::OutOfRange {
        return code;
    }
    *value = HeaderValue::from(Code::ResourceExhausted as i32);
    Code::ResourceExhausted
}

/// A call's end, also that of one whose client left.
struct End {
    services: Services,
    method: String,
    subject: Subject,
    started: Instant,
    code: Code,
}

impl End {
    fn finish(mut self, code: Code) {
        self.code = code;
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let Some((service, rpc)) = self.method.trim_start_matches('/').split_once('/') else {
            return;
        };
        // Any other path is made up by the client: it is not worth a line, nor a place among the counts.
        if !["runtime.v1.", "reconcile.records.v1."]
            .iter()
            .any(|ours| service.starts_with(ours))
            || self.code == Code::Unimplemented && !is_known(rpc)
        {
            return;
        }
        let about = self.subject.get();
        let took = self.started.elapsed();
        let code = format!("{:?}", self.code);
        let meter = self.services.store.meter();
        let labels: Labels = &[("operation", rpc), ("code", &code), ("handler", &about.handler)];
        meter.count("reconcile_rpc_total", labels);
        meter.time("reconcile_rpc_seconds", &[("operation", rpc)], took);
        if changes(rpc) {
            tracing::info!(rpc, pod = about.pod, id = about.id, ?took, code, "call ended");
        } else {
            tracing::debug!(rpc, ?took, code, "call ended");
        }
    }
}

/// Is this the name of an RPC as the protocols spell them?
fn is_known(rpc: &str) -> bool {
    rpc.len() < 40 && rpc.bytes().all(|b| b.is_ascii_alphabetic())
}

/// Does the RPC change anything?
fn changes(rpc: &str) -> bool {
    const CHANGES: [&str; 17] = [
        "Run",
        "Stop",
        "Remove",
        "Create",
        "Start",
        "Update",
        "Reopen",
        "Exec",
        "Pull",
        "Apply",
        "Delete",
        "Once",
        "Reload",
        "Checkpoint",
        "Restore",
        "Attach",
        "PortForward",
    ];
    rpc != "RuntimeConfig" && CHANGES.iter().any(|verb| rpc.starts_with(verb))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn binds_for_the_owner_and_replaces_only_what_is_dead() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b.sock");
        let listener = bind(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
        assert_eq!(bind(&path).unwrap_err().kind(), ErrorKind::AddrInUse);
        drop(listener);
        bind(&path).unwrap();
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        let file = dir.path().join("file");
        std::fs::write(&file, "kept").unwrap();
        assert_eq!(bind(&file).unwrap_err().kind(), ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "kept");
        let long = dir.path().join("x".repeat(120));
        let error = bind(&long).unwrap_err().to_string();
        assert!(error.contains(&long.display().to_string()), "{error}");
    }

    #[test]
    fn tells_changes_from_reads() {
        for rpc in [
            "RunPodSandbox",
            "ExecSync",
            "PullImage",
            "Apply",
            "UpdateRuntimeConfig",
            "Once",
        ] {
            assert!(changes(rpc), "{rpc}");
        }
        for rpc in [
            "RuntimeConfig",
            "Status",
            "ListImages",
            "StreamContainers",
            "Get",
            "Watch",
            "ImageFsInfo",
        ] {
            assert!(!changes(rpc), "{rpc}");
        }
    }
}
