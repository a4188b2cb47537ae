//! Pods with a user namespace of their own, by what the kernel shows of their processes and files.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use e2e::leaks::Process;
use e2e::node::{Node, Options};
use e2e::pods::{self, HELLO, shell};
use e2e::v1::*;
use tonic::Code;

const HOST: u32 = 1_234_000;
const LENGTH: u32 = 65_536;

fn mapping() -> Vec<IdMapping> {
    vec![IdMapping {
        host_id: HOST,
        container_id: 0,
        length: LENGTH,
    }]
}

fn options() -> UserNamespace {
    UserNamespace {
        mode: NamespaceMode::Pod.into(),
        uids: mapping(),
        gids: mapping(),
    }
}

/// A node whose directories let other users through to the root file systems, as the default ones do.
async fn node() -> Result<Node> {
    let node = Node::start().await?;
    fs::set_permissions(node.state(), fs::Permissions::from_mode(0o711))?;
    node.busybox().await?;
    Ok(node)
}

fn in_user(mut pod: PodSandboxConfig) -> PodSandboxConfig {
    let linux = pod.linux.get_or_insert_default();
    let security = linux.security_context.get_or_insert_default();
    security.namespace_options.get_or_insert_default().userns_options = Some(options());
    pod
}

fn container(name: &str, script: &str) -> ContainerConfig {
    let mut config = shell(name, script);
    let security = config
        .linux
        .get_or_insert_default()
        .security_context
        .get_or_insert_default();
    security.namespace_options.get_or_insert_default().userns_options = Some(options());
    config
}

fn map_of(pid: i32) -> Result<String> {
    let map = fs::read_to_string(format!("/proc/{pid}/uid_map"))?;
    Ok(map.split_whitespace().collect::<Vec<_>>().join(" "))
}

fn user_of(pid: i32) -> Result<u32> {
    Ok(fs::metadata(format!("/proc/{pid}"))?.uid())
}

#[tokio::test(flavor = "multi_thread")]
async fn root_inside_is_nobody_in_particular_outside() -> Result<()> {
    let mut node = node().await?;
    let volume = node.path("volume");
    fs::create_dir(&volume)?;
    fs::write(volume.join("of-root"), "r\n")?;
    fs::set_permissions(volume.join("of-root"), fs::Permissions::from_mode(0o600))?;
    let mut pod = in_user(node.pod("users"));
    pod.linux.get_or_insert_default().sysctls = [("net.ipv4.tcp_syncookies".into(), "0".into())].into();
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let pause = node.cri.sandbox_pid(&sandbox).await?;
    assert_eq!(map_of(pause)?, format!("0 {HOST} {LENGTH}"));
    assert_eq!(user_of(pause)?, HOST);

    let script = "id -u; stat -c '%u %n' / /etc/passwd /home/app /etc/hosts /volume/of-root; cat /volume/of-root; \
                  echo new > /volume/new; echo x > /file; chown 1001 /file; echo 127.9.9.9 extra >> /etc/hosts; \
                  cat /proc/sys/net/ipv4/tcp_syncookies; cat /sys/class/net/eth0/operstate; echo x > /dev/null; \
                  mount -t tmpfs x /tmp 2>/dev/null || echo no-mount; touch /dev/shm/x; ls /dev/mqueue /dev/pts; \
                  echo ready; sleep 1000";
    let mut config = container("c", script);
    config.mounts = vec![Mount {
        host_path: volume.display().to_string(),
        container_path: "/volume".into(),
        uid_mappings: mapping(),
        gid_mappings: mapping(),
        ..Default::default()
    }];
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    let log = format!("{}/c.log", pod.log_directory);
    let lines = e2e::eventually(std::time::Duration::from_secs(10), async || {
        let lines = pods::log_texts(&log)?;
        ensure!(lines.iter().any(|line| line == "ready"), "{lines:#?}");
        Ok(lines)
    })
    .await?;
    assert_eq!(
        lines,
        [
            "0",
            "0 /",
            "0 /etc/passwd",
            "1001 /home/app",
            "0 /etc/hosts",
            "0 /volume/of-root",
            "r",
            "0",
            "up",
            "no-mount",
            "/dev/mqueue:",
            "",
            "/dev/pts:",
            "ptmx",
            "ready"
        ]
    );
    let pid = node.cri.container_pid(&id).await?;
    assert_eq!((map_of(pid)?, user_of(pid)?), (format!("0 {HOST} {LENGTH}"), HOST));
    assert_eq!(
        fs::metadata(volume.join("new"))?.uid(),
        0,
        "the volume keeps its owners"
    );
    let dirs: PathBuf = node.root().join("pods").join(&sandbox).join("containers").join(&id);
    let upper = dirs.join("upper/file");
    assert_eq!(fs::metadata(&upper)?.uid(), HOST + 1001, "{}", upper.display());

    let exec = node
        .cri
        .exec(&id, &["sh", "-c", "cat /proc/self/uid_map; id -u; cat /file"], 5)
        .await?;
    let text = String::from_utf8(exec.stdout)?;
    assert!(text.contains(&HOST.to_string()) && text.ends_with("\n0\nx\n"), "{text}");
    let refused = node
        .cri
        .exec(&id, &["sh", "-c", "echo 1 > /proc/sys/kernel/panic"], 5)
        .await?;
    assert_ne!(refused.exit_code, 0, "root of a user namespace is not the node's");

    node.crash().await?;
    assert_eq!(node.cri.container_pid(&id).await?, pid);
    let status = node.cri.sandbox(&sandbox).await?;
    assert_eq!(status.state(), PodSandboxState::SandboxReady);
    let told = status
        .linux
        .and_then(|linux| linux.namespaces)
        .and_then(|namespaces| namespaces.options);
    assert_eq!(told.context("options")?.userns_options, Some(options()));
    let again = node.cri.launch(&sandbox, &pod, &container("d", "id -u")).await?;
    assert_eq!(node.cri.exited(&again).await?.exit_code, 0);
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_namespace_on_the_hosts_network_and_a_shared_pid_namespace() -> Result<()> {
    let node = node().await?;
    let pod = pods::host_network(in_user(node.pod("host")));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let mut config = container(
        "c",
        "cat /proc/1/comm; touch /sys/x 2>/dev/null || echo read-only; ls /sys/class/net",
    );
    let security = config
        .linux
        .get_or_insert_default()
        .security_context
        .get_or_insert_default();
    let options = security.namespace_options.get_or_insert_default();
    options.network = NamespaceMode::Node.into();
    options.pid = NamespaceMode::Pod.into();
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    let status = node.cri.exited(&id).await?;
    let lines = pods::log_texts(&status.log_path)?;
    assert_eq!(lines[..2], ["pause", "read-only"], "{lines:#?}");
    assert!(lines.contains(&"lo".to_owned()) && status.exit_code == 0, "{lines:#?}");
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_is_refused_and_the_node_says_what_can() -> Result<()> {
    let node = node().await?;
    let ask = tonic::Request::new(StatusRequest { verbose: false });
    let features = node.cri.runtime.clone().status(ask).await?.into_inner();
    let handler = features.runtime_handlers.iter().find(|handler| handler.name.is_empty());
    let handler = handler
        .and_then(|handler| handler.features)
        .context("the default handler")?;
    assert!(handler.user_namespaces && handler.recursive_read_only_mounts);
    assert!(features.features.context("features")?.user_namespaces_host_network);

    let pod = in_user(node.pod("refused"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let refused = node
        .cri
        .create(&sandbox, &pod, &shell("plain", "true"))
        .await
        .expect_err("not the pod's");
    assert_eq!(refused.code(), Code::InvalidArgument);
    let mut unmapped = container("unmapped", "true");
    let security = unmapped
        .linux
        .get_or_insert_default()
        .security_context
        .get_or_insert_default();
    security.run_as_user = Some(Int64Value { value: 70_000 });
    let refused = node
        .cri
        .create(&sandbox, &pod, &unmapped)
        .await
        .expect_err("no such user in the namespace");
    assert!(refused.message().contains("70000"), "{refused:?}");
    for change in [
        |options: &mut NamespaceOption| options.pid = NamespaceMode::Node.into(),
        |options: &mut NamespaceOption| options.ipc = NamespaceMode::Node.into(),
    ] {
        let mut pod = in_user(node.pod("host"));
        let linux = pod.linux.get_or_insert_default();
        let security = linux.security_context.get_or_insert_default();
        change(security.namespace_options.get_or_insert_default());
        let refused = node
            .cri
            .run_sandbox(&pod)
            .await
            .expect_err("the host's pid or ipc namespace");
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused:?}");
    }
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_of_yaml_get_ranges_of_their_own() -> Result<()> {
    let node = node().await?;
    let pod = |name: &str| {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\nspec:\n  hostUsers: false\n  volumes:\n  \
             - name: v\n    \
             emptyDir: {{}}\n  containers:\n  - name: main\n    image: {}\n    command: [sh, -c, 'echo x > /v/x; sleep \
             1000']\n    volumeMounts:\n    - name: v\n      mountPath: /v\n",
            pods::BUSYBOX
        )
    };
    let file = node.file("pods.yaml", format!("{}---\n{}", pod("one"), pod("two")))?;
    node.ok(&["apply", "-f", &file]).await?;
    let maps = e2e::eventually(std::time::Duration::from_secs(20), async || {
        let mut maps = Vec::new();
        for container in node.cri.containers(None).await? {
            let pid = node.cri.container_pid(&container.id).await?;
            ensure!(
                pid > 0 && Process::read(pid).is_some(),
                "{} does not run yet",
                container.id
            );
            ensure!(user_of(pid)? > 0x7000_0000 - 1);
            maps.push(map_of(pid)?);
        }
        ensure!(maps.len() == 2, "{} containers", maps.len());
        Ok(maps)
    })
    .await?;
    assert_ne!(maps[0], maps[1]);
    assert!(
        maps.iter().all(|map| map.starts_with("0 ") && map.ends_with(" 65536")),
        "{maps:?}"
    );
    node.ok(&["delete", "-f", &file]).await?;
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_directory_on_the_way_is_named() -> Result<()> {
    let node = node().await?;
    fs::set_permissions(node.state(), fs::Permissions::from_mode(0o700))?;
    let pod = in_user(node.pod("closed"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let id = node.cri.create(&sandbox, &pod, &container("c", "true")).await?;
    let refused = node.cri.start(&id).await.expect_err("its root cannot be reached");
    let dir = node.state().display().to_string();
    assert!(
        refused.message().contains(&dir) && refused.message().contains("o+x"),
        "{refused:?}"
    );
    node.finish().await
}

/// An image as a volume belongs to root of the namespace too.
#[tokio::test(flavor = "multi_thread")]
async fn an_image_volume_in_a_user_namespace() -> Result<()> {
    let node = node().await?;
    let pod = in_user(node.pod("image"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let mut config = container(
        "c",
        "stat -c %u /v /v/home/app; touch /v/x 2>/dev/null || echo read-only",
    );
    config.mounts = vec![Mount {
        container_path: "/v".into(),
        readonly: true,
        image: Some(ImageSpec {
            image: pods::BUSYBOX.into(),
            ..Default::default()
        }),
        uid_mappings: mapping(),
        gid_mappings: mapping(),
        ..Default::default()
    }];
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    let status = node.cri.exited(&id).await?;
    assert_eq!(pods::log_texts(&status.log_path)?, ["0", "1001", "read-only"]);
    node.finish().await
}

/// Without a user namespace nothing has changed: the maps are the node's.
#[tokio::test(flavor = "multi_thread")]
async fn mode_node_is_the_nodes() -> Result<()> {
    let mut node = Node::new(Options::default())?;
    node.serve().await?;
    let mut pod = pods::host_network(node.pod("node"));
    let linux = pod.linux.get_or_insert_default();
    let security = linux.security_context.get_or_insert_default();
    security.namespace_options.get_or_insert_default().userns_options = Some(UserNamespace {
        mode: NamespaceMode::Node.into(),
        ..Default::default()
    });
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
    assert_eq!(
        fs::read_to_string(format!("/proc/{pid}/uid_map"))?,
        fs::read_to_string("/proc/self/uid_map")?
    );
    node.finish().await
}
