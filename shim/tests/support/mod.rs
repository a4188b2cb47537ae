//! A real shim, as root, on the real kernel: a pod directory, a root file system borrowed from the host, run records.

// Each test program uses a part of it.
#![allow(dead_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use shim::api::{ExecOutput, ExecRequest, PauseRequest, RunRequest, StartSlot, Started, StopRequest};
use shim::record::{self, End};
use shim::{Client, Identity};

static COUNT: AtomicU32 = AtomicU32::new(0);

pub struct Pod {
    pub tmp: tempfile::TempDir,
    pub dir: PathBuf,
    pub client: Client,
    pub name: String,
    /// Its pid.
    pub shim: u32,
}

pub struct Container {
    pub request: RunRequest,
    pub config: Value,
}

impl Pod {
    pub async fn new() -> Pod {
        let tmp = tempfile::Builder::new().prefix("shim-test").tempdir_in("/run").unwrap();
        let name = format!(
            "shimtest{}x{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        // Longer than a socket's path may be.
        let dir = tmp.path().join("x".repeat(100)).join("shim");
        let (client, shim) = serve(&dir, &name).await;
        Pod {
            tmp,
            dir,
            client,
            name,
            shim,
        }
    }

    /// A container that runs `args`.
    pub fn container(&self, id: &str, args: &[&str]) -> Container {
        let base = self.tmp.path().join(id);
        let root = base.join("root");
        for dir in ["usr", "bin", "lib", "lib64", "etc", "proc", "dev", "sys", "tmp"] {
            fs::create_dir_all(root.join(dir)).unwrap();
        }
        let program = self.tmp.path().join("hello");
        if !program.exists() {
            // By another process: what this one opens for writing, whoever is forked at that moment has open as well,
            // and then nobody can execute it (ETXTBSY).
            let copied = Command::new("cp").arg(exe()).arg(&program).status().unwrap();
            assert!(copied.success());
        }
        fs::hard_link(program, root.join("hello")).unwrap();
        fs::write(
            root.join("etc/passwd"),
            "root:x:0:0::/root:/bin/sh\napp:x:1000:1000::/home/app:/bin/sh\n",
        )
        .unwrap();
        let bind = |dir: &str| json!({"destination": dir, "source": dir, "type": "bind", "options": ["rbind", "ro"]});
        let config = json!({
            "ociVersion": "1.1.0",
            "root": {"path": root},
            "process": {
                "args": args, "cwd": "/", "env": ["PATH=/bin:/usr/bin"],
                "user": {"uid": 0, "gid": 0},
                "capabilities": {"bounding": [], "effective": [], "permitted": []},
            },
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
                {"destination": "/dev/pts", "type": "devpts", "source": "devpts",
                 "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]},
                bind("/usr"), bind("/bin"), bind("/lib"), bind("/lib64"),
            ],
            "linux": {
                "cgroupsPath": format!("/{}/{id}", self.name),
                "namespaces": [{"type": "mount"}, {"type": "ipc"}, {"type": "uts"}, {"type": "network"}],
                "maskedPaths": ["/proc/kcore"], "readonlyPaths": ["/proc/sys"],
            },
        });
        let path = |name: &str| base.join(name).to_str().unwrap().to_owned();
        let request = RunRequest {
            id: id.into(),
            bundle: path("bundle"),
            record: path("run"),
            fifo_dir: path("io"),
            log_path: path("log"),
            ..RunRequest::default()
        };
        Container { request, config }
    }

    pub async fn run(&self, container: &Container) -> shim::Result<Started> {
        fs::create_dir_all(&container.request.bundle).unwrap();
        let config = serde_json::to_vec(&container.config).unwrap();
        fs::write(Path::new(&container.request.bundle).join("config.json"), config).unwrap();
        self.client.run(container.request.clone()).await
    }

    /// Runs `sh -c script`.
    pub async fn shell(&self, id: &str, script: &str) -> Container {
        let container = self.container(id, &["sh", "-c", script]);
        self.run(&container).await.unwrap();
        container
    }

    pub async fn pause(&self, new_pid_ns: bool) -> Started {
        let record = self.tmp.path().join("pause-run").to_str().unwrap().to_owned();
        let cgroup = format!("/{}/pause", self.name);
        self.client
            .pause(PauseRequest {
                record,
                new_pid_ns,
                cgroup,
                ..PauseRequest::default()
            })
            .await
            .unwrap()
    }

    pub async fn stop(&self, id: &str, signal: i32, grace: Duration) {
        let grace_ns = grace.as_nanos() as i64;
        self.client
            .stop(StopRequest {
                id: id.into(),
                signal,
                grace_ns,
            })
            .await
            .unwrap();
    }

    pub async fn exec(&self, id: &str, script: &str, timeout: Duration) -> shim::Result<ExecOutput> {
        let args = ["sh", "-c", script].map(String::from).to_vec();
        let timeout_ns = timeout.as_nanos() as i64;
        self.client
            .exec(ExecRequest {
                id: id.into(),
                args,
                timeout_ns,
                ..ExecRequest::default()
            })
            .await
    }

    /// Kills the shim, then starts another that takes over.
    pub async fn replace_shim(&mut self) {
        self.kill_shim();
        self.revive_shim().await;
    }

    pub fn kill_shim(&self) {
        // SAFETY: no pointers; the shim that this pod started.
        unsafe { libc::kill(self.shim as i32, libc::SIGKILL) };
    }

    /// Starts another shim once the last is gone.
    pub async fn revive_shim(&mut self) {
        self.client.closed().await;
        wait(|| fs::read_link(format!("/proc/{}/exe", self.shim)).is_err().then_some(()));
        (self.client, self.shim) = serve(&self.dir, &self.name).await;
    }

    /// Cgroup directories of this pod that exist.
    pub fn cgroups(&self, id: &str) -> Vec<PathBuf> {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let points = mounts
            .lines()
            .filter(|line| line.contains(" cgroup"))
            .map(|line| line.split(' ').nth(1).unwrap());
        points
            .map(|point| Path::new(point).join(&self.name).join(id))
            .filter(|dir| dir.exists())
            .collect()
    }

    /// Ends everything, and checks that the shim ends by itself then.
    pub async fn end(self) {
        for process in self.client.state().await.unwrap().processes {
            self.client.delete(&process.id).await.unwrap();
        }
        self.client.shutdown().await.unwrap();
        self.client.closed().await;
        assert_eq!(self.cgroups("pause"), Vec::<PathBuf>::new());
        for dir in self.cgroups("") {
            fs::remove_dir(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
        }
    }
}

impl Drop for Pod {
    /// A failed test leaves nothing behind.
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "shim.log:\n{}",
                fs::read_to_string(self.dir.join(shim::LOG)).unwrap_or_default()
            );
        }
        // SAFETY: no pointers; the shim that this pod started, if the test did not end it.
        unsafe { libc::kill(self.shim as i32, libc::SIGKILL) };
        for _ in 0..100 {
            let dirs = self.cgroups("");
            if dirs.iter().all(|dir| clear(dir)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Kills everyone in a cgroup and removes it; true if that worked.
fn clear(dir: &Path) -> bool {
    for child in fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
    {
        if child.is_dir() {
            clear(&child);
        }
    }
    let procs = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    for pid in procs.lines().filter_map(|pid| pid.parse::<i32>().ok()) {
        // SAFETY: no pointers; a process of this pod's cgroup.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
    fs::remove_dir(dir).is_ok()
}

impl Container {
    pub fn log(&self) -> String {
        fs::read_to_string(&self.request.log_path).unwrap_or_default()
    }

    /// The log's content without stamps: `stdout F text`.
    pub fn lines(&self) -> Vec<String> {
        self.log()
            .lines()
            .map(|line| line.split_once(' ').unwrap().1.to_owned())
            .collect()
    }

    pub fn started(&self) -> StartSlot {
        record::read(Path::new(&self.request.record))
            .unwrap()
            .unwrap()
            .start
            .unwrap()
    }

    /// Waits for the end slot.
    pub fn ended(&self) -> End {
        wait(|| {
            record::read(Path::new(&self.request.record))
                .unwrap()
                .and_then(|record| record.end)
        })
    }

    pub fn set(&mut self, pointer: &str, value: Value) {
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        self.config.pointer_mut(parent).unwrap()[key] = value;
    }

    /// Waits until the log has a line that contains `text`.
    pub fn wait_for(&self, text: &str) {
        wait(|| self.log().contains(text).then_some(()));
    }
}

/// The binary under test. Not `env!`: the compiler runs below a shell, which drops names with a dash.
pub fn exe() -> PathBuf {
    let beside = || {
        std::env::current_exe()
            .unwrap()
            .parent()
            .unwrap()
            .with_file_name("reconcile-shim")
    };
    std::env::var_os("CARGO_BIN_EXE_reconcile-shim").map_or_else(beside, PathBuf::from)
}

async fn serve(dir: &Path, name: &str) -> (Client, u32) {
    spawn(dir, name).unwrap();
    let client = Client::connect(dir).await.unwrap();
    let pid = client.state().await.unwrap().pid;
    (client, pid)
}

pub fn spawn(dir: &Path, name: &str) -> shim::Result<()> {
    let whose = Identity {
        namespace: "test".into(),
        name: name.into(),
        uid: "0123".into(),
    };
    shim::spawn(&exe(), &whose, dir, &shim::Place::default())
}

/// Looks until it is there; a test that waits longer has failed.
pub fn wait<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < Duration::from_secs(20), "waited in vain");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub fn is_alive(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

/// Memory of a process, kB: (proportional share, of it anonymous).
pub fn memory(pid: u32) -> (u64, u64) {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap().split_whitespace().next().unwrap().parse().unwrap()
    };
    (field("Pss:"), field("Pss_Anon:"))
}
