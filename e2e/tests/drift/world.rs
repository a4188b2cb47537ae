//! Kinds 13 to 25, 31, 32, 33, 39 and 40: namespaces, network, mounts, cgroups, logs.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::hung::Hung;
use e2e::leaks::Process;
use e2e::node::{Node, Options};
use e2e::pods::{self, HELLO, container, shell};
use e2e::v1::*;
use e2e::{cni, eventually, tools};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::{Up, dry, finding, json, kill9, pods_dir, quiet, repaired, runs, state_dir, step, up};

const STRANGE: &str = "fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210";

fn ip(args: &[&str]) -> Result<()> {
    tools::check(Command::new("ip").args(args)).map(drop)
}

fn netns(node: &Node, up: &Up) -> String {
    format!("rc-{}-{}", node.instance(), up.sandbox)
}

/// Where a cgroup is, in v1's hierarchy of a controller or in v2's one.
fn cgroup(controller: &str, path: &str) -> PathBuf {
    let v1 = Path::new("/sys/fs/cgroup").join(controller);
    let base = if v1.exists() { v1 } else { "/sys/fs/cgroup".into() };
    base.join(path.trim_start_matches('/'))
}

fn bind(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(from)?;
    fs::create_dir_all(to)?;
    Ok(mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>)?)
}

/// `sleep` of the test's own.
fn stranger() -> Result<Child> {
    Ok(Command::new("sleep").arg("1000").spawn()?)
}

#[tokio::test(flavor = "multi_thread")]
async fn drift_13_netns_without_owner() -> Result<()> {
    let mut node = Node::start().await?;
    let kept = up(&node, "kept").await?;
    let name = format!("rc-{}-{STRANGE}", node.instance());
    ip(&["netns", "add", &name])?;
    repaired(&node, "all", "NoRecord", "A").await.context("daemon up")?;
    assert!(!Path::new("/run/netns").join(&name).exists());
    node.stop().await?;
    ip(&["netns", "add", &name])?;
    repaired(&node, "all", "NoRecord", "A").await.context("daemon down")?;
    assert!(!Path::new("/run/netns").join(&name).exists());
    node.serve().await?;
    runs(&node, &kept).await?;
    node.finish().await
}

/// A lost pin is had again from a living process: the same namespace, not a new one. Without any the pod has ended.
#[tokio::test(flavor = "multi_thread")]
async fn drift_14_netns_pin_lost() -> Result<()> {
    let mut node = Node::start().await?;
    let up = up(&node, "pinned").await?;
    let pin = Path::new("/run/netns").join(netns(&node, &up));
    let inode = fs::metadata(&pin)?.ino();
    let lose = || -> Result<()> {
        umount2(&pin, MntFlags::MNT_DETACH)?;
        Ok(fs::remove_file(&pin)?)
    };
    lose()?;
    repaired(&node, "netns", "PinLost", "B").await.context("daemon up")?;
    assert_eq!(fs::metadata(&pin)?.ino(), inode, "the same namespace");
    runs(&node, &up).await?;
    node.stop().await?;
    lose()?;
    repaired(&node, "netns", "PinLost", "B").await.context("daemon down")?;
    assert_eq!(fs::metadata(&pin)?.ino(), inode);

    let pause = node.processes()?;
    let pause = pause.iter().find(|line| line.contains("pause")).context("a pause")?;
    let pause: i32 = pause.split(' ').next().unwrap_or_default().parse()?;
    for pid in node.shims()?.into_iter().chain([pause, up.pid]) {
        kill9(pid)?;
    }
    eventually(Duration::from_secs(10), async || {
        ensure!(
            Process::read(up.pid).is_none() && Process::read(pause).is_none(),
            "not reaped"
        );
        Ok(())
    })
    .await?;
    lose()?;
    node.serve().await?;
    eventually(Duration::from_secs(10), async || {
        let state = node.cri.sandbox(&up.sandbox).await?.state();
        ensure!(state == PodSandboxState::SandboxNotready, "{state:?}");
        Ok(())
    })
    .await?;
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn drift_15_address_route_link_missing() -> Result<()> {
    let mut node = Node::start().await?;
    let up = up(&node, "net").await?;
    let (name, ip_was) = (netns(&node, &up), node.cri.ip(&up.sandbox).await?);
    let hurts: [&[&str]; 3] = [
        &["-n", &name, "address", "flush", "dev", "eth0"],
        &["-n", &name, "route", "flush", "default"],
        &["-n", &name, "link", "delete", "eth0"],
    ];
    node.stop().await?;
    for hurt in hurts {
        ip(hurt)?;
        repaired(&node, "network", "Drifted", "B")
            .await
            .with_context(|| hurt.join(" "))?;
    }
    node.serve().await?;
    assert_eq!(node.cri.ip(&up.sandbox).await?, ip_was);
    ip(hurts[2])?;
    // Told by netlink, without a question.
    eventually(Duration::from_secs(10), async || {
        ip(&["-n", &name, "link", "show", "eth0"])
    })
    .await?;
    quiet(&node).await?;
    runs(&node, &up).await?;
    node.finish().await
}

/// A teardown that is owed is a step of the plan, with a daemon and without, until it can be done.
#[tokio::test(flavor = "multi_thread")]
async fn drift_17_owed_teardown() -> Result<()> {
    let mut node = Node::new(Options {
        network: "cni",
        ..Options::default()
    })?;
    cni::install(&node)?;
    node.serve().await?;
    let debtor = up(&node, "debtor").await?;
    node.file("fail-DEL", "")?;
    eventually(Duration::from_secs(45), async || {
        Ok(node.cri.stop_sandbox(&debtor.sandbox).await?)
    })
    .await?;
    node.cri.remove_sandbox(&debtor.sandbox).await?;
    for daemon in [true, false] {
        if !daemon {
            node.stop().await?;
        }
        let (code, plan) = dry(&node).await?;
        let due = step(&plan, "network", "Owed")?;
        ensure!(code == 10 && due["risk"] == "A", "daemon: {daemon}: {code} {plan:#}");
        let (_, findings) = json(&node, &["doctor"]).await?;
        let found = finding(&findings, "owed")?;
        let object = found["object"].as_str().unwrap_or_default();
        ensure!(
            object.contains(&debtor.sandbox) && found["since"].is_number() && found["repair"] == "reconcile --once",
            "{found:#}"
        );
    }
    let (code, report) = json(&node, &["--once"]).await?;
    ensure!(code == 20, "it cannot be paid yet: {code} {report:#}");
    assert_eq!(cni::leases(&node), 1);
    fs::remove_file(node.path("fail-DEL"))?;
    repaired(&node, "network", "Owed", "A").await?;
    assert_eq!(cni::leases(&node), 0);
    node.finish().await
}

/// Leases belong to attachments: what the database forgot is given back by DEL; another pod's stays.
#[tokio::test(flavor = "multi_thread")]
async fn drift_16_lease_without_record() -> Result<()> {
    ensure!(
        Path::new("/usr/lib/cni/bridge").exists(),
        "install containernetworking-plugins"
    );
    let (bridge, net) = (
        format!("drcni{}", std::process::id() % 10_000),
        format!("dr{}", std::process::id()),
    );
    let mut node = Node::new(Options {
        network: "cni",
        ..Options::default()
    })?;
    for dir in ["etc", "net.d", "leases"] {
        fs::create_dir_all(node.path(dir))?;
    }
    let leases = node.path("leases");
    let chain = format!(
        r#"{{"cniVersion":"1.0.0","name":"{net}","plugins":[{{"type":"bridge","bridge":"{bridge}","ipam":
        {{"type":"host-local","dataDir":"{}","ranges":[[{{"subnet":"10.213.9.0/24"}}]]}}}}]}}"#,
        leases.display()
    );
    node.file("net.d/10-t.conflist", chain)?;
    let dir = node.path("net.d");
    let config = format!(
        "network:\n  cniConfDir: {}\n  cniBinDirs: [/usr/lib/cni]\n",
        dir.display()
    );
    node.file("etc/config.yaml", config)?;
    node.serve().await?;
    let count = || -> usize {
        let all = fs::read_dir(leases.join(&net)).into_iter().flatten().flatten();
        all.filter(|e| e.file_name().to_string_lossy().starts_with("10."))
            .count()
    };
    let (lost, kept) = (up(&node, "lost").await?, up(&node, "kept").await?);
    assert_eq!(count(), 2);
    node.stop().await?;
    fs::remove_dir_all(node.root().join("store"))?;
    fs::remove_file(pods_dir(&node, &lost).join("record.json"))?;
    repaired(&node, "all", "NoRecord", "B").await?;
    assert_eq!(count(), 1, "the address is free");
    node.serve().await?;
    runs(&node, &kept).await?;
    let outcome = node.finish().await;
    let _ = ip(&["link", "delete", &bridge]);
    outcome
}

fn nft(args: &str) -> Result<()> {
    tools::check(Command::new("nft").args(args.split(' '))).map(drop)
}

/// The rule of a living pod is put back, that of no pod taken away; nothing else of the table is touched.
#[tokio::test(flavor = "multi_thread")]
async fn drift_18_host_port_rules() -> Result<()> {
    let mut node = Node::start().await?;
    let port = i32::from(e2e::port::unused());
    let mut pod = node.pod("ports");
    pod.port_mappings = vec![PortMapping {
        container_port: 8080,
        host_port: port,
        ..Default::default()
    }];
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let ip = node.cri.ip(&sandbox).await?;
    let table = format!("rc-{}", node.instance());
    let (own, foreign) = (format!("tcp . {port}"), format!("tcp . {}", port + 600));
    for up in [true, false] {
        if !up {
            node.stop().await?;
        }
        nft(&format!("delete element inet {table} hp4 {{ {own} }}"))?;
        repaired(&node, "network", "Drifted", "B")
            .await
            .with_context(|| format!("daemon up: {up}"))?;
        nft(&format!("add element inet {table} hp4 {{ {foreign} : {ip} . 80 }}"))?;
        repaired(&node, "network", "StaleRule", "A")
            .await
            .with_context(|| format!("daemon up: {up}"))?;
        let listed = tools::check(Command::new("nft").args(["list", "table", "inet", &table]))?;
        let listed = String::from_utf8(listed.stdout)?;
        ensure!(listed.contains(&own) && !listed.contains(&foreign), "{listed}");
    }
    node.finish().await
}

/// In a directory of no record, and in the trash; what lies behind a mount is not touched.
#[tokio::test(flavor = "multi_thread")]
async fn drift_19_mount_without_record() -> Result<()> {
    let node = Node::start().await?;
    let outside = node.path("outside");
    fs::create_dir_all(&outside)?;
    fs::write(outside.join("precious"), "kept")?;
    bind(&outside, &node.root().join("trash/old/volume"))?;
    repaired(&node, "mount", "NoRecord", "A").await?;
    bind(&outside, &node.state().join("pods").join(STRANGE).join("shm"))?;
    repaired(&node, "all", "NoRecord", "A").await?;
    assert_eq!(fs::read_to_string(outside.join("precious"))?, "kept");
    node.finish().await
}

/// A volume that is gone inside a running container is told, not mounted again. The host's view of its root is not its.
#[tokio::test(flavor = "multi_thread")]
async fn drift_20_mount_missing_in_container() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = node.pod("mounts");
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let volume = node.path("volume");
    fs::create_dir_all(&volume)?;
    let mut config = shell("c", "exec sleep 1000");
    config.mounts = vec![Mount {
        host_path: volume.display().to_string(),
        container_path: "/volume".into(),
        ..Default::default()
    }];
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    let pid = node.cri.container_pid(&id).await?;
    let rootfs = node
        .state()
        .join("pods")
        .join(&sandbox)
        .join("containers")
        .join(&id)
        .join("rootfs");
    umount2(&rootfs, MntFlags::MNT_DETACH)?;
    quiet(&node).await.context("unmounted on the host alone")?;
    assert_eq!(node.cri.exec(&id, &["ls", "/volume"], 5).await?.exit_code, 0);

    let target = pid.to_string();
    tools::check(Command::new("nsenter").args(["-t", &target, "-m", "-r", "/bin/umount", "/volume"]))?;
    let (code, report) = dry(&node).await?;
    assert_eq!(code, 20, "{report:#}");
    let found = finding(&report, "mount-missing")?;
    assert!(
        found["message"].as_str().is_some_and(|m| m.contains("/volume")),
        "{found:#}"
    );
    assert_eq!(node.cri.container_pid(&id).await?, pid, "left running");
    node.finish().await
}

/// A copy of a pod's mounts in a namespace elsewhere holds up nothing: removing the mount point takes it away there.
#[tokio::test(flavor = "multi_thread")]
async fn drift_21_mount_held_elsewhere() -> Result<()> {
    let node = Node::start().await?;
    let held = up(&node, "held").await?;
    let mut holder = Command::new("unshare");
    let mut holder = holder
        .args(["-m", "--propagation", "private", "sleep", "1000"])
        .spawn()?;
    let (own, pid) = (fs::read_link("/proc/self/ns/mnt")?, holder.id());
    eventually(Duration::from_secs(20), async || {
        ensure!(fs::read_link(format!("/proc/{pid}/ns/mnt"))? != own, "not yet");
        Ok(())
    })
    .await?;
    let copies = || -> Result<usize> {
        let table = fs::read_to_string(format!("/proc/{pid}/mountinfo"))?;
        Ok(table.lines().filter(|line| line.contains(&held.sandbox)).count())
    };
    assert!(copies()? > 0, "the holder has copies");
    node.cri.stop_sandbox(&held.sandbox).await?;
    node.cri.remove_sandbox(&held.sandbox).await?;
    assert_eq!(copies()?, 0);
    // The kernel takes a pod's link away some time after its namespace.
    eventually(Duration::from_secs(20), async || quiet(&node).await).await?;
    holder.kill()?;
    holder.wait()?;
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn drift_22_cgroup_left_over() -> Result<()> {
    let mut node = Node::start().await?;
    let kept = up(&node, "kept").await?;
    let left = cgroup("pids", &format!("reconcile-{}/{STRANGE}", node.instance()));
    fs::create_dir(&left)?;
    repaired(&node, "cgroup", "NoRecord", "A").await?;
    assert!(!left.exists());
    node.stop().await?;
    fs::create_dir(&left)?;
    repaired(&node, "cgroup", "NoRecord", "A").await?;
    assert!(!left.exists());
    node.serve().await?;
    runs(&node, &kept).await?;
    node.finish().await
}

/// What nothing of ours explains is somebody else's: told, not killed, and no obstacle.
#[tokio::test(flavor = "multi_thread")]
async fn drift_23_cgroup_with_foreign_process() -> Result<()> {
    let node = Node::start().await?;
    let _kept = up(&node, "kept").await?;
    let left = cgroup("pids", &format!("reconcile-{}/{STRANGE}", node.instance()));
    fs::create_dir(&left)?;
    let mut other = stranger()?;
    fs::write(left.join("cgroup.procs"), other.id().to_string())?;
    let (code, report) = json(&node, &["--once"]).await?;
    assert_eq!(code, 20, "{report:#}");
    assert!(
        report["human"][0]
            .as_str()
            .is_some_and(|l| l.contains("ForeignProcesses")),
        "{report:#}"
    );
    assert!(other.try_wait()?.is_none() && left.exists());
    other.kill()?;
    other.wait()?;
    repaired(&node, "cgroup", "NoRecord", "A").await?;
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn drift_24_cgroup_frozen() -> Result<()> {
    let node = Node::start().await?;
    let up = up(&node, "frozen").await?;
    let own = format!("reconcile-{}/{}", node.instance(), up.id);
    let freezer = cgroup("freezer", &own);
    let (file, on) = match freezer.join("freezer.state").exists() {
        true => ("freezer.state", "FROZEN"),
        false => ("cgroup.freeze", "1"),
    };
    quiet(&node).await?;
    fs::write(freezer.join(file), on)?;
    repaired(&node, "limits", "Frozen", "A").await?;
    assert_ne!(fs::read_to_string(freezer.join(file))?.trim(), on);
    // Wanted dying.
    fs::write(freezer.join(file), on)?;
    node.cri.stop(&up.id, 5).await?;
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn drift_25_wrong_cgroup_and_limits() -> Result<()> {
    let mut node = Node::start().await?;
    let pod = node.pod("limits");
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let mut config = container("c", HELLO, &["/hello", "sleep", "1000"]);
    config.linux.get_or_insert_default().resources = Some(LinuxContainerResources {
        memory_limit_in_bytes: 64 << 20,
        ..Default::default()
    });
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    let pid = node.cri.container_pid(&id).await?;
    let memory = cgroup("memory", &format!("reconcile-{}/{id}", node.instance()));
    let limit = ["memory.limit_in_bytes", "memory.max"]
        .map(|f| memory.join(f))
        .into_iter()
        .find(|f| f.exists());
    let limit = limit.context("a limit")?;
    let astray = || fs::write(cgroup("memory", "cgroup.procs"), pid.to_string());
    let inside = || -> Result<bool> {
        let pids = fs::read_to_string(memory.join("cgroup.procs"))?;
        Ok(pids.lines().any(|line| line == pid.to_string()))
    };
    for up in [true, false] {
        if !up {
            node.stop().await?;
        }
        // What a start has yet to look at comes first.
        quiet(&node).await?;
        fs::write(&limit, (48u64 << 20).to_string())?;
        repaired(&node, "limits", "LimitDiffers", "A").await?;
        assert_eq!(fs::read_to_string(&limit)?.trim(), (64u64 << 20).to_string());
        astray()?;
        ensure!(!inside()?, "moved out");
        repaired(&node, "limits", "Astray", "B").await?;
        ensure!(inside()?, "moved back");
    }
    node.finish().await
}

/// Pins and directories of nobody: an ipc pin, a bundle with a volume still mounted in it.
#[tokio::test(flavor = "multi_thread")]
async fn drift_31_32_pin_and_directory_without_record() -> Result<()> {
    let mut node = Node::start().await?;
    let _kept = up(&node, "kept").await?;
    node.stop().await?;
    let pins = node.state().join("pods").join(STRANGE).join("ns");
    fs::create_dir_all(&pins)?;
    let pin = pins.join("ipc");
    fs::write(&pin, "")?;
    mount(
        Some("/proc/self/ns/ipc"),
        &pin,
        None::<&str>,
        MsFlags::MS_BIND,
        None::<&str>,
    )?;
    repaired(&node, "all", "NoRecord", "A").await?;
    assert!(!pin.exists());
    let outside = node.path("outside");
    fs::create_dir_all(&outside)?;
    fs::write(outside.join("precious"), "kept")?;
    let dir = node.root().join("pods").join(STRANGE);
    bind(&outside, &dir.join("containers").join(STRANGE).join("upper/data"))?;
    repaired(&node, "all", "NoRecord", "A").await?;
    assert!(!dir.exists());
    assert_eq!(fs::read_to_string(outside.join("precious"))?, "kept");
    node.finish().await
}

/// A removed or replaced log is opened anew; a rotation that was asked for is no drift, also for a new daemon.
#[tokio::test(flavor = "multi_thread")]
async fn drift_33_log_missing() -> Result<()> {
    let mut node = Node::start().await?;
    node.busybox().await?;
    let pod = node.pod("logs");
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let config = shell("c", "i=0; while :; do echo $i; i=$((i+1)); sleep 0.05; done");
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    let log = PathBuf::from(node.cri.container(&id).await?.log_path);
    let grows = async || {
        eventually(Duration::from_secs(20), async || {
            ensure!(!pods::log_texts(&log)?.is_empty(), "no line");
            Ok(())
        })
        .await
    };
    for up in [true, false] {
        if !up {
            node.stop().await?;
        }
        // What a start has yet to look at comes first.
        quiet(&node).await?;
        fs::remove_file(&log)?;
        repaired(&node, "log", "LogMissing", "A")
            .await
            .with_context(|| format!("daemon up: {up}"))?;
        grows().await?;
    }
    node.serve().await?;
    fs::rename(&log, log.with_extension("1"))?;
    node.cri.reopen_log(&id).await?;
    grows().await?;
    quiet(&node).await?;
    node.crash().await?;
    quiet(&node).await.context("a new daemon")?;
    fs::rename(&log, log.with_extension("2"))?;
    fs::write(&log, "")?;
    repaired(&node, "log", "LogMissing", "A").await.context("replaced")?;
    grows().await?;
    node.finish().await
}

/// A stopped container that lives on long after its grace is told with what holds it: here a request that a server of
/// files has taken and does not answer. (Under a v1 freezer SIGKILL waits too; this is so with v1 and with v2.)
#[tokio::test(flavor = "multi_thread")]
async fn drift_39_unkillable() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let volume = node.path("volume");
    fs::create_dir(&volume)?;
    bind(&volume, &volume)?;
    mount(None::<&str>, &volume, None::<&str>, MsFlags::MS_SHARED, None::<&str>)?;
    let pod = node.pod("stays");
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let mut config = shell("c", "while [ ! -e /volume/hung/ready ]; do sleep 0.05; done");
    config.mounts = vec![Mount {
        host_path: volume.display().to_string(),
        container_path: "/volume".into(),
        propagation: MountPropagation::PropagationHostToContainer.into(),
        ..Default::default()
    }];
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    let pid = node.cri.container_pid(&id).await?;
    let mut hung = Hung::unkillable(volume.join("hung"))?;
    eventually(Duration::from_secs(10), async || {
        // Still interruptible here: only the first signal makes the wait one that nothing ends.
        let waits_in = fs::read_to_string(format!("/proc/{pid}/wchan"))?;
        ensure!(waits_in == "request_wait_answer", "it does not wait yet: {waits_in:?}");
        Ok(())
    })
    .await?;
    let (cri, stopped) = (node.cri.clone(), id.clone());
    let stop = tokio::spawn(async move { cri.stop(&stopped, 0).await });
    let told = eventually(Duration::from_secs(40), async || {
        let (code, report) = dry(&node).await?;
        let found = finding(&report, "task-unkillable")?;
        ensure!(code == 20 && found["since"].is_number(), "{code} {found:#}");
        let message = found["message"].as_str().unwrap_or_default();
        ensure!(
            message.contains(&pid.to_string()) && message.contains("request_wait_answer"),
            "{found:#}"
        );
        Ok(())
    })
    .await;
    hung.let_go();
    told?;
    let _ = stop.await?;
    node.cri.exited(&id).await?;
    quiet(&node).await?;
    umount2(&volume, MntFlags::MNT_DETACH)?;
    node.finish().await
}

/// Namespaces, cgroups, links, mounts of others are not listed, not touched.
#[tokio::test(flavor = "multi_thread")]
async fn drift_40_others_things() -> Result<()> {
    let (mut node, other) = (Node::start().await?, Node::start().await?);
    let (_mine, theirs) = (up(&node, "mine").await?, up(&other, "theirs").await?);
    let tag = std::process::id();
    let names = [format!("cni-{tag}"), format!("rc-{:08x}-{STRANGE}", tag)];
    for name in &names {
        ip(&["netns", "add", name])?;
    }
    let link = format!("drx{tag}");
    ip(&["link", "add", &link, "type", "bridge"])?;
    let left = cgroup("pids", &format!("reconcile-{tag:08x}/{STRANGE}"));
    fs::create_dir_all(&left)?;
    let place = node.path("elsewhere");
    bind(&node.path("logs"), &place)?;
    quiet(&node).await?;
    node.stop().await?;
    quiet(&node).await?;
    let (code, report) = json(&node, &["--once", "--force"]).await?;
    assert_eq!(code, 0, "{report:#}");
    runs(&other, &theirs).await?;
    assert!(state_dir(&other, &theirs).exists());
    for name in &names {
        ip(&["netns", "delete", name]).context("untouched")?;
    }
    ip(&["link", "delete", &link]).context("untouched")?;
    fs::remove_dir(&left).context("untouched")?;
    let _ = fs::remove_dir(left.parent().context("parent")?);
    umount2(&place, MntFlags::MNT_DETACH).context("untouched")?;
    other.finish().await?;
    node.finish().await
}

/// The steps of a sandbox whose record is gone are told once, not once a part.
#[tokio::test(flavor = "multi_thread")]
async fn an_orphan_is_one_step() -> Result<()> {
    let mut node = Node::start().await?;
    let lone = up(&node, "lone").await?;
    node.stop().await?;
    fs::remove_dir_all(node.root().join("store"))?;
    fs::remove_file(pods_dir(&node, &lone).join("record.json"))?;
    fs::remove_file(
        pods_dir(&node, &lone)
            .join("containers")
            .join(&lone.id)
            .join("record.json"),
    )?;
    let (_, plan) = dry(&node).await?;
    step(&plan, "all", "NoRecord")?;
    assert_eq!(plan["done"].as_array().map(Vec::len), Some(1), "{plan:#}");
    json(&node, &["--once"]).await?;
    quiet(&node).await?;
    node.finish().await
}
