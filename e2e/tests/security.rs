//! What a container may: devices, profiles, capabilities, images as volumes, by what the kernel lets it do.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use e2e::images::{Compression, Image, Layer};
use e2e::node::Node;
use e2e::pods::{self, shell};
use e2e::v1::*;
use serde_json::json;
use tonic::Code;

fn security(config: &mut ContainerConfig) -> &mut LinuxContainerSecurityContext {
    config
        .linux
        .get_or_insert_default()
        .security_context
        .get_or_insert_default()
}

async fn sandbox(node: &Node, name: &str, privileged: bool) -> Result<(PodSandboxConfig, String)> {
    let mut pod = pods::host_network(node.pod(name));
    let linux = pod.linux.get_or_insert_default();
    linux.security_context.get_or_insert_default().privileged = privileged;
    let id = node.cri.run_sandbox(&pod).await?;
    Ok((pod, id))
}

/// Runs a container to its end: what it printed.
async fn run(node: &Node, pod: &(PodSandboxConfig, String), config: &ContainerConfig) -> Result<Vec<String>> {
    let id = node.cri.launch(&pod.1, &pod.0, config).await?;
    let status = node.cri.exited(&id).await?;
    let lines = pods::log_texts(&status.log_path)?;
    ensure!(status.exit_code == 0, "exit {}: {lines:#?}", status.exit_code);
    Ok(lines)
}

#[tokio::test(flavor = "multi_thread")]
async fn only_devices_that_were_given_can_be_opened() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = sandbox(&node, "devices", true).await?;
    // 1:11 is the kernel's log, which nobody was given.
    let script = "head -c 4 /dev/given/zero | wc -c; echo x > /dev/given/zero || echo read-only; \
                  mknod /tmp/kmsg c 1 11 && head -c 1 /tmp/kmsg >/dev/null || echo kmsg refused; \
                  mknod /tmp/null c 1 3 && echo x > /tmp/null && echo null allowed";
    let mut config = shell("given", script);
    config.devices = vec![Device {
        container_path: "/dev/given/zero".into(),
        host_path: "/dev/zero".into(),
        permissions: "r".into(),
    }];
    let lines = run(&node, &pod, &config).await?;
    let lines: Vec<_> = lines.iter().filter(|line| !line.contains(": ")).collect();
    assert_eq!(
        lines,
        ["4", "kmsg refused", "null allowed"],
        "zero is of those that all may write"
    );

    let mut config = shell(
        "all",
        "mknod /tmp/full c 1 7 && head -c 4 /tmp/full | wc -c; ls /dev | wc -l; ls /dev/kmsg; true",
    );
    security(&mut config).privileged = true;
    let lines = run(&node, &pod, &config).await?;
    assert_eq!(lines[0], "4");
    if Path::new("/dev/kmsg").exists() {
        assert_eq!(lines[2], "/dev/kmsg", "a privileged container has the node's devices");
    }
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn privileged_and_ambient_capabilities() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = sandbox(&node, "capabilities", true).await?;
    let field = |lines: &[String], key: &str| -> Result<String> {
        let line = lines
            .iter()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix(":\t"));
        Ok(line.context("no such field")?.to_owned())
    };
    let own = fs::read_to_string("/proc/self/status")?;
    let own: Vec<String> = own.lines().map(str::to_owned).collect();
    let mut config = shell(
        "privileged",
        "cat /proc/self/status; touch /sys/fs/cgroup/x 2>&1; grep ' /sys ' /proc/self/mounts",
    );
    security(&mut config).privileged = true;
    security(&mut config).seccomp = Some(SecurityProfile::default());
    let lines = run(&node, &pod, &config).await?;
    assert_eq!(
        field(&lines, "CapEff")?,
        field(&own, "CapPrm")?,
        "all that the daemon has"
    );
    assert_eq!(field(&lines, "Seccomp")?, "0", "whatever profile is asked for");
    let sys = lines.last().context("the mount of /sys")?;
    assert!(sys.contains(" rw,"), "{sys}");

    let mut config = shell("ambient", "cat /proc/self/status");
    security(&mut config).run_as_user = Some(Int64Value { value: 1001 });
    security(&mut config).capabilities = Some(Capability {
        add_ambient_capabilities: vec!["NET_BIND_SERVICE".into()],
        ..Default::default()
    });
    let lines = run(&node, &pod, &config).await?;
    for key in ["CapAmb", "CapInh", "CapEff", "CapPrm"] {
        let set = u64::from_str_radix(&field(&lines, key)?, 16)?;
        assert_eq!(set & 1 << 10, 1 << 10, "{key}: a user who is not root has it");
    }
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn profiles_of_the_node_are_used_or_the_mistake_is_named() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = sandbox(&node, "profiles", false).await?;
    let localhost = |path: &str| {
        Some(SecurityProfile {
            profile_type: 2,
            localhost_ref: path.into(),
        })
    };
    let profile = json!({ "defaultAction": "SCMP_ACT_ALLOW", "syscalls": [
        { "names": ["chmod", "fchmod", "fchmodat", "fchmodat2"], "action": "SCMP_ACT_ERRNO" }] });
    let good = node.file("profile.json", profile.to_string())?;
    let broken = node.file("broken.json", "{ \"defaultAction\": 7 }")?;
    let mut config = shell(
        "blocked",
        "touch /x; chmod 700 /x || echo blocked; grep Seccomp: /proc/self/status",
    );
    security(&mut config).seccomp = localhost(&good);
    let lines = run(&node, &pod, &config).await?;
    assert_eq!(lines[lines.len() - 2..], ["blocked", "Seccomp:\t2"]);
    for path in ["/no/such/profile.json", &broken] {
        let mut config = shell("refused", "true");
        security(&mut config).seccomp = localhost(path);
        let refused = node.cri.create(&pod.1, &pod.0, &config).await.expect_err("no profile");
        assert!(refused.message().contains("seccomp"), "{refused:?}");
    }
    let mut config = shell("apparmor", "true");
    security(&mut config).apparmor = localhost("no-such-profile");
    let refused = node
        .cri
        .create(&pod.1, &pod.0, &config)
        .await
        .expect_err("no AppArmor, or no such profile");
    assert!(
        refused.message().contains("apparmor") && refused.message().contains("AppArmor is off")
            || refused.message().contains("no-such-profile"),
        "{refused:?}"
    );
    let mut config = shell("selinux", "true");
    security(&mut config).selinux_options = Some(SeLinuxOption {
        level: "no-level".into(),
        ..Default::default()
    });
    let refused = node
        .cri
        .create(&pod.1, &pod.0, &config)
        .await
        .expect_err("no such level");
    assert!(refused.message().contains("no-level"), "{refused:?}");
    assert!(
        node.cri
            .containers(None)
            .await?
            .iter()
            .all(|container| container.state != 0),
        "nothing is left"
    );
    node.finish().await
}

/// In the guest of `e2e/vm`; elsewhere there may be no AppArmor.
#[tokio::test(flavor = "multi_thread")]
async fn the_default_apparmor_profile_where_there_is_apparmor() -> Result<()> {
    let on = fs::read_to_string("/sys/module/apparmor/parameters/enabled").unwrap_or_default();
    if !on.starts_with('Y') {
        println!("AppArmor is off here");
        return Ok(());
    }
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = sandbox(&node, "apparmor", false).await?;
    let script = "cat /proc/self/attr/current; mount -t tmpfs x /tmp 2>/dev/null || echo no mount; \
                  (echo 1 > /proc/sys/kernel/panic) 2>/dev/null || echo no setting; echo x > /file && cat /file";
    for profile in [None, Some(SecurityProfile::default())] {
        let name = format!("c{}", profile.is_some());
        let mut config = shell(&name, script);
        security(&mut config).apparmor = profile;
        let capabilities = Capability {
            add_capabilities: vec!["SYS_ADMIN".into()],
            ..Default::default()
        };
        security(&mut config).capabilities = Some(capabilities);
        let lines = run(&node, &pod, &config).await?;
        assert_eq!(lines, ["reconcile-default (enforce)", "no mount", "no setting", "x"]);
    }
    let mut config = shell("unconfined", "cat /proc/self/attr/current");
    security(&mut config).apparmor = Some(SecurityProfile {
        profile_type: 1,
        ..Default::default()
    });
    assert_eq!(run(&node, &pod, &config).await?, ["unconfined"]);
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn images_as_volumes() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let name = "localhost/data:1";
    let program = fs::read("/bin/busybox")?;
    let layers = vec![
        Layer::new(Compression::Gzip)
            .dir("models", 0o755)
            .file("models/a", 0o644, "a\n")
            .file("models/gone", 0o644, "x"),
        Layer::new(Compression::Plain)
            .remove("models/gone")
            .file("echo", 0o755, program)
            .symlink("out", "/etc"),
    ];
    node.import(Image::new(name, layers, json!({})).oci()).await?;
    let mount = |sub_path: &str| Mount {
        container_path: "/mnt/volume".into(),
        readonly: true,
        image: Some(ImageSpec {
            image: name.into(),
            ..Default::default()
        }),
        image_sub_path: sub_path.into(),
        ..Default::default()
    };
    let pod = sandbox(&node, "images", false).await?;
    let mut config = shell(
        "whole",
        "cd /mnt/volume; ls models; touch models/new 2>/dev/null || echo read-only; ./echo runs",
    );
    config.mounts = vec![mount("")];
    assert_eq!(run(&node, &pod, &config).await?, ["a", "read-only", "runs"]);
    let container = node.cri.containers(None).await?.pop().context("the container")?;
    let told = node
        .cri
        .container(&container.id)
        .await?
        .mounts
        .pop()
        .and_then(|mount| mount.image);
    let id = node.cri.image(name).await?.context("the image")?.id;
    assert_eq!(told.context("an image in the mount")?.image_ref, id);

    node.cri.remove_image(name).await?;
    let mut again = shell("sub", "ls /mnt/volume");
    again.mounts = vec![mount("models")];
    let refused = node
        .cri
        .create(&pod.1, &pod.0, &again)
        .await
        .expect_err("the image is not here");
    assert!(refused.message().contains(name), "{refused:?}");
    node.import(
        Image::new(
            name,
            vec![
                Layer::new(Compression::Plain)
                    .dir("models", 0o755)
                    .file("models/b", 0o644, ""),
            ],
            json!({}),
        )
        .oci(),
    )
    .await?;
    assert_eq!(
        run(&node, &pod, &again).await?,
        ["b"],
        "the name's new image; the old one is still mounted beside it"
    );

    for sub_path in ["models/b", "none", "out"] {
        let mut config = shell("refused", "true");
        config.mounts = vec![mount(sub_path)];
        let refused = node
            .cri
            .create(&pod.1, &pod.0, &config)
            .await
            .expect_err("no directory of the image");
        assert!(refused.message().contains("ImageVolumeMountFailed"), "{refused:?}");
    }
    let mut config = shell("writable", "true");
    config.mounts = vec![Mount {
        readonly: false,
        ..mount("")
    }];
    let refused = node
        .cri
        .create(&pod.1, &pod.0, &config)
        .await
        .expect_err("an image is read-only");
    assert_eq!(refused.code(), Code::InvalidArgument);

    let volumes = node.state().join("pods").join(&pod.1).join("images");
    assert!(fs::read_dir(&volumes)?.count() >= 2);
    node.cri.stop_sandbox(&pod.1).await?;
    assert!(!volumes.exists(), "they go with the sandbox");
    node.finish().await
}

/// UpdateRuntimeConfig gives the bridge its network, and a CNI template its numbers.
#[tokio::test(flavor = "multi_thread")]
async fn pod_cidrs_reach_the_bridge_and_the_template() -> Result<()> {
    let node = Node::start().await?;
    let update = async |cidr: &str| {
        let config = e2e::v1::RuntimeConfig {
            network_config: Some(NetworkConfig { pod_cidr: cidr.into() }),
        };
        let ask = UpdateRuntimeConfigRequest {
            runtime_config: Some(config),
        };
        node.cri.runtime.clone().update_runtime_config(ask).await
    };
    update("10.213.7.0/24").await?;
    let ip = e2e::eventually(std::time::Duration::from_secs(10), async || {
        let sandbox = node.cri.run_sandbox(&node.pod("cidr")).await?;
        let ip = node.cri.ip(&sandbox).await?;
        ensure!(ip.to_string().starts_with("10.213.7."), "{ip}");
        Ok(ip)
    })
    .await?;
    assert!(ip.is_ipv4());
    node.finish().await?;

    let mut node = Node::new(e2e::node::Options {
        network: "cni",
        ..Default::default()
    })?;
    let template = node.file(
        "template",
        r#"{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"ptp","ipam":{"subnet":"{{.PodCIDR}}"}}]}"#,
    )?;
    fs::create_dir_all(node.path("etc"))?;
    let net = node.path("net.d");
    fs::create_dir_all(&net)?;
    let config = format!("network:\n  cniConfDir: {}\n  cniTemplate: {template}\n", net.display());
    fs::write(node.path("etc/config.yaml"), config)?;
    node.serve().await?;
    let config = e2e::v1::RuntimeConfig {
        network_config: Some(NetworkConfig {
            pod_cidr: "10.9.0.0/24".into(),
        }),
    };
    let ask = UpdateRuntimeConfigRequest {
        runtime_config: Some(config),
    };
    node.cri.runtime.clone().update_runtime_config(ask).await?;
    e2e::eventually(std::time::Duration::from_secs(10), async || {
        let made = fs::read_to_string(net.join("10-reconcile.conflist"))?;
        ensure!(made.contains(r#""subnet":"10.9.0.0/24""#), "{made}");
        Ok(())
    })
    .await?;
    node.finish().await
}
