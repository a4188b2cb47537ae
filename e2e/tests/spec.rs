//! What the request and the image say, as the process inside sees it: identity, rights, mounts, environment.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result};
use e2e::node::Node;
use e2e::pods::{self, shell};
use e2e::v1::*;
use tonic::Code;

/// Runs `script` in a container that `change` prepared; answers what it printed and its exit code.
async fn run(
    node: &Node,
    name: &str,
    script: &str,
    change: impl Fn(&mut ContainerConfig),
) -> Result<(Vec<String>, i32)> {
    let pod = pods::host_network(node.pod(name));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let mut config = shell("c", script);
    change(&mut config);
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    let status = node.cri.exited(&id).await?;
    Ok((pods::log_texts(&status.log_path)?, status.exit_code))
}

fn security(config: &mut ContainerConfig) -> &mut LinuxContainerSecurityContext {
    config
        .linux
        .get_or_insert_default()
        .security_context
        .get_or_insert_default()
}

/// `Name: value` lines of /proc/self/status.
fn fields(lines: &[String]) -> BTreeMap<&str, &str> {
    lines
        .iter()
        .filter_map(|line| line.split_once(':'))
        .map(|(key, value)| (key, value.trim()))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn environment_arguments_and_directory() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let (lines, _) = run(&node, "env", "env; pwd", |config| {
        config.envs = vec![
            KeyValue {
                key: "A".into(),
                value: "first".into(),
            },
            KeyValue {
                key: "A".into(),
                value: "last".into(),
            },
            KeyValue {
                key: "FROM_IMAGE".into(),
                value: "overridden".into(),
            },
        ];
        config.working_dir = "/made/when/missing".into();
    })
    .await?;
    for line in ["A=last", "FROM_IMAGE=overridden", "HOME=/root", "/made/when/missing"] {
        assert!(lines.iter().any(|found| found == line), "{line} in {lines:#?}");
    }
    assert!(
        lines
            .iter()
            .any(|line| line.starts_with("PATH=") && line.contains("/bin")),
        "{lines:#?}"
    );
    let (lines, _) = run(&node, "args", "", |config| {
        config.command = vec!["/bin/echo".into()];
        config.args = vec!["two words".into(), "$HOME".into()];
    })
    .await?;
    assert_eq!(lines, ["two words $HOME"], "no shell in between");
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn users_and_groups() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let id = "id -u; id -g; id -G";
    let by_name = |config: &mut ContainerConfig| security(config).run_as_username = "app".into();
    assert_eq!(run(&node, "name", id, by_name).await?.0, ["1001", "1001", "1001 2002"]);
    let strict = |config: &mut ContainerConfig| {
        security(config).run_as_user = Some(Int64Value { value: 1001 });
        security(config).supplemental_groups = vec![3003];
        security(config).supplemental_groups_policy = SupplementalGroupsPolicy::Strict.into();
    };
    assert_eq!(run(&node, "strict", id, strict).await?.0, ["1001", "1001", "1001 3003"]);
    let both = |config: &mut ContainerConfig| {
        security(config).run_as_user = Some(Int64Value { value: 7 });
        security(config).run_as_group = Some(Int64Value { value: 8 });
    };
    assert_eq!(run(&node, "both", id, both).await?.0, ["7", "8", "8"]);

    let pod = pods::host_network(node.pod("wrong"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let mut group_only = shell("c", "id");
    security(&mut group_only).run_as_group = Some(Int64Value { value: 8 });
    let refused = node
        .cri
        .create(&sandbox, &pod, &group_only)
        .await
        .expect_err("a group without a user");
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(refused.message().contains("run_as_group"), "{refused:?}");
    let mut nobody = shell("c", "id");
    security(&mut nobody).run_as_username = "stranger".into();
    let refused = node
        .cri
        .create(&sandbox, &pod, &nobody)
        .await
        .expect_err("no such user in the image");
    assert!(refused.message().contains("stranger"), "{refused:?}");
    assert!(
        node.cri
            .containers(None)
            .await?
            .iter()
            .all(|container| container.pod_sandbox_id != sandbox)
    );
    node.finish().await
}

const DEFAULT_CAPABILITIES: u64 = 0x0000_0000_a804_25fb;

#[tokio::test(flavor = "multi_thread")]
async fn capabilities_seccomp_and_no_new_privileges() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let status = "cat /proc/self/status";
    let hex = |fields: &BTreeMap<&str, &str>, key: &str| u64::from_str_radix(fields.get(key).unwrap_or(&"z"), 16);
    let (lines, _) = run(&node, "plain", status, |_| {}).await?;
    let found = fields(&lines);
    for key in ["CapEff", "CapPrm", "CapBnd"] {
        assert_eq!(hex(&found, key)?, DEFAULT_CAPABILITIES, "{key}");
    }
    assert_eq!((hex(&found, "CapInh")?, hex(&found, "CapAmb")?), (0, 0));
    assert_eq!(
        (found["Seccomp"], found["NoNewPrivs"]),
        ("0", "0"),
        "absent means unconfined"
    );

    let (lines, _) = run(&node, "tight", status, |config| {
        let security = security(config);
        let drop = vec!["ALL".into()];
        security.capabilities = Some(Capability {
            add_capabilities: vec!["NET_ADMIN".into()],
            drop_capabilities: drop,
            ..Default::default()
        });
        security.no_new_privs = true;
        security.seccomp = Some(SecurityProfile::default());
    })
    .await?;
    let found = fields(&lines);
    assert_eq!(hex(&found, "CapEff")?, 1 << 12, "only NET_ADMIN");
    assert_eq!((found["Seccomp"], found["NoNewPrivs"]), ("2", "1"));

    let profile = |config: &mut ContainerConfig| security(config).seccomp = Some(SecurityProfile::default());
    let (lines, code) = run(&node, "denied", "unshare -U true", profile).await?;
    assert_ne!(code, 0, "RuntimeDefault denies a new user namespace: {lines:?}");
    let (lines, code) = run(&node, "allowed", "unshare -U true", |_| {}).await?;
    assert_eq!(code, 0, "unconfined allows it: {lines:?}");
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn mounts_masks_and_a_read_only_root() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let (rw, ro) = (node.path("rw"), node.path("ro"));
    fs::create_dir_all(&rw)?;
    fs::create_dir_all(&ro)?;
    fs::write(ro.join("kept"), "kept\n")?;
    let mounts = |config: &mut ContainerConfig| {
        let mount = |path: &std::path::Path, inside: &str, readonly| Mount {
            host_path: path.display().to_string(),
            container_path: inside.into(),
            readonly,
            ..Default::default()
        };
        config.mounts = vec![mount(&rw, "/rw", false), mount(&ro, "/ro", true)];
        let security = security(config);
        security.readonly_rootfs = true;
        security.masked_paths = vec!["/proc/interrupts".into(), "/sys/firmware".into()];
        security.readonly_paths = vec!["/proc/sys".into()];
    };
    let script = "echo x > /rw/written && echo rw-ok; echo x > /ro/written || echo ro-refused; cat /ro/kept; \
                  echo x > /root-written || echo root-refused; ls /sys/firmware | wc -l; \
                  echo 1 > /proc/sys/kernel/panic || echo sys-refused; wc -c < /proc/interrupts; \
                  echo x > /dev/null && echo null-ok";
    let (lines, _) = run(&node, "mounts", script, mounts).await?;
    let texts: Vec<_> = lines
        .iter()
        .filter(|line| !line.starts_with("/bin/sh") && !line.starts_with("sh:"))
        .collect();
    assert_eq!(
        texts,
        [
            "rw-ok",
            "ro-refused",
            "kept",
            "root-refused",
            "0",
            "sys-refused",
            "0",
            "null-ok"
        ]
    );
    assert_eq!(fs::read_to_string(rw.join("written"))?, "x\n");
    assert!(!ro.join("written").exists());
    let container = node.cri.containers(None).await?.pop().context("the container")?;
    let seen = node.cri.container(&container.id).await?.mounts;
    assert!(
        seen.iter().any(|mount| mount.container_path == "/ro" && mount.readonly),
        "{seen:?}"
    );
    node.finish().await
}

/// An image's symlink must not lead a mount, a working directory or a user look-up out of its root.
#[tokio::test(flavor = "multi_thread")]
async fn an_images_symlinks_lead_nowhere_outside() -> Result<()> {
    let node = Node::start().await?;
    let outside = node.path("outside");
    fs::create_dir_all(&outside)?;
    let mut image = e2e::images::Image::busybox(pods::BUSYBOX)?;
    let mut trap = e2e::images::Layer::new(e2e::images::Compression::Plain)
        .symlink("trap", &outside.display().to_string())
        .symlink("dangling", &node.path("nowhere").display().to_string())
        .symlink("etc/group", "/proc/1/environ");
    // Inside the image the link's target is there too: that is where it leads.
    let inside: Vec<_> = outside.ancestors().filter(|dir| dir.parent().is_some()).collect();
    for dir in inside.iter().rev() {
        trap = trap.dir(dir.display().to_string().trim_start_matches('/'), 0o755);
    }
    image.layers.push(trap);
    node.import(image.oci()).await?;
    let shared = node.path("shared");
    fs::create_dir_all(&shared)?;
    let mount = |inside: &str| Mount {
        host_path: shared.display().to_string(),
        container_path: inside.into(),
        ..Default::default()
    };
    let (_, code) = run(&node, "trap", "echo inside > /trap/deep/here", |config| {
        config.working_dir = "/trap/cwd".into();
        config.mounts = vec![mount("/trap/deep")];
    })
    .await?;
    assert_eq!(code, 0);
    assert_eq!(fs::read_to_string(shared.join("here"))?, "inside\n");
    let dangling = run(&node, "dangling", "true", |config| {
        config.working_dir = "/dangling/cwd".into();
        config.mounts = vec![mount("/dangling/deep")];
    });
    println!(
        "a mount below a dangling link: {:?}",
        dangling.await.map(|(_, code)| code)
    );
    assert_eq!(
        fs::read_dir(&outside)?.count(),
        0,
        "made on the host through a symlink of the image"
    );
    assert!(
        !node.path("nowhere").exists(),
        "made on the host through a dangling symlink of the image"
    );
    node.finish().await
}
