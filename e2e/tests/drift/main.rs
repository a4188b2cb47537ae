//! The kinds of drift, one test each, on the real kernel: made, seen in the plan with its proof and risk, repaired or
//! honestly told, and not seen again. And: a healthy node shows none. The table of kinds, what sees and what repairs
//! each, is `reconciler/src/repair/drift.md`.
//!
//! | kinds | file |
//! |---|---|
//! | 1 to 6, 11 | `records` |
//! | 7 to 10, 12, 34 (with 8), 35 | `pods` |
//! | 13 to 25, 31 to 33, 39, 40 | `world` |
//! | 26 to 30 | `images` |
//! | 37, 38 | `node` |
//!
//! Kind 36 (a changed file of a directory or configuration) is the daemon's reload; of kind 22 the units of systemd are
//! not ours.

mod images;
mod node;
mod pods;
mod records;
mod tool;
mod upgrade;
mod world;

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use e2e::node::{Node, shown};
use e2e::pods::{HELLO, container};
use e2e::v1::PodSandboxConfig;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// A pod with one container that runs for ever.
pub struct Up {
    pub pod: PodSandboxConfig,
    pub sandbox: String,
    pub id: String,
    pub pid: i32,
}

/// Starts one.
pub async fn up(node: &Node, name: &str) -> Result<Up> {
    up_in(node, node.pod(name)).await
}

pub async fn up_in(node: &Node, pod: PodSandboxConfig) -> Result<Up> {
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let config = container("c", HELLO, &["/hello", "sleep", "1000"]);
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    let pid = node.cri.container_pid(&id).await?;
    Ok(Up { pod, sandbox, id, pid })
}

pub fn kill9(pid: i32) -> Result<()> {
    Ok(kill(Pid::from_raw(pid), Signal::SIGKILL)?)
}

/// `reconcile ARGS -o json`: exit code and document.
pub async fn json(node: &Node, args: &[&str]) -> Result<(i32, Value)> {
    let args = [args, &["-o", "json"]].concat();
    let out = node.reconcile(&args).await?;
    let document = serde_json::from_slice(&out.stdout).with_context(|| shown(&out))?;
    Ok((out.status.code().context("a code")?, document))
}

pub async fn dry(node: &Node) -> Result<(i32, Value)> {
    json(node, &["--once", "--dry-run"]).await
}

/// The step of a report with this stage and reason.
pub fn step<'a>(report: &'a Value, stage: &str, reason: &str) -> Result<&'a Value> {
    let steps = report["done"].as_array().context("steps")?;
    let found = steps.iter().find(|s| s["stage"] == stage && s["reason"] == reason);
    found.with_context(|| format!("no step {stage} {reason} in {report:#}"))
}

/// The finding with this id.
pub fn finding<'a>(report: &'a Value, id: &str) -> Result<&'a Value> {
    let findings = report["findings"]
        .as_array()
        .or_else(|| report.as_array())
        .context("findings")?;
    let found = findings.iter().find(|f| f["id"] == id);
    found.with_context(|| format!("no finding {id} in {report:#}"))
}

/// The drift is in the plan with this risk, `--once` repairs it, and then there is nothing to do.
pub async fn repaired(node: &Node, stage: &str, reason: &str, risk: &str) -> Result<Value> {
    let (code, plan) = dry(node).await?;
    let due = step(&plan, stage, reason)?;
    ensure!(due["risk"] == risk && due["undo"] != "", "{due:#}");
    ensure!(code == 10, "the plan's code is {code}: {plan:#}");
    let (code, done) = json(node, &["--once"]).await?;
    ensure!(code == 10, "--once ended with {code}: {done:#}");
    quiet(node).await?;
    Ok(done)
}

/// Nothing to do and nothing found.
pub async fn quiet(node: &Node) -> Result<()> {
    let (code, report) = dry(node).await?;
    let empty = |key: &str| report[key].as_array().is_some_and(Vec::is_empty);
    ensure!(
        code == 0 && empty("done") && empty("findings") && empty("human") && empty("failed"),
        "{code}: {report:#}"
    );
    Ok(())
}

/// Container and sandbox as the CRI tells them: running, with the same process.
pub async fn runs(node: &Node, up: &Up) -> Result<()> {
    ensure!(node.cri.container_pid(&up.id).await? == up.pid, "another process");
    let sandbox = node.cri.sandbox(&up.sandbox).await?;
    ensure!(sandbox.state() == e2e::v1::PodSandboxState::SandboxReady, "{sandbox:?}");
    Ok(())
}

pub fn pods_dir(node: &Node, up: &Up) -> PathBuf {
    node.root().join("pods").join(&up.sandbox)
}

pub fn state_dir(node: &Node, up: &Up) -> PathBuf {
    node.state().join("pods").join(&up.sandbox)
}
