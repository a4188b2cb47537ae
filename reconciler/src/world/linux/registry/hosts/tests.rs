//! Which endpoints come of which files.

use super::*;

fn reference(text: &str) -> Reference {
    Reference::parse(text, "image").unwrap()
}

fn urls(hosts: &Hosts) -> Vec<&str> {
    hosts.endpoints.iter().map(|endpoint| endpoint.url.as_str()).collect()
}

fn of(text: &str) -> Hosts {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(root.path().join("r.example")).unwrap();
    fs::write(root.path().join("r.example/hosts.toml"), text).unwrap();
    look_up(&[root.path().into()], &reference("r.example/a"), None, false)
}

#[test]
fn without_files() {
    let alias = Some("registry.example");
    let look = |text: &str, alias| look_up(&[], &reference(text), alias, false);
    assert_eq!(urls(&look("a", alias)), ["https://registry.example/v2"]);
    assert_eq!(urls(&look("r.example:5000/a", None)), ["https://r.example:5000/v2"]);
    assert_eq!(urls(&look("localhost/a", None)), ["https://localhost/v2"]);
    assert_eq!(urls(&look("127.0.0.1:80/a", None)), ["http://127.0.0.1/v2"]);
    let guessed = look("[::1]:5000/a", None);
    assert_eq!(urls(&guessed), ["https://[::1]:5000/v2", "http://[::1]:5000/v2"]);
    assert!(guessed.endpoints[0].tls.skip_verify);
    assert!(!look("r.example/a", None).endpoints[0].tls.skip_verify);
}

#[test]
fn order_of_the_file_and_every_field() {
    let hosts = of(r#"
server = "https://up.example"
skip_verify = true
[host."http://z.example:5000"]
capabilities = ["pull", "resolve"]
dial_timeout = "1m30s"
[host."a.example/proxy"]
ca = "ca.crt"
client = [["c.crt", "c.key"]]
override_path = true
header = { X-A = ["1", "2"] }
"#);
    assert!(hosts.ignored.is_empty(), "{:?}", hosts.ignored);
    assert_eq!(
        urls(&hosts),
        [
            "http://z.example:5000/v2",
            "https://a.example/proxy",
            "https://up.example/v2"
        ]
    );
    let [z, a, up] = &hosts.endpoints[..] else {
        panic!("three")
    };
    assert!(!z.capabilities.push && z.capabilities.resolve && !z.tls.skip_verify);
    assert_eq!(z.dial_timeout, Duration::from_secs(90));
    let dir = hosts.directory.as_ref().unwrap();
    assert_eq!(a.tls.ca, [dir.join("ca.crt")]);
    assert_eq!(a.tls.client, [(dir.join("c.crt"), Some(dir.join("c.key")))]);
    assert_eq!(a.headers.len(), 2);
    assert!(up.tls.skip_verify && up.role == Role::Server);
    assert!(
        hosts
            .endpoints
            .iter()
            .all(|endpoint| endpoint.ns.as_deref() == Some("r.example"))
    );
    let origin = |endpoint: &Endpoint, name: &str| {
        let setting = endpoint.settings.iter().find(|setting| setting.name == name).unwrap();
        setting.origin.rsplit('/').next().unwrap().to_owned()
    };
    assert_eq!(origin(z, "dial_timeout"), "hosts.toml:6");
    assert_eq!(origin(up, "url"), "hosts.toml:2");
    assert_eq!(origin(a, "dial_timeout"), "default");
}

#[test]
fn a_typo_is_told_by_line_and_hides_nothing_else() {
    let hosts = of(
        "server = \"https://up.example\"\nskip_verfy = true\n[host.\"https://m.example\"]\n\
                    capabilities = [\"pul\", \"resolve\"]\nca = 7\n[host.\"ftp://x\"]\n",
    );
    assert_eq!(urls(&hosts), ["https://m.example/v2", "https://up.example/v2"]);
    let told: Vec<_> = hosts
        .ignored
        .iter()
        .map(|one| (one.line, one.problem.as_str()))
        .collect();
    assert_eq!(
        told[0],
        (Some(2), "unknown field \"skip_verfy\"; did you mean skip_verify?"),
        "{told:?}"
    );
    assert!(
        told.iter()
            .any(|(line, text)| *line == Some(4) && text.contains("\"pul\"")),
        "{told:?}"
    );
    assert!(
        told.iter()
            .any(|(line, text)| *line == Some(5) && text.starts_with("ca: expected")),
        "{told:?}"
    );
    assert!(
        told.iter()
            .any(|(line, text)| *line == Some(6) && text.contains("http and https")),
        "{told:?}"
    );
    // Broken syntax, too, has a line.
    let hosts = of("server = \"https://up.example\"\nca = = 1\n");
    assert!(
        hosts.ignored.iter().any(|one| one.line == Some(2)),
        "{:?}",
        hosts.ignored
    );
    assert_eq!(urls(&hosts), ["https://up.example/v2"]);
}

#[test]
fn directories_in_order_and_dockers_certificates() {
    let top = tempfile::tempdir().unwrap();
    let roots = [top.path().join("first"), top.path().join("docker/certs.d")];
    let ported = roots[0].join("r.example_5000_");
    fs::create_dir_all(&ported).unwrap();
    fs::create_dir_all(roots[0].join("_default")).unwrap();
    let dockers = roots[1].join("r.example:5000");
    fs::create_dir_all(&dockers).unwrap();
    for name in ["ca.crt", "me.cert", "me.key", "also.cert", "also.key", "lone.cert"] {
        fs::write(dockers.join(name), "").unwrap();
    }
    let look = |roots: &[PathBuf]| look_up(roots, &reference("r.example:5000/a"), None, false);
    let both = look(&roots);
    assert_eq!(both.directory, Some(ported));
    assert_eq!(both.ignored.len(), 2, "{:?}", both.ignored);
    let alone = look(&roots[1..]);
    let endpoint = &alone.endpoints[0];
    assert_eq!(endpoint.tls.ca, [dockers.join("ca.crt")]);
    assert_eq!(
        endpoint.tls.client,
        ["also.cert", "me.cert"].map(|name| (dockers.join(name), Some(dockers.join(name).with_extension("key"))))
    );
    assert!(alone.ignored[0].problem.contains("lone.key"), "{:?}", alone.ignored);
}
