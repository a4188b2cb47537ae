//! Container: one process tree with its root file system, limits and log.
//!
//! ```text
//!   limits  log      what may change while it runs
//!   task             its processes
//!   rootfs  io       what they stand on
//!   bundle           the OCI configuration, made once
//!   layer            the image's unpacked layers
//!   image            which layers and which configuration
//!   record           the copy of the wish
//! ```

mod bundle;
mod image;
mod image_volumes;
mod io;
mod layer;
pub mod limits;
mod log;
mod rootfs;
pub mod seccomp;
mod selinux;
pub mod spec;
mod task;
mod volumes;

use std::path::PathBuf;
use std::sync::Arc;

use ::shim::record::{End, RunRecord};
use async_trait::async_trait;
use state::container::{ContainerGoal, ContainerKind, ContainerPhase, ContainerStatus};
use state::sandbox::{SandboxGoal, SandboxPhase};
use state::{Condition, Container, PodSandbox};

use crate::engine::pass::{Height, Staged, Summary, truth};
use crate::engine::record::{Placed, Record};
use crate::engine::stage::{AnyStage, Listed, Why};
use crate::engine::{Context, conditions, live};
use crate::error::Result;
use crate::sandbox;
use crate::world::paths::DIR_MODE;
use crate::world::{Paths, World};

pub use image::Stand;

/// Rungs that a container keeps while it does not run: all but what its processes need.
const BUNDLE: usize = 4;

static RUNGS: [&[&'static dyn AnyStage<ContainerKind>]; 7] = [
    &[&Listed(Record)],
    &[&Listed(image::Image)],
    &[&Listed(layer::Layer)],
    &[&Listed(bundle::Bundle)],
    &[&Listed(rootfs::Rootfs), &Listed(io::Io)],
    &[&Listed(task::Task)],
    &[&Listed(limits::Limits), &Listed(log::Log)],
];

/// The container's durable directory.
pub fn dir(paths: &Paths, object: &Container) -> PathBuf {
    paths.container(&object.spec.sandbox, object.uid())
}

pub fn cgroup_path(cx: &Context, sandbox: &PodSandbox, object: &Container) -> String {
    sandbox::cgroup_path(cx, sandbox, object.uid())
}

/// The run record as it stands.
pub fn run_record(world: &World, object: &Container) -> Result<Option<RunRecord>> {
    world.files.run_record(&Paths::run_record(&dir(&world.paths, object)))
}

/// What a container's directory and its sandbox tell.
pub struct Facts {
    run: RunRecord,
    pid: Option<i32>,
    same_boot: bool,
    /// `None` if the record cannot be read.
    sandbox: Option<Arc<PodSandbox>>,
    boottime: u64,
    now: i64,
}

impl Facts {
    fn started(&self) -> bool {
        self.run.start.is_some()
    }

    /// The sandbox lets the container stand at `Running`.
    fn allowed(&self) -> bool {
        self.sandbox
            .as_ref()
            .is_some_and(|s| s.spec.goal == SandboxGoal::Ready && !s.meta.deleted() && !lost(s))
    }

    fn sandbox_ready(&self) -> bool {
        self.sandbox
            .as_ref()
            .is_some_and(|s| s.status.phase == SandboxPhase::Ready)
    }
}

/// Has the sandbox ended for good, though nobody asked?
fn lost(sandbox: &PodSandbox) -> bool {
    sandbox.status.phase == SandboxPhase::NotReady
}

#[async_trait]
impl Staged for ContainerKind {
    type Facts = Facts;

    fn rungs() -> &'static [&'static [&'static dyn AnyStage<Self>]] {
        &RUNGS
    }

    async fn facts(cx: &Context, object: &Container) -> Result<Facts> {
        let run = run_record(&cx.world, object)?.unwrap_or_default();
        Ok(Facts {
            pid: live::pid(&cx.world, &run),
            run,
            same_boot: object.meta.boot_id == cx.world.clock.boot_id,
            sandbox: cx.store.get(&object.spec.sandbox),
            boottime: cx.world.clock.boottime_ns(),
            now: cx.world.clock.now_ns(),
        })
    }

    fn height(_: &Context, object: &Container, facts: &Facts) -> Height {
        if object.meta.deleted() {
            return Height::keep(0);
        }
        let mut height = Height::keep(BUNDLE);
        if facts.run.end.is_some() {
            return height;
        }
        if !facts.same_boot {
            height.ended = Some(Why::new("Rebooted", "the node was started anew"));
            return height;
        }
        if facts.sandbox.is_none() {
            // Its record cannot be read: nothing is torn down on the word of a damaged database.
            height.keep = RUNGS.len();
            return height;
        }
        if object.spec.goal == ContainerGoal::Stopped && !facts.started() {
            height.ended = Some(Why::new("StartError", "stopped before it began"));
            return height;
        }
        let wanted = object.spec.goal == ContainerGoal::Running && facts.allowed();
        if wanted && !facts.started() {
            if object.spec.start_by.is_some_and(|by| by < facts.boottime) {
                height.ended = Some(Why::new("StartError", "not started before the caller's deadline"));
                return height;
            }
            if !facts.sandbox_ready() {
                return height;
            }
        }
        if wanted {
            height.keep = RUNGS.len();
        }
        height
    }

    async fn ended(cx: &Context, object: &Container, why: &Why) -> Result<()> {
        let dir = dir(&cx.world.paths, object);
        cx.world.files.make_dir(&dir, DIR_MODE)?;
        let now = cx.world.clock.now_ns();
        let end = match why.reason {
            "StartError" => End::start_error(why.message.clone(), now),
            _ => End::lost(now),
        };
        tracing::warn!(reason = why.reason, "container has ended: {}", why.message);
        cx.world.files.write_end(&Paths::run_record(&dir), end)
    }

    fn settle(object: &Container, facts: &Facts, summary: Summary, status: &mut ContainerStatus) {
        let spec = &object.spec;
        status.phase = phase(object, facts, &summary);
        if let Some(start) = &facts.run.start {
            status.started_at = start.started_at;
        }
        if let Some(end) = &facts.run.end {
            status.finished_at = end.finished_at;
            status.exit_code = end.code;
            status.reason = end.reason.clone();
            status.message = end.message.clone();
        }
        status.pid = if status.phase == ContainerPhase::Running {
            facts.pid.unwrap_or(0)
        } else {
            0
        };
        if let Some(sandbox) = &facts.sandbox {
            status.log_path = log::path(sandbox, object)
                .map(|p| p.display().to_string())
                .unwrap_or_default();
        }
        status.resources = spec.resources.clone();
        let goal = match spec.goal {
            ContainerGoal::Created => status.phase == ContainerPhase::Created,
            ContainerGoal::Running => status.phase == ContainerPhase::Running,
            ContainerGoal::Stopped => status.phase == ContainerPhase::Exited,
        };
        let mut conditions = summary.conditions;
        if spec.goal == ContainerGoal::Running && !facts.started() && status.phase == ContainerPhase::Created {
            let mut why = match (facts.allowed(), facts.sandbox_ready()) {
                (false, _) => vec![conditions::fails("task", "Stopped", "the sandbox is stopped", true)],
                (true, false) => vec![conditions::fails(
                    "task",
                    "SandboxNotReady",
                    "the sandbox is not ready",
                    false,
                )],
                (true, true) => vec![],
            };
            conditions::keep_since(&mut why, &object.status.conditions, facts.now);
            conditions.extend(why);
        }
        let ready = goal && summary.settled;
        status.conditions = conditions::with_ready(conditions, ready, &object.status.conditions, facts.now);
        status.log_epoch = match truth(&status.conditions, "log") {
            state::Truth::True => spec.log_epoch,
            _ => object.status.log_epoch,
        };
        status.observed_generation = object.meta.generation;
    }

    fn conditions(status: &ContainerStatus) -> &[Condition] {
        &status.conditions
    }

    fn conditions_mut(status: &mut ContainerStatus) -> &mut Vec<Condition> {
        &mut status.conditions
    }
}

fn phase(object: &Container, facts: &Facts, summary: &Summary) -> ContainerPhase {
    if facts.run.end.is_some() {
        return ContainerPhase::Exited;
    }
    if facts.pid.is_some() {
        return ContainerPhase::Running;
    }
    if facts.started() {
        // Gone without a word yet: it was running, and the shim is about to say how it ended.
        return match object.status.phase {
            ContainerPhase::Unknown => ContainerPhase::Unknown,
            _ => ContainerPhase::Running,
        };
    }
    match truth(&summary.conditions, "bundle") {
        state::Truth::True => ContainerPhase::Created,
        _ if object.status.phase == ContainerPhase::Created => ContainerPhase::Created,
        _ => ContainerPhase::Pending,
    }
}

impl Placed for ContainerKind {
    fn dir(paths: &Paths, object: &Container) -> PathBuf {
        dir(paths, object)
    }

    fn state_dir(paths: &Paths, object: &Container) -> Option<PathBuf> {
        Some(paths.container_state(&object.spec.sandbox, object.uid()))
    }
}
