//! Runtime handlers: pods whose containers other OCI runtimes make, and that they are what the built-in one's are.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::client::within;
use e2e::faults::Faults;
use e2e::node::{Node, Options, shown};
use e2e::pods::{self, shell};
use e2e::v1::*;
use e2e::{eventually, tools};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tonic::{Code, Status};

mod own;

const HANDLERS: [&str; 2] = ["runc", "crun"];

/// A program for the node's table.
fn script(node: &Node, name: &str, text: &str) -> Result<String> {
    node.program(name, format!("#!/bin/sh\n{text}\n"))
}

/// Writes a table of the handlers that are installed; `None` if none is.
fn configure(node: &Node) -> Result<Option<Vec<&'static str>>> {
    fs::create_dir_all(node.path("etc"))?;
    let mut text = "handlers:\n".to_owned();
    let mut there = Vec::new();
    for name in HANDLERS.into_iter().filter(|name| tools::installed(name)) {
        let mut binary = name.to_owned();
        if name == "crun" && Path::new("/sys/fs/cgroup/unified/cgroup.controllers").exists() {
            // It refuses a hybrid layout, but not one whose v2 part it does not see.
            let hide = "exec unshare -m sh -c 'umount /sys/fs/cgroup/unified; exec crun \"$@\"' crun \"$@\"";
            binary = script(node, "crun-on-v1", hide)?;
        }
        text += &format!("  {name}:\n    binary: {binary}\n    annotations: [io.example.*]\n");
        text += "    privilegedWithoutHostDevices: true\n";
        there.push(name);
    }
    node.file("etc/config.yaml", &text)?;
    Ok(Some(there).filter(|there| !there.is_empty()))
}

async fn run(node: &Node, pod: &PodSandboxConfig, handler: &str) -> Result<String, Status> {
    let request = RunPodSandboxRequest {
        config: Some(pod.clone()),
        runtime_handler: handler.into(),
    };
    let asked = within(Duration::from_secs(60), request);
    let answer = node.cri.runtime.clone().run_pod_sandbox(asked).await?;
    Ok(answer.into_inner().pod_sandbox_id)
}

async fn remove(node: &Node, sandbox: &str) -> Result<()> {
    node.cri.stop_sandbox(sandbox).await?;
    Ok(node.cri.remove_sandbox(sandbox).await?)
}

/// The files that a runtime's program keeps of a container.
fn state(node: &Node, id: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut dirs = vec![node.state()];
    while let Some(dir) = dirs.pop() {
        for path in fs::read_dir(&dir)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
        {
            let ours = path.ends_with(format!("c/{id}")) || path.ends_with(format!("b/{id}"));
            if path.is_dir() && !path.is_symlink() && !path.ends_with("rootfs") {
                dirs.push(path.clone());
            }
            found.extend(Some(path).filter(|_| ours));
        }
    }
    found
}

fn security(config: &mut ContainerConfig) -> &mut LinuxContainerSecurityContext {
    config
        .linux
        .get_or_insert_default()
        .security_context
        .get_or_insert_default()
}

/// What a process can see of its own rights and surroundings.
const LOOK: &str = "exec 2>&1; pwd; env | sort; \
                    sed -n '/^\\(Uid\\|Gid\\|Groups\\|Cap...\\|NoNewPrivs\\|Seccomp\\):/p' /proc/self/status; \
                    cat /proc/self/oom_score_adj; ulimit -n; echo x 2>/dev/null > /file || echo read-only; \
                    cat /proc/meminfo | wc -l; ls /proc/fs | wc -l; ls /dev; hostname; \
                    for m in /proc /dev /dev/pts /dev/shm /dev/mqueue /sys /etc/hosts /proc/sys; do \
                    sed -n \"s,^[^/]*[^ ]* $m \\([^ ]*\\) .*- \\([^ ]*\\) .*,$m \\1 \\2,p\" \
                    /proc/self/mountinfo; done; \
                    cat /proc/1/comm; unshare -n true 2>&1; exit 7";

#[tokio::test(flavor = "multi_thread")]
async fn containers_are_what_the_built_in_executors_are() -> Result<()> {
    let mut node = Node::new(Options::default())?;
    let Some(handlers) = configure(&node)? else {
        return Ok(());
    };
    let rlimits = "containers: {rlimits: {nofile: '100:200'}}\n";
    let text = fs::read_to_string(node.path("etc/config.yaml"))?;
    node.file("etc/config.yaml", text + rlimits)?;
    node.serve().await?;
    node.busybox().await?;
    let mut pictures = Vec::new();
    for handler in ["builtin"].iter().chain(&handlers) {
        let mut picture = Vec::new();
        for kind in ["plain", "user", "privileged", "shared"] {
            let mut pod = node.pod("same");
            pod.hostname = "same".into();
            let rights = pod
                .linux
                .get_or_insert_default()
                .security_context
                .get_or_insert_default();
            rights.privileged = kind == "privileged";
            let sandbox = run(&node, &pod, handler).await?;
            let mut config = shell("c", LOOK);
            config.linux.get_or_insert_default().resources = Some(LinuxContainerResources {
                oom_score_adj: 321,
                ..Default::default()
            });
            let security = security(&mut config);
            security.seccomp = Some(SecurityProfile {
                profile_type: security_profile::ProfileType::RuntimeDefault.into(),
                ..Default::default()
            });
            security.masked_paths = vec!["/proc/meminfo".into(), "/proc/fs".into()];
            security.readonly_paths = vec!["/proc/sys".into()];
            match kind {
                "user" => {
                    security.run_as_user = Some(Int64Value { value: 1001 });
                    security.run_as_group = Some(Int64Value { value: 1002 });
                    security.supplemental_groups = vec![5000];
                    security.no_new_privs = true;
                    security.readonly_rootfs = true;
                    config.working_dir = "/tmp".into();
                }
                "privileged" => security.privileged = true,
                "shared" => security.namespace_options.get_or_insert_default().pid = NamespaceMode::Pod.into(),
                _ => {}
            }
            let id = node.cri.launch(&sandbox, &pod, &config).await.context(*handler)?;
            let status = node.cri.exited(&id).await?;
            assert_eq!(
                (status.exit_code, status.reason.as_str()),
                (7, "Error"),
                "{handler} {kind}: {status:?}"
            );
            let mut texts = pods::log_texts(&status.log_path)?;
            // The order of a mount's options may differ, and how it keeps times.
            for text in texts
                .iter_mut()
                .filter(|text| text.starts_with('/') && text.contains(','))
            {
                let mut words: Vec<_> = text.split([' ', ',']).filter(|word| !word.ends_with("atime")).collect();
                words.sort_unstable();
                *text = words.join(" ");
            }
            picture.push((kind, texts));
            remove(&node, &sandbox).await?;
        }
        pictures.push((*handler, picture));
    }
    for (handler, picture) in &pictures[1..] {
        for ((kind, theirs), (_, ours)) in picture.iter().zip(&pictures[0].1) {
            // The runtimes mount /dev in another way for privileged containers; the nodes are those of the table. crun
            // makes /dev/core, and a bind mount of it loses its source's flags.
            let of_crun =
                |line: &str| line == "core" || line.starts_with("/dev/shm ") || line.starts_with("/proc/sys ");
            let same = |line: &&String| {
                let mount = line.contains("/dev ") || *kind == "privileged" && line.starts_with("/");
                !(mount || *handler == "crun" && of_crun(line))
            };
            let (theirs, ours): (Vec<_>, Vec<_>) =
                (theirs.iter().filter(same).collect(), ours.iter().filter(same).collect());
            let devices = |line: &&&String| !line.contains("/dev") && !Path::new("/dev").join(line.as_str()).exists();
            if *kind == "privileged" {
                // Its handler gives it no device nodes of the host.
                ensure!(theirs.len() < ours.len(), "{handler}: {theirs:#?}");
                let (theirs, ours): (Vec<_>, Vec<_>) = (
                    theirs.iter().filter(devices).collect(),
                    ours.iter().filter(devices).collect(),
                );
                assert_eq!(theirs, ours, "{handler} {kind}");
                continue;
            }
            assert_eq!(theirs, ours, "{handler} {kind}");
        }
    }
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_life_in_each_handler() -> Result<()> {
    let mut node = Node::new(Options::default())?;
    let Some(handlers) = configure(&node)? else {
        return Ok(());
    };
    node.serve().await?;
    node.busybox().await?;
    for handler in handlers {
        life(&node, handler).await.with_context(|| handler.to_owned())?;
        let job = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: job}}\nspec:\n  runtimeClassName: {handler}\n  \
             restartPolicy: Never\n  containers:\n  - {{name: c, image: {}, command: [/hello, exit, '5']}}\n",
            pods::HELLO
        );
        let file = node.file("job.yaml", job)?;
        let out = node.reconcile(&["run", "--keep", &file]).await?;
        assert_eq!(out.status.code(), Some(5), "{}", shown(&out));
        let sandboxes = node.cri.sandboxes(None).await?;
        assert_eq!(
            sandboxes.iter().map(|pod| &pod.runtime_handler).collect::<Vec<_>>(),
            [handler]
        );
        node.ok(&["delete", "pod", "job"]).await?;
    }
    node.finish().await
}

async fn life(node: &Node, handler: &str) -> Result<()> {
    let mut pod = node.pod(handler);
    pod.annotations = [("io.example.pod", "p"), ("io.example.both", "p"), ("io.other", "p")]
        .map(|(key, value)| (key.into(), value.into()))
        .into();
    let sandbox = run(node, &pod, handler).await?;
    assert_eq!(node.cri.sandbox(&sandbox).await?.runtime_handler, handler);
    let mut config = shell(
        "c",
        "trap 'echo bye; exit 6' TERM; echo out; echo err >&2; while :; do sleep 0.05; done",
    );
    config.annotations = [("io.example.both".into(), "c".into())].into();
    config.linux.get_or_insert_default().resources = Some(LinuxContainerResources {
        cpu_quota: 25_000,
        cpu_period: 50_000,
        memory_limit_in_bytes: 64 << 20,
        ..Default::default()
    });
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    let answer = node.cri.container_answer(&id).await?;
    let info: serde_json::Value = serde_json::from_str(answer.info.get("info").context("info")?)?;
    let spec = &info["runtimeSpec"];
    let annotations = &spec["annotations"];
    assert_eq!(
        (&annotations["io.example.pod"], &annotations["io.example.both"]),
        (&"p".into(), &"c".into())
    );
    assert_eq!(annotations.get("io.other"), None);
    assert_eq!(state(node, &id).len(), 2, "its program keeps a state");
    let pid = node.cri.container_pid(&id).await?;
    let path = spec["linux"]["cgroupsPath"].as_str().context("cgroupsPath")?;
    let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    ensure!(
        cgroups.lines().any(|line| line.ends_with(&format!(":{path}"))),
        "{path} is none of\n{cgroups}"
    );
    let v2 = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    let file = match v2 {
        true => format!("/sys/fs/cgroup{path}/memory.max"),
        false => format!("/sys/fs/cgroup/memory{path}/memory.limit_in_bytes"),
    };
    assert_eq!(
        fs::read_to_string(&file).context(file.clone())?.trim(),
        (64 << 20).to_string()
    );

    // Execs, updates and stats are the shim's and the daemon's own.
    let exec = node
        .cri
        .exec(&id, &["sh", "-c", "echo $$; cat /proc/1/comm; exit 3"], 10)
        .await?;
    assert_eq!(exec.exit_code, 3);
    ensure!(String::from_utf8_lossy(&exec.stdout).ends_with("\nsh\n"), "{exec:?}");
    let update = LinuxContainerResources {
        memory_limit_in_bytes: 96 << 20,
        ..Default::default()
    };
    node.cri.update(&id, update).await?;
    assert_eq!(fs::read_to_string(&file)?.trim(), (96 << 20).to_string());

    // The shim dies, the container does not; its end is known all the same, and its program's state goes.
    let shim = node.shims()?.pop().context("a shim")?;
    kill(Pid::from_raw(shim), Signal::SIGKILL)?;
    eventually(Duration::from_secs(20), async || {
        ensure!(node.shims()?.iter().any(|pid| *pid != shim), "no new shim");
        ensure!(node.cri.exec(&id, &["true"], 5).await?.exit_code == 0, "exec");
        Ok(())
    })
    .await?;
    assert_eq!(node.cri.container_pid(&id).await?, pid);
    node.cri.stop(&id, 10).await?;
    let status = node.cri.container(&id).await?;
    assert_eq!(status.exit_code, 6, "{status:?}");
    let mut texts = pods::log_texts(&status.log_path)?;
    texts.sort();
    assert_eq!(texts, ["bye", "err", "out"]);
    assert_eq!(state(node, &id), [] as [PathBuf; 0]);

    let mut terminal = shell(
        "t",
        "tty; test -t 0 && test -t 2 && echo all; kill -0 1; sleep 0.1; exit 9",
    );
    terminal.tty = true;
    let id = node.cri.launch(&sandbox, &pod, &terminal).await?;
    let status = node.cri.exited(&id).await?;
    let texts = pods::log_texts(&status.log_path)?;
    let texts: Vec<_> = texts.iter().map(|text| text.trim_end()).collect();
    assert_eq!((texts.as_slice(), status.exit_code), (&["/dev/pts/0", "all"][..], 9));

    let mut hungry = shell("hungry", "x=0123456789abcdef; while :; do x=$x$x; done");
    hungry.linux.get_or_insert_default().resources = Some(LinuxContainerResources {
        memory_limit_in_bytes: 16 << 20,
        ..Default::default()
    });
    let id = node.cri.launch(&sandbox, &pod, &hungry).await?;
    let status = node.cri.exited(&id).await?;
    assert_eq!(
        (status.exit_code, status.reason.as_str()),
        (137, "OOMKilled"),
        "{status:?}"
    );

    let missing = pods::container("missing", pods::BUSYBOX, &["/no/such/program"]);
    let id = node.cri.create(&sandbox, &pod, &missing).await?;
    let error = node.cri.start(&id).await.expect_err("there is no such program");
    ensure!(error.message().contains("/no/such/program"), "{error:?}");
    let status = node.cri.container(&id).await?;
    assert_eq!(
        (status.exit_code, status.reason.as_str()),
        (128, "StartError"),
        "{status:?}"
    );
    ensure!(status.message.contains("/no/such/program"), "{status:?}");
    assert_eq!(state(node, &id), [] as [PathBuf; 0]);
    remove(node, &sandbox).await
}

/// The maker, or the shim, is killed at every step that a runtime's program adds; nothing runs twice, nothing is left.
#[tokio::test(flavor = "multi_thread")]
async fn cut_anywhere_nothing_is_left() -> Result<()> {
    let (mut node, faults) = Faults::node(Options::default())?;
    let Some(handlers) = configure(&node)? else {
        return Ok(());
    };
    node.serve().await?;
    node.busybox().await?;
    for (n, point) in [
        "shim.maker.derived",
        "shim.maker.built",
        "shim.maker.recorded",
        "shim.maker.after",
        "runtime.delete.before",
        "shim.finish.before",
        "shim.finish.removed",
    ]
    .into_iter()
    .enumerate()
    {
        let pod = pods::host_network(node.pod("cut"));
        let sandbox = run(&node, &pod, handlers[n % handlers.len()]).await?;
        let id = node.cri.create(&sandbox, &pod, &shell("c", "sleep 1000")).await?;
        faults.arm(&format!("{point}=abort"))?;
        let started = node.cri.start(&id).await;
        let status = node.cri.container(&id).await?;
        if started.is_err() {
            let told = (status.exit_code, status.reason.as_str());
            assert_eq!(told, (128, "StartError"), "{point}: {started:?} {status:?}");
        }
        node.cri.stop(&id, 0).await.context(point)?;
        ensure!(faults.hit(), "{point} was never reached");
        faults.disarm();
        let end = node.cri.container(&id).await?;
        ensure!([128, 137].contains(&end.exit_code), "{point}: {end:?}");
        assert_eq!(state(&node, &id), [] as [PathBuf; 0], "{point}");
        remove(&node, &sandbox).await.context(point)?;
    }

    // Made, not begun, and then the shim dies: it must not be taken for running, nor ever begin.
    for handler in handlers {
        let pod = pods::host_network(node.pod("unborn"));
        let sandbox = run(&node, &pod, handler).await?;
        let id = node
            .cri
            .create(&sandbox, &pod, &shell("c", "echo began; sleep 1000"))
            .await?;
        faults.arm("shim.maker.recorded=hang")?;
        let (cri, started) = (node.cri.clone(), id.clone());
        let starting = tokio::spawn(async move { cri.start(&started).await });
        let record = node.root().join("pods").join(&sandbox).join("containers").join(&id);
        eventually(Duration::from_secs(10), async || {
            ensure!(
                state(&node, &id).iter().any(|dir| dir.join("pid").exists()),
                "no pid file"
            );
            let files = fs::read_dir(&record)?.flatten();
            let begun = files.map(|file| file.file_name().to_string_lossy().into_owned());
            ensure!(begun.into_iter().any(|name| name.contains("run")), "no record");
            Ok(())
        })
        .await?;
        let shim = node.shims()?.pop().context("a shim")?;
        kill(Pid::from_raw(shim), Signal::SIGKILL)?;
        let status = node.cri.exited(&id).await?;
        assert_eq!(
            (status.exit_code, status.reason.as_str()),
            (128, "StartError"),
            "{handler}: {status:?}"
        );
        starting.await?.expect_err("it never began");
        faults.disarm();
        assert_eq!(pods::log_texts(&status.log_path).unwrap_or_default(), [] as [&str; 0]);
        remove(&node, &sandbox).await?;
    }
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_table_is_checked_told_and_reloaded() -> Result<()> {
    let mut node = Node::new(Options::default())?;
    fs::create_dir_all(node.path("etc"))?;
    let broken = script(&node, "broken", "exit 1")?;
    let good = script(&node, "good", "[ \"$1\" = --version ] && echo good 1")?;
    let config = node.file(
        "etc/config.yaml",
        format!("logLevel: info\nhandlers:\n  bad: {{binary: {broken}}}\n"),
    )?;
    let why = format!("{config}:3:3: handlers.bad: binary {broken}: `--version` failed: exit status: 1");
    for args in [&["serve"][..], &["config", "check"]] {
        let out = node.reconcile(args).await?;
        ensure!(
            out.status.code() == Some(1) && shown(&out).contains(&why),
            "{}",
            shown(&out)
        );
    }
    let table = format!("handlers:\n  good: {{binary: {good}}}\ndefaultHandler: good\n");
    node.file("etc/config.yaml", &table)?;
    node.serve().await?;
    let told = async |node: &Node| -> Result<Vec<(String, bool)>> {
        let ask = tonic::Request::new(StatusRequest { verbose: false });
        let handlers = node
            .cri
            .runtime
            .clone()
            .status(ask)
            .await?
            .into_inner()
            .runtime_handlers;
        let one = |handler: RuntimeHandler| (handler.name, handler.features.unwrap_or_default().user_namespaces);
        Ok(handlers.into_iter().map(one).collect())
    };
    let names =
        |all: &[(&str, bool)]| -> Vec<_> { all.iter().map(|(name, able)| ((*name).to_owned(), *able)).collect() };
    // It says nothing of itself, so it is believed to do nothing; the name of the default is empty.
    assert_eq!(
        told(&node).await?,
        names(&[("", false), ("builtin", true), ("good", false)])
    );
    let pod = node.pod("none");
    for (handler, mode) in [("none-such", NamespaceMode::Node), ("good", NamespaceMode::Pod)] {
        let mut pod = pod.clone();
        let mapping = || {
            vec![IdMapping {
                host_id: 100_000,
                container_id: 0,
                length: 65_536,
            }]
        };
        let rights = pod
            .linux
            .get_or_insert_default()
            .security_context
            .get_or_insert_default();
        rights.namespace_options.get_or_insert_default().userns_options = Some(UserNamespace {
            mode: mode.into(),
            uids: if mode == NamespaceMode::Pod {
                mapping()
            } else {
                Vec::new()
            },
            gids: if mode == NamespaceMode::Pod {
                mapping()
            } else {
                Vec::new()
            },
        });
        let error = run(&node, &pod, handler).await.expect_err(handler);
        ensure!(
            error.code() == Code::InvalidArgument && error.message().contains(handler),
            "{error:?}"
        );
    }

    node.file("etc/config.yaml", format!("{table}  \n").replace(&good, &broken))?;
    let out = node.reconcile(&["reload"]).await?;
    ensure!(
        !out.status.success() && shown(&out).contains("handlers.good"),
        "{}",
        shown(&out)
    );
    assert_eq!(told(&node).await?.len(), 3, "the old configuration stays");
    node.file("etc/config.yaml", "logLevel: info\n")?;
    let out = node.ok(&["reload"]).await?;
    ensure!(
        out.contains("defaultHandler: good -> builtin for what is started from now on"),
        "{out}"
    );
    assert_eq!(told(&node).await?, names(&[("", true), ("builtin", true)]));
    // A pod that names a handler which is gone gets no containers, and says why.
    node.finish().await
}
