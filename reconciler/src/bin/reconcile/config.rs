//! The configuration file: the flags' settings, written down. A flag or an environment variable wins over it.

use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use serde::Deserialize;

use crate::metrics::Address;
use crate::options::Network;
use reconciler::world::linux::network::Cidr;

/// Read in a configuration directory.
const NAME: &str = "config.yaml";

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Config {
    pub root: Option<PathBuf>,
    pub state: Option<PathBuf>,
    pub socket: Option<String>,
    pub log_level: Option<String>,
    /// `unix:///PATH` or a loopback address, where metrics are served.
    pub metrics: Option<Address>,
    pub network: NetworkConfig,
    pub registry: RegistryConfig,
    pub streaming: StreamingConfig,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct RegistryConfig {
    /// Roots of `certs.d` directories, in the order of search.
    pub certs_dirs: Option<Vec<PathBuf>>,
    /// Bytes a second that a transfer must have over a whole window.
    pub rate_floor: Option<u64>,
    /// Seconds.
    pub window: Option<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct NetworkConfig {
    pub mode: Option<Network>,
    /// Where CNI configurations lie.
    pub cni_conf_dir: Option<PathBuf>,
    /// Where CNI plugins lie, in the order of search.
    pub cni_bin_dirs: Option<Vec<PathBuf>>,
    /// Filled with the node's pod CIDRs where there is no CNI configuration.
    pub cni_template: Option<PathBuf>,
    /// Networks of the built-in bridge, one of each family at most, comma-separated.
    #[serde(rename = "podCIDR", deserialize_with = "pod_cidrs")]
    pub pod_cidrs: Vec<Cidr>,
}

fn pod_cidrs<'de, D: serde::Deserializer<'de>>(from: D) -> std::result::Result<Vec<Cidr>, D::Error> {
    let text = String::deserialize(from)?;
    let one = |text: &str| {
        let wrong = |_| serde::de::Error::custom(format!("{text:?} is not a CIDR such as 10.1.0.0/16"));
        text.trim().parse::<Cidr>().map_err(wrong)
    };
    let all = text
        .split(',')
        .map(one)
        .collect::<std::result::Result<Vec<_>, D::Error>>()?;
    match &all[..] {
        [_] => Ok(all),
        [a, b] if a.ip.is_ipv4() != b.ip.is_ipv4() => Ok(all),
        _ => Err(serde::de::Error::custom("takes one network of each family at most")),
    }
}

/// The server for exec, attach and port-forward.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct StreamingConfig {
    /// Address and port; port 0 takes a free one.
    pub address: Option<SocketAddr>,
    /// Seconds without any traffic after which a session is ended.
    pub idle_seconds: Option<NonZeroU64>,
}

/// Reads `path`, a file or a directory with a `config.yaml`. What is not there says nothing, unless the path itself
/// names a YAML file.
pub fn read(path: &Path) -> Result<Config> {
    let named = path.extension().is_some_and(|e| e == "yaml" || e == "yml");
    let file = if named || path.is_file() {
        path.to_owned()
    } else {
        path.join(NAME)
    };
    match std::fs::read_to_string(&file) {
        Ok(text) => parse(&text, &file),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && !named => Ok(Config::default()),
        Err(e) => Err(e).with_context(|| format!("cannot read configuration {}", file.display())),
    }
}

fn parse(text: &str, file: &Path) -> Result<Config> {
    // An empty file, or one of comments alone.
    if serde_yaml::from_str::<serde_yaml::Value>(text).is_ok_and(|value| value.is_null()) {
        return Ok(Config::default());
    }
    serde_yaml::from_str(text).map_err(|e| {
        let place = e
            .location()
            .map(|l| format!(":{}:{}", l.line(), l.column()))
            .unwrap_or_default();
        let message = e.to_string();
        let message = message.split(" at line ").next().unwrap_or_default();
        anyhow!("{}{place}: {message}", file.display())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_every_key() {
        let text = "root: /r\nstate: /s\nsocket: unix:///x\nlogLevel: debug\nmetrics: 127.0.0.1:9180\n\
                    network:\n  mode: builtin\n  cniConfDir: /c\n  cniBinDirs: [/a, /b]\n\
                    \x20 cniTemplate: /t\n  podCIDR: 10.1.0.0/16, fd00::/64\n\
                    registry:\n  certsDirs: [/d]\n  rateFloor: 5\n  window: 9\n";
        let config = parse(text, Path::new("c.yaml")).unwrap();
        assert_eq!(config.root, Some("/r".into()));
        assert_eq!(config.log_level.as_deref(), Some("debug"));
        assert_eq!(config.metrics, "127.0.0.1:9180".parse().ok());
        assert_eq!(config.network.mode, Some(Network::Builtin));
        assert_eq!(config.network.cni_bin_dirs, Some(vec!["/a".into(), "/b".into()]));
        assert_eq!(config.network.pod_cidrs.len(), 2);
        assert_eq!(config.registry.certs_dirs, Some(vec!["/d".into()]));
        assert_eq!((config.registry.rate_floor, config.registry.window), (Some(5), Some(9)));
    }

    #[test]
    fn names_file_and_line_of_a_mistake() {
        for (text, words) in [
            ("root: /r\nrot: /x\n", "c.yaml:2:1: unknown field `rot`"),
            (
                "network:\n  mode: none\n",
                "c.yaml:2:9: network.mode: unknown variant `none`",
            ),
            ("network: {podCIDR: ten}\n", "\"ten\" is not a CIDR"),
            (
                "network: {podCIDR: '10.1.0.0/16,10.2.0.0/16'}\n",
                "one network of each family",
            ),
            ("metrics: 0.0.0.0:1\n", "loopback"),
            ("root: [\n", "c.yaml:"),
            ("- a\n", "c.yaml:1:1"),
        ] {
            let error = parse(text, Path::new("c.yaml")).unwrap_err().to_string();
            assert!(error.contains(words), "{text:?}: {error}");
        }
    }

    #[test]
    fn nothing_says_nothing() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()).unwrap(), Config::default());
        assert_eq!(read(&dir.path().join("absent")).unwrap(), Config::default());
        assert!(read(&dir.path().join("absent.yaml")).is_err());
        std::fs::write(dir.path().join(NAME), "# only this\n").unwrap();
        assert_eq!(read(dir.path()).unwrap(), Config::default());
        std::fs::write(dir.path().join(NAME), "state: /y\n").unwrap();
        assert_eq!(read(dir.path()).unwrap().state, Some("/y".into()));
    }
}
