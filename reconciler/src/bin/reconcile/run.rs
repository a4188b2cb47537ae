//! `reconcile run`: pods in the foreground, as if they were one program.
//!
//! ```text
//!   apply -> follow: records say how far it is, log files what it prints -> remove -> exit with its code
//! ```

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use cri::records::v1::Applied;
use cri::records::v1::applied::Outcome;
use futures::future::join_all;
use serde_json::Value;
use state::yaml::Record;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::apply::named;
use crate::client::{Client, list, text};
use crate::exec::code;
use crate::kinds::Kind;
use crate::local::{Need, Session};
use crate::logs::Printer;
use crate::options::Global;
use crate::tail::{self, Start};
use crate::verdict::{Verdict, judge};
use crate::{delete, documents};

/// Exit code when it is not the workload that failed.
pub const FAILURE: u8 = 125;
/// A pod that waits for longer says for what.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Args)]
pub struct Run {
    /// A file, a directory, or - for standard input
    #[arg(value_name = "FILE")]
    file: String,
    /// Leave the pods at the end; without a daemon nobody watches over them then
    #[arg(long)]
    keep: bool,
    /// Remove what bears the same names first
    #[arg(long)]
    replace: bool,
}

pub async fn run(global: &Global, args: &Run) -> Result<ExitCode> {
    let records = documents::read(std::slice::from_ref(&args.file))?;
    if !records
        .iter()
        .any(|r| matches!(r, Record::Pod(_) | Record::Container(_)))
    {
        bail!(
            "{}: holds no Pod and no Container, so there is nothing to run",
            args.file
        );
    }
    let signals = Signals::take()?;
    let session = Session::open(global, Need::Act).await?;
    let code = in_foreground(&session.client, args, &records, signals).await;
    session.close().await?;
    code.map(ExitCode::from)
}

async fn in_foreground(client: &Client, args: &Run, records: &[Record], mut signals: Signals) -> Result<u8> {
    let documents = documents::to_send(records)?;
    make_way(client, args, &client.apply(documents.clone(), true).await?).await?;
    let applied = client.apply(documents, false).await?;
    let mut follower = Follower::new(client.clone(), records, applied);
    let end = follower.until_done(&mut signals).await;
    let removed = match args.keep {
        true => Ok(()),
        false => follower.remove(&mut signals).await,
    };
    follower.last_words().await?;
    let code = end?;
    removed.context("what ran could not be removed wholly")?;
    Ok(code)
}

/// Names must be free: what already ran, or runs, is not this run's.
async fn make_way(client: &Client, args: &Run, would: &[Applied]) -> Result<()> {
    let taken = would
        .iter()
        .filter(|one| one.outcome() != Outcome::Created && !shared(one));
    for one in taken {
        if !args.replace {
            let remedy = format!("`reconcile delete {}` removes it, and so does --replace", named(one));
            bail!("{} exists already; {remedy}", named(one));
        }
        remove_one(client, one).await?;
    }
    Ok(())
}

/// May others use it too? Then it may be there before, and stays.
fn shared(one: &Applied) -> bool {
    one.kind == Kind::Image.name() || one.kind == Kind::Secret.name() && one.outcome() != Outcome::Created
}

async fn remove_one(client: &Client, one: &Applied) -> Result<()> {
    let kind: Kind = one.kind.parse().map_err(anyhow::Error::msg)?;
    let record = client.get(&one.kind, &one.uid).await?.unwrap_or_default();
    delete::remove(client, kind, &one.uid, None, true, delete::stop_time(&record)).await
}

/// SIGINT, SIGTERM and SIGHUP, taken before anything is started.
struct Signals([(Signal, u8); 3]);

impl Signals {
    fn take() -> Result<Signals> {
        let take = |kind: SignalKind| {
            let number = u8::try_from(kind.as_raw_value()).unwrap_or_default();
            anyhow::Ok((signal(kind).context("cannot take signals")?, 128 + number))
        };
        Ok(Signals([
            take(SignalKind::interrupt())?,
            take(SignalKind::terminate())?,
            take(SignalKind::hangup())?,
        ]))
    }

    /// The exit code for the next one.
    async fn next(&mut self) -> u8 {
        let [(a, x), (b, y), (c, z)] = &mut self.0;
        tokio::select! {
            _ = a.recv() => *x,
            _ = b.recv() => *y,
            _ = c.recv() => *z,
        }
    }
}

/// How something that was applied came out.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    Code(u8),
    /// It could not run at all.
    Failed(String),
}

struct Job {
    applied: Applied,
    end: Option<End>,
    /// What it waits for, and what of that was told.
    waits: String,
    told: String,
}

struct Follower {
    client: Client,
    jobs: Vec<Job>,
    changes: mpsc::Receiver<Result<(Value, bool)>>,
    /// The pod's name of every sandbox seen; `None` if it is not ours.
    sandboxes: HashMap<String, Option<String>>,
    /// Containers whose log is shown. Dropping the descriptor says that the log is complete.
    shown: HashMap<String, Option<OwnedFd>>,
    readers: JoinSet<Result<()>>,
    /// More than one container: each line says whose it is.
    labelled: bool,
}

impl Follower {
    fn new(client: Client, records: &[Record], applied: Vec<Applied>) -> Follower {
        let containers = records.iter().map(|record| match record {
            Record::Pod(pod) => pod.spec.init_containers.len() + pod.spec.containers.len(),
            Record::Container(_) => 1,
            _ => 0,
        });
        let (send, changes) = mpsc::channel(64);
        for kind in [Kind::Pod, Kind::Container, Kind::Sandbox, Kind::Image, Kind::Secret] {
            tokio::spawn(forward(client.clone(), kind, send.clone()));
        }
        let job = |applied| Job {
            applied,
            end: None,
            waits: String::new(),
            told: String::new(),
        };
        Follower {
            client,
            jobs: applied.into_iter().map(job).collect(),
            changes,
            sandboxes: HashMap::new(),
            shown: HashMap::new(),
            readers: JoinSet::new(),
            labelled: containers.sum::<usize>() > 1,
        }
    }

    /// Until everything has ended, something cannot run, or a signal comes; the exit code.
    async fn until_done(&mut self, signals: &mut Signals) -> Result<u8> {
        let mut patience = tokio::time::interval(PATIENCE);
        patience.reset();
        loop {
            if let Some(code) = self.over() {
                return code;
            }
            tokio::select! {
                change = self.changes.recv() => self.take(change.context("the daemon stopped")??).await?,
                Some(reader) = self.readers.join_next() => reader??,
                code = signals.next() => return Ok(code),
                _ = patience.tick() => self.tell_waits(),
            }
        }
    }

    /// The first code that is not 0, once all have ended; at once what cannot run.
    fn over(&self) -> Option<Result<u8>> {
        let failure = self.jobs.iter().find_map(|job| match &job.end {
            Some(End::Failed(why)) => Some(Err(anyhow::anyhow!("{}: {why}", named(&job.applied)))),
            _ => None,
        });
        let all: Option<Vec<u8>> = self
            .jobs
            .iter()
            .map(|job| match job.end {
                Some(End::Code(code)) => Some(code),
                _ => None,
            })
            .collect();
        failure.or_else(|| all.map(|codes| Ok(codes.into_iter().find(|code| *code != 0).unwrap_or(0))))
    }

    fn tell_waits(&mut self) {
        for job in self
            .jobs
            .iter_mut()
            .filter(|job| job.end.is_none() && job.waits != job.told)
        {
            job.told.clone_from(&job.waits);
            if !job.waits.is_empty() {
                eprintln!("reconcile: {} waits: {}", named(&job.applied), job.waits);
            }
        }
    }

    async fn take(&mut self, (record, erased): (Value, bool)) -> Result<()> {
        let uid = text(&record["metadata"]["uid"]);
        if record["kind"] == "Container" {
            self.container(&record, erased).await?;
        }
        let Some(job) = self.jobs.iter_mut().find(|job| job.applied.uid == uid) else {
            return Ok(());
        };
        if job.end.is_none() {
            job.end = match erased {
                true => Some(End::Failed("it was deleted meanwhile".to_owned())),
                false => end(&record, job.applied.generation),
            };
            job.waits = match judge(&record, job.applied.generation) {
                Verdict::Waiting(what) => what,
                Verdict::Met | Verdict::Failed(_) => String::new(),
            };
        }
        Ok(())
    }

    /// Shows the log of a container of ours once it has begun; the log is complete once the container has ended.
    async fn container(&mut self, record: &Value, erased: bool) -> Result<()> {
        let (spec, status) = (&record["spec"], &record["status"]);
        let uid = text(&record["metadata"]["uid"]);
        let Some(pod) = self.pod_of(uid, text(&spec["sandbox"])).await? else {
            return Ok(());
        };
        let (phase, path) = (text(&status["phase"]), text(&status["logPath"]));
        if !self.shown.contains_key(uid) && !path.is_empty() && matches!(phase, "Running" | "Exited") {
            let (ended, end) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
            self.shown.insert(uid.to_owned(), Some(end));
            let label = self.labelled.then(|| format!("[{pod}/{}] ", text(&spec["name"])));
            self.readers.spawn_blocking({
                let path = PathBuf::from(path);
                move || show(&path, &ended, Printer::new(label, false))
            });
        }
        if (erased || phase == "Exited")
            && let Some(end) = self.shown.get_mut(uid)
        {
            *end = None;
        }
        Ok(())
    }

    /// The pod's name, if the container is one of this run's.
    async fn pod_of(&mut self, container: &str, sandbox: &str) -> Result<Option<String>> {
        let ours = |uid: &str| self.jobs.iter().any(|job| job.applied.uid == uid);
        if let Some(known) = self.sandboxes.get(sandbox) {
            return Ok(known.clone());
        }
        let Some(record) = self.client.get(Kind::Sandbox.name(), sandbox).await? else {
            return Ok(None);
        };
        let of_ours = ours(container) || ours(sandbox) || ours(text(&record["metadata"]["owner"]["uid"]));
        let pod = of_ours.then(|| text(&record["spec"]["pod"]["name"]).to_owned());
        self.sandboxes.insert(sandbox.to_owned(), pod.clone());
        Ok(pod)
    }

    /// Removes what this run made, and goes on showing logs meanwhile. A further signal ends the wait.
    async fn remove(&mut self, signals: &mut Signals) -> Result<()> {
        let ours = self
            .jobs
            .iter()
            .map(|job| job.applied.clone())
            .filter(|one| !shared(one));
        let ours: Vec<_> = ours.collect();
        let client = self.client.clone();
        let mut removal = Box::pin(remove_all(&client, &ours));
        loop {
            tokio::select! {
                removed = &mut removal => return removed,
                Some(change) = self.changes.recv() => self.take(change?).await?,
                _ = signals.next() => {
                    let names: Vec<_> = ours.iter().map(named).collect();
                    bail!("left early; `reconcile delete {}` waits for the rest", names.join(" "));
                }
            }
        }
    }

    /// Shows what is left of the logs.
    async fn last_words(mut self) -> Result<()> {
        // Containers of which no change was read yet.
        for container in self.client.list(Kind::Container.name()).await.unwrap_or_default() {
            self.container(&container, false).await?;
        }
        self.shown.clear();
        while let Some(reader) = self.readers.join_next().await {
            reader??;
        }
        Ok(())
    }
}

async fn remove_all(client: &Client, ours: &[Applied]) -> Result<()> {
    let removals = join_all(ours.iter().map(|one| remove_one(client, one))).await;
    removals.into_iter().collect()
}

async fn forward(client: Client, kind: Kind, send: mpsc::Sender<Result<(Value, bool)>>) {
    let pump = async {
        let mut changes = client.watch(kind.name(), "").await?;
        while let Some(change) = changes.next().await? {
            if send.send(Ok(change)).await.is_err() {
                return Ok(());
            }
        }
        bail!("the daemon stopped")
    };
    if let Err(e) = pump.await {
        let _ = send.send(Err(e)).await;
    }
}

fn show(path: &std::path::Path, ended: &OwnedFd, mut printer: Printer) -> Result<()> {
    match tail::follow(path, Start::default(), ended, |entry| printer.print(entry)) {
        // It ended and its pod was removed before the log could be opened.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
        other => other.with_context(|| format!("log {}", path.display()))?,
    }
    Ok(printer.end()?)
}

/// How a record came out, once it has.
fn end(record: &Value, generation: u64) -> Option<End> {
    let status = &record["status"];
    let verdict = judge(record, generation);
    if verdict == Verdict::Met && record["kind"] == "Secret" {
        return Some(End::Code(0));
    }
    if status["observedGeneration"].as_u64().unwrap_or(0) < generation {
        return None;
    }
    match (text(&record["kind"]), text(&status["phase"]), verdict) {
        ("Pod", "Succeeded", _) => Some(End::Code(0)),
        ("Pod", "Failed", verdict) => match (pod_code(status), verdict) {
            (Some(code), _) => Some(End::Code(code)),
            (None, Verdict::Failed(why)) => Some(End::Failed(why)),
            (None, _) => Some(End::Failed("it failed".to_owned())),
        },
        ("Container", "Exited", verdict) => match (verdict, text(&status["reason"])) {
            (Verdict::Failed(why), "StartError") => Some(End::Failed(why)),
            _ => Some(End::Code(code_of(status))),
        },
        (_, _, Verdict::Failed(why)) => Some(End::Failed(why)),
        // These only have to be there.
        ("PodSandbox" | "Image", _, Verdict::Met) => Some(End::Code(0)),
        _ => None,
    }
}

fn code_of(status: &Value) -> u8 {
    code(
        status["exitCode"]
            .as_i64()
            .and_then(|c| i32::try_from(c).ok())
            .unwrap_or(255),
    )
}

/// The first failing main container's code, else the failing init container's; `None` if one could not start.
fn pod_code(status: &Value) -> Option<u8> {
    let containers = list(&status["containers"]);
    if containers.iter().any(|c| c["reason"] == "StartError") {
        return None;
    }
    let failing = |init: bool| {
        let mut these = containers.iter().filter(move |c| c["init"] == init);
        these.find(|c| c["exitCode"].as_i64().is_some_and(|code| code != 0))
    };
    failing(false).or_else(|| failing(true)).map(code_of)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(phase: &str, containers: Value) -> Value {
        json!({"kind": "Pod", "spec": {}, "status": {"observedGeneration": 1, "phase": phase, "conditions": [],
            "containers": containers}})
    }

    #[test]
    fn a_pods_code_is_that_of_its_first_failing_main_container() {
        fn c(name: &str, init: bool, code: i32) -> serde_json::Value {
            json!({"name": name, "init": init, "exitCode": code, "reason": "Error"})
        }
        let failed = pod(
            "Failed",
            json!([
                c("side", true, 137),
                c("a", false, 0),
                c("b", false, 3),
                c("c", false, 4)
            ]),
        );
        assert_eq!(end(&failed, 1), Some(End::Code(3)));
        let init = pod("Failed", json!([c("setup", true, 7)]));
        assert_eq!(end(&init, 1), Some(End::Code(7)));
        assert_eq!(end(&pod("Succeeded", json!([])), 1), Some(End::Code(0)));
        assert_eq!(
            end(&pod("Succeeded", json!([])), 2),
            None,
            "the status of an older wish"
        );
        assert_eq!(
            end(&pod("Running", json!([c("a", false, 3)])), 1),
            None,
            "it will be restarted"
        );
    }

    #[test]
    fn what_cannot_start_is_our_failure() {
        let c = json!([{"name": "a", "init": false, "exitCode": 128, "reason": "StartError", "message": "no /x"}]);
        let Some(End::Failed(why)) = end(&pod("Failed", c.clone()), 1) else {
            panic!()
        };
        assert!(why.contains("no /x"), "{why}");
        assert!(
            matches!(end(&pod("Running", c), 1), Some(End::Failed(_))),
            "whatever the restart policy"
        );
    }
}
