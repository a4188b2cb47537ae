//! Findings about pods: what no step mends, because it would harm what runs, or because it is not ours to mend.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, StatxAttributes, StatxFlags};
use serde::Deserialize;
use state::container::ContainerKind;
use state::image::ImageKind;
use state::sandbox::SandboxKind;
use state::{Container, Image, PodSandbox};

use super::discard;
use super::finding::{Finding, Severity};
use crate::container;
use crate::engine::stage::Risk;
use crate::engine::{Context, live};

/// What a shim may take to answer; one that takes longer is stopped or stuck.
const ASK: Duration = Duration::from_secs(2);
/// What a look at the kernel may take.
const BOUND: Duration = Duration::from_secs(5);
/// A stopped container that lives on this long after its grace cannot be killed, ns.
const UNKILLABLE: u64 = 10_000_000_000;
/// A smaller jump of the clock is not told, ns.
const JUMP: i64 = 60_000_000_000;
/// proc(5): start times are in hundredths of a second for user space.
const NS_PER_TICK: i64 = 10_000_000;

/// Everything, looked at at once.
pub async fn findings(cx: &Arc<Context>) -> Vec<Finding> {
    let mut found = discard::findings(cx);
    found.extend(rebuilt(cx));
    let sandboxes = cx.store.list::<SandboxKind>();
    let shims = join_all(sandboxes.iter().map(|sandbox| shim(cx, sandbox))).await;
    found.extend(shims.into_iter().flatten());
    let images = cx.store.list::<ImageKind>();
    let doubts = join_all(images.iter().map(|image| unverified(cx, image))).await;
    found.extend(doubts.into_iter().flatten());
    if cx.world.usage.is_none() {
        return found;
    }
    let work = cx.clone();
    let look = tokio::task::spawn_blocking(move || kernel(&work));
    match tokio::time::timeout(BOUND, look).await {
        Ok(Ok(more)) => found.extend(more),
        _ => found.push(Finding::new(
            "stuck",
            Severity::Human,
            "node",
            format!("a look at /proc did not end within {} s", BOUND.as_secs()),
        )),
    }
    found
}

/// The database was lost and is there again.
fn rebuilt(cx: &Context) -> Option<Finding> {
    let why = cx.opened.rebuilt.as_ref()?;
    let message = format!("the database was rebuilt from the copies beside the objects: {why}");
    Some(Finding::new("store-rebuilt", Severity::Note, "node", message))
}

/// Layers that an unclean boot has put in doubt. Each is verified before its first use.
async fn unverified(cx: &Context, image: &Image) -> Option<Finding> {
    let doubtful = cx.world.images.doubtful(&image.status.chain_ids).await.ok()?;
    let clock = &cx.world.clock;
    (doubtful > 0).then(|| {
        let message =
            format!("{doubtful} layers are not verified since an unclean boot; they are before their first use");
        let object = format!("Image {}", image.meta.name);
        let finding = Finding::new("layers-unverified", Severity::Note, object, message);
        Finding {
            since: clock.now_ns().checked_sub_unsigned(clock.boottime_ns()),
            risk: Risk::B,
            ..finding.repair("reconcile images check --deep --repair")
        }
    })
}

/// A shim that does not answer, or that is of another version than this program.
async fn shim(cx: &Context, sandbox: &PodSandbox) -> Option<Finding> {
    let dir = cx.world.paths.shim(sandbox.uid());
    if !cx.world.files.exists(&dir) {
        return None;
    }
    let name = format!("PodSandbox {}", sandbox.meta.name);
    let asked = tokio::time::timeout(ASK, async {
        let client = cx.world.shims.find(sandbox.uid()).await?;
        client.state().await.ok()
    });
    match asked.await {
        // Dead: a step of the plan sees to it.
        Ok(None) => None,
        Err(_) => {
            let message = format!("its shim has not answered for {} s", ASK.as_secs());
            let finding = Finding::new("shim-stuck", Severity::Human, name, message);
            Some(match shim_pid(cx, sandbox.uid()) {
                Some(pid) => finding.repair(format!("kill -CONT {pid} || kill -KILL {pid}   # a new one takes over")),
                None => finding,
            })
        }
        Ok(Some(state)) => {
            let own = env!("CARGO_PKG_VERSION");
            let exe = fs::read_link(format!("/proc/{}/exe", state.pid)).unwrap_or_default();
            let replaced = exe.to_string_lossy().ends_with(" (deleted)");
            if let Some(process) = state.processes.iter().find(|process| process.dropped_bytes > 0) {
                let message = format!(
                    "{} bytes of output of {} were dropped: its log could not be written",
                    process.dropped_bytes, process.id
                );
                return Some(Finding {
                    size: Some(process.dropped_bytes),
                    ..Finding::new("log-dropped", Severity::Note, name, message)
                });
            }
            (state.version != own || replaced).then(|| {
                let message = format!(
                    "its shim {} is of version {}{}, this program of {own}; it is served as long as its pod lives",
                    state.pid,
                    state.version,
                    if replaced { ", whose file was replaced" } else { "" }
                );
                Finding::new("shim-old", Severity::Note, name, message)
            })
        }
    }
}

/// The pid of a sandbox's shim, from its command line.
fn shim_pid(cx: &Context, uid: &str) -> Option<i32> {
    let pids = cx.world.usage.as_ref()?.processes(cx.world.shims.cgroup());
    pids.into_iter().find(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(uid)
    })
}

/// What /proc tells.
fn kernel(cx: &Context) -> Vec<Finding> {
    let mut found = Vec::new();
    let clock = &cx.world.clock;
    let boot = clock.now_ns() - i64::try_from(clock.boottime_ns()).unwrap_or(0);
    for object in cx.store.list::<ContainerKind>() {
        let Ok(Some(run)) = container::run_record(&cx.world, &object) else {
            continue;
        };
        let Some(pid) = live::pid(&cx.world, &run) else {
            continue;
        };
        found.extend(missing_mount(cx, &object, pid));
        if let Some(stop) = &run.stop
            && stop.deadline.saturating_add(UNKILLABLE) < cx.world.clock.boottime_ns()
        {
            let over = clock.boottime_ns().saturating_sub(stop.deadline);
            let since = clock.now_ns().checked_sub_unsigned(over);
            found.push(Finding {
                since,
                ..unkillable(&object, pid)
            });
        }
        if let Some(start) = &run.start {
            found.extend(jumped(boot, start.started_at, start.start_ticks));
        }
    }
    let mut told = false;
    found.retain(|f| f.id != "clock-jumped" || !std::mem::replace(&mut told, true));
    found
}

fn unkillable(object: &Container, pid: i32) -> Finding {
    let of = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
    let status = of("status");
    let state = status
        .lines()
        .find_map(|line| line.strip_prefix("State:"))
        .unwrap_or("?")
        .trim();
    let message = format!(
        "process {pid} lives on after its grace: state {state}, waiting in {}",
        of("wchan")
    );
    Finding::new(
        "task-unkillable",
        Severity::Human,
        format!("Container {}", object.spec.name),
        message,
    )
    .repair(format!("cat /proc/{pid}/stack"))
}

/// Only the mounts are of interest.
#[derive(Deserialize)]
struct Bundle {
    #[serde(default)]
    mounts: Vec<BundleMount>,
}

#[derive(Deserialize)]
struct BundleMount {
    destination: PathBuf,
    #[serde(default, rename = "type")]
    kind: String,
}

/// A bind mount that its container was started with and does not have any more. The container itself may have taken it
/// off; either way nothing is mounted under a living process again.
fn missing_mount(cx: &Context, object: &Container, pid: i32) -> Option<Finding> {
    let config = container::dir(&cx.world.paths, object).join("bundle/config.json");
    let bundle: Bundle = serde_json::from_slice(&fs::read(config).ok()?).ok()?;
    let root = fs::File::open(format!("/proc/{pid}/root")).ok()?;
    let gone = bundle.mounts.iter().find(|mount| {
        let inside = mount.destination.strip_prefix("/").unwrap_or(&mount.destination);
        mount.kind == "bind" && lost(&root, inside)
    })?;
    let message = format!(
        "{} is not mounted in process {pid} any more; restart the container to have it again",
        gone.destination.display()
    );
    let name = format!("Container {}", object.spec.name);
    let finding = Finding::new("mount-missing", Severity::Human, name, message);
    Some(finding.repair(format!("reconcile delete container {}", object.uid())))
}

/// Is `path` there and no mount point? What cannot be looked at is not told.
fn lost(root: &fs::File, path: &Path) -> bool {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let Ok(file) = rustix::fs::openat2(root, path, flags, Mode::empty(), resolve) else {
        return false;
    };
    let stat = rustix::fs::statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::TYPE);
    stat.is_ok_and(|stat| !stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

/// The clock that people read against the one that never jumps, since a process began. `boot` is when the machine
/// started, by the first, ns.
fn jumped(boot: i64, started_at: i64, ticks: u64) -> Option<Finding> {
    let began = boot.checked_add(i64::try_from(ticks).ok()?.checked_mul(NS_PER_TICK)?)?;
    let by = began.checked_sub(started_at)?;
    (by.saturating_abs() > JUMP).then(|| {
        let seconds = by / 1_000_000_000;
        let message =
            format!("the clock was set by {seconds:+} s while containers ran: times and ages are not to be trusted");
        Finding::new("clock-jumped", Severity::Note, "node", message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kind 37 of drift: the machine's clock cannot be set in a test that shares it with others.
    #[test]
    fn a_jump_of_the_clock_is_a_note_and_a_little_is_nothing() {
        const SECOND: i64 = 1_000_000_000;
        let boot = 1_700_000_000 * SECOND;
        let began = boot + 50 * SECOND;
        assert!(jumped(boot, began, 5000).is_none() && jumped(boot, began + 30 * SECOND, 5000).is_none());
        let forward = jumped(boot + 3600 * SECOND, began, 5000).unwrap();
        assert!(
            forward.message.contains("+3600 s") && forward.severity == Severity::Note,
            "{forward:?}"
        );
        assert!(
            jumped(boot - 365 * 86_400 * SECOND, began, 5000)
                .unwrap()
                .message
                .contains("-31536000 s")
        );
        assert!(jumped(boot, began, u64::MAX).is_none());
    }
}
