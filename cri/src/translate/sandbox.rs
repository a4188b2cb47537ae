//! `PodSandboxConfig` to a sandbox's wish, and its status back.

use std::collections::BTreeMap;

use state::sandbox::{
    Dns, NamespaceMode, PodRef, PodSandbox, PortMapping, Protocol, SandboxGoal, SandboxKind, SandboxPhase,
    SandboxSecurity, SandboxSpec,
};
use state::{Meta, New};

use super::security::ProfileKind;
use super::{absolute, known, name, present, resources, security, text};
use crate::error::{Error, Result};
use crate::runtime::v1;

/// Bytes of a host name (`HOST_NAME_MAX` of Linux).
const HOSTNAME_MAX: usize = 64;
/// Bytes of a pod's uid.
const UID_MAX: usize = 128;

/// The record that a RunPodSandbox call asks for.
///
/// # Errors
/// For a field that cannot be, by its path.
pub fn new(config: &v1::PodSandboxConfig, handler: &str) -> Result<New<SandboxKind>> {
    if config.windows.is_some() {
        return Err(Error::invalid("config.windows", "this node runs Linux"));
    }
    let pod = pod("config.metadata", config.metadata.as_ref())?;
    if config.hostname.len() > HOSTNAME_MAX {
        return Err(Error::invalid(
            "config.hostname",
            format!("is longer than {HOSTNAME_MAX} bytes"),
        ));
    }
    text("config.hostname", &config.hostname)?;
    if !config.log_directory.is_empty() {
        absolute("config.log_directory", &config.log_directory)?;
    }
    let linux = config.linux.clone().unwrap_or_default();
    cgroup_parent(&linux.cgroup_parent)?;
    let context = linux.security_context.clone().unwrap_or_default();
    let namespaces = security::namespaces(
        "config.linux.security_context.namespace_options",
        context.namespace_options.as_ref(),
    )?;
    sysctls(&linux.sysctls, namespaces.network, namespaces.ipc)?;
    let amounts = |part: &str, from: &Option<v1::LinuxContainerResources>| match from {
        Some(from) => resources::from_proto(&format!("config.linux.{part}"), from).map(Some),
        None => Ok(None),
    };
    let spec = SandboxSpec {
        goal: SandboxGoal::Ready,
        hostname: config.hostname.clone(),
        log_directory: config.log_directory.clone(),
        dns: dns(config.dns_config.as_ref())?,
        ports: ports(&config.port_mappings)?,
        cgroup_parent: linux.cgroup_parent.clone(),
        sysctls: linux.sysctls.clone(),
        namespaces,
        security: sandbox_security("config.linux.security_context", &context)?,
        runtime_handler: handler.to_owned(),
        overhead: amounts("overhead", &linux.overhead)?,
        resources: amounts("resources", &linux.resources)?,
        pod,
    };
    let meta = Meta {
        name: identity(&spec.pod),
        namespace: spec.pod.namespace.clone(),
        labels: config.labels.clone(),
        annotations: config.annotations.clone(),
        ..Meta::default()
    };
    Ok(New { meta, spec })
}

/// Name of the record: one sandbox per attempt of a pod.
pub(crate) fn identity(pod: &PodRef) -> String {
    format!("{}_{}_{}_{}", pod.name, pod.namespace, pod.uid, pod.attempt)
}

fn pod(field: &str, from: Option<&v1::PodSandboxMetadata>) -> Result<PodRef> {
    let from = from.ok_or_else(|| Error::invalid(field, "must be set"))?;
    for (part, value) in [("name", &from.name), ("namespace", &from.namespace), ("uid", &from.uid)] {
        name(&format!("{field}.{part}"), value)?;
    }
    if from.uid.len() > UID_MAX {
        return Err(Error::invalid(
            format!("{field}.uid"),
            format!("is longer than {UID_MAX} bytes"),
        ));
    }
    Ok(PodRef {
        name: from.name.clone(),
        namespace: from.namespace.clone(),
        uid: from.uid.clone(),
        attempt: from.attempt,
    })
}

fn cgroup_parent(parent: &str) -> Result<()> {
    let field = "config.linux.cgroup_parent";
    text(field, parent)?;
    if parent.split('/').any(|part| part == "..") {
        return Err(Error::invalid(field, "must not contain .."));
    }
    Ok(())
}

/// Only sysctls that a namespace of the pod confines; those of the node's namespaces would change the node.
fn sysctls(sysctls: &BTreeMap<String, String>, network: NamespaceMode, ipc: NamespaceMode) -> Result<()> {
    for key in sysctls.keys() {
        let field = || format!("config.linux.sysctls[{key:?}]");
        let dotted = key.replace('/', ".");
        let of_network = dotted.starts_with("net.");
        let of_ipc = dotted.starts_with("fs.mqueue.")
            || ["kernel.shm", "kernel.msg"]
                .iter()
                .any(|prefix| dotted.starts_with(prefix))
            || dotted == "kernel.sem";
        if !(of_network || of_ipc) || dotted.contains("..") || dotted.contains('\0') {
            let problem = "is not confined to a pod; net.*, kernel.shm*, kernel.msg*, kernel.sem and fs.mqueue.* are";
            return Err(Error::invalid(field(), problem));
        }
        if of_network && network == NamespaceMode::Node {
            return Err(Error::invalid(
                field(),
                "cannot be set: the pod uses the host's network",
            ));
        }
        if of_ipc && ipc == NamespaceMode::Node {
            return Err(Error::invalid(
                field(),
                "cannot be set: the pod uses the host's ipc namespace",
            ));
        }
    }
    Ok(())
}

fn dns(from: Option<&v1::DnsConfig>) -> Result<Option<Dns>> {
    let Some(from) = from else { return Ok(None) };
    for (part, values) in [
        ("servers", &from.servers),
        ("searches", &from.searches),
        ("options", &from.options),
    ] {
        for (i, value) in values.iter().enumerate() {
            if value.is_empty() || value.chars().any(|c| c.is_whitespace() || c.is_control()) {
                let problem = "must be one word: it becomes part of a line of resolv.conf";
                return Err(Error::invalid(format!("config.dns_config.{part}[{i}]"), problem));
            }
        }
    }
    Ok(Some(Dns {
        servers: from.servers.clone(),
        searches: from.searches.clone(),
        options: from.options.clone(),
    }))
}

fn ports(from: &[v1::PortMapping]) -> Result<Vec<PortMapping>> {
    let one = |(i, from): (usize, &v1::PortMapping)| {
        let field = |part: &str| format!("config.port_mappings[{i}].{part}");
        let port = |part: &str, value: i32| {
            u16::try_from(value).map_err(|_| Error::invalid(field(part), format!("{value} is no port")))
        };
        if !from.host_ip.is_empty() && from.host_ip.parse::<std::net::IpAddr>().is_err() {
            return Err(Error::invalid(
                field("host_ip"),
                format!("{:?} is no IP address", from.host_ip),
            ));
        }
        Ok(PortMapping {
            protocol: match known::<v1::Protocol>(&field("protocol"), from.protocol)? {
                v1::Protocol::Tcp => Protocol::Tcp,
                v1::Protocol::Udp => Protocol::Udp,
                v1::Protocol::Sctp => Protocol::Sctp,
            },
            container_port: port("container_port", from.container_port)?,
            host_port: port("host_port", from.host_port)?,
            host_ip: from.host_ip.clone(),
        })
    };
    from.iter().enumerate().map(one).collect()
}

fn sandbox_security(field: &str, from: &v1::LinuxSandboxSecurityContext) -> Result<SandboxSecurity> {
    let user = from.run_as_user.map(|v| v.value);
    let group = from.run_as_group.map(|v| v.value);
    security::ids(&format!("{field}.run_as_user"), &user)?;
    security::ids(&format!("{field}.run_as_group"), &group)?;
    security::ids(&format!("{field}.supplemental_groups"), &from.supplemental_groups)?;
    if group.is_some() && user.is_none() {
        return Err(Error::invalid(format!("{field}.run_as_group"), "needs run_as_user"));
    }
    let policy = format!("{field}.supplemental_groups_policy");
    Ok(SandboxSecurity {
        privileged: from.privileged,
        readonly_rootfs: from.readonly_rootfs,
        run_as_user: user,
        run_as_group: group,
        supplemental_groups: from.supplemental_groups.clone(),
        groups_policy: security::groups_policy(&policy, from.supplemental_groups_policy)?,
        selinux: security::selinux(from.selinux_options.as_ref()),
        #[allow(deprecated)]
        seccomp: security::profile(
            ProfileKind::Seccomp,
            &format!("{field}.seccomp"),
            from.seccomp.as_ref(),
            &format!("{field}.seccomp_profile_path"),
            &from.seccomp_profile_path,
        )?,
        apparmor: security::profile(
            ProfileKind::AppArmor,
            &format!("{field}.apparmor"),
            from.apparmor.as_ref(),
            "",
            "",
        )?,
    })
}

/// The metadata of CreateContainer's copy of the sandbox's configuration must be there; the record is what counts.
pub(crate) fn check_copy(config: &Option<v1::PodSandboxConfig>) -> Result<()> {
    let config = present("sandbox_config", config)?;
    present("sandbox_config.metadata", &config.metadata).map(drop)
}

/// READY only while it is and shall be: a stopping sandbox must not be taken for the pod's live one.
pub(crate) fn state(sandbox: &PodSandbox) -> v1::PodSandboxState {
    let wanted = sandbox.spec.goal == SandboxGoal::Ready && !sandbox.meta.deleted();
    match sandbox.status.phase {
        SandboxPhase::Ready if wanted => v1::PodSandboxState::SandboxReady,
        _ => v1::PodSandboxState::SandboxNotready,
    }
}

pub(crate) fn metadata(sandbox: &PodSandbox) -> v1::PodSandboxMetadata {
    let pod = &sandbox.spec.pod;
    v1::PodSandboxMetadata {
        name: pod.name.clone(),
        uid: pod.uid.clone(),
        namespace: pod.namespace.clone(),
        attempt: pod.attempt,
    }
}

/// The sandbox in a list.
pub(crate) fn item(sandbox: &PodSandbox) -> v1::PodSandbox {
    v1::PodSandbox {
        id: sandbox.meta.uid.clone(),
        metadata: Some(metadata(sandbox)),
        state: state(sandbox).into(),
        created_at: sandbox.meta.created,
        labels: sandbox.meta.labels.clone(),
        annotations: sandbox.meta.annotations.clone(),
        runtime_handler: sandbox.spec.runtime_handler.clone(),
    }
}

pub(crate) fn status(sandbox: &PodSandbox) -> v1::PodSandboxStatus {
    let pod_ip = |ip: &String| v1::PodIp { ip: ip.clone() };
    v1::PodSandboxStatus {
        id: sandbox.meta.uid.clone(),
        metadata: Some(metadata(sandbox)),
        state: state(sandbox).into(),
        created_at: sandbox.meta.created,
        network: Some(v1::PodSandboxNetworkStatus {
            ip: sandbox.status.ip.clone(),
            additional_ips: sandbox.status.additional_ips.iter().map(pod_ip).collect(),
        }),
        linux: Some(v1::LinuxPodSandboxStatus {
            namespaces: Some(v1::Namespace {
                options: Some(security::namespaces_to_proto(&sandbox.spec.namespaces)),
            }),
        }),
        labels: sandbox.meta.labels.clone(),
        annotations: sandbox.meta.annotations.clone(),
        runtime_handler: sandbox.spec.runtime_handler.clone(),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::error::Error;
    use state::Object;
    use state::sandbox::SandboxStatus;

    /// Every field that a caller may set, set.
    pub(crate) fn full() -> v1::PodSandboxConfig {
        let map = |key: &str| BTreeMap::from([(key.to_owned(), "v".to_owned())]);
        v1::PodSandboxConfig {
            metadata: Some(v1::PodSandboxMetadata {
                name: "web".into(),
                uid: "u1".into(),
                namespace: "d".into(),
                attempt: 3,
            }),
            hostname: "web-0".into(),
            log_directory: "/var/log/pods/d_web_u1".into(),
            dns_config: Some(v1::DnsConfig {
                servers: vec!["192.0.2.1".into()],
                searches: vec!["a.example".into()],
                options: vec!["ndots:5".into()],
            }),
            port_mappings: vec![v1::PortMapping {
                protocol: v1::Protocol::Udp.into(),
                container_port: 53,
                host_port: 5353,
                host_ip: "::1".into(),
            }],
            labels: map("l"),
            annotations: map("a"),
            linux: Some(v1::LinuxPodSandboxConfig {
                cgroup_parent: "/kubepods/pod1".into(),
                security_context: Some(v1::LinuxSandboxSecurityContext {
                    namespace_options: Some(v1::NamespaceOption {
                        pid: v1::NamespaceMode::Container.into(),
                        ..v1::NamespaceOption::default()
                    }),
                    run_as_user: Some(v1::Int64Value { value: 5 }),
                    run_as_group: Some(v1::Int64Value { value: 6 }),
                    ..v1::LinuxSandboxSecurityContext::default()
                }),
                sysctls: BTreeMap::from([("net.core.somaxconn".to_owned(), "9".to_owned())]),
                overhead: None,
                resources: Some(v1::LinuxContainerResources {
                    cpu_shares: 2,
                    ..v1::LinuxContainerResources::default()
                }),
            }),
            windows: None,
        }
    }

    pub(crate) fn object(new: New<SandboxKind>, status: SandboxStatus) -> PodSandbox {
        let meta = Meta {
            uid: "s".repeat(64),
            created: 7,
            ..new.meta
        };
        Object::new(meta, new.spec, status)
    }

    #[test]
    fn status_returns_what_was_asked() {
        let config = full();
        let new = new(&config, "own").unwrap();
        assert_eq!(new.meta.name, "web_d_u1_3");
        let status = SandboxStatus {
            phase: SandboxPhase::Ready,
            ip: "192.0.2.9".into(),
            additional_ips: vec!["2001:db8::9".into()],
            ..SandboxStatus::default()
        };
        let mut sandbox = object(new, status);
        let answer = super::status(&sandbox);
        assert_eq!(answer.metadata, config.metadata);
        assert_eq!(
            (&answer.labels, &answer.annotations),
            (&config.labels, &config.annotations)
        );
        assert_eq!((answer.created_at, answer.runtime_handler.as_str()), (7, "own"));
        assert_eq!(answer.state(), v1::PodSandboxState::SandboxReady);
        let network = answer.network.unwrap();
        assert_eq!((network.ip.as_str(), network.additional_ips.len()), ("192.0.2.9", 1));
        let options = answer.linux.unwrap().namespaces.unwrap().options;
        assert_eq!(
            options,
            config.linux.unwrap().security_context.unwrap().namespace_options
        );
        sandbox.spec.goal = SandboxGoal::Stopped;
        assert_eq!(state(&sandbox), v1::PodSandboxState::SandboxNotready);
    }

    #[test]
    fn defaults_when_linux_is_absent() {
        let config = v1::PodSandboxConfig {
            metadata: full().metadata,
            ..v1::PodSandboxConfig::default()
        };
        let spec = new(&config, "").unwrap().spec;
        assert_eq!(spec.namespaces, Default::default());
        assert_eq!((spec.dns, spec.resources), (None, None));
    }

    /// Each spoils a good request and names the field that the error has to begin with.
    pub(crate) type Spoiler = (fn(&mut v1::PodSandboxConfig), &'static str);

    pub(crate) const SPOILERS: [Spoiler; 22] = [
        (|c| c.metadata = None, "config.metadata: "),
        (|c| metadata_of(c).name.clear(), "config.metadata.name: "),
        (|c| metadata_of(c).name = "a\nb".into(), "config.metadata.name: "),
        (|c| metadata_of(c).namespace.clear(), "config.metadata.namespace: "),
        (|c| metadata_of(c).uid = "x".repeat(5000), "config.metadata.uid: "),
        (|c| c.hostname = "h".repeat(65), "config.hostname: "),
        (|c| c.log_directory = "var/log".into(), "config.log_directory: "),
        (
            |c| c.windows = Some(v1::WindowsPodSandboxConfig::default()),
            "config.windows: ",
        ),
        (
            |c| c.port_mappings[0].container_port = 70_000,
            "config.port_mappings[0].container_port: ",
        ),
        (
            |c| c.port_mappings[0].host_port = -1,
            "config.port_mappings[0].host_port: ",
        ),
        (
            |c| c.port_mappings[0].host_ip = "x".into(),
            "config.port_mappings[0].host_ip: ",
        ),
        (
            |c| c.port_mappings[0].protocol = 3,
            "config.port_mappings[0].protocol: ",
        ),
        (
            |c| dns_of(c).servers.push("a b".into()),
            "config.dns_config.servers[1]: ",
        ),
        (
            |c| dns_of(c).options[0] = "a\nnameserver x".into(),
            "config.dns_config.options[0]: ",
        ),
        (
            |c| linux_of(c).cgroup_parent = "/a/../..".into(),
            "config.linux.cgroup_parent: ",
        ),
        (
            |c| sysctl(c, "kernel.panic"),
            "config.linux.sysctls[\"kernel.panic\"]: ",
        ),
        (
            |c| sysctl(c, "net/../kernel/panic"),
            "config.linux.sysctls[\"net/../kernel/panic\"]: ",
        ),
        (
            |c| context_of(c).run_as_user = None,
            "config.linux.security_context.run_as_group: ",
        ),
        (
            |c| context_of(c).run_as_user = Some(v1::Int64Value { value: -1 }),
            "config.linux.security_context.run_as_user: ",
        ),
        (
            |c| context_of(c).supplemental_groups = vec![1 << 40],
            "config.linux.security_context.supplemental_groups: ",
        ),
        (
            |c| context_of(c).namespace_options.as_mut().unwrap().network = 2,
            "config.linux.sysctls[\"net.core.somaxconn\"]: ",
        ),
        (
            |c| linux_of(c).resources.as_mut().unwrap().cpu_shares = -1,
            "config.linux.resources.cpu_shares: ",
        ),
    ];

    fn metadata_of(config: &mut v1::PodSandboxConfig) -> &mut v1::PodSandboxMetadata {
        config.metadata.as_mut().unwrap()
    }
    fn dns_of(config: &mut v1::PodSandboxConfig) -> &mut v1::DnsConfig {
        config.dns_config.as_mut().unwrap()
    }
    fn linux_of(config: &mut v1::PodSandboxConfig) -> &mut v1::LinuxPodSandboxConfig {
        config.linux.as_mut().unwrap()
    }
    fn context_of(config: &mut v1::PodSandboxConfig) -> &mut v1::LinuxSandboxSecurityContext {
        linux_of(config).security_context.as_mut().unwrap()
    }
    fn sysctl(config: &mut v1::PodSandboxConfig, key: &str) {
        linux_of(config).sysctls.insert(key.into(), "1".into());
    }

    #[test]
    fn bad_requests_name_their_field() {
        for (spoil, start) in SPOILERS {
            let mut config = full();
            spoil(&mut config);
            let error: Error = new(&config, "").unwrap_err();
            assert!(
                error.to_string().starts_with(start),
                "{error} does not start with {start}"
            );
            assert_eq!(error.code(), tonic::Code::InvalidArgument);
        }
    }
}
