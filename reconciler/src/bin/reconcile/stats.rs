//! `reconcile stats`: what containers use now.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use cri::runtime::v1::{ContainerStats, UInt64Value};
use serde_json::{Value, json};

use crate::client::{Client, text};
use crate::containers;
use crate::kinds::Kind;
use crate::local::{Need, Session};
use crate::options::Global;
use crate::print::{self, Table, short, size};

/// Between two samples, whose difference is the use of the processor.
const APART: Duration = Duration::from_secs(1);

#[derive(Args)]
pub struct Stats {
    /// A pod's name, or the beginning of a container's id [default: every running container]
    #[arg(value_name = "POD|ID")]
    target: Option<String>,
    /// Only in this namespace
    #[arg(short, long)]
    namespace: Option<String>,
    /// Go on, once a second
    #[arg(short, long)]
    watch: bool,
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Table,
    Json,
    Yaml,
}

pub async fn run(global: &Global, args: &Stats) -> Result<ExitCode> {
    let session = Session::open(global, Need::Act).await?;
    let shown = show(&session.client, args).await;
    session.close().await?;
    shown.map(|()| ExitCode::SUCCESS)
}

async fn show(client: &Client, args: &Stats) -> Result<()> {
    let mut before = client.stats().await?;
    loop {
        tokio::time::sleep(APART).await;
        let now = client.stats().await?;
        let rows = select(client, args, &before, &now).await?;
        match args.output {
            Format::Table => {
                if args.watch && std::io::stdout().is_terminal() {
                    print::out("\x1b[2J\x1b[H")?;
                }
                print::out(table(&rows))?;
            }
            Format::Json if args.watch => print::line(json!({ "stats": rows }))?,
            Format::Json => print::line(serde_json::to_string_pretty(&json!({ "stats": rows }))?)?,
            Format::Yaml if args.watch => print::out(format_args!("---\n{}", serde_yaml::to_string(&rows)?))?,
            Format::Yaml => print::out(serde_yaml::to_string(&json!({ "stats": rows }))?)?,
        }
        if !args.watch {
            return Ok(());
        }
        before = now;
    }
}

/// One object a container, by pod and name.
async fn select(
    client: &Client,
    args: &Stats,
    before: &[ContainerStats],
    now: &[ContainerStats],
) -> Result<Vec<Value>> {
    let wanted = match &args.target {
        None => None,
        Some(target) => {
            let found = containers::find(client, target, None, args.namespace.as_deref()).await?;
            Some(
                found
                    .iter()
                    .map(|c| text(&c["metadata"]["uid"]).to_owned())
                    .collect::<Vec<_>>(),
            )
        }
    };
    let pods = pods(client).await?;
    let records = client.list(Kind::Container.name()).await?;
    let mut rows = Vec::new();
    for record in &records {
        let uid = text(&record["metadata"]["uid"]);
        let Some(stats) = now.iter().find(|stats| id(stats) == uid) else {
            continue;
        };
        let (namespace, pod) = pods.get(text(&record["spec"]["sandbox"])).cloned().unwrap_or_default();
        if wanted.as_ref().is_some_and(|wanted| !wanted.iter().any(|w| w == uid))
            || args.namespace.as_ref().is_some_and(|only| *only != namespace)
        {
            continue;
        }
        let earlier = before.iter().find(|stats| id(stats) == uid);
        let mut row = describe(stats, earlier);
        row["name"] = record["spec"]["name"].clone();
        row["pod"] = pod.into();
        row["namespace"] = namespace.into();
        rows.push(row);
    }
    if rows.is_empty()
        && let Some(target) = &args.target
    {
        bail!("no container of {target} is running");
    }
    rows.sort_by_cached_key(|row| ["namespace", "pod", "name"].map(|key| text(&row[key]).to_owned()));
    Ok(rows)
}

fn id(stats: &ContainerStats) -> &str {
    stats.attributes.as_ref().map_or("", |attributes| &attributes.id)
}

/// Namespace and name of the pod of every sandbox.
async fn pods(client: &Client) -> Result<HashMap<String, (String, String)>> {
    let sandboxes = client.list(Kind::Sandbox.name()).await?;
    let pair = |s: &Value| {
        let pod = &s["spec"]["pod"];
        let names = (text(&pod["namespace"]).to_owned(), text(&pod["name"]).to_owned());
        (text(&s["metadata"]["uid"]).to_owned(), names)
    };
    Ok(sandboxes.iter().map(pair).collect())
}

fn number(value: Option<UInt64Value>) -> u64 {
    value.map_or(0, |value| value.value)
}

fn describe(now: &ContainerStats, before: Option<&ContainerStats>) -> Value {
    let cpu = now.cpu.unwrap_or_default();
    let rate = before.and_then(|before| before.cpu).and_then(|before| {
        let passed = cpu
            .timestamp
            .checked_sub(before.timestamp)
            .filter(|passed| *passed > 0)?;
        let used = number(cpu.usage_core_nano_seconds).checked_sub(number(before.usage_core_nano_seconds))?;
        Some(u128::from(used) * 1_000_000_000 / u128::try_from(passed).ok()?)
    });
    let memory = now.memory.unwrap_or_default();
    let disk = now.writable_layer.clone().unwrap_or_default();
    json!({
        "id": id(now),
        "timestamp": cpu.timestamp,
        "cpu": {
            "usageNanoCores": rate.and_then(|rate| u64::try_from(rate).ok()),
            "usageCoreNanoSeconds": number(cpu.usage_core_nano_seconds),
        },
        "memory": {
            "workingSetBytes": number(memory.working_set_bytes),
            "usageBytes": number(memory.usage_bytes),
            "availableBytes": number(memory.available_bytes),
            "rssBytes": number(memory.rss_bytes),
        },
        "swapBytes": now.swap.map(|swap| number(swap.swap_usage_bytes)),
        "disk": { "usedBytes": number(disk.used_bytes), "inodesUsed": number(disk.inodes_used) },
    })
}

fn table(rows: &[Value]) -> Table {
    let mut table = Table::new(["CONTAINER", "NAME", "POD", "CPU %", "MEM", "DISK", "INODES", "SWAP"]);
    let bytes = |value: &Value| size(value.as_u64().unwrap_or(0));
    for row in rows {
        let cpu = row["cpu"]["usageNanoCores"]
            .as_u64()
            .map(|rate| format!("{:.2}", rate as f64 / 1e7));
        table.row([
            short(text(&row["id"])).to_owned(),
            text(&row["name"]).to_owned(),
            text(&row["pod"]).to_owned(),
            cpu.unwrap_or_else(|| "-".to_owned()),
            bytes(&row["memory"]["workingSetBytes"]),
            bytes(&row["disk"]["usedBytes"]),
            row["disk"]["inodesUsed"].to_string(),
            bytes(&row["swapBytes"]),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use cri::runtime::v1::CpuUsage;

    fn stats(timestamp: i64, used: u64) -> ContainerStats {
        let cpu = CpuUsage {
            timestamp,
            usage_core_nano_seconds: Some(UInt64Value { value: used }),
            ..CpuUsage::default()
        };
        ContainerStats {
            cpu: Some(cpu),
            ..ContainerStats::default()
        }
    }

    #[test]
    fn the_processor_is_told_in_percent_of_one_core() {
        let row = describe(
            &stats(2_000_000_000, 900_000_000),
            Some(&stats(1_000_000_000, 400_000_000)),
        );
        assert_eq!(row["cpu"]["usageNanoCores"], 500_000_000);
        assert!(table(&[row]).to_string().contains("50.00"));
        let first = describe(&stats(5, 5), None);
        assert!(first["cpu"]["usageNanoCores"].is_null());
        let again = describe(&stats(5, 5), Some(&stats(5, 5)));
        assert!(again["cpu"]["usageNanoCores"].is_null(), "no time has passed");
    }
}
