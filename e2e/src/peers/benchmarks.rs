//! The conformance suite's own benchmarks (critest `-benchmark`) on a runtime.

use std::fs;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::runtime::Runtime;
use crate::pods::BUSYBOX;
use crate::tools;

/// Lifecycles of each kind, one after the other.
const PODS: usize = 50;
const CONTAINERS: usize = 50;
const LIMIT: Duration = Duration::from_secs(300);

/// Of each operation its name, its median and its 99th percentile in ms.
pub async fn run(runtime: &Runtime) -> Result<Vec<(String, f64, f64)>> {
    let suite = || tools::go_suite("critest.test", "sigs.k8s.io/cri-tools/cmd/critest");
    let suite = tokio::task::spawn_blocking(suite)
        .await??
        .context("install Go: the suite is built with it")?;
    let dir = runtime.dir().join("benchmarks");
    fs::create_dir_all(&dir)?;
    let file = |name: &str, text: String| -> Result<String> {
        let path = dir.join(name);
        fs::write(&path, text)?;
        Ok(path.display().to_string())
    };
    let images = file("images.yaml", format!("defaultTestContainerImage: {BUSYBOX}\n"))?;
    let counts = file(
        "params.yaml",
        format!("podsNumber: {PODS}\ncontainersNumber: {CONTAINERS}\n"),
    )?;
    let mut command = tokio::process::Command::new(suite);
    command
        .args([
            "-benchmark",
            "-ginkgo.no-color",
            // It sets the focus to all benchmarks itself.
            "-ginkgo.skip=from scratch|on Image",
        ])
        .arg(format!("-runtime-endpoint=unix://{}", runtime.socket().display()))
        .args(["-test-images-file", &images, "-benchmarking-params-file", &counts])
        .arg("-benchmarking-output-dir")
        .arg(&dir)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let out = tokio::time::timeout(LIMIT, command.output())
        .await
        .context("the suite hangs")??;
    let said = String::from_utf8_lossy(&out.stdout);
    ensure!(out.status.success(), "{said}");
    let mut all = Vec::new();
    for (name, count) in [("pod", PODS), ("container", CONTAINERS)] {
        let path = dir.join(format!("{name}_benchmark_data.json"));
        let text = fs::read(&path).with_context(|| format!("{}\n{said}", path.display()))?;
        let results: Value = serde_json::from_slice(&text)?;
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        // Of each lifecycle the ns of its operations, in their order.
        let lifecycles = list(&results["datapoints"]);
        ensure!(lifecycles.len() == count, "{} of {count} lifecycles", lifecycles.len());
        for (n, operation) in list(&results["operationsNames"]).iter().enumerate() {
            let ns = lifecycles
                .iter()
                .filter_map(|one| one["operationsDurationsNs"][n].as_f64());
            let mut times: Vec<_> = ns.map(|ns| ns / 1e6).collect();
            times.sort_by(f64::total_cmp);
            let at = |share: f64| {
                times
                    .get((times.len().saturating_sub(1) as f64 * share) as usize)
                    .copied()
            };
            let operation = operation.as_str().unwrap_or_default().to_owned();
            all.push((operation, at(0.5).unwrap_or_default(), at(0.99).unwrap_or_default()));
        }
    }
    Ok(all)
}
