//! `reconcile serve`: the daemon.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use cri::{OnceReport, Services};
use reconciler::engine::Context;
use reconciler::runtime::Runtime;
use reconciler::{repair, streaming};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::metrics::Endpoint;
use crate::options::Global;
use crate::reload::{self, Reloader};

/// What is logged unless the configuration says otherwise.
pub const LOG: &str = "info,netlink_proto=error";

/// Serves until SIGTERM or SIGINT; pods go on. SIGHUP reads the configuration anew.
pub async fn run(global: &Global) -> Result<ExitCode> {
    let socket = &global.socket;
    let mut terminate = signal(SignalKind::terminate()).context("cannot take SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot take SIGINT")?;
    let mut hangup = signal(SignalKind::hangup()).context("cannot take SIGHUP")?;
    let metrics = match &global.config.metrics {
        Some(address) => Some(Endpoint::bind(address).await?),
        None => None,
    };
    let runtime = Runtime::open(global.runtime()?).await?;
    let cx = runtime.cx.clone();
    let running = runtime.start().await?;
    let listener = cri::bind(socket)?;
    let (close, closing) = watch::channel(false);
    let settings = global.streaming()?;
    let reloader = Arc::new(Reloader::new(global, cx.clone(), settings.tls.clone()));
    let (streaming_url, streams) = streaming(cx.clone(), settings, closing.clone()).await?;
    let config = cri::Config {
        told: reloader.told.clone(),
        reload: Some(reload::hook(reloader.clone())),
        once: Some(once_hook(cx.clone())),
        streaming_url: Some(streaming_url),
        systemd_cgroups: cx.world.systemd,
        ..cri::Config::default()
    };
    let services = Services::new(cx.store.clone(), config, closing.clone());
    let metrics = metrics.map(|endpoint| tokio::spawn(endpoint.serve(services.clone(), closing)));
    let server = tokio::spawn(cri::serve(listener, services));
    tracing::info!(socket = %socket.display(), instance = cx.world.paths.instance, "serving");
    notify("READY=1");
    loop {
        tokio::select! {
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            // What is wrong was told by the reload itself.
            _ = hangup.recv() => drop(reloader.reload().await),
        }
    }
    tracing::info!("stopping; pods go on");
    notify("STOPPING=1");
    let _ = close.send(true);
    server.await.context("server task")??;
    streams.await.context("streaming task")?;
    if let Some(metrics) = metrics {
        metrics.await.context("metrics task")?;
    }
    running.stop().await;
    Ok(ExitCode::SUCCESS)
}

/// Starts the streaming server; answers its URL.
pub async fn streaming(
    cx: Arc<Context>,
    settings: streaming::Settings,
    closing: watch::Receiver<bool>,
) -> Result<(String, tokio::task::JoinHandle<()>)> {
    let address = settings.address;
    let server = streaming::Server::bind(settings)
        .await
        .with_context(|| format!("streaming.address: cannot listen on {address}"))?;
    let url = server.url().context("streaming.address")?;
    Ok((url, tokio::spawn(server.serve(cx, closing))))
}

pub fn once_hook(cx: Arc<Context>) -> cri::OnceHook {
    Arc::new(move |request| {
        let cx = cx.clone();
        Box::pin(async move {
            let plan = match request.plan.as_slice() {
                [] => None,
                plan => Some(serde_json::from_slice(plan).map_err(|e| format!("the plan: {e}"))?),
            };
            let ask = repair::Ask {
                dry_run: request.dry_run,
                doctor: request.doctor,
                force: request.force,
                objects: request.objects,
                plan,
            };
            let report = repair::run(&cx, &ask).await.map_err(|e| e.to_string())?;
            let exit_code = i32::from(report.exit_code());
            let report = serde_json::to_value(&report).map_err(|e| e.to_string())?;
            Ok(OnceReport { report, exit_code })
        })
    })
}

/// sd_notify(3), without its library: one datagram to the socket that the environment names.
fn notify(message: &str) {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    let text = path.to_string_lossy();
    let address = match text.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&path),
    };
    let sent = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(message.as_bytes(), &address));
    if let Err(e) = sent {
        tracing::warn!("cannot notify {text}: {e}");
    }
}
