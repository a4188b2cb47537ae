//! `reconcile images`: import archives, list and remove images.

mod explain;

use std::fs::File;
use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use cri::records::v1;
use futures::future::join_all;
use reconciler::world::linux::archive::{self, Imported};
use reconciler::world::linux::content::Content;
use state::image::{ImageKind, ImageSource, ImageSpec};
use state::resource::Kind as _;
use state::{Meta, New, Reference};

use crate::client::{Client, text};
use crate::get::{self, Format};
use crate::kinds::{self, Kind};
use crate::local::{Need, Session};
use crate::options::Global;
use crate::print::{self, short};
use crate::verdict::Verdict;
use crate::{apply, delete};

/// For unpacking a big image on a slow disk.
const UNPACK: Duration = Duration::from_secs(1800);

#[derive(Args)]
pub struct Images {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Import an OCI layout or a docker archive, compressed or not: `docker save X | reconcile images import -`
    Import {
        /// A tar file, or - for standard input
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Call the archive's one image so, whatever the archive calls it
        #[arg(long, value_name = "REFERENCE")]
        name: Option<String>,
    },
    /// List images
    #[command(visible_alias = "list")]
    Ls {
        #[arg(short, long, value_enum, default_value_t = Format::Table)]
        output: Format,
    },
    /// Remove images; what containers were made from stays until they are gone
    #[command(visible_alias = "remove")]
    Rm {
        /// References or beginnings of image ids
        #[arg(required = true, value_name = "REFERENCE")]
        references: Vec<String>,
    },
    /// Show which endpoints serve a reference, in order, and where each setting was made
    Explain(explain::Explain),
}

pub async fn run(global: &Global, args: &Images) -> Result<ExitCode> {
    match &args.command {
        Command::Ls { output } => get::run(global, &get::Get::images(*output)).await,
        Command::Import { file, name } => {
            if let Some(name) = name {
                Reference::parse(name, "--name")?;
            }
            let reader = source(file)?;
            let session = Session::open(global, Need::Act).await?;
            let imported = import(&session.client, reader, name.clone()).await;
            session.close().await?;
            imported.map(|()| ExitCode::SUCCESS)
        }
        Command::Explain(args) => explain::run(args),
        Command::Rm { references } => {
            let session = Session::open(global, Need::Act).await?;
            let removed = remove(&session.client, references).await;
            session.close().await?;
            removed.map(|()| ExitCode::SUCCESS)
        }
    }
}

/// Opened before anything else is done, so that a mistyped name costs nothing.
fn source(file: &Path) -> Result<Box<dyn Read + Send>> {
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
async fn import(client: &Client, reader: Box<dyn Read + Send>, name: Option<String>) -> Result<()> {
    // The daemon's own root, whatever this command's flags say.
    let nodes = client.list(Kind::Node.name()).await?;
    let root = nodes
        .first()
        .map(|node| text(&node["status"]["root"]).to_owned())
        .filter(|root| !root.is_empty());
    let root = root.context("the daemon does not say where its images lie")?;
    let content = Content::open(Path::new(&root))?;
    let (content, imported) = tokio::task::spawn_blocking(move || {
        let imported = archive::import(reader, &content, name.as_deref());
        imported.map(|imported| (content, imported))
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

async fn remove(client: &Client, references: &[String]) -> Result<()> {
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
