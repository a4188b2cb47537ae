//! The network on the real kernel, as root. Each test has a "host" of its own: a net namespace with a second one as the
//! world outside.
//!
//! ```text
//!   outside 192.0.2.2, 2001:db8::2  ---  192.0.2.1, 2001:db8::1 host  ---  bridge  ---  pods
//! ```

use std::future::Future;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rtnetlink::packet_route::link::{InfoData, InfoKind, InfoVeth};
use rtnetlink::{LinkMessageBuilder, LinkUnspec, LinkVeth};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::links::{Links, enter};
use super::*;
use crate::world::Network as _;
use crate::world::linux::netns::{self, Pins};

mod builtin;
mod cni;
mod repair;

const TIMEOUT: Duration = Duration::from_secs(3);
static NEXT: AtomicU32 = AtomicU32::new(0);

/// Runs a test on a host of its own; it is told the namespace outside.
fn on_a_host<F: Future<Output = ()>>(test: impl FnOnce(PathBuf) -> F + Send + 'static) {
    let run = move || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        // Every thread of this runtime is born in the namespace.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let host = Host::new().await;
            test(host.outside.clone()).await;
        });
    };
    std::thread::spawn(run).join().unwrap();
}

struct Host {
    outside: PathBuf,
    _dir: tempfile::TempDir,
}

impl Drop for Host {
    fn drop(&mut self) {
        netns::remove(&self.outside).unwrap();
    }
}

impl Host {
    async fn new() -> Host {
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().join("outside");
        let pins = Pins {
            net: Some(outside.clone()),
            ..Pins::default()
        };
        netns::ensure(&pins, std::path::Path::new("")).unwrap();
        let links = Links::here().unwrap();
        let file = std::fs::File::open(&outside).unwrap();
        let peer = LinkUnspec::new_with_name("up").setns_by_fd(file.as_raw_fd()).build();
        let pair = LinkMessageBuilder::<LinkVeth>::new_with_info_kind(InfoKind::Veth)
            .name("uplink")
            .set_info_data(InfoData::Veth(InfoVeth::Peer(peer)))
            .up()
            .build();
        links.handle().link().add(pair).execute().await.unwrap();
        let lo = LinkUnspec::new_with_name("lo").up().build();
        links.handle().link().change(lo).execute().await.unwrap();
        let far = Links::inside(&outside, || Ok(())).await.unwrap();
        for (links, name, own, other) in [(&links, "uplink", 1, 2), (&far, "up", 2, 1)] {
            let index = links.by_name(name).await.unwrap().unwrap().index;
            let up = LinkUnspec::new_with_index(index).up().build();
            links.handle().link().change(up).execute().await.unwrap();
            for net in ["192.0.2.0/24", "2001:db8::/64"].map(|n| n.parse::<Cidr>().unwrap()) {
                links.add_address(index, net.nth(own)).await.unwrap();
                if name == "uplink" {
                    links.add_default_route(index, net.nth(other).ip).await.unwrap();
                }
            }
        }
        Host { outside, _dir: dir }
    }
}

/// One daemon's root on a host.
struct Root {
    config: Config,
    _dir: tempfile::TempDir,
}

impl Root {
    fn new(mode: Mode) -> Root {
        let dir = tempfile::tempdir().unwrap();
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let instance = format!("{:08x}", (std::process::id() << 12) | n);
        let mut config = Config::new(instance, dir.path().join("root"));
        config.mode = mode;
        config.cni_conf_dir = dir.path().join("net.d");
        config.cni_bin_dirs = vec![dir.path().join("bin")];
        std::fs::create_dir_all(&config.cni_conf_dir).unwrap();
        std::fs::create_dir_all(&config.cni_bin_dirs[0]).unwrap();
        Root { config, _dir: dir }
    }

    /// A daemon starts.
    async fn start(&self) -> Network {
        let network = Network::new(self.config.clone()).unwrap();
        network.sync_node().await.unwrap();
        network
    }

    /// A pod's wish, its namespace pinned and its directory made.
    fn pod(&self, name: &str, ports: &[PortMapping]) -> Want {
        let uid = format!("{name}{}", "0".repeat(64 - name.len()));
        let want = Want {
            netns: netns::net_path(&self.config.instance, &uid),
            dir: self.config.root.join("pods").join(&uid),
            namespace: "default".into(),
            name: name.into(),
            pod_uid: format!("uid-{name}"),
            ports: ports.to_vec(),
            uid,
            ..Want::default()
        };
        std::fs::create_dir_all(&want.dir).unwrap();
        let pins = Pins {
            net: Some(want.netns.clone()),
            ..Pins::default()
        };
        netns::ensure(&pins, std::path::Path::new("")).unwrap();
        want
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        for uid in netns::list(&self.config.instance).unwrap() {
            netns::remove(&netns::net_path(&self.config.instance, &uid)).unwrap();
        }
    }
}

fn port(protocol: Protocol, host_port: u16, container_port: u16) -> PortMapping {
    PortMapping {
        protocol,
        container_port,
        host_port,
        host_ip: None,
    }
}

fn tcp(host_port: u16, container_port: u16) -> PortMapping {
    port(Protocol::Tcp, host_port, container_port)
}

/// Runs something in a namespace, `None` is the host.
async fn within<T: Send + 'static>(netns: Option<&Path>, work: impl FnOnce() -> T + Send + 'static) -> T {
    let netns = netns.map(Path::to_owned);
    let (send, done) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        if let Some(netns) = netns {
            enter(&netns).unwrap();
        }
        let _ = send.send(work());
    });
    done.await.unwrap()
}

/// A server that tells each client `name` and the address it is seen under. It ends with the test.
async fn serve(netns: Option<&Path>, port: u16, name: &'static str) {
    let listener = within(netns, move || std::net::TcpListener::bind(("::", port)).unwrap()).await;
    listener.set_nonblocking(true).unwrap();
    let listener = tokio::net::TcpListener::from_std(listener).unwrap();
    tokio::spawn(async move {
        while let Ok((mut client, from)) = listener.accept().await {
            let _ = client.read_u8().await;
            let _ = client
                .write_all(format!("{name} {}", from.ip().to_canonical()).as_bytes())
                .await;
        }
    });
}

/// The same for datagrams.
async fn serve_udp(netns: Option<&Path>, port: u16, name: &'static str) {
    let socket = within(netns, move || std::net::UdpSocket::bind(("::", port)).unwrap()).await;
    socket.set_nonblocking(true).unwrap();
    let socket = tokio::net::UdpSocket::from_std(socket).unwrap();
    tokio::spawn(async move {
        let mut buffer = [0; 1500];
        while let Ok((_, from)) = socket.recv_from(&mut buffer).await {
            let _ = socket
                .send_to(format!("{name} {}", from.ip().to_canonical()).as_bytes(), from)
                .await;
        }
    });
}

/// What the server at an address tells a client in a namespace.
async fn ask(netns: Option<&Path>, to: &str) -> std::result::Result<String, String> {
    let to: SocketAddr = to.parse().unwrap();
    let work = move || {
        let mut stream = std::net::TcpStream::connect_timeout(&to, TIMEOUT)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.write_all(b"?")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok::<_, std::io::Error>(answer)
    };
    within(netns, work).await.map_err(|e| format!("{to}: {e}"))
}

/// The same by one datagram from a socket that may be used again.
async fn ask_udp(socket: &std::net::UdpSocket, to: &str) -> std::result::Result<String, String> {
    let (socket, to): (_, SocketAddr) = (socket.try_clone().unwrap(), to.parse().unwrap());
    let work = move || {
        socket.set_read_timeout(Some(TIMEOUT))?;
        socket.send_to(b"?", to)?;
        let mut buffer = [0; 1500];
        let (length, _) = socket.recv_from(&mut buffer)?;
        Ok::<_, std::io::Error>(String::from_utf8_lossy(&buffer[..length]).into_owned())
    };
    within(None, work).await.map_err(|e| format!("{to}: {e}"))
}

/// The links of the host, when none of a pod's is on its way out any more.
async fn settled_links(expected: usize) -> Vec<links::Link> {
    let links = Links::here().unwrap();
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let all = links.all().await.unwrap();
        if all.len() == expected || Instant::now() > deadline {
            return all;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn attached(state: State) -> Attachment {
    match state {
        State::Attached(attachment) => *attachment,
        other => panic!("not attached: {other:?}"),
    }
}

fn four(attachment: &Attachment) -> IpAddr {
    attachment.addresses[0].ip
}

fn six(attachment: &Attachment) -> IpAddr {
    attachment.addresses[1].ip
}

/// The instance's table, to look at or to harm.
fn table(root: &Root) -> nft::Table {
    let pods = vec!["10.88.0.0/16".parse().unwrap(), "fd00::/64".parse().unwrap()];
    let instance = &root.config.instance;
    nft::Table {
        name: nft::Table::name_of(instance),
        bridge: bridge::bridge_name(instance),
        pods,
    }
}
