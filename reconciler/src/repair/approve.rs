//! Which steps may be taken: by their risk, by name, by an approved plan.

use std::collections::BTreeSet;

use sha2::{Digest, Sha256};

use super::{Ask, Report, keys};
use crate::engine::plan::Planned;
use crate::engine::stage::Risk;

/// What a run may do.
pub struct Permit {
    force: bool,
    objects: Vec<String>,
    /// Keys of the approved steps.
    approved: Option<BTreeSet<String>>,
}

impl Permit {
    pub fn new(ask: &Ask) -> Permit {
        Permit {
            force: ask.force,
            objects: ask.objects.clone(),
            approved: ask.plan.as_ref().map(|plan| keys(&plan.done)),
        }
    }

    /// By its risk alone.
    pub fn risks(&self, step: &Planned) -> bool {
        let named = |object: &String| !object.is_empty() && (step.uid.starts_with(object) || step.name == *object);
        match step.risk {
            Risk::A | Risk::B => true,
            Risk::C => self.force || self.objects.iter().any(named) || self.approved(step).unwrap_or(false),
            Risk::R => false,
        }
    }

    fn approved(&self, step: &Planned) -> Option<bool> {
        self.approved.as_ref().map(|keys| keys.contains(&step.key()))
    }

    pub fn allows(&self, step: &Planned) -> bool {
        self.risks(step) && self.approved(step).unwrap_or(true)
    }
}

/// Why a step is left to a person.
pub fn withheld(step: &Planned) -> String {
    let how = match step.risk {
        Risk::A | Risk::B => "it is not in the approved plan".to_owned(),
        Risk::C => format!("to take it: reconcile --once --object {}", step.uid),
        Risk::R => "nothing is done about it".to_owned(),
    };
    format!("{step}; {how}")
}

/// The hash of a plan's steps, 64 hex digits: of what is done to what, in order, not of the proofs.
pub fn hash(steps: &[Planned]) -> String {
    let mut hasher = Sha256::new();
    for step in steps {
        hasher.update(step.key());
        hasher.update(b"\n");
    }
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Why an approved plan cannot be run: it was edited, or the node has moved on since.
pub fn differing(approved: &Report, now: &Report) -> Vec<String> {
    if approved.hash != hash(&approved.done) {
        return vec!["the plan's hash is not that of its steps: make it anew with --once --dry-run -o json".to_owned()];
    }
    let (old, new) = (keys(&approved.done), keys(&now.done));
    let mut lines = Vec::new();
    for step in approved.done.iter().filter(|step| !new.contains(&step.key())) {
        lines.push(format!("the node has moved on, this step is not due any more: {step}"));
    }
    for step in now.done.iter().filter(|step| !old.contains(&step.key())) {
        lines.push(format!("the node has moved on, this step is not in the plan: {step}"));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::plan::Action;

    fn step(uid: &str, risk: Risk) -> Planned {
        Planned {
            kind: "PodSandbox".into(),
            uid: uid.into(),
            name: format!("{uid}-name"),
            stage: "netns".into(),
            action: Action::Remake,
            reason: "Gone".into(),
            message: "process 7 has it".into(),
            risk,
            undo: String::new(),
        }
    }

    fn plan(steps: Vec<Planned>) -> Report {
        Report {
            hash: hash(&steps),
            done: steps,
            ..Report::default()
        }
    }

    #[test]
    fn a_plan_is_the_same_whatever_its_proofs_say() {
        let mut other = step("a", Risk::B);
        other.message = "process 8 has it".into();
        assert!(differing(&plan(vec![step("a", Risk::B)]), &plan(vec![other])).is_empty());
    }

    #[test]
    fn what_differs_is_named_and_an_edited_plan_is_refused() {
        let (old, now) = (plan(vec![step("a", Risk::A)]), plan(vec![step("b", Risk::A)]));
        let lines = differing(&old, &now);
        assert!(lines[0].contains("a-name") && lines[1].contains("b-name"), "{lines:?}");
        let mut edited = old;
        edited.done.clear();
        assert!(differing(&edited, &now)[0].contains("hash"));
    }

    #[test]
    fn a_dangerous_step_needs_its_name_or_force() {
        let c = step("abcdef", Risk::C);
        let allows = |force, objects: &[&str]| {
            let objects = objects.iter().map(|o| (*o).to_owned()).collect();
            let ask = Ask {
                force,
                objects,
                ..Ask::default()
            };
            Permit::new(&ask).allows(&c)
        };
        assert!(!allows(false, &[]) && !allows(false, &["x", ""]));
        assert!(allows(true, &[]) && allows(false, &["abc"]) && allows(false, &["abcdef-name"]));
        assert!(
            !Permit::new(&Ask {
                force: true,
                ..Ask::default()
            })
            .allows(&step("a", Risk::R))
        );
    }
}
