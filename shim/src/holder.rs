//! `hold`: makes namespaces, says so, stands in them until its standard input ends. Whoever started it writes the
//! user namespace's maps and pins them all.

use std::io::{Read, Write};

use crate::sys;

/// The exit code.
pub fn run(kinds: &[String]) -> i32 {
    let made = make(kinds);
    let code = i32::from(made.is_err());
    let text = made.err().unwrap_or_else(|| shim::READY.to_owned());
    if writeln!(std::io::stdout(), "{text}").is_ok() && code == 0 {
        let _ = std::io::stdin().read(&mut [0]);
    }
    code
}

fn make(kinds: &[String]) -> Result<(), String> {
    let mut flags = 0;
    for kind in kinds {
        flags |= match kind.as_str() {
            "user" => libc::CLONE_NEWUSER,
            "net" => libc::CLONE_NEWNET,
            "ipc" => libc::CLONE_NEWIPC,
            "uts" => libc::CLONE_NEWUTS,
            other => return Err(format!("{other:?} is none of user, net, ipc, uts")),
        };
    }
    // With CLONE_NEWUSER among them the others belong to it, user_namespaces(7).
    // SAFETY: no pointers; this process has one thread.
    sys::check(unsafe { libc::unshare(flags) })
        .map(drop)
        .map_err(|error| format!("unshare {}: {error}", kinds.join(", ")))
}
