//! `reconcile images push`: an image to a registry, with the credentials of who runs this program.

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;
use reconciler::world::linux::registry::{Access, Keyring, Registry};
use state::Reference;

use super::{content, find};
use crate::client::Client;
use crate::local::{Need, Session};
use crate::options::Global;
use crate::print::{self, short, size};

#[derive(Args)]
pub struct Push {
    /// Name or id of an image that is here
    source: String,
    /// Where to [default: the image's own name]
    destination: Option<String>,
    /// Only the digest at the end
    #[arg(short, long)]
    quiet: bool,
}

pub async fn run(global: &Global, args: &Push) -> Result<ExitCode> {
    let session = Session::open(global, Need::Look).await?;
    let pushed = push(global, &session.client, args).await;
    session.close().await?;
    print::line(pushed?)?;
    Ok(ExitCode::SUCCESS)
}

/// Answers the digest. Of a multi-arch image only this platform's manifest is here, so that is what is pushed.
async fn push(global: &Global, client: &Client, args: &Push) -> Result<String> {
    let found = find::one(client, &args.source).await?;
    let destination = args
        .destination
        .as_deref()
        .unwrap_or_else(|| match found.names.contains(&args.source) {
            true => &args.source,
            false => found.name(),
        });
    let reference = Reference::parse(destination, "DESTINATION")?;
    let store = content(client).await?;
    let image = found.load(&store)?;
    if let Some(digest) = reference.digest()
        && digest != image.descriptor.digest().as_ref()
    {
        bail!(
            "{reference}: this image's manifest is {}; push it to a tag",
            image.descriptor.digest()
        );
    }
    let (credentials, unread) = Keyring::of_user(Vec::new()).matching(&reference).await;
    for problem in unread {
        eprintln!("reconcile: credentials: {problem}");
    }
    let registry = Registry::new(global.registry())?;
    let access = Access { reference, credentials };
    for blob in image.blobs().skip(1) {
        let sent = registry
            .upload_blob(&access, blob, &store.blob_path(blob.digest())?)
            .await;
        let sent = sent.with_context(|| format!("push {}", access.reference))?;
        if !args.quiet {
            let name = short(blob.digest().as_ref());
            let what = if sent { "pushed" } else { "already there" };
            eprintln!("{name}: {what} {}", size(blob.size()));
        }
    }
    let document = store.read(image.descriptor.digest())?;
    let kind = image.descriptor.media_type().to_string();
    let put = registry.put_manifest(&access, &kind, document.into()).await;
    put.with_context(|| format!("push {}", access.reference))?;
    Ok(image.descriptor.digest().to_string())
}
