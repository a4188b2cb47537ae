//! Pods from YAML: `run` with the workload's exit code, with and without a daemon; `apply` twice; the examples.

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, TcpStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::images::real;
use e2e::node::{Node, shown};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A Kubernetes v1 Pod of one container, restartPolicy Never.
fn job(name: &str, image: &str, command: &[&str]) -> String {
    let command = serde_json::to_string(command).unwrap_or_default();
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\nspec:\n  restartPolicy: Never\n  containers:\n  \
         - name: main\n    image: {image}\n    command: {command}\n"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn run_ends_with_the_workloads_code_without_a_daemon_on_an_empty_store() -> Result<()> {
    let node = Node::new(Default::default())?;
    for code in [0, 3] {
        let words = ["/hello", "exit", &code.to_string()].map(str::to_owned);
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        let file = node.file("job.yaml", job("job", "localhost/hello", &words))?;
        let out = node.reconcile(&["run", &file]).await?;
        assert_eq!(out.status.code(), Some(code), "{}", shown(&out));
    }
    let file = node.file("lines.yaml", job("lines", "localhost/hello", &["/hello", "lines", "3"]))?;
    let out = node.ok(&["run", &file]).await?;
    assert_eq!(out.lines().count(), 3, "the log is shown: {out}");
    let echo = node.file(
        "echo.yaml",
        job("echo", "localhost/hello", &["/hello", "echo", "hello", "world"]),
    )?;
    let mut command = tokio::process::Command::from(node.command(&["run", "-"])?);
    let out = command.stdin(fs::File::open(echo)?).output().await?;
    assert!(
        String::from_utf8_lossy(&out.stdout).contains("hello world"),
        "{}",
        shown(&out)
    );
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn run_beside_a_daemon_follows_the_log_and_removes_the_pod() -> Result<()> {
    let node = Node::start().await?;
    let file = node.file("job.yaml", job("job", "localhost/hello", &["/hello", "exit", "7"]))?;
    let out = node.reconcile(&["run", &file]).await?;
    assert_eq!(out.status.code(), Some(7), "{}", shown(&out));
    node.no_pods().await?;
    let kept = node.reconcile(&["run", "--keep", &file]).await?;
    assert_eq!(kept.status.code(), Some(7), "{}", shown(&kept));
    let pods = node.ok(&["get", "pods"]).await?;
    assert!(pods.contains("job"), "{pods}");
    let absent = node.file("absent.yaml", job("absent", "localhost/no-such:1", &["/x"]))?;
    let out = node.reconcile(&["run", &absent]).await?;
    assert!(!out.status.success(), "a pod that cannot start is a failure");
    assert!(
        String::from_utf8_lossy(&out.stderr).contains("localhost/no-such:1"),
        "{}",
        shown(&out)
    );
    node.ok(&["delete", "pod", "job"]).await?;
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_removes_the_pod() -> Result<()> {
    let node = Node::start().await?;
    let file = node.file(
        "sleep.yaml",
        job("sleep", "localhost/hello", &["/hello", "sleep", "1000"]),
    )?;
    let mut command = tokio::process::Command::from(node.command(&["run", &file])?);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    e2e::eventually(Duration::from_secs(10), async || {
        ensure!(
            node.cri.containers(None).await?.iter().any(|c| c.state == 1),
            "not running yet"
        );
        Ok(())
    })
    .await?;
    kill(Pid::from_raw(child.id().context("run")? as i32), Signal::SIGINT)?;
    let status = tokio::time::timeout(Duration::from_secs(45), child.wait()).await??;
    assert!(status.code() == Some(130) || status.signal() == Some(2), "{status}");
    node.no_pods().await?;
    node.finish().await
}

/// The real thing: an archive of other people's tools, a Kubernetes manifest, a shell loop; log, code and network
/// looked at from outside.
#[tokio::test(flavor = "multi_thread")]
async fn a_kubernetes_pod_of_a_real_image() -> Result<()> {
    let node = Node::start().await?;
    let dir = node.path("made");
    fs::create_dir(&dir)?;
    let (docker, _) = tokio::task::spawn_blocking(move || real(&dir)).await??;
    node.ok(&["images", "import", &docker.display().to_string()]).await?;
    let script = "for i in 1 2 3; do echo line $i $GREETING; done; cat /data/kept; \
                  echo page > /tmp-page; httpd -p 8000 -h / ; while [ ! -e /stop/now ]; do sleep 0.1; done; exit 5";
    let (stop, name) = (node.path("stop"), "shell-loop");
    fs::create_dir(&stop)?;
    let manifest = format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\n  namespace: default\n  labels: {{app: loop}}\nspec:\n  \
         restartPolicy: Never\n  containers:\n  - name: main\n    image: localhost/real:1\n    \
         command: [/bin/sh, -c]\n    args:\n    - {}\n    env: [{{name: GREETING, value: hi}}]\n    \
         resources: {{limits: {{memory: 64Mi, cpu: 500m}}}}\n    volumeMounts: [{{name: stop, mountPath: /stop}}]\n  \
         volumes: [{{name: stop, hostPath: {{path: {}}}}}]\n",
        serde_json::to_string(script)?,
        stop.display()
    );
    let file = node.file("pod.yaml", manifest)?;
    let mut command = tokio::process::Command::from(node.command(&["run", &file])?);
    let run = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let page = e2e::eventually(Duration::from_secs(20), async || {
        let sandbox = node.cri.sandboxes(None).await?.pop().context("no sandbox yet")?;
        let ip = node.cri.ip(&sandbox.id).await?;
        tokio::task::spawn_blocking(move || fetch(ip, 8000, "/tmp-page")).await?
    })
    .await
    .context("the page from outside the pod")?;
    assert!(page.ends_with("page\n"), "{page}");
    fs::write(stop.join("now"), "")?;
    let out = tokio::time::timeout(Duration::from_secs(30), run.wait_with_output()).await??;
    assert_eq!(out.status.code(), Some(5), "{}", shown(&out));
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(
        lines,
        ["line 1 hi", "line 2 hi", "line 3 hi", "of the second layer"],
        "{}",
        shown(&out)
    );
    node.no_pods().await?;
    node.finish().await
}

fn fetch(ip: IpAddr, port: u16, path: &str) -> Result<String> {
    let mut stream = TcpStream::connect_timeout(&(ip, port).into(), Duration::from_secs(2))?;
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes())?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

#[tokio::test(flavor = "multi_thread")]
async fn apply_twice_does_nothing_the_second_time() -> Result<()> {
    let node = Node::start().await?;
    let two = format!(
        "{}---\n{}",
        job("one", "localhost/hello", &["/hello", "sleep", "1000"]),
        job("two", "localhost/hello", &["/hello", "sleep", "1001"])
    );
    let file = node.file("two.yaml", &two)?;
    node.ok(&["apply", "-f", &file]).await?;
    let running = async || -> Result<Vec<String>> {
        let containers = node.cri.containers(None).await?;
        ensure!(
            containers.len() == 2 && containers.iter().all(|c| c.state == 1),
            "{containers:?}"
        );
        Ok(containers.into_iter().map(|container| container.id).collect())
    };
    let before = e2e::eventually(Duration::from_secs(10), running).await?;
    let again = node.ok(&["apply", "-f", &file]).await?;
    assert!(again.contains("unchanged"), "{again}");
    assert_eq!(running().await?, before, "nothing was restarted");
    let once = node.reconcile(&["--once"]).await?;
    assert_eq!(once.status.code(), Some(0), "{}", shown(&once));
    let changed = node.file("changed.yaml", two.replace("1001", "1002"))?;
    node.ok(&["apply", "-f", &changed]).await?;
    let after = e2e::eventually(Duration::from_secs(40), async || {
        let after = running().await?;
        ensure!(after != before, "not replaced yet");
        Ok(after)
    })
    .await?;
    assert_eq!(
        after.iter().filter(|id| before.contains(id)).count(),
        1,
        "only the changed pod was restarted"
    );
    for name in ["one", "two"] {
        node.ok(&["delete", "pod", name]).await?;
    }
    node.no_pods().await?;
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_container_is_restarted_as_its_policy_says() -> Result<()> {
    let node = Node::start().await?;
    let never = job("restarts", "localhost/hello", &["/hello", "exit", "1"]);
    let file = node.file(
        "restarts.yaml",
        never.replace("restartPolicy: Never", "restartPolicy: OnFailure"),
    )?;
    node.ok(&["apply", "-f", &file]).await?;
    e2e::eventually(Duration::from_secs(30), async || {
        let attempts = node
            .cri
            .containers(None)
            .await?
            .into_iter()
            .filter_map(|c| c.metadata)
            .map(|meta| meta.attempt);
        ensure!(attempts.max().unwrap_or(0) >= 1, "no second attempt yet");
        Ok(())
    })
    .await?;
    node.ok(&["delete", "pod", "restarts"]).await?;
    node.no_pods().await?;
    node.finish().await
}

fn examples() -> Result<Vec<PathBuf>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
    let mut all: Vec<_> = fs::read_dir(&dir)?.flatten().map(|entry| entry.path()).collect();
    all.retain(|path| path.extension().is_some_and(|ext| ext == "yaml"));
    all.sort();
    Ok(all)
}

/// Each example applies, comes up, and goes. Where a first line says `# exit code: N` it ends with that, else it stays.
#[tokio::test(flavor = "multi_thread")]
async fn every_example_runs() -> Result<()> {
    let node = Node::start().await?;
    let all = examples()?;
    assert!(all.len() >= 5, "{all:?}");
    for path in all {
        let (text, file) = (fs::read_to_string(&path)?, path.display().to_string());
        let code = text.lines().find_map(|line| line.strip_prefix("# exit code: "));
        if let Some(code) = code {
            let out = node.reconcile(&["run", &file]).await?;
            assert_eq!(out.status.code(), Some(code.trim().parse()?), "{file}: {}", shown(&out));
        } else {
            node.ok(&["apply", "-f", &file]).await.with_context(|| file.clone())?;
            e2e::eventually(Duration::from_secs(15), async || {
                let containers = node.cri.containers(None).await?;
                ensure!(!containers.is_empty(), "{file}: no container");
                ensure!(
                    containers.iter().all(|container| container.state == 1),
                    "{file}: {containers:?}"
                );
                Ok(())
            })
            .await?;
            node.ok(&["delete", "-f", &file]).await.with_context(|| file.clone())?;
        }
        node.no_pods().await.with_context(|| file.clone())?;
    }
    node.finish().await
}
