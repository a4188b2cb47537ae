//! Kinds 26 to 30: writable layers, unpacked layers, blobs, images.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use e2e::hub::Hub;
use e2e::images::Image;
use e2e::node::Node;
use e2e::pods::{self, BUSYBOX, HELLO, container, shell};

use crate::{quiet, repaired, runs, up};

fn layers(node: &Node) -> Result<Vec<PathBuf>> {
    let all = fs::read_dir(node.root().join("layers"))?.flatten().map(|e| e.path());
    Ok(all.filter(|path| path.join("fs").exists()).collect())
}

fn blobs(node: &Node) -> Result<Vec<PathBuf>> {
    Ok(fs::read_dir(node.root().join("content/blobs/sha256"))?
        .flatten()
        .map(|e| e.path())
        .collect())
}

/// A container's directory that no record knows, beside one that lives.
#[tokio::test(flavor = "multi_thread")]
async fn drift_26_writable_layer_without_container() -> Result<()> {
    let mut node = Node::start().await?;
    let kept = up(&node, "kept").await?;
    let dir = node
        .root()
        .join("pods")
        .join(&kept.sandbox)
        .join("containers")
        .join("0f".repeat(32));
    fs::create_dir_all(dir.join("upper/deep"))?;
    repaired(&node, "all", "NoRecord", "A").await?;
    assert!(!dir.exists());
    node.stop().await?;
    fs::create_dir_all(dir.join("upper/deep"))?;
    repaired(&node, "all", "NoRecord", "A").await?;
    node.serve().await?;
    runs(&node, &kept).await?;
    node.finish().await
}

/// Unpacked layers that are gone are unpacked again from the blobs; a container that was made can still start.
#[tokio::test(flavor = "multi_thread")]
async fn drift_27_layer_directory_gone() -> Result<()> {
    let mut node = Node::start().await?;
    node.busybox().await?;
    let pod = pods::host_network(node.pod("layers"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let id = node.cri.create(&sandbox, &pod, &shell("c", "exit 3")).await?;
    node.stop().await?;
    for layer in layers(&node)? {
        fs::remove_dir_all(layer)?;
    }
    repaired(&node, "layers", "NotUnpacked", "A").await?;
    node.serve().await?;
    node.cri.start(&id).await?;
    assert_eq!(node.cri.exited(&id).await?.exit_code, 3);
    node.finish().await
}

/// After an unclean boot layers are told as not verified yet; damage is found before the first use and made again from
/// the blob. Damage without a boot is found by the deep check.
#[tokio::test(flavor = "multi_thread")]
async fn drift_28_layer_damaged() -> Result<()> {
    let mut node = Node::start().await?;
    node.busybox().await?;
    let mut files = layers(&node)?.into_iter().map(|layer| layer.join("fs/etc/passwd"));
    // The built-in image has one too.
    let of_busybox = |file: &std::path::PathBuf| fs::read_to_string(file).is_ok_and(|text| !text.contains("/hello"));
    let passwd = files.find(of_busybox).context("a layer with a file")?;
    let whole = fs::read(&passwd)?;
    let cut = || fs::OpenOptions::new().write(true).open(&passwd)?.set_len(1);
    let told = |report: &serde_json::Value| {
        let all = report["findings"].as_array().or_else(|| report.as_array());
        let of = |f: &&serde_json::Value| f["id"] == "layers-unverified" && f["object"] == format!("Image {BUSYBOX}");
        all.and_then(|all| all.iter().find(of).cloned())
    };
    node.kill9().await?;
    cut()?;
    let mark = node.root().join("layers/mark.json");
    let mut boot: serde_json::Value = serde_json::from_slice(&fs::read(&mark)?)?;
    boot["boot"] = "another".into();
    fs::write(&mark, boot.to_string())?;
    node.serve().await?;
    let (code, plan) = crate::dry(&node).await?;
    let note = told(&plan).with_context(|| format!("{plan:#}"))?;
    ensure!(
        code == 0 && note["severity"] == "note" && note["since"].is_number(),
        "{code} {note:#}"
    );
    assert_eq!(note["repair"], "reconcile images check --deep --repair");
    let (_, findings) = crate::json(&node, &["doctor"]).await?;
    told(&findings).context("the doctor's")?;
    assert_eq!(node.inside(BUSYBOX, "grep -c root /etc/passwd").await?, ["1"]);
    assert_eq!(fs::read(&passwd)?, whole);
    let (_, plan) = crate::dry(&node).await?;
    ensure!(told(&plan).is_none(), "{plan:#}");

    cut()?;
    let check = node.reconcile(&["images", "check", "--deep"]).await?;
    assert_eq!(check.status.code(), Some(20), "{}", e2e::node::shown(&check));
    node.ok(&["images", "check", "--deep", "--repair"]).await?;
    assert_eq!(fs::read(&passwd)?, whole);
    node.finish().await
}

/// A blob that is gone or cut short is fetched again from where it came.
#[tokio::test(flavor = "multi_thread")]
async fn drift_29_blob_gone_or_short() -> Result<()> {
    let hub = Hub::start().await?;
    let mut node = Node::start().await?;
    let image = Image::busybox(BUSYBOX)?;
    hub.push(&image, "busybox:1", &[])?;
    node.cri.pull(&hub.name("busybox:1")).await?;
    node.stop().await?;
    let own = |node: &Node| -> Result<PathBuf> {
        let all = blobs(node)?;
        let newest = all
            .into_iter()
            .max_by_key(|path| fs::metadata(path).and_then(|m| m.modified()).ok());
        newest.context("a blob")
    };
    let sizes = |node: &Node| -> Result<Vec<(PathBuf, u64)>> {
        let mut all: Vec<_> = blobs(node)?
            .into_iter()
            .map(|p| (p.clone(), fs::metadata(&p).map_or(0, |m| m.len())))
            .collect();
        all.sort();
        Ok(all)
    };
    let before = sizes(&node)?;
    let victim = before.iter().max_by_key(|(_, size)| *size).context("a blob")?.0.clone();
    own(&node)?;
    for short in [false, true] {
        match short {
            false => fs::remove_file(&victim)?,
            true => fs::OpenOptions::new().write(true).open(&victim)?.set_len(100)?,
        }
        repaired(&node, "blobs", "BlobsMissing", "A")
            .await
            .with_context(|| format!("short: {short}"))?;
        ensure!(sizes(&node)? == before, "{:?}", sizes(&node)?);
    }
    node.finish().await
}

/// The image that is always there is made again from the program.
#[tokio::test(flavor = "multi_thread")]
async fn drift_30_builtin_image_gone() -> Result<()> {
    let mut node = Node::start().await?;
    node.stop().await?;
    for path in blobs(&node)?.into_iter().chain(layers(&node)?) {
        match path.is_dir() {
            true => fs::remove_dir_all(path)?,
            false => fs::remove_file(path)?,
        }
    }
    for args in [&["--once", "--dry-run"][..], &["--once"]] {
        let (code, report) = crate::json(&node, args).await?;
        ensure!(
            code == 10 && report["done"].to_string().contains(HELLO),
            "{args:?}: {code} {report:#}"
        );
    }
    quiet(&node).await?;
    node.serve().await?;
    let pod = pods::host_network(node.pod("again"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let config = container("c", HELLO, &["/hello", "exit", "4"]);
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    assert_eq!(node.cri.exited(&id).await?.exit_code, 4);
    node.finish().await
}
