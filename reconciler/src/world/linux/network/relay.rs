//! Serves `[::1]:port`, which no packet rule can: the answer to a translated loopback address is dropped on its way.
//!
//! The sockets here also hold the port: they get only what the rules let through, and take it only from loopback.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;

/// Connections, or UDP peers, of one port at a time.
const MOST: usize = 512;
/// How long a UDP peer may be silent; conntrack's own time for a stream is two minutes.
const UDP_IDLE: Duration = Duration::from_secs(120);
const CONNECT: Duration = Duration::from_secs(10);

/// Relays connections from loopback to the pod until dropped.
pub async fn tcp(listener: TcpListener, pod: SocketAddr) {
    let places = Arc::new(Semaphore::new(MOST));
    let mut connections = JoinSet::new();
    loop {
        let Ok(place) = places.clone().acquire_owned().await else {
            return;
        };
        let accepted = listener.accept().await;
        while connections.try_join_next().is_some() {}
        match accepted {
            Ok((mut client, from)) if from.ip().to_canonical().is_loopback() => {
                connections.spawn(async move {
                    let _place = place;
                    if let Ok(Ok(mut server)) = tokio::time::timeout(CONNECT, TcpStream::connect(pod)).await {
                        let _ = copy_bidirectional(&mut client, &mut server).await;
                    }
                });
            }
            Ok(_) => {}
            // Out of descriptors, or the peer went at once.
            Err(error) => {
                tracing::debug!(%pod, %error, "relay: accept");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// Relays datagrams from loopback to the pod, and the answers back, until dropped.
pub async fn udp(socket: UdpSocket, pod: SocketAddr) {
    let socket = Arc::new(socket);
    let mut peers: HashMap<SocketAddr, mpsc::Sender<Vec<u8>>> = HashMap::new();
    let mut sessions = JoinSet::new();
    let mut buffer = vec![0; 65536];
    loop {
        tokio::select! {
            received = socket.recv_from(&mut buffer) => {
                let Ok((length, from)) = received else { continue };
                if !from.ip().to_canonical().is_loopback() {
                    continue;
                }
                if !peers.contains_key(&from) && peers.len() < MOST {
                    let (send, datagrams) = mpsc::channel(64);
                    peers.insert(from, send);
                    let socket = socket.clone();
                    sessions.spawn(async move {
                        let _ = session(socket, from, pod, datagrams).await;
                        from
                    });
                }
                if let Some(peer) = peers.get(&from) {
                    // A full queue drops, as a network would.
                    let _ = peer.try_send(buffer[..length].to_vec());
                }
            }
            Some(ended) = sessions.join_next() => {
                if let Ok(from) = ended {
                    peers.remove(&from);
                }
            }
        }
    }
}

async fn session(
    socket: Arc<UdpSocket>,
    from: SocketAddr,
    pod: SocketAddr,
    mut datagrams: mpsc::Receiver<Vec<u8>>,
) -> io::Result<()> {
    let any: SocketAddr = if pod.is_ipv6() {
        ([0u16; 8], 0).into()
    } else {
        ([0u8; 4], 0).into()
    };
    let server = UdpSocket::bind(any).await?;
    server.connect(pod).await?;
    let mut buffer = vec![0; 65536];
    loop {
        tokio::select! {
            datagram = datagrams.recv() => match datagram {
                Some(datagram) => drop(server.send(&datagram).await),
                None => return Ok(()),
            },
            answer = server.recv(&mut buffer) => {
                if let Ok(length) = answer {
                    socket.send_to(&buffer[..length], from).await?;
                }
            }
            () = tokio::time::sleep(UDP_IDLE) => return Ok(()),
        }
    }
}
