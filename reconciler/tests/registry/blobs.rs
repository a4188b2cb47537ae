//! Bodies that break, stall, lie.

use std::time::{Duration, Instant};

use reconciler::world::linux::registry::{Class, Error};

use crate::common::{client, descriptor, fetch, noise, with};
use crate::server::{Fault, Server};

const SIZE: usize = 1 << 20;

#[tokio::test]
async fn whole_and_from_an_offset() {
    let server = Server::start().await.unwrap();
    let bytes = noise(SIZE);
    let descriptor = descriptor(&server.blob("a/b", &bytes), SIZE);
    let registry = client();
    let access = with(&server, Vec::new());
    assert_eq!(fetch(&registry, &access, &descriptor, 0).await.unwrap(), bytes);
    assert_eq!(server.sent(), SIZE as u64);
    server.take_seen();
    assert_eq!(
        fetch(&registry, &access, &descriptor, 1_000_000).await.unwrap(),
        bytes[1_000_000..]
    );
    assert_eq!(server.sent(), (SIZE - 1_000_000) as u64);
    assert_eq!(server.take_seen()[0].header("range"), Some("bytes=1000000-"));
    // All of it is here: nobody is asked.
    assert_eq!(fetch(&registry, &access, &descriptor, SIZE as u64).await.unwrap(), b"");
    assert_eq!(server.seen().len(), 0);
    assert!(registry.blob(&access, &descriptor, SIZE as u64 + 1).await.is_err());
}

#[tokio::test]
async fn a_broken_body_goes_on_where_it_broke() {
    let server = Server::start().await.unwrap();
    let bytes = noise(SIZE);
    let descriptor = descriptor(&server.blob("a/b", &bytes), SIZE);
    server.fault("/blobs/", Fault::Truncate(300_000), 1);
    server.fault("/blobs/", Fault::Truncate(1), 1);
    server.fault("/blobs/", Fault::Truncate(0), 2);
    let fetched = fetch(&client(), &with(&server, Vec::new()), &descriptor, 0)
        .await
        .unwrap();
    assert_eq!(fetched, bytes);
    assert_eq!(server.sent(), SIZE as u64, "a byte was sent twice");
    let ranges: Vec<_> = server
        .seen()
        .iter()
        .filter_map(|seen| seen.header("range").map(str::to_owned))
        .collect();
    assert_eq!(
        ranges,
        ["bytes=300000-", "bytes=300001-", "bytes=300001-", "bytes=300001-"]
    );
}

#[tokio::test]
async fn connections_that_bring_nothing_are_not_made_for_ever() {
    let server = Server::start().await.unwrap();
    let descriptor = descriptor(&server.blob("a/b", &noise(SIZE)), SIZE);
    server.fault("/blobs/", Fault::Truncate(100_000), 1);
    server.fault("/blobs/", Fault::Truncate(0), 99);
    let error = fetch(&client(), &with(&server, Vec::new()), &descriptor, 0)
        .await
        .unwrap_err();
    assert_eq!(error.class(), Class::Unavailable);
    let text = error.to_string();
    assert!(
        text.contains("100000 of 1048576 bytes") && text.contains(server.host()),
        "{text}"
    );
    assert!(server.seen().len() <= 5, "{} requests", server.seen().len());
}

#[tokio::test]
async fn a_trickle_by_new_connections_is_one() {
    let server = Server::start().await.unwrap();
    let descriptor = descriptor(&server.blob("a/b", &noise(SIZE)), SIZE);
    // 1,000 bytes/s, a tenth of the floor.
    server.fault("/blobs/", Fault::Crumb(Duration::from_millis(100), 100), 99_999);
    let error = fetch(&client(), &with(&server, Vec::new()), &descriptor, 0)
        .await
        .unwrap_err();
    assert_eq!(error.class(), Class::Unavailable);
    let text = error.to_string();
    assert!(
        text.contains("of 1048576 bytes") && text.contains(server.host()),
        "{text}"
    );
    assert!(server.seen().len() <= 5, "{} requests", server.seen().len());
}

#[tokio::test]
async fn servers_that_ignore_ranges_cost_bytes_but_no_mistake() {
    for fault in [Fault::NoRange, Fault::BadRange] {
        let server = Server::start().await.unwrap();
        let bytes = noise(SIZE);
        let descriptor = descriptor(&server.blob("a/b", &bytes), SIZE);
        server.fault("/blobs/", fault.clone(), 1);
        let fetched = fetch(&client(), &with(&server, Vec::new()), &descriptor, 700_000)
            .await
            .unwrap();
        assert_eq!(fetched, bytes[700_000..], "{fault:?}");
    }
}

#[tokio::test]
async fn a_stall_and_a_trickle_fail_with_what_is_here() {
    for fault in [Fault::Stall(400_000), Fault::Trickle(100, Duration::from_millis(20))] {
        let server = Server::start().await.unwrap();
        let named = server.blob("a/b", &noise(SIZE));
        let descriptor = descriptor(&named, SIZE);
        server.fault("/blobs/", fault.clone(), 99);
        let began = Instant::now();
        let error = fetch(&client(), &with(&server, Vec::new()), &descriptor, 0)
            .await
            .unwrap_err();
        assert!(
            began.elapsed() < Duration::from_secs(20),
            "{fault:?} took {:?}",
            began.elapsed()
        );
        assert_eq!(error.class(), Class::Unavailable);
        let Error::Slow {
            host,
            digest,
            done,
            total,
            ..
        } = &error
        else {
            panic!("{error}")
        };
        assert_eq!(
            (host.as_str(), digest.to_string(), *total),
            (server.host(), named, SIZE as u64)
        );
        match fault {
            Fault::Stall(bytes) => assert_eq!(*done, bytes),
            _ => assert!(*done > 0 && *done < 100_000, "{done}"),
        }
        assert_eq!(*done, server.sent().min(*done), "more bytes than were sent");
        assert!(
            error.to_string().contains(&format!("{done} of 1048576 bytes")),
            "{error}"
        );
    }
}

#[tokio::test]
async fn wrong_lengths_are_seen() {
    let server = Server::start().await.unwrap();
    let descriptor = descriptor(&server.blob("a/b", &noise(SIZE)), SIZE);
    let access = with(&server, Vec::new());
    for fault in [Fault::Longer(1), Fault::LongerUnsaid(1), Fault::LongerUnsaid(1 << 20)] {
        server.fault("/blobs/", fault.clone(), 1);
        let error = fetch(&client(), &access, &descriptor, 0).await.unwrap_err();
        assert_eq!(error.class(), Class::Bad, "{fault:?}: {error}");
    }
    let shorter = crate::common::descriptor(descriptor.digest().as_ref(), SIZE - 1);
    let error = fetch(&client(), &access, &shorter, 0).await.unwrap_err();
    assert_eq!(error.class(), Class::Bad, "{error}");
}

#[tokio::test]
async fn dropping_a_blob_ends_its_traffic() {
    let server = Server::start().await.unwrap();
    let size = 64 << 20;
    let descriptor = descriptor(&server.blob("a/b", &noise(size)), size);
    let registry = client();
    let mut blob = registry.blob(&with(&server, Vec::new()), &descriptor, 0).await.unwrap();
    blob.next().await.unwrap().unwrap();
    drop(blob);
    let began = Instant::now();
    while server.connections() > 0 {
        assert!(
            began.elapsed() < Duration::from_secs(20),
            "the connection is still there"
        );
        tokio::task::yield_now().await;
    }
    assert!(server.sent() < 32 << 20, "{} bytes were sent", server.sent());
}

#[tokio::test]
async fn redirects_are_followed_without_the_credential() {
    let server = Server::start().await.unwrap();
    let store = Server::start().await.unwrap();
    let bytes = noise(SIZE);
    let named = store.blob("a/b", &bytes);
    server.gate(crate::server::Gate::basic("user", "hunter22"));
    server.fault("GET /v2/a/b/blobs/", Fault::Redirect(store.base()), 9);
    // The redirect comes before the gate here: sign in first.
    server.manifest("a/b", "t", crate::common::MANIFEST, b"{}");
    let access = with(&server, vec![crate::common::basic("x", "user", "hunter22")]);
    let registry = client();
    registry.resolve(&access).await.unwrap();
    let fetched = fetch(&registry, &access, &descriptor(&named, SIZE), 5).await.unwrap();
    assert_eq!(fetched, bytes[5..]);
    let at_home = server.seen();
    assert!(
        at_home
            .iter()
            .any(|seen| seen.path.contains("/blobs/") && seen.header("authorization").is_some())
    );
    let elsewhere = store.seen();
    assert_eq!(elsewhere.len(), 1);
    assert_eq!(elsewhere[0].header("authorization"), None);
    assert_eq!(elsewhere[0].header("range"), Some("bytes=5-"));

    server.heal();
    server.fault("GET", Fault::Redirect(server.base()), 99);
    let error = fetch(&registry, &access, &descriptor(&named, SIZE), 0)
        .await
        .unwrap_err();
    assert!(error.to_string().contains("redirects"), "{error}");
}
