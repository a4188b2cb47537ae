//! Pulls under faults: they stop when nobody waits, resume where they stopped, fetch nothing twice, believe nothing.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use e2e::eventually;
use e2e::images::Image;
use e2e::node::{Node, Options};
use e2e::registry::{Fault, Gate, Server};
use e2e::served::{Served, fetched, layer, serve};
use e2e::v1::AuthConfig;
use serde_json::json;
use tonic::Code;

const SECOND: Duration = Duration::from_secs(1);

/// Waits until the layer's transfer has begun.
async fn begun(server: &Server, blob: &str) -> Result<()> {
    eventually(10 * SECOND, async || {
        let asked = server
            .seen()
            .iter()
            .any(|seen| seen.path.contains(blob) && seen.sent > 0);
        ensure!(asked, "the layer was not asked for");
        Ok(())
    })
    .await
}

/// A transfer that stalls is given up by its client, long before the window for its rate ends.
async fn stopped(server: &Server) -> Result<()> {
    let closed = eventually(10 * SECOND, async || {
        ensure!(server.sending() == 0, "{} answers are on their way", server.sending());
        Ok(())
    });
    closed.await.context("the traffic goes on")
}

async fn absent(node: &Node, image: &Served) -> Result<()> {
    ensure!(node.cri.image(&image.name).await?.is_none(), "{} appeared", image.name);
    Ok(())
}

/// A node whose registries must send 1 KiB a second over this time.
const WINDOW: Duration = Duration::from_secs(3);

async fn hasty() -> Result<Node> {
    let mut node = Node::new(Options::default())?;
    fs::create_dir(node.path("etc"))?;
    let window = WINDOW.as_secs();
    let config = format!("registry: {{rateFloor: 1024, window: {window}}}\n");
    node.file("etc/config.yaml", config)?;
    node.serve().await?;
    Ok(node)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_stops_the_traffic_and_the_next_pull_goes_on() -> Result<()> {
    let server = Server::start().await?;
    let mut node = Node::start().await?;
    let image = serve(&server, "late", &[layer(1, 2 << 20), layer(2, 4 << 20)]);
    let (stalls, size) = image.blobs[1].clone();
    server.fault(&stalls, Fault::Stall(size * 2 / 5), 1);
    let since = Instant::now();
    let (pulled, begun) = tokio::join!(
        node.cri.pull_with(2 * SECOND, &image.name, None),
        begun(&server, &stalls)
    );
    let error = pulled.unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded, "{error:?}");
    assert!(since.elapsed() < 20 * SECOND, "{:?}", since.elapsed());
    begun?;
    stopped(&server).await?;
    absent(&node, &image).await?;
    let before = fetched(&server, &image);
    // Also a later daemon goes on where this one stopped.
    node.crash().await?;
    absent(&node, &image).await?;
    server.heal();
    node.cri.pull(&image.name).await?;
    let ranges = server.seen().iter().any(|seen| seen.header("range").is_some());
    let total = before + fetched(&server, &image);
    assert!(ranges, "it began anew");
    assert!(total < image.size() * 11 / 10, "{total} bytes for {}", image.size());
    // With nothing to do it costs one request.
    node.cri.pull(&image.name).await?;
    assert_eq!(server.take_seen().len(), 1);
    node.ok(&["images", "check", "--deep"]).await?;
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_takes_its_pull_along() -> Result<()> {
    let server = Server::start().await?;
    let node = Node::start().await?;
    let image = serve(&server, "left", &[layer(3, 1 << 20)]);
    server.fault(&image.blobs[0].0, Fault::Stall(1000), 1);
    {
        let pull = node.cri.pull(&image.name);
        tokio::pin!(pull);
        tokio::select! {
            ended = &mut pull => bail!("it ended: {ended:?}"),
            begun = begun(&server, &image.blobs[0].0) => begun?,
        }
    }
    stopped(&server).await?;
    absent(&node, &image).await?;
    node.finish().await
}

/// T11: a stalled layer fails within the window, says where and how far, and holds up nobody.
#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_pull_names_host_layer_and_bytes() -> Result<()> {
    let server = Server::start().await?;
    let node = hasty().await?;
    let image = serve(&server, "stall", &[layer(4, 4 << 20)]);
    let (blob, size) = image.blobs[0].clone();
    server.fault(&blob, Fault::Stall(size * 2 / 5), 9);
    let manifest = format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: stalled}}\nspec:\n  hostNetwork: true\n  containers:\n  - \
         {{name: a, image: '{}', command: [/x]}}\n",
        image.name
    );
    let file = node.file("stalled.yaml", manifest)?;
    node.ok(&["apply", "-f", &file]).await?;
    begun(&server, &blob).await?;
    let since = Instant::now();
    node.ok(&["delete", "pod", "stalled"]).await?;
    stopped(&server).await?;
    assert!(since.elapsed() < WINDOW, "ended after {:?}", since.elapsed());
    let error = node.cri.pull(&image.name).await.unwrap_err();
    assert_eq!(error.code(), Code::Unknown, "{error:?}");
    for word in ["RegistryUnavailable: ", server.host(), &blob, &size.to_string()] {
        assert!(error.message().contains(word), "no {word} in {error:?}");
    }
    server.heal();
    node.cri.pull(&image.name).await?;
    let total = fetched(&server, &image);
    assert!(total < size * 11 / 10, "{total} bytes for {size}");
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn each_blob_is_fetched_once_however_many_want_it() -> Result<()> {
    let server = Server::start().await?;
    let node = Node::start().await?;
    let base = layer(5, 2 << 20);
    let one = serve(&server, "one", &[base.clone(), layer(6, 1 << 20)]);
    let two = serve(&server, "two", &[base, layer(7, 1 << 20)]);
    let names = [&one.name, &two.name, &one.name, &two.name, &one.name];
    let pulls = names.map(|name| node.cri.pull(name));
    for pulled in futures::future::join_all(pulls).await {
        pulled?;
    }
    let seen = server.take_seen();
    for (digest, _) in one.blobs.iter().chain(&two.blobs) {
        let gets = seen
            .iter()
            .filter(|seen| seen.method == "GET" && seen.path.contains(digest));
        assert_eq!(gets.count(), 1, "{digest}");
    }
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_on_the_way_is_found_and_nothing_is_kept_of_it() -> Result<()> {
    let server = Server::start().await?;
    let node = hasty().await?;
    let image = serve(&server, "damaged", &[layer(8, 1 << 20)]);
    let blob = image.blobs[0].0.clone();
    for fault in [Fault::Corrupt, Fault::Longer(7)] {
        server.fault(&blob, fault.clone(), 9);
        let error = node.cri.pull(&image.name).await.expect_err(&format!("{fault:?}"));
        assert_ne!(error.code(), Code::DeadlineExceeded, "{fault:?}: {error:?}");
        absent(&node, &image).await?;
        server.heal();
    }
    server.fault(&blob, Fault::Truncate(5000), 1);
    node.cri.pull(&image.name).await.context("one broken connection")?;
    node.ok(&["images", "check", "--deep"]).await?;
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_open_the_gate_and_are_found_nowhere() -> Result<()> {
    let server = Server::start().await?;
    let node = Node::start().await?;
    let image = serve(&server, "private", &[layer(9, 1 << 20)]);
    server.gate(Gate::bearer("hugo", "swordfish-7351"));
    let error = node.cri.pull(&image.name).await.unwrap_err();
    assert_eq!(error.code(), Code::PermissionDenied, "{error:?}");
    let auth = AuthConfig {
        username: "hugo".into(),
        password: "swordfish-7351".into(),
        ..AuthConfig::default()
    };
    node.cri.pull_with(30 * SECOND, &image.name, Some(auth)).await?;
    for secret in ["swordfish-7351", &e2e::registry::base64("hugo:swordfish-7351")] {
        let places = [node.root(), node.state(), node.path("daemon.log")];
        let found = Command::new("grep").args(["-rlaF", secret]).args(places).output()?;
        assert!(found.stdout.is_empty(), "{}", String::from_utf8_lossy(&found.stdout));
    }
    node.finish().await
}

/// SIGKILL at any time: no half layer is ever used, and the next pull fetches what is missing and little more.
/// `E2E_PULL_KILLS` says how often.
#[tokio::test(flavor = "multi_thread")]
async fn killed_at_random_times() -> Result<()> {
    let kills: u64 = std::env::var("E2E_PULL_KILLS").map_or(20, |n| n.parse().expect("a number"));
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
    let mut seed = now.as_nanos() as u64;
    println!("seed {seed}");
    let server = Server::start().await?;
    let mut node = Node::start().await?;
    let (mut before, mut after, mut missing, mut cut) = (0, 0, 0, 0);
    for round in 0..kills {
        let layers: Vec<_> = (0..4).map(|n| layer(100 + round * 4 + n, 1 << 20)).collect();
        let image = serve(&server, &format!("killed{round}"), &layers);
        server.fault("blobs", Fault::Trickle(64 << 10, Duration::from_millis(4)), 999);
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let wait = Duration::from_millis(20 + (seed >> 33) % 250);
        let pulling = tokio::time::timeout(wait, node.cri.pull(&image.name)).await;
        node.kill9().await?;
        drop(pulling);
        let first = fetched(&server, &image);
        let lacks = image.size() - here(&node, &image);
        cut += u64::from(first > 0 && lacks > 0);
        node.serve().await?;
        node.cri
            .pull(&image.name)
            .await
            .with_context(|| format!("after a kill at {wait:?}"))?;
        server.heal();
        let again = fetched(&server, &image);
        ensure!(
            again * 10 <= lacks * 11,
            "{again} bytes were sent for {lacks} after a kill at {wait:?}"
        );
        (before, after, missing) = (before + first, after + again, missing + lacks);
    }
    println!("{kills} kills, {cut} amid layers: {before} bytes sent before, {after} after for {missing} missing");
    node.ok(&["images", "check", "--deep"]).await?;
    node.finish().await
}

/// Bytes of an image's layers in the content store, half-fetched ones included.
fn here(node: &Node, image: &Served) -> u64 {
    let content = node.root().join("content");
    let of = |(digest, _): &(String, u64)| {
        let hex = digest.trim_start_matches("sha256:");
        let places = [format!("blobs/sha256/{hex}"), format!("ingest/sha256-{hex}")];
        let sizes = places.map(|place| fs::metadata(content.join(place)).map_or(0, |meta| meta.len()));
        sizes.into_iter().max().unwrap_or(0)
    };
    image.blobs.iter().map(of).sum()
}

/// T09: what a power cut has damaged is found before its first use and made again from the blob, without a registry.
#[tokio::test(flavor = "multi_thread")]
async fn damage_by_an_unclean_boot_is_mended_before_use() -> Result<()> {
    let server = Server::start().await?;
    let mut node = Node::start().await?;
    let mut busybox = Image::busybox("unused")?;
    busybox.layers.push(layer(10, 1 << 20));
    let image = serve(&server, "boot", &busybox.layers);
    let other = serve(&server, "other", &[layer(11, 1 << 20)]);
    node.cri.pull(&image.name).await?;
    node.cri.pull(&other.name).await?;
    node.kill9().await?;
    drop(server);
    let layers = node.root().join("layers");
    let mark = fs::read_to_string(layers.join("mark.json"))?;
    let mut mark: serde_json::Value = serde_json::from_str(&mark)?;
    mark["boot"] = json!("another");
    fs::write(layers.join("mark.json"), mark.to_string())?;
    let mut cut = 0;
    let ours = |dir: &std::path::Path| !dir.join("fs/hello").exists();
    for entry in fs::read_dir(&layers)?.flatten().filter(|entry| ours(&entry.path())) {
        for name in ["fs/etc/passwd", "fs/etc/group", "fs/noise10"] {
            if let Ok(file) = fs::OpenOptions::new().write(true).open(entry.path().join(name)) {
                file.set_len(1)?;
                cut += 1;
            }
        }
    }
    assert_eq!(cut, 3);
    node.serve().await?;
    let pod = e2e::pods::host_network(node.pod("boot"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let script = "grep -c root /etc/passwd; wc -c </noise10";
    let config = e2e::pods::container("c", &image.name, &["/bin/sh", "-c", script]);
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    let texts = e2e::pods::log_texts(node.cri.exited(&id).await?.log_path)?;
    assert_eq!(texts, ["1", &(1 << 20).to_string()]);
    assert!(node.daemon_log().contains("damaged since the last boot"));
    assert!(node.cri.image(&other.name).await?.is_some());
    node.finish().await
}

/// T10: garbage collection, pruning and the removal of an image with the same layers do a slow pull no harm.
#[tokio::test(flavor = "multi_thread")]
async fn pruning_during_a_slow_pull() -> Result<()> {
    let server = Server::start().await?;
    let node = Node::start().await?;
    let mut layers = Image::busybox("unused")?.layers;
    let first = serve(&server, "first", &layers);
    layers.push(layer(13, 1 << 20));
    let slow = serve(&server, "slow", &layers);
    node.cri.pull(&first.name).await?;
    let last = slow.blobs.last().context("layers")?;
    server.fault(&last.0, Fault::Trickle(8 << 10, Duration::from_millis(300)), 1);
    let pull = async {
        let pulled = node.cri.pull_with(120 * SECOND, &slow.name, None).await;
        pulled.map(|_| Instant::now())
    };
    let prunes = async {
        for _ in 0..20 {
            node.cri.remove_image(&first.name).await?;
            node.ok(&["images", "prune", "--all", "--yes"]).await?;
            node.cri.pull(&first.name).await?;
        }
        anyhow::Ok(Instant::now())
    };
    let (pulled, pruned) = tokio::join!(pull, prunes);
    ensure!(pruned? < pulled?, "all of it was to happen during the pull");
    node.cri.remove_image(&first.name).await?;
    node.ok(&["images", "check", "--deep"]).await?;
    let pod = e2e::pods::host_network(node.pod("pruned"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let config = e2e::pods::container("c", &slow.name, &["/bin/sh", "-c", "wc -c </noise13"]);
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    let texts = e2e::pods::log_texts(node.cri.exited(&id).await?.log_path)?;
    assert_eq!(texts, [(1 << 20).to_string()]);
    node.finish().await
}

/// Damage is found, told with exit code 20, and repaired from the blob or the registry.
#[tokio::test(flavor = "multi_thread")]
async fn check_finds_and_repairs() -> Result<()> {
    let server = Server::start().await?;
    let node = Node::start().await?;
    let image = serve(&server, "check", &[layer(14, 1 << 20), layer(15, 1 << 20)]);
    node.cri.pull(&image.name).await?;
    node.ok(&["images", "check", "--deep"]).await?;
    let hex = image.blobs[0].0.trim_start_matches("sha256:").to_owned();
    let blob = node.root().join("content/blobs/sha256").join(hex);
    fs::OpenOptions::new().write(true).open(&blob)?.set_len(100)?;
    let mut turned = false;
    for entry in fs::read_dir(node.root().join("layers"))?.flatten() {
        let path = entry.path().join("fs/noise15");
        if let Ok(mut bytes) = fs::read(&path) {
            let meta = fs::metadata(&path)?;
            bytes[1000] ^= 1;
            fs::write(&path, bytes)?;
            fs::File::options()
                .write(true)
                .open(&path)?
                .set_modified(meta.modified()?)?;
            turned = true;
        }
    }
    assert!(turned);
    let shallow = node.reconcile(&["images", "check", "-o", "json"]).await?;
    assert_eq!(shallow.status.code(), Some(20));
    let found: serde_json::Value = serde_json::from_slice(&shallow.stdout)?;
    assert_eq!(found.as_array().map(Vec::len), Some(1), "{found}");
    let deep = node.reconcile(&["images", "check", "--deep", "--repair"]).await?;
    assert!(deep.status.success(), "{}", e2e::node::shown(&deep));
    node.ok(&["images", "check", "--deep"]).await?;
    node.finish().await
}

/// A small disk below a node's root; unmounted when it is dropped.
struct SmallDisk(std::path::PathBuf);

impl SmallDisk {
    fn mount(node: &Node, bytes: u64) -> Result<SmallDisk> {
        let (flags, options) = (nix::mount::MsFlags::empty(), format!("size={bytes}"));
        nix::mount::mount(Some("none"), &node.root(), Some("tmpfs"), flags, Some(options.as_str()))?;
        Ok(SmallDisk(node.root()))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = nix::mount::umount2(&self.0, nix::mount::MntFlags::MNT_DETACH);
    }
}

/// T12: at 0 bytes free a pull fails at once and says so, removals work, and then there is room without a restart.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_refuses_pulls_and_lets_go() -> Result<()> {
    let server = Server::start().await?;
    let mut node = Node::new(Options::default())?;
    let disk = SmallDisk::mount(&node, 96 << 20)?;
    node.serve().await?;
    let mut busybox = Image::busybox("unused")?;
    busybox.layers.push(layer(20, 4 << 20));
    let first = serve(&server, "small", &busybox.layers);
    node.cri.pull(&first.name).await?;
    let pod = e2e::pods::host_network(node.pod("full"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let config = |name: &str| e2e::pods::container(name, &first.name, &["/bin/sleep", "1000"]);
    let running = node.cri.launch(&sandbox, &pod, &config("c")).await?;
    let filler = node.root().join("filler");
    let mut file = fs::File::create(&filler)?;
    let full = std::io::copy(&mut std::io::repeat(7), &mut file).unwrap_err();
    assert_eq!(full.raw_os_error(), Some(nix::libc::ENOSPC));
    let next = serve(&server, "next", &[layer(21, 4 << 20)]);
    let error = node.cri.pull(&next.name).await.unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted, "{error:?}");
    absent(&node, &next).await?;
    let other = e2e::pods::host_network(node.pod("refused"));
    let error = node.cri.run_sandbox(&other).await.unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted, "{error:?}");
    let error = node.cri.create(&sandbox, &pod, &config("more")).await.unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted, "{error:?}");
    assert_eq!(node.cri.sandboxes(None).await?.len(), 1);
    assert_eq!(node.cri.containers(None).await?.len(), 1);
    node.cri.stop(&running, 0).await?;
    node.cri.remove(&running).await?;
    node.cri.stop_sandbox(&sandbox).await?;
    node.cri.remove_sandbox(&sandbox).await?;
    node.cri.remove_image(&first.name).await?;
    eventually(10 * SECOND, async || Ok(node.cri.pull(&next.name).await?))
        .await
        .context("the removals gave no space")?;
    let again = node.cri.run_sandbox(&other).await?;
    node.cri.remove_sandbox(&again).await?;
    drop(file);
    node.no_pods().await?;
    node.stop().await?;
    // The census would find the disk itself.
    drop(disk);
    node.finish_unused().await
}
