//! References and manifests.

use std::str::FromStr;

use oci_spec::image::Digest;
use reconciler::world::linux::registry::Class;

use crate::common::{MANIFEST, access, client, with};
use crate::server::{Fault, Server, digest};

const BODY: &[u8] = br#"{"schemaVersion":2,"layers":[]}"#;

#[tokio::test]
async fn a_tag_costs_one_request_and_a_manifest_is_verified() {
    let server = Server::start().await.unwrap();
    let named = server.manifest("a/b", "t", MANIFEST, BODY);
    let registry = client();
    let access = with(&server, Vec::new());
    let resolved = registry.resolve(&access).await.unwrap();
    assert_eq!(resolved.digest.to_string(), named);
    assert_eq!(resolved.media_type, MANIFEST);
    assert_eq!(resolved.size, BODY.len() as u64);
    assert_eq!(resolved.host, server.host());
    assert!(resolved.body.is_none());
    let seen = server.take_seen();
    assert_eq!(seen.len(), 1, "{seen:?}");
    assert_eq!(
        (seen[0].method.as_str(), seen[0].path.as_str()),
        ("HEAD", "/v2/a/b/manifests/t")
    );
    let accepted = seen[0].header("accept").unwrap();
    for media_type in [
        "manifest.v2+json",
        "manifest.list.v2+json",
        "image.manifest.v1+json",
        "image.index.v1+json",
    ] {
        assert!(accepted.contains(media_type), "{accepted}");
    }
    let body = registry
        .manifest(&access, &resolved.digest, Some(resolved.size))
        .await
        .unwrap();
    assert_eq!(body, BODY);
    let wrong = registry.manifest(&access, &resolved.digest, Some(7)).await.unwrap_err();
    assert_eq!(wrong.class(), Class::Bad, "{wrong}");
}

#[tokio::test]
async fn without_head_or_headers_the_body_tells() {
    for fault in [Fault::Status(405), Fault::Bare] {
        let server = Server::start().await.unwrap();
        let named = server.manifest("a/b", "t", MANIFEST, BODY);
        server.fault("HEAD", fault.clone(), 1);
        server.fault("GET", Fault::Bare, 1);
        let resolved = client().resolve(&with(&server, Vec::new())).await.unwrap();
        assert_eq!(resolved.digest.to_string(), named, "{fault:?}");
        assert_eq!(resolved.media_type, MANIFEST, "{fault:?}");
        assert_eq!(resolved.body.unwrap(), BODY, "{fault:?}");
        assert_eq!(server.seen().len(), 2, "{fault:?}");
    }
}

#[tokio::test]
async fn by_digest_nothing_else_is_taken() {
    let server = Server::start().await.unwrap();
    let named = server.manifest("a/b", "t", MANIFEST, BODY);
    let by_digest = access(&format!("{}/a/b@{named}", server.host()));
    assert_eq!(client().resolve(&by_digest).await.unwrap().digest.to_string(), named);
    server.fault("HEAD", Fault::Digest(digest(b"other")), 1);
    let error = client().resolve(&by_digest).await.unwrap_err();
    assert_eq!(error.class(), Class::Bad, "{error}");

    let digest = Digest::from_str(&named).unwrap();
    server.fault("GET", Fault::Corrupt, 1);
    let error = client().manifest(&by_digest, &digest, None).await.unwrap_err();
    assert_eq!(error.class(), Class::Bad, "{error}");
    assert!(error.to_string().contains(server.host()), "{error}");
    assert!(error.to_string().contains(&named), "{error}");
}

#[tokio::test]
async fn absent_is_told_apart() {
    let server = Server::start().await.unwrap();
    let error = client().resolve(&with(&server, Vec::new())).await.unwrap_err();
    assert_eq!(error.class(), Class::Absent);
    let text = error.to_string();
    assert!(
        text.contains(&format!("{}/a/b:t", server.host())) && text.contains("404 Not Found"),
        "{text}"
    );

    // Nobody listens.
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let error = client()
        .resolve(&access(&format!("127.0.0.1:{port}/a")))
        .await
        .unwrap_err();
    assert_eq!(error.class(), Class::Unavailable);
    assert!(
        error.to_string().to_lowercase().contains("connection refused"),
        "{error}"
    );

    server.fault("HEAD", Fault::Silence, 9);
    let error = client().resolve(&with(&server, Vec::new())).await.unwrap_err();
    assert_eq!(error.class(), Class::Unavailable, "{error}");
}

#[tokio::test]
async fn documents_have_limits() {
    let server = Server::start().await.unwrap();
    let big = vec![b' '; (8 << 20) + 1];
    let named = server.manifest("a/b", "t", MANIFEST, &big);
    let registry = client();
    let access = with(&server, Vec::new());
    assert_eq!(registry.resolve(&access).await.unwrap_err().class(), Class::Bad);
    server.fault("GET", Fault::LongerUnsaid(1), 1);
    let error = registry
        .manifest(&access, &Digest::from_str(&named).unwrap(), None)
        .await
        .unwrap_err();
    assert_eq!(error.class(), Class::Bad, "{error}");
    assert!(error.to_string().contains("8388608"), "{error}");
}

#[tokio::test]
async fn schema_1_is_refused_by_name() {
    let server = Server::start().await.unwrap();
    let media_type = "application/vnd.docker.distribution.manifest.v1+prettyjws";
    server.manifest("a/b", "t", media_type, br#"{"schemaVersion":1}"#);
    let error = client().resolve(&with(&server, Vec::new())).await.unwrap_err();
    assert!(error.to_string().contains("schema 1"), "{error}");
}

#[tokio::test]
async fn busy_and_failing_servers_are_asked_again() {
    let server = Server::start().await.unwrap();
    server.manifest("a/b", "t", MANIFEST, BODY);
    let registry = client();
    let access = with(&server, Vec::new());
    registry.resolve(&access).await.unwrap();
    server.take_seen();

    server.fault("HEAD", Fault::Later(429, 1), 2);
    let began = std::time::Instant::now();
    registry.resolve(&access).await.unwrap();
    assert!(began.elapsed().as_millis() >= 2000, "Retry-After was not honoured");
    assert_eq!(server.take_seen().len(), 3);

    server.fault("HEAD", Fault::LaterDate(429), 1);
    let began = std::time::Instant::now();
    registry.resolve(&access).await.unwrap();
    // The back-off would be half a second.
    assert!(
        began.elapsed().as_millis() >= 1000,
        "Retry-After with a date was not honoured"
    );
    assert_eq!(server.take_seen().len(), 2);

    server.fault("HEAD", Fault::Later(429, 0), 99);
    let error = registry.resolve(&access).await.unwrap_err();
    assert_eq!(error.class(), Class::Unavailable, "{error}");
    assert_eq!(server.seen().iter().filter(|seen| seen.status == 429).count() % 5, 0);
    server.heal();
    server.take_seen();

    server.fault("HEAD", Fault::Status(503), 1);
    registry.resolve(&access).await.unwrap();
    // The same status twice in a row is enough.
    server.fault("HEAD", Fault::Status(500), 99);
    server.take_seen();
    let error = registry.resolve(&access).await.unwrap_err();
    assert_eq!(error.class(), Class::Unavailable);
    assert!(error.to_string().contains("500 Internal Server Error"), "{error}");
}

#[tokio::test]
async fn other_refusals_of_the_request_are_told_as_they_are() {
    let server = Server::start().await.unwrap();
    server.fault("HEAD", Fault::Status(400), 9);
    let error = client().resolve(&with(&server, Vec::new())).await.unwrap_err();
    assert_eq!(error.class(), Class::Bad);
    assert!(error.to_string().contains("400 Bad Request"), "{error}");
}
