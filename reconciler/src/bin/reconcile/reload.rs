//! `reconcile reload`, and what SIGHUP does: the configuration is read anew, and what can change in a running daemon
//! changes. No pod is touched.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::{Arc, PoisonError, RwLock};

use anyhow::{Context as _, Result, bail};
use cri::records::v1::Changed;
use cri::records::v1::changed::When as Sent;
use cri::{Handler, Told};
use reconciler::config::handlers::{self, Handlers, Ready};
use reconciler::config::keys::When;
use reconciler::config::{Change, Config, Settings};
use reconciler::engine::Context;
use reconciler::streaming::tls::Identity;
use tokio::sync::Mutex;

use crate::client::Client;
use crate::options::{Flags, Global, filter};
use crate::{logging, print, serve};

/// Asks the daemon, and prints what changed.
pub async fn run(global: &Global) -> Result<ExitCode> {
    let Some(client) = Client::connect(&global.socket).await? else {
        bail!("no daemon serves {}", global.socket.display());
    };
    let changes = client.reload().await?;
    for change in &changes {
        let value = |text: &str| {
            if text.is_empty() {
                "nothing".to_owned()
            } else {
                print::plain(text)
            }
        };
        let when = match change.when() {
            Sent::Now => "",
            Sent::Next => " for what is started from now on",
            Sent::Restart => " needs a restart of the daemon",
        };
        let (key, from, to) = (print::plain(&change.key), value(&change.from), value(&change.to));
        print::line(format_args!("{key}: {from} -> {to}{when}"))?;
    }
    if changes.is_empty() {
        print::line("nothing changed")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The running daemon's configuration.
pub struct Reloader {
    flags: Flags,
    cx: Arc<Context>,
    /// What the services tell clients.
    pub told: Arc<RwLock<Told>>,
    /// The settings in force.
    now: Mutex<Settings>,
    /// The streaming server's certificate.
    tls: Option<Arc<Identity>>,
    /// The daemon's own OOM score before any setting.
    oom_score: Option<i32>,
}

const OOM_SCORE: &str = "/proc/self/oom_score_adj";

/// What clients are told.
fn told(config: &Config, handlers: &Handlers) -> Told {
    let handler = |(name, ready): (&String, &Ready)| Handler {
        name: name.clone(),
        recursive_read_only: ready.features.recursive_read_only,
        user_namespaces: ready.features.id_mapped,
    };
    let image = config.images.sandbox_image.0.clone();
    let pinned = config.images.pinned.iter().map(|name| name.0.clone());
    Told {
        pinned: pinned.chain([image.clone()]).collect::<BTreeSet<_>>(),
        sandbox_image: image,
        handlers: handlers.all.iter().map(handler).collect(),
        default_handler: handlers.default.clone(),
    }
}

impl Reloader {
    /// Of a daemon that was started with these settings; they hold from here on.
    pub fn new(global: &Global, cx: Arc<Context>, tls: Option<Arc<Identity>>) -> Reloader {
        let before = std::fs::read_to_string(OOM_SCORE).ok();
        let told = told(&global.config, &cx.live().handlers);
        let reloader = Reloader {
            flags: global.flags.clone(),
            cx,
            told: Arc::new(RwLock::new(told)),
            now: Mutex::new(global.settings.clone()),
            tls,
            oom_score: before.and_then(|text| text.trim().parse().ok()),
        };
        if global.config.oom_score.daemon.is_some() {
            reloader.set_oom_score(&global.config);
        }
        reloader
    }

    /// Reads the configuration anew.
    ///
    /// # Errors
    /// If it does not hold; then nothing has changed.
    pub async fn reload(&self) -> Result<Vec<Change>> {
        let mut now = self.now.lock().await;
        let flags = self.flags.clone();
        let read = tokio::task::spawn_blocking(move || {
            let loaded = flags.load()?;
            let handlers = handlers::probe(&loaded.config, &loaded.settings)?;
            anyhow::Ok((loaded, handlers))
        });
        let read = read.await.context("read the configuration")?;
        let (loaded, handlers) = read.inspect_err(|e| tracing::error!("the configuration stays as it was: {e:#}"))?;
        loaded.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        let changes = now.changes(&loaded.settings);
        let applied = self.apply(&loaded.config, handlers, &changes);
        applied.inspect_err(|e| tracing::error!("the configuration stays as it was: {e:#}"))?;
        for Change { key, when, from, to } in &changes {
            match when {
                When::Now | When::Next => tracing::info!(key, from, to, "configuration changed"),
                When::Restart => tracing::info!(key, from, to, "configuration changed; it needs a restart"),
            }
        }
        tracing::info!(changed = changes.len(), "configuration reloaded");
        *now = loaded.settings.keep_what_needs_a_restart(&now);
        Ok(changes)
    }

    fn apply(&self, config: &Config, handlers: Handlers, changes: &[Change]) -> Result<()> {
        if let Some(tls) = &self.tls {
            tls.renew().context("the certificate in use stays")?;
        }
        let changed = |key: &str| changes.iter().any(|change| change.key == key);
        if changed("logLevel") {
            logging::change(filter(config, serve::LOG)?)?;
        }
        let told = told(config, &handlers);
        self.cx.set_live(config.live(handlers))?;
        let world = &self.cx.world;
        world.images.reconfigure(config.registries());
        world.shims.set_oom_score(config.oom_score.shims.map(|score| score.0));
        *self.told.write().unwrap_or_else(PoisonError::into_inner) = told;
        if changed("oomScore.daemon") {
            self.set_oom_score(config);
        }
        if changed("images.gcGraceSeconds") || changed("images.gcHighPercent") {
            world.images.look_for_garbage();
        }
        Ok(())
    }

    fn set_oom_score(&self, config: &Config) {
        let Some(score) = config.oom_score.daemon.map(|score| score.0).or(self.oom_score) else {
            return;
        };
        if let Err(e) = std::fs::write(OOM_SCORE, score.to_string()) {
            tracing::warn!(
                score,
                "oomScore.daemon could not be set (it takes CAP_SYS_RESOURCE to lower it): {e}"
            );
        }
    }
}

/// The same, as the records service asks for it.
pub fn hook(reloader: Arc<Reloader>) -> cri::ReloadHook {
    Arc::new(move || {
        let reloader = reloader.clone();
        Box::pin(async move {
            let changes = reloader.reload().await.map_err(|e| format!("{e:#}"))?;
            Ok(changes.into_iter().map(sent).collect())
        })
    })
}

fn sent(change: Change) -> Changed {
    let when = match change.when {
        When::Now => Sent::Now,
        When::Next => Sent::Next,
        When::Restart => Sent::Restart,
    };
    Changed {
        key: change.key,
        from: change.from,
        to: change.to,
        when: when.into(),
    }
}
