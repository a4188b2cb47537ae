//! The world of the tests: server, clients, and the stand-in.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cri::runtime::v1::{self, image_service_client::ImageServiceClient, runtime_service_client::RuntimeServiceClient};
use cri::{Config, Services};
use state::container::{ContainerGoal, ContainerKind, ContainerPhase, ContainerStatus};
use state::image::{ImageKind, ImagePhase, ImageSource, ImageSpec, ImageStatus};
use state::node::{LOCAL, NodeKind, NodeSpec, NodeStatus};
use state::pull::{PullFailure, PullKind, PullOutcome, PullStatus};
use state::sandbox::{SandboxGoal, SandboxKind, SandboxPhase, SandboxStatus};
use state::session::{Outcome, SessionKind, SessionStatus, Wish};
use state::store::{Copies, Event};
use state::{Condition, Container, Meta, New, PodSandbox, Put, Session, Store, Truth};
use tokio::net::UnixStream;
use tokio::sync::{Notify, watch};
use tonic::transport::{Channel, Endpoint, Uri};

/// Image id of `localhost/hello`.
pub const HELLO: &str = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";

pub struct World {
    pub store: Store,
    pub runtime: RuntimeServiceClient<Channel>,
    pub images: ImageServiceClient<Channel>,
    pub records: cri::records::v1::records_client::RecordsClient<Channel>,
    /// Lets sandboxes named `gated` become ready.
    pub gate: Arc<Notify>,
    pub closing: watch::Sender<bool>,
    pub served: tokio::task::JoinHandle<()>,
    _dir: tempfile::TempDir,
}

pub async fn world() -> World {
    let world = unready().await;
    set_node(&world.store, Truth::True).await;
    world
}

/// Like [`world`], before the first look at the node.
pub async fn unready() -> World {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    std::fs::create_dir(&root).unwrap();
    let copies = Copies {
        all: Box::new(Vec::new),
        one: Box::new(|_, _| None),
    };
    let (store, _) = Store::open(&root, copies).unwrap();
    let gate = Arc::new(Notify::new());
    tokio::spawn(sandboxes(store.clone(), gate.clone()));
    tokio::spawn(containers(store.clone()));
    tokio::spawn(sessions(store.clone()));
    tokio::spawn(images(store.clone()));
    tokio::spawn(pulls(store.clone()));
    let (closing, receiver) = watch::channel(false);
    let config = Config {
        told: Arc::new(std::sync::RwLock::new(cri::Told {
            sandbox_image: "localhost/pause".into(),
            handlers: vec![cri::Handler {
                name: "own".into(),
                recursive_read_only: true,
                user_namespaces: false,
            }],
            ..cri::Told::default()
        })),
        ..Config::default()
    };
    let services = Services::new(store.clone(), config, receiver);
    let path = dir.path().join("api.sock");
    let listener = cri::bind(&path).unwrap();
    let serving = services.clone();
    let served = tokio::spawn(async move { cri::serve(listener, serving).await.unwrap() });
    let channel = Endpoint::from_static("http://localhost")
        .connect_with_connector(tower::service_fn(move |_: Uri| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(hyper_util::rt::TokioIo::new) }
        }))
        .await
        .unwrap();
    World {
        store,
        runtime: RuntimeServiceClient::new(channel.clone()).max_encoding_message_size(64 << 20),
        images: ImageServiceClient::new(channel.clone()),
        records: cri::records::v1::records_client::RecordsClient::new(channel),
        gate,
        closing,
        served,
        _dir: dir,
    }
}

pub async fn set_node(store: &Store, ready: Truth) {
    let meta = Meta {
        name: LOCAL.into(),
        ..Meta::default()
    };
    let node = match store.by_name::<NodeKind>(LOCAL) {
        Some(node) => node,
        None => {
            let (Put::Created(node) | Put::Joined(node)) = store
                .create(New::<NodeKind> {
                    meta,
                    spec: NodeSpec::default(),
                })
                .await
                .unwrap();
            node
        }
    };
    let status = NodeStatus {
        conditions: vec![
            condition("Ready", ready, ""),
            condition("NetworkReady", Truth::True, ""),
        ],
        state: "/run/x".into(),
        image_store: "/var/lib/x".into(),
        image_bytes: 5,
        ..NodeStatus::default()
    };
    store.set_status::<NodeKind>(node.uid(), status);
}

pub fn condition(stage: &str, status: Truth, message: &str) -> Condition {
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    Condition {
        stage: stage.into(),
        status,
        reason: String::new(),
        message: message.into(),
        permanent: false,
        since: now.as_nanos() as i64,
    }
}

async fn sandboxes(store: Store, gate: Arc<Notify>) {
    let mut changes = store.watch::<SandboxKind>();
    while let Some(change) = changes.recv().await {
        let Event::Applied(sandbox) = change else { continue };
        if sandbox.status.observed_generation >= sandbox.meta.generation && !sandbox.meta.deleted() {
            continue;
        }
        if sandbox.meta.deleted() {
            erase_sandbox(&store, sandbox.uid()).await;
            continue;
        }
        let (store, gate) = (store.clone(), gate.clone());
        tokio::spawn(async move {
            if sandbox.spec.pod.name == "gated" {
                gate.notified().await;
                gate.notify_one();
            }
            store.set_status::<SandboxKind>(sandbox.uid(), sandbox_status(&sandbox));
        });
    }
}

fn sandbox_status(sandbox: &PodSandbox) -> SandboxStatus {
    let mut status = SandboxStatus {
        observed_generation: sandbox.meta.generation,
        phase: SandboxPhase::Pending,
        ..SandboxStatus::default()
    };
    match (
        sandbox.spec.goal,
        sandbox.spec.pod.name.as_str(),
        sandbox.spec.hostname.as_str(),
    ) {
        (SandboxGoal::Stopped, ..) => (status.phase, status.torn_down) = (SandboxPhase::NotReady, true),
        (_, "slow", _) => {
            status.conditions = vec![
                condition("cgroup", Truth::True, ""),
                condition("network", Truth::False, "waiting for plugin x"),
            ];
        }
        (_, "bad", "") => {
            let mut network = condition("network", Truth::False, "no configuration");
            network.permanent = true;
            status.conditions = vec![network];
        }
        _ => (status.phase, status.ip) = (SandboxPhase::Ready, "192.0.2.7".into()),
    }
    status
}

async fn erase_sandbox(store: &Store, uid: &str) {
    if store.owned::<ContainerKind>(uid).is_empty() {
        store.erase::<SandboxKind>(uid).await.unwrap();
    }
}

async fn containers(store: Store) {
    let mut changes = store.watch::<ContainerKind>();
    while let Some(change) = changes.recv().await {
        let Event::Applied(container) = change else { continue };
        if container.meta.deleted() {
            store.erase::<ContainerKind>(container.uid()).await.unwrap();
            let owner = store.get::<SandboxKind>(&container.spec.sandbox);
            if owner.is_some_and(|owner| owner.meta.deleted()) {
                erase_sandbox(&store, &container.spec.sandbox).await;
            }
        } else if container.status.observed_generation < container.meta.generation {
            store.set_status::<ContainerKind>(container.uid(), container_status(&container));
        }
    }
}

fn container_status(container: &Container) -> ContainerStatus {
    let mut status = ContainerStatus {
        observed_generation: container.meta.generation,
        log_epoch: container.spec.log_epoch,
        ..container.status.clone()
    };
    let refused = container.spec.resources.memory_limit == 666;
    let mut limits = condition(
        "limits",
        if refused { Truth::False } else { Truth::True },
        "refused by the kernel",
    );
    limits.permanent = refused;
    status.conditions = vec![limits];
    if status.phase == ContainerPhase::Exited {
        return status;
    }
    match (container.spec.goal, container.spec.name.as_str()) {
        (ContainerGoal::Created, _) => status.phase = ContainerPhase::Created,
        // Its process does not heed signals, until the grace is short.
        (ContainerGoal::Stopped, "stubborn") if container.spec.grace_seconds > 5 => {
            status.conditions = vec![condition("task", Truth::False, "pid 7 is in its grace")];
        }
        (ContainerGoal::Running, "nostart") => {
            (status.phase, status.exit_code, status.finished_at) = (ContainerPhase::Exited, 128, 3);
            (status.reason, status.message) = ("StartError".into(), "/x: no such file".into());
        }
        (ContainerGoal::Running, "quick") => {
            (status.phase, status.started_at, status.finished_at) = (ContainerPhase::Exited, 2, 3);
            status.reason = "Completed".into();
        }
        (ContainerGoal::Running, _) => (status.phase, status.started_at) = (ContainerPhase::Running, 2),
        (ContainerGoal::Stopped, _) => {
            (status.phase, status.exit_code, status.finished_at) = (ContainerPhase::Exited, 137, 3);
        }
    }
    status
}

async fn sessions(store: Store) {
    let mut changes = store.watch::<SessionKind>();
    while let Some(change) = changes.recv().await {
        let Event::Applied(session) = change else { continue };
        if session.meta.deleted() {
            store.erase::<SessionKind>(session.uid()).await.unwrap();
        } else if let Some(outcome) = outcome(&session).filter(|_| !session.status.claimed) {
            let status = SessionStatus {
                claimed: true,
                outcome: Some(outcome),
            };
            store.set_status::<SessionKind>(session.uid(), status);
        }
    }
}

fn outcome(session: &Session) -> Option<Outcome> {
    let word = match &session.spec.wish {
        Wish::Exec(command) => command[0].as_str(),
        Wish::Checkpoint(archive) => return checkpointed(archive),
    };
    match word {
        "late" => Some(Outcome::TimedOut),
        "dead" => Some(Outcome::NotRunning("has ended".into())),
        "hang" => None,
        word => Some(Outcome::Done {
            stdout: word.into(),
            stderr: vec![],
            exit_code: 3,
        }),
    }
}

fn checkpointed(archive: &str) -> Option<Outcome> {
    match archive {
        "/a/late" => Some(Outcome::TimedOut),
        "/a/none" => Some(Outcome::Unsupported("no CRIU".into())),
        "/a/dir" => Some(Outcome::Misplaced("is a directory".into())),
        "/a/hang" => None,
        _ => Some(Outcome::Saved),
    }
}

/// Has `localhost/hello`, and a registry that has nothing.
async fn pulls(store: Store) {
    let mut changes = store.watch::<PullKind>();
    while let Some(change) = changes.recv().await {
        let Event::Applied(pull) = change else { continue };
        if pull.meta.deleted() {
            store.erase::<PullKind>(pull.uid()).await.unwrap();
        } else if !pull.status.claimed {
            let outcome = match pull.spec.image.as_str() {
                "localhost/hello:latest" => PullOutcome::Done {
                    id: HELLO.into(),
                    digest: HELLO.into(),
                },
                "r.example/away:latest" => PullOutcome::Failed {
                    why: PullFailure::RegistryUnavailable,
                    message: "connection refused".into(),
                },
                _ => PullOutcome::Failed {
                    why: PullFailure::NotFound,
                    message: "no such manifest".into(),
                },
            };
            let status = PullStatus {
                claimed: true,
                outcome: Some(outcome),
                ..PullStatus::default()
            };
            store.set_status::<PullKind>(pull.uid(), status);
        }
    }
}

async fn images(store: Store) {
    let mut changes = store.watch::<ImageKind>();
    while let Some(change) = changes.recv().await {
        match change {
            Event::Applied(image) if image.meta.deleted() => store.erase::<ImageKind>(image.uid()).await.unwrap(),
            _ => {}
        }
    }
}

/// An image that is here, under `name`.
pub async fn import(store: &Store, name: &str, id: &str) {
    let meta = Meta {
        name: name.into(),
        ..Meta::default()
    };
    let spec = ImageSpec {
        source: ImageSource::BuiltIn,
        ..ImageSpec::default()
    };
    let (Put::Created(image) | Put::Joined(image)) = store.create(New::<ImageKind> { meta, spec }).await.unwrap();
    let status = ImageStatus {
        phase: ImagePhase::Ready,
        id: id.into(),
        size: 9,
        ..ImageStatus::default()
    };
    store.set_status::<ImageKind>(image.uid(), status);
}

pub fn pod(name: &str, attempt: u32) -> v1::PodSandboxConfig {
    v1::PodSandboxConfig {
        metadata: Some(v1::PodSandboxMetadata {
            name: name.into(),
            uid: "u1".into(),
            namespace: "d".into(),
            attempt,
        }),
        labels: [("app".to_owned(), name.to_owned())].into(),
        ..v1::PodSandboxConfig::default()
    }
}

pub fn container(name: &str) -> v1::ContainerConfig {
    v1::ContainerConfig {
        metadata: Some(v1::ContainerMetadata {
            name: name.into(),
            attempt: 0,
        }),
        image: Some(v1::ImageSpec {
            image: "localhost/hello".into(),
            ..v1::ImageSpec::default()
        }),
        ..v1::ContainerConfig::default()
    }
}

/// A request with a time limit, as clients of gRPC send it.
pub fn within<T>(limit: Duration, message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(limit);
    request
}

impl World {
    pub async fn run(&self, config: v1::PodSandboxConfig) -> Result<String, tonic::Status> {
        let request = v1::RunPodSandboxRequest {
            config: Some(config),
            runtime_handler: String::new(),
        };
        let answer = self.runtime.clone().run_pod_sandbox(request).await?;
        Ok(answer.into_inner().pod_sandbox_id)
    }

    pub async fn create(&self, pod_sandbox_id: &str, config: v1::ContainerConfig) -> Result<String, tonic::Status> {
        let request = v1::CreateContainerRequest {
            pod_sandbox_id: pod_sandbox_id.into(),
            config: Some(config),
            sandbox_config: Some(pod("any", 0)),
        };
        let answer = self.runtime.clone().create_container(request).await?;
        Ok(answer.into_inner().container_id)
    }

    pub async fn start(&self, container_id: &str) -> Result<(), tonic::Status> {
        let request = v1::StartContainerRequest {
            container_id: container_id.into(),
        };
        self.runtime.clone().start_container(request).await.map(drop)
    }

    /// A running container of a new sandbox.
    pub async fn running(&self, pod_name: &str, name: &str) -> (String, String) {
        if self.store.by_name::<ImageKind>("localhost/hello:latest").is_none() {
            import(&self.store, "localhost/hello:latest", HELLO).await;
        }
        let sandbox = self.run(pod(pod_name, 0)).await.unwrap();
        let id = self.create(&sandbox, container(name)).await.unwrap();
        self.start(&id).await.unwrap();
        (sandbox, id)
    }

    pub async fn container_status(&self, id: &str) -> Result<v1::ContainerStatus, tonic::Status> {
        let request = v1::ContainerStatusRequest {
            container_id: id.into(),
            verbose: false,
        };
        let answer = self.runtime.clone().container_status(request).await?;
        Ok(answer.into_inner().status.unwrap())
    }

    /// Waits until the store holds what `found` looks for.
    pub async fn until<T>(&self, mut found: impl FnMut(&Store) -> Option<T>) -> T {
        let give_up = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(found) = found(&self.store) {
                return found;
            }
            assert!(Instant::now() < give_up, "waited in vain");
            tokio::task::yield_now().await;
        }
    }
}
