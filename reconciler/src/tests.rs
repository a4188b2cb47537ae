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

/// In a process of its own: what is forked without pause holds the mounts of other tests, too.
#[test]
fn a_program_can_be_run_at_once_whatever_else_is_forked() {
    const NAME: &str = "tests::a_program_can_be_run_at_once_whatever_else_is_forked";
    if std::env::var_os("RECONCILE_TEST_ALONE").is_none() {
        let mut alone = Command::new(std::env::current_exe().unwrap());
        alone.args(["--exact", NAME]).env("RECONCILE_TEST_ALONE", "1");
        let out = alone.output().unwrap();
        let said = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("program");
    std::thread::scope(|scope| {
        let runs = scope.spawn(|| {
            // Written by this process, two in three hundred could not be executed.
            for code in (0..500).map(|n| n % 256) {
                install(&path, &format!("#!/bin/sh\nexit {code}\n"));
                assert_eq!(Command::new(&path).status().unwrap().code(), Some(code));
            }
        });
        while !runs.is_finished() {
            assert!(Command::new("true").status().unwrap().success());
        }
    });
}
