//! One kubelet: its configuration, its process, its directories, what it answers.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::status;
use crate::leaks::{self, Mark};
use crate::node::Node;
use crate::{pods, port, scrub, tools};

/// Settings of the kernel that a kubelet sets if they are not so (kubelet: setupKernelTunables).
const WANTED: [(&str, &str); 6] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

/// How long a pod may take on a busy two-core machine.
const LIMIT: Duration = Duration::from_secs(90);

/// How a kubelet is started.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Feature gates and whether they are on.
    pub gates: Vec<(&'static str, bool)>,
    /// Further fields of its KubeletConfiguration.
    pub further: Value,
}

/// A kubelet with its directories. It ends with the value; its pods do not.
pub struct Kubelet {
    dir: PathBuf,
    /// Its socket of the CRI.
    endpoint: String,
    program: PathBuf,
    /// What is the daemon's, to end that after a failure.
    mark: Mark,
    /// How it is started next.
    pub settings: Settings,
    /// Of the main server, the read-only one, and health.
    ports: [u16; 3],
    /// The cgroup below which it makes `kubepods`, in every hierarchy.
    cgroup: String,
    process: Option<Child>,
}

impl Kubelet {
    /// A kubelet for this node, not yet started; `None` where none can be built.
    pub async fn new(node: &Node, settings: Settings) -> Result<Option<Kubelet>> {
        let Some(program) = tokio::task::spawn_blocking(tools::kubelet).await?? else {
            return Ok(None);
        };
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let kubelet = Kubelet {
            dir: node.path("kubelet"),
            endpoint: format!("unix://{}", node.socket().display()),
            program,
            mark: node.mark(),
            settings,
            ports: [port::unused(), port::unused(), port::unused()],
            cgroup: format!("rc-kubelet-{}-{n}", std::process::id()),
            process: None,
        };
        for name in ["", "manifests", "root", "pods", "log", "lib", "plugins", "sys"] {
            fs::create_dir_all(kubelet.dir.join(name))?;
        }
        kubelet.share()?;
        Ok(Some(kubelet))
    }

    /// Starts it and waits until it says it is healthy.
    pub async fn start(&mut self) -> Result<()> {
        ensure!(self.process.is_none(), "this kubelet runs already");
        for hierarchy in hierarchies()? {
            fs::create_dir_all(hierarchy.join(&self.cgroup))?;
        }
        fs::write(self.dir.join("config.json"), self.config().to_string())?;
        let mut script = String::from("set -e\nmount --make-private /\nmount --make-rprivate /proc\n");
        for (name, value) in WANTED {
            let file = self.dir.join("sys").join(name.replace('/', "."));
            fs::write(&file, format!("{value}\n"))?;
            script += &format!("mount --bind {} /proc/sys/{name}\n", file.display());
        }
        for name in ["log", "lib"] {
            script += &format!("mount --bind {} /var/{name}\n", self.dir.join(name).display());
        }
        script += "exec \"$@\"";
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.dir.join("kubelet.log"))?;
        let option = |name: &str, value: &Path| format!("--{name}={}", value.display());
        let process = Command::new("unshare")
            .args(["--mount", "--propagation", "unchanged", "sh", "-c", &script, "sh"])
            .arg(&self.program)
            .arg(option("config", &self.dir.join("config.json")))
            .arg(option("root-dir", &self.dir.join("root")))
            .arg(option("cert-dir", &self.dir.join("pki")))
            .args(["--hostname-override=n1", "--v=3"])
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("unshare: install the Debian package util-linux")?;
        self.process = Some(process);
        self.wait("kubelet to be healthy", async |kubelet| {
            ensure!(kubelet.get("/healthz").await? == "ok", "it is not");
            Ok(())
        })
        .await
    }

    /// Its KubeletConfiguration.
    fn config(&self) -> Value {
        let gates: serde_json::Map<_, _> = self
            .settings
            .gates
            .iter()
            .map(|(gate, on)| (gate.to_string(), json!(on)))
            .collect();
        let mut config = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "staticPodPath": self.dir.join("manifests"), "podLogsDir": self.dir.join("pods"),
            "volumePluginDir": self.dir.join("plugins"),
            "containerRuntimeEndpoint": self.endpoint, "imageServiceEndpoint": self.endpoint,
            "address": "127.0.0.1", "port": self.ports[0], "readOnlyPort": self.ports[1],
            "healthzBindAddress": "127.0.0.1", "healthzPort": self.ports[2],
            "authentication": { "anonymous": { "enabled": true }, "webhook": { "enabled": false } },
            "authorization": { "mode": "AlwaysAllow" },
            "failCgroupV1": false, "failSwapOn": false, "cgroupDriver": "cgroupfs",
            "cgroupRoot": format!("/{}", self.cgroup), "enforceNodeAllocatable": [],
            "makeIPTablesUtilChains": false, "protectKernelDefaults": true,
            "syncFrequency": "1s", "fileCheckFrequency": "1s", "nodeStatusUpdateFrequency": "1s",
            "volumeStatsAggPeriod": "5s", "registryPullQPS": 0, "serializeImagePulls": false,
            "imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 99,
            "evictionHard": { "imagefs.available": "0%", "nodefs.available": "0%", "nodefs.inodesFree": "0%",
                "imagefs.inodesFree": "0%", "memory.available": "0%", "pid.available": "0%" },
            "shutdownGracePeriod": "0s", "featureGates": gates,
        });
        super::merge(&mut config, self.settings.further.clone());
        config
    }

    /// Makes its directory a mount that other mount namespaces share.
    fn share(&self) -> Result<()> {
        let none = None::<&str>;
        mount(Some(&self.dir), &self.dir, none, MsFlags::MS_BIND, none).context("bind the kubelet's directory")?;
        // A group of its own, also where the file system around it is shared.
        for flag in [MsFlags::MS_PRIVATE, MsFlags::MS_SHARED] {
            mount(none, &self.dir, none, flag, none).context("share the kubelet's directory")?;
        }
        Ok(())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    pub fn pid(&self) -> Result<i32> {
        Ok(self.process.as_ref().context("no kubelet runs")?.id() as i32)
    }

    /// SIGKILL, and waits until it is gone.
    pub fn kill9(&mut self) -> Result<()> {
        self.end(Signal::SIGKILL)
    }

    /// What a reboot does to it: its process and all of its pods' are gone, as are cgroups and what was mounted. The
    /// node's daemon and shims go first: no shim sees an end that was the node's.
    pub async fn reboot(&mut self, node: &mut Node) -> Result<()> {
        self.kill9()?;
        node.kill9().await?;
        for shim in node.shims()? {
            kill(Pid::from_raw(shim), Signal::SIGKILL)?;
        }
        self.kill_pods();
        self.unmount_below();
        self.remove_cgroups();
        Ok(())
    }

    /// SIGTERM; its pods go on.
    pub fn stop(&mut self) -> Result<()> {
        self.end(Signal::SIGTERM)
    }

    fn end(&mut self, signal: Signal) -> Result<()> {
        let mut process = self.process.take().context("no kubelet runs")?;
        let pid = Pid::from_raw(process.id() as i32);
        // One that a reboot has ended is only to be reaped.
        if process.try_wait()?.is_none() {
            kill(pid, signal)?;
        }
        let start = Instant::now();
        while process.try_wait()?.is_none() {
            if start.elapsed() > Duration::from_secs(20) {
                kill(pid, Signal::SIGKILL)?;
                process.wait()?;
                bail!("the kubelet did not end within 20 s of {signal}");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Writes the manifest of a pod in the namespace `default`, its grace two seconds unless the spec says otherwise.
    pub fn apply(&self, name: &str, spec: Value) -> Result<()> {
        let mut whole = json!({ "terminationGracePeriodSeconds": 2, "enableServiceLinks": false });
        super::merge(&mut whole, spec);
        let pod = json!({ "apiVersion": "v1", "kind": "Pod", "spec": whole,
            "metadata": { "name": name, "namespace": "default", "labels": { "app": name } } });
        // The kubelet leaves alone what begins with a dot.
        let new = self.dir.join(format!("manifests/.{name}"));
        fs::write(&new, pod.to_string())?;
        fs::rename(new, self.dir.join(format!("manifests/{name}.json")))?;
        Ok(())
    }

    /// Takes the manifest away: the kubelet is to end the pod.
    pub fn delete(&self, name: &str) -> Result<()> {
        fs::remove_file(self.dir.join(format!("manifests/{name}.json"))).with_context(|| format!("manifest of {name}"))
    }

    /// Takes all manifests away and waits until the kubelet has ended all pods.
    pub async fn delete_all(&self, node: &Node) -> Result<()> {
        for entry in fs::read_dir(self.dir.join("manifests"))? {
            fs::remove_file(entry?.path())?;
        }
        self.wait("all pods to end", async |kubelet| {
            let pods = kubelet.pods().await?;
            ensure!(pods.is_empty(), "the kubelet has {} pods", pods.len());
            let sandboxes = node.cri.sandboxes(None).await?;
            let ready = |sandbox: &&crate::v1::PodSandbox| sandbox.state() == crate::v1::PodSandboxState::SandboxReady;
            ensure!(sandboxes.iter().find(ready).is_none(), "ready: {sandboxes:#?}");
            let volumes = fs::read_dir(kubelet.path("root/pods"))?.count();
            ensure!(volumes == 0, "directories of {volumes} pods are left");
            Ok(())
        })
        .await
    }

    /// What a container has written, by its log of the newest attempt.
    pub fn lines(&self, pod: &Value, container: &str) -> Result<Vec<String>> {
        let attempt = status::restarts(pod, container)?;
        pods::log_texts(self.log_dir(pod, container).join(format!("{attempt}.log")))
    }

    /// Where a container's logs are.
    pub fn log_dir(&self, pod: &Value, container: &str) -> PathBuf {
        let text = |field: &str| pod["metadata"][field].as_str().unwrap_or_default().to_owned();
        let of_pod = format!("{}_{}_{}", text("namespace"), text("name"), text("uid"));
        self.dir.join("pods").join(of_pod).join(container)
    }

    /// GET on the read-only port; an answer other than 200 is an error.
    pub async fn get(&self, path: &str) -> Result<String> {
        let work = async {
            let mut stream = tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, self.ports[1])).await?;
            let ask = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n");
            stream.write_all(ask.as_bytes()).await?;
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).await?;
            Ok::<_, std::io::Error>(String::from_utf8_lossy(&answer).into_owned())
        };
        let answer = tokio::time::timeout(Duration::from_secs(20), work).await;
        let answer = answer
            .with_context(|| format!("no answer from {path}"))?
            .context("the kubelet")?;
        let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP answer")?;
        let status = head.split(' ').nth(1).unwrap_or_default();
        ensure!(status == "200", "{path}: {status} {body}");
        Ok(body.to_owned())
    }

    /// URL of the main server.
    pub fn url(&self, path: &str) -> String {
        format!("https://127.0.0.1:{}{path}", self.ports[0])
    }

    /// GET on the main server, for what the read-only one has not.
    pub async fn fetch(&self, path: &str) -> Result<String> {
        let url = self.url(path);
        let mut curl = tokio::process::Command::new("curl");
        curl.args([
            "--silent",
            "--show-error",
            "--fail-with-body",
            "--insecure",
            "--max-time",
            "20",
            &url,
        ]);
        let out = curl.output().await.context("curl")?;
        ensure!(out.status.success(), "{url}: {}", crate::node::shown(&out));
        Ok(String::from_utf8_lossy(&out.stdout).into_owned())
    }

    /// All pods that it knows.
    pub async fn pods(&self) -> Result<Vec<Value>> {
        let mut list: Value = serde_json::from_str(&self.get("/pods").await?).context("/pods is not JSON")?;
        match list["items"].take() {
            Value::Array(pods) => Ok(pods),
            _ => Ok(Vec::new()),
        }
    }

    /// One pod, by the name of its manifest.
    pub async fn pod(&self, name: &str) -> Result<Value> {
        let full = format!("{name}-n1");
        let pods = self.pods().await?;
        let found = pods.into_iter().find(|pod| pod["metadata"]["name"] == *full);
        found.with_context(|| format!("the kubelet has no pod {full}"))
    }

    /// Waits until the pod's condition Ready is True; the pod.
    pub async fn ready(&self, name: &str) -> Result<Value> {
        self.wait(&format!("the pod {name} to be ready"), async |kubelet| {
            let pod = kubelet.pod(name).await?;
            let conditions = pod["status"]["conditions"].as_array().context("no conditions")?;
            let ready = |one: &Value| one["type"] == "Ready" && one["status"] == "True";
            ensure!(conditions.iter().any(ready), "{:#}", pod["status"]);
            Ok(pod)
        })
        .await
    }

    /// Waits until `look` answers; fails with its last words, and the kubelet's.
    pub async fn wait<T>(&self, what: &str, mut look: impl AsyncFnMut(&Kubelet) -> Result<T>) -> Result<T> {
        let start = Instant::now();
        loop {
            match look(self).await {
                Ok(found) => return Ok(found),
                Err(why) if start.elapsed() > LIMIT => {
                    return Err(why.context(format!("waited {LIMIT:?} for {what}")));
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
            }
        }
    }

    /// How often it has looked at what runs, or synced a pod.
    pub async fn syncs(&self) -> Result<f64> {
        let text = self.get("/metrics").await?;
        let count = |line: &str| line.rsplit(' ').next()?.parse::<f64>().ok();
        let names = [
            "kubelet_pod_worker_duration_seconds_count",
            "kubelet_pleg_relist_duration_seconds_count",
        ];
        let lines = text
            .lines()
            .filter(|line| names.iter().any(|name| line.starts_with(name)));
        Ok(lines.filter_map(count).sum())
    }

    /// How often it found the node not ready to sync pods.
    pub fn unready(&self) -> usize {
        self.log().matches("Skipping pod synchronization").count()
    }

    /// Its log so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.path("kubelet.log")).unwrap_or_default()
    }

    /// The end of a test: all pods away, the kubelet stopped, nothing left of it.
    pub async fn finish(mut self, node: &Node) -> Result<()> {
        self.delete_all(node).await?;
        self.stop()?;
        self.clean();
        let left = leaks::cgroups()?;
        let left: Vec<_> = left.iter().filter(|path| path.contains(&self.cgroup)).collect();
        ensure!(left.is_empty(), "cgroups are left: {left:#?}");
        let mounts = leaks::mounts(Path::new("/proc/self/mountinfo"))?;
        let dir = self.dir.display().to_string();
        let left: Vec<_> = mounts.iter().filter(|line| line.contains(&dir)).collect();
        ensure!(left.is_empty(), "mounts are left: {left:#?}");
        Ok(())
    }

    /// SIGKILL to all that runs in its cgroups, after a failure.
    fn kill_pods(&self) {
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(5) {
            let cgroups = leaks::cgroups().unwrap_or_default();
            let ours = cgroups.iter().filter(|path| path.contains(&self.cgroup));
            let lists: String = ours
                .filter_map(|path| fs::read_to_string(Path::new(path).join("cgroup.procs")).ok())
                .collect();
            let pids: Vec<i32> = lists.lines().filter_map(|pid| pid.parse().ok()).collect();
            if pids.is_empty() {
                break;
            }
            for pid in pids {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Takes away what only this harness and the kubelet made: the shared mount, and empty cgroups.
    fn clean(&self) {
        self.unmount_below();
        let _ = umount2(&self.dir, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW);
        self.remove_cgroups();
    }

    fn unmount_below(&self) {
        let mounts = leaks::mounts(Path::new("/proc/self/mountinfo")).unwrap_or_default();
        let mut points: Vec<_> = mounts.iter().filter_map(|line| line.split(' ').next()).collect();
        points.retain(|point| Path::new(point).starts_with(&self.dir) && Path::new(point) != self.dir);
        points.sort_by_key(|point| std::cmp::Reverse(point.len()));
        for point in points {
            let _ = umount2(point, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW);
        }
    }

    fn remove_cgroups(&self) {
        let mut cgroups = leaks::cgroups().unwrap_or_default();
        cgroups.retain(|path| path.contains(&self.cgroup));
        cgroups.sort_by_key(|path| std::cmp::Reverse(path.len()));
        for cgroup in cgroups {
            let _ = fs::remove_dir(cgroup);
        }
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        if self.process.is_some() {
            let log = self.log();
            let errors: Vec<_> = log.lines().filter(|line| line.starts_with('E')).collect();
            eprintln!("--- the kubelet's last errors ---");
            errors.iter().rev().take(15).rev().for_each(|line| eprintln!("{line}"));
            let _ = self.kill9();
            // A daemon would put back what is killed.
            let _ = scrub::scrub(&self.mark);
            self.kill_pods();
        }
        if std::env::var_os("E2E_KEEP").is_some() {
            let _ = fs::copy(self.path("kubelet.log"), format!("/var/tmp/{}.log", self.cgroup));
        }
        self.clean();
    }
}

/// Where cgroups are mounted.
fn hierarchies() -> Result<Vec<PathBuf>> {
    let table = fs::read_to_string("/proc/self/mountinfo").context("read the mount table")?;
    let cgroups = table.lines().filter(|line| line.contains(" - cgroup"));
    Ok(cgroups
        .filter_map(|line| line.split(' ').nth(4))
        .map(PathBuf::from)
        .collect())
}
