//! A runtime under trial: ours, or containerd with a root, state and socket of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;
use tokio::process::Child;

use crate::client::Cri;
use crate::images::Image;
use crate::leaks::{self, Process, processes};
use crate::node::{Node, Options};
use crate::pods::BUSYBOX;
use crate::{eventually, tools};

/// Debian's CNI plugins.
const PLUGINS: &str = "/usr/lib/cni";

/// Writes the CNI configuration that both get; its leases lie in `dir` too.
fn network(dir: &Path) -> Result<PathBuf> {
    let net = dir.join("net.d");
    fs::create_dir_all(&net)?;
    let ranges = serde_json::json!([[{ "subnet": "198.51.100.0/24" }]]);
    let ipam = serde_json::json!({ "type": "host-local", "dataDir": dir.join("leases"), "ranges": ranges });
    let plugins = serde_json::json!([{ "type": "ptp", "ipam": ipam }]);
    let list = serde_json::json!({ "cniVersion": "1.0.0", "name": "peers", "plugins": plugins });
    fs::write(net.join("10-peers.conflist"), list.to_string())?;
    Ok(net)
}

pub enum Runtime {
    Ours(Box<Node>),
    Containerd(Box<Containerd>),
}

pub struct Containerd {
    dir: TempDir,
    daemon: Option<Child>,
    cri: Cri,
}

impl Runtime {
    pub async fn ours() -> Result<Runtime> {
        let options = Options {
            network: "cni",
            ..Options::default()
        };
        let mut node = Node::new(options)?;
        let net = network(&node.path(""))?;
        let config = format!("network:\n  cniConfDir: {}\n  cniBinDirs: [{PLUGINS}]\n", net.display());
        fs::create_dir_all(node.path("etc"))?;
        node.file("etc/config.yaml", config)?;
        node.serve().await?;
        node.busybox().await?;
        Ok(Runtime::Ours(Box::new(node)))
    }

    /// Debian's package, with runc.
    pub async fn containerd() -> Result<Runtime> {
        let dir = tempfile::Builder::new().prefix("cd-").tempdir_in("/var/tmp")?;
        for name in ["root", "state", "logs"] {
            fs::create_dir(dir.path().join(name))?;
        }
        let path = |name: &str| dir.path().join(name).display().to_string();
        // Not every machine lets its root lower the score; ours clamps it by itself.
        let config = format!(
            "version = 2\nroot = \"{}\"\nstate = \"{}\"\n[grpc]\naddress = \"{}\"\n\
             [plugins.\"io.containerd.grpc.v1.cri\"]\nsandbox_image = \"localhost/pause:1\"\n\
             restrict_oom_score_adj = true\n\
             [plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = \"{PLUGINS}\"\nconf_dir = \"{}\"\n",
            path("root"),
            path("state"),
            path("cri.sock"),
            network(dir.path())?.display()
        );
        fs::write(path("config.toml"), config)?;
        let cri = Cri::new(&dir.path().join("cri.sock"));
        let mut containerd = Containerd { dir, daemon: None, cri };
        containerd.serve().await?;
        containerd.import(&Image::busybox(BUSYBOX)?)?;
        let mut pause = Image::busybox("localhost/pause:1")?;
        pause.config["Entrypoint"] = serde_json::json!(["/bin/sleep", "1000000"]);
        pause.config["Cmd"] = serde_json::json!([]);
        containerd.import(&pause)?;
        Ok(Runtime::Containerd(Box::new(containerd)))
    }

    pub fn cri(&self) -> &Cri {
        match self {
            Runtime::Ours(node) => &node.cri,
            Runtime::Containerd(other) => &other.cri,
        }
    }

    pub fn dir(&self) -> PathBuf {
        match self {
            Runtime::Ours(node) => node.path(""),
            Runtime::Containerd(other) => other.dir.path().into(),
        }
    }

    pub fn socket(&self) -> PathBuf {
        match self {
            Runtime::Ours(node) => node.socket(),
            Runtime::Containerd(other) => other.dir.path().join("cri.sock"),
        }
    }

    pub async fn kill9(&mut self) -> Result<()> {
        match self {
            Runtime::Ours(node) => node.kill9().await,
            Runtime::Containerd(other) => {
                let mut daemon = other.daemon.take().context("containerd does not run")?;
                daemon.start_kill()?;
                daemon.wait().await?;
                Ok(())
            }
        }
    }

    pub async fn serve(&mut self) -> Result<()> {
        match self {
            Runtime::Ours(node) => node.serve().await,
            Runtime::Containerd(other) => other.serve().await,
        }
    }

    /// Pid of the sandbox's shim.
    pub fn shim(&self, sandbox: &str) -> Result<Option<i32>> {
        let program = match self {
            Runtime::Ours(_) => "reconcile-shim serve",
            Runtime::Containerd(_) => "containerd-shim",
        };
        let is = |process: &Process| process.command.contains(program) && process.command.contains(sandbox);
        Ok(processes()?.into_iter().find(is).map(|process| process.pid))
    }

    /// What bears this runtime's mark: its processes but the daemon, mounts, cgroups.
    pub fn things(&self) -> Result<Vec<String>> {
        let marks = match self {
            Runtime::Ours(node) => vec![node.root().display().to_string(), node.instance()],
            Runtime::Containerd(other) => vec![other.dir.path().display().to_string(), "/k8s.io/".to_owned()],
        };
        let ours = |text: &str| marks.iter().any(|mark| text.contains(mark));
        let mut all = Vec::new();
        for process in processes()? {
            let daemon = process.command.contains(" serve") && !process.command.contains("shim")
                || process.command.starts_with("containerd ");
            if ours(&process.command) && !daemon && process.state != 'Z' && process.pid != std::process::id() as i32 {
                all.push(format!("process {} {}", process.pid, process.command));
            }
        }
        let mounts = leaks::mounts(Path::new("/proc/self/mountinfo"))?;
        all.extend(
            mounts
                .into_iter()
                .filter(|mount| ours(mount))
                .map(|mount| format!("mount {mount}")),
        );
        let cgroups = leaks::cgroups()?;
        // A runtime's own cgroup, which holds its pods', may stay.
        let inner = |path: &String| ours(path) && path.rsplit('/').next().is_some_and(|name| name.len() == 64);
        all.extend(
            cgroups
                .into_iter()
                .filter(inner)
                .map(|cgroup| format!("cgroup {cgroup}")),
        );
        Ok(all)
    }

    /// Removes all that it lists.
    pub async fn clear(&self) -> Result<()> {
        let cri = self.cri();
        for container in cri.containers(None).await? {
            let _ = cri.stop(&container.id, 0).await;
            let _ = cri.remove(&container.id).await;
        }
        for sandbox in cri.sandboxes(None).await? {
            let _ = cri.stop_sandbox(&sandbox.id).await;
            let _ = cri.remove_sandbox(&sandbox.id).await;
        }
        Ok(())
    }

    /// The last lines that the daemon wrote.
    pub fn log_tail(&self) -> String {
        let log = fs::read(self.dir().join("daemon.log")).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<_> = log.lines().rev().take(15).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join("\n")
    }

    pub async fn end(self) -> Result<()> {
        match self {
            Runtime::Ours(node) => node.finish().await,
            Runtime::Containerd(mut other) => {
                if let Some(mut daemon) = other.daemon.take() {
                    daemon.start_kill()?;
                    daemon.wait().await?;
                }
                other.scrub()
            }
        }
    }
}

impl Containerd {
    async fn serve(&mut self) -> Result<()> {
        ensure!(
            tools::installed("containerd"),
            "install Debian's packages containerd and runc"
        );
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.dir.path().join("daemon.log"))?;
        let mut command = tokio::process::Command::new("containerd");
        command.arg("--config").arg(self.dir.path().join("config.toml"));
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.daemon = Some(command.kill_on_drop(true).spawn().context("start containerd")?);
        eventually(Duration::from_secs(20), async || Ok(self.cri.version().await?)).await?;
        Ok(())
    }

    fn import(&self, image: &Image) -> Result<()> {
        let file = self.dir.path().join("image.tar");
        fs::write(&file, image.docker())?;
        let socket = self.dir.path().join("cri.sock");
        let mut ctr = Command::new("ctr");
        ctr.arg("--address")
            .arg(socket)
            .args(["--namespace", "k8s.io", "images", "import"])
            .arg(&file);
        tools::check(&mut ctr).map(drop)
    }

    /// Takes away what it left.
    fn scrub(&self) -> Result<()> {
        let ours = self.dir.path().display().to_string();
        for process in processes()? {
            if process.command.contains(&ours) && process.pid != std::process::id() as i32 {
                let _ = kill(Pid::from_raw(process.pid), Signal::SIGKILL);
            }
        }
        let mut mounts = leaks::mounts(Path::new("/proc/self/mountinfo"))?;
        mounts.retain(|mount| mount.contains(&ours));
        for mount in mounts.iter().rev() {
            let Some(point) = mount.split(' ').next() else {
                bail!("a mount without a point: {mount}")
            };
            let _ = umount2(point, MntFlags::MNT_DETACH);
        }
        let mut cgroups = leaks::cgroups()?;
        cgroups.retain(|path| path.contains("/k8s.io"));
        cgroups.sort_by_key(|path| std::cmp::Reverse(path.len()));
        for cgroup in cgroups {
            let procs = fs::read_to_string(Path::new(&cgroup).join("cgroup.procs")).unwrap_or_default();
            for pid in procs.lines().filter_map(|pid| pid.parse().ok()) {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
            let _ = fs::remove_dir(&cgroup);
        }
        Ok(())
    }
}
