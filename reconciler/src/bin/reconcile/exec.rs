//! `reconcile exec`: a program in a running container; its streams and exit code.

use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use crate::client::{Client, text};
use crate::containers;
use crate::local::{Need, Session};
use crate::options::Global;
use crate::stream::{self, Local};

#[derive(Args)]
pub struct Exec {
    /// A pod's name, or the beginning of a container's id
    #[arg(value_name = "POD|ID")]
    target: String,
    /// The container in the pod [default: its first]
    #[arg(short, long)]
    container: Option<String>,
    /// Only in this namespace
    #[arg(short, long)]
    namespace: Option<String>,
    /// Pass standard input to the program
    #[arg(short = 'i', long)]
    stdin: bool,
    /// Give the program a terminal
    #[arg(short, long)]
    tty: bool,
    /// Kill the program after so many seconds; 0: never
    #[arg(
        long,
        default_value_t = 0,
        value_name = "SECONDS",
        value_parser = clap::value_parser!(i64).range(0..),
        conflicts_with_all = ["stdin", "tty"],
    )]
    timeout: i64,
    /// The program and its arguments, after --
    #[arg(required = true, last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

pub async fn run(global: &Global, args: &Exec) -> Result<ExitCode> {
    let session = Session::open(global, Need::Act).await?;
    let done = exec(global, &session.client, args).await;
    session.close().await?;
    done
}

async fn exec(global: &Global, client: &Client, args: &Exec) -> Result<ExitCode> {
    let container = containers::running(
        client,
        &args.target,
        args.container.as_deref(),
        args.namespace.as_deref(),
    )
    .await?;
    let id = text(&container["metadata"]["uid"]);
    if args.timeout > 0 {
        let done = client.exec(id, args.command.clone(), args.timeout).await?;
        std::io::stdout().lock().write_all(&done.stdout)?;
        std::io::stderr().lock().write_all(&done.stderr)?;
        return Ok(ExitCode::from(code(done.exit_code)));
    }
    let local = Local::new(args.stdin, args.tty, false);
    let url = client
        .exec_url(id, args.command.clone(), local.stdin, local.tty)
        .await?;
    stream::command(global, &url, local)
        .await
        .map(|done| ExitCode::from(code(done)))
}

/// An exit code as a process can bear it.
pub fn code(code: i32) -> u8 {
    u8::try_from(code).unwrap_or(255)
}
