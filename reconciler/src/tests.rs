//! What the tests of more than one part use: programs that they make and run.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// Makes `path` a program with this text, written by another process. A file that is open for writing cannot be
/// executed (execve(2), ETXTBSY), and what a test opens is open in all that other threads fork at that moment as well.
pub fn install(path: &Path, text: &str) {
    let mut writer = Command::new("install")
        .args(["-m", "755", "/dev/stdin"])
        .arg(path)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    writer.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(writer.wait().unwrap().success());
}

#[test]
fn a_program_can_be_run_at_once_whatever_else_is_forked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("program");
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                assert!(Command::new("true").status().unwrap().success());
            }
        });
        for code in 0..100 {
            install(&path, &format!("#!/bin/sh\nexit {code}\n"));
            let status = Command::new(&path).status();
            if !status.as_ref().is_ok_and(|status| status.code() == Some(code)) {
                over.store(true, std::sync::atomic::Ordering::Relaxed);
                panic!("{code}: {status:?}");
            }
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}
