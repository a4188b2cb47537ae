//! The kubelet's own endpoints, which answer from what the daemon tells.

use std::io::Read;
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::hub::Hub;
use e2e::kubelet::{self, Kubelet, Settings, shell};
use e2e::node::{Options, shown};
use e2e::tools;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::Command;

/// Runs the client of `e2e/conformance` with this input.
async fn stream(program: &PathBuf, args: &[&str], input: &[u8]) -> Result<Output> {
    let mut command = Command::new(program);
    command
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut client = command.kill_on_drop(true).spawn()?;
    let mut stdin = client.stdin.take().context("stdin")?;
    stdin.write_all(input).await?;
    drop(stdin);
    let out = tokio::time::timeout(Duration::from_secs(30), client.wait_with_output()).await;
    Ok(out.context("the client did not end within 30 s")??)
}

/// A number of a Prometheus line that has all these parts.
fn metric(text: &str, name: &str, parts: &[&str]) -> Result<f64> {
    let fits = |line: &&str| line.starts_with(&format!("{name}{{")) && parts.iter().all(|part| line.contains(part));
    let line = text.lines().find(fits);
    let line = line.with_context(|| format!("no {name} with {parts:?}"))?;
    let (_, values) = line.split_once("} ").context("no value")?;
    values
        .split(' ')
        .next()
        .unwrap_or_default()
        .parse()
        .with_context(|| line.to_owned())
}

/// `/stats/summary` of a pod that works a little.
async fn summary(kubelet: &Kubelet) -> Result<()> {
    kubelet
        .wait("the summary", async |kubelet| {
            let all: Value = serde_json::from_str(&kubelet.get("/stats/summary").await?)?;
            let pods = all["pods"].as_array().context("no pods")?;
            let pod = pods
                .iter()
                .find(|pod| pod["podRef"]["name"] == "web-n1")
                .context("no pod")?;
            let main = pod["containers"].as_array().context("no containers")?;
            let main = main.iter().find(|one| one["name"] == "main").context("no container")?;
            let positive = |object: &Value, path: &str| {
                let value = object.pointer(path).and_then(Value::as_u64);
                ensure!(
                    value.is_some_and(|value| value > 0),
                    "{path} is {value:?} in {object:#}"
                );
                Ok(())
            };
            for path in [
                "/cpu/usageNanoCores",
                "/cpu/usageCoreNanoSeconds",
                "/memory/workingSetBytes",
                "/rootfs/usedBytes",
                "/rootfs/capacityBytes",
                "/logs/usedBytes",
            ] {
                positive(main, path)?;
            }
            for path in [
                "/cpu/usageCoreNanoSeconds",
                "/memory/workingSetBytes",
                "/network/rxBytes",
                "/process_stats/process_count",
                "/ephemeral-storage/usedBytes",
            ] {
                positive(pod, path)?;
            }
            ensure!(pod["network"]["name"] == "eth0", "{:#}", pod["network"]);
            positive(&all, "/node/runtime/imageFs/usedBytes")
        })
        .await
}

async fn metrics(kubelet: &Kubelet) -> Result<()> {
    let labels = [r#"container="main""#, r#"namespace="default""#, r#"pod="web-n1""#];
    kubelet
        .wait("/metrics/cadvisor", async |kubelet| {
            let text = kubelet.get("/metrics/cadvisor").await?;
            for name in [
                "container_cpu_usage_seconds_total",
                "container_memory_working_set_bytes",
                "container_memory_rss",
                "container_processes",
                "container_start_time_seconds",
            ] {
                let parts = [&labels[..], &[r#"image=""#, r#"id=""#]].concat();
                metric(&text, name, &parts)?;
            }
            ensure!(metric(&text, "container_memory_working_set_bytes", &labels)? > 0.0);
            ensure!(metric(&text, "container_spec_memory_limit_bytes", &labels)? == 67108864.0);
            let of_pod = [r#"pod="web-n1""#, r#"interface="eth0""#];
            ensure!(metric(&text, "container_network_receive_bytes_total", &of_pod)? > 0.0);
            Ok(())
        })
        .await?;
    kubelet
        .wait("/metrics/resource", async |kubelet| {
            let text = kubelet.get("/metrics/resource").await?;
            ensure!(metric(&text, "container_cpu_usage_seconds_total", &labels)? > 0.0);
            ensure!(metric(&text, "container_memory_working_set_bytes", &labels)? > 0.0);
            ensure!(metric(&text, "container_start_time_seconds", &labels)? > 1e9);
            ensure!(metric(&text, "pod_memory_working_set_bytes", &[r#"pod="web-n1""#])? > 0.0);
            Ok(())
        })
        .await
}

async fn logs(kubelet: &Kubelet) -> Result<()> {
    kubelet
        .wait("logs", async |kubelet| {
            let text = kubelet.fetch("/containerLogs/default/web-n1/main").await?;
            ensure!(text.starts_with("one\ntwo\n"), "{text}");
            Ok(())
        })
        .await?;
    let text = kubelet
        .fetch("/containerLogs/default/web-n1/side?tailLines=1&timestamps=true")
        .await?;
    let (time, rest) = text.split_once(' ').context("no time")?;
    ensure!(time.contains('T') && rest == "still\n", "{text}");
    Ok(())
}

/// Exec, attach and port-forward over both protocols.
async fn streams(kubelet: &Kubelet, program: &PathBuf) -> Result<()> {
    let shell = "/exec/default/web-n1/main?command=/bin/sh&command=-c";
    let exec = format!("{shell}&command=cat%3Becho+err+%3E%262%3Bexit+7&input=1&output=1&error=1");
    let exec = kubelet.url(&exec);
    // The size comes after the start.
    let until = "until+stty+size+2%3E/dev/null+%7C+grep+77%3Bdo+sleep+0.1%3Bdone";
    let tty = kubelet.url(&format!("{shell}&command={until}&output=1&tty=1"));
    let attach = kubelet.url("/attach/default/web-n1/echo?input=1&output=1&error=1");
    for protocol in ["spdy", "websocket"] {
        let out = stream(
            program,
            &["exec", &exec, protocol, "stdin", "stdout", "stderr"],
            b"through\n",
        )
        .await?;
        let told = (out.status.code(), &*out.stdout, &*out.stderr);
        ensure!(
            told == (Some(7), b"through\n", b"err\n"),
            "exec by {protocol}: {}",
            shown(&out)
        );
        let out = stream(program, &["exec", &tty, protocol, "tty", "stdout", "33x77"], b"").await?;
        ensure!(
            out.stdout == b"33 77\r\n",
            "exec by {protocol} with a terminal: {}",
            shown(&out)
        );

        let mut command = Command::new(program);
        command.args(["attach", &attach, protocol, "stdin", "stdout", "stderr"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut client = command.spawn()?;
        let mut stdin = client.stdin.take().context("stdin")?;
        let mut lines = BufReader::new(client.stdout.take().context("stdout")?).lines();
        stdin.write_all(format!("hello {protocol}\n").as_bytes()).await?;
        let line = tokio::time::timeout(Duration::from_secs(20), lines.next_line()).await;
        let line = line.with_context(|| format!("attach by {protocol} says nothing"))??;
        ensure!(
            line == Some(format!("heard hello {protocol}")),
            "attach by {protocol}: {line:?}"
        );
        client.kill().await?;
        forward(kubelet, program, protocol)
            .await
            .with_context(|| format!("port-forward by {protocol}"))?;
    }
    Ok(())
}

async fn forward(kubelet: &Kubelet, program: &PathBuf, protocol: &str) -> Result<()> {
    let url = kubelet.url("/portForward/default/web-n1");
    let mut command = Command::new(program);
    command.args(["forward", &url, protocol, "8080"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
    let mut client = command.spawn()?;
    let mut lines = BufReader::new(client.stdout.take().context("stdout")?).lines();
    let line = tokio::time::timeout(Duration::from_secs(20), lines.next_line()).await;
    let address = line.context("it does not listen")??.context("it ended")?;
    kubelet
        .wait("an answer", async |_| {
            let mut stream = TcpStream::connect(&address)?;
            stream.set_read_timeout(Some(Duration::from_secs(5)))?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            ensure!(text == "served\n", "{text:?}");
            Ok(())
        })
        .await?;
    client.kill().await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn its_endpoints_answer_from_the_daemon() -> Result<()> {
    let hub = Hub::start().await?;
    let node = kubelet::node(&hub, Options::default()).await?;
    let gates = vec![("PodAndContainerStatsFromCRI", true), ("CRIListStreaming", true)];
    let settings = Settings {
        gates,
        ..Settings::default()
    };
    let Some(mut kubelet) = Kubelet::new(&node, settings).await? else {
        return node.finish_unused().await;
    };
    let program = tokio::task::spawn_blocking(|| tools::go_program("streams", "./streams")).await??;
    let program = program.context("there is Go, so there is the client")?;
    kubelet.start().await?;
    let main = "echo one; echo two; head -c 100000 /dev/zero > /file; trap 'exit 0' TERM; \
                while :; do echo served | nc -l -p 8080; done";
    let busy =
        "echo still; trap 'exit 0' TERM; while :; do i=0; while [ $i -lt 999 ]; do i=$((i+1)); done; sleep 0.2; done";
    let limited = json!({ "resources": { "limits": { "memory": "64Mi" } },
        "readinessProbe": { "tcpSocket": { "port": 8080 }, "periodSeconds": 1 } });
    let echo = "trap 'exit 0' TERM; while read line; do echo heard $line; done";
    let spec = json!({ "containers": [shell("main", main, limited), shell("side", busy, json!({})),
        shell("echo", echo, json!({ "stdin": true }))] });
    kubelet.apply("web", spec)?;
    kubelet.ready("web").await?;
    crate::all(vec![
        ("summary", Box::pin(summary(&kubelet))),
        ("metrics", Box::pin(metrics(&kubelet))),
        ("logs", Box::pin(logs(&kubelet))),
        ("streams", Box::pin(streams(&kubelet, &program))),
    ])
    .await?;
    kubelet.finish(&node).await?;
    node.finish().await
}
