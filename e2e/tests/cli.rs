//! The program: every sub-command once, as a person would type it.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::node::{Node, shown};

const SLEEPER: &str = "apiVersion: v1\nkind: Pod\nmetadata: {name: sleeper, labels: {app: x}}\nspec:\n  \
    restartPolicy: Never\n  \
    containers:\n  - {name: main, image: localhost/hello, command: [/hello, sleep, '1000']}\n  \
    - {name: lines, image: localhost/hello, command: [/hello, lines, '5']}\n";

#[tokio::test(flavor = "multi_thread")]
async fn apply_get_describe_logs_exec_delete() -> Result<()> {
    let node = Node::start().await?;
    let file = node.file("sleeper.yaml", SLEEPER)?;
    let applied = node.ok(&["apply", "-f", &file]).await?;
    assert!(applied.contains("sleeper"), "{applied}");
    e2e::eventually(Duration::from_secs(10), async || {
        let pods = node.ok(&["get", "pods"]).await?;
        ensure!(pods.contains("sleeper") && pods.contains("Running"), "{pods}");
        Ok(())
    })
    .await?;
    for kind in ["podsandboxes", "containers", "images", "nodes"] {
        let table = node.ok(&["get", kind]).await?;
        assert!(table.lines().count() >= 2, "get {kind}: {table}");
    }
    for format in ["json", "yaml"] {
        let text = node.ok(&["get", "pod", "sleeper", "-o", format]).await?;
        assert!(text.contains("reconcile/v1") && text.contains("sleeper"), "{text}");
    }
    let described = node.ok(&["describe", "pod", "sleeper"]).await?;
    assert!(described.contains("localhost/hello"), "{described}");
    let logs = node.ok(&["logs", "sleeper", "-c", "lines"]).await?;
    assert_eq!(logs.lines().count(), 5, "{logs}");
    let out = node
        .reconcile(&["exec", "sleeper", "-c", "main", "--", "/hello", "exit", "9"])
        .await?;
    assert_eq!(out.status.code(), Some(9), "{}", shown(&out));
    let out = node
        .ok(&[
            "exec", "sleeper", "-c", "main", "--", "/hello", "echo", "from", "inside",
        ])
        .await?;
    assert_eq!(out.trim(), "from inside");
    let absent = node.reconcile(&["get", "pod", "nobody"]).await?;
    assert!(
        !absent.status.success() && shown(&absent).contains("nobody"),
        "{}",
        shown(&absent)
    );
    node.ok(&["delete", "pod", "sleeper"]).await?;
    node.no_pods().await?;
    let pods = node.ok(&["get", "pods"]).await?;
    assert!(!pods.contains("sleeper"), "{pods}");
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_follow_to_the_end() -> Result<()> {
    let node = Node::start().await?;
    let slow = SLEEPER.replace("lines, '5'", "lines, '20000'");
    let file = node.file("slow.yaml", slow)?;
    node.ok(&["apply", "-f", &file]).await?;
    let follow = async || {
        let mut command = tokio::process::Command::from(node.command(&["logs", "-f", "sleeper", "-c", "lines"])?);
        let run = command.stdin(Stdio::null()).kill_on_drop(true).output();
        let out = tokio::time::timeout(Duration::from_secs(30), run)
            .await
            .context("it did not end with its container")??;
        ensure!(out.status.success(), "{}", shown(&out));
        Ok(String::from_utf8(out.stdout)?.lines().count())
    };
    let lines = e2e::eventually(Duration::from_secs(10), follow).await?;
    assert_eq!(lines, 20_000);
    node.ok(&["delete", "pod", "sleeper"]).await?;
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn reset_removes_everything_and_asks_before() -> Result<()> {
    let mut node = Node::start().await?;
    let file = node.file("sleeper.yaml", SLEEPER)?;
    node.ok(&["apply", "-f", &file]).await?;
    e2e::eventually(Duration::from_secs(10), async || {
        ensure!(
            node.cri
                .containers(None)
                .await?
                .iter()
                .any(|container| container.state == 1),
            "not running"
        );
        Ok(())
    })
    .await?;
    node.kill9().await?;
    let asked = node.reconcile(&["reset"]).await?;
    assert!(
        !asked.status.success(),
        "without --yes and without an answer nothing is removed: {}",
        shown(&asked)
    );
    assert_eq!(node.shims()?.len(), 1);
    node.ok(&["reset", "--yes"]).await?;
    node.empty().await?;
    node.ok(&["reset", "--yes"])
        .await
        .context("a second time there is nothing to do")?;
    node.finish_unused().await
}

#[tokio::test(flavor = "multi_thread")]
async fn version_help_completion_and_manual() -> Result<()> {
    let node = Node::new(Default::default())?;
    let version = node.ok(&["--version"]).await?;
    assert!(version.starts_with("reconcile 0."), "{version}");
    let help = node.ok(&["--help"]).await?;
    let commands = [
        "serve",
        "run",
        "apply",
        "get",
        "describe",
        "delete",
        "logs",
        "exec",
        "images",
        "reset",
        "--once",
        "--network",
    ];
    for word in commands {
        assert!(help.contains(word), "{word} is not in --help:\n{help}");
    }
    let script = node.ok(&["completion", "bash"]).await?;
    assert!(script.contains("complete"), "{script}");
    let manual = node.ok(&["man"]).await?;
    assert!(manual.contains(".TH"), "{manual}");
    node.finish_unused().await
}
