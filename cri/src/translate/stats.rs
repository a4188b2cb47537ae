//! Usage as the CRI tells it. Pure.

use state::usage::{CgroupUsage, ContainerUsage, Interface, Pressure, SandboxUsage, Stall};
use state::{Container, PodSandbox};

use super::{container as containers, sandbox as sandboxes};
use crate::runtime::v1;

fn value(value: u64) -> Option<v1::UInt64Value> {
    Some(v1::UInt64Value { value })
}

/// `usage` is absent of a container that does not run; `store` is the image store's directory.
pub(crate) fn container(container: &Container, usage: Option<&ContainerUsage>, store: &str) -> v1::ContainerStats {
    let meta = &container.meta;
    let cgroup = usage.map(|usage| &usage.cgroup);
    v1::ContainerStats {
        attributes: Some(v1::ContainerAttributes {
            id: meta.uid.clone(),
            metadata: Some(containers::metadata(container)),
            labels: meta.labels.clone(),
            annotations: meta.annotations.clone(),
        }),
        cpu: cgroup.map(cpu),
        memory: cgroup.map(memory),
        writable_layer: usage.and_then(|usage| usage.layer).map(|layer| v1::FilesystemUsage {
            timestamp: layer.at,
            fs_id: Some(v1::FilesystemIdentifier {
                mountpoint: store.to_owned(),
            }),
            used_bytes: value(layer.bytes),
            inodes_used: value(layer.inodes),
        }),
        swap: cgroup.and_then(swap),
        io: cgroup.and_then(io),
    }
}

pub(crate) fn sandbox(
    sandbox: &PodSandbox,
    usage: &SandboxUsage,
    containers: Vec<v1::ContainerStats>,
) -> v1::PodSandboxStats {
    let meta = &sandbox.meta;
    let cgroup = &usage.cgroup;
    v1::PodSandboxStats {
        attributes: Some(v1::PodSandboxAttributes {
            id: meta.uid.clone(),
            metadata: Some(sandboxes::metadata(sandbox)),
            labels: meta.labels.clone(),
            annotations: meta.annotations.clone(),
        }),
        linux: Some(v1::LinuxPodSandboxStats {
            cpu: Some(cpu(cgroup)),
            memory: Some(memory(cgroup)),
            network: usage.network.as_ref().map(|network| {
                let interfaces: Vec<_> = network.interfaces.iter().map(interface).collect();
                let default = interfaces.iter().find(|i| i.name == "eth0").or(interfaces.first());
                v1::NetworkUsage {
                    timestamp: network.at,
                    default_interface: default.cloned(),
                    interfaces,
                }
            }),
            process: Some(v1::ProcessUsage {
                timestamp: cgroup.at,
                process_count: value(cgroup.tasks),
            }),
            containers,
            io: io(cgroup),
        }),
        windows: None,
    }
}

fn cpu(usage: &CgroupUsage) -> v1::CpuUsage {
    v1::CpuUsage {
        timestamp: usage.at,
        usage_core_nano_seconds: value(usage.cpu.usage),
        usage_nano_cores: usage.cpu.rate.and_then(value),
        psi: usage.cpu.pressure.as_ref().map(pressure),
    }
}

fn memory(usage: &CgroupUsage) -> v1::MemoryUsage {
    let memory = &usage.memory;
    v1::MemoryUsage {
        timestamp: usage.at,
        working_set_bytes: value(memory.working_set),
        available_bytes: value(memory.available),
        usage_bytes: value(memory.usage),
        rss_bytes: value(memory.rss),
        page_faults: value(memory.page_faults),
        major_page_faults: value(memory.major_page_faults),
        psi: memory.pressure.as_ref().map(pressure),
    }
}

fn swap(usage: &CgroupUsage) -> Option<v1::SwapUsage> {
    let swap = usage.swap?;
    Some(v1::SwapUsage {
        timestamp: usage.at,
        swap_available_bytes: swap.available.and_then(value),
        swap_usage_bytes: value(swap.usage),
    })
}

fn io(usage: &CgroupUsage) -> Option<v1::IoUsage> {
    let psi = usage.io_pressure.as_ref()?;
    Some(v1::IoUsage {
        timestamp: usage.at,
        psi: Some(pressure(psi)),
    })
}

fn pressure(from: &Pressure) -> v1::PsiStats {
    let stall = |stall: &Stall| v1::PsiData {
        total: stall.total,
        avg10: stall.avg10,
        avg60: stall.avg60,
        avg300: stall.avg300,
    };
    v1::PsiStats {
        full: Some(stall(&from.full)),
        some: Some(stall(&from.some)),
    }
}

fn interface(from: &Interface) -> v1::NetworkInterfaceUsage {
    v1::NetworkInterfaceUsage {
        name: from.name.clone(),
        rx_bytes: value(from.received.bytes),
        rx_errors: value(from.received.errors),
        tx_bytes: value(from.sent.bytes),
        tx_errors: value(from.sent.errors),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use state::usage::{Network, Traffic};

    fn with(names: &[&str]) -> SandboxUsage {
        let interface = |name: &&str| Interface {
            name: (*name).to_owned(),
            received: Traffic {
                bytes: 5,
                ..Traffic::default()
            },
            ..Interface::default()
        };
        SandboxUsage {
            network: Some(Network {
                at: 3,
                interfaces: names.iter().map(interface).collect(),
            }),
            ..SandboxUsage::default()
        }
    }

    #[test]
    fn eth0_is_the_default_interface_else_the_first() {
        let pod = PodSandbox::new(Default::default(), Default::default(), Default::default());
        for (names, default) in [
            (&["net1", "eth0"][..], Some("eth0")),
            (&["net1", "net2"], Some("net1")),
            (&[], None),
        ] {
            let linux = sandbox(&pod, &with(names), Vec::new()).linux.unwrap();
            let network = linux.network.unwrap();
            assert_eq!(network.default_interface.map(|i| i.name).as_deref(), default);
            assert_eq!(network.interfaces.len(), names.len());
        }
        let linux = sandbox(&pod, &SandboxUsage::default(), Vec::new()).linux.unwrap();
        assert!(linux.network.is_none() && linux.io.is_none());
        let memory = linux.memory.unwrap();
        assert_eq!(
            memory.available_bytes.map(|v| v.value),
            Some(0),
            "set, though there is no limit"
        );
        assert!(
            linux.cpu.unwrap().usage_nano_cores.is_none(),
            "there was one sample only"
        );
    }
}
