//! The store's promises towards its callers, on a real disk.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use state::container::{ContainerGoal, ContainerImage, ContainerKind, ContainerSpec};
use state::image::{ImageKind, ImageSpec};
use state::sandbox::{PodRef, SandboxGoal, SandboxKind, SandboxPhase, SandboxSpec, SandboxStatus};
use state::session::{SessionKind, SessionSpec, Wish};
use state::store::{Copies, Event};
use state::{Error, Meta, New, Owner, Put, Store};

fn no_copies() -> Copies {
    Copies {
        all: Box::new(Vec::new),
        one: Box::new(|_, _| None),
    }
}

fn open(root: &std::path::Path) -> Store {
    let (store, opened) = Store::open(root, no_copies()).unwrap();
    assert_eq!(opened.rebuilt, None);
    assert!(opened.quarantined.is_empty());
    store
}

fn sandbox(name: &str, ready_by: Option<u64>) -> New<SandboxKind> {
    New {
        meta: Meta {
            name: name.into(),
            ready_by,
            ..Meta::default()
        },
        spec: SandboxSpec {
            pod: PodRef {
                name: name.into(),
                namespace: "default".into(),
                uid: "u1".into(),
                attempt: 0,
            },
            ..SandboxSpec::default()
        },
    }
}

fn container(sandbox: &str, name: &str) -> New<ContainerKind> {
    New {
        meta: Meta {
            name: name.into(),
            owner: Some(Owner {
                kind: "PodSandbox".into(),
                uid: sandbox.into(),
            }),
            ..Meta::default()
        },
        spec: ContainerSpec {
            sandbox: sandbox.into(),
            name: name.into(),
            image: ContainerImage {
                requested: "localhost/hello".into(),
                ..ContainerImage::default()
            },
            ..ContainerSpec::default()
        },
    }
}

fn uid<K: state::Kind>(put: Put<K>) -> String {
    match put {
        Put::Created(object) | Put::Joined(object) => object.uid().to_owned(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_lives_over_a_restart() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let id = store.root_id().to_owned();
    assert_eq!(id.len(), 32);
    let made = uid(store.create(sandbox("a", Some(5))).await.unwrap());
    let container = uid(store.create(container(&made, "c")).await.unwrap());
    let set = |_: &mut Meta, spec: &mut ContainerSpec| {
        spec.goal = ContainerGoal::Running;
        Ok(())
    };
    let changed = store.update::<ContainerKind, _>(&container, set).await.unwrap();
    assert_eq!(changed.meta.generation, 2);
    store.deliver::<SandboxKind>(&made).await.unwrap();
    drop(store);

    let store = open(root.path());
    assert_eq!(store.root_id(), id);
    let read = store.by_name::<SandboxKind>("a").unwrap();
    assert_eq!(
        (read.uid(), read.meta.ready_by, read.meta.generation),
        (made.as_str(), None, 1)
    );
    assert_eq!(store.owned::<ContainerKind>(&made)[0].spec.goal, ContainerGoal::Running);
    // Younger than anything read.
    let next = uid(store.create(sandbox("b", None)).await.unwrap());
    let list = store.list::<SandboxKind>();
    assert_eq!(list.iter().map(|o| o.uid()).collect::<Vec<_>>(), [&next, &made]);
    assert!(list[0].meta.created > list[1].meta.created);
}

#[tokio::test(flavor = "multi_thread")]
async fn parallel_identical_creates_join() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let tasks: Vec<_> = (0..20)
        .map(|i| {
            let store = store.clone();
            tokio::spawn(async move { store.create(sandbox("a", Some(100 + i))).await })
        })
        .collect();
    let (mut uids, mut created) = (HashSet::new(), 0);
    for task in tasks {
        let put = task.await.unwrap().unwrap();
        created += usize::from(matches!(put, Put::Created(_)));
        uids.insert(uid(put));
    }
    assert_eq!((uids.len(), created), (1, 1));
    let record = &store.list::<SandboxKind>()[0];
    assert_eq!((record.meta.ready_by, record.meta.generation), (Some(119), 1));

    // Delivered: refused, naming the id.
    store.deliver::<SandboxKind>(record.uid()).await.unwrap();
    match store.create(sandbox("a", Some(500))).await {
        Err(Error::AlreadyExists { uid, .. }) => assert_eq!(uid, record.uid()),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_wish_replaces_an_undelivered_one() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let old = uid(store.create(sandbox("a", Some(5))).await.unwrap());
    let child = uid(store.create(container(&old, "c")).await.unwrap());
    let mut changed = sandbox("a", Some(6));
    changed.spec.hostname = "other".into();
    let new = uid(store.create(changed).await.unwrap());
    assert_ne!(old, new);
    assert!(store.get::<SandboxKind>(&old).unwrap().meta.deleted());
    assert!(store.get::<ContainerKind>(&child).unwrap().meta.deleted());
    assert_eq!(store.by_name::<SandboxKind>("a").unwrap().uid(), new);
    // So does a changed label.
    let mut labelled = sandbox("a", Some(6));
    labelled.meta.labels.insert("k".into(), "v".into());
    assert_ne!(uid(store.create(labelled).await.unwrap()), new);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_needs_a_living_owner() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let absent = "0".repeat(64);
    assert!(matches!(
        store.create(container(&absent, "c")).await,
        Err(Error::NotFound { kind: "PodSandbox", .. })
    ));
    let made = uid(store.create(sandbox("a", None)).await.unwrap());
    let stop = |_: &mut Meta, spec: &mut SandboxSpec| {
        spec.goal = SandboxGoal::Stopped;
        Ok(())
    };
    store.update::<SandboxKind, _>(&made, stop).await.unwrap();
    let error = store.create(container(&made, "c")).await.unwrap_err();
    assert_eq!(error.to_string(), "PodSandbox a: is stopped and takes no new children");
    let deleted = uid(store.create(sandbox("b", None)).await.unwrap());
    store.delete::<SandboxKind>(&deleted).await.unwrap();
    let error = store.create(container(&deleted, "c")).await.unwrap_err();
    assert!(matches!(error, Error::Conflict { .. }), "{error}");
    assert!(store.list::<ContainerKind>().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn deletion_cascades_and_erasure_goes_upwards() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let made = uid(store.create(sandbox("a", None)).await.unwrap());
    let child = uid(store.create(container(&made, "c")).await.unwrap());
    assert!(
        store
            .delete::<SandboxKind>(&made)
            .await
            .unwrap()
            .unwrap()
            .meta
            .deleted()
    );
    assert!(store.get::<ContainerKind>(&child).unwrap().meta.deleted());
    assert!(store.by_name::<SandboxKind>("a").is_none());
    assert!(matches!(
        store.erase::<SandboxKind>(&made).await,
        Err(Error::Conflict { .. })
    ));
    store.erase::<ContainerKind>(&child).await.unwrap();
    store.erase::<SandboxKind>(&made).await.unwrap();
    store.erase::<SandboxKind>(&made).await.unwrap();
    assert!(store.get::<SandboxKind>(&made).is_none());
    assert!(store.delete::<SandboxKind>(&made).await.unwrap().is_none());
    drop(store);
    assert!(open(root.path()).list::<SandboxKind>().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_update_without_a_difference_writes_nothing() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let made = uid(store.create(sandbox("a", None)).await.unwrap());
    let mut events = store.watch::<SandboxKind>();
    assert!(matches!(events.recv().await, Some(Event::Applied(_))));
    let same = store.update::<SandboxKind, _>(&made, |_, _| Ok(())).await.unwrap();
    assert_eq!(same.meta.generation, 1);
    assert!(events.try_recv().is_err());
    // What belongs to the store cannot be changed; labels can, without a new generation.
    let change = |meta: &mut Meta, _: &mut SandboxSpec| {
        meta.name = "other".into();
        meta.generation = 9;
        meta.labels.insert("k".into(), "v".into());
        Ok(())
    };
    let changed = store.update::<SandboxKind, _>(&made, change).await.unwrap();
    assert_eq!(
        (
            changed.meta.name.as_str(),
            changed.meta.generation,
            changed.meta.labels.len()
        ),
        ("a", 1, 1)
    );
    // A refused change changes nothing.
    let bad = |_: &mut Meta, spec: &mut SandboxSpec| {
        spec.pod.name.clear();
        Ok(())
    };
    let error = store.update::<SandboxKind, _>(&made, bad).await.unwrap_err();
    assert!(error.to_string().starts_with("spec.pod.name: "), "{error}");
    store.delete::<SandboxKind>(&made).await.unwrap();
    let stop = |_: &mut Meta, spec: &mut SandboxSpec| {
        spec.goal = SandboxGoal::Stopped;
        Ok(())
    };
    assert!(matches!(
        store.update::<SandboxKind, _>(&made, stop).await,
        Err(Error::Conflict { .. })
    ));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panicking_change_harms_its_own_call_only() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let made = uid(store.create(sandbox("a", None)).await.unwrap());
    let panics = |_: &mut Meta, _: &mut SandboxSpec| panic!("on purpose");
    assert!(matches!(
        store.update::<SandboxKind, _>(&made, panics).await,
        Err(Error::Closed)
    ));
    store.create(sandbox("b", None)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn statuses_wake_waiters_and_watchers_in_order() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let made = uid(store.create(sandbox("a", None)).await.unwrap());
    let mut events = store.watch::<SandboxKind>();
    let waiters: Vec<_> = (0..1000)
        .map(|_| {
            let (store, made) = (store.clone(), made.clone());
            tokio::spawn(async move {
                let ready =
                    |o: Option<&state::PodSandbox>| o.filter(|o| o.status.phase == SandboxPhase::Ready).map(drop);
                store.wait::<SandboxKind, _, _>(&made, None, ready).await
            })
        })
        .collect();
    for phase in [SandboxPhase::Pending, SandboxPhase::Pending, SandboxPhase::Ready] {
        let status = SandboxStatus {
            phase,
            ..SandboxStatus::default()
        };
        store.set_status::<SandboxKind>(&made, status);
    }
    for waiter in waiters {
        waiter.await.unwrap().unwrap();
    }
    // A later spec change keeps the status.
    let relabel = |meta: &mut Meta, _: &mut SandboxSpec| {
        meta.labels.insert("k".into(), "v".into());
        Ok(())
    };
    store.update::<SandboxKind, _>(&made, relabel).await.unwrap();
    store.delete::<SandboxKind>(&made).await.unwrap();
    store.erase::<SandboxKind>(&made).await.unwrap();
    let mut seen = Vec::new();
    while let Ok(event) = events.try_recv() {
        seen.push(match event {
            Event::Applied(o) => (o.status.phase, o.meta.labels.len(), o.meta.deleted()),
            Event::Erased(_) => (SandboxPhase::NotReady, 9, true),
        });
    }
    use SandboxPhase::{NotReady, Pending, Ready, Unknown};
    let wanted = [
        (Unknown, 0, false),
        (Pending, 0, false),
        (Ready, 0, false),
        (Ready, 1, false),
        (Ready, 1, true),
        (NotReady, 9, true),
    ];
    assert_eq!(seen, wanted);
    // Gone: told at once; not come by the deadline: told then.
    store
        .wait::<SandboxKind, _, _>(&made, None, |o| o.is_none().then_some(()))
        .await
        .unwrap();
    let deadline = Some(Instant::now() + Duration::from_millis(20));
    let error = store
        .wait::<SandboxKind, (), _>(&made, deadline, |_| None)
        .await
        .unwrap_err();
    assert!(matches!(error, Error::Deadline { .. }));
}

#[tokio::test(flavor = "multi_thread")]
async fn ids_resolve_by_prefix() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let made = uid(store.create(sandbox("a", Some(5))).await.unwrap());
    assert!(matches!(
        store.resolve::<SandboxKind>(&made[..12]),
        Err(Error::NotFound { .. })
    ));
    assert_eq!(store.resolve::<SandboxKind>(&made).unwrap().uid(), made);
    store.deliver::<SandboxKind>(&made).await.unwrap();
    assert_eq!(store.resolve::<SandboxKind>(&made[..12]).unwrap().uid(), made);
    assert!(matches!(store.resolve::<SandboxKind>(""), Err(Error::NotFound { .. })));
    for i in 0..20 {
        store.create(sandbox(&format!("b{i}"), None)).await.unwrap();
    }
    let digits = "0123456789abcdef";
    let ambiguous = (0..16).filter(|i| {
        matches!(
            store.resolve::<SandboxKind>(&digits[*i..=*i]),
            Err(Error::Ambiguous { .. })
        )
    });
    assert!(ambiguous.count() > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn names_are_scoped_by_namespace_and_owner() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let image = |name: &str, namespace: &str| New::<ImageKind> {
        meta: Meta {
            name: name.into(),
            namespace: namespace.into(),
            ..Meta::default()
        },
        spec: ImageSpec::default(),
    };
    let here = uid(store.create(image("localhost/hello", "")).await.unwrap());
    assert_eq!(store.by_name::<ImageKind>("localhost/hello").unwrap().uid(), here);
    let first = uid(store.create(image("web", "default")).await.unwrap());
    let second = uid(store.create(image("web", "other")).await.unwrap());
    assert_eq!(store.by_name::<ImageKind>("web").unwrap().uid(), first);
    assert_eq!(store.by_name::<ImageKind>("default/web").unwrap().uid(), first);
    assert_eq!(store.by_name::<ImageKind>("other/web").unwrap().uid(), second);
    let a = uid(store.create(sandbox("a", None)).await.unwrap());
    let b = uid(store.create(sandbox("b", None)).await.unwrap());
    store.create(container(&a, "c")).await.unwrap();
    store.create(container(&b, "c")).await.unwrap();
    assert!(matches!(
        store.create(container(&b, "c")).await,
        Err(Error::AlreadyExists { .. })
    ));
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_stay_in_memory() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let new = || New::<SessionKind> {
        meta: Meta {
            name: "s".into(),
            ..Meta::default()
        },
        spec: SessionSpec {
            container: "c".into(),
            wish: Wish::Exec(vec!["true".into()]),
            timeout_seconds: 0,
        },
    };
    let mut events = store.watch::<SessionKind>();
    let made = uid(store.create(new()).await.unwrap());
    assert!(matches!(store.create(new()).await, Err(Error::AlreadyExists { .. })));
    assert!(
        store
            .delete::<SessionKind>(&made)
            .await
            .unwrap()
            .unwrap()
            .meta
            .deleted()
    );
    store.erase::<SessionKind>(&made).await.unwrap();
    assert!(matches!(events.recv().await, Some(Event::Applied(o)) if !o.meta.deleted()));
    assert!(matches!(events.recv().await, Some(Event::Applied(o)) if o.meta.deleted()));
    assert!(matches!(events.recv().await, Some(Event::Erased(_))));
    store.create(new()).await.unwrap();
    drop(store);
    assert!(open(root.path()).list::<SessionKind>().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_root_has_one_store() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let error = Store::open(root.path(), no_copies()).err().unwrap();
    assert!(
        error.to_string().contains("another reconcile uses this root"),
        "{error}"
    );
    drop(store);
    open(root.path());
}

#[tokio::test(flavor = "multi_thread")]
async fn records_are_bounded() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path());
    let mut big = sandbox("a", None);
    big.spec.sysctls.insert("a".repeat(2 << 20), "1".into());
    let error = store.create(big).await.unwrap_err();
    assert!(
        matches!(&error, Error::Invalid { field, .. } if field.starts_with("spec")),
        "{error}"
    );
    assert!(store.list::<SandboxKind>().is_empty());
}
