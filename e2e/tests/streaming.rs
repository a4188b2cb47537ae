//! Exec, attach and port-forward as clients that are not ours see them: Kubernetes' client library (a program of
//! `e2e/conformance`, over SPDY and WebSocket), `crictl`, and a bare WebSocket for clients that misbehave.

use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use e2e::node::{Node, Options, shown};
use e2e::pods::{self, shell};
use e2e::v1::*;
use e2e::{eventually, tools};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::{Child, ChildStdout, Command};
use tonic::Code;

const FOREVER: &str = "while :; do sleep 100000; done";

/// A node with one busybox container on the host's network.
async fn running(config: ContainerConfig) -> Result<(Node, String, String)> {
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = pods::host_network(node.pod("stream"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let id = node.cri.launch(&sandbox, &pod, &config).await?;
    Ok((node, sandbox, id))
}

async fn program() -> Result<Option<PathBuf>> {
    tokio::task::spawn_blocking(|| tools::go_program("streams", "./streams")).await?
}

async fn exec_url(node: &Node, id: &str, words: &str, command: &[&str]) -> Result<String, tonic::Status> {
    let has = |word| words.split(' ').any(|known| known == word);
    let request = ExecRequest {
        container_id: id.into(),
        cmd: command.iter().map(|&word| word.into()).collect(),
        tty: has("tty"),
        stdin: has("stdin"),
        stdout: has("stdout"),
        stderr: has("stderr"),
    };
    Ok(node.cri.runtime.clone().exec(request).await?.into_inner().url)
}

async fn attach_url(node: &Node, id: &str, words: &str) -> Result<String, tonic::Status> {
    let has = |word| words.split(' ').any(|known| known == word);
    let request = AttachRequest {
        container_id: id.into(),
        tty: has("tty"),
        stdin: has("stdin"),
        stdout: has("stdout"),
        stderr: has("stderr"),
    };
    Ok(node.cri.runtime.clone().attach(request).await?.into_inner().url)
}

/// Starts the client; `words` are its streams and sizes.
fn client(program: &PathBuf, verb: &str, url: &str, protocol: &str, words: &str) -> Result<Child> {
    let mut command = Command::new(program);
    command.args([verb, url, protocol]).args(words.split(' '));
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    Ok(command.kill_on_drop(true).spawn()?)
}

/// Gives the client its input and its end, and waits.
async fn finish(mut client: Child, input: &[u8]) -> Result<Output> {
    let mut stdin = client.stdin.take().context("stdin")?;
    let input = input.to_vec();
    tokio::spawn(async move {
        let _ = stdin.write_all(&input).await;
    });
    let out = tokio::time::timeout(Duration::from_secs(30), client.wait_with_output()).await;
    Ok(out.context("the client did not end within 30 s")??)
}

/// Waits until no process of the node's has `word` in its command line.
async fn gone(node: &Node, word: &str) -> Result<()> {
    e2e::eventually(Duration::from_secs(20), async || {
        let left: Vec<_> = node
            .processes()?
            .into_iter()
            .filter(|line| line.contains(word))
            .collect();
        ensure!(left.is_empty(), "still there: {left:#?}");
        Ok(())
    })
    .await
}

async fn there(node: &Node, word: &str) -> Result<()> {
    e2e::eventually(Duration::from_secs(20), async || {
        ensure!(
            node.processes()?.iter().any(|line| line.contains(word)),
            "no process {word}"
        );
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn exec_over_every_protocol() -> Result<()> {
    let Some(program) = program().await? else { return Ok(()) };
    let (node, _, id) = running(shell("c", FOREVER)).await?;
    let words = "stdin stdout stderr";
    let command = ["/bin/sh", "-c", "cat; echo err >&2; exit 7"];
    for (protocol, code) in [
        ("spdy", 7),
        ("websocket", 7),
        ("v4.channel.k8s.io", 7),
        ("v3.channel.k8s.io", 125),
        ("v2.channel.k8s.io", 125),
    ] {
        let url = exec_url(&node, &id, words, &command).await?;
        let out = finish(client(&program, "exec", &url, protocol, words)?, b"in\n").await?;
        assert_eq!(out.stdout, b"in\n", "{protocol}: {}", shown(&out));
        assert!(out.stderr.starts_with(b"err\n"), "{protocol}: {}", shown(&out));
        assert_eq!(out.status.code(), Some(code), "{protocol}: {}", shown(&out));
        let is_told = code == 7 || shown(&out).contains("exit status 7");
        assert!(is_told, "{protocol}: {}", shown(&out));
    }
    // The first protocol's client never ends its stdin, and may not wait for the error.
    let url = exec_url(&node, &id, "stdout stderr", &["echo", "old"]).await?;
    let out = finish(client(&program, "exec", &url, "channel.k8s.io", "stdout stderr")?, b"").await?;
    assert_eq!(
        (out.stdout.as_slice(), out.status.code()),
        (&b"old\n"[..], Some(0)),
        "{}",
        shown(&out)
    );
    for protocol in ["spdy", "websocket"] {
        let words = "stdin stdout stderr";
        let url = exec_url(
            &node,
            &id,
            words,
            &["/bin/sh", "-c", "cat; cat /proc/self/cgroup >/dev/stderr"],
        )
        .await?;
        let input: Vec<u8> = (0..4 << 20).map(|n: u32| n.to_ne_bytes()[(n % 3) as usize]).collect();
        let out = finish(client(&program, "exec", &url, protocol, words)?, &input).await?;
        assert!(out.stdout == input, "{protocol}: {} bytes came back", out.stdout.len());
        assert_eq!(out.status.code(), Some(0), "{protocol}: {:?}", out.stderr);
        let url = exec_url(&node, &id, "stdout", &["no-such-program"]).await?;
        let out = finish(client(&program, "exec", &url, protocol, "stdout")?, b"").await?;
        assert_eq!(out.status.code(), Some(125), "{protocol}: {}", shown(&out));
        assert!(shown(&out).contains("no-such-program"), "{protocol}: {}", shown(&out));
    }
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminal_has_its_clients_size_and_its_end_of_input() -> Result<()> {
    let Some(program) = program().await? else { return Ok(()) };
    let (node, _, id) = running(shell("c", FOREVER)).await?;
    let script = "until [ \"$(stty size)\" = '41 123' ]; do sleep 0.05; done; stty size; echo $TERM; cat; exit 3";
    for protocol in ["spdy", "websocket"] {
        let url = exec_url(&node, &id, "tty stdin stdout", &["/bin/sh", "-c", script]).await?;
        let client = client(&program, "exec", &url, protocol, "tty stdin stdout 10x20 0x0 41x123")?;
        let out = finish(client, b"typed\n").await?;
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        assert!(text.contains("41 123\r\nxterm\r\n"), "{protocol}: {text:?}");
        assert!(
            text.matches("typed").count() >= 2,
            "echoed and said: {protocol}: {text:?}"
        );
        assert_eq!(out.status.code(), Some(3), "{protocol}: {}", shown(&out));
    }
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn attach_talks_to_the_first_process_and_ends_with_it() -> Result<()> {
    let Some(program) = program().await? else { return Ok(()) };
    let mut config = pods::container("c", pods::BUSYBOX, &["/bin/sh"]);
    (config.stdin, config.stdin_once) = (true, true);
    let (node, _, id) = running(config).await?;
    let words = "stdin stdout stderr";
    let url = attach_url(&node, &id, words).await?;
    let out = finish(client(&program, "attach", &url, "spdy", words)?, b"echo -n hello\n").await?;
    assert_eq!(
        (out.stdout.as_slice(), out.status.code()),
        (&b"hello"[..], Some(0)),
        "{}",
        shown(&out)
    );
    e2e::eventually(Duration::from_secs(20), async || {
        let status = node.cri.container(&id).await?;
        ensure!(
            status.state() == ContainerState::ContainerExited && status.exit_code == 0,
            "{status:?}"
        );
        Ok(())
    })
    .await?;
    let ended = attach_url(&node, &id, words).await.expect_err("it has ended");
    assert_eq!(ended.code(), Code::FailedPrecondition);

    // Open to one client after the other, and through a terminal.
    let pod = pods::host_network(node.pod("other"));
    let second = node.cri.run_sandbox(&pod).await?;
    for (name, tty) in [("pipe", false), ("tty", true)] {
        let script = "while read line; do echo \"got $line\"; [ $line = end ] && exit 5; done";
        let mut config = shell(name, script);
        (config.stdin, config.tty) = (true, tty);
        let id = node.cri.launch(&second, &pod, &config).await?;
        let words = if tty { "tty stdin stdout" } else { "stdin stdout" };
        for line in ["one", "end"] {
            let url = attach_url(&node, &id, words).await?;
            let mut client = client(&program, "attach", &url, "websocket", words)?;
            let mut stdin = client.stdin.take().context("stdin")?;
            stdin.write_all(format!("{line}\n").as_bytes()).await?;
            let mut stdout = client.stdout.take().context("stdout")?;
            let mut text = String::new();
            let mut piece = [0; 1024];
            while !text.contains(&format!("got {line}")) {
                let len = tokio::time::timeout(Duration::from_secs(10), stdout.read(&mut piece)).await??;
                ensure!(len > 0, "{name}: {text:?}");
                text += &String::from_utf8_lossy(&piece[..len]);
            }
            if line == "end" {
                let status = tokio::time::timeout(Duration::from_secs(10), client.wait()).await??;
                assert_eq!(status.code(), Some(0), "{name}");
            }
        }
    }
    node.finish().await
}

/// A WebSocket client as bare as can be: it reads frames of the server, and pings nobody.
struct Bare {
    stream: TcpStream,
}

impl Bare {
    /// The status line of an upgrade that was asked for; 101 leaves the stream open.
    async fn ask(url: &str, protocol: &str) -> Result<(u16, TcpStream)> {
        let rest = url.strip_prefix("http://").context("an http URL")?;
        let (address, path) = rest.split_once('/').context("a path")?;
        let mut stream = TcpStream::connect(address).await?;
        let head = format!(
            "GET /{path} HTTP/1.1\r\nHost: {address}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
             Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\
             Sec-WebSocket-Protocol: {protocol}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await?;
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n\r\n") {
            answer.push(stream.read_u8().await?);
        }
        let text = String::from_utf8(answer)?;
        let code = text.split(' ').nth(1).context("a status line")?.parse()?;
        Ok((code, stream))
    }

    async fn open(url: &str) -> Result<Bare> {
        let (code, stream) = Bare::ask(url, "v4.channel.k8s.io").await?;
        ensure!(code == 101, "{code}");
        Ok(Bare { stream })
    }

    /// The next message: channel and bytes; `None` at the end.
    async fn next(&mut self) -> Result<Option<(u8, Vec<u8>)>> {
        let first = self.stream.read_u8().await?;
        if first & 15 == 8 {
            return Ok(None);
        }
        let len = match self.stream.read_u8().await? {
            126 => self.stream.read_u16().await?.into(),
            127 => self.stream.read_u64().await?,
            len => u64::from(len),
        };
        let mut message = vec![0; usize::try_from(len)?];
        self.stream.read_exact(&mut message).await?;
        let bytes = message.split_off(1);
        Ok(Some((message[0], bytes)))
    }

    /// Everything on stdout until `end`, and what the error channel said.
    async fn read_to(&mut self, end: &[u8]) -> Result<(Vec<u8>, String)> {
        let (mut output, mut error) = (Vec::new(), String::new());
        let read = async {
            while let Some((channel, bytes)) = self.next().await? {
                match channel {
                    1 => output.extend(bytes),
                    _ => error += &String::from_utf8_lossy(&bytes),
                }
                if !end.is_empty() && output.ends_with(end) {
                    break;
                }
            }
            anyhow::Ok(())
        };
        let read = tokio::time::timeout(Duration::from_secs(60), read).await;
        read.context("no end within 60 s")??;
        Ok((output, error))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_read_along_and_one_that_does_not_read_hurts_nobody() -> Result<()> {
    const READERS: usize = 100;
    let script = "while [ ! -e /go ]; do sleep 0.05; done; i=0; while [ $i -lt 400 ]; do i=$((i+1)); \
                  printf '%s %s\\n' $i \"$PAD\"; [ $((i % 20)) = 0 ] && sleep 0.3; done; echo done";
    let mut config = shell("c", script);
    config.envs = vec![KeyValue {
        key: "PAD".into(),
        value: "x".repeat(8000).into(),
    }];
    let (node, _, id) = running(config).await?;
    let mut readers = Vec::new();
    for _ in 0..READERS {
        readers.push(Bare::open(&attach_url(&node, &id, "stdout stderr").await?).await?);
    }
    let stuck = Bare::open(&attach_url(&node, &id, "stdout").await?).await?;
    node.cri.exec(&id, &["touch", "/go"], 5).await?;
    let mut tasks = tokio::task::JoinSet::new();
    for mut reader in readers {
        tasks.spawn(async move { reader.read_to(b"\ndone\n").await });
    }
    let mut first: Option<Vec<u8>> = None;
    while let Some(read) = tasks.join_next().await {
        let (output, error) = read??;
        ensure!(error.is_empty(), "{error}");
        let text = first.get_or_insert_with(|| output.clone());
        ensure!(
            *text == output,
            "readers saw different things: {} and {} bytes",
            text.len(),
            output.len()
        );
    }
    let text = String::from_utf8(first.context("readers")?)?;
    assert_eq!(text.lines().count(), 401, "all of it, in order");
    assert!(text.starts_with("1 xxx"));
    drop(stuck);
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn who_does_not_read_delays_no_stop() -> Result<()> {
    let (node, _, id) = running(shell("c", "yes aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa")).await?;
    let attached = Bare::open(&attach_url(&node, &id, "stdout").await?).await?;
    let url = exec_url(&node, &id, "stdout", &["yes", "from-exec"]).await?;
    let exec = Bare::open(&url).await?;
    there(&node, "yes from-exec").await?;
    let start = Instant::now();
    node.cri.stop(&id, 0).await?;
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    gone(&node, "yes").await?;
    drop((attached, exec));
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_ends_with_client_container_and_daemon() -> Result<()> {
    let Some(program) = program().await? else { return Ok(()) };
    let (mut node, _, id) = running(shell("c", FOREVER)).await?;
    for (protocol, words) in [("spdy", "stdin stdout"), ("websocket", "tty stdin stdout")] {
        let command = ["/bin/sh", "-c", "trap '' HUP; sleep 4242"];
        let url = exec_url(&node, &id, words, &command).await?;
        let mut client = client(&program, "exec", &url, protocol, words)?;
        there(&node, "sleep 4242").await?;
        client.start_kill()?;
        client.wait().await?;
        gone(&node, "4242").await.context(protocol)?;
    }
    let url = exec_url(&node, &id, "stdout", &["sleep", "4243"]).await?;
    let client_of_daemon = client(&program, "exec", &url, "spdy", "stdout")?;
    there(&node, "sleep 4243").await?;
    node.crash().await?;
    gone(&node, "4243").await?;
    // Kubernetes' client takes a broken connection for an end: it must not hang, that is all.
    finish(client_of_daemon, b"").await?;

    let url = exec_url(&node, &id, "stdout", &["sleep", "4244"]).await?;
    let exec = client(&program, "exec", &url, "websocket", "stdout")?;
    let attach = client(
        &program,
        "attach",
        &attach_url(&node, &id, "stdout").await?,
        "spdy",
        "stdout",
    )?;
    there(&node, "sleep 4244").await?;
    node.cri.stop(&id, 0).await?;
    assert_eq!(finish(exec, b"").await?.status.code(), Some(137));
    assert_eq!(finish(attach, b"").await?.status.code(), Some(0));
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_url_is_good_once_for_what_it_was_given_for() -> Result<()> {
    let (node, sandbox, id) = running(shell("c", FOREVER)).await?;
    let url = exec_url(&node, &id, "stdout", &["echo", "once"]).await?;
    let (refused, _) = Bare::ask(&url, "v9.channel.k8s.io").await?;
    assert_eq!(refused, 403, "a refused protocol leaves the URL good");
    assert_eq!(
        Bare::ask(&url.replace("/exec/", "/attach/"), "v4.channel.k8s.io")
            .await?
            .0,
        404
    );
    let (output, status) = Bare::open(&url).await?.read_to(b"").await?;
    assert_eq!(output, b"once\n");
    assert!(status.contains(r#""status":"Success""#), "{status}");
    assert_eq!(Bare::ask(&url, "v4.channel.k8s.io").await?.0, 404);
    assert_eq!(Bare::ask(&format!("{url}x"), "v4.channel.k8s.io").await?.0, 404);
    for words in ["", "tty stdout stderr"] {
        let refused = exec_url(&node, &id, words, &["true"]).await.expect_err(words);
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused:?}");
        let refused = attach_url(&node, &id, words).await.expect_err(words);
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused:?}");
    }
    let refused = exec_url(&node, &id, "stdout", &[]).await.expect_err("no command");
    assert_eq!(refused.code(), Code::InvalidArgument);
    let refused = attach_url(&node, "feed", "stdout").await.expect_err("unknown");
    assert_eq!(refused.code(), Code::NotFound);
    let forward = |port| PortForwardRequest {
        pod_sandbox_id: sandbox.clone(),
        port,
    };
    let refused = node
        .cri
        .runtime
        .clone()
        .port_forward(forward(vec![80, 0]))
        .await
        .expect_err("port 0");
    assert_eq!(refused.code(), Code::InvalidArgument);
    // The table is bounded.
    let mut full = None;
    for _ in 0..1001 {
        if let Err(status) = attach_url(&node, &id, "stdout").await {
            full = Some(status);
            break;
        }
    }
    assert_eq!(full.context("1,001 grants")?.code(), Code::ResourceExhausted);
    node.finish().await
}

/// Sends a request and reads the answer to its end.
async fn fetch(address: &str, request: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(request.as_bytes()).await?;
    // Half-close: what answers only then still can.
    stream.shutdown().await?;
    let mut text = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(10), stream.read_to_end(&mut text)).await;
    read.context("no answer within 10 s")??;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// The first line a program prints, and where it prints more.
async fn first_line(child: &mut Child) -> Result<(String, ChildStdout)> {
    let mut stdout = child.stdout.take().context("stdout")?;
    let mut line = Vec::new();
    let read = async {
        loop {
            match stdout.read_u8().await? {
                b'\n' => return anyhow::Ok(()),
                byte => line.push(byte),
            }
        }
    };
    let read = tokio::time::timeout(Duration::from_secs(20), read).await;
    read.context("no line within 20 s")??;
    Ok((String::from_utf8(line)?, stdout))
}

#[tokio::test(flavor = "multi_thread")]
async fn ports_inside_a_pod_are_reached_through_every_transport() -> Result<()> {
    let Some(program) = program().await? else { return Ok(()) };
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = node.pod("ports");
    let sandbox = node.cri.run_sandbox(&pod).await?;
    // Answers 1.5 s after the client has said all: a half-close must reach it, and leave the way back open.
    let script = "nc -ll -p 8081 -e /bin/sh -c 'n=$(wc -c); sleep 1.5; echo counted $n'";
    node.cri
        .launch(&sandbox, &pod, &pods::container("web", pods::HELLO, &[]))
        .await?;
    let count = node.cri.launch(&sandbox, &pod, &shell("count", script)).await?;
    e2e::eventually(Duration::from_secs(10), async || {
        let tcp = node
            .cri
            .exec(&count, &["cat", "/proc/net/tcp", "/proc/net/tcp6"], 5)
            .await?;
        ensure!(
            String::from_utf8_lossy(&tcp.stdout).contains(":1F91 "),
            "nobody listens on 8081"
        );
        Ok(())
    })
    .await?;
    let url = async |port| {
        let request = PortForwardRequest {
            pod_sandbox_id: sandbox.clone(),
            port: vec![port],
        };
        anyhow::Ok(node.cri.runtime.clone().port_forward(request).await?.into_inner().url)
    };
    for protocol in ["spdy", "websocket"] {
        let mut web = client(&program, "forward", &url(8080).await?, protocol, "8080")?;
        let (address, _open) = first_line(&mut web).await?;
        let get = "GET / HTTP/1.0\r\n\r\n";
        let fetched = futures::future::join_all((0..20).map(|_| fetch(&address, get))).await;
        for text in fetched {
            ensure!(
                text.as_ref().is_ok_and(|text| text.contains("200 OK")),
                "{protocol}: {text:?}"
            );
        }
        let mut count = client(&program, "forward", &url(8081).await?, protocol, "8081")?;
        let (address, _open) = first_line(&mut count).await?;
        let text = fetch(&address, "12345").await?;
        assert_eq!(text, "counted 5\n", "{protocol}");
        let mut closed = client(&program, "forward", &url(9).await?, protocol, "9")?;
        let (address, _open) = first_line(&mut closed).await?;
        assert_eq!(fetch(&address, "x").await.unwrap_or_default(), "");
        let out = finish(closed, b"").await?;
        assert!(shown(&out).contains("port 9 in the pod"), "{protocol}: {}", shown(&out));
        web.start_kill()?;
        count.start_kill()?;
    }
    let mut lost = client(&program, "forward", &url(8080).await?, "spdy", "8080")?;
    let input = lost.stdin.take();
    let _open = first_line(&mut lost).await?;
    node.cri.stop_sandbox(&sandbox).await?;
    let status = tokio::time::timeout(Duration::from_secs(10), lost.wait()).await;
    assert!(!status.context("it goes on without its pod")??.success());
    drop(input);
    node.finish().await
}

/// The client is Kubernetes' own; it takes any certificate, as the kubelet's is.
#[tokio::test(flavor = "multi_thread")]
async fn everything_goes_over_tls() -> Result<()> {
    let Some(program) = program().await? else { return Ok(()) };
    let mut node = Node::new(Options::default())?;
    let (cert, key) = (node.path("tls.crt"), node.path("tls.key"));
    tools::certificate(&cert, &key, "streams")?;
    std::fs::create_dir(node.path("etc"))?;
    let tls = format!("{{cert: '{}', key: '{}'}}", cert.display(), key.display());
    node.file("etc/config.yaml", format!("streaming: {{tls: {tls}}}\n"))?;
    node.serve().await?;
    node.busybox().await?;
    let pod = node.pod("tls");
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let web = pods::container("web", pods::HELLO, &[]);
    node.cri.launch(&sandbox, &pod, &web).await?;
    for protocol in ["spdy", "websocket"] {
        let echo = "while read line; do echo \"got $line\"; [ $line = end ] && exit 3; done";
        let mut config = shell(protocol, echo);
        config.stdin = true;
        let id = node.cri.launch(&sandbox, &pod, &config).await?;
        let words = "stdin stdout stderr";
        let url = exec_url(&node, &id, words, &["/bin/sh", "-c", "cat; exit 7"]).await?;
        ensure!(url.starts_with("https://"), "{url}");
        let out = finish(client(&program, "exec", &url, protocol, words)?, b"in\n").await?;
        assert_eq!(
            (&*out.stdout, out.status.code()),
            (&b"in\n"[..], Some(7)),
            "{protocol}: {}",
            shown(&out)
        );

        let url = attach_url(&node, &id, words).await?;
        ensure!(url.starts_with("https://"), "{url}");
        let out = finish(client(&program, "attach", &url, protocol, words)?, b"one\nend\n").await?;
        assert_eq!(out.stdout, b"got one\ngot end\n", "{protocol}: {}", shown(&out));
        assert_eq!(node.cri.exited(&id).await?.exit_code, 3, "{protocol}");

        let request = PortForwardRequest {
            pod_sandbox_id: sandbox.clone(),
            port: vec![8080],
        };
        let url = node.cri.runtime.clone().port_forward(request).await?.into_inner().url;
        ensure!(url.starts_with("https://"), "{url}");
        let mut forward = client(&program, "forward", &url, protocol, "8080")?;
        let (address, _open) = first_line(&mut forward).await?;
        // The server may not listen yet.
        eventually(Duration::from_secs(10), async || {
            let text = fetch(&address, "GET / HTTP/1.0\r\n\r\n").await?;
            ensure!(text.contains("200 OK"), "{protocol}: {text}");
            Ok(())
        })
        .await?;
        forward.start_kill()?;
    }
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn crictl_execs_attaches_and_forwards() -> Result<()> {
    let crictl = || tools::go_program("crictl", "sigs.k8s.io/cri-tools/cmd/crictl");
    let Some(program) = tokio::task::spawn_blocking(crictl).await?? else {
        return Ok(());
    };
    let mut config = shell(
        "c",
        "while read line; do echo \"got $line\"; [ $line = end ] && exit; done",
    );
    config.stdin = true;
    let (node, sandbox, id) = running(config).await?;
    node.file("crictl.yaml", "timeout: 20\n")?;
    let base = [
        program.display().to_string(),
        "--config".into(),
        node.path("crictl.yaml").display().to_string(),
        "-r".into(),
        format!("unix://{}", node.socket().display()),
    ];
    let crictl = |args: &[&str]| -> Result<Child> {
        let mut command = Command::new(&base[0]);
        command.args(&base[1..]).args(args);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        Ok(command.kill_on_drop(true).spawn()?)
    };
    for transport in ["spdy", "websocket"] {
        let child = crictl(&["exec", "-i", "-r", transport, &id, "sh", "-c", "cat; exit 4"])?;
        let out = finish(child, b"hello\n").await?;
        assert_eq!(out.stdout, b"hello\n", "{transport}: {}", shown(&out));
        assert!(
            !out.status.success() && shown(&out).contains("exit code 4"),
            "{transport}: {}",
            shown(&out)
        );
    }
    let line = format!("{} exec -it {id} sh -c 'stty size; tty'", base.join(" "));
    let mut script = Command::new("script");
    script.args(["-qefc", &format!("stty rows 33 cols 77; {line}"), "/dev/null"]);
    script
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let out = tokio::time::timeout(Duration::from_secs(20), script.spawn()?.wait_with_output()).await??;
    assert!(shown(&out).contains("/dev/pts/"), "{}", shown(&out));
    let mut attached = crictl(&["attach", "-i", &id])?;
    let mut stdin = attached.stdin.take().context("stdin")?;
    stdin.write_all(b"end\n").await?;
    drop(stdin);
    let out = tokio::time::timeout(Duration::from_secs(20), attached.wait_with_output()).await??;
    assert_eq!(out.stdout, b"got end\n", "{}", shown(&out));
    // A server on the host's network, forwarded from the host's network.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.write_all(b"from the host").await;
        }
    });
    let free = e2e::port::unused();
    let mut forward = crictl(&["port-forward", &sandbox, &format!("{free}:{port}")])?;
    let text = e2e::eventually(Duration::from_secs(20), async || {
        let text = fetch(&format!("127.0.0.1:{free}"), "x").await?;
        if text.is_empty() {
            bail!("nothing yet");
        }
        Ok(text)
    })
    .await?;
    assert_eq!(text, "from the host");
    forward.start_kill()?;
    node.finish().await
}

/// Runs a command line on a terminal of its own, typing `input` once `after` was shown.
async fn on_a_terminal(line: &str, after: &str, input: &[u8]) -> Result<Output> {
    let mut script = Command::new("script");
    script.args(["-qefc", &format!("stty rows 33 cols 77; {line}"), "/dev/null"]);
    script.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
    let mut child = script.spawn().context("script, of bsdutils")?;
    let mut stdin = child.stdin.take().context("stdin")?;
    let mut stdout = child.stdout.take().context("stdout")?;
    let mut shown = Vec::new();
    let talk = async {
        let mut is_typed = false;
        let mut piece = [0; 4096];
        loop {
            let len = stdout.read(&mut piece).await?;
            if len == 0 {
                return anyhow::Ok(child.wait().await?);
            }
            shown.extend(&piece[..len]);
            if !is_typed && String::from_utf8_lossy(&shown).contains(after) {
                is_typed = true;
                stdin.write_all(input).await?;
            }
        }
    };
    let status = tokio::time::timeout(Duration::from_secs(30), talk).await;
    let text = String::from_utf8_lossy(&shown).into_owned();
    Ok(Output {
        status: status.with_context(|| format!("`{line}` did not end: {text:?}"))??,
        stdout: shown,
        stderr: Vec::new(),
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_line_has_a_terminal_and_ports() -> Result<()> {
    let mut config = shell(
        "c",
        "while [ ! -e /heard ]; do echo ready; sleep 0.1; done & \
         while read line; do touch /heard; echo \"got $line\"; [ $line = end ] && exit; done",
    );
    (config.stdin, config.tty) = (true, true);
    let (node, _, id) = running(config).await?;
    let reconcile = |args: &[&str]| -> Result<String> {
        let command = node.command(args)?;
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        Ok(words
            .map(|word| format!("'{}'", word.to_string_lossy()))
            .collect::<Vec<_>>()
            .join(" "))
    };
    let mut piped = Command::from(node.command(&["exec", "-i", &id, "--", "sh", "-c", "cat; echo e >&2; exit 9"])?);
    piped
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let out = finish(piped.spawn()?, b"through\n").await?;
    assert_eq!(
        (out.stdout.as_slice(), out.status.code()),
        (&b"through\n"[..], Some(9)),
        "{}",
        shown(&out)
    );
    assert_eq!(out.stderr, b"e\n");
    let missing = node.reconcile(&["exec", &id, "--", "no-such-program"]).await?;
    assert_eq!(missing.status.code(), Some(1), "{}", shown(&missing));

    let ask = "until [ \"$(stty size)\" = \"33 77\" ]; do sleep 0.05; done; stty size; read word; echo [$word]; exit 6";
    let line = reconcile(&["exec", "-it", &id, "--", "sh", "-c", ask])?;
    let out = on_a_terminal(&line, "33 77", b"typed\r").await?;
    assert!(shown(&out).contains("[typed]"), "{}", shown(&out));
    assert_eq!(out.status.code(), Some(6), "{}", shown(&out));

    let line = format!("{}; echo detached", reconcile(&["attach", "-it", &id])?);
    let out = on_a_terminal(&line, "ready", b"one\r\x10\x11").await?;
    assert!(shown(&out).contains("detached"), "{}", shown(&out));
    let state = node.cri.container(&id).await?.state();
    assert_eq!(state, ContainerState::ContainerRunning, "it goes on");
    let mut attached = Command::from(node.command(&["attach", "-i", &id])?);
    attached
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let out = finish(attached.spawn()?, b"end\n").await?;
    assert!(shown(&out).contains("got end"), "{}", shown(&out));

    let pod = node.pod("web");
    let sandbox = node.cri.run_sandbox(&pod).await?;
    node.cri
        .launch(&sandbox, &pod, &pods::container("web", pods::HELLO, &[]))
        .await?;
    let mut forward = Command::from(node.command(&["port-forward", "web", ":8080"])?);
    let mut forward = forward
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let (line, _open) = first_line(&mut forward).await?;
    let address = line.split(' ').nth(2).with_context(|| line.clone())?.to_owned();
    // The server may not listen yet.
    let text = eventually(Duration::from_secs(10), async || {
        let text = fetch(&address, "GET / HTTP/1.0\r\n\r\n").await?;
        ensure!(!text.is_empty(), "no answer");
        Ok(text)
    });
    let text = text.await?;
    assert!(text.contains("200 OK"), "{text}");
    node.cri.stop_sandbox(&sandbox).await?;
    let out = tokio::time::timeout(Duration::from_secs(10), forward.wait_with_output()).await??;
    assert_eq!(out.status.code(), Some(1), "{}", shown(&out));
    assert!(shown(&out).contains("lost connection to pod web"), "{}", shown(&out));
    node.finish().await
}
