//! One file: its keys, each with its place, and everything that is wrong with it.

use std::path::Path;

use serde_yaml::{Mapping, Value};
use state::yaml::locate::{self, At};

use super::keys::{self, KIND, MOVED, VERSIONS};
use super::{Origin, Problem, Setting};

#[derive(Default)]
pub struct Found {
    /// In the order of the file; null takes back what an earlier file said.
    pub settings: Vec<(String, Setting)>,
    pub warnings: Vec<String>,
    pub problems: Vec<Problem>,
}

struct Reader<'a> {
    text: &'a str,
    file: &'a Path,
    /// Index into [`VERSIONS`], if the file tells it.
    version: Option<usize>,
    found: Found,
}

/// Reads the text of a file. Nothing but comments says nothing.
pub fn parse(text: &str, file: &Path) -> Found {
    let mut reader = Reader {
        text,
        file,
        version: None,
        found: Found::default(),
    };
    match serde_yaml::from_str::<Value>(text) {
        Ok(Value::Null) => {}
        Ok(Value::Mapping(map)) => {
            reader.header(&map);
            reader.walk("", &map);
        }
        Ok(_) => reader.wrong("", At::Value, "must be a map of keys".to_owned()),
        Err(e) => reader.unreadable(&e),
    }
    reader.found
}

impl Reader<'_> {
    fn place(&self, path: &str, at: At) -> Origin {
        let spot = locate::find(self.text, 0, path, at)
            .map(|(_, spot)| spot)
            .unwrap_or_default();
        Origin::File {
            path: self.file.to_owned(),
            line: spot.line,
            column: spot.column,
        }
    }

    fn wrong(&mut self, path: &str, at: At, message: String) {
        let problem = Problem {
            at: self.place(path, at),
            key: path.chars().take(200).collect(),
            message,
        };
        self.found.problems.push(problem);
    }

    /// No YAML at all, or a key twice, which only this says with its place.
    fn unreadable(&mut self, error: &serde_yaml::Error) {
        let twice = locate::duplicate(self.text, 0);
        let at = match &twice {
            Some((_, _, spot)) => Some((spot.line, spot.column)),
            None => error.location().map(|l| (l.line(), l.column())),
        };
        let (line, column) = at.unwrap_or((1, 1));
        let message = match twice {
            Some((parent, key, _)) if parent.is_empty() => format!("the key `{key}` is here twice"),
            Some((parent, key, _)) => format!("the key `{parent}.{key}` is here twice"),
            None => {
                let text = error.to_string();
                text.split(" at line ").next().unwrap_or_default().to_owned()
            }
        };
        self.found.problems.push(Problem {
            at: Origin::File {
                path: self.file.to_owned(),
                line,
                column,
            },
            key: String::new(),
            message,
        });
    }

    /// `apiVersion` and `kind`, which may be left out.
    fn header(&mut self, map: &Mapping) {
        let current = VERSIONS[VERSIONS.len() - 1];
        match map.get("apiVersion") {
            None | Some(Value::Null) => {}
            Some(Value::String(text)) => match VERSIONS.iter().position(|known| known == text) {
                Some(version) => self.version = Some(version),
                None if text.starts_with("reconcile/") => {
                    let message = format!("{text:?} is not known here: this program reads files up to {current}");
                    self.wrong("apiVersion", At::Value, message);
                }
                None => self.wrong("apiVersion", At::Value, format!("must be {current}, not {text:?}")),
            },
            Some(_) => self.wrong("apiVersion", At::Value, format!("must be {current}")),
        }
        match map.get("kind") {
            None | Some(Value::Null) => {}
            Some(Value::String(text)) if text == KIND => {}
            Some(_) => self.wrong("kind", At::Value, format!("must be {KIND}")),
        }
    }

    fn walk(&mut self, parent: &str, map: &Mapping) {
        for (key, value) in map {
            let Value::String(name) = key else {
                self.wrong(parent, At::Value, "has a key that is not text".to_owned());
                continue;
            };
            let path = match parent {
                "" => name.clone(),
                _ => format!("{parent}.{name}"),
            };
            if matches!(path.as_str(), "apiVersion" | "kind") {
                continue;
            }
            // A dot within a name would make it another key's path.
            if name.contains('.') || name.is_empty() {
                self.unknown(&path);
            } else if keys::find(&path).is_some() {
                self.leaf(&path, &path, value);
            } else if keys::is_section(&path) {
                self.section(&path, value);
            } else {
                self.moved(&path, value);
            }
        }
    }

    fn section(&mut self, path: &str, value: &Value) {
        match value {
            Value::Null => {}
            Value::Mapping(below) => self.walk(path, below),
            _ => self.wrong(path, At::Value, "must be a map of keys".to_owned()),
        }
    }

    /// `written` is the name in the file, `path` the key's own.
    fn leaf(&mut self, written: &str, path: &str, value: &Value) {
        let check = keys::find(path).map(|key| key.check);
        if let (false, Some(check)) = (value.is_null(), check)
            && let Err(message) = check(value)
        {
            let told = keys::find(path).map_or("", |key| key.kind);
            self.wrong(written, At::Value, format!("{message} (expected: {told})"));
            return;
        }
        if self.found.settings.iter().any(|(key, _)| key == path) {
            return self.wrong(
                written,
                At::Key,
                format!("stands for `{path}`, which is here under both of its names"),
            );
        }
        let origin = self.place(written, At::Key);
        let value = value.clone();
        self.found.settings.push((path.to_owned(), Setting { value, origin }));
    }

    /// A name of an older version, or none at all.
    fn moved(&mut self, path: &str, value: &Value) {
        let Some(moved) = MOVED.iter().find(|moved| moved.from == path) else {
            return self.unknown(path);
        };
        let until = VERSIONS.iter().position(|known| *known == moved.until);
        if self.version > until {
            return self.wrong(path, At::Key, format!("is called `{}` now", moved.to));
        }
        let place = self.place(path, At::Key);
        let warning = format!(
            "{place}: `{path}` is called `{}` now; the old name still counts",
            moved.to
        );
        self.found.warnings.push(warning);
        self.leaf(path, moved.to, value);
    }

    fn unknown(&mut self, path: &str) {
        let message = match keys::nearest(path) {
            Some(near) => format!("unknown key; did you mean `{near}`?"),
            None => "unknown key; `reconcile config explain` lists all".to_owned(),
        };
        self.wrong(path, At::Key, message);
    }
}
