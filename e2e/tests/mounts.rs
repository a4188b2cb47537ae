//! Mounts of a container: volumes of the image, the host's directories with their propagation, mounts at /dev.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::images::{Compression, Image, Layer};
use e2e::node::Node;
use e2e::pods::{self, shell};
use e2e::v1::*;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::json;
use tonic::Code;

fn bind(host: &Path, inside: &str) -> Mount {
    Mount {
        host_path: host.display().to_string(),
        container_path: inside.into(),
        ..Default::default()
    }
}

/// Runs `script` with these mounts to its end: what it printed.
async fn run(node: &Node, name: &str, script: &str, mounts: Vec<Mount>) -> Result<Vec<String>> {
    let pod = pods::host_network(node.pod(name));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let mut config = shell("c", script);
    config.mounts = mounts;
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    let status = node.cri.exited(&id).await?;
    let lines = pods::log_texts(&status.log_path)?;
    ensure!(status.exit_code == 0, "exit {}: {lines:#?}", status.exit_code);
    Ok(lines)
}

/// A tmpfs of the test's own on the host.
struct Tmpfs(PathBuf);

impl Tmpfs {
    fn new(path: PathBuf, flags: MsFlags) -> Result<Tmpfs> {
        fs::create_dir_all(&path)?;
        mount(Some("test"), &path, Some("tmpfs"), MsFlags::empty(), None::<&str>)?;
        let made = Tmpfs(path);
        mount(None::<&str>, &made.0, None::<&str>, flags, None::<&str>)?;
        Ok(made)
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_images_volumes_are_filled_and_go_with_the_container() -> Result<()> {
    let node = Node::start().await?;
    let mut image = Image::busybox(pods::BUSYBOX)?;
    image.layers.push(
        Layer::new(Compression::Plain)
            .dir("data", 0o750)
            .owned_by(1001)
            .file("data/seed", 0o640, "from the image\n")
            .owned_by(1001)
            .symlink("data/link", "seed")
            .file("plain", 0o644, "a file\n"),
    );
    image.config["Volumes"] = json!({ "/data/": {}, "/made/deep": {}, "/plain": {}, "/given": {} });
    node.import(image.oci()).await?;
    let given = node.path("given");
    fs::create_dir(&given)?;
    fs::write(given.join("of-the-host"), "")?;

    let pod = pods::host_network(node.pod("volumes"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let script = "cat /data/link; stat -c '%u:%g %a' /data /data/seed; ls /given; cat /plain; \
                  for d in /data /made/deep; do grep -q \" $d \" /proc/self/mountinfo && echo $d is mounted; \
                  echo more > $d/more; done; touch /root-is-read-only 2>/dev/null || echo read-only";
    let mut config = shell("c", script);
    config.mounts = vec![bind(&given, "/given")];
    let security = config
        .linux
        .get_or_insert_default()
        .security_context
        .get_or_insert_default();
    security.readonly_rootfs = true;
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    let status = node.cri.exited(&id).await?;
    assert_eq!(
        pods::log_texts(&status.log_path)?,
        [
            "from the image",
            "1001:1001 750",
            "1001:1001 640",
            "of-the-host",
            "a file",
            "/data is mounted",
            "/made/deep is mounted",
            "read-only"
        ]
    );
    let volumes = node
        .root()
        .join("pods")
        .join(&sandbox)
        .join("containers")
        .join(&id)
        .join("volumes");
    assert_eq!(fs::read_to_string(volumes.join("0/more"))?, "more\n");
    let second = node.cri.launch(&sandbox, &pod, &shell("d", "ls /data")).await?;
    let status = node.cri.exited(&second).await?;
    assert_eq!(
        pods::log_texts(&status.log_path)?,
        ["link", "seed"],
        "each container has its own"
    );
    node.cri.remove(&id).await?;
    assert!(!volumes.exists());
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn mounts_at_dev_and_below_it() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let (file, dir) = (node.path("log"), node.path("dir"));
    fs::write(&file, "")?;
    fs::create_dir(&dir)?;
    let script =
        "echo done > /dev/termination-log; touch /dev/deep/er/here; echo x > /dev/null; ls -d /dev/shm /dev/pts";
    let mounts = vec![bind(&file, "/dev/termination-log"), bind(&dir, "/dev/deep/er")];
    assert_eq!(run(&node, "below", script, mounts).await?, ["/dev/pts", "/dev/shm"]);
    assert_eq!(fs::read_to_string(&file)?, "done\n");
    assert!(dir.join("here").exists());

    let own = Tmpfs::new(node.path("own-dev"), MsFlags::MS_PRIVATE)?;
    fs::write(own.0.join("marker"), "")?;
    assert_eq!(
        run(&node, "own", "ls /dev", vec![bind(&own.0, "/dev")]).await?,
        ["marker", "shm"]
    );
    let script = "ls /dev/null /dev/shm >/dev/null && ls / | grep -c dev; ls -d /dev/marker 2>/dev/null; true";
    let host = run(&node, "host", script, vec![bind(Path::new("/dev"), "/dev")]).await?;
    assert_eq!(host, ["1"]);
    drop(own);
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn propagation_is_as_asked_for_each_mount() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let shared = Tmpfs::new(node.path("shared"), MsFlags::MS_SHARED)?;
    let other = Tmpfs::new(node.path("other"), MsFlags::MS_SHARED)?;
    let alone = Tmpfs::new(node.path("alone"), MsFlags::MS_PRIVATE)?;
    for (at, name) in [(&shared, "slave"), (&shared, "both"), (&other, "private")] {
        fs::create_dir(at.0.join(name))?;
    }
    let with = |mut mount: Mount, propagation: MountPropagation| {
        mount.propagation = propagation.into();
        mount
    };
    let mut pod = pods::host_network(node.pod("propagation"));
    let security = pod
        .linux
        .get_or_insert_default()
        .security_context
        .get_or_insert_default();
    security.privileged = true;
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let mut config = shell(
        "c",
        "mount -t tmpfs in /both/both; mkdir /both/both/inside; echo ready; sleep 1000",
    );
    config.mounts = vec![
        with(bind(&shared.0, "/slave"), MountPropagation::PropagationHostToContainer),
        with(bind(&shared.0, "/both"), MountPropagation::PropagationBidirectional),
        bind(&other.0, "/private"),
    ];
    config
        .linux
        .get_or_insert_default()
        .security_context
        .get_or_insert_default()
        .privileged = true;
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    let status = node.cri.container(&id).await?;
    let told: Vec<_> = status.mounts.iter().map(Mount::propagation).collect();
    let wanted: Vec<_> = config.mounts.iter().map(Mount::propagation).collect();
    assert_eq!(told, wanted);
    e2e::eventually(Duration::from_secs(10), async || {
        ensure!(
            shared.0.join("both/inside").is_dir(),
            "the container's mount does not show on the host"
        );
        Ok(())
    })
    .await?;
    for (at, name) in [(&shared, "slave"), (&other, "private")] {
        mount(
            Some("late"),
            &at.0.join(name),
            Some("tmpfs"),
            MsFlags::empty(),
            None::<&str>,
        )?;
        fs::create_dir(at.0.join(name).join("late"))?;
    }
    let seen = node
        .cri
        .exec(&id, &["ls", "/slave/slave", "/both/slave", "/private/private"], 5)
        .await?;
    let seen = String::from_utf8(seen.stdout)?;
    assert_eq!(seen, "/both/slave:\nlate\n\n/private/private:\n\n/slave/slave:\nlate\n");
    node.cri.stop(&id, 0).await?;
    assert!(
        shared.0.join("both/inside").is_dir(),
        "what it mounted on the host is the host's"
    );

    for (source, propagation, word) in [
        (&alone, MountPropagation::PropagationHostToContainer, "shared or slave"),
        (&alone, MountPropagation::PropagationBidirectional, "not shared"),
    ] {
        let mut config = shell("refused", "true");
        config.mounts = vec![with(bind(&source.0, "/x"), propagation)];
        let refused = node
            .cri
            .create(&sandbox, &pod, &config)
            .await
            .expect_err("not a shared mount");
        assert!(refused.message().contains(word), "{refused:?}");
    }
    let gone = node.cri.remove_sandbox(&sandbox).await;
    for mount in ["shared/slave", "shared/both", "other/private"] {
        umount2(&node.path(mount), MntFlags::MNT_DETACH)?;
    }
    gone?;
    drop((shared, other, alone));
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn read_only_with_and_without_what_is_below() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let below = Tmpfs::new(node.path("top/below"), MsFlags::MS_PRIVATE)?;
    let top = node.path("top");
    let read_only = |recursive| Mount {
        readonly: true,
        recursive_read_only: recursive,
        ..bind(&top, "/mnt")
    };
    let script = "for d in /mnt /mnt/below; do touch $d/new 2>/dev/null && echo $d written; done; true";
    assert_eq!(
        run(&node, "flat", script, vec![read_only(false)]).await?,
        ["/mnt/below written"]
    );
    assert!(run(&node, "deep", script, vec![read_only(true)]).await?.is_empty());
    let pod = pods::host_network(node.pod("refused"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let writable = Mount {
        readonly: false,
        ..read_only(true)
    };
    let slave = Mount {
        propagation: MountPropagation::PropagationHostToContainer.into(),
        ..read_only(true)
    };
    let shared = Mount {
        propagation: MountPropagation::PropagationBidirectional.into(),
        ..read_only(true)
    };
    for mount in [writable, slave, shared] {
        let mut config = shell("c", "true");
        config.mounts = vec![mount];
        let refused = node
            .cri
            .create(&sandbox, &pod, &config)
            .await
            .expect_err("recursive, but not as it must be");
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().contains("recursive_read_only"), "{refused:?}");
    }
    drop(below);
    node.finish().await
}

/// Images without the directory that one of their links leads to are common: /var/run, /run.
#[tokio::test(flavor = "multi_thread")]
async fn a_mount_through_a_links_missing_target_and_one_that_is_no_match() -> Result<()> {
    let node = Node::start().await?;
    let mut image = Image::busybox(pods::BUSYBOX)?;
    image.layers.push(
        Layer::new(Compression::Plain)
            .dir("var", 0o755)
            .symlink("var/run", "../../../run")
            .symlink("sneaky", "/proc/sys"),
    );
    node.import(image.oci()).await?;
    let dir = node.path("secret");
    fs::create_dir(&dir)?;
    fs::write(dir.join("token"), "t\n")?;
    let mounts = vec![bind(&dir, "/var/run/secrets/x")];
    assert_eq!(run(&node, "run", "cat /run/secrets/x/token", mounts).await?, ["t"]);

    for (mount, words) in [
        (bind(&dir, "/etc/passwd"), "is a directory"),
        (bind(&dir.join("token"), "/etc"), "is a file"),
        (bind(&dir, "/sneaky/kernel"), "/proc"),
    ] {
        let pod = pods::host_network(node.pod("mismatch"));
        let sandbox = node.cri.run_sandbox(&pod).await?;
        let mut config = shell("c", "true");
        config.mounts = vec![mount];
        let id = node.cri.create(&sandbox, &pod, &config).await?;
        let refused = node.cri.start(&id).await.expect_err("no place for the mount");
        assert!(refused.message().contains(words), "{refused:?}");
        let status = node.cri.container(&id).await?;
        assert_eq!((status.exit_code, status.reason.as_str()), (128, "StartError"));
    }
    let container = node.cri.containers(None).await?.pop().context("a container")?;
    assert_eq!(container.state(), ContainerState::ContainerExited);
    node.finish().await
}
