//! What `/pods` says of a pod's containers.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::node::Node;

/// The status of a container, whether it is an init container or not.
pub fn container<'a>(pod: &'a Value, name: &str) -> Result<&'a Value> {
    let lists = ["containerStatuses", "initContainerStatuses"];
    let mut all = lists.iter().filter_map(|list| pod["status"][list].as_array()).flatten();
    all.find(|status| status["name"] == name)
        .with_context(|| format!("no status of the container {name} in {:#}", pod["status"]))
}

/// The CRI id of a container.
pub fn container_id(pod: &Value, name: &str) -> Result<String> {
    let id = container(pod, name)?["containerID"].as_str().unwrap_or_default();
    let (runtime, id) = id
        .split_once("://")
        .with_context(|| format!("{name} has the id {id:?}"))?;
    ensure!(runtime == "reconcile", "{name} is of the runtime {runtime:?}");
    Ok(id.to_owned())
}

/// How often it was started again.
pub fn restarts(pod: &Value, name: &str) -> Result<u64> {
    container(pod, name)?["restartCount"]
        .as_u64()
        .context("no restartCount")
}

/// Ids and restarts of all containers that run, for comparison.
pub fn started(pods: &[Value]) -> Vec<String> {
    let mut all = Vec::new();
    for pod in pods {
        for list in ["containerStatuses", "initContainerStatuses"] {
            for status in pod["status"][list].as_array().into_iter().flatten() {
                if status["state"]["running"].is_object() {
                    all.push(format!(
                        "{} {} {} {}",
                        pod["metadata"]["name"], status["name"], status["containerID"], status["restartCount"]
                    ));
                }
            }
        }
    }
    all.sort();
    all
}

/// The pid of a container's first process.
pub async fn process_of(node: &Node, pod: &Value, name: &str) -> Result<i32> {
    node.cri.container_pid(&container_id(pod, name)?).await
}
