//! Records as version 0.1.0 wrote them: they must be read whole by every later version.

use serde_json::Value;
use state::container::ContainerKind;
use state::debt::DebtKind;
use state::image::ImageKind;
use state::node::NodeKind;
use state::pod::PodKind;
use state::sandbox::SandboxKind;
use state::store::{Copied, Copies};
use state::{Kind, Store};

/// Copies beside the objects, in the order of owners.
const GOLDEN: [&str; 5] = [
    include_str!("golden/node.json"),
    include_str!("golden/image.json"),
    include_str!("golden/pod.json"),
    include_str!("golden/sandbox.json"),
    include_str!("golden/container.json"),
];
const DEBT: &str = include_str!("golden/debt.json");

fn copies(all: &[String]) -> Copies {
    let kinds = [
        NodeKind::KIND,
        ImageKind::KIND,
        PodKind::KIND,
        SandboxKind::KIND,
        ContainerKind::KIND,
        DebtKind::KIND,
    ];
    let copied = |text: &String| {
        let json: Value = serde_json::from_str(text).unwrap();
        Copied {
            kind: kinds.into_iter().find(|kind| json["kind"] == *kind).unwrap(),
            uid: json["metadata"]["uid"].as_str().unwrap().to_owned(),
            json: text.clone().into_bytes(),
        }
    };
    let all: Vec<Copied> = all.iter().map(copied).collect();
    Copies {
        all: Box::new(move || all.clone()),
        one: Box::new(|_, _| None),
    }
}

/// As the copies are written; here they are laid out for people.
fn compact(text: &str) -> String {
    text.lines()
        .map(str::trim_start)
        .collect::<String>()
        .replace("\": ", "\":")
}

/// Everything of `old` is in `new`, equal.
fn kept(old: &Value, new: &Value, at: &str) {
    match (old, new) {
        (Value::Object(old), Value::Object(new)) => {
            for (key, value) in old {
                kept(value, new.get(key).unwrap_or(&Value::Null), &format!("{at}.{key}"));
            }
        }
        _ => assert_eq!(old, new, "{at}"),
    }
}

#[test]
fn records_of_the_first_version_stay_readable() {
    let root = tempfile::tempdir().unwrap();
    let all: Vec<String> = GOLDEN.iter().chain([&DEBT]).map(|text| compact(text)).collect();
    let (store, opened) = Store::open(root.path(), copies(&all)).unwrap();
    assert!(opened.quarantined.is_empty(), "{:?}", opened.quarantined);
    let mut read: Vec<Vec<u8>> = Vec::new();
    read.extend(store.list::<NodeKind>().iter().map(|o| o.to_json().unwrap()));
    read.extend(store.list::<ImageKind>().iter().map(|o| o.to_json().unwrap()));
    read.extend(store.list::<PodKind>().iter().map(|o| o.to_json().unwrap()));
    read.extend(store.list::<SandboxKind>().iter().map(|o| o.to_json().unwrap()));
    read.extend(store.list::<ContainerKind>().iter().map(|o| o.to_json().unwrap()));
    read.extend(store.list::<DebtKind>().iter().map(|o| o.to_json().unwrap()));
    assert_eq!(read.len(), all.len());
    for (old, new) in all.iter().zip(read) {
        let (old, new): (Value, Value) = (
            serde_json::from_str(old).unwrap(),
            serde_json::from_slice(&new).unwrap(),
        );
        kept(&old, &new, old["kind"].as_str().unwrap());
    }
}

#[test]
fn a_copy_of_a_newer_version_is_left_alone() {
    let root = tempfile::tempdir().unwrap();
    let newer = compact(GOLDEN[3]).replace("reconcile/v1", "reconcile/v2");
    assert!(newer.contains("reconcile/v2"));
    let uid = serde_json::from_str::<Value>(&newer).unwrap()["metadata"]["uid"]
        .as_str()
        .unwrap()
        .to_owned();
    let (store, opened) = Store::open(root.path(), copies(&[newer])).unwrap();
    assert!(store.quarantined(&uid) && store.list::<SandboxKind>().is_empty());
    assert!(
        opened.quarantined[0].2.contains("reconcile/v2"),
        "{:?}",
        opened.quarantined
    );
}
