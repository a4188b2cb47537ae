//! `reconcile doctor`: what is wrong on the node, and the command that helps. Reads only.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, ValueEnum};
use reconciler::repair::{Ask, Finding, Severity};

use crate::once::answer;
use crate::options::Global;
use crate::print::{self, Table};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Table,
    Json,
    Yaml,
}

/// Exit codes: 0 clean, 10 something the loop or `reconcile --once` repairs, 20 a person is needed
#[derive(Args)]
pub struct Doctor {
    /// How to print the findings
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

pub async fn run(global: &Global, args: &Doctor) -> Result<ExitCode> {
    let ask = Ask {
        doctor: true,
        ..Ask::default()
    };
    let (report, code) = answer(global, &ask).await?;
    let findings = &report.findings;
    match args.output {
        Format::Json => print::line(serde_json::to_string_pretty(findings)?)?,
        Format::Yaml => print::out(serde_yaml::to_string(findings)?)?,
        Format::Table if findings.is_empty() => print::line("nothing is wrong")?,
        Format::Table => table(findings)?,
    }
    Ok(ExitCode::from(code))
}

fn table(findings: &[Finding]) -> Result<()> {
    let mut table = Table::new(["FINDING", "SEVERITY", "RISK", "SINCE", "SIZE", "OBJECT", "WHAT"]);
    for finding in findings {
        let severity = match finding.severity {
            Severity::Note => "note",
            Severity::Repairable => "repairable",
            Severity::Human => "human",
        };
        table.row([
            finding.id.clone(),
            severity.to_owned(),
            format!("{:?}", finding.risk),
            finding
                .since
                .map_or("-".to_owned(), |since| print::age(since, print::now())),
            finding.size.map_or("-".to_owned(), print::size),
            print::plain(&finding.object),
            print::plain(&finding.message),
        ]);
    }
    print::out(table)?;
    for finding in findings.iter().filter(|f| !f.repair.is_empty()) {
        print::line(format!(
            "{}: {}",
            print::plain(&finding.object),
            print::plain(&finding.repair)
        ))?;
    }
    Ok(())
}
