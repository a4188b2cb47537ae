//! Pulls at the same time: what they share is fetched once, and nobody waits for more of another's pull than that.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use e2e::eventually;
use e2e::images::Layer;
use e2e::node::Node;
use e2e::registry::{Fault, Server};
use e2e::served::{Served, layer, serve};
use futures::future::Either;

const SECOND: Duration = Duration::from_secs(1);

fn gets(server: &Server, digest: &str) -> usize {
    let seen = server.seen();
    let of = seen
        .iter()
        .filter(|seen| seen.method == "GET" && seen.path.contains(digest));
    of.count()
}

/// Each of these is being sent.
async fn begun(server: &Server, digests: &[&String]) -> Result<()> {
    eventually(20 * SECOND, async || {
        let seen = server.seen();
        let begun = |digest: &&String| seen.iter().any(|seen| seen.path.contains(*digest) && seen.sent > 0);
        ensure!(digests.iter().all(begun), "not all are asked for");
        Ok(())
    })
    .await
}

/// Pulls `stuck`, whose layers of its own never end; once `wanted` are on their way pulls the others, which must end
/// though it does not.
async fn beside(server: &Server, node: &Node, stuck: &Served, wanted: &[&String], others: &[&Served]) -> Result<()> {
    let stalled = node.cri.pull(&stuck.name);
    tokio::pin!(stalled);
    let rest = async {
        begun(server, wanted).await?;
        for pulled in futures::future::join_all(others.iter().map(|other| node.cri.pull(&other.name))).await {
            pulled?;
        }
        anyhow::Ok(())
    };
    tokio::select! {
        ended = &mut stalled => bail!("it ended: {ended:?}"),
        done = tokio::time::timeout(40 * SECOND, rest) => done.context("they wait for more than what they share")??,
    }
    for other in others {
        ensure!(node.cri.image(&other.name).await?.is_some());
    }
    Ok(())
}

fn slow(server: &Server, digest: &str) {
    server.fault(digest, Fault::Trickle(64 << 10, Duration::from_millis(60)), 1);
}

fn stuck(server: &Server, image: &Served, own: std::ops::Range<usize>) {
    for (digest, size) in &image.blobs[own] {
        server.fault(digest, Fault::Stall(size / 2), 9);
    }
}

/// The shared layer is the lowest of both: it is unpacked once, and has its name while the rest of the first image is
/// still under way. In another place of an image it is unpacked again, from the one blob.
#[tokio::test(flavor = "multi_thread")]
async fn a_shared_blob_is_waited_for_alone() -> Result<()> {
    let server = Server::start().await?;
    let node = Node::start().await?;
    let base = layer(60, 1 << 20);
    let own = |seed| layer(seed, 256 << 10);
    let first = serve(&server, "first", &[base.clone(), own(61)]);
    let above = serve(&server, "above", &[base.clone(), own(62)]);
    let below = serve(&server, "below", &[own(63), base.clone(), own(64)]);
    let shared = first.blobs[0].0.clone();
    slow(&server, &shared);
    stuck(&server, &first, 1..2);
    beside(&server, &node, &first, &[&shared], &[&above, &below]).await?;
    ensure!(
        gets(&server, &shared) == 1,
        "{} requests for the shared blob",
        gets(&server, &shared)
    );
    // The first one ended with its client; what it had is used.
    server.heal();
    node.cri.pull(&first.name).await?;
    ensure!(gets(&server, &shared) == 1);
    node.ok(&["images", "check", "--deep"]).await?;
    node.finish().await
}

/// More stuck layers than an image unpacks at a time: the shared one has not begun, so the second image begins it.
#[tokio::test(flavor = "multi_thread")]
async fn what_another_has_not_begun_is_not_waited_for() -> Result<()> {
    let server = Server::start().await?;
    let node = Node::start().await?;
    let mut layers: Vec<Layer> = vec![layer(70, 64 << 10)];
    layers.extend((71..76).map(|seed| layer(seed, 1 << 20)));
    let first = serve(&server, "first", &layers);
    let other = serve(&server, "other", &[layers[0].clone(), layer(76, 64 << 10)]);
    stuck(&server, &first, 1..6);
    // The largest come first; which of equals they are is nobody's promise.
    let rest = async {
        eventually(20 * SECOND, async || {
            let begun = first.blobs[1..].iter().filter(|(digest, _)| gets(&server, digest) > 0);
            ensure!(begun.count() >= 1, "not begun");
            Ok(())
        })
        .await?;
        node.cri.pull(&other.name).await?;
        anyhow::Ok(())
    };
    tokio::select! {
        ended = node.cri.pull(&first.name) => bail!("it ended: {ended:?}"),
        done = tokio::time::timeout(40 * SECOND, rest) => done.context("it waits for the first image's turn")??,
    }
    ensure!(gets(&server, &first.blobs[0].0) == 1);
    node.finish().await
}

/// The one that fetches leaves: the one that waits takes over where it stopped.
#[tokio::test(flavor = "multi_thread")]
async fn who_waits_takes_over() -> Result<()> {
    let server = Server::start().await?;
    let node = Node::start().await?;
    let base = layer(80, 2 << 20);
    let first = serve(&server, "first", &[base.clone(), layer(81, 64 << 10)]);
    let second = serve(&server, "second", &[layer(82, 64 << 10), base]);
    let (shared, size) = first.blobs[0].clone();
    server.fault(&shared, Fault::Stall(size / 2), 1);
    let own = [&second.blobs[0].0];
    let waits = Box::pin(async {
        begun(&server, &[&shared]).await?;
        anyhow::Ok(node.cri.pull(&second.name).await?)
    });
    let waits = tokio::select! {
        ended = node.cri.pull(&first.name) => bail!("it ended: {ended:?}"),
        // The second has come as far as the blob of its own, the smaller one: it has reached for the shared one.
        both = futures::future::select(waits, Box::pin(begun(&server, &own))) => match both {
            Either::Left((ended, _)) => bail!("it ended: {ended:?}"),
            Either::Right((begun, waits)) => {
                begun?;
                waits
            }
        },
    };
    ensure!(gets(&server, &shared) == 1);
    waits.await?;
    let seen = server.seen();
    let again = seen
        .iter()
        .filter(|seen| seen.path.contains(&shared))
        .nth(1)
        .context("asked again")?;
    ensure!(again.header("range").is_some(), "from its beginning: {again:?}");
    node.finish().await
}
