//! The `info` of verbose answers: one key, one JSON object, with the names that other tools look for.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use state::container::{Container, ContainerPhase};
use state::sandbox::PodSandbox;
use state::{Kind, Object};

fn info(value: Value) -> BTreeMap<String, String> {
    BTreeMap::from([("info".to_owned(), value.to_string())])
}

/// The wish as it is stored.
fn config<K: Kind>(object: &Object<K>) -> Value {
    json!({ "metadata": object.meta, "spec": object.spec })
}

pub(super) fn sandbox(sandbox: &PodSandbox, image: &str) -> BTreeMap<String, String> {
    let status = &sandbox.status;
    info(json!({
        "pid": status.pid,
        "processStatus": if status.pid > 0 { "running" } else { "stopped" },
        "netNamespace": status.netns,
        "netNamespaceClosed": status.torn_down,
        "image": image,
        "runtimeHandler": sandbox.spec.runtime_handler,
        "runtimeType": "reconcile-shim",
        "cniResult": status.network_result,
        "config": config(sandbox),
        "overhead": sandbox.spec.overhead,
        "resources": sandbox.spec.resources,
        "conditions": status.conditions,
    }))
}

pub(super) fn container(container: &Container) -> BTreeMap<String, String> {
    let status = &container.status;
    info(json!({
        "sandboxID": container.spec.sandbox,
        "pid": if status.phase == ContainerPhase::Running { status.pid } else { 0 },
        "removing": container.meta.deleted(),
        "snapshotKey": container.meta.uid,
        "snapshotter": "overlay",
        "runtimeType": "reconcile-shim",
        "runtimeOptions": Value::Null,
        "privileged": container.spec.security.privileged,
        "bundle": status.bundle,
        "runtimeSpec": status.runtime_spec.as_deref().and_then(|text| serde_json::from_str::<Value>(text).ok()),
        "config": config(container),
        "conditions": status.conditions,
    }))
}
