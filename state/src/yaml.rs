//! YAML documents to records: our own kinds, and a Kubernetes `v1` Pod.
//!
//! Every problem has file, line, column, path and the source line with a caret: unknown fields, duplicate keys, wrong
//! types and bad values alike. All problems of a file are found at once and nothing is returned of a file with one.

mod kubernetes;
pub mod locate;
mod pod;
mod quantity;
mod secret;

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_yaml::Value;

use crate::error::{Error, Result as StateResult};
use crate::resource::{API_VERSION, Kind, Meta, Object};
use crate::store::New;
use crate::{container, image, pod as own_pod, sandbox, secret as own_secret};

use locate::{At, Spot};

/// Bytes of a file at most.
const MAX_TEXT: usize = 4 << 20;
/// Problems that are told of one file.
const MAX_PROBLEMS: usize = 20;

/// A record that a document states.
#[derive(Clone, Debug)]
pub enum Record {
    Pod(New<own_pod::PodKind>),
    PodSandbox(New<sandbox::SandboxKind>),
    Container(New<container::ContainerKind>),
    Image(New<image::ImageKind>),
    Secret(New<own_secret::SecretKind>),
}

/// One document of a file.
#[derive(Clone, Debug)]
pub struct Document {
    pub record: Record,
    /// Line on which it begins, from 1.
    pub line: usize,
    /// Fields that were read but mean nothing here.
    pub warnings: Vec<Problem>,
}

/// Something wrong with a file, with its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub file: String,
    /// From 1; 0 if the place is not known.
    pub line: usize,
    /// In characters, from 1.
    pub column: usize,
    /// e.g. `spec.containers[0].image`; empty for syntax errors.
    pub path: String,
    pub message: String,
    /// The line's text; empty where it may hold a secret.
    pub source: String,
}

impl fmt::Display for Problem {
    /// `FILE:LINE:COLUMN: PATH: MESSAGE`, the line, a caret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file)?;
        if self.line > 0 {
            write!(f, ":{}:{}", self.line, self.column)?;
        }
        if !self.path.is_empty() {
            write!(f, ": {}", self.path)?;
        }
        write!(f, ": {}", self.message)?;
        if self.line > 0 && !self.source.is_empty() {
            let shown: String = self
                .source
                .chars()
                .take(160)
                .map(|c| if c.is_control() { ' ' } else { c })
                .collect();
            let caret = " ".repeat((self.column - 1).min(160));
            write!(f, "\n    {shown}\n    {caret}^")?;
        }
        Ok(())
    }
}

impl Record {
    pub fn kind(&self) -> &'static str {
        match self {
            Record::Pod(_) => own_pod::PodKind::KIND,
            Record::PodSandbox(_) => sandbox::SandboxKind::KIND,
            Record::Container(_) => container::ContainerKind::KIND,
            Record::Image(_) => image::ImageKind::KIND,
            Record::Secret(_) => own_secret::SecretKind::KIND,
        }
    }

    pub fn meta(&self) -> &Meta {
        match self {
            Record::Pod(new) => &new.meta,
            Record::PodSandbox(new) => &new.meta,
            Record::Container(new) => &new.meta,
            Record::Image(new) => &new.meta,
            Record::Secret(new) => &new.meta,
        }
    }

    /// The form of [`Object::to_json`], to be sent to a daemon.
    pub fn to_json(&self) -> serde_json::Result<Vec<u8>> {
        fn json<K: Kind>(new: &New<K>) -> serde_json::Result<Vec<u8>> {
            Object::<K>::new(new.meta.clone(), new.spec.clone(), K::Status::default()).to_json()
        }
        match self {
            Record::Pod(new) => json(new),
            Record::PodSandbox(new) => json(new),
            Record::Container(new) => json(new),
            Record::Image(new) => json(new),
            Record::Secret(new) => secret::to_json(new),
        }
    }

    /// Reads what [`Record::to_json`] wrote and validates it.
    pub fn from_json(json: &[u8]) -> StateResult<Record> {
        #[derive(Deserialize)]
        struct Head {
            kind: String,
        }
        fn new<K: Kind>(json: &[u8]) -> StateResult<New<K>> {
            let object = Object::<K>::from_json(json).map_err(|e| Error::invalid("spec", e.to_string()))?;
            let (meta, spec) = (object.meta, object.spec);
            meta.validate()?;
            K::validate(&meta, &spec)?;
            Ok(New { meta, spec })
        }
        let head: Head = serde_json::from_slice(json).map_err(|e| Error::invalid("kind", e.to_string()))?;
        match head.kind.as_str() {
            "Pod" => new(json).map(Record::Pod),
            "PodSandbox" => new(json).map(Record::PodSandbox),
            "Container" => new(json).map(Record::Container),
            "Image" => new(json).map(Record::Image),
            "Secret" => secret::from_json(json).map(Record::Secret),
            other => Err(Error::invalid("kind", format!("unknown kind {other:?}"))),
        }
    }
}

/// A record with its status as YAML.
pub fn to_yaml<K: Kind>(object: &Object<K>) -> Result<String, serde_yaml::Error> {
    #[derive(serde::Serialize)]
    struct Whole<'a, S, T> {
        #[serde(rename = "apiVersion")]
        api_version: &'a str,
        kind: &'a str,
        metadata: &'a Meta,
        spec: &'a S,
        status: &'a T,
    }
    serde_yaml::to_string(&Whole {
        api_version: API_VERSION,
        kind: K::KIND,
        metadata: &object.meta,
        spec: &object.spec,
        status: &object.status,
    })
}

/// Reads every document of a file; `file` is its name in the problems. Empty documents are skipped.
pub fn parse(text: &str, file: &str) -> Result<Vec<Document>, Vec<Problem>> {
    let mut reader = Reader {
        text,
        file,
        document: 0,
        secret: false,
        problems: Vec::new(),
        warnings: Vec::new(),
    };
    if text.len() > MAX_TEXT {
        let message = format!("the file has {} bytes, {MAX_TEXT} are allowed", text.len());
        reader.problem(String::new(), Spot::default(), message);
        return Err(reader.problems);
    }
    let mut documents = Vec::new();
    for (number, yaml) in serde_yaml::Deserializer::from_str(text).enumerate() {
        reader.document = number;
        let before = reader.problems.len();
        documents.extend(reader.document(yaml));
        // After a syntax error the rest of the text has no meaning.
        if reader.problems.get(before).is_some_and(|p| p.path.is_empty()) || reader.problems.len() >= MAX_PROBLEMS {
            break;
        }
    }
    if reader.problems.is_empty() {
        return Ok(documents);
    }
    reader.problems.truncate(MAX_PROBLEMS);
    Err(reader.problems)
}

/// The state of reading one file.
struct Reader<'a> {
    text: &'a str,
    file: &'a str,
    /// Number of the present document.
    document: usize,
    /// It holds secrets: no problem may quote it.
    secret: bool,
    problems: Vec<Problem>,
    warnings: Vec<Problem>,
}

/// `metadata` of our own kinds as a user may write it.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct OwnMeta {
    name: String,
    #[serde(default = "default_namespace")]
    namespace: String,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

fn default_namespace() -> String {
    "default".into()
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Own<S> {
    #[serde(rename = "apiVersion")]
    _api_version: String,
    #[serde(rename = "kind")]
    _kind: String,
    metadata: OwnMeta,
    spec: S,
}

impl Reader<'_> {
    fn document(&mut self, yaml: serde_yaml::Deserializer<'_>) -> Option<Document> {
        // Until it can be read, nobody knows which of the file's documents holds secrets.
        self.secret = self.text.to_lowercase().contains("secret");
        let mut value = match Value::deserialize(yaml) {
            Ok(Value::Null) => return None,
            Ok(value) => value,
            Err(error) => {
                self.unreadable(&error);
                return None;
            }
        };
        let line = locate::find(self.text, self.document, "", At::Value).map_or(0, |(_, spot)| spot.line);
        if let Err(error) = value.apply_merge() {
            self.at("", At::Value, error.to_string());
            return None;
        }
        let text = |field| value.get(field).and_then(Value::as_str).unwrap_or_default().to_owned();
        let (api_version, kind) = (text("apiVersion"), text("kind"));
        self.secret = kind.to_lowercase().contains("secret");
        let record = match (api_version.as_str(), kind.as_str()) {
            ("v1", "Pod") => self.kubernetes_pod(value).map(Record::Pod),
            ("v1", "Secret") => self.kubernetes_secret(value).map(Record::Secret),
            (API_VERSION, "Pod") => self.own(value).map(Record::Pod),
            (API_VERSION, "PodSandbox") => self.own(value).map(Record::PodSandbox),
            (API_VERSION, "Container") => self.own(value).map(Record::Container),
            (API_VERSION, "Image") => self.own(value).map(Record::Image),
            _ => {
                self.unknown_kind(&value, &api_version, &kind);
                None
            }
        };
        let warnings = std::mem::take(&mut self.warnings);
        Some(Document {
            record: record?,
            line,
            warnings,
        })
    }

    fn unknown_kind(&mut self, value: &Value, api_version: &str, kind: &str) {
        let known =
            "apiVersion: v1 has Pod and Secret; apiVersion: reconcile/v1 has Pod, PodSandbox, Container and Image";
        if !value.is_mapping() {
            self.at(
                "",
                At::Value,
                "a document must be a map with apiVersion, kind, metadata and spec".into(),
            );
        } else if value.get("apiVersion").is_none() {
            self.at("apiVersion", At::Value, format!("is missing ({known})"));
        } else if !matches!(api_version, "v1" | API_VERSION) {
            self.at(
                "apiVersion",
                At::Value,
                format!("unknown version {api_version:?} ({known})"),
            );
        } else if value.get("kind").is_none() {
            self.at("kind", At::Value, format!("is missing ({known})"));
        } else {
            self.at("kind", At::Value, format!("unknown kind {kind:?} ({known})"));
        }
    }

    /// A syntax error, or a duplicate key.
    fn unreadable(&mut self, error: &serde_yaml::Error) {
        if let Some((path, key, spot)) = locate::duplicate(self.text, self.document) {
            let path = if path.is_empty() { key } else { format!("{path}.{key}") };
            return self.problem(path, spot, "is given twice".into());
        }
        let place = error.location().map(|l| Spot {
            line: l.line(),
            column: l.column(),
        });
        let message = error.to_string();
        let message = message.split(" at line ").next().unwrap_or(&message).to_owned();
        self.problem(String::new(), place.unwrap_or_default(), message);
    }

    /// One of our own kinds.
    fn own<K: Kind>(&mut self, value: Value) -> Option<New<K>> {
        let own: Own<K::Spec> = self.typed(value)?;
        let namespace = if K::KIND == image::ImageKind::KIND {
            String::new()
        } else {
            own.metadata.namespace
        };
        let meta = Meta {
            name: own.metadata.name,
            namespace,
            labels: own.metadata.labels,
            annotations: own.metadata.annotations,
            ..Meta::default()
        };
        self.validated(New { meta, spec: own.spec })
    }

    /// Each unknown field is told and taken out, so that the rest can be read and judged too.
    fn typed<T: DeserializeOwned>(&mut self, mut value: Value) -> Option<T> {
        loop {
            let error = match serde_path_to_error::deserialize::<_, T>(value.clone()) {
                Ok(typed) => return Some(typed),
                Err(error) => error,
            };
            let (path, message) = (error.path(), error.inner().to_string());
            self.mistyped(&path.to_string(), &message);
            let field = message
                .strip_prefix("unknown field `")
                .and_then(|rest| rest.split('`').next());
            if self.problems.len() >= MAX_PROBLEMS || !field.is_some_and(|field| remove(&mut value, path, field)) {
                return None;
            }
        }
    }

    /// serde's message about the value at `path`.
    fn mistyped(&mut self, path: &str, message: &str) {
        let path = if path == "." { "" } else { path };
        let mut quoted = message.split('`').skip(1).step_by(2);
        if message.starts_with("unknown field") {
            let field = quoted.next().unwrap_or_default();
            let parent = path.strip_suffix(field).map_or(path, |p| p.trim_end_matches('.'));
            let path = if parent.is_empty() {
                field.to_owned()
            } else {
                format!("{parent}.{field}")
            };
            let hint = closest(field, quoted).map_or_else(String::new, |known| format!(", did you mean {known:?}?"));
            self.at(&path, At::Key, format!("unknown field{hint}"));
        } else if message.starts_with("missing field") {
            let field = quoted.next().unwrap_or_default();
            let path = if path.is_empty() {
                field.to_owned()
            } else {
                format!("{path}.{field}")
            };
            self.at(&path, At::Value, "is missing".into());
        } else {
            // serde quotes what it found.
            let message = match message.rsplit_once("expected ") {
                Some((_, expected)) if self.secret => format!("must be {expected}"),
                None if self.secret => "is not as it should be".to_owned(),
                _ => message.to_owned(),
            };
            self.at(path, At::Value, message);
        }
    }

    fn validated<K: Kind>(&mut self, new: New<K>) -> Option<New<K>> {
        match new.meta.validate().and_then(|()| K::validate(&new.meta, &new.spec)) {
            Ok(()) => Some(new),
            Err(Error::Invalid { field, problem }) => {
                self.at(&field, At::Value, problem);
                None
            }
            Err(error) => {
                self.at("", At::Value, error.to_string());
                None
            }
        }
    }

    /// A problem with what `path` names; if that is not there, its nearest parent's place is shown.
    fn at(&mut self, path: &str, at: At, message: String) {
        let problem = self.located(path, at, message);
        self.problems.push(problem);
    }

    fn warn(&mut self, path: &str, message: String) {
        let problem = self.located(path, At::Key, message);
        self.warnings.push(problem);
    }

    fn located(&self, path: &str, at: At, message: String) -> Problem {
        let found = locate::find(self.text, self.document, path, at);
        self.build(
            path.to_owned(),
            found.map(|(_, spot)| spot).unwrap_or_default(),
            message,
        )
    }

    fn problem(&mut self, path: String, spot: Spot, message: String) {
        let problem = self.build(path, spot, message);
        self.problems.push(problem);
    }

    fn build(&self, path: String, spot: Spot, message: String) -> Problem {
        let source = spot
            .line
            .checked_sub(1)
            .and_then(|n| self.text.lines().nth(n))
            .filter(|_| !self.secret)
            .unwrap_or_default();
        Problem {
            file: self.file.to_owned(),
            line: spot.line,
            column: spot.column.max(1),
            path,
            message,
            source: source.to_owned(),
        }
    }
}

/// Takes `field` out of the map that `path` names or leads into.
fn remove(value: &mut Value, path: &serde_path_to_error::Path, field: &str) -> bool {
    use serde_path_to_error::Segment;
    let mut here = value;
    for segment in path {
        let next = match segment {
            Segment::Map { key } if key == field && here.get(field).is_some() => break,
            Segment::Map { key } => here.get_mut(key.as_str()),
            Segment::Seq { index } => here.get_mut(index),
            _ => None,
        };
        match next {
            Some(next) => here = next,
            None => return false,
        }
    }
    here.as_mapping_mut().is_some_and(|map| map.remove(field).is_some())
}

/// The name most like `field`, if one is at most a third of it away.
fn closest<'a>(field: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let bound = field.chars().count().max(3) / 3;
    known
        .map(|name| (distance(field, name), name))
        .filter(|(d, _)| *d <= bound)
        .min()
        .map(|(_, name)| name)
}

/// Edits between two names, upper and lower case being the same.
fn distance(a: &str, b: &str) -> usize {
    let (a, b) = (a.to_lowercase(), b.to_lowercase());
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().take(64).enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
