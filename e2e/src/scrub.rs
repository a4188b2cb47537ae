//! Takes away by force what a failed test left behind: only what bears its mark.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Result;
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::leaks::{Census, Mark};

/// Kills processes, then removes mounts, namespaces, links, tables and cgroups of `mark`. Best effort.
pub fn scrub(mark: &Mark) -> Result<()> {
    let start = Instant::now();
    let mut census = Census::of(mark)?;
    while census.kind("process").next().is_some() && start.elapsed() < Duration::from_secs(5) {
        for line in census.kind("process") {
            let pid = line.split(' ').next().and_then(|pid| pid.parse().ok());
            if let Some(pid) = pid {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
        std::thread::sleep(Duration::from_millis(20));
        census = Census::of(mark)?;
    }
    let mut points: Vec<_> = census
        .kind("mount")
        .filter_map(|mount| mount.split(' ').next())
        .collect();
    points.sort_by_key(|point| std::cmp::Reverse(point.len()));
    for point in points {
        while umount2(point, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW).is_ok() {}
    }
    for pin in census.kind("netns") {
        let _ = umount2(Path::new(pin), MntFlags::MNT_DETACH);
        let _ = fs::remove_file(pin);
    }
    for link in census.kind("link").filter_map(|link| link.split(' ').next()) {
        quietly(Command::new("ip").args(["link", "delete", link]));
    }
    for table in census.kind("nft table") {
        quietly(Command::new("nft").args(["delete", "table", "inet", table]));
    }
    let mut cgroups: Vec<_> = census.kind("cgroup").collect();
    cgroups.sort_by_key(|path| std::cmp::Reverse(path.len()));
    for cgroup in cgroups {
        let _ = fs::remove_dir(cgroup);
    }
    Ok(())
}

fn quietly(command: &mut Command) {
    let _ = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
}
