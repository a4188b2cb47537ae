//! Metrics: the CRI's, and the same for Prometheus.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::client::within;
use e2e::node::{Node, Options};
use e2e::pods::shell;
use e2e::v1::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

const LIMIT: Duration = Duration::from_secs(20);

/// A container with every limit that metrics tell of.
fn limited() -> ContainerConfig {
    let mut config = shell("main", "while :; do sleep 0.1; done");
    let linux = config.linux.get_or_insert_default();
    linux.resources = Some(LinuxContainerResources {
        cpu_period: 100_000,
        cpu_quota: 20_000,
        cpu_shares: 1024,
        memory_limit_in_bytes: 64 << 20,
        memory_swap_limit_in_bytes: 64 << 20,
        ..Default::default()
    });
    config
}

async fn descriptors(node: &Node) -> Result<Vec<MetricDescriptor>> {
    let request = within(LIMIT, ListMetricDescriptorsRequest {});
    let answer = node.cri.runtime.clone().list_metric_descriptors(request).await?;
    Ok(answer.into_inner().descriptors)
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_is_described_is_sampled() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = node.pod("measured");
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let id = node.cri.launch(&sandbox, &pod, &limited()).await?;
    let write = "for n in 1 2 3 4 5; do dd if=/dev/zero of=/file$n bs=1M count=1; done; sync";
    node.cri.exec(&id, &["/bin/sh", "-c", write], 20).await?;
    let described = descriptors(&node).await?;
    assert!(described.len() >= 45);
    let request = within(LIMIT, ListPodSandboxMetricsRequest {});
    let mut pods = node
        .cri
        .runtime
        .clone()
        .list_pod_sandbox_metrics(request)
        .await?
        .into_inner()
        .pod_metrics;
    assert_eq!(pods.len(), 1);
    let found = pods.remove(0);
    assert_eq!(found.pod_sandbox_id, sandbox);
    assert_eq!(found.container_metrics[0].container_id, id);
    let mut all = found.metrics.clone();
    all.extend(found.container_metrics[0].metrics.clone());
    // These have no sample where nothing was read from a disk.
    let by_device = |name: &str| {
        ["blkio", "fs_reads", "fs_writes"]
            .iter()
            .any(|part| name.contains(part))
    };
    for descriptor in &described {
        let samples: Vec<_> = all.iter().filter(|metric| metric.name == descriptor.name).collect();
        ensure!(
            !samples.is_empty() || by_device(&descriptor.name),
            "{} has no sample",
            descriptor.name
        );
        for sample in samples {
            assert_eq!(sample.label_values.len(), descriptor.label_keys.len(), "{sample:?}");
            assert!(sample.value.is_some());
        }
    }
    let names: BTreeSet<_> = described.iter().map(|d| d.name.as_str()).collect();
    assert!(
        all.iter().all(|metric| names.contains(metric.name.as_str())),
        "nothing that is not described"
    );
    let value = |name: &str| {
        let metric = all.iter().find(|metric| metric.name == format!("container_{name}"));
        metric
            .and_then(|metric| metric.value)
            .map(|value| value.value)
            .context(name.to_owned())
    };
    assert_eq!(value("spec_memory_limit_bytes")?, 64 << 20);
    assert_eq!(value("spec_cpu_quota")?, 20_000);
    assert!(value("processes")? >= 1 && value("file_descriptors")? >= 3);
    assert!(value("fs_usage_bytes")? > 4 << 20);
    assert!(value("start_time_seconds")? > 1_700_000_000);
    let usage = all
        .iter()
        .find(|m| m.name == "container_memory_usage_bytes")
        .context("memory")?;
    let labels = &usage.label_values;
    assert!(labels[0].ends_with(&id), "the cgroup's path: {labels:?}");
    assert_eq!(
        labels[1..],
        [&id, "localhost/busybox:1", "e2e", "measured", "main"].map(str::to_owned)
    );
    node.finish().await
}

async fn get(node: &Node, path: &str) -> Result<(String, String)> {
    let mut stream = UnixStream::connect(node.path("metrics.sock")).await?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    let (head, body) = text.split_once("\r\n\r\n").context("an HTTP answer")?;
    Ok((head.to_owned(), body.to_owned()))
}

/// Series by name and labels; fails on a line that is not in the format.
fn parse(text: &str) -> Result<BTreeMap<String, f64>> {
    let mut series = BTreeMap::new();
    let mut typed = BTreeSet::new();
    for line in text.lines() {
        if let Some(comment) = line.strip_prefix("# ") {
            let mut words = comment.splitn(3, ' ');
            let (word, name, rest) = (words.next(), words.next(), words.next());
            ensure!(
                matches!(word, Some("HELP" | "TYPE")) && rest.is_some_and(|r| !r.is_empty()),
                "{line}"
            );
            if word == Some("TYPE") {
                ensure!(typed.insert(name.context("a name")?.to_owned()), "typed twice: {line}");
            }
            continue;
        }
        let (key, value) = line.rsplit_once(' ').with_context(|| line.to_owned())?;
        let name = key.split('{').next().unwrap_or_default();
        let family = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|end| name.strip_suffix(end));
        let known = typed.contains(name) || family.is_some_and(|family| typed.contains(family));
        ensure!(known, "before its TYPE: {line}");
        let value: f64 = value.parse().with_context(|| line.to_owned())?;
        ensure!(series.insert(key.to_owned(), value).is_none(), "twice: {line}");
    }
    Ok(series)
}

#[tokio::test(flavor = "multi_thread")]
async fn prometheus_reads_them() -> Result<()> {
    let mut node = Node::new(Options::default())?;
    let socket = node.path("metrics.sock");
    let metrics = ("RECONCILE_METRICS", format!("unix://{}", socket.display()));
    node = node.with(Options {
        env: vec![metrics, ("RECONCILE_LOG_LEVEL", "debug".into())],
        ..Options::default()
    });
    node.serve().await?;
    node.busybox().await?;
    let pod = node.pod("scraped");
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let mut config = limited();
    config.envs.push(KeyValue {
        key: "PASSWORD".into(),
        value: b"hunter2".to_vec(),
    });
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    assert!(node.cri.start(&id).await.is_err());
    let (head, body) = get(&node, "/metrics").await?;
    assert!(
        head.starts_with("HTTP/1.1 200") && head.contains("text/plain; version=0.0.4"),
        "{head}"
    );
    let series = parse(&body)?;
    let of = |key: &str| {
        series
            .get(key)
            .copied()
            .with_context(|| format!("{key} is not in\n{body}"))
    };
    let rpc = |operation: &str, code: &str| {
        of(&format!(
            r#"reconcile_rpc_total{{operation="{operation}",code="{code}",handler="default"}}"#
        ))
    };
    assert_eq!(rpc("RunPodSandbox", "Ok")?, 1.0);
    assert_eq!(rpc("StartContainer", "Ok")?, 1.0);
    assert_eq!(
        rpc("StartContainer", "FailedPrecondition")?,
        1.0,
        "errors by operation, code and handler"
    );
    assert_eq!(of(r#"reconcile_rpc_seconds_count{operation="StartContainer"}"#)?, 2.0);
    assert_eq!(of(r#"reconcile_records{kind="Container"}"#)?, 1.0);
    assert!(of("reconcile_commit_seconds_count{}")? >= 4.0);
    assert!(of(r#"reconcile_passes_total{kind="Container",result="ok"}"#)? >= 1.0);
    assert_eq!(of(r#"reconcile_ready_seconds_count{kind="PodSandbox"}"#)?, 1.0);
    let memory = series
        .iter()
        .find(|(key, _)| key.starts_with("container_memory_usage_bytes{"));
    let (labels, bytes) = memory.context("container series")?;
    assert!(
        labels.contains(r#"pod="scraped",container="main""#) && *bytes > 0.0,
        "{labels} {bytes}"
    );
    let described: BTreeSet<_> = descriptors(&node).await?.into_iter().map(|d| d.name).collect();
    let scraped = series.keys().filter_map(|key| key.split('{').next());
    assert!(
        scraped
            .filter(|name| name.starts_with("container_"))
            .all(|name| described.contains(name))
    );
    assert!(get(&node, "/other").await?.0.starts_with("HTTP/1.1 404"));

    let log = node.daemon_log();
    let line = |what: &str, rpc: &str| {
        log.lines()
            .any(|l| l.contains(what) && l.contains(&format!("rpc=\"{rpc}\"")))
    };
    for rpc in ["RunPodSandbox", "CreateContainer", "StartContainer"] {
        assert!(line("call begins", rpc) && line("call ended", rpc), "{rpc} in\n{log}");
    }
    assert!(log.contains("PASSWORD") && log.contains("e2e/scraped"));
    let bytes = format!("{:?}", b"hunter2");
    assert!(
        !log.contains("hunter2") && !log.contains(&bytes),
        "a secret is in the log"
    );
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn they_are_off_unless_asked_for_and_never_for_strangers() -> Result<()> {
    let node = Node::start().await?;
    assert!(UnixStream::connect(node.path("metrics.sock")).await.is_err());
    let out = node.reconcile(&["get", "node", "--metrics", "0.0.0.0:9180"]).await?;
    assert_eq!(out.status.code(), Some(2), "a usage error");
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(text.contains("loopback"), "{text}");
    node.finish().await
}
