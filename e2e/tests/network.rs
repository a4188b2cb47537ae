//! The built-in network, checked from outside the pod: addresses, host ports, masquerade, repair, clashes; and CNI.

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::client::within;
use e2e::leaks::links;
use e2e::node::{Node, Options};
use e2e::pods::{self, HELLO, shell};
use e2e::v1::*;
use e2e::{port, tools};

/// GET / over TCP within 3 s; the status line.
fn get(address: impl Into<SocketAddr>) -> Result<String> {
    let address = address.into();
    let mut stream =
        TcpStream::connect_timeout(&address, Duration::from_secs(3)).with_context(|| format!("{address}"))?;
    stream.set_read_timeout(Some(Duration::from_secs(3)))?;
    stream.write_all(b"GET / HTTP/1.0\r\nHost: pod\r\n\r\n")?;
    let mut answer = String::new();
    stream
        .read_to_string(&mut answer)
        .with_context(|| format!("read from {address}"))?;
    Ok(answer.lines().next().unwrap_or_default().to_owned())
}

async fn fetched(address: impl Into<SocketAddr> + Send) -> Result<()> {
    let address = address.into();
    let line = tokio::task::spawn_blocking(move || get(address)).await??;
    ensure!(line.contains("200"), "{address} answered {line:?}");
    Ok(())
}

/// The host's own address towards the default route, or a documentation address put on a dummy link.
fn host_address() -> Result<Ipv4Addr> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    let _ = socket.connect("198.51.100.1:9");
    match socket.local_addr()?.ip() {
        IpAddr::V4(ip) if !ip.is_unspecified() && !ip.is_loopback() => Ok(ip),
        _ => {
            let all = nix::ifaddrs::getifaddrs()?;
            let mut v4 = all.filter_map(|a| a.address.as_ref()?.as_sockaddr_in().map(|v4| v4.ip()));
            v4.find(|ip| !ip.is_loopback())
                .context("no address but loopback on this host")
        }
    }
}

fn mapping(protocol: Protocol, host: i32, container: i32, ip: &str) -> PortMapping {
    PortMapping {
        protocol: protocol.into(),
        host_port: host,
        container_port: container,
        host_ip: ip.into(),
    }
}

/// A node with one pod that serves HTTP on 8080, mapped as told.
async fn serving(ports: Vec<PortMapping>) -> Result<(Node, String, String)> {
    let node = Node::start().await?;
    node.busybox().await?;
    let mut pod = node.pod("web");
    pod.port_mappings = ports;
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let id = node
        .cri
        .launch(&sandbox, &pod, &pods::container("web", HELLO, &[]))
        .await?;
    let ip = node.cri.ip(&sandbox).await?;
    e2e::eventually(Duration::from_secs(20), async || fetched((ip, 8080)).await)
        .await
        .context("the pod's page")?;
    Ok((node, sandbox, id))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_pods_addresses_answer_from_the_host_and_from_another_pod() -> Result<()> {
    let (node, sandbox, _) = serving(Vec::new()).await?;
    let status = node.cri.sandbox(&sandbox).await?.network.context("network")?;
    let v6: Ipv6Addr = status.additional_ips.first().context("an IPv6 address")?.ip.parse()?;
    fetched((v6, 8080)).await.context("IPv6")?;
    let other = node.pod("other");
    let other_id = node.cri.run_sandbox(&other).await?;
    assert_ne!(node.cri.ip(&other_id).await?.to_string(), status.ip);
    let script = format!("wget -qO- http://{}:8080/ && wget -qO- http://[{v6}]:8080/", status.ip);
    let id = node.cri.launch(&other_id, &other, &shell("c", &script)).await?;
    let ended = node.cri.exited(&id).await?;
    assert_eq!(ended.exit_code, 0, "{:?}", pods::log_texts(&ended.log_path));
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn host_ports_from_every_side() -> Result<()> {
    let host_port = i32::from(port::unused());
    let (node, sandbox, id) = serving(vec![mapping(Protocol::Tcp, host_port, 8080, "")]).await?;
    let number = host_port as u16;
    fetched((host_address()?, number)).await.context("the host's address")?;
    fetched((Ipv4Addr::LOCALHOST, number)).await.context("127.0.0.1")?;
    fetched((Ipv6Addr::LOCALHOST, number)).await.context("::1")?;
    let url = format!("http://{}:{number}/", host_address()?);
    let client = shell("hairpin", &format!("timeout 3 wget -qO- {url}"));
    let pod = node.pod("unused");
    let hairpin = node.cri.launch(&sandbox, &pod, &client).await?;
    assert_eq!(
        node.cri.exited(&hairpin).await?.exit_code,
        0,
        "from the pod itself through {url}"
    );
    node.cri.stop(&id, 0).await?;
    node.cri.stop_sandbox(&sandbox).await?;
    assert!(get((Ipv4Addr::LOCALHOST, number)).is_err(), "the port is closed again");
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_taken_host_port_is_refused_by_name_and_free_again_later() -> Result<()> {
    let host_port = i32::from(port::unused());
    let (node, sandbox, _) = serving(vec![mapping(Protocol::Tcp, host_port, 8080, "")]).await?;
    let mut second = node.pod("second");
    second.port_mappings = vec![mapping(Protocol::Tcp, host_port, 80, "")];
    let refused = node.cri.run_sandbox(&second).await.expect_err("taken");
    assert!(refused.message().contains(&host_port.to_string()), "{refused:?}");
    assert_eq!(node.cri.sandboxes(None).await?.len(), 1, "nothing is left of it");
    assert_eq!(node.shims()?.len(), 1);
    let bound = TcpListener::bind((Ipv4Addr::UNSPECIFIED, host_port as u16));
    assert!(bound.is_err(), "a process of the host cannot take the port either");
    node.cri.stop_sandbox(&sandbox).await?;
    let third = node.cri.run_sandbox(&second).await.context("free again")?;
    node.cri.remove_sandbox(&third).await?;

    let process = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    let mut taken = node.pod("taken");
    taken.port_mappings = vec![mapping(Protocol::Tcp, process.local_addr()?.port().into(), 80, "")];
    let refused = node
        .cri
        .run_sandbox(&taken)
        .await
        .expect_err("a process of the host listens there");
    assert!(
        refused.message().contains(&process.local_addr()?.port().to_string()),
        "{refused:?}"
    );
    node.finish().await
}

/// A port of which only connections are left (closed by a server of the host a moment ago, or begun from it by chance)
/// is free for a pod, and they go on.
#[tokio::test(flavor = "multi_thread")]
async fn connections_of_the_host_do_not_take_a_port() -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port::unused()))?;
    let closed = listener.local_addr()?.port();
    let mut client = TcpStream::connect((Ipv4Addr::LOCALHOST, closed))?;
    // Who closes first keeps the port, in the state TIME_WAIT.
    drop((listener.accept()?, listener));
    client.read_to_end(&mut Vec::new())?;
    drop(client);

    let listener = TcpListener::bind((host_address()?, 0))?;
    let mut client = TcpStream::connect(listener.local_addr()?)?;
    let (mut server, _) = listener.accept()?;
    let open = client.local_addr()?.port();
    let ports = [closed, open].map(|port| mapping(Protocol::Tcp, port.into(), 8080, ""));
    let (node, _, _) = serving(ports.to_vec()).await?;
    for port in [closed, open] {
        fetched((host_address()?, port)).await?;
        fetched((Ipv4Addr::LOCALHOST, port)).await?;
    }
    for end in [&client, &server] {
        end.set_read_timeout(Some(Duration::from_secs(20)))?;
    }
    let mut piece = [0; 4];
    for _ in 0..3 {
        server.write_all(b"ping")?;
        client.read_exact(&mut piece)?;
        client.write_all(&piece)?;
        server.read_exact(&mut piece)?;
    }
    assert_eq!(piece, *b"ping");
    node.finish().await
}

/// Datagrams of a known client must follow the port to its next pod.
#[tokio::test(flavor = "multi_thread")]
async fn udp_follows_the_port_to_the_next_pod() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let host_port = i32::from(port::unused());
    let client = UdpSocket::bind("0.0.0.0:0")?;
    client.set_read_timeout(Some(Duration::from_millis(300)))?;
    let target = (host_address()?, host_port as u16);
    for name in ["first", "second"] {
        let mut pod = node.pod(name);
        pod.port_mappings = vec![mapping(Protocol::Udp, host_port, 9000, "")];
        let sandbox = node.cri.run_sandbox(&pod).await?;
        let netns = format!("/run/netns/rc-{}-{sandbox}", node.instance());
        let server = tools::in_netns(netns, || UdpSocket::bind("0.0.0.0:9000"))?;
        server.set_read_timeout(Some(Duration::from_millis(300)))?;
        e2e::eventually(Duration::from_secs(10), async || {
            client.send_to(b"ping", target)?;
            let mut buffer = [0; 100];
            let (_, from) = server
                .recv_from(&mut buffer)
                .with_context(|| format!("nothing reached {name}"))?;
            server.send_to(name.as_bytes(), from)?;
            let len = client
                .recv(&mut buffer)
                .with_context(|| format!("no answer of {name}"))?;
            ensure!(
                buffer[..len] == *name.as_bytes(),
                "another pod answered instead of {name}"
            );
            Ok(())
        })
        .await?;
        drop(server);
        node.cri.stop_sandbox(&sandbox).await?;
        node.cri.remove_sandbox(&sandbox).await?;
    }
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn host_ports_and_addresses_survive_restarts_of_the_daemon() -> Result<()> {
    let host_port = i32::from(port::unused());
    let (mut node, sandbox, _) = serving(vec![mapping(Protocol::Tcp, host_port, 8080, "")]).await?;
    let ip = node.cri.ip(&sandbox).await?;
    node.kill9().await?;
    fetched((ip, 8080)).await.context("the pod without a daemon")?;
    fetched((host_address()?, host_port as u16))
        .await
        .context("the host port without a daemon")?;
    node.serve().await?;
    assert_eq!(node.cri.ip(&sandbox).await?, ip);
    for host in [
        IpAddr::V4(host_address()?),
        Ipv4Addr::LOCALHOST.into(),
        Ipv6Addr::LOCALHOST.into(),
    ] {
        e2e::eventually(Duration::from_secs(20), async || {
            fetched((host, host_port as u16)).await
        })
        .await?;
    }
    node.finish().await
}

/// Promise P3.4 for what the kernel announces: an address taken away is put back long before the resync.
#[tokio::test(flavor = "multi_thread")]
async fn what_somebody_flushed_is_put_back() -> Result<()> {
    let (node, sandbox, _) = serving(Vec::new()).await?;
    let ip = node.cri.ip(&sandbox).await?;
    let netns = format!("rc-{}-{sandbox}", node.instance());
    tools::check(Command::new("ip").args(["-n", &netns, "address", "flush", "dev", "eth0"]))?;
    e2e::eventually(Duration::from_secs(70), async || fetched((ip, 8080)).await)
        .await
        .context("not put back")?;
    assert_eq!(node.cri.ip(&sandbox).await?, ip);
    assert_eq!(node.cri.sandbox(&sandbox).await?.state(), PodSandboxState::SandboxReady);
    node.finish().await
}

/// A second network namespace plays the world outside: pods reach it under the host's address.
#[tokio::test(flavor = "multi_thread")]
async fn the_world_outside_sees_the_host() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let world = format!("e2e-world-{}", std::process::id());
    let ip = |args: &str| tools::check(Command::new("ip").args(args.split(' '))).map(drop);
    ip(&format!("netns add {world}"))?;
    let outcome = async {
        ip(&format!("link add e2ew0 type veth peer name w0 netns {world}"))?;
        ip("address add 198.18.77.1/30 dev e2ew0")?;
        ip("link set e2ew0 up")?;
        ip(&format!("-n {world} address add 198.18.77.2/30 dev w0"))?;
        ip(&format!("-n {world} link set w0 up"))?;
        let listener = tools::in_netns(format!("/run/netns/{world}"), || TcpListener::bind("198.18.77.2:7777"))?;
        let peer = tokio::task::spawn_blocking(move || listener.accept().map(|(_, peer)| peer));
        let pod = node.pod("out");
        let sandbox = node.cri.run_sandbox(&pod).await?;
        let script = "for i in 1 2 3 4 5 6 7 8 9; do nc -w 2 198.18.77.2 7777 </dev/null && exit 0; done; exit 1";
        let id = node.cri.launch(&sandbox, &pod, &shell("c", script)).await?;
        let status = node.cri.exited(&id).await?;
        ensure!(
            status.exit_code == 0,
            "no way out: {:?}",
            pods::log_texts(&status.log_path)
        );
        let peer = tokio::time::timeout(Duration::from_secs(5), peer)
            .await
            .context("nobody came")???;
        ensure!(peer.ip().to_string() == "198.18.77.1", "the world outside saw {peer}");
        Ok(())
    }
    .await;
    let _ = ip("link delete e2ew0");
    ip(&format!("netns delete {world}"))?;
    outcome?;
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_link_is_left_of_pods_that_came_and_went() -> Result<()> {
    let node = Node::start().await?;
    let first = node.cri.run_sandbox(&node.pod("stays")).await?;
    let instance = node.instance();
    let ours = || -> Result<usize> { Ok(links()?.iter().filter(|link| link.contains(&instance)).count()) };
    let before = ours()?;
    for _ in 0..5 {
        let all = futures::future::join_all((0..4).map(|n| {
            let (cri, pod) = (node.cri.clone(), node.pod(&format!("p{n}")));
            async move {
                let id = cri.run_sandbox(&pod).await?;
                cri.stop_sandbox(&id).await?;
                cri.remove_sandbox(&id).await
            }
        }))
        .await;
        all.into_iter().collect::<Result<Vec<_>, _>>()?;
    }
    e2e::eventually(Duration::from_secs(20), async || {
        ensure!(ours()? == before, "{} links, {before} before", ours()?);
        Ok(())
    })
    .await?;
    assert_eq!(node.cri.sandboxes(None).await?[0].id, first);
    node.finish().await
}

/// A CNI plugin of shell that keeps a journal of its calls and hands out one address.
const FAKE_PLUGIN: &str = r#"#!/bin/sh
config=$(cat)
echo "$CNI_COMMAND $CNI_CONTAINERID ${CNI_NETNS:-none} $CNI_IFNAME" >> DIR/journal
if [ -e DIR/fail-$CNI_COMMAND ]; then
  echo '{"cniVersion":"1.0.0","code":11,"msg":"told to fail","details":"by the test"}'
  exit 1
fi
case $CNI_COMMAND in
ADD)
  ip link add fh$$ type veth peer name fc$$ && ip link set fh$$ up
  ip link set fc$$ netns "$(basename "$CNI_NETNS")" && ip -n "$(basename "$CNI_NETNS")" link set fc$$ name eth0
  ip -n "$(basename "$CNI_NETNS")" address add 192.0.2.9/32 dev eth0
  ip -n "$(basename "$CNI_NETNS")" link set eth0 up
  echo '{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"'"$CNI_NETNS"'"}],'
  echo '"ips":[{"address":"192.0.2.9/32","interface":0}]}' ;;
VERSION) echo '{"cniVersion":"1.0.0","supportedVersions":["0.4.0","1.0.0"]}' ;;
esac
"#;

async fn cni_node(plugins: &str) -> Result<Node> {
    let mut node = Node::new(Options {
        network: "auto",
        ..Options::default()
    })?;
    for dir in ["etc", "net.d", "bin"] {
        fs::create_dir_all(node.path(dir))?;
    }
    node.program(
        "bin/fake",
        FAKE_PLUGIN.replace("DIR", &node.path("").display().to_string()),
    )?;
    let config = format!(
        "network:\n  cniConfDir: {}\n  cniBinDirs: [{}, /usr/lib/cni]\n",
        node.path("net.d").display(),
        node.path("bin").display()
    );
    node.file("etc/config.yaml", config)?;
    if !plugins.is_empty() {
        node.file("net.d/10-test.conflist", plugins)?;
    }
    node.serve().await?;
    Ok(node)
}

const CHAIN: &str = r#"{"cniVersion":"1.0.0","name":"fake","plugins":[{"type":"fake"}]}"#;

fn journal(node: &Node) -> Vec<String> {
    let text = fs::read_to_string(node.path("journal")).unwrap_or_default();
    text.lines()
        .filter(|line| line.starts_with("ADD") || line.starts_with("DEL"))
        .map(str::to_owned)
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn cni_until_loaded_not_ready_then_add_and_del() -> Result<()> {
    let node = cni_node("").await?;
    let ready = async || -> Result<bool> {
        let status = node
            .cri
            .runtime
            .clone()
            .status(StatusRequest { verbose: false })
            .await?
            .into_inner();
        let conditions = status.status.context("status")?.conditions;
        Ok(conditions
            .iter()
            .any(|condition| condition.r#type == "NetworkReady" && condition.status))
    };
    assert!(!ready().await?, "no configuration yet");
    let early_pod = node.pod("early");
    let config = Some(early_pod.clone());
    let request = within(
        Duration::from_secs(2),
        RunPodSandboxRequest {
            config,
            ..Default::default()
        },
    );
    let early = node
        .cri
        .runtime
        .clone()
        .run_pod_sandbox(request)
        .await
        .expect_err("no network yet");
    assert!(
        early.message().contains("net.d"),
        "it says what it waits for: {early:?}"
    );
    let host = node
        .cri
        .run_sandbox(&pods::host_network(node.pod("host")))
        .await
        .context("host network needs none")?;
    node.cri.remove_sandbox(&host).await?;
    node.file("net.d/10-test.conflist", CHAIN)?;
    e2e::eventually(Duration::from_secs(20), async || {
        ensure!(ready().await?, "not seen");
        Ok(())
    })
    .await?;
    let id = node
        .cri
        .run_sandbox(&early_pod)
        .await
        .context("joined by the same request")?;
    assert_eq!(node.cri.ip(&id).await?.to_string(), "192.0.2.9");
    node.cri.stop_sandbox(&id).await?;
    let calls = journal(&node);
    let of = |verb: &str| {
        calls
            .iter()
            .filter(|line| line.starts_with(verb) && line.contains(&id))
            .count()
    };
    assert_eq!((of("ADD"), of("DEL")), (1, 1), "{calls:#?}");
    node.finish().await
}

/// Torture case T05: DEL fails for good; Stop and Remove succeed within their bound, the debt is paid later, once.
#[tokio::test(flavor = "multi_thread")]
async fn cni_a_failing_del_does_not_hold_the_pod() -> Result<()> {
    let mut node = cni_node(CHAIN).await?;
    let id = node.cri.run_sandbox(&node.pod("debtor")).await?;
    node.file("fail-DEL", "")?;
    let start = std::time::Instant::now();
    while let Err(status) = node.cri.stop_sandbox(&id).await {
        ensure!(
            start.elapsed() < Duration::from_secs(45),
            "still refused after 45 s: {status:?}"
        );
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    node.cri.remove_sandbox(&id).await?;
    assert!(node.cri.sandboxes(None).await?.is_empty());
    node.crash().await?;
    fs::remove_file(node.path("fail-DEL"))?;
    let before = journal(&node).len();
    e2e::eventually(Duration::from_secs(90), async || {
        ensure!(journal(&node).len() > before, "the debt is not paid");
        Ok(())
    })
    .await?;
    let calls = journal(&node);
    assert!(
        calls[before..]
            .iter()
            .all(|line| line.starts_with("DEL") && line.contains(&id)),
        "{calls:#?}"
    );
    node.finish().await
}

/// The plugins Debian ships. (Not `portmap`: it leaves chains of iptables behind on the node, whoever calls it.)
#[tokio::test(flavor = "multi_thread")]
async fn cni_bridge_and_host_local() -> Result<()> {
    ensure!(
        fs::metadata("/usr/lib/cni/bridge").is_ok(),
        "install the Debian package containernetworking-plugins"
    );
    let bridge = format!("e2ecni{}", std::process::id() % 10_000);
    let data = "/var/lib/cni/networks/e2e";
    let chain = format!(
        r#"{{"cniVersion":"1.0.0","name":"e2e","plugins":[{{"type":"bridge","bridge":"{bridge}","isGateway":true,
        "ipam":{{"type":"host-local","ranges":[[{{"subnet":"10.213.7.0/24"}}]],"routes":[{{"dst":"0.0.0.0/0"}}]}}}}]}}"#
    );
    let node = cni_node(&chain).await?;
    let pod = node.pod("real-cni");
    let sandbox = node.cri.run_sandbox(&pod).await?;
    node.cri
        .launch(&sandbox, &pod, &pods::container("web", HELLO, &[]))
        .await?;
    let ip = node.cri.ip(&sandbox).await?;
    assert!(ip.to_string().starts_with("10.213.7."), "{ip}");
    e2e::eventually(Duration::from_secs(20), async || fetched((ip, 8080)).await).await?;
    let leases = || fs::read_dir(data).into_iter().flatten().flatten().count();
    let with = leases();
    node.cri.stop_sandbox(&sandbox).await?;
    node.cri.remove_sandbox(&sandbox).await?;
    assert!(leases() < with, "the address is free again");
    let outcome = node.finish().await;
    let _ = Command::new("ip").args(["link", "delete", &bridge]).status();
    let _ = fs::remove_dir_all(data);
    outcome
}
