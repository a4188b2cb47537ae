//! `reconcile images`: pull, import, list and remove images.

mod check;
mod explain;
mod export;
pub mod find;
mod import;
mod inspect;
mod mount;
mod prune;
mod pull;
mod push;
mod remove;
mod tag;
pub mod usage;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use reconciler::world::linux::content::Content;
use state::Reference;

use crate::client::{Client, text};
use crate::get::{self, Format};
use crate::kinds::Kind;
use crate::local::{Need, Session};
use crate::options::Global;

#[derive(Args)]
pub struct Images {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Pull an image from its registry; prints its id
    Pull(pull::Pull),
    /// Import an OCI layout or a docker archive, compressed or not: `docker save X | reconcile images import -`
    Import {
        /// A tar file, or - for standard input
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Call the archive's one image so, whatever the archive calls it
        #[arg(long, value_name = "REFERENCE")]
        name: Option<String>,
    },
    /// Write images to an archive: an OCI layout that `docker load` reads, too
    #[command(visible_alias = "save")]
    Export(export::Export),
    /// List images
    #[command(visible_alias = "list")]
    Ls {
        #[arg(short, long, value_enum, default_value_t = Format::Table)]
        output: Format,
        /// Ids only, each once
        #[arg(short, long, conflicts_with = "output")]
        quiet: bool,
    },
    /// Remove images; what containers were made from stays until they are gone
    #[command(visible_alias = "remove")]
    Rm {
        /// References or beginnings of image ids
        #[arg(required = true, value_name = "REFERENCE")]
        references: Vec<String>,
    },
    /// Show manifest, configuration and layers
    Inspect(inspect::Inspect),
    /// Give an image that is here another name
    Tag(tag::Tag),
    /// Push an image to a registry
    Push(push::Push),
    /// Remove images that nothing names or uses
    Prune(prune::Prune),
    /// Mount an image's files, read-only, and print where
    Mount(mount::Mount),
    /// Unmount them
    #[command(visible_alias = "unmount")]
    Umount(mount::Umount),
    /// Look for damage in blobs and layers
    Check(check::Check),
    /// Show what layers take on the disk, and who uses them
    Usage(usage::Usage),
    /// Show which endpoints serve a reference, in order, and where each setting was made
    Explain(explain::Explain),
}

pub async fn run(global: &Global, args: &Images) -> Result<ExitCode> {
    match &args.command {
        Command::Ls { quiet: true, .. } => remove::ids(global).await,
        Command::Ls { output, .. } => get::run(global, &get::Get::images(*output)).await,
        Command::Pull(args) => pull::run(global, args).await,
        Command::Export(args) => export::run(global, args).await,
        Command::Inspect(args) => inspect::run(global, args).await,
        Command::Tag(args) => tag::run(global, args).await,
        Command::Push(args) => push::run(global, args).await,
        Command::Prune(args) => prune::run(global, args).await,
        Command::Mount(args) => mount::mount(global, args).await,
        Command::Umount(args) => mount::umount(global, args).await,
        Command::Check(args) => check::run(global, args).await,
        Command::Usage(args) => usage::run(global, args).await,
        Command::Import { file, name } => {
            if let Some(name) = name {
                Reference::parse(name, "--name")?;
            }
            let reader = import::source(file)?;
            let session = Session::open(global, Need::Act).await?;
            let imported = import::import(&session.client, reader, name.clone()).await;
            session.close().await?;
            imported.map(|()| ExitCode::SUCCESS)
        }
        Command::Explain(args) => explain::run(global, args),
        Command::Rm { references } => {
            let session = Session::open(global, Need::Act).await?;
            let removed = remove::remove(&session.client, references).await;
            session.close().await?;
            removed.map(|()| ExitCode::SUCCESS)
        }
    }
}

/// The daemon's own root, whatever this command's flags say.
pub async fn root(client: &Client) -> Result<PathBuf> {
    dir(client, "root").await
}

/// Its `root` or `state` directory.
async fn dir(client: &Client, which: &str) -> Result<PathBuf> {
    let nodes = client.list(Kind::Node.name()).await?;
    let dir = nodes.first().map(|node| text(&node["status"][which]).to_owned());
    let dir = dir.filter(|dir| !dir.is_empty());
    Ok(dir.context("the daemon does not say where its images lie")?.into())
}

async fn content(client: &Client) -> Result<Content> {
    Ok(Content::open(Path::new(&root(client).await?))?)
}
