//! Every failpoint of both programs: the process is cut there, the daemon started again, the call repeated as a
//! kubelet does; then all is as it should be, once, and goes away without a trace.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::faults::{self, Faults, persist, revive};
use e2e::images::{Compression, Image, Layer};
use e2e::leaks::{Census, Process};
use e2e::node::{Node, Options};
use e2e::pods::{self, HELLO};
use e2e::v1::*;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tonic::Code;

const LIMIT: Duration = Duration::from_secs(20);

/// A pod's life as a kubelet leads it.
struct Life {
    node: Node,
    faults: Faults,
    pod: PodSandboxConfig,
    sandbox: String,
    container: String,
    config: ContainerConfig,
}

impl Life {
    async fn begin(options: Options) -> Result<Life> {
        let (node, faults) = Faults::node(options)?;
        Ok(Life {
            pod: node.pod("life"),
            node,
            faults,
            sandbox: String::new(),
            container: String::new(),
            config: pods::container("c", HELLO, &["/hello", "sleep", "1000"]),
        })
    }

    /// Runs the sandbox; a duplicate answers which one it is.
    async fn sandbox(&mut self) -> Result<()> {
        let pod = self.pod.clone();
        let made = persist(&mut self.node, async |cri| cri.run_sandbox(&pod).await).await?;
        let all = persist(&mut self.node, async |cri| cri.sandboxes(None).await).await??;
        ensure!(all.len() == 1, "sandboxes: {all:#?}");
        self.sandbox = all[0].id.clone();
        match made {
            Ok(id) => ensure!(id == self.sandbox, "{id} is not listed"),
            Err(status) => ensure!(
                status.code() == Code::AlreadyExists && status.message().contains(&self.sandbox),
                "RunPodSandbox: {status:?}"
            ),
        }
        Ok(())
    }

    /// A running container. Where a start failed, the next attempt follows.
    async fn run(&mut self) -> Result<()> {
        for attempt in 0..4 {
            self.config.metadata.get_or_insert_default().attempt = attempt;
            let (sandbox, pod, config) = (self.sandbox.clone(), self.pod.clone(), self.config.clone());
            let made = persist(&mut self.node, async |cri| cri.create(&sandbox, &pod, &config).await).await?;
            self.container = match made {
                Ok(id) => id,
                Err(status) => {
                    ensure!(status.code() == Code::AlreadyExists, "CreateContainer: {status:?}");
                    let all = persist(&mut self.node, async |cri| cri.containers(None).await).await??;
                    let named = all.into_iter().find(|c| status.message().contains(&c.id));
                    named.with_context(|| format!("{status:?} names none"))?.id
                }
            };
            let id = self.container.clone();
            let started = persist(&mut self.node, async |cri| cri.start(&id).await).await?;
            let status = persist(&mut self.node, async |cri| cri.container(&id).await).await??;
            match status.state() {
                ContainerState::ContainerRunning => return Ok(()),
                ContainerState::ContainerExited => {
                    ensure!(status.exit_code != 0, "it never ended by itself: {status:?}");
                    persist(&mut self.node, async |cri| cri.remove(&id).await).await??;
                }
                _ => {
                    ensure!(started.is_err(), "started, yet {status:?}");
                    persist(&mut self.node, async |cri| cri.remove(&id).await).await??;
                }
            }
        }
        anyhow::bail!("four attempts did not start")
    }

    /// One of everything, and it works.
    async fn whole(&mut self) -> Result<()> {
        let (id, sandbox) = (self.container.clone(), self.sandbox.clone());
        let output = self.exec(&["/hello", "echo", "hi"]).await?;
        ensure!(output.stdout == b"hi\n", "exec: {output:?}");
        let host = self.pod.port_mappings.is_empty() && self.pod.hostname.is_empty();
        e2e::eventually(LIMIT, async || {
            // A fault may also be hit between two calls.
            if self.node.has_ended()? {
                revive(&mut self.node).await?;
            }
            let all = self.node.cri.sandboxes(None).await?;
            ensure!(all.len() == 1 && all[0].id == sandbox, "{all:#?}");
            ensure!(all[0].state() == PodSandboxState::SandboxReady, "{all:#?}");
            if !host {
                self.node.cri.ip(&sandbox).await?;
            }
            let containers = self.node.cri.containers(None).await?;
            ensure!(containers.len() == 1 && containers[0].id == id, "{containers:#?}");
            ensure!(
                containers[0].state() == ContainerState::ContainerRunning,
                "{containers:#?}"
            );
            ensure!(self.node.shims()?.len() == 1, "shims: {:?}", self.node.shims()?);
            let pause = self.node.cri.sandbox_pid(&sandbox).await?;
            let own = self.node.cri.container_pid(&id).await?;
            for pid in [pause, own] {
                ensure!(Process::read(pid).is_some(), "process {pid} is not there");
            }
            let processes = self.node.processes()?;
            ensure!(processes.len() == 3, "shim, pause, container: {processes:#?}");
            let leases = leases(&self.node.root())?;
            ensure!(leases == usize::from(!host), "{leases} attachments");
            Ok(())
        })
        .await
    }

    async fn exec(&mut self, command: &[&str]) -> Result<ExecSyncResponse> {
        let id = self.container.clone();
        let start = Instant::now();
        loop {
            // At most once, so a cut one is asked for again by its caller.
            match persist(&mut self.node, async |cri| cri.exec(&id, command, 10).await).await? {
                Ok(output) => return Ok(output),
                Err(status) => ensure!(start.elapsed() < LIMIT, "ExecSync: {status:?}"),
            }
        }
    }

    async fn change(&mut self) -> Result<()> {
        let id = self.container.clone();
        persist(&mut self.node, async |cri| cri.reopen_log(&id).await)
            .await?
            .context("ReopenContainerLog")?;
        let wanted = LinuxContainerResources {
            memory_limit_in_bytes: 64 << 20,
            ..Default::default()
        };
        persist(&mut self.node, async |cri| cri.update(&id, wanted.clone()).await)
            .await?
            .context("UpdateContainerResources")
    }

    /// SIGKILL to the shim; the next one takes over.
    async fn orphan(&mut self) -> Result<()> {
        let pid = self.node.cri.container_pid(&self.container).await?;
        for shim in self.node.shims()? {
            kill(Pid::from_raw(shim), Signal::SIGKILL)?;
        }
        self.exec(&["/hello", "echo", "adopted"]).await?;
        let id = self.container.clone();
        let now = persist(&mut self.node, async |cri| cri.container_answer(&id).await).await??;
        ensure!(e2e::client::Cri::pid(&now.info)? == pid, "another process");
        Ok(())
    }

    async fn end(&mut self) -> Result<()> {
        let (id, sandbox) = (self.container.clone(), self.sandbox.clone());
        persist(&mut self.node, async |cri| cri.stop(&id, 5).await)
            .await?
            .context("StopContainer")?;
        let first = persist(&mut self.node, async |cri| cri.container(&id).await).await??;
        ensure!(first.state() == ContainerState::ContainerExited, "{first:?}");
        ensure!([137, 143, 255].contains(&first.exit_code), "{first:?}");
        persist(&mut self.node, async |cri| cri.stop_sandbox(&sandbox).await)
            .await?
            .context("StopPodSandbox")?;
        let last = persist(&mut self.node, async |cri| cri.container(&id).await).await??;
        ensure!(
            (first.exit_code, first.finished_at) == (last.exit_code, last.finished_at),
            "told differently: {first:?} then {last:?}"
        );
        persist(&mut self.node, async |cri| cri.remove_sandbox(&sandbox).await)
            .await?
            .context("RemovePodSandbox")?;
        self.nothing().await
    }

    /// Nothing is left of any pod.
    async fn nothing(&mut self) -> Result<()> {
        let mark = self.node.mark();
        let instance = self.node.instance();
        e2e::eventually(LIMIT, async || {
            // A fault of the last clean-up may be hit after the last call.
            if self.node.has_ended()? {
                revive(&mut self.node).await?;
            }
            let census = Census::of(&mark)?;
            let processes = self.node.processes()?;
            ensure!(processes.is_empty(), "processes are left:\n{}", processes.join("\n"));
            for kind in ["netns", "directory", "fifo"] {
                ensure!(census.kind(kind).next().is_none(), "left:\n{census}");
            }
            let pod = |link: &&str| link.contains(&format!("{instance}:"));
            ensure!(census.kind("link").find(pod).is_none(), "left:\n{census}");
            let uid = |cgroup: &&str| cgroup.rsplit('/').next().is_some_and(|name| name.len() == 64);
            ensure!(census.kind("cgroup").find(uid).is_none(), "left:\n{census}");
            Ok(())
        })
        .await
    }
}

/// Attachments on disk: each holds an address.
fn leases(root: &Path) -> Result<usize> {
    let pods = fs::read_dir(root.join("pods")).into_iter().flatten().flatten();
    Ok(pods.filter(|pod| pod.path().join("attachment.json").exists()).count())
}

/// What happens between two looks at the census.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scene {
    /// A pod on the bridge with a host port: made, used, changed, orphaned, ended.
    Pod,
    /// The same with a CNI plugin.
    Cni,
    /// An image pulled, looked at and removed.
    Image,
    /// A pod of YAML.
    Declared,
}

impl Scene {
    async fn begin(self, port: u16) -> Result<Life> {
        let network = if self == Scene::Cni { "auto" } else { "builtin" };
        let mut life = Life::begin(Options {
            network,
            ..Options::default()
        })
        .await?;
        match self {
            Scene::Pod => {
                life.pod.port_mappings = vec![PortMapping {
                    container_port: 8080,
                    host_port: port.into(),
                    ..Default::default()
                }];
            }
            Scene::Cni => e2e::cni::install(&life.node)?,
            Scene::Image => {}
            Scene::Declared => {
                let text = "apiVersion: v1\nkind: Pod\nmetadata: {name: declared}\nspec:\n  restartPolicy: Always\n  \
                    containers:\n  - {name: main, image: localhost/hello, command: [/hello, sleep, '1000']}\n";
                life.node.file("pod.yaml", text)?;
            }
        }
        life.node.serve().await?;
        Ok(life)
    }

    async fn play(self, life: &mut Life) -> Result<()> {
        match self {
            Scene::Pod | Scene::Cni => {
                life.sandbox().await?;
                life.run().await?;
                life.whole().await?;
                if self == Scene::Pod {
                    life.change().await?;
                    life.orphan().await?;
                    life.whole().await?;
                }
                life.end().await?;
                let leases = e2e::cni::leases(&life.node);
                ensure!(leases == 0, "{leases} addresses are leaked");
                Ok(())
            }
            Scene::Image => {
                // Always another: what a cut removal left unneeded stays for a while.
                let layer = |n| {
                    let text = format!("{n} {}", life.pod.metadata.clone().unwrap_or_default().uid);
                    Layer::new(Compression::Gzip).file(&format!("f{n}"), 0o644, text)
                };
                let image = Image::new("localhost/faults:1", vec![layer(1), layer(2)], serde_json::json!({}));
                let file = life.node.file("image.tar", image.oci())?;
                command(&mut life.node, &["images", "import", &file]).await?;
                let name = "localhost/faults:1";
                let found = persist(&mut life.node, async |cri| cri.image(name).await).await??;
                ensure!(found.is_some(), "imported, yet not there");
                command(&mut life.node, &["images", "check"]).await?;
                persist(&mut life.node, async |cri| cri.remove_image(name).await).await??;
                let left = persist(&mut life.node, async |cri| cri.image(name).await).await??;
                ensure!(left.is_none(), "removed, yet there");
                command(&mut life.node, &["images", "prune", "--yes"]).await?;
                life.nothing().await
            }
            Scene::Declared => {
                let file = life.node.path("pod.yaml").display().to_string();
                command(&mut life.node, &["apply", "-f", &file]).await?;
                e2e::eventually(LIMIT, async || {
                    if life.node.has_ended()? {
                        revive(&mut life.node).await?;
                    }
                    let all = life.node.cri.containers(None).await?;
                    let running = |c: &&Container| c.state() == ContainerState::ContainerRunning;
                    ensure!(all.iter().filter(running).count() == 1, "{all:#?}");
                    Ok(())
                })
                .await?;
                command(&mut life.node, &["delete", "pod", "declared"]).await?;
                life.nothing().await
            }
        }
    }

    /// Is a point this scene's to try, not another's?
    fn owns(self, point: &str) -> bool {
        let begins = |list: &[&str]| list.iter().any(|part| point.starts_with(part));
        match self {
            Scene::Pod => true,
            Scene::Cni => begins(&["cni.", "attachment.", "stage.PodSandbox.network"]),
            Scene::Image => begins(&["content.", "layers.", "stage.Image", "trash."]),
            Scene::Declared => begins(&["stage.Pod."]),
        }
    }

    /// Plays the scene once to learn its points, then once for each of them and each way to fail. Answers the points.
    async fn all(self, port: u16, part: usize, parts: usize) -> Result<BTreeSet<String>> {
        let mut life = self.begin(port).await?;
        life.faults.arm("trace")?;
        self.play(&mut life).await.context("undisturbed")?;
        life.node.crash().await?;
        life.faults.disarm();
        let points = life.faults.traced();
        let start = Instant::now();
        let mut tried = 0;
        let own = points.iter().filter(|point| self.owns(point)).enumerate();
        for (n, point) in own.filter(|(n, _)| n % parts == part) {
            let fails = point.starts_with("stage.");
            for action in ["abort", "error"]
                .into_iter()
                .filter(|action| *action == "abort" || fails)
            {
                let began = Instant::now();
                life.pod = PodSandboxConfig {
                    metadata: life.node.pod("life").metadata,
                    ..life.pod
                };
                life.faults.arm(&format!("{point}={action}"))?;
                let played = self.play(&mut life).await;
                played.with_context(|| format!("{self:?}, point {n}: {point}={action}"))?;
                if !life.faults.hit() {
                    // What pods share is made for the first of them.
                    life.node.reconcile(&["--once"]).await?;
                    let played = self.play(&mut life).await;
                    played.with_context(|| format!("{self:?}, point {n}: {point}={action}, swept before"))?;
                }
                if !life.faults.hit() {
                    // Only a start of the daemon leads there.
                    life.node.kill9().await?;
                    revive(&mut life.node).await?;
                }
                ensure!(life.faults.hit(), "{self:?}: {point}={action} was never reached");
                tried += 1;
                let took = began.elapsed();
                if took > Duration::from_secs(3) {
                    println!("{self:?} {point}={action}: {took:?}");
                }
            }
        }
        println!("{self:?}: {tried} faults in {:?}", start.elapsed());
        life.node.finish().await?;
        Ok(points.into_iter().collect())
    }
}

/// `reconcile ARGS`, again while the daemon is cut under it.
async fn command(node: &mut Node, args: &[&str]) -> Result<()> {
    let start = Instant::now();
    loop {
        let out = node.reconcile(args).await?;
        if node.has_ended()? {
            revive(node).await?;
        } else if out.status.success() {
            return Ok(());
        }
        // Deleted by the call that was cut.
        let gone = args[0] == "delete" && String::from_utf8_lossy(&out.stderr).contains("not found");
        if gone {
            return Ok(());
        }
        ensure!(
            start.elapsed() < LIMIT,
            "`reconcile {args:?}`: {}",
            e2e::node::shown(&out)
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_point_of_images_cni_and_yaml() -> Result<()> {
    let (cni, image, declared) = tokio::join!(
        Scene::Cni.all(0, 0, 1),
        Scene::Image.all(0, 0, 1),
        Scene::Declared.all(0, 0, 1)
    );
    all_reached([cni, image, declared]).map(drop)
}

/// Torture case T03, for every step there is.
#[tokio::test(flavor = "multi_thread")]
async fn every_point_of_a_pods_life() -> Result<()> {
    let (one, two) = tokio::join!(
        Scene::Pod.all(e2e::port::unused(), 0, 2),
        Scene::Pod.all(e2e::port::unused(), 1, 2)
    );
    let reached = all_reached([one, two])?;
    let (points, _) = faults::in_sources()?;
    let shims = points.iter().filter(|point| point.starts_with("shim."));
    let never: Vec<_> = shims.filter(|point| !reached.contains(*point)).collect();
    ensure!(never.is_empty(), "no scene reaches {never:#?}");
    Ok(())
}

/// The points of scenes that all went well.
fn all_reached<const N: usize>(outcomes: [Result<BTreeSet<String>>; N]) -> Result<BTreeSet<String>> {
    let (mut reached, mut failed) = (BTreeSet::new(), Vec::new());
    for outcome in outcomes {
        match outcome {
            Ok(points) => reached.extend(points),
            Err(error) => failed.push(format!("{error:#}")),
        }
    }
    ensure!(failed.is_empty(), "{}", failed.join("\n\n"));
    Ok(reached)
}
