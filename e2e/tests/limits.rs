//! Limits, cgroups and what ends a container, on cgroup v1 and v2 alike: the files say what was asked for.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use e2e::node::Node;
use e2e::pods::{self, shell};
use e2e::v1::*;

/// Where a process's cgroup is; `None` without the controller. v2 has one for all.
fn cgroup(pid: i32, controller: &str) -> Result<Option<PathBuf>> {
    let lines = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    for line in lines.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (names, path) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let path = path.trim_start_matches('/');
        if v2() && names.is_empty() {
            return Ok(Some(Path::new("/sys/fs/cgroup").join(path)));
        }
        if !v2() && names.split(',').any(|name| name == controller) {
            let mounts = fs::read_to_string("/proc/self/mountinfo")?;
            let mount = mounts.lines().find_map(|line| {
                let (left, right) = line.split_once(" - cgroup ")?;
                let options = right.split(' ').nth(1)?;
                let fits = options.split(',').any(|option| option == controller);
                fits.then(|| left.split(' ').nth(4)).flatten()
            });
            return Ok(mount.map(|mount| Path::new(mount).join(path)));
        }
    }
    Ok(None)
}

fn v2() -> bool {
    Path::new("/sys/fs/cgroup/cgroup.controllers").exists()
}

fn read(pid: i32, controller: &str, file: &str) -> Result<String> {
    let dir = cgroup(pid, controller)?.with_context(|| format!("no cgroup of {controller}"))?;
    let path = dir.join(file);
    Ok(fs::read_to_string(&path)
        .with_context(|| path.display().to_string())?
        .trim()
        .to_owned())
}

fn limited(config: &mut ContainerConfig) -> &mut LinuxContainerResources {
    config.linux.get_or_insert_default().resources.get_or_insert_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_kernels_files_say_what_was_asked_for() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = pods::host_network(node.pod("limits"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let mut config = shell("c", "sleep 1000");
    let mems = if v2() {
        "/sys/fs/cgroup/cpuset.mems.effective"
    } else {
        "/sys/fs/cgroup/cpuset/cpuset.mems"
    };
    *limited(&mut config) = LinuxContainerResources {
        cpu_shares: 512,
        cpu_quota: 25_000,
        cpu_period: 50_000,
        memory_limit_in_bytes: 64 << 20,
        cpuset_cpus: "0".into(),
        cpuset_mems: fs::read_to_string(mems).unwrap_or("0".into()).trim().to_owned(),
        oom_score_adj: 321,
        ..Default::default()
    };
    if v2() {
        limited(&mut config).unified = [
            ("memory.high".into(), "50331648".into()),
            ("pids.max".into(), "77".into()),
        ]
        .into();
    }
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    let pid = node.cri.container_pid(&id).await?;
    let expected: &[(&str, &str, &str)] = if v2() {
        &[
            ("", "cpu.weight", "59"),
            ("", "cpu.max", "25000 50000"),
            ("", "memory.max", "67108864"),
            ("", "memory.high", "50331648"),
            ("", "pids.max", "77"),
            ("", "cpuset.cpus", "0"),
        ]
    } else {
        &[
            ("cpu", "cpu.shares", "512"),
            ("cpu", "cpu.cfs_quota_us", "25000"),
            ("cpu", "cpu.cfs_period_us", "50000"),
            ("memory", "memory.limit_in_bytes", "67108864"),
            ("cpuset", "cpuset.cpus", "0"),
        ]
    };
    for (controller, file, value) in expected {
        assert_eq!(read(pid, controller, file)?, *value, "{file}");
    }
    if v2() && cgroup(pid, "")?.is_some_and(|dir| dir.join("memory.swap.max").exists()) {
        assert_eq!(
            read(pid, "", "memory.swap.max")?,
            "0",
            "a limit on memory is one on swap too"
        );
    }
    assert_eq!(fs::read_to_string(format!("/proc/{pid}/oom_score_adj"))?.trim(), "321");
    let exec = node
        .cri
        .exec(
            &id,
            &["sh", "-c", "cat /proc/self/oom_score_adj; cat /proc/self/cgroup"],
            20,
        )
        .await?;
    let text = String::from_utf8(exec.stdout)?;
    assert!(text.starts_with("321\n"), "{text}");

    let update = LinuxContainerResources {
        memory_limit_in_bytes: 96 << 20,
        cpu_shares: 1024,
        ..Default::default()
    };
    node.cri.update(&id, update).await?;
    let (memory, shares) = if v2() {
        (read(pid, "", "memory.max")?, read(pid, "", "cpu.weight")?)
    } else {
        (
            read(pid, "memory", "memory.limit_in_bytes")?,
            read(pid, "cpu", "cpu.shares")?,
        )
    };
    assert_eq!(memory, (96 << 20).to_string());
    assert_eq!(shares, if v2() { "100" } else { "1024" });
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_raw_cgroup_file_is_written_on_v2_and_refused_on_v1() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = pods::host_network(node.pod("unified"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    for (file, words) in [
        ("../x.y", "unified"),
        ("cgroup.procs", "unified"),
        ("memory.high", "cgroup v2"),
    ] {
        let mut config = shell("refused", "true");
        limited(&mut config).unified = [(file.into(), "1".into())].into();
        if v2() && file == "memory.high" {
            continue;
        }
        let refused = node
            .cri
            .create(&sandbox, &pod, &config)
            .await
            .expect_err("no such file");
        assert!(refused.message().contains(words), "{refused:?}");
    }
    if v2() {
        let mut config = shell("unknown", "true");
        limited(&mut config).unified = [("memory.nonsense".into(), "1".into())].into();
        let id = node.cri.create(&sandbox, &pod, &config).await?;
        node.cri.start(&id).await.expect_err("the kernel has no such file");
    }
    node.finish().await
}

/// A frozen container is killed all the same, and what it started with it.
#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_container_ends() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = pods::host_network(node.pod("frozen"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let id = node
        .cri
        .launch(&sandbox, &pod, &shell("c", "sleep 1000 & sleep 1000 & wait"))
        .await?;
    let pid = node.cri.container_pid(&id).await?;
    let (file, word) = if v2() {
        ("cgroup.freeze", "1")
    } else {
        ("freezer.state", "FROZEN")
    };
    let dir = cgroup(pid, "freezer")?.context("no freezer")?;
    fs::write(dir.join(file), word)?;
    node.cri.stop(&id, 0).await?;
    assert_eq!(node.cri.container(&id).await?.exit_code, 137);
    assert!(!dir.exists(), "its cgroup is gone");
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn huge_pages_are_limited_where_they_can_be() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = pods::host_network(node.pod("huge"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let mut config = shell("c", "sleep 1000");
    let limit = |size: &str, limit| HugepageLimit {
        page_size: size.into(),
        limit,
    };
    limited(&mut config).hugepage_limits = vec![limit("2MB", 4 << 20), limit("7MB", 1)];
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    let pid = node.cri.container_pid(&id).await?;
    let file = if v2() {
        "hugetlb.2MB.max"
    } else {
        "hugetlb.2MB.limit_in_bytes"
    };
    match cgroup(pid, "hugetlb")?
        .map(|dir| dir.join(file))
        .filter(|path| path.exists())
    {
        Some(path) => assert_eq!(fs::read_to_string(path)?.trim(), (4 << 20).to_string()),
        None => println!("huge pages cannot be limited here: left out"),
    }
    node.finish().await
}
