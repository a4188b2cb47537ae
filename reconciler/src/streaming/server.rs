//! HTTP in front of the streams: a token in the path, an upgrade to SPDY or WebSocket.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming as Body;
use hyper::header::{CONNECTION, HeaderMap, HeaderName, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_PROTOCOL};
use hyper::header::{SEC_WEBSOCKET_KEY, UPGRADE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::upgrade::Upgraded;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use nix::sys::socket::{setsockopt, sockopt};
use state::grant::{self, GrantKind, Streams, Wish};
use state::sandbox::{NamespaceMode, SandboxGoal, SandboxKind, SandboxPhase};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_rustls::TlsAcceptor;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;

use super::Settings;
use super::channels::{Channels, Form, Link, Outgoing, Watcher, closed};
use super::portforward::{self, Pair};
use super::session::{self, Limits};
use super::spdy::{Connection, Role};
use super::tls;
use super::websocket::{self, PROTOCOLS, Protocol, TUNNELS};
use crate::engine::Context;

/// Connections at a time; more wait to be accepted.
const CONNECTIONS: u32 = 1024;
/// How long a client may take to send its request, and to open the streams of its session.
const OPENING: Duration = Duration::from_secs(30);
/// How long open sessions may take to tell their clients that the daemon stops.
const LAST_WORDS: Duration = Duration::from_secs(2);
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

const VERSION: HeaderName = HeaderName::from_static("x-stream-protocol-version");
const ACCEPTED: HeaderName = HeaderName::from_static("x-accepted-stream-protocol-versions");
/// SPDY's protocols for exec and attach; the later, the more.
const REMOTE_COMMAND: [&str; 4] = [
    "v4.channel.k8s.io",
    "v3.channel.k8s.io",
    "v2.channel.k8s.io",
    "channel.k8s.io",
];
const PORT_FORWARD: [&str; 1] = ["portforward.k8s.io"];

/// The listening server.
pub struct Server {
    listener: TcpListener,
    settings: Settings,
    acceptor: Option<TlsAcceptor>,
}

/// What every request is given.
struct Shared {
    cx: Arc<Context>,
    idle: Duration,
    acceptor: Option<TlsAcceptor>,
    closing: watch::Receiver<bool>,
}

/// What a request and its answer agreed on.
enum Agreed {
    Spdy(&'static str),
    WebSocket(Protocol),
    Tunnel,
}

impl Server {
    pub async fn bind(settings: Settings) -> std::io::Result<Server> {
        let acceptor = settings.tls.clone().map(tls::acceptor).transpose();
        let acceptor = acceptor.map_err(std::io::Error::other)?;
        let listener = TcpListener::bind(settings.address).await?;
        Ok(Server {
            listener,
            settings,
            acceptor,
        })
    }

    /// What URLs begin with. A server on all addresses is reached through the loopback one.
    pub fn url(&self) -> std::io::Result<String> {
        let mut address = self.listener.local_addr()?;
        if address.ip().is_unspecified() {
            let loopback = if address.is_ipv4() {
                [127, 0, 0, 1].into()
            } else {
                std::net::Ipv6Addr::LOCALHOST.into()
            };
            address = SocketAddr::new(loopback, address.port());
        }
        let scheme = if self.settings.tls.is_some() { "https" } else { "http" };
        Ok(format!("{scheme}://{address}"))
    }

    /// Serves until `closing`; open sessions then have a moment to say so.
    pub async fn serve(self, cx: Arc<Context>, closing: watch::Receiver<bool>) {
        let seats = Arc::new(Semaphore::new(CONNECTIONS as usize));
        let shared = Arc::new(Shared {
            cx,
            idle: self.settings.idle,
            acceptor: self.acceptor,
            closing: closing.clone(),
        });
        loop {
            let accepted = async {
                let seat = seats.clone().acquire_owned().await;
                (self.listener.accept().await, seat)
            };
            tokio::select! {
                (accepted, seat) = accepted => match (accepted, seat) {
                    (Ok((stream, _)), Ok(seat)) => drop(tokio::spawn(connection(shared.clone(), stream, seat))),
                    (Err(error), _) => {
                        tracing::warn!(%error, "cannot accept a streaming connection");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                    (_, Err(_)) => return,
                },
                () = closed(closing.clone()) => break,
            }
        }
        let _ = tokio::time::timeout(LAST_WORDS, seats.acquire_many(CONNECTIONS)).await;
    }
}

async fn connection(shared: Arc<Shared>, stream: TcpStream, seat: OwnedSemaphorePermit) {
    let _ = stream.set_nodelay(true);
    // A client whose machine is gone says nothing.
    let _ = setsockopt(&stream, sockopt::KeepAlive, &true);
    let Some(acceptor) = &shared.acceptor else {
        return requests(&shared, stream, seat).await;
    };
    let secured = tokio::select! {
        secured = tokio::time::timeout(OPENING, acceptor.accept(stream)) => secured,
        () = closed(shared.closing.clone()) => return,
    };
    match secured {
        Ok(Ok(secured)) => requests(&shared, secured, seat).await,
        Ok(Err(error)) => tracing::debug!(%error, "no TLS on a streaming connection"),
        Err(_) => tracing::debug!("a streaming connection did not begin its TLS in time"),
    }
}

async fn requests<S>(shared: &Arc<Shared>, stream: S, seat: OwnedSemaphorePermit)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let seat = Arc::new(seat);
    let service = service_fn(|request| {
        let (shared, seat) = (shared.clone(), seat.clone());
        async move { Ok::<_, Infallible>(answer(shared, seat, request).await) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(OPENING)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    tokio::select! {
        served = served => if let Err(error) = served {
            tracing::debug!(%error, "streaming connection");
        },
        () = closed(shared.closing.clone()) => {}
    }
}

/// A refusal; its text is for people.
fn refusal(status: StatusCode, text: &str) -> Response<String> {
    let mut response = Response::new(format!("{text}\n"));
    *response.status_mut() = status;
    response
}

async fn answer(shared: Arc<Shared>, seat: Arc<OwnedSemaphorePermit>, mut request: Request<Body>) -> Response<String> {
    let missing = || {
        refusal(
            StatusCode::NOT_FOUND,
            "no such stream: a URL is good once, for a minute",
        )
    };
    let store = &shared.cx.store;
    let mut words = request.uri().path().split('/').skip(1);
    let (verb, token) = (
        words.next().unwrap_or_default(),
        words.next().unwrap_or_default().to_owned(),
    );
    let Some(grant) = store
        .get::<GrantKind>(&token)
        .filter(|grant| words.next().is_none() && grant.spec.wish.verb() == verb && grant.spec.waits())
    else {
        return missing();
    };
    if ![Method::GET, Method::POST].contains(request.method()) {
        return refusal(StatusCode::METHOD_NOT_ALLOWED, "GET or POST");
    }
    // Before the token is taken: a client may try another protocol with it.
    let is_forward = matches!(grant.spec.wish, Wish::PortForward { .. });
    let (agreed, response) = match agree(request.headers(), is_forward) {
        Ok(agreed) => agreed,
        Err(refused) => return *refused,
    };
    if grant::redeem(store, &token).await.is_err() {
        return missing();
    }
    tokio::spawn(async move {
        let wish = grant.spec.wish.clone();
        match hyper::upgrade::on(&mut request).await {
            Ok(upgraded) => stream(&shared, &wish, agreed, upgraded).await,
            Err(error) => tracing::debug!(%error, "no upgrade"),
        }
        if let Err(error) = shared.cx.store.erase::<GrantKind>(&token).await {
            tracing::warn!(%error, "grant not erased");
        }
        drop(seat);
    });
    response
}

/// The words of all headers of a name, comma lists taken apart.
fn words(headers: &HeaderMap, name: HeaderName) -> Vec<&str> {
    let values = headers
        .get_all(name)
        .into_iter()
        .filter_map(|value| value.to_str().ok());
    values
        .flat_map(|value| value.split(','))
        .map(str::trim)
        .filter(|word| !word.is_empty())
        .collect()
}

fn agree(headers: &HeaderMap, is_forward: bool) -> Result<(Agreed, Response<String>), Box<Response<String>>> {
    let upgrade = words(headers, UPGRADE);
    let asks = |name: &str| upgrade.iter().any(|word| word.eq_ignore_ascii_case(name));
    if asks("websocket") {
        agree_websocket(headers, is_forward)
    } else if asks("SPDY/3.1") {
        agree_spdy(headers, is_forward)
    } else {
        let text = "ask for an upgrade to SPDY/3.1 or websocket";
        Err(Box::new(refusal(StatusCode::BAD_REQUEST, text)))
    }
}

fn agree_spdy(headers: &HeaderMap, is_forward: bool) -> Result<(Agreed, Response<String>), Box<Response<String>>> {
    let known: &[&'static str] = if is_forward { &PORT_FORWARD } else { &REMOTE_COMMAND };
    let offered = words(headers, VERSION);
    if offered.is_empty() && !is_forward {
        let text = "the header X-Stream-Protocol-Version is missing";
        return Err(Box::new(refusal(StatusCode::BAD_REQUEST, text)));
    }
    let mut chosen = offered.iter().find_map(|word| known.iter().find(|name| *name == word));
    if offered.is_empty() {
        chosen = known.first();
    }
    let Some(&chosen) = chosen else {
        let mut refused = refusal(StatusCode::FORBIDDEN, "no protocol of the client's is known here");
        for name in known {
            refused.headers_mut().append(ACCEPTED, HeaderValue::from_static(name));
        }
        return Err(Box::new(refused));
    };
    let mut response = switching("SPDY/3.1");
    response.headers_mut().insert(VERSION, HeaderValue::from_static(chosen));
    Ok((Agreed::Spdy(chosen), response))
}

fn agree_websocket(headers: &HeaderMap, is_forward: bool) -> Result<(Agreed, Response<String>), Box<Response<String>>> {
    let Some(key) = headers.get(SEC_WEBSOCKET_KEY) else {
        let text = "the header Sec-WebSocket-Key is missing";
        return Err(Box::new(refusal(StatusCode::BAD_REQUEST, text)));
    };
    let offered = words(headers, SEC_WEBSOCKET_PROTOCOL);
    let tunnel = TUNNELS.iter().find(|name| is_forward && offered.contains(name));
    let channel = match offered.is_empty() {
        true => PROTOCOLS.last(),
        false => offered
            .iter()
            .find_map(|word| PROTOCOLS.iter().find(|known| known.name == *word)),
    };
    let (agreed, name) = match (tunnel, channel) {
        (Some(name), _) => (Agreed::Tunnel, *name),
        (None, Some(protocol)) => (Agreed::WebSocket(*protocol), protocol.name),
        (None, None) => {
            let text = "no WebSocket protocol of the client's is known here";
            return Err(Box::new(refusal(StatusCode::FORBIDDEN, text)));
        }
    };
    let mut response = switching("websocket");
    if let Ok(accept) = HeaderValue::from_str(&derive_accept_key(key.as_bytes())) {
        response.headers_mut().insert(SEC_WEBSOCKET_ACCEPT, accept);
    }
    if !name.is_empty() {
        response
            .headers_mut()
            .insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(name));
    }
    Ok((agreed, response))
}

fn switching(to: &'static str) -> Response<String> {
    let mut response = Response::new(String::new());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    response
        .headers_mut()
        .insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    response.headers_mut().insert(UPGRADE, HeaderValue::from_static(to));
    response
}

/// Serves what was agreed on, to its end.
async fn stream(shared: &Shared, wish: &Wish, agreed: Agreed, upgraded: Upgraded) {
    let io = TokioIo::new(upgraded);
    match wish {
        Wish::Exec { streams, .. } | Wish::Attach { streams, .. } => {
            let opened = match agreed {
                Agreed::Spdy(version) => spdy_channels(io, version, *streams).await,
                Agreed::WebSocket(protocol) => Some(websocket_channels(io, protocol, *streams).await),
                Agreed::Tunnel => None,
            };
            if let Some((link, mut channels)) = opened {
                command(shared, wish, link, &mut channels).await;
            }
        }
        Wish::PortForward { sandbox, ports } => {
            let Ok(netns) = netns(shared, sandbox) else { return };
            match agreed {
                Agreed::Spdy(_) => forward(shared, sandbox, netns, Connection::new(io, Role::Server)).await,
                Agreed::Tunnel => {
                    let io = websocket::tunnel(io).await;
                    forward(shared, sandbox, netns, Connection::new(io, Role::Server)).await;
                }
                Agreed::WebSocket(protocol) => websocket_ports(shared, sandbox, netns, ports, protocol, io).await,
            }
        }
    }
}

async fn command(shared: &Shared, wish: &Wish, link: Link, channels: &mut Channels) {
    let limits = Limits {
        client: &link.watcher,
        idle: shared.idle,
        closing: shared.closing.clone(),
    };
    let outcome = session::run(&shared.cx.store, &*shared.cx.world.shims, wish, channels, limits).await;
    tracing::info!(verb = wish.verb(), ?outcome, "stream ended");
    let Some(outcome) = outcome else { return };
    // A client that reads nothing is not told either.
    if tokio::time::timeout(OPENING, channels.close(&outcome)).await.is_ok() {
        link.finish().await;
    }
}

/// Waits until the client has opened every stream that was granted.
async fn spdy_channels(io: TokioIo<Upgraded>, version: &str, streams: Streams) -> Option<(Link, Channels)> {
    let mut connection = Connection::new(io, Role::Server).ok()?;
    let has_sizes = streams.tty && ["v4.channel.k8s.io", "v3.channel.k8s.io"].contains(&version);
    let wanted: Vec<&str> = [
        (true, "error"),
        (streams.stdin, "stdin"),
        (streams.stdout, "stdout"),
        (streams.stderr, "stderr"),
        (has_sizes, "resize"),
    ]
    .into_iter()
    .filter_map(|(is_wanted, name)| is_wanted.then_some(name))
    .collect();
    let mut found = HashMap::new();
    let opening = async {
        while found.len() < wanted.len() {
            let stream = connection.opened.recv().await?;
            let kind = stream.header("streamtype").unwrap_or_default().to_owned();
            if wanted.contains(&kind.as_str()) && !found.contains_key(&kind) {
                found.insert(kind, stream);
            } else {
                stream.outgoing.reset().await;
            }
        }
        Some(())
    };
    if !matches!(tokio::time::timeout(OPENING, opening).await, Ok(Some(()))) {
        tracing::debug!(?wanted, "the client did not open its streams");
        return None;
    }
    let mut take = |name: &str| found.remove(name);
    let (stdin, resize) = (take("stdin"), take("resize"));
    let channels = Channels {
        stdin: stdin.map(|stream| stream.incoming),
        stdout: take("stdout").map(|stream| stream.outgoing),
        stderr: take("stderr").map(|stream| stream.outgoing),
        resize: resize.map(|stream| stream.incoming),
        error: take("error")?.outgoing,
        form: if version == REMOTE_COMMAND[0] {
            Form::Json
        } else {
            Form::Text
        },
    };
    Some((connection.link, channels))
}

async fn websocket_channels(io: TokioIo<Upgraded>, protocol: Protocol, streams: Streams) -> (Link, Channels) {
    let (link, incoming) = websocket::channels(io, protocol, &[0, 4]).await;
    let mut incoming = incoming.into_iter();
    let (stdin, resize) = (incoming.next(), incoming.next());
    let to = |channel| Outgoing {
        channel,
        to: link.out.clone(),
    };
    let channels = Channels {
        stdin: stdin.filter(|_| streams.stdin),
        stdout: streams.stdout.then(|| to(1)),
        stderr: streams.stderr.then(|| to(2)),
        resize: resize.filter(|_| streams.tty && protocol.is_v4),
        error: to(3),
        form: if protocol.is_v4 { Form::Json } else { Form::Text },
    };
    // An empty message: the client sees that the server is there.
    let first = channels
        .stdout
        .as_ref()
        .or(channels.stderr.as_ref())
        .unwrap_or(&channels.error);
    first.send(bytes::Bytes::new()).await;
    (link, channels)
}

/// Where a ready sandbox's network is; `None` inside for the host's.
fn netns(shared: &Shared, sandbox: &str) -> Result<Option<PathBuf>, ()> {
    let cx = &shared.cx;
    let record = cx.store.get::<SandboxKind>(sandbox).ok_or(())?;
    let is_host = record.spec.namespaces.network == NamespaceMode::Node;
    Ok((!is_host).then(|| cx.world.paths.netns(sandbox)))
}

/// Until the sandbox is ready no more, nothing happened for long, or the daemon stops.
async fn over(shared: &Shared, sandbox: &str, client: &Watcher) {
    let store = &shared.cx.store;
    let stopped = store.wait::<SandboxKind, (), _>(sandbox, None, |now| {
        let is_ready = now.is_some_and(|now| {
            now.status.phase == SandboxPhase::Ready && now.spec.goal == SandboxGoal::Ready && !now.meta.deleted()
        });
        (!is_ready).then_some(())
    });
    tokio::select! {
        _ = stopped => {}
        () = client.activity.idle(shared.idle) => {}
        () = client.gone() => {}
        () = closed(shared.closing.clone()) => {}
    }
}

async fn forward(shared: &Shared, sandbox: &str, netns: Option<PathBuf>, connection: std::io::Result<Connection>) {
    let Ok(mut connection) = connection else { return };
    // Its parts are waited for beside each other.
    let client = connection.link.watcher.clone();
    tokio::select! {
        () = portforward::serve(netns, &mut connection) => {}
        () = over(shared, sandbox, &client) => {}
    }
    tracing::info!(verb = "portforward", "stream ended");
    connection.link.finish().await;
}

/// Channels 2n and 2n + 1 carry data and errors of the n-th port.
async fn websocket_ports(
    shared: &Shared,
    sandbox: &str,
    netns: Option<PathBuf>,
    ports: &[u16],
    protocol: Protocol,
    io: TokioIo<Upgraded>,
) {
    let numbers: Vec<u32> = (0..ports.len() as u32).map(|n| 2 * n).collect();
    let (link, incoming) = websocket::channels(io, protocol, &numbers).await;
    let mut pairs = tokio::task::JoinSet::new();
    for ((port, number), incoming) in ports.iter().zip(numbers).zip(incoming) {
        let to = |channel| Outgoing {
            channel,
            to: link.out.clone(),
        };
        let pair = Pair {
            port: *port,
            incoming,
            data: to(number),
            error: to(number + 1),
            reset: None,
        };
        let netns = netns.clone();
        pairs.spawn(async move {
            for channel in [&pair.data, &pair.error] {
                channel
                    .send(bytes::Bytes::copy_from_slice(&pair.port.to_le_bytes()))
                    .await;
            }
            portforward::forward(netns, pair).await;
        });
    }
    tokio::select! {
        () = async { while pairs.join_next().await.is_some() {} } => {}
        () = over(shared, sandbox, &link.watcher) => {}
    }
    link.finish().await;
}
