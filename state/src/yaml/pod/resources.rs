//! A container's requests and limits.

use std::collections::BTreeMap;

use super::super::kubernetes::{self as k8s, Quantity};
use super::super::locate::At;
use super::super::{Reader, quantity};
use super::join;
use crate::container::Resources;

/// µs; the kubelet's `quotaPeriod`.
const CPU_PERIOD: i64 = 100_000;

impl Reader<'_> {
    /// Requests and limits in the CRI's units, as the kubelet converts them.
    pub(super) fn resources(&mut self, at: &str, resources: k8s::ResourceRequirements) -> Resources {
        self.unsupported(at, &[("claims", resources.claims.is_some())]);
        let limits = self.quantities(&join(at, "limits"), resources.limits);
        let requests = self.quantities(&join(at, "requests"), resources.requests);
        for (name, request) in &requests {
            if limits.get(name).is_some_and(|limit| limit < request) {
                self.at(
                    &join(at, &format!("requests.{name}")),
                    At::Value,
                    "is more than the limit".into(),
                );
            }
        }
        let whole = |milli: &i64| milli / 1000 + i64::from(milli % 1000 > 0);
        let mut converted = Resources::default();
        if let Some(limit) = limits.get("cpu").filter(|limit| **limit > 0) {
            converted.cpu_period = CPU_PERIOD;
            converted.cpu_quota = (limit.saturating_mul(CPU_PERIOD) / 1000).max(1000);
        }
        let request = requests.get("cpu").or(limits.get("cpu")).copied().unwrap_or(0);
        converted.cpu_shares = (request.saturating_mul(1024) / 1000).clamp(2, 262_144);
        converted.memory_limit = limits.get("memory").map_or(0, whole);
        for (name, limit) in &limits {
            if let Some(size) = name.strip_prefix("hugepages-") {
                match page_size(size) {
                    Some(page) => drop(converted.hugepages.insert(page, whole(limit).unsigned_abs())),
                    None => self.at(&format!("{at}.limits.{name}"), At::Key, "unknown page size".into()),
                }
            }
        }
        converted
    }

    /// Thousandths by resource name.
    fn quantities(&mut self, at: &str, given: Option<BTreeMap<String, Quantity>>) -> BTreeMap<String, i64> {
        let mut read = BTreeMap::new();
        for (name, Quantity(text)) in given.unwrap_or_default() {
            let path = join(at, &name);
            match quantity::milli(&text) {
                Err(problem) => self.at(&path, At::Value, problem),
                Ok(_) if name == "ephemeral-storage" => self.meaningless(at, &[(&name, true)]),
                Ok(milli) if name == "cpu" || name == "memory" || name.starts_with("hugepages-") => {
                    read.insert(name, milli);
                }
                Ok(_) => self.unsupported(at, &[(&name, true)]),
            }
        }
        read
    }
}

/// `2Mi` to the `2MB` that cgroup files are named by.
fn page_size(size: &str) -> Option<String> {
    let bytes = quantity::whole(size)
        .ok()
        .filter(|bytes| bytes.count_ones() == 1 && *bytes >= 1 << 10)?;
    Some(match bytes.trailing_zeros() {
        10..20 => format!("{}KB", bytes >> 10),
        20..30 => format!("{}MB", bytes >> 20),
        _ => format!("{}GB", bytes >> 30),
    })
}

#[cfg(test)]
mod tests {
    use super::page_size;

    #[test]
    fn page_sizes_are_named_as_the_kernel_does() {
        for (size, wanted) in [
            ("2Mi", Some("2MB")),
            ("1Gi", Some("1GB")),
            ("64Ki", Some("64KB")),
            ("3Mi", None),
        ] {
            assert_eq!(page_size(size).as_deref(), wanted, "{size}");
        }
    }
}
