//! The streaming server: where a client opens what Exec, Attach or PortForward granted.
//!
//! ```text
//!  kubelet, crictl ─(TLS) HTTP upgrade─> server      token redeemed once, protocol agreed on
//!                                      │
//!                     spdy/ or websocket         frames <-> channels, each way bounded
//!                                      │
//!            ┌─────────────────────────┴──┐
//!         session                     portforward
//!   stdio that the pod's shim      TCP connections made inside
//!   handed over                    the pod's network namespace
//! ```
//!
//! A client that does not read only holds up the program that writes to it: what waits for it is bounded, and its
//! session ends with the container whatever it does. Must not: decide who may open what (a grant does), or touch
//! records but grants.

pub mod channels;
pub mod portforward;
mod server;
mod session;
pub mod spdy;
pub mod tls;
pub mod websocket;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

pub use server::Server;

/// How the server listens.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Port 0 takes a free one.
    pub address: SocketAddr,
    /// A session without any traffic for so long is ended.
    pub idle: Duration,
    /// Its certificate; without one it speaks plain HTTP.
    pub tls: Option<Arc<tls::Identity>>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            idle: Duration::from_secs(4 * 3600),
            tls: None,
        }
    }
}
