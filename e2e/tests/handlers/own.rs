//! What a handler has of its own: a base for its containers, a CNI configuration for its pods.

use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::node::{Node, Options, shown};
use e2e::pods::{self, shell};
use e2e::v1::*;
use e2e::{cni, eventually, tools};
use serde_json::json;

use super::{run, security};

/// What a base says, and what a container sees of it.
const SEEN: &str = "exec 2>&1; echo $FROM_BASE $LANG; pwd; ulimit -n; ulimit -Hn; ulimit -c; \
                    cat /proc/sys/net/core/somaxconn /proc/sys/net/ipv4/ip_default_ttl; \
                    sed -n 's,^[^ ]* \\(/base\\) [^ ]* \\([^ ]*\\) .*,\\1 \\2,p' /proc/mounts; \
                    head -c 3 /dev/of-base | wc -c; sed -n 's,^NoNewPrivs:.,,p' /proc/self/status";

fn base(node: &Node, word: &str) -> Result<String> {
    // In the container's network namespace, before its root is.
    let hook = "echo 77 > /proc/sys/net/ipv4/ip_default_ttl";
    let limit = |name: &str, soft: u64, hard: u64| json!({ "type": name, "soft": soft, "hard": hard });
    let base = json!({
        "ociVersion": "1.0.2", "root": { "path": "/no", "readonly": true },
        "process": {
            "args": ["/no"], "cwd": "/base", "env": [format!("FROM_BASE={word}"), "LANG=base"],
            "user": { "uid": 5, "gid": 5 }, "noNewPrivileges": true,
            "rlimits": [limit("RLIMIT_NOFILE", 123, 456), limit("RLIMIT_CORE", 0, 0)] },
        "mounts": [{ "destination": "/base", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid"] }],
        "hooks": { "createContainer": [{ "path": "/bin/sh", "args": ["sh", "-c", hook] }] },
        "linux": {
            "sysctl": { "net.core.somaxconn": "99" },
            "devices": [{ "path": "/dev/of-base", "type": "c", "major": 1, "minor": 5 }],
            "resources": { "pids": { "limit": 321 } } },
    });
    node.file("base.json", base.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_base_decides_what_requests_leave_open() -> Result<()> {
    let mut node = Node::new(Options::default())?;
    fs::create_dir_all(node.path("etc"))?;
    let file = base(&node, "one")?;
    let mut config = "containers: {rlimits: {nofile: '9:10', core: 5}}\nhandlers:\n".to_owned();
    let handlers: Vec<_> = ["builtin", "runc"]
        .into_iter()
        .filter(|name| *name == "builtin" || tools::installed(name))
        .collect();
    for name in &handlers {
        config += &format!("  of-{name}: {{binary: {name}, baseSpec: {file}}}\n");
    }
    let path = node.file("etc/config.yaml", &config)?;
    node.serve().await?;
    node.busybox().await?;
    let ttl = "/proc/sys/net/ipv4/ip_default_ttl";
    let of_host = fs::read_to_string(ttl)?;
    let mut made = Vec::new();
    for name in &handlers {
        let pod = node.pod(name);
        let sandbox = run(&node, &pod, &format!("of-{name}")).await?;
        let seen = look(&node, &sandbox, &pod, shell("open", SEEN)).await.context(*name)?;
        let (mount, rest) = (&seen[7], [&seen[..7], &seen[8..]].concat());
        assert_eq!(
            rest,
            ["one base", "/base", "123", "456", "0", "99", "77", "3", "0"],
            "{name}"
        );
        ensure!(
            mount.starts_with("/base ") && mount.contains("nosuid"),
            "{name}: {mount}"
        );

        // The request wins where it speaks.
        let mut config = shell("decided", SEEN);
        config.working_dir = "/tmp".into();
        config.envs = vec![KeyValue {
            key: "LANG".into(),
            value: "own".into(),
        }];
        security(&mut config).no_new_privs = true;
        let seen = look(&node, &sandbox, &pod, config).await.context(*name)?;
        assert_eq!(
            (seen[0].as_str(), seen[1].as_str(), seen[9].as_str()),
            ("one own", "/tmp", "1"),
            "{name}"
        );
        let id = node.cri.launch(&sandbox, &pod, &shell("lives", "sleep 1000")).await?;
        let pid = node.cri.container_pid(&id).await?;
        let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        let of_pids = cgroups.lines().find_map(|line| line.split_once(":pids:"));
        let dir = match of_pids {
            Some((_, path)) => format!("/sys/fs/cgroup/pids{path}"),
            None => format!("/sys/fs/cgroup{}", cgroups.trim().trim_start_matches("0::")),
        };
        assert_eq!(fs::read_to_string(format!("{dir}/pids.max"))?.trim(), "321", "{name}");
        made.push((sandbox, pod));
    }
    assert_eq!(fs::read_to_string(ttl)?, of_host, "the node's own is untouched");

    // It counts as it was read: another one counts from a reload on, one that is none stays without effect.
    let (sandbox, pod) = &made[0];
    let word = async |name: &str| -> Result<String> {
        Ok(look(&node, sandbox, pod, shell(name, "echo $FROM_BASE"))
            .await?
            .concat())
    };
    node.file("base.json", "{}")?;
    let why = format!("{path}:3:3: handlers.of-builtin: baseSpec {file}: it is not an OCI configuration");
    for args in [&["reload"][..], &["config", "check"]] {
        let out = node.reconcile(args).await?;
        ensure!(!out.status.success() && shown(&out).contains(&why), "{}", shown(&out));
    }
    assert_eq!(word("stays").await?, "one");
    base(&node, "two")?;
    assert_eq!(word("unread").await?, "one");
    node.ok(&["reload"]).await?;
    assert_eq!(word("reread").await?, "two");
    fs::remove_file(&file)?;
    node.kill9().await?;
    let out = node.reconcile(&["serve"]).await?;
    let why = format!("handlers.of-builtin: baseSpec {file}: No such file");
    ensure!(
        out.status.code() == Some(1) && shown(&out).contains(&why),
        "{}",
        shown(&out)
    );
    base(&node, "three")?;
    node.serve().await?;
    assert_eq!(
        node.cri.containers(None).await?.len(),
        3 * handlers.len() + 3,
        "those that were made stay"
    );
    node.finish().await
}

/// What a container prints.
async fn look(node: &Node, sandbox: &str, pod: &PodSandboxConfig, config: ContainerConfig) -> Result<Vec<String>> {
    let id = node.cri.launch(sandbox, pod, &config).await?;
    let status = node.cri.exited(&id).await?;
    pods::log_texts(&status.log_path)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handlers_own_cni_configuration() -> Result<()> {
    let mut node = Node::new(Options {
        network: "auto",
        ..Options::default()
    })?;
    cni::install(&node)?;
    let list = cni::other(&node, "other")?;
    let without = fs::read_to_string(node.path("etc/config.yaml"))?;
    let dir = node.path("other.d");
    let table = format!("handlers:\n  far: {{binary: builtin, cniConfDir: {}}}\n", dir.display());
    node.file("etc/config.yaml", format!("{without}{table}"))?;
    node.serve().await?;
    node.busybox().await?;
    let near = run(&node, &node.pod("near"), "").await?;
    assert_eq!(node.cri.ip(&near).await?.to_string(), "192.0.2.9");
    let pod = node.pod("far");
    let early = run(&node, &pod, "far")
        .await
        .expect_err("its network is not configured");
    ensure!(
        early.message().contains("no CNI configuration") && early.message().contains("other.d"),
        "{early:?}"
    );

    fs::create_dir(&dir)?;
    node.file("other.d/1.conflist", &list)?;
    let far = eventually(Duration::from_secs(10), async || Ok(run(&node, &pod, "far").await?)).await?;
    let address = "198.51.100.9";
    assert_eq!(node.cri.ip(&far).await?.to_string(), address);
    let seen = look(&node, &far, &pod, shell("c", "ip -4 address show dev eth0"))
        .await?
        .join("\n");
    ensure!(seen.contains(&format!("inet {address}/32")), "{seen}");
    let file = node.path("journal-other");
    let journal = || fs::read_to_string(&file).unwrap_or_default();
    let calls = |verb: &str| {
        journal()
            .lines()
            .filter(|line| line.starts_with(verb) && line.contains(&far))
            .count()
    };
    assert_eq!((calls("ADD"), calls("DEL")), (1, 0), "{}", journal());

    // The handler goes, and the directory with it; repair and removal are still by what it was given.
    node.file("etc/config.yaml", &without)?;
    node.ok(&["reload"]).await?;
    fs::remove_dir_all(&dir)?;
    let netns = format!("rc-{}-{far}", node.instance());
    tools::check(Command::new("ip").args(["-n", &netns, "link", "delete", "eth0"]))?;
    node.reconcile(&["--once"]).await?;
    eventually(Duration::from_secs(10), async || {
        ensure!((calls("ADD"), calls("DEL")) == (2, 1), "{}", journal());
        Ok(())
    })
    .await?;
    assert_eq!(node.cri.ip(&far).await?.to_string(), address);
    assert_eq!(
        cni::journal(&node).len(),
        1,
        "the node's own plugin has nothing to do with it"
    );

    // A teardown that fails becomes a debt, which is paid by the same plugin.
    node.crash().await?;
    node.file("fail-DEL", "")?;
    eventually(Duration::from_secs(60), async || {
        Ok(node.cri.stop_sandbox(&far).await?)
    })
    .await?;
    node.cri.remove_sandbox(&far).await?;
    let before = calls("DEL");
    fs::remove_file(node.path("fail-DEL"))?;
    eventually(Duration::from_secs(90), async || {
        ensure!(calls("DEL") > before && cni::leases(&node) == 1, "not paid");
        Ok(())
    })
    .await?;
    node.finish().await
}
