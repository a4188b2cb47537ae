//! `reconcile delete`: records, and with them what they stand for.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{ArgAction, Args};
use futures::future::join_all;

use crate::client::{Client, text};
use crate::documents;
use crate::kinds::{self, KINDS, Kind, Target};
use crate::local::{Need, Session};
use crate::options::Global;
use crate::print;

/// For what is left to do after the grace period.
const TEARDOWN: Duration = Duration::from_secs(90);

#[derive(Args)]
pub struct Delete {
    /// KIND or KIND/NAME
    #[arg(value_name = "KIND", required_unless_present = "filename", help = format!("{KINDS}; or KIND/NAME"))]
    target: Option<Target>,
    /// Names, or beginnings of ids
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// What these files state: files, directories, or - for standard input
    #[arg(short, long = "filename", value_name = "FILE", conflicts_with = "target")]
    filename: Vec<String>,
    /// Only in this namespace
    #[arg(short, long)]
    namespace: Option<String>,
    /// Every record of the kind
    #[arg(long, conflicts_with_all = ["names", "filename"])]
    all: bool,
    /// Seconds between the stop signal and SIGKILL [default: as the pod says]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(i64).range(0..=86_400))]
    grace_period: Option<i64>,
    /// Kill at once; the same as --grace-period 0
    #[arg(long, conflicts_with = "grace_period")]
    now: bool,
    /// Wait until everything is gone; without a daemon that is always done
    #[arg(long, default_value_t = true, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true",
        value_name = "BOOL")]
    wait: bool,
}

pub async fn run(global: &Global, args: &Delete) -> Result<ExitCode> {
    let wanted = wanted(args)?;
    let session = Session::open(global, Need::Act).await?;
    let done = delete(&session, args, &wanted).await;
    session.close().await?;
    done.map(|()| ExitCode::SUCCESS)
}

/// What to look for: kinds, names, namespaces. `None` for the name: all.
type Wanted = (Kind, Option<String>, Option<String>);

fn wanted(args: &Delete) -> Result<Vec<Wanted>> {
    let Some(target) = &args.target else {
        let mut records = documents::read(&args.filename)?;
        // What was made last goes first: children before what they stand on.
        records.reverse();
        let one = |record: state::yaml::Record| {
            let kind = record.kind().parse().map_err(anyhow::Error::msg)?;
            let namespace = Some(record.meta().namespace.clone()).filter(|n| !n.is_empty());
            Ok((kind, Some(record.meta().name.clone()), namespace))
        };
        return records.into_iter().map(one).collect();
    };
    let names = target.names(&args.names);
    if matches!(target.kind, Kind::Node | Kind::Debt) {
        bail!("a {} cannot be deleted: it states what is", target.kind.lower());
    }
    match (names.is_empty(), args.all) {
        (true, true) => Ok(vec![(target.kind, None, args.namespace.clone())]),
        (true, false) => bail!("say which {}: names, or --all", target.kind.lower()),
        (false, _) => Ok(names
            .into_iter()
            .map(|name| {
                // `delete pod/a sandbox/b`; an image's name has slashes of its own.
                let other = name.parse::<Target>().ok().filter(|_| target.kind != Kind::Image);
                match other {
                    Some(Target { kind, name: Some(name) }) => (kind, Some(name), args.namespace.clone()),
                    _ => (target.kind, Some(name), args.namespace.clone()),
                }
            })
            .collect()),
    }
}

async fn delete(session: &Session, args: &Delete, wanted: &[Wanted]) -> Result<()> {
    let client = &session.client;
    let mut victims = Vec::new();
    let mut missing = Vec::new();
    for (kind, name, namespace) in wanted {
        match name {
            Some(name) => match kinds::called(&client.list(kind.name()).await?, *kind, name, namespace.as_deref()) {
                found if found.is_empty() => missing.push(format!("{} {name:?} not found", kind.lower())),
                found if found.len() == 1 => victims.extend(found.into_iter().map(|r| (*kind, r))),
                // Says which they are.
                _ => victims.push((*kind, kinds::one(client, *kind, name, namespace.as_deref()).await?)),
            },
            None => {
                let mut all = client.list(kind.name()).await?;
                all.retain(|r| {
                    namespace
                        .as_ref()
                        .is_none_or(|n| text(&r["metadata"]["namespace"]) == n)
                });
                victims.extend(all.into_iter().map(|r| (*kind, r)));
            }
        }
    }
    let grace = if args.now { Some(0) } else { args.grace_period };
    let wait = args.wait || session.own();
    let gone = join_all(victims.iter().map(|(kind, record)| async move {
        let (uid, name) = (text(&record["metadata"]["uid"]), text(&record["metadata"]["name"]));
        remove(client, *kind, uid, grace, wait, stop_time(record)).await?;
        print::line(format_args!("{}/{name} deleted", kind.lower()))
    }))
    .await;
    missing.extend(gone.into_iter().filter_map(|r| r.err().map(|e| format!("{e:#}"))));
    // A file's records that are gone already are as wished.
    if !args.filename.is_empty() {
        missing.retain(|m| !m.ends_with("not found"));
    }
    if missing.is_empty() {
        return Ok(());
    }
    bail!("{}", missing.join("\n"))
}

/// The grace that a record gives itself.
pub fn stop_time(record: &serde_json::Value) -> Duration {
    let spec = &record["spec"];
    let grace = spec["terminationGracePeriodSeconds"]
        .as_u64()
        .or(spec["graceSeconds"].as_u64());
    Duration::from_secs(grace.unwrap_or(30).min(86_400))
}

/// Deletes one record; `own`: the grace that it has by itself.
pub async fn remove(
    client: &Client,
    kind: Kind,
    uid: &str,
    grace: Option<i64>,
    wait: bool,
    own: Duration,
) -> Result<()> {
    let grace_time = grace.map_or(own, |s| Duration::from_secs(s.unsigned_abs()));
    client
        .delete(kind.name(), uid, grace, wait, grace_time + TEARDOWN)
        .await
}
