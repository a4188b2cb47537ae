//! `reconcile config`: what can be written, what is in force and why, what is wrong, what another runtime's file means.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand, ValueEnum};
use reconciler::config::{self, Problems, containerd, handlers, keys, show};

use crate::options::Flags;
use crate::print;

#[derive(Args)]
pub struct Config {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print a file with every key, its default and its meaning
    Default,
    /// Print the settings in force: files, environment and flags
    Show {
        /// Also tell where each was set
        #[arg(long)]
        origin: bool,
        /// How to print them
        #[arg(short, long, value_enum, default_value_t = Format::Yaml)]
        output: Format,
    },
    /// Tell everything that is wrong, and exit 1 if anything is
    Check {
        /// Files to check instead of those that the daemon reads; later ones lie over earlier ones
        files: Vec<PathBuf>,
    },
    /// Tell what a key means
    Explain {
        /// Such as network.mode, or a section such as network; all without it
        key: Option<String>,
    },
    /// Translate another runtime's configuration
    #[command(subcommand)]
    Import(Import),
}

#[derive(Subcommand)]
enum Import {
    /// containerd's config.toml (versions 2 to 4): our YAML on standard output, what has no counterpart on standard
    /// error
    Containerd { file: PathBuf },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    Yaml,
    Json,
}

pub fn run(flags: &Flags, args: &Config) -> Result<ExitCode> {
    match &args.command {
        Command::Default => print::out(show::defaults())?,
        Command::Show { origin, output } => {
            let loaded = flags.load()?;
            warn(&loaded.warnings);
            match output {
                Format::Yaml => print::out(show::yaml(&loaded.settings.all(), *origin))?,
                Format::Json => print::line(serde_json::to_string_pretty(&show::json(&loaded.settings, *origin))?)?,
            }
        }
        Command::Check { files } => return check(flags, files),
        Command::Explain { key } => explain(key.as_deref().unwrap_or_default())?,
        Command::Import(Import::Containerd { file }) => {
            let told = || format!("import {}", file.display());
            let import = containerd::read(file).with_context(told)?;
            print::out(&import.yaml)?;
            import.left.iter().for_each(|line| eprintln!("{line}"));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn warn(warnings: &[String]) {
    warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
}

fn check(flags: &Flags, files: &[PathBuf]) -> Result<ExitCode> {
    let (files, overrides) = match files {
        [] => (flags.files(), flags.overrides()?),
        files => (Ok(files.to_vec()), Vec::new()),
    };
    let checked = files.and_then(|files| {
        let loaded = config::load(&files, &overrides)?;
        handlers::probe(&loaded.config, &loaded.settings)?;
        Ok((loaded, files))
    });
    match checked {
        Ok((loaded, files)) => {
            warn(&loaded.warnings);
            for file in &files {
                print::line(format_args!("{}: ok", file.display()))?;
            }
            if files.is_empty() {
                print::line("no file is there; the defaults are in force")?;
            }
            Ok(ExitCode::SUCCESS)
        }
        Err(Problems(problems)) => {
            problems.iter().for_each(|problem| eprintln!("{problem}"));
            Ok(ExitCode::FAILURE)
        }
    }
}

fn explain(key: &str) -> Result<()> {
    // One name of a set is the set's key.
    let path = keys::find(key).map_or(key, |key| key.path);
    let texts: Vec<String> = keys::within(path).map(show::explain).collect();
    if texts.is_empty() {
        match keys::nearest(key) {
            Some(near) => bail!("{key}: unknown key; did you mean `{near}`?"),
            None => bail!("{key}: unknown key; `reconcile config explain` lists all"),
        }
    }
    print::out(texts.join("\n"))?;
    Ok(())
}
