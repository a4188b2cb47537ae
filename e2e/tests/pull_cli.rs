//! Registries from the command line and from YAML: policies, failures that show, and everything `images` can do.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::eventually;
use e2e::hub::Hub;
use e2e::images::{Compression, Image, Layer};
use e2e::node::{Node, shown};
use serde_json::Value;

fn marked(mark: &str) -> Result<Image> {
    let mut image = Image::busybox("pushed")?;
    let layer = Layer::new(Compression::Gzip).file("mark", 0o644, format!("{mark}\n"));
    image.layers.push(layer);
    Ok(image)
}

fn pod(name: &str, image: &str, policy: &str) -> String {
    let policy = match policy {
        "" => String::new(),
        policy => format!("imagePullPolicy: {policy}, "),
    };
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  hostNetwork: true\n  restartPolicy: Never\n  \
         containers:\n  - {{name: a, image: '{image}', {policy}command: [/bin/cat, /mark]}}\n"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_pull_by_policy() -> Result<()> {
    let hub = Hub::start().await?;
    let node = Node::start().await?;
    let run = async |name: &str, image: &str, policy: &str| -> Result<std::process::Output> {
        let file = node.file(&format!("{name}.yaml"), pod(name, image, policy))?;
        node.reconcile(&["run", &file]).await
    };
    let said = |out: &std::process::Output, word: &str| -> Result<()> {
        ensure!(
            out.status.success() && shown(out).contains(word),
            "no {word}: {}",
            shown(out)
        );
        Ok(())
    };
    let one = hub.push(&marked("first")?, "policy:1", &[])?;
    let latest = hub.push(&marked("first")?, "policy:latest", &[])?;
    said(&run("absent", &one, "").await?, "first")?;
    said(&run("latest", &latest, "").await?, "first")?;
    for tag in ["policy:1", "policy:latest"] {
        hub.push(&marked("second")?, tag, &[])?;
    }
    said(&run("present", &one, "").await?, "first")?;
    said(&run("never", &one, "Never").await?, "first")?;
    said(&run("again", &latest, "").await?, "second")?;
    said(&run("always", &one, "Always").await?, "second")?;
    let out = run("without", &hub.name("other:1"), "Never").await?;
    ensure!(
        !out.status.success() && shown(&out).contains("ErrImageNeverPull"),
        "{}",
        shown(&out)
    );
    let out = run("nothing", &hub.name("nothing:1"), "").await?;
    ensure!(
        !out.status.success() && shown(&out).contains("nothing:1"),
        "{}",
        shown(&out)
    );
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pull_that_fails_shows_and_backs_off() -> Result<()> {
    let hub = Hub::start().await?;
    let node = Node::start().await?;
    let file = node.file("late.yaml", pod("late", &hub.name("late:1"), ""))?;
    node.ok(&["apply", "-f", &file]).await?;
    eventually(Duration::from_secs(20), async || {
        let text = node.ok(&["describe", "pod", "late"]).await?;
        ensure!(text.contains("ImagePullBackOff") && text.contains("late:1"), "{text}");
        Ok(())
    })
    .await?;
    let list = node.ok(&["get", "pods"]).await?;
    assert!(list.contains("ImagePullBackOff"), "{list}");
    hub.push(&marked("late")?, "late:1", &[])?;
    eventually(Duration::from_secs(40), async || {
        let list = node.ok(&["get", "pods"]).await?;
        ensure!(list.contains("Succeeded"), "{list}");
        Ok(())
    })
    .await?;
    node.ok(&["delete", "pod", "late"]).await?;
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn inspect_tag_push_export_mount_usage_prune() -> Result<()> {
    let hub = Hub::start().await?;
    let node = Node::start().await?;
    let name = hub.push(&marked("tools")?, "tools:1", &[])?;
    node.cri.pull(&name).await?;
    let id = node.cri.image(&name).await?.context("pulled")?.id;

    let seen: Value = serde_json::from_str(&node.ok(&["images", "inspect", &name]).await?)?;
    assert_eq!(
        (&seen[0]["id"], &seen[0]["repoTags"][0]),
        (&id.as_str().into(), &name.as_str().into())
    );
    assert_eq!(
        node.ok(&["images", "inspect", "--layers", &name])
            .await?
            .lines()
            .count(),
        3
    );

    let copy = hub.name("copy:2");
    node.ok(&["images", "tag", &name, &copy]).await?;
    let digest = node.ok(&["images", "push", "-q", &copy]).await?;
    assert_eq!(digest.trim(), hub.digest("copy:2")?);
    let image = node.cri.image(&id).await?.context("by id")?;
    assert_eq!(image.repo_tags, [copy.clone(), name.clone()]);

    let archive = node.path("out.tar").display().to_string();
    node.ok(&["images", "export", "-o", &archive, &name]).await?;
    for transport in ["oci-archive", "docker-archive"] {
        hub.copy(
            &format!("{transport}:{archive}"),
            &format!("exported/{transport}:1"),
            &[],
        )?;
    }

    let mounted = node.ok(&["images", "mount", &name]).await?;
    let mark = std::path::Path::new(mounted.trim()).join("mark");
    assert_eq!(fs::read_to_string(&mark)?, "tools\n");
    assert!(fs::write(&mark, "x").is_err(), "it can be written");
    node.ok(&["images", "umount", &name]).await?;
    assert!(!mark.exists());

    let usage: Value = serde_json::from_str(&node.ok(&["images", "usage", "-o", "json"]).await?)?;
    let layers = usage["layers"].as_array().context("layers")?;
    assert!(
        layers.iter().any(|layer| layer["images"][0] == copy.as_str()),
        "{usage:#}"
    );
    node.ok(&["images", "usage"]).await?;
    node.ok(&["snapshots", "usage", "-o", "json"]).await?;

    node.ok(&["images", "prune", "--yes"]).await?;
    assert!(node.cri.image(&id).await?.is_some(), "it has tags");
    node.ok(&["images", "prune", "--all", "--yes"]).await?;
    assert!(node.cri.image(&id).await?.is_none());
    // What nobody reaches goes, behind.
    eventually(Duration::from_secs(10), async || {
        let left = fs::read_dir(node.root().join("layers"))?
            .flatten()
            .filter(|e| e.path().is_dir())
            .count();
        ensure!(left == 1, "{left} layers, the built-in image has one");
        Ok(())
    })
    .await?;
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_tag_removed_takes_the_name_by_digest_with_it() -> Result<()> {
    let hub = Hub::start().await?;
    let node = Node::start().await?;
    let name = hub.push(&marked("named")?, "named:1", &[])?;
    node.cri.pull(&name).await?;
    let image = node.cri.image(&name).await?.context("pulled")?;
    assert_eq!(image.repo_digests.len(), 1);
    let other = hub.name("named:2");
    node.ok(&["images", "tag", &name, &other]).await?;
    node.ok(&["images", "rm", &name]).await?;
    let left = node.cri.image(&image.id).await?.context("it has a tag")?;
    assert_eq!(
        (&left.repo_tags, &left.repo_digests),
        (&vec![other.clone()], &image.repo_digests)
    );
    let said = node.ok(&["images", "rm", &other]).await?;
    assert!(said.contains(&image.repo_digests[0]), "{said}");
    assert!(node.cri.image(&image.id).await?.is_none());
    node.finish().await
}
