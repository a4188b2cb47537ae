//! What pods are made of: containers, namespaces, volumes, limits, identities.

use std::fs;
use std::io::Read;
use std::net::TcpStream;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::kubelet::{SLEEP, container, shell};
use serde_json::json;

use crate::Cluster;

fn namespace(pid: i32, kind: &str) -> Result<u64> {
    Ok(fs::metadata(format!("/proc/{pid}/ns/{kind}"))?.ino())
}

/// Init containers one after the other, a sidecar that outlives the containers, two of these.
pub async fn many(cluster: Cluster<'_>) -> Result<()> {
    let kubelet = cluster.kubelet;
    let order = cluster.node.path("order");
    fs::create_dir(&order)?;
    let mounts = json!({ "volumeMounts": [{ "name": "order", "mountPath": "/order" }] });
    let say = |word: &str| shell(word, &format!("echo {word} >> /order/up"), mounts.clone());
    let ends = |name: &str, wait: &str| {
        let script = format!(
            "echo {name} >> /order/up; trap '{wait} echo {name} >> /order/down; exit 0' TERM; \
             while :; do sleep 0.1; done"
        );
        shell(name, &script, mounts.clone())
    };
    let mut side = ends("side", "");
    side["restartPolicy"] = json!("Always");
    let probe = json!({ "exec": { "command": ["grep", "side", "/order/up"] }, "periodSeconds": 1 });
    side["startupProbe"] = probe;
    let spec = json!({
        "initContainers": [say("init1"), say("init2"), side, say("init3")],
        "containers": [ends("one", "sleep 1;"), ends("two", "")], "terminationGracePeriodSeconds": 20,
        "volumes": [{ "name": "order", "hostPath": { "path": order, "type": "Directory" } }],
    });
    kubelet.apply("many", spec)?;
    let pod = kubelet.ready("many").await?;
    let read = |name: &str| fs::read_to_string(order.join(name)).unwrap_or_default();
    let up = read("up");
    ensure!(up.starts_with("init1\ninit2\nside\ninit3\n"), "{up}");
    for name in ["init1", "init2", "init3"] {
        let state = &container(&pod, name)?["state"]["terminated"];
        ensure!(
            state["reason"] == "Completed" && state["exitCode"] == 0,
            "{:#}",
            pod["status"]
        );
    }
    let pid = cluster.pid(&pod, "side").await?;
    ensure!(namespace(pid, "net")? == namespace(cluster.pid(&pod, "one").await?, "net")?);
    ensure!(namespace(pid, "pid")? != namespace(cluster.pid(&pod, "one").await?, "pid")?);
    kubelet.delete("many")?;
    cluster.gone(pid).await?;
    let down = read("down");
    ensure!(down == "two\none\nside\n", "a sidecar ends last: {down}");
    Ok(())
}

pub async fn host_namespaces(cluster: Cluster<'_>) -> Result<()> {
    let kubelet = cluster.kubelet;
    let containers = [shell("main", SLEEP, json!({}))];
    let spec = json!({ "hostNetwork": true, "hostPID": true, "hostIPC": true, "containers": containers });
    kubelet.apply("host", spec)?;
    let pod = kubelet.ready("host").await?;
    let pid = cluster.pid(&pod, "main").await?;
    for kind in ["net", "pid", "ipc", "uts"] {
        let own = namespace(std::process::id() as i32, kind)?;
        ensure!(namespace(pid, kind)? == own, "the {kind} namespace is not the host's");
    }
    Ok(())
}

/// Served at its own address and at the port of the host.
pub async fn host_port(cluster: Cluster<'_>) -> Result<()> {
    let kubelet = cluster.kubelet;
    let port = e2e::port::unused();
    let script = "trap 'exit 0' TERM; while :; do echo served | nc -l -p 8080; done";
    let further = json!({ "ports": [{ "containerPort": 8080, "hostPort": port }] });
    kubelet.apply("ports", json!({ "containers": [shell("main", script, further)] }))?;
    let pod = kubelet.ready("ports").await?;
    let ip = pod["status"]["podIP"].as_str().context("no podIP")?;
    for address in [format!("{ip}:8080"), format!("127.0.0.1:{port}")] {
        kubelet
            .wait(&format!("an answer from {address}"), async |_| {
                let mut stream = TcpStream::connect_timeout(&address.parse()?, Duration::from_secs(1))?;
                stream.set_read_timeout(Some(Duration::from_secs(2)))?;
                let mut text = String::new();
                stream.read_to_string(&mut text)?;
                ensure!(text == "served\n", "{text:?}");
                Ok(())
            })
            .await?;
    }
    Ok(())
}

pub async fn shared_processes(cluster: Cluster<'_>) -> Result<()> {
    let kubelet = cluster.kubelet;
    let spec = json!({ "shareProcessNamespace": true,
        "containers": [shell("one", SLEEP, json!({})), shell("two", SLEEP, json!({}))] });
    kubelet.apply("shared", spec)?;
    let pod = kubelet.ready("shared").await?;
    let (one, two) = (cluster.pid(&pod, "one").await?, cluster.pid(&pod, "two").await?);
    ensure!(namespace(one, "pid")? == namespace(two, "pid")?, "two pid namespaces");
    ensure!(namespace(one, "pid")? != namespace(std::process::id() as i32, "pid")?);
    Ok(())
}

pub async fn volumes(cluster: Cluster<'_>) -> Result<()> {
    let kubelet = cluster.kubelet;
    let host = cluster.node.path("of-host");
    fs::create_dir_all(host.join("in"))?;
    fs::write(host.join("file"), "of the host\n")?;
    let script = "echo x > /sub/f; echo sub $(cat /disk/a/b/f); \
                  echo mem $(grep ' /mem ' /proc/mounts | cut -d' ' -f3); \
                  cat /host/file /one; touch /host/no 2> /dev/null || echo read-only; echo y > /in/f; \
                  stat -c %g /disk; echo done; trap 'exit 0' TERM; while :; do sleep 0.1; done";
    let further = json!({ "volumeMounts": [
        { "name": "disk", "mountPath": "/disk" }, { "name": "disk", "mountPath": "/sub", "subPath": "a/b" },
        { "name": "mem", "mountPath": "/mem" }, { "name": "host", "mountPath": "/host", "readOnly": true },
        { "name": "host", "mountPath": "/in", "subPath": "in" },
        { "name": "host", "mountPath": "/one", "subPath": "file" },
    ] });
    let spec = json!({ "containers": [shell("main", script, further)], "securityContext": { "fsGroup": 1001 },
        "volumes": [
            { "name": "disk", "emptyDir": {} },
            { "name": "mem", "emptyDir": { "medium": "Memory", "sizeLimit": "1Mi" } },
            { "name": "host", "hostPath": { "path": host, "type": "Directory" } }] });
    kubelet.apply("volumes", spec)?;
    let pod = kubelet.ready("volumes").await?;
    cluster.wrote(&pod, "main", "done").await?;
    let lines = kubelet.lines(&pod, "main")?;
    let wanted = [
        "sub x",
        "mem tmpfs",
        "of the host",
        "of the host",
        "read-only",
        "1001",
        "done",
    ];
    ensure!(lines == wanted, "{lines:#?}");
    ensure!(fs::read_to_string(host.join("in/f"))? == "y\n");
    let pid = cluster.pid(&pod, "main").await?;
    kubelet.delete("volumes")?;
    cluster.gone(pid).await?;
    ensure!(
        fs::read_to_string(host.join("file"))? == "of the host\n",
        "a hostPath volume stays"
    );
    Ok(())
}

/// The file of a process's cgroup, `up` levels above it: v1's of this controller, else v2's.
fn limit(pid: i32, up: usize, v1: (&str, &str), v2: &str) -> Result<String> {
    let table = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let unified = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    let named = |line: &&str| {
        let name = line.split(':').nth(1).unwrap_or_default();
        if unified {
            name.is_empty()
        } else {
            name.split(',').any(|one| one == v1.0)
        }
    };
    let line = table.lines().find(named).context("no cgroup")?;
    let path = line.splitn(3, ':').nth(2).unwrap_or_default().trim_start_matches('/');
    let mount = PathBuf::from(if unified {
        "/sys/fs/cgroup".into()
    } else {
        format!("/sys/fs/cgroup/{}", v1.0)
    });
    let dir = mount.join(path);
    let dir = dir.ancestors().nth(up).context("above the top")?;
    let file = dir.join(if unified { v2 } else { v1.1 });
    Ok(fs::read_to_string(&file)
        .with_context(|| file.display().to_string())?
        .trim()
        .to_owned())
}

/// The container's cgroup has its limits, and lies in the one that the kubelet made for the pod.
pub async fn limits(cluster: Cluster<'_>) -> Result<()> {
    let kubelet = cluster.kubelet;
    let further = json!({ "resources": { "limits": { "cpu": "200m", "memory": "64Mi" },
        "requests": { "cpu": "100m", "memory": "64Mi" } } });
    kubelet.apply("limits", json!({ "containers": [shell("main", SLEEP, further)] }))?;
    let pod = kubelet.ready("limits").await?;
    let pid = cluster.pid(&pod, "main").await?;
    for up in [0, 1] {
        ensure!(
            limit(pid, up, ("memory", "memory.limit_in_bytes"), "memory.max")? == "67108864",
            "{up} up"
        );
        let quota = limit(pid, up, ("cpu", "cpu.cfs_quota_us"), "cpu.max")?;
        ensure!(quota == "20000" || quota == "20000 100000", "{up} up: {quota}");
        let shares = limit(pid, up, ("cpu", "cpu.shares"), "cpu.weight")?;
        ensure!(["102", "17"].contains(&&*shares), "{up} up: {shares}");
    }
    let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let uid = pod["metadata"]["uid"].as_str().context("no uid")?;
    ensure!(cgroups.contains(&format!("/kubepods/burstable/pod{uid}/")), "{cgroups}");
    Ok(())
}

pub async fn security(cluster: Cluster<'_>) -> Result<()> {
    let kubelet = cluster.kubelet;
    let script = "touch /no 2> /dev/null || echo read-only; echo x > /disk/f && stat -c %g /disk/f; echo done; \
                  trap 'exit 0' TERM; while :; do sleep 0.1; done";
    let further = json!({ "securityContext": { "readOnlyRootFilesystem": true, "allowPrivilegeEscalation": false,
        "runAsGroup": 2000, "capabilities": { "drop": ["ALL"], "add": ["NET_BIND_SERVICE"] },
        "seccompProfile": { "type": "RuntimeDefault" } },
        "volumeMounts": [{ "name": "disk", "mountPath": "/disk" }] });
    let spec = json!({ "containers": [shell("main", script, further)], "volumes": [{ "name": "disk", "emptyDir": {} }],
        "securityContext": { "runAsUser": 1234, "runAsNonRoot": true, "fsGroup": 3000, "supplementalGroups": [4000],
            "sysctls": [{ "name": "net.ipv4.ip_local_port_range", "value": "40000 41000" }] } });
    kubelet.apply("secure", spec)?;
    let pod = kubelet.ready("secure").await?;
    cluster.wrote(&pod, "main", "done").await?;
    let lines = kubelet.lines(&pod, "main")?;
    ensure!(lines == ["read-only", "3000", "done"], "{lines:?}");
    let pid = cluster.pid(&pod, "main").await?;
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        line.split_whitespace().skip(1).collect::<Vec<_>>().join(" ")
    };
    ensure!(field("Uid:") == "1234 1234 1234 1234", "{status}");
    ensure!(field("Gid:") == "2000 2000 2000 2000", "{status}");
    ensure!(field("Groups:") == "2000 3000 4000", "{status}");
    ensure!(
        field("CapBnd:") == "0000000000000400" && field("CapEff:") == "0000000000000000",
        "{status}"
    );
    ensure!(field("NoNewPrivs:") == "1" && field("Seccomp:") == "2", "{status}");
    Ok(())
}

/// A changed manifest is another pod in the old one's place.
pub async fn changed(cluster: Cluster<'_>) -> Result<()> {
    let kubelet = cluster.kubelet;
    let spec = |word: &str| json!({ "containers": [shell("main", &format!("echo {word}; {SLEEP}"), json!({}))] });
    kubelet.apply("changed", spec("before"))?;
    let old = kubelet.ready("changed").await?;
    let pid = cluster.pid(&old, "main").await?;
    kubelet.apply("changed", spec("after"))?;
    cluster.gone(pid).await?;
    let pod = kubelet
        .wait("the new pod", async |kubelet| {
            let pod = kubelet.ready("changed").await?;
            ensure!(pod["metadata"]["uid"] != old["metadata"]["uid"], "the old one");
            Ok(pod)
        })
        .await?;
    cluster.wrote(&pod, "main", "after").await
}
