//! Making and comparing conditions.

use state::{Condition, Truth};

pub fn holds(stage: &str) -> Condition {
    Condition {
        stage: stage.to_owned(),
        status: Truth::True,
        reason: String::new(),
        message: String::new(),
        permanent: false,
        since: 0,
    }
}

pub fn fails(stage: &str, reason: &str, message: impl Into<String>, permanent: bool) -> Condition {
    Condition {
        stage: stage.to_owned(),
        status: Truth::False,
        reason: reason.to_owned(),
        message: message.into(),
        permanent,
        since: 0,
    }
}

/// Sets `since`: as before where the truth did not change, else `now` (ns since the epoch).
pub fn keep_since(new: &mut [Condition], old: &[Condition], now: i64) {
    for condition in new {
        let before = old
            .iter()
            .find(|c| c.stage == condition.stage && c.status == condition.status);
        condition.since = before.map_or(now, |c| c.since);
    }
}

/// The conjunction `Ready` in front of `conditions`: true iff `ready`; else the first failure speaks for all.
pub fn with_ready(mut conditions: Vec<Condition>, ready: bool, old: &[Condition], now: i64) -> Vec<Condition> {
    let mut all = match conditions.iter().find(|c| c.status == Truth::False) {
        _ if ready => holds("Ready"),
        Some(first) => fails(
            "Ready",
            &first.reason,
            format!("{}: {}", first.stage, first.message),
            first.permanent,
        ),
        None => fails("Ready", "Stopped", "", false),
    };
    keep_since(std::slice::from_mut(&mut all), old, now);
    conditions.insert(0, all);
    conditions
}
