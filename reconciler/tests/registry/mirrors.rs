//! `hosts.toml`: order, fall-back, what goes where.

use std::fs;
use std::time::Duration;

use crate::common::{MANIFEST, access, basic, client_with, descriptor, fetch, noise};
use crate::server::{Fault, Gate, Server};

#[tokio::test]
async fn mirrors_come_first_and_the_server_helps_out() {
    let mirror = Server::start().await.unwrap();
    let origin = Server::start().await.unwrap();
    let bytes = noise(200_000);
    let named = origin.blob("a/b", &bytes);
    mirror.blob("a/b", &bytes);
    origin.manifest("a/b", "t", MANIFEST, b"{}");
    origin.gate(Gate::basic("user", "hunter22"));
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(root.path().join("r.example")).unwrap();
    let text = format!(
        "server = \"{}\"\n[host.\"{}\"]\ncapabilities = [\"pull\"]\n[host.\"{}\".header]\nX-Tag = \"mine\"\n",
        origin.base(),
        mirror.base(),
        mirror.base()
    );
    fs::write(root.path().join("r.example/hosts.toml"), text).unwrap();
    let registry = client_with(vec![root.path().into()]);
    let mut access = access("r.example/a/b:t");
    let mut credential = basic("x", "user", "hunter22");
    credential.server_address = origin.host().into();
    access.credentials.push(credential);

    // The mirror may not resolve.
    registry.resolve(&access).await.unwrap();
    assert_eq!(mirror.seen().len(), 0);
    origin.take_seen();

    // It stalls: the rest comes from the server, by range.
    mirror.fault("/blobs/", Fault::Stall(50_000), 1);
    let began = std::time::Instant::now();
    let fetched = fetch(&registry, &access, &descriptor(&named, bytes.len()), 0)
        .await
        .unwrap();
    assert_eq!(fetched, bytes);
    assert!(began.elapsed() < Duration::from_secs(20));
    let seen = mirror.take_seen();
    assert!(seen[0].path.ends_with("?ns=r.example"), "{}", seen[0].path);
    assert_eq!(seen[0].header("x-tag"), Some("mine"));
    assert_eq!(
        seen[0].header("authorization"),
        None,
        "the credential is not the mirror's"
    );
    let seen = origin.take_seen();
    assert_eq!(seen[0].header("range"), Some("bytes=50000-"));
    assert_eq!(seen[0].header("x-tag"), None);

    // It does not have it, or fails: neither is worth a retry.
    for fault in [Fault::Status(404), Fault::Status(500)] {
        mirror.fault("/blobs/", fault, 1);
        assert_eq!(
            fetch(&registry, &access, &descriptor(&named, bytes.len()), 0)
                .await
                .unwrap(),
            bytes
        );
        assert_eq!(mirror.take_seen().len(), 1);
    }
}
