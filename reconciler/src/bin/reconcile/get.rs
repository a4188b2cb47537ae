//! `reconcile get`: records as tables, JSON or YAML.

use std::collections::HashMap;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use crate::client::{Client, list, text};
use crate::kinds::{self, KINDS, Kind, Target};
use crate::local::{Need, Session};
use crate::options::Global;
use crate::print::{self, Table, age, now, short, size};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Table,
    /// A table with more columns
    Wide,
    Json,
    Yaml,
}

#[derive(Args)]
pub struct Get {
    /// KIND or KIND/NAME
    #[arg(value_name = "KIND", help = format!("{KINDS}; or KIND/NAME"))]
    target: Target,
    /// Names, or beginnings of ids
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
    /// Only this namespace [default: all]
    #[arg(short, long)]
    namespace: Option<String>,
    /// Show the namespace of each
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    all_namespaces: bool,
    /// Go on showing changes
    #[arg(short, long)]
    watch: bool,
}

impl Get {
    /// Every image.
    pub fn images(output: Format) -> Get {
        let target = Target {
            kind: Kind::Image,
            name: None,
        };
        Get {
            target,
            names: Vec::new(),
            output,
            namespace: None,
            all_namespaces: false,
            watch: false,
        }
    }
}

pub async fn run(global: &Global, args: &Get) -> Result<ExitCode> {
    let session = Session::open(global, if args.watch { Need::Act } else { Need::Look }).await?;
    let shown = show(&session.client, args).await;
    session.close().await?;
    shown
}

async fn show(client: &Client, args: &Get) -> Result<ExitCode> {
    let (kind, names) = (args.target.kind, args.target.names(&args.names));
    let (found, missing) = select(client.list(kind.name()).await?, args, &names);
    match args.output {
        Format::Json if names.len() == 1 && found.len() == 1 => print::line(serde_json::to_string_pretty(&found[0])?)?,
        Format::Json => print::line(serde_json::to_string_pretty(&list_of(&found))?)?,
        Format::Yaml if names.len() == 1 && found.len() == 1 => print::out(serde_yaml::to_string(&found[0])?)?,
        Format::Yaml => print::out(serde_yaml::to_string(&list_of(&found))?)?,
        Format::Table | Format::Wide if found.is_empty() && names.is_empty() => eprintln!("nothing found"),
        Format::Table | Format::Wide if found.is_empty() => {}
        Format::Table | Format::Wide => print::out(table(client, kind, &found, args).await?)?,
    }
    for name in &missing {
        eprintln!("reconcile: {} {name:?} not found", kind.lower());
    }
    if args.watch {
        follow(client, args, &names).await?;
    }
    Ok(if missing.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn select(all: Vec<Value>, args: &Get, names: &[String]) -> (Vec<Value>, Vec<String>) {
    let namespace = args.namespace.as_deref();
    if names.is_empty() {
        let wanted = |r: &Value| namespace.is_none_or(|n| text(&r["metadata"]["namespace"]) == n);
        return (all.into_iter().filter(wanted).collect(), Vec::new());
    }
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for name in names {
        let called = kinds::called(&all, args.target.kind, name, namespace);
        if called.is_empty() {
            missing.push(name.clone());
        }
        found.extend(called);
    }
    (found, missing)
}

fn list_of(items: &[Value]) -> Value {
    json!({"apiVersion": state::resource::API_VERSION, "kind": "List", "items": items})
}

/// Prints each change as a line of its own.
async fn follow(client: &Client, args: &Get, names: &[String]) -> Result<()> {
    let kind = args.target.kind;
    let mut changes = client.watch(kind.name(), "").await?;
    while let Some((record, erased)) = changes.next().await? {
        let (found, _) = select(vec![record], args, names);
        match (args.output, found.first()) {
            (_, None) => {}
            (Format::Json, Some(record)) => print::line(record)?,
            (Format::Yaml, Some(record)) => print::out(format_args!("---\n{}", serde_yaml::to_string(record)?))?,
            (Format::Table | Format::Wide, Some(_)) => {
                let table = table(client, kind, &found, args).await?.to_string();
                let end = if erased { "   (gone)" } else { "" };
                print::line(format_args!("{}{end}", table.lines().nth(1).unwrap_or_default()))?;
            }
        }
    }
    Ok(())
}

/// The cells of a record; wide or not; with the pods' names by sandbox.
type Row = fn(&Value, bool, &HashMap<String, String>) -> Vec<String>;

async fn table(client: &Client, kind: Kind, records: &[Value], args: &Get) -> Result<Table> {
    let wide = args.output == Format::Wide;
    let other = |r: &Value| !matches!(text(&r["metadata"]["namespace"]), "" | "default");
    let namespaced = matches!(kind, Kind::Pod | Kind::Sandbox | Kind::Container | Kind::Secret);
    let namespace = namespaced && (args.all_namespaces || wide || records.iter().any(other));
    let pods = if kind == Kind::Container {
        pods_of(client).await?
    } else {
        HashMap::new()
    };
    let (header, row): (&[&str], Row) = match kind {
        Kind::Pod if wide => (&["NAME", "READY", "STATUS", "RESTARTS", "AGE", "IP", "MESSAGE"], pod),
        Kind::Pod => (&["NAME", "READY", "STATUS", "RESTARTS", "AGE"], pod),
        Kind::Sandbox if wide => (&["SANDBOX ID", "POD", "STATE", "ATTEMPT", "AGE", "IP", "PID"], sandbox),
        Kind::Sandbox => (&["SANDBOX ID", "POD", "STATE", "ATTEMPT", "AGE"], sandbox),
        Kind::Container if wide => (
            &[
                "CONTAINER ID",
                "NAME",
                "POD",
                "STATE",
                "ATTEMPT",
                "IMAGE",
                "AGE",
                "PID",
                "MESSAGE",
            ],
            container,
        ),
        Kind::Container => (
            &["CONTAINER ID", "NAME", "POD", "STATE", "ATTEMPT", "IMAGE", "AGE"],
            container,
        ),
        Kind::Image if wide => (&["IMAGE", "TAG", "IMAGE ID", "SIZE", "STATE", "AGE", "MESSAGE"], image),
        Kind::Image => (&["IMAGE", "TAG", "IMAGE ID", "SIZE", "STATE"], image),
        Kind::Secret => (&["NAME", "TYPE", "AGE"], secret),
        Kind::Node => (&["NAME", "READY", "NETWORK", "ROOT", "AGE"], node),
        Kind::Debt => (&["NAME", "PART", "OBJECT", "ATTEMPTS", "AGE", "REASON"], debt),
    };
    let first = namespace.then_some("NAMESPACE");
    let mut table = Table::new(first.into_iter().chain(header.iter().copied()));
    for record in records {
        let first = namespace.then(|| text(&record["metadata"]["namespace"]).to_owned());
        table.row(first.into_iter().chain(row(record, wide, &pods)));
    }
    Ok(table)
}

/// The pod name of every sandbox.
async fn pods_of(client: &Client) -> Result<HashMap<String, String>> {
    let sandboxes = client.list(Kind::Sandbox.name()).await?;
    let pair = |s: &Value| {
        (
            text(&s["metadata"]["uid"]).to_owned(),
            text(&s["spec"]["pod"]["name"]).to_owned(),
        )
    };
    Ok(sandboxes.iter().map(pair).collect())
}

fn born(record: &Value) -> String {
    age(record["metadata"]["created"].as_i64().unwrap_or(0), now())
}

/// The record's phase, or that it is on its way out.
fn phase(record: &Value) -> String {
    match kinds::deleted(record) {
        true => "Terminating".to_owned(),
        false => text(&record["status"]["phase"]).to_owned(),
    }
}

fn number(value: &Value) -> String {
    value.as_i64().unwrap_or(0).to_string()
}

fn pod(record: &Value, wide: bool, _: &HashMap<String, String>) -> Vec<String> {
    let status = &record["status"];
    let containers = list(&status["containers"]);
    let mains = || containers.iter().filter(|c| c["init"] == false);
    let restarts: i64 = containers.iter().filter_map(|c| c["restarts"].as_i64()).sum();
    // Why the last attempt of one ended, not what one that is being made waits for.
    let ended = containers
        .iter()
        .filter(|c| c["exitCode"].is_i64() || c["reason"] == "ImagePullBackOff");
    let mut failing = ended
        .map(|c| text(&c["reason"]))
        .filter(|r| !matches!(*r, "" | "Completed"));
    let shown = match phase(record).as_str() {
        "Pending" => failing.next().unwrap_or("Pending").to_owned(),
        phase => phase.to_owned(),
    };
    let ready = format!(
        "{}/{}",
        mains().filter(|c| c["running"] == true).count(),
        mains().count()
    );
    let mut row = vec![
        text(&record["metadata"]["name"]).to_owned(),
        ready,
        shown,
        restarts.to_string(),
        born(record),
    ];
    if wide {
        row.extend([text(&status["ip"]).to_owned(), crate::verdict::waits_for(status)]);
    }
    row
}

fn sandbox(record: &Value, wide: bool, _: &HashMap<String, String>) -> Vec<String> {
    let (spec, status) = (&record["spec"], &record["status"]);
    let mut row = vec![
        short(text(&record["metadata"]["uid"])).to_owned(),
        text(&spec["pod"]["name"]).to_owned(),
        phase(record),
        number(&spec["pod"]["attempt"]),
        born(record),
    ];
    if wide {
        row.extend([text(&status["ip"]).to_owned(), number(&status["pid"])]);
    }
    row
}

fn container(record: &Value, wide: bool, pods: &HashMap<String, String>) -> Vec<String> {
    let (spec, status) = (&record["spec"], &record["status"]);
    let state = match phase(record).as_str() {
        "Exited" => format!("Exited ({})", number(&status["exitCode"])),
        phase => phase.to_owned(),
    };
    let mut row = vec![
        short(text(&record["metadata"]["uid"])).to_owned(),
        text(&spec["name"]).to_owned(),
        pods.get(text(&spec["sandbox"])).cloned().unwrap_or_default(),
        state,
        number(&spec["attempt"]),
        text(&spec["image"]["requested"]).to_owned(),
        born(record),
    ];
    if wide {
        let message = match text(&status["message"]) {
            "" => crate::verdict::waits_for(status),
            message => message.to_owned(),
        };
        row.extend([number(&status["pid"]), message]);
    }
    row
}

fn image(record: &Value, wide: bool, _: &HashMap<String, String>) -> Vec<String> {
    let (name, status) = (text(&record["metadata"]["name"]), &record["status"]);
    let (repository, tag) = split(name);
    let mut row = vec![
        repository.to_owned(),
        tag.to_owned(),
        short(text(&status["id"])).to_owned(),
        size(status["size"].as_u64().unwrap_or(0)),
        phase(record),
    ];
    if wide {
        row.extend([born(record), crate::verdict::waits_for(status)]);
    }
    row
}

/// Repository and tag (or digest) of a normalized reference.
fn split(name: &str) -> (&str, &str) {
    if let Some((repository, digest)) = name.split_once('@') {
        return (repository, digest.get(..19).unwrap_or(digest));
    }
    match name.rsplit_once(':') {
        Some((repository, tag)) if !tag.contains('/') => (repository, tag),
        _ => (name, "<none>"),
    }
}

fn secret(record: &Value, _: bool, _: &HashMap<String, String>) -> Vec<String> {
    vec![
        text(&record["metadata"]["name"]).to_owned(),
        text(&record["spec"]["type"]).to_owned(),
        born(record),
    ]
}

fn node(record: &Value, _: bool, _: &HashMap<String, String>) -> Vec<String> {
    let status = &record["status"];
    let condition = |name: &str| {
        let found = list(&status["conditions"]).iter().find(|c| c["type"] == name);
        found.map_or("Unknown", |c| text(&c["status"])).to_owned()
    };
    let name = text(&record["metadata"]["name"]).to_owned();
    vec![
        name,
        condition("Ready"),
        condition("NetworkReady"),
        text(&status["root"]).to_owned(),
        born(record),
    ]
}

fn debt(record: &Value, _: bool, _: &HashMap<String, String>) -> Vec<String> {
    let (spec, status) = (&record["spec"], &record["status"]);
    vec![
        text(&record["metadata"]["name"]).to_owned(),
        text(&spec["part"]).to_owned(),
        short(text(&spec["object"])).to_owned(),
        number(&status["attempts"]),
        born(record),
        text(&spec["reason"]).to_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pods_row() {
        let record = json!({
            "metadata": {"name": "web", "created": 1},
            "status": {"phase": "Running", "ip": "10.0.0.2", "containers": [
                {"name": "setup", "init": true, "running": false, "restarts": 1, "reason": "Completed"},
                {"name": "a", "init": false, "running": true, "restarts": 2, "reason": ""},
                {"name": "b", "init": false, "running": false, "restarts": 0, "reason": "Error", "exitCode": 1},
            ]},
        });
        let row = pod(&record, false, &HashMap::new());
        assert_eq!(row[..4], ["web", "1/2", "Running", "3"]);
        let mut pending = record.clone();
        pending["status"]["phase"] = json!("Pending");
        assert_eq!(
            pod(&pending, false, &HashMap::new())[2],
            "Error",
            "why it is not running"
        );
        pending["metadata"]["deletion"] = json!(5);
        assert_eq!(pod(&pending, false, &HashMap::new())[2], "Terminating");
    }

    #[test]
    fn an_images_name_is_split() {
        assert_eq!(
            split("docker.io/library/busybox:1.36"),
            ("docker.io/library/busybox", "1.36")
        );
        assert_eq!(split("localhost:5000/x"), ("localhost:5000/x", "<none>"));
        assert_eq!(split("h/x@sha256:0123456789abcdef"), ("h/x", "sha256:0123456789ab"));
    }
}
