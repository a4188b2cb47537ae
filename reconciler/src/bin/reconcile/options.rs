//! Flags that every subcommand takes, and what they mean together with environment, configuration file and defaults.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use reconciler::runtime::Options;
use reconciler::streaming::Settings;
use reconciler::world::linux::network::{Cidr, Mode};
use reconciler::world::linux::registry;
use serde::Deserialize;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::{config, metrics};

/// As given on the command line or in the environment.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Global options")]
pub struct Flags {
    /// Durable directory: records, images, object directories [default: /var/lib/reconcile]
    #[arg(long, global = true, value_name = "DIR", env = "RECONCILE_ROOT")]
    root: Option<PathBuf>,
    /// Volatile directory, on a tmpfs: pins, sockets, mount points [default: /run/reconcile]
    #[arg(long, global = true, value_name = "DIR", env = "RECONCILE_STATE")]
    state: Option<PathBuf>,
    /// Socket of the CRI and of this program [default: unix://STATE/reconcile.sock]
    #[arg(long, global = true, value_name = "ADDRESS", env = "RECONCILE_SOCKET")]
    socket: Option<String>,
    /// Configuration file, or a directory with config.yaml [default: /etc/reconcile]
    #[arg(long, global = true, value_name = "PATH", env = "RECONCILE_CONFIG")]
    config: Option<PathBuf>,
    /// error, warn, info, debug, trace, or a filter such as `reconciler=debug` [default: info for serve, else warn]
    #[arg(long, global = true, value_name = "LEVEL", env = "RECONCILE_LOG_LEVEL")]
    log_level: Option<String>,
    /// Who gives pods their network [default: auto]
    #[arg(long, global = true, value_enum, env = "RECONCILE_NETWORK")]
    network: Option<Network>,
    /// Serve metrics for Prometheus: a loopback address such as 127.0.0.1:9180, or unix:///PATH [default: nowhere]
    #[arg(long, global = true, value_name = "ADDRESS", env = "RECONCILE_METRICS")]
    metrics: Option<metrics::Address>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Network {
    /// Pods from the CRI need CNI; pods from YAML take CNI where it is configured, else the built-in bridge
    #[default]
    Auto,
    /// CNI plugins for every pod
    Cni,
    /// The built-in bridge for every pod
    Builtin,
}

/// The settings in force: flag before environment before file before default.
#[derive(Clone, Debug)]
pub struct Global {
    pub root: PathBuf,
    pub state: PathBuf,
    pub socket: PathBuf,
    /// `None`: what suits the subcommand.
    pub log_level: Option<String>,
    /// Where metrics are served, if anywhere.
    pub metrics: Option<metrics::Address>,
    network: Network,
    cni_conf_dir: PathBuf,
    cni_bin_dirs: Vec<PathBuf>,
    cni_template: Option<PathBuf>,
    pod_cidrs: Vec<Cidr>,
    pub registry: registry::Config,
    streaming: Settings,
}

impl Flags {
    /// Reads the configuration file and settles every setting.
    pub fn settle(&self) -> Result<Global> {
        let file = config::read(self.config.as_deref().unwrap_or(Path::new("/etc/reconcile")))?;
        let absolute = |what: &str, flag: &Option<PathBuf>, file: &Option<PathBuf>, default: &str| {
            let path = flag
                .as_ref()
                .or(file.as_ref())
                .map_or(Path::new(default), PathBuf::as_path);
            std::path::absolute(path).with_context(|| format!("{what} {}", path.display()))
        };
        let state = absolute("--state", &self.state, &file.state, "/run/reconcile")?;
        let socket = match self.socket.as_ref().or(file.socket.as_ref()) {
            None => state.join("reconcile.sock"),
            Some(text) => {
                let path = text.strip_prefix("unix://").unwrap_or(text);
                if !path.starts_with('/') {
                    bail!("--socket {text:?}: must be unix:// and an absolute path");
                }
                path.into()
            }
        };
        let network = file.network;
        let mut streaming = Settings::default();
        if let Some(address) = file.streaming.address {
            streaming.address = address;
        }
        if let Some(seconds) = file.streaming.idle_seconds {
            streaming.idle = Duration::from_secs(seconds.get());
        }
        Ok(Global {
            root: absolute("--root", &self.root, &file.root, "/var/lib/reconcile")?,
            state,
            socket,
            log_level: self.log_level.clone().or(file.log_level),
            metrics: self.metrics.clone().or(file.metrics),
            network: self.network.or(network.mode).unwrap_or_default(),
            cni_conf_dir: network.cni_conf_dir.unwrap_or_else(|| "/etc/cni/net.d".into()),
            cni_bin_dirs: network
                .cni_bin_dirs
                .unwrap_or_else(|| vec!["/opt/cni/bin".into(), "/usr/lib/cni".into()]),
            cni_template: network.cni_template,
            pod_cidrs: network.pod_cidrs,
            registry: registries(file.registry),
            streaming,
        })
    }
}

impl Global {
    /// What the runtime is opened with.
    pub fn runtime(&self) -> Result<Options> {
        Ok(Options {
            root: self.root.clone(),
            state: self.state.clone(),
            shim: shim()?,
            network: match self.network {
                Network::Auto => Mode::Auto,
                Network::Cni => Mode::Cni,
                Network::Builtin => Mode::Builtin,
            },
            cni_conf_dir: self.cni_conf_dir.clone(),
            cni_bin_dirs: self.cni_bin_dirs.clone(),
            pod_cidrs: self.pod_cidrs.clone(),
            cni_template: self.cni_template.clone(),
            registry: self.registry.clone(),
        })
    }

    /// How the streaming server listens.
    pub fn streaming(&self) -> Settings {
        self.streaming.clone()
    }

    /// Starts logging to stderr; `level` is what suits the subcommand.
    pub fn log(&self, level: &str) -> Result<()> {
        let level = self.log_level.as_deref().unwrap_or(level);
        let told = || format!("--log-level {level:?}");
        let directives = if level.contains(['=', ',']) {
            level.to_owned()
        } else {
            own_lines(level.parse().with_context(told)?)
        };
        let filter = EnvFilter::try_new(directives).with_context(told)?;
        tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .with_target(false)
            .with_ansi(std::io::stderr().is_terminal())
            .init();
        Ok(())
    }
}

/// A lone level is for our own lines: the libraries below (HTTP/2 frames, the store's pages) tell warnings at most.
fn own_lines(level: LevelFilter) -> String {
    let libraries = level.min(LevelFilter::WARN);
    let own = ["reconcile", "reconciler", "cri", "state", "shim"];
    own.iter()
        .fold(libraries.to_string(), |all, name| format!("{all},{name}={level}"))
}

fn registries(file: config::RegistryConfig) -> registry::Config {
    let default = registry::Config::default();
    registry::Config {
        hosts_roots: file.certs_dirs.unwrap_or(default.hosts_roots),
        rate_floor: file.rate_floor.unwrap_or(default.rate_floor),
        window: file.window.map_or(default.window, Duration::from_secs),
    }
}

/// `reconcile-shim` lies beside this program.
fn shim() -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this program's own path")?;
    let shim = own.with_file_name("reconcile-shim");
    if !shim.exists() {
        bail!("{} is missing: it must lie beside {}", shim.display(), own.display());
    }
    Ok(shim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_wins_over_the_file_and_the_file_over_the_default() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.yaml");
        std::fs::write(&file, "root: /from-file\nstate: /s\nnetwork: {mode: cni}\n").unwrap();
        let flags = Flags {
            config: Some(file),
            root: Some("/from-flag".into()),
            ..Flags::default()
        };
        let global = flags.settle().unwrap();
        assert_eq!(global.root, Path::new("/from-flag"));
        assert_eq!(global.socket, Path::new("/s/reconcile.sock"));
        assert_eq!(global.network, Network::Cni);
        assert_eq!(global.cni_conf_dir, Path::new("/etc/cni/net.d"));
    }

    #[test]
    fn a_lone_level_is_for_our_own_lines() {
        let debug = own_lines(LevelFilter::DEBUG);
        assert!(debug.starts_with("warn,") && debug.contains(",cri=debug"), "{debug}");
        assert!(own_lines(LevelFilter::OFF).starts_with("off,"));
    }

    #[test]
    fn a_socket_is_an_absolute_path() {
        let dir = tempfile::tempdir().unwrap();
        let with = |socket: &str| {
            let flags = Flags {
                config: Some(dir.path().into()),
                socket: Some(socket.into()),
                ..Flags::default()
            };
            flags.settle().map(|global| global.socket)
        };
        assert_eq!(with("unix:///a/b").unwrap(), Path::new("/a/b"));
        assert_eq!(with("/a/b").unwrap(), Path::new("/a/b"));
        assert!(with("tcp://1.2.3.4:5").is_err());
    }
}
