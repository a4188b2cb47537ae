//! The rules that a simulation can see. Numbers are those of the architecture's list of invariants:
//!
//! 1 answered creates stand | 2 rest is rest | 3 each name has one record | 4 all removed, nothing left
//! 5 a status recomputed equals the live one | 6 one start, one process tree (`shims`) | 7 exit codes never change
//! 8 nothing goes before its users (`parts`) | 9 no condition from the future | 10 looking changes nothing
//! 12 output goes to the log of that name | 14 a lost database loses no object (1 and 6 after `Blow::Store`)

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use reconciler::engine::Context;
use reconciler::repair::{self, Ask};
use state::container::{ContainerKind, ContainerPhase};
use state::debt::DebtKind;
use state::image::{ImageKind, ImagePhase};
use state::pod::PodKind;
use state::sandbox::{SandboxKind, SandboxPhase};
use state::{Condition, Kind, Object};

use super::node::Sim;
use super::parts::census;

/// How the records stand, for comparison with another time.
pub fn statuses(cx: &Context) -> BTreeMap<String, String> {
    let conditions = |all: &[Condition]| -> String {
        let one = |c: &Condition| format!("{}={:?} {} {}", c.stage, c.status, c.reason, c.permanent);
        all.iter().map(one).collect::<Vec<_>>().join(", ")
    };
    let mut all = BTreeMap::new();
    for s in cx.store.list::<SandboxKind>() {
        let t = &s.status;
        let text = format!(
            "{:?} {} {} {} {} [{}]",
            t.phase,
            t.ip,
            t.pid,
            t.netns,
            t.torn_down,
            conditions(&t.conditions)
        );
        all.insert(format!("sandbox {}", s.uid()), text);
    }
    for c in cx.store.list::<ContainerKind>() {
        let t = &c.status;
        let text = format!(
            "{:?} {} {} {} {} {} [{}]",
            t.phase,
            t.pid,
            t.started_at,
            t.finished_at,
            t.exit_code,
            t.reason,
            conditions(&t.conditions)
        );
        all.insert(format!("container {}", c.uid()), text);
    }
    for i in cx.store.list::<ImageKind>() {
        all.insert(
            format!("image {}", i.meta.name),
            format!("{:?} {}", i.status.phase, i.status.id),
        );
    }
    all
}

/// 5: as soon as a daemon answers, what another boot has ended is told as ended, and as [`always`] says for ever.
pub fn boot(sim: &Sim, cx: &Context, problems: &mut Vec<String>) {
    let (boot, unsure) = {
        let node = sim.lock();
        // A write that fails leaves it to the loop.
        (node.boot_id(), node.unrest.fail > 0 || node.daemon == 0)
    };
    let other = |boot_id: &str, deleted: bool| boot_id != boot && !deleted && !unsure;
    for c in cx.store.list::<ContainerKind>() {
        if other(&c.meta.boot_id, c.meta.deleted()) && c.status.phase != ContainerPhase::Exited {
            problems.push(format!("5: {} of another boot is {:?}", c.uid(), c.status.phase));
        }
    }
    for s in cx.store.list::<SandboxKind>() {
        if other(&s.meta.boot_id, s.meta.deleted()) && s.status.phase != SandboxPhase::NotReady {
            problems.push(format!(
                "5: sandbox {} of another boot is {:?}",
                s.uid(),
                s.status.phase
            ));
        }
    }
}

/// Exit codes as they were told first.
pub type Exits = BTreeMap<String, (i32, i64, String)>;

/// 7 and 9: at any time.
pub fn always(cx: &Context, exits: &mut Exits, problems: &mut Vec<String>) {
    for c in cx.store.list::<ContainerKind>() {
        future(&*c, c.status.observed_generation, problems);
        if c.meta.deleted() {
            // Nobody is told of it any more.
            continue;
        }
        if c.status.phase != ContainerPhase::Exited {
            if exits.contains_key(c.uid()) && c.status.phase != ContainerPhase::Unknown {
                problems.push(format!("7: {} had ended and is {:?}", c.uid(), c.status.phase));
            }
            continue;
        }
        let now = (c.status.exit_code, c.status.finished_at, c.status.reason.clone());
        let first = exits.entry(c.uid().to_owned()).or_insert_with(|| now.clone());
        if *first != now {
            problems.push(format!("7: the end of {} was {first:?} and is {now:?}", c.uid()));
        }
    }
    for s in cx.store.list::<SandboxKind>() {
        future(&*s, s.status.observed_generation, problems);
    }
}

fn future<K: Kind>(object: &Object<K>, observed: u64, problems: &mut Vec<String>) {
    if observed > object.meta.generation {
        problems.push(format!("9: {} {} saw generation {observed}", K::KIND, object.uid()));
    }
}

/// 1, 2, 3 and 10: once all is quiet.
pub async fn at_rest(sim: &Sim, cx: &Arc<Context>, promised: &BTreeSet<String>, problems: &mut Vec<String>) {
    for uid in promised {
        let sandbox = cx.store.get::<SandboxKind>(uid).map(|s| s.meta.deleted());
        let container = cx.store.get::<ContainerKind>(uid).map(|c| c.meta.deleted());
        if sandbox.or(container) != Some(false) {
            problems.push(format!("1: {uid} was answered and is gone"));
        }
    }
    settled(sim, cx, problems);
    let before = sim.lock().steps;
    let ask = Ask {
        dry_run: true,
        force: true,
        ..Ask::default()
    };
    match repair::run(cx, &ask).await {
        Ok(plan) => {
            let due = plan
                .done
                .iter()
                .map(|step| format!("2: at rest there is still to do: {step}"));
            problems.extend(due.chain(plan.failed.iter().map(|why| format!("2: at rest fails: {why}"))));
        }
        Err(e) => problems.push(format!("2: at rest no plan can be made: {e}")),
    }
    if sim.lock().steps != before {
        problems.push("10: a plan changed the node".to_owned());
    }
    names(sim, cx, problems);
}

/// 2: each record is ready, ended, or gone.
fn settled(sim: &Sim, cx: &Context, problems: &mut Vec<String>) {
    for s in cx.store.list::<SandboxKind>() {
        let ok = match s.status.phase {
            SandboxPhase::Ready => s.status.conditions.iter().all(|c| c.status == state::Truth::True),
            SandboxPhase::NotReady => s.status.torn_down,
            _ => false,
        };
        if !ok || s.meta.deleted() {
            problems.push(format!(
                "2: sandbox {} rests as {:?} {:?}",
                s.uid(),
                s.status.phase,
                s.status.conditions
            ));
        }
    }
    for c in cx.store.list::<ContainerKind>() {
        let procs = sim.lock().procs.values().filter(|p| p.id == c.uid()).count();
        let ok = match c.status.phase {
            ContainerPhase::Running => procs > 0,
            ContainerPhase::Created | ContainerPhase::Exited => procs == 0,
            _ => false,
        };
        let lost = sim.lock().writes_elsewhere(c.uid());
        if c.status.phase == ContainerPhase::Running && lost {
            problems.push(format!("12: the log of container {} has lost its name", c.uid()));
        }
        if !ok || c.meta.deleted() {
            let why = &c.status.conditions;
            problems.push(format!(
                "2: container {} rests as {:?}, {procs} processes {why:?}",
                c.uid(),
                c.status.phase
            ));
        }
    }
    for i in cx.store.list::<ImageKind>() {
        if i.status.phase != ImagePhase::Ready {
            problems.push(format!(
                "2: image {} rests as {:?} {:?}",
                i.meta.name, i.status.phase, i.status.conditions
            ));
        }
    }
    let pods = cx.store.list::<PodKind>().into_iter().filter(|p| p.meta.deleted());
    pods.for_each(|p| problems.push(format!("2: pod {} is still being removed", p.meta.name)));
    let debts = cx.store.list::<DebtKind>().into_iter();
    debts.for_each(|d| problems.push(format!("2: a debt of {} is unpaid", d.spec.object)));
}

/// 3: every uid in a name of the node is a record's.
fn names(sim: &Sim, cx: &Context, problems: &mut Vec<String>) {
    for name in census(&sim.lock()).keys() {
        let uids = name
            .split(|c: char| !c.is_ascii_hexdigit())
            .filter(|word| word.len() == 64);
        for uid in uids {
            let known = cx.store.get::<SandboxKind>(uid).is_some()
                || cx.store.get::<ContainerKind>(uid).is_some()
                || cx.store.get::<PodKind>(uid).is_some();
            if !known {
                problems.push(format!("3: {name} belongs to no record"));
            }
        }
    }
}
