//! Debt: an undo that is still owed, with its original input; retried until it succeeds.

use serde::{Deserialize, Serialize};

use crate::check;
use crate::condition::Condition;
use crate::error::Result;
use crate::resource::{Kind, Meta, Object};

/// `metadata.name` is `<part>/<name in the world>`.
pub type Debt = Object<DebtKind>;

#[derive(Clone, Debug)]
pub struct DebtKind;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DebtSpec {
    /// World part that owes it: `network` or `mounts`.
    pub part: String,
    /// uid of the object that it was owed for.
    pub object: String,
    /// The undo's input, e.g. the attachment.
    #[serde(default)]
    pub input: serde_json::Value,
    /// Why it could not be done at once.
    #[serde(default)]
    pub reason: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DebtStatus {
    pub observed_generation: u64,
    pub conditions: Vec<Condition>,
    pub attempts: u32,
}

impl Kind for DebtKind {
    const KIND: &'static str = "Debt";
    const PLURAL: &'static str = "debts";
    type Spec = DebtSpec;
    type Status = DebtStatus;

    fn validate(_: &Meta, spec: &DebtSpec) -> Result<()> {
        check::text("spec.part", &spec.part)?;
        check::text("spec.object", &spec.object)
    }
}
