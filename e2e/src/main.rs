//! Longer trials of the real daemon, as root: `cargo chaos --seed 7 --minutes 10`.

use std::time::Duration;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "e2e", about = "Trials of the real daemon on this node")]
struct Cli {
    #[command(subcommand)]
    trial: Trial,
}

#[derive(Subcommand)]
enum Trial {
    /// Pods come and go while daemon, shims and pauses are killed and the node drifts; then nothing may be lost or left
    Chaos {
        /// The same seed gives the same faults [default: a fresh one]
        #[arg(long)]
        seed: Option<u64>,
        #[arg(long, default_value_t = 2)]
        minutes: u64,
        /// Instead of minutes
        #[arg(long)]
        seconds: Option<u64>,
    },
    /// The same faults on `reconcile` and on containerd from Debian's package, as a table
    Peers,
    /// The conformance suite's benchmarks on both, as a table
    Benchmarks,
}

#[tokio::main]
async fn main() -> Result<()> {
    match Cli::parse().trial {
        Trial::Benchmarks => print!("{}", e2e::peers::benchmarks().await?),
        Trial::Peers => print!("{}", e2e::peers::table().await?),
        Trial::Chaos { seed, minutes, seconds } => {
            let options = e2e::chaos::Options {
                seed: seed.unwrap_or_else(|| fastrand::u64(..)),
                time: Duration::from_secs(seconds.unwrap_or(minutes * 60)),
            };
            println!("chaos, seed {}, {} s", options.seed, options.time.as_secs());
            println!("{}", e2e::chaos::run(options).await?);
        }
    }
    Ok(())
}
