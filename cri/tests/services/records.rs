//! The records service: apply, get, watch, delete, once.

use crate::common::{HELLO, World, import, world};
use cri::records::v1;
use serde_json::{Value, json};
use state::container::ContainerKind;
use state::pod::PodKind;
use state::sandbox::SandboxKind;
use tonic::Code;

fn document(kind: &str, name: &str, spec: Value) -> v1::Document {
    let json = json!({ "apiVersion": "reconcile/v1", "kind": kind, "metadata": { "name": name }, "spec": spec });
    v1::Document {
        kind: kind.into(),
        json: serde_json::to_vec(&json).unwrap(),
    }
}

fn pod(name: &str, image: &str) -> v1::Document {
    document("Pod", name, json!({ "containers": [{ "name": "a", "image": image }] }))
}

impl World {
    async fn apply(&self, documents: Vec<v1::Document>, dry_run: bool) -> Result<Vec<v1::Applied>, tonic::Status> {
        let answer = self
            .records
            .clone()
            .apply(v1::ApplyRequest { documents, dry_run })
            .await?;
        Ok(answer.into_inner().applied)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn apply_twice_changes_nothing() {
    use v1::applied::Outcome::{Configured, Created, Unchanged};
    let world = world().await;
    let dry = world.apply(vec![pod("web", "localhost/hello")], true).await.unwrap();
    assert_eq!((dry[0].outcome(), dry[0].uid.as_str()), (Created, ""));
    assert!(world.store.list::<PodKind>().is_empty());
    let first = world.apply(vec![pod("web", "localhost/hello")], false).await.unwrap();
    assert_eq!(
        (first[0].outcome(), first[0].generation, first[0].namespace.as_str()),
        (Created, 1, "default")
    );
    let again = world.apply(vec![pod("web", "localhost/hello")], false).await.unwrap();
    assert_eq!(
        (again[0].outcome(), again[0].generation, &again[0].uid),
        (Unchanged, 1, &first[0].uid)
    );
    let dry = world.apply(vec![pod("web", "localhost/other")], true).await.unwrap();
    assert_eq!(dry[0].outcome(), Configured);
    assert_eq!(world.store.list::<PodKind>()[0].meta.generation, 1);
    let changed = world.apply(vec![pod("web", "localhost/other")], false).await.unwrap();
    assert_eq!(
        (changed[0].outcome(), changed[0].generation, &changed[0].uid),
        (Configured, 2, &first[0].uid)
    );
    // The same name in another namespace is another pod.
    let mut other: Value = serde_json::from_slice(&pod("web", "x").json).unwrap();
    other["metadata"]["namespace"] = json!("n2");
    let other = v1::Document {
        kind: "Pod".into(),
        json: serde_json::to_vec(&other).unwrap(),
    };
    assert_eq!(world.apply(vec![other], false).await.unwrap()[0].outcome(), Created);
    assert_eq!(world.store.list::<PodKind>().len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_bad_document_stops_all() {
    let world = world().await;
    for (bad, start) in [
        (document("Node", "n", json!({})), "documents[1].kind: "),
        (
            document("Pod", "p", json!({ "containers": [{ "name": "a", "imag": "x" }] })),
            "documents[1] (Pod): spec.containers[0].imag: ",
        ),
        (
            document("Pod", "p", json!({ "containers": [] })),
            "documents[1] (Pod): spec.containers: ",
        ),
        (
            document("Image", "A B", json!({ "source": "builtIn" })),
            "documents[1] (Image): metadata.name: ",
        ),
        (
            v1::Document {
                kind: "Pod".into(),
                json: b"{".to_vec(),
            },
            "documents[1] (Pod): ",
        ),
    ] {
        let error = world.apply(vec![pod("good", "x"), bad], false).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(
            error.message().starts_with(start),
            "{error:?} does not start with {start}"
        );
    }
    assert!(world.store.list::<PodKind>().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sandbox_and_container_documents() {
    let world = world().await;
    import(&world.store, "localhost/hello:latest", HELLO).await;
    let sandbox = document(
        "PodSandbox",
        "box",
        json!({ "pod": { "name": "a", "namespace": "d", "uid": "1" } }),
    );
    let container = |goal| {
        let spec = json!({ "goal": goal, "sandbox": "box", "name": "c", "image": { "requested": "localhost/hello" } });
        document("Container", "", spec)
    };
    let applied = world
        .apply(vec![sandbox.clone(), container("Running")], false)
        .await
        .unwrap();
    let record = world.store.get::<ContainerKind>(&applied[1].uid).unwrap();
    assert_eq!(
        (record.spec.image.id.as_str(), record.spec.sandbox.as_str()),
        (HELLO, applied[0].uid.as_str())
    );
    let again = world.apply(vec![sandbox, container("Running")], false).await.unwrap();
    assert!(
        again.iter().all(|a| a.outcome() == v1::applied::Outcome::Unchanged),
        "{again:?}"
    );
    let error = world.apply(vec![container("Created")], false).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    let delete = v1::DeleteRequest {
        kind: "Image".into(),
        name: "localhost/hello".into(),
        ..Default::default()
    };
    let mut records = world.records.clone();
    assert!(!records.delete(delete).await.unwrap().into_inner().uid.is_empty());
    let delete = v1::DeleteRequest {
        kind: "podsandboxes".into(),
        name: "box".into(),
        wait: true,
        ..Default::default()
    };
    assert_eq!(
        records.delete(delete.clone()).await.unwrap().into_inner().uid,
        applied[0].uid
    );
    assert!(world.store.list::<SandboxKind>().is_empty());
    assert_eq!(records.delete(delete).await.unwrap().into_inner().uid, "");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn get_and_watch() {
    let world = world().await;
    let applied = world.apply(vec![pod("a", "x"), pod("b", "x")], false).await.unwrap();
    let mut records = world.records.clone();
    let get = v1::GetRequest {
        kind: "Pod".into(),
        name: "b".into(),
        ..Default::default()
    };
    let found = records.get(get).await.unwrap().into_inner().documents;
    assert_eq!(found.len(), 1);
    let json: Value = serde_json::from_slice(&found[0].json).unwrap();
    assert_eq!(
        (json["kind"].as_str(), json["metadata"]["uid"].as_str()),
        (Some("Pod"), Some(applied[1].uid.as_str()))
    );
    assert!(json["status"].is_object());
    let get = v1::GetRequest {
        kind: "pods".into(),
        ..Default::default()
    };
    assert_eq!(records.get(get).await.unwrap().into_inner().documents.len(), 2);
    let error = records
        .get(v1::GetRequest {
            kind: "Session".into(),
            ..Default::default()
        })
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);

    let watch = v1::WatchRequest {
        kind: "Pod".into(),
        uid: applied[0].uid.clone(),
    };
    let mut changes = records.watch(watch).await.unwrap().into_inner();
    let first = changes.message().await.unwrap().unwrap();
    assert!(!first.erased);
    let delete = v1::DeleteRequest {
        kind: "Pod".into(),
        uid: applied[0].uid[..16].into(),
        ..Default::default()
    };
    records.delete(delete).await.unwrap();
    world.store.erase::<PodKind>(&applied[0].uid).await.unwrap();
    let mut last = first;
    while !last.erased {
        last = changes.message().await.unwrap().unwrap();
    }
    // The server's end ends the stream.
    world.closing.send(true).unwrap();
    assert!(changes.message().await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn once_without_a_loop_says_so() {
    let world = world().await;
    let error = world
        .records
        .clone()
        .once(v1::OnceRequest {
            dry_run: true,
            ..Default::default()
        })
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::Unimplemented);
}
