//! The node-repair tool: what differs from the records, as a plan; the plan, executed once; what only a person can see
//! to, as findings.
//!
//! ```text
//!   inventory (reads only, every item bounded)   plan: steps with proof, risk, way back
//!     objects: passes that only look       -->     |-- a person approves it by its hash
//!     orphans, debts, stale rules                  v
//!     look, host: findings                       passes until nothing changes, sweep
//! ```
//!
//! A step of risk A or B is taken; one of C only by `--force` or for an object that is named; R is told. Only what
//! bears this root's mark is listed at all, so nothing of another runtime can be touched.
#![doc = include_str!("drift.md")]

mod approve;
mod discard;
mod doctor;
mod finding;
mod host;
mod look;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use serde::{Deserialize, Serialize};
use state::container::ContainerKind;
use state::debt::DebtKind;
use state::image::ImageKind;
use state::pod::PodKind;
use state::sandbox::SandboxKind;
use state::{Kind, Object};

pub use approve::{Permit, hash};
pub use finding::{Finding, Severity};

use crate::engine::controller::Controlled;
use crate::engine::pass::{self, Mode, Passed, Staged};
use crate::engine::plan::{Action, Planned};
use crate::engine::stage::Risk;
use crate::engine::{Context, sweep};
use crate::error::{Class, Error, Result};

/// What one object's inventory may take.
const BOUND: Duration = Duration::from_secs(2);
/// What it may take when it is looked at again, alone: a busy machine is no stuck object.
const SECOND_BOUND: Duration = Duration::from_secs(5);
/// More rounds than any chain of dependencies (pod, sandbox, container, and back) needs.
const ROUNDS: usize = 32;

/// What is asked of the whole node.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Ask {
    /// Look only.
    pub dry_run: bool,
    /// Look only, and also at the host; answer findings.
    pub doctor: bool,
    /// Also take steps of risk C.
    pub force: bool,
    /// Take those of these objects: uid, beginning of a uid, or name.
    pub objects: Vec<String>,
    /// The approved plan: its steps and no others.
    pub plan: Option<Report>,
}

/// What was done, or would be, and what was found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Report {
    /// Over the steps of a plan; what `--plan` compares. Empty in the report of what was done.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub hash: String,
    pub done: Vec<Planned>,
    /// Could not be done now, but may be later.
    pub failed: Vec<String>,
    /// Only a person can help.
    pub human: Vec<String>,
    pub findings: Vec<Finding>,
}

impl Report {
    /// 0 clean, 10 repaired (or to be), 20 needs a human, 30 failed.
    pub fn exit_code(&self) -> u8 {
        let human = !self.human.is_empty() || self.findings.iter().any(|f| f.severity == Severity::Human);
        let repairable = !self.done.is_empty() || self.findings.iter().any(|f| f.severity == Severity::Repairable);
        match (self.failed.is_empty(), human, repairable) {
            (false, _, _) => 30,
            (true, true, _) => 20,
            (true, false, true) => 10,
            (true, false, false) => 0,
        }
    }

    fn merge(&mut self, other: Report) {
        self.done.extend(other.done);
        self.failed = other.failed;
        self.human = other.human;
    }
}

/// Answers what is asked.
pub async fn run(cx: &Arc<Context>, ask: &Ask) -> Result<Report> {
    if ask.doctor {
        return doctor::run(cx).await;
    }
    let permit = Permit::new(ask);
    if ask.dry_run {
        return plan(cx, &permit).await;
    }
    if let Some(approved) = &ask.plan {
        let now = plan(cx, &permit).await?;
        let differing = approve::differing(approved, &now);
        if !differing.is_empty() {
            return Ok(Report {
                human: differing,
                ..Report::default()
            });
        }
    }
    once(cx, &permit).await
}

/// The steps due now, over all objects and orphans, and what was found. Changes nothing.
async fn plan(cx: &Arc<Context>, permit: &Permit) -> Result<Report> {
    let mut report = Report {
        done: discard::due(cx, permit),
        ..Report::default()
    };
    for one in passes(cx, Mode::Plan, permit).await {
        report.done.extend(one.done);
        report.failed.extend(one.failed);
        report.human.extend(one.human);
    }
    report
        .done
        .extend(cx.store.list::<DebtKind>().iter().map(|debt| owed(debt)));
    report.done.extend(stale_rules(cx).await);
    for orphan in sweep::orphans(cx).await? {
        report.done.push(orphan.plan(sweep::judge(cx, &orphan).await));
    }
    let (steps, left): (Vec<_>, Vec<_>) = report.done.drain(..).partition(|step| permit.risks(step));
    report.done = steps;
    report.human.extend(left.iter().map(approve::withheld));
    report.findings = look::findings(cx).await;
    report.hash = hash(&report.done);
    Ok(report)
}

/// Passes until nothing changes, then sweeps.
async fn once(cx: &Arc<Context>, permit: &Permit) -> Result<Report> {
    let mut report = Report::default();
    report.done.extend(discard::run(cx, permit).await?);
    report.done.extend(shared(cx, permit).await?);
    for _ in 0..ROUNDS {
        let mut all = Report::default();
        for one in passes(cx, Mode::Act, permit).await {
            all.done.extend(one.done);
            all.failed.extend(one.failed);
            all.human.extend(one.human);
        }
        for debt in cx.store.list::<DebtKind>() {
            let _turn = cx.passes.take(debt.uid()).await;
            // The loop may have paid it meanwhile.
            let Some(debt) = cx.store.get::<DebtKind>(debt.uid()) else {
                continue;
            };
            match crate::debt::pass(cx, &debt).await {
                Ok(_) if debt.meta.deleted() => {}
                Ok(_) => all.done.push(owed(&debt)),
                Err(e) => all
                    .human
                    .push(format!("owed network teardown of {}: {e}", debt.spec.object)),
            }
        }
        let quiet = all.done.is_empty();
        report.merge(all);
        if quiet {
            break;
        }
    }
    cx.world.network.sweep_node().await?;
    crate::runtime::sweep_shared(&cx.world);
    for orphan in sweep::orphans(cx).await? {
        let step = orphan.plan(sweep::judge(cx, &orphan).await);
        if !permit.allows(&step) {
            report.human.push(approve::withheld(&step));
            continue;
        }
        match sweep::sweep(cx, &orphan).await {
            Ok(()) => report.done.push(step),
            Err(e) => report.failed.push(format!("{orphan:?}: {e}")),
        }
    }
    if let Err(e) = cx.world.files.empty_trash().await {
        report.failed.push(format!("trash: {e}"));
    }
    report.findings = look::findings(cx).await;
    Ok(report)
}

/// Makes the rules that pods share anew from the attachments; answers which of the steps that were due it did.
async fn shared(cx: &Arc<Context>, permit: &Permit) -> Result<Vec<Planned>> {
    let mut due = round::<SandboxKind>(cx, Mode::Plan, permit).await.done;
    due.extend(stale_rules(cx).await);
    crate::node::tell_network(cx);
    cx.world.network.sync_node().await?;
    cx.world.network.mend().await?;
    let left = keys(&round::<SandboxKind>(cx, Mode::Plan, permit).await.done);
    due.retain(|step| step.stage == "network" && !left.contains(&step.key()));
    Ok(due)
}

fn owed(debt: &state::Debt) -> Planned {
    Planned {
        kind: DebtKind::KIND.to_owned(),
        uid: debt.uid().to_owned(),
        name: debt.meta.name.clone(),
        stage: debt.spec.part.clone(),
        action: Action::Undo,
        reason: "Owed".to_owned(),
        message: debt.spec.reason.clone(),
        risk: Risk::A,
        undo: Action::Undo.way_back().to_owned(),
    }
}

/// Host-port rules of pods that are gone.
async fn stale_rules(cx: &Context) -> Option<Planned> {
    let stale = cx.world.network.stale().await.unwrap_or_default();
    (!stale.is_empty()).then(|| Planned {
        kind: "Network".to_owned(),
        uid: cx.world.paths.instance.clone(),
        name: "host ports".to_owned(),
        stage: "network".to_owned(),
        action: Action::Sweep,
        reason: "StaleRule".to_owned(),
        message: format!("no pod has asked for {}", stale.join(", ")),
        risk: Risk::A,
        undo: Action::Sweep.way_back().to_owned(),
    })
}

async fn passes(cx: &Arc<Context>, mode: Mode, permit: &Permit) -> [Report; 4] {
    [
        round::<ImageKind>(cx, mode, permit).await,
        round::<PodKind>(cx, mode, permit).await,
        round::<SandboxKind>(cx, mode, permit).await,
        round::<ContainerKind>(cx, mode, permit).await,
    ]
}

/// One pass over every object of a kind, all at once.
async fn round<K: Staged + Controlled>(cx: &Arc<Context>, mode: Mode, permit: &Permit) -> Report {
    let mut objects = cx.store.list::<K>();
    objects.retain(|o| !o.meta.paused());
    // Oldest first, so that a plan reads in the order of creation.
    objects.reverse();
    let turns = join_all(objects.iter().map(|object| turn(cx, object, mode, permit))).await;
    let mut report = Report::default();
    for (object, (plan, error)) in objects.iter().zip(turns) {
        report.done.extend(plan);
        match error {
            None | Some(Error::Pending(_)) => {}
            Some(e) if e.class() == Class::Transient && !matches!(e, Error::Stuck { .. }) => {
                report.failed.push(format!("{} {}: {e}", K::KIND, object.meta.name))
            }
            Some(e) => report.human.push(format!("{} {}: {e}", K::KIND, object.meta.name)),
        }
    }
    report
}

async fn turn<K: Staged + Controlled>(
    cx: &Arc<Context>,
    object: &Arc<Object<K>>,
    mode: Mode,
    permit: &Permit,
) -> (Vec<Planned>, Option<Error>) {
    if mode == Mode::Plan {
        // What a look could not see is as much a finding as what it saw.
        return match inventory(cx, object).await {
            Ok(passed) => (passed.plan, passed.error),
            Err(e) => (Vec::new(), Some(e)),
        };
    }
    // While the loop's own pass runs, what is seen is half done, and doing it as well would do it twice.
    let turn = tokio::time::timeout(BOUND + SECOND_BOUND, cx.passes.take(object.uid())).await;
    let Some(object) = cx.store.get::<K>(object.uid()) else {
        return (Vec::new(), None);
    };
    let passed = match inventory(cx, &object).await {
        Ok(passed) => passed,
        Err(e) => return (Vec::new(), Some(e)),
    };
    let Ok(_turn) = turn else {
        let due = !passed.plan.is_empty();
        let error = passed.error.or_else(|| due.then(|| stuck("pass", &object)));
        return (Vec::new(), error);
    };
    if passed.plan.is_empty() && !object.meta.deleted() {
        cx.store.set_status::<K>(object.uid(), passed.status);
        return (Vec::new(), passed.error);
    }
    if let Some(step) = passed.plan.iter().find(|step| !permit.allows(step)) {
        return (Vec::new(), Some(Error::Refused(approve::withheld(step))));
    }
    match crate::engine::staged::pass(cx, &object).await {
        Ok(_) => (passed.plan, None),
        Err(e @ Error::Pending(_)) => (passed.plan, Some(e)),
        // What failed was not done; another round now would only fail again.
        Err(e) => (Vec::new(), Some(e)),
    }
}

/// A look at one object, in a task of its own: one that hangs in the kernel holds up no other.
async fn inventory<K: Staged>(cx: &Arc<Context>, object: &Arc<Object<K>>) -> Result<Passed<K>> {
    for bound in [BOUND, SECOND_BOUND] {
        let (cx, object) = (cx.clone(), object.clone());
        let look = tokio::spawn(async move { pass::run(&cx, &object, Mode::Plan).await });
        match tokio::time::timeout(bound, look).await {
            Ok(done) => {
                return done.map_err(|source| Error::Task { op: "look", source })?;
            }
            Err(_) => continue,
        }
    }
    Err(stuck("look", object))
}

fn stuck<K: Kind>(op: &'static str, object: &Object<K>) -> Error {
    Error::Stuck {
        op,
        object: format!("{} {}", K::KIND, object.meta.name),
        seconds: (BOUND + SECOND_BOUND).as_secs(),
    }
}

/// The keys of steps.
fn keys(steps: &[Planned]) -> BTreeSet<String> {
    steps.iter().map(Planned::key).collect()
}
