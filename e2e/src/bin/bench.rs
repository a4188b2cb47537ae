//! Measures what a node pays for its pods and prints it beside the budget. Not a test: nothing here can fail on a time.
//!
//! `cargo run --release -p e2e --bin bench [pods]` as root on a quiet machine; 100 pods unless told otherwise.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use e2e::leaks::{self, processes};
use e2e::netns::inside;
use e2e::node::Node;

use e2e::pods::{self, HELLO, shell};
use e2e::v1::PodSandboxConfig;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The longest that a repair is waited for.
const LIMIT: Duration = Duration::from_secs(120);

/// Rows of the table: what, measured, budget.
#[derive(Default)]
struct Table(Vec<[String; 3]>);

impl Table {
    fn row(&mut self, what: &str, measured: impl Into<String>, budget: &str) {
        let measured = measured.into();
        eprintln!("{what}: {measured}");
        self.0.push([what.into(), measured, budget.into()]);
    }

    fn times(&mut self, what: &str, mut times: Vec<Duration>, budget: &str) {
        times.sort();
        let at = |part: usize| times[(times.len() - 1) * part / 100].as_secs_f64() * 1e3;
        self.row(what, format!("{:.1} / {:.1} ms", at(50), at(99)), budget);
    }

    fn print(&self) {
        println!("| | measured | budget |\n|---|---|---|");
        for [what, measured, budget] in &self.0 {
            println!("| {what} | {measured} | {budget} |");
        }
    }
}

async fn timed<T, E>(times: &mut Vec<Duration>, work: impl Future<Output = Result<T, E>>) -> Result<T, E> {
    let start = Instant::now();
    let outcome = work.await;
    times.push(start.elapsed());
    outcome
}

/// A value in kB of a file like /proc/PID/status.
fn kilobytes(path: &str, key: &str) -> Result<u64> {
    let text = fs::read_to_string(path).with_context(|| path.to_owned())?;
    let line = text
        .lines()
        .find(|line| line.starts_with(key))
        .with_context(|| format!("{key} in {path}"))?;
    line.split_whitespace()
        .nth(1)
        .context("a value")?
        .parse()
        .context("a number")
}

fn pss(pid: i32) -> Result<u64> {
    kilobytes(&format!("/proc/{pid}/smaps_rollup"), "Pss:")
}

/// Processor time of a process and of its ended children, in seconds.
fn cpu(pid: i32) -> Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<_> = stat.rsplit_once(')').context("stat")?.1.split_whitespace().collect();
    let ticks: u64 = fields[11..15]
        .iter()
        .map(|field| field.parse::<u64>().unwrap_or(0))
        .sum();
    Ok(ticks as f64 / 100.0)
}

#[tokio::main]
async fn main() -> Result<()> {
    let pods: usize = std::env::args()
        .nth(1)
        .map_or(Ok(100), |word| word.parse())
        .context("how many pods")?;
    let mut table = Table::default();
    let mut node = Node::start().await?;
    node.busybox().await?;
    table.row("daemon without pods, RSS", megabytes(node.pid()?)?, "15 MiB");
    one_by_one(&node, &mut table, "built-in network", |pod| pod, ["8", "24", "6"]).await?;
    one_by_one(&node, &mut table, "host network", pods::host_network, ["5", "20", "5"]).await?;
    many(&mut node, &mut table, pods).await?;
    logs(&node, &mut table).await?;
    node.finish().await?;
    table.print();
    Ok(())
}

fn megabytes(pid: i32) -> Result<String> {
    let rss = kilobytes(&format!("/proc/{pid}/status"), "VmRSS:")?;
    Ok(format!("{:.1} MiB", rss as f64 / 1024.0))
}

/// 50 pods, one after the other.
async fn one_by_one(
    node: &Node,
    table: &mut Table,
    network: &str,
    on: impl Fn(PodSandboxConfig) -> PodSandboxConfig,
    [run, start, stop]: [&str; 3],
) -> Result<()> {
    let [mut ran, mut created, mut started, mut all, mut exec] = [const { Vec::new() }; 5];
    let [mut stopped, mut removed, mut torn, mut gone] = [const { Vec::new() }; 4];
    let cri = &node.cri;
    for n in 0..50 {
        let pod = on(node.pod(&format!("one{n}")));
        let whole = Instant::now();
        let sandbox = timed(&mut ran, cri.run_sandbox(&pod)).await?;
        let config = pods::container("c", HELLO, &["/hello", "sleep", "1000"]);
        let id = timed(&mut created, cri.create(&sandbox, &pod, &config)).await?;
        timed(&mut started, cri.start(&id)).await?;
        all.push(whole.elapsed());
        timed(&mut exec, cri.exec(&id, &["/hello", "exit", "0"], 5)).await?;
        timed(&mut stopped, cri.stop(&id, 10)).await?;
        timed(&mut removed, cri.remove(&id)).await?;
        timed(&mut torn, cri.stop_sandbox(&sandbox)).await?;
        timed(&mut gone, cri.remove_sandbox(&sandbox)).await?;
    }
    let name = |what: &str| format!("{what}, {network}, p50 / p99");
    table.times(&name("RunPodSandbox"), ran, &format!("{run} ms"));
    table.times(&name("CreateContainer"), created, "3 ms");
    table.times(&name("StartContainer"), started, "10 ms");
    table.times(&name("pod start to running"), all, &format!("{start} ms"));
    table.times(&name("ExecSync"), exec, "4 ms");
    table.times(&name("StopContainer"), stopped, "4 ms");
    table.times(&name("RemoveContainer"), removed, "");
    table.times(&name("StopPodSandbox"), torn, &format!("{stop} ms"));
    table.times(&name("RemovePodSandbox"), gone, "");
    Ok(())
}

/// Many pods, ten at a time; what they weigh; how long a restarted daemon needs to answer for them.
async fn many(node: &mut Node, table: &mut Table, pods: usize) -> Result<()> {
    let before = cpu(node.pid()?)?;
    let start = Instant::now();
    let mut lanes = tokio::task::JoinSet::new();
    for lane in 0..10 {
        let cri = node.cri.clone();
        let configs: Vec<_> = (lane..pods)
            .step_by(10)
            .map(|n| node.pod(&format!("many{n}")))
            .collect();
        lanes.spawn(async move {
            for pod in configs {
                let sandbox = cri.run_sandbox(&pod).await?;
                cri.launch(
                    &sandbox,
                    &pod,
                    &pods::container("c", HELLO, &["/hello", "sleep", "100000"]),
                )
                .await?;
            }
            anyhow::Ok(())
        });
    }
    for lane in lanes.join_all().await {
        lane?;
    }
    let rate = pods as f64 / start.elapsed().as_secs_f64();
    table.row(
        &format!("{pods} pods, ten at a time"),
        format!("{rate:.0} pods/s"),
        "60 pods/s",
    );
    let used = (cpu(node.pid()?)? - before) / pods as f64;
    table.row(
        "processor time of the daemon and its ended children per pod start",
        format!("{used:.3} s"),
        "0.03 s",
    );
    table.row(
        &format!("daemon with {pods} pods, RSS"),
        megabytes(node.pid()?)?,
        "25 MiB",
    );

    let [mut shims, mut pauses] = [const { Vec::new() }; 2];
    let ours = node.shims()?;
    for process in processes()? {
        if ours.contains(&process.pid) {
            shims.push(pss(process.pid)?);
        } else if ours.contains(&process.parent) && process.command.contains("pause") {
            pauses.push(pss(process.pid)?);
        }
    }
    ensure!(shims.len() == pods, "{} shims for {pods} pods", shims.len());
    let mean = |all: &[u64]| all.iter().sum::<u64>() as f64 / all.len().max(1) as f64;
    let (shim, pause) = (mean(&shims), mean(&pauses));
    table.row(
        "memory of a pod (PSS): shim + pause",
        format!("{shim:.0} + {pause:.0} kB"),
        "300 kB",
    );

    idle(node, table).await?;

    node.kill9().await?;
    let start = Instant::now();
    let (answer, served) = tokio::join!(first_list(node.cri.clone(), pods), node.serve());
    served?;
    let took = answer?.duration_since(start).as_secs_f64();
    table.row(
        &format!("restart with {pods} pods: first complete list"),
        format!("{took:.3} s"),
        "0.05 s",
    );
    let mut lists = Vec::new();
    for _ in 0..50 {
        ensure!(
            timed(&mut lists, node.cri.containers(None)).await?.len() == pods,
            "a list is short"
        );
    }
    table.times(&format!("ListContainers, {pods} containers, p50 / p99"), lists, "1 ms");

    repairs(node, table).await?;

    let start = Instant::now();
    let cri = &node.cri;
    for chunk in cri.sandboxes(None).await?.chunks(10) {
        let gone = chunk.iter().map(|sandbox| async {
            cri.stop_sandbox(&sandbox.id).await?;
            cri.remove_sandbox(&sandbox.id).await
        });
        futures::future::try_join_all(gone).await?;
    }
    let rate = pods as f64 / start.elapsed().as_secs_f64();
    table.row(
        &format!("{pods} pods stopped and removed, ten at a time"),
        format!("{rate:.0} pods/s"),
        "",
    );
    Ok(())
}

/// Command lines of all processes, and nothing else of them: what takes the time must not be the looking.
fn commands() -> Vec<String> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter(|entry| entry.file_name().as_encoded_bytes()[0].is_ascii_digit());
    let lines = numbers.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    lines.map(|line| String::from_utf8_lossy(&line).into_owned()).collect()
}

/// When each of the pods was seen to be whole again, from `start` on.
fn until_whole(sandboxes: &[String], pauses: &[i32], start: Instant) -> Result<Vec<Duration>> {
    let mut broken: Vec<_> = sandboxes.iter().zip(pauses).enumerate().collect();
    let mut times = Vec::new();
    while !broken.is_empty() {
        ensure!(start.elapsed() < LIMIT, "not repaired within {LIMIT:?}: {broken:?}");
        let commands = commands();
        broken.retain(|(n, (id, pause))| {
            let is_whole = match n % 4 {
                0 | 1 => default_route(**pause),
                _ => commands.iter().any(|c| c.contains("reconcile-shim") && c.contains(*id)),
            };
            times.extend(is_whole.then(|| start.elapsed()));
            !is_whole
        });
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(times)
}

/// While the daemon is dead half of the pods lose their shims, a quarter their addresses, a quarter their links. Timed
/// is from the daemon's start until the kernel shows each whole again.
async fn repairs(node: &mut Node, table: &mut Table) -> Result<()> {
    let sandboxes: Vec<String> = node.cri.sandboxes(None).await?.into_iter().map(|s| s.id).collect();
    let instance = node.instance();
    let netns = |id: &str| PathBuf::from(format!("/run/netns/rc-{instance}-{id}"));
    let mut pauses = Vec::new();
    for id in &sandboxes {
        pauses.push(node.cri.sandbox_pid(id).await?);
    }
    node.kill9().await?;
    for (n, id) in sandboxes.iter().enumerate() {
        match n % 4 {
            0 => drop(inside(
                &netns(id),
                &["addr", "flush", "dev", "eth0", "scope", "global"],
            )?),
            1 => drop(inside(&netns(id), &["link", "set", "eth0", "down"])?),
            _ => kill(Pid::from_raw(shim_of(id)?.context("a shim")?), Signal::SIGKILL)?,
        }
    }
    let start = Instant::now();
    // In a thread of its own: nothing else here delays the looks.
    let looks = tokio::task::spawn_blocking(move || until_whole(&sandboxes, &pauses, start));
    node.serve().await?;
    let times = looks.await??;
    let what = format!("{} faults repaired after the daemon's start, p50 / p99", times.len());
    table.times(&what, times, "");
    Ok(())
}

/// The shim that serves this sandbox.
/// Has this process's network namespace a default route? Without link or address there is none (proc_pid_net(5)).
fn default_route(pid: i32) -> bool {
    let table = std::fs::read_to_string(format!("/proc/{pid}/net/route")).unwrap_or_default();
    table.lines().any(|line| line.starts_with("eth0\t00000000\t"))
}

fn shim_of(sandbox: &str) -> Result<Option<i32>> {
    let serves =
        |process: &leaks::Process| process.command.contains("reconcile-shim") && process.command.contains(sandbox);
    Ok(processes()?.into_iter().find(serves).map(|process| process.pid))
}

async fn first_list(cri: e2e::client::Cri, pods: usize) -> Result<Instant> {
    let start = Instant::now();
    loop {
        if cri.sandboxes(None).await.is_ok_and(|sandboxes| sandboxes.len() == pods) {
            return Ok(Instant::now());
        }
        if start.elapsed() > Duration::from_secs(30) {
            bail!("no complete list within 30 s of the restart");
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Processor time of the daemon and all shims while nobody asks anything.
async fn idle(node: &Node, table: &mut Table) -> Result<()> {
    let total = || -> Result<f64> {
        let mut sum = cpu(node.pid()?)?;
        for shim in node.shims()? {
            sum += cpu(shim)?;
        }
        Ok(sum)
    };
    tokio::time::sleep(Duration::from_secs(5)).await;
    let before = total()?;
    tokio::time::sleep(Duration::from_secs(65)).await;
    let used = (total()? - before) * 60.0 / 65.0;
    table.row(
        "idle processor time of daemon and shims in a minute",
        format!("{used:.2} s"),
        "0.1 s",
    );
    Ok(())
}

/// 300 MiB of 100-byte lines through a pipe into the log.
async fn logs(node: &Node, table: &mut Table) -> Result<()> {
    let pod = pods::host_network(node.pod("log"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let line = "x".repeat(99);
    let script = format!("yes {line} | head -c 314572800");
    let id = node.cri.launch(&sandbox, &pod, &shell("c", &script)).await?;
    let shim = node.shims()?.pop().context("the shim")?;
    let start = Instant::now();
    loop {
        let status = node.cri.container(&id).await?;
        if status.finished_at > 0 {
            let took = (status.finished_at - status.started_at) as f64 / 1e9;
            table.row(
                "log of 300 MiB in 100-byte lines",
                format!("{:.0} MB/s", 314.6 / took),
                "350 MB/s",
            );
            table.row(
                "processor time of the shim for it",
                format!("{:.2} s", cpu(shim)?),
                "0.6 s",
            );
            break;
        }
        ensure!(
            start.elapsed() < Duration::from_secs(120),
            "the log takes longer than two minutes"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    node.cri.stop_sandbox(&sandbox).await?;
    node.cri.remove_sandbox(&sandbox).await?;
    Ok(())
}
