//! Which containers a person means by a pod's name or a container's id, for `logs` and `exec`.

use anyhow::{Result, bail};
use serde_json::Value;

use crate::client::{Client, list, text};
use crate::kinds::{self, Kind};

/// The newest attempt of each container of a pod, main ones first and in the order of its spec (with `container`, that
/// one alone); or the container that is called `target` itself.
pub async fn find(
    client: &Client,
    target: &str,
    container: Option<&str>,
    namespace: Option<&str>,
) -> Result<Vec<Value>> {
    let pods = kinds::called(&client.list(Kind::Pod.name()).await?, Kind::Pod, target, namespace);
    let sandboxes = client.list(Kind::Sandbox.name()).await?;
    let of_pod = match pods.first() {
        Some(pod) => owned(&sandboxes, text(&pod["metadata"]["uid"])),
        // The CRI's sandboxes have no Pod record; the newest attempt is meant.
        None => kinds::called(&sandboxes, Kind::Sandbox, target, namespace)
            .first()
            .map(uid)
            .into_iter()
            .collect(),
    };
    if pods.is_empty() && of_pod.is_empty() {
        if container.is_some() {
            bail!("no pod {target:?} found");
        }
        return Ok(vec![
            kinds::one(client, Kind::Container, target, namespace)
                .await
                .map_err(|e| anyhow::anyhow!("no pod is called {target:?}, and {e}"))?,
        ]);
    }
    let all = client.list(Kind::Container.name()).await?;
    let mut found = newest(&all, |c| of_pod.iter().any(|s| s == text(&c["spec"]["sandbox"])));
    if let Some(pod) = pods.first() {
        let order = order(pod);
        found.sort_by_key(|c| order.iter().position(|n| *n == text(&c["spec"]["name"])));
    }
    if let Some(name) = container {
        found.retain(|c| text(&c["spec"]["name"]) == name);
    }
    match (found.is_empty(), container) {
        (false, _) => Ok(found),
        (true, Some(name)) => bail!("pod {target} has no container {name:?}, or not yet"),
        (true, None) => bail!("pod {target} has no container yet"),
    }
}

/// The first of [`find`] that runs, else its first.
pub async fn running(client: &Client, target: &str, container: Option<&str>, namespace: Option<&str>) -> Result<Value> {
    let mut found = find(client, target, container, namespace).await?;
    let running = found.iter().position(|c| c["status"]["phase"] == "Running");
    match found.is_empty() {
        true => bail!("{target} has no container"),
        false => Ok(found.swap_remove(running.unwrap_or(0))),
    }
}

fn uid(record: &Value) -> String {
    text(&record["metadata"]["uid"]).to_owned()
}

/// The ids of the sandboxes that a pod owns.
pub fn owned(sandboxes: &[Value], pod: &str) -> Vec<String> {
    sandboxes
        .iter()
        .filter(|s| text(&s["metadata"]["owner"]["uid"]) == pod)
        .map(uid)
        .collect()
}

/// A pod's container names, main ones first.
fn order(pod: &Value) -> Vec<&str> {
    let parts = ["containers", "initContainers"]
        .iter()
        .flat_map(|part| list(&pod["spec"][*part]));
    parts.map(|c| text(&c["name"])).collect()
}

/// Of each container name the newest attempt, oldest name first; `all` comes newest first.
fn newest(all: &[Value], wanted: impl Fn(&Value) -> bool) -> Vec<Value> {
    let mut found: Vec<Value> = Vec::new();
    for container in all.iter().filter(|c| wanted(c)) {
        if !found.iter().any(|f| f["spec"]["name"] == container["spec"]["name"]) {
            found.push(container.clone());
        }
    }
    found.reverse();
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_newest_attempt_of_each_name() {
        let c = |name: &str, attempt: u32| json!({"spec": {"name": name, "attempt": attempt}});
        let all = [c("b", 1), c("b", 0), c("a", 0)];
        let found = newest(&all, |_| true);
        assert_eq!(found, [c("a", 0), c("b", 1)]);
    }

    #[test]
    fn main_containers_first() {
        let pod = json!({"spec": {"initContainers": [{"name": "i"}], "containers": [{"name": "x"}, {"name": "a"}]}});
        assert_eq!(order(&pod), ["x", "a", "i"]);
    }
}
