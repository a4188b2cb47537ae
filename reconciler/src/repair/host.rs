//! Findings about the host: what pods need of it, and what an earlier life of this root left.

use std::fs;
use std::path::Path;
use std::time::UNIX_EPOCH;

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::statvfs::statvfs;

use super::finding::{Finding, Severity};
use crate::engine::Context;

/// Less free than this, and pulls and new pods fail soon, bytes.
const LOW_BYTES: u64 = 256 << 20;
/// Fewer free inodes than this on a file system that counts them.
const LOW_INODES: u64 = 10_000;
/// Files walked for the size of what was set aside.
const WALK: usize = 10_000;

pub fn findings(cx: &Context) -> Vec<Finding> {
    let mut found = Vec::new();
    for dir in [&cx.world.paths.root, &cx.world.paths.state] {
        found.extend(space(dir));
    }
    found.extend(inotify(&cx.world.paths.state));
    found.extend(descriptors());
    found.extend(cni(cx));
    found.extend(hosts(cx));
    if let Err(why) = cx.world.mounts.overlay() {
        let message = format!("{why}: every root file system is a copy of its image");
        found.push(Finding::new("overlay", Severity::Note, "node", message));
    }
    found.extend(cgroups(cx));
    found.extend(set_aside(&cx.world.paths.root));
    found
}

fn space(dir: &Path) -> Vec<Finding> {
    let Ok(stat) = statvfs(dir) else {
        let message = "its file system cannot be looked at";
        return vec![Finding::new(
            "disk",
            Severity::Human,
            dir.display().to_string(),
            message,
        )];
    };
    let mut found = Vec::new();
    let name = dir.display().to_string();
    let unit = stat.fragment_size().max(1);
    let free = stat.blocks_available().saturating_mul(unit);
    let total = stat.blocks().saturating_mul(unit);
    if stat.flags().contains(nix::sys::statvfs::FsFlags::ST_RDONLY) {
        found.push(Finding::new(
            "disk-read-only",
            Severity::Human,
            &name,
            "its file system is read-only",
        ));
    }
    if free < LOW_BYTES.min(total / 20) {
        let message = format!("{} MiB are free of {}", free >> 20, total >> 20);
        let finding = Finding::new("disk-full", Severity::Human, &name, message);
        found.push(Finding {
            size: Some(free),
            ..finding.repair("reconcile images prune")
        });
    }
    let inodes = stat.files();
    if inodes > 0 && stat.files_available() < LOW_INODES.min(inodes / 20) {
        let message = format!("{} inodes are free of {inodes}", stat.files_available());
        found.push(Finding::new("disk-inodes", Severity::Human, &name, message).repair("reconcile images prune"));
    }
    found
}

/// Tried rather than counted: the limits are per user and the others' use cannot be seen.
fn inotify(dir: &Path) -> Option<Finding> {
    let tried = Inotify::init(InitFlags::IN_CLOEXEC).and_then(|it| it.add_watch(dir, AddWatchFlags::IN_DELETE_SELF));
    let key = match tried {
        Ok(_) => return None,
        Err(nix::errno::Errno::EMFILE) => "max_user_instances",
        Err(_) => "max_user_watches",
    };
    let now = fs::read_to_string(format!("/proc/sys/fs/inotify/{key}")).unwrap_or_default();
    let now: u64 = now.trim().parse().unwrap_or(0);
    let message = format!("no file can be watched any more: the limit fs.inotify.{key} of {now} is reached");
    let finding = Finding::new("inotify", Severity::Human, "node", message);
    Some(finding.repair(format!("sysctl -w fs.inotify.{key}={}", (now * 4).max(1024))))
}

fn descriptors() -> Option<Finding> {
    let limit = crate::world::linux::usage::process::max_open_files(i32::try_from(std::process::id()).ok()?)?;
    let used = fs::read_dir("/proc/self/fd").ok()?.count() as u64;
    (used > limit / 10 * 9).then(|| {
        let message = format!("{used} of {limit} file descriptors are in use");
        Finding::new("descriptors", Severity::Human, "node", message).repair("raise LimitNOFILE of the daemon's unit")
    })
}

fn cni(cx: &Context) -> Option<Finding> {
    let (dir, why) = cx.world.network.misconfigured()?;
    Some(Finding::new("cni", Severity::Human, dir.display().to_string(), why))
}

/// Lines of `hosts.toml` and files beside it that are not used.
fn hosts(cx: &Context) -> Vec<Finding> {
    let ignored = cx.world.images.ignored_settings().into_iter();
    ignored
        .map(|(reference, line)| {
            let (file, line) = (line.file.display().to_string(), line.to_string());
            let finding = Finding::new("hosts.toml", Severity::Human, file, line);
            finding.repair(format!("reconcile images explain {reference}"))
        })
        .collect()
}

fn cgroups(cx: &Context) -> Vec<Finding> {
    let missing = cx.world.usage.as_ref().map(|real| real.lacking()).unwrap_or_default();
    missing
        .into_iter()
        .map(|controller| {
            let message = format!("controller {controller} is not there: its limits cannot be kept");
            Finding::new("cgroup", Severity::Human, "node", message)
        })
        .collect()
}

/// Databases that were damaged and kept for a person to look at.
fn set_aside(root: &Path) -> Vec<Finding> {
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    let damaged = entries.filter(|e| e.file_name().to_string_lossy().starts_with("store.damaged-"));
    damaged
        .map(|entry| {
            let path = entry.path();
            let changed = entry.metadata().and_then(|meta| meta.modified()).ok();
            let since = changed.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
            let message = "a damaged database, kept for a look; the records were rebuilt from the copies";
            let finding = Finding::new("store-damaged", Severity::Note, path.display().to_string(), message);
            Finding {
                since: since.and_then(|since| i64::try_from(since.as_nanos()).ok()),
                size: Some(bytes(&path, &mut WALK.clone())),
                ..finding.repair(format!("rm -r {}", path.display()))
            }
        })
        .collect()
}

fn bytes(dir: &Path, left: &mut usize) -> u64 {
    let mut sum = 0;
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if *left == 0 {
            break;
        }
        *left -= 1;
        match entry.metadata() {
            Ok(meta) if meta.is_dir() => sum += bytes(&entry.path(), left),
            Ok(meta) => sum += meta.len(),
            Err(_) => {}
        }
    }
    sum
}
