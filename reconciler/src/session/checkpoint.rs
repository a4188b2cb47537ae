//! CheckpointContainer: memory by CRIU and changed files by a look at the overlay's upper directory, of one instant,
//! into one archive; the container runs on.
//!
//! ```text
//!   its turn -> criu check -> freeze -> criu dump, rootfs-diff.tar -> thaw -> the archive: temporary name, rename
//! ```
//!
//! All that is half made lies in `checkpoint-SESSION` in the container's directory, which also names the unfinished
//! archive. When time is over, the caller leaves or the container is to stop, CRIU is killed and waited for, then the
//! container thawed: it must not be frozen again by one that still runs. After a crash the next daemon removes what is
//! left ([`clear`]), and the stage `limits` thaws.

use std::fs;
use std::future::Future;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use oci_spec::runtime::Spec;
use state::container::{ContainerGoal, ContainerKind, ContainerPhase};
use state::sandbox::{NamespaceMode, SandboxGoal, SandboxKind};
use state::session::{Outcome, SessionKind, Wish};
use state::{Container, PodSandbox, Session};

use super::archive;
use crate::container::limits::{freeze, is_still};
use crate::container::{self, Stand, cgroup_path, run_record};
use crate::engine::{Context, live};
use crate::error::{Error, Result};
use crate::sandbox;
use crate::world::linux::criu::{Criu, Dump};
use crate::world::linux::diff;
use crate::world::linux::stop::Stop;
use crate::world::{Cgroups, Files};

/// Before the session's uid, in the container's directory.
const PREFIX: &str = "checkpoint-";
/// How long the end of the daemon waits for containers to be thawed.
const PATIENCE: Duration = Duration::from_secs(5);
const NO_CRIU: &str = "there is no program `criu` in the daemon's PATH; install CRIU (Debian and Ubuntu: \
                       `apt-get install criu`)";

/// What is to be done.
#[derive(Clone, Copy)]
pub struct Work<'a> {
    pub session: &'a Session,
    pub container: &'a Container,
    pub archive: &'a Path,
}

/// Takes a checkpoint. `None`: the caller has left.
pub(super) async fn run(cx: &Context, work: Work<'_>, left: impl Future<Output = ()>) -> Option<Outcome> {
    let (teller, stop) = Stop::new();
    let taken = async {
        match take(cx, work, &stop).await {
            Ok(outcome) => outcome,
            Err(e) => Outcome::Failed(e.to_string()),
        }
    };
    tokio::pin!(taken);
    let seconds = u64::try_from(work.session.spec.timeout_seconds).unwrap_or(0);
    let late = async {
        match seconds {
            0 => std::future::pending().await,
            seconds => tokio::time::sleep(Duration::from_secs(seconds)).await,
        }
    };
    let why = tokio::select! {
        outcome = &mut taken => return Some(outcome),
        () = left => None,
        () = late => Some(Outcome::TimedOut),
        problem = ending(cx, work.container) => Some(Outcome::NotRunning(problem)),
    };
    let _ = teller.send(true);
    match taken.await {
        Outcome::Saved => Some(Outcome::Saved),
        _ => why,
    }
}

/// Until the container is not to run any more, or does not.
async fn ending(cx: &Context, container: &Container) -> String {
    let own = cx
        .store
        .wait::<ContainerKind, &str, _>(container.uid(), None, |now| match now {
            None => Some("is gone"),
            Some(now) if now.meta.deleted() || now.spec.goal != ContainerGoal::Running => Some("is being stopped"),
            Some(now) if now.status.phase != ContainerPhase::Running => Some("has ended"),
            Some(_) => None,
        });
    let above = cx
        .store
        .wait::<SandboxKind, &str, _>(&container.spec.sandbox, None, |now| {
            let goes = now.is_none_or(|now| now.meta.deleted() || now.spec.goal != SandboxGoal::Ready);
            goes.then_some("is being stopped with its pod")
        });
    let why = tokio::select! { why = own => why, why = above => why };
    why.unwrap_or("cannot be watched").to_owned()
}

async fn take(cx: &Context, work: Work<'_>, stop: &Stop) -> Result<Outcome> {
    if let Err(why) = cx.world.mounts.overlay() {
        let problem = format!("what a container has changed is read from its overlay, and {why}");
        return Ok(Outcome::Unsupported(problem));
    }
    let place = work.archive.to_owned();
    let misplaced = blocking("look at", work.archive, move || Ok(archive::misplaced(&place)));
    if let Some(problem) = misplaced.await? {
        return Ok(Outcome::Misplaced(problem));
    }
    let Some(criu) = Criu::find(&std::env::var_os("PATH").unwrap_or_default()) else {
        return Ok(Outcome::Unsupported(NO_CRIU.to_owned()));
    };
    let turn = tokio::select! {
        turn = cx.checkpoints.take(work.container.uid()) => turn,
        () = stop.wait() => return Err(ended_early(work)),
    };
    let dir = Dir::make(cx, work)?;
    let checked = criu.check(&dir.path, stop).await;
    if let Some(problem) = checked.map_err(Error::io("run", "criu check"))? {
        return Ok(Outcome::Unsupported(format!("`criu check`: {problem}")));
    }
    let begun = Instant::now();
    let refused = capture(cx, work, &criu, &dir.path, stop).await?;
    let frozen = begun.elapsed();
    drop(turn);
    if let Some(outcome) = refused {
        return Ok(outcome);
    }
    let (from, to, told) = (dir.path.clone(), work.archive.to_owned(), stop.clone());
    let token = token(work.session).to_owned();
    let pack = blocking("write archive", work.archive, move || {
        archive::pack(&from, &to, &token, &told)
    });
    pack.await?;
    let (name, took) = (&work.container.spec.name, begun.elapsed());
    tracing::info!(container = name, archive = %work.archive.display(), ?frozen, ?took, "checkpoint written");
    Ok(Outcome::Saved)
}

fn ended_early(work: Work<'_>) -> Error {
    Error::io("checkpoint to", work.archive)(Stop::error())
}

/// File work, in a thread of its own: file systems may be slow, or hang.
async fn blocking<T: Send + 'static>(
    op: &'static str,
    path: &Path,
    act: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(act).await;
    done.map_err(|source| Error::Task { op, source })?
        .map_err(Error::io(op, path))
}

/// Everything that is of one instant; why it cannot be had, if so. The container is thawed again whatever happens.
async fn capture(cx: &Context, work: Work<'_>, criu: &Criu, dir: &Path, stop: &Stop) -> Result<Option<Outcome>> {
    let container = work.container;
    let sandbox = sandbox::of(cx, container)?;
    let cgroup = cgroup_path(cx, &sandbox, container);
    let frozen = Frozen::freeze(&*cx.world.cgroups, &cgroup, stop);
    let _frozen = frozen.await.map_err(Error::io("freeze cgroup", &cgroup))?;
    // A frozen process stays what it is.
    let run = run_record(&cx.world, container)?.unwrap_or_default();
    let Some(pid) = live::pid(&cx.world, &run) else {
        return Ok(Some(Outcome::NotRunning("has ended".to_owned())));
    };
    let dump = dump(cx, container, &cgroup, pid, dir)?;
    if let Some(problem) = criu.dump(&dump, stop).await.map_err(Error::io("run", "criu dump"))? {
        return Ok(Some(Outcome::Failed(format!("`criu dump`: {problem}"))));
    }
    let upper = container_dir(cx, container).join("upper");
    let (from, to, told) = (upper.clone(), dir.to_owned(), stop.clone());
    let user = sandbox.spec.namespaces.user.clone();
    let user = user.filter(|user| user.mode == NamespaceMode::Pod && !user.uids.is_empty());
    let diff = move || {
        let file = fs::File::create(to.join(archive::DIFF))?;
        let deleted = diff::write(&from, user.as_ref(), io::BufWriter::new(file), &told)?;
        fs::write(to.join(archive::DELETED), serde_json::to_vec(&deleted)?)
    };
    blocking("read what the container has changed in", &upper, diff).await?;
    describe(cx, &sandbox, container, dir)?;
    Ok(None)
}

fn container_dir(cx: &Context, container: &Container) -> PathBuf {
    container::dir(&cx.world.paths, container)
}

/// What the container was made from.
fn describe(cx: &Context, sandbox: &PodSandbox, container: &Container, dir: &Path) -> Result<()> {
    let spec = container_dir(cx, container).join("bundle/config.json");
    fs::copy(&spec, dir.join(archive::SPEC)).map_err(Error::io("copy", &spec))?;
    let stand = Stand::of(cx, container)?;
    let config = archive::config(sandbox, container, &stand, cx.world.clock.now_ns());
    let path = dir.join(archive::CONFIG);
    fs::write(&path, config.to_string()).map_err(Error::io("write", path))
}

fn dump(cx: &Context, container: &Container, cgroup: &str, pid: i32, dir: &Path) -> Result<Dump> {
    let real = cx.world.usage.as_ref();
    let missing = || Error::Refused("a checkpoint needs the freezer's cgroup, which is not mounted".to_owned());
    let config = container_dir(cx, container).join("bundle/config.json");
    let text = cx.world.files.read(&config)?.unwrap_or_default();
    let spec: Spec = serde_json::from_slice(&text)
        .map_err(io::Error::other)
        .map_err(Error::io("read", &config))?;
    let is_bind = |mount: &&oci_spec::runtime::Mount| {
        let mut options = mount.options().iter().flatten();
        let bound = options.any(|option| option == "bind" || option == "rbind");
        bound || mount.typ().as_deref() == Some("bind")
    };
    let binds = spec.mounts().iter().flatten().filter(is_bind);
    let masked = spec.linux().as_ref().and_then(|linux| linux.masked_paths().clone());
    Ok(Dump {
        pid,
        dir: dir.to_owned(),
        root: cx.world.paths.rootfs(&container.spec.sandbox, container.uid()),
        freezer: real.and_then(|real| real.dir("freezer", cgroup)).ok_or_else(missing)?,
        binds: binds.map(|mount| mount.destination().display().to_string()).collect(),
        masked: masked.unwrap_or_default(),
        terminal: container.spec.tty,
    })
}

/// A frozen cgroup; dropping this thaws it.
struct Frozen<'a> {
    cgroups: &'a dyn Cgroups,
    path: &'a str,
}

impl<'a> Frozen<'a> {
    /// Waits until all of its processes have stopped. v1 tells nobody when that is, and it takes milliseconds.
    async fn freeze(cgroups: &'a dyn Cgroups, path: &'a str, stop: &Stop) -> io::Result<Frozen<'a>> {
        let frozen = Frozen { cgroups, path };
        let mut pause = Duration::from_millis(1);
        loop {
            // Each time again: v1 may miss one who forks.
            freeze(cgroups, path, true)?;
            if is_still(cgroups, path)? {
                return Ok(frozen);
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => pause = (pause * 2).min(Duration::from_millis(50)),
                () = stop.wait() => return Err(Stop::error()),
            }
        }
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        let thawed = freeze(self.cgroups, self.path, false);
        if let Some(e) = thawed.err().filter(|e| e.kind() != io::ErrorKind::NotFound) {
            tracing::error!(cgroup = self.path, "not thawed, it is tried again within a minute: {e}");
        }
    }
}

/// The work directory; dropping this throws it away.
struct Dir<'a> {
    files: &'a dyn Files,
    path: PathBuf,
}

impl<'a> Dir<'a> {
    fn make(cx: &'a Context, work: Work<'_>) -> Result<Dir<'a>> {
        let path = container_dir(cx, work.container).join(format!("{PREFIX}{}", token(work.session)));
        // Memory is going to lie there.
        let made = fs::DirBuilder::new().mode(0o700).create(&path);
        made.map_err(Error::io("make directory", &path))?;
        Ok(Dir {
            files: &*cx.world.files,
            path,
        })
    }
}

impl Drop for Dir<'_> {
    fn drop(&mut self) {
        if let Err(e) = self.files.bury(&self.path) {
            tracing::warn!("the next start of the daemon removes it: {e}");
        }
    }
}

fn token(session: &Session) -> &str {
    session.uid().get(..16).unwrap_or(session.uid())
}

/// At the start, before any checkpoint: throws away what an earlier daemon left half made.
pub fn clear(cx: &Context) {
    for container in cx.store.list::<ContainerKind>() {
        let own = container_dir(cx, &container);
        let entries = cx.world.files.list(&own).unwrap_or_default();
        for entry in entries.into_iter().filter(|e| e.is_dir && e.name.starts_with(PREFIX)) {
            let (work, files) = (own.join(entry.name), cx.world.files.clone());
            // Not waited for: where the archive was to be may hang.
            tokio::task::spawn_blocking(move || {
                tracing::info!(dir = %work.display(), "throwing a half-made checkpoint away");
                let removed = archive::remove_unfinished(&work).map_err(Error::io("remove archive of", &work));
                if let Err(e) = removed.and_then(|()| files.bury(&work)) {
                    tracing::warn!("a half-made checkpoint stays until the next start: {e}");
                }
            });
        }
    }
}

/// At the end of the daemon: ends the checkpoints that are being taken, so that no container stays frozen.
pub async fn end(cx: &Context) {
    for session in cx.store.list::<SessionKind>() {
        if matches!(session.spec.wish, Wish::Checkpoint(_)) {
            let _ = cx.store.delete::<SessionKind>(session.uid()).await;
        }
    }
    if tokio::time::timeout(PATIENCE, cx.checkpoints.idle()).await.is_err() {
        tracing::warn!("a checkpoint does not end; the next daemon thaws its container");
    }
}
