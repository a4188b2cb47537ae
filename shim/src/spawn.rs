//! Starting a shim.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::{EXIT_ALREADY_SERVED, Error, LOG, Result, fault};

/// Whose shim it is: shows in the process list, and in `state`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// The sandbox's uid.
    pub uid: String,
}

/// Where a shim stands among the node's processes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    /// Absolute within each hierarchy, made if absent; `None`: the caller's.
    pub cgroup: Option<String>,
    /// Its `oom_score_adj`; `None`: the caller's.
    pub oom_score: Option<i32>,
}

/// Makes a shim serve `dir` (made if absent); returns once it listens. A shim that already serves it is success.
/// If a shim of this directory died, the new one takes its processes over. Blocks for about
/// a millisecond: call it from a blocking thread.
pub fn spawn(exe: &Path, whose: &Identity, dir: &Path, place: &Place) -> Result<()> {
    fault::point("shims.spawn.before");
    fs::create_dir_all(dir).map_err(Error::io("make shim directory", dir))?;
    fault::point("shims.spawn.torn");
    // No pre_exec and no working directory: std then uses posix_spawn, whose cost does not grow with the daemon.
    let mut command = Command::new(exe);
    command.args([
        "serve",
        "--namespace",
        &whose.namespace,
        "--name",
        &whose.name,
        "--id",
        &whose.uid,
    ]);
    command.args([OsStr::new("--dir"), dir.as_os_str()]);
    if let Some(cgroup) = &place.cgroup {
        command.args(["--cgroup", cgroup]);
    }
    if let Some(score) = place.oom_score {
        command.args(["--oom-score".to_owned(), score.to_string()]);
    }
    let command = command
        .env_clear()
        .envs(fault::value().map(|value| (fault::VARIABLE, value)))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let status = command.status().map_err(Error::io("run shim", exe))?;
    fault::point("shims.spawn.after");
    match status.code() {
        Some(0) | Some(EXIT_ALREADY_SERVED) => Ok(()),
        _ => Err(Error::Spawn {
            dir: dir.into(),
            reason: format!("{status}; {}", log_end(dir)),
        }),
    }
}

/// The last words in the shim's log.
fn log_end(dir: &Path) -> String {
    let mut text = String::new();
    if let Ok(mut file) = File::open(dir.join(LOG)) {
        let start = file.metadata().map_or(0, |meta| meta.len().saturating_sub(512));
        let _ = file
            .seek(SeekFrom::Start(start))
            .and_then(|_| file.take(512).read_to_string(&mut text));
    }
    text.lines().next_back().unwrap_or("its log is empty").to_owned()
}
