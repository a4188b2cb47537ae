//! `imagePullSecrets` of pods from YAML: they open the registry, are asked in their order, are kept in memory alone.

use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::eventually;
use e2e::images::Image;
use e2e::node::{Node, Options, shown};
use e2e::registry::{Fault, Gate, GateKind, Seen, Server, base64};
use e2e::served::{Served, layer, serve};

const SECOND: Duration = Duration::from_secs(1);
const PASSWORD: &str = "swordfish-7351";

fn image(server: &Server, path: &str) -> Result<Served> {
    let mut image = Image::busybox("unused")?;
    image.layers.push(layer(40, 1 << 20));
    Ok(serve(server, path, &image.layers))
}

fn pod(name: &str, image: &Served, secrets: &[&str]) -> String {
    let secrets: Vec<_> = secrets.iter().map(|name| format!("{{name: {name}}}")).collect();
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  hostNetwork: true\n\
         \x20 imagePullSecrets: [{}]\n  containers:\n  - {{name: a, image: '{}', command: [/bin/sleep, '1000']}}\n",
        secrets.join(", "),
        image.name
    )
}

/// One of the forms in which clusters hand secrets out.
fn secret(name: &str, form: usize, key: &str, user: &str, password: &str) -> String {
    let entry = format!("{{\"{key}\":{{\"username\":\"{user}\",\"password\":\"{password}\"}}}}");
    let auth = format!(
        "{{\"{key}\":{{\"auth\":\"{}\"}}}}",
        base64(&format!("{user}:{password}"))
    );
    let (kind, data) = match form {
        0 => (
            "dockerconfigjson",
            format!("stringData: {{.dockerconfigjson: '{{\"auths\":{entry}}}'}}"),
        ),
        1 => (
            "dockerconfigjson",
            format!(
                "data: {{.dockerconfigjson: {}}}",
                base64(&format!("{{\"auths\":{auth}}}"))
            ),
        ),
        _ => ("dockercfg", format!("data: {{.dockercfg: {}}}", base64(&auth))),
    };
    format!("---\napiVersion: v1\nkind: Secret\nmetadata: {{name: {name}}}\ntype: kubernetes.io/{kind}\n{data}\n")
}

/// No form of the secret is on the disk or in a log.
fn nowhere(node: &Node, secrets: &[&str]) -> Result<()> {
    let encoded = base64(&format!("hugo:{PASSWORD}"));
    for secret in secrets.iter().copied().chain([PASSWORD, &encoded]) {
        let places = [node.root(), node.state(), node.path("daemon.log")];
        let found = Command::new("grep")
            .args(["-rlaF", "-e", secret])
            .args(places)
            .output()?;
        ensure!(
            found.stdout.is_empty(),
            "{secret} is in {}",
            String::from_utf8_lossy(&found.stdout)
        );
    }
    Ok(())
}

async fn running(node: &Node, name: &str) -> Result<()> {
    eventually(20 * SECOND, async || {
        let pods = node.ok(&["get", "pod", name]).await?;
        ensure!(pods.contains("1/1"), "{pods}");
        Ok(())
    })
    .await
}

/// The pod's description, once it says this.
async fn describes(node: &Node, name: &str, word: &str) -> Result<String> {
    eventually(20 * SECOND, async || {
        let text = node.ok(&["describe", "pod", name]).await?;
        ensure!(text.contains(word), "no {word:?} in {text}");
        Ok(text)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn every_form_opens_the_gate_and_is_found_nowhere() -> Result<()> {
    let server = Server::start().await?;
    let node = Node::start().await?;
    for (form, gate) in [
        Gate::bearer("hugo", PASSWORD),
        Gate::basic("hugo", PASSWORD),
        Gate::bearer("hugo", PASSWORD),
    ]
    .into_iter()
    .enumerate()
    {
        server.gate(gate);
        let name = format!("form{form}");
        let image = image(&server, &name)?;
        // The secret stands after the pod that needs it.
        let secret = secret(
            "regcred",
            form,
            &format!("https://{}/v1/", server.host()),
            "hugo",
            PASSWORD,
        );
        let file = node.file(&format!("{name}.yaml"), pod(&name, &image, &["regcred"]) + &secret)?;
        let said = node.ok(&["apply", "-f", &file, "--wait"]).await?;
        let outcome = if form == 0 { "created" } else { "configured" };
        ensure!(said.contains(&format!("secret/regcred {outcome}")), "{said}");
        running(&node, &name).await?;
        let again = node.ok(&["apply", "-f", &file]).await?;
        ensure!(again.contains("secret/regcred unchanged"), "{again}");
        let shown = node.ok(&["get", "secrets", "-o", "yaml"]).await?;
        let listed = node.ok(&["get", "secret"]).await?;
        ensure!(
            listed.contains("regcred") && listed.contains("kubernetes.io/docker"),
            "{listed}"
        );
        ensure!(!shown.contains("config:") && !shown.contains("hugo"), "{shown}");
        nowhere(&node, &[])?;
        node.ok(&["delete", "-f", &file, "--now"]).await?;
        // What follows must not find it.
        let left = node.ok(&["get", "secret", "-o", "json"]).await?;
        ensure!(form == 2 || !left.contains("regcred"), "{left}");
        let file = node.file("secret.yaml", secret)?;
        node.ok(&["apply", "-f", &file]).await?;
    }
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_restart_the_pod_says_what_it_needs_and_goes_on_at_once() -> Result<()> {
    let server = Server::start().await?;
    let mut node = Node::start().await?;
    server.gate(Gate::bearer("hugo", PASSWORD));
    let image = image(&server, "again")?;
    let (blob, size) = image.blobs[1].clone();
    server.fault(&blob, Fault::Stall(size / 2), 1);
    let file = pod("again", &image, &["regcred"]) + &secret("regcred", 0, server.host(), "hugo", PASSWORD);
    let file = node.file("again.yaml", file)?;
    node.ok(&["apply", "-f", &file]).await?;
    eventually(10 * SECOND, async || {
        ensure!(
            server
                .seen()
                .iter()
                .any(|seen| seen.path.contains(&blob) && seen.sent > 0),
            "not asked for"
        );
        Ok(())
    })
    .await?;
    node.crash().await?;
    let text = describes(&node, "again", "default/regcred: not known to this daemon").await?;
    ensure!(text.contains("apply the file with this Secret (again)"), "{text}");
    let said = node.ok(&["apply", "-f", &file]).await?;
    ensure!(
        said.contains("pod/again unchanged") && said.contains("secret/regcred created"),
        "{said}"
    );
    running(&node, "again").await?;
    // Not by the next try after a back-off.
    ensure!(!node.daemon_log().contains(", try 2"), "it waited");
    nowhere(&node, &[])?;
    node.ok(&["delete", "pod", "again", "--now"]).await?;
    node.finish().await
}

/// Who was shown, in order; tokens are asked for by form.
fn shown_to(seen: &[Seen]) -> Vec<String> {
    let user = |seen: &Seen| {
        let form = seen.body.split('&').find_map(|pair| pair.strip_prefix("username="));
        form.map(str::to_owned)
            .or((seen.method == "GET" && seen.header("authorization").is_none()).then(|| "nobody".to_owned()))
    };
    let tokens = seen.iter().filter(|seen| seen.path.starts_with("/token"));
    tokens.filter_map(user).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn sources_come_in_their_order_and_all_answers_are_told() -> Result<()> {
    let server = Server::start().await?;
    let mut node = Node::new(Options::default())?;
    let docker = node.path("docker");
    fs::create_dir(&docker)?;
    let auths = |user: &str, password: &str| {
        let entry = format!("{{\"username\":\"{user}\",\"password\":\"{password}\"}}");
        format!("{{\"auths\":{{\"{}\":{entry}}}}}", server.host())
    };
    fs::write(docker.join("config.json"), auths("file", "wrong-password-4"))?;
    // The daemon sees this over /etc.
    let etc = node.path("etc-upper");
    fs::create_dir_all(etc.join("reconcile"))?;
    fs::write(etc.join("reconcile/auth.json"), auths("node", "wrong-password-5"))?;
    let over = format!(
        "mount -t overlay -o ro,lowerdir={}:/etc none /etc && exec \"$0\" \"$@\"",
        etc.display()
    );
    let wrapper = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", &over];
    let home = node.path("home").display().to_string();
    node = node.with(Options {
        env: vec![("DOCKER_CONFIG", docker.display().to_string()), ("HOME", home)],
        wrapper: wrapper.map(str::to_owned).to_vec(),
        ..Options::default()
    });
    node.serve().await?;
    let mut gate = Gate::bearer("nobody-of-them", PASSWORD);
    gate.kind = GateKind::Bearer {
        post: true,
        anonymous: true,
        expires_in: 300,
        realm: None,
    };
    server.gate(gate);
    let image = image(&server, "team/order")?;
    let host = server.host();
    let secrets = [
        secret("host", 0, host, "host", "wrong-password-1"),
        secret("team", 0, &format!("{host}/team"), "team", "wrong-password-2"),
        secret("elsewhere", 0, "other.example", "elsewhere", "wrong-password-3"),
    ]
    .concat();
    server.revoke();
    let file = node.file(
        "order.yaml",
        pod("order", &image, &["host", "team", "elsewhere", "absent"]) + &secrets,
    )?;
    node.ok(&["apply", "-f", &file]).await?;
    // Nobody's own credential is good; anonymous is, and comes last.
    running(&node, "order").await?;
    let order = shown_to(&server.take_seen());
    ensure!(order[..5] == ["team", "host", "node", "file", "nobody"], "{order:?}");

    server.gate(Gate::bearer("nobody-of-them", PASSWORD));
    server.revoke();
    let closed = crate::image(&server, "team/closed")?;
    let file = node.file(
        "closed.yaml",
        pod("closed", &closed, &["host", "team", "elsewhere", "absent"]),
    )?;
    node.ok(&["apply", "-f", &file]).await?;
    let text = describes(&node, "closed", "absent: not known to this daemon").await?;
    let config = docker.join("config.json").display().to_string();
    let (team, alone) = (format!("{host}/team"), format!("{host}: token from"));
    for source in [
        &format!("{host} with imagePullSecrets default/team ({team}): token from {host}: 401"),
        &format!("{host} with imagePullSecrets default/host ({host}): token from {host}: 401"),
        &format!("{host} with /etc/reconcile/auth.json ({host}): token from {host}: 401"),
        &format!("{host} with {config} ({host}): token from {host}: 401"),
        &alone,
    ] {
        ensure!(text.contains(source.as_str()), "no {source:?} in {text}");
    }
    ensure!(
        !text.contains("default/elsewhere"),
        "it is for another registry: {text}"
    );
    ensure!(!text.contains("wrong-password"), "{text}");
    nowhere(&node, &["wrong-password"])?;
    for name in ["order", "closed"] {
        node.ok(&["delete", "pod", name, "--now"]).await?;
    }
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn run_brings_its_secret_and_a_bad_one_is_refused_unseen() -> Result<()> {
    let server = Server::start().await?;
    let node = Node::start().await?;
    server.gate(Gate::basic("hugo", PASSWORD));
    let image = image(&server, "run")?;
    let pod = pod("run", &image, &["regcred"]).replace("[/bin/sleep, '1000']", "[/bin/echo, it ran]");
    let pod = pod.replace("hostNetwork", "restartPolicy: Never\n  hostNetwork");
    let good = pod.clone() + &secret("regcred", 2, server.host(), "hugo", PASSWORD);
    let file = node.file("run.yaml", good)?;
    let out = node.reconcile(&["run", &file]).await?;
    ensure!(
        out.status.success() && shown(&out).contains("it ran"),
        "{}",
        shown(&out)
    );
    let left = node.ok(&["get", "secret", "-o", "json"]).await?;
    ensure!(!left.contains("regcred"), "{left}");
    let bad = format!(
        "---\napiVersion: v1\nkind: Secret\nmetadata: {{name: bad}}\ntype: kubernetes.io/dockerconfigjson\n\
        stringData: {{.dockerconfigjson: '{PASSWORD}'}}\n"
    );
    let file = node.file("bad.yaml", pod + &bad)?;
    let out = node.reconcile(&["apply", "-f", &file]).await?;
    let said = shown(&out);
    ensure!(
        !out.status.success() && said.contains("data[.dockerconfigjson]: is not JSON"),
        "{said}"
    );
    ensure!(!said.contains(PASSWORD), "{said}");
    ensure!(
        !node.ok(&["get", "pods", "-o", "json"]).await?.contains("\"run\""),
        "half of the file was applied"
    );
    nowhere(&node, &[]).context("a refused secret")?;
    node.finish().await
}
