//! What goes wrong between an image's bytes and a mounted root file system.

use std::fmt::Display;
use std::io;

use nix::errno::Errno;
use oci_spec::image::Digest;

/// What goes wrong between an image's bytes and a mounted root file system.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{action} {object}: {cause}")]
    Io {
        action: &'static str,
        object: String,
        cause: io::Error,
    },
    /// The bytes are not what the specification asks for; they will not get better.
    #[error("{object}: {problem}")]
    Invalid { object: String, problem: String },
    #[error("{0} is not in the content store; pull or import the image")]
    NotFound(String),
    #[error("{object}: content has digest {got}, expected {want}; the source is damaged, fetch it again")]
    Digest { object: String, want: String, got: String },
    #[error("{object} is larger than the {limit} bytes allowed")]
    TooBig { object: String, limit: u64 },
    #[error("the image has no manifest for {wanted}; it offers {offered}")]
    NoPlatform { wanted: String, offered: String },
    #[error("{target} is busy{}", holder_text(.holder))]
    Busy { target: String, holder: Option<i32> },
}

fn holder_text(holder: &Option<i32>) -> String {
    match holder {
        Some(pid) => format!(": process {pid} holds it open"),
        None => ": a process or mount holds it".into(),
    }
}

/// Whether trying again may help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Not before the image or the request changes.
    Permanent,
    /// Perhaps: a full disk, a busy mount, bytes to fetch again.
    Transient,
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub fn class(&self) -> Class {
        match self {
            Error::Invalid { .. } | Error::TooBig { .. } | Error::NoPlatform { .. } => Class::Permanent,
            Error::Io { cause, .. } => match cause.raw_os_error().map(Errno::from_raw) {
                Some(Errno::ENAMETOOLONG | Errno::EFBIG | Errno::EMLINK | Errno::ELOOP) => Class::Permanent,
                _ => Class::Transient,
            },
            Error::NotFound(_) | Error::Digest { .. } | Error::Busy { .. } => Class::Transient,
        }
    }

    /// Whether a disk or quota is full.
    pub fn is_full(&self) -> bool {
        let full = |e: &io::Error| matches!(e.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT));
        matches!(self, Error::Io { cause, .. } if full(cause))
    }

    /// Whether what lies there cannot be read, however often it is tried: a bad sector, damage of the file system.
    pub fn is_damage(&self) -> bool {
        let damage = |e: &io::Error| matches!(e.raw_os_error(), Some(libc::EIO | libc::EUCLEAN | libc::EBADMSG));
        matches!(self, Error::Io { cause, .. } if damage(cause))
    }

    /// For `map_err`: what was being done, to what.
    pub(crate) fn io<E: Into<io::Error>>(action: &'static str, object: impl Display) -> impl FnOnce(E) -> Error {
        move |cause| Error::Io {
            action,
            object: object.to_string(),
            cause: cause.into(),
        }
    }

    /// Says which layer a complaint about its bytes belongs to.
    pub(crate) fn of_layer(self, digest: &Digest) -> Error {
        self.of_member(&format!("layer {digest}"))
    }

    pub(crate) fn of_member(self, member: &str) -> Error {
        let of = |object: String| format!("{member}: {object}");
        match self {
            Error::Io { action, object, cause } => Error::Io {
                action,
                object: of(object),
                cause,
            },
            Error::Invalid { object, problem } => Error::Invalid {
                object: of(object),
                problem,
            },
            Error::Digest { object, want, got } => Error::Digest {
                object: of(object),
                want,
                got,
            },
            Error::TooBig { object, limit } => Error::TooBig {
                object: of(object),
                limit,
            },
            other => other,
        }
    }

    pub(crate) fn invalid(object: impl Display, problem: impl Display) -> Error {
        Error::Invalid {
            object: object.to_string(),
            problem: problem.to_string(),
        }
    }
}
