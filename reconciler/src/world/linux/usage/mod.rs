//! What cgroups, processes, network namespaces and directories use, read from the kernel's files.
//!
//! ```text
//!   v1 v2      a cgroup's files            -> CgroupUsage, and what only metrics show
//!   disk       a container's own layer     -> bytes, inodes
//!   process    /proc/<pid>                 -> open files, sockets, limits
//!   network    /proc/<pid>/net/dev         -> traffic by interface
//! ```
//!
//! Must not: change anything, remember anything (that is `node/sample.rs`), or run processes. What a container writes
//! is hostile: reads are bounded, links are not followed, mounts are not crossed.

pub mod disk;
pub mod network;
pub mod process;
mod text;
mod v1;
mod v2;

use std::path::PathBuf;

use state::usage::{Able, CgroupUsage, Cpu, Detail, Memory, MemoryDetail, Pressure, Swap, Throttling};

use super::cgroup::Cgroups;

/// Limits beyond this are none: the kernel's spelling of "unlimited" on v1.
const UNLIMITED: u64 = 1 << 62;

/// What the kernel can tell of cgroups here.
pub fn able(cgroups: &Cgroups) -> Able {
    Able {
        // v1 has no pressure of its own, and a container need not be in the unified hierarchy beside it.
        pressure: cgroups.v2 && std::path::Path::new("/proc/pressure/cpu").exists(),
    }
}

/// A cgroup's usage at `at` (ns since the epoch); `None` if there is no such cgroup.
pub fn cgroup(cgroups: &Cgroups, path: &str, at: i64) -> Option<CgroupUsage> {
    let usage = if cgroups.v2 {
        v2::usage(&cgroups.dir("", path)?)
    } else {
        v1::usage(&v1::Dirs::of(cgroups, path)?)
    }?;
    Some(CgroupUsage { at, ..usage })
}

/// What only metrics show of a container's cgroup, `pid` being its first process and `layer` a directory on the file
/// system of its writable layer.
pub fn detail(cgroups: &Cgroups, path: &str, pid: i32, layer: &std::path::Path) -> Option<Detail> {
    let mut detail = if cgroups.v2 {
        v2::detail(&cgroups.dir("", path)?)
    } else {
        v1::detail(&v1::Dirs::of(cgroups, path)?)
    };
    detail.path = path.to_owned();
    let pids = match cgroups.dir(if cgroups.v2 { "" } else { "memory" }, path) {
        Some(dir) => processes(&dir, 0),
        None => Vec::new(),
    };
    detail.processes = pids.len() as u64;
    let open = process::open(&pids);
    detail.files = open.files;
    detail.sockets = open.sockets;
    detail.max_open_files = process::max_open_files(pid);
    detail.file_system = disk::file_system(layer).unwrap_or_default();
    Some(detail)
}

/// The pids in a cgroup and below it, as far as a container nests its own.
fn processes(dir: &std::path::Path, depth: usize) -> Vec<i32> {
    const DEEPEST: usize = 8;
    let mut pids: Vec<i32> = text::read(&dir.join("cgroup.procs"))
        .unwrap_or_default()
        .lines()
        .filter_map(|line| line.parse().ok())
        .collect();
    let Ok(entries) = std::fs::read_dir(dir) else {
        return pids;
    };
    let below: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| depth < DEEPEST && entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect();
    for dir in below {
        pids.extend(processes(&dir, depth + 1));
    }
    pids
}

/// Memory's derived figures: working set, and what is left up to `limit`.
fn memory(usage: u64, inactive_file: u64, limit: u64) -> Memory {
    let working_set = usage.saturating_sub(inactive_file);
    Memory {
        usage,
        working_set,
        available: if limit >= UNLIMITED {
            0
        } else {
            limit.saturating_sub(working_set)
        },
        ..Memory::default()
    }
}

/// The sum of several cgroups, for a pod that has none around it. Pressure does not add up.
pub fn sum(at: i64, parts: &[CgroupUsage]) -> CgroupUsage {
    let total = |of: fn(&CgroupUsage) -> u64| parts.iter().map(of).sum();
    let swap = parts.iter().any(|part| part.swap.is_some()).then(|| Swap {
        usage: total(|part| part.swap.map_or(0, |swap| swap.usage)),
        available: None,
    });
    CgroupUsage {
        at,
        cpu: Cpu {
            usage: total(|part| part.cpu.usage),
            rate: None,
            pressure: None,
        },
        memory: Memory {
            usage: total(|part| part.memory.usage),
            working_set: total(|part| part.memory.working_set),
            available: 0,
            rss: total(|part| part.memory.rss),
            page_faults: total(|part| part.memory.page_faults),
            major_page_faults: total(|part| part.memory.major_page_faults),
            pressure: None,
        },
        swap,
        tasks: total(|part| part.tasks),
        io_pressure: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::Cgroups as _;

    #[test]
    fn working_set_and_available_never_go_below_nothing() {
        assert_eq!(memory(10, 30, u64::MAX).working_set, 0);
        assert_eq!(memory(100, 30, u64::MAX).available, 0, "no limit");
        let limited = memory(100, 30, 90);
        assert_eq!((limited.working_set, limited.available), (70, 20));
        assert_eq!(memory(100, 0, 90).available, 0);
    }

    #[test]
    fn a_cgroup_of_this_kernel_can_be_read() {
        let cgroups = Cgroups::detect().unwrap();
        let path = format!("/reconcile-test-usage-{}", std::process::id());
        assert!(cgroup(&cgroups, &path, 1).is_none());
        cgroups.ensure(&path).unwrap();
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        for dir in cgroups.dirs(&path) {
            std::fs::write(dir.join("cgroup.procs"), child.id().to_string()).unwrap();
        }
        let usage = cgroup(&cgroups, &path, 7).unwrap();
        let detail = detail(&cgroups, &path, child.id() as i32, std::path::Path::new("/"));
        child.kill().unwrap();
        child.wait().unwrap();
        cgroups.remove(&path).unwrap();
        assert_eq!((usage.at, usage.tasks), (7, 1));
        let detail = detail.unwrap();
        assert_eq!(detail.processes, 1);
        assert!(detail.files >= 3, "{detail:?}");
        assert!(detail.max_open_files.is_some());
        assert!(detail.file_system.bytes > 0 && detail.file_system.inodes > 0);
    }
}
