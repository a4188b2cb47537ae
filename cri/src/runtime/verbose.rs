//! The `info` of verbose answers: one key, one JSON object, with the names that other tools look for.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use state::container::{Container, ContainerPhase, Mount};
use state::sandbox::{NamespaceMode, PodSandbox};
use state::{Kind, Object};

fn info(value: Value) -> BTreeMap<String, String> {
    BTreeMap::from([("info".to_owned(), value.to_string())])
}

/// The wish as it is stored.
fn record<K: Kind>(object: &Object<K>) -> Value {
    json!({ "metadata": object.meta, "spec": object.spec })
}

/// The wish in the words of the request, as other tools read it.
fn sandbox_config(sandbox: &PodSandbox) -> Value {
    let (meta, spec) = (&sandbox.meta, &sandbox.spec);
    json!({
        "metadata": spec.pod,
        "hostname": spec.hostname,
        "log_directory": spec.log_directory,
        "dns_config": spec.dns,
        "labels": meta.labels,
        "annotations": meta.annotations,
        "linux": { "cgroup_parent": spec.cgroup_parent, "sysctls": spec.sysctls },
    })
}

fn container_config(container: &Container) -> Value {
    let (meta, spec) = (&container.meta, &container.spec);
    let mount = |mount: &Mount| {
        json!({
            "container_path": mount.container_path,
            "host_path": mount.host_path,
            "readonly": mount.readonly,
        })
    };
    json!({
        "metadata": { "name": spec.name, "attempt": spec.attempt },
        "image": { "image": spec.image.requested },
        "command": spec.command,
        "args": spec.args,
        "working_dir": spec.working_dir,
        "mounts": spec.mounts.iter().map(mount).collect::<Vec<_>>(),
        "labels": meta.labels,
        "annotations": meta.annotations,
        "log_path": spec.log_path,
        "stdin": spec.stdin,
        "stdin_once": spec.stdin_once,
        "tty": spec.tty,
    })
}

/// What there is of an OCI configuration: a sandbox is namespaces and a built-in process, not a container.
fn sandbox_spec(sandbox: &PodSandbox) -> Value {
    let network = match sandbox.status.netns.as_str() {
        "" => json!({ "type": "network" }),
        path => json!({ "type": "network", "path": path }),
    };
    let on_host = sandbox.spec.namespaces.network == NamespaceMode::Node;
    let namespaces: Vec<Value> = (!on_host).then_some(network).into_iter().collect();
    json!({
        "hostname": sandbox.spec.hostname,
        "annotations": sandbox.meta.annotations,
        "linux": { "namespaces": namespaces, "sysctl": sandbox.spec.sysctls },
    })
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
        "runtimeSpec": sandbox_spec(sandbox),
        "config": sandbox_config(sandbox),
        "record": record(sandbox),
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
        "config": container_config(container),
        "record": record(container),
        "conditions": status.conditions,
    }))
}
