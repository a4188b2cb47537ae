//! `reconcile images mount` and `umount`: look at an image's files without a container.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;
use reconciler::world::linux::layers::Layers;
use reconciler::world::linux::mounts;
use reconciler::world::linux::unpack::Limits;

use super::{content, dir, find, root};
use crate::client::Client;
use crate::local::{Need, Session};
use crate::options::Global;
use crate::print::{self, short};

#[derive(Args)]
pub struct Mount {
    /// Name or id of an image that is here
    reference: String,
    /// Where to [default: a directory below the state directory]
    target: Option<PathBuf>,
}

#[derive(Args)]
pub struct Umount {
    /// Name or id of the image, or the directory that it is mounted at
    #[arg(required = true, value_name = "REFERENCE")]
    references: Vec<String>,
}

pub async fn mount(global: &Global, args: &Mount) -> Result<ExitCode> {
    let session = Session::open(global, Need::Look).await?;
    let mounted = mounted(&session.client, args).await;
    session.close().await?;
    print::line(mounted?.display())?;
    Ok(ExitCode::SUCCESS)
}

async fn mounted(client: &Client, args: &Mount) -> Result<PathBuf> {
    let found = find::one(client, &args.reference).await?;
    let target = match &args.target {
        Some(target) => std::path::absolute(target)?,
        None => place(client, &found.id).await?,
    };
    let image = found.load(&content(client).await?)?;
    let layers = Layers::open(&root(client).await?, Limits::default())?;
    if !layers.missing(&image.chain_ids)?.is_empty() {
        anyhow::bail!("{} is not unpacked: reconcile images check --repair", found.name());
    }
    let lower = layers.lower(&image.chain_ids)?;
    let to = target.clone();
    tokio::task::spawn_blocking(move || mounts::mount_view(&lower, &to, None)).await??;
    Ok(target)
}

async fn place(client: &Client, id: &str) -> Result<PathBuf> {
    Ok(dir(client, "state").await?.join("images").join(short(id)))
}

pub async fn umount(global: &Global, args: &Umount) -> Result<ExitCode> {
    let session = Session::open(global, Need::Look).await?;
    let outcome = async {
        for reference in &args.references {
            let target = match reference.starts_with('/') {
                true => reference.into(),
                false => place(&session.client, &find::one(&session.client, reference).await?.id).await?,
            };
            mounts::unmount(&target).with_context(|| format!("unmount {}", target.display()))?;
            // Ours, if it was made for this; anybody else's is not empty or wanted.
            if !reference.starts_with('/') {
                let _ = std::fs::remove_dir(&target);
                target.parent().map(std::fs::remove_dir);
            }
        }
        anyhow::Ok(())
    };
    let outcome = outcome.await;
    session.close().await?;
    outcome.map(|()| ExitCode::SUCCESS)
}
