//! What goes wrong between us and a registry. A failure keeps every answer that was given, host by host and credential
//! by credential, so that one line tells the user which of them to look after.

use std::fmt::{self, Display};
use std::time::Duration;

use oci_spec::image::Digest;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What one endpoint answered to one way of asking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// `host[:port]` that was asked.
    pub host: String,
    /// Whose credential was shown (`imagePullSecrets default/regcred`, a file); `None` if nothing was.
    pub source: Option<String>,
    /// `401 Unauthorized: …`, `connection refused`.
    pub said: String,
}

impl Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            Some(source) => write!(f, "{} with {source}: {}", self.host, self.said),
            None => write!(f, "{}: {}", self.host, self.said),
        }
    }
}

/// What goes wrong between us and a registry.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// Every host that answered does not have it.
    #[error("{object} does not exist: {}", listed(.answers))]
    Absent { object: String, answers: Vec<Answer> },
    /// 401 or 403, whatever was shown.
    #[error("{object}: the registry refuses access: {}", listed(.answers))]
    Refused { object: String, answers: Vec<Answer> },
    /// No connection, no sensible status, or one that asks to come again (429, 5xx).
    #[error("{object}: no registry could be reached: {}", listed(.answers))]
    Unreachable { object: String, answers: Vec<Answer> },
    /// Bytes came, but fewer than the floor within the window.
    #[error(
        "{host} sends {digest} too slowly: {done} of {total} bytes so far, fewer than {floor} bytes/s for {} s",
        .window.as_secs()
    )]
    Slow {
        host: String,
        digest: Digest,
        /// Bytes of the blob that are here, those of earlier tries included.
        done: u64,
        total: u64,
        /// Bytes a second.
        floor: u64,
        window: Duration,
    },
    /// The answer is not what the specification or the digest asks for.
    #[error("{object} from {host}: {problem}")]
    Bad {
        host: String,
        object: String,
        problem: String,
    },
    /// Something on this node is in the way: a certificate that cannot be read, no host that may do it.
    #[error("{object}: {problem}")]
    Setup { object: String, problem: String },
}

/// What a caller makes of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    Absent,
    Refused,
    /// Unreachable or slow: worth another try.
    Unavailable,
    /// Damaged or senseless: another try may meet a better copy.
    Bad,
    /// Until somebody changes this node's configuration.
    Setup,
}

impl Error {
    pub fn class(&self) -> Class {
        match self {
            Error::Absent { .. } => Class::Absent,
            Error::Refused { .. } => Class::Refused,
            Error::Unreachable { .. } | Error::Slow { .. } => Class::Unavailable,
            Error::Bad { .. } => Class::Bad,
            Error::Setup { .. } => Class::Setup,
        }
    }

    /// The same, told after what earlier tries met.
    pub(super) fn after(mut self, earlier: &[Answer]) -> Error {
        if let Error::Absent { answers, .. } | Error::Refused { answers, .. } | Error::Unreachable { answers, .. } =
            &mut self
        {
            answers.splice(0..0, earlier.iter().cloned());
        }
        self
    }

    pub(super) fn bad(host: impl Display, object: impl Display, problem: impl Display) -> Error {
        Error::Bad {
            host: host.to_string(),
            object: object.to_string(),
            problem: problem.to_string(),
        }
    }

    pub(super) fn setup(object: impl Display, problem: impl Display) -> Error {
        Error::Setup {
            object: object.to_string(),
            problem: problem.to_string(),
        }
    }
}

fn listed(answers: &[Answer]) -> String {
    let mut all: Vec<String> = Vec::new();
    for text in answers.iter().map(Answer::to_string) {
        if !all.contains(&text) {
            all.push(text);
        }
    }
    all.join("; ")
}

/// Text from a registry, fit for a log line: no control characters, bounded.
pub(super) fn plain(text: &str) -> String {
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    text.trim().chars().take(300).map(clean).collect()
}
