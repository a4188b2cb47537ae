//! What the doctor adds to a plan and its findings: the host, and of each finding since when, how big, and the command.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use state::container::ContainerKind;
use state::debt::DebtKind;
use state::image::ImageKind;
use state::pod::PodKind;
use state::sandbox::SandboxKind;
use state::{Condition, Kind, Truth};

use super::finding::{Finding, Severity};
use super::{Ask, Permit, Report, host};
use crate::engine::Context;
use crate::engine::pass::Staged;
use crate::engine::plan::{Action, Planned};
use crate::error::Result;

/// What the looks at the host and at sizes may take, each; a file system may hang.
const BOUND: Duration = Duration::from_secs(5);

/// Everything that differs or is wrong, worst first. Reads only.
pub async fn run(cx: &Arc<Context>) -> Result<Report> {
    let report = super::plan(cx, &Permit::new(&Ask::default())).await?;
    let mut findings = Vec::new();
    for step in &report.done {
        findings.push(of_step(cx, step).await);
    }
    let lines = |lines: &[String], severity| -> Vec<Finding> {
        lines.iter().map(|line| Finding::of_line(line, severity)).collect()
    };
    findings.extend(lines(&report.human, Severity::Human));
    findings.extend(lines(&report.failed, Severity::Repairable));
    findings.extend(report.findings);
    let work = cx.clone();
    match bounded(move || host::findings(&work)).await {
        Some(host) => findings.extend(host),
        None => {
            let message = format!("a look at the host did not end within {} s", BOUND.as_secs());
            findings.push(Finding::new("stuck", Severity::Human, "node", message));
        }
    }
    seen(cx, &mut findings);
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    Ok(Report {
        findings,
        ..Report::default()
    })
}

/// A step that is due.
async fn of_step(cx: &Context, step: &Planned) -> Finding {
    let what = match step.message.as_str() {
        "" => step.reason.clone(),
        message => format!("{}: {message}", step.reason),
    };
    let id = if step.kind == DebtKind::KIND { "owed" } else { "drift" };
    let object = format!("{} {}", step.kind, step.name);
    let message = format!("{}: {what}", step.stage);
    let mut finding = Finding::new(id, Severity::Repairable, object, message).repair("reconcile --once");
    finding.risk = step.risk;
    finding.since = since(cx, step);
    if let Some(place) = place(cx, step) {
        let look = bounded(move || (host::modified(&place), host::size(&place))).await;
        (finding.since, finding.size) = look.map_or((None, None), |(since, size)| (since, Some(size)));
    }
    finding
}

async fn bounded<T: Send + 'static>(look: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let look = tokio::task::spawn_blocking(look);
    tokio::time::timeout(BOUND, look).await.ok()?.ok()
}

/// Since when a step is due, as far as the loop has told.
fn since(cx: &Context, step: &Planned) -> Option<i64> {
    fn of<K: Staged>(cx: &Context, step: &Planned) -> Option<i64> {
        let object = cx.store.get::<K>(&step.uid)?;
        let open = |c: &&Condition| c.stage == step.stage && c.status != Truth::True;
        Some(K::conditions(&object.status).iter().find(open)?.since)
    }
    match step.kind.as_str() {
        DebtKind::KIND => Some(cx.store.get::<DebtKind>(&step.uid)?.meta.created),
        SandboxKind::KIND => of::<SandboxKind>(cx, step),
        ContainerKind::KIND => of::<ContainerKind>(cx, step),
        ImageKind::KIND => of::<ImageKind>(cx, step),
        PodKind::KIND => of::<PodKind>(cx, step),
        _ => None,
    }
}

/// The directory that would be swept.
fn place(cx: &Context, step: &Planned) -> Option<PathBuf> {
    let paths = &cx.world.paths;
    let dir = match (step.action, step.kind.as_str()) {
        (Action::Sweep, SandboxKind::KIND) => paths.pod(&step.uid),
        (Action::Sweep, ContainerKind::KIND) => container(cx, &step.uid)?,
        (Action::Sweep, "Directory") => paths.root.join(&step.uid),
        _ => return None,
    };
    cx.world.files.exists(&dir).then_some(dir)
}

/// The directory of a container of which only the uid is known.
pub fn container(cx: &Context, uid: &str) -> Option<PathBuf> {
    let pods = cx.world.files.list(&cx.world.paths.pods()).ok()?;
    let dirs = pods.into_iter().map(|pod| cx.world.paths.container(&pod.name, uid));
    dirs.into_iter().find(|dir| cx.world.files.exists(dir))
}

/// What nothing dates is as old as this process has seen it.
fn seen(cx: &Context, findings: &mut [Finding]) {
    let now = cx.world.clock.now_ns();
    let mut seen = cx.seen.lock().unwrap_or_else(PoisonError::into_inner);
    let mut still = BTreeMap::new();
    for finding in findings {
        // What a message counts may change.
        let what = finding.message.split(':').next().unwrap_or_default();
        let key = format!("{} {} {what}", finding.id, finding.object);
        let first = seen.get(&key).copied().unwrap_or(now);
        finding.since.get_or_insert(first);
        still.insert(key, first);
    }
    *seen = still;
}
