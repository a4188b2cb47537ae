//! `ContainerConfig` to a container's wish, and its status back.

use std::path::Path;

use state::container::{
    Container, ContainerGoal, ContainerImage, ContainerKind, ContainerPhase, ContainerSecurity, ContainerSpec, EnvVar,
};
use state::sandbox::{NamespaceMode, Namespaces, PodSandbox, UserNamespace};
use state::{Kind, Meta, New, Owner};

use super::security::ProfileKind;
use super::{absolute, image, mount, name, no_nul, present, resources, security, signal, text};
use crate::error::{Error, Result};
use crate::runtime::v1;

/// Capability names are at most this long; `CAP_CHECKPOINT_RESTORE` is the longest that Linux has.
const CAPABILITY_MAX: usize = 32;

/// The record that a CreateContainer call asks for. Images are not resolved yet: their `id`s are empty.
///
/// # Errors
/// For a field that cannot be, by its path.
pub fn new(config: &v1::ContainerConfig, sandbox: &PodSandbox) -> Result<New<ContainerKind>> {
    if config.windows.is_some() {
        return Err(Error::invalid("config.windows", "this node runs Linux"));
    }
    let metadata = present("config.metadata", &config.metadata)?;
    name("config.metadata.name", &metadata.name)?;
    let requested = present("config.image", &config.image)?;
    text("config.image.image", &requested.image)?;
    if requested.image.is_empty() {
        return Err(Error::invalid("config.image.image", "must not be empty"));
    }
    log_path(&config.log_path)?;
    for (part, values) in [("command", &config.command), ("args", &config.args)] {
        for (i, value) in values.iter().enumerate() {
            no_nul(&format!("config.{part}[{i}]"), value)?;
        }
    }
    text("config.working_dir", &config.working_dir)?;
    let linux = config.linux.clone().unwrap_or_default();
    let amounts = linux.resources.unwrap_or_default();
    let context = linux.security_context.unwrap_or_default();
    let spec = ContainerSpec {
        goal: ContainerGoal::Created,
        sandbox: sandbox.meta.uid.clone(),
        name: metadata.name.clone(),
        attempt: metadata.attempt,
        image: image::from_proto(requested, String::new()),
        command: config.command.clone(),
        args: config.args.clone(),
        working_dir: config.working_dir.clone(),
        env: env(&config.envs)?,
        mounts: mount::mounts(&config.mounts)?,
        devices: mount::devices(&config.devices)?,
        cdi_devices: config.cdi_devices.iter().map(|d| d.name.clone()).collect(),
        log_path: config.log_path.clone(),
        stdin: config.stdin,
        stdin_once: config.stdin_once,
        tty: config.tty,
        resources: resources::from_proto("config.linux.resources", &amounts)?,
        security: container_security("config.linux.security_context", &context, sandbox)?,
        stop_signal: signal::from_proto("config.stop_signal", config.stop_signal)?,
        grace_seconds: 0,
        log_epoch: 0,
        start_by: None,
    };
    let meta = Meta {
        name: identity(&spec, sandbox),
        namespace: sandbox.meta.namespace.clone(),
        owner: Some(owner(sandbox)),
        labels: config.labels.clone(),
        annotations: config.annotations.clone(),
        ..Meta::default()
    };
    Ok(New { meta, spec })
}

/// Name of the record: one container per attempt, within its sandbox (the owner).
pub(crate) fn identity(spec: &ContainerSpec, sandbox: &PodSandbox) -> String {
    let pod = &sandbox.spec.pod;
    format!(
        "{}_{}_{}_{}_{}",
        spec.name, pod.name, pod.namespace, pod.uid, spec.attempt
    )
}

pub(crate) fn owner(sandbox: &PodSandbox) -> Owner {
    Owner {
        kind: state::sandbox::SandboxKind::KIND.to_owned(),
        uid: sandbox.meta.uid.clone(),
    }
}

fn log_path(path: &str) -> Result<()> {
    let field = "config.log_path";
    text(field, path)?;
    if path.starts_with('/') || path.split('/').any(|part| part == "..") {
        return Err(Error::invalid(field, "must stay below the sandbox's log_directory"));
    }
    Ok(())
}

/// Values are bytes in the CRI, but the OCI runtime configuration is JSON and holds text only.
fn env(from: &[v1::KeyValue]) -> Result<Vec<EnvVar>> {
    let one = |(i, from): (usize, &v1::KeyValue)| {
        let field = format!("config.envs[{i}]");
        name(&format!("{field}.key"), &from.key)?;
        if from.key.contains('=') {
            return Err(Error::invalid(format!("{field}.key"), "must not contain ="));
        }
        let field = format!("{field}.value");
        let not_text = |_| Error::invalid(&field, "is not UTF-8: the OCI runtime configuration cannot hold it");
        let value = String::from_utf8(from.value.clone()).map_err(not_text)?;
        no_nul(&field, &value)?;
        Ok(EnvVar {
            name: from.key.clone(),
            value,
        })
    };
    from.iter().enumerate().map(one).collect()
}

fn container_security(
    field: &str,
    from: &v1::LinuxContainerSecurityContext,
    sandbox: &PodSandbox,
) -> Result<ContainerSecurity> {
    if from.privileged && !sandbox.spec.security.privileged {
        return Err(Error::invalid(
            format!("{field}.privileged"),
            "needs a privileged sandbox",
        ));
    }
    let namespaces = security::namespaces(&format!("{field}.namespace_options"), from.namespace_options.as_ref())?;
    user_namespace_fits(
        &format!("{field}.namespace_options.userns_options"),
        &namespaces,
        &sandbox.spec.namespaces,
    )?;
    let user = from.run_as_user.map(|v| v.value);
    let group = from.run_as_group.map(|v| v.value);
    security::ids(&format!("{field}.run_as_user"), &user)?;
    security::ids(&format!("{field}.run_as_group"), &group)?;
    security::ids(&format!("{field}.supplemental_groups"), &from.supplemental_groups)?;
    if group.is_some() && user.is_none() && from.run_as_username.is_empty() {
        return Err(Error::invalid(
            format!("{field}.run_as_group"),
            "needs run_as_user or run_as_username",
        ));
    }
    text(&format!("{field}.run_as_username"), &from.run_as_username)?;
    for (part, paths) in [
        ("masked_paths", &from.masked_paths),
        ("readonly_paths", &from.readonly_paths),
    ] {
        for (i, path) in paths.iter().enumerate() {
            absolute(&format!("{field}.{part}[{i}]"), path)?;
        }
    }
    let capabilities = from.capabilities.clone().unwrap_or_default();
    capability_names(&format!("{field}.capabilities"), &capabilities)?;
    let policy = format!("{field}.supplemental_groups_policy");
    #[allow(deprecated)]
    let (seccomp_text, apparmor_text) = (&from.seccomp_profile_path, &from.apparmor_profile);
    Ok(ContainerSecurity {
        privileged: from.privileged,
        readonly_rootfs: from.readonly_rootfs,
        no_new_privs: from.no_new_privs,
        namespaces,
        run_as_user: user,
        run_as_group: group,
        run_as_username: from.run_as_username.clone(),
        supplemental_groups: from.supplemental_groups.clone(),
        groups_policy: security::groups_policy(&policy, from.supplemental_groups_policy)?,
        add_capabilities: capabilities.add_capabilities,
        drop_capabilities: capabilities.drop_capabilities,
        add_ambient_capabilities: capabilities.add_ambient_capabilities,
        masked_paths: from.masked_paths.clone(),
        readonly_paths: from.readonly_paths.clone(),
        selinux: security::selinux(from.selinux_options.as_ref()),
        seccomp: security::profile(
            ProfileKind::Seccomp,
            &format!("{field}.seccomp"),
            from.seccomp.as_ref(),
            &format!("{field}.seccomp_profile_path"),
            seccomp_text,
        )?,
        apparmor: security::profile(
            ProfileKind::AppArmor,
            &format!("{field}.apparmor"),
            from.apparmor.as_ref(),
            &format!("{field}.apparmor_profile"),
            apparmor_text,
        )?,
    })
}

/// All containers of a pod live in the sandbox's user namespace. NODE and absence mean the same.
fn user_namespace_fits(field: &str, own: &Namespaces, sandbox: &Namespaces) -> Result<()> {
    fn mapped(namespaces: &Namespaces) -> Option<&UserNamespace> {
        namespaces.user.as_ref().filter(|user| user.mode != NamespaceMode::Node)
    }
    if mapped(own) != mapped(sandbox) {
        return Err(Error::invalid(field, "must be the same as the sandbox's"));
    }
    Ok(())
}

fn capability_names(field: &str, from: &v1::Capability) -> Result<()> {
    for (part, names) in [
        ("add_capabilities", &from.add_capabilities),
        ("drop_capabilities", &from.drop_capabilities),
        ("add_ambient_capabilities", &from.add_ambient_capabilities),
    ] {
        for (i, name) in names.iter().enumerate() {
            let word = name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
            if name.is_empty() || name.len() > CAPABILITY_MAX || !word {
                let problem = format!("{name:.40?} is no capability");
                return Err(Error::invalid(format!("{field}.{part}[{i}]"), problem));
            }
        }
    }
    Ok(())
}

pub(crate) fn state(phase: ContainerPhase) -> v1::ContainerState {
    match phase {
        ContainerPhase::Pending | ContainerPhase::Created => v1::ContainerState::ContainerCreated,
        ContainerPhase::Running => v1::ContainerState::ContainerRunning,
        ContainerPhase::Exited => v1::ContainerState::ContainerExited,
        ContainerPhase::Unknown => v1::ContainerState::ContainerUnknown,
    }
}

pub(crate) fn metadata(container: &Container) -> v1::ContainerMetadata {
    v1::ContainerMetadata {
        name: container.spec.name.clone(),
        attempt: container.spec.attempt,
    }
}

/// What the image index knows of a container's image: a tag for people and a digest.
#[derive(Clone, Debug, Default)]
pub(crate) struct ImageNames {
    pub(crate) tag: Option<String>,
    pub(crate) digest: Option<String>,
}

/// `image_ref`: a repository digest if one is known, else the image id.
fn image_ref(image: &ContainerImage, names: &ImageNames) -> String {
    names.digest.clone().unwrap_or_else(|| image.id.clone())
}

/// The container in a list.
pub(crate) fn item(container: &Container, names: &ImageNames) -> v1::Container {
    let spec = &container.spec;
    v1::Container {
        id: container.meta.uid.clone(),
        pod_sandbox_id: spec.sandbox.clone(),
        metadata: Some(metadata(container)),
        image: Some(image::to_proto(&spec.image)),
        image_ref: image_ref(&spec.image, names),
        state: state(container.status.phase).into(),
        created_at: container.meta.created,
        labels: container.meta.labels.clone(),
        annotations: container.meta.annotations.clone(),
        image_id: spec.image.id.clone(),
    }
}

/// The full status. `sandbox` (if it is still known) tells where the log is before the controller does.
pub(crate) fn status(container: &Container, names: &ImageNames, sandbox: Option<&PodSandbox>) -> v1::ContainerStatus {
    let (spec, status) = (&container.spec, &container.status);
    let state = state(status.phase);
    let ended = state == v1::ContainerState::ContainerExited;
    let mut image = image::to_proto(&spec.image);
    if let Some(tag) = &names.tag {
        image.image.clone_from(tag);
    }
    let stop_signal = [status.stop_signal.as_str(), spec.stop_signal.as_str(), "SIGTERM"];
    v1::ContainerStatus {
        id: container.meta.uid.clone(),
        metadata: Some(metadata(container)),
        state: state.into(),
        created_at: container.meta.created,
        started_at: status.started_at,
        finished_at: if ended { status.finished_at } else { 0 },
        exit_code: if ended { status.exit_code } else { 0 },
        image: Some(image),
        image_ref: image_ref(&spec.image, names),
        reason: status.reason.clone(),
        message: status.message.clone(),
        labels: container.meta.labels.clone(),
        annotations: container.meta.annotations.clone(),
        mounts: spec.mounts.iter().map(mount::to_proto).collect(),
        log_path: log_file(container, sandbox),
        resources: Some(v1::ContainerResources {
            linux: Some(resources::to_proto(&spec.resources)),
            windows: None,
        }),
        image_id: spec.image.id.clone(),
        user: status.user.as_ref().map(|user| v1::ContainerUser {
            linux: Some(v1::LinuxContainerUser {
                uid: user.uid.into(),
                gid: user.gid.into(),
                supplemental_groups: user.groups.iter().map(|g| i64::from(*g)).collect(),
            }),
        }),
        stop_signal: signal::to_proto(stop_signal.into_iter().find(|s| !s.is_empty()).unwrap_or_default()),
    }
}

fn log_file(container: &Container, sandbox: Option<&PodSandbox>) -> String {
    let directory = sandbox.map(|s| s.spec.log_directory.as_str()).unwrap_or_default();
    if !container.status.log_path.is_empty() || directory.is_empty() || container.spec.log_path.is_empty() {
        return container.status.log_path.clone();
    }
    Path::new(directory)
        .join(&container.spec.log_path)
        .display()
        .to_string()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use state::Object;
    use state::container::{ContainerStatus, ContainerUser};
    use state::sandbox::SandboxStatus;
    use std::collections::BTreeMap;

    pub(crate) fn sandbox(spoil: fn(&mut v1::PodSandboxConfig)) -> PodSandbox {
        let mut config = crate::translate::sandbox::tests::full();
        spoil(&mut config);
        let new = crate::translate::sandbox::new(&config, "").unwrap();
        crate::translate::sandbox::tests::object(new, SandboxStatus::default())
    }

    /// Every field that a caller may set, set.
    pub(crate) fn full() -> v1::ContainerConfig {
        let map = |key: &str| BTreeMap::from([(key.to_owned(), "v".to_owned())]);
        let mapping = v1::IdMapping {
            host_id: 1,
            container_id: 0,
            length: 9,
        };
        v1::ContainerConfig {
            metadata: Some(v1::ContainerMetadata {
                name: "app".into(),
                attempt: 2,
            }),
            image: Some(v1::ImageSpec {
                image: "localhost/hello".into(),
                annotations: map("i"),
                user_specified_image: "hello".into(),
                runtime_handler: "own".into(),
                image_ref: String::new(),
            }),
            command: vec!["/hello".into()],
            args: vec!["sleep".into(), "9".into()],
            working_dir: "/tmp".into(),
            envs: vec![v1::KeyValue {
                key: "A".into(),
                value: "b=ä".into(),
            }],
            mounts: vec![
                v1::Mount {
                    container_path: "/data".into(),
                    host_path: "/srv".into(),
                    readonly: true,
                    selinux_relabel: true,
                    uid_mappings: vec![mapping],
                    gid_mappings: vec![mapping],
                    recursive_read_only: true,
                    mount_options: vec!["noexec".into()],
                    ..v1::Mount::default()
                },
                v1::Mount {
                    container_path: "/peer".into(),
                    host_path: "/mnt".into(),
                    propagation: v1::MountPropagation::PropagationBidirectional.into(),
                    ..v1::Mount::default()
                },
            ],
            devices: vec![v1::Device {
                container_path: "/dev/x".into(),
                host_path: "/dev/null".into(),
                permissions: "rw".into(),
            }],
            labels: map("l"),
            annotations: map("a"),
            log_path: "app/2.log".into(),
            stdin: true,
            stdin_once: true,
            tty: true,
            linux: Some(v1::LinuxContainerConfig {
                resources: Some(v1::LinuxContainerResources {
                    cpu_shares: 4,
                    ..v1::LinuxContainerResources::default()
                }),
                security_context: Some(v1::LinuxContainerSecurityContext {
                    capabilities: Some(v1::Capability {
                        add_capabilities: vec!["net_admin".into()],
                        drop_capabilities: vec!["ALL".into()],
                        add_ambient_capabilities: vec![],
                    }),
                    run_as_user: Some(v1::Int64Value { value: 5 }),
                    run_as_group: Some(v1::Int64Value { value: 6 }),
                    masked_paths: vec!["/proc/kcore".into()],
                    ..v1::LinuxContainerSecurityContext::default()
                }),
            }),
            windows: None,
            cdi_devices: vec![v1::CdiDevice { name: "v/c=d".into() }],
            stop_signal: v1::Signal::Sigint.into(),
        }
    }

    #[test]
    fn status_returns_what_was_asked() {
        let (config, sandbox) = (full(), sandbox(|_| {}));
        let new = new(&config, &sandbox).unwrap();
        assert_eq!(new.meta.name, "app_web_d_u1_2");
        assert_eq!(new.meta.owner.as_ref().unwrap().uid, sandbox.meta.uid);
        let mut spec = new.spec;
        spec.image.id = "sha256:1".into();
        let run = ContainerStatus {
            phase: ContainerPhase::Running,
            started_at: 8,
            user: Some(ContainerUser {
                uid: 5,
                gid: 6,
                groups: vec![6, 7],
            }),
            ..ContainerStatus::default()
        };
        let container = Object::new(new.meta, spec, run);
        let names = ImageNames {
            tag: Some("localhost/hello:latest".into()),
            digest: None,
        };
        let answer = status(&container, &names, Some(&sandbox));
        assert_eq!(answer.metadata, config.metadata);
        assert_eq!(
            (&answer.labels, &answer.annotations),
            (&config.labels, &config.annotations)
        );
        assert_eq!(answer.mounts, config.mounts);
        assert_eq!(answer.image.as_ref().unwrap().image, "localhost/hello:latest");
        assert_eq!(
            (answer.image_ref.as_str(), answer.image_id.as_str()),
            ("sha256:1", "sha256:1")
        );
        assert_eq!(answer.log_path, "/var/log/pods/d_web_u1/app/2.log");
        assert_eq!(
            answer.resources.as_ref().unwrap().linux,
            config.linux.unwrap().resources
        );
        assert_eq!(answer.stop_signal(), v1::Signal::Sigint);
        assert_eq!(
            answer
                .user
                .as_ref()
                .unwrap()
                .linux
                .as_ref()
                .unwrap()
                .supplemental_groups,
            [6, 7]
        );
        let item = item(&container, &names);
        assert_eq!(item.image.unwrap().image, config.image.unwrap().image);
        assert_eq!(item.image_id, "sha256:1");
    }

    #[test]
    fn default_stop_signal_is_term() {
        let (mut config, sandbox) = (full(), sandbox(|_| {}));
        config.stop_signal = 0;
        let new = new(&config, &sandbox).unwrap();
        let container = Object::new(new.meta, new.spec, ContainerStatus::default());
        let answer = status(&container, &ImageNames::default(), None);
        assert_eq!(answer.stop_signal(), v1::Signal::Sigterm);
    }

    type Spoiler = (fn(&mut v1::ContainerConfig), &'static str);

    const SPOILERS: [Spoiler; 29] = [
        (|c| c.metadata = None, "config.metadata: "),
        (|c| c.metadata.as_mut().unwrap().name.clear(), "config.metadata.name: "),
        (|c| c.image = None, "config.image: "),
        (|c| c.image.as_mut().unwrap().image.clear(), "config.image.image: "),
        (
            |c| c.windows = Some(v1::WindowsContainerConfig::default()),
            "config.windows: ",
        ),
        (|c| c.log_path = "../x".into(), "config.log_path: "),
        (|c| c.log_path = "/x".into(), "config.log_path: "),
        (|c| c.command[0] = "a\0b".into(), "config.command[0]: "),
        (|c| c.args[1] = "\0".into(), "config.args[1]: "),
        (|c| c.working_dir = "\0".into(), "config.working_dir: "),
        (|c| c.envs[0].key = "A=B".into(), "config.envs[0].key: "),
        (|c| c.envs[0].value = vec![0xff], "config.envs[0].value: "),
        (|c| c.envs[0].value = vec![0], "config.envs[0].value: "),
        (
            |c| c.mounts[1].container_path = "peer".into(),
            "config.mounts[1].container_path: ",
        ),
        (|c| c.mounts[1].host_path.clear(), "config.mounts[1].host_path: "),
        (|c| c.mounts[1].propagation = 7, "config.mounts[1].propagation: "),
        (
            |c| c.mounts[1].recursive_read_only = true,
            "config.mounts[1].recursive_read_only: ",
        ),
        (|c| c.mounts[1].image = hello(), "config.mounts[1].host_path: "),
        (
            |c| (c.mounts[1].image, c.mounts[1].host_path) = (hello(), "".into()),
            "config.mounts[1].readonly: ",
        ),
        (
            |c| c.mounts[0].image_sub_path = "x".into(),
            "config.mounts[0].image_sub_path: ",
        ),
        (
            |c| c.devices[0].permissions = "rx".into(),
            "config.devices[0].permissions: ",
        ),
        (|c| c.devices[0].host_path.clear(), "config.devices[0].host_path: "),
        (|c| c.stop_signal = 99, "config.stop_signal: "),
        (
            |c| context(c).privileged = true,
            "config.linux.security_context.privileged: ",
        ),
        (
            |c| context(c).run_as_user = None,
            "config.linux.security_context.run_as_group: ",
        ),
        (
            |c| context(c).masked_paths[0] = "x".into(),
            "config.linux.security_context.masked_paths[0]: ",
        ),
        (
            |c| context(c).capabilities.as_mut().unwrap().add_capabilities[0] = "a b".into(),
            "config.linux.security_context.capabilities.add_capabilities[0]: ",
        ),
        (
            |c| context(c).namespace_options = Some(mapped()),
            "config.linux.security_context.namespace_options.userns_options: ",
        ),
        (
            |c| context(c).supplemental_groups_policy = 2,
            "config.linux.security_context.supplemental_groups_policy: ",
        ),
    ];

    fn context(config: &mut v1::ContainerConfig) -> &mut v1::LinuxContainerSecurityContext {
        config.linux.as_mut().unwrap().security_context.as_mut().unwrap()
    }
    fn hello() -> Option<v1::ImageSpec> {
        full().image
    }
    fn mapped() -> v1::NamespaceOption {
        let all = vec![v1::IdMapping {
            host_id: 1000,
            container_id: 0,
            length: 10,
        }];
        v1::NamespaceOption {
            userns_options: Some(v1::UserNamespace {
                mode: v1::NamespaceMode::Pod.into(),
                uids: all.clone(),
                gids: all,
            }),
            ..v1::NamespaceOption::default()
        }
    }

    #[test]
    fn bad_requests_name_their_field() {
        for (spoil, start) in SPOILERS {
            let mut config = full();
            spoil(&mut config);
            let error = new(&config, &sandbox(|_| {})).unwrap_err();
            assert!(
                error.to_string().starts_with(start),
                "{error} does not start with {start}"
            );
            assert_eq!(error.code(), tonic::Code::InvalidArgument);
        }
    }
}
