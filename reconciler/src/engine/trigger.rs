//! Triggers: each says which object to look at again. Losing one costs time only.

use kube_runtime::controller::{ReconcileReason, ReconcileRequest};
use kube_runtime::reflector::ObjectRef;
use state::container::ContainerKind;
use state::debt::DebtKind;
use state::image::ImageKind;
use state::node::NodeKind;
use state::pod::PodKind;
use state::pull::PullKind;
use state::sandbox::SandboxKind;
use state::session::SessionKind;
use state::{Kind, Object};
use tokio::sync::mpsc;

pub type Request<K> = ReconcileRequest<Object<K>>;
pub type Receiver<K> = mpsc::UnboundedReceiver<Request<K>>;

/// The queue of one kind.
pub struct Queue<K: Kind>(mpsc::UnboundedSender<Request<K>>);

impl<K: Kind> Clone for Queue<K> {
    fn clone(&self) -> Self {
        Queue(self.0.clone())
    }
}

impl<K: Kind> Queue<K> {
    pub fn new() -> (Queue<K>, Receiver<K>) {
        let (tx, rx) = mpsc::unbounded_channel();
        (Queue(tx), rx)
    }

    /// Look at `uid` again. A closed queue means that the loop is ending.
    pub fn look(&self, uid: &str, reason: &'static str) {
        let request = ReconcileRequest {
            obj_ref: ObjectRef::new(uid),
            reason: ReconcileReason::Custom {
                reason: reason.to_owned(),
            },
        };
        let _ = self.0.send(request);
    }
}

/// The queues of all kinds.
pub struct Queues {
    pub nodes: Queue<NodeKind>,
    pub pods: Queue<PodKind>,
    pub sandboxes: Queue<SandboxKind>,
    pub containers: Queue<ContainerKind>,
    pub images: Queue<ImageKind>,
    pub sessions: Queue<SessionKind>,
    pub pulls: Queue<PullKind>,
    pub debts: Queue<DebtKind>,
}

/// The other ends.
pub struct Receivers {
    pub nodes: Receiver<NodeKind>,
    pub pods: Receiver<PodKind>,
    pub sandboxes: Receiver<SandboxKind>,
    pub containers: Receiver<ContainerKind>,
    pub images: Receiver<ImageKind>,
    pub sessions: Receiver<SessionKind>,
    pub pulls: Receiver<PullKind>,
    pub debts: Receiver<DebtKind>,
}

impl Queues {
    pub fn new() -> (Queues, Receivers) {
        let (nodes, nodes_rx) = Queue::new();
        let (pods, pods_rx) = Queue::new();
        let (sandboxes, sandboxes_rx) = Queue::new();
        let (containers, containers_rx) = Queue::new();
        let (images, images_rx) = Queue::new();
        let (sessions, sessions_rx) = Queue::new();
        let (pulls, pulls_rx) = Queue::new();
        let (debts, debts_rx) = Queue::new();
        let queues = Queues {
            nodes,
            pods,
            sandboxes,
            containers,
            images,
            sessions,
            pulls,
            debts,
        };
        let receivers = Receivers {
            nodes: nodes_rx,
            pods: pods_rx,
            sandboxes: sandboxes_rx,
            containers: containers_rx,
            images: images_rx,
            sessions: sessions_rx,
            pulls: pulls_rx,
            debts: debts_rx,
        };
        (queues, receivers)
    }
}
