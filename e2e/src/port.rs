//! Ports for what a test starts, or asks of a pod.

use std::net::{Ipv6Addr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

/// A TCP port that nobody listens at, another one with each call, and below those that the kernel gives away: a port
/// that is free for a moment there can be any socket's of this machine in the next.
pub fn unused() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let base = 20_000 + (std::process::id() % 200) as u16 * 50;
    let mut ports = std::iter::repeat_with(|| base + NEXT.fetch_add(1, Ordering::Relaxed) % 1000);
    let free = |port: &u16| TcpListener::bind((Ipv6Addr::UNSPECIFIED, *port)).is_ok();
    ports.find(free).unwrap_or(base)
}
