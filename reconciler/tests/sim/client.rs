//! A client as the kubelet is one: it does a list of calls, one after the other, and comes again when one fails.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use cri::records::v1::{ApplyRequest, DeleteRequest, Document, records_server::Records};
use cri::runtime::v1::{self, image_service_server::ImageService, runtime_service_server::RuntimeService};
use serde_json::json;
use state::container::{ContainerKind, ContainerPhase};
use state::pod::{PodKind, PodPhase};
use state::sandbox::SandboxKind;
use tonic::{Code, Request, Status};

use super::daemon::Daemon;
use super::node::LOGS;

/// One call, or a wait.
#[derive(Clone, Debug)]
pub enum Op {
    Pull(&'static str),
    RemoveImage(&'static str),
    Run(&'static str),
    /// Pod, container, what its program does.
    Create(&'static str, &'static str, &'static [&'static str]),
    Start(&'static str),
    AwaitExit(&'static str),
    /// Container and grace in seconds.
    Stop(&'static str, i64),
    Remove(&'static str),
    /// Container and bytes of memory.
    Update(&'static str, i64),
    StopPod(&'static str),
    RemovePod(&'static str),
    /// Two of the same at once.
    Twice(Box<Op>),
    /// The caller leaves after so many ms.
    Cancelled(Box<Op>, u64),
    /// A declared pod: name, what its program does, restart policy.
    Apply(&'static str, &'static [&'static str], &'static str),
    /// Until it runs, or (`false`) has ended.
    AwaitDeclared(&'static str, bool),
    DeleteDeclared(&'static str),
    /// A pod with a user namespace of its own.
    RunUser(&'static str),
    /// Runs something in a container that takes so many ms; what comes of it depends.
    Exec(&'static str, u64),
    /// Opens a container's log anew.
    Reopen(&'static str),
    /// Pod and container: somebody renames the log, or (`false`) removes it.
    LoseLog(&'static str, &'static str, bool),
    /// The disk is full from here on, or (`false`) has room again.
    Fill(bool),
    /// What may be refused, and if so is not asked for again.
    Refused(Box<Op>),
    Sleep(u64),
}

pub const APP: &str = "registry.sim/app:1";

/// What a client knows, whatever happens to the daemon.
#[derive(Debug, Default)]
pub struct Client {
    pub pods: BTreeMap<&'static str, String>,
    pub containers: BTreeMap<&'static str, String>,
    /// Ids that were answered and whose removal was not asked for.
    pub promised: BTreeSet<String>,
    /// Pods with a user namespace.
    users: BTreeSet<&'static str>,
}

fn pod_config(name: &str) -> v1::PodSandboxConfig {
    v1::PodSandboxConfig {
        metadata: Some(v1::PodSandboxMetadata {
            name: name.to_owned(),
            uid: format!("uid-of-{name}"),
            namespace: "sim".to_owned(),
            attempt: 0,
        }),
        hostname: name.to_owned(),
        log_directory: format!("{LOGS}/{name}"),
        linux: Some(v1::LinuxPodSandboxConfig::default()),
        ..v1::PodSandboxConfig::default()
    }
}

/// What a pod with a user namespace asks for, and each of its containers too.
fn users() -> v1::NamespaceOption {
    let map = v1::IdMapping {
        host_id: 100_000,
        container_id: 0,
        length: 65_536,
    };
    let users = v1::UserNamespace {
        mode: v1::NamespaceMode::Pod as i32,
        uids: vec![map],
        gids: vec![map],
    };
    v1::NamespaceOption {
        userns_options: Some(users),
        ..v1::NamespaceOption::default()
    }
}

/// The same with a user namespace.
fn with_users(mut config: v1::PodSandboxConfig) -> v1::PodSandboxConfig {
    let security = v1::LinuxSandboxSecurityContext {
        namespace_options: Some(users()),
        ..v1::LinuxSandboxSecurityContext::default()
    };
    config.linux.get_or_insert_default().security_context = Some(security);
    config
}

fn container_config(name: &str, args: &[&str]) -> v1::ContainerConfig {
    let unconfined = v1::SecurityProfile {
        profile_type: v1::security_profile::ProfileType::Unconfined as i32,
        ..v1::SecurityProfile::default()
    };
    v1::ContainerConfig {
        metadata: Some(v1::ContainerMetadata {
            name: name.to_owned(),
            attempt: 0,
        }),
        image: Some(v1::ImageSpec {
            image: APP.to_owned(),
            ..v1::ImageSpec::default()
        }),
        command: args.iter().map(|arg| (*arg).to_owned()).collect(),
        log_path: format!("{name}.log"),
        linux: Some(v1::LinuxContainerConfig {
            resources: Some(v1::LinuxContainerResources {
                memory_limit_in_bytes: 64 << 20,
                ..v1::LinuxContainerResources::default()
            }),
            security_context: Some(v1::LinuxContainerSecurityContext {
                apparmor: Some(unconfined),
                ..v1::LinuxContainerSecurityContext::default()
            }),
        }),
        ..v1::ContainerConfig::default()
    }
}

impl Client {
    /// Makes one call. `Ok` is also what a client takes for done: what it asked for is so, or cannot be any more.
    pub async fn call(&mut self, daemon: &Daemon, op: &Op) -> Result<(), Status> {
        match op {
            Op::Cancelled(op, ms) => {
                let _ = tokio::time::timeout(Duration::from_millis(*ms), Box::pin(self.call(daemon, op))).await;
                Ok(())
            }
            Op::Twice(op) => {
                let mut other = Client {
                    pods: self.pods.clone(),
                    containers: self.containers.clone(),
                    promised: BTreeSet::new(),
                    users: self.users.clone(),
                };
                let (first, second) = tokio::join!(Box::pin(self.call(daemon, op)), Box::pin(other.call(daemon, op)));
                self.promised.append(&mut other.promised);
                if first.is_err() {
                    self.pods.append(&mut other.pods);
                    self.containers.append(&mut other.containers);
                    return second;
                }
                Ok(())
            }
            Op::Refused(op) => {
                let known = self.promised.clone();
                if Box::pin(self.call(daemon, op)).await.is_err() {
                    self.promised = known;
                }
                Ok(())
            }
            Op::LoseLog(pod, name, renamed) => {
                let log = Path::new(LOGS).join(pod).join(format!("{name}.log"));
                let mut node = daemon.sim.lock();
                match renamed {
                    true => node.fs.rename(&log, &log.with_extension("1")),
                    false => node.fs.unlink(&log),
                }
                Ok(())
            }
            Op::Fill(full) => {
                let mut node = daemon.sim.lock();
                node.full = *full;
                node.trace.push(format!("---- disk full: {full}"));
                Ok(())
            }
            _ => self.simple(daemon, op).await,
        }
    }

    async fn simple(&mut self, daemon: &Daemon, op: &Op) -> Result<(), Status> {
        let services = &daemon.services;
        match op {
            Op::Run(pod) | Op::RunUser(pod) => {
                let mut config = pod_config(pod);
                if matches!(op, Op::RunUser(_)) {
                    config = with_users(config);
                    self.users.insert(pod);
                }
                let request = v1::RunPodSandboxRequest {
                    config: Some(config),
                    ..v1::RunPodSandboxRequest::default()
                };
                let uid = match services.run_pod_sandbox(Request::new(request)).await {
                    Ok(answer) => answer.into_inner().pod_sandbox_id,
                    Err(e) if e.code() == Code::AlreadyExists => match self.find_pod(daemon, pod) {
                        Some(uid) => uid,
                        None => return Err(e),
                    },
                    Err(e) => return Err(e),
                };
                self.promised.insert(uid.clone());
                self.pods.insert(pod, uid);
                Ok(())
            }
            Op::Create(pod, name, args) => self.create(daemon, pod, name, args).await,
            Op::Start(name) => self.start(daemon, name).await,
            Op::AwaitExit(name) => {
                let Some(uid) = self.containers.get(name) else {
                    return Ok(());
                };
                let deadline = tokio::time::Instant::now().into_std() + Duration::from_secs(600);
                let ended = daemon.store.wait::<ContainerKind, _, _>(uid, Some(deadline), |now| {
                    let never = |phase| !matches!(phase, ContainerPhase::Running | ContainerPhase::Unknown);
                    now.is_none_or(|now| never(now.status.phase)).then_some(())
                });
                ended.await.map_err(|e| Status::deadline_exceeded(e.to_string()))
            }
            Op::Stop(name, grace) => {
                let Some(uid) = self.containers.get(name).cloned() else {
                    return Ok(());
                };
                let request = v1::StopContainerRequest {
                    container_id: uid,
                    timeout: *grace,
                };
                services.stop_container(Request::new(request)).await.map(drop)
            }
            Op::Remove(name) => {
                let Some(uid) = self.containers.get(name).cloned() else {
                    return Ok(());
                };
                self.promised.remove(&uid);
                let request = v1::RemoveContainerRequest { container_id: uid };
                services.remove_container(Request::new(request)).await.map(drop)
            }
            Op::Update(name, bytes) => {
                let Some(uid) = self.containers.get(name).cloned() else {
                    return Ok(());
                };
                let request = v1::UpdateContainerResourcesRequest {
                    container_id: uid,
                    linux: Some(v1::LinuxContainerResources {
                        memory_limit_in_bytes: *bytes,
                        ..v1::LinuxContainerResources::default()
                    }),
                    ..v1::UpdateContainerResourcesRequest::default()
                };
                over(
                    services
                        .update_container_resources(Request::new(request))
                        .await
                        .map(drop),
                )
            }
            Op::Exec(name, ms) => {
                let Some(uid) = self.containers.get(name).cloned() else {
                    return Ok(());
                };
                let request = v1::ExecSyncRequest {
                    container_id: uid,
                    cmd: vec!["work".to_owned(), ms.to_string()],
                    timeout: 2,
                };
                // It is at most once: nobody asks again.
                let _ = services.exec_sync(Request::new(request)).await;
                Ok(())
            }
            Op::Reopen(name) => {
                let Some(uid) = self.containers.get(name).cloned() else {
                    return Ok(());
                };
                let request = v1::ReopenContainerLogRequest { container_id: uid };
                over(services.reopen_container_log(Request::new(request)).await.map(drop))
            }
            Op::StopPod(pod) => {
                let Some(uid) = self.pods.get(pod).cloned() else {
                    return Ok(());
                };
                let request = v1::StopPodSandboxRequest { pod_sandbox_id: uid };
                services.stop_pod_sandbox(Request::new(request)).await.map(drop)
            }
            Op::RemovePod(pod) => {
                let Some(uid) = self.pods.get(pod).cloned() else {
                    return Ok(());
                };
                self.promised.remove(&uid);
                for container in daemon.store.owned::<ContainerKind>(&uid) {
                    self.promised.remove(container.uid());
                }
                self.promised
                    .retain(|uid| !self.containers.values().any(|own| own == uid));
                let request = v1::RemovePodSandboxRequest { pod_sandbox_id: uid };
                services.remove_pod_sandbox(Request::new(request)).await.map(drop)
            }
            _ => self.records(daemon, op).await,
        }
    }

    async fn records(&mut self, daemon: &Daemon, op: &Op) -> Result<(), Status> {
        let services = &daemon.services;
        match op {
            Op::Pull(image) => {
                let image = Some(v1::ImageSpec {
                    image: (*image).to_owned(),
                    ..v1::ImageSpec::default()
                });
                let request = v1::PullImageRequest {
                    image,
                    ..v1::PullImageRequest::default()
                };
                services.pull_image(Request::new(request)).await.map(drop)
            }
            Op::RemoveImage(image) => {
                let image = Some(v1::ImageSpec {
                    image: (*image).to_owned(),
                    ..v1::ImageSpec::default()
                });
                services
                    .remove_image(Request::new(v1::RemoveImageRequest { image }))
                    .await
                    .map(drop)
            }
            Op::Apply(name, args, restart) => {
                let pod = json!({
                    "apiVersion": "reconcile/v1", "kind": "Pod",
                    "metadata": { "name": name, "namespace": "sim" },
                    "spec": {
                        "restartPolicy": restart, "terminationGracePeriodSeconds": 5,
                        "containers": [{
                            "name": "main", "image": APP, "command": args,
                            "security": { "apparmor": { "type": "Unconfined" } },
                        }],
                    },
                });
                let request = ApplyRequest {
                    documents: vec![Document {
                        kind: "Pod".to_owned(),
                        json: pod.to_string().into_bytes(),
                    }],
                    dry_run: false,
                };
                services.apply(Request::new(request)).await.map(drop)
            }
            Op::AwaitDeclared(name, runs) => {
                let Some(pod) = daemon.store.by_name::<PodKind>(&format!("sim/{name}")) else {
                    return Err(Status::not_found(format!("pod {name}")));
                };
                let deadline = tokio::time::Instant::now().into_std() + Duration::from_secs(1200);
                let reached = daemon.store.wait::<PodKind, _, _>(pod.uid(), Some(deadline), |now| {
                    now.is_none_or(|now| match now.status.phase {
                        PodPhase::Running => *runs,
                        PodPhase::Succeeded | PodPhase::Failed => !runs,
                        _ => false,
                    })
                    .then_some(())
                });
                reached.await.map_err(|e| Status::deadline_exceeded(e.to_string()))
            }
            Op::DeleteDeclared(name) => {
                let request = DeleteRequest {
                    kind: "Pod".to_owned(),
                    name: (*name).to_owned(),
                    namespace: "sim".to_owned(),
                    wait: true,
                    ..DeleteRequest::default()
                };
                Records::delete(services, Request::new(request)).await.map(drop)
            }
            Op::Sleep(ms) => {
                tokio::time::sleep(Duration::from_millis(*ms)).await;
                Ok(())
            }
            other => unreachable!("{other:?}"),
        }
    }

    async fn create(&mut self, daemon: &Daemon, pod: &str, name: &'static str, args: &[&str]) -> Result<(), Status> {
        let Some(sandbox) = self.pods.get(pod).cloned() else {
            return Ok(());
        };
        let mut config = container_config(name, args);
        if self.users.contains(pod) {
            let linux = config.linux.get_or_insert_default();
            linux.security_context.get_or_insert_default().namespace_options = Some(users());
        }
        let request = v1::CreateContainerRequest {
            pod_sandbox_id: sandbox.clone(),
            config: Some(config),
            sandbox_config: Some(match self.users.contains(pod) {
                true => with_users(pod_config(pod)),
                false => pod_config(pod),
            }),
        };
        let uid = match daemon.services.create_container(Request::new(request)).await {
            Ok(answer) => answer.into_inner().container_id,
            Err(e) if e.code() == Code::AlreadyExists => {
                let all = daemon.store.owned::<ContainerKind>(&sandbox);
                match all.iter().find(|c| c.spec.name == name && !c.meta.deleted()) {
                    Some(container) => container.uid().to_owned(),
                    None => return Err(e),
                }
            }
            Err(e) => return over(Err(e)),
        };
        self.promised.insert(uid.clone());
        self.containers.insert(name, uid);
        Ok(())
    }

    async fn start(&mut self, daemon: &Daemon, name: &str) -> Result<(), Status> {
        let Some(uid) = self.containers.get(name).cloned() else {
            return Ok(());
        };
        let request = v1::StartContainerRequest {
            container_id: uid.clone(),
        };
        let started = daemon.services.start_container(Request::new(request)).await.map(drop);
        // It ended before it began: the kubelet makes another attempt, this one has had its turn.
        let ended = daemon
            .store
            .get::<ContainerKind>(&uid)
            .is_some_and(|c| c.status.phase == ContainerPhase::Exited);
        if ended { Ok(()) } else { over(started) }
    }

    fn find_pod(&self, daemon: &Daemon, pod: &str) -> Option<String> {
        let all = daemon.store.list::<SandboxKind>();
        let found = all
            .iter()
            .find(|s| s.spec.pod.name == pod && s.meta.owner.is_none() && !s.meta.deleted());
        found.map(|sandbox| sandbox.uid().to_owned())
    }
}

/// What cannot be any more is done with.
fn over(answer: Result<(), Status>) -> Result<(), Status> {
    match answer {
        Err(e) if matches!(e.code(), Code::FailedPrecondition | Code::NotFound) => Ok(()),
        other => other,
    }
}
