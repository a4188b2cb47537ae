//! What can go wrong with a network, and whether to try again.

use std::io;
use std::path::PathBuf;

use super::Protocol;

/// Whether an error may go away by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Try again, with back-off.
    Transient,
    /// Only another wish helps.
    Permanent,
}

pub type Result<T> = std::result::Result<T, Error>;

/// Errors of the network; each names the object and, where there is one, the way out.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("network not ready: NetworkPluginNotReady: {0}")]
    NotReady(String),
    #[error("could not {doing} {object}: {source}")]
    System {
        doing: &'static str,
        object: String,
        source: io::Error,
    },
    #[error("netlink: could not {doing} {object}: {source}")]
    Netlink {
        doing: &'static str,
        object: String,
        source: rtnetlink::Error,
    },
    #[error("link {name} exists without our mark: another program made it; rename or remove it")]
    ForeignLink { name: String },
    #[error("host port {port}/{protocol} on {address} is taken by {holder}")]
    PortTaken {
        port: u16,
        protocol: &'static str,
        address: String,
        holder: String,
    },
    #[error("no address is left in {0}; remove pods, or configure a bigger pod CIDR")]
    NoAddress(String),
    #[error("pod CIDR: {0}")]
    PodCidr(String),
    #[error("annotation {key}: {why}")]
    Annotation { key: String, why: String },
    #[error("attachment {path}: {why}")]
    Attachment { path: PathBuf, why: String },
    #[error("attachment {path}: its version {version} is newer than this program, which knows 1; upgrade it")]
    NewerAttachment { path: PathBuf, version: u64 },
    #[error("CNI plugin {plugin}: not found in {}", list(searched))]
    PluginAbsent { plugin: String, searched: Vec<PathBuf> },
    #[error("CNI plugin {plugin} {verb} failed (code {code}): {message}")]
    PluginFailed {
        plugin: String,
        verb: &'static str,
        code: u64,
        message: String,
    },
    #[error("CNI plugin {plugin} {verb} did not end within {seconds} s and was killed")]
    PluginTimeout {
        plugin: String,
        verb: &'static str,
        seconds: u64,
    },
    #[error("CNI plugin {plugin} {verb}: {why}")]
    PluginOutput {
        plugin: String,
        verb: &'static str,
        why: String,
    },
    #[error("CNI network {network} gave no address on {ifname}")]
    NoResultAddress { network: String, ifname: String },
    /// Every plugin was tried; these failed.
    #[error("CNI DEL of {network}: {failures}")]
    Delete { network: String, failures: String },
    #[error("the sandbox's network namespace {0} is gone")]
    NetnsGone(PathBuf),
}

impl Error {
    pub fn class(&self) -> Class {
        match self {
            // Told at once: whoever waits may choose another port, or come again when the plugin is there.
            Error::PortTaken { .. } | Error::NotReady(_) => Class::Permanent,
            Error::Annotation { .. } | Error::PodCidr(_) | Error::NewerAttachment { .. } => Class::Permanent,
            _ => Class::Transient,
        }
    }
}

fn list(paths: &[PathBuf]) -> String {
    let paths: Vec<String> = paths.iter().map(|p| p.display().to_string()).collect();
    paths.join(", ")
}

pub(super) fn system(doing: &'static str, object: impl ToString) -> impl FnOnce(io::Error) -> Error {
    let object = object.to_string();
    move |source| Error::System { doing, object, source }
}

pub(super) fn netlink(doing: &'static str, object: impl ToString) -> impl FnOnce(rtnetlink::Error) -> Error {
    let object = object.to_string();
    move |source| Error::Netlink { doing, object, source }
}

impl Protocol {
    /// Lower case, as CNI has it.
    pub fn name(self) -> &'static str {
        match self {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
            Protocol::Sctp => "sctp",
        }
    }

    /// The IP protocol number.
    pub fn number(self) -> u8 {
        match self {
            Protocol::Tcp => 6,
            Protocol::Udp => 17,
            Protocol::Sctp => 132,
        }
    }
}
