//! The configuration: how files, environment and flags make it, that its keys do something, and reloads.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::client::within;
use e2e::node::{Node, Options, shown};
use e2e::pods::{BUSYBOX, HELLO, log_lines, shell};
use e2e::v1::{ExecRequest, StatusRequest};
use e2e::{eventually, leaks, tools};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const SOON: Duration = Duration::from_secs(10);

/// A node that is not running yet, with this configuration.
fn configured(text: &str) -> Result<Node> {
    let node = Node::new(Options::default())?;
    fs::create_dir_all(node.path("etc/config.d"))?;
    node.file("etc/config.yaml", text)?;
    Ok(node)
}

/// What a process's file below /proc says.
fn proc(pid: i32, file: &str) -> Result<String> {
    let path = format!("/proc/{pid}/{file}");
    Ok(fs::read_to_string(&path).context(path)?.trim().to_owned())
}

/// What is new in the daemon's log since `seen` bytes of it.
fn news(node: &Node, seen: usize) -> String {
    let log = node.daemon_log();
    log.get(seen..).unwrap_or_default().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn files_environment_and_flags_are_merged_and_shown() -> Result<()> {
    let mut node = configured("registry: {rateFloor: 5, window: 9}\nlogLevel: info\n")?;
    node.options.env = vec![("RECONCILE_METRICS", "unix:///run/rc-none.sock".into())];
    let late = node.file("etc/config.d/20.yaml", "registry:\n  rateFloor: 7\n")?;
    node.file("etc/config.d/10.yaml", "registry: {rateFloor: 6}\n")?;
    let out = node.reconcile(&["config", "show", "--origin"]).await?;
    let (text, said) = (String::from_utf8(out.stdout)?, String::from_utf8(out.stderr)?);
    let config = node.path("etc/config.yaml").display().to_string();
    for line in [
        format!("root: {}  # flag --root\n", node.root().display()),
        "metrics: unix:///run/rc-none.sock  # env RECONCILE_METRICS\n".to_owned(),
        format!("logLevel: info  # {config}:2\n"),
        "  mode: builtin  # flag --network\n".to_owned(),
        format!("  rateFloor: 7  # {late}:2\n"),
        format!("  windowSeconds: 9  # {config}:1\n"),
        "  cniConfDir: /etc/cni/net.d  # default\n".to_owned(),
    ] {
        ensure!(text.contains(&line), "{line}\n---\n{text}");
    }
    let warning = format!("warning: {config}:1: `registry.window` is called `registry.windowSeconds` now");
    ensure!(said.contains(&warning), "{said}");
    let json: serde_json::Value = serde_json::from_str(&node.ok(&["config", "show", "-o", "json"]).await?)?;
    assert_eq!(json["registry"]["rateFloor"], 7);
    let checked = node.ok(&["config", "check"]).await?;
    ensure!(
        checked.lines().count() == 3 && checked.contains("20.yaml: ok"),
        "{checked}"
    );

    node.file("etc/config.d/30.yaml", "rot: 1\nnetwork:\n  mode: none\n")?;
    let out = node.reconcile(&["config", "check"]).await?;
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(1));
    ensure!(
        said.contains("30.yaml:1:1: rot: unknown key; did you mean `root`?"),
        "{said}"
    );
    ensure!(said.contains("30.yaml:3:9: network.mode: unknown variant"), "{said}");
    // A daemon does not start with it, nor does any other command.
    for args in [&["serve"][..], &["get", "pods"]] {
        let out = node.reconcile(args).await?;
        assert_eq!(out.status.code(), Some(1), "{}", shown(&out));
        ensure!(shown(&out).contains("30.yaml:1:1: rot: unknown key"), "{}", shown(&out));
    }
    ensure!(fs::read_dir(node.root())?.next().is_none(), "it touched its root");
    node.finish_unused().await
}

#[tokio::test(flavor = "multi_thread")]
async fn every_key_is_explained_and_defaults_hold() -> Result<()> {
    let node = Node::new(Options::default())?;
    let defaults = node.ok(&["config", "default"]).await?;
    let file = node.file("defaults.yaml", &defaults)?;
    assert_eq!(node.ok(&["config", "check", &file]).await?, format!("{file}: ok\n"));
    let explained = node.ok(&["config", "explain"]).await?;
    let explained = explained
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with(' '));
    ensure!(explained.count() > 20);
    let one = node.ok(&["config", "explain", "containers.rlimits.nofile"]).await?;
    ensure!(
        one.starts_with("containers.rlimits.*\n") && one.contains("a reload applies it to what is"),
        "{one}"
    );
    let out = node.reconcile(&["config", "explain", "logLevl"]).await?;
    ensure!(
        !out.status.success() && shown(&out).contains("did you mean `logLevel`?"),
        "{}",
        shown(&out)
    );

    // What the README shows can be written.
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("README.md");
    let readme = fs::read_to_string(readme)?;
    let section = readme.split("### Configuration").nth(1).context("the section")?;
    let example = section
        .split("```yaml")
        .nth(1)
        .and_then(|rest| rest.split("```").next());
    let example = node.file("readme.yaml", example.context("its example")?)?;
    node.ok(&["config", "check", &example]).await?;

    let theirs = "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.cni]\nconf_dir = '/c'\nmax_conf_num = 1\n";
    let theirs = node.file("config.toml", theirs)?;
    let out = node.reconcile(&["config", "import", "containerd", &theirs]).await?;
    ensure!(out.status.success(), "{}", shown(&out));
    let yaml = String::from_utf8(out.stdout)?;
    assert_eq!(
        yaml,
        "apiVersion: reconcile/v1\nkind: Config\nnetwork:\n  cniConfDir: /c\n"
    );
    let left = String::from_utf8(out.stderr)?;
    ensure!(
        left.contains("\"io.containerd.cri.v1.runtime\".cni.max_conf_num = 1: no counterpart"),
        "{left}"
    );
    let ours = node.file("imported.yaml", yaml)?;
    node.ok(&["config", "check", &ours]).await?;
    node.finish_unused().await
}

/// What containers are given: open files, seccomp mode, and how a long line is logged.
async fn given(node: &Node) -> Result<(String, String, Vec<usize>)> {
    let script =
        "ulimit -n; sed -n 's/^Seccomp:[^0-9]*//p' /proc/self/status; head -c 600 /dev/zero | tr '\\0' x; echo";
    let pod = node.pod("given");
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let id = node.cri.launch(&sandbox, &pod, &shell("main", script)).await?;
    let lines = log_lines(node.cri.exited(&id).await?.log_path)?;
    node.cri.stop_sandbox(&sandbox).await?;
    node.cri.remove_sandbox(&sandbox).await?;
    ensure!(lines.len() >= 3, "{lines:?}");
    let long = lines[2..].iter().map(|line| line.text.len()).collect();
    Ok((lines[0].text.clone(), lines[1].text.clone(), long))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_applies_what_it_can_and_touches_no_pod() -> Result<()> {
    let mut node = configured("# nothing yet\n")?;
    node.serve().await?;
    node.busybox().await?;
    let pod = node.pod("stays");
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let id = node
        .cri
        .launch(&sandbox, &pod, &shell("main", "while :; do sleep 0.1; done"))
        .await?;
    let (picture, shims, daemon) = (node.picture().await?, node.shims()?, node.pid()?);
    let (_, seccomp, long) = given(&node).await?;
    assert_eq!((seccomp.as_str(), long), ("0", vec![600]));
    assert_eq!(node.ok(&["reload"]).await?, "nothing changed\n");
    ensure!(!node.daemon_log().contains("DEBUG"), "it is silent at first");

    let new = format!(
        "logLevel: debug\ncontainers:\n  seccomp: RuntimeDefault\n  rlimits: {{nofile: '512:1024'}}\nlogs: \
         {{maxLineBytes: 256}}\nimages: {{pinned: ['{BUSYBOX}'], sandboxImage: 'example.com/pause:1'}}\n\
         streaming: {{idleSeconds: 5}}\noomScore: {{daemon: 7}}\n"
    );
    node.file("etc/config.yaml", &new)?;
    let seen = node.daemon_log().len();
    let told = node.ok(&["reload"]).await?;
    for line in [
        "logLevel: nothing -> debug\n",
        "images.pinned: [] -> [localhost/busybox:1]\n",
        "containers.seccomp: Unconfined -> RuntimeDefault for what is started from now on\n",
        "containers.rlimits.nofile: nothing -> 512:1024 for what is started from now on\n",
        "streaming.idleSeconds: 14400 -> 5 needs a restart of the daemon\n",
    ] {
        ensure!(told.contains(line), "{line}\n---\n{told}");
    }
    let (limit, seccomp, long) = given(&node).await?;
    assert_eq!(
        (limit.as_str(), seccomp.as_str(), long),
        ("512", "2", vec![256, 256, 88])
    );
    assert_eq!(proc(node.pid()?, "oom_score_adj")?, "7");
    ensure!(
        node.cri.image(BUSYBOX).await?.context("the image")?.pinned,
        "{BUSYBOX} is not shown as pinned"
    );
    ensure!(
        status(&node).await?.contains("example.com/pause:1"),
        "the sandbox image was not told"
    );
    node.ok(&["images", "prune", "--all", "--yes"]).await?;
    ensure!(node.cri.image(BUSYBOX).await?.is_some(), "a pinned image was pruned");
    let log = news(&node, seen);
    ensure!(log.contains("DEBUG"), "the log level did not change:\n{log}");
    let one_line_a_key = |key: &str| log.lines().filter(|line| line.contains(key)).count();
    ensure!(
        one_line_a_key("containers.seccomp") == 1 && one_line_a_key("needs a restart") == 1,
        "{log}"
    );
    // An exec is the old container's process, with the old container's limits.
    let limits = node.cri.exec(&id, &["/bin/sh", "-c", "ulimit -n"], 10).await?;
    ensure!(
        String::from_utf8_lossy(&limits.stdout).trim() != "512",
        "a running container changed"
    );

    // What does not hold changes nothing, whichever way it is read.
    node.file(
        "etc/config.yaml",
        "logLevel: debug\ncontainers:\n  secomp: Unconfined\n",
    )?;
    let seen = node.daemon_log().len();
    kill(Pid::from_raw(node.pid()?), Signal::SIGHUP)?;
    let wrong = "config.yaml:3:3: containers.secomp: unknown key; did you mean `containers.seccomp`?";
    eventually(SOON, async || {
        let log = news(&node, seen);
        ensure!(log.contains(wrong) && log.contains("stays as it was"), "{log}");
        Ok(())
    })
    .await?;
    let out = node.reconcile(&["reload"]).await?;
    ensure!(
        out.status.code() == Some(1) && shown(&out).contains(wrong),
        "{}",
        shown(&out)
    );
    let (limit, seccomp, _) = given(&node).await?;
    assert_eq!((limit.as_str(), seccomp.as_str()), ("512", "2"));

    // SIGHUP does the same as the command; what was set is taken back.
    node.file("etc/config.yaml", "")?;
    let seen = node.daemon_log().len();
    kill(Pid::from_raw(node.pid()?), Signal::SIGHUP)?;
    eventually(SOON, async || {
        let log = news(&node, seen);
        ensure!(log.contains("configuration reloaded"), "{log}");
        Ok(())
    })
    .await?;
    let (limit, seccomp, long) = given(&node).await?;
    assert_eq!((seccomp.as_str(), long), ("0", vec![600]));
    assert_ne!(limit, "512");
    assert_ne!(proc(node.pid()?, "oom_score_adj")?, "7");
    assert_eq!(node.picture().await?, picture, "a reload changed what runs");
    assert_eq!((node.shims()?, node.pid()?), (shims, daemon));
    node.finish().await
}

/// The verbose Status, as one text.
async fn status(node: &Node) -> Result<String> {
    let request = within(SOON, StatusRequest { verbose: true });
    let answer = node.cri.runtime.clone().status(request).await?.into_inner();
    Ok(format!("{:?}", answer.info))
}

#[tokio::test(flavor = "multi_thread")]
async fn shims_stand_where_the_configuration_says() -> Result<()> {
    let parent = format!("rc-e2e-shims-{}", std::process::id());
    let text = format!("cgroup: {{driver: cgroupfs, shims: /{parent}}}\noomScore: {{daemon: 11, shims: 12}}\n");
    let mut node = configured(&text)?;
    node.serve().await?;
    node.cri.run_sandbox(&node.pod("placed")).await?;
    let shims = node.shims()?;
    assert_eq!(shims.len(), 1);
    let groups = proc(shims[0], "cgroup")?;
    let own = format!("/{parent}/{}", node.instance());
    ensure!(
        groups.lines().any(|line| line.ends_with(&own)),
        "{own} is none of\n{groups}"
    );
    assert_eq!(proc(shims[0], "oom_score_adj")?, "12");
    assert_eq!(proc(node.pid()?, "oom_score_adj")?, "11");
    node.finish().await?;
    // It was there for others too, as far as the daemon knows.
    let left = leaks::cgroups()?.into_iter().filter(|path| path.contains(&parent));
    let left: Vec<_> = left.collect();
    ensure!(left.iter().all(|path| path.ends_with(&parent)), "{left:?}");
    for path in left {
        fs::remove_dir(&path).with_context(|| path.clone())?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn old_content_goes_once_the_grace_is_short_enough() -> Result<()> {
    // However full the disk is.
    let mut node = configured("images: {gcHighPercent: 100}\n")?;
    node.serve().await?;
    let digest = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
    let blob = node.root().join("content/blobs/sha256").join(digest);
    fs::write(&blob, "hello\n")?;
    let old = std::time::SystemTime::now() - Duration::from_secs(300);
    fs::File::open(&blob)?.set_modified(old)?;
    // Unchanged: nothing is collected, though it is looked for.
    node.busybox().await?;
    node.ok(&["images", "rm", BUSYBOX]).await?;
    gone(&node, BUSYBOX).await?;
    ensure!(blob.exists(), "content younger than the grace went");
    for config in ["gcGraceSeconds: 60, gcHighPercent: 100", "gcHighPercent: 1"] {
        fs::write(&blob, "hello\n")?;
        fs::File::open(&blob)?.set_modified(old)?;
        node.file("etc/config.yaml", format!("images: {{{config}}}\n"))?;
        node.ok(&["reload"]).await?;
        eventually(SOON, async || {
            ensure!(!blob.exists(), "{config}: old content is still there");
            Ok(())
        })
        .await?;
    }
    ensure!(node.cri.image(HELLO).await?.is_some());
    node.finish().await
}

/// Waits until only the built-in image's blobs and the odd one are left.
async fn gone(node: &Node, image: &str) -> Result<()> {
    let blobs = node.root().join("content/blobs/sha256");
    let count = |dir: &Path| fs::read_dir(dir).map(Iterator::count).unwrap_or_default();
    eventually(SOON, async || {
        let left = count(&blobs);
        ensure!(left <= 4, "{left} blobs after the removal of {image}");
        Ok(())
    })
    .await
}

/// Makes a certificate of this name, and its key, where the configuration has them.
fn certificate(node: &Node, name: &str) -> Result<()> {
    tools::certificate(&node.path("tls.crt"), &node.path("tls.key"), name)
}

/// Whose certificate the server at an address has, as a client sees that knows nothing of us.
async fn subject(address: &str) -> Result<String> {
    let mut client = tokio::process::Command::new("openssl");
    client
        .args(["s_client", "-connect", address])
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let out = tokio::time::timeout(SOON, client.output()).await??;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let line = text.lines().find(|line| line.starts_with("subject="));
    Ok(line.with_context(|| shown(&out))?.to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_go_over_tls_with_the_certificate_of_the_configuration() -> Result<()> {
    let mut node = configured("")?;
    certificate(&node, "first")?;
    let (cert, key) = (node.path("tls.crt"), node.path("tls.key"));
    let config = format!(
        "streaming: {{tls: {{cert: {}, key: {}}}}}\n",
        cert.display(),
        key.display()
    );
    node.file("etc/config.yaml", config)?;
    node.serve().await?;
    node.busybox().await?;
    let pod = node.pod("secured");
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let id = node
        .cri
        .launch(&sandbox, &pod, &shell("main", "while :; do sleep 0.1; done"))
        .await?;
    let exec = ExecRequest {
        container_id: id.clone(),
        cmd: vec!["true".into()],
        stdout: true,
        ..Default::default()
    };
    let url = node
        .cri
        .runtime
        .clone()
        .exec(within(SOON, exec))
        .await?
        .into_inner()
        .url;
    let address = url.strip_prefix("https://").and_then(|rest| rest.split('/').next());
    let address = address.with_context(|| url.clone())?;
    let first = subject(address).await?;
    ensure!(first.ends_with("first"), "{first}");
    // Streams, both ways: the program's own exit code, and what it read.
    let mut echo =
        tokio::process::Command::from(node.command(&["exec", "-i", &id, "--", "sh", "-c", "cat; exit 7"])?);
    let mut echo = echo
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut to = echo.stdin.take().context("its input")?;
    to.write_all(b"through and back\n").await?;
    drop(to);
    let out = tokio::time::timeout(SOON, echo.wait_with_output()).await??;
    assert_eq!(
        (out.status.code(), &*out.stdout),
        (Some(7), &b"through and back\n"[..]),
        "{}",
        shown(&out)
    );
    // Nobody is answered without TLS, and nobody else's certificate is taken.
    let mut plain = tokio::net::TcpStream::connect(address).await?;
    plain.write_all(b"GET /exec/x HTTP/1.1\r\nHost: x\r\n\r\n").await?;
    let mut answer = Vec::new();
    let _ = tokio::time::timeout(SOON, plain.read_to_end(&mut answer)).await?;
    ensure!(!answer.starts_with(b"HTTP"), "{}", String::from_utf8_lossy(&answer));
    certificate(&node, "second")?;
    let stale = node.reconcile(&["exec", "-i", &id, "--", "true"]).await?;
    ensure!(
        shown(&stale).contains("is not that of streaming.tls.cert"),
        "{}",
        shown(&stale)
    );
    node.ok(&["reload"]).await?;
    let second = subject(address).await?;
    ensure!(second.ends_with("second"), "{second}");
    node.ok(&["exec", "-i", &id, "--", "true"]).await?;
    // A key of another certificate is refused, and the one in use stays.
    let old = fs::read(&key)?;
    certificate(&node, "third")?;
    fs::write(&key, old)?;
    let out = node.reconcile(&["reload"]).await?;
    ensure!(
        !out.status.success() && shown(&out).contains("streaming.tls.cert: "),
        "{}",
        shown(&out)
    );
    let second = subject(address).await?;
    ensure!(second.ends_with("second"), "{second}");
    // The node's own commands need a configuration that holds.
    certificate(&node, "fourth")?;
    node.finish().await
}
