//! A Kubernetes `v1` Pod, as far as one node without a cluster can mean it.
//!
//! Fields that would change what the pod does but are not supported are errors; those that speak to a scheduler or an
//! API server are warnings.

mod container;
mod resources;
mod security;
mod volumes;

use std::collections::BTreeMap;

use serde_yaml::Value;

use super::Reader;
use super::kubernetes as k8s;
use super::locate::At;
use crate::error::Error;
use crate::pod::{PodContainer, PodKind, PodSpec, RestartPolicy, SecretRef};
use crate::resource::{Kind, Meta};
use crate::sandbox::{Dns, NamespaceMode, Namespaces};
use crate::store::New;

fn join(parent: &str, field: &str) -> String {
    format!("{parent}.{field}")
}

/// The path in a `v1` Pod of a field of ours.
fn kubernetes_path(path: &str) -> String {
    path.replacen(".security.addCapabilities", ".securityContext.capabilities.add", 1)
        .replacen(".security.dropCapabilities", ".securityContext.capabilities.drop", 1)
        .replacen(
            ".security.seccomp.localhostRef",
            ".securityContext.seccompProfile.localhostProfile",
            1,
        )
        .replacen(".security.", ".securityContext.", 1)
        .replacen("spec.sysctls.", "spec.securityContext.sysctls.", 1)
        .replacen("spec.dns.servers", "spec.dnsConfig.nameservers", 1)
        .replacen("spec.dns.", "spec.dnsConfig.", 1)
}

impl Reader<'_> {
    pub(super) fn kubernetes_pod(&mut self, value: Value) -> Option<New<PodKind>> {
        let before = self.problems.len();
        let pod: k8s::Pod = self.typed(value)?;
        if pod.status.is_some() {
            self.warn("status", "has no effect here".into());
        }
        let meta = self.pod_meta(pod.metadata);
        let spec = self.pod_spec(pod.spec);
        if self.problems.len() > before {
            return None;
        }
        match meta.validate().and_then(|()| PodKind::validate(&meta, &spec)) {
            Ok(()) => Some(New { meta, spec }),
            Err(Error::Invalid { field, problem }) => {
                self.at(&kubernetes_path(&field), At::Value, problem);
                None
            }
            Err(error) => {
                self.at("", At::Value, error.to_string());
                None
            }
        }
    }

    /// Reports the fields of `parent` that are set and not supported.
    fn unsupported(&mut self, parent: &str, fields: &[(&str, bool)]) {
        for (field, _) in fields.iter().filter(|(_, set)| *set) {
            self.at(&join(parent, field), At::Key, "not supported yet".into());
        }
    }

    /// Warns of the fields of `parent` that are set and mean nothing on a single node.
    fn meaningless(&mut self, parent: &str, fields: &[(&str, bool)]) {
        for (field, _) in fields.iter().filter(|(_, set)| *set) {
            self.warn(&join(parent, field), "has no effect here".into());
        }
    }

    /// One of a few words; `None` after reporting another.
    fn word<T: Copy>(&mut self, path: &str, word: &str, known: &[(&str, T)]) -> Option<T> {
        let found = known.iter().find(|(name, _)| *name == word).map(|(_, value)| *value);
        if found.is_none() {
            let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
            self.at(path, At::Value, format!("{word:?} is none of {}", names.join(", ")));
        }
        found
    }

    pub(super) fn pod_meta(&mut self, meta: k8s::ObjectMeta) -> Meta {
        self.unsupported("metadata", &[("generateName", meta.generate_name.is_some())]);
        self.meaningless(
            "metadata",
            &[
                ("creationTimestamp", meta.creation_timestamp.is_some()),
                (
                    "deletionGracePeriodSeconds",
                    meta.deletion_grace_period_seconds.is_some(),
                ),
                ("deletionTimestamp", meta.deletion_timestamp.is_some()),
                ("finalizers", meta.finalizers.is_some()),
                ("generation", meta.generation.is_some()),
                ("managedFields", meta.managed_fields.is_some()),
                ("ownerReferences", meta.owner_references.is_some()),
                ("resourceVersion", meta.resource_version.is_some()),
                ("selfLink", meta.self_link.is_some()),
                ("uid", meta.uid.is_some()),
            ],
        );
        Meta {
            name: meta.name,
            namespace: meta.namespace.unwrap_or_else(|| "default".into()),
            labels: meta.labels.unwrap_or_default(),
            annotations: meta.annotations.unwrap_or_default(),
            ..Meta::default()
        }
    }

    fn pod_fields(&mut self, spec: &k8s::PodSpec) {
        let other_os = spec.os.as_ref().is_some_and(|os| os.name != "linux");
        self.unsupported(
            "spec",
            &[
                ("activeDeadlineSeconds", spec.active_deadline_seconds.is_some()),
                ("ephemeralContainers", spec.ephemeral_containers.is_some()),
                ("hostAliases", spec.host_aliases.is_some()),
                ("hostnameOverride", spec.hostname_override.is_some()),
                ("os", other_os),
                ("resourceClaims", spec.resource_claims.is_some()),
                ("resources", spec.resources.is_some()),
                ("schedulingGates", spec.scheduling_gates.is_some()),
                ("setHostnameAsFQDN", spec.set_hostname_as_fqdn == Some(true)),
                ("subdomain", spec.subdomain.is_some()),
            ],
        );
        self.meaningless(
            "spec",
            &[
                ("affinity", spec.affinity.is_some()),
                (
                    "automountServiceAccountToken",
                    spec.automount_service_account_token == Some(true),
                ),
                ("enableServiceLinks", spec.enable_service_links == Some(true)),
                ("nodeName", spec.node_name.is_some()),
                ("nodeSelector", spec.node_selector.is_some()),
                ("overhead", spec.overhead.is_some()),
                ("preemptionPolicy", spec.preemption_policy.is_some()),
                ("priority", spec.priority.is_some()),
                ("priorityClassName", spec.priority_class_name.is_some()),
                ("readinessGates", spec.readiness_gates.is_some()),
                ("schedulerName", spec.scheduler_name.is_some()),
                ("serviceAccount", spec.service_account.is_some()),
                ("serviceAccountName", spec.service_account_name.is_some()),
                ("tolerations", spec.tolerations.is_some()),
                ("topologySpreadConstraints", spec.topology_spread_constraints.is_some()),
            ],
        );
    }

    fn pod_spec(&mut self, spec: k8s::PodSpec) -> PodSpec {
        self.pod_fields(&spec);
        let pod_security = spec.security_context.as_ref();
        let sysctls = pod_security.map_or_else(BTreeMap::new, |security| self.pod_security(security));
        let policies = [
            ("Always", RestartPolicy::Always),
            ("OnFailure", RestartPolicy::OnFailure),
            ("Never", RestartPolicy::Never),
        ];
        let policy = spec.restart_policy.as_deref().unwrap_or("Always");
        let restart_policy = self.word("spec.restartPolicy", policy, &policies).unwrap_or_default();
        let share = spec.share_process_namespace.unwrap_or(false);
        let mode = |host: Option<bool>, own| if host == Some(true) { NamespaceMode::Node } else { own };
        let namespaces = Namespaces {
            network: mode(spec.host_network, NamespaceMode::Pod),
            pid: mode(
                spec.host_pid,
                if share {
                    NamespaceMode::Pod
                } else {
                    NamespaceMode::Container
                },
            ),
            ipc: mode(spec.host_ipc, NamespaceMode::Pod),
            ..Namespaces::default()
        };
        let dns = self.pod_dns(spec.dns_policy.as_deref(), spec.dns_config);
        let mut containers = |field: &str, list: Vec<k8s::Container>| -> Vec<PodContainer> {
            let convert = |(i, c)| self.container(&format!("spec.{field}[{i}]"), field, c, pod_security, &namespaces);
            list.into_iter().enumerate().map(convert).collect()
        };
        let init_containers = containers("initContainers", spec.init_containers.unwrap_or_default());
        let containers = containers("containers", spec.containers);
        let volumes = spec.volumes.unwrap_or_default().into_iter().enumerate();
        let secrets = spec.image_pull_secrets.unwrap_or_default().into_iter();
        PodSpec {
            restart_policy,
            init_containers,
            containers,
            volumes: volumes
                .filter_map(|(i, v)| self.volume(&format!("spec.volumes[{i}]"), v))
                .collect(),
            image_pull_secrets: secrets.map(|secret| SecretRef { name: secret.name }).collect(),
            hostname: spec.hostname.unwrap_or_default(),
            runtime_class_name: spec.runtime_class_name.unwrap_or_default(),
            host_network: spec.host_network.unwrap_or(false),
            host_pid: spec.host_pid.unwrap_or(false),
            host_ipc: spec.host_ipc.unwrap_or(false),
            host_users: spec.host_users,
            share_process_namespace: share,
            dns,
            sysctls,
            termination_grace_period_seconds: spec.termination_grace_period_seconds.unwrap_or(30),
        }
    }
    fn pod_dns(&mut self, policy: Option<&str>, config: Option<k8s::DnsConfig>) -> Option<Dns> {
        let known = [
            ("Default", false),
            ("ClusterFirst", false),
            ("ClusterFirstWithHostNet", false),
            ("None", true),
        ];
        let none = self.word("spec.dnsPolicy", policy.unwrap_or("Default"), &known)?;
        match (none, config) {
            (false, None) => None,
            (false, Some(_)) => {
                let problem = "needs dnsPolicy: None; adding to the host's servers is not supported yet";
                self.at("spec.dnsConfig", At::Key, problem.into());
                None
            }
            (true, None) => {
                self.at(
                    "spec.dnsPolicy",
                    At::Value,
                    "None needs a dnsConfig with nameservers".into(),
                );
                None
            }
            (true, Some(config)) => {
                let option = |o: k8s::DnsOption| match o.value {
                    Some(value) => format!("{}:{value}", o.name),
                    None => o.name,
                };
                Some(Dns {
                    servers: config.nameservers.unwrap_or_default(),
                    searches: config.searches.unwrap_or_default(),
                    options: config.options.unwrap_or_default().into_iter().map(option).collect(),
                })
            }
        }
    }
}
