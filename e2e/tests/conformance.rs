//! The wire, proved by an implementation that is not ours: `crictl` of sigs.k8s.io/cri-tools against our socket.
//!
//! Go builds it once from `e2e/conformance/go.mod` into the user's cache. Without Go the test prints SKIPPED, which
//! `.ci/run` counts as a failure.

use anyhow::{Context, Result, ensure};
use e2e::crictl::{Crictl, path};
use e2e::node::{Node, shown};
use serde_json::json;

/// Stats, metrics and events as crictl shows them.
async fn observed(crictl: &Crictl, sandbox: &str, id: &str) -> Result<()> {
    let row = crictl.row(&["stats", "-a"], &id[..13]).await?;
    assert_eq!((row[1].as_str(), row.len()), ("main", 7), "{row:?}");
    let stats = crictl.json(&["stats", "-a", "-o", "json"]).await?;
    assert_eq!(path(&stats, "/stats/0/attributes/id")?, id);
    assert!(path(&stats, "/stats/0/memory/workingSetBytes/value")?.is_string());
    let row = crictl.row(&["statsp"], &sandbox[..13]).await?;
    assert_eq!(row[0], "web", "{row:?}");
    let metrics = crictl.json(&["metricsp"]).await?;
    assert_eq!(path(&metrics, "/podMetrics/0/podSandboxId")?, sandbox);
    let described = crictl.json(&["metricdescs"]).await?;
    let described = path(&described, "/descriptors")?.as_array().context("an array")?;
    assert!(described.len() >= 45);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn crictl_drives_a_pod_through_its_life() -> Result<()> {
    let node = Node::start().await?;
    let Some(crictl) = Crictl::of(&node).await? else {
        return node.finish_unused().await;
    };
    node.busybox().await?;
    let logs = node.path("logs");
    let pod = node.file(
        "pod.json",
        json!({ "metadata": { "name": "web", "namespace": "prod", "uid": "uid-1", "attempt": 1 }, "hostname": "web",
            "labels": { "app": "web" }, "log_directory": logs, "linux": { "cgroup_parent": "" } })
        .to_string(),
    )?;
    let script = "echo from crictl; echo err >&2; sleep 1000";
    let container = node.file(
        "container.json",
        json!({ "metadata": { "name": "main", "attempt": 2 }, "image": { "image": "localhost/busybox:1" },
            "command": ["/bin/sh", "-c", script], "log_path": "main.log",
            "labels": { "io.kubernetes.pod.name": "web", "io.kubernetes.pod.namespace": "prod" }, "linux": {} })
        .to_string(),
    )?;

    let version = crictl.ok(&["version"]).await?;
    assert!(version.contains("RuntimeName:  reconcile"), "{version}");
    let info = crictl.json(&["info"]).await?;
    for condition in ["RuntimeReady", "NetworkReady"] {
        let all = path(&info, "/status/conditions")?.as_array().context("an array")?;
        let found = all.iter().find(|found| found["type"] == condition).context(condition)?;
        assert_eq!(found["status"], true, "{found}");
    }
    assert!(path(&info, "/runtimeHandlers")?.is_array());
    assert!(
        path(&info, "/config/sandboxImage")?
            .as_str()
            .is_some_and(|image| !image.is_empty())
    );

    let images = crictl.row(&["images"], "localhost/busybox").await?;
    assert_eq!(images[..2], ["localhost/busybox", "1"], "{images:?}");
    let usage = crictl.json(&["imagefsinfo"]).await?;
    assert!(
        !path(&usage, "/status/imageFilesystems/0/fsId/mountpoint")?
            .as_str()
            .unwrap_or("")
            .is_empty()
    );
    assert!(path(&usage, "/status/imageFilesystems/0/usedBytes/value")?.is_string());

    let sandbox = crictl.ok(&["runp", &pod]).await?;
    assert_eq!(sandbox.len(), 64, "{sandbox}");
    let row = crictl.row(&["pods"], &sandbox[..13]).await?;
    assert_eq!(row[2..], ["Ready", "web", "prod", "1", "(default)"], "{row:?}");
    assert_eq!(
        crictl.ok(&["pods", "-q", "--no-trunc", "--label", "app=web"]).await?,
        sandbox
    );
    assert_eq!(crictl.ok(&["pods", "-q", "--name", "nothing-like-it"]).await?, "");
    let inspect = crictl.json(&["inspectp", &sandbox[..13]]).await?;
    assert_eq!(path(&inspect, "/status/id")?, sandbox.as_str());
    assert_eq!(path(&inspect, "/status/state")?, "SANDBOX_READY");
    assert!(
        path(&inspect, "/status/createdAt")?
            .as_str()
            .is_some_and(|time| time.starts_with("20"))
    );
    assert!(
        path(&inspect, "/status/network/ip")?
            .as_str()
            .is_some_and(|ip| ip.contains('.'))
    );
    assert!(path(&inspect, "/status/linux/namespaces/options/pid")?.is_string());
    assert!(path(&inspect, "/info/pid")?.as_i64().is_some_and(|pid| pid > 1));
    assert_eq!(path(&inspect, "/info/config/metadata/name")?, "web");
    assert_eq!(path(&inspect, "/info/runtimeSpec/linux/namespaces/0/type")?, "network");

    let id = crictl.ok(&["create", &sandbox[..13], &container, &pod]).await?;
    assert_eq!(crictl.ok(&["ps", "-q"]).await?, "", "ps shows what runs");
    assert_eq!(crictl.row(&["ps", "-a"], &id[..13]).await?[3], "Created");
    crictl.ok(&["start", &id[..13]]).await?;
    let row = crictl.row(&["ps"], &id[..13]).await?;
    assert_eq!(row[1], "localhost/busybox:1", "{row:?}");
    assert_eq!(row[3..6], ["Running", "main", "2"], "{row:?}");
    assert_eq!(row[6..], [&sandbox[..13], "web", "prod"], "{row:?}");
    let inspect = crictl.json(&["inspect", &id[..13]]).await?;
    assert_eq!(path(&inspect, "/status/state")?, "CONTAINER_RUNNING");
    assert_eq!(path(&inspect, "/status/metadata/attempt")?, 2);
    assert!(
        path(&inspect, "/status/imageId")?
            .as_str()
            .is_some_and(|id| id.starts_with("sha256:"))
    );
    let log = logs.join("main.log").display().to_string();
    assert_eq!(path(&inspect, "/status/logPath")?, log.as_str());
    assert!(path(&inspect, "/info/pid")?.as_i64().is_some_and(|pid| pid > 1));
    assert!(path(&inspect, "/info/runtimeSpec/linux/namespaces")?.is_array());
    assert_eq!(path(&inspect, "/info/sandboxID")?, sandbox.as_str());
    observed(&crictl, &sandbox, &id).await?;

    let (out, _) = e2e::eventually(std::time::Duration::from_secs(20), async || {
        let out = crictl.run(&["logs", &id[..13]]).await?;
        ensure!(
            out.stdout == b"from crictl\n" && out.stderr == b"err\n",
            "{}",
            shown(&out)
        );
        Ok((out, ()))
    })
    .await?;
    assert!(out.status.success());
    assert_eq!(crictl.ok(&["exec", "-s", &id[..13], "echo", "inside"]).await?, "inside");
    let failing = crictl.run(&["exec", "-s", &id[..13], "sh", "-c", "exit 7"]).await?;
    assert!(
        !failing.status.success() && shown(&failing).contains('7'),
        "{}",
        shown(&failing)
    );

    assert!(
        !crictl.run(&["rm", &id]).await?.status.success(),
        "rm refuses what runs"
    );
    crictl.ok(&["stop", "--timeout", "1", &id[..13]]).await?;
    assert_eq!(crictl.row(&["ps", "-a"], &id[..13]).await?[3], "Exited");
    let inspect = crictl.json(&["inspect", &id]).await?;
    assert_eq!(
        path(&inspect, "/status/exitCode")?,
        143,
        "SIGTERM ends a shell that is not pid 1: the pause is, where the pod shares its pid namespace"
    );
    assert_eq!(path(&inspect, "/status/reason")?, "Error");
    crictl.ok(&["rm", &id[..13]]).await?;
    assert_eq!(crictl.ok(&["ps", "-a", "-q"]).await?, "");
    let gone = crictl.run(&["inspect", &id]).await?;
    assert!(
        !gone.status.success() && shown(&gone).contains("NotFound"),
        "{}",
        shown(&gone)
    );

    assert!(
        !crictl.run(&["rmp", &sandbox]).await?.status.success(),
        "rmp refuses what is ready"
    );
    crictl.ok(&["stopp", &sandbox[..13]]).await?;
    assert_eq!(crictl.row(&["pods"], &sandbox[..13]).await?[2], "NotReady");
    crictl.ok(&["rmp", &sandbox[..13]]).await?;
    assert_eq!(crictl.ok(&["pods", "-q"]).await?, "");
    node.finish().await
}
