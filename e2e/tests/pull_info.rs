//! What the CRI tells of pulled images and of the disk that they and their containers take.

use anyhow::{Context, Result, ensure};
use e2e::images::Image;
use e2e::node::Node;
use e2e::pods;
use e2e::registry::Server;
use e2e::served::serve;
use e2e::v1::*;
use serde_json::Value;

const WRITTEN: u64 = 8 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn verbose_status_tells_how_an_image_was_made() -> Result<()> {
    let server = Server::start().await?;
    let mut node = Node::start().await?;
    let image = serve(&server, "made", &Image::busybox("unused")?.layers);
    node.cri.pull(&image.name).await?;
    for _ in 0..2 {
        let request = ImageStatusRequest {
            image: Some(ImageSpec {
                image: image.name.clone(),
                ..ImageSpec::default()
            }),
            verbose: true,
        };
        let answer = node.cri.images.clone().image_status(request).await?.into_inner();
        let seen = answer.image.context("pulled")?;
        let spec = seen.spec.context("its spec")?;
        ensure!(
            spec.image == seen.id && spec.annotations["org.example.path"] == "made",
            "{spec:?}"
        );
        ensure!(seen.uid.map(|uid| uid.value) == Some(7), "{:?}", seen.uid);
        let info: Value = serde_json::from_str(&answer.info["info"])?;
        let made = &info["imageSpec"];
        ensure!(
            made["created"] == "2024-05-06T07:08:09Z" && made["author"] == "the tests",
            "{info:#}"
        );
        ensure!(made["os"] == "linux" && made["config"]["User"] == "7:8", "{info:#}");
        let layers = made["rootfs"]["diff_ids"].as_array().context("diff ids")?.len();
        ensure!(
            layers == image.blobs.len() && made["history"].as_array().map(Vec::len) == Some(layers),
            "{info:#}"
        );
        ensure!(made["history"][0]["created_by"] == "put into made", "{info:#}");
        // Another daemon reads it from the store.
        node.crash().await?;
    }
    node.finish().await
}

async fn used(node: &Node) -> Result<(u64, u64)> {
    let info = node
        .cri
        .images
        .clone()
        .image_fs_info(ImageFsInfoRequest {})
        .await?
        .into_inner();
    let bytes = |list: &[FilesystemUsage]| list.first().and_then(|one| Some(one.used_bytes?.value));
    let (images, containers) = (&info.image_filesystems, &info.container_filesystems);
    // One disk: kubelet takes two mount points for two.
    ensure!(images[0].fs_id == containers[0].fs_id, "{info:?}");
    ensure!(images[0].timestamp > 0 && containers[0].timestamp > 0, "{info:?}");
    Ok((
        bytes(images).context("images")?,
        bytes(containers).context("containers")?,
    ))
}

/// Contract 7.10: what containers write counts, whether they run or not.
#[tokio::test(flavor = "multi_thread")]
async fn what_containers_write_is_part_of_the_disk() -> Result<()> {
    let mut node = Node::start().await?;
    node.busybox().await?;
    let pod = pods::host_network(node.pod("writes"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let script = format!("dd if=/dev/zero of=/written bs=65536 count={}", WRITTEN / 65536);
    let config = pods::container("c", pods::BUSYBOX, &["/bin/sh", "-c", &script]);
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    node.cri.exited(&id).await?;
    let (images, containers) = used(&node).await?;
    ensure!(
        containers >= WRITTEN && images > containers,
        "{images} and {containers} bytes"
    );
    node.cri.stop_sandbox(&sandbox).await?;
    node.cri.remove_sandbox(&sandbox).await?;
    node.crash().await?;
    let (images, containers) = used(&node).await?;
    ensure!(
        containers < WRITTEN && images > containers,
        "{images} and {containers} bytes"
    );
    node.finish().await
}
