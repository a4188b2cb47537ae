//! The built-in image's program.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Command, Output};

fn hello(words: &[&str]) -> Output {
    let exe = std::env::current_exe()
        .unwrap()
        .parent()
        .unwrap()
        .with_file_name("reconcile-shim");
    let exe = std::env::var_os("CARGO_BIN_EXE_reconcile-shim").map_or(exe, PathBuf::from);
    Command::new(exe)
        .arg("hello")
        .args(words)
        .env_clear()
        .env("A", "b")
        .output()
        .unwrap()
}

#[test]
fn words() {
    let text = |words: &[&str]| String::from_utf8(hello(words).stdout).unwrap();
    assert_eq!(text(&["lines", "3"]), "1\n2\n3\n");
    assert_eq!(text(&["lines", "0"]), "");
    assert_eq!(text(&["echo", "a", "b"]), "a b\n");
    assert_eq!(text(&["env"]), "A=b\n");
    assert_eq!(hello(&["exit", "9"]).status.code(), Some(9));
    assert_eq!(hello(&["sleep", "0"]).status.code(), Some(0));
    for bad in [&["dance"][..], &["exit", "300"], &["lines"], &["sleep", "x"]] {
        let output = hello(bad);
        assert_eq!(output.status.code(), Some(2), "{bad:?}");
        assert!(String::from_utf8(output.stderr).unwrap().starts_with("usage:"));
    }
}

#[test]
fn a_page_on_both_families() {
    let exe = std::env::current_exe()
        .unwrap()
        .parent()
        .unwrap()
        .with_file_name("reconcile-shim");
    // In a network namespace of its own, so that the port is free; this test's thread goes along.
    // SAFETY: no pointers.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        panic!("{}", std::io::Error::last_os_error());
    }
    let up = Command::new("ip").args(["link", "set", "lo", "up"]).status();
    assert!(up.is_ok_and(|status| status.success()), "needs iproute2");
    let mut child = Command::new(exe)
        .arg("hello")
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = [0; 5];
    child.stdout.as_mut().unwrap().read_exact(&mut line).unwrap();
    let get = |address: &str, path: &str| {
        let mut stream = TcpStream::connect(address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    assert!(get("127.0.0.1:8080", "/").contains("It runs."));
    assert!(get("[::1]:8080", "/healthz").ends_with("\r\n\r\nok\n"));
    // SAFETY: no pointers; this test's child.
    unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
    assert_eq!(child.wait().unwrap().code(), Some(143));
}
