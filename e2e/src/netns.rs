//! A pod's network as `ip` sees it in the pod's namespace.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::tools;

/// What `ip` tells inside the namespace pinned at `netns`; an error once it is gone.
pub fn inside(netns: &Path, args: &[&str]) -> Result<String> {
    let name = netns.file_name().context("netns")?.to_string_lossy().into_owned();
    let out = tools::check(Command::new("ip").args(["-n", &name]).args(args))?;
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Is the pod's link up, with an address?
pub fn connected(netns: &Path) -> Result<()> {
    let shown = inside(netns, &["addr", "show", "dev", "eth0"])?;
    ensure!(
        shown.contains("inet ") && shown.contains("state UP"),
        "still so: {shown}"
    );
    Ok(())
}
