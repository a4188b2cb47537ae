//! Failpoints of the programs under test (`shim::fault`), and a client that asks again as the kubelet does.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tonic::{Code, Status};

use crate::client::Cri;
use crate::eventually;
use crate::node::{Node, Options};

/// The file that arms points in a node's daemon and shims.
#[derive(Clone, Debug)]
pub struct Faults {
    file: PathBuf,
}

impl Faults {
    /// A node, no daemon yet, whose programs look at the file.
    pub fn node(options: Options) -> Result<(Node, Faults)> {
        let node = Node::new(options.clone())?;
        let file = node.path("faults");
        let mut options = options;
        options.env.push(("RECONCILE_FAULT", file.display().to_string()));
        Ok((node.with(options), Faults { file }))
    }

    /// Arms points, all at once: lines of `POINT=ACTION`, or `trace`.
    pub fn arm(&self, lines: &str) -> Result<()> {
        let _ = fs::remove_file(self.beside("hit"));
        let new = self.beside("new");
        fs::write(&new, lines)?;
        fs::rename(&new, &self.file).context("arm failpoints")
    }

    /// Nothing is armed any more.
    pub fn disarm(&self) {
        let _ = fs::remove_file(&self.file);
    }

    /// Was the armed point reached (`abort`, `stop`, `error`)?
    pub fn hit(&self) -> bool {
        self.beside("hit").exists()
    }

    /// Points reached since `trace` was armed, in order, each once.
    pub fn traced(&self) -> Vec<String> {
        let text = fs::read_to_string(self.beside("trace")).unwrap_or_default();
        let mut seen = BTreeSet::new();
        let lines = text.lines().filter(|line| seen.insert(*line));
        lines.map(str::to_owned).collect()
    }

    fn beside(&self, suffix: &str) -> PathBuf {
        self.file.with_extension(suffix)
    }
}

/// Calls until the answer is one: a dead daemon is started again, what may pass is asked again, for 40 s and then
/// once more. A daemon that was cut has its 40 s anew, three times.
pub async fn persist<T>(node: &mut Node, call: impl AsyncFn(&Cri) -> Result<T, Status>) -> Result<Result<T, Status>> {
    let (mut start, mut cuts) = (Instant::now(), 0);
    loop {
        let mut late = start.elapsed() > Duration::from_secs(40);
        let status = match call(&node.cri).await {
            Ok(answer) => return Ok(Ok(answer)),
            Err(status) => status,
        };
        let passing = [
            Code::Unavailable,
            Code::Unknown,
            Code::Cancelled,
            Code::Internal,
            Code::DeadlineExceeded,
            Code::Aborted,
        ];
        if ending(node, &status).await? {
            revive(node).await?;
            cuts += 1;
            if cuts <= 3 {
                (start, late) = (Instant::now(), false);
            }
        } else if !passing.contains(&status.code()) {
            return Ok(Err(status));
        }
        ensure!(!late, "still refused: {status:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Has the daemon ended, or is it about to? A process that was cut is gone from its socket before it can be waited for.
async fn ending(node: &mut Node, status: &Status) -> Result<bool> {
    if status.code() == Code::Unavailable && std::error::Error::source(status).is_some() {
        let gone = async || {
            ensure!(node.has_ended()?, "the daemon runs");
            Ok(())
        };
        // One that runs after all is asked again.
        let _ = eventually(Duration::from_secs(20), gone).await;
    }
    node.has_ended()
}

/// Starts the daemon, a second time if it is cut short while it starts.
pub async fn revive(node: &mut Node) -> Result<()> {
    for _ in 0..3 {
        match node.serve().await {
            Err(error) if node.has_ended()? => eprintln!("started again: {error:#}"),
            other => return other,
        }
    }
    bail!("the daemon ends whenever it starts")
}

/// Every failpoint that the sources name, and the stages: `(points, stages)`.
pub fn in_sources() -> Result<(BTreeSet<String>, BTreeSet<String>)> {
    let top = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .context("the workspace")?;
    let (mut points, mut stages) = (BTreeSet::new(), BTreeSet::new());
    for dir in ["shim/src", "state/src", "reconciler/src"] {
        each_source(&top.join(dir), &mut |text| {
            let text = text.split("#[cfg(test)]").next().unwrap_or_default();
            for call in ["fault::point(\"", "fault::check(\""] {
                let names = text.split(call).skip(1).filter_map(|rest| rest.split('"').next());
                points.extend(names.map(str::to_owned));
            }
            if text.contains(" Stage<") {
                let names = text.split("const NAME: &'static str = \"").skip(1);
                stages.extend(names.filter_map(|rest| rest.split('"').next()).map(str::to_owned));
            }
        })?;
    }
    Ok((points, stages))
}

fn each_source(dir: &Path, see: &mut dyn FnMut(&str)) -> Result<()> {
    for entry in fs::read_dir(dir).with_context(|| format!("list {}", dir.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            each_source(&path, see)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            see(&fs::read_to_string(&path)?);
        }
    }
    Ok(())
}
