//! The protocol's messages as version 0.1.0 has them, encoded by another program. Daemon and shim may be of different
//! versions, and a task's file is read by a later shim, so no number and no type of a field ever changes.

use prost::Message;
use shim::api::*;
use shim::frame::{HEADER, Header, Kind, encode};

/// The bytes say this and this gives the bytes; what a later version adds is no obstacle.
fn golden<M: Message + Default + PartialEq + std::fmt::Debug>(message: M, hex: &str) {
    let pairs = hex.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap());
    let mut bytes: Vec<u8> = pairs.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect();
    assert_eq!(M::decode(&*bytes).unwrap(), message);
    let same: String = message
        .encode_to_vec()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    assert_eq!(same, hex, "{message:?}");
    // Field 1000, of text.
    bytes.extend([0xc2, 0x3e, 3, b'n', b'e', b'w']);
    assert_eq!(M::decode(&*bytes).unwrap(), message);
}

fn run() -> RunRequest {
    RunRequest {
        id: "c1".into(),
        bundle: "/b".into(),
        record: "/r/run".into(),
        fifo_dir: "/s/fifo".into(),
        log_path: "/l/c.log".into(),
        terminal: true,
        stdin: true,
        stdin_once: true,
        pid: PidNamespace::Target.into(),
        pid_target: "c0".into(),
        start_by: 77,
        max_line: 4096,
        // Of a later version.
        ..RunRequest::default()
    }
}

#[test]
fn the_envelope() {
    golden(
        Request {
            service: shim::SERVICE.into(),
            method: "Run".into(),
            payload: b"\x0a\x01c".to_vec(),
            timeout_nano: 5_000_000_000,
        },
        "0a0c7368696d2e76312e5368696d120352756e1a030a01632080e497d012",
    );
    let status = Status {
        code: 5,
        message: "no".into(),
    };
    golden(
        Response {
            status: Some(status.clone()),
            payload: b"\x08\x01".to_vec(),
        },
        "0a06080512026e6f12020801",
    );
    let frame = encode(7, Kind::Response, &status);
    assert_eq!(frame[..HEADER], [0, 0, 0, 6, 0, 0, 0, 7, 2, 0]);
    for (byte, kind) in [(1, Kind::Request), (2, Kind::Response), (3, Kind::Data)] {
        let header = Header::read(&[0, 0, 1, 0, 0, 0, 0, 9, byte, 0]).unwrap();
        assert_eq!(
            header,
            Some(Header {
                len: 256,
                stream: 9,
                kind
            })
        );
    }
}

#[test]
fn the_pod_and_its_processes() {
    let process = Process {
        id: "c1".into(),
        pid: 42,
        phase: Phase::Running.into(),
        adopted: true,
        dropped_bytes: 5,
        execs: 2,
        started_at: 1_700_000_000_000_000_000,
        log_dev: 64769,
        log_ino: 131,
    };
    golden(
        StateResponse {
            pid: 7,
            namespace: "ns".into(),
            name: "web".into(),
            uid: "u1".into(),
            version: "0.1.0".into(),
            processes: vec![process],
        },
        concat!(
            "080712026e731a03776562220275312a05302e312e30321f0a026331102a1801200128053002388080a8b1e39fe7cb174081",
            "fa03488301",
        ),
    );
    golden(
        PauseRequest {
            record: "/r/run".into(),
            netns: "/n/net".into(),
            ipc: "/n/ipc".into(),
            uts: "/n/uts".into(),
            user: "/n/user".into(),
            new_pid_ns: true,
            cgroup: "/pods/u1".into(),
            hostname: "web".into(),
            ..PauseRequest::default()
        },
        concat!(
            "0a062f722f72756e12062f6e2f6e65741a062f6e2f69706322062f6e2f7574732a072f6e2f7573657230013a082f706f6473",
            "2f75314203776562",
        ),
    );
    golden(
        run(),
        concat!(
            "0a02633112022f621a062f722f72756e22072f732f6669666f2a082f6c2f632e6c6f67300138014001480252026330584d60",
            "8020",
        ),
    );
    golden(
        Started {
            pid: 42,
            start_ticks: 900,
            started_at: 1_700_000_000_000_000_000,
        },
        "082a108407188080a8b1e39fe7cb17",
    );
    let id = || "c1".to_owned();
    golden(
        StopRequest {
            id: id(),
            signal: 15,
            grace_ns: 30_000_000_000,
        },
        "0a026331100f1880d88ee16f",
    );
    golden(KillRequest { id: id(), signal: 9 }, "0a0263311009");
    golden(DeleteRequest { id: id() }, "0a026331");
    golden(
        ReopenLogRequest {
            id: id(),
            path: "/l/c.log".into(),
        },
        "0a02633112082f6c2f632e6c6f67",
    );
}

#[test]
fn execs_and_streams() {
    golden(
        ExecRequest {
            id: "c1".into(),
            args: vec!["sh".into(), "-c".into()],
            env: vec!["A=1".into()],
            cwd: "/tmp".into(),
            timeout_ns: 2_000_000_000,
            limit: 1024,
        },
        "0a0263311202736812022d631a03413d3122042f746d702880a8d6b907308008",
    );
    golden(
        ExecStreamRequest {
            id: "c1".into(),
            args: vec!["sh".into()],
            env: vec!["A=1".into()],
            terminal: true,
            stdin: true,
            stdout: true,
            stderr: true,
        },
        "0a026331120273681a03413d312001280130013801",
    );
    golden(
        AttachRequest {
            id: "c1".into(),
            stdin: true,
            stdout: true,
            stderr: true,
        },
        "0a026331100118012001",
    );
    let kinds = [
        StreamKind::Stdin,
        StreamKind::Stdout,
        StreamKind::Stderr,
        StreamKind::Terminal,
    ];
    golden(
        Streams {
            kinds: kinds.map(i32::from).to_vec(),
        },
        "0a0400010203",
    );
    golden(
        ExecOutput {
            stdout: b"out".to_vec(),
            stderr: b"err".to_vec(),
            exit_code: 3,
            truncated: true,
            timed_out: true,
        },
        "0a036f75741203657272180320012801",
    );
}

/// What an adopting shim reads.
#[test]
fn the_file_of_a_task() {
    golden(
        Task {
            id: "c1".into(),
            pause: true,
            run: Some(run()),
            cgroups: vec!["/sys/fs/cgroup/x".into()],
            record: "/r/run".into(),
            ended: Some(EndSlot {
                code: 137,
                signal: 9,
                oom: true,
                finished_at: 1_700_000_000_000_000_001,
                reason: "OOMKilled".into(),
                message: "why".into(),
            }),
        },
        concat!(
            "0a02633110011a340a02633112022f621a062f722f72756e22072f732f6669666f2a082f6c2f632e6c6f6730013801400148",
            "0252026330584d60802022102f7379732f66732f6367726f75702f782a062f722f72756e322108890110091801208180a8b1",
            "e39fe7cb172a094f4f4d4b696c6c65643203776879",
        ),
    );
}
