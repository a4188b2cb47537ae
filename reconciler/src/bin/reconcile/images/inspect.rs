//! `reconcile images inspect`: what an image's documents say.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, ValueEnum};
use oci_spec::image::{Descriptor, Digest};
use reconciler::image::manifest::Loaded;
use reconciler::world::linux::layers::{LayerMeta, Layers};
use reconciler::world::linux::unpack::Limits;
use serde_json::{Value, json};

use super::{content, find, root};
use crate::client::Client;
use crate::local::{Need, Session};
use crate::options::Global;
use crate::print::{self, Table, short, size};

#[derive(Args)]
pub struct Inspect {
    #[arg(required = true, value_name = "REFERENCE")]
    references: Vec<String>,
    /// A table of the layers instead: bottom first, with what made each
    #[arg(long)]
    layers: bool,
    #[arg(short, long, value_enum, default_value_t = Form::Json)]
    output: Form,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Form {
    Json,
    Yaml,
}

pub async fn run(global: &Global, args: &Inspect) -> Result<ExitCode> {
    let session = Session::open(global, Need::Look).await?;
    let shown = show(&session.client, args).await;
    session.close().await?;
    shown.map(|()| ExitCode::SUCCESS)
}

async fn show(client: &Client, args: &Inspect) -> Result<()> {
    let store = content(client).await?;
    let layers = Layers::open(&root(client).await?, Limits::default())?;
    let mut all = Vec::new();
    for reference in &args.references {
        let found = find::one(client, reference).await?;
        let image = found.load(&store)?;
        let metas = layers.observe(&image.chain_ids)?;
        if args.layers {
            print::out(table(&image, &metas))?;
        } else {
            all.push(document(&found, &image, &metas));
        }
    }
    match args.output {
        _ if args.layers => Ok(()),
        Form::Json => print::line(serde_json::to_string_pretty(&all)?),
        Form::Yaml => print::out(serde_yaml::to_string(&all)?),
    }
}

type Metas = [Option<LayerMeta>];

fn document(found: &find::Found, image: &Loaded, metas: &Metas) -> Value {
    let (tags, digests): (Vec<_>, Vec<_>) = found.names.iter().partition(|name| !name.contains('@'));
    json!({
        "id": found.id,
        "repoTags": tags,
        "repoDigests": digests,
        "digest": found.digest,
        "manifestDigest": found.manifest,
        "size": image.size(),
        "unpackedSize": metas.iter().flatten().map(|meta| meta.bytes).sum::<u64>(),
        "layers": rows(image, metas).map(|row| row.json()).collect::<Vec<_>>(),
        "config": image.configuration,
        "manifest": image.manifest,
    })
}

struct Row<'a> {
    blob: &'a Descriptor,
    diff_id: &'a Digest,
    chain_id: &'a Digest,
    meta: Option<&'a LayerMeta>,
    made_by: String,
}

/// Bottom first. The history has entries without layers, too.
fn rows<'a>(image: &'a Loaded, metas: &'a Metas) -> impl Iterator<Item = Row<'a>> {
    let history = image.configuration.history().iter().flatten();
    let made = history.filter(|h| h.empty_layer() != Some(true));
    let mut made = made.map(|h| h.created_by().clone().unwrap_or_default());
    let blobs = image.manifest.layers().iter().enumerate();
    let rows: Vec<_> = blobs
        .map(|(i, blob)| Row {
            blob,
            diff_id: &image.diff_ids[i],
            chain_id: &image.chain_ids[i],
            meta: metas.get(i).and_then(Option::as_ref),
            made_by: made.next().unwrap_or_default(),
        })
        .collect();
    rows.into_iter()
}

impl Row<'_> {
    fn json(&self) -> Value {
        json!({
            "digest": self.blob.digest(),
            "mediaType": self.blob.media_type(),
            "size": self.blob.size(),
            "diffId": self.diff_id,
            "chainId": self.chain_id,
            "unpackedSize": self.meta.map(|meta| meta.bytes),
            "inodes": self.meta.map(|meta| meta.inodes),
            "createdBy": self.made_by,
        })
    }
}

fn table(image: &Loaded, metas: &Metas) -> Table {
    let mut table = Table::new(["LAYER", "CHAIN ID", "SIZE", "UNPACKED", "INODES", "CREATED BY"]);
    for row in rows(image, metas) {
        let made: String = row.made_by.chars().take(60).collect();
        table.row([
            short(row.blob.digest().as_ref()).to_owned(),
            short(row.chain_id.as_ref()).to_owned(),
            size(row.blob.size()),
            row.meta.map_or("-".to_owned(), |meta| size(meta.bytes)),
            row.meta.map_or("-".to_owned(), |meta| meta.inodes.to_string()),
            made,
        ]);
    }
    table
}
