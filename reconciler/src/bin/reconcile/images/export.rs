//! `reconcile images export`: an archive that is an OCI layout and, for `docker load`, a docker archive as well.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;
use oci_spec::image::Descriptor;
use reconciler::image::manifest::Loaded;
use reconciler::world::linux::content::Content;
use serde_json::{Value, json};

use super::{content, find};
use crate::local::{Need, Session};
use crate::options::Global;

#[derive(Args)]
pub struct Export {
    #[arg(required = true, value_name = "REFERENCE")]
    references: Vec<String>,
    /// Write to this file [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

pub async fn run(global: &Global, args: &Export) -> Result<ExitCode> {
    let session = Session::open(global, Need::Look).await?;
    let images = async {
        let store = content(&session.client).await?;
        let mut images = Vec::new();
        for reference in &args.references {
            let found = find::one(&session.client, reference).await?;
            images.push((found.name().to_owned(), found.load(&store)?));
        }
        anyhow::Ok((store, images))
    };
    let images = images.await;
    session.close().await?;
    let (store, images) = images?;
    let output = args.output.clone();
    tokio::task::spawn_blocking(move || match &output {
        None if io::stdout().is_terminal() => bail!("standard output is a terminal; give --output FILE or a pipe"),
        None => write(&store, &images, io::stdout().lock()),
        Some(path) => to_file(&store, &images, path),
    })
    .await??;
    Ok(ExitCode::SUCCESS)
}

/// Complete under its name, or not there.
fn to_file(store: &Content, images: &[(String, Loaded)], path: &Path) -> Result<()> {
    let temp = path.with_added_extension("part");
    let file = File::create(&temp).with_context(|| format!("cannot write {}", temp.display()))?;
    let written = write(store, images, &file).and_then(|()| {
        file.sync_all()?;
        Ok(std::fs::rename(&temp, path)?)
    });
    if written.is_err() {
        let _ = std::fs::remove_file(&temp);
    }
    written
}

fn write(store: &Content, images: &[(String, Loaded)], to: impl Write) -> Result<()> {
    let mut tar = tar::Builder::new(BufWriter::with_capacity(1 << 20, to));
    let mut done = BTreeSet::new();
    let (mut index, mut docker) = (Vec::new(), Vec::new());
    document(&mut tar, "oci-layout", &json!({ "imageLayoutVersion": "1.0.0" }))?;
    for (name, image) in images {
        for blob in image.blobs() {
            if done.insert(blob.digest().to_string()) {
                add(&mut tar, store, blob)?;
            }
        }
        index.push(entry(name, image));
        docker.push(json!({
            "Config": member(image.manifest.config()),
            "RepoTags": if name.contains('@') { vec![] } else { vec![name] },
            "Layers": image.manifest.layers().iter().map(member).collect::<Vec<_>>(),
        }));
    }
    document(&mut tar, "manifest.json", &Value::from(docker))?;
    document(
        &mut tar,
        "index.json",
        &json!({ "schemaVersion": 2, "manifests": index }),
    )?;
    tar.into_inner()?.flush()?;
    Ok(())
}

/// The image as the index lists it: skopeo and podman go by the tag, containerd by the full name.
fn entry(name: &str, image: &Loaded) -> Value {
    let (full, tag) = ("io.containerd.image.name", "org.opencontainers.image.ref.name");
    let mut entry = json!(image.descriptor);
    entry["annotations"] = json!({ full: name, tag: name });
    entry
}

fn member(blob: &Descriptor) -> String {
    format!("blobs/sha256/{}", blob.digest().digest())
}

fn add(tar: &mut tar::Builder<impl Write>, store: &Content, blob: &Descriptor) -> Result<()> {
    let file = store.open_blob(blob.digest())?;
    let size = file.metadata()?.len();
    if size != blob.size() {
        bail!("blob {} is damaged: reconcile images check --repair", blob.digest());
    }
    tar.append_data(&mut header(size), member(blob), file)?;
    Ok(())
}

fn document(tar: &mut tar::Builder<impl Write>, name: &str, value: &Value) -> Result<()> {
    let bytes = serde_json::to_vec(value)?;
    tar.append_data(&mut header(bytes.len() as u64), name, bytes.as_slice())?;
    Ok(())
}

fn header(size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_mode(0o644);
    header.set_size(size);
    header
}
