//! `reconcile images pull`: with a bar per layer on a terminal, lines elsewhere.

use std::collections::HashSet;
use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use cri::records::v1;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
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
        bars: Vec<ProgressBar>,
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
                    let layer = &layers[bars.len()];
                    let bar = all.add(
                        ProgressBar::new(layer.size)
                            .with_style(style(layer.present))
                            .with_position(layer.done),
                    );
                    bar.set_prefix(name(layer).to_owned());
                    bars.push(bar);
                }
                for (bar, layer) in bars.iter().zip(layers) {
                    bar.set_position(layer.done);
                    if layer.done == layer.size && !bar.is_finished() {
                        bar.finish();
                    }
                }
            }
        }
    }

    fn done(&self, answer: &v1::PullResponse) {
        if let Shown::Bars { bars, .. } = self {
            bars.iter()
                .filter(|bar| !bar.is_finished())
                .for_each(ProgressBar::finish);
        }
        if !matches!(self, Shown::Nothing) {
            eprintln!("digest: {}", answer.digest);
        }
    }
}

fn style(present: bool) -> ProgressStyle {
    let template = if present {
        "{prefix}  already here"
    } else {
        "{prefix}  {bar:30}  {bytes:>10}/{total_bytes:<10}  {bytes_per_sec:>12}  {eta}"
    };
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// The first digits of a layer's digest.
fn name(layer: &v1::LayerProgress) -> &str {
    let hex = layer.digest.strip_prefix("sha256:").unwrap_or(&layer.digest);
    hex.get(..12).unwrap_or(hex)
}
