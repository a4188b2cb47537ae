//! The same faults on `reconcile` and on containerd, side by side.

mod benchmarks;
mod runtime;
mod trials;

use anyhow::{Context, Result};

use runtime::Runtime;

/// Rows: the fault, what ours did, what containerd did.
pub async fn table() -> Result<String> {
    let ours = column(Runtime::ours().await?).await.context("reconcile")?;
    let theirs = column(Runtime::containerd().await?).await.context("containerd")?;
    let mut text = "| | reconcile | containerd |\n|---|---|---|\n".to_owned();
    for ((what, a), (_, b)) in ours.iter().zip(&theirs) {
        text += &format!("| {what} | {a} | {b} |\n");
    }
    Ok(text)
}

/// Rows: an operation, its p50 / p99 in ms on ours and on containerd, and how many times ours the other's median is.
pub async fn benchmarks() -> Result<String> {
    let ours = benchmark(Runtime::ours().await?).await.context("reconcile")?;
    let theirs = benchmark(Runtime::containerd().await?).await.context("containerd")?;
    let mut text = "| ms, p50 / p99 | reconcile | containerd | of ours |\n|---|---|---|---|\n".to_owned();
    for ((what, p50, p99), (_, other50, other99)) in ours.iter().zip(&theirs) {
        let times = other50 / p50;
        text += &format!("| {what} | {p50:.1} / {p99:.1} | {other50:.1} / {other99:.1} | {times:.1} × |\n");
    }
    Ok(text)
}

async fn benchmark(runtime: Runtime) -> Result<Vec<(String, f64, f64)>> {
    let rows = benchmarks::run(&runtime).await;
    let told = runtime.log_tail();
    let ended = runtime.end().await;
    let rows = rows.context(told)?;
    ended?;
    Ok(rows)
}

async fn column(mut runtime: Runtime) -> Result<trials::Rows> {
    let rows = rows(&mut runtime).await;
    let told = runtime.log_tail();
    let ended = runtime.end().await;
    let rows = rows.context(told)?;
    ended?;
    Ok(rows)
}

async fn rows(runtime: &mut Runtime) -> Result<trials::Rows> {
    let mut rows = Vec::new();
    rows.extend(trials::amid_creates(runtime).await.context("killed amid creates")?);
    rows.extend(trials::away(runtime).await.context("away while containers end")?);
    rows.extend(trials::shim(runtime).await.context("shim killed")?);
    rows.extend(trials::pause(runtime).await.context("pause killed")?);
    rows.extend(trials::logs(runtime).await.context("killed under log load")?);
    for row in &rows {
        eprintln!("{}: {}", row.0, row.1);
    }
    Ok(rows)
}
