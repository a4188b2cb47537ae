//! `reconcile describe`: one record for people: wish, status, and what every stage says since when.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use serde_json::Value;

use crate::client::{list, text};
use crate::kinds::{self, KINDS, Target};
use crate::local::{Need, Session};
use crate::options::Global;
use crate::print::{self, Table, age, now, plain, time};

#[derive(Args)]
pub struct Describe {
    /// KIND or KIND/NAME
    #[arg(value_name = "KIND", help = format!("{KINDS}; or KIND/NAME"))]
    target: Target,
    /// Names, or beginnings of ids; none: every record of the kind
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Only this namespace [default: all]
    #[arg(short, long)]
    namespace: Option<String>,
}

pub async fn run(global: &Global, args: &Describe) -> Result<ExitCode> {
    let session = Session::open(global, Need::Look).await?;
    let found = find(&session, args).await;
    session.close().await?;
    let all: Vec<_> = found?.iter().map(|record| description(record, now())).collect();
    print::out(all.join("\n\n"))?;
    Ok(ExitCode::SUCCESS)
}

async fn find(session: &Session, args: &Describe) -> Result<Vec<Value>> {
    let (kind, names) = (args.target.kind, args.target.names(&args.names));
    let namespace = args.namespace.as_deref();
    if names.is_empty() {
        let mut all = session.client.list(kind.name()).await?;
        all.retain(|r| namespace.is_none_or(|n| text(&r["metadata"]["namespace"]) == n));
        return Ok(all);
    }
    let mut found = Vec::new();
    for name in &names {
        found.push(kinds::one(&session.client, kind, name, namespace).await?);
    }
    Ok(found)
}

fn description(record: &Value, now: i64) -> String {
    let (meta, status) = (&record["metadata"], &record["status"]);
    let mut text_of = String::new();
    let mut say = |name: &str, value: String| {
        if !value.is_empty() {
            text_of.push_str(&format!("{:<14} {}\n", format!("{name}:"), plain(&value)));
        }
    };
    let instant = |value: &Value| match value.as_i64() {
        Some(ns) => format!("{} ({} ago)", time(ns), age(ns, now)),
        None => String::new(),
    };
    say("Kind", text(&record["kind"]).to_owned());
    say("Name", text(&meta["name"]).to_owned());
    say("Namespace", text(&meta["namespace"]).to_owned());
    say("Id", text(&meta["uid"]).to_owned());
    say("Created", instant(&meta["created"]));
    say("Deleted", instant(&meta["deletion"]));
    say("Labels", pairs(&meta["labels"]));
    say("Annotations", pairs(&meta["annotations"]));
    if meta["owner"].is_object() {
        say(
            "Owner",
            format!("{} {}", text(&meta["owner"]["kind"]), text(&meta["owner"]["uid"])),
        );
    }
    let seen = status["observedGeneration"].as_i64().unwrap_or(0);
    say(
        "Generation",
        format!("{} (status is of {seen})", meta["generation"].as_i64().unwrap_or(0)),
    );
    text_of.push_str(&section("Spec", &record["spec"]));
    let mut rest = status.clone();
    if let Some(map) = rest.as_object_mut() {
        map.remove("conditions");
        map.remove("observedGeneration");
        map.retain(|_, value| !empty(value));
    }
    text_of.push_str(&section("Status", &rest));
    text_of + &conditions(list(&status["conditions"]), now)
}

fn pairs(map: &Value) -> String {
    let pair = |(key, value): (&String, &Value)| format!("{key}={}", text(value));
    let all: Vec<_> = map.as_object().into_iter().flatten().map(pair).collect();
    all.join(", ")
}

fn empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

/// A part of the record as indented YAML.
fn section(title: &str, value: &Value) -> String {
    if empty(value) {
        return String::new();
    }
    let yaml = serde_yaml::to_string(value).unwrap_or_default();
    let lines: Vec<_> = yaml.lines().map(|line| format!("  {}\n", plain(line))).collect();
    format!("{title}:\n{}", lines.concat())
}

fn conditions(all: &[Value], now: i64) -> String {
    if all.is_empty() {
        return String::new();
    }
    let mut table = Table::new(["  TYPE", "STATUS", "SINCE", "REASON", "MESSAGE"]);
    for c in all {
        let since = age(c["since"].as_i64().unwrap_or(0), now);
        let status = if c["permanent"] == true {
            "False (for good)"
        } else {
            text(&c["status"])
        };
        let name = format!("  {}", text(&c["type"]));
        table.row([&name, status, &since, text(&c["reason"]), text(&c["message"])]);
    }
    format!("Conditions:\n{table}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn says_what_there_is_and_nothing_empty() {
        let record = json!({
            "kind": "Pod",
            "metadata": {"name": "web", "namespace": "default", "uid": "00ff", "created": 1_700_000_000_000_000_000i64,
                "generation": 2, "labels": {"app": "x"}},
            "spec": {"containers": [{"image": "localhost/hello"}]},
            "status": {"observedGeneration": 2, "phase": "Running", "ip": "", "conditions": [
                {"type": "children", "status": "False", "reason": "Refused", "message": "no\x1bway", "permanent": true,
                    "since": 1_700_000_000_000_000_000i64}]},
        });
        let text = description(&record, 1_700_000_060_000_000_000);
        for part in [
            "web",
            "app=x",
            "image: localhost/hello",
            "phase: Running",
            "60s",
            "False (for good)",
            "no way",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        assert!(
            !text.contains("ip:") && !text.contains("Deleted") && !text.contains('\x1b'),
            "{text}"
        );
    }
}
