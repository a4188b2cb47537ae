//! Prints the census of the whole node; with a file, compares with what it printed there before and fails if it
//! differs.
//!
//! `census > before; …; census before`

use std::process::ExitCode;

use anyhow::{Context, Result};
use e2e::leaks::Census;

fn main() -> Result<ExitCode> {
    let now = Census::node()?.to_string();
    let Some(file) = std::env::args().nth(1) else {
        print!("{now}");
        return Ok(ExitCode::SUCCESS);
    };
    let before = std::fs::read_to_string(&file).with_context(|| file.clone())?;
    let mut same = true;
    for line in before.lines().filter(|line| !now.lines().any(|other| other == *line)) {
        println!("- {line}");
        same = false;
    }
    for line in now.lines().filter(|line| !before.lines().any(|other| other == *line)) {
        println!("+ {line}");
        same = false;
    }
    Ok(if same { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
