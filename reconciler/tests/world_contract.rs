//! What the loop relies on, part by part, against the real kernel: `ensure` twice is `ensure` once, `remove` twice is
//! `remove` once, `observe` tells the truth and changes nothing. Needs root.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use reconciler::world::linux::netns::{self, Pin, Pins};
use reconciler::world::linux::network::{Config, Mode, State, Want};
use reconciler::world::linux::{files, mounts};
use reconciler::world::{Paths, Settings, World};

/// A world of its own on a temporary root, with the real shim.
struct Node {
    _dir: tempfile::TempDir,
    world: World,
}

fn shim() -> PathBuf {
    // target/release/deps/world_contract-… -> target/release/reconcile-shim
    let own = std::env::current_exe().unwrap();
    let shim = own.parent().unwrap().parent().unwrap().join("reconcile-shim");
    assert!(
        shim.exists(),
        "{} is missing: run `cargo build --release` first",
        shim.display()
    );
    shim
}

fn node(instance: &str) -> Node {
    let dir = tempfile::Builder::new()
        .prefix("rc-world-")
        .tempdir_in("/var/tmp")
        .unwrap();
    let (root, state) = (dir.path().join("root"), dir.path().join("state"));
    let paths = Arc::new(Paths {
        root: root.clone(),
        state,
        instance: instance.to_owned(),
    });
    let network = Config {
        mode: Mode::Builtin,
        ..Config::new(instance, root)
    };
    let world = World::open(Settings {
        shim_cgroup: None,
        systemd: Some(false),
        paths,
        shim: shim(),
        network,
        registry: Default::default(),
    })
    .unwrap();
    Node { _dir: dir, world }
}

fn uid(n: u8) -> String {
    format!("{n:02x}").repeat(32)
}

fn net_inode(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().ino()
}

#[tokio::test]
async fn cgroups_are_made_once_and_removed_once() {
    let node = node("c0ffee01");
    let cgroups = &node.world.cgroups;
    let path = format!("{}/{}", node.world.paths.default_cgroup(), uid(1));
    assert_eq!(cgroups.observe(&path).0, 0);
    cgroups.ensure(&path).unwrap();
    cgroups.ensure(&path).unwrap();
    let (have, want) = cgroups.observe(&path);
    assert!(have == want && want > 0);
    let real = node.world.usage.as_ref().unwrap();
    assert!(real.dirs(&path).iter().all(|dir| dir.is_dir()));
    assert_eq!(cgroups.children(&node.world.paths.default_cgroup()), [uid(1)]);
    cgroups.remove(&path).unwrap();
    cgroups.remove(&path).unwrap();
    cgroups.remove_if_empty(&node.world.paths.default_cgroup());
    assert!(
        real.dirs(&node.world.paths.default_cgroup())
            .iter()
            .all(|dir| !dir.exists())
    );
}

#[tokio::test]
async fn namespaces_are_pinned_once_listed_and_unpinned() {
    let node = node("c0ffee02");
    let paths = &node.world.paths;
    let net = paths.netns(&uid(2));
    let dir = paths.pod_state(&uid(2));
    std::fs::create_dir_all(&dir).unwrap();
    let pins = Pins {
        net: Some(net.clone()),
        ipc: Some(dir.join("ipc")),
        uts: Some(dir.join("uts")),
        hostname: "contract".to_owned(),
        ..Pins::default()
    };
    let make = pins.clone();
    tokio::task::spawn_blocking(move || netns::ensure(&make, std::path::Path::new("")))
        .await
        .unwrap()
        .unwrap();
    let first = net_inode(&net);
    assert_ne!(first, net_inode(Path::new("/proc/self/ns/net")), "it is not the host's");
    tokio::task::spawn_blocking(move || netns::ensure(&pins, std::path::Path::new("")))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(net_inode(&net), first, "a whole set is left as it is");
    assert!(matches!(netns::observe(&net).unwrap(), Pin::Ns { inode } if inode == first));
    assert_eq!(netns::list(&paths.instance).unwrap(), [uid(2)]);
    for pin in [net.clone(), dir.join("ipc"), dir.join("uts")] {
        netns::remove(&pin).unwrap();
        netns::remove(&pin).unwrap();
        assert_eq!(netns::observe(&pin).unwrap(), Pin::Absent);
    }
    assert!(netns::list(&paths.instance).unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_is_attached_observed_and_taken_back() {
    let node = node("c0ffee03");
    let paths = &node.world.paths;
    let (pin, dir) = (paths.netns(&uid(3)), paths.pod(&uid(3)));
    std::fs::create_dir_all(&dir).unwrap();
    let pins = Pins {
        net: Some(pin.clone()),
        ..Pins::default()
    };
    tokio::task::spawn_blocking(move || netns::ensure(&pins, std::path::Path::new("")))
        .await
        .unwrap()
        .unwrap();
    let want = Want {
        uid: uid(3),
        netns: pin.clone(),
        dir: dir.clone(),
        ..Want::default()
    };
    let network = &node.world.network;
    assert_eq!(network.observe(&want).await.unwrap(), State::Absent);
    let first = network.ensure(&want).await.unwrap();
    let again = network.ensure(&want).await.unwrap();
    assert_eq!(first.addresses, again.addresses, "a sandbox keeps its addresses");
    assert!(matches!(network.observe(&want).await.unwrap(), State::Attached(_)));
    assert_eq!(network.list().await.unwrap(), [uid(3)]);
    network.remove(&uid(3), &dir, Some(&pin)).await.unwrap();
    network.remove(&uid(3), &dir, Some(&pin)).await.unwrap();
    netns::remove(&pin).unwrap();
    assert_eq!(network.observe(&want).await.unwrap(), State::Absent);
    network.sweep_node().await.unwrap();
}

#[tokio::test]
async fn a_root_file_system_is_mounted_once_and_unmounted() {
    let node = node("c0ffee04");
    let root = &node.world.paths.root;
    let dir = |name: &str| {
        let path = root.join("contract").join(name);
        std::fs::create_dir_all(&path).unwrap();
        path
    };
    let (lower, upper, work, target) = (dir("lower"), dir("upper"), dir("work"), dir("target"));
    std::fs::write(lower.join("file"), "below").unwrap();
    assert!(!files::is_mount_point(&target).unwrap());
    mounts::mount_rootfs(std::slice::from_ref(&lower), &upper, &work, &target, None).unwrap();
    mounts::mount_rootfs(std::slice::from_ref(&lower), &upper, &work, &target, None).unwrap();
    assert!(files::is_mount_point(&target).unwrap());
    assert_eq!(std::fs::read_to_string(target.join("file")).unwrap(), "below");
    std::fs::write(target.join("file"), "above").unwrap();
    assert_eq!(
        std::fs::read_to_string(lower.join("file")).unwrap(),
        "below",
        "the layer is not written"
    );
    files::unmount(&target).unwrap();
    files::unmount(&target).unwrap();
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(
        !table.contains(root.to_str().unwrap()),
        "nothing of it is mounted any more"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shim_is_started_once_found_and_ended() {
    let node = node("c0ffee05");
    let shims = &node.world.shims;
    std::fs::create_dir_all(node.world.paths.pod_state(&uid(5))).unwrap();
    assert!(shims.find(&uid(5)).await.is_none());
    let first = shims.ensure("ns", "pod", &uid(5)).await.unwrap().state().await.unwrap();
    let again = shims.ensure("ns", "pod", &uid(5)).await.unwrap().state().await.unwrap();
    assert_eq!(first.pid, again.pid, "one shim a pod");
    let line = std::fs::read_to_string(format!("/proc/{}/cmdline", first.pid)).unwrap();
    assert!(
        line.contains("ns") && line.contains("pod") && line.contains(&uid(5)),
        "pstree tells whose it is: {line}"
    );
    shims.remove(&uid(5)).await.unwrap();
    shims.remove(&uid(5)).await.unwrap();
    assert!(shims.find(&uid(5)).await.is_none());
    // Its socket closes a moment before the process has left its cgroup.
    let gone = || !Path::new(&format!("/proc/{}", first.pid)).exists() || zombie(first.pid);
    let ended = async {
        while !gone() || node.world.cgroups.remove(shims.cgroup()).is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), ended)
        .await
        .expect("the process and its cgroup are gone");
}

/// Ended, but not reaped by the machine's init yet.
fn zombie(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z'))
}

#[tokio::test]
async fn what_is_buried_is_gone_at_once_and_deleted_later_but_never_through_a_mount() {
    let node = node("c0ffee06");
    let root = &node.world.paths.root;
    let tree = root.join("tree");
    std::fs::create_dir_all(tree.join("a/b")).unwrap();
    let outside = root.join("outside");
    std::fs::create_dir_all(&outside).unwrap();
    std::fs::write(outside.join("precious"), "").unwrap();
    std::os::unix::fs::symlink(&outside, tree.join("link")).unwrap();
    node.world.files.bury(&tree).unwrap();
    node.world.files.bury(&tree).unwrap();
    assert!(!tree.exists());
    assert_eq!(node.world.files.empty_trash().await.unwrap(), 1);
    assert!(outside.join("precious").exists(), "links are not followed");
    assert_eq!(std::fs::read_dir(root.join("trash")).unwrap().count(), 0);
}
