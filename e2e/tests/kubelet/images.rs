//! Images as pods ask for them.

use anyhow::{Result, ensure};
use e2e::images::{Compression, Image, busybox_layer};
use e2e::kubelet::{container, merge, shell};
use serde_json::{Value, json};

use crate::Cluster;

/// An image that says who it is by a variable.
fn image(word: &str) -> Result<Image> {
    let config = json!({ "Cmd": ["/bin/sh"], "Env": [format!("WORD={word}")] });
    Ok(Image::new("moving:1", vec![busybox_layer(Compression::Gzip)?], config))
}

fn pod(image: &str, policy: &str) -> Value {
    let script = "echo it is $WORD; trap 'exit 0' TERM; while :; do sleep 0.1; done";
    let mut main = shell("main", script, json!({}));
    merge(&mut main, json!({ "image": image, "imagePullPolicy": policy }));
    json!({ "containers": [main] })
}

/// A tag that moves: who has it keeps it, who asks always gets the new one. What is not there is not there.
pub async fn policies(cluster: Cluster<'_>) -> Result<()> {
    let kubelet = cluster.kubelet;
    let name = "registry.example/moving:1";
    kubelet.apply("never", pod("registry.example/absent:1", "Never"))?;
    kubelet.apply("absent", pod("registry.example/absent:1", "IfNotPresent"))?;
    cluster.hub.push(&image("old")?, "moving:1", &[])?;
    kubelet.apply("first", pod(name, "IfNotPresent"))?;
    cluster
        .wrote(&kubelet.ready("first").await?, "main", "it is old")
        .await?;
    cluster.hub.push(&image("new")?, "moving:1", &[])?;
    kubelet.apply("present", pod(name, "IfNotPresent"))?;
    cluster
        .wrote(&kubelet.ready("present").await?, "main", "it is old")
        .await?;
    kubelet.apply("always", pod(name, "Always"))?;
    cluster
        .wrote(&kubelet.ready("always").await?, "main", "it is new")
        .await?;

    let reasons: [(_, &[&str]); 2] = [
        ("never", &["ErrImageNeverPull"]),
        ("absent", &["ErrImagePull", "ImagePullBackOff"]),
    ];
    for (name, reasons) in reasons {
        kubelet
            .wait("the pull to be refused", async |kubelet| {
                let pod = kubelet.pod(name).await?;
                let reason = &container(&pod, "main")?["state"]["waiting"]["reason"];
                ensure!(reasons.iter().any(|one| reason == one), "{:#}", pod["status"]);
                Ok(())
            })
            .await?;
    }
    Ok(())
}
