//! How far a record has come, read from its status: is the wish met, can it still be, and what does it wait for?

use serde_json::Value;

use crate::client::{list, text};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// As wished; for a job also: ended well.
    Met,
    /// Never, unless the wish or something outside changes.
    Failed(String),
    /// Not yet.
    Waiting(String),
}

/// Judges a record by the status that was computed for `generation` or a later one.
pub fn judge(record: &Value, generation: u64) -> Verdict {
    let (spec, status) = (&record["spec"], &record["status"]);
    // It only has to be there.
    if text(&record["kind"]) == "Secret" {
        return Verdict::Met;
    }
    if status["observedGeneration"].as_u64().unwrap_or(0) < generation {
        return Verdict::Waiting(String::new());
    }
    if let Some(why) = permanent(status) {
        return Verdict::Failed(why);
    }
    let waiting = || Verdict::Waiting(waits_for(status));
    let phase = text(&status["phase"]);
    match (text(&record["kind"]), phase) {
        ("Pod", "Succeeded") | ("Image", "Ready") => Verdict::Met,
        ("Pod", "Running") if ready(status) => Verdict::Met,
        ("Pod", _) => match (list(&status["containers"]).iter().find_map(not_startable), phase) {
            (Some(why), _) => Verdict::Failed(why),
            (None, "Failed") => Verdict::Failed(failed_containers(status)),
            (None, _) => waiting(),
        },
        ("PodSandbox", phase) => match (text(&spec["goal"]), phase) {
            ("Stopped", "NotReady") | ("Ready", "Ready") => Verdict::Met,
            ("Ready", "NotReady") => Verdict::Failed(waits_for(status)),
            _ => waiting(),
        },
        ("Container", phase) => match (text(&spec["goal"]), phase) {
            ("Stopped", "Exited") | ("Running", "Running") | ("Created", "Created" | "Running" | "Exited") => {
                Verdict::Met
            }
            ("Running", "Exited") if status["exitCode"] == 0 => Verdict::Met,
            ("Running", "Exited") => Verdict::Failed(ended(status)),
            _ => waiting(),
        },
        ("Image", "Failed") => Verdict::Failed(waits_for(status)),
        _ => waiting(),
    }
}

fn ready(status: &Value) -> bool {
    list(&status["conditions"])
        .iter()
        .any(|c| c["type"] == "Ready" && c["status"] == "True")
}

/// The first condition that only a new generation can change.
fn permanent(status: &Value) -> Option<String> {
    let mut conditions = list(&status["conditions"]).iter();
    // `Ready` only repeats what a stage says.
    let found = conditions.find(|c| c["permanent"] == true && c["status"] == "False" && c["type"] != "Ready");
    found.map(|c| sentence(&c["message"], &c["reason"]))
}

/// The message, or the reason where there is none.
fn sentence(message: &Value, reason: &Value) -> String {
    match text(message) {
        "" => text(reason).to_owned(),
        message => message.to_owned(),
    }
}

/// What the lowest unfinished stage says.
pub fn waits_for(status: &Value) -> String {
    let conditions = list(&status["conditions"]);
    let unfinished = conditions
        .iter()
        .find(|c| c["type"] != "Ready" && c["status"] == "False");
    unfinished
        .map(|c| format!("{}: {}", text(&c["type"]), sentence(&c["message"], &c["reason"])))
        .unwrap_or_default()
}

/// A container of a pod whose process could not begin.
fn not_startable(container: &Value) -> Option<String> {
    let reasons = ["StartError", "ImagePullBackOff"];
    reasons.contains(&text(&container["reason"])).then(|| {
        let message = sentence(&container["message"], &container["reason"]);
        format!("container {} cannot start: {message}", text(&container["name"]))
    })
}

fn failed_containers(status: &Value) -> String {
    let failed = list(&status["containers"])
        .iter()
        .filter(|c| c["exitCode"].as_i64().is_some_and(|code| code != 0));
    let all: Vec<_> = failed
        .map(|c| format!("container {} {}", text(&c["name"]), ended(c)))
        .collect();
    all.join(", ")
}

/// `ended with code 3 (Error: message)`.
pub fn ended(status: &Value) -> String {
    let code = status["exitCode"].as_i64().unwrap_or(255);
    let (reason, message) = (text(&status["reason"]), text(&status["message"]));
    match (reason, message) {
        ("" | "Error" | "Completed", "") => format!("ended with code {code}"),
        (reason, "") => format!("ended with code {code} ({reason})"),
        (reason, message) => format!("ended with code {code} ({reason}: {message})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(phase: &str, conditions: Value, containers: Value) -> Value {
        let status =
            json!({"observedGeneration": 2, "phase": phase, "conditions": conditions, "containers": containers});
        json!({"kind": "Pod", "spec": {}, "status": status})
    }

    #[test]
    fn a_pod_is_met_when_ready_or_succeeded() {
        let ready = json!([{"type": "Ready", "status": "True"}]);
        assert_eq!(judge(&pod("Running", ready.clone(), json!([])), 2), Verdict::Met);
        assert_eq!(
            judge(&pod("Running", ready, json!([])), 3),
            Verdict::Waiting(String::new()),
            "an older status"
        );
        assert_eq!(judge(&pod("Succeeded", json!([]), json!([])), 1), Verdict::Met);
    }

    #[test]
    fn a_pod_that_cannot_start_says_why() {
        let refused = json!([{"type": "children", "status": "False", "permanent": true, "message": "image x: gone"}]);
        assert_eq!(
            judge(&pod("Pending", refused, json!([])), 2),
            Verdict::Failed("image x: gone".into())
        );
        let bad = json!([{"name": "a", "reason": "StartError", "message": "no such file", "exitCode": 128}]);
        let Verdict::Failed(why) = judge(&pod("Pending", json!([]), bad), 2) else {
            panic!()
        };
        assert!(why.contains("container a") && why.contains("no such file"), "{why}");
    }

    #[test]
    fn a_pod_that_waits_says_for_what() {
        let waiting = json!([
            {"type": "record", "status": "True"},
            {"type": "children", "status": "False", "reason": "Waiting", "message": "the sandbox is being made"},
            {"type": "Ready", "status": "False"},
        ]);
        let want = Verdict::Waiting("children: the sandbox is being made".into());
        assert_eq!(judge(&pod("Pending", waiting, json!([])), 2), want);
    }

    #[test]
    fn containers_and_sandboxes_by_their_goal() {
        let of = |kind: &str, goal: &str, phase: &str, code: i32| {
            let status = json!({"observedGeneration": 1, "phase": phase, "exitCode": code, "reason": "Error"});
            judge(&json!({"kind": kind, "spec": {"goal": goal}, "status": status}), 1)
        };
        assert_eq!(of("Container", "Running", "Exited", 0), Verdict::Met);
        assert_eq!(
            of("Container", "Running", "Exited", 3),
            Verdict::Failed("ended with code 3".into())
        );
        assert!(matches!(of("Container", "Running", "Created", 0), Verdict::Waiting(_)));
        assert_eq!(of("PodSandbox", "Stopped", "NotReady", 0), Verdict::Met);
        assert!(matches!(of("PodSandbox", "Ready", "NotReady", 0), Verdict::Failed(_)));
    }
}
