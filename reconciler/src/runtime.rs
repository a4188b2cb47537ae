//! The whole: store, node and loop, opened in the one order that is safe, started, or run once.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use state::container::ContainerKind;
use state::image::{ImageKind, ImagePhase, ImageSource, ImageSpec};
use state::node::NodeKind;
use state::pod::PodKind;
use state::sandbox::SandboxKind;
use state::store::{New, Opened};
use state::{Meta, Store};
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinSet;

use crate::config::Live;
use crate::engine::controller;
use crate::engine::pass::{self, Mode, Staged};
use crate::engine::stage::Risk;
use crate::engine::trigger::{Queues, Receivers};
use crate::engine::{Context, restore, staged, sweep};
use crate::error::{Error, Result};
use crate::image::builtin;
use crate::world::linux::{network, registry};
use crate::world::{Paths, Settings, World};
use crate::{container, image, node, repair, session};

/// Where an instance lives and how it makes networks.
#[derive(Clone, Debug)]
pub struct Options {
    pub root: PathBuf,
    pub state: PathBuf,
    pub shim: PathBuf,
    pub network: network::Mode,
    pub cni_conf_dir: PathBuf,
    pub cni_bin_dirs: Vec<PathBuf>,
    /// Networks of the built-in bridge, one of each family at most; the first free ones if not given.
    pub pod_cidrs: Vec<network::Cidr>,
    pub cni_template: Option<PathBuf>,
    pub registry: registry::Config,
    /// Cgroup above the shims' own; `None`: theirs is at the top, named after the instance.
    pub shim_cgroup: Option<String>,
    /// Cgroups are made by systemd; `None`: if it can.
    pub systemd: Option<bool>,
    pub shim_oom_score: Option<i32>,
    pub live: Live,
}

/// An opened instance; it holds the store's lock.
pub struct Runtime {
    pub cx: Arc<Context>,
    receivers: Receivers,
}

/// A running loop; dropping it stops the loop and leaves the pods alone.
pub struct Running {
    pub cx: Arc<Context>,
    tasks: JoinSet<()>,
}

/// A sandbox or pod directory without a record is looked at twice before it is swept.
const SECOND_LOOK: Duration = Duration::from_secs(30);
const SWEEP_EVERY: Duration = Duration::from_secs(300);

impl Runtime {
    /// Opens the store (or rebuilds it from the copies) and the node's parts.
    pub async fn open(options: Options) -> Result<Runtime> {
        let root = options.root.clone();
        crate::world::paths::make_dir(&root)?;
        let opened = tokio::task::spawn_blocking(move || Store::open(&root, restore::copies(&root))).await;
        let (store, opened) = opened.map_err(|source| Error::Task {
            op: "open store",
            source,
        })??;
        if let Some(why) = &opened.rebuilt {
            tracing::warn!("the database was set aside and rebuilt from the copies beside the objects: {why}");
        }
        let instance: String = store.root_id().chars().take(8).collect();
        let paths = Arc::new(Paths {
            root: options.root,
            state: options.state,
            instance: instance.clone(),
        });
        let network = network::Config {
            mode: options.network,
            cni_conf_dir: options.cni_conf_dir,
            cni_bin_dirs: options.cni_bin_dirs,
            pod_cidr4: options.pod_cidrs.iter().find(|cidr| cidr.ip.is_ipv4()).copied(),
            pod_cidr6: options.pod_cidrs.iter().find(|cidr| cidr.ip.is_ipv6()).copied(),
            cni_template: options.cni_template,
            ..network::Config::new(instance, &paths.root)
        };
        let world = World::open(Settings {
            paths,
            shim: options.shim,
            network,
            registry: options.registry,
            shim_cgroup: options.shim_cgroup,
            systemd: options.systemd,
        })?;
        keep_driver(&world, !store.list::<SandboxKind>().is_empty())?;
        world.shims.set_oom_score(options.shim_oom_score);
        let runtime = Runtime::on(store, opened, world);
        runtime.cx.set_live(options.live)?;
        Ok(runtime)
    }

    /// An instance over an opened store and node.
    pub fn on(store: Store, opened: Opened, world: World) -> Runtime {
        let (queues, receivers) = Queues::new();
        let cx = Arc::new(Context::new(store, opened, world, queues));
        Runtime { cx, receivers }
    }

    /// The bridge of running pods comes first, in the networks that the node was given.
    async fn sync_network(&self) -> Result<()> {
        node::tell_network(&self.cx);
        Ok(self.cx.world.network.sync_node().await?)
    }

    /// Makes the records that always are, and looks at everything without changing it.
    pub async fn prepare(&self) -> Result<()> {
        let cx = &self.cx;
        node::ensure(cx).await?;
        builtin_image(cx).await?;
        for sandbox in cx.store.list::<SandboxKind>() {
            let _ = cx.world.runs.add(&cx.world.paths.pod(sandbox.uid()));
        }
        for object in cx.store.list::<ContainerKind>() {
            let _ = cx.world.runs.add(&container::dir(&cx.world.paths, &object));
        }
        look::<ImageKind>(cx).await;
        look::<SandboxKind>(cx).await;
        look::<ContainerKind>(cx).await;
        look::<PodKind>(cx).await;
        let _ = cx.looked.set(());
        if let Some(node) = cx.store.by_name::<NodeKind>(state::node::LOCAL) {
            node::pass(cx, &node).await?;
        }
        Ok(())
    }

    /// Looks at everything, then starts the loop.
    pub async fn start(self) -> Result<Running> {
        self.sync_network().await?;
        end_earlier_boots(&self.cx).await;
        session::checkpoint::clear(&self.cx);
        self.prepare().await?;
        let Runtime { cx, receivers } = self;
        // Half a second once in a root's life: an empty store can run its first pod as soon as it answers.
        for image in cx.store.list::<ImageKind>() {
            if image.spec.source == ImageSource::BuiltIn && image.status.phase != ImagePhase::Ready {
                // On a full disk, say: what runs is served all the same, and the loop tries again.
                if let Err(e) = staged::pass(&cx, &image).await {
                    tracing::warn!("the built-in image is not ready yet: {e}");
                }
            }
        }
        let mut tasks = JoinSet::new();
        let q = &cx.queues;
        tasks.spawn(controller::run(cx.clone(), q.nodes.clone(), receivers.nodes));
        tasks.spawn(controller::run(cx.clone(), q.images.clone(), receivers.images));
        tasks.spawn(controller::run(cx.clone(), q.sandboxes.clone(), receivers.sandboxes));
        tasks.spawn(controller::run(cx.clone(), q.containers.clone(), receivers.containers));
        tasks.spawn(controller::run(cx.clone(), q.pods.clone(), receivers.pods));
        tasks.spawn(controller::run(cx.clone(), q.sessions.clone(), receivers.sessions));
        tasks.spawn(controller::run(cx.clone(), q.pulls.clone(), receivers.pulls));
        tasks.spawn(controller::run(cx.clone(), q.debts.clone(), receivers.debts));
        tasks.spawn(watch_runs(cx.clone()));
        tasks.spawn(watch_shims(cx.clone()));
        tasks.spawn(watch_network(cx.clone()));
        tasks.spawn(sweep_always(cx.clone()));
        tasks.spawn(empty_trash(cx.clone()));
        tasks.spawn(image::collect::follow(cx.clone()));
        tasks.spawn(node::sample::run(cx.clone()));
        tasks.spawn(crate::pod::secrets::follow(cx.clone()));
        Ok(Running { cx, tasks })
    }

    /// Looks at everything, then answers what is asked of the whole node, without a loop.
    pub async fn repair(&self, ask: &repair::Ask) -> Result<repair::Report> {
        self.prepare().await?;
        repair::run(&self.cx, ask).await
    }
}

impl Running {
    /// Ends the loop; pods go on.
    pub async fn stop(mut self) {
        session::checkpoint::end(&self.cx).await;
        self.tasks.shutdown().await;
        if let Err(e) = self.cx.world.images.end().await {
            tracing::warn!("the next boot will verify layers: {e}");
        }
        // A shim leaves its cgroup a moment after its socket: what was busy then may be empty now.
        sweep_shared(&self.cx.world);
    }
}

/// The paths of cgroups follow from the driver: it cannot change under pods. Without a file it is cgroupfs.
fn keep_driver(world: &World, pods: bool) -> Result<()> {
    let file = world.paths.root.join("cgroup-driver");
    let now = if world.systemd { "systemd" } else { "cgroupfs" };
    let old = world.files.read(&file)?.unwrap_or_else(|| b"cgroupfs".into());
    let old = String::from_utf8_lossy(&old);
    if old == now {
        return Ok(());
    }
    if pods {
        return Err(Error::Refused(format!(
            "cgroup.driver: it is {now} now, but the pods of {} were made with {old}: set {old}, or remove them first",
            world.paths.root.display()
        )));
    }
    world.files.replace(&file, now.as_bytes())
}

/// Takes away the cgroups that pods share when the last pod has left them; its own undo may have been cut before that.
pub(crate) fn sweep_shared(world: &World) {
    world.cgroups.remove_if_empty(&world.paths.default_cgroup());
    world.cgroups.remove_if_empty(world.shims.cgroup());
    // Where they were before another one was configured.
    world.cgroups.remove_if_empty(&world.paths.default_shim_cgroup());
}

/// Writes down the ends of what another boot has ended, before anybody can ask: what is told once never changes. What
/// cannot be written now is by the loop, and is unknown until then.
async fn end_earlier_boots(cx: &Arc<Context>) {
    let mut writes = JoinSet::new();
    end_of_kind::<SandboxKind>(cx, &mut writes);
    end_of_kind::<ContainerKind>(cx, &mut writes);
    writes.join_all().await;
}

fn end_of_kind<K: Staged>(cx: &Arc<Context>, writes: &mut JoinSet<()>) {
    let mut objects = cx.store.list::<K>();
    objects.retain(|object| object.meta.boot_id != cx.world.clock.boot_id);
    for object in objects {
        let cx = cx.clone();
        writes.spawn(async move {
            if let Err(e) = pass::end::<K>(&cx, &object).await {
                tracing::warn!(
                    kind = K::KIND,
                    name = object.meta.name,
                    "its end is not written yet: {e}"
                );
            }
        });
    }
}

/// The first look: statuses from what is there, nothing changed.
async fn look<K: Staged>(cx: &Arc<Context>) {
    let objects = cx.store.list::<K>();
    let looks = join_all(objects.iter().map(|object| pass::run(cx, object, Mode::Plan))).await;
    for (object, look) in objects.iter().zip(looks) {
        match look {
            Ok(passed) => cx.store.set_status::<K>(object.uid(), passed.status),
            Err(e) => tracing::warn!(kind = K::KIND, name = object.meta.name, "first look: {e}"),
        }
    }
}

async fn builtin_image(cx: &Arc<Context>) -> Result<()> {
    if cx.store.by_name::<ImageKind>(builtin::REFERENCE).is_some() {
        return Ok(());
    }
    let meta = Meta {
        name: builtin::REFERENCE.to_owned(),
        ..Meta::default()
    };
    let spec = ImageSpec {
        source: ImageSource::BuiltIn,
        pinned: true,
        ..ImageSpec::default()
    };
    match cx.store.create::<ImageKind>(New { meta, spec }).await {
        Ok(_) | Err(state::Error::AlreadyExists { .. }) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// Run records that were written: look at their objects.
async fn watch_runs(cx: Arc<Context>) {
    let mut runs = cx.world.runs.subscribe();
    loop {
        let dir = match runs.recv().await {
            Ok(dir) => Some(dir),
            Err(RecvError::Lagged(_)) => None,
            Err(RecvError::Closed) => return,
        };
        let Some(dir) = dir else {
            cx.store
                .list::<ContainerKind>()
                .iter()
                .for_each(|c| cx.queues.containers.look(c.uid(), "run record"));
            cx.store
                .list::<SandboxKind>()
                .iter()
                .for_each(|s| cx.queues.sandboxes.look(s.uid(), "run record"));
            continue;
        };
        let Some(uid) = dir.file_name().and_then(|name| name.to_str()) else {
            continue;
        };
        let container = dir.parent().is_some_and(|parent| parent.ends_with("containers"));
        if container {
            cx.queues.containers.look(uid, "run record");
        } else {
            cx.queues.sandboxes.look(uid, "run record");
        }
    }
}

async fn watch_shims(cx: Arc<Context>) {
    let Some(mut deaths) = cx.world.shims.deaths() else {
        return;
    };
    while let Some(uid) = deaths.recv().await {
        cx.queues.sandboxes.look(&uid, "shim gone");
    }
}

/// Links of ours that went, and another CNI configuration: look at who stands on them.
async fn watch_network(cx: Arc<Context>) {
    let all = || {
        cx.store
            .list::<SandboxKind>()
            .iter()
            .for_each(|s| cx.queues.sandboxes.look(s.uid(), "network"))
    };
    let mut configured = cx.world.network.changes();
    let mut drift = match cx.world.network.drift() {
        Ok(drift) => Some(drift),
        Err(e) => {
            tracing::error!("cannot follow links, their drift is noticed at the next resync only: {e}");
            None
        }
    };
    loop {
        let link = async {
            match drift.as_mut() {
                Some(drift) => drift.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            found = link => match found {
                Some(network::Drift::Sandbox(uid)) => cx.queues.sandboxes.look(&uid, "link gone"),
                Some(network::Drift::All) => all(),
                None => drift = None,
            },
            changed = configured.changed() => {
                if changed.is_err() {
                    return;
                }
                let _ = cx.world.network.probe().await;
                cx.store.list::<NodeKind>().iter().for_each(|n| cx.queues.nodes.look(n.uid(), "CNI configuration"));
                all();
            }
        }
    }
}

/// Sweeps what stays an orphan over two looks.
async fn sweep_always(cx: Arc<Context>) {
    loop {
        let first = sweep::orphans(&cx).await.unwrap_or_default();
        tokio::time::sleep(SECOND_LOOK).await;
        if !first.is_empty() {
            let second = sweep::orphans(&cx).await.unwrap_or_default();
            for orphan in first.intersection(&second) {
                // What may be wanted after all is for a person to say.
                if sweep::judge(&cx, orphan).await.risk > Risk::B {
                    continue;
                }
                if let Err(e) = sweep::sweep(&cx, orphan).await {
                    tracing::warn!(?orphan, "could not be swept, trying again later: {e}");
                }
            }
        }
        if let Err(e) = cx.world.network.mend().await {
            tracing::warn!("network mend: {e}");
        }
        if let Err(e) = cx.world.network.sweep_node().await {
            tracing::warn!("network sweep: {e}");
        }
        sweep_shared(&cx.world);
        if let Err(e) = image::collect::garbage(&cx).await {
            tracing::warn!("image garbage: {e}");
        }
        tokio::time::sleep(SWEEP_EVERY - SECOND_LOOK).await;
    }
}

/// Deletes behind everyone's back what was renamed away.
async fn empty_trash(cx: Arc<Context>) {
    loop {
        // Deleting big trees slows unpacking on the same file system down.
        let _ = tokio::time::timeout(SECOND_LOOK, cx.world.images.quiet()).await;
        if let Err(e) = cx.world.files.empty_trash().await {
            tracing::warn!("trash: {e}");
            tokio::time::sleep(SECOND_LOOK).await;
        }
        cx.world.files.buried().await;
    }
}
