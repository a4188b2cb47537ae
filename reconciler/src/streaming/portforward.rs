//! Port-forward: connections made inside a pod's network namespace, many over one stream connection.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::channels::{Incoming, Outgoing, PIECE};
use super::spdy::{Connection, Stream};
use crate::world::linux::dial::dial;

/// How long one of a pair waits for the other.
const PARTNER: Duration = Duration::from_secs(30);
/// What the client may still send after the pod has ended a connection.
const LAST: Duration = Duration::from_secs(1);

/// One end of a forwarded connection.
pub struct Pair {
    pub port: u16,
    pub incoming: Incoming,
    pub data: Outgoing,
    pub error: Outgoing,
    /// Fires when the client wants nothing more of it.
    pub reset: Option<oneshot::Receiver<()>>,
}

/// Serves pairs of streams until the connection ends; dropped, it drops all of them.
pub async fn serve(netns: Option<PathBuf>, connection: &mut Connection) {
    let mut halves: HashMap<String, (Instant, Stream)> = HashMap::new();
    let mut pairs = JoinSet::new();
    loop {
        let oldest = halves.values().map(|(since, _)| *since + PARTNER).min();
        let late = async {
            match oldest {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        let stream = tokio::select! {
            stream = connection.opened.recv() => stream,
            Some(_) = pairs.join_next() => continue,
            () = late => {
                for (_, (_, stream)) in halves.extract_if(|_, (since, _)| since.elapsed() >= PARTNER) {
                    refuse(&stream.outgoing, "the other stream of the pair did not come").await;
                }
                continue;
            }
        };
        let Some(stream) = stream else { return };
        let key = request_of(&stream);
        let Some((_, other)) = halves.remove(&key) else {
            halves.insert(key, (Instant::now(), stream));
            continue;
        };
        match pair(stream, other) {
            Ok(pair) => drop(pairs.spawn(forward(netns.clone(), pair))),
            Err((error, why)) => refuse(&error, &why).await,
        }
    }
}

/// Both streams of a pair bear one request's id; of an old client the error stream comes first, two numbers before.
fn request_of(stream: &Stream) -> String {
    match (stream.header("requestid"), stream.header("streamtype")) {
        (Some(id), _) if !id.is_empty() => id.to_owned(),
        (_, Some("data")) => stream.id().saturating_sub(2).to_string(),
        _ => stream.id().to_string(),
    }
}

fn pair(one: Stream, other: Stream) -> Result<Pair, (Outgoing, String)> {
    let kinds = (one.header("streamtype"), other.header("streamtype"));
    let (data, error) = match kinds {
        (Some("data"), Some("error")) => (one, other),
        (Some("error"), Some("data")) => (other, one),
        _ => return Err((one.outgoing, "a pair is one data and one error stream".to_owned())),
    };
    let port = data.header("port").or(error.header("port")).unwrap_or_default().parse();
    match port {
        Ok(port) if port > 0 => Ok(Pair {
            port,
            incoming: data.incoming,
            data: data.outgoing,
            error: error.outgoing,
            reset: Some(data.reset),
        }),
        _ => Err((error.outgoing, "port: must be 1 to 65535".to_owned())),
    }
}

async fn refuse(error: &Outgoing, why: &str) {
    error.send(Bytes::copy_from_slice(why.as_bytes())).await;
    error.end().await;
}

/// Connects and copies both ways, to the end of both or the client's reset.
pub async fn forward(netns: Option<PathBuf>, mut pair: Pair) {
    let reset = pair.reset.take();
    let reset = async {
        match reset {
            Some(reset) => drop(reset.await),
            None => std::future::pending().await,
        }
    };
    let problem = tokio::select! {
        problem = copy(netns, &mut pair) => problem,
        () = reset => return pair.error.end().await,
    };
    match problem {
        None => {
            pair.data.end().await;
            pair.error.end().await;
        }
        Some(why) => {
            refuse(&pair.error, &why).await;
            pair.data.reset().await;
        }
    }
}

async fn copy(netns: Option<PathBuf>, pair: &mut Pair) -> Option<String> {
    let port = pair.port;
    let mut socket = match dial(netns, port).await {
        Ok(socket) => socket,
        Err(error) => return Some(format!("connect to port {port} in the pod: {error}")),
    };
    let (mut read, mut write) = socket.split();
    let inward = async {
        while let Some(bytes) = pair.incoming.recv().await {
            if write.write_all(&bytes).await.is_err() {
                return;
            }
        }
        let _ = write.shutdown().await;
    };
    let outward = async {
        let mut piece = vec![0; PIECE];
        loop {
            match read.read(&mut piece).await {
                Ok(0) => return None,
                Ok(len) => {
                    if !pair
                        .data
                        .send(Bytes::copy_from_slice(piece.get(..len).unwrap_or_default()))
                        .await
                    {
                        return None;
                    }
                }
                Err(error) => return Some(format!("read from port {port} in the pod: {error}")),
            }
        }
    };
    tokio::pin!(inward, outward);
    tokio::select! {
        problem = &mut outward => {
            if problem.is_none() {
                pair.data.end().await;
                let _ = tokio::time::timeout(LAST, inward).await;
            }
            problem
        }
        // A client that sends no more may wait for the answer as long as it likes.
        () = &mut inward => outward.await,
    }
}
