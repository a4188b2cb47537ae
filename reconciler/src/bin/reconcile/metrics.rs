//! `/metrics` for Prometheus, on loopback or a Unix socket, only where it is asked for.

use anyhow::{Context, Result};
use axum::Router;
use axum::http::{StatusCode, header};
use axum::routing::get;
use cri::Services;
use reconciler::config::values::Address;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;

/// The text format and its version.
const TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

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
