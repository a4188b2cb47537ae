//! `reconcile events`: what happened to sandboxes and containers, and what happens.
//!
//! What happened is read from the records as they are: when each was created, started and stopped. Of what is removed
//! nothing is known any more. What happens comes from the daemon's event stream.

use std::collections::{HashMap, HashSet};
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use cri::runtime::v1::{ContainerEventResponse, ContainerStatus};
use serde_json::{Value, json};

use crate::client::{Client, text};
use crate::kinds::Kind;
use crate::local::{Need, Session};
use crate::options::Global;
use crate::print::{self, plain, short, time};
use crate::stats::Format;

#[derive(Args)]
pub struct Events {
    /// A pod's name, or the beginning of an id [default: all]
    #[arg(value_name = "POD|ID")]
    target: Option<String>,
    /// Only in this namespace
    #[arg(short, long)]
    namespace: Option<String>,
    /// Go on showing what happens
    #[arg(short, long)]
    follow: bool,
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

pub async fn run(global: &Global, args: &Events) -> Result<ExitCode> {
    let session = Session::open(global, if args.follow { Need::Act } else { Need::Look }).await?;
    let shown = show(&session.client, args).await;
    session.close().await?;
    shown.map(|()| ExitCode::SUCCESS)
}

async fn show(client: &Client, args: &Events) -> Result<()> {
    // Subscribed before the records are read, so that nothing falls between.
    let stream = if args.follow {
        Some(client.events().await?)
    } else {
        None
    };
    let mut past = past(client).await?;
    past.retain(|event| wanted(args, event));
    match args.output {
        Format::Json if !args.follow => print::line(serde_json::to_string_pretty(&json!({ "events": past }))?)?,
        Format::Yaml if !args.follow => print::out(serde_yaml::to_string(&json!({ "events": past }))?)?,
        Format::Table if !args.follow && past.is_empty() => eprintln!("nothing found"),
        format => {
            if format == Format::Table {
                print::line(columns(["TIME", "EVENT", "KIND", "ID", "POD", "NAME", "MESSAGE"]))?;
            }
            past.iter().try_for_each(|event| one(format, event))?;
        }
    }
    let Some(mut stream) = stream else { return Ok(()) };
    let mut shown: HashSet<(String, String)> = past.iter().map(key).collect();
    let mut names = HashMap::new();
    while let Some(event) = stream.next().await? {
        let event = streamed(&event, &mut names);
        if shown.insert(key(&event)) && wanted(args, &event) {
            one(args.output, &event)?;
        }
        if event["event"] == "DELETED" {
            shown.retain(|(id, _)| id != text(&event["id"]));
        }
    }
    Ok(())
}

fn key(event: &Value) -> (String, String) {
    (text(&event["id"]).to_owned(), text(&event["event"]).to_owned())
}

fn wanted(args: &Events, event: &Value) -> bool {
    let target = args.target.as_deref().is_none_or(|target| {
        let pod = text(&event["pod"]);
        let qualified = format!("{}/{pod}", text(&event["namespace"]));
        pod == target || qualified == target || (target.len() >= 4 && text(&event["id"]).starts_with(target))
    });
    target
        && args
            .namespace
            .as_deref()
            .is_none_or(|only| text(&event["namespace"]) == only)
}

fn one(format: Format, event: &Value) -> Result<()> {
    match format {
        Format::Json => print::line(event),
        Format::Yaml => print::out(format_args!("---\n{}", serde_yaml::to_string(event)?)),
        Format::Table => print::line(columns([
            &time(event["time"].as_i64().unwrap_or(0)),
            text(&event["event"]),
            text(&event["kind"]),
            short(text(&event["id"])),
            &format!("{}/{}", text(&event["namespace"]), text(&event["pod"])),
            text(&event["name"]),
            text(&event["message"]),
        ])),
    }
}

/// Cells of a table whose rows come one by one.
fn columns(cells: [&str; 7]) -> String {
    let [time, event, kind, id, pod, name, message] = cells.map(plain);
    let line = format!("{time:<20}   {event:<7}   {kind:<10}   {id:<13}   {pod:<24}   {name:<16}   {message}");
    line.trim_end().to_owned()
}

/// The events that the records tell of, oldest first.
async fn past(client: &Client) -> Result<Vec<Value>> {
    let mut events = Vec::new();
    let mut pods = HashMap::new();
    for sandbox in client.list(Kind::Sandbox.name()).await? {
        let (uid, pod) = (text(&sandbox["metadata"]["uid"]), &sandbox["spec"]["pod"]);
        events.push(json!({
            "time": sandbox["metadata"]["created"], "event": "CREATED", "kind": "PodSandbox", "id": uid,
            "namespace": pod["namespace"], "pod": pod["name"], "name": "", "message": "",
        }));
        pods.insert(uid.to_owned(), pod.clone());
    }
    for container in client.list(Kind::Container.name()).await? {
        let (meta, status) = (&container["metadata"], &container["status"]);
        let pod = pods
            .get(text(&container["spec"]["sandbox"]))
            .cloned()
            .unwrap_or_default();
        let ended = exit(
            text(&status["reason"]),
            status["exitCode"].as_i64(),
            text(&status["message"]),
        );
        for (at, event, message) in [
            (&meta["created"], "CREATED", ""),
            (&status["startedAt"], "STARTED", ""),
            (&status["finishedAt"], "STOPPED", ended.as_str()),
        ] {
            if at.as_i64().is_some_and(|at| at > 0) {
                events.push(json!({
                    "time": at, "event": event, "kind": "Container", "id": meta["uid"],
                    "namespace": pod["namespace"], "pod": pod["name"], "name": container["spec"]["name"],
                    "message": message,
                }));
            }
        }
    }
    events.sort_by_key(|event| event["time"].as_i64());
    Ok(events)
}

fn exit(reason: &str, code: Option<i64>, message: &str) -> String {
    let code = code.unwrap_or(0);
    let colon = if message.is_empty() { "" } else { ": " };
    format!("{reason}, exit code {code}{colon}{message}")
}

/// An event of the stream in the same form; `names` keeps what containers are called, for their last event.
fn streamed(event: &ContainerEventResponse, names: &mut HashMap<String, String>) -> Value {
    let id = &event.container_id;
    let sandbox = event.pod_sandbox_status.as_ref();
    let pod = sandbox.and_then(|sandbox| sandbox.metadata.clone()).unwrap_or_default();
    let is_sandbox = sandbox.is_some_and(|sandbox| sandbox.id == *id);
    let status = event.containers_statuses.iter().find(|status| status.id == *id);
    if let Some(metadata) = status.and_then(|status| status.metadata.as_ref()) {
        names.insert(id.clone(), metadata.name.clone());
    }
    let word = event.container_event_type().as_str_name();
    let word = word.trim_start_matches("CONTAINER_").trim_end_matches("_EVENT");
    let ended = |status: &ContainerStatus| exit(&status.reason, Some(status.exit_code.into()), &status.message);
    let name = names.get(id).cloned().unwrap_or_default();
    if word == "DELETED" {
        names.remove(id);
    }
    json!({
        "time": event.created_at, "event": word, "kind": if is_sandbox { "PodSandbox" } else { "Container" },
        "id": id, "namespace": pod.namespace, "pod": pod.name, "name": name,
        "message": status.filter(|_| word == "STOPPED").map(ended).unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use cri::runtime::v1::{ContainerEventType, ContainerMetadata, PodSandboxMetadata, PodSandboxStatus};

    #[test]
    fn a_streamed_event_has_the_form_of_the_past_ones() {
        let status = ContainerStatus {
            id: "c1".into(),
            metadata: Some(ContainerMetadata {
                name: "main".into(),
                attempt: 0,
            }),
            exit_code: 3,
            reason: "Error".into(),
            ..ContainerStatus::default()
        };
        let mut event = ContainerEventResponse {
            container_id: "c1".into(),
            container_event_type: ContainerEventType::ContainerStoppedEvent.into(),
            created_at: 7,
            pod_sandbox_status: Some(PodSandboxStatus {
                id: "p".into(),
                metadata: Some(PodSandboxMetadata {
                    name: "web".into(),
                    namespace: "prod".into(),
                    ..PodSandboxMetadata::default()
                }),
                ..PodSandboxStatus::default()
            }),
            containers_statuses: vec![status],
        };
        let mut names = HashMap::new();
        let shown = streamed(&event, &mut names);
        let expected = json!({"time": 7, "event": "STOPPED", "kind": "Container", "id": "c1", "namespace": "prod",
            "pod": "web", "name": "main", "message": "Error, exit code 3"});
        assert_eq!(shown, expected);
        event.set_container_event_type(ContainerEventType::ContainerDeletedEvent);
        event.containers_statuses.clear();
        assert_eq!(
            streamed(&event, &mut names)["name"],
            "main",
            "the last word still has its name"
        );
        assert!(names.is_empty());
    }
}
