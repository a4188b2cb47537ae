//! The image that a person means, out of the records.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail};
use reconciler::image::manifest::{self, Loaded};
use reconciler::world::linux::content::Content;
use serde_json::Value;

use crate::client::{Client, list, text};
use crate::kinds::{self, Kind};
use crate::print::short;

/// One image with its names.
#[derive(Clone, Debug)]
pub struct Found {
    pub id: String,
    /// What the name that was given resolves to (an index's digest for multi-arch).
    pub digest: String,
    /// Digest of the manifest for this platform.
    pub manifest: String,
    /// Every name of the image, sorted.
    pub names: Vec<String>,
}

/// By any name, or the beginning of its id.
pub async fn one(client: &Client, called: &str) -> Result<Found> {
    let all = client.list(Kind::Image.name()).await?;
    let mut meant = kinds::called(&all, Kind::Image, called, None);
    meant.retain(|image| !text(&image["status"]["id"]).is_empty());
    let ids: BTreeSet<&str> = meant.iter().map(|image| text(&image["status"]["id"])).collect();
    if ids.len() > 1 {
        let ids: Vec<_> = ids.into_iter().map(short).collect();
        bail!("{called:?} begins more than one image id: {}", ids.join(", "));
    }
    let Some(image) = meant.first() else {
        bail!("image {called:?} not found");
    };
    Ok(found(image, &all))
}

/// Every image that is here, each once.
pub fn all(records: &[Value]) -> Vec<Found> {
    let mut seen = BTreeSet::new();
    let here = records
        .iter()
        .filter(|r| !text(&r["status"]["id"]).is_empty() && !kinds::deleted(r));
    here.filter(|r| seen.insert(text(&r["status"]["id"]).to_owned()))
        .map(|r| found(r, records))
        .collect()
}

fn found(image: &Value, all: &[Value]) -> Found {
    let id = text(&image["status"]["id"]).to_owned();
    let same = all
        .iter()
        .filter(|r| text(&r["status"]["id"]) == id && !kinds::deleted(r));
    let mut names: Vec<String> = same.map(|r| text(&r["metadata"]["name"]).to_owned()).collect();
    names.sort();
    Found {
        digest: text(&image["status"]["digest"]).to_owned(),
        manifest: text(&image["status"]["manifestDigest"]).to_owned(),
        id,
        names,
    }
}

impl Found {
    /// Manifest and configuration.
    pub fn load(&self, content: &Content) -> Result<Loaded> {
        let loaded = manifest::by_digest(content, &self.manifest);
        loaded.with_context(|| format!("image {}", self.name()))
    }

    /// The name to show: a tag before a digest.
    pub fn name(&self) -> &str {
        let tag = self.names.iter().find(|name| !name.contains('@'));
        tag.or(self.names.first()).map_or(&self.id, |name| name)
    }
}

/// A container, and the id of the image that it was made from.
pub struct User {
    pub uid: String,
    pub name: String,
    pub image: String,
    pub state: String,
}

pub async fn users(client: &Client) -> Result<Vec<User>> {
    let sandboxes = client.list(Kind::Sandbox.name()).await?;
    let pod = |uid: &str| {
        let sandbox = sandboxes.iter().find(|s| text(&s["metadata"]["uid"]) == uid);
        sandbox.map_or("?", |s| text(&s["spec"]["pod"]["name"])).to_owned()
    };
    let containers = client.list(Kind::Container.name()).await?;
    let user = |c: &Value| {
        let sandbox = text(&c["spec"]["sandbox"]);
        User {
            uid: text(&c["metadata"]["uid"]).to_owned(),
            name: format!("{}/{}", pod(sandbox), text(&c["spec"]["name"])),
            image: text(&c["spec"]["image"]["id"]).to_owned(),
            state: text(&c["status"]["phase"]).to_owned(),
        }
    };
    Ok(containers.iter().map(user).collect())
}

/// The chain IDs of a record's layers, bottom first.
pub fn chain(record: &Value) -> Vec<String> {
    let ids = list(&record["status"]["chainIds"]).iter();
    ids.map(|id| text(id).to_owned()).collect()
}
