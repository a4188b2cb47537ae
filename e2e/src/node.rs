//! A node of its own for each test: `reconcile serve` on a root, state directory and socket in a temporary directory.
//!
//! [`Node::finish`] is the end of every test: it removes everything through the API, stops the daemon, asks `--once`
//! whether anything is left to do, and takes the census. A node that is dropped unfinished shows the daemon's last
//! words and is cleaned away by force.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;
use tokio::net::UnixDatagram;
use tokio::process::Child;

use crate::client::Cri;
use crate::disk::Disk;
use crate::leaks::{Census, Mark, Process};
use crate::pods;
use crate::v1::{ContainerState, PodSandboxConfig};
use crate::{eventually, images, scrub, tools};

/// How the daemon is started.
#[derive(Clone, Debug)]
pub struct Options {
    /// `--network`: `auto`, `cni` or `builtin`.
    pub network: &'static str,
    /// A program that runs the daemon (`strace -f …`), with its arguments.
    pub wrapper: Vec<String>,
    /// Further environment.
    pub env: Vec<(&'static str, String)>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            network: "builtin",
            wrapper: Vec::new(),
            env: Vec::new(),
        }
    }
}

/// A daemon, its directories, a client of its socket.
pub struct Node {
    /// What the root lies on, if not on the usual disk. Goes before the directory that it is mounted in.
    disk: Option<Disk>,
    dir: TempDir,
    /// The state directory, where systems have a tmpfs.
    state: TempDir,
    /// How its next daemon is started.
    pub options: Options,
    daemon: Option<Child>,
    /// Where the daemon says what it is doing (sd_notify(3)).
    notify: Option<UnixDatagram>,
    /// Kept once known: `reset` takes the file away, and the census comes after.
    instance: OnceLock<String>,
    finished: bool,
    pub cri: Cri,
}

impl Node {
    /// A running daemon with the built-in network.
    pub async fn start() -> Result<Node> {
        let mut node = Node::new(Options::default())?;
        node.serve().await?;
        Ok(node)
    }

    /// Directories only; no daemon yet.
    pub fn new(options: Options) -> Result<Node> {
        // On disk: overlay and fsync behave differently on a tmpfs. Short: socket paths end at 108 bytes.
        let dir = tempfile::Builder::new()
            .prefix("rc-")
            .tempdir_in("/var/tmp")
            .context("make the node's directory")?;
        let state = tempfile::Builder::new()
            .prefix("rc-")
            .tempdir_in("/run")
            .context("make the state directory")?;
        for name in ["root", "logs"] {
            fs::create_dir(dir.path().join(name))?;
        }
        let cri = Cri::new(&dir.path().join("cri.sock"));
        Ok(Node {
            disk: None,
            dir,
            state,
            options,
            daemon: None,
            notify: None,
            instance: OnceLock::new(),
            finished: false,
            cri,
        })
    }

    /// The same node, its next daemon started in another way.
    pub fn with(mut self, options: Options) -> Node {
        self.options = options;
        self
    }

    /// The same node, its root on the file system that this mounts.
    pub fn on(mut self, make: impl FnOnce(&Path) -> Result<Disk>) -> Result<Node> {
        let target = self.path("disk");
        fs::create_dir(&target)?;
        self.disk = Some(make(&target)?);
        fs::create_dir(self.root())?;
        Ok(self)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn root(&self) -> PathBuf {
        self.path(if self.disk.is_some() { "disk/root" } else { "root" })
    }

    pub fn state(&self) -> PathBuf {
        self.state.path().into()
    }

    pub fn socket(&self) -> PathBuf {
        self.path("cri.sock")
    }

    /// What the daemon printed so far.
    pub fn daemon_log(&self) -> String {
        fs::read_to_string(self.path("daemon.log")).unwrap_or_default()
    }

    /// The instance's name as it stands in everything global: the first eight digits of the root's id.
    pub fn instance(&self) -> String {
        if let Some(known) = self.instance.get() {
            return known.clone();
        }
        let id = fs::read_to_string(self.root().join("id")).unwrap_or_default();
        let name: String = id.trim().chars().take(8).collect();
        if name.len() == 8 {
            let _ = self.instance.set(name.clone());
        }
        name
    }

    /// The mark by which this node's things are known.
    pub fn mark(&self) -> Mark {
        Mark {
            instance: self.instance(),
            dirs: vec![self.root(), self.state()],
            parents: Vec::new(),
        }
    }

    /// Starts the daemon and waits until it says that it is ready and answers.
    pub async fn serve(&mut self) -> Result<()> {
        let notify = self.path("notify");
        let _ = fs::remove_file(&notify);
        let ready = UnixDatagram::bind(&notify).context("bind the notify socket")?;
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.path("daemon.log"))?;
        let command = self.command(&["serve"])?;
        let mut command = tokio::process::Command::from(command);
        command
            .env("NOTIFY_SOCKET", &notify)
            .stdout(log.try_clone()?)
            .stderr(log)
            .stdin(Stdio::null());
        let mut daemon = command.spawn().context("start the daemon")?;
        let mut buffer = [0; 1024];
        let waited = async {
            loop {
                let len = tokio::select! {
                    received = ready.recv(&mut buffer) => received?,
                    status = daemon.wait() => bail!("the daemon ended with {}", status?),
                };
                if buffer[..len].windows(7).any(|window| window == b"READY=1") {
                    return Ok(());
                }
            }
        };
        let outcome = tokio::time::timeout(Duration::from_secs(20), waited).await;
        self.daemon = Some(daemon);
        self.notify = Some(ready);
        match outcome {
            Ok(outcome) => outcome?,
            Err(_) => bail!("the daemon did not say READY=1 within 20 s"),
        }
        eventually(Duration::from_secs(10), async || Ok(self.cri.version().await?))
            .await
            .context("Version")?;
        let hello = async || self.cri.image(pods::HELLO).await?.context("not there yet");
        eventually(Duration::from_secs(10), hello)
            .await
            .context("the built-in image")?;
        Ok(())
    }

    /// `reconcile` with this node's directories and the given arguments.
    pub fn command(&self, args: &[&str]) -> Result<Command> {
        let program = tools::built("reconcile")?;
        let wrapped = args.first() == Some(&"serve") && !self.options.wrapper.is_empty();
        let mut command = if wrapped {
            let mut command = Command::new(&self.options.wrapper[0]);
            command.args(&self.options.wrapper[1..]).arg(program);
            command
        } else {
            Command::new(program)
        };
        command
            .arg("--root")
            .arg(self.root())
            .arg("--state")
            .arg(self.state())
            .arg("--socket")
            .arg(format!("unix://{}", self.socket().display()))
            .args([
                "--config",
                &self.path("etc").display().to_string(),
                "--network",
                self.options.network,
            ])
            .args(args)
            .envs(self.options.env.iter().map(|(key, value)| (key, value)));
        Ok(command)
    }

    /// Runs `reconcile ARGS` to its end, 120 s at most, whatever its exit code.
    pub async fn reconcile(&self, args: &[&str]) -> Result<Output> {
        let mut command = tokio::process::Command::from(self.command(args)?);
        let run = command.stdin(Stdio::null()).kill_on_drop(true).output();
        let out = tokio::time::timeout(Duration::from_secs(120), run).await;
        Ok(out.with_context(|| format!("`reconcile {}` did not end", args.join(" ")))??)
    }

    /// The same, and it must succeed; answers its standard output.
    pub async fn ok(&self, args: &[&str]) -> Result<String> {
        let out = self.reconcile(args).await?;
        ensure!(out.status.success(), "`reconcile {}`: {}", args.join(" "), shown(&out));
        Ok(String::from_utf8(out.stdout)?)
    }

    /// Writes a file of the node's directory and answers its path.
    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) -> Result<String> {
        let path = self.path(name);
        fs::write(&path, content)?;
        Ok(path.display().to_string())
    }

    /// Writes a program of the node's directory and answers its path.
    ///
    /// Another process does it. A file that is open for writing cannot be executed (execve(2), ETXTBSY), and what a
    /// test opens is open in all that other tests fork at that moment as well.
    pub fn program(&self, name: &str, text: impl AsRef<[u8]>) -> Result<String> {
        let text = self.file(&format!("{name}.text"), text)?;
        let path = self.path(name).display().to_string();
        tools::check(Command::new("install").args(["-m", "755", &text, &path]))?;
        fs::remove_file(text)?;
        Ok(path)
    }

    /// Imports an image archive.
    pub async fn import(&self, archive: impl AsRef<[u8]>) -> Result<()> {
        let file = self.file("import.tar", archive)?;
        self.ok(&["images", "import", &file]).await.map(drop)
    }

    /// Imports `localhost/busybox:1`.
    pub async fn busybox(&self) -> Result<()> {
        self.import(images::Image::busybox(pods::BUSYBOX)?.oci()).await
    }

    /// What a shell script prints inside a container of `image`, in a pod of its own.
    pub async fn inside(&self, image: &str, script: &str) -> Result<Vec<String>> {
        let pod = pods::host_network(self.pod("look"));
        let sandbox = self.cri.run_sandbox(&pod).await?;
        let config = pods::container("c", image, &["/bin/sh", "-c", script]);
        let id = self.cri.launch(&sandbox, &pod, &config).await?;
        let texts = pods::log_texts(self.cri.exited(&id).await?.log_path)?;
        self.cri.stop_sandbox(&sandbox).await?;
        self.cri.remove_sandbox(&sandbox).await?;
        Ok(texts)
    }

    /// A sandbox config for this node.
    pub fn pod(&self, name: &str) -> PodSandboxConfig {
        pods::sandbox(name, &self.path("logs"))
    }

    /// The daemon's own pid, also below a wrapper.
    pub fn pid(&self) -> Result<i32> {
        let pid = self
            .daemon
            .as_ref()
            .and_then(Child::id)
            .context("no daemon is running")?;
        let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
        // Some wrappers become what they run.
        if self.options.wrapper.is_empty() || program.ends_with("reconcile") {
            return Ok(pid as i32);
        }
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
        children
            .split_whitespace()
            .next()
            .context("the wrapper runs nothing")?
            .parse()
            .context("a pid")
    }

    /// Did the daemon end by itself? Then it may be started again.
    pub fn has_ended(&mut self) -> Result<bool> {
        let ended = match &mut self.daemon {
            Some(daemon) => daemon.try_wait().context("look at the daemon")?.is_some(),
            None => true,
        };
        if ended {
            self.daemon = None;
        }
        Ok(ended)
    }

    /// SIGKILL, and waits until it is gone.
    pub async fn kill9(&mut self) -> Result<()> {
        self.end(Signal::SIGKILL).await.map(drop)
    }

    /// SIGTERM: the daemon ends with code 0 within 15 s and leaves the pods running.
    pub async fn stop(&mut self) -> Result<()> {
        let status = self.end(Signal::SIGTERM).await?;
        ensure!(
            status.code() == Some(0),
            "SIGTERM ended the daemon with {status} (signal {:?})",
            status.signal()
        );
        Ok(())
    }

    async fn end(&mut self, signal: Signal) -> Result<std::process::ExitStatus> {
        kill(Pid::from_raw(self.pid()?), signal)?;
        let mut daemon = self.daemon.take().context("no daemon is running")?;
        let status = tokio::time::timeout(Duration::from_secs(15), daemon.wait()).await;
        status
            .with_context(|| format!("the daemon did not end within 15 s of {signal}"))?
            .context("wait for the daemon")
    }

    /// SIGKILL and a new daemon.
    pub async fn crash(&mut self) -> Result<()> {
        self.kill9().await?;
        self.serve().await
    }

    /// All processes of the node but the daemon (and its wrapper).
    pub fn processes(&self) -> Result<Vec<String>> {
        let own = |line: &&str| line.contains("reconcile ") && line.contains(" serve");
        let shim = |line: &str| line.contains("reconcile-shim");
        let census = Census::of(&self.mark())?;
        Ok(census
            .kind("process")
            .filter(|line| !own(line) || shim(line))
            .map(str::to_owned)
            .collect())
    }

    /// Pids of the shims.
    pub fn shims(&self) -> Result<Vec<i32>> {
        let lines = self.processes()?;
        let shims = lines.iter().filter(|line| line.contains("reconcile-shim serve"));
        shims
            .map(|line| Ok(line.split(' ').next().unwrap_or_default().parse()?))
            .collect()
    }

    /// Everything that a client can read of each object and that must read the same after a restart, by id.
    pub async fn picture(&self) -> Result<BTreeMap<String, String>> {
        let mut all = BTreeMap::new();
        for sandbox in self.cri.sandboxes(None).await? {
            let status = self.cri.sandbox(&sandbox.id).await?;
            let pause = self.cri.sandbox_pid(&status.id).await?;
            all.insert(sandbox.id, format!("{status:?} pause {pause}"));
        }
        for container in self.cri.containers(None).await? {
            let status = self.cri.container(&container.id).await?;
            let pid = match status.state() {
                ContainerState::ContainerRunning => self.cri.container_pid(&container.id).await?,
                _ => 0,
            };
            let started = Process::start_time(pid);
            all.insert(container.id, format!("{status:?} pid {pid} since {started:?}"));
        }
        Ok(all)
    }

    /// Waits until no pod has left anything: process, netns, directory, FIFO, link.
    pub async fn no_pods(&self) -> Result<()> {
        eventually(Duration::from_secs(20), async || {
            let processes = self.processes()?;
            ensure!(processes.is_empty(), "processes are left:\n{}", processes.join("\n"));
            let census = Census::of(&self.mark())?;
            // The kernel takes a pod's link away some time after its namespace. The bridge's mark has no pod in it.
            let of_pods = format!("reconcile:{}:", self.instance());
            let links = census.kind("link").filter(|link| link.contains(&of_pods));
            let left = ["netns", "directory", "fifo"]
                .into_iter()
                .flat_map(|kind| census.kind(kind));
            ensure!(
                left.chain(links).next().is_none(),
                "left of pods that are gone:\n{census}"
            );
            Ok(())
        })
        .await
    }

    /// Removes everything, stops the daemon, takes the census. See the module's text.
    pub async fn finish(mut self) -> Result<()> {
        if self.daemon.is_none() {
            self.serve().await.context("the daemon, to clean up")?;
        }
        for sandbox in self.cri.sandboxes(None).await? {
            self.cri
                .stop_sandbox(&sandbox.id)
                .await
                .context("StopPodSandbox, to clean up")?;
            self.cri
                .remove_sandbox(&sandbox.id)
                .await
                .context("RemovePodSandbox, to clean up")?;
        }
        let left = self.cri.containers(None).await?;
        ensure!(left.is_empty(), "containers outlived their sandboxes: {left:#?}");
        self.no_pods().await?;
        self.instance();
        self.stop().await?;
        let once = self.reconcile(&["--once", "--dry-run"]).await?;
        ensure!(
            once.status.code() == Some(0),
            "`--once --dry-run` at rest: {}",
            shown(&once)
        );
        self.ok(&["reset", "--yes"]).await?;
        self.empty().await?;
        self.finished = true;
        Ok(())
    }

    /// The census of this node is empty.
    pub async fn empty(&self) -> Result<()> {
        let mark = self.mark();
        eventually(Duration::from_secs(10), async || {
            let census = Census::of(&mark)?;
            ensure!(census.is_empty(), "left behind:\n{census}");
            Ok(())
        })
        .await
    }

    /// For a test that needed no pods: the node may go as it is, after its census.
    pub async fn finish_unused(mut self) -> Result<()> {
        if self.daemon.is_some() {
            self.stop().await?;
        }
        self.finished = true;
        Ok(())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(daemon) = &mut self.daemon {
            let _ = daemon.start_kill();
        }
        if !self.finished {
            let log = self.daemon_log();
            let spoke = |line: &&str| ["WARN", "ERROR", "panicked"].iter().any(|word| line.contains(word));
            let tail: Vec<_> = log.lines().filter(spoke).rev().take(20).collect();
            let kept = if std::env::var_os("E2E_KEEP").is_some() {
                "kept"
            } else {
                "E2E_KEEP=1 keeps it"
            };
            eprintln!(
                "--- what the daemon complained of; its log was {} ({kept}) ---",
                self.path("daemon.log").display()
            );
            tail.iter().rev().for_each(|line| eprintln!("{line}"));
        }
        let mark = Mark {
            dirs: vec![self.dir.path().into(), self.state()],
            ..self.mark()
        };
        if let Err(error) = scrub::scrub(&mark) {
            eprintln!("cleaning up after a test: {error:#}");
        }
        if std::env::var_os("E2E_KEEP").is_some() && !self.finished {
            self.dir.disable_cleanup(true);
            self.state.disable_cleanup(true);
        }
    }
}

/// Exit status and both streams of a command, for messages.
pub fn shown(out: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    format!("{}\n{}{}", out.status, text(&out.stdout), text(&out.stderr))
}

/// True if the path is a socket somebody answers on.
pub fn answers(socket: &Path) -> bool {
    std::os::unix::net::UnixStream::connect(socket).is_ok()
}
