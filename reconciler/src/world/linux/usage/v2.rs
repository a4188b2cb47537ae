//! cgroup v2 (Documentation/admin-guide/cgroup-v2.rst).

use std::path::Path;

use super::text::{Keys, limit, number, pressure, read};
use super::{CgroupUsage, Cpu, Detail, Memory, MemoryDetail, Swap, Throttling, UNLIMITED, memory};
use crate::world::linux::usage::disk::device_name;
use state::usage::Disk;

pub fn usage(dir: &Path) -> Option<CgroupUsage> {
    let cpu = Keys::read(&dir.join("cpu.stat"))?;
    let stat = Keys::read(&dir.join("memory.stat"));
    let of = |key: &str| stat.as_ref().map_or(0, |stat| stat.get(key));
    let now = number(&dir.join("memory.current")).unwrap_or(0);
    let bound = number(&dir.join("memory.max")).unwrap_or(UNLIMITED);
    Some(CgroupUsage {
        at: 0,
        cpu: Cpu {
            usage: cpu.get("usage_usec").saturating_mul(1000),
            rate: None,
            pressure: pressure(&dir.join("cpu.pressure")),
        },
        memory: Memory {
            rss: of("anon"),
            page_faults: of("pgfault"),
            major_page_faults: of("pgmajfault"),
            pressure: pressure(&dir.join("memory.pressure")),
            ..memory(now, of("inactive_file"), bound)
        },
        swap: number(&dir.join("memory.swap.current")).map(|usage| Swap {
            usage,
            available: limit(&dir.join("memory.swap.max")).map(|limit| limit.saturating_sub(usage)),
        }),
        tasks: number(&dir.join("pids.current")).unwrap_or(0),
        io_pressure: pressure(&dir.join("io.pressure")),
    })
}

pub fn detail(dir: &Path) -> Detail {
    let keys = |file: &str| Keys::read(&dir.join(file));
    let (cpu, stat, events) = (keys("cpu.stat"), keys("memory.stat"), keys("memory.events"));
    let of = |keys: &Option<Keys>, key: &str| keys.as_ref().map_or(0, |keys| keys.get(key));
    let micros = |key: &str| of(&cpu, key).saturating_mul(1000);
    Detail {
        cpu_user: micros("user_usec"),
        cpu_system: micros("system_usec"),
        cfs: Throttling {
            periods: of(&cpu, "nr_periods"),
            throttled_periods: of(&cpu, "nr_throttled"),
            throttled: micros("throttled_usec"),
        },
        memory: MemoryDetail {
            cache: of(&stat, "file"),
            kernel: of(&stat, "kernel"),
            mapped_file: of(&stat, "file_mapped"),
            max_usage: number(&dir.join("memory.peak")).unwrap_or(0),
            failures: of(&events, "max"),
            oom_kills: of(&events, "oom_kill"),
            // Always of the whole subtree here.
            own_page_faults: of(&stat, "pgfault"),
            own_major_page_faults: of(&stat, "pgmajfault"),
        },
        tasks_limit: limit(&dir.join("pids.max")),
        disks: disks(&read(&dir.join("io.stat")).unwrap_or_default()),
        ..Detail::default()
    }
}

/// `io.stat`: `8:0 rbytes=1 wbytes=2 rios=3 wios=4 …` a line.
fn disks(text: &str) -> Vec<Disk> {
    text.lines()
        .filter_map(|line| {
            let (number, rest) = line.split_once(' ')?;
            let (major, minor) = number.split_once(':')?;
            let (major, minor) = (major.parse().ok()?, minor.parse().ok()?);
            let of = |key: &str| {
                let mut words = rest.split(' ').filter_map(|word| word.split_once('='));
                words
                    .find(|(name, _)| *name == key)
                    .and_then(|(_, n)| n.parse().ok())
                    .unwrap_or(0)
            };
            Some(Disk {
                major,
                minor,
                device: device_name(major, minor),
                reads: of("rios"),
                writes: of("wios"),
                read_bytes: of("rbytes"),
                write_bytes: of("wbytes"),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A directory with the files that a v2 kernel has; the numbers are made up.
    fn dir() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in [
            (
                "cpu.stat",
                "usage_usec 2500\nuser_usec 1500\nsystem_usec 1000\nnr_periods 9\nnr_throttled 4\nthrottled_usec 70\n",
            ),
            (
                "memory.stat",
                "anon 100\nfile 300\nkernel 20\nfile_mapped 30\ninactive_file 50\npgfault 7\npgmajfault 1\n",
            ),
            ("memory.current", "420\n"),
            ("memory.max", "1000\n"),
            ("memory.peak", "600\n"),
            ("memory.swap.current", "10\n"),
            ("memory.swap.max", "max\n"),
            ("memory.events", "low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\n"),
            ("pids.current", "5\n"),
            ("pids.max", "max\n"),
            ("io.stat", "7:1 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=0 dios=0\n7:2 \n"),
            (
                "memory.pressure",
                "some avg10=0.00 avg60=0.00 avg300=0.00 total=3\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=2\n",
            ),
        ] {
            fs::write(dir.path().join(name), text).unwrap();
        }
        dir
    }

    #[test]
    fn reads_usage() {
        let dir = dir();
        let usage = usage(dir.path()).unwrap();
        assert_eq!(usage.cpu.usage, 2_500_000);
        assert_eq!(usage.cpu.pressure, None, "no file");
        let memory = &usage.memory;
        assert_eq!((memory.usage, memory.working_set, memory.available), (420, 370, 630));
        assert_eq!((memory.rss, memory.page_faults, memory.major_page_faults), (100, 7, 1));
        assert_eq!(memory.pressure.unwrap().some.total, 3000);
        let swap = Swap {
            usage: 10,
            available: None,
        };
        assert_eq!((usage.swap, usage.tasks), (Some(swap), 5));
        fs::write(dir.path().join("memory.swap.max"), "4\n").unwrap();
        assert_eq!(super::usage(dir.path()).unwrap().swap.unwrap().available, Some(0));
        assert!(super::usage(&dir.path().join("absent")).is_none());
    }

    #[test]
    fn reads_detail() {
        let dir = dir();
        let detail = detail(dir.path());
        assert_eq!((detail.cpu_user, detail.cpu_system), (1_500_000, 1_000_000));
        assert_eq!((detail.cfs.throttled_periods, detail.cfs.throttled), (4, 70_000));
        let memory = &detail.memory;
        assert_eq!((memory.cache, memory.kernel, memory.max_usage), (300, 20, 600));
        assert_eq!((memory.failures, memory.oom_kills), (3, 2));
        assert_eq!(detail.tasks_limit, None);
        let disk = &detail.disks[0];
        assert_eq!(
            (disk.read_bytes, disk.write_bytes, disk.reads, disk.writes),
            (1, 2, 3, 4)
        );
        assert_eq!((detail.disks.len(), detail.disks[1].reads), (2, 0));
    }
}
