//! Random runs: many faults, calls that fail, verbs that take their time, a clock that jumps.
//!
//! `cargo sim SEED` plays one seed and tells its story, which is the same each time. `cargo sim --minutes M` plays
//! fresh ones until the time is over; without either the first few hundred are played, some of them twice.

mod sim;

use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use sim::case::{Case, play};
use sim::node::{Rng, Unrest};
use sim::scenarios;

/// Seeds that a test plays.
const SEEDS: u64 = 300;

/// Of so many one is played twice.
const TWICE: u64 = 4;

/// The last lines of a failed seed's story are shown.
const LINES: usize = 400;

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

/// Plays a seed in this process and tells its story; true if all is well.
fn tell(seed: u64) -> bool {
    let case = case(seed);
    let outcome = play(&case);
    println!("{}", outcome.report(&case));
    outcome.problems.is_empty()
}

/// A seed's story, and true if all was well. In a process of its own: the libraries number what they make in a process,
/// and their chance comes from the number too.
fn story(seed: u64) -> (bool, String) {
    let program = std::env::current_exe().expect("this program's path");
    let done = std::process::Command::new(program).arg(seed.to_string()).output();
    let done = done.expect("this program starts");
    let told = [done.stdout, done.stderr].concat();
    (done.status.success(), String::from_utf8_lossy(&told).into_owned())
}

/// True if all is well.
fn run(seed: u64) -> bool {
    let (well, story) = story(seed);
    if !well {
        let lines: Vec<_> = story.lines().collect();
        println!("{}", lines[lines.len().saturating_sub(LINES)..].join("\n"));
        println!("seed {seed} failed; this plays it again: cargo sim {seed}\n");
    }
    well
}

/// True if a seed's course is the same twice; else tells where it parts.
fn same(seed: u64) -> bool {
    let ((_, first), (_, second)) = (story(seed), story(seed));
    let [first, second] = [first, second].map(|story| story.lines().map(str::to_owned).collect::<Vec<_>>());
    if first == second {
        return true;
    }
    let parts = first.iter().zip(&second).position(|(a, b)| a != b);
    let at = parts.unwrap_or(first.len().min(second.len()));
    println!("seed {seed} parts at line {at}:");
    for story in [&first, &second] {
        let near = story[at.saturating_sub(3)..].iter().take(6);
        near.for_each(|line| println!("    {line}"));
        println!();
    }
    false
}

/// How many of the seeds `well` is not true for; both processors play.
fn count_bad(seeds: impl Iterator<Item = u64> + Send, well: impl Fn(u64) -> bool + Sync) -> usize {
    let (seeds, bad) = (Mutex::new(seeds), AtomicUsize::new(0));
    let next = || seeds.lock().unwrap_or_else(PoisonError::into_inner).next();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(seed) = next() {
                    bad.fetch_add(usize::from(!well(seed)), Ordering::Relaxed);
                }
            });
        }
    });
    bad.into_inner()
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
            let first = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
            let mut played = 0;
            let seeds = (first * 1_000_000..).take_while(|_| Instant::now() < end);
            let failed = count_bad(seeds.inspect(|_| played += 1), run);
            println!("{played} seeds from {}, {failed} failed", first * 1_000_000);
            failed == 0
        }
        Some(text) if text.parse::<u64>().is_ok() => tell(number(args.first()).unwrap_or(0)),
        _ => {
            let failed = count_bad(1..=SEEDS, run);
            let other = count_bad((1..=SEEDS).filter(|seed| seed % TWICE == 0), same);
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
