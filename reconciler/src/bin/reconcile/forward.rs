//! `reconcile port-forward`: local ports that lead to ports inside a pod.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use clap::Args;
use reconciler::streaming::channels::PIECE;
use reconciler::streaming::spdy::Connection;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::client::{Client, text};
use crate::kinds::{self, Kind};
use crate::local::{Need, Session};
use crate::options::Global;
use crate::{containers, stream};

#[derive(Args)]
pub struct Forward {
    /// A pod's name, or the beginning of a sandbox's id
    #[arg(value_name = "POD|ID")]
    target: String,
    /// Port here and in the pod; ":REMOTE" takes a free one here
    #[arg(required = true, value_name = "[LOCAL:]REMOTE")]
    ports: Vec<Ports>,
    /// Addresses to listen on [default: 127.0.0.1 and ::1]
    #[arg(long, value_delimiter = ',', value_name = "ADDRESS")]
    address: Vec<IpAddr>,
    /// Only in this namespace
    #[arg(short, long)]
    namespace: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ports {
    /// 0: a free one.
    local: u16,
    remote: u16,
}

impl FromStr for Ports {
    type Err = String;

    fn from_str(words: &str) -> Result<Ports, String> {
        let (local, remote) = words.split_once(':').unwrap_or((words, words));
        let port = |word: &str| word.parse::<u16>().map_err(|_| format!("{word:?} is no port"));
        let local = if local.is_empty() { 0 } else { port(local)? };
        match port(remote)? {
            0 => Err("the pod's port cannot be 0".to_owned()),
            remote => Ok(Ports { local, remote }),
        }
    }
}

pub async fn run(global: &Global, args: &Forward) -> Result<ExitCode> {
    let session = Session::open(global, Need::Act).await?;
    let done = tokio::select! {
        done = forward(global, &session.client, args) => done,
        interrupted = tokio::signal::ctrl_c() => interrupted.map(|()| ExitCode::SUCCESS).map_err(Into::into),
    };
    session.close().await?;
    done
}

async fn forward(global: &Global, client: &Client, args: &Forward) -> Result<ExitCode> {
    let sandbox = sandbox(client, &args.target, args.namespace.as_deref()).await?;
    let remote = args.ports.iter().map(|ports| ports.remote).collect();
    let url = client.port_forward_url(&sandbox, remote).await?;
    let connection = Arc::new(stream::open(global, &url, "portforward.k8s.io").await?);
    let mut listening = JoinSet::new();
    for ports in &args.ports {
        for listener in listen(&args.address, ports.local).await? {
            let address = listener.local_addr()?;
            writeln!(std::io::stdout(), "Forwarding from {address} -> {}", ports.remote)?;
            listening.spawn(accept(listener, connection.clone(), ports.remote));
        }
    }
    connection.link.watcher.gone().await;
    bail!("lost connection to pod {}", args.target)
}

/// The sandbox of a pod that is ready, else its newest.
async fn sandbox(client: &Client, target: &str, namespace: Option<&str>) -> Result<String> {
    let pods = kinds::called(&client.list(Kind::Pod.name()).await?, Kind::Pod, target, namespace);
    let mut sandboxes = client.list(Kind::Sandbox.name()).await?;
    match pods.first() {
        Some(pod) => {
            let owned = containers::owned(&sandboxes, text(&pod["metadata"]["uid"]));
            sandboxes.retain(|sandbox| owned.iter().any(|uid| uid == text(&sandbox["metadata"]["uid"])));
        }
        None => sandboxes = kinds::called(&sandboxes, Kind::Sandbox, target, namespace),
    }
    let ready = sandboxes.iter().find(|sandbox| sandbox["status"]["phase"] == "Ready");
    match ready.or(sandboxes.first()) {
        Some(sandbox) => Ok(text(&sandbox["metadata"]["uid"]).to_owned()),
        None => bail!("no pod {target:?} found"),
    }
}

/// Listeners on every address; of the two that nobody asked for, one is enough.
async fn listen(addresses: &[IpAddr], port: u16) -> Result<Vec<TcpListener>> {
    let given = |address: IpAddr, port| {
        let address = SocketAddr::new(address, port);
        async move {
            TcpListener::bind(address)
                .await
                .with_context(|| format!("cannot listen on {address}"))
        }
    };
    let mut all = Vec::new();
    if addresses.is_empty() {
        let first = given(Ipv4Addr::LOCALHOST.into(), port).await?;
        let port = first.local_addr()?.port();
        all.push(first);
        all.extend(given(Ipv6Addr::LOCALHOST.into(), port).await.ok());
    }
    for address in addresses {
        all.push(given(*address, port).await?);
    }
    Ok(all)
}

async fn accept(listener: TcpListener, connection: Arc<Connection>, port: u16) {
    let mut open = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((socket, _)) => drop(open.spawn(one(socket, connection.clone(), port))),
                Err(error) => return eprintln!("reconcile: accept: {error}"),
            },
            Some(done) = open.join_next() => if let Ok(Err(error)) = done {
                eprintln!("reconcile: {error:#}");
            },
        }
    }
}

/// One connection, to the end of both its directions.
async fn one(mut socket: TcpStream, connection: Arc<Connection>, port: u16) -> Result<()> {
    static REQUEST: AtomicU64 = AtomicU64::new(0);
    let request = REQUEST.fetch_add(1, Ordering::Relaxed).to_string();
    let headers = |kind: &str| {
        let pairs = [
            ("streamtype", kind),
            ("port", &port.to_string()),
            ("requestid", &request),
        ];
        pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec()
    };
    let mut error = connection.open(headers("error")).await?;
    error.outgoing.end().await;
    let mut data = connection.open(headers("data")).await?;
    let (mut read, mut write) = socket.split();
    let outward = async {
        let mut piece = vec![0; PIECE];
        while let Ok(len) = read.read(&mut piece).await {
            let bytes = Bytes::copy_from_slice(piece.get(..len).unwrap_or_default());
            if len == 0 || !data.outgoing.send(bytes).await {
                break;
            }
        }
        data.outgoing.end().await;
        std::future::pending::<()>().await;
    };
    let inward = async {
        while let Some(bytes) = data.incoming.recv().await {
            if write.write_all(&bytes).await.is_err() {
                break;
            }
        }
        let _ = write.shutdown().await;
    };
    tokio::select! { () = outward => {}, () = inward => {} }
    data.outgoing.reset().await;
    let mut told = Vec::new();
    while let Some(bytes) = error.incoming.recv().await {
        told.extend_from_slice(&bytes);
    }
    match told.is_empty() {
        true => Ok(()),
        false => bail!("{}", String::from_utf8_lossy(&told)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_written_as_in_kubectl() {
        let ports = |local, remote| Ok(Ports { local, remote });
        assert_eq!("80".parse(), ports(80, 80));
        assert_eq!("8080:80".parse(), ports(8080, 80));
        assert_eq!(":80".parse(), ports(0, 80));
        for bad in ["", "x", "80:", "1:70000", "5:0", "-1"] {
            assert!(bad.parse::<Ports>().is_err(), "{bad}");
        }
    }
}
