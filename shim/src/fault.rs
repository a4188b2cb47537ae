//! Failpoints: named places, before, amid and after a side effect, where a test may cut this program short.
//!
//! [`VARIABLE`] switches them on; without it a point costs one atomic load. Its value is a list, `POINT=ACTION,…`, or,
//! beginning with a slash, a file with one of these a line, which is read again at every point, so that a test can arm
//! and disarm a running program and all that it starts. An action of a file that ends something (`abort`, `stop`,
//! `error`) is taken once: the file is renamed to `FILE.hit` first.
//!
//! ```text
//! netns.ensure.torn=abort      SIGKILL to itself
//! shim.run.forked=stop         SIGSTOP to itself, until somebody sends SIGCONT
//! stage.Container.task.act.before=error      the verb fails
//! store.commit.before=sleep:2s (or ms)
//! cni.del.before=hang          until the line is gone
//! trace                        every point reached is added to FILE.trace, a line each
//! ```
//!
//! Points are called `PART.VERB.PLACE`; those of stages `stage.KIND.STAGE.act|undo.before|after`.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

/// The environment variable that arms points.
pub const VARIABLE: &str = "RECONCILE_FAULT";
/// How often a hanging point looks whether it may go on.
pub const LOOK: Duration = Duration::from_millis(20);

/// What is left to do at a point for its caller, who knows whether it may block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Sleep(Duration),
    /// Until [`due`] says otherwise.
    Hang,
    Error,
}

enum Source {
    List(String),
    File(PathBuf),
}

fn source() -> Option<&'static Source> {
    static SOURCE: OnceLock<Option<Source>> = OnceLock::new();
    let read = || {
        let value = value()?;
        Some(match value.as_bytes().first()? {
            b'/' => Source::File(value.into()),
            _ => Source::List(value.to_string_lossy().into_owned()),
        })
    };
    SOURCE.get_or_init(read).as_ref()
}

/// The variable's value, for programs that are to be under the same faults.
pub fn value() -> Option<OsString> {
    std::env::var_os(VARIABLE)
}

/// Are any points armed, or may they be?
pub fn armed() -> bool {
    source().is_some()
}

/// A point in code that may block and cannot fail.
pub fn point(name: &str) {
    if armed() {
        let _ = blocking(name);
    }
}

/// A point in code that may block and fail.
///
/// # Errors
/// If the point is armed with `error`.
pub fn check(name: &str) -> io::Result<()> {
    if armed() { blocking(name) } else { Ok(()) }
}

fn blocking(name: &str) -> io::Result<()> {
    match due(name) {
        None => Ok(()),
        Some(Action::Sleep(time)) => {
            std::thread::sleep(time);
            Ok(())
        }
        Some(Action::Hang) => {
            while due(name) == Some(Action::Hang) {
                std::thread::sleep(LOOK);
            }
            Ok(())
        }
        Some(Action::Error) => Err(failure(name)),
    }
}

/// The error of an armed point.
pub fn failure(name: &str) -> io::Error {
    io::Error::other(format!("the failpoint {name} is armed"))
}

/// Does what ends or stops this program here, and answers what else is due at this point.
pub fn due(name: &str) -> Option<Action> {
    let (text, file) = match source()? {
        Source::List(text) => (text.clone(), None),
        // No file, nothing armed.
        Source::File(path) => (fs::read_to_string(path).ok()?, Some(path.as_path())),
    };
    let mut entries = text.split(['\n', ',']).map(str::trim);
    if let Some(file) = file.filter(|_| entries.clone().any(|entry| entry == "trace")) {
        trace(file, name);
    }
    let action = entries.find_map(|entry| entry.strip_prefix(name)?.strip_prefix('='))?;
    let signal = match action {
        "abort" => Some(libc::SIGKILL),
        "stop" => Some(libc::SIGSTOP),
        "error" => None,
        "hang" => return Some(Action::Hang),
        _ => return duration(action.strip_prefix("sleep:")?).map(Action::Sleep),
    };
    // Whoever renames it first has it.
    if file.is_some_and(|file| fs::rename(file, beside(file, ".hit")).is_err()) {
        return None;
    }
    match signal {
        Some(signal) => {
            // SAFETY: no pointers; both signals act at once on this very process.
            unsafe { libc::kill(libc::getpid(), signal) };
            None
        }
        None => Some(Action::Error),
    }
}

fn duration(text: &str) -> Option<Duration> {
    match text.strip_suffix("ms") {
        Some(ms) => ms.parse().ok().map(Duration::from_millis),
        None => text.strip_suffix('s')?.parse().ok().map(Duration::from_secs),
    }
}

fn beside(file: &Path, suffix: &str) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// One write a line, so that those of several processes do not mix. A test that misses one says so.
fn trace(file: &Path, name: &str) {
    let opened = OpenOptions::new()
        .append(true)
        .create(true)
        .open(beside(file, ".trace"));
    let _ = opened.and_then(|mut file| file.write_all(format!("{name}\n").as_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test, for the variable is read once.
    #[test]
    fn a_file_is_read_at_every_point_and_endings_are_taken_once() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("faults");
        // SAFETY: the only test of this program that touches the environment.
        unsafe { std::env::set_var(VARIABLE, &file) };
        assert!(armed());
        assert!(check("a.b.before").is_ok(), "no file");
        fs::write(&file, "trace\na.b.before=error\na.b.after=sleep:1ms\n").unwrap();
        assert!(check("a.b").is_ok() && check("a.b.before.x").is_ok());
        assert_eq!(due("a.b.after"), Some(Action::Sleep(Duration::from_millis(1))));
        assert!(check("a.b.before").unwrap_err().to_string().contains("a.b.before"));
        assert!(check("a.b.before").is_ok(), "once");
        assert!(dir.path().join("faults.hit").exists());
        let traced = fs::read_to_string(dir.path().join("faults.trace")).unwrap();
        // The tests beside this one pass points of their own.
        let own = traced.lines().rfind(|line| line.starts_with("a."));
        assert_eq!(own, Some("a.b.before"));
        fs::write(&file, "a=hang").unwrap();
        let waiting = std::thread::spawn(|| point("a"));
        fs::remove_file(&file).unwrap();
        waiting.join().unwrap();
    }
}
