//! `reconcile images rm`, and the ids of `ls -q`.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::client::{Client, text};
use crate::delete;
use crate::kinds::{self, Kind};
use crate::local::{Need, Session};
use crate::options::Global;
use crate::print;

pub async fn ids(global: &Global) -> Result<ExitCode> {
    let session = Session::open(global, Need::Look).await?;
    let all = session.client.list(Kind::Image.name()).await;
    session.close().await?;
    let all = all?;
    let mut seen = BTreeSet::new();
    for id in all.iter().map(|image| text(&image["status"]["id"])) {
        if !id.is_empty() && seen.insert(id) {
            print::line(id)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

pub async fn remove(client: &Client, references: &[String]) -> Result<()> {
    let mut failures = Vec::new();
    for reference in references {
        let all = kinds::called(&client.list(Kind::Image.name()).await?, Kind::Image, reference, None);
        if all.is_empty() {
            failures.push(format!("image {reference:?} not found"));
        }
        for image in all {
            let name = text(&image["metadata"]["name"]);
            if image["spec"]["source"] == "builtIn" {
                failures.push(format!("{name} is built into this program and cannot be removed"));
                continue;
            }
            let uid = text(&image["metadata"]["uid"]);
            delete::remove(client, Kind::Image, uid, None, true, Duration::ZERO).await?;
            print::line(format_args!("{name} removed"))?;
        }
    }
    if failures.is_empty() {
        Ok(())
    } else {
        bail!("{}", failures.join("\n"))
    }
}
