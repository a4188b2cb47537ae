//! Execs whose output is collected.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use shim::Code;
use shim::api::ExecRequest;
use support::{Pod, is_alive, wait};

const LONG: Duration = Duration::from_secs(600);

#[tokio::test]
async fn output_code_and_errors() {
    let pod = Pod::new().await;
    let container = pod.container("c", &["/hello", "sleep", "1000"]);
    pod.run(&container).await.unwrap();
    let output = pod.exec("c", "echo out; echo err >&2; exit 3", LONG).await.unwrap();
    assert_eq!(
        (&*output.stdout, &*output.stderr, output.exit_code),
        (&b"out\n"[..], &b"err\n"[..], 3)
    );
    let killed = pod.exec("c", "kill -9 $$", LONG).await.unwrap();
    assert_eq!((killed.exit_code, killed.timed_out), (137, false));
    let request = |args: &[&str]| ExecRequest {
        id: "c".into(),
        args: args.iter().map(|arg| arg.to_string()).collect(),
        env: vec!["X=1".into(), "PATH=/usr/bin".into()],
        cwd: "/usr".into(),
        limit: 10,
        ..ExecRequest::default()
    };
    let output = pod
        .client
        .exec(request(&["sh", "-c", "echo $X $PWD $PATH"]))
        .await
        .unwrap();
    assert_eq!((&*output.stdout, output.truncated), (&b"1 /usr /us"[..], true));
    let error = pod.client.exec(request(&["no-such"])).await.unwrap_err();
    assert_eq!(error.code(), Some(Code::StartFailed));
    assert!(error.to_string().contains("/usr/bin"), "{error}");
    assert_eq!(
        pod.exec("nobody", "true", LONG).await.unwrap_err().code(),
        Some(Code::NotFound)
    );
    assert_eq!(
        pod.client.exec(request(&[])).await.unwrap_err().code(),
        Some(Code::InvalidArgument)
    );
    let start = Instant::now();
    for _ in 0..50 {
        assert_eq!(pod.exec("c", "exit 0", LONG).await.unwrap().exit_code, 0);
    }
    println!("exec of sh: {:?} each", start.elapsed() / 50);
    assert_eq!(sessions(&pod), Vec::<PathBuf>::new());
    pod.end().await;
}

/// Cgroups of execs that are left.
fn sessions(pod: &Pod) -> Vec<PathBuf> {
    let dirs = pod.cgroups("c").into_iter().flat_map(|dir| fs::read_dir(dir).unwrap());
    dirs.map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir())
        .collect()
}

fn pids(stdout: &[u8]) -> Vec<u32> {
    String::from_utf8_lossy(stdout)
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect()
}

#[tokio::test]
async fn a_timeout_leaves_nothing_of_the_session() {
    let pod = Pod::new().await;
    let mut container = pod.container("c", &["/hello", "sleep", "1000"]);
    // So that the numbers printed are the host's.
    container.request.pid = shim::api::PidNamespace::Host as i32;
    pod.run(&container).await.unwrap();
    let start = Instant::now();
    let script = "setsid sleep 1234 & echo $!; (setsid setsid sleep 1234 &) ; echo $$; sleep 1234";
    let output = pod.exec("c", script, Duration::from_secs(1)).await.unwrap();
    assert!(output.timed_out);
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    let found = pids(&output.stdout);
    assert_eq!(found.len(), 2);
    assert!(found.iter().all(|pid| !is_alive(*pid)));
    assert_eq!(sessions(&pod), Vec::<PathBuf>::new());
    pod.end().await;
}

#[tokio::test]
async fn a_background_child_that_holds_the_pipe_is_not_waited_for() {
    let pod = Pod::new().await;
    let mut container = pod.container("c", &["/hello", "sleep", "1000"]);
    container.request.pid = shim::api::PidNamespace::Host as i32;
    pod.run(&container).await.unwrap();
    let start = Instant::now();
    let output = pod
        .exec("c", "sleep 300 & echo $!", Duration::from_secs(1))
        .await
        .unwrap();
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    assert_eq!((output.exit_code, output.timed_out), (0, false));
    assert!(!is_alive(pids(&output.stdout)[0]));
    // One that let go of it was meant to stay.
    let output = pod
        .exec("c", "sleep 300 >/dev/null 2>&1 & echo $!", LONG)
        .await
        .unwrap();
    let daemon = pids(&output.stdout)[0];
    assert!(is_alive(daemon));
    assert_eq!(sessions(&pod), Vec::<PathBuf>::new());
    pod.client.delete("c").await.unwrap();
    assert!(!is_alive(daemon));
    pod.end().await;
}

#[tokio::test]
async fn an_exec_dies_with_its_connection_and_with_its_container() {
    let pod = Pod::new().await;
    let mut container = pod.container("c", &["/hello", "sleep", "1000"]);
    container.request.pid = shim::api::PidNamespace::Host as i32;
    pod.run(&container).await.unwrap();
    let running = |pod: &Pod| {
        let names = pod.cgroups("c").into_iter().flat_map(|dir| {
            let sessions = fs::read_dir(dir)
                .unwrap()
                .map(|entry| entry.unwrap().path().join("cgroup.procs"));
            sessions
                .filter_map(|path| fs::read_to_string(path).ok())
                .collect::<Vec<_>>()
        });
        names
            .flat_map(|pids| pids.lines().map(String::from).collect::<Vec<_>>())
            .collect::<Vec<_>>()
    };
    let dropped = tokio::time::timeout(Duration::from_millis(300), pod.exec("c", "sleep 1000", LONG)).await;
    assert!(dropped.is_err());
    while !running(&pod).is_empty() {
        tokio::task::yield_now().await;
    }
    wait(|| sessions(&pod).is_empty().then_some(()));
    let exec = pod.exec("c", "touch /tmp/begun; sleep 1000", LONG);
    let root = container.config.pointer("/root/path").unwrap().as_str().unwrap();
    let begun = Path::new(root).join("tmp/begun");
    let end = async {
        while !begun.exists() {
            tokio::task::yield_now().await;
        }
        pod.client.delete("c").await.unwrap();
    };
    let (output, ()) = tokio::join!(exec, end);
    assert_eq!(output.unwrap().exit_code, 137);
    pod.end().await;
}
