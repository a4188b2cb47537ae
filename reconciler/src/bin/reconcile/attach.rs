//! `reconcile attach`: this terminal on a running container's first process.

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;

use crate::client::{Client, text};
use crate::local::{Need, Session};
use crate::options::Global;
use crate::stream::{self, Local};
use crate::{containers, exec};

#[derive(Args)]
pub struct Attach {
    /// A pod's name, or the beginning of a container's id
    #[arg(value_name = "POD|ID")]
    target: String,
    /// The container in the pod [default: its first]
    #[arg(short, long)]
    container: Option<String>,
    /// Only in this namespace
    #[arg(short, long)]
    namespace: Option<String>,
    /// Pass standard input to the container
    #[arg(short = 'i', long)]
    stdin: bool,
    /// Standard input is a terminal, as the container's is; Ctrl-P Ctrl-Q detaches
    #[arg(short, long)]
    tty: bool,
}

pub async fn run(global: &Global, args: &Attach) -> Result<ExitCode> {
    let session = Session::open(global, Need::Act).await?;
    let done = attach(global, &session.client, args).await;
    session.close().await?;
    done
}

async fn attach(global: &Global, client: &Client, args: &Attach) -> Result<ExitCode> {
    let container = containers::running(
        client,
        &args.target,
        args.container.as_deref(),
        args.namespace.as_deref(),
    )
    .await?;
    let has_tty = container["spec"]["tty"] == true;
    if args.tty && !has_tty {
        bail!(
            "container {} has no terminal: leave -t away",
            text(&container["spec"]["name"])
        );
    }
    let local = Local::new(args.stdin, args.tty, args.tty);
    // What the container has, not what this side can do, says how many streams there are.
    let local = Local { tty: has_tty, ..local };
    let url = client
        .attach_url(text(&container["metadata"]["uid"]), local.stdin, local.tty)
        .await?;
    stream::command(global, &url, local)
        .await
        .map(|code| ExitCode::from(exec::code(code)))
}
