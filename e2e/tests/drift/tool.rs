//! The tool itself: approved plans, refusals, what is stuck, what was cut short.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::node::{Node, shown};
use e2e::tools;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::{dry, json, quiet, runs, up};

fn plant(node: &Node, uid: &str) -> Result<std::path::PathBuf> {
    let dir = node.root().join("pods").join(uid.repeat(32));
    fs::create_dir_all(dir.join("x"))?;
    Ok(dir)
}

/// A plan is taken as it was approved, or, once the node has moved on or the file was edited, not at all.
#[tokio::test(flavor = "multi_thread")]
async fn an_approved_plan_is_run_exactly() -> Result<()> {
    let mut node = Node::start().await?;
    let kept = up(&node, "kept").await?;
    for daemon in [true, false] {
        if !daemon {
            node.stop().await?;
        }
        let (one, two) = (plant(&node, "1a")?, node.root().join("pods").join("2b".repeat(32)));
        let (code, plan) = dry(&node).await?;
        assert_eq!(code, 10, "{plan:#}");
        assert_eq!(plan["hash"].as_str().map(str::len), Some(64));
        let file = node.file("plan.json", serde_json::to_vec(&plan)?)?;

        plant(&node, "2b")?;
        let (code, report) = json(&node, &["--once", "--plan", &file]).await?;
        assert_eq!(code, 20, "{report:#}");
        let told = report["human"].to_string();
        ensure!(
            told.contains("moved on") && told.contains("2b2b") && !told.contains("1a1a"),
            "{told}"
        );
        assert!(one.exists() && two.exists(), "nothing was done");

        fs::remove_dir_all(&two)?;
        let mut edited = plan.clone();
        edited["done"][0]["uid"] = "3c".repeat(32).into();
        let wrong = node.file("edited.json", serde_json::to_vec(&edited)?)?;
        let (code, report) = json(&node, &["--once", "--plan", &wrong]).await?;
        assert_eq!((code, one.exists()), (20, true), "{report:#}");
        ensure!(report["human"].to_string().contains("hash"), "{report:#}");

        let (code, report) = json(&node, &["--once", "--plan", &file]).await?;
        assert_eq!((code, one.exists()), (10, false), "{report:#}");
        assert_eq!(report["done"][0]["uid"], plan["done"][0]["uid"]);
        let again = node.reconcile(&["--once", "--plan", &file]).await?;
        assert_eq!(
            again.status.code(),
            Some(20),
            "it is not due any more: {}",
            shown(&again)
        );
    }
    let missing = node.reconcile(&["--once", "--plan", "/nowhere"]).await?;
    ensure!(shown(&missing).contains("--plan /nowhere"), "{}", shown(&missing));
    quiet(&node).await?;
    node.serve().await?;
    runs(&node, &kept).await?;
    node.finish().await
}

/// One stopped shim is a finding, and everything else is repaired in time.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_stuck_holds_up_nothing_else() -> Result<()> {
    let mut node = Node::start().await?;
    let (_stuck, other) = (up(&node, "stuck").await?, up(&node, "other").await?);
    node.stop().await?;
    let shim = *node.shims()?.first().context("a shim")?;
    kill(Pid::from_raw(shim), Signal::SIGSTOP)?;
    let left = plant(&node, "4d")?;
    let begun = Instant::now();
    let (code, report) = json(&node, &["--once"]).await?;
    let took = begun.elapsed();
    kill(Pid::from_raw(shim), Signal::SIGCONT)?;
    assert_eq!(code, 20, "{report:#}");
    assert!(!left.exists(), "the rest was repaired: {report:#}");
    ensure!(took < Duration::from_secs(60), "bounded, yet {took:?}");
    quiet(&node).await?;
    node.serve().await?;
    runs(&node, &other).await?;
    node.finish().await
}

/// Cut at any moment and run again, it comes to the same end.
#[tokio::test(flavor = "multi_thread")]
async fn killed_half_way_and_run_again() -> Result<()> {
    let mut node = Node::start().await?;
    let kept = up(&node, "kept").await?;
    node.stop().await?;
    let netns = format!("rc-{}-{}", node.instance(), kept.sandbox);
    for moment in [10, 30, 60, 100, 160, 250] {
        for uid in ["5e", "6f", "70"] {
            plant(&node, uid)?;
        }
        let stray = format!("rc-{}-{}", node.instance(), "81".repeat(32));
        tools::check(Command::new("ip").args(["netns", "add", &stray]))?;
        tools::check(Command::new("ip").args(["-n", &netns, "address", "flush", "dev", "eth0"]))?;
        let mut once = node.command(&["--once"])?.stdout(std::process::Stdio::null()).spawn()?;
        // Not a wait for anything: the moment of the kill is the point.
        tokio::time::sleep(Duration::from_millis(moment)).await;
        once.kill()?;
        once.wait()?;
        let (code, report) = json(&node, &["--once"]).await?;
        ensure!([0, 10].contains(&code), "killed after {moment} ms: {report:#}");
        quiet(&node)
            .await
            .with_context(|| format!("killed after {moment} ms"))?;
    }
    node.serve().await?;
    runs(&node, &kept).await?;
    node.finish().await
}

/// The forms of the doctor, on a node that is well and on one that is not.
#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_says_what_helps() -> Result<()> {
    let mut node = Node::start().await?;
    for daemon in [true, false] {
        if !daemon {
            node.stop().await?;
        }
        let left = plant(&node, "92")?;
        let (code, findings) = json(&node, &["doctor"]).await?;
        let drift = crate::finding(&findings, "drift")?;
        ensure!(
            [10, 20].contains(&code) && drift["severity"] == "repairable",
            "{findings:#}"
        );
        assert_eq!(drift["repair"], "reconcile --once");
        ensure!(drift["size"].is_number(), "{drift:#}");
        let dated = |all: &serde_json::Value| {
            let mut all = all.as_array().into_iter().flatten();
            all.all(|f| f["since"].as_i64().is_some_and(|since| since > 0))
        };
        ensure!(dated(&findings), "{findings:#}");
        assert!(left.exists(), "it only reads");
        let yaml = node.reconcile(&["doctor", "-o", "yaml"]).await?;
        ensure!(shown(&yaml).contains("id: drift"), "{}", shown(&yaml));
        let table = node.reconcile(&["doctor"]).await?;
        ensure!(
            shown(&table).contains("FINDING") && shown(&table).contains("reconcile --once"),
            "{}",
            shown(&table)
        );
        json(&node, &["--once"]).await?;
    }
    node.finish().await
}
