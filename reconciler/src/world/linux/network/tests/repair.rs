//! The built-in bridge, harmed, cut short, removed: what is seen and what is made of it.

use super::super::{bridge, plug};
use super::*;

/// All the kernel has of an instance and a pod.
async fn facts(root: &Root, pod: &Want) -> String {
    let (links, inside) = (
        Links::here().unwrap(),
        Links::inside(&pod.netns, || Ok(())).await.unwrap(),
    );
    let mut all = String::new();
    for links in [&links, &inside] {
        for link in links.all().await.unwrap() {
            all += &format!("{link:?} {:?}\n", links.addresses(link.index).await.unwrap());
        }
        // The kernel itself adds link-local, multicast and local IPv6 routes a while after a link is up.
        let mut routes = links.destinations().await.unwrap();
        routes.retain(|(to, _)| to.ip.is_ipv4() || to.prefix == 64 && !to.to_string().starts_with("fe80"));
        all += &format!("{:?} {routes:?}\n", links.gateways().await.unwrap());
    }
    let mut elements = table(root).elements().unwrap().unwrap();
    elements.sort();
    all + &format!("{elements:?}")
}

#[test]
fn ensuring_again_changes_nothing() {
    on_a_host(|_outside| async move {
        let root = Root::new(Mode::Builtin);
        let network = root.start().await;
        let pod = root.pod("pod", &[tcp(8080, 80), tcp(8081, 81)]);
        let attachment = network.ensure(&pod).await.unwrap();
        let before = facts(&root, &pod).await;
        assert_eq!(network.ensure(&pod).await.unwrap(), attachment);
        assert_eq!(facts(&root, &pod).await, before);
        // Nor does a new daemon.
        drop(network);
        let network = root.start().await;
        assert_eq!(attached(network.observe(&pod).await.unwrap()), attachment);
        assert_eq!(network.ensure(&pod).await.unwrap(), attachment);
        assert_eq!(facts(&root, &pod).await, before);
    });
}

#[test]
fn a_new_daemon_serves_the_old_ports() {
    on_a_host(|outside| async move {
        let root = Root::new(Mode::Builtin);
        let network = root.start().await;
        let pod = root.pod("pod", &[tcp(8080, 80)]);
        network.ensure(&pod).await.unwrap();
        serve(Some(&pod.netns), 80, "pod").await;
        drop(network);
        assert!(
            ask(Some(&outside), "192.0.2.1:8080").await.is_ok(),
            "while no daemon runs"
        );
        let network = root.start().await;
        assert!(ask(None, "[::1]:8080").await.is_ok());
        assert!(std::net::TcpListener::bind("0.0.0.0:8080").is_err());
        // What the new daemon removes is gone, though the old one made it.
        network.remove(&pod.uid, &pod.dir, Some(&pod.netns)).await.unwrap();
        assert!(ask(Some(&outside), "192.0.2.1:8080").await.is_err());
        assert_eq!(table(&root).elements().unwrap(), Some(Vec::new()));
    });
}

#[test]
fn every_half_is_finished() {
    on_a_host(|_outside| async move {
        let root = Root::new(Mode::Builtin);
        let pod = root.pod("pod", &[tcp(8080, 80)]);
        let whole = root.start().await.ensure(&pod).await.unwrap();
        let links = Links::here().unwrap();
        let host_link = plug::host_link(&root.config.instance, &pod.uid);
        for half in [
            "attachment",
            "pair",
            "link without mark",
            "addresses",
            "ports",
            "bridge without mark",
        ] {
            // A SIGKILL: no receipt of completion, and the next daemon starts from nothing.
            Attachment {
                complete: false,
                ..whole.clone()
            }
            .write(&pod.dir)
            .unwrap();
            let inside = Links::inside(&pod.netns, || Ok(())).await.unwrap();
            let eth0 = inside.by_name("eth0").await.unwrap().unwrap();
            match half {
                "attachment" => {
                    table(&root).delete().unwrap();
                    bridge::remove(&root.config.instance).await.unwrap();
                    inside.delete(&eth0).await.unwrap();
                }
                "pair" => inside.delete(&eth0).await.unwrap(),
                "link without mark" => unmark(&links, &host_link).await,
                "addresses" => {
                    for address in &whole.addresses {
                        inside.delete_address(eth0.index, *address).await.unwrap();
                    }
                }
                "ports" => {
                    table(&root).delete().unwrap();
                }
                _ => unmark(&links, &bridge::bridge_name(&root.config.instance)).await,
            }
            let network = root.start().await;
            let state = network.observe(&pod).await.unwrap();
            assert!(matches!(state, State::Partial(_)), "{half}: {state:?}");
            assert_eq!(network.ensure(&pod).await.unwrap(), whole, "{half}");
            attached(network.observe(&pod).await.unwrap());
        }
    });
}

async fn unmark(links: &Links, name: &str) {
    let bare = LinkUnspec::new_with_name(name).alias("").build();
    links.handle().link().change(bare).execute().await.unwrap();
}

#[test]
fn drift_is_seen_and_restored() {
    on_a_host(|_outside| async move {
        let root = Root::new(Mode::Builtin);
        let network = root.start().await;
        let pod = root.pod("pod", &[tcp(8080, 80)]);
        let bystander = root.pod("bystander", &[tcp(9090, 80)]);
        let whole = network.ensure(&pod).await.unwrap();
        network.ensure(&bystander).await.unwrap();
        serve(Some(&pod.netns), 80, "pod").await;
        let links = Links::here().unwrap();
        let host_link = plug::host_link(&root.config.instance, &pod.uid);
        for (harm, words) in [
            ("link deleted", "is missing"),
            ("link down", "is not up"),
            ("off the bridge", "is not on the bridge"),
            ("address", "lacks"),
            ("eth0 down", "is down"),
            ("table", "is not whole"),
            ("element", "host port 8080/tcp is not mapped"),
            ("bridge", "bridge"),
        ] {
            let inside = Links::inside(&pod.netns, || Ok(())).await.unwrap();
            let eth0 = inside.by_name("eth0").await.unwrap().unwrap();
            let change = |message| links.handle().link().change(message).execute();
            match harm {
                "link deleted" => inside.delete(&eth0).await.unwrap(),
                "link down" => change(LinkUnspec::new_with_name(&host_link).down().build())
                    .await
                    .unwrap(),
                "off the bridge" => {
                    change(LinkUnspec::new_with_name(&host_link).nocontroller().build())
                        .await
                        .unwrap();
                }
                "address" => inside.delete_address(eth0.index, whole.addresses[1]).await.unwrap(),
                "eth0 down" => {
                    let down = LinkUnspec::new_with_index(eth0.index).down().build();
                    inside.handle().link().change(down).execute().await.unwrap();
                }
                "table" => table(&root).delete().unwrap(),
                "element" => {
                    let all = table(&root).elements().unwrap().unwrap();
                    let ours: Vec<_> = all.into_iter().filter(|e| e.host_port == 8080).collect();
                    table(&root).change(&ours, &[]).unwrap();
                }
                _ => bridge::remove(&root.config.instance).await.unwrap(),
            }
            match network.observe(&pod).await.unwrap() {
                State::Drifted(why) => assert!(why.contains(words), "{harm}: {why}"),
                other => panic!("{harm}: {other:?}"),
            }
            assert_eq!(network.ensure(&pod).await.unwrap(), whole, "{harm}");
            assert_eq!(attached(network.observe(&pod).await.unwrap()), whole, "{harm}");
            let answer = ask(None, "127.0.0.1:8080").await;
            assert!(answer.is_ok(), "{harm}: {answer:?}");
        }
        network.ensure(&bystander).await.unwrap();
        attached(network.observe(&bystander).await.unwrap());
        netns::remove(&pod.netns).unwrap();
        let state = network.observe(&pod).await.unwrap();
        assert!(
            matches!(&state, State::Drifted(why) if why.contains("is gone")),
            "{state:?}"
        );
    });
}

#[test]
fn harm_is_noticed_as_it_happens() {
    on_a_host(|_outside| async move {
        let root = Root::new(Mode::Builtin);
        let network = root.start().await;
        let mut drift = network.drift().unwrap();
        let pods = [root.pod("a", &[]), root.pod("b", &[tcp(8080, 80)])];
        for pod in &pods {
            network.ensure(pod).await.unwrap();
        }
        // Making pods was no news, so these come first.
        let links = Links::here().unwrap();
        let name = plug::host_link(&root.config.instance, &pods[1].uid);
        let down = LinkUnspec::new_with_name(&name).down().build();
        links.handle().link().change(down).execute().await.unwrap();
        assert_eq!(drift.recv().await, Some(Drift::Sandbox(pods[1].uid.clone())));
        network.ensure(&pods[1]).await.unwrap();
        netns::remove(&pods[0].netns).unwrap();
        while drift.recv().await != Some(Drift::Sandbox(pods[0].uid.clone())) {}
        bridge::remove(&root.config.instance).await.unwrap();
        while drift.recv().await != Some(Drift::All) {}
    });
}

#[test]
fn removal_leaves_nothing() {
    on_a_host(|_outside| async move {
        let root = Root::new(Mode::Builtin);
        let network = root.start().await;
        let before = settled_links(2).await;
        let pods: Vec<Want> = (0..3)
            .map(|n| root.pod(&format!("p{n}"), &[port(Protocol::Udp, 5300 + n, 53)]))
            .collect();
        for pod in &pods {
            network.ensure(pod).await.unwrap();
        }
        serve_udp(Some(&pods[0].netns), 53, "p").await;
        let client = std::net::UdpSocket::bind("192.0.2.1:0").unwrap();
        ask_udp(&client, "192.0.2.1:5300").await.unwrap();
        for pod in &pods {
            // Twice, and once more when even the namespace is gone.
            for _ in 0..2 {
                network.remove(&pod.uid, &pod.dir, Some(&pod.netns)).await.unwrap();
            }
            netns::remove(&pod.netns).unwrap();
            network.remove(&pod.uid, &pod.dir, None).await.unwrap();
            assert_eq!(network.observe(pod).await.unwrap(), State::Absent);
        }
        network.sweep_node().await.unwrap();
        network.sweep_node().await.unwrap();
        assert_eq!(settled_links(before.len()).await, before);
        assert_eq!(network.list().await.unwrap(), Vec::<String>::new());
        assert_eq!(table(&root).elements().unwrap(), None);
        let left = super::super::conntrack::forget_udp(|flow| flow.answers_from != flow.destination);
        assert_eq!(left.unwrap(), 0);
        assert!(std::net::UdpSocket::bind("0.0.0.0:5300").is_ok());
        // And the next pod finds everything anew.
        let again = root.pod("again", &[tcp(8080, 80)]);
        network.ensure(&again).await.unwrap();
        attached(network.observe(&again).await.unwrap());
    });
}

#[test]
fn a_link_without_a_pin_is_swept() {
    on_a_host(|_outside| async move {
        let root = Root::new(Mode::Builtin);
        let network = root.start().await;
        let pod = root.pod("pod", &[]);
        network.ensure(&pod).await.unwrap();
        // Something holds the namespace, and the directory is gone.
        let _holder = std::fs::File::open(&pod.netns).unwrap();
        netns::remove(&pod.netns).unwrap();
        std::fs::remove_dir_all(&pod.dir).unwrap();
        let network = root.start().await;
        assert_eq!(network.list().await.unwrap(), std::slice::from_ref(&pod.uid));
        network.remove(&pod.uid, &pod.dir, None).await.unwrap();
        assert_eq!(network.list().await.unwrap(), Vec::<String>::new());
    });
}

#[test]
fn foreign_links_are_left_alone() {
    on_a_host(|_outside| async move {
        let root = Root::new(Mode::Builtin);
        let links = Links::here().unwrap();
        let name = bridge::bridge_name(&root.config.instance);
        let theirs = rtnetlink::LinkBridge::new(&name).build();
        links.handle().link().add(theirs).execute().await.unwrap();
        let mark = LinkUnspec::new_with_name(&name).alias("theirs").build();
        links.handle().link().change(mark).execute().await.unwrap();
        let network = root.start().await;
        let pod = root.pod("pod", &[]);
        let error = network.ensure(&pod).await.unwrap_err();
        assert!(matches!(error, Error::ForeignLink { .. }), "{error}");
        network.sweep_node().await.unwrap();
        assert!(links.by_name(&name).await.unwrap().is_some());
    });
}

#[test]
fn looking_makes_nothing() {
    on_a_host(|_outside| async move {
        let root = Root::new(Mode::Builtin);
        let pod = root.pod("pod", &[tcp(8080, 80)]);
        let whole = root.start().await.ensure(&pod).await.unwrap();
        let network = Network::new(root.config.clone()).unwrap();
        attached(network.observe(&pod).await.unwrap());
        // All of it gone: named, and still gone after the look.
        table(&root).delete().unwrap();
        bridge::remove(&root.config.instance).await.unwrap();
        let inside = Links::inside(&pod.netns, || Ok(())).await.unwrap();
        let eth0 = inside.by_name("eth0").await.unwrap().unwrap();
        inside.delete(&eth0).await.unwrap();
        let links = settled_links(2).await;
        match network.observe(&pod).await.unwrap() {
            State::Drifted(why) => {
                for words in ["bridge", "pair", "not whole"] {
                    assert!(why.contains(words), "{why}");
                }
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(settled_links(2).await, links);
        assert_eq!(table(&root).elements().unwrap(), None);
        assert_eq!(
            network.ensure(&pod).await.unwrap(),
            whole,
            "the network it had, though nothing is left of it"
        );
    });
}

#[test]
fn attachments_of_another_boot_hold_nothing() {
    on_a_host(|_outside| async move {
        let root = Root::new(Mode::Builtin);
        let pod = root.pod("pod", &[tcp(8080, 80)]);
        let whole = root.start().await.ensure(&pod).await.unwrap();
        Attachment {
            boot_id: "another".into(),
            ..whole
        }
        .write(&pod.dir)
        .unwrap();
        netns::remove(&pod.netns).unwrap();
        let network = root.start().await;
        assert!(matches!(network.observe(&pod).await.unwrap(), State::Partial(_)));
        let next = root.pod("next", &[tcp(8080, 80)]);
        network.ensure(&next).await.unwrap();
        network.remove(&pod.uid, &pod.dir, None).await.unwrap();
        attached(network.observe(&next).await.unwrap());
        // Cut short by a power failure.
        std::fs::write(pod.dir.join(attachment::FILE), "").unwrap();
        assert!(matches!(network.observe(&pod).await.unwrap(), State::Partial(_)));
        network.remove(&pod.uid, &pod.dir, None).await.unwrap();
        assert_eq!(network.observe(&pod).await.unwrap(), State::Absent);
    });
}
