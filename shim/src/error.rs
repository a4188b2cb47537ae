//! The crate's one error type.

use std::io;
use std::path::{Path, PathBuf};

/// Result of everything here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A gRPC status code, as far as shims use them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Code {
    /// A field of the request is wrong; the message names it.
    InvalidArgument = 3,
    /// The deadline of the call passed.
    DeadlineExceeded = 4,
    /// No such process in this shim.
    NotFound = 5,
    /// A process with this id exists.
    AlreadyExists = 6,
    /// A bound was reached.
    ResourceExhausted = 8,
    /// The process is not in a state for this.
    FailedPrecondition = 9,
    /// The container did not start; its run record says so too (StartError).
    StartFailed = 10,
    /// The method is unknown to this (older) shim.
    Unimplemented = 12,
    /// Anything else.
    Internal = 13,
}

impl From<i32> for Code {
    fn from(code: i32) -> Self {
        use Code::*;
        [
            InvalidArgument,
            DeadlineExceeded,
            NotFound,
            AlreadyExists,
            ResourceExhausted,
            FailedPrecondition,
            StartFailed,
            Unimplemented,
        ]
        .into_iter()
        .find(|known| *known as i32 == code)
        .unwrap_or(Internal)
    }
}

/// What went wrong, where, with what.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file, socket or directory refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was being done, as in "cannot {action} PATH".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The shim program ended instead of serving.
    #[error("shim for {} did not start: {reason}", dir.display())]
    Spawn {
        /// The shim's directory.
        dir: PathBuf,
        /// How it ended, with the end of its log.
        reason: String,
    },
    /// Namespaces could not be made.
    #[error("could not make namespaces: {reason}; see user.max_user_namespaces and its like in namespaces(7)")]
    Namespaces {
        /// The child's words.
        reason: String,
    },
    /// The shim refused the call.
    #[error("shim {method}: {message}")]
    Refused {
        /// The method called.
        method: &'static str,
        /// Class of the refusal.
        code: Code,
        /// The shim's words.
        message: String,
    },
    /// The connection ended before the answer: the shim died. What was asked may or may not have been done.
    #[error("shim {method}: connection lost before the answer")]
    Disconnected {
        /// The method called.
        method: &'static str,
    },
    /// The shim did not answer in time.
    #[error("shim {method}: no answer within {after_ms} ms")]
    Deadline {
        /// The method called.
        method: &'static str,
        /// How long was waited.
        after_ms: u128,
    },
    /// The other side broke the protocol.
    #[error("shim protocol: {0}")]
    Protocol(String),
}

impl Error {
    /// The code of a refusal.
    pub fn code(&self) -> Option<Code> {
        match self {
            Error::Refused { code, .. } => Some(*code),
            Error::Deadline { .. } => Some(Code::DeadlineExceeded),
            _ => None,
        }
    }

    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
        let path = path.to_owned();
        move |source| Error::Io { action, path, source }
    }
}
