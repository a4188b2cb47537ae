//! `reconcile images prune`: removes images that nothing names or uses, and what interrupted pulls left.

use std::collections::BTreeSet;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use serde_json::Value;

use super::{content, find};
use crate::client::{Client, text};
use crate::delete;
use crate::kinds::{self, Kind};
use crate::local::{Need, Session};
use crate::options::Global;
use crate::print::{self, short, size};

#[derive(Args)]
pub struct Prune {
    /// Also images with tags, if no container uses them
    #[arg(short, long)]
    all: bool,
    /// Do not ask
    #[arg(short, long, visible_short_alias = 'f', visible_alias = "force")]
    yes: bool,
}

pub async fn run(global: &Global, args: &Prune) -> Result<ExitCode> {
    let what = match args.all {
        true => "all images that no container uses",
        false => "all untagged images that no container uses",
    };
    if !args.yes && !agreed(what)? {
        bail!("nothing was removed");
    }
    let session = Session::open(global, Need::Act).await?;
    let pruned = prune(global, &session.client, args.all).await;
    session.close().await?;
    pruned.map(|()| ExitCode::SUCCESS)
}

fn agreed(what: &str) -> Result<bool> {
    if !std::io::stdin().is_terminal() {
        bail!("this removes {what}; say so with --yes");
    }
    print::out(format_args!("Remove {what}? [y/N] "))?;
    std::io::stdout().flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

async fn prune(global: &Global, client: &Client, all: bool) -> Result<()> {
    let records = client.list(Kind::Image.name()).await?;
    let used: BTreeSet<String> = find::users(client).await?.into_iter().map(|user| user.image).collect();
    let listed = |name: &str| global.config.images.pinned.iter().any(|pinned| pinned.0 == name);
    let kept = |record: &&Value| {
        let spec = &record["spec"];
        spec["pinned"] == true || spec["source"] == "builtIn" || listed(text(&record["metadata"]["name"]))
    };
    let pinned: BTreeSet<&str> = records.iter().filter(kept).map(|r| text(&r["status"]["id"])).collect();
    for image in find::all(&records) {
        let tagged = image.names.iter().any(|name| !name.contains('@'));
        if used.contains(&image.id) || pinned.contains(image.id.as_str()) || (tagged && !all) {
            continue;
        }
        let own = records
            .iter()
            .filter(|r| text(&r["status"]["id"]) == image.id && !kinds::deleted(r));
        for record in own {
            let uid = text(&record["metadata"]["uid"]);
            delete::remove(client, Kind::Image, uid, None, true, Duration::ZERO).await?;
        }
        print::line(format_args!("{} {} removed", short(&image.id), image.name()))?;
    }
    let store = content(client).await?;
    let mut left = 0;
    for partial in store.partials()? {
        // What is being fetched right now is locked, and stays.
        if store.remove_partial(&partial, Duration::ZERO)? {
            left += partial.bytes;
        }
    }
    if left > 0 {
        print::line(format_args!("{} of interrupted pulls removed", size(left)))?;
    }
    Ok(())
}
