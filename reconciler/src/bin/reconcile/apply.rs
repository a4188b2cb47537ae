//! `reconcile apply`: what files state becomes records.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use cri::records::v1::Applied;
use cri::records::v1::applied::Outcome;
use futures::future::join_all;

use crate::client::Client;
use crate::documents;
use crate::local::{Need, Session};
use crate::options::Global;
use crate::print;
use crate::verdict::{Verdict, judge};

#[derive(Args)]
pub struct Apply {
    /// Files, directories, or - for standard input
    #[arg(short, long = "filename", required = true, value_name = "FILE")]
    filename: Vec<String>,
    /// Say what would be created or changed, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Wait until everything is ready; without a daemon that is always done, since nothing goes on after this command
    #[arg(long)]
    wait: bool,
    /// How long to wait, in seconds
    #[arg(long, default_value_t = 120, value_name = "SECONDS")]
    timeout: u64,
}

pub async fn run(global: &Global, args: &Apply) -> Result<ExitCode> {
    let records = documents::read(&args.filename)?;
    let session = Session::open(global, if args.dry_run { Need::Look } else { Need::Act }).await?;
    let applied = session
        .client
        .apply(documents::to_send(&records)?, args.dry_run)
        .await?;
    for one in &applied {
        let outcome = match one.outcome() {
            Outcome::Created => "created",
            Outcome::Configured => "configured",
            Outcome::Unchanged => "unchanged",
        };
        let dry = if args.dry_run { " (dry run)" } else { "" };
        print::line(format_args!("{} {outcome}{dry}", named(one)))?;
    }
    let result = match (args.wait || session.own()) && !args.dry_run {
        true => settle(&session.client, &applied, Duration::from_secs(args.timeout)).await,
        false => Ok(()),
    };
    session.close().await?;
    result.map(|()| ExitCode::SUCCESS)
}

/// `pod/web`
pub fn named(one: &Applied) -> String {
    format!("{}/{}", one.kind.to_lowercase(), one.name)
}

/// Waits until every record is as wished, or cannot be.
pub async fn settle(client: &Client, applied: &[Applied], limit: Duration) -> Result<()> {
    let verdicts = join_all(applied.iter().map(|one| settled(client, one, limit))).await;
    let mut failures = Vec::new();
    for (one, verdict) in applied.iter().zip(verdicts) {
        match verdict? {
            Verdict::Met => {}
            Verdict::Failed(why) => failures.push(format!("{}: {why}", named(one))),
            Verdict::Waiting(what) => {
                let what = if what.is_empty() {
                    "not looked at yet".to_owned()
                } else {
                    what
                };
                failures.push(format!("{}: not ready after {} s: {what}", named(one), limit.as_secs()));
            }
        }
    }
    if failures.is_empty() {
        return Ok(());
    }
    bail!("{}", failures.join("\n"))
}

/// The verdict on one record: met, failed, or what it waited for when `limit` was over.
pub async fn settled(client: &Client, one: &Applied, limit: Duration) -> Result<Verdict> {
    let mut last = Verdict::Waiting(String::new());
    let watch = async {
        let mut changes = client.watch(&one.kind, &one.uid).await?;
        while let Some((record, erased)) = changes.next().await? {
            if erased {
                return Ok(Verdict::Failed("it was deleted meanwhile".to_owned()));
            }
            last = judge(&record, one.generation);
            if !matches!(last, Verdict::Waiting(_)) {
                return Ok(last.clone());
            }
        }
        bail!("the daemon stopped")
    };
    match tokio::time::timeout(limit, watch).await {
        Ok(verdict) => verdict,
        Err(_) => Ok(last),
    }
}
