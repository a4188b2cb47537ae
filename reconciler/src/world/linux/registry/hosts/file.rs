//! `hosts.toml`, field by field: what cannot be used is reported with its line, and the rest is used.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::time::Duration;

use reqwest::header::{HeaderName, HeaderValue};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{Capabilities, Ignored};

/// A value and the line that it stands on, from 1; 0 stands for the file.
#[derive(Clone, Debug)]
pub struct At<T> {
    pub line: usize,
    pub value: T,
}

impl<T> At<T> {
    pub fn file(value: T) -> At<T> {
        At { line: 0, value }
    }
}

/// What may be said at the top, of the server, and of each host.
#[derive(Clone, Debug, Default)]
pub struct Fields {
    pub capabilities: Option<At<Capabilities>>,
    pub ca: Option<At<Vec<PathBuf>>>,
    pub client: Option<At<Vec<(PathBuf, Option<PathBuf>)>>>,
    pub skip_verify: Option<At<bool>>,
    pub override_path: Option<At<bool>>,
    pub headers: Vec<At<(HeaderName, HeaderValue)>>,
    pub dial_timeout: Option<At<Duration>>,
}

/// `[host."URL"]`.
#[derive(Clone, Debug)]
pub struct Table {
    pub line: usize,
    pub url: String,
    pub fields: Fields,
}

#[derive(Clone, Debug, Default)]
pub struct HostsFile {
    pub path: PathBuf,
    pub server: Option<At<String>>,
    pub top: Fields,
    /// In the order of the file.
    pub hosts: Vec<Table>,
}

impl HostsFile {
    /// `file:line`.
    pub fn origin(&self, line: usize) -> String {
        match line {
            0 => self.path.display().to_string(),
            line => format!("{}:{line}", self.path.display()),
        }
    }

    pub fn ignored(&self, line: usize, problem: String) -> Ignored {
        Ignored {
            file: self.path.clone(),
            line: Some(line).filter(|line| *line > 0),
            problem,
        }
    }
}

const FIELDS: [&str; 7] = [
    "capabilities",
    "ca",
    "client",
    "skip_verify",
    "override_path",
    "header",
    "dial_timeout",
];

/// Reads the text of the file at `path`; relative paths in it start at its directory.
pub fn parse(path: &Path, text: &str, ignored: &mut Vec<Ignored>) -> HostsFile {
    let (document, errors) = DeTable::parse_recoverable(text);
    let mut reader = Reader { path, text, ignored };
    for error in errors {
        reader.complain(error.span().map_or(0, |span| span.start), error.message());
    }
    let mut file = HostsFile {
        path: path.to_owned(),
        ..HostsFile::default()
    };
    let mut top = Vec::new();
    for (key, value) in in_order(document.get_ref()) {
        match key.get_ref().as_ref() {
            "server" => file.server = reader.string(key, value).filter(|server| !server.value.is_empty()),
            "host" => match value.get_ref() {
                DeValue::Table(hosts) => file.hosts = reader.hosts(hosts),
                other => reader.mismatch(key, "a table for each host", other),
            },
            _ => top.push((key, value)),
        }
    }
    file.top = reader.fields(top, &["server", "host"]);
    file
}

type Key<'a> = Spanned<std::borrow::Cow<'a, str>>;
type Entry<'a, 'b> = (&'b Key<'a>, &'b Spanned<DeValue<'a>>);

/// Entries as they stand in the file; the library sorts them by name.
fn in_order<'a, 'b>(table: &'b DeTable<'a>) -> Vec<Entry<'a, 'b>> {
    let mut entries: Vec<_> = table.iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    entries
}

struct Reader<'a> {
    path: &'a Path,
    text: &'a str,
    ignored: &'a mut Vec<Ignored>,
}

impl Reader<'_> {
    fn line(&self, offset: usize) -> usize {
        let before = self.text.as_bytes().get(..offset).unwrap_or(self.text.as_bytes());
        1 + before.iter().filter(|byte| **byte == b'\n').count()
    }

    fn complain(&mut self, offset: usize, problem: impl Display) {
        let line = Some(self.line(offset));
        self.ignored.push(Ignored {
            file: self.path.to_owned(),
            line,
            problem: problem.to_string(),
        });
    }

    fn mismatch(&mut self, key: &Key, wanted: &str, got: &DeValue) {
        let problem = format!("{}: expected {wanted}, found a {}", key.get_ref(), got.type_str());
        self.complain(key.span().start, problem);
    }

    fn at<T>(&self, key: &Key, value: T) -> At<T> {
        At {
            line: self.line(key.span().start),
            value,
        }
    }

    fn hosts(&mut self, hosts: &DeTable) -> Vec<Table> {
        let mut tables = Vec::new();
        for (url, value) in in_order(hosts) {
            match value.get_ref() {
                DeValue::Table(fields) => tables.push(Table {
                    line: self.line(url.span().start),
                    url: url.get_ref().to_string(),
                    fields: self.fields(in_order(fields), &[]),
                }),
                other => self.mismatch(url, "a table", other),
            }
        }
        tables
    }

    fn fields(&mut self, entries: Vec<Entry>, also: &[&str]) -> Fields {
        let mut fields = Fields::default();
        for (key, value) in entries {
            match key.get_ref().as_ref() {
                "capabilities" => fields.capabilities = self.capabilities(key, value),
                "ca" => fields.ca = self.paths(key, value),
                "client" => fields.client = self.client(key, value),
                "skip_verify" => fields.skip_verify = self.bool(key, value),
                "override_path" => fields.override_path = self.bool(key, value),
                "header" => self.headers(key, value, &mut fields.headers),
                "dial_timeout" => fields.dial_timeout = self.duration(key, value),
                other => {
                    let known = FIELDS.iter().chain(also);
                    let near = known.min_by_key(|name| distance(name, other));
                    let near = near.filter(|name| distance(name, other) <= 3);
                    let hint = near.map_or_else(String::new, |name| format!("; did you mean {name}?"));
                    self.complain(key.span().start, format!("unknown field {other:?}{hint}"));
                }
            }
        }
        fields
    }

    fn string(&mut self, key: &Key, value: &Spanned<DeValue>) -> Option<At<String>> {
        match value.get_ref() {
            DeValue::String(text) => Some(self.at(key, text.to_string())),
            other => {
                self.mismatch(key, "a string", other);
                None
            }
        }
    }

    fn bool(&mut self, key: &Key, value: &Spanned<DeValue>) -> Option<At<bool>> {
        match value.get_ref() {
            DeValue::Boolean(value) => Some(self.at(key, *value)),
            other => {
                self.mismatch(key, "true or false", other);
                None
            }
        }
    }

    /// A string or a list of strings, each with its place.
    fn strings(&mut self, key: &Key, value: &Spanned<DeValue>) -> Option<Vec<(usize, String)>> {
        match value.get_ref() {
            DeValue::String(text) => Some(vec![(value.span().start, text.to_string())]),
            DeValue::Array(items) => {
                let mut all = Vec::new();
                for item in items.iter() {
                    match item.get_ref() {
                        DeValue::String(text) => all.push((item.span().start, text.to_string())),
                        other => self.mismatch(key, "strings", other),
                    }
                }
                Some(all)
            }
            other => {
                self.mismatch(key, "a string or a list of strings", other);
                None
            }
        }
    }

    fn capabilities(&mut self, key: &Key, value: &Spanned<DeValue>) -> Option<At<Capabilities>> {
        let mut held = Capabilities {
            pull: false,
            resolve: false,
            push: false,
        };
        for (place, name) in self.strings(key, value)? {
            match name.as_str() {
                "pull" => held.pull = true,
                "resolve" => held.resolve = true,
                "push" => held.push = true,
                "referrers" => {}
                other => self.complain(place, format!("unknown capability {other:?}: pull, resolve or push")),
            }
        }
        Some(self.at(key, held))
    }

    fn absolute(&self, path: &str) -> PathBuf {
        self.path.parent().unwrap_or(Path::new("/")).join(path)
    }

    fn paths(&mut self, key: &Key, value: &Spanned<DeValue>) -> Option<At<Vec<PathBuf>>> {
        let paths = self.strings(key, value)?;
        let paths = paths.iter().map(|(_, path)| self.absolute(path)).collect();
        Some(self.at(key, paths))
    }

    /// A path, a list of paths, or a list of `[certificate, key]`.
    fn client(&mut self, key: &Key, value: &Spanned<DeValue>) -> Option<At<Vec<(PathBuf, Option<PathBuf>)>>> {
        let mut pairs: Vec<(PathBuf, Option<PathBuf>)> = Vec::new();
        match value.get_ref() {
            DeValue::Array(items) if items.iter().any(|item| item.get_ref().is_array()) => {
                for item in items.iter() {
                    let place = item.span().start;
                    let pair = self.strings(key, item)?;
                    match pair.as_slice() {
                        [(_, cert)] => pairs.push((self.absolute(cert), None)),
                        [(_, cert), (_, file)] => {
                            let file = Some(file.as_str()).filter(|file| !file.is_empty());
                            let file = file.map(|file| self.absolute(file));
                            pairs.push((self.absolute(cert), file));
                        }
                        _ => self.complain(place, "client: expected [certificate, key]"),
                    }
                }
            }
            _ => {
                let paths = self.strings(key, value)?;
                pairs.extend(paths.iter().map(|(_, path)| (self.absolute(path), None)));
            }
        }
        (!pairs.is_empty()).then(|| self.at(key, pairs))
    }

    fn headers(&mut self, key: &Key, value: &Spanned<DeValue>, headers: &mut Vec<At<(HeaderName, HeaderValue)>>) {
        let DeValue::Table(table) = value.get_ref() else {
            return self.mismatch(key, "a table", value.get_ref());
        };
        for (key, value) in in_order(table) {
            let Ok(name) = HeaderName::from_bytes(key.get_ref().as_bytes()) else {
                self.complain(key.span().start, format!("{:?} is no name of a header", key.get_ref()));
                continue;
            };
            for (place, text) in self.strings(key, value).unwrap_or_default() {
                match HeaderValue::from_str(&text) {
                    Ok(mut value) => {
                        value.set_sensitive(true);
                        headers.push(At {
                            line: self.line(place),
                            value: (name.clone(), value),
                        });
                    }
                    Err(_) => self.complain(place, format!("the value of {name} cannot stand in a header")),
                }
            }
        }
    }

    fn duration(&mut self, key: &Key, value: &Spanned<DeValue>) -> Option<At<Duration>> {
        let text = self.string(key, value)?;
        let parsed = duration(&text.value).filter(|duration| !duration.is_zero());
        if parsed.is_none() {
            self.complain(
                value.span().start,
                format!("{:?} is no duration such as 30s", text.value),
            );
        }
        parsed.map(|value| self.at(key, value))
    }
}

/// `1m30s`, `500ms`, `1.5h`, as Go writes durations.
fn duration(text: &str) -> Option<Duration> {
    let mut rest = text;
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let value: f64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let letters = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let unit = match &rest[..letters] {
            "ms" => 0.001,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return None,
        };
        rest = &rest[letters..];
        total = total.checked_add(Duration::try_from_secs_f64(value * unit).ok()?)?;
    }
    Some(total)
}

/// Edits between two words (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().take(64).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let change = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = change.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
