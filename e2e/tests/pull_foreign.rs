//! Layers that a registry may not hand out (OCI image-spec, descriptor `urls`; Docker's foreign layers): fetched from
//! where their descriptor says, believed no more than any other, and without a credential.

use std::time::Duration;

use anyhow::{Result, ensure};
use e2e::images::Image;
use e2e::node::Node;
use e2e::registry::{Fault, Gate, Server};
use e2e::served::{Served, layer, serve_as};
use e2e::v1::AuthConfig;
use serde_json::{Value, json};
use tonic::Code;

const SECOND: Duration = Duration::from_secs(1);
const DOCKER: &str = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip";
const OCI: &str = "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip";

/// A registry whose top layer lies elsewhere; the descriptor names these URLs, where `@` stands for the digest.
struct Split {
    registry: Server,
    elsewhere: Server,
    image: Served,
}

async fn split(kind: &str, urls: impl Fn(&Server, &Server, &str) -> Vec<String>) -> Result<Split> {
    let (registry, elsewhere) = (Server::start().await?, Server::start().await?);
    let mut busybox = Image::busybox("unused")?;
    busybox.layers.push(layer(90, 256 << 10));
    let top = busybox.layers.len() - 1;
    let image = serve_as(&registry, "split", &busybox.layers, |i, descriptor: &mut Value| {
        if i == top {
            let digest = descriptor["digest"].as_str().unwrap_or_default().to_owned();
            descriptor["mediaType"] = json!(kind);
            descriptor["urls"] = json!(urls(&registry, &elsewhere, &digest));
        }
    });
    elsewhere.blob("files", &busybox.layers[top].blob().0);
    registry.gate(Gate::basic("hugo", "swordfish-7351"));
    Ok(Split {
        registry,
        elsewhere,
        image,
    })
}

impl Split {
    fn top(&self) -> &str {
        self.image.blobs.last().map_or("", |(digest, _)| digest)
    }

    /// The registry does not have the layer.
    fn withhold(&self) {
        self.registry
            .fault(&format!("GET /v2/split/blobs/{}", self.top()), Fault::Status(404), 99);
    }

    async fn pull(&self, node: &Node) -> Result<String, tonic::Status> {
        let auth = AuthConfig {
            username: "hugo".into(),
            password: "swordfish-7351".into(),
            ..AuthConfig::default()
        };
        node.cri.pull_with(30 * SECOND, &self.image.name, Some(auth)).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn urls_are_asked_after_the_registry_and_without_credentials() -> Result<()> {
    for kind in [DOCKER, OCI] {
        let node = Node::start().await?;
        let split = split(kind, |_, elsewhere, digest| {
            vec![
                format!("ftp://{}/x", elsewhere.host()),
                "file:///etc/passwd".to_owned(),
                format!("http://{}/v2/files/absent", elsewhere.host()),
                format!("http://user:pass@{}/v2/files/blobs/{digest}", elsewhere.host()),
            ]
        })
        .await?;
        split.withhold();
        // Whoever asks for a password gets none.
        split.elsewhere.fault("/v2/files/absent", Fault::Status(401), 1);
        split.pull(&node).await?;
        let asked = split.elsewhere.take_seen();
        let paths: Vec<_> = asked.iter().map(|seen| seen.path.clone()).collect();
        ensure!(
            paths
                == [
                    "/v2/files/absent".to_owned(),
                    format!("/v2/files/blobs/{}", split.top())
                ],
            "{paths:?}"
        );
        ensure!(
            asked.iter().all(|seen| seen.header("authorization").is_none()),
            "{asked:?}"
        );
        ensure!(
            split.registry.seen().iter().any(|seen| seen.path.contains(split.top())),
            "the registry was not asked"
        );
        ensure!(node.inside(&split.image.name, "wc -c </noise90").await? == ["262144"]);
        node.finish().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_has_the_layer_is_enough() -> Result<()> {
    let node = Node::start().await?;
    let split = split(DOCKER, |_, elsewhere, digest| {
        vec![format!("{}/v2/files/blobs/{digest}", elsewhere.base())]
    })
    .await?;
    split.pull(&node).await?;
    ensure!(split.elsewhere.seen().is_empty(), "{:?}", split.elsewhere.seen());
    node.finish().await
}

/// Also not on the registry's own host.
#[tokio::test(flavor = "multi_thread")]
async fn a_url_on_the_registrys_host_gets_no_credential_either() -> Result<()> {
    let node = Node::start().await?;
    let split = split(OCI, |registry, _, digest| {
        vec![format!("{}/v2/files/blobs/{digest}", registry.base())]
    })
    .await?;
    split.withhold();
    let error = split.pull(&node).await.unwrap_err();
    ensure!(
        matches!(error.code(), Code::PermissionDenied | Code::NotFound),
        "{error:?}"
    );
    let seen = split.registry.take_seen();
    let shown: Vec<_> = seen.iter().filter(|seen| seen.path.starts_with("/v2/files/")).collect();
    ensure!(
        !shown.is_empty() && shown.iter().all(|seen| seen.header("authorization").is_none()),
        "{shown:?}"
    );
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_comes_from_a_url_is_verified_and_redirects_have_an_end() -> Result<()> {
    let node = Node::start().await?;
    let split = split(DOCKER, |_, elsewhere, digest| {
        vec![format!("{}/v2/files/blobs/{digest}", elsewhere.base())]
    })
    .await?;
    split.withhold();
    for fault in [
        Fault::Corrupt,
        Fault::Longer(3),
        Fault::Redirect(split.elsewhere.base()),
    ] {
        split.elsewhere.fault("GET", fault.clone(), 99);
        let error = split.pull(&node).await.expect_err(&format!("{fault:?}"));
        ensure!(error.code() != Code::DeadlineExceeded, "{fault:?}: {error:?}");
        ensure!(
            node.cri.image(&split.image.name).await?.is_none(),
            "{fault:?}: it appeared"
        );
        split.elsewhere.heal();
    }
    ensure!(split.elsewhere.take_seen().len() < 40, "redirects without an end");
    split.pull(&node).await?;
    node.ok(&["images", "check", "--deep"]).await?;
    node.finish().await
}
