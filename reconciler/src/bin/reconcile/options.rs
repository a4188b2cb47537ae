//! Flags that every subcommand takes, and what they mean for the runtime.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use reconciler::runtime::Options;
use reconciler::world::linux::network::Mode;
use tracing_subscriber::EnvFilter;

#[derive(Args, Clone, Debug)]
pub struct Global {
    /// Durable directory: records, images, object directories
    #[arg(long, global = true, default_value = "/var/lib/reconcile")]
    pub root: PathBuf,
    /// Volatile directory, on a tmpfs: pins, sockets, mount points
    #[arg(long, global = true, default_value = "/run/reconcile")]
    pub state: PathBuf,
    /// Socket of the CRI and of this program [default: unix://<state>/reconcile.sock]
    #[arg(long, global = true)]
    pub socket: Option<String>,
    /// error, warn, info, debug, trace, or a filter such as `reconciler=debug`
    #[arg(long, global = true, default_value = "info")]
    pub log_level: String,
    /// Who gives pods their network
    #[arg(long, global = true, value_enum, default_value_t = Network::Auto)]
    pub network: Network,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Network {
    /// Pods from the CRI need CNI; pods from YAML take CNI where it is configured, else the built-in bridge
    Auto,
    Cni,
    Builtin,
}

impl Global {
    /// The socket's path.
    pub fn socket(&self) -> Result<PathBuf> {
        match self.socket.as_deref() {
            None => Ok(self.state.join("reconcile.sock")),
            Some(text) => {
                let path = text.strip_prefix("unix://").unwrap_or(text);
                if !path.starts_with('/') {
                    bail!("--socket {text:?}: must be unix:// and an absolute path");
                }
                Ok(path.into())
            }
        }
    }

    /// What the runtime is opened with.
    pub fn runtime(&self) -> Result<Options> {
        let absolute = |flag: &str, path: &Path| {
            std::path::absolute(path).with_context(|| format!("{flag} {}", path.display()))
        };
        Ok(Options {
            root: absolute("--root", &self.root)?,
            state: absolute("--state", &self.state)?,
            shim: shim()?,
            network: match self.network {
                Network::Auto => Mode::Auto,
                Network::Cni => Mode::Cni,
                Network::Builtin => Mode::Builtin,
            },
            cni_conf_dir: "/etc/cni/net.d".into(),
            cni_bin_dirs: vec!["/opt/cni/bin".into(), "/usr/lib/cni".into()],
        })
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

/// Starts logging to stderr.
pub fn log(level: &str) {
    let filter = EnvFilter::try_new(level).unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false).init();
}
