//! Errors of the record store and of validation.

/// What can go wrong with a record.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A wish is malformed; `field` is a path such as `spec.containers[0].image`.
    #[error("{field}: {problem}")]
    Invalid { field: String, problem: String },
    #[error("{kind} {name}: no such record")]
    NotFound { kind: &'static str, name: String },
    /// An id prefix matches more than one record.
    #[error("{kind} {prefix}: the prefix is ambiguous, give more characters of the id")]
    Ambiguous { kind: &'static str, prefix: String },
    /// The name belongs to a record whose uid was already given to a caller.
    #[error("{kind} {name} already exists with id {uid}")]
    AlreadyExists {
        kind: &'static str,
        name: String,
        uid: String,
    },
    /// The record (or its owner) is being deleted or stopped, so it takes no new wish.
    #[error("{kind} {name}: {problem}")]
    Conflict {
        kind: &'static str,
        name: String,
        problem: String,
    },
    /// The wait ended before the predicate held.
    #[error("{kind} {name}: deadline exceeded while waiting")]
    Deadline { kind: &'static str, name: String },
    /// The store's files cannot be used; nothing was changed.
    #[error("store {path}: {problem}")]
    Storage { path: String, problem: String },
    /// The disk is full; removals still work, creations do not.
    #[error("store {path}: no space left, free some and retry: {problem}")]
    Full { path: String, problem: String },
    /// The record was written by a newer version of this program.
    #[error("store {path}: format {found} is newer than {known}; start the newer version again")]
    NewerFormat { path: String, found: u32, known: u32 },
    #[error("the store is shutting down")]
    Closed,
    /// Nobody reads [`crate::Store::questions`], or the reader has ended.
    #[error("usage is not sampled: the loop that looks at the node does not run")]
    Unanswered,
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// The same failure of the store for another caller.
    pub(crate) fn repeat(&self) -> Self {
        match self {
            Error::Storage { path, problem } => Error::Storage {
                path: path.clone(),
                problem: problem.clone(),
            },
            Error::Full { path, problem } => Error::Full {
                path: path.clone(),
                problem: problem.clone(),
            },
            _ => Error::Closed,
        }
    }

    /// An [`Error::Invalid`] for `field`.
    pub fn invalid(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Error::Invalid {
            field: field.into(),
            problem: problem.into(),
        }
    }
}
