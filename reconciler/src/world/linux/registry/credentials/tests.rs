//! Look-up in files and secrets.

use super::*;

fn reference(text: &str) -> Reference {
    Reference::parse(text, "image").unwrap()
}

fn keyring(json: &str) -> Keyring {
    Keyring {
        secrets: vec![("s".into(), json.as_bytes().to_vec())],
        files: Vec::new(),
    }
}

async fn users(keyring: &Keyring, image: &str) -> Vec<String> {
    let (found, notes) = keyring.matching(&reference(image)).await;
    assert!(notes.is_empty(), "{notes:?}");
    let user = |credential: Credential| match credential.kind {
        CredentialKind::Basic { username, .. } => username,
        _ => "token".to_owned(),
    };
    found.into_iter().map(user).collect()
}

#[tokio::test]
async fn the_longest_match_comes_first_and_every_match_comes() {
    let entry = |key: &str, user: &str| format!(r#""{key}":{{"username":"{user}","password":"p"}}"#);
    let entries = [
        entry("r.example", "host"),
        entry("https://r.example/team/app", "app"),
        entry("r.example/team", "team"),
        entry("*.example", "star"),
        entry("r.example:5000", "port"),
        entry("https://index.docker.io/v1/", "hub"),
    ];
    let keyring = keyring(&format!(r#"{{"auths":{{{}}}}}"#, entries.join(",")));
    assert_eq!(
        users(&keyring, "r.example/team/app").await,
        ["app", "team", "host", "star"]
    );
    assert_eq!(users(&keyring, "r.example/teams/app").await, ["host", "star"]);
    assert_eq!(users(&keyring, "q.example/a").await, ["star"]);
    assert_eq!(users(&keyring, "r.example:5000/a").await, ["port"]);
    assert_eq!(users(&keyring, "busybox").await, ["hub"]);
    assert!(users(&keyring, "q.r.example/a").await.is_empty());
}

/// Secrets are looked at together, as the kubelet does it; those of a file come after.
#[tokio::test]
async fn the_longest_match_of_all_secrets_comes_first() {
    let dir = tempfile::tempdir().unwrap();
    let entry = |key: &str, user: &str| format!(r#"{{"auths":{{"{key}":{{"username":"{user}","password":"p"}}}}}}"#);
    let file = dir.path().join("auth.json");
    std::fs::write(&file, entry("r.example/team/app", "file")).unwrap();
    let secret = |n: usize, key: &str, user: &str| (format!("s{n}"), entry(key, user).into_bytes());
    let keyring = Keyring {
        secrets: vec![
            secret(0, "r.example", "host"),
            secret(1, "r.example/team", "team"),
            secret(2, "r.example", "again"),
        ],
        files: vec![file],
    };
    assert_eq!(
        users(&keyring, "r.example/team/app").await,
        ["team", "host", "again", "file"]
    );
}

#[tokio::test]
async fn the_older_form_and_nonsense() {
    let older = keyring(r#"{"r.example":{"auth":"dXNlcjpzZWNyZXQ","email":"x"}}"#);
    assert_eq!(users(&older, "r.example/a").await, ["user"]);
    for text in [
        "",
        "[]",
        "{\"auths\":7}",
        r#"{"auths":{"r.example":{"auth":["s3cr3t-thing"]}}}"#,
    ] {
        let (found, notes) = keyring(text).matching(&reference("r.example/a")).await;
        assert!(found.is_empty() && notes.len() == 1, "{text:?}: {notes:?}");
        assert!(!notes[0].contains("s3cr3t"), "{notes:?}");
    }
}

#[tokio::test]
async fn helpers_are_asked_and_bounded() {
    let dir = tempfile::tempdir().unwrap();
    // The name of the program cannot hold a path, so it lies where programs lie.
    let name = format!("rc-test-{}", std::process::id());
    let program = Path::new("/usr/local/bin").join(format!("docker-credential-{name}"));
    let script = "#!/bin/sh\nread server\n[ $server = r.example ] || { echo credentials not found; exit 1; }\n\
                  echo '{\"Username\":\"helped\",\"Secret\":\"p\"}'\n";
    crate::tests::install(&program, script);
    let file = dir.path().join("config.json");
    std::fs::write(
        &file,
        format!(r#"{{"credsStore":"{name}","credHelpers":{{"bad.example":"../x"}}}}"#),
    )
    .unwrap();
    let keyring = Keyring {
        secrets: Vec::new(),
        files: vec![dir.path().join("absent"), file],
    };
    let here = users(&keyring, "r.example/a").await;
    let elsewhere = users(&keyring, "q.example/a").await;
    let (_, notes) = keyring.matching(&reference("bad.example/a")).await;
    std::fs::remove_file(&program).unwrap();
    assert_eq!(here, ["helped"]);
    assert!(elsewhere.is_empty());
    assert!(
        notes.len() == 1 && notes[0].contains("no name of a program"),
        "{notes:?}"
    );
}

#[test]
fn a_service_without_home_has_its_users() {
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap();
    let me = Uid::effective().to_string();
    let line = passwd.lines().find(|line| line.split(':').nth(2) == Some(&me)).unwrap();
    assert_eq!(home().as_deref(), line.split(':').nth(5).map(std::path::Path::new));
}
