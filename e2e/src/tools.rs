//! Programs of the node that tests call: run, check, show what they said.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, anyhow, ensure};

/// Runs a command to its end; fails with its output if it does.
pub fn check(command: &mut Command) -> Result<Output> {
    let shown = format!("{command:?}");
    let out = command.output().with_context(|| format!("run {shown}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    ensure!(
        out.status.success(),
        "{shown}: {}\n{}{}",
        out.status,
        text(&out.stdout),
        text(&out.stderr)
    );
    Ok(out)
}

/// True if the program can be run. A test that goes on without it prints SKIPPED, which `.ci/run` counts as a failure.
pub fn installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|dir| dir.join(program).is_file());
    if !found {
        eprintln!("SKIPPED: the program {program} is not installed");
    }
    found
}

/// A program built beside this test, `target/release/<name>`; or below `$RECONCILE_BIN_DIR`, to test an installed one.
pub fn built(name: &str) -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os("RECONCILE_BIN_DIR") {
        return Ok(PathBuf::from(dir).join(name));
    }
    let exe = std::env::current_exe().context("the test's own path")?;
    let dirs = exe.ancestors().skip(1).take(3).map(|dir| dir.join(name));
    let mut dirs = dirs.filter(|path| path.is_file());
    dirs.next()
        .with_context(|| format!("{name} is not built: run `cargo build --release` first"))
}

/// Runs `work` on a thread inside a network namespace. A socket it returns stays there, and holds the namespace.
pub fn in_netns<T: Send + 'static>(
    netns: impl AsRef<Path>,
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> Result<T> {
    let netns = netns.as_ref().to_owned();
    let inside = move || -> Result<T> {
        let file = File::open(&netns).with_context(|| netns.display().to_string())?;
        nix::sched::setns(file, nix::sched::CloneFlags::CLONE_NEWNET).context("enter the network namespace")?;
        Ok(work()?)
    };
    std::thread::spawn(inside)
        .join()
        .map_err(|_| anyhow!("the thread in the network namespace panicked"))?
}
