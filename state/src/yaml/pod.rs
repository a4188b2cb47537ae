//! A Kubernetes `v1` Pod, as far as one node without a cluster can mean it.
//!
//! Fields that would change what the pod does but are not supported are errors; those that speak to a scheduler or an
//! API server are warnings.

use std::collections::BTreeMap;

use serde_yaml::Value;

use super::kubernetes::{self as k8s, Quantity};
use super::locate::At;
use super::{Reader, quantity};
use crate::container::{ContainerSecurity, EnvVar, Resources};
use crate::error::Error;
use crate::pod::{ContainerPort, PodContainer, PodKind, PodSpec, RestartPolicy, Volume, VolumeMount, VolumeSource};
use crate::resource::{Kind, Meta};
use crate::sandbox::{Dns, GroupsPolicy, NamespaceMode, Namespaces, Profile, Protocol, SeLinux};
use crate::store::New;

/// The kubelet's `defaultMaskedPaths`.
const MASKED: [&str; 12] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];

/// The kubelet's `defaultReadonlyPaths`.
const READONLY: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// µs; the kubelet's `quotaPeriod`.
const CPU_PERIOD: i64 = 100_000;

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

    fn pod_meta(&mut self, meta: k8s::ObjectMeta) -> Meta {
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
                ("hostUsers", spec.host_users == Some(false)),
                ("hostnameOverride", spec.hostname_override.is_some()),
                ("os", other_os),
                ("resourceClaims", spec.resource_claims.is_some()),
                ("resources", spec.resources.is_some()),
                ("runtimeClassName", spec.runtime_class_name.is_some()),
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
                ("imagePullSecrets", spec.image_pull_secrets.is_some()),
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
        PodSpec {
            restart_policy,
            init_containers,
            containers,
            volumes: volumes
                .filter_map(|(i, v)| self.volume(&format!("spec.volumes[{i}]"), v))
                .collect(),
            hostname: spec.hostname.unwrap_or_default(),
            host_network: spec.host_network.unwrap_or(false),
            host_pid: spec.host_pid.unwrap_or(false),
            host_ipc: spec.host_ipc.unwrap_or(false),
            share_process_namespace: share,
            dns,
            sysctls,
            termination_grace_period_seconds: spec.termination_grace_period_seconds.unwrap_or(30),
        }
    }

    fn pod_security(&mut self, security: &k8s::PodSecurityContext) -> BTreeMap<String, String> {
        self.unsupported(
            "spec.securityContext",
            &[
                ("fsGroup", security.fs_group.is_some()),
                ("fsGroupChangePolicy", security.fs_group_change_policy.is_some()),
                ("seLinuxChangePolicy", security.se_linux_change_policy.is_some()),
                ("windowsOptions", security.windows_options.is_some()),
            ],
        );
        let mut sysctls = BTreeMap::new();
        for (i, sysctl) in security.sysctls.iter().flatten().enumerate() {
            if sysctls.insert(sysctl.name.clone(), sysctl.value.clone()).is_some() {
                let path = format!("spec.securityContext.sysctls[{i}].name");
                self.at(&path, At::Value, format!("{:?} is given twice", sysctl.name));
            }
        }
        sysctls
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

    fn container_fields(&mut self, at: &str, init: bool, c: &k8s::Container) {
        self.unsupported(
            at,
            &[
                ("envFrom", c.env_from.is_some()),
                ("lifecycle", c.lifecycle.is_some()),
                ("livenessProbe", c.liveness_probe.is_some()),
                ("readinessProbe", c.readiness_probe.is_some()),
                ("restartPolicy", !init && c.restart_policy.is_some()),
                ("restartPolicyRules", c.restart_policy_rules.is_some()),
                ("startupProbe", c.startup_probe.is_some()),
                ("volumeDevices", c.volume_devices.is_some()),
            ],
        );
        self.meaningless(
            at,
            &[
                ("resizePolicy", c.resize_policy.is_some()),
                ("terminationMessagePath", c.termination_message_path.is_some()),
                ("terminationMessagePolicy", c.termination_message_policy.is_some()),
            ],
        );
        if let Some(policy) = &c.image_pull_policy {
            let path = join(at, "imagePullPolicy");
            let always = self.word(
                &path,
                policy,
                &[("Always", true), ("IfNotPresent", false), ("Never", false)],
            );
            if always == Some(true) {
                self.warn(&path, "an image that is present is not pulled again".into());
            }
        }
    }

    fn container(
        &mut self,
        at: &str,
        list: &str,
        c: k8s::Container,
        pod: Option<&k8s::PodSecurityContext>,
        namespaces: &Namespaces,
    ) -> PodContainer {
        let init = list == "initContainers";
        self.container_fields(at, init, &c);
        let restart_policy = c
            .restart_policy
            .as_deref()
            .filter(|_| init)
            .and_then(|policy| self.word(&join(at, "restartPolicy"), policy, &[("Always", RestartPolicy::Always)]));
        let env = self.environment(&join(at, "env"), c.env.unwrap_or_default());
        let expand = |texts: Option<Vec<String>>| -> Vec<String> {
            texts
                .unwrap_or_default()
                .iter()
                .map(|text| expand(text, &env))
                .collect()
        };
        let (command, args) = (expand(c.command), expand(c.args));
        let ports = c.ports.unwrap_or_default().into_iter().enumerate();
        let ports = ports
            .filter_map(|(i, port)| self.port(&format!("{at}.ports[{i}]"), port))
            .collect();
        let mounts = c.volume_mounts.unwrap_or_default().into_iter().enumerate();
        let volume_mounts = mounts
            .map(|(i, m)| self.volume_mount(&format!("{at}.volumeMounts[{i}]"), m))
            .collect();
        PodContainer {
            name: c.name,
            image: c.image.unwrap_or_default(),
            command,
            args,
            working_dir: c.working_dir.unwrap_or_default(),
            env,
            ports,
            volume_mounts,
            resources: self.resources(&join(at, "resources"), c.resources.unwrap_or_default()),
            security: self.security(
                &join(at, "securityContext"),
                c.security_context.unwrap_or_default(),
                pod,
                namespaces,
            ),
            stdin: c.stdin.unwrap_or(false),
            stdin_once: c.stdin_once.unwrap_or(false),
            tty: c.tty.unwrap_or(false),
            stop_signal: String::new(),
            restart_policy,
        }
    }

    /// Each value may refer to the variables before it.
    fn environment(&mut self, at: &str, list: Vec<k8s::EnvVar>) -> Vec<EnvVar> {
        let mut env: Vec<EnvVar> = Vec::new();
        for (i, variable) in list.into_iter().enumerate() {
            self.unsupported(&format!("{at}[{i}]"), &[("valueFrom", variable.value_from.is_some())]);
            let value = expand(&variable.value.unwrap_or_default(), &env);
            env.push(EnvVar {
                name: variable.name,
                value,
            });
        }
        env
    }

    fn port(&mut self, at: &str, port: k8s::ContainerPort) -> Option<ContainerPort> {
        let protocols = [("TCP", Protocol::Tcp), ("UDP", Protocol::Udp), ("SCTP", Protocol::Sctp)];
        let protocol = port.protocol.as_deref().unwrap_or("TCP");
        let protocol = self.word(&join(at, "protocol"), protocol, &protocols)?;
        let mut number = |field: &str, value: i64| {
            let number = u16::try_from(value).ok().filter(|n| *n > 0);
            if number.is_none() {
                self.at(
                    &join(at, field),
                    At::Value,
                    format!("{value} is not a port (1 to 65535)"),
                );
            }
            number
        };
        Some(ContainerPort {
            container_port: number("containerPort", port.container_port)?,
            host_port: port.host_port.map_or(Some(0), |port| number("hostPort", port))?,
            host_ip: port.host_ip.unwrap_or_default(),
            protocol,
            name: port.name.unwrap_or_default(),
        })
    }

    fn volume_mount(&mut self, at: &str, mount: k8s::VolumeMount) -> VolumeMount {
        self.unsupported(
            at,
            &[
                (
                    "mountPropagation",
                    mount.mount_propagation.as_deref().is_some_and(|p| p != "None"),
                ),
                (
                    "recursiveReadOnly",
                    mount.recursive_read_only.as_deref().is_some_and(|p| p != "Disabled"),
                ),
                ("subPathExpr", mount.sub_path_expr.is_some()),
            ],
        );
        VolumeMount {
            name: mount.name,
            mount_path: mount.mount_path,
            sub_path: mount.sub_path.unwrap_or_default(),
            read_only: mount.read_only.unwrap_or(false),
        }
    }

    fn volume(&mut self, at: &str, volume: k8s::Volume) -> Option<Volume> {
        let source = match (&volume.empty_dir, &volume.host_path) {
            (Some(_), Some(_)) => {
                self.at(at, At::Value, "has two sources, emptyDir and hostPath".into());
                return None;
            }
            (Some(empty), None) => {
                let mediums = [("", false), ("Memory", true)];
                let medium = empty.medium.as_deref().unwrap_or_default();
                let memory = self.word(&join(at, "emptyDir.medium"), medium, &mediums)?;
                let limit = empty
                    .size_limit
                    .as_ref()
                    .map_or(Ok(0), |limit| quantity::whole(&limit.0));
                let limit = limit.map_err(|problem| self.at(&join(at, "emptyDir.sizeLimit"), At::Value, problem));
                VolumeSource::EmptyDir {
                    memory,
                    size_limit: limit.ok()?.unsigned_abs(),
                }
            }
            (None, Some(host)) => VolumeSource::HostPath {
                path: host.path.clone(),
                kind: host.kind.clone().unwrap_or_default(),
            },
            (None, None) => {
                let others = [
                    ("configMap", volume.config_map.is_some()),
                    ("csi", volume.csi.is_some()),
                    ("downwardAPI", volume.downward_api.is_some()),
                    ("ephemeral", volume.ephemeral.is_some()),
                    ("image", volume.image.is_some()),
                    ("iscsi", volume.iscsi.is_some()),
                    ("nfs", volume.nfs.is_some()),
                    ("persistentVolumeClaim", volume.persistent_volume_claim.is_some()),
                    ("projected", volume.projected.is_some()),
                    ("secret", volume.secret.is_some()),
                ];
                self.unsupported(at, &others);
                if !others.iter().any(|(_, given)| *given) {
                    self.at(at, At::Value, "has no source, e.g. emptyDir: {}".into());
                }
                return None;
            }
        };
        Some(Volume {
            name: volume.name,
            source,
        })
    }

    /// Requests and limits in the CRI's units, as the kubelet converts them.
    fn resources(&mut self, at: &str, resources: k8s::ResourceRequirements) -> Resources {
        self.unsupported(at, &[("claims", resources.claims.is_some())]);
        let limits = self.quantities(&join(at, "limits"), resources.limits);
        let requests = self.quantities(&join(at, "requests"), resources.requests);
        for (name, request) in &requests {
            if limits.get(name).is_some_and(|limit| limit < request) {
                self.at(
                    &join(at, &format!("requests.{name}")),
                    At::Value,
                    "is more than the limit".into(),
                );
            }
        }
        let whole = |milli: &i64| milli / 1000 + i64::from(milli % 1000 > 0);
        let mut converted = Resources::default();
        if let Some(limit) = limits.get("cpu").filter(|limit| **limit > 0) {
            converted.cpu_period = CPU_PERIOD;
            converted.cpu_quota = (limit.saturating_mul(CPU_PERIOD) / 1000).max(1000);
        }
        let request = requests.get("cpu").or(limits.get("cpu")).copied().unwrap_or(0);
        converted.cpu_shares = (request.saturating_mul(1024) / 1000).clamp(2, 262_144);
        converted.memory_limit = limits.get("memory").map_or(0, whole);
        for (name, limit) in &limits {
            if let Some(size) = name.strip_prefix("hugepages-") {
                match page_size(size) {
                    Some(page) => drop(converted.hugepages.insert(page, whole(limit).unsigned_abs())),
                    None => self.at(&format!("{at}.limits.{name}"), At::Key, "unknown page size".into()),
                }
            }
        }
        converted
    }

    /// Thousandths by resource name.
    fn quantities(&mut self, at: &str, given: Option<BTreeMap<String, Quantity>>) -> BTreeMap<String, i64> {
        let mut read = BTreeMap::new();
        for (name, Quantity(text)) in given.unwrap_or_default() {
            let path = join(at, &name);
            match quantity::milli(&text) {
                Err(problem) => self.at(&path, At::Value, problem),
                Ok(_) if name == "ephemeral-storage" => self.meaningless(at, &[(&name, true)]),
                Ok(milli) if name == "cpu" || name == "memory" || name.starts_with("hugepages-") => {
                    read.insert(name, milli);
                }
                Ok(_) => self.unsupported(at, &[(&name, true)]),
            }
        }
        read
    }

    /// What the container says, else what the pod says, else the kubelet's defaults.
    fn security(
        &mut self,
        at: &str,
        own: k8s::SecurityContext,
        pod: Option<&k8s::PodSecurityContext>,
        namespaces: &Namespaces,
    ) -> ContainerSecurity {
        self.unsupported(at, &[("windowsOptions", own.windows_options.is_some())]);
        let privileged = own.privileged.unwrap_or(false);
        let run_as_user = own.run_as_user.or(pod.and_then(|pod| pod.run_as_user));
        self.check_identity(at, &own, pod, run_as_user);
        let proc_mount = own.proc_mount.as_deref().unwrap_or("Default");
        let mounts = [("Default", true), ("Unmasked", false)];
        let masked = !privileged && self.word(&join(at, "procMount"), proc_mount, &mounts).unwrap_or(true);
        let paths = |list: &[&str]| list.iter().filter(|_| masked).map(|path| (*path).to_owned()).collect();
        let policies = [("Merge", GroupsPolicy::Merge), ("Strict", GroupsPolicy::Strict)];
        let policy = pod
            .and_then(|pod| pod.supplemental_groups_policy.as_deref())
            .unwrap_or("Merge");
        let policy = self.word("spec.securityContext.supplementalGroupsPolicy", policy, &policies);
        let seccomp = match (&own.seccomp_profile, pod.and_then(|pod| pod.seccomp_profile.as_ref())) {
            (Some(profile), _) => self.profile(&join(at, "seccompProfile"), profile),
            (None, Some(profile)) => self.profile("spec.securityContext.seccompProfile", profile),
            (None, None) => Some(Profile::RuntimeDefault),
        };
        let apparmor = match (
            &own.app_armor_profile,
            pod.and_then(|pod| pod.app_armor_profile.as_ref()),
        ) {
            (Some(profile), _) => self.profile(&join(at, "appArmorProfile"), profile),
            (None, Some(profile)) => self.profile("spec.securityContext.appArmorProfile", profile),
            (None, None) => None,
        };
        let capabilities = own.capabilities.unwrap_or_default();
        ContainerSecurity {
            privileged,
            readonly_rootfs: own.read_only_root_filesystem.unwrap_or(false),
            no_new_privs: own.allow_privilege_escalation == Some(false),
            namespaces: namespaces.clone(),
            run_as_user,
            run_as_group: own.run_as_group.or(pod.and_then(|pod| pod.run_as_group)),
            run_as_username: String::new(),
            supplemental_groups: pod.and_then(|pod| pod.supplemental_groups.clone()).unwrap_or_default(),
            groups_policy: policy.unwrap_or_default(),
            add_capabilities: capabilities.add.unwrap_or_default(),
            drop_capabilities: capabilities.drop.unwrap_or_default(),
            add_ambient_capabilities: Vec::new(),
            masked_paths: paths(&MASKED),
            readonly_paths: paths(&READONLY),
            selinux: own
                .se_linux_options
                .as_ref()
                .or(pod.and_then(|pod| pod.se_linux_options.as_ref()))
                .map(|options| SeLinux {
                    user: options.user.clone().unwrap_or_default(),
                    role: options.role.clone().unwrap_or_default(),
                    kind: options.kind.clone().unwrap_or_default(),
                    level: options.level.clone().unwrap_or_default(),
                }),
            seccomp: seccomp.filter(|_| !privileged),
            apparmor,
        }
    }

    fn check_identity(
        &mut self,
        at: &str,
        own: &k8s::SecurityContext,
        pod: Option<&k8s::PodSecurityContext>,
        run_as_user: Option<i64>,
    ) {
        if own.run_as_non_root.or(pod.and_then(|pod| pod.run_as_non_root)) == Some(true) {
            let path = if own.run_as_non_root.is_some() {
                at
            } else {
                "spec.securityContext"
            };
            let path = join(path, "runAsNonRoot");
            match run_as_user {
                Some(0) => self.at(&path, At::Value, "contradicts runAsUser: 0".into()),
                Some(_) => {}
                None => self.at(
                    &path,
                    At::Value,
                    "needs runAsUser; to look into the image is not supported yet".into(),
                ),
            }
        }
        if own.allow_privilege_escalation == Some(false) {
            let path = join(at, "allowPrivilegeEscalation");
            let added = own.capabilities.iter().flat_map(|c| c.add.iter().flatten());
            if own.privileged == Some(true) {
                self.at(&path, At::Value, "contradicts privileged: true".into());
            } else if added
                .into_iter()
                .any(|cap| cap.trim_start_matches("CAP_") == "SYS_ADMIN")
            {
                self.at(&path, At::Value, "contradicts the capability SYS_ADMIN".into());
            }
        }
    }

    fn profile(&mut self, at: &str, profile: &k8s::SeccompProfile) -> Option<Profile> {
        let kinds = [("RuntimeDefault", 0), ("Unconfined", 1), ("Localhost", 2)];
        match (
            self.word(&join(at, "type"), &profile.kind, &kinds)?,
            &profile.localhost_profile,
        ) {
            (2, Some(reference)) if !reference.is_empty() => Some(Profile::Localhost {
                reference: reference.clone(),
            }),
            (2, _) => {
                self.at(at, At::Key, "Localhost needs localhostProfile".into());
                None
            }
            (_, Some(_)) => {
                self.at(
                    &join(at, "localhostProfile"),
                    At::Key,
                    "belongs to type: Localhost only".into(),
                );
                None
            }
            (0, None) => Some(Profile::RuntimeDefault),
            (_, None) => Some(Profile::Unconfined),
        }
    }
}

/// `2Mi` to the `2MB` that cgroup files are named by.
fn page_size(size: &str) -> Option<String> {
    let bytes = quantity::whole(size)
        .ok()
        .filter(|bytes| bytes.count_ones() == 1 && *bytes >= 1 << 10)?;
    Some(match bytes.trailing_zeros() {
        10..20 => format!("{}KB", bytes >> 10),
        20..30 => format!("{}MB", bytes >> 20),
        _ => format!("{}GB", bytes >> 30),
    })
}

/// Replaces `$(NAME)` by that variable; `$$` is a `$`, and what names no variable stays (as Kubernetes does it).
fn expand(text: &str, env: &[EnvVar]) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(dollar) = rest.find('$') {
        out.push_str(&rest[..dollar]);
        rest = &rest[dollar + 1..];
        if let Some(after) = rest.strip_prefix('$') {
            out.push('$');
            rest = after;
        } else if let Some((name, after)) = rest.strip_prefix('(').and_then(|r| r.split_once(')')) {
            match env.iter().rev().find(|variable| variable.name == name) {
                Some(variable) => out.push_str(&variable.value),
                None => out.push_str(&format!("$({name})")),
            }
            rest = after;
        } else {
            out.push('$');
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::{EnvVar, expand, page_size};

    #[test]
    fn references_are_expanded() {
        let env = [EnvVar {
            name: "A".into(),
            value: "1".into(),
        }];
        for (text, wanted) in [
            ("x$(A)y", "x1y"),
            ("$(B)", "$(B)"),
            ("$$(A)", "$(A)"),
            ("$A ${A} $", "$A ${A} $"),
            ("$(A", "$(A"),
            ("$(A)$(A)", "11"),
        ] {
            assert_eq!(expand(text, &env), wanted, "{text}");
        }
    }

    #[test]
    fn page_sizes_are_named_as_the_kernel_does() {
        for (size, wanted) in [
            ("2Mi", Some("2MB")),
            ("1Gi", Some("1GB")),
            ("64Ki", Some("64KB")),
            ("3Mi", None),
        ] {
            assert_eq!(page_size(size).as_deref(), wanted, "{size}");
        }
    }
}
