//! What was found, for a person: what, since when, how big, and the command that helps.

use serde::{Deserialize, Serialize};

use crate::engine::stage::Risk;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Good to know; nothing is wrong with what runs.
    Note,
    /// The loop or `--once` mends it.
    Repairable,
    /// Only a person can.
    Human,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    /// Of the check, e.g. `shim-old`.
    pub id: String,
    pub severity: Severity,
    /// What it is about: kind and name, or a path.
    pub object: String,
    pub message: String,
    /// ns since the epoch; from the doctor always there: what nothing dates is as old as its process has seen it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<i64>,
    /// Bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    pub risk: Risk,
    /// The exact command; empty where there is none.
    pub repair: String,
}

impl Finding {
    pub fn new(id: &str, severity: Severity, object: impl Into<String>, message: impl Into<String>) -> Finding {
        Finding {
            id: id.to_owned(),
            severity,
            object: object.into(),
            message: message.into(),
            since: None,
            size: None,
            risk: Risk::R,
            repair: String::new(),
        }
    }

    pub fn repair(self, command: impl Into<String>) -> Finding {
        Finding {
            repair: command.into(),
            ..self
        }
    }

    /// A line of a report; the command it ends with, if it names one, is the repair.
    pub fn of_line(line: &str, severity: Severity) -> Finding {
        let (what, repair) = match line.rsplit_once("reconcile --once") {
            Some((what, rest)) => (what.trim_end(), format!("reconcile --once{rest}")),
            None => (line, String::new()),
        };
        let (object, message) = what.split_once(": ").unwrap_or(("node", what));
        let risk = if repair.is_empty() { Risk::R } else { Risk::C };
        Finding {
            risk,
            ..Finding::new("withheld", severity, object, message).repair(repair)
        }
    }
}
