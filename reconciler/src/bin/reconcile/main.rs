//! The program `reconcile`.

mod options;
mod serve;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Declarative container runtime for one node.
#[derive(Parser)]
#[command(name = "reconcile", version)]
struct Cli {
    #[command(flatten)]
    global: options::Global,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Run the daemon: serve the CRI and keep the node as the records say.
    Serve,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    options::log(&cli.global.log_level);
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(e) => {
            eprintln!("reconcile: cannot start threads: {e}");
            return ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(async {
        match cli.command {
            Some(Command::Serve) | None => serve::run(&cli.global).await,
        }
    });
    match result {
        Ok(code) => code,
        Err(e) => {
            eprintln!("reconcile: {e:#}");
            ExitCode::FAILURE
        }
    }
}
