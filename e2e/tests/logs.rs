//! The CRI log file: format, byte for byte what was written, whole across crashes and rotation.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::node::Node;
use e2e::pods::{self, shell};

#[tokio::test(flavor = "multi_thread")]
async fn streams_tags_and_bytes() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = pods::host_network(node.pod("bytes"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let script =
        r"echo out; echo err >&2; printf 'cr\r\n'; printf '\n'; printf '\377\376 bytes\n'; sleep 0.2; printf last";
    let id = node.cri.launch(&sandbox, &pod, &shell("c", script)).await?;
    let status = node.cri.exited(&id).await?;
    let raw = fs::read(&status.log_path)?;
    let mut texts: Vec<(String, Vec<u8>)> = Vec::new();
    for line in raw.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        let mut parts = line.splitn(4, |byte| *byte == b' ');
        let time = String::from_utf8(parts.next().context("time")?.to_vec())?;
        assert!(time.len() >= 20 && time.contains('T'), "RFC 3339: {time}");
        let stream = String::from_utf8(parts.next().context("stream")?.to_vec())?;
        let tag = String::from_utf8(parts.next().context("tag")?.to_vec())?;
        texts.push((format!("{stream} {tag}"), parts.next().context("text")?.to_vec()));
    }
    let stdout: Vec<_> = texts.iter().filter(|(head, _)| head.starts_with("stdout")).collect();
    let expected: [(&str, &[u8]); 5] = [
        ("stdout F", b"out"),
        ("stdout F", b"cr\r"),
        ("stdout F", b""),
        ("stdout F", b"\xff\xfe bytes"),
        ("stdout P", b"last"),
    ];
    assert_eq!(stdout.len(), expected.len(), "{texts:?}");
    for (found, expected) in stdout.iter().zip(expected) {
        assert_eq!((found.0.as_str(), found.1.as_slice()), expected);
    }
    assert!(texts.contains(&("stderr F".into(), b"err".to_vec())));
    assert_eq!(raw.last(), Some(&b'\n'), "also the last line ends in a newline");
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_line_comes_in_parts_that_add_up() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let pod = pods::host_network(node.pod("long"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let script = "head -c 100000 /dev/zero | tr '\\0' x; echo; echo after";
    let id = node.cri.launch(&sandbox, &pod, &shell("c", script)).await?;
    let lines = pods::log_lines(node.cri.exited(&id).await?.log_path)?;
    let (after, long) = lines.split_last().context("lines")?;
    assert_eq!((after.text.as_str(), after.tag.as_str()), ("after", "F"));
    assert_eq!(long.iter().map(|line| line.text.len()).sum::<usize>(), 100_000);
    let (end, parts) = long.split_last().context("a long line")?;
    assert!(
        parts.iter().all(|line| line.tag == "P") && end.tag == "F",
        "parts, then the end"
    );
    node.finish().await
}

/// Numbers in `texts` must be 1, 2, 3 … with none missing, doubled or out of order.
fn contiguous(texts: &[String]) -> Result<usize> {
    for (n, text) in texts.iter().enumerate() {
        let found = text.split(' ').next().unwrap_or_default();
        ensure!(found == (n + 1).to_string(), "line {} says {text:?}", n + 1);
    }
    Ok(texts.len())
}

/// Torture case T14 at a size for every day: a chatty container, the daemon and then the shim killed, the log rotated.
#[tokio::test(flavor = "multi_thread")]
async fn no_line_is_lost_doubled_or_reordered_by_kills_and_rotation() -> Result<()> {
    let mut node = Node::start().await?;
    node.busybox().await?;
    let pod = pods::host_network(node.pod("chatty"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let script =
        "i=0; while [ $i -lt 60000 ]; do i=$((i+1)); echo $i some text to make the line longer; done; echo 60001 end";
    let id = node.cri.launch(&sandbox, &pod, &shell("c", script)).await?;
    let log = node.cri.container(&id).await?.log_path;
    let mut files = Vec::new();
    for round in 0..4 {
        let lines = |path: &str| fs::read(path).map(|bytes| bytes.iter().filter(|byte| **byte == b'\n').count());
        let full = async || -> Result<()> {
            let ended = node.cri.container(&id).await.is_ok_and(|status| status.finished_at > 0);
            ensure!(ended || lines(&log).unwrap_or(0) > 200, "too few lines yet");
            Ok(())
        };
        e2e::eventually(Duration::from_secs(20), full).await?;
        if round % 2 == 0 {
            node.crash().await?;
        } else {
            let shim = node.shims()?.pop().context("a shim")?;
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(shim), nix::sys::signal::Signal::SIGKILL)?;
            e2e::eventually(Duration::from_secs(20), async || {
                ensure!(node.shims()?.iter().any(|pid| *pid != shim), "no new shim");
                Ok(())
            })
            .await?;
        }
        let rotated = format!("{log}.{round}");
        fs::rename(&log, &rotated)?;
        files.push(rotated);
        match node.cri.reopen_log(&id).await {
            Ok(()) => ensure!(fs::metadata(&log).is_ok(), "reopened, yet there is no file"),
            Err(status) if status.code() == tonic::Code::FailedPrecondition => break,
            Err(status) => return Err(status.into()),
        }
    }
    let status = node.cri.exited(&id).await?;
    if fs::metadata(&log).is_ok() {
        files.push(log);
    }
    let mut texts = Vec::new();
    for file in &files {
        texts.extend(pods::log_texts(file)?);
    }
    let count = contiguous(&texts)?;
    assert_eq!((count, status.exit_code), (60_001, 0), "over {} files", files.len());
    node.finish().await
}

/// Writes numbered lines of a KiB, about 1000 a second, then one without an end. Its exit code is 1 if a hundred lines
/// ever took it ten seconds: a log that nobody takes would hold it up for as long as the daemon is away.
const PACED: &str = "pad=$(head -c 1000 /dev/zero | tr '\\0' x); i=0; worst=0
now() { read up rest </proc/uptime; at=${up%.*}; }
now; last=$at
while [ $i -lt 36000 ]; do
  i=$((i+1)); echo $i $pad
  if [ $((i%100)) = 0 ]; then
    usleep 90000; now
    if [ $((at-last)) -gt $worst ]; then worst=$((at-last)); fi
    last=$at
  fi
done
printf '%s last' $((i+1))
exit $((worst > 10))";

/// Torture case T14: the daemon away for half a minute of a steady writer, then five rotations; the last line has no
/// end.
#[tokio::test(flavor = "multi_thread")]
async fn a_steady_writer_outlives_the_daemons_absence_and_rotations() -> Result<()> {
    let mut node = Node::start().await?;
    node.busybox().await?;
    let pod = pods::host_network(node.pod("steady"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let id = node.cri.launch(&sandbox, &pod, &shell("c", PACED)).await?;
    let log = node.cri.container(&id).await?.log_path;
    let grown = async |lines: u64| {
        let full = async || -> Result<()> {
            let size = fs::metadata(&log)?.len();
            ensure!(size > lines << 10, "{size} bytes, {lines} lines are waited for");
            Ok(())
        };
        e2e::eventually(Duration::from_secs(120), full).await
    };
    grown(1000).await?;
    node.kill9().await?;
    grown(31_000).await?;
    node.serve().await?;
    let mut files = Vec::new();
    for round in 0..5 {
        let rotated = format!("{log}.{round}");
        fs::rename(&log, &rotated)?;
        files.push(rotated);
        node.cri.reopen_log(&id).await?;
        grown(300).await?;
    }
    let status = node.cri.exited(&id).await?;
    files.push(log.clone());
    let mut lines = Vec::new();
    for file in &files {
        lines.extend(pods::log_lines(file)?);
    }
    let (last, before) = lines.split_last().context("no lines")?;
    assert!(before.iter().all(|line| line.tag == "F"), "whole lines");
    assert_eq!((last.tag.as_str(), last.text.as_str()), ("P", "36001 last"));
    let texts: Vec<_> = lines.iter().map(|line| line.text.clone()).collect();
    assert_eq!((contiguous(&texts)?, status.exit_code), (36_001, 0));
    node.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn reopen_of_an_ended_container_is_refused_and_makes_no_file() -> Result<()> {
    let node = Node::start().await?;
    let pod = pods::host_network(node.pod("reopen"));
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let id = node
        .cri
        .launch(
            &sandbox,
            &pod,
            &pods::container("c", pods::HELLO, &["/hello", "lines", "2"]),
        )
        .await?;
    let log = node.cri.exited(&id).await?.log_path;
    fs::remove_file(&log)?;
    let refused = node.cri.reopen_log(&id).await.expect_err("it has ended");
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
    assert!(fs::metadata(&log).is_err(), "a file was made");
    node.finish().await
}

/// The application never blocks because its log cannot be written.
#[tokio::test(flavor = "multi_thread")]
async fn an_unwritable_log_does_not_stop_the_writer() -> Result<()> {
    let node = Node::start().await?;
    node.busybox().await?;
    let mut pod = pods::host_network(node.pod("full"));
    let small = node.path("small");
    fs::create_dir(&small)?;
    let options = Some("size=64k");
    nix::mount::mount(
        Some("tmpfs"),
        &small,
        Some("tmpfs"),
        nix::mount::MsFlags::empty(),
        options,
    )?;
    pod.log_directory = small.display().to_string();
    let sandbox = node.cri.run_sandbox(&pod).await?;
    let script = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); echo $i 0123456789012345678901234567890123456789; done";
    let id = node.cri.launch(&sandbox, &pod, &shell("c", script)).await?;
    let status = node.cri.exited(&id).await;
    nix::mount::umount2(&small, nix::mount::MntFlags::MNT_DETACH)?;
    assert_eq!(status?.exit_code, 0, "it went on to its end");
    node.finish().await
}
