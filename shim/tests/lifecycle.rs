//! Containers from start to end, by a real shim.

mod support;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::json;
use shim::api::{PidNamespace, StopRequest};
use shim::{Code, PAUSE, record};
use support::{Pod, exe, is_alive, memory, spawn, wait};

const LONG: Duration = Duration::from_secs(3600);

#[test]
fn the_binary_is_static() {
    let elf = fs::read(exe()).unwrap();
    let word = |at: usize, len: usize| {
        elf[at..at + len]
            .iter()
            .rev()
            .fold(0usize, |all, byte| all << 8 | *byte as usize)
    };
    let (table, size, count) = (word(32, 8), word(54, 2), word(56, 2));
    let interpreters = (0..count).filter(|n| word(table + n * size, 4) == 3).count();
    assert_eq!(interpreters, 0, "PT_INTERP: the wrapper in .cargo did not link it");
}

#[tokio::test]
async fn a_container_runs_logs_and_ends() {
    let pod = Pod::new().await;
    let ok = pod.container("ok", &["/hello", "lines", "3"]);
    let started = pod.run(&ok).await.unwrap();
    assert_eq!(started.pid, ok.started().pid);
    let end = ok.ended();
    assert_eq!((end.code, end.reason.as_str(), end.oom), (0, "Completed", false));
    assert!(end.finished_at >= ok.started().started_at);
    assert_eq!(ok.lines(), ["stdout F 1", "stdout F 2", "stdout F 3"]);
    let bad = pod
        .shell("bad", "echo out; echo err >&2; printf 'cr\\r\\nno end'; exit 7")
        .await;
    assert_eq!((bad.ended().code, bad.ended().reason.as_str()), (7, "Error"));
    let mut lines = bad.lines();
    lines.sort();
    assert_eq!(
        lines,
        ["stderr F err", "stdout F cr", "stdout F out", "stdout P no end"]
    );
    assert!(bad.log().contains("F cr\r\n"));
    for container in [&ok, &bad] {
        assert!(!Path::new(&container.request.fifo_dir).exists());
        assert_eq!(pod.cgroups(&container.request.id), Vec::<PathBuf>::new());
    }
    // A second life is refused.
    let again = pod.run(&ok).await.unwrap_err();
    assert_eq!(again.code(), Some(Code::FailedPrecondition));
    let left: Vec<_> = fs::read_dir(&pod.dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left.len(), 5, "sock, lock, log, empty b and c: {left:?}");
    pod.end().await;
}

fn handles_term(pid: u32) {
    let caught = || {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let set = status
            .lines()
            .find_map(|line| line.strip_prefix("SigCgt:"))
            .unwrap()
            .trim()
            .to_owned();
        (u64::from_str_radix(&set, 16).unwrap() & 1 << (libc::SIGTERM - 1) != 0).then_some(())
    };
    wait(caught);
}

#[tokio::test]
async fn signals_and_grace() {
    let pod = Pod::new().await;
    let polite = pod.container("polite", &["/hello", "sleep", "1000"]);
    let pid = pod.run(&polite).await.unwrap().pid;
    // Before it has a handler, the first process of a pid namespace ignores the signal.
    handles_term(pid);
    pod.stop("polite", libc::SIGTERM, LONG).await;
    assert_eq!(polite.ended().code, 143);
    let script = "trap 'echo term' TERM; echo ready; while :; do sleep 1000 & wait; done";
    let rude = pod.shell("rude", script).await;
    rude.wait_for("ready");
    pod.stop("rude", libc::SIGTERM, LONG).await;
    rude.wait_for("term");
    // The signal is sent once; the deadline only comes nearer.
    pod.stop("rude", libc::SIGTERM, LONG * 2).await;
    let deadline = record::read(Path::new(&rude.request.record))
        .unwrap()
        .unwrap()
        .stop
        .unwrap()
        .deadline;
    pod.stop("rude", libc::SIGTERM, Duration::from_millis(100)).await;
    assert!(
        record::read(Path::new(&rude.request.record))
            .unwrap()
            .unwrap()
            .stop
            .unwrap()
            .deadline
            < deadline
    );
    let end = rude.ended();
    assert_eq!((end.code, end.signal), (137, 9));
    assert_eq!(rude.lines().iter().filter(|line| line.ends_with("term")).count(), 1);
    pod.end().await;
}

#[tokio::test]
async fn a_frozen_container_is_thawed_to_be_stopped() {
    let pod = Pod::new().await;
    let container = pod.container("cold", &["/hello", "sleep", "1000"]);
    handles_term(pod.run(&container).await.unwrap().pid);
    for dir in pod.cgroups("cold") {
        let _ = fs::write(dir.join("freezer.state"), "FROZEN");
        let _ = fs::write(dir.join("cgroup.freeze"), "1");
    }
    pod.stop("cold", libc::SIGTERM, LONG).await;
    assert_eq!(container.ended().code, 143);
    pod.end().await;
}

#[tokio::test]
async fn out_of_memory_is_told() {
    let pod = Pod::new().await;
    let mut container = pod.container("hog", &["sh", "-c", "x=x; while :; do x=$x$x; done"]);
    container.set(
        "/linux/resources",
        json!({"memory": {"limit": 32 << 20, "swap": 32 << 20}}),
    );
    pod.run(&container).await.unwrap();
    let end = container.ended();
    assert_eq!((end.code, end.oom, end.reason.as_str()), (137, true, "OOMKilled"));
    pod.end().await;
}

#[tokio::test]
async fn what_cannot_start_says_why() {
    let pod = Pod::new().await;
    for (id, args, words) in [
        (
            "missing",
            &["no-such-program"][..],
            &["no-such-program", "/bin:/usr/bin"][..],
        ),
        ("absent", &["/no/such"], &["/no/such", "No such file"]),
        ("directory", &["/etc"], &["/etc", "directory"]),
        ("forbidden", &["/etc/passwd"], &["/etc/passwd", "denied"]),
    ] {
        let container = pod.container(id, args);
        let error = pod.run(&container).await.unwrap_err();
        assert_eq!(error.code(), Some(Code::StartFailed), "{error}");
        let end = container.ended();
        assert_eq!((end.code, end.reason.as_str()), (128, "StartError"));
        for word in words {
            assert!(
                end.message.contains(word) && error.to_string().contains(word),
                "{id}: {}",
                end.message
            );
        }
        assert_eq!(pod.cgroups(id), Vec::<PathBuf>::new());
        assert!(!Path::new(&container.request.fifo_dir).exists());
    }
    let mut late = pod.container("late", &["/hello", "echo", "never"]);
    late.request.start_by = 1;
    assert_eq!(pod.run(&late).await.unwrap_err().code(), Some(Code::StartFailed));
    assert!(late.ended().message.contains("deadline"), "{}", late.ended().message);
    assert_eq!(late.log(), "");
    let mut broken = pod.container("broken", &["/hello"]);
    broken.set("/linux/cgroupsPath", json!("relative"));
    assert!(pod.run(&broken).await.unwrap_err().to_string().contains("cgroupsPath"));
    assert_eq!(broken.ended().code, 128);
    broken.request.id = "../up".into();
    assert_eq!(pod.run(&broken).await.unwrap_err().code(), Some(Code::InvalidArgument));
    pod.end().await;
}

#[tokio::test]
async fn identity_is_what_the_spec_says_in_init_and_exec() {
    let pod = Pod::new().await;
    let show = "grep -E '^(Uid|Gid|Groups|Cap|NoNew|Seccomp:)' /proc/self/status; pwd; echo $HOME $X; ulimit -n; umask";
    let mut container = pod.container("app", &["sh", "-c", &format!("{show}; exec sleep 1000")]);
    container.set(
        "/process/user",
        json!({"uid": 1000, "gid": 1000, "additionalGids": [7, 1000]}),
    );
    let caps = json!(["CAP_CHOWN", "CAP_KILL"]);
    container.set(
        "/process/capabilities",
        json!({"bounding": caps, "effective": [], "permitted": []}),
    );
    container.set("/process/noNewPrivileges", json!(true));
    container.set("/process/cwd", json!("/tmp/made/here"));
    container.set(
        "/process/rlimits",
        json!([{"type": "RLIMIT_NOFILE", "soft": 77, "hard": 88}]),
    );
    container.set("/process/oomScoreAdj", json!(555));
    fs::create_dir_all(&container.request.bundle).unwrap();
    // allow everything
    let allow: [u8; 8] = [6, 0, 0, 0, 0, 0, 0xff, 0x7f];
    fs::write(Path::new(&container.request.bundle).join("seccomp.bpf"), allow).unwrap();
    let root = container
        .config
        .pointer("/root/path")
        .unwrap()
        .as_str()
        .unwrap()
        .to_owned();
    let started = pod.run(&container).await.unwrap();
    container.wait_for(" 0022");
    let words = |text: &str| text.split_whitespace().map(String::from).collect::<Vec<_>>();
    let init: Vec<String> = container
        .lines()
        .iter()
        .flat_map(|line| words(line.split_once(" F ").unwrap().1))
        .collect();
    let expected = words(
        "Uid: 1000 1000 1000 1000 Gid: 1000 1000 1000 1000 Groups: 7 1000 CapInh: 0000000000000000 \
         CapPrm: 0000000000000000 CapEff: 0000000000000000 CapBnd: 0000000000000021 CapAmb: 0000000000000000 \
         NoNewPrivs: 1 Seccomp: 2 /tmp/made/here /home/app 77 0022",
    );
    assert_eq!(init, expected);
    assert!(Path::new(&root).join("tmp/made/here").exists());
    let adj = |pid: u32| fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
    assert_eq!(adj(started.pid).trim(), "555");
    let output = pod
        .exec("app", &format!("{show}; cat /proc/self/oom_score_adj"), LONG)
        .await
        .unwrap();
    let mut expected = expected;
    expected.push("555".into());
    assert_eq!(words(&String::from_utf8(output.stdout).unwrap()), expected);
    pod.end().await;
}

#[tokio::test]
async fn ambient_capabilities_reach_the_program() {
    let pod = Pod::new().await;
    let mut container = pod.container("amb", &["grep", "Cap", "/proc/self/status"]);
    container.set("/process/user", json!({"uid": 1000, "gid": 1000}));
    let caps = json!(["CAP_NET_RAW"]);
    let all = json!({"bounding": caps, "effective": caps, "permitted": caps, "inheritable": caps, "ambient": caps});
    container.set("/process/capabilities", all);
    pod.run(&container).await.unwrap();
    assert_eq!(container.ended().code, 0);
    assert_eq!(
        container.log().matches("0000000000002000").count(),
        5,
        "{}",
        container.log()
    );
    pod.end().await;
}

#[tokio::test]
async fn grandchildren_end_with_the_first_process() {
    let pod = Pod::new().await;
    let mut container = pod.container("kids", &["sh", "-c", "setsid sleep 12345 & echo $!; exit 3"]);
    container.request.pid = PidNamespace::Host as i32;
    let before = Instant::now();
    pod.run(&container).await.unwrap();
    assert_eq!(container.ended().code, 3);
    assert!(before.elapsed() < Duration::from_secs(5));
    let pid = container.lines()[0].rsplit(' ').next().unwrap().parse().unwrap();
    wait(|| (!is_alive(pid)).then_some(()));
    pod.end().await;
}

#[tokio::test]
async fn pause_has_an_empty_root_and_holds_a_shared_pid_namespace() {
    let pod = Pod::new().await;
    let pause = pod.pause(true).await;
    let comm = wait(|| {
        fs::read_to_string(format!("/proc/{}/comm", pause.pid))
            .ok()
            .filter(|comm| comm.starts_with("pause"))
    });
    assert_eq!(comm, "pause\n");
    let status = fs::read_to_string(format!("/proc/{}/status", pause.pid)).unwrap();
    assert!(
        status.contains("CapEff:\t0000000000000000") && status.contains("NoNewPrivs:\t1"),
        "{status}"
    );
    assert_eq!(fs::read_dir(format!("/proc/{}/fd", pause.pid)).unwrap().count(), 0);
    let score = |who: &str| fs::read_to_string(format!("/proc/{who}/oom_score_adj")).unwrap();
    // Without CAP_SYS_RESOURCE (bit 24) it stays as it was.
    let own = fs::read_to_string("/proc/self/status").unwrap();
    let caps = own
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .unwrap()
        .trim();
    let can_lower = u64::from_str_radix(caps, 16).unwrap() & 1 << 24 != 0;
    let expected = if can_lower { "-998\n".to_owned() } else { score("self") };
    assert_eq!(score(&pause.pid.to_string()), expected);
    let script = "echo root: $(ls -a /proc/1/root/ 2>/dev/null); cat /proc/1/comm; (sleep 0.01 &) ; \
                  touch /proc/1/root/x || echo read-only; exec sleep 1000";
    let mut a = pod.container("a", &["sh", "-c", script]);
    a.set(
        "/process/capabilities",
        json!({
        "bounding": ["CAP_SYS_PTRACE"], "effective": ["CAP_SYS_PTRACE"], "permitted": ["CAP_SYS_PTRACE"]}),
    );
    a.request.pid = PidNamespace::Pod as i32;
    let started = pod.run(&a).await.unwrap();
    a.wait_for("read-only");
    assert!(
        a.log().contains("root: . ..\n") && a.log().contains("F pause\n"),
        "{}",
        a.log()
    );
    let namespace = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/pid")).unwrap();
    assert_eq!(namespace(started.pid), namespace(pause.pid));
    // Another looks at the first by TARGET.
    let mut b = pod.container("b", &["sleep", "1000"]);
    b.request.pid = PidNamespace::Target as i32;
    b.request.pid_target = "a".into();
    let b_pid = pod.run(&b).await.unwrap().pid;
    assert_eq!(namespace(b_pid), namespace(started.pid));
    // Zombies in it go to pause, which reaps them.
    let zombies = || {
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", pause.pid)).unwrap();
        children.is_empty().then_some(())
    };
    wait(zombies);
    println!("pause, kB (PSS, anonymous): {:?}", memory(pause.pid));
    pod.stop(PAUSE, libc::SIGTERM, LONG).await;
    // Its end takes the namespace's processes with it.
    assert_eq!((a.ended().code, b.ended().code), (137, 137));
    let end = wait(|| record::read(&pod.tmp.path().join("pause-run")).unwrap()?.end);
    assert_eq!(end.code, 0);
    pod.end().await;
}

#[tokio::test]
async fn one_shim_serves_a_directory() {
    let pod = Pod::new().await;
    let pid = pod.client.state().await.unwrap().pid;
    let code = std::process::Command::new(exe())
        .args(["serve", "--dir"])
        .arg(&pod.dir)
        .status()
        .unwrap()
        .code();
    assert_eq!(code, Some(shim::EXIT_ALREADY_SERVED));
    spawn(&pod.dir, &pod.name).unwrap();
    let state = pod.client.state().await.unwrap();
    assert_eq!(
        (state.pid, state.namespace.as_str(), state.uid.as_str()),
        (pid, "test", "0123")
    );
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap().count();
    assert_eq!(
        (stat.rsplit_once(") ").unwrap().1.split(' ').nth(1), threads),
        (Some("1"), 1)
    );
    let container = pod.container("one", &["/hello", "sleep", "1000"]);
    pod.run(&container).await.unwrap();
    let refused = pod.client.shutdown().await.unwrap_err();
    assert_eq!(refused.code(), Some(Code::FailedPrecondition));
    let none = StopRequest {
        id: "none".into(),
        signal: 15,
        grace_ns: 0,
    };
    assert_eq!(pod.client.stop(none).await.unwrap_err().code(), Some(Code::NotFound));
    pod.client.delete("none").await.unwrap();
    pod.client.delete("one").await.unwrap();
    assert_eq!(container.ended().code, 137);
    pod.end().await;
}

#[tokio::test]
async fn a_terminal_is_the_containers_own() {
    let pod = Pod::new().await;
    let mut container = pod.container(
        "tty",
        &["sh", "-c", "tty; test -t 0 && echo yes; ls -l /dev/console; exit 4"],
    );
    container.set("/process/terminal", json!(true));
    container.request.terminal = true;
    pod.run(&container).await.unwrap();
    assert_eq!(container.ended().code, 4);
    let log = container.log();
    assert!(
        log.contains("stdout F /dev/pts/0\r\n") && log.contains("F yes\r\n"),
        "{log}"
    );
    pod.end().await;
}

#[tokio::test]
async fn output_belongs_to_the_user_and_can_be_reopened() {
    let pod = Pod::new().await;
    let mut container = pod.container("own", &["sh", "-c", "echo again > /dev/stdout; echo err > /dev/stderr"]);
    container.set("/process/user", json!({"uid": 1000, "gid": 1000}));
    pod.run(&container).await.unwrap();
    assert_eq!(container.ended().code, 0, "{}", container.log());
    let mut lines = container.lines();
    lines.sort();
    assert_eq!(lines, ["stderr F err", "stdout F again"]);
    assert_eq!(fs::metadata(&container.request.log_path).unwrap().mode() & 0o777, 0o640);
    pod.end().await;
}

#[tokio::test]
async fn a_user_namespace_maps_the_container() {
    let pod = Pod::new().await;
    fs::set_permissions(pod.tmp.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let mut container = pod.container(
        "user",
        &[
            "sh",
            "-c",
            "id -u; cat /proc/self/uid_map; echo again > /dev/stdout; exec sleep 1000",
        ],
    );
    let map = json!([{"containerID": 0, "hostID": 100_000, "size": 65_536}]);
    container.set("/linux/uidMappings", map.clone());
    container.set("/linux/gidMappings", map);
    let namespaces = container
        .config
        .pointer_mut("/linux/namespaces")
        .unwrap()
        .as_array_mut()
        .unwrap();
    namespaces.push(json!({"type": "user"}));
    container.set("/process/user", json!({"uid": 7, "gid": 7}));
    let pid = pod.run(&container).await.unwrap().pid;
    container.wait_for("F again");
    assert_eq!(fs::metadata(format!("/proc/{pid}")).unwrap().uid(), 100_007);
    let output = pod
        .exec(
            "user",
            "id -u; grep CapPrm /proc/self/status; readlink /proc/self/ns/user",
            LONG,
        )
        .await;
    let text = String::from_utf8(output.unwrap().stdout).unwrap();
    let namespace = fs::read_link(format!("/proc/{pid}/ns/user")).unwrap();
    assert_eq!(text, format!("7\nCapPrm:\t0000000000000000\n{}\n", namespace.display()));
    pod.end().await;
}

#[tokio::test]
async fn a_read_only_root_gets_its_working_directory() {
    let pod = Pod::new().await;
    let mut container = pod.container("ro", &["sh", "-c", "pwd; touch /x"]);
    container.set("/root/readonly", json!(true));
    container.set("/process/cwd", json!("/made/here"));
    pod.run(&container).await.unwrap();
    assert_eq!(container.ended().code, 1);
    assert!(container.log().contains("stdout F /made/here\n") && container.log().contains("Read-only"));
    pod.end().await;
}

#[tokio::test]
async fn a_start_and_a_stop_are_quick() {
    let pod = Pod::new().await;
    let mut spent = Duration::ZERO;
    for n in 0..20 {
        let container = pod.container(&format!("t{n}"), &["/hello", "exit", "0"]);
        let start = Instant::now();
        pod.run(&container).await.unwrap();
        container.ended();
        spent += start.elapsed();
    }
    println!("start to recorded end: {:?} each", spent / 20);
    pod.end().await;
}

#[tokio::test]
async fn a_container_cannot_write_the_shim() {
    let pod = Pod::new().await;
    let shim = pod.client.state().await.unwrap().pid;
    let name = fs::read_to_string(format!("/proc/{shim}/comm")).unwrap();
    assert_eq!(name, "reconcile-shim\n");
    let error = fs::OpenOptions::new()
        .write(true)
        .open(format!("/proc/{shim}/exe"))
        .unwrap_err();
    assert!([Some(libc::EROFS), Some(libc::ETXTBSY)].contains(&error.raw_os_error()));
    // Its own file, executed by name; then it is not busy, but read-only still.
    let container = pod.container("evil", &["/proc/self/exe", "hello", "sleep", "1000"]);
    let pid = pod.run(&container).await.unwrap().pid;
    let exe = fs::File::open(format!("/proc/{pid}/exe")).unwrap();
    // SAFETY: all zero is a valid statvfs to fill; a live descriptor.
    let flags = unsafe {
        let mut info: libc::statvfs = std::mem::zeroed();
        assert_eq!(libc::fstatvfs(std::os::fd::AsRawFd::as_raw_fd(&exe), &mut info), 0);
        info.f_flag
    };
    assert_ne!(flags & libc::ST_RDONLY, 0);
    pod.end().await;
}

#[tokio::test]
async fn what_a_shim_costs() {
    let mut pods = Vec::new();
    for _ in 0..10 {
        let pod = Pod::new().await;
        pod.pause(false).await;
        pod.run(&pod.container("c", &["/hello", "sleep", "1000"]))
            .await
            .unwrap();
        pods.push(pod);
    }
    let pid = pods[9].client.state().await.unwrap().pid;
    println!("one of ten shims, kB (PSS, anonymous): {:?}", memory(pid));
    for pod in pods {
        pod.end().await;
    }
}
