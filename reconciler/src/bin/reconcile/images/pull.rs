//! `reconcile images pull`: with a bar per layer on a terminal, lines elsewhere.

use std::collections::HashSet;
use std::fmt::Write;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use cri::records::v1;
use indicatif::{HumanBytes, HumanDuration, MultiProgress, ProgressBar, ProgressState, ProgressStyle};
use reconciler::world::linux::registry::{Credential, CredentialKind, Keyring};
use state::Reference;

use crate::client::Client;
use crate::local::{Need, Session};
use crate::options::Global;
use crate::print::{self, size};

#[derive(Args)]
pub struct Pull {
    #[arg(required = true, value_name = "REFERENCE")]
    references: Vec<String>,
    /// No progress, only the ids
    #[arg(short, long)]
    quiet: bool,
}

pub async fn run(global: &Global, args: &Pull) -> Result<ExitCode> {
    let parse = |text: &String| Reference::parse(text, "image");
    let references = args.references.iter().map(parse).collect::<Result<Vec<_>, _>>()?;
    let session = Session::open(global, Need::Act).await?;
    let mut failures = Vec::new();
    for reference in &references {
        let pulled = tokio::select! {
            pulled = pull(&session.client, reference, args.quiet) => pulled,
            _ = tokio::signal::ctrl_c() => bail!("interrupted; what was fetched is kept for the next pull"),
        };
        match pulled {
            Ok(id) => print::line(id)?,
            Err(e) => failures.push(format!("{e:#}")),
        }
    }
    session.close().await?;
    if failures.is_empty() {
        Ok(ExitCode::SUCCESS)
    } else {
        bail!("{}", failures.join("\n"))
    }
}

/// Pulls one image with the credentials of who runs this program; its id.
pub async fn pull(client: &Client, reference: &Reference, quiet: bool) -> Result<String> {
    let (credentials, unread) = Keyring::of_user(Vec::new()).matching(reference).await;
    for problem in unread {
        eprintln!("reconcile: credentials: {problem}");
    }
    let mut shown = match quiet {
        true => Shown::Nothing,
        false if std::io::stderr().is_terminal() => Shown::bars(reference),
        false => Shown::lines(reference),
    };
    let credentials = credentials.into_iter().map(sent).collect();
    let mut changes = client.pull(reference.to_string(), credentials).await?;
    while let Some(change) = changes.next().await? {
        shown.layers(&change.layers);
        if !change.id.is_empty() {
            shown.done(&change);
            return Ok(change.id);
        }
    }
    bail!("the daemon stopped")
}

fn sent(credential: Credential) -> v1::Credential {
    let mut to = v1::Credential {
        source: credential.source,
        server_address: credential.server_address,
        ..v1::Credential::default()
    };
    match credential.kind {
        CredentialKind::Anonymous => {}
        CredentialKind::Basic { username, password } => (to.username, to.password) = (username, password),
        CredentialKind::IdentityToken(token) => to.identity_token = token,
        CredentialKind::RegistryToken(token) => to.registry_token = token,
    }
    to
}

/// How progress is shown, on standard error.
enum Shown {
    Nothing,
    /// One line when a layer begins to come and one when it is there.
    Lines {
        begun: HashSet<String>,
        ended: HashSet<String>,
    },
    Bars {
        all: MultiProgress,
        bars: Vec<Bar>,
    },
}

impl Shown {
    fn lines(reference: &Reference) -> Shown {
        eprintln!("pulling {reference}");
        Shown::Lines {
            begun: HashSet::new(),
            ended: HashSet::new(),
        }
    }

    fn bars(reference: &Reference) -> Shown {
        eprintln!("pulling {reference}");
        Shown::Bars {
            all: MultiProgress::new(),
            bars: Vec::new(),
        }
    }

    fn layers(&mut self, layers: &[v1::LayerProgress]) {
        match self {
            Shown::Nothing => {}
            Shown::Lines { begun, ended } => {
                for layer in layers {
                    let name = name(layer);
                    if layer.done > 0 && !layer.present && begun.insert(layer.digest.clone()) {
                        eprintln!("{name}: fetching {}", size(layer.size));
                    }
                    if layer.done == layer.size && ended.insert(layer.digest.clone()) {
                        eprintln!("{name}: {}", if layer.present { "already here" } else { "fetched" });
                    }
                }
            }
            Shown::Bars { all, bars } => {
                while bars.len() < layers.len() {
                    bars.push(Bar::new(all, &layers[bars.len()]));
                }
                bars.iter().zip(layers).for_each(|(bar, layer)| bar.update(layer));
            }
        }
    }

    fn done(&self, answer: &v1::PullResponse) {
        if let Shown::Bars { bars, .. } = self {
            bars.iter().for_each(Bar::finish);
        }
        if !matches!(self, Shown::Nothing) {
            eprintln!("digest: {}", answer.digest);
        }
    }
}

/// One layer's bar, and since when how many bytes have been coming.
struct Bar {
    bar: ProgressBar,
    begun: Arc<OnceLock<(Instant, u64)>>,
}

impl Bar {
    fn new(all: &MultiProgress, layer: &v1::LayerProgress) -> Bar {
        let begun = Arc::default();
        let bar = all.add(ProgressBar::new(layer.size).with_style(style(layer.present, &begun)));
        bar.set_prefix(name(layer).to_owned());
        Bar { bar, begun }
    }

    fn update(&self, layer: &v1::LayerProgress) {
        if layer.done > 0 {
            self.begun.get_or_init(|| (Instant::now(), layer.done));
        }
        self.bar.set_position(layer.done);
        if layer.done == layer.size {
            self.finish();
        }
    }

    fn finish(&self) {
        if !self.bar.is_finished() {
            self.bar.finish();
        }
    }
}

/// Bytes a second since the layer began to come; what was here before tells nothing.
fn rate(begun: &OnceLock<(Instant, u64)>, state: &ProgressState) -> Option<f64> {
    let (since, from) = begun.get()?;
    let rate = state.pos().checked_sub(*from)? as f64 / since.elapsed().as_secs_f64();
    (rate.is_finite() && rate >= 1.0).then_some(rate)
}

fn style(present: bool, begun: &Arc<OnceLock<(Instant, u64)>>) -> ProgressStyle {
    let template = if present {
        "{prefix}  already here"
    } else {
        "{prefix}  {bar:30}  {bytes:>10}/{total_bytes:<10}  {rate:>12}  {left}"
    };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    // A terminal that cannot be written to is not this bar's to mend.
    let speed = begun.clone();
    let style = style.with_key("rate", move |state: &ProgressState, to: &mut dyn Write| {
        let rate = rate(&speed, state).map(|rate| format!("{}/s", HumanBytes(rate as u64)));
        let _ = to.write_str(&rate.unwrap_or_default());
    });
    let begun = begun.clone();
    style.with_key("left", move |state: &ProgressState, to: &mut dyn Write| {
        let bytes = state.len().unwrap_or_default().saturating_sub(state.pos());
        if let Some(rate) = rate(&begun, state).filter(|_| bytes > 0) {
            let _ = write!(to, "{:#}", HumanDuration(Duration::from_secs_f64(bytes as f64 / rate)));
        }
    })
}

/// The first digits of a layer's digest.
fn name(layer: &v1::LayerProgress) -> &str {
    let hex = layer.digest.strip_prefix("sha256:").unwrap_or(&layer.digest);
    hex.get(..12).unwrap_or(hex)
}
