//! What survives: SIGKILL, damaged files, a full disk.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use state::image::{ImageKind, ImageSpec};
use state::store::{Copied, Copies, Opened};
use state::{Error, Image, Kind, Meta, New, Put, Store};

fn no_copies() -> Copies {
    Copies {
        all: Box::new(Vec::new),
        one: Box::new(|_, _| None),
    }
}

/// Copies as the loop leaves them beside the objects.
#[derive(Clone, Default)]
struct Beside(Arc<Mutex<BTreeMap<String, Vec<u8>>>>);

fn all_of(copies: &BTreeMap<String, Vec<u8>>) -> Vec<Copied> {
    let copied = |(uid, json): (&String, &Vec<u8>)| Copied {
        kind: ImageKind::KIND,
        uid: uid.clone(),
        json: json.clone(),
    };
    copies.iter().map(copied).collect()
}

impl Beside {
    fn add(&self, image: &Image) {
        self.0
            .lock()
            .unwrap()
            .insert(image.uid().to_owned(), image.to_json().unwrap());
    }
    fn copies(&self) -> Copies {
        let (all, one) = (self.0.clone(), self.0.clone());
        Copies {
            all: Box::new(move || all_of(&all.lock().unwrap())),
            one: Box::new(move |_, uid| one.lock().unwrap().get(uid).cloned()),
        }
    }
}

fn image(name: &str, epoch: u64) -> New<ImageKind> {
    New {
        meta: Meta {
            name: name.into(),
            annotations: [("padding".to_owned(), "x".repeat(300))].into(),
            ..Meta::default()
        },
        spec: ImageSpec {
            pull_epoch: epoch,
            ..ImageSpec::default()
        },
    }
}

async fn create(store: &Store, new: New<ImageKind>) -> Arc<Image> {
    match store.create(new).await.unwrap() {
        Put::Created(object) | Put::Joined(object) => object,
    }
}

async fn raise(store: &Store, uid: &str) -> state::Result<Arc<Image>> {
    let raise = |_: &mut Meta, spec: &mut ImageSpec| {
        spec.pull_epoch += 1;
        Ok(())
    };
    store.update::<ImageKind, _>(uid, raise).await
}

/// name to pull epoch
fn content(store: &Store) -> BTreeMap<String, u64> {
    store
        .list::<ImageKind>()
        .iter()
        .map(|o| (o.meta.name.clone(), o.spec.pull_epoch))
        .collect()
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}

/// The writer that is killed: this test, run again by [`killed_writers_lose_nothing`]. It prints what is acknowledged.
#[test]
#[ignore = "child of killed_writers_lose_nothing"]
fn writer() {
    let root = PathBuf::from(std::env::var_os("WRITER_ROOT").unwrap());
    let (store, opened) = Store::open(&root, no_copies()).unwrap();
    assert_eq!(opened.rebuilt, None);
    let round = std::env::var("WRITER_ROUND").unwrap();
    runtime().block_on(async {
        let out = Arc::new(Mutex::new(std::io::stdout()));
        let tasks = (0..4).map(|task| {
            let (store, out, round) = (store.clone(), out.clone(), round.clone());
            tokio::spawn(async move {
                for i in 0.. {
                    let name = format!("r{round}-{task}-{i}");
                    let object = create(&store, image(&name, 1)).await;
                    writeln!(out.lock().unwrap(), "ack {name} 1").unwrap();
                    if i % 2 == 0 {
                        raise(&store, object.uid()).await.unwrap();
                        writeln!(out.lock().unwrap(), "ack {name} 2").unwrap();
                    } else {
                        writeln!(out.lock().unwrap(), "deleting {name} 0").unwrap();
                        store.delete::<ImageKind>(object.uid()).await.unwrap();
                        writeln!(out.lock().unwrap(), "gone {name} 0").unwrap();
                        store.erase::<ImageKind>(object.uid()).await.unwrap();
                    }
                }
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.unwrap();
        }
    });
}

#[test]
fn killed_writers_lose_nothing() {
    let root = tempfile::tempdir().unwrap();
    let mut wanted: BTreeMap<String, u64> = BTreeMap::new();
    let mut gone = std::collections::BTreeSet::new();
    let mut acknowledged = 0;
    for round in 0..200 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "writer", "--ignored", "--nocapture"])
            .env("WRITER_ROOT", root.path())
            .env("WRITER_ROUND", round.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // Killed after some of its lines, somewhere in the work on the next.
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut left = 1 + round * 7 % 23;
        for line in lines {
            let line = line.unwrap();
            let mut words = line.split(' ');
            let (Some(what), Some(name), Some(epoch)) = (words.next(), words.next(), words.next()) else {
                continue;
            };
            match what {
                "ack" => drop(wanted.insert(name.to_owned(), epoch.parse().unwrap())),
                "deleting" => drop(wanted.remove(name)),
                "gone" => drop(gone.insert(name.to_owned())),
                _ => continue,
            }
            acknowledged += 1;
            left -= 1;
            if left == 0 {
                child.kill().unwrap();
            }
        }
        child.wait().unwrap();
        if round % 20 == 19 {
            let (store, opened) = Store::open(root.path(), no_copies()).unwrap();
            assert_eq!(opened.rebuilt, None, "round {round}");
            for (name, epoch) in &wanted {
                let found = store
                    .by_name::<ImageKind>(name)
                    .unwrap_or_else(|| panic!("{name} is lost"));
                assert!(found.spec.pull_epoch >= *epoch, "{name} is older than acknowledged");
            }
            for name in &gone {
                assert!(store.by_name::<ImageKind>(name).is_none(), "{name} is back");
            }
        }
    }
    println!("{acknowledged} acknowledged");
    assert!(acknowledged > 1000);
}

fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_dir(&entry.path(), &target);
        } else if entry.file_name() != "store.ballast" {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// A root with 60 images, raised once, half with copies; what it holds.
fn prepared(root: &Path, beside: &Beside) -> BTreeMap<String, u64> {
    let (store, _) = Store::open(root, no_copies()).unwrap();
    runtime().block_on(async {
        for i in 0..60 {
            let object = create(&store, image(&format!("i{i}"), 0)).await;
            let object = raise(&store, object.uid()).await.unwrap();
            beside.add(&object);
        }
    });
    content(&store)
}

/// Opens a damaged root: all must be there, or what is missing be told.
fn check(root: &Path, beside: &Beside, wanted: &BTreeMap<String, u64>, what: &str) -> Opened {
    let (store, opened) = Store::open(root, beside.copies()).unwrap_or_else(|e| panic!("{what}: {e}"));
    let found = content(&store);
    assert_eq!(
        found.len() + opened.quarantined.len(),
        wanted.len(),
        "{what}: {opened:?}"
    );
    for (name, epoch) in &found {
        assert_eq!(wanted.get(name), Some(epoch), "{what}: {name}");
    }
    // It goes on, and the next opening finds nothing wrong.
    runtime().block_on(create(&store, image("after", 0)));
    drop(store);
    let (store, again) = Store::open(root, beside.copies()).unwrap_or_else(|e| panic!("{what}, again: {e}"));
    assert_eq!(again.rebuilt, None, "{what}");
    assert_eq!(content(&store).len(), found.len() + 1, "{what}");
    opened
}

#[test]
fn damaged_files_lose_no_record() {
    let base = tempfile::tempdir().unwrap();
    let beside = Beside::default();
    let wanted = prepared(base.path(), &beside);
    let db = base.path().join("store/db");
    let size = std::fs::metadata(&db).unwrap().len();
    // Where there is something: sled's file is mostly holes and zeros.
    let bytes = std::fs::read(&db).unwrap();
    let used: Vec<u64> = (0..size).filter(|at| bytes[*at as usize] != 0).collect();
    let (mut rebuilt, mut harmless, mut single) = (0, 0, 0);
    for round in 0..100 {
        let root = tempfile::tempdir().unwrap();
        copy_dir(base.path(), root.path());
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(root.path().join("store/db"))
            .unwrap();
        let at = used[(round * used.len() / 100 + round * 31) % used.len()];
        let what = match round % 4 {
            0 => {
                file.set_len(at).unwrap();
                format!("truncated at {at} of {size}")
            }
            1 => {
                let end = (at + 512).min(size) - at;
                file.write_all_at(&vec![0; end as usize], at).unwrap();
                format!("zeros at {at}")
            }
            _ => {
                file.write_all_at(&[bytes[at as usize] ^ (1 << (round % 8))], at)
                    .unwrap();
                format!("bit flipped at {at}")
            }
        };
        drop(file);
        let opened = check(root.path(), &beside, &wanted, &what);
        match (opened.rebuilt, opened.quarantined.is_empty()) {
            (Some(_), _) => {
                rebuilt += 1;
                assert!(root.path().join("store.damaged-1").exists(), "{what}");
            }
            (None, true) => harmless += 1,
            (None, false) => single += 1,
        }
    }
    println!("rebuilt {rebuilt}, nothing to do {harmless}, quarantined {single}");
    assert!(rebuilt > 10);
}

#[test]
fn a_missing_or_foreign_database_is_rebuilt() {
    let base = tempfile::tempdir().unwrap();
    let beside = Beside::default();
    let wanted = prepared(base.path(), &beside);
    for what in [
        "store removed",
        "store emptied",
        "another root's store",
        "an older store",
        "no watermark",
    ] {
        let root = tempfile::tempdir().unwrap();
        copy_dir(base.path(), root.path());
        let store = root.path().join("store");
        match what {
            "store removed" => std::fs::remove_dir_all(&store).unwrap(),
            "store emptied" => std::fs::File::options()
                .write(true)
                .open(store.join("db"))
                .unwrap()
                .set_len(0)
                .unwrap(),
            "another root's store" => {
                std::fs::write(root.path().join("id"), "0123456789abcdef0123456789abcdef\n").unwrap()
            }
            "an older store" => {
                std::fs::remove_dir_all(&store).unwrap();
                let other = tempfile::tempdir().unwrap();
                std::fs::copy(root.path().join("id"), other.path().join("id")).unwrap();
                let (early, _) = Store::open(other.path(), no_copies()).unwrap();
                runtime().block_on(create(&early, image("i0", 0)));
                drop(early);
                copy_dir(&other.path().join("store"), &store);
            }
            _ => std::fs::remove_file(root.path().join("store.watermark")).unwrap(),
        }
        let opened = check(root.path(), &beside, &wanted, what);
        println!("{what}: {:?}", opened.rebuilt);
        assert_eq!(opened.rebuilt.is_some(), what != "no watermark", "{what}");
    }
    // A new root is nothing to report.
    let root = tempfile::tempdir().unwrap();
    let (_, opened) = Store::open(root.path(), no_copies()).unwrap();
    assert_eq!(opened.rebuilt, None);
}

#[test]
fn copies_are_imported_as_delivered_and_made_consistent() {
    let beside = Beside::default();
    let root = tempfile::tempdir().unwrap();
    let (store, _) = Store::open(root.path(), no_copies()).unwrap();
    let (old, new) = runtime().block_on(async {
        let mut trial = image("twice", 1);
        trial.meta.ready_by = Some(5);
        let old = create(&store, trial.clone()).await;
        trial.spec.source = state::image::ImageSource::BuiltIn;
        (old, create(&store, trial).await)
    });
    // The copy of the replaced record does not know of its end.
    beside.add(&old);
    beside.add(&new);
    beside
        .0
        .lock()
        .unwrap()
        .insert("broken".into(), old.to_json().unwrap()[..200].to_vec());
    beside.0.lock().unwrap().insert("empty".into(), Vec::new());
    drop(store);
    std::fs::remove_dir_all(root.path().join("store")).unwrap();
    let (store, opened) = Store::open(root.path(), beside.copies()).unwrap();
    assert_eq!(opened.rebuilt.as_deref(), Some("the database is missing"));
    assert_eq!(opened.quarantined.len(), 2, "{opened:?}");
    assert!(store.get::<ImageKind>(old.uid()).unwrap().meta.deleted());
    let kept = store.by_name::<ImageKind>("twice").unwrap();
    assert_eq!((kept.uid(), kept.meta.ready_by), (new.uid(), None));
}

/// A file system of its own, which can be filled.
struct Disk(tempfile::TempDir);

impl Disk {
    fn new(megabytes: u32) -> Disk {
        let dir = tempfile::tempdir().unwrap();
        let options = format!("size={megabytes}m");
        nix::mount::mount(
            Some("state-test"),
            dir.path(),
            Some("tmpfs"),
            nix::mount::MsFlags::empty(),
            Some(&*options),
        )
        .unwrap();
        Disk(dir)
    }
    /// Writes zeros until nothing more fits.
    fn fill(&self) {
        let mut file = std::fs::File::create(self.0.path().join("filler")).unwrap();
        while file.write_all(&[0; 4096]).is_ok() {}
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        nix::mount::umount2(self.0.path(), nix::mount::MntFlags::MNT_DETACH).unwrap();
    }
}

#[test]
fn a_full_disk_takes_removals() {
    let disk = Disk::new(48);
    let root = disk.0.path().join("root");
    let beside = Beside::default();
    let wanted = prepared(&root, &beside);
    let (store, _) = Store::open(&root, no_copies()).unwrap();
    disk.fill();
    let runtime = runtime();
    runtime.block_on(async {
        let error = store.create(image("new", 0)).await.unwrap_err();
        assert!(matches!(error, Error::Full { .. }), "{error}");
        assert!(store.by_name::<ImageKind>("new").is_none());
        // Every record can be changed and deleted, again and again.
        for object in store.list::<ImageKind>() {
            raise(&store, object.uid()).await.unwrap();
            store.delete::<ImageKind>(object.uid()).await.unwrap();
        }
        let first = store.list::<ImageKind>()[0].clone();
        store.erase::<ImageKind>(first.uid()).await.unwrap();
    });
    assert_eq!(store.list::<ImageKind>().len(), wanted.len() - 1);
    drop(store);
    // It opens on the full disk, and takes records as soon as there is room.
    let (store, opened) = Store::open(&root, no_copies()).unwrap();
    assert_eq!(opened.rebuilt, None);
    assert_eq!(store.list::<ImageKind>().len(), wanted.len() - 1);
    assert!(
        store
            .list::<ImageKind>()
            .iter()
            .all(|o| o.meta.deleted() && o.spec.pull_epoch == 2)
    );
    assert!(matches!(
        runtime.block_on(store.create(image("new", 0))),
        Err(Error::Full { .. })
    ));
    std::fs::remove_file(disk.0.path().join("filler")).unwrap();
    runtime.block_on(create(&store, image("new", 0)));
    drop(store);
    let (store, _) = Store::open(&root, no_copies()).unwrap();
    assert!(store.by_name::<ImageKind>("new").is_some());
}

#[test]
fn a_disk_that_fills_up_under_writes_loses_nothing_acknowledged() {
    let disk = Disk::new(32);
    let root = disk.0.path().join("root");
    let (store, _) = Store::open(&root, no_copies()).unwrap();
    let runtime = runtime();
    let (mut known, mut refused) = (BTreeMap::new(), 0);
    runtime.block_on(async {
        for i in 0..100 {
            create(&store, image(&format!("i{i}"), 0)).await;
            known.insert(format!("i{i}"), 0);
        }
        disk.fill();
        // Changes are taken until the reserve is used up, too.
        for object in store.list::<ImageKind>() {
            let grow = |meta: &mut Meta, spec: &mut ImageSpec| {
                meta.annotations.insert("padding".into(), "y".repeat(250_000));
                spec.pull_epoch = 1;
                Ok(())
            };
            match store.update::<ImageKind, _>(object.uid(), grow).await {
                Ok(_) => drop(known.insert(object.meta.name.clone(), 1)),
                Err(Error::Full { .. }) => refused += 1,
                Err(error) => panic!("{error}"),
            }
        }
    });
    println!("{} of 100 changes refused", refused);
    assert!(refused > 0 && refused < 100);
    assert_eq!(content(&store), known);
    std::fs::remove_file(disk.0.path().join("filler")).unwrap();
    // The same store goes on.
    runtime.block_on(create(&store, image("b", 7)));
    known.insert("b".into(), 7);
    assert_eq!(content(&store), known);
    drop(store);
    let (store, opened) = Store::open(&root, no_copies()).unwrap();
    assert_eq!(opened.rebuilt, None);
    assert_eq!(content(&store), known);
}

#[test]
fn opening_is_quick_and_writes_nothing_when_idle() {
    let root = tempfile::tempdir().unwrap();
    let (store, _) = Store::open(root.path(), no_copies()).unwrap();
    runtime().block_on(async {
        let tasks: Vec<_> = (0..1000)
            .map(|i| {
                let store = store.clone();
                tokio::spawn(async move { create(&store, image(&format!("i{i}"), 0)).await })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
    });
    drop(store);
    let started = std::time::Instant::now();
    let (store, _) = Store::open(root.path(), no_copies()).unwrap();
    println!("opened 1,000 records in {:?}", started.elapsed());
    assert_eq!(store.list::<ImageKind>().len(), 1000);
}
