//! The settings as the parts of the program take them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;

use super::handlers::{self, Handler};
use super::values::*;
use super::{Origin, Problem, Settings};
use crate::container::seccomp;
use crate::container::spec::capability::CapabilitySet;
use crate::streaming::tls;

/// Its fields are the table's keys: what the one has, the other must have.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Config {
    pub root: Place,
    pub state: Place,
    pub socket: Option<Socket>,
    pub log_level: Option<LogLevel>,
    pub metrics: Option<Address>,
    pub cgroup: Cgroup,
    pub network: Networks,
    pub registry: Registry,
    pub images: Images,
    pub containers: Containers,
    #[serde(default)]
    pub handlers: BTreeMap<String, Handler>,
    pub default_handler: String,
    pub logs: Logs,
    pub streaming: Streaming,
    #[serde(default)]
    pub oom_score: OomScores,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Cgroup {
    pub driver: CgroupDriver,
    pub shims: Option<CgroupPath>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Networks {
    pub mode: Network,
    pub cni_conf_dir: Place,
    pub cni_bin_dirs: Vec<Place>,
    pub cni_template: Option<Place>,
    #[serde(rename = "podCIDR")]
    pub pod_cidr: Option<Cidrs>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Registry {
    pub certs_dirs: Vec<Place>,
    pub rate_floor: u64,
    pub window_seconds: Seconds,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Images {
    pub pinned: Vec<ImageName>,
    pub sandbox_image: ImageName,
    pub gc_grace_seconds: Grace,
    pub gc_high_percent: Percent,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Containers {
    pub seccomp: Seccomp,
    #[serde(default)]
    pub rlimits: Rlimits,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Logs {
    pub max_line_bytes: LineBytes,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Streaming {
    pub address: Listen,
    pub idle_seconds: Seconds,
    #[serde(default)]
    pub tls: Tls,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Tls {
    pub cert: Option<Place>,
    pub key: Option<Place>,
}

impl Tls {
    /// The certificate, read with its key; `None` if none is configured.
    ///
    /// # Errors
    /// If the files are not what they should be; of a pair that is not whole there is none.
    pub fn identity(&self) -> Result<Option<tls::Identity>, tls::Error> {
        match (&self.cert, &self.key) {
            (Some(cert), Some(key)) => tls::Identity::read(&cert.0, &key.0).map(Some),
            _ => Ok(None),
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct OomScores {
    pub daemon: Option<OomScore>,
    pub shims: Option<OomScore>,
}

/// The whole, each of its values checked before, and what only the whole can tell; with warnings.
pub fn build(settings: &Settings) -> Result<(Config, Vec<String>), Problem> {
    let config: Config = serde_yaml::from_value(settings.tree()).map_err(|e| Problem {
        at: Origin::Default,
        key: String::new(),
        message: e.to_string(),
    })?;
    let wrong = |key: &str, message: String| Problem {
        at: settings.origin(key),
        key: key.to_owned(),
        message,
    };
    if config.root == config.state {
        let key = match settings.origin("state") {
            Origin::Default => "root",
            _ => "state",
        };
        return Err(wrong(key, "root and state must be different directories".to_owned()));
    }
    let tls = &config.streaming.tls;
    match (&tls.cert, &tls.key) {
        (Some(_), None) => {
            return Err(wrong(
                "streaming.tls.cert",
                "needs streaming.tls.key beside it".to_owned(),
            ));
        }
        (None, Some(_)) => {
            return Err(wrong(
                "streaming.tls.key",
                "needs streaming.tls.cert beside it".to_owned(),
            ));
        }
        _ => {}
    }
    let warnings = handlers::check(&config, settings)?;
    // What could not be used is told now, not at each use.
    tls.identity().map_err(|e| wrong("streaming.tls.cert", e.to_string()))?;
    let cx = seccomp::Context {
        capabilities: CapabilitySet::default(),
        kernel: (6, 0),
        arch: seccomp::Arch::NATIVE,
        deny_socketcall: false,
    };
    seccomp::filter(Some(&config.containers.seccomp.0), false, &cx)
        .map_err(|e| wrong("containers.seccomp", e.to_string()))?;
    Ok((config, warnings))
}

impl Config {
    /// The API's socket.
    pub fn socket(&self) -> PathBuf {
        match &self.socket {
            Some(socket) => socket.0.clone(),
            None => self.state.0.join("reconcile.sock"),
        }
    }
}
