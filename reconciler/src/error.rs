//! Errors of the loop and of the world, with what a pass does about each.

use std::path::PathBuf;

/// What a failure means for the object that it happened to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Worth another try after a back-off.
    Transient,
    /// Only a new wish can help.
    Permanent,
    /// The thing is gone and cannot be had again.
    Lost,
}

/// What can go wrong between a wish and the node.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{op} {path}: {source}")]
    Io {
        op: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    /// The wish itself cannot be met; the text names the field.
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    Network(#[from] crate::world::linux::network::Error),
    #[error("{op} of {id}: {problem}")]
    Shim {
        op: &'static str,
        id: String,
        problem: String,
        class: Class,
    },
    #[error("image {image}: {problem}")]
    Image {
        image: String,
        problem: String,
        class: Class,
    },
    #[error(transparent)]
    State(#[from] state::Error),
    /// A step took longer than its bound.
    #[error("{op} of {object} did not end within {seconds} s")]
    Stuck {
        op: &'static str,
        object: String,
        seconds: u64,
    },
    /// Nothing failed, but the step cannot be finished yet.
    #[error("{0}")]
    Pending(String),
    #[error("{0}")]
    Lost(String),
    #[error("{op}: a background task ended early: {source}")]
    Task {
        op: &'static str,
        source: tokio::task::JoinError,
    },
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub fn io(op: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.into();
        move |source| Error::Io { op, path, source }
    }

    /// The same for errors of `nix`.
    pub fn sys(op: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(nix::Error) -> Error {
        let path = path.into();
        move |source| Error::Io {
            op,
            path,
            source: source.into(),
        }
    }

    pub fn class(&self) -> Class {
        match self {
            Error::Refused(_) => Class::Permanent,
            // Whoever waits is told at once; freeing space is another wish's work.
            Error::Io { source, .. } if source.raw_os_error() == Some(libc::ENOSPC) => Class::Permanent,
            Error::Network(e) => match e.class() {
                crate::world::linux::network::Class::Transient => Class::Transient,
                crate::world::linux::network::Class::Permanent => Class::Permanent,
            },
            Error::Shim { class, .. } | Error::Image { class, .. } => *class,
            Error::State(state::Error::Invalid { .. }) => Class::Permanent,
            Error::Lost(_) => Class::Lost,
            Error::Io { .. } | Error::State(_) | Error::Stuck { .. } | Error::Pending(_) | Error::Task { .. } => {
                Class::Transient
            }
        }
    }

    /// One CamelCase word for a condition.
    pub fn reason(&self) -> &'static str {
        match self {
            Error::Io { source, .. } if source.raw_os_error() == Some(libc::ENOSPC) => "NoSpace",
            Error::Io { .. } => "SystemError",
            Error::Refused(_) => "Invalid",
            Error::Network(_) => "NetworkError",
            Error::Shim { .. } => "ShimError",
            Error::Image { .. } => "ImageError",
            Error::State(_) => "StoreError",
            Error::Stuck { .. } => "Stuck",
            Error::Pending(_) => "Pending",
            Error::Lost(_) => "Lost",
            Error::Task { .. } => "InternalError",
        }
    }
}
