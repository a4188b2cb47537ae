//! Stage `task`: the container's processes, started once and ended once.

use std::sync::Arc;
use std::time::Duration;

use shim::api::{PidNamespace, RunRequest, StopRequest};
use shim::record::RunRecord;
use state::container::{ContainerGoal, ContainerKind};
use state::sandbox::NamespaceMode;
use state::{Container, PodSandbox};

use super::{bundle, cgroup_path, dir, io, limits, log, run_record, spec};
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::engine::{Context, live};
use crate::error::{Class, Error, Result};
use crate::sandbox;
use crate::world::linux::shims::fault;
use crate::world::{Paths, Shim};

pub struct Task;

pub struct Have {
    run: RunRecord,
    pid: Option<i32>,
    shim: bool,
    /// Its cgroup or its shim entry may be left.
    traces: bool,
}

impl Stage<ContainerKind> for Task {
    type Have = Have;
    const NAME: &'static str = "task";

    async fn observe(cx: &Context, object: &Container) -> Result<Have> {
        let run = run_record(&cx.world, object)?.unwrap_or_default();
        let pid = live::pid(&cx.world, &run);
        let begun = run.start.is_some() && run.end.is_none();
        if pid.is_some() {
            io::hold(cx, object);
        } else if run.end.is_some() {
            io::release(cx, object);
        }
        let shim = begun && cx.world.shims.find(&object.spec.sandbox).await.is_some();
        let traces = match cx.store.get::<state::sandbox::SandboxKind>(&object.spec.sandbox) {
            Some(sandbox) => cx.world.cgroups.observe(&cgroup_path(cx, &sandbox, object)).0 > 0,
            None => false,
        };
        Ok(Have { run, pid, shim, traces })
    }

    fn diff(_: &Container, have: &Have) -> Step {
        match (&have.run.start, &have.run.end) {
            (_, Some(_)) => Step::Wait(Why::new("Ended", "it has ended")),
            (None, None) => Step::Make(Why::new("Absent", "")),
            (Some(_), None) if !have.shim => {
                Step::Change(Why::new("ShimGone", "its shim is gone; a new one takes it over"))
            }
            (Some(_), None) if have.pid.is_none() => {
                Step::Wait(Why::new("Ending", "it has ended; the shim drains its output"))
            }
            (Some(_), None) => Step::Keep,
        }
    }

    fn present(have: &Have) -> bool {
        (have.run.start.is_some() && have.run.end.is_none()) || have.traces
    }

    async fn act(cx: &Context, object: &Container, step: &Step) -> Result<()> {
        let sandbox = sandbox::of(cx, object)?;
        let client = shim_of(cx, &sandbox).await?;
        if !matches!(step, Step::Make(_)) {
            return Ok(());
        }
        let request = request(cx, &sandbox, object)?;
        // Other runtimes see to the devices themselves.
        if request.runtime.is_empty() {
            make_cgroup(cx, &sandbox, object)?;
        }
        cx.world.runs.add(&dir(&cx.world.paths, object))?;
        let ran = client.run(request).await;
        cx.world.cgroups.settled(&cgroup_path(cx, &sandbox, object));
        match ran {
            Ok(started) => {
                tracing::info!(pid = started.pid, "container started");
                Ok(())
            }
            // Its run record says StartError: the pass reads that as the container's end.
            Err(e) => Err(match run_record(&cx.world, object)?.and_then(|run| run.end) {
                Some(end) => Error::Shim {
                    op: "start container",
                    id: object.spec.name.clone(),
                    problem: end.message,
                    class: Class::Permanent,
                },
                None => fault("start container", object.uid())(e),
            }),
        }
    }

    /// Stop signal, grace, then SIGKILL; waits for the end, since every caller of Stop does. A newer wish (a shorter
    /// grace, a removal) ends the wait.
    async fn undo(cx: &Context, object: &Container) -> Result<Undone> {
        let sandbox = sandbox::of(cx, object)?;
        let have = Self::observe(cx, object).await?;
        if have.run.start.is_some() && have.run.end.is_none() {
            let client = shim_of(cx, &sandbox).await?;
            let mut changed = cx.world.runs.subscribe();
            stop(cx, &sandbox, object, &*client).await?;
            let own = dir(&cx.world.paths, object);
            loop {
                if run_record(&cx.world, object)?.is_some_and(|run| run.end.is_some()) {
                    break;
                }
                tokio::select! {
                    changed = changed.recv() => match changed {
                        Ok(path) if path != own => continue,
                        Err(tokio::sync::broadcast::error::RecvError::Closed) => break,
                        _ => {}
                    },
                    () = superseded(cx, object, &sandbox) => {
                        return Err(Error::Pending("a newer wish came while it was stopping".to_owned()));
                    }
                    () = tokio::time::sleep(Duration::from_secs(5)) => {}
                    () = client.closed() => {
                        return Err(Error::Pending("its shim died while it was stopping".to_owned()));
                    }
                }
            }
        }
        clear(cx, &sandbox, object).await?;
        Ok(Undone::Done)
    }
}

async fn shim_of(cx: &Context, sandbox: &PodSandbox) -> Result<Arc<dyn Shim>> {
    let pod = &sandbox.spec.pod;
    cx.world.shims.ensure(&pod.namespace, &pod.name, sandbox.uid()).await
}

/// Until the record's wish, or its sandbox's, is newer than the one this pass works on.
async fn superseded(cx: &Context, object: &Container, sandbox: &PodSandbox) {
    let newer =
        |old: &state::Meta, new: &state::Meta| new.generation > old.generation || new.deleted() != old.deleted();
    let own = cx.store.wait::<ContainerKind, (), _>(object.uid(), None, |now| {
        now.is_none_or(|now| newer(&object.meta, &now.meta)).then_some(())
    });
    let above = cx
        .store
        .wait::<state::sandbox::SandboxKind, (), _>(sandbox.uid(), None, |now| {
            now.is_none_or(|now| newer(&sandbox.meta, &now.meta)).then_some(())
        });
    tokio::select! { _ = own => {}, _ = above => {} }
}

/// A declared pod's container always gets its grace. One of the CRI's only if it is itself asked to stop: with its
/// sandbox it is killed at once.
fn grace(object: &Container, sandbox: &PodSandbox) -> i64 {
    let own = object.spec.goal == ContainerGoal::Stopped && !object.meta.deleted();
    let pod = sandbox.spec.goal == state::sandbox::SandboxGoal::Ready && !sandbox.meta.deleted();
    let declared = sandbox.meta.owner.is_some();
    if declared || (own && pod) {
        object.spec.grace_seconds.max(0)
    } else {
        0
    }
}

async fn stop(cx: &Context, sandbox: &PodSandbox, object: &Container, client: &dyn Shim) -> Result<()> {
    let name = match bundle::Have::read(&cx.world, object)? {
        Some(have) => have.stop_signal().to_owned(),
        None => "SIGTERM".to_owned(),
    };
    let seconds = grace(object, sandbox);
    tracing::info!(signal = name, grace_s = seconds, "stopping container");
    let request = StopRequest {
        id: object.uid().to_owned(),
        signal: spec::signal::number(&name).unwrap_or(libc::SIGTERM),
        grace_ns: seconds.saturating_mul(1_000_000_000),
    };
    client
        .stop(request)
        .await
        .map_err(fault("stop container", object.uid()))
}

/// Takes away what the end left: the shim's entry and the cgroup.
async fn clear(cx: &Context, sandbox: &PodSandbox, object: &Container) -> Result<()> {
    io::release(cx, object);
    if let Some(client) = cx.world.shims.find(sandbox.uid()).await {
        client
            .delete(object.uid())
            .await
            .map_err(fault("clear container", object.uid()))?;
    }
    let path = cgroup_path(cx, sandbox, object);
    cx.world.cgroups.kill(&path)?;
    cx.world.cgroups.remove(&path)
}

/// Makes the container's cgroup where its maker does not. v2 has no file for device rules: a program on the cgroup
/// keeps them, from before its first process.
fn make_cgroup(cx: &Context, sandbox: &PodSandbox, object: &Container) -> Result<()> {
    let path = cgroup_path(cx, sandbox, object);
    if !cx.world.cgroups.before_container() {
        return Ok(());
    }
    let config = bundle::path(&cx.world.paths, object).join("config.json");
    let text = cx.world.files.read(&config)?.unwrap_or_default();
    let spec: oci_spec::runtime::Spec = serde_json::from_slice(&text)
        .map_err(std::io::Error::other)
        .map_err(Error::io("read", &config))?;
    let resources = spec.linux().as_ref().and_then(|linux| linux.resources().clone());
    let resources = resources.unwrap_or_default();
    cx.world.cgroups.ensure(&path)?;
    limits::keep_first(cx, &path, object, &resources)?;
    let Some(dir) = cx.world.cgroups.v2_dir(&path) else {
        return Ok(());
    };
    let rules = resources.devices().clone().unwrap_or_default();
    spec::device_filter::attach(&dir, &spec::device_filter::program(&rules)).map_err(Error::io("limit devices of", dir))
}

fn request(cx: &Context, sandbox: &PodSandbox, object: &Container) -> Result<RunRequest> {
    let paths = &cx.world.paths;
    let own = dir(paths, object);
    let namespaces = &object.spec.security.namespaces;
    let pid = match namespaces.pid {
        NamespaceMode::Pod => PidNamespace::Pod,
        NamespaceMode::Container => PidNamespace::Own,
        NamespaceMode::Node => PidNamespace::Host,
        NamespaceMode::Target => PidNamespace::Target,
    };
    let program = bundle::program(&cx.world, object)?;
    let (runtime, runtime_options) = match program {
        Some(program) => (program.binary.display().to_string(), program.options),
        None => Default::default(),
    };
    Ok(RunRequest {
        id: object.uid().to_owned(),
        bundle: bundle::path(paths, object).display().to_string(),
        record: Paths::run_record(&own).display().to_string(),
        fifo_dir: paths.fifos(sandbox.uid(), object.uid()).display().to_string(),
        log_path: log::path(sandbox, object)
            .map(|p| p.display().to_string())
            .unwrap_or_default(),
        terminal: object.spec.tty,
        stdin: object.spec.stdin,
        stdin_once: object.spec.stdin_once,
        pid: pid.into(),
        pid_target: namespaces.target_id.clone(),
        start_by: object.spec.start_by.unwrap_or(0),
        max_line: cx.live().max_line,
        runtime,
        runtime_options,
    })
}
