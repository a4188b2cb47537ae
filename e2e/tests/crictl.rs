//! Every command of `crictl`: the columns of its tables, the keys of its JSON, what it does. A pod's whole life is in
//! `conformance.rs`; exec, attach and port-forward are in `streaming.rs`.

use std::fs;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::crictl::{Crictl, has, path};
use e2e::eventually;
use e2e::images::{Compression, busybox_layer};
use e2e::node::{Node, Options, shown};
use e2e::pods::BUSYBOX;
use e2e::registry::{Gate, Server};
use e2e::served::{layer, serve};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;

const SOON: Duration = Duration::from_secs(10);

/// A pod's configuration as people write it for crictl.
fn pod_file(node: &Node, name: &str, attempt: u32) -> Result<String> {
    let pod = json!({ "metadata": { "name": name, "namespace": "prod", "uid": format!("uid-{name}"),
        "attempt": attempt }, "hostname": name, "labels": { "app": name }, "annotations": { "note": "x" },
        "log_directory": node.path("logs"), "linux": { "cgroup_parent": "" } });
    node.file(&format!("{name}.pod.json"), pod.to_string())
}

fn container_file(node: &Node, name: &str, image: &str, script: &str) -> Result<String> {
    let container = json!({ "metadata": { "name": name, "attempt": 1 }, "image": { "image": image },
        "command": ["/bin/sh", "-c", script], "log_path": format!("{name}/1.log"),
        "labels": { "io.kubernetes.pod.name": "web", "io.kubernetes.pod.namespace": "prod" },
        "annotations": { "note": "y" }, "linux": { "resources": { "memory_limit_in_bytes": 64 << 20,
        "cpu_shares": 512 } } });
    node.file(&format!("{name}.container.json"), container.to_string())
}

struct Running {
    sandbox: String,
    id: String,
}

async fn running(node: &Node, crictl: &Crictl, script: &str) -> Result<Running> {
    let (pod, container) = (
        pod_file(node, "web", 3)?,
        container_file(node, "main", BUSYBOX, script)?,
    );
    let sandbox = crictl.ok(&["runp", &pod]).await?;
    let id = crictl.ok(&["create", &sandbox, &container, &pod]).await?;
    crictl.ok(&["start", &id]).await?;
    Ok(Running { sandbox, id })
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_have_their_columns() -> Result<()> {
    let node = Node::start().await?;
    let Some(crictl) = Crictl::of(&node).await? else {
        return node.finish_unused().await;
    };
    node.busybox().await?;
    let Running { sandbox, id } = running(&node, &crictl, "while :; do sleep 0.1; done").await?;
    // By table: the command, its columns, and of the row of our own what is known beforehand.
    type Known<'a> = &'a [(&'a str, &'a str)];
    let tables: [(&[&str], &[&str], Known); 7] = [
        (
            &["pods"],
            &["POD ID", "CREATED", "STATE", "NAME", "NAMESPACE", "ATTEMPT", "RUNTIME"],
            &[
                ("POD ID", &sandbox[..13]),
                ("STATE", "Ready"),
                ("NAME", "web"),
                ("NAMESPACE", "prod"),
                ("ATTEMPT", "3"),
                ("RUNTIME", "(default)"),
            ],
        ),
        (
            &["ps"],
            &[
                "CONTAINER",
                "IMAGE",
                "CREATED",
                "STATE",
                "NAME",
                "ATTEMPT",
                "POD ID",
                "POD",
                "NAMESPACE",
            ],
            &[
                ("CONTAINER", &id[..13]),
                ("IMAGE", BUSYBOX),
                ("STATE", "Running"),
                ("NAME", "main"),
                ("ATTEMPT", "1"),
                ("POD ID", &sandbox[..13]),
                ("POD", "web"),
                ("NAMESPACE", "prod"),
            ],
        ),
        (
            &["images", "--digests"],
            &["IMAGE", "TAG", "DIGEST", "IMAGE ID", "SIZE"],
            &[("IMAGE", "localhost/busybox"), ("TAG", "1")],
        ),
        (
            &["images", "--pinned"],
            &["IMAGE", "TAG", "IMAGE ID", "SIZE", "PINNED"],
            &[("IMAGE", "localhost/busybox"), ("TAG", "1"), ("PINNED", "false")],
        ),
        (
            &["stats"],
            &["CONTAINER", "NAME", "CPU %", "MEM", "DISK", "INODES", "SWAP"],
            &[("CONTAINER", &id[..13]), ("NAME", "main")],
        ),
        (
            &["statsp"],
            &["POD", "POD ID", "CPU %", "MEM"],
            &[("POD", "web"), ("POD ID", &sandbox[..13])],
        ),
        (
            &["config", "--list"],
            &["KEY", "VALUE"],
            &[("KEY", "timeout"), ("VALUE", "20")],
        ),
    ];
    for (args, columns, known) in tables {
        let table = crictl.table(args).await?;
        assert_eq!(table.columns, columns, "{args:?}");
        let row = table.rows.iter().find(|row| row[known[0].0] == known[0].1);
        let row = row.with_context(|| format!("{args:?}: no row of ours in {:#?}", table.rows))?;
        for (column, cell) in known {
            assert_eq!(row[*column], *cell, "{args:?} {column}");
        }
        for column in columns {
            ensure!(!row[*column].is_empty(), "{args:?}: {column} is empty in {row:?}");
        }
    }
    let usage = crictl.ok(&["imagefsinfo", "-o", "table"]).await?;
    for word in [
        "Image Filesystem",
        "TimeStamp[0]: 1",
        "Disk[0]: ",
        "Inodes[0]: ",
        "Mountpoint[0]: /",
    ] {
        ensure!(usage.contains(word), "{word} is not in\n{usage}");
    }
    let version = crictl.ok(&["version"]).await?;
    for line in [
        "Version:  0.1.0",
        "RuntimeName:  reconcile",
        "RuntimeVersion:  ",
        "RuntimeApiVersion:  v1",
    ] {
        ensure!(version.contains(line), "{line} is not in\n{version}");
    }
    let driver = crictl.ok(&["runtime-config"]).await?;
    ensure!(
        driver.starts_with("cgroup driver:") && driver.ends_with("CGROUPFS"),
        "{driver}"
    );
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn json_has_its_keys() -> Result<()> {
    let node = Node::start().await?;
    let Some(crictl) = Crictl::of(&node).await? else {
        return node.finish_unused().await;
    };
    node.busybox().await?;
    let Running { sandbox, id } = running(&node, &crictl, "while :; do sleep 0.1; done").await?;

    let info = crictl.json(&["info"]).await?;
    has(
        &info,
        &[
            "/status/conditions/0/type",
            "/status/conditions/0/reason",
            "/status/conditions/0/message",
            "/runtimeHandlers/0/features",
            "/features/supplemental_groups_policy",
            "/config/sandboxImage",
            "/cniconfig",
            "/lastCNILoadStatus",
        ],
    )?;
    let pods = crictl.json(&["pods", "-o", "json"]).await?;
    has(
        &pods,
        &[
            "/items/0/metadata/name",
            "/items/0/metadata/uid",
            "/items/0/metadata/namespace",
            "/items/0/metadata/attempt",
            "/items/0/labels/app",
            "/items/0/annotations/note",
            "/items/0/runtimeHandler",
        ],
    )?;
    assert_eq!(path(&pods, "/items/0/id")?, &*sandbox);
    assert_eq!(path(&pods, "/items/0/state")?, "SANDBOX_READY");
    ensure!(nanoseconds(&pods, "/items/0/createdAt")?);
    let containers = crictl.json(&["ps", "-o", "json"]).await?;
    has(
        &containers,
        &[
            "/containers/0/metadata/name",
            "/containers/0/metadata/attempt",
            "/containers/0/image/image",
            "/containers/0/annotations/note",
        ],
    )?;
    let of = |key: &str| path(&containers, &format!("/containers/0/{key}")).cloned();
    assert_eq!((of("id")?, of("podSandboxId")?), (json!(id), json!(sandbox)));
    assert_eq!(of("state")?, "CONTAINER_RUNNING");
    ensure!(nanoseconds(&containers, "/containers/0/createdAt")?);

    // One and the same id wherever an image has one.
    let image = crictl.json(&["inspecti", BUSYBOX]).await?;
    has(
        &image,
        &[
            "/status/repoTags/0",
            "/status/repoDigests/0",
            "/status/size",
            "/status/username",
            "/status/pinned",
            "/info/chainID",
            "/info/imageSpec/config/Cmd",
            "/info/imageSpec/config/Env",
            "/info/imageSpec/rootfs/diff_ids",
        ],
    )?;
    let image_id = path(&image, "/status/id")?.clone();
    assert_eq!(of("imageId")?, image_id);
    let short = image_id.as_str().context("an id")?["sha256:".len()..][..13].to_owned();
    for name in [&short, &format!("sha256:{short}"), "localhost/busybox:1"] {
        assert_eq!(
            path(&crictl.json(&["inspecti", name]).await?, "/status/id")?,
            &image_id,
            "{name}"
        );
    }
    let several = crictl.json(&["inspecti", BUSYBOX, "localhost/hello"]).await?;
    assert_eq!(several.as_array().map(Vec::len), Some(2), "one object each");
    let images = crictl.json(&["images", "-o", "json"]).await?;
    let images = path(&images, "/images")?.as_array().context("a list")?.clone();
    let ours = images.iter().find(|image| image["id"] == image_id).context("ours")?;
    has(ours, &["/repoTags", "/repoDigests", "/size", "/pinned"])?;
    let filtered = crictl.ok(&["images", "-q", BUSYBOX]).await?;
    assert_eq!(
        filtered.lines().collect::<Vec<_>>(),
        [image_id.as_str().unwrap_or_default()]
    );

    let inspected = crictl.json(&["inspect", &id]).await?;
    has(
        &inspected,
        &[
            "/status/exitCode",
            "/status/reason",
            "/status/mounts",
            "/status/imageRef",
            "/status/logPath",
            "/status/user/linux/uid",
            "/info/pid",
            "/info/sandboxID",
            "/info/removing",
            "/info/snapshotKey",
            "/info/snapshotter",
            "/info/runtimeType",
            "/info/runtimeOptions",
            "/info/config/metadata/name",
            "/info/runtimeSpec/process/user",
            "/info/runtimeSpec/mounts",
            "/info/runtimeSpec/linux/cgroupsPath",
        ],
    )?;
    assert_eq!(
        path(&inspected, "/status/resources/linux/memoryLimitInBytes")?,
        "67108864"
    );
    let pod = crictl.json(&["inspectp", &sandbox]).await?;
    has(
        &pod,
        &[
            "/status/network/ip",
            "/status/network/additionalIps",
            "/status/linux/namespaces/options/network",
            "/info/pid",
            "/info/image",
            "/info/config/metadata/uid",
            "/info/cniResult",
            "/info/processStatus",
            "/info/netNamespaceClosed",
            "/info/runtimeType",
            "/info/runtimeSpec/linux/namespaces",
        ],
    )?;
    assert_eq!(path(&pod, "/info/processStatus")?, "running");
    assert_eq!(path(&pod, "/info/netNamespaceClosed")?, false);

    let stats = crictl.json(&["stats", "-o", "json"]).await?;
    has(
        &stats,
        &[
            "/stats/0/attributes/labels",
            "/stats/0/cpu/usageCoreNanoSeconds/value",
            "/stats/0/cpu/timestamp",
            "/stats/0/memory/workingSetBytes/value",
            "/stats/0/writableLayer/usedBytes/value",
            "/stats/0/writableLayer/inodesUsed/value",
            "/stats/0/swap/swapUsageBytes/value",
        ],
    )?;
    let stats = crictl.json(&["statsp", "-o", "json"]).await?;
    has(
        &stats,
        &[
            "/stats/0/attributes/metadata/name",
            "/stats/0/linux/cpu/usageCoreNanoSeconds/value",
            "/stats/0/linux/memory/workingSetBytes/value",
            "/stats/0/linux/network/defaultInterface/rxBytes/value",
            "/stats/0/linux/process/processCount/value",
            "/stats/0/linux/containers/0/attributes/id",
        ],
    )?;
    let usage = crictl.json(&["imagefsinfo"]).await?;
    let of = |key: &str| path(&usage, &format!("/status/imageFilesystems/0/{key}"));
    let mountpoint = of("fsId/mountpoint")?.as_str().context("a path")?;
    ensure!(fs::metadata(mountpoint)?.is_dir(), "{mountpoint}");
    ensure!(of("inodesUsed/value")?.is_string() && nanoseconds(&usage, "/status/imageFilesystems/0/timestamp")?);
    has(&usage, &["/status/containerFilesystems"])?;

    let described = crictl.json(&["metricdescs"]).await?;
    has(
        &described,
        &[
            "/descriptors/0/name",
            "/descriptors/0/help",
            "/descriptors/0/labelKeys/0",
        ],
    )?;
    let metrics = crictl.json(&["metricsp"]).await?;
    has(
        &metrics,
        &[
            "/podMetrics/0/metrics/0/name",
            "/podMetrics/0/metrics/0/metricType",
            "/podMetrics/0/metrics/0/labelValues",
            "/podMetrics/0/metrics/0/value",
            "/podMetrics/0/containerMetrics/0/metrics/0/name",
        ],
    )?;
    assert_eq!(path(&metrics, "/podMetrics/0/containerMetrics/0/containerId")?, &*id);
    node.finish().await
}

/// Is it a time in nanoseconds, as text?
fn nanoseconds(json: &Value, pointer: &str) -> Result<bool> {
    let text = path(json, pointer)?.as_str().unwrap_or_default();
    Ok(text.len() == 19 && text.parse::<u64>().is_ok())
}

#[tokio::test(flavor = "multi_thread")]
async fn updates_and_configuration() -> Result<()> {
    let node = Node::start().await?;
    let Some(crictl) = Crictl::of(&node).await? else {
        return node.finish_unused().await;
    };
    node.busybox().await?;
    let Running { id, .. } = running(&node, &crictl, "while :; do sleep 0.1; done").await?;
    let memory = (96 << 20).to_string();
    let limits = [
        "--cpu-quota",
        "40000",
        "--cpu-period",
        "80000",
        "--cpu-share",
        "256",
        "--memory",
        &memory,
    ];
    crictl.ok(&[&["update"], &limits[..], &[&id]].concat()).await?;
    let inspected = crictl.json(&["inspect", &id]).await?;
    for (key, value) in [
        ("cpuQuota", "40000"),
        ("cpuPeriod", "80000"),
        ("cpuShares", "256"),
        ("memoryLimitInBytes", &*memory),
    ] {
        assert_eq!(path(&inspected, &format!("/status/resources/linux/{key}"))?, value);
    }
    let unknown = crictl
        .refused(&["update", "--memory", &memory, &"0".repeat(64)])
        .await?;
    ensure!(unknown.contains("NotFound"), "{unknown}");

    let said = crictl
        .run(&["update-runtime-config", "--pod-cidr", "10.99.0.0/24"])
        .await?;
    ensure!(
        said.status.success() && shown(&said).contains("successfully updated"),
        "{}",
        shown(&said)
    );
    let wrong = crictl
        .refused(&["update-runtime-config", "--pod-cidr", "10.99.0.0/240"])
        .await?;
    ensure!(
        wrong.contains("pod_cidr") && wrong.contains("InvalidArgument"),
        "{wrong}"
    );

    crictl.ok(&["config", "--set", "timeout=7,debug=false"]).await?;
    assert_eq!(crictl.ok(&["config", "--get", "timeout"]).await?, "7");
    crictl.refused(&["config", "--get", "nonsense"]).await?;
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_as_they_are_asked_for() -> Result<()> {
    let node = Node::start().await?;
    let Some(crictl) = Crictl::of(&node).await? else {
        return node.finish_unused().await;
    };
    node.busybox().await?;
    let script = "mkfifo /go; for n in 1 2 3; do echo line $n; done; read go < /go; echo error >&2; echo end";
    let Running { id, .. } = running(&node, &crictl, script).await?;
    eventually(SOON, async || {
        let all = crictl.ok(&["logs", &id]).await?;
        ensure!(all == "line 1\nline 2\nline 3", "{all}");
        Ok(())
    })
    .await?;
    assert_eq!(
        crictl.ok(&["logs", "--tail", "2", "--since", "1h", &id]).await?,
        "line 2\nline 3"
    );
    assert_eq!(crictl.ok(&["logs", "--limit-bytes", "6", &id]).await?, "line 1");
    let stamped = crictl.ok(&["logs", "-t", "--tail", "1", &id]).await?;
    ensure!(stamped.starts_with("20") && stamped.ends_with(" line 3"), "{stamped}");
    // The container before it: attempt 0 beside attempt 1.
    let log = node.path("logs/main/1.log");
    fs::write(log.with_file_name("0.log"), "2024-01-01T00:00:00.0Z stdout F before\n")?;
    assert_eq!(crictl.ok(&["logs", "-p", &id]).await?, "before");
    // Renamed by a rotation and opened again: what follows is in the new file.
    fs::rename(&log, log.with_extension("log.20240101-000000"))?;
    crictl.ok(&["logs", "-r", &id]).await?;
    ensure!(fs::metadata(&log)?.len() == 0, "the new file is there at once");
    let mut follow = crictl.command(&["logs", "-f", &id]);
    let follow = follow.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    crictl.ok(&["exec", "-s", &id, "sh", "-c", "echo > /go"]).await?;
    let out = tokio::time::timeout(SOON, follow.wait_with_output()).await;
    let out = out.context("logs -f goes on after the end of the container")??;
    assert_eq!(
        (&*out.stdout, &*out.stderr),
        (&b"end\n"[..], &b"error\n"[..]),
        "{}",
        shown(&out)
    );
    for (stream, stdout, stderr) in [("stdout", "end\n", ""), ("stderr", "", "error\n")] {
        let out = crictl.run(&["logs", "-s", stream, &id]).await?;
        assert_eq!(
            (&*out.stdout, &*out.stderr),
            (stdout.as_bytes(), stderr.as_bytes()),
            "{stream}"
        );
    }

    crictl.ok(&["rm", "-k", &id]).await?;
    ensure!(log.exists(), "rm -k keeps the log");
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn images_are_pulled_run_and_removed() -> Result<()> {
    let mut node = Node::new(Options::default())?;
    let server = Server::start().await?;
    node.serve().await?;
    let Some(crictl) = Crictl::of(&node).await? else {
        return node.finish_unused().await;
    };
    let plain = serve(&server, "a/plain", &[busybox_layer(Compression::Gzip)?]);
    let locked = serve(&server, "a/locked", &[layer(5, 4096)]);
    let pulled = crictl.ok(&["pull", &plain.name]).await?;
    ensure!(pulled.contains("sha256:"), "{pulled}");

    let (pod, container) = (
        pod_file(&node, "web", 0)?,
        container_file(&node, "main", &plain.name, "id -u; while :; do sleep 0.1; done")?,
    );
    server.take_seen();
    let id = crictl.ok(&["run", &container, &pod]).await?;
    ensure!(!server.take_seen().is_empty(), "run asks the registry first");
    assert_eq!(crictl.table(&["ps"]).await?.rows[0]["CONTAINER"], id[..13]);
    let listed = crictl.ok(&["ps", "-q", "--image", &plain.name]).await?;
    assert_eq!(listed, id);
    assert_eq!(crictl.ok(&["ps", "-q", "--state", "Exited"]).await?, "");
    let of_pod = crictl
        .ok(&["pods", "-q", "--namespace", "^prod$", "--state", "Ready"])
        .await?;
    assert_eq!(crictl.ok(&["ps", "-q", "-p", &of_pod[..13]]).await?, id);

    server.gate(Gate::basic("me", "secret"));
    let refused = crictl.refused(&["pull", &locked.name]).await?;
    ensure!(
        refused.contains("401") || refused.contains("denied") || refused.contains("authori"),
        "{refused}"
    );
    crictl.ok(&["pull", "--creds", "me:secret", &locked.name]).await?;
    crictl
        .ok(&["pull", "--auth", &e2e::registry::base64("me:secret"), &locked.name])
        .await?;

    // What runs is not pruned, nor what is pinned.
    let pruned = crictl.ok(&["rmi", "--prune"]).await?;
    assert_eq!(pruned, format!("Deleted: {}", locked.name));
    let absent = crictl.refused(&["rmi", &locked.name]).await?;
    ensure!(absent.contains("no such image"), "{absent}");
    assert_eq!(
        crictl.ok(&["rmi", &plain.name]).await?,
        format!("Deleted: {}", plain.name)
    );
    let state = crictl.json(&["inspect", &id]).await?;
    assert_eq!(
        path(&state, "/status/state")?,
        "CONTAINER_RUNNING",
        "it goes on without its image's name"
    );

    let log = node.path("logs/main/1.log");
    ensure!(log.exists());
    assert_eq!(
        crictl.ok(&["rm", "-f", &id]).await?,
        format!("{id}\n{id}"),
        "stopped and removed"
    );
    ensure!(!log.exists(), "crictl removes the log file");
    let sandbox = crictl.ok(&["pods", "-q"]).await?;
    let removed = crictl.ok(&["rmp", "-f", &sandbox]).await?;
    ensure!(removed.contains("web") || removed.contains(&sandbox), "{removed}");
    assert_eq!(crictl.ok(&["pods", "-q"]).await?, "");
    for args in [&["rm", "-a"][..], &["rmp", "-a"], &["stop", &id], &["stopp", &sandbox]] {
        let out = crictl.run(args).await?;
        ensure!(!shown(&out).contains("panic"), "{args:?}: {}", shown(&out));
    }
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn events_as_they_come() -> Result<()> {
    let node = Node::start().await?;
    let Some(crictl) = Crictl::of(&node).await? else {
        return node.finish_unused().await;
    };
    node.busybox().await?;
    let mut listening = crictl.command(&["events"]);
    let mut listening = listening.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    let mut stdout = listening.stdout.take().context("its output")?;
    // Nothing says that it has subscribed but its first event.
    let pod = node.pod("first");
    let first = eventually(SOON, async || {
        let sandbox = node.cri.run_sandbox(&node.pod("first")).await?;
        node.cri.stop_sandbox(&sandbox).await?;
        node.cri.remove_sandbox(&sandbox).await?;
        let mut piece = [0; 64 << 10];
        let len = tokio::time::timeout(Duration::from_millis(500), stdout.read(&mut piece)).await??;
        Ok(piece[..len].to_vec())
    })
    .await?;
    drop(pod);
    let Running { sandbox, id } = running(&node, &crictl, "exit 3").await?;
    node.cri.exited(&id).await?;
    crictl.ok(&["rmp", "-f", &sandbox]).await?;
    let mut text = first;
    let mut seen = Vec::new();
    let read = async {
        loop {
            let whole = serde_json::Deserializer::from_slice(&text).into_iter::<Value>();
            let events: Vec<Value> = whole.filter_map(Result::ok).collect();
            seen = events
                .into_iter()
                .filter(|event| {
                    let of = &event["containerId"];
                    of == id.as_str() || of == sandbox.as_str()
                })
                .collect();
            let over = |event: &Value| {
                event["containerId"] == sandbox.as_str() && event["containerEventType"] == "CONTAINER_DELETED_EVENT"
            };
            if seen.iter().any(over) {
                return anyhow::Ok(());
            }
            let mut piece = [0; 64 << 10];
            let len = stdout.read(&mut piece).await?;
            ensure!(len > 0, "crictl events ended");
            text.extend(&piece[..len]);
        }
    };
    tokio::time::timeout(SOON, read)
        .await
        .context("no end of the pod was told")??;
    let kinds = |of: &str| -> Vec<String> {
        let of = seen.iter().filter(|event| event["containerId"] == of);
        let kinds = of.filter_map(|event| event["containerEventType"].as_str());
        kinds
            .map(|kind| {
                kind.trim_start_matches("CONTAINER_")
                    .trim_end_matches("_EVENT")
                    .to_owned()
            })
            .collect()
    };
    assert_eq!(kinds(&id), ["CREATED", "STARTED", "STOPPED", "DELETED"]);
    assert_eq!(kinds(&sandbox), ["CREATED", "STARTED", "STOPPED", "DELETED"]);
    for event in &seen {
        has(
            event,
            &["/createdAt", "/podSandboxStatus/metadata/name", "/containersStatuses"],
        )?;
    }
    listening.kill().await?;
    node.finish().await
}
