//! The program `reconcile`.

mod apply;
mod attach;
mod client;
mod completion;
mod config;
mod containers;
mod delete;
mod describe;
mod doctor;
mod documents;
mod events;
mod exec;
mod forward;
mod get;
mod images;
mod kinds;
mod local;
mod logging;
mod logs;
mod metrics;
mod once;
mod options;
mod print;
mod reload;
mod reset;
mod run;
mod serve;
mod snapshots;
mod stats;
mod stream;
mod tail;
mod verdict;

use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use options::Global;

/// Declarative container runtime for one node.
#[derive(Parser)]
#[command(name = "reconcile", version)]
struct Cli {
    #[command(flatten)]
    flags: options::Flags,
    #[command(flatten)]
    once: once::Once,
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
    /// Put this terminal on a running container
    Attach(attach::Attach),
    /// Forward local ports to a pod
    PortForward(forward::Forward),
    /// Show what running containers use
    Stats(stats::Stats),
    /// Show what happened to pods and containers
    Events(events::Events),
    /// Pull, import, list, check and remove images
    Images(images::Images),
    /// Show what containers have written
    Snapshots(snapshots::Snapshots),
    /// Say what is wrong on this node and which command helps; changes nothing
    Doctor(doctor::Doctor),
    /// Show, check and explain the configuration
    Config(config::Config),
    /// Let the daemon read its configuration anew; no pod is touched
    Reload,
    /// Stop and remove everything of this root: pods, network, images, records
    Reset(reset::Reset),
    /// Print a completion script
    Completion(completion::Completion),
    /// Print the manual page
    Man,
}

fn main() -> ExitCode {
    let matches = Cli::command().get_matches();
    let mut cli = Cli::from_arg_matches(&matches).unwrap_or_else(|e| e.exit());
    cli.flags.told_by(&matches);
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
    match &cli.command {
        Some(Command::Completion(args)) => return completion::script(args, Cli::command()),
        Some(Command::Config(args)) => return config::run(&cli.flags, args),
        Some(Command::Man) => return completion::manual(Cli::command()),
        None if !cli.once.once => {
            Cli::command().write_help(&mut std::io::stderr())?;
            return Ok(ExitCode::from(2));
        }
        _ => {}
    }
    let (global, warnings) = cli.flags.settle()?;
    // Elsewhere the command itself says what went wrong with an object, once.
    global.log(match cli.command {
        Some(Command::Serve) => serve::LOG,
        _ => "warn,reconciler::engine=error,netlink_proto=error",
    })?;
    warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    if shim::fault::armed() {
        state::fault::watch(shim::fault::point);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(command(cli, &global))
}

async fn command(cli: &Cli, global: &Global) -> Result<ExitCode> {
    match &cli.command {
        None => once::run(global, &cli.once).await,
        Some(Command::Serve) => serve::run(global).await,
        Some(Command::Run(args)) => run::run(global, args).await,
        Some(Command::Apply(args)) => apply::run(global, args).await,
        Some(Command::Get(args)) => get::run(global, args).await,
        Some(Command::Describe(args)) => describe::run(global, args).await,
        Some(Command::Delete(args)) => delete::run(global, args).await,
        Some(Command::Logs(args)) => logs::run(global, args).await,
        Some(Command::Exec(args)) => exec::run(global, args).await,
        Some(Command::Attach(args)) => attach::run(global, args).await,
        Some(Command::PortForward(args)) => forward::run(global, args).await,
        Some(Command::Stats(args)) => stats::run(global, args).await,
        Some(Command::Events(args)) => events::run(global, args).await,
        Some(Command::Images(args)) => images::run(global, args).await,
        Some(Command::Snapshots(args)) => snapshots::run(global, args).await,
        Some(Command::Doctor(args)) => doctor::run(global, args).await,
        Some(Command::Reload) => reload::run(global).await,
        Some(Command::Reset(args)) => reset::run(global, args).await,
        Some(Command::Completion(_) | Command::Config(_) | Command::Man) => Ok(ExitCode::SUCCESS),
    }
}

/// Standard output was a pipe to a program that has seen enough.
fn reader_left(error: &anyhow::Error) -> bool {
    let io = error.chain().find_map(|cause| cause.downcast_ref::<std::io::Error>());
    io.is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}
