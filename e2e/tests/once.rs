//! `reconcile --once [--dry-run]`: the plan is what is then done, once; exit 0 clean, 10 repaired.

use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::leaks::Census;
use e2e::node::{Node, Options, shown};
use e2e::pods::{self, HELLO};
use e2e::{cni, eventually, tools};

/// The steps of a plan or of its execution, without what differs by nature (times, totals).
fn steps(text: &str) -> Vec<String> {
    let step = |line: &&str| !line.trim().is_empty();
    text.lines()
        .filter(step)
        .map(|line| line.trim_end().to_owned())
        .collect()
}

/// Two repairs at once, and the loop beside them: what is missing is made once.
#[tokio::test(flavor = "multi_thread")]
async fn one_loss_is_repaired_once_however_many_repair_it() -> Result<()> {
    let mut node = Node::new(Options {
        network: "auto",
        ..Options::default()
    })?;
    cni::install(&node)?;
    node.serve().await?;
    let sandbox = node.cri.run_sandbox(&node.pod("lost")).await?;
    let netns = format!("rc-{}-{sandbox}", node.instance());
    tools::check(Command::new("ip").args(["-n", &netns, "link", "delete", "eth0"]))?;
    node.file("hang-DEL", "")?;
    let repair = async || node.reconcile(&["--once"]).await;
    let rest = async || {
        // The first is amid its repair while the others look.
        eventually(Duration::from_secs(10), async || {
            ensure!(cni::journal(&node).len() == 2, "{:?}", cni::journal(&node));
            Ok(())
        })
        .await?;
        let looks = async || {
            let look = node.reconcile(&["--once", "--dry-run"]).await;
            fs::remove_file(node.path("hang-DEL"))?;
            look
        };
        let (two, three, look) = tokio::join!(repair(), repair(), looks());
        ensure!(shown(&look?).contains("eth0 is missing"));
        Ok([two?, three?])
    };
    let (one, others) = tokio::join!(repair(), rest());
    for out in [one?].into_iter().chain(others?) {
        let code = out.status.code();
        ensure!([Some(0), Some(10)].contains(&code), "{}", shown(&out));
    }
    let verbs: Vec<_> = cni::journal(&node).iter().map(|call| call[..3].to_owned()).collect();
    assert_eq!(verbs, ["ADD", "DEL", "ADD"]);
    node.cri.ip(&sandbox).await?;
    node.finish().await
}

/// Things on the node that bear the instance's mark and belong to no record.
fn plant(node: &Node) -> Result<String> {
    let (instance, uid) = (node.instance(), "0123456789abcdef".repeat(4));
    ensure!(instance.len() == 8, "the root's id: {instance:?}");
    tools::check(Command::new("ip").args(["netns", "add", &format!("rc-{instance}-{uid}")]))?;
    let link = format!("rcp{instance}");
    tools::check(Command::new("ip").args(["link", "add", &link, "type", "bridge"]))?;
    let alias = format!("reconcile:{instance}:{uid}");
    tools::check(Command::new("ip").args(["link", "set", &link, "alias", &alias]))?;
    for base in ["/sys/fs/cgroup/pids", "/sys/fs/cgroup/memory", "/sys/fs/cgroup"] {
        let parent = format!("{base}/reconcile-{instance}");
        if fs::metadata(&parent).is_ok() {
            fs::create_dir(format!("{parent}/{uid}"))?;
        }
    }
    let dir = node.root().join("pods").join(&uid);
    fs::create_dir_all(dir.join("deep"))?;
    fs::write(dir.join("deep/file"), "left over")?;
    let outside = node.path("outside");
    fs::create_dir_all(&outside)?;
    fs::write(outside.join("precious"), "kept")?;
    fs::create_dir(dir.join("mounted"))?;
    let flags = nix::mount::MsFlags::MS_BIND;
    nix::mount::mount(Some(&outside), &dir.join("mounted"), None::<&str>, flags, None::<&str>)?;
    Ok(uid)
}

#[tokio::test(flavor = "multi_thread")]
async fn orphans_are_planned_then_swept_then_nothing_is_left_to_do() -> Result<()> {
    let mut node = Node::start().await?;
    let pod = node.pod("kept");
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
    node.stop().await?;
    let clean = node.reconcile(&["--once", "--dry-run"]).await?;
    assert_eq!(
        clean.status.code(),
        Some(0),
        "a healthy node has nothing to do: {}",
        shown(&clean)
    );

    let before = Census::of(&node.mark())?;
    let uid = plant(&node)?;
    let planted = Census::of(&node.mark())?;
    assert_ne!(before, planted);
    let plan = node.reconcile(&["--once", "--dry-run"]).await?;
    assert_eq!(plan.status.code(), Some(10), "{}", shown(&plan));
    assert_eq!(Census::of(&node.mark())?, planted, "a dry run changes nothing");
    let text = String::from_utf8(plan.stdout)?;
    assert!(text.contains(&uid[..8]), "the plan names the orphan: {text}");

    let done = node.reconcile(&["--once"]).await?;
    assert_eq!(done.status.code(), Some(10), "{}", shown(&done));
    let planned: Vec<_> = steps(&text)
        .into_iter()
        .filter(|line| line.contains(&uid[..8]))
        .collect();
    let executed = String::from_utf8(done.stdout)?;
    let executed: Vec<_> = steps(&executed)
        .into_iter()
        .filter(|line| line.contains(&uid[..8]))
        .collect();
    assert_eq!(planned, executed, "the plan is what was done, in that order");
    e2e::eventually(std::time::Duration::from_secs(10), async || {
        let after = Census::of(&node.mark())?;
        ensure!(before == after, "{}", before.diff(&after));
        Ok(())
    })
    .await?;
    assert_eq!(
        fs::read_to_string(node.path("outside/precious"))?,
        "kept",
        "deletion never crosses a mount"
    );
    assert!(e2e::leaks::Process::read(pid).is_some(), "what runs was left alone");

    let again = node.reconcile(&["--once"]).await?;
    assert_eq!(
        again.status.code(),
        Some(0),
        "the second run has nothing to do: {}",
        shown(&again)
    );
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_living_daemon_answers_once_and_sweeps_by_itself() -> Result<()> {
    let node = Node::start().await?;
    let sandbox = node.cri.run_sandbox(&node.pod("alive")).await?;
    let once = node.reconcile(&["--once"]).await?;
    assert_eq!(once.status.code(), Some(0), "{}", shown(&once));
    let json = node.reconcile(&["--once", "--dry-run", "-o", "json"]).await?;
    assert_eq!(json.status.code(), Some(0), "{}", shown(&json));
    serde_json::from_slice::<serde_json::Value>(&json.stdout).with_context(|| shown(&json))?;
    plant(&node)?;
    let swept = node.reconcile(&["--once"]).await?;
    assert_eq!(swept.status.code(), Some(10), "{}", shown(&swept));
    assert_eq!(node.cri.sandboxes(None).await?[0].id, sandbox);
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_shim_and_address_are_planned_and_put_back() -> Result<()> {
    let mut node = Node::start().await?;
    let pod = node.pod("hurt");
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let id = node
        .cri
        .launch(&sandbox, &pod, &pods::container("c", HELLO, &[]))
        .await?;
    let (pid, ip) = (node.cri.container_pid(&id).await?, node.cri.ip(&sandbox).await?);
    node.stop().await?;
    let shim = node.shims()?.pop().context("a shim")?;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(shim), nix::sys::signal::Signal::SIGKILL)?;
    let netns = format!("rc-{}-{sandbox}", node.instance());
    tools::check(Command::new("ip").args(["-n", &netns, "address", "flush", "dev", "eth0"]))?;
    let plan = node.reconcile(&["--once", "--dry-run"]).await?;
    assert_eq!(plan.status.code(), Some(10), "{}", shown(&plan));
    let once = node.reconcile(&["--once"]).await?;
    assert_eq!(once.status.code(), Some(10), "{}", shown(&once));
    assert_eq!(node.reconcile(&["--once"]).await?.status.code(), Some(0));
    let shims = node.shims()?;
    assert!(shims.len() == 1 && shims[0] != shim, "{shims:?}");
    node.serve().await?;
    assert_eq!(
        (node.cri.container_pid(&id).await?, node.cri.ip(&sandbox).await?),
        (pid, ip)
    );
    tokio::net::TcpStream::connect((ip, 8080))
        .await
        .context("the pod answers again")?;
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_root_is_clean_and_stays_as_it_is() -> Result<()> {
    let node = Node::new(Default::default())?;
    let out = node.reconcile(&["--once", "--dry-run"]).await?;
    assert_eq!(out.status.code(), Some(0), "{}", shown(&out));
    node.finish_unused().await
}
