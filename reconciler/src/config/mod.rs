//! The configuration: files, environment and flags in, one checked set of settings out.
//!
//! ```text
//!  /etc/reconcile/config.yaml ─┐   file: each key checked by the table `keys`, with its place
//!  config.d/*.yaml, by name   ─┤
//!  RECONCILE_…                ─┼─> Settings: key -> value, origin ──> Config, typed
//!  --flags                    ─┘        │
//!                                       ├─> show: default, show, explain
//!                                       └─> changes: what a reload means
//! ```
//!
//! A later source wins, key by key: sections merge, lists and plain values replace. `null` is the default again.
//! Whatever is wrong anywhere is told at once, each with its place, and then nothing of it counts.

pub mod containerd;
mod file;
pub mod handlers;
pub mod keys;
mod live;
pub mod show;
mod typed;
pub mod values;

use std::collections::BTreeMap;
use std::fmt;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use serde_yaml::{Mapping, Value};

use keys::{KEYS, Key};

pub use live::Live;
pub use typed::Config;

/// Where files are looked for unless told otherwise.
pub const DIRECTORY: &str = "/etc/reconcile";
const NAME: &str = "config.yaml";
const DROP_INS: &str = "config.d";
/// Bytes of one file; positions are found by reading it again.
const LIMIT: u64 = 256 << 10;

/// Where a value was set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Default,
    File { path: PathBuf, line: usize, column: usize },
    Flag(String),
    Env(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::File { path, line, .. } => write!(f, "{}:{line}", path.display()),
            Origin::Flag(flag) => write!(f, "flag --{flag}"),
            Origin::Env(variable) => write!(f, "env {variable}"),
        }
    }
}

/// What is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub at: Origin,
    /// The key's path; empty if the whole file is meant.
    pub key: String,
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.at {
            Origin::File { path, line: 0, .. } => write!(f, "{}: ", path.display())?,
            Origin::File { path, line, column } => write!(f, "{}:{line}:{column}: ", path.display())?,
            Origin::Flag(flag) => return write!(f, "--{flag}: {}", self.message),
            Origin::Env(variable) => return write!(f, "{variable}: {}", self.message),
            Origin::Default => {}
        }
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.message)
    }
}

/// Everything that is wrong with a configuration, one line each.
#[derive(Debug, thiserror::Error)]
pub struct Problems(pub Vec<Problem>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<String> = self.0.iter().map(Problem::to_string).collect();
        f.write_str(&lines.join("\n"))
    }
}

/// A value and where it was set.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    pub value: Value,
    pub origin: Origin,
}

/// What a flag or a variable says of a key, as text.
#[derive(Clone, Debug)]
pub struct Override {
    pub key: &'static str,
    pub text: String,
    pub origin: Origin,
}

/// What was set, by key; what is not in it has its default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    set: BTreeMap<String, Setting>,
}

/// A configuration that holds.
#[derive(Clone, Debug)]
pub struct Loaded {
    pub config: Config,
    pub settings: Settings,
    /// What still works and should be written otherwise, or does not do what it seems to.
    pub warnings: Vec<String>,
}

/// A key whose value differs between two settings; values as they are shown, empty if there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub key: String,
    pub when: keys::When,
    pub from: String,
    pub to: String,
}

/// The files of `path` (a file, or a directory with a `config.yaml`) in the order of reading: the file, then those of
/// the directory `config.d` beside it, by name.
///
/// # Errors
/// If `path` names a YAML file that is not there, or a directory cannot be read.
pub fn files(path: &Path) -> Result<Vec<PathBuf>, Problem> {
    let named = path.extension().is_some_and(|e| e == "yaml" || e == "yml");
    let main = if named || path.is_file() {
        path.to_owned()
    } else {
        path.join(NAME)
    };
    let mut all = Vec::new();
    if named || main.exists() {
        all.push(main.clone());
    }
    let dir = main.with_file_name(DROP_INS);
    let entries = match std::fs::read_dir(&dir) {
        Ok(entries) => entries,
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(all),
        Err(e) => return Err(unreadable(&dir, &e.to_string())),
    };
    let mut drop_ins = Vec::new();
    for entry in entries {
        let path = entry.map_err(|e| unreadable(&dir, &e.to_string()))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.ends_with(".yaml") && !name.starts_with('.') {
            drop_ins.push(path);
        }
    }
    drop_ins.sort();
    all.extend(drop_ins);
    Ok(all)
}

/// Reads these files, lays the overrides over them, and checks the whole.
///
/// # Errors
/// All that is wrong, in the order of reading.
pub fn load(files: &[PathBuf], overrides: &[Override]) -> Result<Loaded, Problems> {
    let mut settings = Settings::default();
    let (mut warnings, mut problems) = (Vec::new(), Vec::new());
    for path in files {
        match read(path) {
            Ok(text) => {
                let found = file::parse(&text, path);
                problems.extend(found.problems);
                warnings.extend(found.warnings);
                found
                    .settings
                    .into_iter()
                    .for_each(|(key, setting)| settings.put(key, setting));
            }
            Err(problem) => problems.push(problem),
        }
    }
    for over in overrides {
        let value = Value::String(over.text.clone());
        let checked = keys::find(over.key).map_or(Ok(()), |key| (key.check)(&value));
        let origin = over.origin.clone();
        match checked {
            Ok(()) => settings.put(over.key.to_owned(), Setting { value, origin }),
            Err(message) => problems.push(Problem {
                at: origin,
                key: over.key.to_owned(),
                message,
            }),
        }
    }
    if problems.is_empty() {
        match typed::build(&settings) {
            Ok((config, more)) => {
                warnings.extend(more);
                return Ok(Loaded {
                    config,
                    settings,
                    warnings,
                });
            }
            Err(problem) => problems.push(problem),
        }
    }
    Err(Problems(problems))
}

fn unreadable(path: &Path, why: &str) -> Problem {
    Problem {
        at: whole(path),
        key: String::new(),
        message: format!("cannot be read: {why}"),
    }
}

fn whole(path: &Path) -> Origin {
    Origin::File {
        path: path.to_owned(),
        line: 0,
        column: 0,
    }
}

fn read(path: &Path) -> Result<String, Problem> {
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(|e| unreadable(path, &e.to_string()))?;
    if !file.metadata().is_ok_and(|meta| meta.is_file()) {
        return Err(unreadable(path, "it is not a file"));
    }
    let read = file.take(LIMIT + 1).read_to_string(&mut text);
    read.map_err(|e| unreadable(path, &e.to_string()))?;
    match text.len() as u64 > LIMIT {
        true => Err(unreadable(path, &format!("it is larger than {LIMIT} bytes"))),
        false => Ok(text),
    }
}

impl Settings {
    fn put(&mut self, key: String, setting: Setting) {
        if setting.value.is_null() {
            self.set.remove(&key);
        } else {
            self.set.insert(key, setting);
        }
    }

    /// Every key that has a value, in the order of the table, with its setting.
    pub fn all(&self) -> Vec<(String, Setting)> {
        KEYS.iter().flat_map(|key| self.of(key)).collect()
    }

    /// Those that were set, in the order of the table.
    fn set_ones(&self) -> Vec<(String, Setting)> {
        let mut all = self.all();
        all.retain(|(path, _)| self.set.contains_key(path));
        all
    }

    fn of(&self, key: &Key) -> Vec<(String, Setting)> {
        if let Some(section) = key.path.strip_suffix('*') {
            let below = self.set.iter().filter(|(path, _)| path.starts_with(section));
            return below.map(|(path, setting)| (path.clone(), setting.clone())).collect();
        }
        let default = || {
            let (value, origin) = (key.default_value()?, Origin::Default);
            Some(Setting { value, origin })
        };
        let setting = self.set.get(key.path).cloned().or_else(default);
        setting
            .map(|setting| (key.path.to_owned(), setting))
            .into_iter()
            .collect()
    }

    /// Where a key was set.
    pub fn origin(&self, key: &str) -> Origin {
        self.set
            .get(key)
            .map_or(Origin::Default, |setting| setting.origin.clone())
    }

    /// All values as one YAML tree.
    pub fn tree(&self) -> Value {
        let mut root = Mapping::new();
        for (path, setting) in self.all() {
            insert(&mut root, &path, setting.value);
        }
        Value::Mapping(root)
    }

    /// What differs in `new`, in the order of the table.
    pub fn changes(&self, new: &Settings) -> Vec<Change> {
        let (old, new) = (self.all(), new.all());
        let value = |all: &[(String, Setting)], path: &str| {
            let found = all.iter().find(|(other, _)| other == path);
            found.map(|(_, setting)| setting.value.clone())
        };
        let mut paths: Vec<&String> = old.iter().chain(&new).map(|(path, _)| path).collect();
        paths.sort_by_key(|path| (keys::position(path), *path));
        paths.dedup();
        let changed = paths.into_iter().filter_map(|path| {
            let (from, to) = (value(&old, path), value(&new, path));
            let key = keys::find(path).filter(|_| from != to)?;
            let shown = |value: Option<Value>| value.as_ref().map(show::flow).unwrap_or_default();
            Some(Change {
                key: path.clone(),
                when: key.when,
                from: shown(from),
                to: shown(to),
            })
        });
        changed.collect()
    }

    /// These settings, but every key that only a restart applies as it was in `old`: what a daemon goes on with.
    pub fn keep_what_needs_a_restart(&self, old: &Settings) -> Settings {
        let restart = |path: &String| keys::find(path).is_some_and(|key| key.when == keys::When::Restart);
        let kept = old.set.iter().filter(|(path, _)| restart(path));
        let taken = self.set.iter().filter(|(path, _)| !restart(path));
        let set = kept.chain(taken).map(|(path, setting)| (path.clone(), setting.clone()));
        Settings { set: set.collect() }
    }
}

/// Puts a value at a path below `map`.
fn insert(map: &mut Mapping, path: &str, value: Value) {
    match path.split_once('.') {
        None => {
            map.insert(path.into(), value);
        }
        Some((section, rest)) => {
            let below = map.entry(section.into()).or_insert_with(|| Mapping::new().into());
            if let Value::Mapping(below) = below {
                insert(below, rest, value);
            }
        }
    }
}

#[cfg(test)]
mod tests;
