//! The independent judge: umoci unpacks the same layers, the kernel tells what both have made.

use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};

use super::{image, tree};
use crate::node::Node;
use crate::tools;

/// What umoci makes of an image, at `<dir>/tree`.
fn unpack(archive: &[u8], dir: &Path) -> Result<()> {
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

/// Imports a seed's image and compares it with what umoci makes of it; the image is gone afterwards.
pub async fn compare(node: &Node, seed: u64) -> Result<()> {
    let name = format!("localhost/corpus:{seed}");
    let made = image(seed, &name);
    let dir = tempfile::Builder::new().prefix("rc-judge-").tempdir_in("/var/tmp")?;
    let start = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() as i64 - 1;
    unpack(&made.judged.oci(), dir.path()).with_context(|| made.told.join("\n"))?;
    node.import(made.image.oci())
        .await
        .with_context(|| made.told.join("\n"))?;
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

/// The same for many; the first difference in full, and which other seeds differ.
pub async fn compare_all(node: &Node, seeds: impl IntoIterator<Item = u64>) -> Result<()> {
    let (mut first, mut failed) = (None, Vec::new());
    for seed in seeds {
        println!("seed {seed}");
        if let Err(why) = compare(node, seed).await {
            failed.push(seed);
            println!("{}", why.root_cause());
            first.get_or_insert(why);
        }
    }
    match first {
        Some(why) => Err(why.context(format!(
            "seeds that differ: {failed:?}; again: UNPACK_SEED={} cargo test --release -p e2e --test unpack generated",
            failed[0]
        ))),
        None => Ok(()),
    }
}
