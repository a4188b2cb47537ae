//! The plan: the steps that a pass would take, as values that can be printed, compared and approved.

use serde::{Deserialize, Serialize};
use state::{Kind, Object};

use crate::engine::stage::{Risk, Why};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    Make,
    Change,
    Remake,
    /// Takes down what the object should not have (any more).
    Undo,
    /// Writes down that the object has ended.
    End,
    /// Takes down something that bears our mark and belongs to no record.
    Sweep,
    /// Erases the record of an object that is wholly gone.
    Erase,
}

/// One step, with its proof and risk class.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Planned {
    pub kind: String,
    pub uid: String,
    pub name: String,
    pub stage: String,
    pub action: Action,
    pub reason: String,
    pub message: String,
    pub risk: Risk,
    /// How to go back.
    #[serde(default)]
    pub undo: String,
}

impl Action {
    /// As it is printed.
    pub fn word(self) -> &'static str {
        match self {
            Action::Make => "make",
            Action::Change => "change",
            Action::Remake => "remake",
            Action::Undo => "undo",
            Action::End => "end",
            Action::Sweep => "sweep",
            Action::Erase => "erase",
        }
    }

    /// How a step of this sort is taken back, for the plan.
    pub fn way_back(self) -> &'static str {
        match self {
            Action::Make | Action::Remake => "goes with its object: delete that",
            Action::Change => "goes with the wish: change that",
            Action::Undo => "none: nothing wants it; create the object anew",
            Action::End => "none: an end is final; a new attempt starts afresh",
            Action::Sweep => "none: nothing knows it",
            Action::Erase => "none",
        }
    }
}

impl Planned {
    pub fn new<K: Kind>(object: &Object<K>, stage: &str, action: Action, why: &Why) -> Planned {
        Planned {
            kind: K::KIND.to_owned(),
            uid: object.meta.uid.clone(),
            name: object.meta.name.clone(),
            stage: stage.to_owned(),
            action,
            reason: why.reason.to_owned(),
            message: why.message.clone(),
            risk: why.risk,
            undo: action.way_back().to_owned(),
        }
    }

    /// What makes a step the same in two plans; not its proof, which may count or name processes.
    pub fn key(&self) -> String {
        let action = self.action.word();
        format!("{} {} {} {action} {:?}", self.kind, self.uid, self.stage, self.risk)
    }

    pub fn undo<K: Kind>(object: &Object<K>, stage: &str) -> Planned {
        let reason = if object.meta.deleted() { "Deleted" } else { "NotWanted" };
        Planned::new(object, stage, Action::Undo, &Why::new(reason, ""))
    }
}

impl std::fmt::Display for Planned {
    /// One line: `PodSandbox 0123abcd (web) netns: make, Absent`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let short: String = self.uid.chars().take(13).collect();
        write!(
            f,
            "{} {short} ({}) {}: {}",
            self.kind,
            self.name,
            self.stage,
            self.action.word()
        )?;
        write!(f, ", {} [{:?}]", self.reason, self.risk)?;
        if !self.message.is_empty() {
            write!(f, " {}", self.message)?;
        }
        Ok(())
    }
}
