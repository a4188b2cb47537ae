//! The same cases against the simulated node and, as root, the real one: what the loop relies on, part by part.
//! `ensure` twice is `ensure` once, `remove` twice is `remove` once, `observe` tells the truth. What only the real node
//! has is in `world_contract`.

mod sim;

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use reconciler::world::linux::netns::{Pin, Pins};
use reconciler::world::linux::network::{Config, Mode, State, Want};
use reconciler::world::paths::DIR_MODE;
use reconciler::world::{Entry, Paths, Settings, World};
use shim::record::End;
use sim::node::Sim;

/// Runs a case against both.
fn on_both<F: Future<Output = ()>>(instance: &str, case: impl Fn(Arc<World>) -> F) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        let sim = Sim::new(1);
        sim.lock().run(true);
        let (world, _) = sim::parts::world(&sim);
        case(Arc::new(world)).await;
        assert_eq!(sim.lock().problems, Vec::<String>::new());
    });
    let dir = tempfile::Builder::new()
        .prefix("rc-parts-")
        .tempdir_in("/var/tmp")
        .unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let world = real(dir.path(), instance);
        case(Arc::new(world)).await;
    });
}

fn real(dir: &Path, instance: &str) -> World {
    let root = dir.join("root");
    let own = std::env::current_exe().unwrap();
    let shim = own.parent().unwrap().parent().unwrap().join("reconcile-shim");
    assert!(
        shim.exists(),
        "{} is missing: run `cargo build --release` first",
        shim.display()
    );
    World::open(Settings {
        shim_cgroup: None,
        systemd: Some(false),
        paths: Arc::new(Paths {
            root: root.clone(),
            state: dir.join("state"),
            instance: instance.to_owned(),
        }),
        shim,
        network: Config {
            mode: Mode::Builtin,
            ..Config::new(instance, root)
        },
        registry: Default::default(),
    })
    .unwrap()
}

fn uid(n: u8) -> String {
    format!("{n:02x}").repeat(32)
}

#[test]
fn files() {
    on_both("c0ffee11", async |world| {
        let files = &world.files;
        let dir = world.paths.pod(&uid(1));
        let file = dir.join("file");
        assert!(files.replace(&file, b"x").is_err(), "its directory is not there");
        assert_eq!(files.read(&file).unwrap(), None);
        files.make_dir(&dir, DIR_MODE).unwrap();
        files.make_dir(&dir, DIR_MODE).unwrap();
        files.replace(&file, b"one").unwrap();
        files.replace(&file, b"two").unwrap();
        assert_eq!(files.read(&file).unwrap().as_deref(), Some(&b"two"[..]));
        files.make_dir(&dir.join("a/b"), DIR_MODE).unwrap();
        let entry = |name: &str, is_dir| Entry {
            name: name.to_owned(),
            is_dir,
        };
        assert_eq!(files.list(&dir).unwrap(), [entry("a", true), entry("file", false)]);
        assert!(files.remove_dir(&dir).is_err(), "it is not empty");
        files.unlink(&file).unwrap();
        files.unlink(&file).unwrap();
        assert!(!files.exists(&file) && files.exists(&dir.join("a")));
        files.bury(&dir).unwrap();
        files.bury(&dir).unwrap();
        assert!(!files.exists(&dir));
        assert_eq!(files.list(&dir).unwrap(), []);
        assert_eq!(files.empty_trash().await.unwrap(), 1);
        assert_eq!(files.empty_trash().await.unwrap(), 0);
        files.remove_dir(&dir).unwrap();
    });
}

#[test]
fn run_records() {
    on_both("c0ffee12", async |world| {
        let dir = world.paths.pod(&uid(2));
        let record = Paths::run_record(&dir);
        assert!(
            world.files.write_end(&record, End::lost(1)).is_err(),
            "its directory is not there"
        );
        assert!(world.files.run_record(&record).unwrap().is_none());
        world.files.make_dir(&dir, DIR_MODE).unwrap();
        world.files.write_end(&record, End::start_error("why", 7)).unwrap();
        world.files.write_end(&record, End::lost(8)).unwrap();
        let end = world.files.run_record(&record).unwrap().unwrap().end.unwrap();
        assert_eq!(
            (end.code, end.finished_at, end.message.as_str()),
            (128, 7, "why"),
            "the first end stands"
        );
    });
}

#[test]
fn mounts() {
    on_both("c0ffee13", async |world| {
        let (files, mounts) = (&world.files, &world.mounts);
        let target = world.paths.shm(&uid(3));
        assert!(!mounts.is_mounted(&target).unwrap());
        files.make_dir(&target, DIR_MODE).unwrap();
        mounts.shm(&target, 1 << 20, None).unwrap();
        mounts.shm(&target, 1 << 20, None).unwrap();
        assert!(mounts.is_mounted(&target).unwrap());
        assert!(files.remove_dir(&target).is_err(), "it is busy");
        assert_eq!(
            mounts.below(&[world.paths.pod_state(&uid(3))]).unwrap(),
            std::slice::from_ref(&target)
        );
        mounts.unmount(&target).unwrap();
        mounts.unmount(&target).unwrap();
        assert!(!files.exists(&target) && !mounts.is_mounted(&target).unwrap());
        let volume = world.paths.root.join("volume");
        files.make_dir(&volume, DIR_MODE).unwrap();
        mounts.tmpfs(&volume, 0).unwrap();
        mounts.tmpfs(&volume, 0).unwrap();
        mounts.unmount_only(&volume).unwrap();
        assert!(files.exists(&volume) && !mounts.is_mounted(&volume).unwrap());
    });
}

#[test]
fn cgroups() {
    on_both("c0ffee14", async |world| {
        let (cgroups, parent) = (&world.cgroups, world.paths.default_cgroup());
        let path = format!("{parent}/{}", uid(4));
        assert_eq!(cgroups.observe(&path).0, 0);
        cgroups.ensure(&path).unwrap();
        cgroups.ensure(&path).unwrap();
        let (have, want) = cgroups.observe(&path);
        assert!(have == want && want > 0);
        assert_eq!(cgroups.children(&parent), [uid(4)]);
        cgroups.remove_if_empty(&parent);
        assert!(cgroups.observe(&path).0 > 0, "a parent with children stays");
        cgroups.kill(&path).unwrap();
        cgroups.remove(&path).unwrap();
        cgroups.remove(&path).unwrap();
        cgroups.kill(&path).unwrap();
        cgroups.remove_if_empty(&parent);
        assert_eq!(cgroups.observe(&parent).0, 0);
    });
}

fn pins(world: &World, n: u8) -> (Pins, Vec<PathBuf>) {
    let dir = world.paths.pod_state(&uid(n));
    let pins = Pins {
        net: Some(world.paths.netns(&uid(n))),
        ipc: Some(dir.join("ipc")),
        uts: Some(dir.join("uts")),
        hostname: "contract".to_owned(),
        ..Pins::default()
    };
    (pins, vec![world.paths.netns(&uid(n)), dir.join("ipc"), dir.join("uts")])
}

#[test]
fn namespaces() {
    on_both("c0ffee15", async |world| {
        let instance = &world.paths.instance;
        world.files.make_dir(&world.paths.pod_state(&uid(5)), DIR_MODE).unwrap();
        let (want, paths) = pins(&world, 5);
        world.netns.ensure(want.clone()).await.unwrap();
        let inode = |path: &PathBuf| match world.netns.observe(path).unwrap() {
            Pin::Ns { inode } => inode,
            other => panic!("{other:?} of {instance}"),
        };
        let first: Vec<u64> = paths.iter().map(inode).collect();
        world.netns.ensure(want).await.unwrap();
        assert_eq!(
            paths.iter().map(inode).collect::<Vec<_>>(),
            first,
            "a whole set is left as it is"
        );
        assert_eq!(world.netns.list().unwrap(), [uid(5)]);
        for path in &paths {
            world.netns.remove(path).unwrap();
            world.netns.remove(path).unwrap();
            assert_eq!(world.netns.observe(path).unwrap(), Pin::Absent);
        }
        assert!(world.netns.list().unwrap().is_empty());
    });
}

#[test]
fn networks() {
    on_both("c0ffee16", async |world| {
        let (pin, dir) = (world.paths.netns(&uid(6)), world.paths.pod(&uid(6)));
        world.files.make_dir(&dir, DIR_MODE).unwrap();
        world.files.make_dir(&world.paths.pod_state(&uid(6)), DIR_MODE).unwrap();
        let (want, paths) = pins(&world, 6);
        let network = &world.network;
        let asked = Want {
            uid: uid(6),
            netns: pin.clone(),
            dir: dir.clone(),
            ..Want::default()
        };
        assert_eq!(network.observe(&asked).await.unwrap(), State::Absent);
        assert!(network.attachment(&dir).unwrap().is_none());
        world.netns.ensure(want).await.unwrap();
        let first = network.ensure(&asked).await.unwrap();
        let again = network.ensure(&asked).await.unwrap();
        assert!(first.complete && !first.addresses.is_empty());
        assert_eq!(first.addresses, again.addresses, "a sandbox keeps its addresses");
        assert!(matches!(network.observe(&asked).await.unwrap(), State::Attached(_)));
        assert_eq!(network.list().await.unwrap(), [uid(6)]);
        network.remove(&uid(6), &dir, Some(&pin)).await.unwrap();
        network.remove(&uid(6), &dir, Some(&pin)).await.unwrap();
        assert!(network.attachment(&dir).unwrap().is_none());
        network.forget(&dir).unwrap();
        paths.iter().for_each(|path| world.netns.remove(path).unwrap());
        assert_eq!(network.observe(&asked).await.unwrap(), State::Absent);
        network.sweep_node().await.unwrap();
    });
}

#[test]
fn shims() {
    on_both("c0ffee17", async |world| {
        let shims = &world.shims;
        world.files.make_dir(&world.paths.pod_state(&uid(7)), DIR_MODE).unwrap();
        assert!(shims.find(&uid(7)).await.is_none());
        let first = shims.ensure("ns", "pod", &uid(7)).await.unwrap().state().await.unwrap();
        let again = shims.ensure("ns", "pod", &uid(7)).await.unwrap().state().await.unwrap();
        assert_eq!((first.pid, first.uid), (again.pid, uid(7)), "one shim a pod");
        let shim = shims.find(&uid(7)).await.unwrap();
        shim.delete("nothing").await.unwrap();
        shims.remove(&uid(7)).await.unwrap();
        shims.remove(&uid(7)).await.unwrap();
        shim.closed().await;
        assert!(shims.find(&uid(7)).await.is_none());
        while world.cgroups.remove(shims.cgroup()).is_err() {
            // Its socket closes a moment before the process has left its cgroup.
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    });
}
