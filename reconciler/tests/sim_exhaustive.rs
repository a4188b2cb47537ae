//! Every scenario, cut at every step, before or after it: daemon, shims, both, power (names or bytes lost), database.
//!
//! By default each step is cut twice, by the daemon's death and by one other blow, in turn; `SIM_ALL=1` plays all
//! blows at each. `SIM_ONLY=life` plays the scenarios whose names begin so. What fails prints the node's whole story.

mod sim;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use sim::case::{Case, play};
use sim::client::Op;
use sim::fs::Loss;
use sim::node::{Blow, Cut};
use sim::scenarios;

const BLOWS: [Blow; 6] = [
    Blow::Daemon,
    Blow::Shims,
    Blow::Both,
    Blow::Power(Loss::Names),
    Blow::Power(Loss::Bytes),
    Blow::Store,
];
/// Failed cases that are told.
const TOLD: usize = 3;

fn chosen() -> Vec<(&'static str, Vec<Op>)> {
    let only = std::env::var("SIM_ONLY").unwrap_or_default();
    scenarios::all()
        .into_iter()
        .filter(|(name, _)| name.starts_with(&only))
        .collect()
}

fn case(name: &str, ops: Vec<Op>, cut: Option<Cut>) -> Case {
    Case {
        name: name.to_owned(),
        ops,
        cut,
        ..Case::default()
    }
}

#[test]
fn a_quiet_node_answers_every_call_at_once() {
    for (name, ops) in chosen() {
        let case = case(name, ops, None);
        let outcome = play(&case);
        assert!(
            outcome.problems.is_empty() && outcome.errors.is_empty(),
            "{}",
            outcome.report(&case)
        );
        let again = play(&case);
        assert!(
            again.trace == outcome.trace,
            "{name}: a case is the same whenever it is played"
        );
    }
}

#[test]
fn a_cut_at_any_step_is_repaired() {
    let all = std::env::var_os("SIM_ALL").is_some();
    let mut cases = Vec::new();
    for (name, ops) in chosen() {
        let steps = play(&case(name, ops.clone(), None)).steps;
        for step in 1..=steps {
            let blows = BLOWS.iter().flat_map(|blow| [(false, *blow), (true, *blow)]);
            let turn = step as usize % 12;
            let due = |i: usize| all || i == 1 || i == turn;
            for (_, (after, blow)) in blows.enumerate().filter(|(i, _)| due(*i)) {
                cases.push(case(name, ops.clone(), Some(Cut { step, after, blow })));
            }
        }
    }
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let outcome = play(case);
                    if !outcome.problems.is_empty() {
                        failed.lock().unwrap().push((outcome.report(case), outcome.problems));
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap();
    println!("{} cases, {} failed", cases.len(), failed.len());
    for (report, _) in failed.iter().take(TOLD) {
        println!("{report}");
    }
    for (report, problems) in &failed {
        println!("{} => {}", report.lines().next().unwrap_or_default(), problems[0]);
    }
    assert!(failed.is_empty(), "{} of {} cases", failed.len(), cases.len());
}

/// The last step of a quiet play that has this name.
fn step_of(name: &str, step: &str) -> (Vec<Op>, u64) {
    let ops = scenarios::all()
        .into_iter()
        .find(|(own, _)| *own == name)
        .expect("a scenario")
        .1;
    let trace = play(&case(name, ops.clone(), None)).trace;
    let found = trace.iter().rev().find(|line| line.ends_with(step)).expect("a step");
    (
        ops,
        found.split(' ').next().and_then(|n| n.parse().ok()).expect("a number"),
    )
}

fn well(name: &str, step: &str, after: bool, blow: Blow) {
    let (ops, step) = step_of(name, step);
    let case = case(name, ops, Some(Cut { step, after, blow }));
    let outcome = play(&case);
    assert!(outcome.problems.is_empty(), "{}", outcome.report(&case));
}

/// The next shim writes "never began" into the pause's record; that was taken for "not made yet", and no shim makes a
/// process with a record that has an end: the sandbox never became ready.
#[test]
fn a_pause_whose_start_was_cut_is_started_again() {
    for step in ["shim: task noted", "shim: cgroup made", "shim: process forked"] {
        well("sandbox", step, true, Blow::Shims);
        well("sandbox", step, true, Blow::Both);
    }
}

/// The undo that would have taken the pods' common cgroup away was cut after its own, and no later look missed it.
#[test]
fn the_common_cgroup_goes_though_the_daemon_died_before_it() {
    well("sandbox", "cgroups: directory removed", true, Blow::Daemon);
}

/// A start was written, the daemon died before it began, and the next call was a stop: it waited for an end that never
/// came.
#[test]
fn a_container_that_is_stopped_before_it_began_has_ended() {
    for name in ["life", "stop with grace"] {
        well(name, "files: temporary written", true, Blow::Daemon);
        let (ops, begun) = step_of(name, "shim: program begins");
        for step in begun.saturating_sub(12)..begun {
            let case = case(
                name,
                ops.clone(),
                Some(Cut {
                    step,
                    after: true,
                    blow: Blow::Daemon,
                }),
            );
            let outcome = play(&case);
            assert!(outcome.problems.is_empty(), "{}", outcome.report(&case));
        }
    }
}

/// The receipt of a container's image and its bundle are not flushed; empty after a power cut, they failed every later
/// look at the container, and with it all collection of image garbage.
#[test]
fn receipts_that_a_power_cut_emptied_are_made_again() {
    for step in ["images: blob fetched", "images: layer unpacked"] {
        well("exit by itself", step, true, Blow::Power(Loss::Bytes));
        well("exit by itself", step, true, Blow::Power(Loss::Names));
    }
}

/// What the checks are worth: each of these breaks one promise, and is seen.
#[test]
fn a_broken_promise_is_seen() {
    let broken = |name: &str, mutation, blow: Blow, rule: &str| {
        let ops = scenarios::all()
            .into_iter()
            .find(|(own, _)| *own == name)
            .expect("a scenario")
            .1;
        let steps = play(&case(name, ops.clone(), None)).steps;
        let seen = (1..=steps).rev().any(|step| {
            let after = true;
            let case = Case {
                mutation: Some(mutation),
                ..case(name, ops.clone(), Some(Cut { step, after, blow }))
            };
            play(&case).problems.iter().any(|problem| problem.starts_with(rule))
        });
        assert!(seen, "{mutation} is not seen");
    };
    broken("sandbox", "pin kept", Blow::Daemon, "4");
    broken("exit by itself", "end not flushed", Blow::Power(Loss::Bytes), "7");
    broken("exit by itself", "answered before it is durable", Blow::Daemon, "1");
}
