//! The kinds as a person names them, and finding a record by what that person calls it.

use std::str::FromStr;

use anyhow::{Result, bail};
use serde_json::Value;
use state::Reference;

use crate::client::{Client, text};
use crate::print::short;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Pod,
    Sandbox,
    Container,
    Image,
    Secret,
    Node,
    Debt,
}

/// For help texts.
pub const KINDS: &str = "pod (po), podsandbox (sandbox, sb), container (ctr), image (img), secret, node (no) or debt";

impl Kind {
    /// As it stands in records.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Pod => "Pod",
            Kind::Sandbox => "PodSandbox",
            Kind::Container => "Container",
            Kind::Image => "Image",
            Kind::Secret => "Secret",
            Kind::Node => "Node",
            Kind::Debt => "Debt",
        }
    }

    /// In messages.
    pub fn lower(self) -> String {
        self.name().to_lowercase()
    }

    /// Does a person mean this record by `name`? The name itself, a beginning of the id, or what it is called inside
    /// its pod.
    fn called(self, record: &Value, name: &str) -> bool {
        let (meta, spec) = (&record["metadata"], &record["spec"]);
        let id = |id: &str| name.len() >= 4 && id.starts_with(name);
        if text(&meta["name"]) == name || id(text(&meta["uid"])) {
            return true;
        }
        match self {
            Kind::Sandbox => text(&spec["pod"]["name"]) == name,
            Kind::Container => text(&spec["name"]) == name,
            Kind::Image => {
                let image = text(&record["status"]["id"]);
                let same = |r: Reference| r.to_string() == text(&meta["name"]);
                id(image) || id(image.trim_start_matches("sha256:")) || Reference::parse(name, "image").is_ok_and(same)
            }
            Kind::Pod | Kind::Secret | Kind::Node | Kind::Debt => false,
        }
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Kind, String> {
        Ok(match text.to_lowercase().as_str() {
            "pod" | "pods" | "po" => Kind::Pod,
            "podsandbox" | "podsandboxes" | "sandbox" | "sandboxes" | "sb" => Kind::Sandbox,
            "container" | "containers" | "ctr" | "ctrs" => Kind::Container,
            "image" | "images" | "img" | "imgs" => Kind::Image,
            "secret" | "secrets" => Kind::Secret,
            "node" | "nodes" | "no" => Kind::Node,
            "debt" | "debts" => Kind::Debt,
            _ => return Err(format!("unknown kind; it must be {KINDS}")),
        })
    }
}

/// `KIND` or `KIND/NAME`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub kind: Kind,
    pub name: Option<String>,
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Target, String> {
        Ok(match text.split_once('/') {
            Some((kind, name)) => Target {
                kind: kind.parse()?,
                name: Some(name.to_owned()),
            },
            None => Target {
                kind: text.parse()?,
                name: None,
            },
        })
    }
}

impl Target {
    /// The names meant: `pod/web`, or `pod web db`.
    pub fn names(&self, further: &[String]) -> Vec<String> {
        self.name.iter().chain(further).cloned().collect()
    }
}

/// Every record of the kind that is called so; those not being deleted before those that are.
pub fn called(all: &[Value], kind: Kind, name: &str, namespace: Option<&str>) -> Vec<Value> {
    let in_namespace = |r: &&Value| namespace.is_none_or(|n| text(&r["metadata"]["namespace"]) == n);
    let mut found: Vec<_> = all
        .iter()
        .filter(in_namespace)
        .filter(|r| kind.called(r, name))
        .cloned()
        .collect();
    // What bears exactly this name, or this id, is meant before what only begins so.
    let exact = |r: &Value| text(&r["metadata"]["name"]) == name || text(&r["metadata"]["uid"]) == name;
    if found.iter().any(exact) {
        found.retain(exact);
    }
    if found.iter().any(|r| !deleted(r)) {
        found.retain(|r| !deleted(r));
    }
    found
}

/// The one record of the kind that is called so.
pub async fn one(client: &Client, kind: Kind, name: &str, namespace: Option<&str>) -> Result<Value> {
    let mut found = called(&client.list(kind.name()).await?, kind, name, namespace);
    if found.len() > 1 {
        let of = |r: &Value| {
            format!(
                "{} {}",
                short(text(&r["metadata"]["uid"])),
                text(&r["metadata"]["name"])
            )
        };
        let all: Vec<_> = found.iter().map(of).collect();
        bail!(
            "{} of them are called {name:?}; give an id or a namespace:\n  {}",
            found.len(),
            all.join("\n  ")
        );
    }
    match found.pop() {
        Some(record) => Ok(record),
        None => bail!("{} {name:?} not found", kind.lower()),
    }
}

pub fn deleted(record: &Value) -> bool {
    !record["metadata"]["deletion"].is_null()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn kinds_and_targets() {
        for (text, kind, name) in [
            ("po", Kind::Pod, None),
            ("PodSandbox", Kind::Sandbox, None),
            ("pod/web", Kind::Pod, Some("web")),
            (
                "img/localhost/hello:latest",
                Kind::Image,
                Some("localhost/hello:latest"),
            ),
        ] {
            let target: Target = text.parse().unwrap();
            assert_eq!((target.kind, target.name.as_deref()), (kind, name), "{text}");
        }
        assert!("deployment".parse::<Target>().is_err());
    }

    #[test]
    fn finds_by_name_id_and_what_it_is_called_in_its_pod() {
        let container = |name: &str, uid: &str, deletion: Value| {
            let meta = json!({"name": format!("{name}_web_default_x_0"), "uid": uid, "deletion": deletion});
            json!({"metadata": meta, "spec": {"name": name}})
        };
        let all = [
            container("main", "abcdef", Value::Null),
            container("main", "abff", json!(5)),
        ];
        let find = |name: &str| called(&all, Kind::Container, name, None).len();
        assert_eq!(find("main"), 1, "the one being deleted is not meant");
        assert_eq!(find("abcd"), 1);
        assert_eq!(find("ab"), 0, "too short for an id");
        assert_eq!(find("abff"), 1);
        assert_eq!(find("mai"), 0);
    }

    #[test]
    fn images_are_found_by_any_form_of_their_reference() {
        let image = json!({
            "metadata": {"name": "docker.io/library/busybox:latest", "uid": "00"},
            "status": {"id": "sha256:0123456789"},
        });
        for name in [
            "busybox",
            "docker.io/library/busybox",
            "busybox:latest",
            "sha256:01234",
            "012345",
        ] {
            assert_eq!(
                called(std::slice::from_ref(&image), Kind::Image, name, None).len(),
                1,
                "{name}"
            );
        }
        assert!(called(&[image], Kind::Image, "busybox:1", None).is_empty());
    }
}
