//! `crictl` of sigs.k8s.io/cri-tools on a node's socket: run, check, read its tables and its JSON.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Output, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tokio::process::Command;

use crate::node::{Node, shown};
use crate::tools;

pub struct Crictl {
    program: PathBuf,
    args: Vec<String>,
}

/// A table: its columns from left to right, and each row's cells by column.
pub struct Table {
    pub columns: Vec<String>,
    pub rows: Vec<BTreeMap<String, String>>,
}

impl Crictl {
    /// Go builds it once from `e2e/conformance/go.mod` into the user's cache; without Go there is none.
    pub async fn of(node: &Node) -> Result<Option<Crictl>> {
        let program = || tools::go_program("crictl", "sigs.k8s.io/cri-tools/cmd/crictl");
        let Some(program) = tokio::task::spawn_blocking(program).await?? else {
            return Ok(None);
        };
        let config = node.file("crictl.yaml", "timeout: 20\n")?;
        let endpoint = format!("unix://{}", node.socket().display());
        let args = ["--config", &config, "-r", &endpoint, "-t", "20s"].map(str::to_owned);
        Ok(Some(Crictl {
            program,
            args: args.into(),
        }))
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(&self.args)
            .args(args)
            .stdin(Stdio::null())
            .kill_on_drop(true);
        command
    }

    pub async fn run(&self, args: &[&str]) -> Result<Output> {
        Ok(self.command(args).output().await?)
    }

    /// Standard output of a command that must succeed.
    pub async fn ok(&self, args: &[&str]) -> Result<String> {
        let out = self.run(args).await?;
        ensure!(out.status.success(), "crictl {}: {}", args.join(" "), shown(&out));
        Ok(String::from_utf8(out.stdout)?.trim_end().to_owned())
    }

    /// What a command says that must fail.
    pub async fn refused(&self, args: &[&str]) -> Result<String> {
        let out = self.run(args).await?;
        ensure!(
            !out.status.success(),
            "crictl {} succeeded: {}",
            args.join(" "),
            shown(&out)
        );
        Ok(shown(&out))
    }

    pub async fn json(&self, args: &[&str]) -> Result<Value> {
        let text = self.ok(args).await?;
        serde_json::from_str(&text).with_context(|| format!("crictl {}: {text}", args.join(" ")))
    }

    /// The row of a table whose line contains `key`, by columns of two or more spaces.
    pub async fn row(&self, args: &[&str], key: &str) -> Result<Vec<String>> {
        let text = self.ok(args).await?;
        let line = text
            .lines()
            .find(|line| line.contains(key))
            .with_context(|| format!("{key:?} is not in\n{text}"))?;
        Ok(cells(line).into_iter().map(|(_, cell)| cell.to_owned()).collect())
    }

    pub async fn table(&self, args: &[&str]) -> Result<Table> {
        let text = self.ok(args).await?;
        // Tables that can be watched begin by clearing the screen.
        let mut lines = text.trim_start_matches("\x1b[2J\x1b[H").lines();
        let head = cells(
            lines
                .next()
                .with_context(|| format!("crictl {}: no head", args.join(" ")))?,
        );
        let row = |line: &str| {
            let ends = head.iter().skip(1).map(|(at, _)| *at).chain([line.len()]);
            let cell = |start: usize, end: usize| line.get(start..end.min(line.len())).unwrap_or_default().trim();
            head.iter()
                .zip(ends)
                .map(|((at, name), end)| (name.to_string(), cell(*at, end).to_owned()))
                .collect()
        };
        Ok(Table {
            columns: head.iter().map(|(_, name)| name.to_string()).collect(),
            rows: lines.map(row).collect(),
        })
    }
}

/// What stands on a line between gaps of two or more spaces, and where it begins.
fn cells(line: &str) -> Vec<(usize, &str)> {
    let parts = line
        .split("  ")
        .map(|part| (part.as_ptr() as usize - line.as_ptr() as usize, part));
    parts
        .map(|(at, part)| (at + part.len() - part.trim_start().len(), part.trim()))
        .filter(|(_, part)| !part.is_empty())
        .collect()
}

/// The value at a JSON pointer, which must be there.
pub fn path<'a>(json: &'a Value, pointer: &str) -> Result<&'a Value> {
    json.pointer(pointer)
        .with_context(|| format!("{pointer} is missing in {json:#}"))
}

/// Every pointer must lead to something.
pub fn has(json: &Value, pointers: &[&str]) -> Result<()> {
    pointers.iter().try_for_each(|pointer| path(json, pointer).map(drop))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_begin_where_they_stand() {
        assert_eq!(cells("POD ID    A   CPU %"), [(0, "POD ID"), (10, "A"), (14, "CPU %")]);
    }
}
