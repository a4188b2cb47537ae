//! What every handler has at hand: the store, the settings, and how an id becomes a record.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError};

use futures::future::BoxFuture;
use state::container::{ContainerKind, ContainerPhase};
use state::node::{LOCAL, NodeKind};
use state::sandbox::{SandboxGoal, SandboxKind, SandboxPhase};
use state::{Container, Kind, Node, Object, PodSandbox, Store, Truth};
use tokio::sync::{RwLock, watch};

use crate::error::{Error, Result};
use crate::records::v1::{Changed, OnceRequest};
use crate::runtime::Feed;

/// What a pass over everything did, or would do.
#[derive(Clone, Debug, Default)]
pub struct OnceReport {
    pub report: serde_json::Value,
    /// 0 clean, 10 repaired (or to be), 20 needs a human, 30 failed.
    pub exit_code: i32,
}

/// Asks the loop for a pass, its plan, or findings; the binary supplies it.
pub type OnceHook = Arc<dyn Fn(OnceRequest) -> BoxFuture<'static, Result<OnceReport, String>> + Send + Sync>;

/// Reads the configuration anew; answers what changed, or why it does not hold. The binary supplies it.
pub type ReloadHook = Arc<dyn Fn() -> BoxFuture<'static, Result<Vec<Changed>, String>> + Send + Sync>;

/// What clients are told and a reload may change.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// In the verbose Status; other tools read it there.
    pub sandbox_image: String,
    /// Full names of images that are shown as pinned beside those whose record says so.
    pub pinned: BTreeSet<String>,
    /// What `runtime_handler` may be beside the empty name, which is the default one's.
    pub handlers: Vec<Handler>,
    /// The default's name; if it is not among them, the default can do all that the node can.
    pub default_handler: String,
}

/// A runtime handler, and what it can do where the node can.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Handler {
    pub name: String,
    pub recursive_read_only: bool,
    pub user_namespaces: bool,
}

impl Told {
    /// The handler of a request's name.
    pub(crate) fn handler(&self, name: &str) -> Option<Handler> {
        let wanted = if name.is_empty() { &self.default_handler } else { name };
        let found = self.handlers.iter().find(|handler| handler.name == wanted).cloned();
        let able = || Handler {
            name: String::new(),
            recursive_read_only: true,
            user_namespaces: true,
        };
        found.or_else(|| name.is_empty().then(able))
    }
}

/// Settings of the services.
#[derive(Clone)]
pub struct Config {
    /// Semantic version of the runtime.
    pub version: String,
    pub told: Arc<std::sync::RwLock<Told>>,
    /// `SupplementalGroupsPolicy` is honoured.
    pub supplemental_groups_policy: bool,
    /// User namespaces work for pods on the host's network.
    pub user_namespaces_host_network: bool,
    /// `Mount.mount_options` is honoured.
    pub mount_options: bool,
    pub once: Option<OnceHook>,
    pub reload: Option<ReloadHook>,
    /// Where the streaming server listens, `http://ADDRESS:PORT`; `None` if none does.
    pub streaming_url: Option<String>,
    /// Cgroups are systemd's: what RuntimeConfig tells.
    pub systemd_cgroups: bool,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            told: Arc::default(),
            supplemental_groups_policy: true,
            user_namespaces_host_network: true,
            mount_options: true,
            once: None,
            reload: None,
            streaming_url: None,
            systemd_cgroups: false,
        }
    }
}

/// The services over one store; clones share everything.
#[derive(Clone)]
pub struct Services {
    pub(crate) store: Store,
    pub(crate) config: Arc<Config>,
    /// Delivering (many at a time) against withdrawing (alone): what was given to a caller is never taken back.
    pub(crate) settle: Arc<RwLock<()>>,
    /// Becomes true when the server stops; streams and waits end then.
    pub(crate) closing: watch::Receiver<bool>,
    /// What GetContainerEvents tells.
    pub(crate) feed: Arc<Feed>,
}

impl Services {
    /// Services over `store`, to be given to [`crate::serve`] together with the end signal `closing`.
    pub fn new(store: Store, config: Config, closing: watch::Receiver<bool>) -> Services {
        Services {
            store,
            config: Arc::new(config),
            settle: Arc::default(),
            closing,
            feed: Arc::default(),
        }
    }

    /// Ends when the server stops (or its owner is gone).
    pub(crate) async fn closed(&self) {
        // An error means that the sender is gone, which is an end as well.
        let _ = self.closing.clone().wait_for(|closing| *closing).await;
    }

    pub(crate) fn told(&self) -> Told {
        self.config.told.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn node(&self) -> Option<Arc<Node>> {
        self.store.by_name::<NodeKind>(LOCAL)
    }

    /// Has the first look at the node been taken? Until then nothing is answered from statuses.
    pub(crate) fn ready(&self) -> Result<()> {
        let ready = self.node().and_then(|node| {
            let ready = node.status.conditions.iter().find(|c| c.stage == "Ready")?;
            Some((ready.status == Truth::True, ready.message.clone()))
        });
        match ready {
            Some((true, _)) => Ok(()),
            Some((false, message)) if !message.is_empty() => {
                Err(Error::Unavailable(format!("not ready yet: {message}")))
            }
            _ => Err(Error::Unavailable(
                "not ready yet: still looking at what runs on this node".into(),
            )),
        }
    }

    /// The visible sandbox of a request's id or unique prefix.
    pub(crate) fn sandbox(&self, field: &str, id: &str) -> Result<Arc<PodSandbox>> {
        self.find::<SandboxKind>("sandbox", field, id, sandbox_visible)
    }

    /// The visible container of a request's id or unique prefix.
    pub(crate) fn container(&self, field: &str, id: &str) -> Result<Arc<Container>> {
        self.find::<ContainerKind>("container", field, id, container_visible)
    }

    fn find<K: Kind>(
        &self,
        what: &'static str,
        field: &str,
        id: &str,
        visible: fn(&Object<K>) -> bool,
    ) -> Result<Arc<Object<K>>> {
        if id.is_empty() {
            return Err(Error::invalid(field, "must not be empty"));
        }
        let missing = || Error::NotFound {
            what,
            id: format!("{id:.100}"),
        };
        let found = match self.store.get::<K>(id) {
            Some(found) => Ok(found),
            None => self.store.resolve::<K>(id),
        };
        match found {
            Ok(object) if visible(&object) => Ok(object),
            Ok(_) | Err(state::Error::NotFound { .. }) => Err(missing()),
            Err(state::Error::Ambiguous { .. }) => Err(Error::invalid(
                field,
                format!("{id:.100} is the beginning of more than one {what} id"),
            )),
            Err(error) => Err(error.into()),
        }
    }

    /// Sandboxes as the CRI shows them, newest first.
    pub(crate) fn sandboxes(&self) -> Vec<Arc<PodSandbox>> {
        let mut all = self.store.list::<SandboxKind>();
        all.retain(|sandbox| sandbox_visible(sandbox));
        all
    }

    /// Containers as the CRI shows them, newest first.
    pub(crate) fn containers(&self) -> Vec<Arc<Container>> {
        let mut all = self.store.list::<ContainerKind>();
        all.retain(|container| container_visible(container));
        all
    }
}

/// A create on trial is hidden until its goal holds, lest the client start the next attempt beside it.
pub(crate) fn sandbox_visible(sandbox: &PodSandbox) -> bool {
    // Who stopped it knew it, whether its own caller was answered or not.
    let stopped = sandbox.spec.goal == SandboxGoal::Stopped;
    let ready = sandbox.status.phase == SandboxPhase::Ready;
    sandbox.meta.delivered() || ((ready || stopped) && !sandbox.meta.deleted())
}

pub(crate) fn container_visible(container: &Container) -> bool {
    let made = !matches!(
        container.status.phase,
        ContainerPhase::Unknown | ContainerPhase::Pending
    );
    container.meta.delivered() || (made && !container.meta.deleted())
}

/// `namespace/name`, for logs and errors.
pub(crate) fn pod_of(sandbox: &PodSandbox) -> String {
    format!("{}/{}", sandbox.spec.pod.namespace, sandbox.spec.pod.name)
}
