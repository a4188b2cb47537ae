//! Runs one CNI plugin: environment and standard input in, JSON out (CNI specification, section 2).
//!
//! Plugins are programs of the administrator's, but what they print is not trusted: output and time are bounded.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};
use tokio::time::{Instant, timeout, timeout_at};

use super::error::{Error, Result};

const MAX_STDOUT: usize = 1 << 20;
const MAX_STDERR: usize = 64 << 10;
/// How long output may trail the end of the plugin, which a background process of its may hold open.
const TRAIL: Duration = Duration::from_millis(500);

/// `CNI_COMMAND`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    Add,
    Del,
    Status,
}

impl Verb {
    pub fn name(self) -> &'static str {
        match self {
            Verb::Add => "ADD",
            Verb::Del => "DEL",
            Verb::Status => "STATUS",
        }
    }
}

/// Where plugins are and how long they may take.
#[derive(Debug, Clone)]
pub struct Runner {
    pub dirs: Vec<PathBuf>,
    pub timeout: Duration,
}

/// What all plugins of one call are told.
#[derive(Debug, Clone, Default)]
pub struct Environment {
    pub container_id: String,
    /// Empty if the namespace is gone.
    pub netns: String,
    pub ifname: String,
    pub args: String,
}

impl Runner {
    /// Runs a plugin to its end; what it printed, `None` if nothing.
    pub async fn run(&self, verb: Verb, plugin: &str, config: &Value, env: &Environment) -> Result<Option<Value>> {
        let path = self.find(plugin)?;
        let odd = |why: String| Error::PluginOutput {
            plugin: plugin.into(),
            verb: verb.name(),
            why,
        };
        let dirs: Vec<_> = self.dirs.iter().map(|d| d.display().to_string()).collect();
        let mut command = Command::new(&path);
        command
            .env("CNI_COMMAND", verb.name())
            .env("CNI_PATH", dirs.join(":"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Killed as a group, with what it started.
            .process_group(0)
            .kill_on_drop(true);
        if verb != Verb::Status {
            command
                .env("CNI_CONTAINERID", &env.container_id)
                .env("CNI_NETNS", &env.netns);
            command.env("CNI_IFNAME", &env.ifname).env("CNI_ARGS", &env.args);
        }
        let mut child = command
            .spawn()
            .map_err(|e| odd(format!("cannot run {}: {e}", path.display())))?;
        let input = serde_json::to_vec(config).map_err(|e| odd(e.to_string()))?;
        let (status, stdout, stderr) = match talk(&mut child, &input, self.timeout).await {
            Ok(done) => done,
            Err(error) => {
                kill(child.id());
                let _ = child.wait().await;
                let seconds = self.timeout.as_secs();
                return Err(match error.kind() {
                    io::ErrorKind::TimedOut => Error::PluginTimeout {
                        plugin: plugin.into(),
                        verb: verb.name(),
                        seconds,
                    },
                    _ => odd(error.to_string()),
                });
            }
        };
        if !status.success() {
            return Err(failure(plugin, verb, status, &stdout, &stderr));
        }
        if stdout.trim_ascii().is_empty() {
            return Ok(None);
        }
        serde_json::from_slice(&stdout)
            .map(Some)
            .map_err(|e| odd(format!("its output is not JSON: {e}")))
    }

    fn find(&self, plugin: &str) -> Result<PathBuf> {
        let runs = |p: &PathBuf| {
            p.metadata()
                .is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
        };
        let found = self.dirs.iter().map(|d| d.join(plugin)).find(runs);
        found.ok_or_else(|| Error::PluginAbsent {
            plugin: plugin.into(),
            searched: self.dirs.clone(),
        })
    }
}

/// Feeds a plugin and hears it out. Its end counts, not that of its output, which a process it leaves behind may hold.
async fn talk(child: &mut Child, input: &[u8], limit: Duration) -> io::Result<(ExitStatus, Vec<u8>, Vec<u8>)> {
    let deadline = Instant::now() + limit;
    let (mut stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let write = async {
        // A plugin that does not read its input is its own affair.
        if let Some(mut stdin) = stdin.take() {
            let _ = stdin.write_all(input).await;
        }
    };
    let status = {
        let output = async {
            tokio::try_join!(
                collect(stdout, &mut out, MAX_STDOUT, true),
                collect(stderr, &mut err, MAX_STDERR, false)
            )
        };
        let all = async { tokio::join!(write, output).1 };
        tokio::pin!(all);
        tokio::select! {
            ended = &mut all => {
                ended?;
                timeout_at(deadline, child.wait()).await??
            }
            status = timeout_at(deadline, child.wait()) => {
                let status = status??;
                if let Ok(ended) = timeout(TRAIL, all).await {
                    ended?;
                }
                status
            }
        }
    };
    Ok((status, out, err))
}

/// Reads to the end; beyond `most` it fails if `strict`, else throws away.
async fn collect(
    from: Option<impl AsyncRead + Unpin>,
    into: &mut Vec<u8>,
    most: usize,
    strict: bool,
) -> io::Result<()> {
    let Some(mut from) = from else { return Ok(()) };
    let mut buffer = [0; 8192];
    loop {
        let read = from.read(&mut buffer).await?;
        if read == 0 {
            return Ok(());
        }
        let room = most - into.len();
        if strict && read > room {
            return Err(io::Error::other(format!(
                "it printed more than {most} bytes and was killed"
            )));
        }
        into.extend(&buffer[..read.min(room)]);
    }
}

fn kill(group: Option<u32>) {
    if let Some(group) = group.and_then(|id| i32::try_from(id).ok()) {
        // The child is not reaped yet, so its id is still its own.
        let _ = nix::sys::signal::killpg(nix::unistd::Pid::from_raw(group), nix::sys::signal::Signal::SIGKILL);
    }
}

/// A plugin's error is JSON on its standard output: code, msg, details.
fn failure(plugin: &str, verb: Verb, status: ExitStatus, stdout: &[u8], stderr: &[u8]) -> Error {
    let error: Value = serde_json::from_slice(stdout).unwrap_or_default();
    let field = |name: &str| error.get(name).and_then(Value::as_str).unwrap_or("").trim().to_string();
    let code = error.get("code").and_then(Value::as_u64).unwrap_or(0);
    let mut parts = vec![field("msg"), field("details")];
    if parts[0].is_empty() {
        let heard = if stderr.trim_ascii().is_empty() { stdout } else { stderr };
        let tail = String::from_utf8_lossy(&heard[heard.len().saturating_sub(1024)..]);
        parts = vec![status.to_string(), tail.trim().to_string()];
    }
    parts.retain(|p| !p.is_empty());
    // One line, whatever the plugin printed.
    let message = parts.join(": ").replace(|c: char| c.is_control(), " ");
    Error::PluginFailed {
        plugin: plugin.into(),
        verb: verb.name(),
        code,
        message,
    }
}

/// Whether a path may stand in `CNI_NETNS`.
pub fn netns_text(path: Option<&Path>) -> String {
    path.map(|p| p.display().to_string()).unwrap_or_default()
}
