//! Limits (CRI `LinuxContainerResources`, OCI config-linux `resources`): v1 values, which the runtime converts for v2.

use std::collections::HashMap;

use oci_spec::runtime::{LinuxCpu, LinuxHugepageLimit, LinuxMemory, LinuxResources};
use state::container::Resources;

use super::{HostFacts, Result, SpecError};

const SWAP_FILE: &str = "memory.swap.max";

/// The limits without device rules. 0 and empty mean not set.
///
/// A memory limit without a swap limit means no swap, where swap can be limited at all; where it cannot, swap limits
/// are left out. Page sizes that this node does not limit are left out too.
///
/// # Errors
/// For negative values other than the documented -1, swap below memory, and cgroup v2 files that are no file names.
pub fn linux_resources(wish: &Resources, host: &HostFacts) -> Result<LinuxResources> {
    let memory = memory(wish, host)?;
    let mut unified = unified(wish, host)?;
    // The runtime takes a difference of zero between the two for "not set" and would leave swap unlimited.
    let swapless = memory.is_some_and(|m| m.limit().is_some_and(|limit| limit > 0) && m.swap() == m.limit());
    if host.cgroup_v2 && swapless {
        unified.entry(SWAP_FILE.into()).or_insert_with(|| "0".into());
    }
    let mut resources = LinuxResources::default();
    resources
        .set_cpu(cpu(wish)?)
        .set_memory(memory)
        .set_hugepage_limits(hugepages(wish, host))
        .set_unified((!unified.is_empty()).then_some(unified));
    Ok(resources)
}

fn cpu(wish: &Resources) -> Result<Option<LinuxCpu>> {
    let unsigned = |field: &str, value: i64| {
        let value = u64::try_from(value)
            .map_err(|_| SpecError::invalid(format!("spec.resources.{field}"), "must not be negative"))?;
        Ok((value != 0).then_some(value))
    };
    if wish.cpu_quota < -1 {
        return Err(SpecError::invalid(
            "spec.resources.cpuQuota",
            "must be -1 (no limit) or microseconds",
        ));
    }
    let mut cpu = LinuxCpu::default();
    cpu.set_shares(unsigned("cpuShares", wish.cpu_shares)?)
        .set_period(unsigned("cpuPeriod", wish.cpu_period)?)
        .set_quota((wish.cpu_quota != 0).then_some(wish.cpu_quota))
        .set_cpus(text(&wish.cpuset_cpus))
        .set_mems(text(&wish.cpuset_mems));
    Ok((cpu != LinuxCpu::default()).then_some(cpu))
}

fn text(value: &str) -> Option<String> {
    (!value.is_empty()).then(|| value.to_string())
}

fn memory(wish: &Resources, host: &HostFacts) -> Result<Option<LinuxMemory>> {
    let invalid = |field: &str, reason: String| Err(SpecError::invalid(format!("spec.resources.{field}"), reason));
    let (limit, swap) = (wish.memory_limit, wish.memory_swap_limit);
    if limit < -1 {
        return invalid("memoryLimit", "must be -1 (no limit) or bytes".into());
    }
    if swap < -1 {
        return invalid(
            "memorySwapLimit",
            "must be -1 (no limit) or bytes of memory and swap together".into(),
        );
    }
    if swap > 0 && limit <= 0 {
        return invalid(
            "memorySwapLimit",
            "needs a memoryLimit: it counts memory and swap together".into(),
        );
    }
    if swap > 0 && swap < limit {
        return invalid(
            "memorySwapLimit",
            format!("{swap} is below memoryLimit {limit}: it counts both together"),
        );
    }
    let swap = match (host.swap_accounting, limit, swap) {
        (false, ..) | (true, 0, _) => None,
        (true, -1, _) => Some(-1),
        (true, limit, 0) => Some(limit),
        (true, _, swap) => Some(swap),
    };
    // With no limit on memory the runtime also lifts that on swap, and fails where there is no such file.
    let limit = match limit {
        0 => None,
        -1 if swap.is_none() => None,
        limit => Some(limit),
    };
    let mut memory = LinuxMemory::default();
    memory.set_limit(limit).set_swap(swap);
    Ok((memory != LinuxMemory::default()).then_some(memory))
}

fn hugepages(wish: &Resources, host: &HostFacts) -> Option<Vec<LinuxHugepageLimit>> {
    let known = wish.hugepages.iter().filter(|(size, _)| host.hugepages.contains(size));
    let limits: Vec<_> = known
        .map(|(size, bytes)| {
            let mut limit = LinuxHugepageLimit::default();
            limit
                .set_page_size(size.clone())
                .set_limit(i64::try_from(*bytes).unwrap_or(i64::MAX));
            limit
        })
        .collect();
    (!limits.is_empty()).then_some(limits)
}

/// Whether a file of cgroup v2 is one of a controller, directly in the cgroup.
pub fn is_limit_file(name: &str) -> bool {
    name.contains('.') && !name.contains('/') && !name.starts_with("cgroup.") && !name.starts_with('.')
}

/// Raw cgroup v2 files, written last. The core files (`cgroup.*`) are the runtime's own.
fn unified(wish: &Resources, host: &HostFacts) -> Result<HashMap<String, String>> {
    if !wish.unified.is_empty() && !host.cgroup_v2 {
        let reason = "raw cgroup files need cgroup v2; this node runs v1";
        return Err(SpecError::unsupported("spec.resources.unified", reason));
    }
    for name in wish.unified.keys() {
        if !is_limit_file(name) {
            return Err(SpecError::invalid(
                format!("spec.resources.unified[{name}]"),
                "is not the name of a controller's file, such as memory.high",
            ));
        }
    }
    Ok(wish.unified.clone().into_iter().collect())
}
