//! Findings about the host: what pods need of it, and what an earlier life of this root left.

use std::fs;
use std::os::unix::fs::MetadataExt;
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
        found.push(Finding::new("overlay", Severity::Note, "node", message).repair("modprobe overlay"));
    }
    found.extend(cgroups(cx));
    found.extend(set_aside(&cx.world.paths.root));
    found
}

fn space(dir: &Path) -> Vec<Finding> {
    let Ok(stat) = statvfs(dir) else {
        let (name, message) = (dir.display().to_string(), "its file system cannot be looked at");
        let command = format!("findmnt --target {name}");
        return vec![Finding::new("disk", Severity::Human, name, message).repair(command)];
    };
    let mut found = Vec::new();
    let name = dir.display().to_string();
    let unit = stat.fragment_size().max(1);
    let free = stat.blocks_available().saturating_mul(unit);
    let total = stat.blocks().saturating_mul(unit);
    if stat.flags().contains(nix::sys::statvfs::FsFlags::ST_RDONLY) {
        let command = format!("mount -o remount,rw \"$(findmnt -no TARGET --target {name})\"");
        let message = "its file system is read-only";
        found.push(Finding::new("disk-read-only", Severity::Human, &name, message).repair(command));
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
        let message =
            format!("{used} of {limit} file descriptors are in use; for good: LimitNOFILE of the daemon's unit");
        let command = format!(
            "prlimit --pid {} --nofile={}",
            std::process::id(),
            limit.saturating_mul(4)
        );
        Finding::new("descriptors", Severity::Human, "node", message).repair(command)
    })
}

fn cni(cx: &Context) -> Vec<Finding> {
    let all = cx.world.network.misconfigured().into_iter();
    all.map(|(dir, why)| Finding::new("cni", Severity::Human, dir.display().to_string(), why))
        .collect()
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
            let finding = Finding::new("cgroup", Severity::Human, "node", message);
            match cx.world.cgroups.v2() {
                true => finding.repair(format!("echo +{controller} > /sys/fs/cgroup/cgroup.subtree_control")),
                false => finding,
            }
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
            let message = "a damaged database, kept for a look; the records were rebuilt from the copies";
            let finding = Finding::new("store-damaged", Severity::Note, path.display().to_string(), message);
            Finding {
                since: modified(&path),
                size: Some(size(&path)),
                ..finding.repair(format!("rm -r {}", path.display()))
            }
        })
        .collect()
}

/// When something was last changed, ns since the epoch.
pub fn modified(path: &Path) -> Option<i64> {
    let changed = path.symlink_metadata().and_then(|meta| meta.modified()).ok()?;
    i64::try_from(changed.duration_since(UNIX_EPOCH).ok()?.as_nanos()).ok()
}

/// Bytes of the files below a directory and on its file system, as far as they are walked.
pub fn size(dir: &Path) -> u64 {
    let device = dir.symlink_metadata().map_or(0, |meta| meta.dev());
    bytes(dir, device, &mut WALK.clone())
}

fn bytes(dir: &Path, device: u64, left: &mut usize) -> u64 {
    let mut sum = 0;
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if *left == 0 {
            break;
        }
        *left -= 1;
        match entry.metadata() {
            Ok(meta) if meta.dev() != device => {}
            Ok(meta) if meta.is_dir() => sum += bytes(&entry.path(), device, left),
            Ok(meta) => sum += meta.len(),
            Err(_) => {}
        }
    }
    sum
}
