//! CRI calls as a client makes them whose runtime is killed again and again: repeated until they are answered.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tonic::{Code, Status};

use crate::client::Cri;
use crate::eventually;
use crate::v1::*;

const LIMIT: Duration = Duration::from_secs(90);

/// Repeats what failed because nobody was there to answer, or because the answer was lost.
pub async fn again<T>(what: &str, mut call: impl AsyncFnMut() -> Result<T, Status>) -> Result<T> {
    let start = Instant::now();
    loop {
        match call().await {
            Ok(done) => return Ok(done),
            Err(status) if final_word(&status) => return Err(status).with_context(|| what.to_owned()),
            Err(status) if start.elapsed() > LIMIT => bail!("{what}: still {status} after {LIMIT:?}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(30)).await,
        }
    }
}

fn final_word(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::InvalidArgument
            | Code::NotFound
            | Code::AlreadyExists
            | Code::FailedPrecondition
            | Code::PermissionDenied
            | Code::Unimplemented
    )
}

/// The one id of a create, however often it was asked for: a create whose answer was lost is refused by its id.
async fn one_id(what: &str, call: impl AsyncFnMut() -> Result<String, Status>) -> Result<String> {
    match again(what, call).await {
        Ok(id) => Ok(id),
        Err(error) => match error.downcast_ref::<Status>() {
            Some(status) if status.code() == Code::AlreadyExists => {
                id_in(status.message()).with_context(|| format!("{what}: refused without an id: {status}"))
            }
            _ => Err(error),
        },
    }
}

fn id_in(text: &str) -> Option<String> {
    let hex = |word: &&str| word.len() == 64 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
    text.split(|c: char| !c.is_ascii_alphanumeric())
        .find(hex)
        .map(str::to_owned)
}

pub async fn run_sandbox(cri: &Cri, pod: &PodSandboxConfig) -> Result<String> {
    one_id("RunPodSandbox", async || cri.run_sandbox(pod).await).await
}

pub async fn create(cri: &Cri, sandbox: &str, pod: &PodSandboxConfig, config: &ContainerConfig) -> Result<String> {
    one_id("CreateContainer", async || cri.create(sandbox, pod, config).await).await
}

/// How a start came out.
#[derive(Debug, PartialEq, Eq)]
pub enum Started {
    Runs,
    /// The start's call ended before it was begun, so it never will be.
    Never,
}

pub async fn start(cri: &Cri, id: &str) -> Result<Started> {
    again("StartContainer", async || match cri.start(id).await {
        Ok(()) => Ok(Started::Runs),
        Err(refused) if final_word(&refused) => {
            // An earlier try may have been carried out though its answer was lost.
            let status = cri.container(id).await?;
            match (status.state(), status.exit_code, status.reason.as_str()) {
                (ContainerState::ContainerRunning, ..) => Ok(Started::Runs),
                (ContainerState::ContainerExited, 128, "StartError") => Ok(Started::Never),
                (ContainerState::ContainerCreated, ..) => Err(Status::unavailable(format!("under way: {refused}"))),
                _ => Err(refused),
            }
        }
        Err(other) => Err(other),
    })
    .await
}

/// Its status once it has exited.
pub async fn exited(cri: &Cri, id: &str) -> Result<ContainerStatus> {
    eventually(LIMIT, async || {
        let status = again("ContainerStatus", async || cri.container(id).await).await?;
        ensure!(status.state() == ContainerState::ContainerExited, "{status:?}");
        Ok(status)
    })
    .await
}
