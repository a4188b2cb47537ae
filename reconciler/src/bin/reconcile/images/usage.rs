//! `reconcile images usage`: layers on the disk, and the images and containers that stand on them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, ValueEnum};
use reconciler::world::linux::layers::{LayerMeta, Layers};
use reconciler::world::linux::unpack::Limits;
use serde::Serialize;
use serde_json::{Value, json};

use super::{content, find, root};
use crate::client::{Client, text};
use crate::kinds::Kind;
use crate::local::{Need, Session};
use crate::options::Global;
use crate::print::{self, Table, short, size};

#[derive(Args)]
pub struct Usage {
    #[arg(short, long, value_enum, default_value_t = Form::Table)]
    output: Form,
    #[arg(long, value_enum, default_value_t = Sort::Size)]
    sort: Sort,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Form {
    Table,
    Json,
    Yaml,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Sort {
    /// The largest first
    Size,
    Inodes,
    Name,
}

impl Form {
    pub fn print(self, value: &impl Serialize, table: impl FnOnce() -> String) -> Result<()> {
        match self {
            Form::Table => print::out(table()),
            Form::Json => print::line(serde_json::to_string_pretty(value)?),
            Form::Yaml => print::out(serde_yaml::to_string(value)?),
        }
    }
}

#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    layers: Vec<Layer>,
    images: Vec<Image>,
    /// Layers, blobs, and what interrupted pulls left.
    total: Sum,
    blobs: Sum,
    partials: Sum,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Sum {
    bytes: u64,
    inodes: u64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Layer {
    chain_id: String,
    bytes: u64,
    inodes: u64,
    images: Vec<String>,
    containers: Vec<String>,
}

/// `own` goes with the image, `shared` does not.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Image {
    id: String,
    name: String,
    own: Sum,
    shared: Sum,
}

pub async fn run(global: &Global, args: &Usage) -> Result<ExitCode> {
    let session = Session::open(global, Need::Look).await?;
    let report = report(&session.client, args.sort).await;
    session.close().await?;
    let report = report?;
    args.output.print(&report, || report.to_string())?;
    Ok(ExitCode::SUCCESS)
}

async fn report(client: &Client, sort: Sort) -> Result<Report> {
    let root = root(client).await?;
    let store = content(client).await?;
    let metas = Layers::open(&root, Limits::default())?.list()?;
    let records = client.list(Kind::Image.name()).await?;
    let containers = client.list(Kind::Container.name()).await?;
    let mut images: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for found in find::all(&records) {
        let own = records.iter().find(|r| text(&r["status"]["id"]) == found.id);
        for chain in own.map(find::chain).unwrap_or_default() {
            images.entry(chain).or_default().insert(found.name().to_owned());
        }
    }
    let mut users: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for user in find::users(client).await? {
        let chains = stand(&root, &containers, &user.uid);
        for chain in chains {
            users.entry(chain).or_default().insert(user.name.clone());
        }
    }
    let list = |of: &BTreeMap<String, BTreeSet<String>>, chain: &str| -> Vec<String> {
        of.get(chain).into_iter().flatten().cloned().collect()
    };
    let layer = |(chain, meta): &(_, Option<LayerMeta>)| {
        let chain_id = String::from(AsRef::<str>::as_ref(chain as &oci_spec::image::Digest));
        Layer {
            bytes: meta.as_ref().map_or(0, |m| m.bytes),
            inodes: meta.as_ref().map_or(0, |m| m.inodes),
            images: list(&images, &chain_id),
            containers: list(&users, &chain_id),
            chain_id,
        }
    };
    let mut layers: Vec<Layer> = metas.iter().map(layer).collect();
    match sort {
        Sort::Size => layers.sort_by_key(|l| std::cmp::Reverse(l.bytes)),
        Sort::Inodes => layers.sort_by_key(|l| std::cmp::Reverse(l.inodes)),
        Sort::Name => layers.sort_by(|a, b| a.chain_id.cmp(&b.chain_id)),
    }
    let blobs = store.usage()?;
    let partials = store.partials()?;
    let partials = Sum {
        bytes: partials.iter().map(|p| p.bytes).sum(),
        inodes: partials.len() as u64,
    };
    let whole = layers.iter().fold(Sum::default(), |sum, l| sum.plus(l));
    Ok(Report {
        images: shares(&records, &layers),
        total: Sum {
            bytes: whole.bytes + blobs.bytes,
            inodes: whole.inodes + blobs.inodes,
        },
        blobs: Sum {
            bytes: blobs.bytes,
            inodes: blobs.inodes,
        },
        partials,
        layers,
    })
}

/// The layers that a container stands on, also when its image was removed: its receipt has them.
fn stand(root: &Path, containers: &[Value], uid: &str) -> Vec<String> {
    let Some(container) = containers.iter().find(|c| text(&c["metadata"]["uid"]) == uid) else {
        return Vec::new();
    };
    let own = root
        .join("pods")
        .join(text(&container["spec"]["sandbox"]))
        .join("containers");
    let receipt = std::fs::read(own.join(uid).join("image.json")).ok();
    let receipt: Option<Value> = receipt.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let receipt = json!({ "status": receipt });
    find::chain(&receipt)
}

fn shares(records: &[Value], layers: &[Layer]) -> Vec<Image> {
    let mut images: Vec<Image> = Vec::new();
    for found in find::all(records) {
        let name = found.name().to_owned();
        let mine = || layers.iter().filter(|l| l.images.contains(&name));
        let sum = |alone: bool| {
            let some = mine().filter(|l| (l.images.len() == 1) == alone);
            some.fold(Sum::default(), |sum, l| sum.plus(l))
        };
        images.push(Image {
            own: sum(true),
            shared: sum(false),
            id: found.id.clone(),
            name: name.clone(),
        });
    }
    images.sort_by_key(|image| std::cmp::Reverse(image.own.bytes));
    images
}

impl Sum {
    fn plus(self, layer: &Layer) -> Sum {
        Sum {
            bytes: self.bytes + layer.bytes,
            inodes: self.inodes + layer.inodes,
        }
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut table = Table::new(["LAYER", "SIZE", "INODES", "IMAGES", "CONTAINERS"]);
        for layer in &self.layers {
            table.row([
                short(&layer.chain_id).to_owned(),
                size(layer.bytes),
                layer.inodes.to_string(),
                dash(&layer.images),
                dash(&layer.containers),
            ]);
        }
        writeln!(f, "{table}")?;
        let mut table = Table::new(["IMAGE", "OWN", "SHARED", "INODES"]);
        for image in &self.images {
            let inodes = image.own.inodes + image.shared.inodes;
            table.row([
                image.name.clone(),
                size(image.own.bytes),
                size(image.shared.bytes),
                inodes.to_string(),
            ]);
        }
        writeln!(f, "{table}")?;
        let (blobs, partials) = (size(self.blobs.bytes), size(self.partials.bytes));
        let total = size(self.total.bytes);
        writeln!(
            f,
            "total {total} in {} inodes; blobs {blobs}, interrupted pulls {partials}",
            self.total.inodes
        )
    }
}

fn dash(all: &[String]) -> String {
    if all.is_empty() { "-".to_owned() } else { all.join(",") }
}
