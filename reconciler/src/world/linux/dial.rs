//! Connections that begin inside a network namespace.

use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use nix::sched::{CloneFlags, setns};
use tokio::net::TcpStream;
use tokio::sync::oneshot;

/// A port of the own host answers at once, or nobody does.
const LIMIT: Duration = Duration::from_secs(10);

/// A TCP connection to `port` on 127.0.0.1, else ::1, of the namespace pinned at `netns` (`None`: the host's).
pub async fn dial(netns: Option<PathBuf>, port: u16) -> io::Result<TcpStream> {
    let (tell, connected) = oneshot::channel();
    // A socket belongs to the namespace of the thread that made it; the thread ends with it.
    let work = move || drop(tell.send(connect(netns, port)));
    std::thread::Builder::new().name("dial".into()).spawn(work)?;
    let stream = connected.await.map_err(io::Error::other)??;
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    TcpStream::from_std(stream)
}

fn connect(netns: Option<PathBuf>, port: u16) -> io::Result<std::net::TcpStream> {
    if let Some(path) = netns {
        setns(File::open(path)?, CloneFlags::CLONE_NEWNET)?;
    }
    let to = |address: IpAddr| std::net::TcpStream::connect_timeout(&SocketAddr::new(address, port), LIMIT);
    to(Ipv4Addr::LOCALHOST.into()).or_else(|first| to(Ipv6Addr::LOCALHOST.into()).map_err(|_| first))
}
