//! `reconcile images rm`, and the ids of `ls -q`.

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use serde_json::Value;
use state::Reference;

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
        let all = client.list(Kind::Image.name()).await?;
        let mut gone = kinds::called(&all, Kind::Image, reference, None);
        if gone.is_empty() {
            failures.push(format!("image {reference:?} not found"));
        }
        gone.extend(untagged(&all, &gone));
        for image in gone {
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

/// The names by digest that a pull has given: with the last tag of their repository they go, too, as docker has it.
fn untagged(all: &[Value], gone: &[Value]) -> Vec<Value> {
    let uid = |image: &Value| text(&image["metadata"]["uid"]).to_owned();
    let id = |image: &Value| text(&image["status"]["id"]).to_owned();
    let name = |image: &Value| Reference::parse(text(&image["metadata"]["name"]), "metadata.name").ok();
    let going: BTreeSet<_> = gone.iter().map(uid).collect();
    let mut also = BTreeMap::new();
    for (tagged, image) in gone.iter().filter_map(|image| Some((name(image)?, image))) {
        let sibling = |other: &&Value| {
            let same = name(other).is_some_and(|name| name.repository() == tagged.repository());
            same && id(other) == id(image) && !kinds::deleted(other) && !going.contains(&uid(other))
        };
        let left: Vec<_> = all.iter().filter(sibling).collect();
        let nameless = |other: &&Value| name(other).is_some_and(|name| name.tag().is_none() && name.digest().is_some());
        if !id(image).is_empty() && tagged.tag().is_some() && left.iter().all(nameless) {
            also.extend(left.into_iter().map(|other| (uid(other), other.clone())));
        }
    }
    also.into_values().collect()
}
