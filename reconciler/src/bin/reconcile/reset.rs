//! `reconcile reset`: stops and removes everything that this root stands for, then the root's content itself.

use std::fs;
use std::io::{ErrorKind, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use futures::future::join_all;
use nix::mount::{MntFlags, umount2};
use reconciler::engine::Context;
use reconciler::engine::sweep::{self, Orphan};
use reconciler::runtime::Runtime;
use reconciler::world::linux::trash::Trash;
use state::debt::DebtKind;
use state::pod::PodKind;
use state::sandbox::SandboxKind;
use state::{Kind, Store};

use crate::client::Client;
use crate::options::Global;
use crate::print;

/// For all pods at once; the longest grace period comes on top.
const TEARDOWN: Duration = Duration::from_secs(120);
/// What a root holds, in the order of removal. Its id goes last: as long as anything is left, a second reset must know
/// the names of what this root made.
const ROOT: &[&str] = &[
    "declared",
    "pods",
    "images",
    "layers",
    "content",
    "store",
    "store.watermark",
    "store.ballast",
    "store.lock",
    "id",
];

#[derive(Args)]
pub struct Reset {
    /// Do not ask
    #[arg(short, long)]
    yes: bool,
}

pub async fn run(global: &Global, args: &Reset) -> Result<ExitCode> {
    if Client::connect(&global.socket).await?.is_some() {
        bail!(
            "a daemon serves {}; stop it first (systemctl stop reconcile)",
            global.socket.display()
        );
    }
    let used = global.root.join("id").exists();
    if !used && !global.state.join("pods").exists() {
        print::line(format_args!("nothing to do: {} is not in use", global.root.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    if !args.yes && !agreed(global)? {
        bail!("nothing was removed");
    }
    if used {
        tear_down(global).await?;
    }
    let (root, state, socket) = (global.root.clone(), global.state.clone(), global.socket.clone());
    tokio::task::spawn_blocking(move || erase(&root, &state, &socket)).await??;
    print::line(format_args!(
        "{} is as if it had never been used",
        global.root.display()
    ))?;
    Ok(ExitCode::SUCCESS)
}

fn agreed(global: &Global) -> Result<bool> {
    if !std::io::stdin().is_terminal() {
        bail!(
            "this removes all pods, images and records of {}; say so with --yes",
            global.root.display()
        );
    }
    print::out(format_args!(
        "Remove all pods, images and records of {}? [y/N] ",
        global.root.display()
    ))?;
    std::io::stdout().flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

/// Removes pods by the loop, as `delete` does, then what no record knows, then what the pods shared.
async fn tear_down(global: &Global) -> Result<()> {
    let running = Runtime::open(global.runtime()?).await?.start().await?;
    let cx = running.cx.clone();
    let removed = async {
        remove_all::<PodKind>(&cx.store, |pod| pod.termination_grace_period_seconds).await?;
        remove_all::<SandboxKind>(&cx.store, |_| 0).await
    }
    .await;
    running.stop().await;
    removed?;
    let mut orphans = sweep::orphans(&cx).await?;
    let quarantined = cx.quarantined();
    let lost = quarantined.iter().filter(|(kind, ..)| kind == SandboxKind::KIND);
    orphans.extend(lost.map(|(_, uid, _)| Orphan::Sandbox(uid.clone())));
    for orphan in &orphans {
        sweep::sweep(&cx, orphan).await?;
    }
    if !cx.store.list::<DebtKind>().is_empty() {
        eprintln!(
            "reconcile: {} network teardowns are still owed and now forgotten",
            cx.store.list::<DebtKind>().len()
        );
    }
    cx.world.network.sweep_node().await?;
    let shared = cx.world.paths.default_cgroup();
    for path in [cx.world.shims.cgroup().to_owned(), format!("{shared}-shims"), shared] {
        cx.world.cgroups.kill(&path)?;
        cx.world.cgroups.remove(&path)?;
    }
    close(cx).await
}

/// Marks every record of a kind deleted and waits until all are gone.
async fn remove_all<K: Kind>(store: &Store, grace: fn(&K::Spec) -> i64) -> Result<()> {
    let all = store.list::<K>();
    let longest = all.iter().map(|object| grace(&object.spec)).max().unwrap_or(0);
    let deadline = Instant::now() + TEARDOWN + Duration::from_secs(longest.clamp(0, 86_400).unsigned_abs());
    let gone = join_all(all.iter().map(|object| async move {
        store.delete::<K>(object.uid()).await?;
        store
            .wait::<K, (), _>(object.uid(), Some(deadline), |now| now.is_none().then_some(()))
            .await
    }))
    .await;
    let failures: Vec<_> = gone
        .into_iter()
        .filter_map(|r| r.err().map(|e| e.to_string()))
        .collect();
    if failures.is_empty() {
        return Ok(());
    }
    bail!(
        "{}\nnothing else was removed; repeat the command once the cause is gone",
        failures.join("\n")
    )
}

/// The store is closed by its last owner's end, which blocks.
async fn close(cx: Arc<Context>) -> Result<()> {
    tokio::task::spawn_blocking(move || drop(cx))
        .await
        .context("close the store")
}

/// Unmounts and deletes what is left in the two directories, and the directories where nothing else lies in them.
fn erase(root: &Path, state: &Path, socket: &Path) -> Result<()> {
    unmount_below(&[root.join("pods"), root.join("declared"), state.join("pods")])?;
    for path in [state.join("pods"), socket.to_owned()] {
        delete(&path)?;
    }
    if root.exists() {
        let trash = Trash::open(root)?;
        for name in ROOT {
            if *name == "id" {
                trash.empty()?;
            }
            // The lists of contents can be long and deep; the trash's walk is made for that.
            match trash.bury(&root.join(name)) {
                Ok(()) => {}
                Err(_) => delete(&root.join(name))?,
            }
        }
        trash.empty()?;
        delete(&root.join("trash"))?;
    }
    for dir in [root, state] {
        leave(dir)?;
    }
    Ok(())
}

/// Absent is success.
fn delete(path: &Path) -> Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(e) => Err(e),
    };
    match removed {
        Err(e) if e.kind() != ErrorKind::NotFound => {
            Err(e).with_context(|| format!("cannot delete {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Removes a directory if nothing is left in it.
fn leave(dir: &Path) -> Result<()> {
    match fs::remove_dir(dir) {
        Err(e) if e.kind() == ErrorKind::DirectoryNotEmpty => {
            let entries = fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))?;
            let names: Vec<_> = entries
                .flatten()
                .map(|e| e.file_name().to_string_lossy().into_owned())
                .collect();
            eprintln!(
                "reconcile: left alone in {}: {}",
                dir.display(),
                print::plain(&names.join(", "))
            );
            Ok(())
        }
        // A mount point, or a directory that may not be removed: it is empty, which is enough.
        _ => Ok(()),
    }
}

/// Unmounts everything below these directories, the innermost first.
fn unmount_below(dirs: &[PathBuf]) -> Result<()> {
    let table = fs::read_to_string("/proc/self/mountinfo").context("cannot read the mount table")?;
    for point in mount_points(&table).into_iter().rev() {
        if dirs.iter().any(|dir| point.starts_with(dir)) {
            let flags = MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW;
            umount2(&point, flags).with_context(|| format!("cannot unmount {}", point.display()))?;
        }
    }
    Ok(())
}

/// The mount points in the order of mounting (proc_pid_mountinfo(5), field 5, with `\040` for a space).
fn mount_points(table: &str) -> Vec<PathBuf> {
    let unescaped = |field: &str| {
        let mut parts = field.split('\\');
        let mut path = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            match part.get(..3).and_then(|octal| u8::from_str_radix(octal, 8).ok()) {
                Some(byte) => {
                    path.push(char::from(byte));
                    path.push_str(&part[3..]);
                }
                None => path.push_str(part),
            }
        }
        PathBuf::from(path)
    };
    table
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(unescaped)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_read_with_their_escapes() {
        let table = "22 1 0:1 / / rw - ext4 x rw\n30 22 0:2 / /a\\040b/c rw - tmpfs x rw\n";
        assert_eq!(mount_points(table), [PathBuf::from("/"), PathBuf::from("/a b/c")]);
    }

    #[test]
    fn erases_what_is_ours_and_leaves_what_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let (root, state) = (dir.path().join("root"), dir.path().join("state"));
        fs::create_dir_all(root.join("pods/x/containers")).unwrap();
        fs::create_dir_all(state.join("pods/x")).unwrap();
        fs::write(root.join("id"), "x").unwrap();
        fs::write(root.join("precious"), "not ours").unwrap();
        fs::write(state.join("reconcile.sock"), "").unwrap();
        let again = || erase(&root, &state, &state.join("reconcile.sock")).unwrap();
        again();
        assert!(!state.exists());
        let left: Vec<_> = fs::read_dir(&root).unwrap().flatten().map(|e| e.file_name()).collect();
        assert_eq!(left, ["precious"]);
        again();
    }
}
