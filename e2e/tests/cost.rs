//! What a pod's life costs in processes executed and in syncs of the disk, counted by strace: a budget, not a time.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context, Result};
use e2e::node::{Node, Options};
use e2e::pods::{self, HELLO};
use e2e::tools;

const SYNCS: [&str; 5] = ["fsync(", "fdatasync(", "sync_file_range(", "syncfs(", "sync("];

/// Lines of the trace after `from` that are one of `calls` and succeeded.
fn count(trace: &str, calls: &[&str]) -> Vec<String> {
    let is = |line: &&str| {
        calls.iter().any(|call| {
            line.split_whitespace()
                .nth(1)
                .is_some_and(|word| word.starts_with(call))
        })
    };
    let failed = |line: &str| line.contains(" = -1 ");
    // The watermark is flushed once a second while there is something new, whatever the number of pods.
    let lazy = |line: &str| line.contains("store.watermark");
    trace
        .lines()
        .filter(is)
        .filter(|line| !failed(line) && !lazy(line))
        .map(str::to_owned)
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn three_processes_and_twelve_syncs_in_a_pods_life() -> Result<()> {
    if !tools::installed("strace") {
        return Ok(());
    }
    let mut node = Node::new(Options::default())?;
    let file = node.path("trace");
    let trace = format!(
        "strace -f -y -qq -o {} -e signal=none -e trace=execve,execveat,fsync,fdatasync,syncfs,sync",
        file.display()
    );
    node = node.with(Options {
        wrapper: trace.split(' ').map(str::to_owned).collect(),
        ..Options::default()
    });
    node.serve().await?;
    let life = async |name: &str| -> Result<()> {
        let pod = node.pod(name);
        let sandbox = node.cri.run_sandbox(&pod).await?;
        let id = node
            .cri
            .launch(
                &sandbox,
                &pod,
                &pods::container("c", HELLO, &["/hello", "sleep", "1000"]),
            )
            .await?;
        node.cri.stop(&id, 5).await?;
        node.cri.remove(&id).await?;
        node.cri.stop_sandbox(&sandbox).await?;
        node.cri.remove_sandbox(&sandbox).await?;
        node.no_pods().await
    };
    life("warm")
        .await
        .context("the first pod, which may still make the node's own things")?;
    let before = fs::read_to_string(&file)?.len();
    const PODS: usize = 4;
    for n in 0..PODS {
        life(&format!("counted{n}")).await?;
    }
    let text = fs::read_to_string(&file)?;
    let executed = count(&text[before..], &["execve(", "execveat("]);
    let synced = count(&text[before..], &SYNCS);
    // By pid: the shim executes itself once more, from a sealed copy, and is the same process.
    let pids: BTreeSet<_> = executed
        .iter()
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    println!(
        "in a pod's life: {} processes executed, {} syncs",
        pids.len() / PODS,
        synced.len() / PODS
    );
    assert!(
        pids.len() <= 3 * PODS,
        "shim, pause, the program and no more:\n{}",
        executed.join("\n")
    );
    assert!(
        synced.len() <= 12 * PODS,
        "{} syncs for {PODS} pods:\n{}",
        synced.len(),
        synced.join("\n")
    );
    node.finish().await
}
