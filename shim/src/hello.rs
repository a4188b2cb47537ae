//! The program of the built-in image `hello`: enough to see that a pod runs, for examples and tests.

use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::net::{Ipv6Addr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd};
use std::time::Duration;

use crate::sys;

const USAGE: &str = "usage: hello                 serve a page on port 8080
       hello sleep SECONDS   wait
       hello env             print the environment
       hello exit CODE       end with a code
       hello lines N         print N numbered lines
       hello echo WORDS      print words";

/// Most bytes of a request looked at.
const REQUEST: u64 = 8 << 10;

/// Runs with the words after the program's name; returns the exit code.
pub fn run(words: &[String]) -> i32 {
    // The first process of a pid namespace gets no signal that it has no handler for.
    // SAFETY: the handler only calls _exit.
    unsafe {
        for signal in [libc::SIGTERM, libc::SIGINT] {
            libc::signal(signal, end as *const () as libc::sighandler_t);
        }
    }
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = match words[..] {
        [] => serve(),
        ["sleep", seconds] => match seconds.parse() {
            Ok(seconds) => {
                std::thread::sleep(Duration::from_secs(seconds));
                Ok(())
            }
            Err(_) => return usage(),
        },
        ["env"] => print(
            std::env::vars_os().map(|(key, value)| format!("{}={}", key.to_string_lossy(), value.to_string_lossy())),
        ),
        ["exit", code] => match code.parse::<u8>() {
            Ok(code) => return i32::from(code),
            Err(_) => return usage(),
        },
        ["lines", count] => match count.parse::<u64>() {
            Ok(count) => print(1..=count),
            Err(_) => return usage(),
        },
        ["echo", ref words @ ..] => print([words.join(" ")]),
        _ => return usage(),
    };
    match done {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("hello: {error}");
            1
        }
    }
}

fn usage() -> i32 {
    eprintln!("{USAGE}");
    2
}

extern "C" fn end(signal: i32) {
    sys::exit(128 + signal);
}

fn print(lines: impl IntoIterator<Item: std::fmt::Display>) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(32 << 10, io::stdout().lock());
    for line in lines {
        writeln!(out, "{line}")?;
    }
    out.flush()
}

/// One request at a time, on IPv4 and IPv6; a client that says nothing is let go after two seconds.
fn serve() -> io::Result<()> {
    let listener = listen().or_else(|_| TcpListener::bind(("0.0.0.0", 8080)))?;
    println!("hello: listening on port 8080");
    for client in listener.incoming() {
        if let Err(error) = client.and_then(answer) {
            eprintln!("hello: {error}");
        }
    }
    Ok(())
}

/// One socket for both families.
fn listen() -> io::Result<TcpListener> {
    let (on, off) = (1i32, 0i32);
    // SAFETY: each call gets valid pointers with their sizes; the descriptor is the kernel's answer and owned from
    // then on.
    unsafe {
        let fd = sys::check(libc::socket(libc::AF_INET6, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0))? as i32;
        let listener = TcpListener::from_raw_fd(fd);
        let mut address: libc::sockaddr_in6 = std::mem::zeroed();
        address.sin6_family = libc::AF_INET6 as _;
        address.sin6_port = 8080u16.to_be();
        address.sin6_addr.s6_addr = Ipv6Addr::UNSPECIFIED.octets();
        let set = |level, name, value: &i32| {
            sys::check(libc::setsockopt(
                fd,
                level,
                name,
                (&raw const *value).cast(),
                size_of::<i32>() as u32,
            ))
        };
        set(libc::SOL_SOCKET, libc::SO_REUSEADDR, &on)?;
        set(libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, &off)?;
        sys::check(libc::bind(
            listener.as_raw_fd(),
            (&raw const address).cast(),
            size_of_val(&address) as u32,
        ))?;
        sys::check(libc::listen(fd, 64))?;
        Ok(listener)
    }
}

fn answer(client: TcpStream) -> io::Result<()> {
    let patience = Some(Duration::from_secs(2));
    client.set_read_timeout(patience)?;
    client.set_write_timeout(patience)?;
    let mut lines = BufReader::new((&client).take(REQUEST)).lines();
    let request = lines.next().transpose()?.unwrap_or_default();
    while lines.next().transpose()?.is_some_and(|line| !line.is_empty()) {}
    let path = request.split(' ').nth(1).unwrap_or("/");
    let body = match path {
        "/healthz" => "ok\n".to_owned(),
        _ => {
            let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
            format!(
                "<!doctype html><title>hello</title><h1>It runs.</h1><p>This is pod {}.</p>\n",
                host.trim()
            )
        }
    };
    let kind = if path == "/healthz" { "text/plain" } else { "text/html" };
    let body = if request.starts_with("HEAD ") { "" } else { &body };
    let length = body.len();
    write!(
        &client,
        "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
}
