//! The built-in bridge: every way to a pod, and what pods share.

use super::*;

#[test]
fn every_way_to_a_pod() {
    on_a_host(|outside| async move {
        let root = Root::new(Mode::Builtin);
        let network = root.start().await;
        let web = root.pod("web", &[tcp(8080, 80)]);
        let begun = Instant::now();
        let attachment = network.ensure(&web).await.unwrap();
        println!("first set-up {:?}", begun.elapsed());
        let client = root.pod("client", &[]);
        let begun = Instant::now();
        let other = network.ensure(&client).await.unwrap();
        println!("set-up without ports {:?}", begun.elapsed());
        assert_eq!(attached(network.observe(&web).await.unwrap()), attachment);
        serve(Some(&web.netns), 80, "web").await;
        serve(Some(&outside), 80, "outside").await;

        let (v4, v6) = (four(&attachment), six(&attachment));
        let is = |answer: &str| Ok(answer.to_string());
        // The host to the pod.
        let gateway = attachment.gateways[0];
        assert_eq!(ask(None, &format!("{v4}:80")).await, is(&format!("web {gateway}")));
        let gateway6 = attachment.gateways[1];
        assert_eq!(ask(None, &format!("[{v6}]:80")).await, is(&format!("web {gateway6}")));
        // Pod to pod, addresses kept.
        let pod = Some(client.netns.as_path());
        assert_eq!(
            ask(pod, &format!("{v4}:80")).await,
            is(&format!("web {}", four(&other)))
        );
        assert_eq!(
            ask(pod, &format!("[{v6}]:80")).await,
            is(&format!("web {}", six(&other)))
        );
        // The host port from the host itself, by every address.
        assert_eq!(ask(None, "192.0.2.1:8080").await, is("web 192.0.2.1"));
        assert_eq!(ask(None, "[2001:db8::1]:8080").await, is("web 2001:db8::1"));
        assert_eq!(ask(None, "127.0.0.1:8080").await, is(&format!("web {gateway}")));
        assert_eq!(ask(None, "127.0.0.5:8080").await, is(&format!("web {gateway}")));
        assert_eq!(ask(None, "[::1]:8080").await, is(&format!("web {gateway6}")));
        // From outside, source kept.
        let outside = Some(outside.as_path());
        assert_eq!(ask(outside, "192.0.2.1:8080").await, is("web 192.0.2.2"));
        assert_eq!(ask(outside, "[2001:db8::1]:8080").await, is("web 2001:db8::2"));
        // From pods, the served one too.
        for pod in [&client, &web] {
            let pod = Some(pod.netns.as_path());
            assert!(ask(pod, "192.0.2.1:8080").await.unwrap().starts_with("web"));
            assert!(ask(pod, "[2001:db8::1]:8080").await.unwrap().starts_with("web"));
            // To the world, under the host's address.
            assert_eq!(ask(pod, "192.0.2.2:80").await, is("outside 192.0.2.1"));
            assert_eq!(ask(pod, "[2001:db8::2]:80").await, is("outside 2001:db8::1"));
        }
        assert!(ask(None, "127.0.0.1:8081").await.is_err());
    });
}

#[test]
fn a_pod_does_not_reach_the_hosts_loopback() {
    on_a_host(|_outside| async move {
        let root = Root::new(Mode::Builtin);
        let network = root.start().await;
        let pod = root.pod("pod", &[]);
        let attachment = network.ensure(&pod).await.unwrap();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:5000").await.unwrap();
        let accepted = tokio::spawn(async move { listener.accept().await });
        // The pod sends 127.0.0.1 out of eth0, to the bridge.
        let prepare = || {
            std::fs::write("/proc/sys/net/ipv4/conf/all/route_localnet", "1")?;
            std::fs::write("/proc/sys/net/ipv4/conf/all/rp_filter", "0")
        };
        let inside = Links::inside(&pod.netns, prepare).await.unwrap();
        let lo = inside.by_name("lo").await.unwrap().unwrap();
        inside
            .delete_address(lo.index, "127.0.0.1/8".parse().unwrap())
            .await
            .unwrap();
        let eth0 = inside.by_name("eth0").await.unwrap().unwrap();
        let std::net::IpAddr::V4(gateway) = attachment.gateways[0] else {
            unreachable!()
        };
        let route = rtnetlink::RouteMessageBuilder::<std::net::Ipv4Addr>::new()
            .destination_prefix([127, 0, 0, 0].into(), 8)
            .gateway(gateway)
            .output_interface(eth0.index)
            .build();
        inside.handle().route().add(route).execute().await.unwrap();
        assert!(ask(Some(&pod.netns), "127.0.0.1:5000").await.is_err());
        assert!(!accepted.is_finished());
    });
}

#[test]
fn udp_follows_the_port_to_another_pod() {
    on_a_host(|_outside| async move {
        let root = Root::new(Mode::Builtin);
        let network = root.start().await;
        let ports = [port(Protocol::Udp, 5300, 53)];
        let client = std::net::UdpSocket::bind("192.0.2.1:0").unwrap();
        // A flow from before the port is mapped must not stay unmapped.
        assert!(client.send_to(b"early", "192.0.2.1:5300").is_ok());
        for name in ["first", "second"] {
            let pod = root.pod(name, &ports);
            network.ensure(&pod).await.unwrap();
            serve_udp(Some(&pod.netns), 53, name).await;
            assert_eq!(
                ask_udp(&client, "192.0.2.1:5300").await,
                Ok(format!("{name} 192.0.2.1"))
            );
            let local = std::net::UdpSocket::bind("[::1]:0").unwrap();
            assert!(
                ask_udp(&local, "[::1]:5300").await.unwrap().starts_with(name),
                "by the relay"
            );
            network.remove(&pod.uid, &pod.dir, Some(&pod.netns)).await.unwrap();
            // The pod still runs and still answers; only the port has left it.
        }
    });
}

#[test]
fn host_addresses_are_told_apart() {
    on_a_host(|outside| async move {
        let root = Root::new(Mode::Builtin);
        let network = root.start().await;
        let on = |ip: &str| PortMapping {
            host_ip: Some(ip.parse().unwrap()),
            ..tcp(8080, 80)
        };
        let local = root.pod("local", &[on("127.0.0.1"), on("::1")]);
        let public = root.pod("public", &[on("192.0.2.1"), on("2001:db8::1")]);
        for (pod, name) in [(&local, "local"), (&public, "public")] {
            network.ensure(pod).await.unwrap();
            serve(Some(&pod.netns), 80, name).await;
        }
        for (to, name) in [
            ("127.0.0.1:8080", "local"),
            ("[::1]:8080", "local"),
            ("192.0.2.1:8080", "public"),
            ("[2001:db8::1]:8080", "public"),
        ] {
            assert!(ask(None, to).await.unwrap().starts_with(name), "{to}");
        }
        assert!(
            ask(Some(&outside), "192.0.2.1:8080")
                .await
                .unwrap()
                .starts_with("public")
        );
        assert!(ask(None, "127.0.0.2:8080").await.is_err());
    });
}

#[test]
fn a_port_is_given_once() {
    on_a_host(|_outside| async move {
        let (root, second) = (Root::new(Mode::Builtin), Root::new(Mode::Builtin));
        let (network, other) = (root.start().await, second.start().await);
        let first = root.pod("first", &[tcp(8080, 80)]);
        network.ensure(&first).await.unwrap();
        let late = root.pod("late", &[tcp(8080, 81)]);
        let error = network.ensure(&late).await.unwrap_err().to_string();
        assert!(
            error.contains("8080/tcp") && error.contains("pod default/first"),
            "{error}"
        );
        // Another instance sees only a socket.
        let foreign = second.pod("foreign", &[tcp(8080, 80), tcp(8081, 80)]);
        let error = other.ensure(&foreign).await.unwrap_err().to_string();
        assert!(error.contains("8080/tcp"), "{error}");
        // So does any other program; and it holds its own against us.
        assert!(std::net::TcpListener::bind("0.0.0.0:8080").is_err());
        assert!(std::net::TcpListener::bind("[::1]:8080").is_err());
        let _theirs = std::net::TcpListener::bind("127.0.0.1:8082").unwrap();
        let theirs = root.pod("theirs", &[tcp(8082, 80)]);
        let error = network.ensure(&theirs).await.unwrap_err();
        assert!(error.to_string().contains("ss -lnp"), "{error}");
        // Once free it can be had.
        network
            .remove(&first.uid, &first.dir, Some(&first.netns))
            .await
            .unwrap();
        network.ensure(&late).await.unwrap();
        network.remove(&late.uid, &late.dir, Some(&late.netns)).await.unwrap();
        other.ensure(&foreign).await.unwrap();
    });
}

#[test]
fn two_instances_side_by_side() {
    on_a_host(|outside| async move {
        let (a, b) = (Root::new(Mode::Builtin), Root::new(Mode::Builtin));
        let (network_a, network_b) = (a.start().await, b.start().await);
        let (pod_a, pod_b) = (a.pod("a", &[tcp(8080, 80)]), b.pod("b", &[tcp(8081, 80)]));
        // At the same time, so that only the lock keeps their networks apart.
        let (of_a, of_b) = tokio::join!(network_a.ensure(&pod_a), network_b.ensure(&pod_b));
        let (of_a, of_b) = (of_a.unwrap(), of_b.unwrap());
        assert!(!of_a.addresses[0].overlaps(of_b.addresses[0]), "{of_a:?} {of_b:?}");
        serve(Some(&pod_a.netns), 80, "a").await;
        serve(Some(&pod_b.netns), 80, "b").await;
        assert_eq!(network_a.list().await.unwrap(), std::slice::from_ref(&pod_a.uid));
        network_a
            .remove(&pod_a.uid, &pod_a.dir, Some(&pod_a.netns))
            .await
            .unwrap();
        netns::remove(&pod_a.netns).unwrap();
        network_a.sweep_node().await.unwrap();
        // The other goes on.
        attached(network_b.observe(&pod_b).await.unwrap());
        assert!(ask(Some(&outside), "192.0.2.1:8081").await.unwrap().starts_with("b"));
        assert!(ask(Some(&outside), "192.0.2.1:8080").await.is_err());
    });
}

#[test]
fn twenty_at_once() {
    on_a_host(|_outside| async move {
        let root = Root::new(Mode::Builtin);
        let network = std::sync::Arc::new(root.start().await);
        let pods: Vec<Want> = (0..20)
            .map(|n| root.pod(&format!("p{n:02}"), &[tcp(9000 + n, 80)]))
            .collect();
        let begun = Instant::now();
        let tasks: Vec<_> = pods
            .iter()
            .cloned()
            .map(|pod| {
                let network = network.clone();
                tokio::spawn(async move { network.ensure(&pod).await.unwrap() })
            })
            .collect();
        let mut addresses = BTreeSet::new();
        for task in tasks {
            addresses.insert(four(&task.await.unwrap()));
        }
        println!("20 at once: {:?}", begun.elapsed());
        assert_eq!(addresses.len(), 20);
        for pod in &pods {
            attached(network.observe(pod).await.unwrap());
        }
        let mut times: Vec<Duration> = Vec::new();
        for n in 0..20 {
            let pod = root.pod(&format!("q{n:02}"), &[tcp(9100 + n, 80)]);
            let begun = Instant::now();
            network.ensure(&pod).await.unwrap();
            times.push(begun.elapsed());
        }
        times.sort();
        println!("one at a time with a port: median {:?}, min {:?}", times[10], times[0]);
    });
}

#[test]
fn a_port_is_free_at_once() {
    on_a_host(|_outside| async move {
        let root = Root::new(Mode::Builtin);
        let network = root.start().await;
        for name in ["one", "two", "three"] {
            let ports = [
                tcp(8080, 80),
                port(Protocol::Udp, 8080, 80),
                port(Protocol::Sctp, 8080, 80),
            ];
            let pod = root.pod(name, &ports);
            network.ensure(&pod).await.unwrap();
            let sctp = table(&root).elements().unwrap().unwrap();
            assert_eq!(sctp.iter().filter(|e| e.protocol == Protocol::Sctp).count(), 2);
            serve(Some(&pod.netns), 80, name).await;
            // The relay closes first and leaves its end of the connection in TIME_WAIT.
            assert!(ask(None, "[::1]:8080").await.unwrap().starts_with(name));
            network.remove(&pod.uid, &pod.dir, Some(&pod.netns)).await.unwrap();
            netns::remove(&pod.netns).unwrap();
        }
    });
}

#[test]
fn a_small_network_is_used_up_and_given_back() {
    on_a_host(|_outside| async move {
        let mut root = Root::new(Mode::Builtin);
        root.config.pod_cidr4 = Some("10.200.0.0/29".parse().unwrap());
        let network = root.start().await;
        let pods: Vec<Want> = (0..6).map(|n| root.pod(&format!("p{n}"), &[])).collect();
        for pod in &pods[..5] {
            network.ensure(pod).await.unwrap();
        }
        let error = network.ensure(&pods[5]).await.unwrap_err().to_string();
        assert!(error.contains("10.200.0.0/29"), "{error}");
        network
            .remove(&pods[2].uid, &pods[2].dir, Some(&pods[2].netns))
            .await
            .unwrap();
        let attachment = network.ensure(&pods[5]).await.unwrap();
        assert_eq!(four(&attachment).to_string(), "10.200.0.4");
        root.config.pod_cidr4 = Some("fd00::/64".parse().unwrap());
        assert!(matches!(
            Network::new(root.config.clone()).unwrap().ensure(&pods[2]).await,
            Err(Error::PodCidr(_))
        ));
    });
}

#[test]
fn a_pod_may_refuse_ipv6() {
    on_a_host(|_outside| async move {
        let root = Root::new(Mode::Builtin);
        let network = root.start().await;
        let pod = root.pod("pod", &[tcp(8080, 80)]);
        let off = || std::fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1").unwrap();
        within(Some(&pod.netns), off).await;
        let attachment = network.ensure(&pod).await.unwrap();
        assert_eq!((attachment.addresses.len(), attachment.gateways.len()), (1, 1));
        assert_eq!(attached(network.observe(&pod).await.unwrap()), attachment);
        let listener = within(Some(&pod.netns), || std::net::TcpListener::bind("0.0.0.0:80").unwrap()).await;
        let client = tokio::spawn(async { ask(None, "[::1]:8080").await });
        let accepted = tokio::task::spawn_blocking(move || {
            let (mut stream, from) = listener.accept().unwrap();
            stream.read_exact(&mut [0]).unwrap();
            from.ip()
        });
        assert_eq!(
            accepted.await.unwrap(),
            attachment.gateways[0],
            "by the relay, over IPv4"
        );
        client.await.unwrap().unwrap();
    });
}
