//! What a call can fail with, and the one table from failure to gRPC code.

use std::time::Duration;

use state::Condition;
use state::pull::PullFailure;
use tonic::{Code, Status};

/// Why a call failed. Ids are kept out of the texts where a name says as much: they end up in pod events.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A field of the request is wrong; `field` is its path in the proto's spelling, e.g. `config.metadata.name`.
    #[error("{field}: {problem}")]
    Invalid { field: String, problem: String },
    #[error("no such {what}: {id}")]
    NotFound { what: &'static str, id: String },
    /// The object is not in the state that the call needs.
    #[error("{what}: {problem}")]
    Precondition { what: String, problem: String },
    /// The wish was taken back while the call waited for it.
    #[error("{what}: {problem}")]
    Aborted { what: String, problem: String },
    /// A stage gave up: only a changed wish can help.
    #[error("{what}: {stage}: {message}")]
    Failed {
        what: String,
        stage: String,
        reason: String,
        message: String,
    },
    /// The call's time is over; the work goes on (a repeated create joins it).
    #[error("{what}: {stage} not done after {}: {message}", seconds(*.age))]
    Deadline {
        what: String,
        stage: String,
        age: Duration,
        message: String,
    },
    #[error("{0}")]
    Unavailable(String),
    /// A bound was reached.
    #[error("{0}")]
    Busy(String),
    #[error("{what}: the answer has {size} bytes and the limit is {limit}: {advice}")]
    TooLarge {
        what: &'static str,
        size: usize,
        limit: usize,
        advice: &'static str,
    },
    #[error("{rpc}: not supported here: {why}")]
    Unimplemented { rpc: &'static str, why: String },
    /// A pull ended without an image.
    #[error("{}image {image}: {message}", crate::pull::prefix(*.why))]
    Pull {
        image: String,
        why: PullFailure,
        message: String,
    },
    #[error("{what}: timed out after {}", seconds(*.limit))]
    TimedOut { what: String, limit: Duration },
    #[error(transparent)]
    Record(#[from] state::Error),
    #[error("cannot encode a record as JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The new configuration does not hold.
    #[error("{0}")]
    Reload(String),
    #[error("once: {0}")]
    Once(String),
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Reasons of permanently false conditions that have a code of their own; any other is INTERNAL.
const REASONS: [(&str, Code); 11] = [
    ("Invalid", Code::InvalidArgument),
    ("InvalidSpec", Code::InvalidArgument),
    ("NotFound", Code::NotFound),
    ("ImageNotFound", Code::NotFound),
    ("PermissionDenied", Code::PermissionDenied),
    ("Unavailable", Code::Unavailable),
    ("NoSpace", Code::ResourceExhausted),
    ("Exhausted", Code::ResourceExhausted),
    ("Precondition", Code::FailedPrecondition),
    ("Stopped", Code::FailedPrecondition),
    ("Unsupported", Code::Unimplemented),
];

impl Error {
    pub(crate) fn invalid(field: impl Into<String>, problem: impl Into<String>) -> Error {
        Error::Invalid {
            field: field.into(),
            problem: problem.into(),
        }
    }

    pub(crate) fn precondition(what: impl Into<String>, problem: impl Into<String>) -> Error {
        Error::Precondition {
            what: what.into(),
            problem: problem.into(),
        }
    }

    /// The error of a condition that is false for good.
    pub(crate) fn failed(what: String, condition: &Condition) -> Error {
        Error::Failed {
            what,
            stage: condition.stage.clone(),
            reason: condition.reason.clone(),
            message: condition.message.clone(),
        }
    }

    /// The outcome's code in the CRI.
    pub fn code(&self) -> Code {
        use state::Error as Record;
        match self {
            Error::Invalid { .. } | Error::Reload(_) => Code::InvalidArgument,
            Error::NotFound { .. } => Code::NotFound,
            Error::Precondition { .. } => Code::FailedPrecondition,
            Error::Aborted { .. } => Code::Aborted,
            Error::Failed { reason, .. } => {
                let known = REASONS.iter().find(|(name, _)| name == reason);
                known.map_or(Code::Internal, |(_, code)| *code)
            }
            Error::Pull { why, .. } => match why {
                PullFailure::NotFound => Code::NotFound,
                PullFailure::PermissionDenied => Code::PermissionDenied,
                PullFailure::RegistryUnavailable => Code::Unknown,
                PullFailure::NoSpace => Code::ResourceExhausted,
                PullFailure::Invalid | PullFailure::Failed => Code::Internal,
            },
            Error::Deadline { .. } | Error::TimedOut { .. } => Code::DeadlineExceeded,
            Error::Unavailable(_) => Code::Unavailable,
            Error::TooLarge { .. } | Error::Busy(_) => Code::ResourceExhausted,
            Error::Unimplemented { .. } => Code::Unimplemented,
            Error::Json(_) | Error::Once(_) => Code::Internal,
            Error::Record(Record::Invalid { .. } | Record::Ambiguous { .. }) => Code::InvalidArgument,
            Error::Record(Record::NotFound { .. }) => Code::NotFound,
            Error::Record(Record::AlreadyExists { .. }) => Code::AlreadyExists,
            Error::Record(Record::Conflict { .. }) => Code::FailedPrecondition,
            Error::Record(Record::Deadline { .. }) => Code::DeadlineExceeded,
            Error::Record(Record::Full { .. }) => Code::ResourceExhausted,
            Error::Record(Record::Closed | Record::Unanswered) => Code::Unavailable,
            Error::Record(_) => Code::Internal,
        }
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Status {
        Status::new(error.code(), error.to_string())
    }
}

/// `41 s` from ten seconds on, `1.3 s` below.
fn seconds(age: Duration) -> String {
    if age < Duration::from_secs(10) {
        format!("{:.1} s", age.as_secs_f64())
    } else {
        format!("{} s", age.as_secs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadline_names_stage_age_and_message() {
        let error = Error::Deadline {
            what: "sandbox d/t".into(),
            stage: "network".into(),
            age: Duration::from_millis(41_200),
            message: "waiting for the plugin".into(),
        };
        let status = Status::from(error);
        assert_eq!(status.code(), Code::DeadlineExceeded);
        assert_eq!(
            status.message(),
            "sandbox d/t: network not done after 41 s: waiting for the plugin"
        );
    }

    #[test]
    fn reasons_map_to_codes() {
        for (reason, code) in [
            ("ImageNotFound", Code::NotFound),
            ("NoSpace", Code::ResourceExhausted),
            ("X", Code::Internal),
        ] {
            let error = Error::Failed {
                what: String::new(),
                stage: String::new(),
                reason: reason.into(),
                message: String::new(),
            };
            assert_eq!(error.code(), code, "{reason}");
        }
    }
}
