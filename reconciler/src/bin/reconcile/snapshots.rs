//! `reconcile snapshots usage`: the writable layers of containers.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};
use serde::Serialize;

use crate::images::find;
use crate::images::usage::{Form, Sort};
use crate::local::{Need, Session};
use crate::options::Global;
use crate::print::{Table, short, size};

#[derive(Args)]
pub struct Snapshots {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Size and inodes of what each container has written, with its pod and state
    Usage {
        #[arg(short, long, value_enum, default_value_t = Form::Table)]
        output: Form,
        #[arg(long, value_enum, default_value_t = Sort::Size)]
        sort: Sort,
    },
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Snapshot {
    /// Container, as `pod/name`; empty if no record knows it.
    container: String,
    id: String,
    state: String,
    bytes: u64,
    inodes: u64,
    path: PathBuf,
}

pub async fn run(global: &Global, args: &Snapshots) -> Result<ExitCode> {
    let Command::Usage { output, sort } = &args.command;
    let session = Session::open(global, Need::Look).await?;
    let found = async {
        let users = find::users(&session.client).await?;
        Ok::<_, anyhow::Error>((users, crate::images::root(&session.client).await?))
    };
    let found = found.await;
    session.close().await?;
    let (users, root) = found?;
    let mut all = tokio::task::spawn_blocking(move || snapshots(&users, &root)).await??;
    match sort {
        Sort::Size => all.sort_by_key(|s| std::cmp::Reverse(s.bytes)),
        Sort::Inodes => all.sort_by_key(|s| std::cmp::Reverse(s.inodes)),
        Sort::Name => all.sort_by(|a, b| a.container.cmp(&b.container)),
    }
    output.print(&all, || table(&all).to_string())?;
    Ok(ExitCode::SUCCESS)
}

fn table(all: &[Snapshot]) -> Table {
    let mut table = Table::new(["CONTAINER", "ID", "STATE", "SIZE", "INODES"]);
    for s in all {
        let (name, inodes) = (
            if s.container.is_empty() { "-" } else { &s.container },
            s.inodes.to_string(),
        );
        table.row([name, short(&s.id), &s.state, &size(s.bytes), &inodes]);
    }
    table
}

/// Every writable layer on the disk, whether a record knows it or not.
fn snapshots(users: &[find::User], root: &Path) -> Result<Vec<Snapshot>> {
    let mut all = Vec::new();
    for pod in std::fs::read_dir(root.join("pods"))?.flatten() {
        let Ok(containers) = std::fs::read_dir(pod.path().join("containers")) else {
            continue;
        };
        for container in containers.flatten() {
            let path = container.path().join("upper");
            if !path.is_dir() {
                continue;
            }
            let id = container.file_name().to_string_lossy().into_owned();
            let user = users.iter().find(|user| user.uid == id);
            let (bytes, inodes) = used(&path);
            all.push(Snapshot {
                container: user.map(|u| u.name.clone()).unwrap_or_default(),
                state: user.map_or("orphan", |u| &u.state).to_owned(),
                id,
                bytes,
                inodes,
                path,
            });
        }
    }
    Ok(all)
}

/// Bytes and inodes on disk, links followed by none. What goes while it is counted is not counted.
fn used(path: &Path) -> (u64, u64) {
    let (mut bytes, mut inodes) = (0, 0);
    let mut pending = vec![path.to_owned()];
    let mut linked = std::collections::HashSet::new();
    while let Some(path) = pending.pop() {
        let Ok(meta) = path.symlink_metadata() else { continue };
        if meta.is_dir() || meta.nlink() == 1 || linked.insert(meta.ino()) {
            bytes += meta.blocks() * 512;
            inodes += 1;
        }
        if meta.is_dir() {
            let entries = std::fs::read_dir(&path).into_iter().flatten().flatten();
            pending.extend(entries.map(|entry| entry.path()));
        }
    }
    (bytes, inodes)
}
