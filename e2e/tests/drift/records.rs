//! Kinds 1 to 6 and 11: the records and what they say of processes.

use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::leaks::Process;
use e2e::node::Node;
use e2e::pods::{HELLO, container};
use e2e::tools;

use crate::{dry, finding, json, kill9, pods_dir, quiet, repaired, runs, state_dir, step, up};

/// The database with the daemon down: `change` gets every `Kind/uid` and its bytes and answers new bytes.
fn tamper(node: &Node, change: impl Fn(&str, &[u8]) -> Option<Vec<u8>>) -> Result<()> {
    let config = sled::Config::new()
        .path(node.root().join("store"))
        .mode(sled::Mode::LowSpace);
    let database = config.flush_every_ms(None).open()?;
    for entry in database.iter() {
        let (key, value) = entry?;
        if let Some(new) = change(&String::from_utf8_lossy(&key), &value) {
            database.insert(key, new)?;
        }
    }
    database.flush()?;
    Ok(())
}

/// With its copy a record that cannot be read is had back; without it, its things are left alone and a person is told.
#[tokio::test(flavor = "multi_thread")]
async fn drift_01_record_unreadable() -> Result<()> {
    let mut node = Node::start().await?;
    let (whole, torn) = (up(&node, "copied").await?, up(&node, "torn").await?);
    node.stop().await?;
    let half = |uid: &str| {
        let key = format!("PodSandbox/{uid}");
        move |at: &str, value: &[u8]| (at == key).then(|| value[..value.len() / 2].to_vec())
    };
    tamper(&node, half(&whole.sandbox))?;
    quiet(&node).await.context("read from its copy")?;

    let copy = pods_dir(&node, &torn).join("record.json");
    let kept = fs::read(&copy)?;
    tamper(&node, half(&torn.sandbox))?;
    fs::write(&copy, &kept[..kept.len() / 2])?;
    let (code, report) = dry(&node).await?;
    assert_eq!(code, 20, "{report:#}");
    let found = finding(&report, "record-quarantined")?;
    assert!(
        found["object"].as_str().is_some_and(|o| o.contains(&torn.sandbox)),
        "{found:#}"
    );
    let (code, _) = json(&node, &["--once"]).await?;
    assert_eq!(code, 20, "a person is still needed");
    assert!(Process::read(torn.pid).is_some(), "what it owns is left alone");
    let (code, report) = json(&node, &["doctor"]).await?;
    assert_eq!(code, 20);
    finding(&report, "record-quarantined")?;

    fs::write(&copy, kept)?;
    node.serve().await?;
    runs(&node, &torn).await?;
    runs(&node, &whole).await?;
    node.finish().await
}

/// What cannot be read is thrown away by name, and only so: with it goes what it owns, and nothing else.
#[tokio::test(flavor = "multi_thread")]
async fn drift_01_unreadable_record_thrown_away() -> Result<()> {
    let mut node = Node::start().await?;
    let (kept, torn) = (up(&node, "kept").await?, up(&node, "torn").await?);
    node.stop().await?;
    let key = format!("PodSandbox/{}", torn.sandbox);
    tamper(&node, |at, value| {
        (at == key).then(|| value[..value.len() / 2].to_vec())
    })?;
    fs::write(pods_dir(&node, &torn).join("record.json"), "{")?;
    node.serve().await?;
    let (code, report) = json(&node, &["--once"]).await?;
    assert_eq!(code, 20, "{report:#}");
    let found = finding(&report, "record-quarantined")?;
    let command = found["repair"].as_str().context("a command")?.to_owned();
    assert_eq!(command, format!("reconcile --once --object {}", torn.sandbox));
    assert!(Process::read(torn.pid).is_some());

    let (_, plan) = json(&node, &["--once", "--dry-run", "--object", &torn.sandbox]).await?;
    let due = step(&plan, "record", "Quarantined")?;
    ensure!(due["risk"] == "C" && due["action"] == "erase", "{due:#}");
    let (code, report) = json(&node, &["--once", "--object", &torn.sandbox]).await?;
    assert_eq!(code, 10, "{report:#}");
    assert!(Process::read(torn.pid).is_none(), "what it owned went with it");
    quiet(&node).await?;
    runs(&node, &kept).await?;
    node.crash().await?;
    quiet(&node).await.context("thrown away for good")?;
    runs(&node, &kept).await?;
    node.finish().await
}

/// Two copies under one name, the database lost: the younger holds the name, the older is taken down.
#[tokio::test(flavor = "multi_thread")]
async fn drift_02_duplicate_records() -> Result<()> {
    let mut node = Node::start().await?;
    let young = up(&node, "twice").await?;
    node.stop().await?;
    let uid = "ab".repeat(32);
    let mut record: serde_json::Value =
        serde_json::from_slice(&fs::read(pods_dir(&node, &young).join("record.json"))?)?;
    record["metadata"]["uid"] = uid.clone().into();
    let created = record["metadata"]["created"].as_i64().context("created")?;
    record["metadata"]["created"] = (created - 1_000_000_000).into();
    let dir = node.root().join("pods").join(&uid);
    fs::create_dir_all(&dir)?;
    fs::write(dir.join("record.json"), serde_json::to_vec(&record)?)?;
    fs::remove_dir_all(node.root().join("store"))?;
    for args in [&["--once", "--dry-run"][..], &["--once"]] {
        let (code, report) = json(&node, args).await?;
        assert_eq!(code, 10, "{args:?}: {report:#}");
        assert!(report["done"].to_string().contains(&uid), "{args:?}: {report:#}");
    }
    node.serve().await?;
    runs(&node, &young).await?;
    assert_eq!(node.cri.sandboxes(None).await?.len(), 1);
    e2e::eventually(Duration::from_secs(20), async || {
        ensure!(!dir.exists(), "the older one's directory is left");
        Ok(())
    })
    .await?;
    node.finish().await
}

/// A record of which nothing exists is made again.
#[tokio::test(flavor = "multi_thread")]
async fn drift_03_record_without_object() -> Result<()> {
    let mut node = Node::start().await?;
    let pod = node.pod("bare");
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let config = container("c", HELLO, &["/hello", "sleep", "1000"]);
    let id = node.cri.create(&sandbox, &pod, &config).await?;
    node.stop().await?;
    fs::remove_dir_all(node.root().join("pods").join(&sandbox).join("containers").join(&id))?;
    repaired(&node, "record", "Absent", "A").await?;
    node.serve().await?;
    node.cri.start(&id).await?;
    node.finish().await
}

/// The copies are had back without the sandbox's: its container stops and goes.
#[tokio::test(flavor = "multi_thread")]
async fn drift_04_sandbox_record_gone() -> Result<()> {
    let mut node = Node::start().await?;
    let lone = up(&node, "lone").await?;
    node.stop().await?;
    fs::remove_dir_all(node.root().join("store"))?;
    fs::remove_file(pods_dir(&node, &lone).join("record.json"))?;
    let (code, plan) = dry(&node).await?;
    assert_eq!(code, 10, "{plan:#}");
    let due = step(&plan, "all", "NoRecord")?;
    assert_eq!(
        (due["kind"].as_str(), due["risk"].as_str()),
        (Some("PodSandbox"), Some("B"))
    );
    let (code, report) = json(&node, &["--once"]).await?;
    assert_eq!(code, 10, "{report:#}");
    quiet(&node).await?;
    assert!(
        Process::read(lone.pid).is_none_or(|p| p.state == 'Z'),
        "its process has ended"
    );
    node.serve().await?;
    assert!(node.cri.containers(None).await?.is_empty());
    node.finish().await
}

/// The first process is gone while the daemon is down: the plan says so, and the code is the real one.
#[tokio::test(flavor = "multi_thread")]
async fn drift_05_process_gone() -> Result<()> {
    let mut node = Node::start().await?;
    let gone = up(&node, "gone").await?;
    node.stop().await?;
    kill9(gone.pid)?;
    let record = pods_dir(&node, &gone).join("containers").join(&gone.id).join("run");
    e2e::eventually(Duration::from_secs(20), async || {
        ensure!(Process::read(gone.pid).is_none(), "the shim has not reaped it");
        ensure!(fs::metadata(&record)?.len() > 1024, "its end is not written");
        Ok(())
    })
    .await?;
    repaired(&node, "rootfs", "NotWanted", "A").await?;
    node.serve().await?;
    let status = node.cri.exited(&gone.id).await?;
    assert_eq!((status.exit_code, status.reason.as_str()), (137, "Error"));
    node.finish().await
}

/// A process lives and an old database does not know it, but its record's copy does: nothing is killed unasked.
#[tokio::test(flavor = "multi_thread")]
async fn drift_06_process_without_record() -> Result<()> {
    let mut node = Node::start().await?;
    node.stop().await?;
    let save = node.path("save");
    tools::check(Command::new("cp").arg("-a").arg(node.root()).arg(&save))?;
    node.serve().await?;
    let lost = up(&node, "lost").await?;
    node.stop().await?;
    let root = node.root();
    fs::remove_dir_all(root.join("store"))?;
    for name in ["store", "store.watermark"] {
        tools::check(Command::new("cp").arg("-a").arg(save.join(name)).arg(&root))?;
    }
    let (code, plan) = dry(&node).await?;
    assert_eq!(code, 20, "{plan:#}");
    let line = plan["human"][0].as_str().context("a line for a person")?;
    let command = format!("--object {}", lost.sandbox);
    assert!(line.contains("RecordLost") && line.contains(&command), "{line}");
    let (code, _) = json(&node, &["--once"]).await?;
    assert_eq!(code, 20);
    assert!(Process::read(lost.pid).is_some(), "not killed unasked");
    let (_, findings) = json(&node, &["doctor"]).await?;
    let told = finding(&findings, "withheld")?["repair"].to_string();
    assert!(told.contains(&command), "{told}");

    let (code, report) = json(&node, &["--once", "--object", &lost.sandbox[..12]]).await?;
    assert_eq!(code, 10, "{report:#}");
    assert!(
        Process::read(lost.pid).is_none_or(|p| p.state == 'Z'),
        "named, it was stopped"
    );
    quiet(&node).await?;
    assert!(!state_dir(&node, &lost).exists());
    node.finish().await
}

/// An exit that no daemon has seen is read from its record, once.
#[tokio::test(flavor = "multi_thread")]
async fn drift_11_exit_not_consumed() -> Result<()> {
    let mut node = Node::start().await?;
    let pod = node.pod("ends");
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let config = container("c", HELLO, &["/hello", "sleep", "1"]);
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    let pid = node.cri.container_pid(&id).await?;
    node.kill9().await?;
    e2e::eventually(Duration::from_secs(10), async || {
        ensure!(Process::read(pid).is_none(), "it still runs");
        Ok(())
    })
    .await?;
    let (code, plan) = dry(&node).await?;
    let due = step(&plan, "rootfs", "NotWanted").context("what it stood on is taken down")?;
    ensure!(code == 10 && due["uid"] == id, "{code} {plan:#}");
    node.serve().await?;
    let first = node.cri.exited(&id).await?;
    assert_eq!(first.exit_code, 0);
    node.crash().await?;
    assert_eq!(node.cri.exited(&id).await?.finished_at, first.finished_at);
    node.finish().await
}
