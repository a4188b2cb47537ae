//! Conditions: one per stage, with a reason, in the manner of Kubernetes.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Truth {
    True,
    False,
    #[default]
    Unknown,
}

/// What one stage found when it last looked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// The stage's name, or `Ready` for their conjunction.
    #[serde(rename = "type")]
    pub stage: String,
    pub status: Truth,
    /// One CamelCase word for machines, empty when `True`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// One sentence for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// `False` for good: only a new generation can change it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub permanent: bool,
    /// Since when `status` holds, ns since the epoch.
    pub since: i64,
}
