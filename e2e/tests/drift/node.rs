//! Kinds 37 and 38, and a node that is well.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use e2e::node::Node;
use e2e::pods::{BUSYBOX, shell};
use e2e::tools;
use e2e::v1::*;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::{finding, json, quiet, repaired, up};

/// A clock that was set is a note, and changes nothing of what runs. (Another clock for the daemon alone: the machine's
/// is everybody's.)
#[tokio::test(flavor = "multi_thread")]
async fn drift_37_clock_set() -> Result<()> {
    let mut node = Node::start().await?;
    let up = up(&node, "clocked").await?;
    for (shift, told) in [(Some("+2h"), "+7"), (Some("-2h"), "-7"), (None, "")] {
        node.stop().await?;
        node.options.env = shift.map(tools::clock).transpose()?.unwrap_or_default();
        node.serve().await?;
        crate::runs(&node, &up).await?;
        if shift.is_none() {
            quiet(&node).await?;
            continue;
        }
        let (code, report) = crate::dry(&node).await?;
        let found = finding(&report, "clock-jumped")?;
        let message = found["message"].as_str().unwrap_or_default();
        ensure!(
            code == 0 && message.contains(&format!("set by {told}")),
            "{code} {report:#}"
        );
        ensure!(report["done"].as_array().is_some_and(Vec::is_empty), "{report:#}");
        let (_, findings) = json(&node, &["doctor"]).await?;
        assert_eq!(finding(&findings, "clock-jumped")?["severity"], "note");
        let (code, _) = json(&node, &["--once"]).await?;
        assert_eq!(code, 0);
        crate::runs(&node, &up).await?;
    }
    node.finish().await
}

/// On a full disk `--once` still repairs and removals still free; the doctor says what is full.
#[tokio::test(flavor = "multi_thread")]
async fn drift_38_disk_full() -> Result<()> {
    let mut node = Node::new(Default::default())?;
    let (disk, root) = (node.path(""), node.root());
    mount(Some("tmpfs"), &disk, Some("tmpfs"), MsFlags::empty(), Some("size=96m"))?;
    for dir in ["root", "logs"] {
        fs::create_dir(node.path(dir))?;
    }
    node.serve().await?;
    let (up, gone) = (up(&node, "full").await?, up(&node, "gone").await?);
    let filler = root.join("filler");
    let _ = Command::new("dd")
        .args(["if=/dev/zero", "bs=4096", &format!("of={}", filler.display())])
        .output()?;
    let (code, findings) = json(&node, &["doctor"]).await?;
    assert_eq!(code, 20, "{findings:#}");
    finding(&findings, "disk-full")?;
    node.stop().await?;
    let netns = format!("rc-{}-{}", node.instance(), up.sandbox);
    tools::check(Command::new("ip").args(["-n", &netns, "address", "flush", "dev", "eth0"]))?;
    repaired(&node, "network", "Drifted", "B").await?;
    node.serve().await?;
    node.cri.stop_sandbox(&gone.sandbox).await?;
    node.cri.remove_sandbox(&gone.sandbox).await?;
    crate::runs(&node, &up).await?;
    fs::remove_file(filler)?;
    let outcome = node.finish().await;
    // The node's end may have taken it along.
    let _ = umount2(&disk, MntFlags::MNT_DETACH);
    outcome
}

/// Pods, a terminal, an exec, an image as a volume, a user namespace, a rotated log, an ended and a made container:
/// nothing to do, nothing found, by a daemon, without one, and by the doctor.
#[tokio::test(flavor = "multi_thread")]
async fn a_healthy_node_shows_nothing() -> Result<()> {
    let mut node = Node::start().await?;
    fs::set_permissions(node.state(), fs::Permissions::from_mode(0o711))?;
    node.busybox().await?;
    let mut pod = node.pod("well");
    pod.port_mappings = vec![PortMapping {
        container_port: 8080,
        host_port: e2e::port::unused().into(),
        ..Default::default()
    }];
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let mut tty = shell("tty", "exec sleep 1000");
    tty.tty = true;
    node.cri.launch(&sandbox, &pod, &tty).await?;
    let mut volume = shell("volume", "while :; do echo x; sleep 0.2; done");
    let dir = node.path("volume");
    fs::create_dir_all(&dir)?;
    volume.mounts = vec![
        Mount {
            container_path: "/image".into(),
            readonly: true,
            image: Some(ImageSpec {
                image: BUSYBOX.into(),
                ..Default::default()
            }),
            ..Default::default()
        },
        Mount {
            host_path: dir.display().to_string(),
            container_path: "/var/run/volume".into(),
            ..Default::default()
        },
    ];
    let id = node.cri.launch(&sandbox, &pod, &volume).await?;
    let ended = node.cri.launch(&sandbox, &pod, &shell("ended", "exit 3")).await?;
    node.cri.exited(&ended).await?;
    node.cri.create(&sandbox, &pod, &shell("made", "exit 0")).await?;

    let map = || {
        vec![IdMapping {
            host_id: 2_345_000,
            container_id: 0,
            length: 65_536,
        }]
    };
    let user = || UserNamespace {
        mode: NamespaceMode::Pod.into(),
        uids: map(),
        gids: map(),
    };
    let mut mapped = node.pod("mapped");
    let options = mapped
        .linux
        .get_or_insert_default()
        .security_context
        .get_or_insert_default();
    options.namespace_options.get_or_insert_default().userns_options = Some(user());
    let users = node.cri.run_sandbox(&mapped).await?;
    let mut config = shell("c", "exec sleep 1000");
    let options = config
        .linux
        .get_or_insert_default()
        .security_context
        .get_or_insert_default();
    options.namespace_options.get_or_insert_default().userns_options = Some(user());
    node.cri.launch(&users, &mapped, &config).await?;
    let stopped = node.cri.run_sandbox(&node.pod("stopped")).await?;
    node.cri.stop_sandbox(&stopped).await?;

    let log = node.cri.container(&id).await?.log_path;
    fs::rename(&log, format!("{log}.1"))?;
    node.cri.reopen_log(&id).await?;
    let (cri, exec) = (node.cri.clone(), id.clone());
    let exec = tokio::spawn(async move { cri.exec(&exec, &["sleep", "1000"], 0).await });
    quiet(&node).await.context("a daemon")?;
    well(&node).await.context("a daemon")?;
    node.crash().await?;
    let _ = exec.await?;
    quiet(&node).await.context("the next daemon")?;
    node.stop().await?;
    quiet(&node).await.context("no daemon")?;
    well(&node).await.context("no daemon")?;
    node.finish().await
}

/// The doctor finds nothing of the node's own. A machine that is short of something may be told so.
async fn well(node: &Node) -> Result<()> {
    let (_, findings) = json(node, &["doctor"]).await?;
    let of_host = ["disk-full", "disk-inodes", "inotify", "overlay", "cgroup", "hosts.toml"];
    let all = findings.as_array().context("a list")?;
    let own: Vec<_> = all
        .iter()
        .filter(|f| !of_host.iter().any(|id| f["id"] == *id))
        .collect();
    ensure!(own.is_empty(), "{own:#?}");
    Ok(())
}
