//! Images: archives of every kind come in, layers stack right, hostile ones stay inside, removal is quiet.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use e2e::images::{Compression, Image, Layer, real};
use e2e::nasty::{self, Fate};
use e2e::node::{Node, shown};
use e2e::pods::{self, BUSYBOX, shell};
use e2e::v1::*;

#[tokio::test(flavor = "multi_thread")]
async fn archives_of_every_kind_and_compression() -> Result<()> {
    let node = Node::start().await?;
    for (n, compression) in [Compression::Plain, Compression::Gzip, Compression::Zstd]
        .into_iter()
        .enumerate()
    {
        for kind in ["oci", "docker"] {
            let name = format!("localhost/kinds:{kind}{n}");
            let mut image = Image::busybox(&name)?;
            image
                .layers
                .push(Layer::new(compression).file("marker", 0o644, format!("{kind} {compression:?}\n")));
            node.import(if kind == "oci" { image.oci() } else { image.docker() })
                .await?;
            let listed = node.cri.image(&name).await?.context("imported, yet unknown")?;
            assert!(
                listed.id.starts_with("sha256:") && listed.size > 0 && listed.repo_tags.contains(&name),
                "{listed:?}"
            );
            let by_id = node.cri.image(&listed.id).await?.context("by its id")?;
            assert_eq!(by_id.id, listed.id);
            let by_short_id = node
                .cri
                .image(&listed.id["sha256:".len()..][..13])
                .await?
                .context("by a short id")?;
            assert_eq!(by_short_id.id, listed.id);
            assert_eq!(
                node.inside(&name, "cat /marker").await?,
                [format!("{kind} {compression:?}")]
            );
        }
    }
    let hello = node.cri.image(pods::HELLO).await?.context("the built-in image")?;
    assert!(hello.size > 0, "{hello:?}");
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn whiteouts_opaque_directories_links_and_owners() -> Result<()> {
    let node = Node::start().await?;
    let mut image = Image::busybox("localhost/stack:1")?;
    let plain = || Layer::new(Compression::Plain);
    let first = plain()
        .dir("d", 0o750)
        .file("d/removed", 0o644, "1")
        .file("d/kept", 0o600, "1")
        .owned_by(1001)
        .dir("o", 0o755)
        .file("o/hidden", 0o644, "1")
        .dir("r", 0o755)
        .file("r/hidden", 0o644, "1")
        .file("becomes-dir", 0o644, "1");
    let second = plain()
        .remove("d/removed")
        .opaque("o")
        .file("o/shown", 0o644, "2")
        .remove("r")
        .dir("r", 0o755)
        .file("r/shown", 0o644, "2")
        .file("orphan/child", 0o644, "a parent without an entry")
        .hardlink("d/hard", "d/kept")
        .symlink("absolute", "/d/kept")
        .fifo("pipe")
        .dir("becomes-dir", 0o755)
        .file("becomes-dir/file", 0o4755, "suid");
    image.layers.extend([first, second]);
    node.import(image.oci()).await?;
    let script = "ls /d /o /r /orphan | tr '\\n' ' '; echo; cat /d/hard; echo; cat /absolute; echo; \
                  stat -c '%a %u' /d /d/kept /becomes-dir/file; test -p /pipe && echo pipe; \
                  find / -xdev -name '.wh.*' | wc -l";
    let texts = node.inside("localhost/stack:1", script).await?;
    let expected = ["/d: hard kept  /o: shown  /orphan: child  /r: shown ", "1", "1"];
    assert_eq!(texts[..3], expected, "{texts:#?}");
    assert_eq!(texts[3..], ["750 0", "600 1001", "4755 0", "pipe", "0"], "{texts:#?}");
    node.finish().await
}

/// Every file below `dir` with its content's length.
fn tree(dir: &Path) -> Result<BTreeMap<String, u64>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(dir)?.flatten() {
        let meta = entry.path().symlink_metadata()?;
        all.insert(
            entry.path().display().to_string(),
            if meta.is_dir() { 0 } else { meta.len() },
        );
        if meta.is_dir() {
            all.extend(tree(&entry.path())?);
        }
    }
    Ok(all)
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_archives_are_refused_or_stay_inside() -> Result<()> {
    let node = Node::start().await?;
    let outside = node.path("victims");
    fs::create_dir(&outside)?;
    fs::write(outside.join("victim"), "unharmed")?;
    let untouched = tree(&outside)?;
    let images = node.cri.list_images().await?.len();
    for (case, archive, fate) in nasty::archives(&outside.display().to_string()) {
        let file = node.file("nasty.tar", &archive)?;
        let out = node.reconcile(&["images", "import", &file]).await?;
        let text = shown(&out);
        assert_eq!(tree(&outside)?, untouched, "{case}: wrote outside\n{text}");
        assert_eq!(fs::read_to_string(outside.join("victim"))?, "unharmed", "{case}");
        if let Fate::Refused(because) = fate {
            assert!(!out.status.success(), "{case} was accepted: {text}");
            assert!(String::from_utf8_lossy(&out.stderr).contains(because), "{case}: {text}");
            assert_eq!(node.cri.list_images().await?.len(), images, "{case}: an image is left");
        } else if out.status.success() {
            node.cri.remove_image("localhost/nasty:1").await?;
        }
        assert!(!text.contains("panicked"), "{case}: {text}");
        node.cri
            .version()
            .await
            .with_context(|| format!("the daemon after {case}"))?;
    }
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_made_by_skopeo_and_umoci() -> Result<()> {
    let node = Node::start().await?;
    let dir = node.path("made");
    fs::create_dir(&dir)?;
    let (docker, oci) = tokio::task::spawn_blocking(move || real(&dir)).await??;
    for archive in [docker, oci] {
        node.ok(&["images", "import", &archive.display().to_string()]).await?;
        let script = "echo $FROM_IMAGE; ls /data /full | tr '\\n' ' '; echo; cat /data/link";
        let texts = node.inside("localhost/real:1", script).await?;
        assert_eq!(texts, ["real", "/data: kept link  /full: new ", "of the second layer"]);
        node.cri.remove_image("localhost/real:1").await?;
        assert!(node.cri.image("localhost/real:1").await?.is_none());
    }
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn import_from_standard_input_list_and_remove() -> Result<()> {
    let node = Node::start().await?;
    let file = node.file("in.tar", Image::busybox(BUSYBOX)?.docker())?;
    let mut command = tokio::process::Command::from(node.command(&["images", "import", "-"])?);
    let out = command.stdin(fs::File::open(&file)?).output().await?;
    ensure!(out.status.success(), "{}", shown(&out));
    let listed = node.ok(&["images", "ls"]).await?;
    assert!(listed.contains("localhost/busybox"), "{listed}");
    let id = node.cri.image(BUSYBOX).await?.context("imported")?.id;
    let removals = (0..5).map(|_| node.cri.remove_image(&id));
    for outcome in futures::future::join_all(removals).await {
        outcome.context("five at once, all succeed")?;
    }
    assert!(node.cri.image(BUSYBOX).await?.is_none());
    node.cri.remove_image(&id).await.context("unknown now")?;
    let info = node
        .cri
        .images
        .clone()
        .image_fs_info(ImageFsInfoRequest {})
        .await?
        .into_inner();
    let store = info.image_filesystems.first().context("an image filesystem")?;
    let mountpoint = &store.fs_id.as_ref().context("its id")?.mountpoint;
    assert!(Path::new(mountpoint).starts_with(node.root()), "{mountpoint}");
    node.finish().await
}

/// A container goes on when its image is removed: what it was made from stays until it is gone.
#[tokio::test(flavor = "multi_thread")]
async fn removing_an_image_in_use_takes_nothing_from_its_containers() -> Result<()> {
    let mut node = Node::start().await?;
    node.busybox().await?;
    let pod = pods::host_network(node.pod("used"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let id = node.cri.launch(&sandbox, &pod, &shell("c", "sleep 1000")).await?;
    node.cri.remove_image(BUSYBOX).await?;
    assert_eq!(node.cri.exec(&id, &["ls", "/bin/busybox"], 5).await?.exit_code, 0);
    node.crash().await?;
    assert_eq!(node.cri.exec(&id, &["ls", "/bin/busybox"], 5).await?.exit_code, 0);
    node.finish().await
}

async fn usage(node: &Node, args: &[&str]) -> Result<serde_json::Value> {
    Ok(serde_json::from_str(
        &node.ok(&[args, &["-o", "json"][..]].concat()).await?,
    )?)
}

/// Whose layers and writable layers are, what they take, in the order that was asked for.
#[tokio::test(flavor = "multi_thread")]
async fn usage_tells_what_is_whose() -> Result<()> {
    let node = Node::start().await?;
    let image = |name: &str, size: usize| -> Result<Image> {
        let mut image = Image::busybox(name)?;
        image
            .layers
            .push(Layer::new(Compression::Gzip).file("own", 0o644, vec![7; size]));
        Ok(image)
    };
    let (large, small) = ("localhost/large:1", "localhost/small:1");
    node.import(image(small, 200 << 10)?.oci()).await?;
    node.import(image(large, 600 << 10)?.oci()).await?;
    let pod = pods::host_network(node.pod("writer"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    for (name, image, blocks) in [("little", small, "100"), ("much", large, "2000")] {
        let count = format!("count={blocks}");
        let command = ["/bin/busybox", "dd", "if=/dev/zero", "of=/written", "bs=1024", &count];
        let config = pods::container(name, image, &command);
        let id = node.cri.launch(&sandbox, &pod, &config).await?;
        node.cri.exited(&id).await?;
    }

    let seen = usage(&node, &["images", "usage"]).await?;
    let layers = seen["layers"].as_array().context("layers")?;
    let sizes: Vec<_> = layers.iter().filter_map(|layer| layer["bytes"].as_u64()).collect();
    assert!(
        sizes.is_sorted_by(|a, b| a >= b) && sizes.len() == layers.len(),
        "{seen:#}"
    );
    let users = |layer: &serde_json::Value| (layer["images"].clone(), layer["containers"].clone());
    let all = |names: [&str; 2]| serde_json::json!(names);
    let (of_pods, of_images) = (all(["writer/little", "writer/much"]), all([large, small]));
    assert!(
        layers
            .iter()
            .any(|layer| users(layer) == (of_images.clone(), of_pods.clone())),
        "{seen:#}"
    );
    for (name, least, container) in [(large, 600 << 10, "writer/much"), (small, 200 << 10, "writer/little")] {
        let mine = serde_json::json!([name]);
        let own = layers.iter().find(|layer| layer["images"] == mine).context(name)?;
        assert_eq!(own["containers"], serde_json::json!([container]), "{seen:#}");
        let image = seen["images"].as_array().context("images")?;
        let image = image.iter().find(|image| image["name"] == name).context(name)?;
        assert_eq!(image["own"]["bytes"], own["bytes"], "{seen:#}");
        assert!(own["bytes"].as_u64() >= Some(least), "{seen:#}");
        assert!(image["shared"]["bytes"].as_u64() > Some(500 << 10), "busybox: {seen:#}");
    }
    let seen = usage(&node, &["images", "usage", "--sort", "name"]).await?;
    let names: Vec<_> = seen["layers"].as_array().context("layers")?.iter().collect();
    assert!(names.is_sorted_by_key(|layer| layer["chainId"].to_string()), "{seen:#}");

    let seen = usage(&node, &["snapshots", "usage"]).await?;
    let found: Vec<_> = seen.as_array().context("a list")?.iter().collect();
    let names: Vec<_> = found.iter().map(|s| &s["container"]).collect();
    assert_eq!(names, ["writer/much", "writer/little"], "{seen:#}");
    for (snapshot, least) in found.iter().zip([2000 << 10, 100 << 10]) {
        assert!(snapshot["bytes"].as_u64() >= Some(least), "{seen:#}");
        let path = snapshot["path"].as_str().context("path")?;
        let found = std::process::Command::new("find").arg(path).output()?.stdout;
        let inodes = found.iter().filter(|byte| **byte == b'\n').count();
        assert_eq!(
            (&snapshot["inodes"], &snapshot["state"]),
            (&inodes.into(), &"Exited".into()),
            "{seen:#}"
        );
    }
    let table = node.ok(&["snapshots", "usage", "--sort", "name"]).await?;
    let firsts: Vec<_> = table
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert_eq!(firsts, ["CONTAINER", "writer/little", "writer/much"], "{table}");
    node.finish().await
}
