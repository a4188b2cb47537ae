//! Session: a one-shot wish (ExecSync today), in memory only, done at most once.

use serde::{Deserialize, Serialize};

use crate::check;
use crate::error::{Error, Result};
use crate::resource::{Kind, Meta, Object};

pub type Session = Object<SessionKind>;

#[derive(Clone, Debug)]
pub struct SessionKind;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SessionSpec {
    pub container: String,
    pub command: Vec<String>,
    /// Seconds; 0 is no limit.
    #[serde(default)]
    pub timeout_seconds: i64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SessionStatus {
    /// Set by the controller before it acts, so that a session runs at most once.
    pub claimed: bool,
    pub outcome: Option<Outcome>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Outcome {
    Done {
        stdout: Vec<u8>,
        stderr: Vec<u8>,
        exit_code: i32,
    },
    TimedOut,
    /// The container does not run (any more).
    NotRunning(String),
    Failed(String),
}

impl Kind for SessionKind {
    const KIND: &'static str = "Session";
    const PLURAL: &'static str = "sessions";
    const VOLATILE: bool = true;
    type Spec = SessionSpec;
    type Status = SessionStatus;

    fn validate(_: &Meta, spec: &SessionSpec) -> Result<()> {
        if spec.command.is_empty() {
            return Err(Error::invalid("spec.command", "must not be empty"));
        }
        check::text("spec.container", &spec.container)?;
        check::arguments("spec.command", &spec.command)?;
        if spec.timeout_seconds < 0 {
            return Err(Error::invalid("spec.timeoutSeconds", "must not be negative"));
        }
        Ok(())
    }
}
