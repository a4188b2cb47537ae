//! `reconcile images check`: are blobs and layers what they should be?

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use reconciler::world::linux::content::Content;
use reconciler::world::linux::layers::{Layers, Soundness};
use reconciler::world::linux::unpack::Limits;
use serde::Serialize;
use serde_json::Value;

use super::usage::Form;
use super::{content, find, root};
use crate::client::{Client, text};
use crate::kinds::Kind;
use crate::local::{Need, Session};
use crate::options::Global;
use crate::print::{self, Table, short};

/// Something is damaged, and only a person can help.
const DAMAGED: u8 = 20;
/// For fetching what was damaged.
const REPAIR: Duration = Duration::from_secs(1800);

#[derive(Args)]
pub struct Check {
    /// Also read every byte: blobs against their digests, layers against their blobs
    #[arg(long)]
    deep: bool,
    /// Make damaged layers again, from the blob or the registry; fetch damaged blobs again
    #[arg(long)]
    repair: bool,
    #[arg(short, long, value_enum, default_value_t = Form::Table)]
    output: Form,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Finding {
    /// `blob` or `layer`
    kind: &'static str,
    /// Digest or chain ID.
    id: String,
    problem: String,
    images: Vec<String>,
    /// Containers that stand on it keep it from being repaired.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    in_use: Vec<String>,
    #[serde(skip)]
    names: Vec<String>,
}

pub async fn run(global: &Global, args: &Check) -> Result<ExitCode> {
    let session = Session::open(global, if args.repair { Need::Act } else { Need::Look }).await?;
    let outcome = check(&session.client, args).await;
    session.close().await?;
    outcome
}

async fn check(client: &Client, args: &Check) -> Result<ExitCode> {
    let findings = look(client, args.deep).await?;
    args.output.print(&findings, || table(&findings))?;
    if findings.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    if !args.repair {
        eprintln!(
            "{} damaged; `reconcile images check --repair` makes them again",
            findings.len()
        );
        return Ok(ExitCode::from(DAMAGED));
    }
    let left = repair(client, &findings, args.deep).await?;
    for finding in &left {
        eprintln!(
            "{} {} is still damaged: {}",
            finding.kind,
            short(&finding.id),
            finding.problem
        );
    }
    Ok(if left.is_empty() {
        print::line(format_args!("{} repaired", findings.len()))?;
        ExitCode::SUCCESS
    } else {
        ExitCode::from(DAMAGED)
    })
}

fn table(findings: &[Finding]) -> String {
    if findings.is_empty() {
        return "no damage found\n".to_owned();
    }
    let mut table = Table::new(["KIND", "ID", "PROBLEM", "IMAGES", "IN USE BY"]);
    for finding in findings {
        table.row([
            finding.kind.to_owned(),
            short(&finding.id).to_owned(),
            finding.problem.clone(),
            finding.images.join(","),
            finding.in_use.join(","),
        ]);
    }
    table.to_string()
}

async fn look(client: &Client, deep: bool) -> Result<Vec<Finding>> {
    let records = client.list(Kind::Image.name()).await?;
    let users = find::users(client).await?;
    let (store, root) = (content(client).await?, root(client).await?);
    tokio::task::spawn_blocking(move || findings(&records, &users, &store, &root, deep)).await?
}

fn findings(records: &[Value], users: &[find::User], store: &Content, root: &Path, deep: bool) -> Result<Vec<Finding>> {
    let layers = Layers::open(root, Limits::default())?;
    let mut all: BTreeMap<String, Finding> = BTreeMap::new();
    for found in find::all(records) {
        let in_use = users.iter().filter(|user| user.image == found.id);
        let in_use: Vec<String> = in_use.map(|user| user.name.clone()).collect();
        let mut add = |kind, id: String, problem: String| {
            let finding = all.entry(id.clone()).or_insert_with(|| Finding {
                kind,
                id,
                problem,
                images: Vec::new(),
                in_use: Vec::new(),
                names: Vec::new(),
            });
            finding.images.push(found.name().to_owned());
            finding.names.extend(found.names.iter().cloned());
            if kind == "layer" {
                finding.in_use.extend(in_use.iter().cloned());
            }
        };
        let image = match found.load(store) {
            Ok(image) => image,
            Err(e) => {
                add("blob", found.manifest.clone(), format!("{e:#}"));
                continue;
            }
        };
        for blob in image.blobs() {
            let problem = match store.size_of(blob.digest())? {
                None => "is absent".to_owned(),
                Some(size) if size != blob.size() => format!("has {size} bytes instead of {}", blob.size()),
                Some(_) if deep && !store.sound(blob.digest())? => "has other bytes than its digest says".to_owned(),
                Some(_) => continue,
            };
            add("blob", blob.digest().to_string(), problem);
        }
        for chain in &image.chain_ids {
            let problem = match layers.verify(chain)? {
                Soundness::Sound => continue,
                Soundness::Absent => "is not unpacked",
                Soundness::Damaged => "differs from what was unpacked",
            };
            add("layer", chain.to_string(), problem.to_owned());
        }
        if deep {
            for chain in layers.differing(store, &image)? {
                add(
                    "layer",
                    chain.to_string(),
                    "has files with other bytes than its blob".to_owned(),
                );
            }
        }
    }
    // Nobody else hears what this process has thrown away.
    let _ = layers.trash().empty();
    Ok(all.into_values().collect())
}

/// Takes the damaged away and has the images' own controllers bring it back; what is damaged after that.
async fn repair(client: &Client, findings: &[Finding], deep: bool) -> Result<Vec<Finding>> {
    let (store, root) = (content(client).await?, root(client).await?);
    let doomed = findings.to_vec();
    tokio::task::spawn_blocking(move || -> Result<()> {
        let layers = Layers::open(&root, Limits::default())?;
        for finding in doomed.iter().filter(|f| f.in_use.is_empty()) {
            let id = finding.id.parse()?;
            match finding.kind {
                "blob" => store.remove_blob(&id)?,
                _ => layers.remove(&id)?,
            }
        }
        let _ = layers.trash().empty();
        Ok(())
    })
    .await??;
    client.once(Default::default()).await?;
    for finding in findings {
        for name in &finding.names {
            ready(client, name).await?;
        }
    }
    look(client, deep).await
}

/// Waits until the image's controller has nothing left to do, or says why it cannot.
async fn ready(client: &Client, name: &str) -> Result<()> {
    let all = client.list(Kind::Image.name()).await?;
    let Some(image) = all.iter().find(|image| text(&image["metadata"]["name"]) == name) else {
        return Ok(());
    };
    let mut changes = client
        .watch(Kind::Image.name(), text(&image["metadata"]["uid"]))
        .await?;
    let settled = async {
        while let Some((image, erased)) = changes.next().await? {
            let failed = image["status"]["conditions"][0]["reason"] == "ImageError";
            if erased || image["status"]["phase"] == "Ready" || failed {
                break;
            }
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(REPAIR, settled).await.unwrap_or(Ok(()))
}
