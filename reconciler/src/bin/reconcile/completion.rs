//! `reconcile completion` and `reconcile man`: both from the flags' own descriptions.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Command};
use clap_complete::Shell;

#[derive(Args)]
pub struct Completion {
    /// For which shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Prints a completion script.
pub fn script(args: &Completion, mut command: Command) -> Result<ExitCode> {
    // Into memory first: clap_complete panics where writing fails.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "reconcile", &mut script);
    crate::print::out(String::from_utf8_lossy(&script))?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the manual page, and one after another those of the subcommands.
pub fn manual(mut command: Command) -> Result<ExitCode> {
    command.build();
    let mut page = Vec::new();
    clap_mangen::Man::new(command.clone()).render(&mut page)?;
    for sub in command
        .get_subcommands()
        .filter(|sub| !sub.is_hide_set() && sub.get_name() != "help")
    {
        clap_mangen::Man::new(sub.clone()).render(&mut page)?;
    }
    crate::print::out(String::from_utf8_lossy(&page))?;
    Ok(ExitCode::SUCCESS)
}
