//! How containers end, and what is told of it: messages, probes, hooks, loops, memory, logs.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;

use anyhow::{Context, Result, ensure};
use e2e::kubelet::{container, merge, restarts, shell};
use flate2::read::GzDecoder;
use serde_json::{Value, json};

use crate::Cluster;

/// What is in the termination log, else the last lines of what was written.
pub async fn messages(cluster: Cluster<'_>) -> Result<()> {
    let kubelet = cluster.kubelet;
    let fallback = json!({ "terminationMessagePolicy": "FallbackToLogsOnError" });
    let spec = json!({ "restartPolicy": "Never", "containers": [
        shell("told", "echo -n my last word > /dev/termination-log; exit 3", json!({})),
        shell("logged", "echo not this; echo said aloud; exit 4", fallback),
        shell("good", "exit 0", json!({})),
    ] });
    kubelet.apply("message", spec)?;
    kubelet
        .wait("three ends", async |kubelet| {
            let pod = kubelet.pod("message").await?;
            let told = |name: &str| {
                let state = &container(&pod, name)?["state"]["terminated"];
                let text = |field: &str| state[field].as_str().unwrap_or_default().to_owned();
                Ok::<_, anyhow::Error>((state["exitCode"].as_i64(), text("reason"), text("message")))
            };
            ensure!(
                told("told")? == (Some(3), "Error".into(), "my last word".into()),
                "{:?}",
                told("told")?
            );
            let logged = told("logged")?;
            ensure!(logged.0 == Some(4) && logged.2.ends_with("said aloud\n"), "{logged:?}");
            ensure!(
                told("good")? == (Some(0), "Completed".into(), String::new()),
                "{:?}",
                told("good")?
            );
            ensure!(pod["status"]["phase"] == "Failed", "{:#}", pod["status"]);
            Ok(())
        })
        .await
}

/// Each fails after a moment, for the first container only: it is started again, and then stays.
pub async fn probes(cluster: Cluster<'_>) -> Result<()> {
    let kubelet = cluster.kubelet;
    let often = |mut probe: Value| {
        merge(
            &mut probe,
            json!({ "periodSeconds": 1, "failureThreshold": 2, "initialDelaySeconds": 1 }),
        );
        json!({ "livenessProbe": probe, "volumeMounts": [{ "name": "disk", "mountPath": "/disk" }] })
    };
    // The first one turns bad after two seconds.
    let once = |name: &str, good: &str, bad: &str| {
        format!(
            "{good}; trap 'exit 0' TERM; if ! test -e /disk/{name}; then touch /disk/{name}; sleep 2; {bad}; fi; \
             while :; do sleep 0.1; done"
        )
    };
    let http = once(
        "http",
        "mkdir /www; echo ok > /www/ok; httpd -p 8081 -h /www",
        "rm /www/ok",
    );
    let tcp = once("tcp", "httpd -f -p 8082 -h / & server=$!", "kill $server");
    let exec = once("exec", "touch /good", "rm /good");
    let spec = json!({ "volumes": [{ "name": "disk", "emptyDir": {} }], "containers": [
        shell("exec", &exec, often(json!({ "exec": { "command": ["test", "-e", "/good"] } }))),
        shell("http", &http, often(json!({ "httpGet": { "path": "/ok", "port": 8081 } }))),
        shell("tcp", &tcp, often(json!({ "tcpSocket": { "port": 8082 } }))),
    ] });
    kubelet.apply("probes", spec)?;
    kubelet
        .wait("each to be started again", async |kubelet| {
            let pod = kubelet.pod("probes").await?;
            for name in ["exec", "http", "tcp"] {
                ensure!(restarts(&pod, name)? >= 1, "{:#}", container(&pod, name)?);
            }
            Ok(())
        })
        .await?;
    let pod = kubelet.ready("probes").await?;
    for name in ["exec", "http", "tcp"] {
        let status = container(&pod, name)?;
        ensure!(
            status["lastState"]["terminated"].is_object() && restarts(&pod, name)? == 1,
            "{status:#}"
        );
    }
    Ok(())
}

pub async fn hooks(cluster: Cluster<'_>) -> Result<()> {
    let kubelet = cluster.kubelet;
    let dir = cluster.node.path("hooks");
    fs::create_dir(&dir)?;
    let run = |script: &str| json!({ "exec": { "command": ["/bin/sh", "-c", script] } });
    let further = json!({ "volumeMounts": [{ "name": "host", "mountPath": "/host" }], "lifecycle": {
        "postStart": run("echo started >> /host/told"), "preStop": run("sleep 1; echo stopping >> /host/told") } });
    let script = "trap 'echo TERM >> /host/told; exit 0' TERM; while :; do sleep 0.1; done";
    let spec = json!({ "containers": [shell("main", script, further)], "terminationGracePeriodSeconds": 10,
        "volumes": [{ "name": "host", "hostPath": { "path": dir } }] });
    kubelet.apply("hooks", spec)?;
    let pod = kubelet.ready("hooks").await?;
    let pid = cluster.pid(&pod, "main").await?;
    kubelet.delete("hooks")?;
    cluster.gone(pid).await?;
    let told = fs::read_to_string(dir.join("told"))?;
    ensure!(told == "started\nstopping\nTERM\n", "{told}");
    Ok(())
}

pub async fn crash_loop(cluster: Cluster<'_>) -> Result<()> {
    let kubelet = cluster.kubelet;
    kubelet.apply(
        "loop",
        json!({ "containers": [shell("main", "echo once more; exit 7", json!({}))] }),
    )?;
    let mut waited = false;
    kubelet
        .wait("three ends, and back-off between them", async |kubelet| {
            let pod = kubelet.pod("loop").await?;
            let status = container(&pod, "main")?;
            waited |= status["state"]["waiting"]["reason"] == "CrashLoopBackOff";
            let last = &status["lastState"]["terminated"];
            ensure!(
                waited && restarts(&pod, "main")? >= 3 && last["exitCode"] == 7,
                "{status:#}"
            );
            Ok(())
        })
        .await
}

pub async fn out_of_memory(cluster: Cluster<'_>) -> Result<()> {
    let kubelet = cluster.kubelet;
    let further = json!({ "resources": { "limits": { "memory": "20Mi" } } });
    let script = "exec dd if=/dev/zero of=/dev/null bs=200M";
    kubelet.apply(
        "oom",
        json!({ "restartPolicy": "Never", "containers": [shell("main", script, further)] }),
    )?;
    kubelet
        .wait("the kernel to kill it", async |kubelet| {
            let pod = kubelet.pod("oom").await?;
            let state = &container(&pod, "main")?["state"]["terminated"];
            ensure!(
                state["reason"] == "OOMKilled" && state["exitCode"] == 137,
                "{:#}",
                pod["status"]
            );
            Ok(())
        })
        .await
}

/// The kubelet rotates the log while it is written: every line is in one of the files, once.
pub async fn rotation(cluster: Cluster<'_>) -> Result<()> {
    const LINES: usize = 12_000;
    let kubelet = cluster.kubelet;
    let script = format!(
        "trap 'exit 0' TERM; i=0; while [ $i -lt {LINES} ]; do echo \"$i 0123456789012345678901234567890123456789\"; \
         i=$((i+1)); [ $((i%400)) = 0 ] && sleep 0.4; done; echo all; while :; do sleep 0.1; done"
    );
    kubelet.apply("logs", json!({ "containers": [shell("main", &script, json!({}))] }))?;
    let pod = kubelet.ready("logs").await?;
    let dir = kubelet.log_dir(&pod, "main");
    let all = |files: &mut usize| -> Result<BTreeMap<usize, usize>> {
        let mut seen = BTreeMap::new();
        *files = 0;
        for entry in fs::read_dir(&dir)? {
            let path = entry?.path();
            let name = path.display().to_string();
            let bytes = fs::read(&path)?;
            let mut text = String::new();
            if name.ends_with(".gz") {
                GzDecoder::new(&*bytes).read_to_string(&mut text)?;
            } else if name.ends_with(".tmp") {
                continue;
            } else {
                text = String::from_utf8(bytes)?;
            }
            *files += 1;
            for line in text.lines() {
                let (_, line) = line
                    .split_once(" stdout F ")
                    .with_context(|| format!("{name}: {line:?}"))?;
                let number = line.split(' ').next().unwrap_or_default();
                *seen
                    .entry(if line == "all" { LINES } else { number.parse()? })
                    .or_default() += 1;
            }
        }
        Ok(seen)
    };
    kubelet
        .wait("all lines in three or more files", async |_| {
            let mut files = 0;
            let seen = all(&mut files)?;
            let odd: Vec<_> = seen.iter().filter(|(_, times)| **times != 1).collect();
            let missing = (0..=LINES).find(|line| !seen.contains_key(line));
            ensure!(
                odd.is_empty() && missing.is_none() && files >= 3,
                "{files} files; {missing:?} misses; {odd:?}"
            );
            Ok(())
        })
        .await?;
    let pod = kubelet.pod("logs").await?;
    ensure!(restarts(&pod, "main")? == 0, "{:#}", container(&pod, "main")?);
    Ok(())
}
