//! `LinuxContainerResources`: the record keeps the CRI's own (cgroup v1) units, so this is one to one.

use state::container::Resources;

use crate::error::{Error, Result};
use crate::runtime::v1;

/// Resources of a request; the error names the field below `field`.
pub(crate) fn from_proto(field: &str, from: &v1::LinuxContainerResources) -> Result<Resources> {
    let least = [
        ("cpu_period", from.cpu_period, 0),
        ("cpu_quota", from.cpu_quota, -1),
        ("cpu_shares", from.cpu_shares, 0),
        ("memory_limit_in_bytes", from.memory_limit_in_bytes, -1),
        ("memory_swap_limit_in_bytes", from.memory_swap_limit_in_bytes, -1),
        ("oom_score_adj", from.oom_score_adj, -1000),
    ];
    for (name, value, least) in least {
        if value < least {
            return Err(Error::invalid(
                format!("{field}.{name}"),
                format!("{value} is below {least}"),
            ));
        }
    }
    if from.oom_score_adj > 1000 {
        let problem = format!("{} is above 1000", from.oom_score_adj);
        return Err(Error::invalid(format!("{field}.oom_score_adj"), problem));
    }
    for key in from.unified.keys() {
        if key.is_empty() || key.contains('/') || !key.contains('.') {
            let problem = "not the name of a cgroup v2 file such as memory.high";
            return Err(Error::invalid(format!("{field}.unified[{key:?}]"), problem));
        }
    }
    Ok(Resources {
        cpu_period: from.cpu_period,
        cpu_quota: from.cpu_quota,
        cpu_shares: from.cpu_shares,
        memory_limit: from.memory_limit_in_bytes,
        memory_swap_limit: from.memory_swap_limit_in_bytes,
        oom_score_adj: from.oom_score_adj,
        cpuset_cpus: from.cpuset_cpus.clone(),
        cpuset_mems: from.cpuset_mems.clone(),
        hugepages: from
            .hugepage_limits
            .iter()
            .map(|l| (l.page_size.clone(), l.limit))
            .collect(),
        unified: from.unified.clone(),
    })
}

pub(crate) fn to_proto(from: &Resources) -> v1::LinuxContainerResources {
    let hugepage = |(page_size, limit): (&String, &u64)| v1::HugepageLimit {
        page_size: page_size.clone(),
        limit: *limit,
    };
    v1::LinuxContainerResources {
        cpu_period: from.cpu_period,
        cpu_quota: from.cpu_quota,
        cpu_shares: from.cpu_shares,
        memory_limit_in_bytes: from.memory_limit,
        memory_swap_limit_in_bytes: from.memory_swap_limit,
        oom_score_adj: from.oom_score_adj,
        cpuset_cpus: from.cpuset_cpus.clone(),
        cpuset_mems: from.cpuset_mems.clone(),
        hugepage_limits: from.hugepages.iter().map(hugepage).collect(),
        unified: from.unified.clone(),
    }
}

/// Lays an update over `old`: zero and empty values leave what was. `oom_score_adj` is fixed at the start.
pub(crate) fn merge(old: &Resources, update: &Resources) -> Resources {
    let number = |old: i64, new: i64| if new == 0 { old } else { new };
    let text = |old: &String, new: &String| if new.is_empty() { old } else { new }.clone();
    let mut merged = Resources {
        cpu_period: number(old.cpu_period, update.cpu_period),
        cpu_quota: number(old.cpu_quota, update.cpu_quota),
        cpu_shares: number(old.cpu_shares, update.cpu_shares),
        memory_limit: number(old.memory_limit, update.memory_limit),
        memory_swap_limit: number(old.memory_swap_limit, update.memory_swap_limit),
        oom_score_adj: old.oom_score_adj,
        cpuset_cpus: text(&old.cpuset_cpus, &update.cpuset_cpus),
        cpuset_mems: text(&old.cpuset_mems, &update.cpuset_mems),
        ..old.clone()
    };
    merged.hugepages.extend(update.hugepages.clone());
    merged.unified.extend(update.unified.clone());
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full() -> v1::LinuxContainerResources {
        v1::LinuxContainerResources {
            cpu_period: 100_000,
            cpu_quota: -1,
            cpu_shares: 512,
            memory_limit_in_bytes: 1 << 28,
            memory_swap_limit_in_bytes: 1 << 29,
            oom_score_adj: -998,
            cpuset_cpus: "0-1".into(),
            cpuset_mems: "0".into(),
            hugepage_limits: vec![v1::HugepageLimit {
                page_size: "2MB".into(),
                limit: 1 << 22,
            }],
            unified: [("memory.high".to_owned(), "1000".to_owned())].into(),
        }
    }

    #[test]
    fn returns_unchanged() {
        assert_eq!(to_proto(&from_proto("r", &full()).unwrap()), full());
    }

    #[test]
    fn merges_what_is_set() {
        let old = from_proto("r", &full()).unwrap();
        assert_eq!(merge(&old, &Resources::default()), old);
        let update = Resources {
            cpu_shares: 2,
            cpuset_cpus: "1".into(),
            unified: [("memory.low".to_owned(), "1".to_owned())].into(),
            oom_score_adj: 5,
            ..Resources::default()
        };
        let merged = merge(&old, &update);
        assert_eq!(
            (merged.cpu_shares, merged.cpuset_cpus.as_str(), merged.oom_score_adj),
            (2, "1", -998)
        );
        assert_eq!((merged.memory_limit, merged.unified.len()), (1 << 28, 2));
    }

    #[test]
    fn names_the_wrong_field() {
        type Spoiler = fn(&mut v1::LinuxContainerResources);
        let cases: [(Spoiler, &str); 4] = [
            (|r| r.cpu_quota = -2, "r.cpu_quota: "),
            (|r| r.memory_limit_in_bytes = -2, "r.memory_limit_in_bytes: "),
            (|r| r.oom_score_adj = 1001, "r.oom_score_adj: "),
            (
                |r| drop(r.unified.insert("../x.y".into(), "".into())),
                "r.unified[\"../x.y\"]: ",
            ),
        ];
        for (spoil, start) in cases {
            let mut resources = full();
            spoil(&mut resources);
            let error = from_proto("r", &resources).unwrap_err().to_string();
            assert!(error.starts_with(start), "{error}");
        }
    }
}
