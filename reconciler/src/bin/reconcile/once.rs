//! `reconcile --once`: one repair of the node, or, dry, its plan. A daemon is asked, where one runs.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use cri::records::v1::OnceRequest;
use reconciler::repair::{Ask, Report};
use reconciler::runtime::Runtime;

use crate::client::Client;
use crate::exec::code;
use crate::options::Global;
use crate::print;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A line for each step, and a last one that sums up
    Text,
    Json,
}

#[derive(Args)]
pub struct Once {
    /// Look at everything once, repair what differs from the records, and exit: 0 nothing to do, 10 repaired, 20 a
    /// person is needed, 30 failed
    #[arg(long)]
    pub once: bool,
    /// With --once: print the steps, take none
    #[arg(long, requires = "once", conflicts_with = "plan")]
    dry_run: bool,
    /// With --once: take exactly the steps of this plan, made by --once --dry-run -o json; if others are due by now,
    /// take none
    #[arg(long, value_name = "FILE", requires = "once")]
    plan: Option<PathBuf>,
    /// With --once: also take steps that cost data or a living process (risk C)
    #[arg(long, requires = "once")]
    force: bool,
    /// With --once: take the steps of risk C of this object (uid, beginning of a uid, or name); may be repeated
    #[arg(long, value_name = "OBJECT", requires = "once")]
    object: Vec<String>,
    /// With --once: how to print them
    #[arg(short, long, value_enum, default_value_t = Format::Text, requires = "once")]
    output: Format,
}

pub async fn run(global: &Global, args: &Once) -> Result<ExitCode> {
    let plan = match &args.plan {
        Some(path) => Some(read(path)?),
        None => None,
    };
    let ask = Ask {
        dry_run: args.dry_run,
        force: args.force,
        objects: args.object.clone(),
        plan,
        ..Ask::default()
    };
    let (report, code) = answer(global, &ask).await?;
    match args.output {
        Format::Json => print::line(serde_json::to_string_pretty(&report)?)?,
        Format::Text => print::out(text(&report, args.dry_run))?,
    }
    Ok(ExitCode::from(code))
}

/// Bytes of the longest plan that is read.
const LIMIT: u64 = 64 << 20;

fn read(path: &Path) -> Result<Report> {
    let size = path
        .metadata()
        .with_context(|| format!("--plan {}", path.display()))?
        .len();
    ensure!(size <= LIMIT, "--plan {}: longer than {LIMIT} bytes", path.display());
    let text = std::fs::read(path).with_context(|| format!("--plan {}", path.display()))?;
    serde_json::from_slice(&text)
        .with_context(|| format!("--plan {}: not what --once --dry-run -o json prints", path.display()))
}

/// The daemon's answer, else this process's own, under the store's lock.
pub async fn answer(global: &Global, ask: &Ask) -> Result<(Report, u8)> {
    let Some(client) = Client::connect(&global.socket).await? else {
        let report = here(global, ask).await?;
        let code = report.exit_code();
        return Ok((report, code));
    };
    client.ready().await?;
    let request = OnceRequest {
        dry_run: ask.dry_run,
        doctor: ask.doctor,
        force: ask.force,
        objects: ask.objects.clone(),
        plan: match &ask.plan {
            Some(plan) => serde_json::to_vec(plan)?,
            None => Vec::new(),
        },
    };
    let (json, exit) = client.once(request).await?;
    let report = serde_json::from_slice(&json).context("the daemon's report")?;
    Ok((report, code(exit)))
}

async fn here(global: &Global, ask: &Ask) -> Result<Report> {
    // Looking at a root that was never used must not make one.
    if (ask.dry_run || ask.doctor) && !global.root.join("id").exists() {
        return Ok(Report::default());
    }
    let runtime = Runtime::open(global.runtime()?).await?;
    Ok(runtime.repair(ask).await?)
}

fn text(report: &Report, dry_run: bool) -> String {
    let mut text = String::new();
    for step in &report.done {
        text.push_str(&format!("{}\n", print::plain(&step.to_string())));
    }
    for finding in &report.findings {
        let line = format!("{}: {}: {}", finding.id, finding.object, finding.message);
        text.push_str(&format!("found {}\n", print::plain(&line)));
    }
    for (what, lines) in [("needs a human", &report.human), ("failed", &report.failed)] {
        for line in lines {
            text.push_str(&format!("{what}: {}\n", print::plain(line)));
        }
    }
    let steps = match (report.done.len(), dry_run) {
        (0, _) => "nothing to do".to_owned(),
        (1, true) => "1 step to take".to_owned(),
        (n, true) => format!("{n} steps to take"),
        (1, false) => "1 step taken".to_owned(),
        (n, false) => format!("{n} steps taken"),
    };
    text.push_str(&steps);
    for (what, count) in [("need a human", report.human.len()), ("failed", report.failed.len())] {
        if count > 0 {
            text.push_str(&format!(", {count} {what}"));
        }
    }
    text + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn report() -> Report {
        let step = json!({"kind": "PodSandbox", "uid": "0123456789abcdef", "name": "web", "stage": "netns",
            "action": "remake", "reason": "Gone", "message": "pin\nlost", "risk": "A"});
        serde_json::from_value(json!({"done": [step], "failed": [], "human": ["Pod x: y"]})).unwrap()
    }

    #[test]
    fn a_line_for_each_step_and_a_summary() {
        let lines: Vec<_> = text(&report(), false).lines().map(str::to_owned).collect();
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert!(lines[0].contains("0123456789abc") && lines[0].contains("remake") && lines[0].contains("pin lost"));
        assert_eq!(lines[1], "needs a human: Pod x: y");
        assert_eq!(lines[2], "1 step taken, 1 need a human");
        assert_eq!(text(&Report::default(), true), "nothing to do\n");
    }

    #[test]
    fn the_plan_reads_as_what_is_then_done() {
        let (plan, done) = (text(&report(), true), text(&report(), false));
        assert_eq!(plan.lines().next(), done.lines().next());
    }

    #[test]
    fn survives_the_way_over_the_socket() {
        let json = serde_json::to_vec(&report()).unwrap();
        let back: Report = serde_json::from_slice(&json).unwrap();
        assert_eq!(back.exit_code(), 20);
        assert_eq!(back.done, report().done);
    }
}
