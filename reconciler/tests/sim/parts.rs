//! The world's parts over the node: each verb in the steps in which the real one makes its changes.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use reconciler::error::{Error, Result};
use reconciler::world::linux::clock::Clock;
use reconciler::world::linux::mounts::UserFiles;
use reconciler::world::linux::netns::{Kind, Pin, Pins};
use reconciler::world::linux::network::attachment::{Cni, Kind as By};
use reconciler::world::linux::network::{self, Attachment, Cidr, Drift, Ready, State, Want};
use reconciler::world::{Cgroups, Entry, Files, Mounts, Netns, Network, Paths, Rootfs, Runs, World};
use serde_json::json;
use shim::record::{End, RunRecord};
use tokio::sync::{Notify, broadcast, mpsc, watch};

use super::node::{HIERARCHIES, Node, ROOT, ROOT_ID, STATE, Sim, Who};

/// The node as one daemon's incarnation has it.
#[derive(Clone)]
pub struct Part {
    pub sim: Arc<Sim>,
    pub who: Who,
    pub garbage: Arc<Notify>,
    trash: Arc<Notify>,
    pulls: Arc<AtomicU64>,
    pub deaths: Arc<std::sync::Mutex<Option<mpsc::UnboundedReceiver<String>>>>,
    changes: Arc<watch::Sender<u64>>,
    drift: Arc<std::sync::Mutex<Vec<mpsc::Sender<Drift>>>>,
}

/// A new daemon's world; it lives from here on.
pub fn world(sim: &Arc<Sim>) -> (World, Part) {
    let (deaths, deaths_rx) = mpsc::unbounded_channel();
    let (who, boot_id) = {
        let mut node = sim.lock();
        node.last_daemon += 1;
        node.daemon = node.last_daemon;
        node.deaths = Some(deaths);
        (Who::Daemon(node.daemon), node.boot_id())
    };
    let part = Part {
        sim: sim.clone(),
        who,
        garbage: Arc::default(),
        trash: Arc::default(),
        pulls: Arc::default(),
        deaths: Arc::new(std::sync::Mutex::new(Some(deaths_rx))),
        changes: Arc::new(watch::channel(0).0),
        drift: Arc::default(),
    };
    let paths = Paths {
        root: ROOT.into(),
        state: STATE.into(),
        instance: ROOT_ID[..8].to_owned(),
    };
    let shared = Arc::new(part.clone());
    let world = World {
        paths: Arc::new(paths),
        clock: Clock { boot_id },
        files: shared.clone(),
        mounts: shared.clone(),
        netns: shared.clone(),
        cgroups: shared.clone(),
        network: shared.clone(),
        images: shared.clone(),
        shims: shared.clone(),
        runs: shared,
        systemd: false,
        selinux: false,
        usage: None,
    };
    (world, part)
}

fn failed(op: &'static str) -> impl FnOnce(super::node::Stopped) -> Error {
    move |why| Error::io(op, "/sim")(why.into())
}

impl Part {
    pub fn step<T>(&self, name: &'static str, change: impl FnOnce(&mut Node) -> T) -> Result<T> {
        self.sim.step(&self.who, name, change).map_err(failed(name))
    }

    /// Reading is for the living, too.
    pub fn look(&self) -> Result<()> {
        self.sim.lock().check(&self.who).map_err(failed("look"))
    }

    /// What an asynchronous verb takes.
    pub async fn pause(&self) {
        let ms = {
            let mut node = self.sim.lock();
            let most = node.unrest.delay;
            1 + node.rng.below(most + 1)
        };
        tokio::time::sleep(Duration::from_millis(ms)).await;
    }

    pub fn pulling(&self) -> bool {
        self.pulls.load(Ordering::Relaxed) > 0
    }
}

fn temp(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    path.with_file_name(name)
}

#[async_trait]
impl Files for Part {
    fn read(&self, path: &Path) -> Result<Option<Vec<u8>>> {
        self.look()?;
        Ok(self.sim.lock().fs.read(path).map(<[u8]>::to_vec))
    }

    fn replace(&self, path: &Path, text: &[u8]) -> Result<()> {
        let temp = temp(path);
        if !self.step("files: temporary written", |node| node.fs.write(&temp, text))? {
            return Err(Error::io("write", &temp)(io::ErrorKind::NotFound.into()));
        }
        self.step("files: renamed", |node| node.fs.rename(&temp, path))
    }

    fn unlink(&self, path: &Path) -> Result<()> {
        if !Files::exists(self, path) {
            return self.look();
        }
        self.step("files: unlinked", |node| node.fs.unlink(path))
    }

    fn exists(&self, path: &Path) -> bool {
        self.sim.lock().fs.exists(path)
    }

    fn identity(&self, path: &Path) -> (u64, u64) {
        self.sim.lock().fs.inode(path).map_or((0, 0), |inode| (1, inode))
    }

    fn make_dir(&self, path: &Path, _: u32) -> Result<()> {
        if Files::exists(self, path) {
            return self.look();
        }
        self.step("files: directory made", |node| node.fs.make_dir(path))
    }

    fn set_mode(&self, _: &Path, _: u32) -> Result<()> {
        self.look()
    }

    fn list(&self, dir: &Path) -> Result<Vec<Entry>> {
        self.look()?;
        let children = self.sim.lock().fs.children(dir);
        Ok(children
            .into_iter()
            .map(|(name, is_dir)| Entry { name, is_dir })
            .collect())
    }

    fn remove_dir(&self, path: &Path) -> Result<()> {
        if !Files::exists(self, path) {
            return self.look();
        }
        if self.sim.lock().mounts.contains(path) {
            return Err(Error::io("remove", path)(io::Error::from_raw_os_error(libc::EBUSY)));
        }
        if !self.step("files: directory removed", |node| node.fs.remove_dir(path))? {
            return Err(Error::io("remove", path)(io::Error::from_raw_os_error(libc::ENOTEMPTY)));
        }
        Ok(())
    }

    fn run_record(&self, path: &Path) -> Result<Option<RunRecord>> {
        self.look()?;
        Ok(self.sim.lock().run_record(path))
    }

    fn write_end(&self, path: &Path, end: End) -> Result<()> {
        if !self.step("run record: end written", |node| node.write_end(path, end))? {
            return Err(Error::io("write run record", path)(io::ErrorKind::NotFound.into()));
        }
        if let Some(dir) = path.parent() {
            let _ = self.sim.lock().runs.send(dir.to_owned());
        }
        Ok(())
    }

    fn hold(&self, _: &Path) -> Vec<File> {
        Vec::new()
    }

    fn bury(&self, path: &Path) -> Result<()> {
        if !Files::exists(self, path) {
            return self.look();
        }
        self.step("files: buried", |node| {
            node.fs.make_dir(&Path::new(ROOT).join("trash"));
            let name = node.rng.next();
            node.fs
                .rename(path, &Path::new(ROOT).join("trash").join(name.to_string()));
        })?;
        self.trash.notify_one();
        Ok(())
    }

    async fn empty_trash(&self) -> Result<usize> {
        let trash = Path::new(ROOT).join("trash");
        let trees = Files::list(self, &trash)?;
        for tree in &trees {
            self.step("trash: tree deleted", |node| {
                node.fs.remove_tree(&trash.join(&tree.name))
            })?;
        }
        Ok(trees.len())
    }

    async fn buried(&self) {
        self.trash.notified().await;
    }
}

#[async_trait]
impl Mounts for Part {
    fn is_mounted(&self, path: &Path) -> Result<bool> {
        self.look()?;
        Ok(self.sim.lock().mounts.contains(path))
    }

    fn below(&self, dirs: &[PathBuf]) -> Result<Vec<PathBuf>> {
        self.look()?;
        let node = self.sim.lock();
        let inside = |path: &&PathBuf| dirs.iter().any(|dir| path.starts_with(dir));
        Ok(node.mounts.iter().rev().filter(inside).cloned().collect())
    }

    fn unmount(&self, path: &Path) -> Result<()> {
        if self.sim.lock().mounts.contains(path) {
            self.unmount_only(path)?;
        }
        self.remove_dir(path)
    }

    fn unmount_only(&self, path: &Path) -> Result<()> {
        self.step("mounts: unmounted", |node| {
            if node.procs.values().any(|proc| proc.rootfs.as_deref() == Some(path)) {
                node.problems
                    .push(format!("8: {} unmounted under a live process", path.display()));
            }
            node.mounts.remove(path);
        })
    }

    fn shm(&self, path: &Path, _: u64, _: Option<&str>) -> Result<()> {
        self.mount(path)
    }

    fn tmpfs(&self, path: &Path, _: u64) -> Result<()> {
        self.mount(path)
    }

    async fn rootfs(&self, want: Rootfs) -> Result<()> {
        self.pause().await;
        let missing = want.lower.iter().find(|tree| {
            let chain = tree.file_name().unwrap_or_default().to_string_lossy().into_owned();
            !self.sim.lock().layers.contains(&chain)
        });
        if let Some(tree) = missing {
            return Err(Error::io("mount rootfs", tree)(io::ErrorKind::NotFound.into()));
        }
        self.step("mounts: upper and work made", |node| {
            node.fs.make_dir(&want.upper);
            node.fs.make_dir(&want.work);
        })?;
        self.mount(&want.target)
    }

    fn clear_scratch(&self, _: &Path) -> Result<()> {
        self.look()
    }

    fn overlay(&self) -> std::result::Result<(), String> {
        Ok(())
    }

    async fn user_files(&self) -> UserFiles {
        UserFiles::None
    }
}

impl Part {
    fn mount(&self, path: &Path) -> Result<()> {
        if self.sim.lock().mounts.contains(path) {
            return self.look();
        }
        if !Files::exists(self, path) {
            return Err(Error::io("mount on", path)(io::ErrorKind::NotFound.into()));
        }
        self.step("mounts: mounted", |node| node.mounts.insert(path.to_owned()))
            .map(drop)
    }
}

/// The pins that a set has.
fn pins(want: &Pins) -> Vec<PathBuf> {
    let user = want.user.as_ref().map(|user| user.path.clone());
    [want.net.clone(), want.ipc.clone(), want.uts.clone(), user]
        .into_iter()
        .flatten()
        .collect()
}

#[async_trait]
impl Netns for Part {
    fn list(&self) -> Result<Vec<String>> {
        self.look()?;
        let node = self.sim.lock();
        let names = node.pins.keys().filter_map(|pin| pin.file_name()?.to_str());
        let prefix = format!("rc-{}-", &ROOT_ID[..8]);
        Ok(names
            .filter_map(|name| name.strip_prefix(&prefix))
            .map(str::to_owned)
            .collect())
    }

    fn observe(&self, pin: &Path) -> Result<Pin> {
        self.look()?;
        Ok(match self.sim.lock().pins.get(pin) {
            Some(inode) => Pin::Ns { inode: *inode },
            None => Pin::Absent,
        })
    }

    async fn ensure(&self, want: Pins) -> Result<()> {
        self.pause().await;
        let pins = pins(&want);
        let whole = {
            let node = self.sim.lock();
            pins.iter().all(|pin| node.pins.contains_key(pin))
        };
        for pin in pins.into_iter().filter(|_| !whole) {
            self.step("netns: pinned", |node| {
                let ns = node.new_ns();
                node.pins.insert(pin, ns);
            })?;
        }
        Ok(())
    }

    fn rebind(&self, pin: &Path, _: Kind, _: u32) -> Result<()> {
        self.step("netns: pinned again", |node| {
            let ns = node.new_ns();
            node.pins.insert(pin.to_owned(), ns);
        })
    }

    fn remove(&self, pin: &Path) -> Result<()> {
        if !self.sim.lock().pins.contains_key(pin) || self.sim.lock().mutation == Some("pin kept") {
            return self.look();
        }
        self.step("netns: unpinned", |node| {
            node.pins.remove(pin);
            let name = pin.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let Some(uid) = name.strip_prefix(&format!("rc-{}-", &ROOT_ID[..8])) else {
                return;
            };
            if node.procs.values().any(|proc| proc.sandbox == uid) {
                node.problems
                    .push(format!("8: namespace of {uid} unpinned under live processes"));
            }
            if node
                .fs
                .exists(&Path::new(ROOT).join("pods").join(uid).join("attachment.json"))
            {
                node.problems.push(format!(
                    "8: namespace of {uid} unpinned before its network was taken back"
                ));
            }
            node.links.remove(uid);
        })
    }
}

impl Cgroups for Part {
    fn v2(&self) -> bool {
        false
    }

    fn observe(&self, path: &str) -> (usize, usize) {
        let node = self.sim.lock();
        let there = (0..HIERARCHIES).filter(|h| node.cgroups.contains(&(*h, path.to_owned())));
        (there.count(), HIERARCHIES)
    }

    fn ensure(&self, path: &str) -> Result<()> {
        for hierarchy in 0..HIERARCHIES {
            if !self.sim.lock().cgroups.contains(&(hierarchy, path.to_owned())) {
                self.step("cgroups: directory made", |node| node.make_cgroup(hierarchy, path))?;
            }
        }
        self.look()
    }

    fn kill(&self, path: &str) -> Result<()> {
        if Cgroups::observe(self, path).0 == 0 {
            return self.look();
        }
        self.step("cgroups: killed", |node| node.kill_cgroup(path))
    }

    fn remove(&self, path: &str) -> Result<()> {
        for hierarchy in 0..HIERARCHIES {
            let own = format!("{path}/");
            let below: Vec<_> = {
                let node = self.sim.lock();
                if node
                    .procs
                    .values()
                    .any(|p| p.cgroup == path || p.cgroup.starts_with(&own))
                {
                    return Err(Error::io("remove cgroup", path)(io::Error::from_raw_os_error(
                        libc::EBUSY,
                    )));
                }
                let all = node
                    .cgroups
                    .iter()
                    .filter(|(h, p)| *h == hierarchy && (p == path || p.starts_with(&own)));
                all.cloned().collect()
            };
            if !below.is_empty() {
                self.step("cgroups: directory removed", |node| {
                    node.cgroups.retain(|name| !below.contains(name));
                    node.limits.retain(|(p, _), _| p != path);
                })?;
            }
        }
        self.look()
    }

    fn remove_if_empty(&self, path: &str) {
        let own = format!("{path}/");
        let (there, used) = {
            let node = self.sim.lock();
            let there = node.cgroups.iter().any(|(_, p)| p == path);
            (there, node.cgroups.iter().any(|(_, p)| p.starts_with(&own)))
        };
        if there && !used {
            let _ = self.step("cgroups: parent removed", |node| {
                node.cgroups.retain(|(_, p)| p != path)
            });
        }
    }

    fn children(&self, parent: &str) -> Vec<String> {
        let node = self.sim.lock();
        let own = format!("{parent}/");
        let names = node.cgroups.iter().filter_map(|(_, p)| p.strip_prefix(&own));
        let mut names: Vec<String> = names
            .map(|rest| rest.split('/').next().unwrap_or(rest).to_owned())
            .collect();
        names.sort();
        names.dedup();
        names
    }

    fn get(&self, _: &str, path: &str, file: &str) -> io::Result<String> {
        let node = self.sim.lock();
        node.limits
            .get(&(path.to_owned(), file.to_owned()))
            .cloned()
            .ok_or(io::ErrorKind::NotFound.into())
    }

    fn set(&self, _: &str, path: &str, file: &str, value: &str) -> io::Result<()> {
        let key = (path.to_owned(), file.to_owned());
        let set = self.sim.step(&self.who, "cgroups: limit set", |node| {
            node.limits.insert(key, value.to_owned());
        });
        set.map_err(io::Error::from)
    }

    fn v2_dir(&self, _: &str) -> Option<PathBuf> {
        None
    }
}

impl Node {
    pub fn make_cgroup(&mut self, hierarchy: usize, path: &str) {
        let mut at = String::new();
        for part in path.split('/').filter(|part| !part.is_empty()) {
            at = format!("{at}/{part}");
            self.cgroups.insert((hierarchy, at.clone()));
        }
    }
}

fn net(why: super::node::Stopped) -> network::Error {
    network::Error::System {
        doing: "simulate",
        object: "network".to_owned(),
        source: why.into(),
    }
}

/// As long as a plugin may take.
const CNI_BOUND: Duration = Duration::from_secs(60);

/// CNI, whose addresses outlive a reboot.
impl Part {
    fn net_step<T>(&self, name: &'static str, change: impl FnOnce(&mut Node) -> T) -> network::Result<T> {
        self.sim.step(&self.who, name, change).map_err(net)
    }

    fn write_attachment(&self, dir: &Path, attachment: &Attachment) -> network::Result<()> {
        let text = serde_json::to_vec(attachment).expect("an attachment is JSON");
        let path = dir.join("attachment.json");
        let temp = dir.join(".attachment.json.new");
        self.net_step("network: attachment's temporary written", |node| {
            node.fs.write(&temp, &text)
        })?;
        self.net_step("network: attachment renamed and synced", |node| {
            node.fs.sync(&temp);
            node.fs.rename(&temp, &path);
            node.fs.sync(&path);
        })
    }

    async fn cni(&self, verb: &'static str) -> network::Result<()> {
        let hangs = {
            let mut node = self.sim.lock();
            let rate = node.unrest.hang;
            node.rng.chance(rate)
        };
        if hangs {
            // As long as a plugin may take; then it is killed.
            tokio::time::sleep(CNI_BOUND).await;
            return Err(network::Error::PluginTimeout {
                plugin: "sim".to_owned(),
                verb,
                seconds: CNI_BOUND.as_secs(),
            });
        }
        let mut node = self.sim.lock();
        let rate = node.unrest.cni;
        if node.rng.chance(rate) {
            return Err(network::Error::PluginFailed {
                plugin: "sim".to_owned(),
                verb,
                code: 100,
                message: "simulated".to_owned(),
            });
        }
        Ok(())
    }

    async fn delete(&self, uid: &str) -> network::Result<()> {
        self.pause().await;
        self.cni("DEL").await?;
        let (link, lease) = {
            let node = self.sim.lock();
            (node.links.contains(uid), node.leases.contains_key(uid))
        };
        if link {
            self.net_step("network: DEL takes the link", |node| node.links.remove(uid))?;
        }
        if lease {
            self.net_step("network: DEL gives the address back", |node| node.leases.remove(uid))?;
        }
        Ok(())
    }
}

#[async_trait]
impl Network for Part {
    async fn ensure(&self, want: &Want) -> network::Result<Attachment> {
        self.pause().await;
        if let Some(have) = self.attachment(&want.dir)? {
            if have.complete && self.sim.lock().links.contains(&want.uid) {
                return Ok(have);
            }
            self.delete(&want.uid).await?;
        }
        if !self.sim.lock().pins.contains_key(&want.netns) {
            return Err(network::Error::NetnsGone(want.netns.clone()));
        }
        let mut attachment = Attachment {
            version: 1,
            uid: want.uid.clone(),
            namespace: want.namespace.clone(),
            name: want.name.clone(),
            pod_uid: want.pod_uid.clone(),
            kind: By::Cni,
            complete: false,
            boot_id: self.sim.lock().boot_id(),
            netns: want.netns.clone(),
            ifname: "eth0".to_owned(),
            addresses: Vec::new(),
            gateways: Vec::new(),
            ports: want.ports.clone(),
            cni: Some(Cni {
                conf_dir: want.cni_conf_dir.clone(),
                conflist: json!({ "name": "sim" }),
                args: String::new(),
                capabilities: Default::default(),
                result: None,
                unknown: Default::default(),
            }),
            unknown: Default::default(),
        };
        self.write_attachment(&want.dir, &attachment)?;
        self.cni("ADD").await?;
        let ip = self.net_step("network: ADD takes an address", |node| {
            let ip = (1..=254)
                .find(|ip| !node.leases.values().any(|taken| taken == ip))
                .unwrap_or(255);
            node.leases.insert(want.uid.clone(), ip);
            ip
        })?;
        self.pause().await;
        // Cut short here it leaves an address.
        self.cni("ADD").await?;
        self.net_step("network: ADD makes the link", |node| {
            node.links.insert(want.uid.clone())
        })?;
        attachment.complete = true;
        attachment.addresses = vec![Cidr::new([10, 0, 0, ip].into(), 24).expect("a prefix of IPv4")];
        self.write_attachment(&want.dir, &attachment)?;
        Ok(attachment)
    }

    async fn observe(&self, want: &Want) -> network::Result<State> {
        self.sim.lock().check(&self.who).map_err(net)?;
        let have = match self.attachment(&want.dir) {
            Ok(Some(have)) => have,
            Ok(None) => return Ok(State::Absent),
            Err(e) => return Ok(State::Partial(e.to_string())),
        };
        let link = self.sim.lock().links.contains(&want.uid);
        Ok(match (have.complete, link) {
            (false, _) => State::Partial("ADD was cut short".to_owned()),
            (true, false) => State::Drifted("the link is gone".to_owned()),
            (true, true) => State::Attached(Box::new(have)),
        })
    }

    async fn remove(&self, uid: &str, dir: &Path, _: Option<&Path>) -> network::Result<()> {
        let containers = |node: &Node| node.procs.values().any(|p| p.sandbox == uid && p.id != uid);
        if containers(&self.sim.lock()) {
            let mut node = self.sim.lock();
            node.problems
                .push(format!("8: network of {uid} taken back under live containers"));
        }
        if self.attachment(dir).unwrap_or_default().is_some() {
            self.delete(uid).await?;
        }
        self.forget(dir)
    }

    async fn detach(&self, attachment: &Attachment, _: Option<&Path>) -> network::Result<()> {
        self.delete(&attachment.uid).await
    }

    fn attachment(&self, dir: &Path) -> network::Result<Option<Attachment>> {
        let node = self.sim.lock();
        node.check(&self.who).map_err(net)?;
        let path = dir.join("attachment.json");
        let Some(text) = node.fs.read(&path) else {
            return Ok(None);
        };
        serde_json::from_slice(text)
            .map(Some)
            .map_err(|e| network::Error::Attachment {
                path,
                why: e.to_string(),
            })
    }

    fn forget(&self, dir: &Path) -> network::Result<()> {
        let path = dir.join("attachment.json");
        if !self.sim.lock().fs.exists(&path) {
            return self.sim.lock().check(&self.who).map_err(net);
        }
        self.net_step("network: attachment unlinked", |node| node.fs.unlink(&path))
    }

    async fn list(&self) -> network::Result<Vec<String>> {
        Ok(self.sim.lock().links.iter().cloned().collect())
    }

    async fn sweep_links(&self, uid: &str) -> network::Result<()> {
        if self.sim.lock().links.contains(uid) {
            self.net_step("network: link swept", |node| node.links.remove(uid))?;
        }
        Ok(())
    }

    async fn sweep_node(&self) -> network::Result<()> {
        Ok(())
    }

    async fn sync_node(&self) -> network::Result<()> {
        Ok(())
    }

    fn use_pod_cidrs(&self, _: &str) -> network::Result<()> {
        Ok(())
    }

    fn ready(&self) -> Ready {
        Ready {
            ok: true,
            reason: String::new(),
            message: String::new(),
        }
    }

    async fn probe(&self) {}

    fn drift(&self) -> network::Result<mpsc::Receiver<Drift>> {
        let (tx, rx) = mpsc::channel(8);
        self.drift.lock().expect("never poisoned").push(tx);
        Ok(rx)
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn describe(&self) -> serde_json::Value {
        json!({ "mode": "sim" })
    }
}

impl Runs for Part {
    fn add(&self, _: &Path) -> Result<()> {
        self.look()
    }

    fn subscribe(&self) -> broadcast::Receiver<PathBuf> {
        self.sim.lock().runs.subscribe()
    }
}

/// Everything of the node that a name of ours can be on, without what is the image store's.
pub fn census(node: &Node) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut put = |kind: &str, name: String| found.insert(format!("{kind} {name}"), String::new());
    let fixed = [ROOT, STATE, "/sim", "/"];
    for path in node.fs.all() {
        let text = path.display().to_string();
        let kept = [
            format!("{ROOT}/pods"),
            format!("{STATE}/pods"),
            format!("{ROOT}/images"),
            format!("{ROOT}/trash"),
        ];
        let empty_parent = kept.contains(&text) || text == format!("{ROOT}/declared");
        let image = text.starts_with(&format!("{ROOT}/images/")) || text.starts_with(super::node::LOGS);
        if !fixed.contains(&text.as_str()) && !empty_parent && !image {
            put("path", text);
        }
    }
    node.mounts
        .iter()
        .for_each(|m| drop(put("mount", m.display().to_string())));
    node.pins.keys().for_each(|p| drop(put("pin", p.display().to_string())));
    node.cgroups
        .iter()
        .for_each(|(h, p)| drop(put("cgroup", format!("{h}:{p}"))));
    node.links.iter().for_each(|l| drop(put("link", l.clone())));
    node.leases.keys().for_each(|l| drop(put("lease", l.clone())));
    node.procs
        .iter()
        .for_each(|(pid, p)| drop(put("process", format!("{pid} {}", p.id))));
    let shims = node.shims.iter().filter(|(_, shim)| shim.alive);
    shims.for_each(|(s, _)| drop(put("shim", s.clone())));
    found
}
