//! Who is let in, with what, and where a credential never goes.

use reconciler::world::linux::registry::{AuthConfig, Class, Credential, CredentialKind};

use crate::common::{MANIFEST, basic, client, descriptor, fetch, with};
use crate::server::{Fault, Gate, GateKind, Server, base64};

const PASSWORD: &str = "hunter22";

async fn server(gate: Gate) -> Server {
    let server = Server::start().await.unwrap();
    server.manifest("a/b", "t", MANIFEST, br#"{"layers":[]}"#);
    server.gate(gate);
    server
}

#[tokio::test]
async fn basic_is_shown_only_when_asked_for_and_then_kept() {
    let server = server(Gate::basic("user", PASSWORD)).await;
    let registry = client();
    let access = with(&server, vec![basic("the request", "user", PASSWORD)]);
    registry.resolve(&access).await.unwrap();
    let shown: Vec<_> = server
        .take_seen()
        .iter()
        .map(|seen| seen.header("authorization").map(str::to_owned))
        .collect();
    assert_eq!(
        shown,
        [None, Some(format!("Basic {}", base64(&format!("user:{PASSWORD}"))))]
    );
    registry.resolve(&access).await.unwrap();
    assert_eq!(
        server.take_seen().len(),
        1,
        "a pull with nothing to do costs one request"
    );
    // What one caller may, another may not.
    let error = registry.resolve(&with(&server, Vec::new())).await.unwrap_err();
    assert_eq!(error.class(), Class::Refused, "{error}");
}

#[tokio::test]
async fn every_credential_is_tried_and_the_error_names_each() {
    let server = server(Gate::basic("user", PASSWORD)).await;
    let wrong = |source: &str| basic(source, "user", "wrong-password");
    let all = vec![wrong("imagePullSecrets[0]"), wrong("imagePullSecrets[1]")];
    let error = client().resolve(&with(&server, all.clone())).await.unwrap_err();
    assert_eq!(error.class(), Class::Refused);
    let text = error.to_string();
    for part in [
        "imagePullSecrets[0]: 401",
        "imagePullSecrets[1]: 401",
        "asks for a password",
    ] {
        assert!(text.contains(part), "{text}");
    }
    assert!(
        !text.contains("wrong-password") && !text.contains(&base64("user:wrong-password")),
        "{text}"
    );
    let good = all.into_iter().chain([basic("the third", "user", PASSWORD)]).collect();
    client().resolve(&with(&server, good)).await.unwrap();
}

#[tokio::test]
async fn tokens_by_post_by_get_and_without_a_name() {
    for post in [true, false] {
        let mut gate = Gate::bearer("user", PASSWORD);
        gate.kind = GateKind::Bearer {
            post,
            anonymous: false,
            expires_in: 300,
            realm: None,
        };
        let server = server(gate).await;
        let registry = client();
        let access = with(&server, vec![basic("x", "user", PASSWORD)]);
        registry.resolve(&access).await.unwrap();
        let seen = server.take_seen();
        let token = seen
            .iter()
            .find(|seen| seen.path.starts_with("/token") && seen.status == 200)
            .unwrap();
        assert_eq!(token.method, if post { "POST" } else { "GET" });
        let asked = if post { &token.body } else { &token.path };
        assert!(
            asked.contains("scope=repository%3Aa%2Fb%3Apull") && asked.contains("service=tests"),
            "{asked}"
        );
        registry.resolve(&access).await.unwrap();
        assert_eq!(server.take_seen().len(), 1, "the token is kept");
        server.revoke();
        registry.resolve(&access).await.unwrap();
        let error = registry.resolve(&with(&server, Vec::new())).await.unwrap_err();
        assert_eq!(error.class(), Class::Refused, "{error}");
    }
    let mut gate = Gate::bearer("user", PASSWORD);
    gate.kind = GateKind::Bearer {
        post: true,
        anonymous: true,
        expires_in: 300,
        realm: None,
    };
    let server = server(gate).await;
    client().resolve(&with(&server, Vec::new())).await.unwrap();
    client()
        .resolve(&with(&server, vec![basic("x", "user", "wrong")]))
        .await
        .unwrap();
}

#[tokio::test]
async fn identity_and_registry_tokens() {
    let mut gate = Gate::bearer("user", PASSWORD);
    gate.refresh.push("refreshing".into());
    gate.access.push("accessing".into());
    let server = server(gate).await;
    for kind in [
        CredentialKind::IdentityToken("refreshing".into()),
        CredentialKind::RegistryToken("accessing".into()),
    ] {
        let credential = Credential {
            kind,
            ..Credential::default()
        };
        client().resolve(&with(&server, vec![credential])).await.unwrap();
    }
}

#[tokio::test]
async fn forbidden_repositories_are_refused_without_an_echo() {
    let mut gate = Gate::basic("user", PASSWORD);
    gate.users[0].2 = 403;
    let server = server(gate).await;
    let error = client()
        .resolve(&with(&server, vec![basic("x", "user", PASSWORD)]))
        .await
        .unwrap_err();
    assert_eq!(error.class(), Class::Refused);
    assert!(error.to_string().contains("403 Forbidden"), "{error}");
    // The server echoes the header in its body, which a GET shows.
    let digest = crate::server::digest(br#"{"layers":[]}"#).parse().unwrap();
    let access = with(&server, vec![basic("x", "user", PASSWORD)]);
    let text = client().manifest(&access, &digest, None).await.unwrap_err().to_string();
    assert!(text.contains("***"), "{text}");
    assert!(!text.contains(&base64(&format!("user:{PASSWORD}"))), "{text}");
}

#[tokio::test]
async fn a_credential_for_another_host_stays_here() {
    let server = server(Gate::basic("user", PASSWORD)).await;
    let mut elsewhere = basic("x", "user", PASSWORD);
    elsewhere.server_address = "https://r.example/v1/".into();
    let error = client()
        .resolve(&with(&server, vec![elsewhere.clone()]))
        .await
        .unwrap_err();
    assert_eq!(error.class(), Class::Refused);
    assert!(server.seen().iter().all(|seen| seen.header("authorization").is_none()));
    elsewhere.server_address = server.base();
    client().resolve(&with(&server, vec![elsewhere])).await.unwrap();
}

#[tokio::test]
async fn a_challenge_from_where_a_redirect_leads_is_not_answered() {
    let evil = server(Gate::bearer("user", PASSWORD)).await;
    let home = server(Gate::basic("user", PASSWORD)).await;
    let blob = descriptor(&evil.blob("a/b", b"bytes"), 5);
    home.blob("a/b", b"bytes");
    home.fault("/blobs/", Fault::Redirect(evil.base()), 9);
    let access = with(&home, vec![basic("x", "user", PASSWORD)]);
    let error = fetch(&client(), &access, &blob, 0).await.unwrap_err();
    assert_eq!(error.class(), Class::Refused, "{error}");
    assert!(error.to_string().contains(evil.host()), "{error}");
    let seen = evil.take_seen();
    assert!(!seen.is_empty());
    for seen in seen {
        assert!(seen.path.starts_with("/v2/"), "a token was asked for: {seen:?}");
        assert!(seen.header("authorization").is_none(), "{seen:?}");
    }
}

#[tokio::test]
async fn trouble_with_tokens_is_no_refusal() {
    let server = server(Gate::bearer("user", PASSWORD)).await;
    let access = with(&server, vec![basic("x", "user", PASSWORD)]);
    for fault in [Fault::Status(503), Fault::Later(429, 0), Fault::Silence] {
        server.fault("/token", fault.clone(), 1);
        let resolved = client().resolve(&access).await;
        assert!(resolved.is_ok(), "{fault:?}: {resolved:?}");
    }
    for fault in [Fault::Status(500), Fault::Later(429, 0), Fault::Silence] {
        server.fault("/token", fault.clone(), 99);
        let error = client().resolve(&access).await.unwrap_err();
        assert_eq!(error.class(), Class::Unavailable, "{fault:?}: {error}");
        assert!(error.to_string().contains("token from"), "{error}");
        server.heal();
    }
    server.fault("/token", Fault::Status(403), 99);
    let error = client().resolve(&access).await.unwrap_err();
    assert_eq!(error.class(), Class::Refused, "{error}");
}

#[test]
fn auth_configs_in_all_forms() {
    let auth = base64(&format!("user:{PASSWORD}:x"));
    let config = AuthConfig {
        auth,
        ..AuthConfig::default()
    };
    let credential = Credential::from_auth_config("x", &config).unwrap().unwrap();
    assert!(!format!("{credential:?}{config:?}").contains(PASSWORD));
    let CredentialKind::Basic { username, password } = credential.kind else {
        panic!("not Basic")
    };
    assert_eq!((username.as_str(), password), ("user", format!("{PASSWORD}:x")));
    let config = AuthConfig {
        auth: "%".into(),
        ..AuthConfig::default()
    };
    assert!(Credential::from_auth_config("x", &config).is_err());
    assert!(
        Credential::from_auth_config("x", &AuthConfig::default())
            .unwrap()
            .is_none()
    );
}
