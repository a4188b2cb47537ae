//! `/metrics` for Prometheus, on loopback or a Unix socket, only where it is asked for.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, Result};
use axum::Router;
use axum::http::{StatusCode, header};
use axum::routing::get;
use cri::Services;
use serde::Deserialize;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;

/// The text format and its version.
const TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Where metrics are served.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        if let Some(path) = text.strip_prefix("unix://") {
            return match path.starts_with('/') {
                true => Ok(Address::Unix(path.into())),
                false => Err(format!("{text:?}: the socket's path must be absolute")),
            };
        }
        let address: SocketAddr = text
            .parse()
            .map_err(|_| format!("{text:?}: must be unix:///PATH, or an address such as 127.0.0.1:9180"))?;
        // Who may read them is not asked, and they tell what runs here.
        match address.ip().is_loopback() {
            true => Ok(Address::Tcp(address)),
            false => Err(format!("{text:?}: metrics are served on a loopback address only")),
        }
    }
}

impl TryFrom<String> for Address {
    type Error = String;

    fn try_from(text: String) -> Result<Address, String> {
        text.parse()
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => write!(f, "http://{address}/metrics"),
            Address::Unix(path) => write!(f, "unix://{}", path.display()),
        }
    }
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// A bound address.
pub struct Endpoint(Listener);

impl Endpoint {
    pub async fn bind(address: &Address) -> Result<Endpoint> {
        let listener = match address {
            Address::Tcp(address) => TcpListener::bind(address).await.map(Listener::Tcp),
            Address::Unix(path) => cri::bind(path).map(Listener::Unix),
        };
        Ok(Endpoint(
            listener.with_context(|| format!("cannot serve metrics at {address}"))?,
        ))
    }

    /// Serves until `closing` says so.
    pub async fn serve(self, services: Services, mut closing: watch::Receiver<bool>) {
        let router = Router::new().route("/metrics", get(move || answer(services.clone())));
        let closed = async move {
            // An error means that the sender is gone, which is an end as well.
            let _ = closing.wait_for(|closing| *closing).await;
        };
        // A connection that stays open must not hold up the end.
        let ended = async move {
            match self.0 {
                Listener::Tcp(listener) => axum::serve(listener, router).await,
                Listener::Unix(listener) => axum::serve(listener, router).await,
            }
        };
        tokio::select! {
            () = closed => {}
            Err(error) = ended => tracing::error!(%error, "metrics are not served any more"),
        }
    }
}

async fn answer(services: Services) -> (StatusCode, [(header::HeaderName, &'static str); 1], String) {
    match services.prometheus().await {
        Ok(text) => (StatusCode::OK, [(header::CONTENT_TYPE, TYPE)], text),
        Err(error) => {
            let text = format!("{error}\n");
            (
                StatusCode::SERVICE_UNAVAILABLE,
                [(header::CONTENT_TYPE, "text/plain")],
                text,
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        assert_eq!("127.0.0.1:1".parse(), Ok(Address::Tcp(([127, 0, 0, 1], 1).into())));
        assert_eq!("unix:///a".parse(), Ok(Address::Unix("/a".into())));
        assert!("[::1]:1".parse::<Address>().is_ok());
        for (bad, why) in [
            ("0.0.0.0:1", "loopback"),
            ("unix://a", "absolute"),
            (":9180", "such as"),
            ("x", "such as"),
        ] {
            let error = bad.parse::<Address>().unwrap_err();
            assert!(error.contains(why) && error.contains(bad), "{error}");
        }
    }
}
