//! A forward proxy (RFC 9110, 7.3.2 and 9.3.6): absolute URLs and CONNECT, for whatever host, to one address each.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};

/// What was asked of it.
#[derive(Clone, Debug)]
pub struct Passed {
    /// `CONNECT host:port` or `GET http://host/path`.
    pub line: String,
    /// `Proxy-Authorization`.
    pub authorization: Option<String>,
    pub refused: bool,
}

struct Shared {
    /// Where plain requests go, and tunnels.
    plain: SocketAddr,
    tunnel: SocketAddr,
    /// The `Proxy-Authorization` that it asks for.
    wanted: String,
    passed: Mutex<Vec<Passed>>,
}

/// It ends with its value.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    task: AbortHandle,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Proxy {
    /// On a free port of 127.0.0.1, for those who show this `Proxy-Authorization`.
    pub async fn start(plain: SocketAddr, tunnel: SocketAddr, wanted: String) -> io::Result<Proxy> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            plain,
            tunnel,
            wanted,
            passed: Mutex::default(),
        });
        let task = tokio::spawn(serve(listener, shared.clone())).abort_handle();
        Ok(Proxy { address, shared, task })
    }

    /// `http://user:password@host:port`, as the environment has it.
    pub fn url(&self, user: &str, password: &str) -> String {
        format!("http://{user}:{password}@{}", self.address)
    }

    /// What was asked so far, forgotten by asking.
    pub fn take_passed(&self) -> Vec<Passed> {
        std::mem::take(&mut self.shared.passed.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let shared = shared.clone();
        // A peer that leaves ends its connection, nothing else.
        connections.spawn(async move { drop(connection(stream, &shared).await) });
        while connections.try_join_next().is_some() {}
    }
}

async fn connection(mut stream: TcpStream, shared: &Shared) -> io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        if stream.read(&mut byte).await? == 0 || head.len() > 64 << 10 {
            return Ok(());
        }
        head.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let first = head.lines().next().unwrap_or_default();
    let line = first.rsplit_once(' ').map_or(first, |(line, _)| line).to_owned();
    let header = |name: &str| {
        let mut all = head.lines().filter_map(|line| line.split_once(':'));
        let found = all.find(|(found, _)| found.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.trim().to_owned())
    };
    let authorization = header("proxy-authorization");
    let refused = authorization.as_ref() != Some(&shared.wanted);
    shared
        .passed
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push(Passed {
            line: line.clone(),
            authorization,
            refused,
        });
    if refused {
        let answer = b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        stream.write_all(answer).await?;
        return stream.shutdown().await;
    }
    if line.starts_with("CONNECT ") {
        let mut upstream = TcpStream::connect(shared.tunnel).await?;
        stream.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await?;
        return tokio::io::copy_bidirectional(&mut stream, &mut upstream)
            .await
            .map(drop);
    }
    let mut upstream = TcpStream::connect(shared.plain).await?;
    upstream.write_all(in_origin_form(&line, &head).as_bytes()).await?;
    // One request a connection, which both sides are told.
    upstream.shutdown().await?;
    let mut status = Vec::new();
    while !status.ends_with(b"\r\n") && status.len() < 1 << 10 {
        status.push(upstream.read_u8().await?);
    }
    stream.write_all(&status).await?;
    stream.write_all(b"Connection: close\r\n").await?;
    tokio::io::copy(&mut upstream, &mut stream).await?;
    stream.shutdown().await
}

/// The request as the server itself takes it.
fn in_origin_form(line: &str, head: &str) -> String {
    let url = line.split("://").nth(1).unwrap_or_default();
    let path = url.find('/').map_or("/", |at| &url[at..]);
    let method = line.split(' ').next().unwrap_or_default();
    let kept = |line: &&str| !line.is_empty() && !line.to_lowercase().starts_with("proxy-");
    let rest: Vec<_> = head.lines().skip(1).filter(kept).collect();
    format!("{method} {path} HTTP/1.1\r\n{}\r\n\r\n", rest.join("\r\n"))
}
