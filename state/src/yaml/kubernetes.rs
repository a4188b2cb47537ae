//! The form of a Kubernetes `v1` Pod.
//!
//! Written out here because the derived tree of `k8s-openapi` takes minutes to compile in every form that it is read
//! in, and is blind to missing and unknown fields. What a field of type [`Given`] holds is not looked at.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};

/// Is the field there?
pub(super) type Given = Option<serde::de::IgnoredAny>;

/// Structs whose fields are named in camelCase and are the only ones that there are.
macro_rules! forms {
    ($($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty,)* })*) => {
        $($(#[$meta])*
        #[derive(Debug, Deserialize)]
        #[serde(rename_all = "camelCase", deny_unknown_fields)]
        pub(super) struct $name { $($(#[$field_meta])* pub $field: $type,)* })*
    };
}

/// A quantity; YAML may take it for a number.
#[derive(Debug)]
pub(super) struct Quantity(pub String);

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(
            untagged,
            expecting = "invalid type: expected a quantity such as 100m, 0.5, 2e3 or 1Gi"
        )]
        enum Form {
            Integer(i64),
            Float(f64),
            Text(String),
        }
        Ok(Quantity(match Form::deserialize(deserializer)? {
            Form::Integer(n) => n.to_string(),
            Form::Float(n) => n.to_string(),
            Form::Text(text) => text,
        }))
    }
}

type List<T> = Option<Vec<T>>;
type Text = Option<String>;
type Quantities = Option<BTreeMap<String, Quantity>>;

forms! {
    Pod {
        #[serde(rename = "apiVersion")]
        _api_version: String,
        #[serde(rename = "kind")]
        _kind: String,
        metadata: ObjectMeta,
        spec: PodSpec,
        status: Given,
    }
    ObjectMeta {
        name: String,
        namespace: Text,
        labels: Option<BTreeMap<String, String>>,
        annotations: Option<BTreeMap<String, String>>,
        generate_name: Given,
        creation_timestamp: Given,
        deletion_grace_period_seconds: Given,
        deletion_timestamp: Given,
        finalizers: Given,
        generation: Given,
        managed_fields: Given,
        owner_references: Given,
        resource_version: Given,
        self_link: Given,
        uid: Given,
    }
    PodSpec {
        containers: Vec<Container>,
        init_containers: List<Container>,
        volumes: List<Volume>,
        image_pull_secrets: List<LocalObjectReference>,
        restart_policy: Text,
        hostname: Text,
        host_network: Option<bool>,
        #[serde(rename = "hostPID")]
        host_pid: Option<bool>,
        #[serde(rename = "hostIPC")]
        host_ipc: Option<bool>,
        share_process_namespace: Option<bool>,
        host_users: Option<bool>,
        dns_policy: Text,
        dns_config: Option<DnsConfig>,
        security_context: Option<PodSecurityContext>,
        termination_grace_period_seconds: Option<i64>,
        #[serde(rename = "setHostnameAsFQDN")]
        set_hostname_as_fqdn: Option<bool>,
        os: Option<Os>,
        automount_service_account_token: Option<bool>,
        enable_service_links: Option<bool>,
        active_deadline_seconds: Given,
        affinity: Given,
        ephemeral_containers: Given,
        host_aliases: Given,
        hostname_override: Given,
        node_name: Given,
        node_selector: Given,
        overhead: Given,
        preemption_policy: Given,
        priority: Given,
        priority_class_name: Given,
        readiness_gates: Given,
        resource_claims: Given,
        resources: Given,
        runtime_class_name: Option<String>,
        scheduler_name: Given,
        scheduling_gates: Given,
        service_account: Given,
        service_account_name: Given,
        subdomain: Given,
        tolerations: Given,
        topology_spread_constraints: Given,
    }
    LocalObjectReference {
        name: String,
    }
    Os {
        name: String,
    }
    DnsConfig {
        nameservers: List<String>,
        searches: List<String>,
        options: List<DnsOption>,
    }
    DnsOption {
        name: String,
        value: Text,
    }
    /// Also `PodSecurityContext`'s and `SecurityContext`'s AppArmor profile.
    SeccompProfile {
        #[serde(rename = "type")]
        kind: String,
        localhost_profile: Text,
    }
    SeLinuxOptions {
        user: Text,
        role: Text,
        #[serde(rename = "type")]
        kind: Text,
        level: Text,
    }
    Sysctl {
        name: String,
        value: String,
    }
    PodSecurityContext {
        app_armor_profile: Option<SeccompProfile>,
        run_as_group: Option<i64>,
        run_as_non_root: Option<bool>,
        run_as_user: Option<i64>,
        se_linux_options: Option<SeLinuxOptions>,
        seccomp_profile: Option<SeccompProfile>,
        supplemental_groups: List<i64>,
        supplemental_groups_policy: Text,
        sysctls: List<Sysctl>,
        fs_group: Given,
        fs_group_change_policy: Given,
        se_linux_change_policy: Given,
        windows_options: Given,
    }
    #[derive(Default)]
    SecurityContext {
        allow_privilege_escalation: Option<bool>,
        app_armor_profile: Option<SeccompProfile>,
        capabilities: Option<Capabilities>,
        privileged: Option<bool>,
        proc_mount: Text,
        read_only_root_filesystem: Option<bool>,
        run_as_group: Option<i64>,
        run_as_non_root: Option<bool>,
        run_as_user: Option<i64>,
        se_linux_options: Option<SeLinuxOptions>,
        seccomp_profile: Option<SeccompProfile>,
        windows_options: Given,
    }
    #[derive(Default)]
    Capabilities {
        add: List<String>,
        drop: List<String>,
    }
    Container {
        name: String,
        image: Text,
        image_pull_policy: Text,
        command: List<String>,
        args: List<String>,
        working_dir: Text,
        env: List<EnvVar>,
        env_from: Given,
        ports: List<ContainerPort>,
        volume_mounts: List<VolumeMount>,
        volume_devices: Given,
        resources: Option<ResourceRequirements>,
        security_context: Option<SecurityContext>,
        restart_policy: Text,
        restart_policy_rules: Given,
        stdin: Option<bool>,
        stdin_once: Option<bool>,
        tty: Option<bool>,
        lifecycle: Given,
        liveness_probe: Given,
        readiness_probe: Given,
        startup_probe: Given,
        resize_policy: Given,
        termination_message_path: Given,
        termination_message_policy: Given,
    }
    EnvVar {
        name: String,
        value: Text,
        value_from: Given,
    }
    ContainerPort {
        container_port: i64,
        host_port: Option<i64>,
        #[serde(rename = "hostIP")]
        host_ip: Text,
        name: Text,
        protocol: Text,
    }
    VolumeMount {
        name: String,
        mount_path: String,
        sub_path: Text,
        read_only: Option<bool>,
        mount_propagation: Text,
        recursive_read_only: Text,
        sub_path_expr: Given,
    }
    #[derive(Default)]
    ResourceRequirements {
        limits: Quantities,
        requests: Quantities,
        claims: Given,
    }
    EmptyDir {
        medium: Text,
        size_limit: Option<Quantity>,
    }
    HostPath {
        path: String,
        #[serde(rename = "type")]
        kind: Text,
    }
    Volume {
        name: String,
        empty_dir: Option<EmptyDir>,
        host_path: Option<HostPath>,
        config_map: Given,
        csi: Given,
        #[serde(rename = "downwardAPI")]
        downward_api: Given,
        ephemeral: Given,
        image: Given,
        iscsi: Given,
        nfs: Given,
        persistent_volume_claim: Given,
        projected: Given,
        secret: Given,
    }
}
