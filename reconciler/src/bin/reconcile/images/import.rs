//! `reconcile images import`: archives into the content store, then the records that name and keep them.

use std::fs::File;
use std::io::{IsTerminal, Read};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use cri::records::v1;
use futures::future::join_all;
use reconciler::world::linux::archive::{self, Imported};
use state::image::{ImageKind, ImageSource, ImageSpec};
use state::resource::Kind as _;
use state::{Meta, New, Reference};

use super::content;
use crate::apply;
use crate::client::{Client, text};
use crate::print::{self, short};
use crate::verdict::Verdict;

/// For unpacking a big image on a slow disk.
const UNPACK: Duration = Duration::from_secs(1800);

/// Opened before anything else is done, so that a mistyped name costs nothing.
pub fn source(file: &Path) -> Result<Box<dyn Read + Send>> {
    if file != Path::new("-") {
        return Ok(Box::new(
            File::open(file).with_context(|| format!("cannot open {}", file.display()))?,
        ));
    }
    if std::io::stdin().is_terminal() {
        bail!("standard input is a terminal; give it an archive: docker save X | reconcile images import -");
    }
    Ok(Box::new(std::io::stdin()))
}

/// The content first, by its digests; then the records, which give it a name and keep it.
pub async fn import(client: &Client, reader: Box<dyn Read + Send>, name: Option<String>) -> Result<()> {
    let content = content(client).await?;
    let (content, imported, held) = tokio::task::spawn_blocking(move || {
        let held = content.importing()?;
        let imported = archive::import(reader, &content, name.as_deref());
        imported.map(|imported| (content, imported, held))
    })
    .await??;
    let mut documents = Vec::new();
    let mut names = Vec::new();
    for image in &imported {
        let (name, document) = record(image)?;
        documents.push(document);
        names.push(name);
    }
    if documents.is_empty() {
        bail!("the archive holds no image");
    }
    let applied = client.apply(documents, false).await?;
    // From here on the records keep the content.
    drop(held);
    tokio::task::spawn_blocking({
        let names = names.clone();
        let targets: Vec<_> = imported.iter().map(|image| image.target.clone()).collect();
        move || {
            names
                .iter()
                .zip(&targets)
                .try_for_each(|(name, target)| content.tag(name, target))
        }
    })
    .await??;
    let unpacked = join_all(applied.iter().map(|one| apply::settled(client, one, UNPACK))).await;
    let mut failures = Vec::new();
    for (verdict, (one, name)) in unpacked.into_iter().zip(applied.iter().zip(&names)) {
        match verdict? {
            Verdict::Met => {
                let id = client.get(&one.kind, &one.uid).await?.unwrap_or_default();
                print::line(format_args!("{name} {}", short(text(&id["status"]["id"]))))?;
            }
            Verdict::Failed(why) | Verdict::Waiting(why) => {
                failures.push(format!("{name}: {why}"));
                // What cannot be unpacked is of no use, and the name stays free.
                if one.outcome() == v1::applied::Outcome::Created {
                    client.delete(&one.kind, &one.uid, None, true, UNPACK).await?;
                }
            }
        }
    }
    if failures.is_empty() {
        Ok(())
    } else {
        bail!("{}", failures.join("\n"))
    }
}

/// The normalized name and the record of an imported image.
fn record(image: &Imported) -> Result<(String, v1::Document)> {
    let Some(name) = &image.reference else {
        bail!(
            "the archive does not name its image {}; give one with --name",
            short(image.manifest.digest().as_ref())
        );
    };
    let name = Reference::parse(name, "the archive's image name")?.to_string();
    let manifest_digest = image.target.digest().to_string();
    let meta = Meta {
        name: name.clone(),
        ..Meta::default()
    };
    let spec = ImageSpec {
        source: ImageSource::Archive { manifest_digest },
        ..ImageSpec::default()
    };
    let json = state::yaml::Record::Image(New { meta, spec }).to_json()?;
    Ok((
        name,
        v1::Document {
            kind: ImageKind::KIND.to_owned(),
            json,
        },
    ))
}
