//! `reconcile images explain`: which endpoints serve a reference, in order, and where each setting was made.

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use reconciler::world::linux::registry::{Explanation, Registry};
use state::Reference;

use crate::get::Format;
use crate::options::Global;
use crate::print::{self, Table};

#[derive(Args)]
pub struct Explain {
    #[arg(value_name = "REFERENCE")]
    reference: String,
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

/// Reads the files of this node; asks neither the daemon nor a registry.
pub fn run(global: &Global, args: &Explain) -> Result<ExitCode> {
    let reference = Reference::parse(&args.reference, "REFERENCE")?;
    let explanation = Registry::new(global.registry())?.explain(&reference);
    match args.output {
        Format::Json => print::line(serde_json::to_string_pretty(&explanation)?)?,
        Format::Yaml => print::out(serde_yaml::to_string(&explanation)?)?,
        Format::Table | Format::Wide => table(&explanation)?,
    }
    if explanation.endpoints.is_empty() {
        bail!("no endpoint serves {reference}");
    }
    Ok(ExitCode::SUCCESS)
}

fn table(explanation: &Explanation) -> Result<()> {
    print::line(format_args!("Reference:  {}", explanation.reference))?;
    let directory = match &explanation.directory {
        Some(directory) => directory.display().to_string(),
        None => "none; the registry itself is asked".to_owned(),
    };
    print::line(format_args!("Directory:  {}\n", print::plain(&directory)))?;
    let mut table = Table::new(["#", "ENDPOINT", "SETTING", "VALUE", "FROM"]);
    for (n, endpoint) in explanation.endpoints.iter().enumerate() {
        let mut head = (format!("{}", n + 1), endpoint.url.clone());
        for setting in endpoint.settings.iter().filter(|setting| setting.name != "url") {
            table.row([&head.0, &head.1, setting.name, &setting.value, &setting.origin]);
            head = Default::default();
        }
    }
    print::out(table)?;
    if !explanation.ignored.is_empty() {
        print::line("\nNot used:")?;
    }
    for ignored in &explanation.ignored {
        print::line(format_args!("  {}", print::plain(&ignored.to_string())))?;
    }
    Ok(())
}
