//! The log on stderr, and another level for it while the program runs.

use std::io::IsTerminal;
use std::sync::OnceLock;

use anyhow::{Context, Result};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Registry, fmt, reload};

static HANDLE: OnceLock<reload::Handle<EnvFilter, Registry>> = OnceLock::new();

/// Begins to log what the filter lets through.
pub fn start(filter: EnvFilter) {
    let (layer, handle) = reload::Layer::new(filter);
    let lines = fmt::layer()
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(std::io::stderr().is_terminal());
    tracing_subscriber::registry().with(layer).with(lines).init();
    let _ = HANDLE.set(handle);
}

/// Lets other lines through from now on.
pub fn change(filter: EnvFilter) -> Result<()> {
    let handle = HANDLE.get().context("the log was not begun")?;
    handle.reload(filter).context("change the log's filter")
}
