//! The same faults on `reconcile` and on containerd, side by side.

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
