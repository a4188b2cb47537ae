//! Images from a real registry: every form of manifest comes in, names merge and move, what is missing comes back.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::hub::Hub;
use e2e::images::{Compression, Image, Layer};
use e2e::node::{Node, shown};
use e2e::v1::*;
use serde_json::json;
use tonic::Code;

fn marked(mark: &str, compression: Compression) -> Result<Image> {
    let mut image = Image::busybox("pushed")?;
    image
        .layers
        .push(Layer::new(compression).file("mark", 0o644, format!("{mark}\n")));
    Ok(image)
}

#[tokio::test(flavor = "multi_thread")]
async fn manifests_of_every_form() -> Result<()> {
    let hub = Hub::start().await?;
    let node = Node::start().await?;
    for (n, compression) in [Compression::Plain, Compression::Gzip, Compression::Zstd]
        .into_iter()
        .enumerate()
    {
        let name = hub.push(
            &marked(&format!("oci {n}"), compression)?,
            &format!("forms/oci:{n}"),
            &[],
        )?;
        let id = node.cri.pull(&name).await?;
        let image = node.cri.image(&name).await?.context("pulled, yet unknown")?;
        assert_eq!(image.id, id);
        assert!(image.size > 0 && image.repo_tags == [name.clone()], "{image:?}");
        let digest = format!("{}@{}", hub.name("forms/oci"), hub.digest(&format!("forms/oci:{n}"))?);
        assert_eq!(image.repo_digests, [digest]);
        assert_eq!(node.inside(&name, "cat /mark").await?, [format!("oci {n}")]);
    }
    let docker = hub.push(
        &marked("docker", Compression::Gzip)?,
        "forms/docker:1",
        &["--format", "v2s2"],
    )?;
    node.cri.pull(&docker).await?;
    assert_eq!(node.inside(&docker, "cat /mark").await?, ["docker"]);

    let mut tall = Image::busybox("pushed")?;
    for n in 0..10 {
        tall.layers.push(
            Layer::new(Compression::Gzip)
                .file(&format!("layer{n}"), 0o644, format!("{n}"))
                .remove("layer0"),
        );
    }
    let tall = hub.push(&tall, "forms/tall:1", &[])?;
    node.cri.pull(&tall).await?;
    assert_eq!(node.inside(&tall, "ls / | grep -c layer").await?, ["9"]);
    node.finish().await
}

/// The platform of this machine is chosen out of an index or a docker list, and the index's digest names the image.
#[tokio::test(flavor = "multi_thread")]
async fn indexes_choose_the_platform() -> Result<()> {
    let hub = Hub::start().await?;
    let node = Node::start().await?;
    let ours = marked("ours", Compression::Gzip)?;
    hub.push(&ours, "multi:ours", &["--format", "v2s2"])?;
    hub.push(
        &marked("theirs", Compression::Gzip)?,
        "multi:theirs",
        &["--format", "v2s2"],
    )?;
    let arch = if cfg!(target_arch = "aarch64") {
        "arm64"
    } else {
        "amd64"
    };
    let entry = |tag: &str, architecture: &str, os: &str| -> Result<serde_json::Value> {
        let digest = hub.digest(tag)?;
        let size = fs::metadata(find(&hub, &digest)?)?.len();
        Ok(
            json!({ "mediaType": "application/vnd.docker.distribution.manifest.v2+json", "digest": digest,
            "size": size, "platform": { "architecture": architecture, "os": os } }),
        )
    };
    let entries = vec![
        entry("multi:theirs", "unknown", "unknown")?,
        entry("multi:theirs", "riscv64", "linux")?,
        entry("multi:ours", arch, "linux")?,
    ];
    for (tag, kind) in [
        ("list", "application/vnd.docker.distribution.manifest.list.v2+json"),
        ("index", "application/vnd.oci.image.index.v1+json"),
    ] {
        let document = json!({ "schemaVersion": 2, "mediaType": kind, "manifests": entries });
        hub.put_manifest("multi", tag, kind, &document)?;
        let name = hub.name(&format!("multi:{tag}"));
        node.cri.pull(&name).await.with_context(|| tag.to_owned())?;
        let image = node.cri.image(&name).await?.context("pulled")?;
        let digest = format!("{}@{}", hub.name("multi"), hub.digest(&format!("multi:{tag}"))?);
        assert!(image.repo_digests.contains(&digest), "{digest} of {image:?}");
        assert_eq!(node.inside(&name, "cat /mark").await?, ["ours"]);
    }
    let kind = "application/vnd.oci.image.index.v1+json";
    let document = json!({ "schemaVersion": 2, "mediaType": kind, "manifests": entries[..2] });
    hub.put_manifest("multi", "foreign", kind, &document)?;
    let error = node.cri.pull(&hub.name("multi:foreign")).await.unwrap_err();
    assert!(
        error.code() == Code::NotFound && error.message().contains("riscv64"),
        "{error:?}"
    );
    node.finish().await
}

fn find(hub: &Hub, digest: &str) -> Result<std::path::PathBuf> {
    let hex = digest.strip_prefix("sha256:").context("a digest")?;
    Ok(hub
        .data()
        .join("docker/registry/v2/blobs/sha256")
        .join(&hex[..2])
        .join(hex)
        .join("data"))
}

/// Contract 7.2, 7.3 and 7.8: one image has all its names, a tag may move, removal by anything drops all.
#[tokio::test(flavor = "multi_thread")]
async fn names_merge_move_and_go() -> Result<()> {
    let hub = Hub::start().await?;
    let mut node = Node::start().await?;
    let first = marked("first", Compression::Gzip)?;
    let one = hub.push(&first, "names/a:1", &[])?;
    let two = hub.push(&first, "names/b:2", &[])?;
    let id = node.cri.pull(&one).await?;
    assert_eq!(node.cri.pull(&two).await?, id);
    let image = node.cri.image(&id).await?.context("by id")?;
    assert_eq!(image.repo_tags, [one.clone(), two.clone()]);
    assert_eq!(image.repo_digests.len(), 2, "{image:?}");

    // By digest alone: no tag, exactly that digest.
    let other = marked("other", Compression::Zstd)?;
    hub.push(&other, "names/c:1", &[])?;
    let by_digest = format!("{}@{}", hub.name("names/c"), hub.digest("names/c:1")?);
    let other_id = node.cri.pull(&by_digest).await?;
    let image = node.cri.image(&by_digest).await?.context("by digest")?;
    assert_eq!(
        (image.repo_tags.len(), &image.repo_digests[..]),
        (0, &[by_digest.clone()][..])
    );

    // The tag moves; what it meant stays, without the tag.
    hub.push(&other, "names/a:1", &[])?;
    assert_eq!(node.cri.pull(&one).await?, other_id);
    let image = node.cri.image(&id).await?.context("the first image is still here")?;
    assert_eq!(image.repo_tags, std::slice::from_ref(&two));
    assert_eq!(image.repo_digests.len(), 2, "{image:?}");
    assert_eq!(node.cri.image(&one).await?.context("the tag")?.id, other_id);
    node.crash().await?;
    assert_eq!(node.cri.image(&one).await?.context("the tag")?.id, other_id);

    node.cri.remove_image(&one).await?;
    for name in [&one, &by_digest, &other_id] {
        assert!(node.cri.image(name).await?.is_none(), "{name} is left");
    }
    node.cri.remove_image(&id).await?;
    assert!(node.cri.image(&two).await?.is_none());
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_say_what_the_kubelet_understands() -> Result<()> {
    let hub = Hub::start().await?;
    let node = Node::start().await?;
    let pull = async |name: &str| node.cri.pull_with(Duration::from_secs(30), name, None).await;
    let error = pull(&hub.name("no/such:1")).await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound, "{error:?}");
    assert!(error.message().contains("no/such:1"), "{error:?}");
    let error = pull("127.0.0.1:1/unreachable:1").await.unwrap_err();
    assert_eq!(error.code(), Code::Unknown, "{error:?}");
    assert!(error.message().starts_with("RegistryUnavailable: "), "{error:?}");
    let error = pull("Not A Name").await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument, "{error:?}");
    let images = node.cri.list_images().await?;
    assert_eq!(images.len(), 1, "only the built-in one: {images:?}");
    assert_eq!(pull("localhost/hello").await?, images[0].id, "it has no registry");
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_line_pulls() -> Result<()> {
    let hub = Hub::start().await?;
    let node = Node::start().await?;
    let name = hub.push(&marked("cli", Compression::Gzip)?, "cli:1", &[])?;
    let out = node.reconcile(&["images", "pull", &name]).await?;
    ensure!(out.status.success(), "{}", shown(&out));
    let id = node.cri.image(&name).await?.context("pulled")?.id;
    assert_eq!(String::from_utf8(out.stdout.clone())?.trim(), id);
    let said = String::from_utf8(out.stderr.clone())?;
    assert!(said.contains("fetched") && said.contains("digest: sha256:"), "{said}");
    let out = node.reconcile(&["images", "pull", "-q", &name]).await?;
    assert_eq!(String::from_utf8(out.stdout.clone())?.trim(), id);
    assert!(out.stderr.is_empty(), "{}", shown(&out));
    assert!(node.ok(&["images", "ls", "-q"]).await?.lines().any(|line| line == id));
    let out = node.reconcile(&["images", "pull", &hub.name("no/such:1")]).await?;
    assert!(
        !out.status.success() && shown(&out).contains("no/such"),
        "{}",
        shown(&out)
    );
    node.finish().await
}

/// A blob, a layer or both are gone: the image's own controller brings them back, unasked.
#[tokio::test(flavor = "multi_thread")]
async fn what_goes_missing_comes_back() -> Result<()> {
    let hub = Hub::start().await?;
    let mut node = Node::start().await?;
    let name = hub.push(&marked("back", Compression::Gzip)?, "back:1", &[])?;
    node.cri.pull(&name).await?;
    node.stop().await?;
    for dir in ["content/blobs/sha256", "layers"] {
        for entry in fs::read_dir(node.root().join(dir))?.flatten() {
            if entry.path().is_dir() {
                fs::remove_dir_all(entry.path())?;
            } else {
                fs::remove_file(entry.path())?;
            }
        }
    }
    node.serve().await?;
    e2e::eventually(Duration::from_secs(20), async || {
        node.cri.image(&name).await?.context("not there yet")
    })
    .await?;
    assert_eq!(node.inside(&name, "cat /mark").await?, ["back"]);
    let request = ImageFsInfoRequest {};
    let info = node.cri.images.clone().image_fs_info(request).await?.into_inner();
    assert!(!info.image_filesystems.is_empty());
    node.finish().await
}
