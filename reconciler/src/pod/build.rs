//! The records of a pod's children, from its spec.

use std::sync::Arc;

use state::container::{ContainerGoal, ContainerImage, ContainerSpec, Mount, Resources};
use state::image::{ImageKind, ImagePhase};
use state::pod::PodContainer;
use state::sandbox::{NamespaceMode, Namespaces, PodRef, PortMapping, SandboxKind, SandboxSpec, UserNamespace};
use state::{Image, Kind, Meta, Owner, Pod, PodSandbox, Reference};

use super::volumes;
use crate::engine::Context;
use crate::error::{Error, Result};
use crate::world::Paths;

fn namespaces(pod: &Pod, user: Option<UserNamespace>) -> Namespaces {
    let mode = |host: bool| if host { NamespaceMode::Node } else { NamespaceMode::Pod };
    let pid = match (pod.spec.host_pid, pod.spec.share_process_namespace) {
        (true, _) => NamespaceMode::Node,
        (false, true) => NamespaceMode::Pod,
        (false, false) => NamespaceMode::Container,
    };
    Namespaces {
        network: mode(pod.spec.host_network),
        ipc: mode(pod.spec.host_ipc),
        pid,
        user,
        ..Namespaces::default()
    }
}

/// Annotation of a pod's sandbox: the pod's generation that it was made from. A changed pod is made anew.
pub const GENERATION: &str = "reconcile/pod-generation";

/// Was the sandbox made from the pod as it is now?
pub fn is_current(pod: &Pod, sandbox: &PodSandbox) -> bool {
    sandbox
        .meta
        .annotations
        .get(GENERATION)
        .is_none_or(|made| *made == pod.meta.generation.to_string())
}

/// `user` is the pod's own user namespace, if it wants one.
pub fn sandbox(paths: &Paths, pod: &Pod, attempt: u32, user: Option<UserNamespace>) -> (Meta, SandboxSpec) {
    let mut meta = Meta {
        name: format!("{}_{}_{}_{attempt}", pod.meta.name, pod.meta.namespace, pod.uid()),
        namespace: pod.meta.namespace.clone(),
        owner: Some(Owner {
            kind: state::pod::PodKind::KIND.to_owned(),
            uid: pod.uid().to_owned(),
        }),
        labels: pod.meta.labels.clone(),
        annotations: pod.meta.annotations.clone(),
        ..Meta::default()
    };
    meta.annotations
        .insert(GENERATION.to_owned(), pod.meta.generation.to_string());
    let hostname = if pod.spec.hostname.is_empty() {
        &pod.meta.name
    } else {
        &pod.spec.hostname
    };
    let containers = pod.spec.init_containers.iter().chain(&pod.spec.containers);
    let ports = containers.flat_map(|c| &c.ports).map(|port| PortMapping {
        protocol: port.protocol,
        container_port: port.container_port,
        host_port: port.host_port,
        host_ip: port.host_ip.clone(),
    });
    let any_privileged = pod
        .spec
        .init_containers
        .iter()
        .chain(&pod.spec.containers)
        .any(|c| c.security.privileged);
    let spec = SandboxSpec {
        pod: PodRef {
            name: pod.meta.name.clone(),
            namespace: pod.meta.namespace.clone(),
            uid: pod.uid().to_owned(),
            attempt,
        },
        hostname: if pod.spec.host_network {
            String::new()
        } else {
            hostname.clone()
        },
        log_directory: super::dir(paths, pod).join("logs").display().to_string(),
        runtime_handler: pod.spec.runtime_class_name.clone(),
        dns: pod.spec.dns.clone(),
        ports: if pod.spec.host_network {
            Vec::new()
        } else {
            ports.collect()
        },
        sysctls: pod.spec.sysctls.clone(),
        namespaces: namespaces(pod, user),
        security: state::sandbox::SandboxSecurity {
            privileged: any_privileged,
            ..Default::default()
        },
        ..SandboxSpec::default()
    };
    (meta, spec)
}

/// The image's id; that it is here was seen when this container was decided on.
fn image(cx: &Context, text: &str) -> Result<String> {
    let name = Reference::parse(text, "image")?.to_string();
    let ready = |image: &Arc<Image>| image.status.phase == ImagePhase::Ready;
    match cx.store.by_name::<ImageKind>(&name).filter(ready) {
        Some(image) => Ok(image.status.id.clone()),
        None => Err(Error::Pending(format!("image {name} is not ready any more"))),
    }
}

pub fn container(
    cx: &Context,
    pod: &Pod,
    sandbox: &PodSandbox,
    name: &str,
    attempt: u32,
) -> Result<(Meta, ContainerSpec)> {
    let all = pod.spec.init_containers.iter().chain(&pod.spec.containers);
    let wish = all.into_iter().find(|c| c.name == name);
    let wish = wish.ok_or_else(|| Error::Refused(format!("container {name} is not in the pod's spec")))?;
    let meta = Meta {
        name: format!(
            "{name}_{}_{}_{}_{attempt}",
            pod.meta.name,
            pod.meta.namespace,
            sandbox.uid()
        ),
        namespace: pod.meta.namespace.clone(),
        owner: Some(Owner {
            kind: SandboxKind::KIND.to_owned(),
            uid: sandbox.uid().to_owned(),
        }),
        labels: pod.meta.labels.clone(),
        ..Meta::default()
    };
    let mut security = wish.security.clone();
    security.namespaces = namespaces(pod, sandbox.spec.namespaces.user.clone());
    let spec = ContainerSpec {
        goal: ContainerGoal::Running,
        sandbox: sandbox.uid().to_owned(),
        name: name.to_owned(),
        attempt,
        image: ContainerImage {
            requested: wish.image.clone(),
            id: image(cx, &wish.image)?,
            ..Default::default()
        },
        command: wish.command.clone(),
        args: wish.args.clone(),
        working_dir: wish.working_dir.clone(),
        env: wish.env.clone(),
        mounts: mounts(&cx.world.paths, pod, sandbox, wish)?,
        log_path: match pod.meta.generation {
            1 => format!("{name}/{attempt}.log"),
            changed => format!("{name}/{changed}-{attempt}.log"),
        },
        stdin: wish.stdin,
        stdin_once: wish.stdin_once,
        tty: wish.tty,
        resources: Resources {
            ..wish.resources.clone()
        },
        security,
        stop_signal: wish.stop_signal.clone(),
        grace_seconds: pod.spec.termination_grace_period_seconds,
        ..ContainerSpec::default()
    };
    Ok((meta, spec))
}

/// Volumes keep their owners: those of the pod's user namespace are shown as if there was none.
fn mounts(paths: &Paths, pod: &Pod, sandbox: &PodSandbox, wish: &PodContainer) -> Result<Vec<Mount>> {
    let user = crate::sandbox::user_namespace(&sandbox.spec);
    let mount = |mount: &state::pod::VolumeMount| {
        let volume = pod.spec.volumes.iter().find(|v| v.name == mount.name);
        let volume =
            volume.ok_or_else(|| Error::Refused(format!("volumeMounts: no volume is named {}", mount.name)))?;
        let mut host = volumes::path(paths, pod, volume);
        if !mount.sub_path.is_empty() {
            host.push(&mount.sub_path);
        }
        Ok(Mount {
            container_path: mount.mount_path.clone(),
            host_path: host.display().to_string(),
            readonly: mount.read_only,
            uid_mappings: user.map(|user| user.uids.clone()).unwrap_or_default(),
            gid_mappings: user.map(|user| user.gids.clone()).unwrap_or_default(),
            ..Mount::default()
        })
    };
    wish.volume_mounts.iter().map(mount).collect()
}
