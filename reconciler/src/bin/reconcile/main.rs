//! The program `reconcile`.

mod apply;
mod client;
mod config;
mod containers;
mod delete;
mod describe;
mod documents;
mod exec;
mod get;
mod kinds;
mod local;
mod logs;
mod options;
mod print;
mod run;
mod serve;
mod tail;
mod verdict;

use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, Parser, Subcommand};

/// Declarative container runtime for one node.
#[derive(Parser)]
#[command(name = "reconcile", version, subcommand_precedence_over_arg = true)]
struct Cli {
    #[command(flatten)]
    flags: options::Flags,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Run the daemon: serve the CRI and keep the node as the records say
    Serve,
    /// Run pods from a file, show their logs, exit with their code
    Run(run::Run),
    /// Create or change what files state
    Apply(apply::Apply),
    /// Show records
    Get(get::Get),
    /// Show one record at length, with what every stage says
    Describe(describe::Describe),
    /// Delete records and what they stand for
    Delete(delete::Delete),
    /// Show the logs of a pod or container
    Logs(logs::Logs),
    /// Run a program in a running container
    Exec(exec::Exec),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    // What `run` says of itself must not be taken for the workload's code.
    let failure = if matches!(cli.command, Some(Command::Run(_))) {
        run::FAILURE
    } else {
        1
    };
    match start(&cli) {
        Ok(code) => code,
        Err(e) if reader_left(&e) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("reconcile: {e:#}");
            ExitCode::from(failure)
        }
    }
}

fn start(cli: &Cli) -> Result<ExitCode> {
    let global = cli.flags.settle()?;
    let Some(command) = &cli.command else {
        Cli::command().write_help(&mut std::io::stderr())?;
        return Ok(ExitCode::from(2));
    };
    global.log(if matches!(command, Command::Serve) {
        "info"
    } else {
        "warn"
    })?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        match command {
            Command::Serve => serve::run(&global).await,
            Command::Run(args) => run::run(&global, args).await,
            Command::Apply(args) => apply::run(&global, args).await,
            Command::Get(args) => get::run(&global, args).await,
            Command::Describe(args) => describe::run(&global, args).await,
            Command::Delete(args) => delete::run(&global, args).await,
            Command::Logs(args) => logs::run(&global, args).await,
            Command::Exec(args) => exec::run(&global, args).await,
        }
    })
}

/// Standard output was a pipe to a program that has seen enough.
fn reader_left(error: &anyhow::Error) -> bool {
    let io = error.chain().find_map(|cause| cause.downcast_ref::<std::io::Error>());
    io.is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}
