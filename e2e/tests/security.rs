//! What a container may: devices, profiles, capabilities, images as volumes, by what the kernel lets it do.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use e2e::images::{Compression, Image, Layer};
use e2e::node::Node;
use e2e::pods::{self, shell};
use e2e::tools;
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
    assert!(
        refused.message().contains("selinux.level") && refused.message().contains("no-level"),
        "{refused:?}"
    );
    // A pod names labels for the nodes that have them: elsewhere they, and relabelling, change nothing.
    if !Path::new("/sys/fs/selinux/enforce").exists() {
        let mut config = shell("labelled", "cat /shared/file");
        security(&mut config).selinux_options = Some(SeLinuxOption {
            r#type: "container_t".into(),
            level: "s0:c1,c2".into(),
            ..Default::default()
        });
        fs::create_dir(node.path("shared"))?;
        node.file("shared/file", "as it was\n")?;
        config.mounts = vec![Mount {
            container_path: "/shared".into(),
            host_path: node.path("shared").display().to_string(),
            selinux_relabel: true,
            ..Default::default()
        }];
        assert_eq!(run(&node, &pod, &config).await?, ["as it was"]);
    }
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

/// Not even two processes of one container share one: each exec joins a new one, as the first process does.
#[tokio::test(flavor = "multi_thread")]
async fn every_container_has_a_session_keyring_of_its_own() -> Result<()> {
    let program = || tools::go_program("keyring", "./keyring");
    let Some(program) = tokio::task::spawn_blocking(program).await?? else {
        return Ok(());
    };
    let node = Node::start().await?;
    let mut image = Image::busybox(pods::BUSYBOX)?;
    let layer = Layer::new(Compression::Gzip);
    image.layers.push(layer.file("keyring", 0o755, fs::read(&program)?));
    node.import(image.oci()).await?;
    let pod = sandbox(&node, "keyrings", false).await?;
    let script = "/keyring id; /keyring add rc-e2e-key; /keyring has rc-e2e-key; while :; do sleep 0.1; done";
    let first = node.cri.launch(&pod.1, &pod.0, &shell("first", script)).await?;
    let log = node.cri.container(&first).await?.log_path;
    let said = e2e::eventually(std::time::Duration::from_secs(10), async || {
        let lines = pods::log_texts(&log)?;
        ensure!(lines.len() == 2, "{lines:?}");
        Ok(lines)
    })
    .await?;
    assert_eq!(said[1], "yes", "it is its own");
    let second = run(&node, &pod, &shell("second", "/keyring id; /keyring has rc-e2e-key")).await?;
    assert_eq!(second[1], "no", "another container's");
    let exec = node.cri.exec(&first, &["/keyring", "id"], 10).await?;
    let exec = String::from_utf8(exec.stdout)?.trim().to_owned();
    let host = String::from_utf8(tools::check(std::process::Command::new(&program).arg("id"))?.stdout)?;
    let all = [&said[0], &second[0], &exec, host.trim()];
    let ids: std::collections::BTreeSet<_> = all.iter().map(|line| line.split(' ').next()).collect();
    assert_eq!(ids.len(), all.len(), "{all:#?}");
    for of_container in &all[..3] {
        assert!(
            of_container.contains(" keyring;0;0;") && of_container.ends_with(";_ses"),
            "{of_container}"
        );
    }
    node.finish().await
}

/// A file of devices where runtimes look for them; it goes with its value.
struct CdiFile(std::path::PathBuf);

impl CdiFile {
    fn new(name: &str, text: &str) -> Result<CdiFile> {
        let path = Path::new("/var/run/cdi").join(format!("{name}.json"));
        fs::create_dir_all(path.parent().context("its directory")?)?;
        let hidden = path.with_extension("new");
        fs::write(&hidden, text)?;
        fs::rename(&hidden, &path)?;
        Ok(CdiFile(path))
    }
}

impl Drop for CdiFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn devices_by_name_bring_all_that_their_file_says() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    fs::create_dir(node.path("driver"))?;
    node.file("driver/version", "7\n")?;
    let kind = format!("rc-e2e-{}.test/gpu", std::process::id());
    // Each is told the container's state, on the node (the last: inside).
    let hook = |name: &str, path: &str| {
        let script = format!("cat > {path}/{name}");
        json!({ "hookName": name, "path": "/bin/sh", "args": ["sh", "-c", script] })
    };
    let dir = node.path("driver").display().to_string();
    let hooks = ["prestart", "createRuntime", "createContainer"].map(|name| hook(name, &dir));
    let hooks: Vec<_> = hooks.into_iter().chain([hook("startContainer", "/tmp")]).collect();
    let spec = json!({ "cdiVersion": "0.6.0", "kind": kind,
        "containerEdits": { "env": ["GPU_DRIVER=7"], "hooks": hooks },
        "devices": [
            { "name": "0", "containerEdits": {
                "env": ["GPU=0"], "additionalGids": [4242],
                "deviceNodes": [{ "path": "/dev/rc-gpu0", "hostPath": "/dev/full", "permissions": "rw" }],
                "mounts": [{ "hostPath": node.path("driver"), "containerPath": "/opt/driver",
                    "options": ["ro", "rbind", "nosuid"] }] } },
            { "name": "1", "containerEdits": { "env": ["GPU=1"] } } ] });
    let file = CdiFile::new(&format!("rc-e2e-{}", std::process::id()), &spec.to_string())?;
    let pod = sandbox(&node, "cdi", false).await?;
    let device = |name: &str| CdiDevice {
        name: format!("{kind}={name}"),
    };
    let script = "echo $GPU $GPU_DRIVER; stat -c '%t:%T %a' /dev/rc-gpu0; head -c 4 /dev/rc-gpu0 | wc -c; \
                  echo x > /dev/rc-gpu0; cat /opt/driver/version; touch /opt/driver/x 2>/dev/null || echo read-only; \
                  id -G | tr ' ' '\\n' | grep 4242; grep -c ociVersion /tmp/startContainer";
    let mut config = shell("given", script);
    config.cdi_devices = vec![device("0")];
    let lines = run(&node, &pod, &config).await?;
    let mode = fs::metadata("/dev/full")?.permissions();
    let mode = std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777;
    let node_line = format!("1:7 {mode:o}");
    let full = lines.iter().any(|line| line.contains("No space left on device"));
    let lines: Vec<_> = lines.iter().filter(|line| !line.contains("No space")).collect();
    assert_eq!(lines, ["0 7", &node_line, "4", "7", "read-only", "4242", "1"]);
    assert!(full, "it is the device itself");
    let container = node.cri.containers(None).await?.pop().context("the container")?;
    for name in ["prestart", "createRuntime", "createContainer"] {
        let state = node.path("driver").join(name);
        let state = fs::read_to_string(&state).with_context(|| format!("the hook {name} did not run"))?;
        let state: serde_json::Value = serde_json::from_str(&state).with_context(|| state.clone())?;
        assert_eq!(state["id"], container.id.as_str(), "{name}: {state}");
    }

    // The annotation of older clients; and the common part of the file, though the device adds nothing of it.
    let mut config = shell("annotated", "echo $GPU $GPU_DRIVER");
    config.annotations = [("cdi.k8s.io/plugin_x".to_owned(), format!("{kind}=1"))].into();
    assert_eq!(run(&node, &pod, &config).await?, ["1 7"]);

    let mut config = shell("unknown", "true");
    config.cdi_devices = vec![device("0"), device("2")];
    let before = node.cri.containers(None).await?.len();
    let refused = node
        .cri
        .create(&pod.1, &pod.0, &config)
        .await
        .expect_err("no such device");
    let name = device("2").name;
    assert!(
        refused.message().contains(&format!("cdiDevices[{name}]")) && refused.message().contains("no CDI device"),
        "{refused:?}"
    );
    assert_eq!(node.cri.containers(None).await?.len(), before, "nothing is left");
    // Its name is free, and a device that comes later is found without a restart.
    let mut grown = spec.clone();
    let mut second = spec["devices"][1].clone();
    second["name"] = "2".into();
    grown["devices"].as_array_mut().context("a list")?.push(second);
    let renewed = CdiFile::new(&format!("rc-e2e-{}", std::process::id()), &grown.to_string())?;
    node.cri.launch(&pod.1, &pod.0, &config).await?;
    drop((file, renewed));
    node.finish().await
}
