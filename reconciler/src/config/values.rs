//! What a key's value may be. Each type reads itself from YAML and says what is wrong in a sentence.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::ValueEnum;
use serde::Deserialize;
use state::Reference;
use state::sandbox::Profile;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::world::linux::network::Cidr;

/// An absolute path.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Place(pub PathBuf);

impl TryFrom<String> for Place {
    type Error = String;

    fn try_from(text: String) -> Result<Place, String> {
        if text.contains('\0') || !text.starts_with('/') {
            return Err(format!("{text:?} is not an absolute path"));
        }
        Ok(Place(text.into()))
    }
}

/// `unix:///PATH`, or the path alone.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Socket(pub PathBuf);

impl TryFrom<String> for Socket {
    type Error = String;

    fn try_from(text: String) -> Result<Socket, String> {
        let path = text.strip_prefix("unix://").unwrap_or(&text);
        match path.starts_with('/') {
            true => Ok(Socket(path.into())),
            false => Err(format!("{text:?}: must be unix:// and an absolute path")),
        }
    }
}

/// A level, or directives for parts of the program (`reconciler=debug,cri=info`).
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct LogLevel(String);

impl TryFrom<String> for LogLevel {
    type Error = String;

    fn try_from(text: String) -> Result<LogLevel, String> {
        let level = LogLevel(text);
        level.filter().map(|_| level)
    }
}

impl FromStr for LogLevel {
    type Err = String;

    fn from_str(text: &str) -> Result<LogLevel, String> {
        LogLevel::try_from(text.to_owned())
    }
}

impl LogLevel {
    /// The filter that it stands for. A lone level is for our own lines: the libraries below (HTTP/2 frames, the
    /// store's pages) tell warnings at most.
    ///
    /// # Errors
    /// If it is neither a level nor directives.
    pub fn filter(&self) -> Result<EnvFilter, String> {
        let text = &self.0;
        let wrong =
            || format!("{text:?} is none of error, warn, info, debug, trace, off, nor a filter such as cri=debug");
        let directives = if text.contains(['=', ',']) {
            text.clone()
        } else {
            own_lines(text.parse().map_err(|_| wrong())?)
        };
        EnvFilter::try_new(directives).map_err(|_| wrong())
    }
}

fn own_lines(level: LevelFilter) -> String {
    let libraries = level.min(LevelFilter::WARN);
    let own = ["reconcile", "reconciler", "cri", "state", "shim"];
    own.iter()
        .fold(libraries.to_string(), |all, name| format!("{all},{name}={level}"))
}

/// Where metrics are served: a loopback address or a Unix socket.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        if let Some(path) = text.strip_prefix("unix://") {
            return match path.starts_with('/') {
                true => Ok(Address::Unix(path.into())),
                false => Err(format!("{text:?}: the socket's path must be absolute")),
            };
        }
        let address: SocketAddr = text
            .parse()
            .map_err(|_| format!("{text:?}: must be unix:///PATH, or an address such as 127.0.0.1:9180"))?;
        // Who may read them is not asked, and they tell what runs here.
        match address.ip().is_loopback() {
            true => Ok(Address::Tcp(address)),
            false => Err(format!("{text:?}: metrics are served on a loopback address only")),
        }
    }
}

impl TryFrom<String> for Address {
    type Error = String;

    fn try_from(text: String) -> Result<Address, String> {
        text.parse()
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => write!(f, "http://{address}/metrics"),
            Address::Unix(path) => write!(f, "unix://{}", path.display()),
        }
    }
}

/// An address and a port to listen on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Listen(pub SocketAddr);

impl TryFrom<String> for Listen {
    type Error = String;

    fn try_from(text: String) -> Result<Listen, String> {
        let address = text.parse().map(Listen);
        address.map_err(|_| format!("{text:?} is not an address and port such as 127.0.0.1:0"))
    }
}

/// Who gives pods their network.
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

/// One network of each family at most, comma-separated.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Cidrs(pub Vec<Cidr>);

impl TryFrom<String> for Cidrs {
    type Error = String;

    fn try_from(text: String) -> Result<Cidrs, String> {
        let one = |text: &str| {
            let wrong = |_| format!("{text:?} is not a CIDR such as 10.1.0.0/16");
            text.trim().parse::<Cidr>().map_err(wrong)
        };
        let all = text.split(',').map(one).collect::<Result<Vec<_>, _>>()?;
        match &all[..] {
            [_] => Ok(Cidrs(all)),
            [a, b] if a.ip.is_ipv4() != b.ip.is_ipv4() => Ok(Cidrs(all)),
            _ => Err("takes one network of each family at most".to_owned()),
        }
    }
}

/// How cgroups are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum CgroupDriver {
    /// systemd where it is the init and keeps the cgroups, else cgroupfs.
    Auto,
    Cgroupfs,
    Systemd,
}

impl TryFrom<String> for CgroupDriver {
    type Error = String;

    fn try_from(text: String) -> Result<CgroupDriver, String> {
        match text.as_str() {
            "auto" => Ok(CgroupDriver::Auto),
            "cgroupfs" => Ok(CgroupDriver::Cgroupfs),
            "systemd" => Ok(CgroupDriver::Systemd),
            _ => Err(format!("{text:?} is none of auto, cgroupfs, systemd")),
        }
    }
}

/// A cgroup's path from the hierarchy's root.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct CgroupPath(pub String);

impl TryFrom<String> for CgroupPath {
    type Error = String;

    fn try_from(text: String) -> Result<CgroupPath, String> {
        let part = |part: &str| !part.is_empty() && part != "." && part != ".." && !part.contains(['\0', '\n']);
        match text.strip_prefix('/').is_some_and(|rest| rest.split('/').all(part)) {
            true => Ok(CgroupPath(text)),
            false => Err(format!(
                "{text:?} is not a cgroup's absolute path such as /system.slice/shims"
            )),
        }
    }
}

/// An image's name; kept in its full form.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub struct ImageName(pub String);

impl TryFrom<String> for ImageName {
    type Error = String;

    fn try_from(text: String) -> Result<ImageName, String> {
        let parsed = Reference::parse(&text, "image");
        parsed
            .map(|full| ImageName(full.to_string()))
            .map_err(|e| e.to_string().trim_start_matches("image: ").to_owned())
    }
}

/// The seccomp profile of a container that asks for none.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Seccomp(pub Profile);

impl TryFrom<String> for Seccomp {
    type Error = String;

    fn try_from(text: String) -> Result<Seccomp, String> {
        match text.as_str() {
            "RuntimeDefault" => Ok(Seccomp(Profile::RuntimeDefault)),
            "Unconfined" => Ok(Seccomp(Profile::Unconfined)),
            path if Path::new(path).is_absolute() => Ok(Seccomp(Profile::Localhost { reference: text })),
            _ => Err(format!(
                "{text:?} is none of RuntimeDefault, Unconfined, an absolute path of a profile"
            )),
        }
    }
}

/// The names of getrlimit(2), in lower case and without `RLIMIT_`.
pub const RLIMITS: [&str; 16] = [
    "as",
    "core",
    "cpu",
    "data",
    "fsize",
    "locks",
    "memlock",
    "msgqueue",
    "nice",
    "nofile",
    "nproc",
    "rss",
    "rtprio",
    "rttime",
    "sigpending",
    "stack",
];

/// A limit of getrlimit(2): `N`, `SOFT:HARD`; a number may be `unlimited`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Text")]
pub struct Rlimit {
    pub soft: u64,
    pub hard: u64,
}

/// A number without quotes is a number to YAML.
#[derive(Deserialize)]
#[serde(untagged)]
enum Text {
    Number(u64),
    Words(String),
}

impl TryFrom<Text> for Rlimit {
    type Error = String;

    fn try_from(text: Text) -> Result<Rlimit, String> {
        let text = match text {
            Text::Number(n) => return Ok(Rlimit { soft: n, hard: n }),
            Text::Words(text) => text,
        };
        let number = |text: &str| match text {
            "unlimited" => Ok(u64::MAX),
            text => text
                .parse::<u64>()
                .map_err(|_| format!("{text:?} is neither a number nor unlimited")),
        };
        let (soft, hard) = text.split_once(':').unwrap_or((&text, &text));
        let (soft, hard) = (number(soft.trim())?, number(hard.trim())?);
        match soft <= hard {
            true => Ok(Rlimit { soft, hard }),
            false => Err(format!("{text:?}: the soft limit is above the hard one")),
        }
    }
}

/// By name, as in [`RLIMITS`].
pub type Rlimits = BTreeMap<String, Rlimit>;

/// What the OOM killer adds to a process's badness (proc_pid_oom_score_adj(5)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "i64")]
pub struct OomScore(pub i32);

impl TryFrom<i64> for OomScore {
    type Error = String;

    fn try_from(score: i64) -> Result<OomScore, String> {
        let score = i32::try_from(score).ok().filter(|score| (-1000..=1000).contains(score));
        score
            .map(OomScore)
            .ok_or_else(|| "must be from -1000 to 1000".to_owned())
    }
}

/// Bytes of a log entry at most. The output's pipe holds 64 KiB, and a line waits there for its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "i64")]
pub struct LineBytes(pub u32);

impl TryFrom<i64> for LineBytes {
    type Error = String;

    fn try_from(bytes: i64) -> Result<LineBytes, String> {
        let bytes = u32::try_from(bytes).ok().filter(|bytes| (256..=32_768).contains(bytes));
        bytes
            .map(LineBytes)
            .ok_or_else(|| "must be from 256 to 32768".to_owned())
    }
}

/// A time in whole seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Seconds(pub NonZeroU64);

impl Seconds {
    pub fn duration(self) -> std::time::Duration {
        std::time::Duration::from_secs(self.0.get())
    }
}

/// A grace below a minute would take content away under an import that has not written its record yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "u64")]
pub struct Grace(pub u64);

impl TryFrom<u64> for Grace {
    type Error = String;

    fn try_from(seconds: u64) -> Result<Grace, String> {
        match seconds >= 60 {
            true => Ok(Grace(seconds)),
            false => Err("must be 60 or more".to_owned()),
        }
    }
}

/// A part of a whole, 1 to 100.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "u8")]
pub struct Percent(pub u8);

impl TryFrom<u8> for Percent {
    type Error = String;

    fn try_from(percent: u8) -> Result<Percent, String> {
        match (1..=100).contains(&percent) {
            true => Ok(Percent(percent)),
            false => Err("must be from 1 to 100".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        assert_eq!("127.0.0.1:1".parse(), Ok(Address::Tcp(([127, 0, 0, 1], 1).into())));
        assert_eq!("unix:///a".parse(), Ok(Address::Unix("/a".into())));
        assert!("[::1]:1".parse::<Address>().is_ok());
        for (bad, why) in [
            ("0.0.0.0:1", "loopback"),
            ("unix://a", "absolute"),
            (":9180", "such as"),
            ("x", "such as"),
        ] {
            let error = bad.parse::<Address>().unwrap_err();
            assert!(error.contains(why) && error.contains(bad), "{error}");
        }
    }

    #[test]
    fn a_lone_level_is_for_our_own_lines() {
        let debug = own_lines(LevelFilter::DEBUG);
        assert!(debug.starts_with("warn,") && debug.contains(",cri=debug"), "{debug}");
        assert!(own_lines(LevelFilter::OFF).starts_with("off,"));
        for bad in ["loud", "cri=loud,"] {
            let error = bad.parse::<LogLevel>().unwrap_err();
            assert!(error.contains(bad), "{error}");
        }
    }

    #[test]
    fn limits() {
        let read = |text: &str| serde_yaml::from_str::<Rlimit>(text).map_err(|e| e.to_string());
        assert_eq!(read("5"), Ok(Rlimit { soft: 5, hard: 5 }));
        assert_eq!(read("1024:2048"), Ok(Rlimit { soft: 1024, hard: 2048 }));
        let unlimited = Rlimit {
            soft: 0,
            hard: u64::MAX,
        };
        assert_eq!(read("'0:unlimited'"), Ok(unlimited));
        assert!(read("2:1").unwrap_err().contains("above the hard"));
        assert!(read("x").unwrap_err().contains("unlimited"));
        assert!(read("-1").is_err() && read("[1]").is_err());
    }

    #[test]
    fn cgroup_paths() {
        for good in ["/a", "/system.slice/b"] {
            assert!(CgroupPath::try_from(good.to_owned()).is_ok(), "{good}");
        }
        for bad in ["", "/", "a", "/a/", "/a//b", "/a/../b", "/."] {
            assert!(CgroupPath::try_from(bad.to_owned()).is_err(), "{bad}");
        }
    }
}
