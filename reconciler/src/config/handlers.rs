//! The handler table: which program makes a pod's containers, by the name that a RuntimeClass has for it.
//!
//! ```text
//!  handlers.NAME  ──found──> absolute path ──probe──> it runs; what it can do ──> Handlers, for the loop and Status
//!       baseSpec  ──read───> checked ────────────────> kept with it ─────────────┤
//!  defaultHandler ───────────────────────────────────────────────────────────────┘
//! ```
//!
//! Where the program is and what its base says, is looked at whenever a configuration is read; that it runs, by who
//! will use it. A base that is changed afterwards counts from the next reload on.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::values::Place;
use super::{Config, Problem, Problems, Settings};
use crate::container::spec::Base;

/// The executor within the shim; there without being configured.
pub const BUILTIN: &str = "builtin";
/// How long a program may take to say what it is.
const PATIENCE: Duration = Duration::from_secs(5);
/// Most of its answer that is read, bytes.
const ANSWER: u64 = 256 << 10;

/// A row of the table, as it is written.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Handler {
    /// `builtin`, an absolute path, or a name that is looked up in PATH.
    pub binary: String,
    /// Global arguments of the program, before the verb.
    #[serde(default)]
    pub options: Vec<String>,
    /// A privileged container does not get the host's device nodes.
    #[serde(default)]
    pub privileged_without_host_devices: bool,
    /// On cgroup v2, an unprivileged container may write in its own cgroup.
    #[serde(default)]
    pub cgroup_writable: bool,
    /// Annotations of pods and containers that the OCI configuration gets.
    #[serde(default)]
    pub annotations: Vec<Glob>,
    /// An OCI configuration that decides what requests leave open.
    pub base_spec: Option<Place>,
    /// Where the CNI configuration of its pods lies, if it is not the node's.
    pub cni_conf_dir: Option<Place>,
}

/// A pattern as path.Match of Go has it, without classes: `*` is anything without a slash, `?` one such character.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Glob(String);

impl TryFrom<String> for Glob {
    type Error = String;

    fn try_from(text: String) -> Result<Glob, String> {
        match text.is_empty() || text.contains(['[', '\\']) {
            true => Err(format!("{text:?}: a pattern is text with * and ?, without [ and \\")),
            false => Ok(Glob(text)),
        }
    }
}

impl Glob {
    pub fn matches(&self, text: &str) -> bool {
        matches(self.0.as_bytes(), text.as_bytes())
    }
}

fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    // Where the last star was, and where the text went on behind it.
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(b'?') if text[t] != b'/' => (p, t) = (p + 1, t + 1),
            Some(c) if *c == text[t] && *c != b'?' => (p, t) = (p + 1, t + 1),
            _ => match star {
                Some((at, from)) if text[from] != b'/' => {
                    star = Some((at, from + 1));
                    (p, t) = (at + 1, from + 1);
                }
                _ => return false,
            },
        }
    }
    pattern[p..].iter().all(|c| *c == b'*')
}

/// The program that makes a container, and how it is called. Kept in the bundle: what was made for one is run by it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    pub binary: PathBuf,
    #[serde(default)]
    pub options: Vec<String>,
}

/// What a runtime says of itself (`features`, OCI runtime spec); nothing is believed that it does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Mount option `rro`.
    pub recursive_read_only: bool,
    /// Id-mapped mounts, without which a pod with a user namespace cannot read its files.
    pub id_mapped: bool,
}

/// A row of the table, ready for use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    /// `None` is the executor within the shim.
    pub program: Option<Program>,
    pub features: Features,
    pub privileged_without_host_devices: bool,
    pub cgroup_writable: bool,
    pub annotations: Vec<Glob>,
    pub base: Arc<Base>,
    /// `None`: the node's.
    pub cni_conf_dir: Option<PathBuf>,
}

/// The table, ready for use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handlers {
    pub default: String,
    pub all: BTreeMap<String, Ready>,
}

impl Default for Handlers {
    fn default() -> Handlers {
        let builtin = Ready {
            features: Features {
                recursive_read_only: true,
                id_mapped: true,
            },
            ..Ready::default()
        };
        Handlers {
            default: BUILTIN.to_owned(),
            all: [(BUILTIN.to_owned(), builtin)].into(),
        }
    }
}

impl Handlers {
    /// The handler of this name; the default one for none.
    pub fn of(&self, name: &str) -> Option<&Ready> {
        let name = if name.is_empty() { &self.default } else { name };
        self.all.get(name)
    }

    /// The CNI directories that handlers have of their own.
    pub fn cni_conf_dirs(&self) -> BTreeSet<PathBuf> {
        self.all
            .values()
            .filter_map(|ready| ready.cni_conf_dir.clone())
            .collect()
    }
}

/// A label of RFC 1123, as Kubernetes wants it (RuntimeClass `handler`).
fn is_name(name: &str) -> bool {
    let inner = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
    (1..=63).contains(&name.len()) && name.bytes().all(inner) && !name.starts_with('-') && !name.ends_with('-')
}

/// Where the program of a handler is; `None` for the executor within the shim.
///
/// # Errors
/// If it is not there, or nobody may execute it.
fn find(binary: &str) -> Result<Option<PathBuf>, String> {
    if binary == BUILTIN {
        return Ok(None);
    }
    if binary.is_empty() || binary.contains('\0') || (binary.contains('/') && !binary.starts_with('/')) {
        return Err(format!(
            "binary {binary:?}: must be {BUILTIN}, an absolute path, or a name in PATH"
        ));
    }
    if binary.starts_with('/') {
        let path = PathBuf::from(binary);
        return match executable(&path) {
            Ok(()) => Ok(Some(path)),
            Err(why) => Err(format!("binary {binary}: {why}")),
        };
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places = std::env::split_paths(&path).filter(|dir| dir.is_absolute());
    let found = places.find_map(|dir| Some(dir.join(binary)).filter(|path| executable(path).is_ok()));
    found.map(Some).ok_or_else(|| {
        format!(
            "binary {binary:?}: no such program in PATH ({})",
            path.to_string_lossy()
        )
    })
}

fn executable(path: &Path) -> Result<(), String> {
    let meta = std::fs::metadata(path).map_err(|e| e.to_string())?;
    match (meta.is_file(), meta.permissions().mode() & 0o111) {
        (false, _) => Err("it is not a file".to_owned()),
        (true, 0) => Err("it is not executable (chmod +x)".to_owned()),
        _ => Ok(()),
    }
}

/// The base of a handler's containers.
///
/// # Errors
/// If its file cannot be read, is not what it should be, or has hooks that nobody would run.
fn base(handler: &Handler) -> Result<Base, String> {
    let Some(Place(path)) = &handler.base_spec else {
        return Ok(Base::default());
    };
    let told = |why: String| format!("baseSpec {}: {why}", path.display());
    let base = Base::read(path).map_err(told)?;
    match handler.binary == BUILTIN && base.has_late_hooks() {
        true => Err(told(format!(
            "hooks: {BUILTIN} runs none of poststart and poststop; another OCI runtime does"
        ))),
        false => Ok(base),
    }
}

/// What can be told without running anything; part of reading a configuration. Answers what still works and is not as
/// it may be meant.
pub(super) fn check(config: &Config, settings: &Settings) -> Result<Vec<String>, Problem> {
    let mut warnings = Vec::new();
    let wrong = |key: String, message: String| Problem {
        at: settings.origin(&key),
        key,
        message,
    };
    for (name, handler) in &config.handlers {
        let key = format!("handlers.{name}");
        if !is_name(name) {
            let why = "a handler's name is 1 to 63 of a-z, 0-9 and -, as in a RuntimeClass".to_owned();
            return Err(wrong(key, why));
        }
        if handler.options.iter().any(|option| option.contains('\0')) {
            return Err(wrong(key, "options: an argument contains a NUL byte".to_owned()));
        }
        match find(&handler.binary) {
            Ok(None) if !handler.options.is_empty() => {
                return Err(wrong(key, format!("options: {BUILTIN} takes none")));
            }
            Ok(_) => {}
            Err(why) => return Err(wrong(key, why)),
        }
        let ignored = match base(handler) {
            Ok(base) => base.ignored.join(", "),
            Err(why) => return Err(wrong(key, why)),
        };
        if !ignored.is_empty() {
            let message = format!("baseSpec: {ignored}: not taken from a base");
            warnings.push(wrong(key, message).to_string());
        }
    }
    let default = &config.default_handler;
    if default != BUILTIN && !config.handlers.contains_key(default) {
        let why = format!("{default:?} is not among handlers, and not {BUILTIN}");
        return Err(wrong("defaultHandler".to_owned(), why));
    }
    Ok(warnings)
}

/// Runs every handler's program to see that it does, and what it can do.
///
/// # Errors
/// One problem for each that does not: missing, not executable, not answering within 5 s, failing; or whose base cannot
/// be read any more.
pub fn probe(config: &Config, settings: &Settings) -> Result<Handlers, Problems> {
    let mut handlers = Handlers {
        default: config.default_handler.clone(),
        ..Handlers::default()
    };
    // One that hangs holds up no other.
    let asked: Vec<_> = std::thread::scope(|scope| {
        let ask = |(name, handler)| (name, scope.spawn(move || ready(handler)));
        let threads: Vec<_> = config.handlers.iter().map(ask).collect();
        let joined = |(name, thread): (_, std::thread::ScopedJoinHandle<'_, _>)| (name, thread.join());
        threads.into_iter().map(joined).collect()
    });
    let mut problems = Vec::new();
    for (name, answer) in asked {
        match answer.unwrap_or_else(|_| Err("looking at it failed".to_owned())) {
            Ok(ready) => drop(handlers.all.insert(name.clone(), ready)),
            Err(message) => {
                let key = format!("handlers.{name}");
                problems.push(Problem {
                    at: settings.origin(&key),
                    key,
                    message,
                });
            }
        }
    }
    match problems.is_empty() {
        true => Ok(handlers),
        false => Err(Problems(problems)),
    }
}

fn ready(handler: &Handler) -> Result<Ready, String> {
    let program = find(&handler.binary)?.map(|binary| Program {
        binary,
        options: handler.options.clone(),
    });
    let features = match &program {
        None => Features {
            recursive_read_only: true,
            id_mapped: true,
        },
        Some(program) => {
            answer(&program.binary, "--version")
                .map_err(|why| format!("binary {}: {why}", program.binary.display()))?;
            // Younger than most programs: one that does not know the verb promises nothing.
            answer(&program.binary, "features").map_or_else(|_| Features::default(), |text| features(&text))
        }
    };
    Ok(Ready {
        program,
        features,
        privileged_without_host_devices: handler.privileged_without_host_devices,
        cgroup_writable: handler.cgroup_writable,
        annotations: handler.annotations.clone(),
        base: Arc::new(base(handler)?),
        cni_conf_dir: handler.cni_conf_dir.clone().map(|dir| dir.0),
    })
}

fn features(text: &[u8]) -> Features {
    let json: serde_json::Value = serde_json::from_slice(text).unwrap_or_default();
    let options = json["mountOptions"].as_array();
    Features {
        recursive_read_only: options.is_some_and(|all| all.iter().any(|option| option == "rro")),
        id_mapped: json["linux"]["mountExtensions"]["idmap"]["enabled"] == true,
    }
}

/// What the program prints, if it ends well within [`PATIENCE`].
fn answer(program: &Path, argument: &str) -> Result<Vec<u8>, String> {
    let (ours, theirs) = std::io::pipe().map_err(|e| e.to_string())?;
    let mut command = Command::new(program);
    command.arg(argument).stdin(Stdio::null()).stderr(Stdio::null());
    // Whatever it starts goes with it.
    command.process_group(0);
    let mut child = command
        .stdout(theirs)
        .spawn()
        .map_err(|e| format!("cannot be executed: {e}"))?;
    // The writing end must be the child's alone.
    drop(command);
    let begun = Instant::now();
    let status = loop {
        match child.try_wait().map_err(|e| e.to_string())? {
            Some(status) => break status,
            None if begun.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(2)),
            None => {
                let _ = nix::sys::signal::killpg(
                    nix::unistd::Pid::from_raw(child.id() as i32),
                    nix::sys::signal::Signal::SIGKILL,
                );
                let _ = child.wait();
                return Err(format!("`{argument}` did not end within {} s", PATIENCE.as_secs()));
            }
        }
    };
    if !status.success() {
        return Err(format!("`{argument}` failed: {status}"));
    }
    read(ours.into())
}

/// What stands in a pipe already: somebody else may still hold its other end.
fn read(pipe: std::os::fd::OwnedFd) -> Result<Vec<u8>, String> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    fcntl(&pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).map_err(|e| e.to_string())?;
    let mut text = Vec::new();
    match File::from(pipe).take(ANSWER).read_to_end(&mut text) {
        Err(e) if e.kind() != std::io::ErrorKind::WouldBlock => Err(e.to_string()),
        _ => Ok(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script(dir: &Path, name: &str, text: &str) -> String {
        let path = dir.join(name);
        crate::tests::install(&path, &format!("#!/bin/sh\n{text}\n"));
        path.display().to_string()
    }

    fn row(binary: &str) -> Handler {
        serde_yaml::from_str(&format!("binary: {binary}")).unwrap()
    }

    #[test]
    fn patterns() {
        let glob = |pattern: &str, text: &str| Glob::try_from(pattern.to_owned()).unwrap().matches(text);
        for (pattern, text) in [
            ("io.katacontainers.*", "io.katacontainers.config"),
            ("a/*", "a/b"),
            ("*", "abc"),
            ("a?c", "abc"),
            ("*.io/*x", "k8s.io/axbx"),
            ("ab", "ab"),
            ("a**", "a"),
        ] {
            assert!(glob(pattern, text), "{pattern} {text}");
        }
        for (pattern, text) in [
            ("a*", "a/b"),
            ("a?b", "a/b"),
            ("ab", "abc"),
            ("?", ""),
            ("*x", "xy"),
            ("a?c", "a?d"),
        ] {
            assert!(!glob(pattern, text), "{pattern} {text}");
        }
        assert!(Glob::try_from("[a]".to_owned()).is_err() && Glob::try_from(String::new()).is_err());
        // Not exponential.
        assert!(!glob(&"*a".repeat(60), &"a".repeat(59)));
    }

    #[test]
    fn names_are_those_of_runtime_classes() {
        assert!(is_name("runc") && is_name("kata-fc2") && is_name(&"a".repeat(63)));
        for bad in ["", "Runc", "a_b", "-a", "a-", &"a".repeat(64)] {
            assert!(!is_name(bad), "{bad}");
        }
    }

    #[test]
    fn a_program_that_cannot_be_run_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let plain = dir.path().join("plain");
        std::fs::write(&plain, "x").unwrap();
        let bad = script(dir.path(), "bad", "exit 3");
        let none = script(dir.path(), "none", "").replace("none", "absent");
        for (binary, why) in [
            ("no-such-runtime", "no such program in PATH"),
            ("bin/runc", "absolute path, or a name"),
            (&*none, "No such file"),
            (&*plain.display().to_string(), "not executable"),
            ("/bin", "not a file"),
            (&*bad, "`--version` failed: exit status: 3"),
        ] {
            let error = ready(&row(binary)).unwrap_err();
            assert!(error.contains(why), "{binary}: {error}");
        }
        let begun = Instant::now();
        let slow = script(dir.path(), "slow", "sleep 100 & sleep 100");
        let error = ready(&row(&slow)).unwrap_err();
        assert!(
            error.contains("did not end within 5 s") && begun.elapsed() < 2 * PATIENCE,
            "{error}"
        );
    }

    #[test]
    fn what_it_says_of_itself_counts() {
        let dir = tempfile::tempdir().unwrap();
        let features = r#"{"mountOptions":["ro","rro"],"linux":{"mountExtensions":{"idmap":{"enabled":true}}}}"#;
        let new = script(
            dir.path(),
            "new",
            &format!("[ $1 = features ] && echo '{features}'; true"),
        );
        let old = script(dir.path(), "old", "[ $1 = --version ]");
        let told = |binary: &str| ready(&row(binary)).unwrap().features;
        let all = Features {
            recursive_read_only: true,
            id_mapped: true,
        };
        assert_eq!(told(&new), all);
        assert_eq!(told(&old), Features::default());
        assert_eq!(told(BUILTIN), all);
        assert_eq!(ready(&row(BUILTIN)).unwrap().program, None);
    }
}
