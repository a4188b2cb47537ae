//! Stats: what the daemon tells of containers and pods, compared with the kernel's own files.

use std::fs;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::client::within;
use e2e::node::Node;
use e2e::pods::{self, shell};
use e2e::tools;
use e2e::v1::*;
use serde_json::Value;
use tonic::Code;

const LIMIT: Duration = Duration::from_secs(20);

async fn container_stats(node: &Node, id: &str) -> Result<ContainerStats> {
    let request = ContainerStatsRequest {
        container_id: id.into(),
    };
    let answer = node.cri.runtime.clone().container_stats(within(LIMIT, request)).await?;
    answer.into_inner().stats.context("an answer without stats")
}

async fn list(node: &Node, filter: Option<ContainerStatsFilter>) -> Result<Vec<String>> {
    let request = ListContainerStatsRequest { filter };
    let answer = node
        .cri
        .runtime
        .clone()
        .list_container_stats(within(LIMIT, request))
        .await?;
    let stats = answer.into_inner().stats;
    let mut ids: Vec<_> = stats.into_iter().filter_map(|s| Some(s.attributes?.id)).collect();
    ids.sort();
    Ok(ids)
}

async fn pod_stats(node: &Node, id: &str) -> Result<LinuxPodSandboxStats> {
    let request = PodSandboxStatsRequest {
        pod_sandbox_id: id.into(),
    };
    let answer = node
        .cri
        .runtime
        .clone()
        .pod_sandbox_stats(within(LIMIT, request))
        .await?;
    answer.into_inner().stats.and_then(|s| s.linux).context("linux stats")
}

fn number(value: Option<UInt64Value>) -> u64 {
    value.map_or(0, |value| value.value)
}

/// The kernel's own number for a process's cgroup: v1's file of `controller`, or v2's.
fn kernel(pid: i32, controller: &str, v1: &str, v2: &str) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let of = |name: &str| {
        text.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let found = parts.next()?.split(',').any(|c| c == name);
            found.then(|| parts.next().unwrap_or_default().to_owned())
        })
    };
    let file = match of(controller) {
        Some(path) => PathBuf::from(format!("/sys/fs/cgroup/{controller}{path}/{v1}")),
        None => PathBuf::from(format!("/sys/fs/cgroup{}/{v2}", of("").context("no cgroup")?)),
    };
    let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    text.trim().parse().with_context(|| text)
}

async fn said(path: &str, word: &str) -> Result<()> {
    e2e::eventually(Duration::from_secs(20), async || {
        ensure!(
            pods::log_texts(path)?.contains(&word.to_owned()),
            "{word:?} is not in {path}"
        );
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn figures_are_the_kernels() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = node.pod("figures");
    let sandbox = node.cri.run_sandbox(&pod).await?;
    // 8 MiB in its own layer, in a file with two names; 24 MiB of memory; all of a core.
    let script = "dd if=/dev/zero of=/data bs=1M count=8 2>/dev/null; ln /data /again; ln -s / /loop; \
                  mkdir /dev/shm 2>/dev/null; dd if=/dev/zero of=/dev/shm/m bs=1M count=24 2>/dev/null; echo up; \
                  while :; do :; done";
    let busy = node.cri.launch(&sandbox, &pod, &shell("busy", script)).await?;
    let idle = node
        .cri
        .launch(&sandbox, &pod, &shell("idle", "echo up; sleep 1000"))
        .await?;
    for name in ["busy", "idle"] {
        said(&format!("{}/{name}.log", pod.log_directory), "up").await?;
    }

    let first = container_stats(&node, &busy).await?;
    let memory = first.memory.context("memory")?;
    let pid = node.cri.container_pid(&busy).await?;
    let usage = kernel(pid, "memory", "memory.usage_in_bytes", "memory.current")?;
    let told = number(memory.usage_bytes);
    assert!(told.abs_diff(usage) < 4 << 20, "told {told}, the kernel says {usage}");
    assert!(
        number(memory.working_set_bytes) <= told && number(memory.working_set_bytes) > 20 << 20,
        "{memory:?}"
    );
    assert_eq!(number(memory.available_bytes), 0, "there is no limit");

    let layer = first.writable_layer.context("a writable layer")?;
    let (bytes, inodes) = (number(layer.used_bytes), number(layer.inodes_used));
    assert!((8 << 20..10 << 20).contains(&bytes), "8 MiB with two names: {bytes}");
    assert!((3..40).contains(&inodes), "{inodes}");
    let mountpoint = layer.fs_id.context("fs_id")?.mountpoint;
    assert!(node.root().starts_with(&mountpoint), "{mountpoint}");

    tokio::time::sleep(Duration::from_millis(700)).await;
    let (second, quiet) = (
        container_stats(&node, &busy).await?,
        container_stats(&node, &idle).await?,
    );
    let (before, after) = (first.cpu.context("cpu")?, second.cpu.context("cpu")?);
    assert!(after.timestamp > before.timestamp);
    let used = number(after.usage_core_nano_seconds) - number(before.usage_core_nano_seconds);
    assert!(used > 50_000_000, "a busy loop used {used} ns");
    assert!(number(after.usage_nano_cores) > 50_000_000, "{after:?}");
    let exact = kernel(pid, "cpuacct", "cpuacct.usage", "cpu.stat").unwrap_or(u64::MAX);
    assert!(
        number(after.usage_core_nano_seconds) <= exact,
        "never more than the kernel has by now"
    );
    assert!(number(quiet.cpu.context("cpu")?.usage_core_nano_seconds) < used + 1_000_000_000);

    // At once again: the same sample.
    let again = container_stats(&node, &busy).await?;
    assert_eq!(again.cpu.context("cpu")?.timestamp, after.timestamp);
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn filters_and_states() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let (one, two) = (pods::host_network(node.pod("one")), pods::host_network(node.pod("two")));
    let (first, second) = (node.cri.run_sandbox(&one).await?, node.cri.run_sandbox(&two).await?);
    let sleeper = |name: &str| shell(name, "sleep 1000");
    let a = node.cri.launch(&first, &one, &sleeper("a")).await?;
    let b = node.cri.launch(&first, &one, &sleeper("b")).await?;
    let c = node.cri.launch(&second, &two, &sleeper("c")).await?;
    let created = node.cri.create(&second, &two, &sleeper("created")).await?;
    let sorted = |ids: &[&String]| {
        let mut ids: Vec<String> = ids.iter().map(|id| (*id).clone()).collect();
        ids.sort();
        ids
    };
    let filter = |id: &str, sandbox: &str, label: Option<&str>| {
        let key = "io.kubernetes.container.name".to_owned();
        Some(ContainerStatsFilter {
            id: id.into(),
            pod_sandbox_id: sandbox.into(),
            label_selector: label.map(|label| (key, label.to_owned())).into_iter().collect(),
        })
    };
    assert_eq!(list(&node, None).await?, sorted(&[&a, &b, &c]), "what runs");
    assert_eq!(list(&node, filter(&a, "", None)).await?, sorted(&[&a]));
    assert_eq!(
        list(&node, filter(&a[..20], &first[..20], None)).await?,
        sorted(&[&a]),
        "prefixes"
    );
    assert_eq!(list(&node, filter("", &first, None)).await?, sorted(&[&a, &b]));
    assert_eq!(list(&node, filter("", "", Some("b"))).await?, sorted(&[&b]));
    for nothing in [
        filter(&a, &second, None),
        filter("", "", Some("x")),
        filter("ffff", "", None),
        filter(&created, "", None),
    ] {
        assert!(list(&node, nothing.clone()).await?.is_empty(), "{nothing:?}");
    }
    let stats = container_stats(&node, &created).await?;
    assert!(stats.cpu.is_none() && stats.attributes.is_some_and(|a| a.id == created));
    let mut runtime = node.cri.runtime.clone();
    let unknown = ContainerStatsRequest {
        container_id: "ab".repeat(32),
    };
    let error = runtime.container_stats(within(LIMIT, unknown)).await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound);

    let stats = pod_stats(&node, &first).await?;
    assert_eq!(stats.containers.len(), 2);
    assert!(stats.network.is_none(), "the host's network is not the pod's");
    assert_eq!(number(stats.process.context("process")?.process_count), 2);
    node.cri.stop_sandbox(&second).await?;
    let request = PodSandboxStatsRequest {
        pod_sandbox_id: second.clone(),
    };
    let error = runtime.pod_sandbox_stats(within(LIMIT, request)).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    let all = ListPodSandboxStatsRequest { filter: None };
    let all = runtime
        .list_pod_sandbox_stats(within(LIMIT, all))
        .await?
        .into_inner()
        .stats;
    assert_eq!(all.len(), 1, "only what is ready");
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn network_bytes_are_counted() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = node.pod("net");
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let before = pod_stats(&node, &sandbox).await?.network.context("network")?;
    let before = before.default_interface.context("eth0")?;
    assert_eq!(before.name, "eth0");
    // The test listens in the pod, and sends from the host.
    let address = std::net::SocketAddr::new(node.cri.ip(&sandbox).await?, 4000);
    let netns = format!("/run/netns/rc-{}-{sandbox}", node.instance());
    let listener = tools::in_netns(netns, move || std::net::TcpListener::bind(address))?;
    let reader = std::thread::spawn(move || -> std::io::Result<u64> {
        let (mut stream, _) = listener.accept()?;
        std::io::copy(&mut stream, &mut std::io::sink())
    });
    const SENT: usize = 3 << 20;
    tokio::task::spawn_blocking(move || -> Result<()> {
        let mut stream = std::net::TcpStream::connect(address)?;
        stream.write_all(&vec![1; SENT])?;
        stream.shutdown(std::net::Shutdown::Write)?;
        stream.read_to_end(&mut Vec::new())?;
        Ok(())
    })
    .await??;
    let read = reader.join().map_err(|_| anyhow::anyhow!("the reader panicked"))??;
    assert_eq!(read, SENT as u64);
    let after = pod_stats(&node, &sandbox).await?.network.context("network")?;
    assert!(after.interfaces.iter().all(|i| i.name != "lo"));
    let after = after.default_interface.context("eth0")?;
    let received = number(after.rx_bytes) - number(before.rx_bytes);
    assert!((SENT as u64..2 * SENT as u64).contains(&received), "{received}");
    assert!(number(after.tx_bytes) > number(before.tx_bytes), "the acknowledgements");
    assert_eq!(number(after.rx_errors), 0);
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pods_cgroup_is_its_callers() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let mut pod = pods::host_network(node.pod("parent"));
    let parent = format!("/rc-stats-test-{}", std::process::id());
    pod.linux.get_or_insert_default().cgroup_parent = parent.clone();
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let id = node
        .cri
        .launch(&sandbox, &pod, &shell("c", "while :; do :; done"))
        .await?;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let stats = pod_stats(&node, &sandbox).await?;
    let pid = node.cri.container_pid(&id).await?;
    let container = container_stats(&node, &id).await?;
    let (pod_cpu, own) = (stats.cpu.context("cpu")?, container.cpu.context("cpu")?);
    assert!(number(pod_cpu.usage_core_nano_seconds) > 100_000_000, "{pod_cpu:?}");
    assert!(number(own.usage_core_nano_seconds) > 0 && pid > 0);
    node.cri.stop_sandbox(&sandbox).await?;
    node.cri.remove_sandbox(&sandbox).await?;
    // The caller's, so that the test removes it.
    for hierarchy in fs::read_dir("/sys/fs/cgroup")?.flatten() {
        let _ = fs::remove_dir(hierarchy.path().join(&parent[1..]));
    }
    let _ = fs::remove_dir(format!("/sys/fs/cgroup{parent}"));
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_line_shows_them() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = pods::host_network(node.pod("shown"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let id = node
        .cri
        .launch(&sandbox, &pod, &shell("busy", "while :; do :; done"))
        .await?;
    let table = node.ok(&["stats"]).await?;
    let row = table.lines().find(|line| line.contains(&id[..13])).context("a row")?;
    assert!(
        table.starts_with("CONTAINER ") && row.contains("busy") && row.contains("shown"),
        "{table}"
    );
    let json: Value = serde_json::from_str(&node.ok(&["stats", "shown", "-o", "json"]).await?)?;
    let stats = &json["stats"][0];
    assert_eq!(stats["id"], id.as_str());
    assert!(
        stats["cpu"]["usageNanoCores"].as_u64().is_some_and(|n| n > 50_000_000),
        "{json:#}"
    );
    assert!(stats["memory"]["workingSetBytes"].as_u64().is_some_and(|n| n > 0));
    let yaml = node.ok(&["stats", &id[..10], "-o", "yaml"]).await?;
    assert!(yaml.contains("workingSetBytes"), "{yaml}");
    let out = node.reconcile(&["stats", "nothing"]).await?;
    assert!(!out.status.success());
    node.finish().await
}

/// A list of many, asked again and again.
#[tokio::test(flavor = "multi_thread")]
async fn a_list_is_quick() -> Result<()> {
    let node = Node::start().await?;
    let pod = pods::host_network(node.pod("many"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    const MANY: usize = 20;
    for n in 0..MANY {
        let config = pods::container(&format!("c{n}"), pods::HELLO, &["/hello", "sleep", "1000"]);
        node.cri.launch(&sandbox, &pod, &config).await?;
    }
    let mut took = Vec::new();
    for _ in 0..30 {
        let start = Instant::now();
        assert_eq!(list(&node, None).await?.len(), MANY);
        took.push(start.elapsed());
        tokio::time::sleep(Duration::from_millis(60)).await;
    }
    took.sort();
    println!(
        "ListContainerStats of {MANY}: median {:?}, worst {:?}",
        took[15], took[29]
    );
    // The fastest: how busy the machine is makes the others slower.
    assert!(took[0] < Duration::from_millis(50), "{took:?}");
    node.finish().await
}
