//! Output into the log: speed, rotation, a killed shim.

mod support;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use shim::record;
use support::{Pod, is_alive, wait};

/// Checks that the log holds the numbers 1..=last, each once, in order.
fn assert_counted(log: &str, last: usize) {
    let mut expected = 1;
    for line in log.lines() {
        let mut parts = line.splitn(4, ' ');
        let (_, stream, tag, text) = (parts.next(), parts.next(), parts.next(), parts.next());
        assert_eq!(
            (stream, tag, text),
            (Some("stdout"), Some("F"), Some(expected.to_string().as_str()))
        );
        expected += 1;
    }
    assert_eq!(expected, last + 1);
}

/// Before Linux 6.15 it is luck whether anybody sees how a process ended that is no child.
fn assert_code(container: &support::Container, code: i32) {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut parts = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let is_told = (parts.next(), parts.next()) >= (Some(6), Some(15));
    let end = container.ended();
    assert!(end.code == code || (!is_told && end.code == 255), "{end:?}");
}

#[tokio::test]
async fn much_output_is_all_there() {
    let pod = Pod::new().await;
    let container = pod.container("much", &["/hello", "lines", "2000000"]);
    let start = Instant::now();
    pod.run(&container).await.unwrap();
    container.ended();
    let log = container.log();
    println!("{} MB of log in {:?}", log.len() >> 20, start.elapsed());
    assert_counted(&log, 2_000_000);
    pod.end().await;
}

#[tokio::test]
async fn a_killed_shim_loses_no_line_and_no_exit_code() {
    let mut pod = Pod::new().await;
    let script = "i=0; while [ $i -lt 60000 ]; do i=$((i+1)); echo $i; done; exit 9";
    let container = pod.shell("count", script).await;
    for size in [1_000, 200_000, 600_000, 1_000_000] {
        wait(|| (container.log().len() > size).then_some(()));
        pod.replace_shim().await;
    }
    let state = pod.client.state().await.unwrap();
    assert!(state.processes.iter().all(|process| process.adopted));
    assert_code(&container, 9);
    assert_counted(&container.log(), 60_000);
    pod.end().await;
}

#[tokio::test]
async fn a_takeover_keeps_stop_deadline_pause_and_dead() {
    let mut pod = Pod::new().await;
    let pause = pod.pause(true).await;
    let script = "trap '' TERM; echo ready; while :; do sleep 1000; done";
    let stubborn = pod.shell("stubborn", script).await;
    stubborn.wait_for("ready");
    let quick = pod.shell("quick", "echo ready; sleep 1; exit 5").await;
    quick.wait_for("ready");
    pod.stop("stubborn", libc::SIGTERM, Duration::from_millis(1500)).await;
    pod.replace_shim().await;
    assert!(is_alive(pause.pid) && is_alive(stubborn.started().pid));
    assert_code(&stubborn, 137);
    assert_code(&quick, 5);
    // Its first process ends while no shim lives: the status is lost, and said so.
    let lost = pod.container("lost", &["/hello", "sleep", "1000"]);
    let pid = pod.run(&lost).await.unwrap().pid;
    // SAFETY: no pointers; processes that this test started.
    unsafe {
        libc::kill(pod.shim as i32, libc::SIGSTOP);
        libc::kill(pid as i32, libc::SIGKILL);
    }
    pod.kill_shim();
    wait(|| (!Path::new(&format!("/proc/{pid}")).exists()).then_some(()));
    pod.revive_shim().await;
    let end = lost.ended();
    assert_eq!(
        (end.code, end.reason.as_str(), end.message.as_str()),
        (255, record::UNKNOWN, "exit status lost")
    );
    pod.end().await;
}

#[tokio::test]
async fn a_log_is_reopened_without_losing_a_line() {
    let pod = Pod::new().await;
    let script = "i=0; while [ $i -lt 30000 ]; do i=$((i+1)); echo $i; done";
    let container = pod.shell("rotate", script).await;
    let mut parts = Vec::new();
    for n in 0..3 {
        wait(|| (container.log().len() > 20_000).then_some(()));
        let old = format!("{}.{n}", container.request.log_path);
        fs::rename(&container.request.log_path, &old).unwrap();
        pod.client.reopen_log("rotate", "").await.unwrap();
        assert!(Path::new(&container.request.log_path).exists());
        parts.push((old.clone(), fs::read_to_string(old).unwrap()));
    }
    container.ended();
    let mut all = String::new();
    for (path, text) in parts {
        assert_eq!(fs::read_to_string(path).unwrap(), text, "written after it was reopened");
        all.push_str(&text);
    }
    all.push_str(&container.log());
    assert_counted(&all, 30_000);
    assert!(pod.client.reopen_log("rotate", "").await.is_err());
    pod.end().await;
}

#[tokio::test]
async fn an_unfinished_line_is_shown_after_a_second() {
    let pod = Pod::new().await;
    let container = pod.shell("prompt", "printf 'name? '; exec sleep 1000").await;
    wait(|| (container.lines() == ["stdout P name? "]).then_some(()));
    pod.client.delete("prompt").await.unwrap();
    pod.end().await;
}

#[tokio::test]
async fn an_unwritable_log_does_not_stop_the_container() {
    let pod = Pod::new().await;
    let mut container = pod.container(
        "dark",
        &[
            "sh",
            "-c",
            "/hello lines 300000; echo done > /tmp/done; exec sleep 1000",
        ],
    );
    let blocked = pod.tmp.path().join("blocked");
    fs::write(&blocked, "").unwrap();
    container.request.log_path = blocked.join("log").to_str().unwrap().into();
    pod.run(&container).await.unwrap();
    let done = container
        .config
        .pointer("/root/path")
        .unwrap()
        .as_str()
        .unwrap()
        .to_owned()
        + "/tmp/done";
    wait(|| Path::new(&done).exists().then_some(()));
    assert!(pod.client.state().await.unwrap().processes[0].dropped_bytes > 0);
    fs::remove_file(&blocked).unwrap();
    container.wait_for("bytes of log dropped");
    assert!(container.log().contains("stdout F 1\n"));
    pod.client.delete("dark").await.unwrap();
    pod.end().await;
}
