//! `reconcile --once`: one repair of the node, or, dry, its plan. A daemon is asked, where one runs.

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use reconciler::runtime::{Report, Runtime};

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
    #[arg(long, requires = "once")]
    dry_run: bool,
    /// With --once: how to print them
    #[arg(short, long, value_enum, default_value_t = Format::Text, requires = "once")]
    output: Format,
}

pub async fn run(global: &Global, args: &Once) -> Result<ExitCode> {
    let (report, code) = match Client::connect(&global.socket).await? {
        Some(client) => {
            client.ready().await?;
            let (json, exit) = client.once(args.dry_run).await?;
            (
                serde_json::from_slice(&json).context("the daemon's report")?,
                code(exit),
            )
        }
        None => {
            let report = here(global, args.dry_run).await?;
            let code = report.exit_code();
            (report, code)
        }
    };
    match args.output {
        Format::Json => print::line(serde_json::to_string_pretty(&report)?)?,
        Format::Text => print::out(text(&report, args.dry_run))?,
    }
    Ok(ExitCode::from(code))
}

/// By this process itself, under the store's lock.
async fn here(global: &Global, dry_run: bool) -> Result<Report> {
    // Looking at a root that was never used must not make one.
    if dry_run && !global.root.join("id").exists() {
        return Ok(Report::default());
    }
    let runtime = Runtime::open(global.runtime()?).await?;
    Ok(match dry_run {
        true => Report {
            done: runtime.plan().await?,
            ..Report::default()
        },
        false => runtime.once().await?,
    })
}

fn text(report: &Report, dry_run: bool) -> String {
    let mut text = String::new();
    for step in &report.done {
        text.push_str(&format!("{}\n", print::plain(&step.to_string())));
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
