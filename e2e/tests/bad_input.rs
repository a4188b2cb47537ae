//! Bad input gets one clear error that names the field, and changes nothing: YAML, CRI requests, flags.

use std::fs;

use anyhow::{Context, Result};
use e2e::leaks::Census;
use e2e::node::{Node, shown};
use e2e::pods::{self, HELLO};
use e2e::v1::*;
use tonic::Code;

/// A YAML document, and what the message must contain: the place and the reason.
const DOCUMENTS: &[(&str, &str, &[&str])] = &[
    ("not YAML", "a: [1, 2", &["bad.yaml:"]),
    ("a list", "- 1\n- 2\n", &["bad.yaml:"]),
    ("no kind", "apiVersion: v1\nmetadata: {name: x}\n", &["kind"]),
    (
        "unknown kind",
        "apiVersion: v1\nkind: Deployment\nmetadata: {name: x}\n",
        &["Deployment", "bad.yaml:"],
    ),
    (
        "unknown version",
        "apiVersion: reconcile/v9\nkind: Pod\nmetadata: {name: x}\n",
        &["reconcile/v9"],
    ),
    (
        "no containers",
        "apiVersion: v1\nkind: Pod\nmetadata: {name: x}\nspec: {containers: []}\n",
        &["spec.containers"],
    ),
    (
        "no image",
        "apiVersion: v1\nkind: Pod\nmetadata: {name: x}\nspec:\n  containers:\n  - name: a\n",
        &["spec.containers[0].image"],
    ),
    (
        "no name",
        "apiVersion: v1\nkind: Pod\nmetadata: {}\nspec: {containers: [{name: a, image: localhost/hello}]}\n",
        &["metadata.name"],
    ),
    (
        "a name that climbs",
        "apiVersion: v1\nkind: Pod\nmetadata: {name: ../x}\nspec: {containers: [{name: a, image: localhost/hello}]}\n",
        &["metadata.name"],
    ),
    (
        "unknown field of ours",
        "apiVersion: reconcile/v1\nkind: Pod\nmetadata: {name: x}\nspec:\n  containers:\n  - {name: a, imge: c}\n",
        &["bad.yaml:6", "imge"],
    ),
];

/// A pod of one container, seven lines; the cases below go on from there.
const POD: &str =
    "apiVersion: v1\nkind: Pod\nmetadata: {name: x}\nspec:\n  containers:\n  - name: a\n    image: localhost/hello\n";

const CONTINUED: &[(&str, &str, &[&str])] = &[
    (
        "unknown field",
        "    comand: [x]\n",
        &["bad.yaml:8", "spec.containers[0]", "comand", "^"],
    ),
    ("duplicate key", "    image: c\n", &["bad.yaml:", "image"]),
    (
        "wrong type",
        "    command: sleep\n",
        &["bad.yaml:8", "spec.containers[0].command", "^"],
    ),
    (
        "two containers of one name",
        "  - {name: a, image: localhost/hello}\n",
        &["spec.containers[1].name"],
    ),
    (
        "no such volume",
        "    volumeMounts: [{name: gone, mountPath: /x}]\n",
        &["volumeMounts[0]", "gone"],
    ),
    (
        "a bad quantity",
        "    resources: {limits: {memory: lots}}\n",
        &["memory", "lots"],
    ),
    (
        "a bad port",
        "    ports: [{containerPort: 70000}]\n",
        &["containerPort", "70000"],
    ),
];

#[tokio::test(flavor = "multi_thread")]
async fn yaml() -> Result<()> {
    let node = Node::start().await?;
    let before = Census::of(&node.mark())?;
    let good =
        "apiVersion: v1\nkind: Pod\nmetadata: {name: good}\nspec: {containers: [{name: a, image: localhost/hello}]}\n";
    let whole = DOCUMENTS
        .iter()
        .map(|(case, document, words)| (case, (*document).to_owned(), words));
    let continued = CONTINUED
        .iter()
        .map(|(case, lines, words)| (case, format!("{POD}{lines}"), words));
    for (case, document, words) in whole.chain(continued) {
        for (form, text) in [
            ("alone", document.clone()),
            ("second", format!("{good}---\n{document}")),
        ] {
            let file = node.file("bad.yaml", text)?;
            let out = node.reconcile(&["apply", "-f", &file]).await?;
            let error = String::from_utf8_lossy(&out.stderr).into_owned();
            assert!(!out.status.success(), "{case} ({form}) was accepted: {}", shown(&out));
            for word in *words {
                // The line is the first document's only where it stands alone.
                let word = if form == "second" {
                    word.split_once(':').map_or(*word, |(file, _)| file)
                } else {
                    word
                };
                assert!(error.contains(word), "{case} ({form}): {word:?} is missing in\n{error}");
            }
            assert!(
                !error.contains("panicked") && !error.contains("RUST_BACKTRACE"),
                "{case}: {error}"
            );
            assert!(
                node.cri.sandboxes(None).await?.is_empty(),
                "{case} ({form}): something was applied"
            );
        }
    }
    let pods = node.ok(&["get", "pods", "-o", "json"]).await?;
    let json: serde_json::Value = serde_json::from_str(&pods).with_context(|| pods.clone())?;
    let items = json.as_array().cloned().or_else(|| json["items"].as_array().cloned());
    assert_eq!(items.map(|items| items.len()), Some(0), "{pods}");
    let after = Census::of(&node.mark())?;
    assert!(before == after, "{}", before.diff(&after));
    node.finish().await
}

fn refused<T>(case: &str, answer: Result<T, tonic::Status>, code: Code, word: &str) {
    match answer {
        Ok(_) => panic!("{case} was accepted"),
        Err(status) => {
            assert_eq!(status.code(), code, "{case}: {status:?}");
            assert!(
                status.message().contains(word),
                "{case}: {word:?} is missing in {:?}",
                status.message()
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn cri_requests() -> Result<()> {
    let node = Node::start().await?;
    let good = pods::host_network(node.pod("good"));
    let mut runtime = node.cri.runtime.clone();
    let empty = runtime.run_pod_sandbox(RunPodSandboxRequest::default()).await;
    refused("no config", empty, Code::InvalidArgument, "config");
    type Break = fn(&mut PodSandboxConfig);
    let sandboxes: [(&str, Break, &str); 9] = [
        ("no metadata", |c| c.metadata = None, "metadata"),
        (
            "no name",
            |c| c.metadata.get_or_insert_default().name.clear(),
            "metadata.name",
        ),
        (
            "no uid",
            |c| c.metadata.get_or_insert_default().uid.clear(),
            "metadata.uid",
        ),
        ("relative logs", |c| c.log_directory = "logs".into(), "log_directory"),
        ("climbing hostname", |c| c.hostname = "a/../b".into(), "hostname"),
        ("unknown mode", |c| options(c).network = 77, "network"),
        (
            "target network",
            |c| options(c).ipc = NamespaceMode::Target.into(),
            "ipc",
        ),
        (
            "port of 70000",
            |c| {
                c.port_mappings = vec![PortMapping {
                    container_port: 70_000,
                    ..Default::default()
                }]
            },
            "port",
        ),
        (
            "climbing cgroup",
            |c| c.linux.get_or_insert_default().cgroup_parent = "/../x".into(),
            "cgroup_parent",
        ),
    ];
    for (case, broken, word) in sandboxes {
        let mut config = good.clone();
        broken(&mut config);
        refused(case, node.cri.run_sandbox(&config).await, Code::InvalidArgument, word);
    }
    let handler = RunPodSandboxRequest {
        config: Some(good.clone()),
        runtime_handler: "none-such".into(),
    };
    refused(
        "unknown handler",
        runtime.run_pod_sandbox(handler).await,
        Code::InvalidArgument,
        "none-such",
    );
    assert!(node.cri.sandboxes(None).await?.is_empty());
    assert!(node.processes()?.is_empty(), "nothing was begun");

    let sandbox = node.cri.run_sandbox(&good).await?;
    type Spoil = fn(&mut ContainerConfig);
    let containers: [(&str, Spoil, Code, &str); 10] = [
        ("no metadata", |c| c.metadata = None, Code::InvalidArgument, "metadata"),
        (
            "no name",
            |c| c.metadata.get_or_insert_default().name.clear(),
            Code::InvalidArgument,
            "metadata.name",
        ),
        ("no image", |c| c.image = None, Code::InvalidArgument, "image"),
        (
            "relative mount",
            |c| c.mounts = vec![mount("/x", "inside")],
            Code::InvalidArgument,
            "container_path",
        ),
        (
            "relative source",
            |c| c.mounts = vec![mount("x", "/inside")],
            Code::InvalidArgument,
            "host_path",
        ),
        (
            "climbing log",
            |c| c.log_path = "../../etc/passwd".into(),
            Code::InvalidArgument,
            "log_path",
        ),
        (
            "unknown capability",
            |c| add_capability(c, "FLY"),
            Code::InvalidArgument,
            "FLY",
        ),
        (
            "negative user",
            |c| security(c).run_as_user = Some(Int64Value { value: -1 }),
            Code::InvalidArgument,
            "run_as_user",
        ),
        (
            "unknown seccomp file",
            |c| seccomp(c, "/none/such.json"),
            Code::InvalidArgument,
            "/none/such.json",
        ),
        (
            "unknown signal",
            |c| c.stop_signal = 4000,
            Code::InvalidArgument,
            "stop_signal",
        ),
    ];
    for (case, spoil, code, word) in containers {
        let mut config = pods::container("c", HELLO, &["/hello", "exit", "0"]);
        spoil(&mut config);
        refused(case, node.cri.create(&sandbox, &good, &config).await, code, word);
    }
    let config = pods::container("c", HELLO, &[]);
    refused(
        "unknown sandbox",
        node.cri.create(&"a".repeat(64), &good, &config).await,
        Code::NotFound,
        "aaaa",
    );
    refused(
        "empty id",
        node.cri.start("").await,
        Code::InvalidArgument,
        "container_id",
    );
    refused("unknown id", node.cri.start("feed").await, Code::NotFound, "feed");
    assert!(
        node.cri.containers(None).await?.is_empty(),
        "a refused create left a container"
    );
    let left = fs::read_dir(node.root().join("pods"))?.count();
    assert!(left <= 1, "directories of refused objects: {left}");
    node.finish().await
}

fn options(config: &mut PodSandboxConfig) -> &mut NamespaceOption {
    let linux = config.linux.get_or_insert_default();
    linux
        .security_context
        .get_or_insert_default()
        .namespace_options
        .get_or_insert_default()
}

fn security(config: &mut ContainerConfig) -> &mut LinuxContainerSecurityContext {
    config
        .linux
        .get_or_insert_default()
        .security_context
        .get_or_insert_default()
}

fn add_capability(config: &mut ContainerConfig, name: &str) {
    let add_capabilities = vec![name.into()];
    security(config).capabilities = Some(Capability {
        add_capabilities,
        ..Default::default()
    });
}

fn seccomp(config: &mut ContainerConfig, file: &str) {
    let profile_type = e2e::v1::security_profile::ProfileType::Localhost.into();
    security(config).seccomp = Some(SecurityProfile {
        profile_type,
        localhost_ref: file.into(),
    });
}

fn mount(host: &str, inside: &str) -> Mount {
    Mount {
        host_path: host.into(),
        container_path: inside.into(),
        ..Default::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn flags() -> Result<()> {
    let node = Node::new(Default::default())?;
    let cases: &[(&[&str], &str)] = &[
        (&["fly"], "fly"),
        (&["serve", "--fly"], "--fly"),
        (&["--network", "token-ring", "serve"], "token-ring"),
        (&["--log-level", "loud", "serve"], "loud"),
        (&["run", "/none/such.yaml"], "/none/such.yaml"),
        (&["apply", "-f", "/none/such.yaml"], "/none/such.yaml"),
        (&["images", "import", "/none/such.tar"], "/none/such.tar"),
        (&["get", "unicorns"], "unicorns"),
        (&["--dry-run"], "--once"),
    ];
    for (args, word) in cases {
        // Bare, so that a flag of the case is not given twice.
        let mut command = tokio::process::Command::new(e2e::tools::built("reconcile")?);
        command.arg("--root").arg(node.root()).arg("--state").arg(node.state());
        command
            .arg("--socket")
            .arg(format!("unix://{}", node.socket().display()))
            .args(*args);
        let out = tokio::time::timeout(std::time::Duration::from_secs(20), command.kill_on_drop(true).output()).await;
        let out = out.with_context(|| format!("{args:?} did not end"))??;
        let error = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!out.status.success(), "{args:?} was accepted: {}", shown(&out));
        assert!(
            error.contains(word) && !error.contains("panicked"),
            "{args:?}: {}",
            shown(&out)
        );
    }
    assert!(node.processes()?.is_empty());
    node.finish_unused().await
}
