//! Proxies of the environment: asked for what is not excepted, by absolute URL or by a tunnel; their password is no more
//! shown than any other.

use std::fs;
use std::net::ToSocketAddrs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::hub::Hub;
use e2e::images::Image;
use e2e::node::{Node, Options};
use e2e::proxy::Proxy;
use e2e::registry::{Server, base64};
use e2e::served::{layer, serve};

const PASSWORD: &str = "codfish-9931";

/// A node whose environment names this proxy.
async fn node(proxy: &str) -> Result<Node> {
    let options = Options {
        env: vec![
            ("HTTP_PROXY", proxy.to_owned()),
            ("HTTPS_PROXY", proxy.to_owned()),
            ("NO_PROXY", "direct.example,.inside.example".to_owned()),
        ],
        ..Options::default()
    };
    let mut node = Node::new(options)?;
    let certs = node.path("certs.d");
    for (host, text) in [
        ("plain.example_5000_", "server = \"http://plain.example:5000\"\n"),
        (
            "secure.example",
            "server = \"https://secure.example\"\nskip_verify = true\n",
        ),
        (
            "direct.example_5000_",
            "server = \"http://direct.example:5000\"\ndial_timeout = \"2s\"\n",
        ),
        (
            "a.inside.example",
            "server = \"https://a.inside.example\"\ndial_timeout = \"2s\"\n",
        ),
    ] {
        fs::create_dir_all(certs.join(host))?;
        fs::write(certs.join(host).join("hosts.toml"), text)?;
    }
    fs::create_dir(node.path("etc"))?;
    let config = format!(
        "registry: {{certsDirs: ['{}'], rateFloor: 1024, window: 10}}\n",
        certs.display()
    );
    node.file("etc/config.yaml", config)?;
    node.serve().await?;
    Ok(node)
}

#[tokio::test(flavor = "multi_thread")]
async fn registries_are_reached_through_the_proxy_unless_excepted() -> Result<()> {
    let server = Server::start().await?;
    let hub = Hub::with_tls().await?;
    let address = |host: &str| host.to_socket_addrs()?.next().context("an address");
    let wanted = format!("Basic {}", base64(&format!("hugo:{PASSWORD}")));
    let proxy = Proxy::start(address(server.host())?, address(&hub.host())?, wanted.clone()).await?;
    let node = node(&proxy.url("hugo", PASSWORD)).await?;

    serve(&server, "plain", &[layer(95, 256 << 10)]);
    node.cri.pull("plain.example:5000/plain:1").await?;
    let passed = proxy.take_passed();
    ensure!(
        passed
            .iter()
            .all(|one| one.line.contains(" http://plain.example:5000/v2/plain/")),
        "{passed:?}"
    );
    ensure!(
        passed.len() >= 4 && passed.iter().all(|one| one.authorization.as_ref() == Some(&wanted)),
        "{passed:?}"
    );
    let seen = server.seen();
    ensure!(
        seen.iter().all(|seen| seen.header("proxy-authorization").is_none()),
        "{seen:?}"
    );

    hub.push(&Image::busybox("unused")?, "secure:1", &[])?;
    node.cri.pull("secure.example/secure:1").await?;
    let passed = proxy.take_passed();
    ensure!(
        !passed.is_empty() && passed.iter().all(|one| one.line == "CONNECT secure.example:443"),
        "{passed:?}"
    );
    // Both ends speak HTTP/2, and say so in the tunnel.
    ensure!(hub.log().contains("HTTP/2.0"), "{}", hub.log());

    for name in ["direct.example:5000/plain:1", "a.inside.example/plain:1"] {
        let error = node.cri.pull(name).await.unwrap_err();
        ensure!(error.message().starts_with("RegistryUnavailable"), "{error:?}");
    }
    // Loopback is nobody else's to reach.
    node.cri.pull(&format!("{}/plain:1", server.host())).await?;
    let passed = proxy.take_passed();
    ensure!(passed.is_empty(), "{passed:?}");
    hidden(&node)?;
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_proxy_that_refuses_is_named_without_its_password() -> Result<()> {
    let server = Server::start().await?;
    let address = server.host().to_socket_addrs()?.next().context("an address")?;
    let proxy = Proxy::start(address, address, "Basic another".to_owned()).await?;
    let node = node(&proxy.url("hugo", PASSWORD)).await?;
    for name in ["plain.example:5000/plain:1", "secure.example/plain:1"] {
        let error = tokio::time::timeout(Duration::from_secs(60), node.cri.pull(name))
            .await?
            .unwrap_err();
        let said = error.message();
        ensure!(
            said.contains("407") || said.to_lowercase().contains("proxy auth"),
            "{said}"
        );
        ensure!(!said.contains(PASSWORD), "{said}");
    }
    ensure!(proxy.take_passed().iter().all(|one| one.refused));
    hidden(&node)?;
    node.finish().await
}

fn hidden(node: &Node) -> Result<()> {
    let encoded = base64(&format!("hugo:{PASSWORD}"));
    for secret in [PASSWORD, &encoded] {
        let places = [node.root(), node.state(), node.path("daemon.log")];
        let found = Command::new("grep")
            .args(["-rlaF", "-e", secret])
            .args(places)
            .output()?;
        ensure!(found.stdout.is_empty(), "in {}", String::from_utf8_lossy(&found.stdout));
    }
    Ok(())
}
