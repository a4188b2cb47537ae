//! Unpacked images against an independent judge: what umoci makes of the same layers.
//!
//! `UNPACK_SEEDS=200` tries as many fresh seeds; `UNPACK_SEED=7` replays one.

use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use e2e::corpus::{self, tree};
use e2e::node::Node;
use e2e::tools;

/// Seeds that are always tried.
const FIXED: std::ops::Range<u64> = 4..200;

fn seeds() -> Result<Vec<u64>> {
    if let Ok(one) = std::env::var("UNPACK_SEED") {
        return Ok(vec![one.parse().context("UNPACK_SEED")?]);
    }
    let fresh: u64 = std::env::var("UNPACK_SEEDS")
        .map_or(Ok(4), |n| n.parse())
        .context("UNPACK_SEEDS")?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis() as u64;
    Ok(FIXED.chain(now..now + fresh).collect())
}

/// What umoci makes of an image, at `<dir>/tree`.
fn judged(archive: &[u8], dir: &Path) -> Result<()> {
    let layout = dir.join("layout");
    std::fs::create_dir_all(&layout)?;
    let file = dir.join("archive.tar");
    std::fs::write(&file, archive)?;
    tools::check(Command::new("tar").arg("-xf").arg(&file).arg("-C").arg(&layout))?;
    let image = format!("{}:judged", layout.display());
    // Not made by umoci if no layer holds anything.
    let out = dir.join("tree");
    std::fs::create_dir(&out)?;
    tools::check(
        Command::new("umoci")
            .args(["raw", "unpack", "--image", &image])
            .arg(&out),
    )
    .context("Debian package umoci")?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn generated_images_are_what_umoci_makes_of_them() -> Result<()> {
    let node = Node::start().await?;
    let (mut first, mut failed) = (None, Vec::new());
    for seed in seeds()? {
        println!("seed {seed}");
        if let Err(why) = one(&node, seed).await {
            failed.push(seed);
            first.get_or_insert(why.context(format!(
                "again: UNPACK_SEED={seed} cargo test --release -p e2e --test unpack generated -- --nocapture"
            )));
        }
    }
    if let Some(why) = first {
        return Err(why.context(format!("seeds that differ: {failed:?}")));
    }
    node.finish().await
}

async fn one(node: &Node, seed: u64) -> Result<()> {
    let name = format!("localhost/corpus:{seed}");
    let made = corpus::image(seed, &name);
    let dir = tempfile::Builder::new().prefix("rc-judge-").tempdir_in("/var/tmp")?;
    let start = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() as i64 - 1;
    judged(&made.judged.oci(), dir.path())?;
    node.import(made.image.oci()).await?;
    let mounted = node.ok(&["images", "mount", &name]).await?;
    let outcome = tree::read(Path::new(mounted.trim())).and_then(|ours| {
        let mut theirs = tree::read(&dir.path().join("tree"))?;
        tree::lenient(&ours, &mut theirs, &made.implied, start);
        tree::same(&ours, &theirs, "umoci").with_context(|| made.told.join("\n"))
    });
    node.ok(&["images", "umount", &name]).await?;
    node.cri.remove_image(&name).await?;
    outcome
}
