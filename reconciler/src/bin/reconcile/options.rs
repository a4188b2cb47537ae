//! Flags that every subcommand takes, and what they mean together with environment, configuration files and defaults.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, ValueEnum};
use reconciler::config::values::{Address, CgroupDriver, Network};
use reconciler::config::{self, Config, Loaded, Origin, Override, Problems, Settings, handlers, keys};
use reconciler::runtime::Options;
use reconciler::streaming;
use reconciler::world::linux::network::Mode;
use reconciler::world::linux::registry;
use tracing_subscriber::EnvFilter;

use crate::logging;

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
    #[arg(long, global = true, value_name = "ADDRESS", env = "RECONCILE_METRICS", value_parser = address)]
    metrics: Option<String>,
    /// Which of them the environment said.
    #[arg(skip)]
    from_env: Vec<&'static str>,
}

/// A usage error, where it is none.
fn address(text: &str) -> Result<String, String> {
    text.parse::<Address>().map(|_| text.to_owned())
}

/// The settings in force: flag before environment before files before default.
#[derive(Clone, Debug)]
pub struct Global {
    pub root: PathBuf,
    pub state: PathBuf,
    pub socket: PathBuf,
    pub config: Config,
    pub settings: Settings,
    /// What they were settled from; a reload does it again.
    pub flags: Flags,
}

impl Flags {
    /// Tells the environment's values from the command line's.
    pub fn told_by(&mut self, matches: &ArgMatches) {
        let id = |key: &keys::Key| key.flag.map(|flag| (key.path, flag.replace('-', "_")));
        let by_env = |id: &str| matches.value_source(id) == Some(ValueSource::EnvVariable);
        let found = keys::KEYS.iter().filter_map(id).filter(|(_, id)| by_env(id));
        self.from_env = found.map(|(path, _)| path).collect();
    }

    /// What they say of the configuration.
    ///
    /// # Errors
    /// If a path is not text.
    pub fn overrides(&self) -> Result<Vec<Override>> {
        // From where this program was started, which is what its user sees.
        let path = |path: &PathBuf| {
            let absolute = std::path::absolute(path).with_context(|| format!("{}", path.display()))?;
            absolute.into_os_string().into_string().map_err(|path| {
                anyhow::anyhow!(
                    "{}: a path of the configuration must be UTF-8",
                    Path::new(&path).display()
                )
            })
        };
        let network = |network: Network| network.to_possible_value().map(|value| value.get_name().to_owned());
        let said = [
            ("root", self.root.as_ref().map(path).transpose()?),
            ("state", self.state.as_ref().map(path).transpose()?),
            ("socket", self.socket.clone()),
            ("logLevel", self.log_level.clone()),
            ("network.mode", self.network.and_then(network)),
            ("metrics", self.metrics.clone()),
        ];
        let over = |(path, text): (&'static str, Option<String>)| {
            let (key, text) = (keys::find(path)?, text?);
            let origin = match key.variable().filter(|_| self.from_env.contains(&path)) {
                Some(variable) => Origin::Env(variable),
                None => Origin::Flag(key.flag?.to_owned()),
            };
            Some(Override {
                key: key.path,
                text,
                origin,
            })
        };
        Ok(said.into_iter().filter_map(over).collect())
    }

    /// The files that are read.
    pub fn files(&self) -> Result<Vec<PathBuf>, Problems> {
        let path = self.config.as_deref().unwrap_or(Path::new(config::DIRECTORY));
        config::files(path).map_err(|problem| Problems(vec![problem]))
    }

    /// Reads files, environment and flags.
    pub fn load(&self) -> Result<Loaded> {
        Ok(config::load(&self.files()?, &self.overrides()?)?)
    }

    /// Settles every setting. Warnings are the caller's to tell.
    pub fn settle(&self) -> Result<(Global, Vec<String>)> {
        let loaded = self.load()?;
        let config = loaded.config;
        let global = Global {
            root: config.root.0.clone(),
            state: config.state.0.clone(),
            socket: config.socket(),
            config,
            settings: loaded.settings,
            flags: self.clone(),
        };
        Ok((global, loaded.warnings))
    }
}

impl Global {
    /// What the runtime is opened with.
    pub fn runtime(&self) -> Result<Options> {
        let network = &self.config.network;
        Ok(Options {
            root: self.root.clone(),
            state: self.state.clone(),
            shim: shim()?,
            network: match network.mode {
                Network::Auto => Mode::Auto,
                Network::Cni => Mode::Cni,
                Network::Builtin => Mode::Builtin,
            },
            cni_conf_dir: network.cni_conf_dir.0.clone(),
            cni_bin_dirs: network.cni_bin_dirs.iter().map(|dir| dir.0.clone()).collect(),
            pod_cidrs: network.pod_cidr.clone().map(|all| all.0).unwrap_or_default(),
            cni_template: network.cni_template.clone().map(|path| path.0),
            registry: self.registry(),
            shim_cgroup: self.config.cgroup.shims.clone().map(|path| path.0),
            systemd: match self.config.cgroup.driver {
                CgroupDriver::Cgroupfs => Some(false),
                CgroupDriver::Systemd => Some(true),
                CgroupDriver::Auto => None,
            },
            shim_oom_score: self.config.oom_score.shims.map(|score| score.0),
            live: self.config.live(handlers::probe(&self.config, &self.settings)?),
        })
    }

    pub fn registry(&self) -> registry::Config {
        self.config.registries()
    }

    /// How the streaming server listens.
    pub fn streaming(&self) -> Result<streaming::Settings> {
        let streaming = &self.config.streaming;
        Ok(streaming::Settings {
            address: streaming.address.0,
            idle: streaming.idle_seconds.duration(),
            tls: streaming.tls.identity().context("streaming.tls")?.map(Arc::new),
        })
    }

    /// Starts logging to stderr; `suits` is what suits the subcommand.
    pub fn log(&self, suits: &str) -> Result<()> {
        logging::start(filter(&self.config, suits)?);
        Ok(())
    }
}

/// What is logged; `suits` if the configuration does not say.
pub fn filter(config: &Config, suits: &str) -> Result<EnvFilter> {
    match &config.log_level {
        Some(level) => level.filter().map_err(|e| anyhow::anyhow!("logLevel: {e}")),
        None => EnvFilter::try_new(suits).context("the log's filter"),
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
        let (global, _) = flags.settle().unwrap();
        assert_eq!(global.root, Path::new("/from-flag"));
        assert_eq!(global.socket, Path::new("/s/reconcile.sock"));
        assert_eq!(global.config.network.mode, Network::Cni);
        assert_eq!(global.config.network.cni_conf_dir.0, Path::new("/etc/cni/net.d"));
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
            flags.settle().map(|(global, _)| global.socket)
        };
        assert_eq!(with("unix:///a/b").unwrap(), Path::new("/a/b"));
        assert_eq!(with("/a/b").unwrap(), Path::new("/a/b"));
        assert!(with("tcp://1.2.3.4:5").is_err());
    }
}
