//! A newer program wrote something, then the older one is back: pods and pids stay, what it cannot read is refused
//! before anything is written, and what it does not know is kept.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use e2e::leaks::Process;
use e2e::node::{Node, shown};
use e2e::tools;

use crate::{dry, finding, json, kill9, pods_dir, quiet, runs, up};

/// A value as the database has it: format, checksum of format, key and body, body.
fn value(format: u32, key: &str, body: &[u8]) -> Vec<u8> {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&format.to_le_bytes());
    crc.update(key.as_bytes());
    crc.update(body);
    [&format.to_le_bytes()[..], &crc.finalize().to_le_bytes(), body].concat()
}

/// Opens the database of a root whose daemon is down.
fn database(node: &Node) -> Result<sled::Db> {
    let config = sled::Config::new()
        .path(node.root().join("store"))
        .mode(sled::Mode::LowSpace);
    Ok(config.flush_every_ms(None).open()?)
}

fn key_of(database: &sled::Db, kind: &str, uid: &str) -> Result<(String, Vec<u8>)> {
    let key = format!("{kind}/{uid}");
    let value = database.get(&key)?.with_context(|| format!("no {key}"))?;
    Ok((key, value.to_vec()))
}

/// Every file below, by path and content's length and change.
fn picture(dir: &Path, all: &mut BTreeMap<String, (u64, std::time::SystemTime)>) -> Result<()> {
    for entry in fs::read_dir(dir)?.flatten() {
        let (path, meta) = (entry.path(), entry.metadata()?);
        match meta.is_dir() {
            true => picture(&path, all)?,
            false => drop(all.insert(path.display().to_string(), (meta.len(), meta.modified()?))),
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_database_is_refused_and_nothing_is_touched() -> Result<()> {
    let mut node = Node::start().await?;
    let kept = up(&node, "kept").await?;
    node.stop().await?;
    let (key, old) = {
        let database = database(&node)?;
        let (key, old) = key_of(&database, "PodSandbox", &kept.sandbox)?;
        database.insert(&key, value(2, &key, b"what only a newer program reads"))?;
        database.flush()?;
        (key, old)
    };
    let look = |node: &Node| -> Result<BTreeMap<_, _>> {
        let mut all = BTreeMap::new();
        picture(&node.root().join("pods"), &mut all)?;
        Ok(all)
    };
    let before = look(&node)?;
    for args in [&["serve"][..], &["--once"], &["--once", "--dry-run"], &["doctor"]] {
        let out = node.reconcile(args).await?;
        let said = shown(&out);
        ensure!(!out.status.success() && said.contains("format 2"), "{args:?}: {said}");
    }
    assert_eq!(look(&node)?, before, "nothing was written");
    assert!(!node.root().join("store.damaged-1").exists());
    assert!(Process::read(kept.pid).is_some());
    {
        let database = database(&node)?;
        database.insert(&key, old)?;
        database.flush()?;
    }
    node.serve().await?;
    runs(&node, &kept).await?;
    node.finish().await
}

/// Fields of a newer program are kept through a change by the older one; nothing is remade for them.
#[tokio::test(flavor = "multi_thread")]
async fn fields_of_a_newer_program_are_kept() -> Result<()> {
    let mut node = Node::start().await?;
    let kept = up(&node, "grown").await?;
    node.stop().await?;
    {
        let database = database(&node)?;
        for (kind, uid) in [("PodSandbox", &kept.sandbox), ("Container", &kept.id)] {
            let (key, old) = key_of(&database, kind, uid)?;
            let mut record: serde_json::Value = serde_json::from_slice(&old[8..])?;
            record["spec"]["later"] = "kept".into();
            database.insert(&key, value(1, &key, &serde_json::to_vec(&record)?))?;
        }
        database.flush()?;
    }
    node.serve().await?;
    runs(&node, &kept).await?;
    node.cri.stop(&kept.id, 0).await?;
    node.stop().await?;
    {
        let database = database(&node)?;
        for (kind, uid) in [("PodSandbox", &kept.sandbox), ("Container", &kept.id)] {
            let (_, now) = key_of(&database, kind, uid)?;
            let record: serde_json::Value = serde_json::from_slice(&now[8..])?;
            assert_eq!(record["spec"]["later"], "kept", "{record:#}");
        }
    }
    node.finish().await
}

/// Receipts of a newer form: told, left as they are, and never a reason to start or stop anything.
#[tokio::test(flavor = "multi_thread")]
async fn newer_receipts_are_told_and_left() -> Result<()> {
    let mut node = Node::start().await?;
    let kept = up(&node, "receipts").await?;
    node.stop().await?;
    let dir = pods_dir(&node, &kept);
    let (run, attachment) = (
        dir.join("containers").join(&kept.id).join("run"),
        dir.join("attachment.json"),
    );
    let own = (fs::read(&run)?, fs::read_to_string(&attachment)?);
    let mut newer = own.0.clone();
    newer[3] = b'2';
    fs::write(&run, &newer)?;
    let replaced = own.1.replacen("\"version\":1", "\"version\":2", 1);
    ensure!(replaced != own.1, "{}", own.1);
    fs::write(&attachment, &replaced)?;
    for args in [&["--once", "--dry-run"][..], &["--once"]] {
        let (code, report) = json(&node, args).await?;
        ensure!(code >= 20, "{code}: {report:#}");
        let told = report.to_string();
        ensure!(told.contains("newer than this program"), "{report:#}");
    }
    node.serve().await?;
    node.stop().await?;
    assert_eq!(
        (fs::read(&run)?, fs::read_to_string(&attachment)?),
        (newer, replaced),
        "left as they are"
    );
    assert!(Process::read(kept.pid).is_some(), "left running");
    fs::write(&run, own.0)?;
    fs::write(&attachment, own.1)?;
    node.serve().await?;
    runs(&node, &kept).await?;
    node.finish().await
}

/// A shim whose program was replaced goes on serving, and the doctor lists it.
#[tokio::test(flavor = "multi_thread")]
async fn an_old_shim_is_served_and_listed() -> Result<()> {
    let mut node = Node::start().await?;
    let kept = up(&node, "old").await?;
    quiet(&node).await?;
    // The program of the running shim, as an upgrade leaves it: unlinked.
    let shim = node.shims()?.pop().context("a shim")?;
    let old = node.path("old");
    fs::create_dir(&old)?;
    for name in ["reconcile", "reconcile-shim"] {
        tools::check(Command::new("cp").arg(tools::built(name)?).arg(old.join(name)))?;
    }
    node.stop().await?;
    kill9(shim)?;
    let started = adopt_with(&node, &old)?;
    fs::remove_dir_all(&old)?;
    node.serve().await?;
    let (code, findings) = json(&node, &["doctor"]).await?;
    let found = finding(&findings, "shim-old")?;
    assert_eq!(found["severity"], "note");
    ensure!(code == 0 || code == 20, "{code}: {findings:#}");
    ensure!(found["message"].to_string().contains(&started.to_string()), "{found:#}");
    runs(&node, &kept).await?;
    assert_eq!(node.cri.exec(&kept.id, &["/hello", "exit", "3"], 5).await?.exit_code, 3);
    node.crash().await?;
    assert_eq!(node.shims()?, [started], "a restart leaves it");
    node.cri.stop(&kept.id, 0).await?;
    assert_eq!(node.cri.exited(&kept.id).await?.exit_code, 137);
    let (code, report) = dry(&node).await?;
    ensure!(code == 0, "{code}: {report:#}");
    node.finish().await
}

/// Lets another copy of the program start the shim in a pod's place; answers its pid.
fn adopt_with(node: &Node, programs: &Path) -> Result<i32> {
    let usual = node.command(&["--once"])?;
    let out = Command::new(programs.join("reconcile"))
        .args(usual.get_args())
        .output()?;
    ensure!(out.status.code() == Some(10), "{}", shown(&out));
    node.shims()?.pop().context("a new shim")
}
