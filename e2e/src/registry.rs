//! A registry that misbehaves on demand: stalls, trickles, lies about lengths, wants to be asked again or with a
//! password. It remembers what it was asked, with which `Authorization`, and how many bytes it sent.
//!
//! Plain tokio and HTTP/1.1, so that every byte is ours. A connection that begins as TLS is closed.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};

/// What goes wrong with an answer.
#[derive(Clone, Debug)]
pub enum Fault {
    /// So many bytes of the body, then silence.
    Stall(u64),
    /// So many bytes of the body each time.
    Trickle(usize, Duration),
    Status(u16),
    /// The status, with a `Retry-After` in seconds.
    Later(u16, u64),
    /// The status, to be asked again a second after its own `Date`, which is long ago.
    LaterDate(u16),
    /// So many bytes of the body, then the connection is closed.
    Truncate(u64),
    /// A while, so many bytes of the body, then the connection is closed.
    Crumb(Duration, u64),
    /// One bit of the body is turned.
    Corrupt,
    /// So many bytes more than there should be, `Content-Length` included.
    Longer(u64),
    /// The same, without a `Content-Length`: the end is that of the connection.
    LongerUnsaid(u64),
    /// To the same path below another base, `http://host`.
    Redirect(String),
    /// The whole body, whatever range was asked for.
    NoRange,
    /// 416 for every range.
    BadRange,
    /// A `Docker-Content-Digest` of something else.
    Digest(String),
    /// No `Docker-Content-Digest` and no useful media type.
    Bare,
    /// Nothing at all.
    Silence,
}

/// How it lets people in.
#[derive(Clone, Debug)]
pub struct Gate {
    /// User, password, and what they get once signed in: 200, or another status.
    pub users: Vec<(String, String, u16)>,
    /// Refresh tokens that are good.
    pub refresh: Vec<String>,
    /// Access tokens that were never issued here but are good.
    pub access: Vec<String>,
    pub kind: GateKind,
}

#[derive(Clone, Debug)]
pub enum GateKind {
    Basic,
    Bearer {
        /// Whether the realm takes POST (OAuth2), or GET alone.
        post: bool,
        /// Whether those without a name get a token.
        anonymous: bool,
        /// Seconds.
        expires_in: u64,
        /// Base of the realm; its own if `None`.
        realm: Option<String>,
    },
}

impl Gate {
    pub fn basic(user: &str, password: &str) -> Gate {
        Gate {
            users: vec![(user.into(), password.into(), 200)],
            refresh: Vec::new(),
            access: Vec::new(),
            kind: GateKind::Basic,
        }
    }

    pub fn bearer(user: &str, password: &str) -> Gate {
        Gate {
            kind: GateKind::Bearer {
                post: true,
                anonymous: false,
                expires_in: 300,
                realm: None,
            },
            ..Gate::basic(user, password)
        }
    }
}

/// A request that came.
#[derive(Clone, Debug)]
pub struct Seen {
    pub method: String,
    /// With the query.
    pub path: String,
    pub headers: HashMap<String, String>,
    pub body: String,
    /// Of the answer.
    pub status: u16,
    /// Bytes of the answer's body that were sent.
    pub sent: u64,
}

impl Seen {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }
}

#[derive(Default)]
struct Held {
    /// Below `/v2/`: media type and body.
    documents: HashMap<String, (String, Vec<u8>)>,
    /// Part of the path, fault, how many times more.
    faults: Vec<(String, Fault, usize)>,
    gate: Option<Gate>,
    tokens: HashMap<String, u16>,
    seen: Vec<Seen>,
}

#[derive(Default)]
struct Shared {
    held: Mutex<Held>,
    open: AtomicUsize,
    sending: AtomicUsize,
    host: String,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The server; it ends with its value.
pub struct Server {
    shared: Arc<Shared>,
    task: AbortHandle,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Server {
    /// On a free port of 127.0.0.1. Must be called within a tokio runtime.
    pub async fn start() -> io::Result<Server> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let shared = Arc::new(Shared {
            host: listener.local_addr()?.to_string(),
            ..Shared::default()
        });
        let serve = serve(listener, shared.clone());
        let task = tokio::spawn(serve).abort_handle();
        Ok(Server { shared, task })
    }

    /// `127.0.0.1:port`.
    pub fn host(&self) -> &str {
        &self.shared.host
    }

    /// `http://127.0.0.1:port`.
    pub fn base(&self) -> String {
        format!("http://{}", self.shared.host)
    }

    /// Puts a blob; its digest.
    pub fn blob(&self, repository: &str, bytes: &[u8]) -> String {
        let digest = digest(bytes);
        let path = format!("{repository}/blobs/{digest}");
        let document = ("application/octet-stream".to_owned(), bytes.to_vec());
        self.shared.lock().documents.insert(path, document);
        digest
    }

    /// Puts a manifest or index under its digest and a tag; its digest.
    pub fn manifest(&self, repository: &str, tag: &str, media_type: &str, body: &[u8]) -> String {
        let digest = digest(body);
        for version in [tag, &digest] {
            let path = format!("{repository}/manifests/{version}");
            let document = (media_type.to_owned(), body.to_vec());
            self.shared.lock().documents.insert(path, document);
        }
        digest
    }

    /// The next `times` requests whose method and path (`GET /v2/…`) hold `part` meet this. Faults of one request are
    /// looked up in the order in which they were made; the first decides.
    pub fn fault(&self, part: &str, fault: Fault, times: usize) {
        self.shared.lock().faults.push((part.to_owned(), fault, times));
    }

    /// No fault any more.
    pub fn heal(&self) {
        self.shared.lock().faults.clear();
    }

    pub fn gate(&self, gate: Gate) {
        self.shared.lock().gate = Some(gate);
    }

    /// No token that was issued is good any more.
    pub fn revoke(&self) {
        self.shared.lock().tokens.clear();
    }

    /// What was asked so far, forgotten by asking.
    pub fn take_seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.shared.lock().seen)
    }

    /// What was asked so far.
    pub fn seen(&self) -> Vec<Seen> {
        self.shared.lock().seen.clone()
    }

    /// Bytes of bodies sent so far.
    pub fn sent(&self) -> u64 {
        self.shared.lock().seen.iter().map(|seen| seen.sent).sum()
    }

    /// Answers that are on their way, stalled ones included.
    pub fn sending(&self) -> usize {
        self.shared.sending.load(Ordering::SeqCst)
    }

    /// Connections that are open.
    pub fn connections(&self) -> usize {
        self.shared.open.load(Ordering::SeqCst)
    }
}

/// `sha256:<hex>`.
pub fn digest(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    // Dropped with this task, and the connections with it.
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let shared = shared.clone();
        connections.spawn(async move {
            shared.open.fetch_add(1, Ordering::SeqCst);
            // A client that leaves is what many tests are about.
            let _ = connection(stream, &shared).await;
            shared.open.fetch_sub(1, Ordering::SeqCst);
        });
        while connections.try_join_next().is_some() {}
    }
}

struct Request {
    method: String,
    path: String,
    headers: HashMap<String, String>,
    body: Vec<u8>,
}

#[derive(Default)]
struct Answer {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    /// Instead of the body's own length.
    length: Option<u64>,
    /// No length at all: the connection ends with the body.
    unsaid: bool,
    pace: Pace,
}

#[derive(Clone, Copy, Default)]
enum Pace {
    #[default]
    Free,
    Stall(u64),
    Trickle(usize, Duration),
    Truncate(Duration, u64),
}

async fn connection(mut stream: TcpStream, shared: &Shared) -> io::Result<()> {
    let mut first = [0];
    if stream.peek(&mut first).await? == 1 && first[0] == 0x16 {
        return Ok(());
    }
    while let Some(request) = request(&mut stream).await? {
        let Some(answer) = answer(&request, shared) else {
            // Silence: until the client leaves.
            let _ = stream.read_exact(&mut first).await;
            return Ok(());
        };
        let index = {
            let mut held = shared.lock();
            held.seen.push(Seen {
                method: request.method.clone(),
                path: request.path.clone(),
                headers: request.headers.clone(),
                body: String::from_utf8_lossy(&request.body).into_owned(),
                status: answer.status,
                sent: 0,
            });
            held.seen.len() - 1
        };
        let count = |bytes: usize| {
            // The list may have been taken meanwhile.
            if let Some(seen) = shared.lock().seen.get_mut(index) {
                seen.sent += bytes as u64;
            }
        };
        let closes = answer.unsaid || matches!(answer.pace, Pace::Truncate(..));
        shared.sending.fetch_add(1, Ordering::SeqCst);
        let sent = send(&mut stream, &request, answer, count).await;
        shared.sending.fetch_sub(1, Ordering::SeqCst);
        sent?;
        if closes {
            return stream.shutdown().await;
        }
    }
    Ok(())
}

async fn request(stream: &mut TcpStream) -> io::Result<Option<Request>> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        if stream.read(&mut byte).await? == 0 || head.len() > 64 << 10 {
            return Ok(None);
        }
        head.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let mut lines = head.lines();
    let mut words = lines.next().unwrap_or_default().split(' ').map(str::to_owned);
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let headers: HashMap<_, _> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_lowercase(), value.trim().to_owned()))
        .collect();
    let length = headers
        .get("content-length")
        .and_then(|text| text.parse().ok())
        .unwrap_or(0_usize);
    let mut body = vec![0; length.min(1 << 20)];
    stream.read_exact(&mut body).await?;
    Ok(Some(Request {
        method,
        path,
        headers,
        body,
    }))
}

async fn send(stream: &mut TcpStream, request: &Request, answer: Answer, count: impl Fn(usize)) -> io::Result<()> {
    let mut head = format!("HTTP/1.1 {} Status\r\n", answer.status);
    if answer.unsaid {
        head.push_str("Connection: close\r\n");
    } else {
        let length = answer.length.unwrap_or(answer.body.len() as u64);
        head.push_str(&format!("Content-Length: {length}\r\n"));
    }
    for (name, value) in &answer.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    stream.write_all(head.as_bytes()).await?;
    if request.method == "HEAD" {
        return Ok(());
    }
    let (limit, piece, pause) = match answer.pace {
        Pace::Free => (u64::MAX, 64 << 10, Duration::ZERO),
        Pace::Stall(limit) | Pace::Truncate(_, limit) => (limit, 16 << 10, Duration::ZERO),
        Pace::Trickle(piece, pause) => (u64::MAX, piece, pause),
    };
    if let Pace::Truncate(before, _) = answer.pace {
        tokio::time::sleep(before).await;
    }
    let limit = usize::try_from(limit).unwrap_or(usize::MAX).min(answer.body.len());
    for chunk in answer.body[..limit].chunks(piece) {
        stream.write_all(chunk).await?;
        count(chunk.len());
        tokio::time::sleep(pause).await;
    }
    if matches!(answer.pace, Pace::Stall(_)) {
        // Until the client leaves.
        let _ = stream.read_exact(&mut [0]).await;
    }
    Ok(())
}

fn answer(request: &Request, shared: &Shared) -> Option<Answer> {
    let mut held = shared.lock();
    let line = format!("{} {}", request.method, request.path);
    let fault = held
        .faults
        .iter_mut()
        .find(|(part, _, times)| *times > 0 && line.contains(part.as_str()));
    let fault = fault.map(|(_, fault, times)| {
        *times -= 1;
        fault.clone()
    });
    match &fault {
        Some(Fault::Silence) => return None,
        Some(Fault::Status(status)) => return Some(plain(*status)),
        Some(Fault::Later(status, seconds)) => {
            let mut answer = plain(*status);
            answer.headers.push(("Retry-After".into(), seconds.to_string()));
            return Some(answer);
        }
        Some(Fault::LaterDate(status)) => {
            let mut answer = plain(*status);
            let date = |second: u8| format!("Wed, 21 Oct 2015 07:28:0{second} GMT");
            answer.headers.push(("Date".into(), date(0)));
            answer.headers.push(("Retry-After".into(), date(1)));
            return Some(answer);
        }
        Some(Fault::Redirect(base)) => {
            let mut answer = plain(307);
            answer
                .headers
                .push(("Location".into(), format!("{base}{}", request.path)));
            return Some(answer);
        }
        _ => {}
    }
    if let Some(answer) = token(request, &mut held) {
        return Some(answer);
    }
    if let Some(refusal) = gate(request, &held, &shared.host) {
        return Some(refusal);
    }
    let path = request.path.split('?').next().unwrap_or_default();
    let document = held.documents.get(path.strip_prefix("/v2/").unwrap_or_default());
    let Some((media_type, body)) = document else {
        return Some(plain(404));
    };
    Some(document_answer(request, media_type, body, fault))
}

fn document_answer(request: &Request, media_type: &str, body: &[u8], fault: Option<Fault>) -> Answer {
    let mut answer = Answer {
        status: 200,
        body: body.to_vec(),
        ..Answer::default()
    };
    let mut named = digest(body);
    let range = request.headers.get("range").and_then(|text| {
        let first = text.strip_prefix("bytes=")?.strip_suffix('-')?;
        first.parse::<usize>().ok().filter(|first| *first < body.len())
    });
    match (&fault, range) {
        (Some(Fault::BadRange), Some(_)) => return plain(416),
        (Some(Fault::NoRange), _) | (_, None) => {}
        (_, Some(first)) => {
            answer.status = 206;
            answer.body = body[first..].to_vec();
            let value = format!("bytes {first}-{}/{}", body.len() - 1, body.len());
            answer.headers.push(("Content-Range".into(), value));
        }
    }
    let bare = matches!(fault, Some(Fault::Bare));
    match fault {
        Some(Fault::Stall(bytes)) => answer.pace = Pace::Stall(bytes),
        Some(Fault::Truncate(bytes)) => answer.pace = Pace::Truncate(Duration::ZERO, bytes),
        Some(Fault::Crumb(before, bytes)) => answer.pace = Pace::Truncate(before, bytes),
        Some(Fault::Trickle(bytes, pause)) => answer.pace = Pace::Trickle(bytes, pause),
        Some(Fault::Corrupt) => {
            let at = answer.body.len() / 2;
            answer.body[at] ^= 1;
        }
        Some(Fault::Longer(more) | Fault::LongerUnsaid(more)) => {
            answer.unsaid = matches!(fault, Some(Fault::LongerUnsaid(_)));
            answer
                .body
                .resize(answer.body.len() + usize::try_from(more).unwrap_or(0), b'x');
        }
        Some(Fault::Digest(other)) => named = other,
        _ => {}
    }
    if !bare {
        answer.headers.push(("Content-Type".into(), media_type.into()));
        answer.headers.push(("Docker-Content-Digest".into(), named));
    }
    answer
}

/// A status with an error body as the specification has it.
fn plain(status: u16) -> Answer {
    let body = format!(r#"{{"errors":[{{"code":"CODE{status}","message":"said with {status}"}}]}}"#);
    Answer {
        status,
        body: body.into_bytes(),
        ..Answer::default()
    }
}

/// The answer to those who may not come in.
fn gate(request: &Request, held: &Held, host: &str) -> Option<Answer> {
    let gate = held.gate.as_ref()?;
    let shown = request
        .headers
        .get("authorization")
        .map(String::as_str)
        .unwrap_or_default();
    let status = match &gate.kind {
        GateKind::Basic => user(gate, shown).unwrap_or(401),
        GateKind::Bearer { .. } => {
            let token = shown.strip_prefix("Bearer ").unwrap_or_default();
            let foreign = gate.access.iter().any(|good| good == token).then_some(200);
            held.tokens.get(token).copied().or(foreign).unwrap_or(401)
        }
    };
    if status == 200 {
        return None;
    }
    let mut answer = plain(status);
    // A server that echoes what it was shown.
    answer.body = format!(r#"{{"errors":[{{"code":"DENIED","message":"no entry for {shown}"}}]}}"#).into_bytes();
    if status == 401 {
        let repository = request.path.strip_prefix("/v2/").unwrap_or_default();
        let repository = repository.split("/manifests/").next().unwrap_or_default();
        let repository = repository.split("/blobs/").next().unwrap_or_default();
        let challenge = match &gate.kind {
            GateKind::Basic => "Basic realm=\"the realm\"".to_owned(),
            GateKind::Bearer { realm, .. } => {
                let base = realm.clone().unwrap_or(format!("http://{host}"));
                format!(r#"Bearer realm="{base}/token",service="tests",scope="repository:{repository}:pull""#)
            }
        };
        answer.headers.push(("WWW-Authenticate".into(), challenge));
    }
    Some(answer)
}

/// What a Basic header gets once signed in.
fn user(gate: &Gate, shown: &str) -> Option<u16> {
    let mut users = gate.users.iter();
    let fits = users.find(|(name, password, _)| shown == format!("Basic {}", base64(&format!("{name}:{password}"))));
    fits.map(|(_, _, status)| *status)
}

/// The realm.
fn token(request: &Request, held: &mut Held) -> Option<Answer> {
    if !request.path.starts_with("/token") {
        return None;
    }
    let gate = held.gate.clone()?;
    let GateKind::Bearer {
        post,
        anonymous,
        expires_in,
        ..
    } = gate.kind
    else {
        return None;
    };
    let status = if request.method == "POST" {
        if !post {
            return Some(plain(404));
        }
        let form = String::from_utf8_lossy(&request.body).into_owned();
        let has = |name: &str, value: &str| form.split('&').any(|pair| pair == format!("{name}={value}"));
        let user = gate
            .users
            .iter()
            .find(|(user, password, _)| has("username", user) && has("password", password));
        let refresh = gate.refresh.iter().find(|token| has("refresh_token", token));
        user.map(|(_, _, status)| *status).or(refresh.map(|_| 200))
    } else {
        match request.headers.get("authorization") {
            Some(shown) => user(&gate, shown),
            None => anonymous.then_some(200),
        }
    };
    let Some(status) = status else {
        return Some(plain(401));
    };
    let token = format!("token-{}", held.tokens.len() + 1);
    held.tokens.insert(token.clone(), status);
    let mut answer = plain(200);
    answer.body = format!(r#"{{"access_token":"{token}","expires_in":{expires_in}}}"#).into_bytes();
    Some(answer)
}

/// Base64 with padding (RFC 4648).
pub fn base64(text: &str) -> String {
    const ALPHABET: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::new();
    for chunk in text.as_bytes().chunks(3) {
        let bits = chunk.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for at in 0..4 {
            let index = (bits >> (18 - 6 * at)) as usize & 63;
            out.push(if at <= chunk.len() {
                char::from(ALPHABET[index])
            } else {
                '='
            });
        }
    }
    out
}
