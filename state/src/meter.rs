//! Counters, gauges and durations of this program, kept in memory and written in Prometheus' text format.
//!
//! Names and label keys are ours, and so must the values of labels be: nothing that a client makes up.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What each name means, and in which unit.
const HELP: &[(&str, &str)] = &[
    ("reconcile_rpc_total", "Calls by operation, code and runtime handler."),
    (
        "reconcile_rpc_seconds",
        "Time to the answer of a call, or to the first of a stream.",
    ),
    ("reconcile_passes_total", "Passes over objects by kind and result."),
    ("reconcile_pass_seconds", "Duration of a pass by kind."),
    (
        "reconcile_stages_total",
        "Steps taken or refused by kind, stage and result.",
    ),
    (
        "reconcile_repairs_total",
        "Stages made anew that had been lost or damaged.",
    ),
    ("reconcile_queue_depth", "Objects that wait to be looked at."),
    (
        "reconcile_ready_seconds",
        "Time from the wish of a new object to its being ready.",
    ),
    (
        "reconcile_orphans_swept_total",
        "Things bearing our mark that no record knew.",
    ),
    ("reconcile_commit_seconds", "Time to make a batch of records durable."),
    ("reconcile_records", "Records by kind."),
];

/// Upper bounds of the buckets of durations, in seconds.
const BOUNDS: [f64; 13] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0,
];

/// More series than the program can name; what would be one more is dropped.
const MOST: usize = 10_000;

/// Label keys with their values.
pub type Labels<'a> = &'a [(&'static str, &'a str)];

/// Clones share everything.
#[derive(Clone, Default)]
pub struct Meter(Arc<Mutex<Series>>);

/// By name, then by labels as they are written.
type Series = BTreeMap<(&'static str, String), Value>;

enum Value {
    Count(u64),
    Level(f64),
    Times(Times),
}

#[derive(Default)]
struct Times {
    /// Not cumulative; the last has no bound.
    buckets: [u64; BOUNDS.len() + 1],
    sum: f64,
}

impl Meter {
    fn lock(&self) -> MutexGuard<'_, Series> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with(&self, name: &'static str, labels: Labels, new: impl FnOnce() -> Value, change: impl FnOnce(&mut Value)) {
        let mut series = self.lock();
        let key = (name, written(labels));
        if series.len() < MOST || series.contains_key(&key) {
            change(series.entry(key).or_insert_with(new));
        }
    }

    /// Counts one more.
    pub fn count(&self, name: &'static str, labels: Labels) {
        self.with(
            name,
            labels,
            || Value::Count(0),
            |value| {
                if let Value::Count(n) = value {
                    *n += 1;
                }
            },
        );
    }

    /// Says how much there is now.
    pub fn set(&self, name: &'static str, labels: Labels, level: f64) {
        self.with(
            name,
            labels,
            || Value::Level(level),
            |value| *value = Value::Level(level),
        );
    }

    /// Adds a duration.
    pub fn time(&self, name: &'static str, labels: Labels, took: Duration) {
        self.with(
            name,
            labels,
            || Value::Times(Times::default()),
            |value| {
                if let Value::Times(times) = value {
                    let seconds = took.as_secs_f64();
                    times.sum += seconds;
                    times.buckets[BOUNDS.partition_point(|bound| *bound < seconds)] += 1;
                }
            },
        );
    }

    /// Total of the counters of a name whose labels hold all of `labels`.
    pub fn total(&self, name: &str, labels: Labels) -> u64 {
        let wanted: Vec<_> = labels
            .iter()
            .map(|label| written(std::slice::from_ref(label)))
            .collect();
        let series = self.lock();
        let fits = series
            .iter()
            .filter(|((n, have), _)| *n == name && wanted.iter().all(|w| have.contains(w.as_str())));
        fits.map(|(_, value)| match value {
            Value::Count(n) => *n,
            _ => 0,
        })
        .sum()
    }

    /// Everything in Prometheus' text format, version 0.0.4.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let mut last = "";
        for ((name, labels), value) in self.lock().iter() {
            if *name != last {
                let help = HELP
                    .iter()
                    .find(|(known, _)| known == name)
                    .map_or("", |(_, help)| help);
                let kind = match value {
                    Value::Count(_) => "counter",
                    Value::Level(_) => "gauge",
                    Value::Times(_) => "histogram",
                };
                // Writing to a String does not fail.
                let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
                last = name;
            }
            write_value(&mut text, name, labels, value);
        }
        text
    }
}

fn write_value(text: &mut String, name: &str, labels: &str, value: &Value) {
    let _ = match value {
        Value::Count(n) => writeln!(text, "{name}{{{labels}}} {n}"),
        Value::Level(level) => writeln!(text, "{name}{{{labels}}} {level}"),
        Value::Times(times) => {
            let comma = if labels.is_empty() { "" } else { "," };
            let mut below = 0;
            let bounds = BOUNDS.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
            for (n, bound) in times.buckets.iter().zip(bounds) {
                below += n;
                let _ = writeln!(text, "{name}_bucket{{{labels}{comma}le=\"{bound}\"}} {below}");
            }
            writeln!(
                text,
                "{name}_sum{{{labels}}} {}\n{name}_count{{{labels}}} {below}",
                times.sum
            )
        }
    };
}

/// Labels as the text format has them; a label without a value is none.
fn written(labels: Labels) -> String {
    let mut text = String::new();
    for (key, value) in labels.iter().filter(|(_, value)| !value.is_empty()) {
        let comma = if text.is_empty() { "" } else { "," };
        let _ = write!(text, "{comma}{key}=\"{}\"", escaped(value));
    }
    text
}

/// A label's value between its quotes.
pub fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_counters_gauges_and_cumulative_buckets() {
        let meter = Meter::default();
        let labels: Labels = &[("operation", "Run\"Pod"), ("handler", "")];
        meter.count("reconcile_rpc_total", labels);
        meter.count("reconcile_rpc_total", labels);
        meter.set("reconcile_records", &[("kind", "Pod")], 3.0);
        for ms in [1, 3, 70_000] {
            meter.time("reconcile_commit_seconds", &[], Duration::from_millis(ms));
        }
        let text = meter.text();
        for line in [
            "# TYPE reconcile_rpc_total counter",
            r#"reconcile_rpc_total{operation="Run\"Pod"} 2"#,
            "# TYPE reconcile_records gauge",
            r#"reconcile_records{kind="Pod"} 3"#,
            r#"reconcile_commit_seconds_bucket{le="0.0005"} 0"#,
            r#"reconcile_commit_seconds_bucket{le="0.001"} 1"#,
            r#"reconcile_commit_seconds_bucket{le="0.005"} 2"#,
            r#"reconcile_commit_seconds_bucket{le="30"} 2"#,
            r#"reconcile_commit_seconds_bucket{le="+Inf"} 3"#,
            "reconcile_commit_seconds_sum{} 70.004",
            "reconcile_commit_seconds_count{} 3",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
        assert_eq!(text.matches("# HELP reconcile_commit_seconds Time").count(), 1);
        assert_eq!(meter.total("reconcile_rpc_total", &[]), 2);
        assert_eq!(meter.total("reconcile_rpc_total", &[("operation", "Stop")]), 0);
    }

    #[test]
    fn the_number_of_series_is_bounded() {
        let meter = Meter::default();
        for n in 0..MOST + 5 {
            meter.count("reconcile_rpc_total", &[("code", &n.to_string())]);
        }
        meter.count("reconcile_rpc_total", &[("code", "0")]);
        assert_eq!(meter.total("reconcile_rpc_total", &[]), MOST as u64 + 1);
    }
}
