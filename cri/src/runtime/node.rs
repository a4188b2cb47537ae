//! What concerns the node as a whole: Version, Status, RuntimeConfig, UpdateRuntimeConfig.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde_json::json;
use state::node::{LOCAL, NodeKind, NodeSpec};
use state::{Condition, Meta, New, Node, Truth};

use super::v1;
use crate::error::{Error, Result};
use crate::services::Services;

/// Prefix of container ids in pod statuses: it must never change on a node.
const RUNTIME_NAME: &str = "reconcile";
/// Version of the kubelet's interface, a constant.
const KUBELET_API: &str = "0.1.0";

pub(super) fn version(services: &Services) -> v1::VersionResponse {
    v1::VersionResponse {
        version: KUBELET_API.to_owned(),
        runtime_name: RUNTIME_NAME.to_owned(),
        runtime_version: services.config.version.clone(),
        runtime_api_version: "v1".to_owned(),
    }
}

/// The driver that is in use, for the life of the node.
pub(super) fn runtime_config(services: &Services) -> v1::RuntimeConfigResponse {
    v1::RuntimeConfigResponse {
        linux: Some(v1::LinuxRuntimeConfiguration {
            cgroup_driver: match services.config.systemd_cgroups {
                true => v1::CgroupDriver::Systemd.into(),
                false => v1::CgroupDriver::Cgroupfs.into(),
            },
        }),
    }
}

pub(super) fn status(services: &Services, request: &v1::StatusRequest) -> Result<v1::StatusResponse> {
    let node = services
        .node()
        .ok_or_else(|| Error::Unavailable("the node was not looked at yet".into()))?;
    let conditions = vec![
        condition("RuntimeReady", find(&node, "Ready"), "RuntimeNotReady"),
        condition("NetworkReady", find(&node, "NetworkReady"), "NetworkPluginNotReady"),
    ];
    let told = services.told();
    let mut names: Vec<&str> = told.handlers.iter().map(|handler| handler.name.as_str()).collect();
    names.push("");
    names.sort_unstable();
    names.dedup();
    let handler = |name: &str| {
        let able = told.handler(name).unwrap_or_default();
        v1::RuntimeHandler {
            name: name.to_owned(),
            features: Some(v1::RuntimeHandlerFeatures {
                recursive_read_only_mounts: able.recursive_read_only && node.status.recursive_read_only,
                user_namespaces: able.user_namespaces && node.status.user_namespaces,
            }),
        }
    };
    Ok(v1::StatusResponse {
        status: Some(v1::RuntimeStatus { conditions }),
        info: if request.verbose {
            info(services, &node)
        } else {
            BTreeMap::new()
        },
        runtime_handlers: names.into_iter().map(handler).collect(),
        features: Some(v1::RuntimeFeatures {
            supplemental_groups_policy: services.config.supplemental_groups_policy,
            user_namespaces_host_network: services.config.user_namespaces_host_network,
            mount_options: services.config.mount_options,
        }),
    })
}

fn find<'a>(node: &'a Node, stage: &str) -> Option<&'a Condition> {
    node.status.conditions.iter().find(|c| c.stage == stage)
}

fn condition(kind: &str, from: Option<&Condition>, default_reason: &str) -> v1::RuntimeCondition {
    let status = from.is_some_and(|c| c.status == Truth::True);
    let (reason, message) = match from {
        _ if status => (String::new(), String::new()),
        Some(c) if !c.reason.is_empty() => (c.reason.clone(), c.message.clone()),
        Some(c) => (default_reason.to_owned(), c.message.clone()),
        None => (default_reason.to_owned(), "not looked at yet".to_owned()),
    };
    v1::RuntimeCondition {
        r#type: kind.to_owned(),
        status,
        reason,
        message,
    }
}

fn info(services: &Services, node: &Node) -> BTreeMap<String, String> {
    let config = json!({
        "sandboxImage": services.told().sandbox_image,
        "rootDir": node.status.root,
        "stateDir": node.status.state,
        "cgroupDriver": "cgroupfs",
        "cgroupV2": node.status.cgroup_v2,
    });
    let conditions = json!({ "conditions": node.status.conditions });
    let network = json!({ "network": node.status.network });
    let network_error = find(node, "NetworkReady").filter(|c| c.status != Truth::True);
    BTreeMap::from([
        ("config".to_owned(), config.to_string()),
        ("node".to_owned(), conditions.to_string()),
        ("cniconfig".to_owned(), network.to_string()),
        (
            "lastCNILoadStatus".to_owned(),
            network_error.map_or("OK".to_owned(), |c| c.message.clone()),
        ),
    ])
}

/// Writes the pod CIDRs into the Node's wish. Empty ones change nothing.
pub(super) async fn update_config(
    services: &Services,
    request: v1::UpdateRuntimeConfigRequest,
) -> Result<v1::UpdateRuntimeConfigResponse> {
    let cidrs = request
        .runtime_config
        .and_then(|c| c.network_config)
        .unwrap_or_default()
        .pod_cidr;
    if cidrs.is_empty() {
        return Ok(v1::UpdateRuntimeConfigResponse {});
    }
    for cidr in cidrs.split(',') {
        if !is_cidr(cidr.trim()) {
            let problem = format!("{cidr:.100?} is no CIDR such as 10.0.0.0/16");
            return Err(Error::invalid("runtime_config.network_config.pod_cidr", problem));
        }
    }
    match services.node() {
        Some(node) => {
            let change = move |_: &mut Meta, spec: &mut NodeSpec| {
                spec.pod_cidr = cidrs;
                Ok(())
            };
            services.store.update::<NodeKind, _>(&node.meta.uid, change).await?;
        }
        None => {
            let meta = Meta {
                name: LOCAL.to_owned(),
                ..Meta::default()
            };
            let spec = NodeSpec { pod_cidr: cidrs };
            services.store.create(New::<NodeKind> { meta, spec }).await?;
        }
    }
    Ok(v1::UpdateRuntimeConfigResponse {})
}

fn is_cidr(text: &str) -> bool {
    let Some((address, bits)) = text.split_once('/') else {
        return false;
    };
    let most = match address.parse() {
        Ok(IpAddr::V4(_)) => 32,
        Ok(IpAddr::V6(_)) => 128,
        Err(_) => return false,
    };
    bits.bytes().all(|b| b.is_ascii_digit()) && bits.parse::<u8>().is_ok_and(|bits| bits <= most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cidrs() {
        for good in ["10.0.0.0/8", "fd00::/64", "0.0.0.0/0"] {
            assert!(is_cidr(good), "{good}");
        }
        for bad in [
            "",
            "10.0.0.0",
            "10.0.0.0/33",
            "10.0.0/8",
            "x/8",
            "fd00::/129",
            "10.0.0.0/+8",
            "10.0.0.0/",
        ] {
            assert!(!is_cidr(bad), "{bad}");
        }
    }

    #[test]
    fn conditions_keep_reason_only_if_false() {
        let from = Condition {
            stage: "NetworkReady".into(),
            status: Truth::False,
            reason: String::new(),
            message: "no configuration".into(),
            permanent: false,
            since: 0,
        };
        let answer = condition("NetworkReady", Some(&from), "NetworkPluginNotReady");
        assert_eq!(
            (answer.status, answer.reason.as_str()),
            (false, "NetworkPluginNotReady")
        );
        let from = Condition {
            status: Truth::True,
            ..from
        };
        let answer = condition("NetworkReady", Some(&from), "NetworkPluginNotReady");
        assert_eq!(
            (answer.status, answer.reason.as_str(), answer.message.as_str()),
            (true, "", "")
        );
    }
}
