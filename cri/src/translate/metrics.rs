//! The metrics of pods, under cAdvisor's names and labels so that dashboards work; the CRI has whole numbers only.

use state::usage::{Able, ContainerUsage, Detail, Disk, Interface, Pressure, SandboxUsage, Traffic};
use state::{Container, PodSandbox};

use crate::runtime::v1;

/// Labels of every sample, in this order.
const KEYS: [&str; 6] = ["id", "name", "image", "namespace", "pod", "container"];

/// One metric of containers.
struct Family {
    name: &'static str,
    help: &'static str,
    kind: v1::MetricType,
    /// Labels behind [`KEYS`].
    labels: &'static [&'static str],
    /// Needs the kernel's pressure stall information.
    pressure: bool,
    samples: fn(&Sampled) -> Samples,
}

/// What samples are made from.
struct Sampled<'a> {
    container: &'a Container,
    usage: &'a ContainerUsage,
    detail: &'a Detail,
}

/// Values, each with its labels behind [`KEYS`].
type Samples = Vec<(Vec<String>, u64)>;

fn plain(value: u64) -> Samples {
    vec![(Vec::new(), value)]
}

fn labelled<const N: usize>(samples: [(&[&str], u64); N]) -> Samples {
    let owned = |labels: &[&str]| labels.iter().map(|&label| label.to_owned()).collect();
    samples
        .into_iter()
        .map(|(labels, value)| (owned(labels), value))
        .collect()
}

fn by_disk(from: &Sampled, value: fn(&Disk) -> u64) -> Samples {
    let sample = |disk: &Disk| (vec![disk.device.clone()], value(disk));
    from.detail.disks.iter().map(sample).collect()
}

fn on_file_system(from: &Sampled, value: u64) -> Samples {
    vec![(vec![from.detail.file_system.device.clone()], value)]
}

fn seconds(ns: u64) -> u64 {
    ns / 1_000_000_000
}

fn stalled(pressure: Option<Pressure>, of: fn(&Pressure) -> u64) -> Samples {
    pressure
        .map(|pressure| plain(seconds(of(&pressure))))
        .unwrap_or_default()
}

/// A limit as it was asked for: 0 is none, as cAdvisor has it.
fn limit(value: i64) -> Samples {
    plain(u64::try_from(value).unwrap_or(0))
}

const fn counter(name: &'static str, help: &'static str, samples: fn(&Sampled) -> Samples) -> Family {
    Family {
        name,
        help,
        kind: v1::MetricType::Counter,
        labels: &[],
        pressure: false,
        samples,
    }
}

const fn gauge(name: &'static str, help: &'static str, samples: fn(&Sampled) -> Samples) -> Family {
    Family {
        kind: v1::MetricType::Gauge,
        ..counter(name, help, samples)
    }
}

impl Family {
    const fn by(self, labels: &'static [&'static str]) -> Family {
        Family { labels, ..self }
    }

    const fn needs_pressure(self) -> Family {
        Family { pressure: true, ..self }
    }
}

const DEVICE: &[&str] = &["device"];

#[rustfmt::skip]
const CONTAINER: &[Family] = &[
    counter("container_cpu_usage_seconds_total", "Processor time, all cores.",
        |f| plain(seconds(f.usage.cgroup.cpu.usage))),
    counter("container_cpu_user_seconds_total", "Processor time in user mode.", |f| plain(seconds(f.detail.cpu_user))),
    counter("container_cpu_system_seconds_total", "Processor time in the kernel.",
        |f| plain(seconds(f.detail.cpu_system))),
    counter("container_cpu_cfs_periods_total", "Elapsed periods of the processor quota.",
        |f| plain(f.detail.cfs.periods)),
    counter("container_cpu_cfs_throttled_periods_total", "Periods in which the quota was used up.",
        |f| plain(f.detail.cfs.throttled_periods)),
    counter("container_cpu_cfs_throttled_seconds_total", "Time without processor for want of quota.",
        |f| plain(seconds(f.detail.cfs.throttled))),
    gauge("container_memory_cache", "Bytes of page cache.", |f| plain(f.detail.memory.cache)),
    gauge("container_memory_rss", "Bytes of anonymous memory.", |f| plain(f.usage.cgroup.memory.rss)),
    gauge("container_memory_kernel_usage", "Bytes of kernel memory.", |f| plain(f.detail.memory.kernel)),
    gauge("container_memory_mapped_file", "Bytes of mapped files.", |f| plain(f.detail.memory.mapped_file)),
    gauge("container_memory_swap", "Bytes in swap.", |f| plain(f.usage.cgroup.swap.map_or(0, |swap| swap.usage))),
    counter("container_memory_failcnt", "How often the memory limit was met.", |f| plain(f.detail.memory.failures)),
    gauge("container_memory_usage_bytes", "Bytes of memory, caches included.",
        |f| plain(f.usage.cgroup.memory.usage)),
    gauge("container_memory_max_usage_bytes", "The most bytes of memory so far.",
        |f| plain(f.detail.memory.max_usage.max(f.usage.cgroup.memory.usage))),
    gauge("container_memory_working_set_bytes", "Bytes of memory without inactive page cache.",
        |f| plain(f.usage.cgroup.memory.working_set)),
    counter("container_memory_failures_total", "Page faults.", |f| labelled([
        (&["pgfault", "container"], f.detail.memory.own_page_faults),
        (&["pgmajfault", "container"], f.detail.memory.own_major_page_faults),
        (&["pgfault", "hierarchy"], f.usage.cgroup.memory.page_faults),
        (&["pgmajfault", "hierarchy"], f.usage.cgroup.memory.major_page_faults),
    ])).by(&["failure_type", "scope"]),
    counter("container_oom_events_total", "Processes killed for want of memory.", |f| plain(f.detail.memory.oom_kills)),
    gauge("container_fs_inodes_free", "Free inodes of the file system.",
        |f| on_file_system(f, f.detail.file_system.inodes_free)).by(DEVICE),
    gauge("container_fs_inodes_total", "Inodes of the file system.",
        |f| on_file_system(f, f.detail.file_system.inodes)).by(DEVICE),
    gauge("container_fs_limit_bytes", "Size of the file system.",
        |f| on_file_system(f, f.detail.file_system.bytes)).by(DEVICE),
    gauge("container_fs_usage_bytes", "Bytes of the container's own layer.",
        |f| on_file_system(f, f.usage.layer.map_or(0, |layer| layer.bytes))).by(DEVICE),
    counter("container_fs_reads_total", "Reads from block devices.", |f| by_disk(f, |disk| disk.reads)).by(DEVICE),
    counter("container_fs_writes_total", "Writes to block devices.", |f| by_disk(f, |disk| disk.writes)).by(DEVICE),
    counter("container_fs_reads_bytes_total", "Bytes read from block devices.",
        |f| by_disk(f, |disk| disk.read_bytes)).by(DEVICE),
    counter("container_fs_writes_bytes_total", "Bytes written to block devices.",
        |f| by_disk(f, |disk| disk.write_bytes)).by(DEVICE),
    counter("container_blkio_device_usage_total", "Bytes moved by block devices.", blkio)
        .by(&["device", "major", "minor", "operation"]),
    gauge("container_processes", "Processes.", |f| plain(f.detail.processes)),
    gauge("container_file_descriptors", "Open file descriptors.", |f| plain(f.detail.files)),
    gauge("container_sockets", "Open sockets.", |f| plain(f.detail.sockets)),
    gauge("container_threads", "Threads.", |f| plain(f.usage.cgroup.tasks)),
    gauge("container_threads_max", "Threads allowed; 0 without a limit.",
        |f| plain(f.detail.tasks_limit.unwrap_or(0))),
    gauge("container_ulimits_soft", "Soft limits of the first process.",
        |f| f.detail.max_open_files.map(|n| labelled([(&["max_open_files"], n)])).unwrap_or_default()).by(&["ulimit"]),
    gauge("container_last_seen", "When the container was last sampled, Unix time.",
        |f| plain(seconds(u64::try_from(f.usage.cgroup.at).unwrap_or(0)))),
    gauge("container_start_time_seconds", "When the container was started, Unix time.",
        |f| plain(seconds(u64::try_from(f.container.status.started_at).unwrap_or(0)))),
    gauge("container_spec_cpu_period", "Period of the processor quota in µs.",
        |f| plain(match f.container.spec.resources.cpu_period { 0 => 100_000, n => u64::try_from(n).unwrap_or(0) })),
    gauge("container_spec_cpu_quota", "Processor quota in µs a period; 0 without a limit.",
        |f| limit(f.container.spec.resources.cpu_quota)),
    gauge("container_spec_cpu_shares", "Processor shares.",
        |f| plain(match f.container.spec.resources.cpu_shares { 0 => 1024, n => u64::try_from(n).unwrap_or(0) })),
    gauge("container_spec_memory_limit_bytes", "Memory limit; 0 without one.",
        |f| limit(f.container.spec.resources.memory_limit)),
    gauge("container_spec_memory_swap_limit_bytes", "Limit of memory and swap together; 0 without one.",
        |f| limit(f.container.spec.resources.memory_swap_limit)),
    counter("container_pressure_cpu_waiting_seconds_total", "Time in which some task waited for a processor.",
        |f| stalled(f.usage.cgroup.cpu.pressure, |p| p.some.total)).needs_pressure(),
    counter("container_pressure_cpu_stalled_seconds_total", "Time in which all tasks waited for a processor.",
        |f| stalled(f.usage.cgroup.cpu.pressure, |p| p.full.total)).needs_pressure(),
    counter("container_pressure_memory_waiting_seconds_total", "Time in which some task waited for memory.",
        |f| stalled(f.usage.cgroup.memory.pressure, |p| p.some.total)).needs_pressure(),
    counter("container_pressure_memory_stalled_seconds_total", "Time in which all tasks waited for memory.",
        |f| stalled(f.usage.cgroup.memory.pressure, |p| p.full.total)).needs_pressure(),
    counter("container_pressure_io_waiting_seconds_total", "Time in which some task waited for input or output.",
        |f| stalled(f.usage.cgroup.io_pressure, |p| p.some.total)).needs_pressure(),
    counter("container_pressure_io_stalled_seconds_total", "Time in which all tasks waited for input or output.",
        |f| stalled(f.usage.cgroup.io_pressure, |p| p.full.total)).needs_pressure(),
];

fn blkio(from: &Sampled) -> Samples {
    let each = |disk: &Disk| {
        let labels = |operation: &str| {
            let (major, minor) = (disk.major.to_string(), disk.minor.to_string());
            vec![disk.device.clone(), major, minor, operation.to_owned()]
        };
        [(labels("Read"), disk.read_bytes), (labels("Write"), disk.write_bytes)]
    };
    from.detail.disks.iter().flat_map(each).collect()
}

/// One metric of a pod's network.
struct NetworkFamily {
    name: &'static str,
    help: &'static str,
    of: fn(&Interface) -> &Traffic,
    value: fn(&Traffic) -> u64,
}

macro_rules! network {
    ($($direction:literal $of:ident: $($what:literal $field:ident),+;)+) => { &[$($(NetworkFamily {
        name: concat!("container_network_", $direction, "_", $what, "_total"),
        help: concat!("Count of ", $what, " at the pod's interfaces, ", $direction, "."),
        of: |interface| &interface.$of,
        value: |traffic| traffic.$field,
    }),+),+] };
}

const NETWORK: &[NetworkFamily] = network! {
    "receive" received: "bytes" bytes, "packets" packets, "packets_dropped" dropped, "errors" errors;
    "transmit" sent: "bytes" bytes, "packets" packets, "packets_dropped" dropped, "errors" errors;
};

fn can(able: &Able, family: &Family) -> bool {
    able.pressure || !family.pressure
}

pub(crate) fn descriptors(able: &Able) -> Vec<v1::MetricDescriptor> {
    let descriptor = |name: &str, help: &str, labels: &[&str]| v1::MetricDescriptor {
        name: name.to_owned(),
        help: help.to_owned(),
        label_keys: KEYS.iter().chain(labels).map(|&key| key.to_owned()).collect(),
    };
    let containers = CONTAINER.iter().filter(|family| can(able, family));
    let containers = containers.map(|family| descriptor(family.name, family.help, family.labels));
    let network = NETWORK
        .iter()
        .map(|family| descriptor(family.name, family.help, &["interface"]));
    containers.chain(network).collect()
}

/// Values of [`KEYS`].
pub(crate) struct Subject([String; 6]);

impl Subject {
    /// Pod-level samples have neither container nor image.
    pub(crate) fn sandbox(sandbox: &PodSandbox) -> Subject {
        let (uid, pod) = (&sandbox.meta.uid, &sandbox.spec.pod);
        let none = String::new;
        Subject([
            uid.clone(),
            uid.clone(),
            none(),
            pod.namespace.clone(),
            pod.name.clone(),
            none(),
        ])
    }

    pub(crate) fn container(
        sandbox: &PodSandbox,
        container: &Container,
        usage: &ContainerUsage,
        image: String,
    ) -> Subject {
        let Subject([_, _, _, namespace, pod, _]) = Subject::sandbox(sandbox);
        let path = usage.detail.as_ref().map(|detail| detail.path.clone());
        let uid = &container.meta.uid;
        Subject([
            path.unwrap_or_else(|| uid.clone()),
            uid.clone(),
            image,
            namespace,
            pod,
            container.spec.name.clone(),
        ])
    }

    fn metric(&self, name: &str, kind: v1::MetricType, labels: Vec<String>, value: u64) -> v1::Metric {
        v1::Metric {
            name: name.to_owned(),
            // Live, says the API.
            timestamp: 0,
            metric_type: kind.into(),
            label_values: self.0.iter().cloned().chain(labels).collect(),
            value: Some(v1::UInt64Value { value }),
        }
    }
}

pub(crate) fn container(
    able: &Able,
    subject: &Subject,
    container: &Container,
    usage: &ContainerUsage,
) -> Vec<v1::Metric> {
    let Some(detail) = usage.detail.as_deref() else {
        return Vec::new();
    };
    let from = Sampled {
        container,
        usage,
        detail,
    };
    let families = CONTAINER.iter().filter(|family| can(able, family));
    let metrics = families.flat_map(|family| {
        let samples = (family.samples)(&from).into_iter();
        samples.map(|(labels, value)| subject.metric(family.name, family.kind, labels, value))
    });
    metrics.collect()
}

pub(crate) fn sandbox(subject: &Subject, usage: &SandboxUsage) -> Vec<v1::Metric> {
    let interfaces = usage.network.as_ref().map_or(&[][..], |network| &network.interfaces);
    let metrics = NETWORK.iter().flat_map(|family| {
        interfaces.iter().map(|interface| {
            let value = (family.value)((family.of)(interface));
            let labels = vec![interface.name.clone()];
            subject.metric(family.name, v1::MetricType::Counter, labels, value)
        })
    });
    metrics.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use state::usage::{CgroupUsage, Network, Stall, Swap};
    use std::collections::BTreeSet;
    use std::sync::Arc;

    /// Names that the conformance suite wants, but for those that it forgives.
    const REQUIRED: [&str; 45] = [
        "blkio_device_usage_total",
        "cpu_cfs_periods_total",
        "cpu_cfs_throttled_periods_total",
        "cpu_cfs_throttled_seconds_total",
        "cpu_system_seconds_total",
        "cpu_usage_seconds_total",
        "cpu_user_seconds_total",
        "file_descriptors",
        "fs_inodes_free",
        "fs_inodes_total",
        "fs_limit_bytes",
        "fs_reads_bytes_total",
        "fs_reads_total",
        "fs_usage_bytes",
        "fs_writes_bytes_total",
        "fs_writes_total",
        "last_seen",
        "memory_cache",
        "memory_failcnt",
        "memory_failures_total",
        "memory_kernel_usage",
        "memory_mapped_file",
        "memory_max_usage_bytes",
        "memory_rss",
        "memory_swap",
        "memory_usage_bytes",
        "memory_working_set_bytes",
        "network_receive_bytes_total",
        "network_receive_errors_total",
        "network_receive_packets_dropped_total",
        "network_receive_packets_total",
        "network_transmit_bytes_total",
        "network_transmit_errors_total",
        "network_transmit_packets_dropped_total",
        "network_transmit_packets_total",
        "oom_events_total",
        "processes",
        "sockets",
        "spec_cpu_period",
        "spec_cpu_shares",
        "spec_memory_limit_bytes",
        "spec_memory_swap_limit_bytes",
        "start_time_seconds",
        "threads",
        "threads_max",
    ];

    #[test]
    fn every_required_name_is_described_once() {
        let all = descriptors(&Able::default());
        let names: BTreeSet<_> = all.iter().map(|d| d.name.as_str()).collect();
        assert_eq!(names.len(), all.len());
        for name in REQUIRED {
            assert!(names.contains(format!("container_{name}").as_str()), "{name}");
        }
        for descriptor in &all {
            assert!(!descriptor.help.is_empty() && descriptor.label_keys.len() >= KEYS.len());
            assert!(!descriptor.name.contains("pressure"), "not where the kernel has none");
        }
        assert_eq!(descriptors(&Able { pressure: true }).len(), all.len() + 6);
    }

    #[test]
    fn every_described_metric_of_a_container_has_a_sample_with_all_labels() {
        let disk = Disk {
            major: 8,
            minor: 1,
            device: "/dev/x".into(),
            reads: 1,
            ..Disk::default()
        };
        let detail = Detail {
            path: "/pods/c".into(),
            disks: vec![disk],
            max_open_files: Some(1024),
            ..Detail::default()
        };
        let pressure = Pressure {
            some: Stall {
                total: 2_999_999_999,
                ..Stall::default()
            },
            ..Pressure::default()
        };
        let mut usage = ContainerUsage {
            cgroup: CgroupUsage::default(),
            layer: None,
            detail: Some(Arc::new(detail)),
        };
        usage.cgroup.cpu.pressure = Some(pressure);
        usage.cgroup.memory.pressure = Some(pressure);
        usage.cgroup.io_pressure = Some(pressure);
        usage.cgroup.swap = Some(Swap::default());
        let sandbox_object = PodSandbox::new(Default::default(), Default::default(), Default::default());
        let mut object = Container::new(Default::default(), Default::default(), Default::default());
        object.spec.name = "main".into();
        let subject = Subject::container(&sandbox_object, &object, &usage, "image".into());
        let able = Able { pressure: true };
        let mut metrics = container(&able, &subject, &object, &usage);
        let interface = Interface {
            name: "eth0".into(),
            ..Interface::default()
        };
        let network = Network {
            at: 1,
            interfaces: vec![interface],
        };
        let pod = SandboxUsage {
            network: Some(network),
            ..SandboxUsage::default()
        };
        metrics.extend(sandbox(&Subject::sandbox(&sandbox_object), &pod));
        for descriptor in descriptors(&able) {
            let found: Vec<_> = metrics.iter().filter(|m| m.name == descriptor.name).collect();
            assert!(!found.is_empty(), "{}", descriptor.name);
            for metric in found {
                assert_eq!(
                    metric.label_values.len(),
                    descriptor.label_keys.len(),
                    "{}",
                    metric.name
                );
            }
        }
        let of = |name: &str| metrics.iter().find(|m| m.name == name).unwrap();
        let waited = of("container_pressure_cpu_waiting_seconds_total");
        assert_eq!(waited.value.unwrap().value, 2, "whole seconds");
        assert_eq!(waited.label_values, ["/pods/c", "", "image", "", "", "main"]);
    }
}
