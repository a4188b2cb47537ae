//! A configuration as a person reads it.

use serde_json::json;
use serde_yaml::Value;

use super::keys::{self, KEYS, KIND, Key, VERSIONS, When};
use super::{Setting, Settings};

/// Columns of a line of comment.
const WIDTH: usize = 100;

/// A value on one line of YAML.
pub fn flow(value: &Value) -> String {
    match value {
        Value::Sequence(items) => {
            let items: Vec<String> = items.iter().map(flow).collect();
            format!("[{}]", items.join(", "))
        }
        Value::Mapping(map) => {
            let pairs: Vec<String> = map
                .iter()
                .map(|(key, value)| format!("{}: {}", flow(key), flow(value)))
                .collect();
            format!("{{{}}}", pairs.join(", "))
        }
        Value::String(text) => scalar(text),
        other => serde_yaml::to_string(other).unwrap_or_default().trim_end().to_owned(),
    }
}

/// Plain where YAML reads the same text back, also within a list; else in quotes.
fn scalar(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+@=".contains(c) || c == ':';
    let back = serde_yaml::from_str::<Value>(text).is_ok_and(|value| value.as_str() == Some(text));
    let same = back && text.chars().all(plain) && !text.ends_with(':') && !text.starts_with(['-', '@', '=']);
    match same {
        true => text.to_owned(),
        false => json!(text).to_string(),
    }
}

/// When a change counts, in words.
pub fn when(when: When) -> &'static str {
    match when {
        When::Now => "a reload applies it",
        When::Next => "a reload applies it to what is started from then on",
        When::Restart => "the daemon must be restarted to apply it",
    }
}

/// Lines of at most [`WIDTH`] columns, each after `prefix`.
fn wrapped(prefix: &str, text: &str) -> String {
    let (mut all, mut line) = (String::new(), prefix.to_owned());
    for word in text.split_whitespace() {
        if line.len() + word.len() > WIDTH && line != prefix {
            all += &format!("{}\n", line.trim_end());
            line = prefix.to_owned();
        }
        line += &format!("{word} ");
    }
    all + line.trim_end() + "\n"
}

/// Every key with its default and its meaning, as a file that changes nothing.
pub fn defaults() -> String {
    let mut text = format!(
        "# The configuration of reconcile: each key with its default. The files of config.d lie over it, by\n\
         # name.\n\
         apiVersion: {}\nkind: {KIND}\n",
        VERSIONS[VERSIONS.len() - 1]
    );
    let mut sections: Vec<&str> = Vec::new();
    for key in KEYS {
        let mut parts: Vec<&str> = key.path.split('.').collect();
        let name = parts.pop().unwrap_or_default();
        text.push('\n');
        let empty = |section: &str| keys::within(section).all(|key| key.default.is_empty());
        // A section of nothing but comments would be null, which is allowed and ugly.
        let mut gone = false;
        for (depth, section) in parts.iter().enumerate() {
            gone = gone || empty(&parts[..=depth].join("."));
            if sections.get(depth) != Some(section) {
                sections.truncate(depth);
                sections.push(section);
                let mark = if gone { "# " } else { "" };
                text += &format!("{}{mark}{section}:\n", "  ".repeat(depth));
            }
        }
        sections.truncate(parts.len());
        let indent = "  ".repeat(parts.len());
        text += &wrapped(&format!("{indent}# "), &about(key));
        text += &match (key.default, name) {
            ("", "*") => format!("{indent}# {}\n", key.example),
            ("", name) => format!("{indent}# {name}: {}\n", key.example),
            (default, name) => format!("{indent}{name}: {default}\n"),
        };
    }
    text
}

fn about(key: &Key) -> String {
    let flag = match (key.flag, key.variable()) {
        (Some(flag), Some(variable)) => format!("; --{flag}, {variable}"),
        _ => String::new(),
    };
    format!("{} ({}{flag}; {})", key.meaning, key.kind, when(key.when))
}

/// What `explain` says of one key.
pub fn explain(key: &Key) -> String {
    let mut text = format!("{}\n", key.path);
    text += &wrapped("  ", key.meaning);
    let mut line = |name: &str, value: &str| text += &format!("  {name:<9}{value}\n");
    line("type", key.kind);
    match key.default {
        "" => line("default", &format!("none (example: {})", key.example)),
        default => line("default", default),
    }
    line("reload", when(key.when));
    match (key.flag, key.variable()) {
        (Some(flag), Some(variable)) => line("flag", &format!("--{flag}, environment {variable}")),
        _ => line("flag", "none"),
    }
    text
}

/// Settings as YAML, in their order; with their origins, if asked.
pub fn yaml(all: &[(String, Setting)], origin: bool) -> String {
    let mut text = String::new();
    let mut sections: Vec<String> = Vec::new();
    for (path, setting) in all {
        let mut parts: Vec<&str> = path.split('.').collect();
        let name = parts.pop().unwrap_or_default();
        for (depth, section) in parts.iter().enumerate() {
            if sections.get(depth).map(String::as_str) != Some(*section) {
                sections.truncate(depth);
                sections.push((*section).to_owned());
                text += &format!("{}{section}:\n", "  ".repeat(depth));
            }
        }
        sections.truncate(parts.len());
        let line = format!("{}{name}: {}", "  ".repeat(parts.len()), flow(&setting.value));
        text += &match origin {
            true => format!("{line}  # {}\n", setting.origin),
            false => format!("{line}\n"),
        };
    }
    text
}

/// The same as JSON: the tree, or, with origins, a map from key to value and origin.
pub fn json(settings: &Settings, origin: bool) -> serde_json::Value {
    if !origin {
        return serde_json::to_value(settings.tree()).unwrap_or_default();
    }
    let all = settings.all().into_iter().map(|(path, setting)| {
        let value = serde_json::to_value(&setting.value).unwrap_or_default();
        (path, json!({ "value": value, "origin": setting.origin.to_string() }))
    });
    all.collect::<serde_json::Map<_, _>>().into()
}
