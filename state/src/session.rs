//! Session: a one-shot wish (ExecSync, CheckpointContainer), in memory only, done at most once.

use serde::{Deserialize, Serialize};

use crate::check;
use crate::error::{Error, Result};
use crate::resource::{Kind, Meta, Object};

pub type Session = Object<SessionKind>;

#[derive(Clone, Debug)]
pub struct SessionKind;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SessionSpec {
    pub container: String,
    pub wish: Wish,
    /// Seconds; 0 is no limit.
    #[serde(default)]
    pub timeout_seconds: i64,
}

/// What shall be done to the container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Wish {
    /// A program with its arguments, run inside.
    Exec(Vec<String>),
    /// Its state, written to the archive with this absolute path (CRI `CheckpointContainerRequest.location`).
    Checkpoint(String),
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
    /// The archive is complete, under its name.
    Saved,
    /// This node cannot do it; what it lacks.
    Unsupported(String),
    /// The archive cannot be written there: what is wrong with its path.
    Misplaced(String),
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
        check::text("spec.container", &spec.container)?;
        match &spec.wish {
            Wish::Exec(command) if command.is_empty() => {
                return Err(Error::invalid("spec.wish.exec", "must not be empty"));
            }
            Wish::Exec(command) => check::arguments("spec.wish.exec", command)?,
            Wish::Checkpoint(archive) => check::absolute("spec.wish.checkpoint", archive)?,
        }
        if spec.timeout_seconds < 0 {
            return Err(Error::invalid("spec.timeoutSeconds", "must not be negative"));
        }
        Ok(())
    }
}
