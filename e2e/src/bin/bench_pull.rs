//! One image of ten layers and one of one, 300 MB each, half of it random, from a registry on loopback to a root
//! file system on disk: ours, `skopeo copy` with `umoci unpack`, and containerd's CRI, in turns. Prints a table;
//! nothing here can fail on a time. Each trial has a fresh ext4 in a file: on one that has just lost many files, making
//! new ones may take several times as long (ext4 without a journal looks for inodes that were not freed lately).
//!
//! `cargo run --release -p e2e --bin bench_pull [rounds]` as root on a quiet machine; three rounds unless told
//! otherwise. Needs the Debian packages skopeo, umoci, docker-registry and containerd.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::client::Cri;
use e2e::corpus::Random;
use e2e::disk::Disk;
use e2e::eventually;
use e2e::hub::Hub;
use e2e::images::{Compression, Image, Layer};
use e2e::node::{Node, Options};
use tempfile::TempDir;

const BYTES: usize = 300_000_000;
const FILES: usize = 20_000;
const LIMIT: Duration = Duration::from_secs(600);

/// Seconds, processor seconds, MiB.
#[derive(Clone, Copy, Debug)]
struct Cost {
    wall: f64,
    cpu: f64,
    peak: f64,
}

fn layer(random: &mut Random, bytes: usize, files: usize) -> Layer {
    let mut layer = Layer::new(Compression::Gzip);
    for n in 0..files {
        let dir = format!("usr/d{}", n / 100);
        if n % 100 == 0 {
            layer = layer.dir(&dir, 0o755);
        }
        let size = bytes / files / 16 * 16;
        let mut data = random.bytes(size / 2);
        let line = format!("{:016x}", random.word());
        data.extend(line.bytes().cycle().take(size / 2));
        layer = layer.file(&format!("{dir}/f{n}"), 0o644, data);
    }
    let tar = layer.tar();
    let (blob, suffix) = layer.blob();
    Layer::stored(tar, blob, suffix)
}

fn image(layers: usize) -> Image {
    let mut random = Random::new(layers as u64);
    let layers = (0..layers).map(|_| layer(&mut random, BYTES / layers, FILES / layers));
    Image::new("localhost/bench:1", layers.collect(), serde_json::json!({}))
}

/// Processor time of a process with its threads, and of its ended children, in seconds.
fn cpu(pid: u32) -> Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<_> = stat.rsplit_once(')').context("stat")?.1.split_whitespace().collect();
    let ticks = fields[11..15].iter().map(|field| field.parse::<u64>().unwrap_or(0));
    Ok(ticks.sum::<u64>() as f64 / 100.0)
}

fn peak(pid: u32) -> Result<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = text.lines().find(|line| line.starts_with("VmHWM:")).context("VmHWM")?;
    Ok(line.split_whitespace().nth(1).context("a value")?.parse::<f64>()? / 1024.0)
}

fn sync() {
    nix::unistd::sync();
}

/// A daemon's pull, the flush of what it left to the kernel included.
async fn pulled(cri: &Cri, pid: u32, name: &str) -> Result<Cost> {
    sync();
    let (start, before) = (Instant::now(), cpu(pid)?);
    cri.pull_with(LIMIT, name, None).await?;
    sync();
    Ok(Cost {
        wall: start.elapsed().as_secs_f64(),
        cpu: cpu(pid)? - before,
        peak: peak(pid)?,
    })
}

/// A fresh file system at `target`.
fn disk(target: &Path) -> Result<Disk> {
    let make = [
        "mkfs.ext4",
        "-q",
        "-E",
        "lazy_itable_init=0,lazy_journal_init=0,nodiscard",
    ];
    Disk::looped(target, &make, "ext4", 6144)
}

/// A directory on a fresh file system.
fn place() -> Result<(TempDir, Disk)> {
    let dir = tempfile::Builder::new().prefix("rc-bench-").tempdir_in("/var/tmp")?;
    let disk = disk(dir.path())?;
    Ok((dir, disk))
}

async fn ours(name: &str) -> Result<Cost> {
    let mut node = Node::new(Options::default())?.on(disk)?;
    node.serve().await?;
    let cost = pulled(&node.cri, node.pid()? as u32, name).await?;
    node.finish().await?;
    Ok(cost)
}

/// Runs a program to its end; its peak is sampled.
fn watched(command: &mut Command) -> Result<f64> {
    let mut child = command.stdout(Stdio::null()).spawn()?;
    let mut most: f64 = 0.0;
    loop {
        most = most.max(peak(child.id()).unwrap_or(0.0));
        if let Some(status) = child.try_wait()? {
            ensure!(status.success(), "{command:?}: {status}");
            return Ok(most);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn skopeo_and_umoci(name: &str) -> Result<Cost> {
    let (dir, _disk) = place()?;
    let layout = format!("{}:x", dir.path().join("layout").display());
    sync();
    let (start, before) = (Instant::now(), cpu(std::process::id())?);
    let mut skopeo = Command::new("skopeo");
    skopeo.args(["--insecure-policy", "copy", "--quiet", "--src-tls-verify=false"]);
    let first = watched(skopeo.args([&format!("docker://{name}"), &format!("oci:{layout}")]))?;
    let mut umoci = Command::new("umoci");
    let second = watched(
        umoci
            .args(["unpack", "--image", &layout])
            .arg(dir.path().join("bundle")),
    )?;
    sync();
    Ok(Cost {
        wall: start.elapsed().as_secs_f64(),
        cpu: cpu(std::process::id())? - before,
        peak: first.max(second),
    })
}

struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn containerd(name: &str) -> Result<Cost> {
    let (dir, _disk) = place()?;
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (host, _) = name.split_once('/').context("a registry's name")?;
    fs::create_dir_all(dir.path().join("certs").join(host))?;
    fs::write(
        dir.path().join("certs").join(host).join("hosts.toml"),
        format!("server = \"http://{host}\"\n[host.\"http://{host}\"]\ncapabilities = [\"pull\", \"resolve\"]\n"),
    )?;
    let config = format!(
        "version = 2\nroot = {:?}\nstate = {:?}\n[grpc]\naddress = {:?}\n\
         [plugins.\"io.containerd.grpc.v1.cri\".registry]\n\
         config_path = {:?}\n",
        at("root"),
        at("state"),
        at("socket"),
        at("certs")
    );
    fs::write(dir.path().join("config.toml"), config)?;
    let log = fs::File::create(dir.path().join("log"))?;
    let mut command = Command::new("containerd");
    command
        .args(["--config", &at("config.toml")])
        .stdout(log.try_clone()?)
        .stderr(log);
    let daemon = Daemon(command.spawn().context("Debian package containerd")?);
    let cri = Cri::new(Path::new(&at("socket")));
    eventually(Duration::from_secs(20), async || Ok(cri.version().await?))
        .await
        .context("containerd")?;
    let cost = pulled(&cri, daemon.0.id(), name).await;
    cost.with_context(|| fs::read_to_string(dir.path().join("log")).unwrap_or_default())
}

fn median(mut costs: Vec<Cost>) -> Cost {
    costs.sort_by(|a, b| a.wall.total_cmp(&b.wall));
    costs[costs.len() / 2]
}

#[tokio::main]
async fn main() -> Result<()> {
    let rounds: usize = std::env::args()
        .nth(1)
        .map_or(Ok(3), |word| word.parse())
        .context("rounds")?;
    let hub = Hub::start().await?;
    println!(
        "| 300 MB from a registry on loopback | wall | processor | peak memory | of ours |\n|---|---|---|---|---|"
    );
    for layers in [10, 1] {
        let name = hub.push(&image(layers), &format!("bench:{layers}"), &[])?;
        let mut all = [const { Vec::new() }; 3];
        for round in 0..rounds {
            for (who, costs) in all.iter_mut().enumerate() {
                let cost = match who {
                    0 => ours(&name).await?,
                    1 => skopeo_and_umoci(&name)?,
                    _ => containerd(&name).await?,
                };
                eprintln!("{layers} layers, round {round}, {who}: {cost:?}");
                costs.push(cost);
            }
        }
        let [first, ..] = &all;
        let own = median(first.clone()).wall;
        for (who, costs) in ["ours", "skopeo copy + umoci unpack", "containerd, CRI"]
            .into_iter()
            .zip(all)
        {
            let Cost { wall, cpu, peak } = median(costs);
            println!(
                "| {layers} layers: {who} | {wall:.1} s | {cpu:.1} s | {peak:.0} MiB | {:.1} × |",
                wall / own
            );
        }
    }
    Ok(())
}
