//! One exec or attach: the client's channels on one side, the descriptors that the shim handed over on the other.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use rustix::termios::{Winsize, tcsetwinsize};
use serde::Deserialize;
use shim::api::{AttachRequest, ExecStreamRequest};
use shim::{Code, Live, Pipe};
use state::Store;
use state::container::{ContainerKind, ContainerPhase};
use state::grant::{Streams, Wish};

use super::channels::{Activity, Channels, Incoming, Outcome, Outgoing, PIECE, Watcher, closed};
use crate::world::Shims;

/// A client that takes nothing of the last output for so long is not waited for any more.
const DRAIN: Duration = Duration::from_secs(10);
/// The character that means the end of input to a terminal in its usual mode.
const END_OF_INPUT: &[u8] = b"\x04";
/// Longest size document of a terminal, bytes.
const SIZE_LIMIT: usize = 1024;

/// Why a session ends from outside.
pub struct Limits<'a> {
    pub client: &'a Watcher,
    pub idle: Duration,
    /// Ends when the daemon does.
    pub closing: tokio::sync::watch::Receiver<bool>,
}

/// Runs a session to its end; `None` if the client left.
pub async fn run(
    store: &Store,
    shims: &dyn Shims,
    wish: &Wish,
    channels: &mut Channels,
    limits: Limits<'_>,
) -> Option<Outcome> {
    let opened = tokio::select! {
        opened = open(store, shims, wish) => opened,
        () = limits.client.gone() => return None,
    };
    let (live, streams) = match opened {
        Ok(opened) => opened,
        Err(why) => return Some(Outcome::Failure(why)),
    };
    let is_exec = matches!(wish, Wish::Exec { .. });
    connect(live, streams, is_exec, channels, limits).await
}

async fn open(store: &Store, shims: &dyn Shims, wish: &Wish) -> Result<(Live, shim::Streams), String> {
    let (Wish::Exec { container, .. } | Wish::Attach { container, .. }) = wish else {
        return Err("no exec or attach".to_owned());
    };
    let Some(record) = store.get::<ContainerKind>(container) else {
        return Err(format!("container {container} is gone"));
    };
    let name = &record.spec.name;
    if record.status.phase != ContainerPhase::Running {
        return Err(format!("container {name} is not running"));
    }
    let Some(client) = shims.streams(&record.spec.sandbox).await else {
        return Err("the pod's shim is being replaced, try again".to_owned());
    };
    let opened = match wish {
        Wish::Exec { command, streams, .. } => {
            let Streams {
                stdin,
                stdout,
                stderr,
                tty,
            } = *streams;
            let request = ExecStreamRequest {
                id: container.clone(),
                args: command.clone(),
                env: Vec::new(),
                terminal: tty,
                stdin,
                stdout,
                stderr,
            };
            client.exec_stream(request).await
        }
        _ => {
            let Streams {
                stdin, stdout, stderr, ..
            } = streams_of(wish);
            let request = AttachRequest {
                id: container.clone(),
                stdin,
                stdout,
                stderr,
            };
            client.attach(request).await
        }
    };
    opened.map_err(|error| match error.code() {
        Some(Code::Unimplemented) => {
            format!("the pod of container {name} was started by an older version that cannot do this; restart the pod")
        }
        _ => error.to_string(),
    })
}

fn streams_of(wish: &Wish) -> Streams {
    match wish {
        Wish::Exec { streams, .. } | Wish::Attach { streams, .. } => *streams,
        Wish::PortForward { .. } => Streams::default(),
    }
}

async fn connect(
    mut live: Live,
    streams: shim::Streams,
    is_exec: bool,
    channels: &mut Channels,
    limits: Limits<'_>,
) -> Option<Outcome> {
    let activity = &limits.client.activity;
    let terminal = streams.terminal.map(Arc::new);
    let output = streams
        .stdout
        .map(Arc::new)
        .or_else(|| terminal.clone().filter(|_| is_exec));
    let stderr = streams.stderr.map(Arc::new);
    let stdin = (channels.stdin.take(), streams.stdin.map(Arc::new).or(terminal.clone()));
    let end = if is_exec && terminal.is_some() {
        END_OF_INPUT
    } else {
        &[]
    };
    let outputs = async {
        tokio::join!(copy(output, &channels.stdout), copy(stderr, &channels.stderr));
    };
    // Asked again after its end.
    let outputs = outputs.shared();
    let inputs = async {
        tokio::join!(
            feed(stdin.0, stdin.1, end),
            resize(channels.resize.take(), terminal.as_deref())
        );
        // What the client ends by itself ends nothing else.
        std::future::pending::<()>().await;
    };
    tokio::pin!(inputs);
    let ended = tokio::select! {
        ended = live.ended() => ended,
        // The output may end long before the program.
        ended = async { outputs.clone().await; std::future::pending().await } => ended,
        () = &mut inputs => return None,
        () = limits.client.gone() => return None,
        () = activity.idle(limits.idle) => return Some(idle(limits.idle)),
        () = closed(limits.closing.clone()) => return Some(Outcome::Failure("the daemon is stopping".to_owned())),
    };
    let outcome = match ended {
        Ok(output) if output.exit_code != 0 => Outcome::Exit(output.exit_code),
        Ok(_) => Outcome::Success,
        Err(error) => Outcome::Failure(error.to_string()),
    };
    tokio::select! {
        _ = drained(outputs, activity) => Some(outcome),
        () = limits.client.gone() => None,
    }
}

fn idle(limit: Duration) -> Outcome {
    Outcome::Failure(format!("nothing happened for {} s", limit.as_secs()))
}

/// Until all output is passed on, or the client takes none of it.
async fn drained(outputs: impl Future, activity: &Activity) {
    tokio::select! { _ = outputs => {}, () = activity.idle(DRAIN) => {} }
}

/// A pipe's bytes to a channel, to its end.
async fn copy(from: Option<Arc<Pipe>>, to: &Option<Outgoing>) {
    let (Some(from), Some(to)) = (from, to) else { return };
    let mut piece = vec![0; PIECE];
    loop {
        match from.read(&mut piece).await {
            Ok(len) if len > 0 => {
                if !to
                    .send(Bytes::copy_from_slice(piece.get(..len).unwrap_or_default()))
                    .await
                {
                    return;
                }
            }
            _ => return,
        }
    }
}

/// A channel's bytes to a pipe, which is closed at the end; to a terminal also `end`.
async fn feed(from: Option<Incoming>, to: Option<Arc<Pipe>>, end: &[u8]) {
    let (Some(mut from), Some(to)) = (from, to) else { return };
    while let Some(bytes) = from.recv().await {
        if to.write_all(&bytes).await.is_err() {
            return;
        }
    }
    let _ = to.write_all(end).await;
}

/// A terminal's size, as clients tell it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Size {
    width: u16,
    height: u16,
}

async fn resize(from: Option<Incoming>, terminal: Option<&Pipe>) {
    let Some(mut from) = from else { return };
    let mut text = Vec::new();
    while let Some(bytes) = from.recv().await {
        text.extend_from_slice(&bytes);
        let Some(size) = last_size(&mut text) else { continue };
        let size = Winsize {
            ws_row: size.height,
            ws_col: size.width,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        if let Some(terminal) = terminal
            && let Err(error) = tcsetwinsize(terminal.file(), size)
        {
            tracing::debug!(%error, "terminal not resized");
        }
    }
}

/// The last whole document that is no zero; what is incomplete stays in `text`.
fn last_size(text: &mut Vec<u8>) -> Option<Size> {
    let mut documents = serde_json::Deserializer::from_slice(text).into_iter::<Size>();
    let (mut last, mut done) = (None, 0);
    loop {
        match documents.next() {
            Some(Ok(size)) => {
                last = Some(size).filter(|size| size.width > 0 && size.height > 0).or(last);
                done = documents.byte_offset();
            }
            Some(Err(error)) if error.is_eof() => break,
            // Not a size: nothing after it can be trusted to be one.
            Some(Err(_)) => {
                done = text.len();
                break;
            }
            None => break,
        }
    }
    text.drain(..done);
    text.truncate(SIZE_LIMIT);
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_come_in_any_pieces() {
        let mut text = br#"{"Width":80,"Height":24}{"Width":0,"Height":0}{"Wid"#.to_vec();
        assert_eq!(last_size(&mut text), Some(Size { width: 80, height: 24 }));
        text.extend_from_slice(br#"th":120,"Height":40}"#);
        assert_eq!(last_size(&mut text), Some(Size { width: 120, height: 40 }));
        text.extend_from_slice(b"rubbish");
        assert_eq!(last_size(&mut text), None);
        text.extend_from_slice(br#"{"Width":1,"Height":2}"#);
        assert_eq!(last_size(&mut text), Some(Size { width: 1, height: 2 }));
    }
}
