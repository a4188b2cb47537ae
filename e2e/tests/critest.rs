//! The CRI's own conformance suite, critest, against our daemon.
//!
//! The images it asks for are built here, pushed to a registry on loopback and reached through `hosts.toml` mirrors, so
//! that their names stay the suite's. What must pass is recorded in `conformance/critest.pass`: a spec that is listed
//! there may neither fail nor be skipped. A spec that passes without being listed is told, to be added.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::hub::Hub;
use e2e::images::{Compression, Image, Layer};
use e2e::node::{Node, Options};
use e2e::tools;
use serde_json::{Value, json};

const STAGING: &str = "k8s-staging-cri-tools";
const RECORD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/conformance/critest.pass");

/// Needs an image whose bytes only the upstream registry has.
const IMPOSSIBLE: &str = "with digest should be pulled";

/// Busybox as the suite wants it: programs are files, and its shell executes `/bin/ls` instead of running its own.
fn busybox(passwd: &str, group: &str) -> Result<Layer> {
    let program = fs::read("/bin/busybox").context("busybox: install the Debian package busybox-static")?;
    let names = tools::check(Command::new("/bin/busybox").arg("--list"))?.stdout;
    let pgrep = "#!/bin/sh\nfound=1\nfor dir in /proc/[0-9]*; do read name 2>/dev/null < $dir/comm || continue\n\
                 case \"$name\" in *\"$1\"*) echo ${dir#/proc/}; found=0;; esac\ndone\nexit $found\n";
    let mut layer = Layer::new(Compression::Gzip);
    for dir in [
        "bin", "etc", "dev", "proc", "sys", "root", "var", "var/run", "usr", "usr/bin", "usr/sbin", "home", "mnt",
    ] {
        layer = layer.dir(dir, 0o755);
    }
    layer = layer
        .dir("tmp", 0o1777)
        .file("bin/ls", 0o755, &program)
        .file("bin/busybox", 0o755, without_ls(program)?)
        .file("bin/ipcs", 0o755, "#!/bin/sh\ncat /proc/sysvipc/shm\n")
        .file("bin/pgrep", 0o755, pgrep)
        .file(
            "etc/passwd",
            0o644,
            format!(
                "root:x:0:0:root:/root:/bin/sh\nwww-data:x:33:33:www-data:/var/www:/bin/false\n\
                 nobody:x:65534:65534:nobody:/home:/bin/false\n{passwd}"
            ),
        )
        .file(
            "etc/group",
            0o644,
            format!("root:x:0:\nwww-data:x:33:\nnogroup:x:65534:\n{group}"),
        );
    for name in String::from_utf8(names)?.lines() {
        if !["busybox", "ls", "ipcs", "pgrep"].contains(&name) {
            layer = layer.hardlink(&format!("bin/{name}"), "bin/busybox");
        }
    }
    Ok(layer)
}

/// Debian's busybox runs applets inside its shell, so that a masked `/bin/ls` would still work: the applet is renamed.
fn without_ls(mut program: Vec<u8>) -> Result<Vec<u8>> {
    let at = program
        .windows(10)
        .position(|window| window == b"\0ls\0lsmod\0")
        .context("busybox's table of applets")?;
    program[at + 2] = b'r';
    Ok(program)
}

/// Every image of the suite, under its own path on the registry.
fn push_images(hub: &Hub, workload: &Path) -> Result<()> {
    let program = fs::read(workload)?;
    let base = busybox("", "")?;
    let image = |layers: Vec<Layer>, config: Value| {
        let mut all = json!({ "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"] });
        for (key, value) in config.as_object().into_iter().flatten() {
            all[key] = value.clone();
        }
        Image::new("localhost/suite:1", layers, all)
    };
    let with = |path: &str, mode: u32, data: &[u8]| Layer::new(Compression::Gzip).file(path, mode, data);
    let server = |file: &str, port: &str, word: &str| {
        image(
            vec![base.clone(), with(file, 0o755, &program)],
            json!({ "Entrypoint": [format!("/{file}"), "master process", port, word] }),
        )
    };
    let put = |image: &Image, names: &[String], further: &[&str]| -> Result<()> {
        names
            .iter()
            .try_for_each(|name| hub.push(image, name, further).map(drop))
    };
    let shell = || json!({ "Cmd": ["sh"] });
    put(
        &image(vec![base.clone()], shell()),
        &["e2e-test-images/busybox:1.29-2".into()],
        &[],
    )?;
    put(
        &server("usr/sbin/nginx", "80", "nginx"),
        &["e2e-test-images/nginx:1.14-2".into()],
        &["--format", "v2s2"],
    )?;
    let host = format!(
        "{STAGING}/hostnet-nginx-{}:latest",
        if cfg!(target_arch = "aarch64") {
            "arm64"
        } else {
            "amd64"
        }
    );
    put(&server("usr/sbin/nginx", "12003", "nginx"), &[host], &[])?;
    put(
        &server("usr/sbin/httpd2", "80", "httpd"),
        &["e2e-test-images/httpd:2.4.39-4".into()],
        &[],
    )?;
    let setuid = image(
        vec![base.clone(), with("usr/bin/euid", 0o4755, &program)],
        json!({ "Entrypoint": ["/usr/bin/euid", "euid"] }),
    );
    put(&setuid, &["e2e-test-images/nonewprivs:1.3".into()], &[])?;
    let pause = image(
        vec![with("pause", 0o755, &program)],
        json!({ "Entrypoint": ["/pause", "pause"] }),
    );
    put(&pause, &["pause:3.9".into()], &[])?;
    for (user, name) in [
        ("1002", "user-uid"),
        ("www-data", "user-username"),
        ("1003:1004", "user-uid-group"),
        ("www-data:1004", "user-username-group"),
    ] {
        let config = json!({ "Cmd": ["sh"], "User": user });
        put(
            &image(vec![base.clone()], config),
            &[format!("{STAGING}/test-image-{name}:latest")],
            &[],
        )?;
    }
    let member = busybox(
        "default-user:x:1000:1000::/home:/bin/sh\n",
        "default-user:x:1000:\ngroup-defined-in-image:x:50000:default-user\n",
    )?;
    let member = image(vec![member], json!({ "Cmd": ["sh"], "User": "1000" }));
    put(&member, &[format!("{STAGING}/test-image-predefined-group:latest")], &[])?;
    for name in [
        "latest:latest",
        "tag:test",
        "tag:all",
        "1:latest",
        "2:latest",
        "3:latest",
    ] {
        let marked = image(vec![base.clone(), with("etc/which", 0o644, name.as_bytes())], shell());
        put(&marked, &[format!("{STAGING}/test-image-{name}")], &[])?;
    }
    let tags = ["1", "2", "3"].map(|tag| format!("{STAGING}/test-image-tags:{tag}"));
    put(
        &image(vec![base, with("etc/which", 0o644, b"tags")], shell()),
        &tags,
        &[],
    )
}

/// A node whose registries are all this one.
async fn node(hub: &Hub) -> Result<Node> {
    let mut node = Node::new(Options::default())?;
    for name in ["registry.k8s.io", "k8s.gcr.io", "gcr.io"] {
        let dir = node.path("certs.d").join(name);
        fs::create_dir_all(&dir)?;
        let text = format!(
            "[host.\"http://{}\"]\ncapabilities = [\"pull\", \"resolve\"]\n",
            hub.host()
        );
        fs::write(dir.join("hosts.toml"), text)?;
    }
    fs::create_dir_all(node.path("etc"))?;
    let config = format!("registry:\n  certsDirs: [{}]\n", node.path("certs.d").display());
    fs::write(node.path("etc").join("config.yaml"), config)?;
    node.serve().await?;
    Ok(node)
}

/// The suite's verdicts, `state name`, one a spec.
fn verdicts(report: &Path) -> Result<Vec<(String, String)>> {
    let suites: Vec<Value> = serde_json::from_slice(&fs::read(report)?)?;
    let specs = suites
        .iter()
        .flat_map(|suite| suite["SpecReports"].as_array().into_iter().flatten());
    let told = |spec: &Value| {
        let parts = spec["ContainerHierarchyTexts"].as_array().into_iter().flatten();
        let words = parts.chain([&spec["LeafNodeText"]]).filter_map(Value::as_str);
        let name = words.collect::<Vec<_>>().join(" ");
        (spec["State"].as_str().unwrap_or_default().to_owned(), name)
    };
    Ok(specs.filter(|spec| spec["LeafNodeType"] == "It").map(told).collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_conformance_suite_passes_what_it_passed_before() -> Result<()> {
    let programs = tokio::task::spawn_blocking(|| -> Result<Option<[PathBuf; 3]>> {
        let suite = tools::go_suite("critest.test", "sigs.k8s.io/cri-tools/cmd/critest")?;
        let runner = tools::go_program("ginkgo", "github.com/onsi/ginkgo/v2/ginkgo")?;
        let workload = tools::go_program("workload", "./workload")?;
        Ok(suite
            .zip(runner)
            .zip(workload)
            .map(|((suite, runner), workload)| [suite, runner, workload]))
    });
    let Some([suite, runner, workload]) = programs.await?? else {
        return Ok(());
    };
    let hub = Hub::start().await?;
    push_images(&hub, &workload)?;
    let node = node(&hub).await?;
    let report = node.path("report.json");
    let mut command = tokio::process::Command::new(runner);
    command
        .args([
            "--procs=3",
            "--no-color",
            "--silence-skips",
            "--timeout=20m",
            "--skip",
            "NRI|AppArmor|benchmark",
        ])
        .args(["--skip", IMPOSSIBLE])
        .arg(format!("--json-report={}", report.display()))
        .arg(&suite)
        .arg("--")
        .arg(format!("--runtime-endpoint=unix://{}", node.socket().display()))
        .current_dir(node.path(""))
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let out = tokio::time::timeout(Duration::from_secs(1260), command.output())
        .await
        .context("critest hangs")??;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let verdicts = verdicts(&report).with_context(|| format!("critest told nothing:\n{text}"))?;
    let passed: BTreeSet<&str> = verdicts
        .iter()
        .filter(|(state, _)| state == "passed")
        .map(|(_, name)| name.as_str())
        .collect();
    let record = fs::read_to_string(RECORD).unwrap_or_default();
    let record: BTreeSet<&str> = record.lines().filter(|line| !line.is_empty()).collect();
    println!(
        "critest: {} of {} specs passed, {} must",
        passed.len(),
        verdicts.len(),
        record.len()
    );
    for name in passed.difference(&record) {
        println!("critest: passes and is not in the record: {name}");
    }
    for (state, name) in verdicts
        .iter()
        .filter(|(state, name)| state == "failed" || record.contains(name.as_str()))
    {
        if state != "passed" {
            println!("critest: {state}: {name}");
        }
    }
    let lost: Vec<_> = record.difference(&passed).collect();
    if !lost.is_empty() {
        println!("{text}");
    }
    ensure!(lost.is_empty(), "specs that passed before do not: {lost:#?}");
    ensure!(!record.is_empty(), "{RECORD} is missing");
    node.finish().await
}
