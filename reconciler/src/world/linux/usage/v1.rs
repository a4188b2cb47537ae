//! cgroup v1 (Documentation/admin-guide/cgroup-v1), also beside an empty v2.

use std::collections::BTreeMap;
use std::path::PathBuf;

use state::usage::Disk;

use super::text::{Keys, limit, number, read};
use super::{CgroupUsage, Cpu, Detail, Memory, MemoryDetail, Swap, Throttling, UNLIMITED, memory};
use crate::world::linux::cgroup::Cgroups;
use crate::world::linux::usage::disk::device_name;

/// One cgroup's directories by controller; what is not mounted is an empty path, where no file is found.
pub struct Dirs {
    cpu: PathBuf,
    cpuacct: PathBuf,
    memory: PathBuf,
    pids: PathBuf,
    blkio: PathBuf,
}

impl Dirs {
    pub fn of(cgroups: &Cgroups, path: &str) -> Option<Dirs> {
        let dir = |controller: &str| cgroups.dir(controller, path).unwrap_or_default();
        Some(Dirs {
            cpu: dir("cpu"),
            cpuacct: dir("cpuacct"),
            memory: cgroups.dir("memory", path)?,
            pids: dir("pids"),
            blkio: dir("blkio"),
        })
    }
}

pub fn usage(dirs: &Dirs) -> Option<CgroupUsage> {
    let stat = Keys::read(&dirs.memory.join("memory.stat"))?;
    let now = number(&dirs.memory.join("memory.usage_in_bytes")).unwrap_or(0);
    let (memory_limit, both_limit) = (
        stat.get("hierarchical_memory_limit"),
        stat.get("hierarchical_memsw_limit"),
    );
    let swapped = stat.get("total_swap");
    // Without swap accounting there is no such limit.
    let accounted = both_limit > 0;
    Some(CgroupUsage {
        at: 0,
        cpu: Cpu {
            usage: number(&dirs.cpuacct.join("cpuacct.usage")).unwrap_or(0),
            ..Cpu::default()
        },
        memory: Memory {
            rss: stat.get("total_rss"),
            page_faults: stat.get("total_pgfault"),
            major_page_faults: stat.get("total_pgmajfault"),
            ..memory(now, stat.get("total_inactive_file"), memory_limit)
        },
        swap: accounted.then(|| Swap {
            usage: swapped,
            available: (both_limit < UNLIMITED).then(|| {
                let limit = both_limit.saturating_sub(memory_limit.min(both_limit));
                limit.saturating_sub(swapped)
            }),
        }),
        tasks: number(&dirs.pids.join("pids.current")).unwrap_or(0),
        io_pressure: None,
    })
}

pub fn detail(dirs: &Dirs) -> Detail {
    let cpu = Keys::read(&dirs.cpu.join("cpu.stat"));
    let stat = Keys::read(&dirs.memory.join("memory.stat"));
    let oom = Keys::read(&dirs.memory.join("memory.oom_control"));
    let of = |keys: &Option<Keys>, key: &str| keys.as_ref().map_or(0, |keys| keys.get(key));
    let bytes = |file: &str| number(&dirs.memory.join(file)).unwrap_or(0);
    let time = |file: &str| number(&dirs.cpuacct.join(file)).unwrap_or(0);
    Detail {
        cpu_user: time("cpuacct.usage_user"),
        cpu_system: time("cpuacct.usage_sys"),
        cfs: Throttling {
            periods: of(&cpu, "nr_periods"),
            throttled_periods: of(&cpu, "nr_throttled"),
            throttled: of(&cpu, "throttled_time"),
        },
        memory: MemoryDetail {
            cache: of(&stat, "total_cache"),
            kernel: bytes("memory.kmem.usage_in_bytes"),
            mapped_file: of(&stat, "total_mapped_file"),
            max_usage: bytes("memory.max_usage_in_bytes"),
            failures: bytes("memory.failcnt"),
            oom_kills: of(&oom, "oom_kill"),
            own_page_faults: of(&stat, "pgfault"),
            own_major_page_faults: of(&stat, "pgmajfault"),
        },
        tasks_limit: limit(&dirs.pids.join("pids.max")),
        disks: disks(
            &read(&dirs.blkio.join("blkio.throttle.io_serviced_recursive")).unwrap_or_default(),
            &read(&dirs.blkio.join("blkio.throttle.io_service_bytes_recursive")).unwrap_or_default(),
        ),
        ..Detail::default()
    }
}

/// Two files of `8:0 Read 3` lines: operations, bytes.
fn disks(operations: &str, bytes: &str) -> Vec<Disk> {
    let mut found: BTreeMap<(u32, u32), Disk> = BTreeMap::new();
    let lines = |text: &str| -> Vec<((u32, u32), bool, u64)> {
        let line = |line: &str| {
            let mut words = line.split(' ');
            let (major, minor) = words.next()?.split_once(':')?;
            let device = (major.parse().ok()?, minor.parse().ok()?);
            let write = match words.next()? {
                "Read" => false,
                "Write" => true,
                _ => return None,
            };
            Some((device, write, words.next()?.parse().ok()?))
        };
        text.lines().filter_map(line).collect()
    };
    let mut set = |of: Vec<((u32, u32), bool, u64)>, field: fn(&mut Disk, bool) -> &mut u64| {
        for ((major, minor), write, n) in of {
            let disk = found.entry((major, minor)).or_insert_with(|| Disk {
                major,
                minor,
                device: device_name(major, minor),
                ..Disk::default()
            });
            *field(disk, write) = n;
        }
    };
    set(lines(operations), |disk, write| {
        if write { &mut disk.writes } else { &mut disk.reads }
    });
    set(lines(bytes), |disk, write| {
        if write {
            &mut disk.write_bytes
        } else {
            &mut disk.read_bytes
        }
    });
    found.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn reads_the_files_of_each_controller() {
        let root = tempfile::tempdir().unwrap();
        let dir = |name: &str| {
            let dir = root.path().join(name);
            fs::create_dir(&dir).unwrap();
            dir
        };
        let dirs = Dirs {
            cpu: dir("cpu"),
            cpuacct: dir("cpuacct"),
            memory: dir("memory"),
            pids: dir("pids"),
            blkio: PathBuf::new(),
        };
        let stat = "swap 1\nhierarchical_memory_limit 1000\nhierarchical_memsw_limit 1500\n\
                    total_cache 300\ntotal_rss 100\n\
                    total_swap 20\ntotal_pgfault 7\npgfault 6\ntotal_inactive_file 50\n";
        for (dir, file, text) in [
            (&dirs.memory, "memory.stat", stat),
            (&dirs.memory, "memory.usage_in_bytes", "420\n"),
            (
                &dirs.memory,
                "memory.oom_control",
                "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
            ),
            (&dirs.memory, "memory.failcnt", "3\n"),
            (&dirs.cpuacct, "cpuacct.usage", "2500\n"),
            (
                &dirs.cpu,
                "cpu.stat",
                "nr_periods 9\nnr_throttled 4\nthrottled_time 70\n",
            ),
            (&dirs.pids, "pids.current", "5\n"),
            (&dirs.pids, "pids.max", "64\n"),
        ] {
            fs::write(dir.join(file), text).unwrap();
        }
        let usage = usage(&dirs).unwrap();
        assert_eq!((usage.cpu.usage, usage.tasks), (2500, 5));
        let memory = &usage.memory;
        assert_eq!((memory.usage, memory.working_set, memory.available), (420, 370, 630));
        assert_eq!((memory.rss, memory.page_faults), (100, 7));
        let swap = Swap {
            usage: 20,
            available: Some(480),
        };
        assert_eq!(usage.swap, Some(swap));
        let detail = detail(&dirs);
        assert_eq!((detail.memory.oom_kills, detail.memory.failures), (2, 3));
        assert_eq!((detail.memory.own_page_faults, detail.tasks_limit), (6, Some(64)));
        assert_eq!(detail.cfs.throttled, 70);
        assert!(detail.disks.is_empty());
    }

    #[test]
    fn joins_operations_and_bytes() {
        let disks = disks(
            "7:1 Read 3\n7:1 Write 4\n7:1 Sync 9\n7:1 Total 7\nTotal 7\n",
            "7:1 Read 100\n7:1 Write 200\n7:2 Read 5\nTotal 305\n",
        );
        let of = |i: usize| {
            (
                disks[i].reads,
                disks[i].writes,
                disks[i].read_bytes,
                disks[i].write_bytes,
            )
        };
        assert_eq!((of(0), of(1), disks.len()), ((3, 4, 100, 200), (0, 0, 5, 0), 2));
    }
}
