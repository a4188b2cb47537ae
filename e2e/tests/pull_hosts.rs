//! `hosts.toml` as the daemon uses it, read at every pull, and as `images explain` shows it.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::node::{Node, Options};
use e2e::registry::Server;
use e2e::served::{layer, serve};
use e2e::{eventually, pods};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// A node that looks below `certs.d` and, for certificates alone, `docker/certs.d`.
async fn node() -> Result<Node> {
    let mut node = Node::new(Options::default())?;
    let (ours, dockers) = (node.path("certs.d"), node.path("docker/certs.d"));
    fs::create_dir(node.path("etc"))?;
    let config = format!(
        "registry: {{certsDirs: ['{}', '{}']}}\n",
        ours.display(),
        dockers.display()
    );
    node.file("etc/config.yaml", config)?;
    node.serve().await?;
    Ok(node)
}

fn hosts(node: &Node, directory: &str, text: &str) -> Result<String> {
    let directory = node.path("certs.d").join(directory);
    fs::create_dir_all(&directory)?;
    let file = directory.join("hosts.toml");
    fs::write(&file, text)?;
    Ok(file.display().to_string())
}

/// The mirror may not resolve and lacks one layer: the tag and that layer come from the server.
#[tokio::test(flavor = "multi_thread")]
async fn mirrors_serve_what_they_may_and_have_and_a_typo_hides_nothing() -> Result<()> {
    let (server, mirror) = (Server::start().await?, Server::start().await?);
    let node = node().await?;
    let layers = [layer(97, 64 << 10), layer(98, 64 << 10)];
    let image = serve(&server, "a/b", &layers);
    serve(&mirror, "a/b", &layers[..1]);
    let text = format!(
        "server = \"{}\"\n[host.\"{}\"]\ncapabilities = [\"pull\"]\ncapabilties = [\"resolve\"]\nheader = {{ X-Team = \
         \"blue\" }}\n",
        server.base(),
        mirror.base()
    );
    let file = hosts(&node, "_default", &text)?;
    node.cri.pull("registry.example:5000/a/b:1").await?;
    let (asked, served) = (mirror.take_seen(), server.take_seen());
    ensure!(
        asked.iter().all(|seen| !seen.path.contains("/manifests/1")),
        "a tag was asked of it: {asked:?}"
    );
    ensure!(
        asked
            .iter()
            .all(|seen| seen.path.ends_with("?ns=registry.example%3A5000")),
        "{asked:?}"
    );
    ensure!(
        asked.iter().all(|seen| seen.header("x-team") == Some("blue")),
        "{asked:?}"
    );
    let sent = |seen: &[e2e::registry::Seen], n: usize| {
        let of = seen.iter().filter(|seen| seen.path.contains(&image.blobs[n].0));
        of.map(|seen| seen.sent).sum::<u64>()
    };
    ensure!(
        sent(&asked, 0) > 1000 && sent(&served, 0) == 0,
        "the mirror has the first layer"
    );
    ensure!(sent(&served, 1) > 1000, "it has not the second");
    ensure!(served.iter().all(|seen| seen.header("x-team").is_none()), "{served:?}");
    let log = node.daemon_log();
    ensure!(log.contains(&format!("{file}:4:")), "the typo is not told: {log}");

    // The file is read again: without its mirror.
    hosts(
        &node,
        "registry.example_5000_",
        &format!("server = \"{}\"\n", server.base()),
    )?;
    node.cri.pull("registry.example:5000/a/b:1").await?;
    ensure!(
        mirror.seen().is_empty() && server.seen().len() == 1,
        "{:?}",
        server.seen()
    );
    node.finish().await
}

/// The registry's settings are taken at a reload, by the command and by SIGHUP, and nothing that runs notices.
#[tokio::test(flavor = "multi_thread")]
async fn a_reload_takes_new_registries() -> Result<()> {
    let server = Server::start().await?;
    let image = "registry.invalid/a/b:1";
    serve(&server, "a/b", &[layer(99, 64 << 10)]);
    let mut node = Node::new(Options::default())?;
    fs::create_dir(node.path("etc"))?;
    let config = |dir: &str| format!("registry: {{certsDirs: ['{}']}}\n", node.path(dir).display());
    let (none, ours) = (config("none.d"), config("certs.d"));
    node.file("etc/config.yaml", &none)?;
    node.serve().await?;
    let pod = pods::host_network(node.pod("stays"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    node.cri
        .launch(&sandbox, &pod, &pods::container("web", pods::HELLO, &[]))
        .await?;
    let (picture, shims) = (node.picture().await?, node.shims()?);
    hosts(&node, "_default", &format!("server = \"{}\"\n", server.base()))?;
    let refused = node.cri.pull(image).await.expect_err("nobody has that name");
    ensure!(refused.to_string().contains("registry.invalid"), "{refused:?}");
    ensure!(server.seen().is_empty(), "{:?}", server.seen());

    node.file("etc/config.yaml", &ours)?;
    let told = node.ok(&["reload"]).await?;
    ensure!(
        told.contains("registry.certsDirs: ") && told.contains("certs.d"),
        "{told}"
    );
    node.cri.pull(image).await?;
    ensure!(node.cri.image(image).await?.is_some() && !server.take_seen().is_empty());

    node.file("etc/config.yaml", &none)?;
    kill(Pid::from_raw(node.pid()?), Signal::SIGHUP)?;
    eventually(Duration::from_secs(10), async || {
        let reloads = node.daemon_log().matches("configuration reloaded").count();
        ensure!(reloads == 2, "{reloads} reloads were logged");
        Ok(())
    })
    .await?;
    node.cri.pull(image).await.expect_err("as before");
    ensure!(server.seen().is_empty(), "{:?}", server.seen());
    assert_eq!(node.picture().await?, picture, "a reload changed what runs");
    assert_eq!(node.shims()?, shims);
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn explain_tells_the_order_and_where_each_setting_was_made() -> Result<()> {
    let node = node().await?;
    let text = "server = \"https://up.example\"\n\n[host.\"https://first.example\"]\nskip_verify = true\n\n\
                [host.\"https://second.example/proxy\"]\noverride_path = true\n\
                capabilities = [\"pull\"]\nnonsense = 1\n";
    let file = hosts(&node, "docker.io", text)?;
    let shown = node.ok(&["images", "explain", "busybox"]).await?;
    let places: Vec<_> = [
        "https://first.example/v2",
        "https://second.example/proxy",
        "https://up.example/v2",
    ]
    .iter()
    .map(|url| shown.find(url).with_context(|| format!("no {url} in {shown}")))
    .collect::<Result<_>>()?;
    ensure!(places.is_sorted(), "{shown}");
    let line = |words: &[&str]| shown.lines().any(|line| words.iter().all(|word| line.contains(word)));
    ensure!(line(&["skip_verify", "true", &format!("{file}:4")]), "{shown}");
    ensure!(line(&["capabilities", "pull", &format!("{file}:8")]), "{shown}");
    ensure!(line(&["capabilities", "pull, resolve, push", "default"]), "{shown}");
    ensure!(
        line(&[&format!("{file}:9"), "nonsense"]) && shown.contains("Not used:"),
        "{shown}"
    );
    let json: Value = serde_json::from_str(&node.ok(&["images", "explain", "-o", "json", "busybox"]).await?)?;
    ensure!(json["endpoints"].as_array().map(Vec::len) == Some(3), "{json:#}");

    // Docker's directory has certificates alone.
    let dockers = node.path("docker/certs.d/own.example");
    fs::create_dir_all(&dockers)?;
    for name in ["hosts.toml", "ca.crt", "a.cert", "a.key", "b.cert", "b.key"] {
        fs::write(dockers.join(name), "")?;
    }
    let shown = node.ok(&["images", "explain", "own.example/x"]).await?;
    for name in ["ca.crt", "a.cert", "b.key", "only certificates are read here"] {
        ensure!(shown.contains(name), "no {name} in {shown}");
    }
    // Nothing is said of a registry that nobody configured.
    let shown = node.ok(&["images", "explain", "other.example/x:1"]).await?;
    ensure!(
        shown.contains("https://other.example/v2") && shown.contains("the registry itself"),
        "{shown}"
    );
    node.finish().await
}
