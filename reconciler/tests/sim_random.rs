//! Random runs: many faults, calls that fail, verbs that take their time, a clock that jumps.
//!
//! `cargo sim SEED` plays one seed and tells its story, which is the same each time. `cargo sim --minutes M` plays
//! fresh ones until the time is over; without either the first few hundred are played, some of them twice.

mod sim;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use sim::case::{Case, play};
use sim::node::{Rng, Unrest};
use sim::scenarios;

/// Seeds that a test plays.
const SEEDS: u64 = 300;

/// Of so many one is played twice.
const TWICE: u64 = 4;

/// Everything of a run comes from its seed.
fn case(seed: u64) -> Case {
    let mut rng = Rng::new(seed ^ 0x51);
    let mut all = scenarios::all();
    let (name, ops) = all.swap_remove(rng.below(all.len() as u64) as usize);
    let unrest = Unrest {
        crash: [3, 10, 30][rng.below(3) as usize],
        fail: [0, 10, 50][rng.below(3) as usize],
        delay: [0, 20, 3000][rng.below(3) as usize],
        cni: [0, 100, 300][rng.below(3) as usize],
        hang: [0, 0, 50][rng.below(3) as usize],
        full: [0, 0, 10][rng.below(3) as usize],
    };
    Case {
        name: name.to_owned(),
        ops,
        unrest,
        seed,
        ..Case::default()
    }
}

/// True if all is well.
fn run(seed: u64, tell: bool) -> bool {
    let case = case(seed);
    let outcome = play(&case);
    let well = outcome.problems.is_empty();
    if tell || !well {
        println!("{}", outcome.report(&case));
    }
    if !well {
        println!("seed {seed} failed; this plays it again: cargo sim {seed}\n");
    }
    well
}

/// True if a seed's course is the same twice; else tells where it parts.
fn same(seed: u64) -> bool {
    let (first, second) = (play(&case(seed)), play(&case(seed)));
    let parts = first.trace.iter().zip(&second.trace).position(|(a, b)| a != b);
    let same = first.trace == second.trace && first.errors == second.errors && first.problems == second.problems;
    if !same {
        let at = parts.unwrap_or(first.trace.len().min(second.trace.len()));
        println!("seed {seed} parts at line {at}:");
        for trace in [&first.trace, &second.trace] {
            trace[at.saturating_sub(3)..]
                .iter()
                .take(6)
                .for_each(|line| println!("    {line}"));
            println!();
        }
    }
    same
}

/// Tells the results as the other test programs do, so that who counts them counts these; true if all is well.
fn results(tests: &[(&str, bool)]) -> bool {
    for (name, well) in tests {
        println!("test {name} ... {}", if *well { "ok" } else { "FAILED" });
    }
    let failed = tests.iter().filter(|(_, well)| !well).count();
    println!(
        "test result: {}. {} passed; {failed} failed; 0 ignored; 0 measured; 0 filtered out",
        if failed == 0 { "ok" } else { "FAILED" },
        tests.len() - failed
    );
    failed == 0
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |text: Option<&String>| text.and_then(|text| text.parse::<u64>().ok());
    let well = match args.first().map(String::as_str) {
        // As the test runners ask for the list of tests.
        Some("--list") => true,
        Some("--minutes") => {
            let end = Instant::now() + Duration::from_secs(60 * number(args.get(1)).unwrap_or(1));
            let first = std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .map_or(0, |d| d.as_secs());
            let mut seeds = first * 1_000_000..;
            let mut played = 0;
            let well = seeds
                .by_ref()
                .take_while(|_| Instant::now() < end)
                .inspect(|_| played += 1)
                .all(|s| run(s, false));
            println!("{played} seeds from {}", first * 1_000_000);
            well
        }
        Some(text) if text.parse::<u64>().is_ok() => {
            let seed = number(args.first()).unwrap_or(0);
            run(seed, true)
        }
        _ => {
            let failed = (1..=SEEDS).filter(|seed| !run(*seed, false)).count();
            let other = (1..=SEEDS).filter(|seed| seed % TWICE == 0 && !same(*seed)).count();
            println!(
                "{SEEDS} seeds, {failed} failed, {other} of {} took another course",
                SEEDS / TWICE
            );
            results(&[
                ("every_seed_comes_to_rest", failed == 0),
                ("a_seed_has_one_course", other == 0),
            ])
        }
    };
    if well { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
