//! The daemon's own files cut and garbled under running pods: it opens at the last state, or rebuilds it from the
//! copies and says so; no process dies of it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::leaks::Process;
use e2e::node::Node;
use e2e::pods::{self, HELLO};
use e2e::v1::*;

fn files(dir: &Path, all: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir).with_context(|| format!("list {}", dir.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            files(&path, all)?;
        } else {
            all.push(path);
        }
    }
    Ok(())
}

/// What may not change: id -> state, pid and start time of the process, code.
async fn picture(node: &Node) -> Result<BTreeMap<String, String>> {
    let mut all = BTreeMap::new();
    for sandbox in node.cri.sandboxes(None).await? {
        let pid = node.cri.sandbox_pid(&sandbox.id).await?;
        let told = format!(
            "{:?} {pid} {:?} {:?}",
            sandbox.state(),
            Process::start_time(pid),
            sandbox.metadata
        );
        all.insert(sandbox.id, told);
    }
    for container in node.cri.containers(None).await? {
        let status = node.cri.container(&container.id).await?;
        let pid = match status.state() {
            ContainerState::ContainerRunning => node.cri.container_pid(&container.id).await?,
            _ => 0,
        };
        let told = format!(
            "{:?} {pid} {:?} {} {}",
            status.state(),
            Process::start_time(pid),
            status.exit_code,
            status.finished_at
        );
        all.insert(container.id, told);
    }
    Ok(all)
}

async fn some_pods(node: &Node, count: usize) -> Result<()> {
    for n in 0..count {
        let pod = pods::host_network(node.pod(&format!("kept{n}")));
        let sandbox = node.cri.run_sandbox(&pod).await?;
        let run = pods::container("run", HELLO, &["/hello", "sleep", "1000"]);
        node.cri.launch(&sandbox, &pod, &run).await?;
        let end = pods::container("end", HELLO, &["/hello", "exit", "4"]);
        let ended = node.cri.launch(&sandbox, &pod, &end).await?;
        node.cri.exited(&ended).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn store_files_cut_and_garbled_anywhere() -> Result<()> {
    let mut node = Node::start().await?;
    some_pods(&node, 3).await?;
    // A store that was closed and opened has more kinds of file.
    node.stop().await?;
    node.serve().await?;
    let before = picture(&node).await?;
    let seed = u64::from(std::process::id()) | 1;
    let mut dice = fastrand::Rng::with_seed(seed);
    println!("seed {seed}");
    let mut rebuilt = 0;
    for round in 0..36 {
        node.kill9().await?;
        let mut all = Vec::new();
        files(&node.root().join("store"), &mut all)?;
        all.push(node.root().join("store.watermark"));
        all.retain(|path| fs::metadata(path).is_ok_and(|meta| meta.len() > 0));
        all.sort();
        // Each file in turn, for there are few.
        let victim = &all[round % all.len()];
        let mut bytes = fs::read(victim)?;
        let at = dice.usize(..bytes.len().max(1));
        let how = match round / all.len() % 4 {
            0 => {
                bytes.truncate(at);
                format!("cut at {at}")
            }
            1 => {
                bytes[at] ^= 1 << dice.u8(..8);
                format!("one bit of byte {at} flipped")
            }
            2 => {
                let end = (at + 512).min(bytes.len());
                bytes[at..end].fill(0);
                format!("zeros from {at} to {end}")
            }
            _ => {
                let end = (at + 4096).min(bytes.len());
                bytes[at..end].iter_mut().for_each(|byte| *byte = dice.u8(..));
                format!("noise from {at} to {end}")
            }
        };
        fs::write(victim, &bytes)?;
        let what = format!("seed {seed} round {round}: {} {how}", victim.display());
        let log = node.daemon_log().len();
        let start = Instant::now();
        node.serve().await.with_context(|| what.clone())?;
        ensure!(
            start.elapsed() < Duration::from_secs(30),
            "{what}: {:?}",
            start.elapsed()
        );
        let now = picture(&node).await?;
        ensure!(now == before, "{what}:\nbefore {before:#?}\nnow {now:#?}");
        let said = node.daemon_log()[log..].contains("rebuilt from the copies");
        if said {
            let condition = node.ok(&["get", "nodes", "-o", "yaml"]).await?;
            ensure!(
                condition.contains("StoreRebuilt"),
                "{what}: it is not told:\n{condition}"
            );
        }
        rebuilt += usize::from(said);
    }
    println!("36 damages, {rebuilt} rebuilt from the copies");
    node.finish().await
}

/// Torture case T04: the store is gone, and of its copies two are cut and one is empty.
#[tokio::test(flavor = "multi_thread")]
async fn damaged_copies_lose_their_own_objects_alone() -> Result<()> {
    let mut node = Node::start().await?;
    let mut sandboxes = Vec::new();
    for n in 0..6 {
        let pod = pods::host_network(node.pod(&format!("p{n}")));
        sandboxes.push(node.cri.run_sandbox(&pod).await?);
    }
    let before = picture(&node).await?;
    let processes = node.shims()?;
    let mut whole = Vec::new();
    node.kill9().await?;
    let (damaged, others) = sandboxes.split_at(3);
    for (n, id) in damaged.iter().enumerate() {
        let copy = node.root().join("pods").join(id).join("record.json");
        let text = fs::read(&copy)?;
        whole.push((copy.clone(), text.clone()));
        fs::write(&copy, &text[..text.len() / 3 * n])?;
    }
    fs::remove_dir_all(node.root().join("store"))?;
    let start = Instant::now();
    node.serve().await?;
    ensure!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    let now = picture(&node).await?;
    for id in others {
        assert_eq!(now.get(id), before.get(id));
    }
    let out = node.reconcile(&["--once"]).await?;
    assert_eq!(out.status.code(), Some(20), "{}", e2e::node::shown(&out));
    assert_eq!(node.shims()?, processes, "nothing that ran is ended");
    let log = node.daemon_log();
    for id in damaged {
        let told = |line: &str| line.contains("quarantined") && line.contains(id.as_str());
        ensure!(log.lines().any(told), "{id} is not told of");
    }
    // With their copies mended they are as they were.
    node.kill9().await?;
    for (copy, text) in whole {
        fs::write(copy, text)?;
    }
    fs::remove_dir_all(node.root().join("store"))?;
    node.serve().await?;
    assert_eq!(picture(&node).await?, before);
    node.finish().await
}
