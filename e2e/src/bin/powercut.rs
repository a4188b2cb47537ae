//! Runs in the guest of `e2e/vm/power-cut.sh`: `load SOCKET LOGS` makes and removes pods for ever and prints what was
//! answered; `check SOCKET FACTS`, after the power came back, holds the daemon to it and removes everything.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use e2e::client::Cri;
use e2e::pods::{self, HELLO};
use e2e::v1::*;

/// A line for the host, which outlives the power.
fn tell(fact: &str, id: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{fact} {id}")?;
    Ok(out.flush()?)
}

async fn life(cri: &Cri, n: usize, logs: &Path) -> Result<()> {
    let mut pod = pods::sandbox(&format!("p{n}"), logs);
    if n.is_multiple_of(2) {
        pod = pods::host_network(pod);
    }
    let sandbox = cri.run_sandbox(&pod).await?;
    tell("sandbox", &sandbox)?;
    let config = pods::container("run", HELLO, &["/hello", "sleep", "100000"]);
    let running = cri.launch(&sandbox, &pod, &config).await?;
    tell("running", &running)?;
    let config = pods::container("end", HELLO, &["/hello", "exit", "7"]);
    let ended = cri.launch(&sandbox, &pod, &config).await?;
    cri.exited(&ended).await?;
    tell("ended", &ended)?;
    if n % 3 == 2 {
        // From here on both are right: there, or gone.
        for id in [&sandbox, &running, &ended] {
            tell("removing", id)?;
        }
        cri.stop_sandbox(&sandbox).await?;
        cri.remove_sandbox(&sandbox).await?;
        for id in [&sandbox, &running, &ended] {
            tell("removed", id)?;
        }
    }
    Ok(())
}

async fn load(cri: &Cri, logs: &Path) -> Result<()> {
    e2e::eventually(Duration::from_secs(120), async || {
        cri.image(HELLO).await?.context("the built-in image")
    })
    .await?;
    tell("ready", "-")?;
    for n in 0.. {
        life(cri, n, logs).await?;
    }
    Ok(())
}

/// The last fact told of each id.
fn facts(text: &str) -> BTreeMap<String, String> {
    // The last line may be cut too.
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let pairs = whole.lines().filter_map(|line| line.split_once(' '));
    pairs
        .filter(|(_, id)| id.len() == 64)
        .map(|(fact, id)| (id.into(), fact.into()))
        .collect()
}

async fn check(cri: &Cri, facts: &BTreeMap<String, String>) -> Result<()> {
    e2e::eventually(Duration::from_secs(120), async || Ok(cri.version().await?)).await?;
    let sandboxes = cri.sandboxes(None).await?;
    let containers = cri.containers(None).await?;
    let ids: BTreeSet<_> = sandboxes
        .iter()
        .map(|s| &s.id)
        .chain(containers.iter().map(|c| &c.id))
        .collect();
    for sandbox in &sandboxes {
        ensure!(
            sandbox.state() == PodSandboxState::SandboxNotready,
            "after a reboot: {sandbox:?}"
        );
    }
    let mut lost = 0;
    for (id, fact) in facts {
        match fact.as_str() {
            "removing" => continue,
            "removed" => ensure!(!ids.contains(id), "removed, yet there: {id}"),
            _ => ensure!(ids.contains(id), "answered ({fact}), yet gone: {id}"),
        }
        if !["running", "ended"].contains(&fact.as_str()) {
            continue;
        }
        let status = cri.container(id).await?;
        let told = (status.exit_code, status.reason.as_str());
        ensure!(status.state() == ContainerState::ContainerExited, "{status:?}");
        match fact.as_str() {
            "running" => ensure!(told == (255, "Unknown"), "{status:?}"),
            _ => ensure!(told == (7, "Error"), "told once, it stands: {status:?}"),
        }
        lost += usize::from(fact == "running");
    }
    println!("{} facts hold, {lost} running containers ended as Unknown", facts.len());
    for sandbox in &sandboxes {
        cri.stop_sandbox(&sandbox.id).await?;
        cri.remove_sandbox(&sandbox.id).await?;
    }
    ensure!(
        cri.containers(None).await?.is_empty(),
        "containers outlived their sandboxes"
    );
    Ok(())
}

#[tokio::main]
async fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words[..] {
        ["load", socket, logs] => load(&Cri::new(Path::new(socket)), Path::new(logs)).await,
        ["check", socket, file] => check(&Cri::new(Path::new(socket)), &facts(&fs::read_to_string(file)?)).await,
        _ => bail!("usage: powercut load SOCKET LOGS | check SOCKET FACTS"),
    }
}
