//! Unpacked images against an independent judge, and where overlay or id-mapped mounts do not work.
//!
//! `UNPACK_SEEDS=200` tries as many fresh seeds; `UNPACK_SEED=7` replays one.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use e2e::corpus::{self, judge};
use e2e::disk::Disk;
use e2e::hub::Hub;
use e2e::images::{Compression, Image, Layer};
use e2e::node::{Node, Options};
use e2e::pods::{self, shell};
use e2e::v1::*;

/// Seeds that are always tried.
const FIXED: std::ops::Range<u64> = 1..13;

fn seeds(fresh: u64) -> Result<Vec<u64>> {
    if let Ok(one) = std::env::var("UNPACK_SEED") {
        return Ok(vec![one.parse().context("UNPACK_SEED")?]);
    }
    let fresh = std::env::var("UNPACK_SEEDS")
        .map_or(Ok(fresh), |n| n.parse())
        .context("UNPACK_SEEDS")?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis() as u64;
    Ok(FIXED.chain(now..now + fresh).collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn generated_images_are_what_umoci_makes_of_them() -> Result<()> {
    let node = Node::start().await?;
    judge::compare_all(&node, seeds(4)?).await?;
    node.finish().await
}

/// A node whose root lies on a file system of its own.
async fn node_on(disk: impl FnOnce(&std::path::Path) -> Result<Disk>) -> Result<Node> {
    let mut node = Node::new(Options::default())?.on(disk)?;
    node.serve().await?;
    fs::set_permissions(node.state(), fs::Permissions::from_mode(0o711))?;
    fs::set_permissions(node.root(), fs::Permissions::from_mode(0o711))?;
    Ok(node)
}

/// Status and reason of a condition of the Node.
async fn condition(node: &Node, kind: &str) -> Result<(String, String)> {
    let text = node.ok(&["get", "node", "-o", "json"]).await?;
    let json: serde_json::Value = serde_json::from_str(&text)?;
    let all = find(&json, "conditions")
        .context("conditions")?
        .as_array()
        .context("a list")?;
    let one = all
        .iter()
        .find(|one| one["type"] == kind)
        .with_context(|| format!("{kind} in {text}"))?;
    let word = |key: &str| one[key].as_str().unwrap_or_default().to_owned();
    Ok((word("status"), word("reason")))
}

fn find<'a>(json: &'a serde_json::Value, key: &str) -> Option<&'a serde_json::Value> {
    match json {
        serde_json::Value::Object(map) => map.get(key).or_else(|| map.values().find_map(|value| find(value, key))),
        serde_json::Value::Array(all) => all.iter().find_map(|value| find(value, key)),
        _ => None,
    }
}

/// Three layers on busybox, each changing what the others made.
fn tall() -> Result<Image> {
    let mut image = Image::busybox("localhost/tall:1")?;
    let layer = || Layer::new(Compression::Gzip);
    image.layers.extend([
        layer()
            .dir("d", 0o750)
            .file("d/removed", 0o644, "1")
            .file("d/kept", 0o640, "kept")
            .owned_by(1001)
            .dir("o", 0o755)
            .file("o/hidden", 0o644, "1"),
        layer()
            .remove("d/removed")
            .opaque("o")
            .file("o/shown", 0o4755, "2")
            .hardlink("hard", "d/kept"),
        layer().remove("o").dir("o", 0o711).file("o/last", 0o644, "3"),
    ]);
    Ok(image)
}

const LOOK: &str = "ls /d /o | tr '\\n' ' '; echo; cat /hard; echo; stat -c '%a %u:%g' /d /d/kept /o /etc/passwd; \
                    find / -xdev -name '.wh.*' | wc -l; stat -c %h /hard";
const SEEN: [&str; 8] = [
    "/d: kept  /o: last ",
    "kept",
    "750 0:0",
    "640 1001:1001",
    "711 0:0",
    "644 0:0",
    "0",
    "2",
];

/// Overlay on overlay: layers hold whole trees, root file systems are copies, and nobody sees a difference.
#[tokio::test(flavor = "multi_thread")]
async fn without_overlay_root_file_systems_are_copies() -> Result<()> {
    let mut node = node_on(Disk::overlay).await?;
    let (status, reason) = condition(&node, "OverlayWorks").await?;
    assert_eq!((&*status, &*reason), ("False", "RootFileSystemsAreCopies"));
    judge::compare_all(&node, seeds(2)?).await?;

    node.import(tall()?.oci()).await?;
    let pod = pods::host_network(node.pod("copies"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let script = format!("{LOOK}; echo mine > /d/kept; rm /etc/group; echo new > /new; echo ready; sleep 1000");
    let (mut ids, mut roots) = (Vec::new(), Vec::new());
    for name in ["one", "two"] {
        let config = pods::container(name, "localhost/tall:1", &["/bin/sh", "-c", &script]);
        let id = node.cri.launch(&sandbox, &pod, &config).await?;
        let log = format!("{}/{name}.log", pod.log_directory);
        let lines = e2e::eventually(Duration::from_secs(10), async || {
            let lines = pods::log_texts(&log)?;
            ensure!(lines.iter().any(|line| line == "ready"), "{lines:#?}");
            Ok(lines)
        })
        .await?;
        assert_eq!(lines[..SEEN.len()], SEEN, "what {name} writes is its own");
        roots.push(PathBuf::from(format!(
            "/proc/{}/root",
            node.cri.container_pid(&id).await?
        )));
        ids.push(id);
    }
    assert_ne!(
        fs::metadata(roots[0].join("new"))?.ino(),
        fs::metadata(roots[1].join("new"))?.ino()
    );
    node.crash().await?;
    let exec = node.cri.exec(&ids[0], &["cat", "/hard"], 5).await?;
    assert_eq!(exec.stdout, b"mine\n", "the copy is kept over a crash");
    node.cri.stop(&ids[0], 1).await?;
    node.cri.remove(&ids[0]).await?;
    assert_eq!(
        node.inside("localhost/tall:1", LOOK).await?,
        SEEN,
        "the layers are untouched"
    );
    node.finish().await
}

const HOST: u32 = 1_234_000;

fn options() -> UserNamespace {
    let mapping = vec![IdMapping {
        host_id: HOST,
        container_id: 0,
        length: 65_536,
    }];
    UserNamespace {
        mode: NamespaceMode::Pod.into(),
        uids: mapping.clone(),
        gids: mapping,
    }
}

/// A pod with a user namespace where the kernel maps no owners: its files are copies that belong to it.
async fn owners_are_copied(mut node: Node) -> Result<()> {
    let (status, reason) = condition(&node, "OwnersMappable").await?;
    assert_eq!((&*status, &*reason), ("False", "RootFileSystemsAreCopies"));
    node.import(tall()?.oci()).await?;
    let mut pod = node.pod("users");
    let linux = pod.linux.get_or_insert_default();
    let security = linux.security_context.get_or_insert_default();
    security.namespace_options.get_or_insert_default().userns_options = Some(options());
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let mut config = shell(
        "c",
        &format!("{LOOK}; echo x > /file; chown 1001 /file; echo ready; sleep 1000"),
    );
    config.image.get_or_insert_default().image = "localhost/tall:1".into();
    let security = config
        .linux
        .get_or_insert_default()
        .security_context
        .get_or_insert_default();
    security.namespace_options.get_or_insert_default().userns_options = Some(options());
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    let log = format!("{}/c.log", pod.log_directory);
    let lines = e2e::eventually(Duration::from_secs(10), async || {
        let lines = pods::log_texts(&log)?;
        ensure!(lines.iter().any(|line| line == "ready"), "{lines:#?}");
        Ok(lines)
    })
    .await?;
    assert_eq!(lines[..SEEN.len()], SEEN);
    let pid = node.cri.container_pid(&id).await?;
    let owner = |path: &str| Ok::<_, anyhow::Error>(fs::metadata(format!("/proc/{pid}/root{path}"))?.uid());
    assert_eq!(
        [owner("/")?, owner("/d/kept")?, owner("/file")?],
        [HOST, HOST + 1001, HOST + 1001]
    );
    node.crash().await?;
    assert_eq!(node.cri.container_pid(&id).await?, pid);
    assert_eq!(
        node.inside("localhost/tall:1", LOOK).await?,
        SEEN,
        "others' owners are as they were"
    );
    node.finish().await
}

/// ext4's driver maps owners under its own name only; overlay works.
#[tokio::test(flavor = "multi_thread")]
async fn owners_are_copied_on_ext3() -> Result<()> {
    let make = ["mkfs.ext3", "-q", "-F", "-O", "^has_journal", "-I", "256"];
    owners_are_copied(node_on(|root| Disk::looped(root, &make, "ext2", 512)).await?).await
}

#[tokio::test(flavor = "multi_thread")]
async fn owners_are_copied_on_an_overlay() -> Result<()> {
    owners_are_copied(node_on(Disk::overlay).await?).await
}

/// A value in kB of /proc/PID/status.
fn kilobytes(pid: i32, key: &str) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = text
        .lines()
        .find(|line| line.starts_with(key))
        .with_context(|| key.to_owned())?;
    Ok(line.split_whitespace().nth(1).context("a value")?.parse()?)
}

/// A layer of one file that no compression makes smaller, as zstd with a window of `1 << window` bytes.
fn wide(seed: u64, mebibytes: usize, window: u32) -> Result<Layer> {
    let mut random = corpus::Random::new(seed);
    let bytes: Vec<u8> = (0..mebibytes << 17).flat_map(|_| random.next().to_le_bytes()).collect();
    let tar = Layer::new(Compression::Plain).file("file", 0o644, bytes).tar();
    let mut zstd = zstd::Encoder::new(Vec::new(), 1)?;
    zstd.window_log(window)?;
    std::io::Write::write_all(&mut zstd, &tar)?;
    Ok(Layer::stored(tar, zstd.finish()?, "+zstd"))
}

/// Windows of 32 MiB in three layers at once would take 96 MiB: they wait for each other.
#[tokio::test(flavor = "multi_thread")]
async fn a_pull_takes_less_than_64_mebibytes() -> Result<()> {
    let hub = Hub::start().await?;
    let node = Node::start().await?;
    let layers = (0..3).map(|n| wide(n, 40, 25)).collect::<Result<Vec<_>>>()?;
    let image = Image::new("localhost/wide:1", layers, serde_json::json!({}));
    let name = hub.push(&image, "wide:1", &[])?;
    let small = hub.push(&Image::busybox("localhost/warm:1")?, "warm:1", &[])?;
    node.cri
        .pull(&small)
        .await
        .context("a first pull, for what every pull needs once")?;
    let pid = node.pid()?;
    let idle = kilobytes(pid, "VmRSS:")?;
    fs::write(format!("/proc/{pid}/clear_refs"), "5").context("forget the peak (proc_pid_clear_refs(5))")?;
    node.cri.pull_with(Duration::from_secs(100), &name, None).await?;
    let grown = kilobytes(pid, "VmHWM:")?.saturating_sub(idle);
    println!("idle {idle} kB, grown by {grown} kB");
    assert!(grown < 64 << 10, "{grown} kB more than when idle");
    assert!(grown > 16 << 10, "{grown} kB: were the windows used at all?");

    let image = Image::new("localhost/wider:1", vec![wide(9, 72, 26)?], serde_json::json!({}));
    let file = node.file("wider.tar", image.oci())?;
    let out = node.reconcile(&["images", "import", &file]).await?;
    let text = String::from_utf8_lossy(&out.stderr);
    assert!(
        !out.status.success() && text.contains("window of 67108864 bytes"),
        "{text}"
    );
    node.finish().await
}
