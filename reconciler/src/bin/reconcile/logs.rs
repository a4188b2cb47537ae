//! `reconcile logs`, and how log entries are shown.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::Value;
use tokio::task::JoinSet;

use crate::client::{Client, text};
use crate::containers;
use crate::local::{Need, Session};
use crate::options::Global;
use crate::print::now;
use crate::tail::{self, Entry, Start};
use crate::verdict::waits_for;

#[derive(Args)]
pub struct Logs {
    /// A pod's name, or the beginning of a container's id
    #[arg(value_name = "POD|ID")]
    target: String,
    /// The container in the pod [default: all, each line with its name]
    #[arg(short, long)]
    container: Option<String>,
    /// Only in this namespace
    #[arg(short, long)]
    namespace: Option<String>,
    /// Go on until the container ends
    #[arg(short, long)]
    follow: bool,
    /// Only the last so many lines
    #[arg(long, value_name = "LINES")]
    tail: Option<usize>,
    /// Only what is newer than so long, e.g. 90s, 10m, 2h
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    since: Option<Duration>,
    /// Show when each line was written
    #[arg(short, long)]
    timestamps: bool,
    /// Of the attempt before the present one
    #[arg(short, long, conflicts_with = "follow")]
    previous: bool,
}

pub async fn run(global: &Global, args: &Logs) -> Result<ExitCode> {
    let session = Session::open(global, if args.follow { Need::Act } else { Need::Look }).await?;
    let shown = show(&session.client, args).await;
    session.close().await?;
    shown.map(|()| ExitCode::SUCCESS)
}

async fn show(client: &Client, args: &Logs) -> Result<()> {
    let found = containers::find(
        client,
        &args.target,
        args.container.as_deref(),
        args.namespace.as_deref(),
    )
    .await?;
    let since = args
        .since
        .map(|d| now().saturating_sub(i64::try_from(d.as_nanos()).unwrap_or(i64::MAX)));
    let start = Start { last: args.tail, since };
    let mut readers = JoinSet::new();
    for container in &found {
        let name = text(&container["spec"]["name"]);
        let path = path(container, args.previous).with_context(|| format!("container {name}"));
        let path = match path {
            // Of several, what has not begun has nothing to show.
            Err(_) if found.len() > 1 => continue,
            path => path?,
        };
        let label = (found.len() > 1).then(|| format!("[{}/{name}] ", args.target));
        let mut printer = Printer::new(label, args.timestamps);
        let ended = match args.follow {
            true => Some(until_ended(client, text(&container["metadata"]["uid"])).await?),
            false => None,
        };
        let read = move || {
            let sink = |entry: Entry<'_>| printer.print(entry);
            match &ended {
                Some(ended) => tail::follow(&path, start, ended, sink),
                None => tail::read(&path, start, sink),
            }
            .with_context(|| format!("log {}", path.display()))?;
            anyhow::Ok(printer.end()?)
        };
        if args.follow {
            readers.spawn_blocking(read);
        } else {
            tokio::task::spawn_blocking(read).await??;
        }
    }
    while let Some(ended) = readers.join_next().await {
        ended??;
    }
    Ok(())
}

/// The log file of a container that has begun.
fn path(container: &Value, previous: bool) -> Result<PathBuf> {
    let status = &container["status"];
    let path = PathBuf::from(text(&status["logPath"]));
    if path.as_os_str().is_empty() {
        bail!("keeps no log: its sandbox has no log directory");
    }
    if previous {
        let before = tail::previous(&path).filter(|p| p.exists());
        return before.context("has no earlier attempt, or its log is gone");
    }
    match text(&status["phase"]) {
        "Running" | "Exited" => Ok(path),
        phase => bail!("has not begun ({phase}) {}", waits_for(status)),
    }
}

/// A descriptor that becomes readable when the container has ended or is gone.
async fn until_ended(client: &Client, uid: &str) -> Result<OwnedFd> {
    let (ended, end) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
    let mut changes = client.watch("Container", uid).await?;
    tokio::spawn(async move {
        while let Ok(Some((container, erased))) = changes.next().await {
            if erased || container["status"]["phase"] == "Exited" {
                break;
            }
        }
        drop(end);
    });
    Ok(ended)
}

/// Writes entries to standard output and error, whole lines at a time when several containers are shown.
pub struct Printer {
    /// Before every line; `None` for a container shown alone, whose bytes are passed on as they come.
    label: Option<String>,
    timestamps: bool,
    /// Unfinished lines of standard output and error.
    open: [Vec<u8>; 2],
    /// Is the last byte that was written to it within a line?
    within: [bool; 2],
}

/// One line is one write, whoever writes.
static TERMINAL: Mutex<()> = Mutex::new(());

impl Printer {
    pub fn new(label: Option<String>, timestamps: bool) -> Printer {
        Printer {
            label,
            timestamps,
            open: Default::default(),
            within: [false; 2],
        }
    }

    pub fn print(&mut self, entry: Entry<'_>) -> io::Result<()> {
        let stream = usize::from(entry.stderr);
        let mut bytes = std::mem::take(&mut self.open[stream]);
        if !self.within[stream] {
            bytes.extend_from_slice(self.label.as_deref().unwrap_or_default().as_bytes());
            if self.timestamps && !entry.time.is_empty() {
                bytes.extend_from_slice(entry.time.as_bytes());
                bytes.push(b' ');
            }
        }
        bytes.extend_from_slice(entry.content);
        self.within[stream] = entry.partial;
        if !entry.partial {
            bytes.push(b'\n');
        } else if self.label.is_some() && bytes.len() < 1 << 20 {
            self.open[stream] = bytes;
            return Ok(());
        }
        write(stream, &bytes)
    }

    /// Ends lines whose newline never came, where another container's may follow.
    pub fn end(&mut self) -> io::Result<()> {
        for stream in 0..2 {
            let mut bytes = std::mem::take(&mut self.open[stream]);
            if self.label.is_some() && self.within[stream] {
                bytes.push(b'\n');
            }
            self.within[stream] = false;
            write(stream, &bytes)?;
        }
        Ok(())
    }
}

fn write(stream: usize, bytes: &[u8]) -> io::Result<()> {
    let _whole = TERMINAL.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if stream == 1 {
        return io::stderr().lock().write_all(bytes);
    }
    let mut out = io::stdout().lock();
    out.write_all(bytes)?;
    out.flush()
}

/// `90s`, `10m`, `1h30m`, `2d`.
fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || "must be like 90s, 10m, 1h30m or 2d".to_owned();
    let (mut seconds, mut digits) = (0u64, String::new());
    for c in text.chars() {
        let unit = match c {
            '0'..='9' => {
                digits.push(c);
                continue;
            }
            's' => 1,
            'm' => 60,
            'h' => 3600,
            'd' => 86_400,
            _ => return Err(wrong()),
        };
        let count: u64 = std::mem::take(&mut digits).parse().map_err(|_| wrong())?;
        seconds = count
            .checked_mul(unit)
            .and_then(|s| s.checked_add(seconds))
            .ok_or_else(wrong)?;
    }
    if text.is_empty() || !digits.is_empty() {
        Err(wrong())
    } else {
        Ok(Duration::from_secs(seconds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn durations() {
        assert_eq!(duration("1h30m5s"), Ok(Duration::from_secs(5405)));
        for text in ["", "5", "m", "5x", "-1s", "99999999999999999999s"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn partial_entries_are_joined_before_a_label_is_shown_again() {
        let mut printer = Printer::new(Some("[p/c] ".into()), true);
        let entry = |content, partial| Entry {
            time: "T",
            stderr: false,
            partial,
            content,
        };
        printer.print(entry(b"a", true)).unwrap();
        printer.print(entry(b"b", true)).unwrap();
        assert_eq!(printer.open[0], b"[p/c] T ab");
    }

    #[test]
    fn a_container_that_has_not_begun_says_why() {
        let conditions = json!([{"type": "image", "status": "False", "message": "image x is not here"}]);
        let status = json!({"phase": "Pending", "logPath": "/l/0.log", "conditions": conditions});
        let error = path(&json!({"status": status}), false).unwrap_err().to_string();
        assert!(error.contains("image x is not here"), "{error}");
    }
}
