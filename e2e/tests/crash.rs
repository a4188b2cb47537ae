//! SIGKILL to the daemon and to shims at any time: what runs keeps running, what was answered is kept, what was half
//! made is finished or removed, and what ended meanwhile is told right.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use e2e::leaks::Process;
use e2e::node::Node;
use e2e::pods::{self, HELLO, shell};
use e2e::v1::*;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

fn kill9(pid: i32) -> Result<()> {
    Ok(kill(Pid::from_raw(pid), Signal::SIGKILL)?)
}

/// Fails with what differs between two pictures.
fn same(now: &BTreeMap<String, String>, before: &BTreeMap<String, String>, when: &str) -> Result<()> {
    let mut differences = Vec::new();
    for id in now
        .keys()
        .chain(before.keys())
        .collect::<std::collections::BTreeSet<_>>()
    {
        let (old, new) = (
            before.get(id).map_or("", |text| text),
            now.get(id).map_or("", |text| text),
        );
        let words = |text: &str| text.split(", ").map(str::to_owned).collect::<Vec<_>>();
        let (old, new) = (words(old), words(new));
        differences.extend(
            old.iter()
                .filter(|word| !new.contains(word))
                .map(|word| format!("{}: - {word}", &id[..8])),
        );
        differences.extend(
            new.iter()
                .filter(|word| !old.contains(word))
                .map(|word| format!("{}: + {word}", &id[..8])),
        );
    }
    ensure!(differences.is_empty(), "{when}:\n{}", differences.join("\n"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_reads_the_same_after_a_crash_and_after_a_clean_restart() -> Result<()> {
    let mut node = Node::start().await?;
    for n in 0..3 {
        let pod = node.pod(&format!("kept{n}"));
        let sandbox = node.cri.run_sandbox(&pod).await?;
        let mut config = pods::container("run", HELLO, &["/hello", "sleep", "1000"]);
        config.annotations.insert("kept".into(), "as is".into());
        node.cri.launch(&sandbox, &pod, &config).await?;
        let ended = node
            .cri
            .launch(&sandbox, &pod, &pods::container("end", HELLO, &["/hello", "exit", "4"]))
            .await?;
        node.cri.exited(&ended).await?;
        node.cri
            .create(
                &sandbox,
                &pod,
                &pods::container("made", HELLO, &["/hello", "exit", "0"]),
            )
            .await?;
    }
    let stopped = node.cri.run_sandbox(&node.pod("stopped")).await?;
    node.cri.stop_sandbox(&stopped).await?;
    let before = node.picture().await?;
    let shims = node.shims()?;
    node.crash().await?;
    same(&node.picture().await?, &before, "after SIGKILL")?;
    node.stop().await?;
    assert_eq!(node.shims()?, shims, "SIGTERM leaves pods running");
    node.serve().await?;
    same(&node.picture().await?, &before, "after SIGTERM")?;
    assert_eq!(node.shims()?, shims);
    node.finish().await
}

/// Torture case T08.
#[tokio::test(flavor = "multi_thread")]
async fn a_container_that_ends_while_the_daemon_is_down() -> Result<()> {
    let mut node = Node::start().await?;
    node.busybox().await?;
    let pod = pods::host_network(node.pod("away"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let gate = node.path("gate");
    nix::unistd::mkfifo(&gate, nix::sys::stat::Mode::S_IRWXU)?;
    let mut config = shell(
        "c",
        "echo before; read line < /gate; echo after $line; printf tail; exit 42",
    );
    let (host_path, container_path) = (gate.display().to_string(), "/gate".into());
    config.mounts = vec![Mount {
        host_path,
        container_path,
        ..Default::default()
    }];
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    let pid = node.cri.container_pid(&id).await?;
    let log = node.cri.container(&id).await?.log_path;
    node.kill9().await?;
    tokio::task::spawn_blocking(move || fs::write(gate, "now\n")).await??;
    e2e::eventually(Duration::from_secs(10), async || {
        ensure!(
            Process::read(pid).is_none_or(|process| process.state == 'Z'),
            "it is still there"
        );
        Ok(())
    })
    .await?;
    let ended = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)?
        .as_nanos() as i64;
    node.serve().await?;
    let status = node.cri.exited(&id).await?;
    assert_eq!((status.exit_code, status.reason.as_str()), (42, "Error"));
    assert!(
        (status.finished_at - ended).abs() < 1_000_000_000,
        "finished at {}, seen {ended}",
        status.finished_at
    );
    let texts = pods::log_texts(&log)?;
    assert_eq!(texts, ["before", "after now", "tail"]);
    let before = node.picture().await?;
    node.crash().await?;
    same(&node.picture().await?, &before, "told the same ever after")?;
    node.finish().await
}

/// Daemon and shim both dead when the container ends: the code is the kernel's, or honestly lost, never 0.
#[tokio::test(flavor = "multi_thread")]
async fn an_exit_nobody_saw_is_never_told_as_success() -> Result<()> {
    let mut node = Node::start().await?;
    let pod = pods::host_network(node.pod("unseen"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let id = node
        .cri
        .launch(
            &sandbox,
            &pod,
            &pods::container("c", HELLO, &["/hello", "sleep", "1000"]),
        )
        .await?;
    let pid = node.cri.container_pid(&id).await?;
    node.kill9().await?;
    for shim in node.shims()? {
        kill9(shim)?;
    }
    kill9(pid)?;
    node.serve().await?;
    let status = node.cri.exited(&id).await?;
    assert!([137, 255].contains(&status.exit_code), "{status:?}");
    if status.exit_code == 255 {
        assert_eq!(status.reason, "Unknown");
        assert!(status.message.contains("exit status lost"), "{status:?}");
    }
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_shim_is_replaced_and_nothing_is_lost() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = node.pod("orphaned");
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let id = node
        .cri
        .launch(
            &sandbox,
            &pod,
            &shell("c", "trap 'exit 6' TERM; while :; do sleep 0.05; done"),
        )
        .await?;
    let (pid, ip) = (node.cri.container_pid(&id).await?, node.cri.ip(&sandbox).await?);
    let shim = node.shims()?.pop().context("a shim")?;
    kill9(shim)?;
    e2e::eventually(Duration::from_secs(20), async || {
        let shims = node.shims()?;
        ensure!(shims.len() == 1 && shims[0] != shim, "no new shim: {shims:?}");
        ensure!(node.cri.exec(&id, &["true"], 5).await?.exit_code == 0, "exec");
        Ok(())
    })
    .await?;
    assert_eq!(
        (node.cri.container_pid(&id).await?, node.cri.ip(&sandbox).await?),
        (pid, ip)
    );
    assert_eq!(node.cri.sandbox(&sandbox).await?.state(), PodSandboxState::SandboxReady);
    node.cri.stop(&id, 10).await?;
    assert_eq!(
        node.cri.container(&id).await?.exit_code,
        6,
        "the status of a process that is not the new shim's child"
    );
    node.finish().await
}

/// Torture case T03 by chance instead of by step: SIGKILL at a random moment of many creates.
#[tokio::test(flavor = "multi_thread")]
async fn sigkill_amid_creates_keeps_what_was_answered_and_leaks_nothing() -> Result<()> {
    let mut node = Node::start().await?;
    let seed = std::process::id() as u64;
    for round in 0..6u64 {
        let mut lanes = tokio::task::JoinSet::new();
        for n in 0..12 {
            let (cri, pod) = (node.cri.clone(), node.pod(&format!("r{round}-{n}")));
            lanes.spawn(async move {
                let mut known = (None, None);
                if let Ok(sandbox) = cri.run_sandbox(&pod).await {
                    known.0 = Some(sandbox.clone());
                    let config = pods::container("c", HELLO, &["/hello", "sleep", "1000"]);
                    if let Ok(id) = cri.create(&sandbox, &pod, &config).await
                        && cri.start(&id).await.is_ok()
                    {
                        known.1 = Some(id);
                    }
                }
                known
            });
        }
        // Not a wait for anything: the moment of the kill is the point.
        let moment = 5 + (seed.wrapping_mul(31).wrapping_add(round * 37)) % 120;
        tokio::time::sleep(Duration::from_millis(moment)).await;
        node.kill9().await?;
        let answered = lanes.join_all().await;
        let shims = node.shims()?;
        node.serve().await?;
        let sandboxes = node.cri.sandboxes(None).await?;
        for (sandbox, container) in &answered {
            if let Some(id) = sandbox {
                let found = sandboxes.iter().find(|sandbox| &sandbox.id == id);
                let found = found.with_context(|| format!("seed {seed} round {round}: answered, yet gone: {id}"))?;
                ensure!(found.state() == PodSandboxState::SandboxReady, "{found:?}");
            }
            if let Some(id) = container {
                let pid = node.cri.container_pid(id).await?;
                ensure!(
                    Process::read(pid).is_some(),
                    "started, yet not running after {moment} ms"
                );
            }
        }
        let told: Vec<_> = answered.iter().filter_map(|(sandbox, _)| sandbox.as_ref()).collect();
        println!(
            "round {round}: killed after {moment} ms, {} of 12 answered, {} shims",
            told.len(),
            shims.len()
        );
        remove_all(&node)
            .await
            .with_context(|| format!("seed {seed} round {round}"))?;
    }
    node.finish().await
}

/// What was half made when the daemon died is finished after its restart, and then listed: it is nobody's, but it can
/// be joined and removed like any other.
async fn remove_all(node: &Node) -> Result<()> {
    e2e::eventually(Duration::from_secs(30), async || {
        for sandbox in node.cri.sandboxes(None).await? {
            node.cri.stop_sandbox(&sandbox.id).await?;
            node.cri.remove_sandbox(&sandbox.id).await?;
        }
        let left = node.processes()?;
        ensure!(left.is_empty(), "processes are left:\n{}", left.join("\n"));
        // What is still being finished is not listed yet.
        let left = fs::read_dir(node.path("root").join("pods"))?.count();
        ensure!(left == 0, "{left} pods are left");
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_request_after_a_crash_joins_what_was_begun() -> Result<()> {
    let mut node = Node::start().await?;
    for moment in [2, 4, 6, 9, 13, 20] {
        let pod = node.pod("again");
        let first = {
            let (cri, pod) = (node.cri.clone(), pod.clone());
            tokio::spawn(async move { cri.run_sandbox(&pod).await })
        };
        tokio::time::sleep(Duration::from_millis(moment)).await;
        node.kill9().await?;
        let first = first.await?;
        node.serve().await?;
        let second = node.cri.run_sandbox(&pod).await;
        let listed = node.cri.sandboxes(None).await?;
        ensure!(listed.len() == 1, "killed after {moment} ms: {listed:?}");
        let id = listed[0].id.clone();
        match (first, second) {
            // Refused by its id: it was given out, though the kill may have lost the answer that was on its way. Then
            // it is complete.
            (told, Err(refused)) => {
                let named = refused.code() == tonic::Code::AlreadyExists && refused.message().contains(&id);
                ensure!(named, "killed after {moment} ms: {refused}");
                ensure!(told.as_ref().map_or(true, |told| *told == id), "{told:?}, listed {id}");
                ensure!(listed[0].state() == PodSandboxState::SandboxReady, "{listed:?}");
            }
            (Err(_), Ok(joined)) => assert_eq!(joined, id, "killed after {moment} ms"),
            (Ok(told), Ok(second)) => bail!("killed after {moment} ms: {told} was given out, and then {second}"),
        }
        assert_eq!(node.shims()?.len(), 1, "killed after {moment} ms");
        node.cri.stop_sandbox(&id).await?;
        node.cri.remove_sandbox(&id).await?;
        node.no_pods().await?;
    }
    node.finish().await
}

/// With the database gone, the copies beside the objects bring every record back, and nothing that runs dies.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_database_loses_no_pod() -> Result<()> {
    for damage in ["removed", "flipped"] {
        let mut node = Node::start().await?;
        let pod = node.pod("survivor");
        let sandbox = node.cri.run_sandbox(&pod).await?;
        node.cri
            .launch(
                &sandbox,
                &pod,
                &pods::container("c", HELLO, &["/hello", "sleep", "1000"]),
            )
            .await?;
        let ended = node
            .cri
            .launch(&sandbox, &pod, &pods::container("e", HELLO, &["/hello", "exit", "5"]))
            .await?;
        node.cri.exited(&ended).await?;
        let before = node.picture().await?;
        node.kill9().await?;
        let database = find(&node.root(), "db").context("no file `db` of the store below the root")?;
        if damage == "removed" {
            fs::remove_dir_all(database.parent().context("its directory")?)?;
        } else {
            let mut bytes = fs::read(&database)?;
            let middle = bytes.len() / 3;
            bytes[16..middle].iter_mut().step_by(97).for_each(|byte| *byte ^= 0x41);
            fs::write(&database, bytes)?;
        }
        node.serve().await.with_context(|| format!("database {damage}"))?;
        same(&node.picture().await?, &before, &format!("database {damage}"))?;
        node.finish().await?;
    }
    Ok(())
}

fn find(dir: &std::path::Path, name: &str) -> Option<std::path::PathBuf> {
    for entry in fs::read_dir(dir).ok()?.flatten() {
        let path = entry.path();
        if path.is_dir() && !path.is_symlink() {
            if let Some(found) = find(&path, name) {
                return Some(found);
            }
        } else if entry.file_name() == name {
            return Some(path);
        }
    }
    None
}

#[tokio::test(flavor = "multi_thread")]
async fn two_daemons_side_by_side_leave_each_other_alone() -> Result<()> {
    let (mut one, two) = (Node::start().await?, Node::start().await?);
    let (a, b) = (one.pod("same"), two.pod("same"));
    let (one_id, two_id) = (one.cri.run_sandbox(&a).await?, two.cri.run_sandbox(&b).await?);
    let hello = pods::container("c", HELLO, &[]);
    one.cri.launch(&one_id, &a, &hello).await?;
    two.cri.launch(&two_id, &b, &hello).await?;
    assert_ne!(one.cri.ip(&one_id).await?, two.cri.ip(&two_id).await?);
    let before = two.picture().await?;
    one.kill9().await?;
    let once = one.reconcile(&["--once"]).await?;
    assert!(
        [Some(0), Some(10)].contains(&once.status.code()),
        "{}",
        e2e::node::shown(&once)
    );
    same(&two.picture().await?, &before, "the other's sweep touched this one")?;
    one.serve().await?;
    one.cri.stop_sandbox(&one_id).await?;
    one.cri.remove_sandbox(&one_id).await?;
    one.finish().await?;
    same(&two.picture().await?, &before, "afterwards")?;
    let ip = two.cri.ip(&two_id).await?;
    tokio::net::TcpStream::connect((ip, 8080))
        .await
        .context("the other's pod still answers")?;
    two.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_daemon_on_the_same_root_is_refused() -> Result<()> {
    let node = Node::start().await?;
    let second = node.reconcile(&["serve"]).await?;
    assert!(!second.status.success());
    let text = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(
        text.contains(&*node.root().to_string_lossy()),
        "it names the root: {text}"
    );
    node.cri.version().await?;
    assert!(
        e2e::node::answers(&node.socket()),
        "the first one's socket is untouched"
    );
    node.finish().await
}
