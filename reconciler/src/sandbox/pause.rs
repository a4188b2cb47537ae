//! Stage `pause`: the pod's first process. Its loss is fatal only where the pod shares its pid namespace.

use shim::record::RunRecord;
use state::PodSandbox;
use state::sandbox::{SandboxKind, SandboxStatus};

use super::{cgroup_path, netns, selinux, shares_pid};
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::engine::{Context, live};
use crate::error::{Class, Error, Result};
use crate::world::Paths;
use crate::world::linux::shims::fault;

pub struct Pause;

pub struct Have {
    run: Option<RunRecord>,
    pid: Option<i32>,
}

impl Stage<SandboxKind> for Pause {
    type Have = Have;
    const NAME: &'static str = "pause";

    async fn observe(cx: &Context, object: &PodSandbox) -> Result<Have> {
        let path = Paths::run_record(&cx.world.paths.pod(object.uid()));
        let run = cx.world.files.run_record(&path)?;
        let pid = run.as_ref().and_then(|run| live::pid(&cx.world, run));
        Ok(Have { run, pid })
    }

    fn diff(object: &PodSandbox, have: &Have) -> Step {
        let started = have.run.as_ref().is_some_and(|run| run.start.is_some());
        match (have.pid, started) {
            (Some(_), _) => Step::Keep,
            (None, false) => Step::Make(Why::new("Absent", "")),
            (None, true) if shares_pid(&object.spec) => Step::Lost(Why::risky(
                "PauseLost",
                "the pause is gone, and with it the pid namespace of the pod",
            )),
            (None, true) => Step::Remake(Why::new("Gone", "the pause has ended")),
        }
    }

    fn present(have: &Have) -> bool {
        have.pid.is_some()
    }

    fn report(have: &Have, status: &mut SandboxStatus) {
        status.pid = have.pid.unwrap_or(0);
    }

    async fn act(cx: &Context, object: &PodSandbox, step: &Step) -> Result<()> {
        let paths = &cx.world.paths;
        let dir = paths.pod(object.uid());
        let pod = &object.spec.pod;
        let client = cx.world.shims.ensure(&pod.namespace, &pod.name, object.uid()).await?;
        // Also one whose making was cut short: an end stands in its record, and a record takes one life.
        let ended = Self::observe(cx, object)
            .await?
            .run
            .is_some_and(|run| run.end.is_some());
        if ended || matches!(step, Step::Remake(_)) {
            client
                .delete(shim::PAUSE)
                .await
                .map_err(fault("clear pause", object.uid()))?;
            cx.world.files.unlink(&Paths::run_record(&dir))?;
        }
        cx.world.runs.add(&dir)?;
        let pins = netns::pins(paths, object);
        let path = |path: Option<std::path::PathBuf>| path.map(|p| p.display().to_string()).unwrap_or_default();
        let labels = selinux::labels(&cx.world, object)?;
        let request = shim::api::PauseRequest {
            record: Paths::run_record(&dir).display().to_string(),
            netns: path(pins.net),
            ipc: path(pins.ipc),
            uts: path(pins.uts),
            user: path(pins.user.map(|user| user.path)),
            new_pid_ns: shares_pid(&object.spec),
            cgroup: cgroup_path(cx, object, object.uid()),
            hostname: String::new(),
            process_label: labels.process.unwrap_or_default(),
            mount_label: labels.mount.unwrap_or_default(),
        };
        let started = client.pause(request).await.map_err(|e| {
            let by_caller = e.code() == Some(shim::Code::InvalidArgument);
            match fault("start pause", object.uid())(e) {
                // Nothing in it is the caller's, so it may well start the next time.
                Error::Shim { op, id, problem, .. } if !by_caller => Error::Shim {
                    op,
                    id,
                    problem,
                    class: Class::Transient,
                },
                other => other,
            }
        })?;
        cx.world.cgroups.settled(&cgroup_path(cx, object, object.uid()));
        tracing::info!(pid = started.pid, "pause started");
        Ok(())
    }

    async fn undo(cx: &Context, object: &PodSandbox) -> Result<Undone> {
        let pod = &object.spec.pod;
        let client = cx.world.shims.ensure(&pod.namespace, &pod.name, object.uid()).await?;
        client
            .delete(shim::PAUSE)
            .await
            .map_err(fault("end pause", object.uid()))?;
        match Self::observe(cx, object).await?.pid {
            None => Ok(Undone::Done),
            Some(pid) => Err(Error::Pending(format!("pause {pid} has not ended yet"))),
        }
    }
}
