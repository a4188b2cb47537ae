//! The client's end of exec and attach: streams of the URL that the daemon gave, this terminal, and the exit code.

use std::io::{IsTerminal, Read, Write};

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use hyper::Request;
use hyper::header::{CONNECTION, HOST, UPGRADE};
use hyper_util::rt::TokioIo;
use reconciler::streaming::channels::Incoming;
use reconciler::streaming::spdy::{Connection, Role};
use reconciler::streaming::tls;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use rustls::pki_types::ServerName;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::client::text;
use crate::options::Global;

/// Ctrl-P, Ctrl-Q: leaves an attached container running.
const DETACH: [u8; 2] = [0x10, 0x11];

/// What this process gives to the other end.
#[derive(Clone, Copy, Debug)]
pub struct Local {
    pub stdin: bool,
    /// The other end is a terminal.
    pub tty: bool,
    /// Standard input is a terminal that passes every key on.
    pub raw: bool,
    /// The detach keys mean something.
    pub detach: bool,
}

impl Local {
    /// `-t` needs a terminal to stand for.
    pub fn new(stdin: bool, tty: bool, detach: bool) -> Local {
        let has_terminal = std::io::stdin().is_terminal();
        if tty && stdin && !has_terminal {
            eprintln!("reconcile: standard input is no terminal: going on without one");
        }
        Local {
            stdin,
            tty: tty && (has_terminal || !stdin),
            raw: tty && stdin && has_terminal,
            detach,
        }
    }
}

/// Opens the connection behind a URL. With TLS the server must have the certificate of the configuration.
pub async fn open(global: &Global, url: &str, protocol: &str) -> Result<Connection> {
    let (scheme, rest) = url.split_once("://").unwrap_or_default();
    let (authority, path) = rest
        .find('/')
        .and_then(|at| rest.split_at_checked(at))
        .with_context(|| format!("the daemon answered an address of another kind: {url}"))?;
    let socket = TcpStream::connect(authority)
        .await
        .with_context(|| format!("cannot reach the daemon's streaming server at {authority}"))?;
    let _ = socket.set_nodelay(true);
    match (scheme, &global.config.streaming.tls.cert) {
        ("http", _) => upgrade(socket, authority, path, protocol).await,
        ("https", Some(cert)) => {
            let name = ServerName::from(socket.peer_addr()?.ip());
            let secured = tls::connector(&cert.0)?.connect(name, socket).await;
            let secured =
                secured.with_context(|| format!("cannot speak TLS with the streaming server at {authority}"))?;
            upgrade(secured, authority, path, protocol).await
        }
        ("https", None) => bail!("the daemon streams with TLS: name its certificate (streaming.tls.cert) here too"),
        _ => bail!("the daemon answered an address of another kind: {url}"),
    }
}

/// From HTTP to SPDY.
async fn upgrade<S>(socket: S, authority: &str, path: &str, protocol: &str) -> Result<Connection>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(socket)).await?;
    tokio::spawn(connection.with_upgrades());
    let request = Request::post(path)
        .header(HOST, authority)
        .header(CONNECTION, "Upgrade")
        .header(UPGRADE, "SPDY/3.1")
        .header("X-Stream-Protocol-Version", protocol)
        .body(String::new())?;
    let mut response = sender.send_request(request).await?;
    if response.status() != hyper::StatusCode::SWITCHING_PROTOCOLS {
        bail!("the streaming server refused: {}", response.status());
    }
    let upgraded = hyper::upgrade::on(&mut response).await?;
    Ok(Connection::new(TokioIo::new(upgraded), Role::Client)?)
}

/// Headers of one stream.
fn kind(name: &str) -> Vec<(String, String)> {
    vec![("streamtype".to_owned(), name.to_owned())]
}

/// Runs a granted exec or attach to its end; its exit code.
pub async fn command(global: &Global, url: &str, local: Local) -> Result<i32> {
    let connection = open(global, url, "v4.channel.k8s.io").await?;
    let error = connection.open(kind("error")).await?;
    let stdin = match local.stdin {
        true => Some(connection.open(kind("stdin")).await?.outgoing),
        false => None,
    };
    let stdout = connection.open(kind("stdout")).await?;
    let stderr = match local.tty {
        true => None,
        false => Some(connection.open(kind("stderr")).await?.incoming),
    };
    let sizes = match local.tty {
        true => Some(connection.open(kind("resize")).await?.outgoing),
        false => None,
    };
    let _raw = Raw::enter(local)?;
    let input = async {
        if let Some(to) = stdin {
            let mut typed = typed();
            let mut last = 0;
            while let Some(bytes) = typed.recv().await {
                if local.detach && detaches(&mut last, &bytes) {
                    return;
                }
                if !to.send(bytes).await {
                    break;
                }
            }
            to.end().await;
        }
        std::future::pending::<()>().await;
    };
    let resized = async {
        if let Some(to) = sizes {
            let mut changes = signal(SignalKind::window_change())?;
            loop {
                if let Ok(size) = tcgetwinsize(std::io::stdout()) {
                    let text = json!({ "Width": size.ws_col, "Height": size.ws_row }).to_string();
                    to.send(text.into()).await;
                }
                changes.recv().await;
            }
        }
        std::future::pending::<Result<()>>().await
    };
    let output = async {
        let (out, err) = (std::io::stdout(), std::io::stderr());
        let all = tokio::try_join!(write(stdout.incoming, out), async {
            match stderr {
                Some(stderr) => write(stderr, err).await,
                None => Ok(()),
            }
        });
        all?;
        outcome(error.incoming).await
    };
    tokio::select! {
        outcome = output => outcome,
        () = input => Ok(0),
        problem = resized => problem.map(|()| 0),
    }
}

async fn write(mut from: Incoming, mut to: impl Write) -> Result<()> {
    while let Some(bytes) = from.recv().await {
        // A full pipe may block for long.
        tokio::task::block_in_place(|| to.write_all(&bytes).and_then(|()| to.flush()))?;
    }
    Ok(())
}

/// What the error stream says in the end.
async fn outcome(mut error: Incoming) -> Result<i32> {
    let mut told = Vec::new();
    while let Some(bytes) = error.recv().await {
        told.extend_from_slice(&bytes);
    }
    if told.is_empty() {
        bail!("the connection to the daemon broke");
    }
    let status: Value = serde_json::from_slice(&told).context("the streaming server's last words")?;
    if status["status"] == "Success" {
        return Ok(0);
    }
    let code = text(&status["details"]["causes"][0]["message"]).parse();
    match code {
        Ok(code) if status["reason"] == "NonZeroExitCode" => Ok(code),
        _ => bail!("{}", text(&status["message"])),
    }
}

/// Standard input in pieces. Read by a thread that nobody waits for: a read cannot be cancelled.
fn typed() -> mpsc::Receiver<Bytes> {
    let (to, typed) = mpsc::channel(4);
    std::thread::spawn(move || {
        let mut stdin = std::io::stdin().lock();
        let mut piece = vec![0; 16 << 10];
        while let Ok(len) = stdin.read(&mut piece) {
            let bytes = Bytes::copy_from_slice(piece.get(..len).unwrap_or_default());
            if len == 0 || to.blocking_send(bytes).is_err() {
                return;
            }
        }
    });
    typed
}

/// Do the detach keys end in these bytes? `last` is the byte before them.
fn detaches(last: &mut u8, bytes: &[u8]) -> bool {
    bytes.iter().any(|byte| {
        let is_end = [*last, *byte] == DETACH;
        *last = *byte;
        is_end
    })
}

/// The terminal passes every key on, until this is dropped.
struct Raw(Option<Termios>);

impl Raw {
    fn enter(local: Local) -> Result<Raw> {
        if !local.raw {
            return Ok(Raw(None));
        }
        let before = tcgetattr(std::io::stdin()).context("terminal")?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(std::io::stdin(), OptionalActions::Now, &raw).context("terminal")?;
        Ok(Raw(Some(before)))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_detach_keys_may_come_in_two_pieces() {
        let mut last = 0;
        assert!(!detaches(&mut last, b"a\x10") && detaches(&mut last, b"\x11"));
        let mut last = 0;
        assert!(!detaches(&mut last, b"\x11\x10a\x11") && detaches(&mut last, b"\x10\x11x"));
    }
}
