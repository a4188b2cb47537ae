//! Answers questions about usage (`state::usage`): at once, past the appliers, from the kernel's files.
//!
//! Nothing is read while nobody asks. A cgroup that was read less than half a second ago is not read again; a writable
//! layer is counted every ten seconds at most, and a count that takes long is not waited for.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use state::container::{ContainerKind, ContainerPhase};
use state::sandbox::{SandboxKind, SandboxPhase};
use state::usage::{Able, Answer, Ask, CgroupUsage, ContainerUsage, DiskUsage, Network, SandboxUsage};
use state::{Container, PodSandbox};

use crate::engine::Context;
use crate::world::linux::cgroup::Cgroups;
use crate::world::linux::usage::{self, disk, network};
use crate::{container, sandbox};

/// A sample younger than this is answered again. (crictl asks twice, a second apart, and wants two.)
const FRESH: Duration = Duration::from_millis(500);
/// The same for the count of a writable layer.
const COUNTED: Duration = Duration::from_secs(10);
/// How long an answer waits for counts that are due; after that the ones before are told.
const PATIENCE: Duration = Duration::from_millis(200);
/// The same for the sum of all layers, which the first count must not miss.
const PATIENCE_ALL: Duration = Duration::from_secs(5);
/// What nobody asked for so long is forgotten.
const FORGOTTEN: Duration = Duration::from_secs(600);

/// Answers until the loop ends.
pub async fn run(cx: Arc<Context>) {
    let Some(node) = cx.world.usage.clone() else {
        return;
    };
    let mut questions = cx.store.questions();
    let sampler = Arc::new(Sampler {
        able: usage::able(&node),
        node,
        cgroups: Mutex::default(),
        layers: Mutex::default(),
        cx,
    });
    while let Some((ask, reply)) = questions.recv().await {
        let sampler = sampler.clone();
        tokio::spawn(async move {
            // The asker may have left.
            let _ = reply.send(sampler.answer(&ask).await);
        });
    }
}

struct Sampler {
    cx: Arc<Context>,
    node: Arc<Cgroups>,
    able: Able,
    /// The newest sample of each cgroup, by its path.
    cgroups: Mutex<HashMap<String, Sample>>,
    /// The last count of each container's layer, by uid.
    layers: Mutex<HashMap<String, Layer>>,
}

struct Sample {
    taken: Instant,
    usage: CgroupUsage,
}

#[derive(Default)]
struct Layer {
    counted: Option<(Instant, DiskUsage)>,
    /// Somebody counts it now.
    counting: bool,
}

/// A running container.
struct Target {
    uid: String,
    path: String,
    pid: i32,
    /// Its own layer.
    upper: PathBuf,
}

/// A ready sandbox.
struct Pod {
    uid: String,
    /// The cgroup around the pod, if the caller gave one.
    around: Option<String>,
    /// The cgroups of its pause and its containers.
    parts: Vec<String>,
    netns: Option<PathBuf>,
    pids: Vec<i32>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sampler {
    async fn answer(self: Arc<Self>, ask: &Ask) -> Answer {
        let containers: Vec<Target> = ask.containers.iter().filter_map(|uid| self.target(uid)).collect();
        let pods: Vec<Pod> = ask.sandboxes.iter().filter_map(|uid| self.pod(uid)).collect();
        let mut layers: Vec<_> = containers.iter().map(|c| (c.uid.clone(), c.upper.clone())).collect();
        let writable = ask.writable.then(|| self.writable());
        layers.extend(writable.clone().unwrap_or_default());
        let patience = if ask.writable { PATIENCE_ALL } else { PATIENCE };
        let counts = self.clone().count(&layers);
        let (sampler, detail) = (self.clone(), ask.detail);
        let read = tokio::task::spawn_blocking(move || sampler.read(&containers, &pods, detail)).await;
        // Late ones go on, and are told the next time.
        let _ = tokio::time::timeout(patience, counts).await;
        let mut answer = read.unwrap_or_default();
        let layers = lock(&self.layers);
        for (uid, usage) in &mut answer.containers {
            usage.layer = layers.get(uid).and_then(|layer| layer.counted).map(|(_, count)| count);
        }
        answer.writable = writable.map(|all| {
            let counted = all.iter().filter_map(|(uid, _)| layers.get(uid)?.counted);
            counted.fold(DiskUsage::default(), |sum, (_, one)| DiskUsage {
                at: sum.at.max(one.at),
                bytes: sum.bytes.saturating_add(one.bytes),
                inodes: sum.inodes + one.inodes,
            })
        });
        answer
    }

    /// Every container's writable layer.
    fn writable(&self) -> Vec<(String, PathBuf)> {
        let all = self.cx.store.list::<ContainerKind>();
        let upper = |object: &Arc<Container>| upper(&self.cx, object);
        all.iter()
            .map(|object| (object.uid().to_owned(), upper(object)))
            .collect()
    }

    fn target(&self, uid: &str) -> Option<Target> {
        let object = self.cx.store.get::<ContainerKind>(uid)?;
        running(&object)?;
        let sandbox = self.cx.store.get::<SandboxKind>(&object.spec.sandbox)?;
        Some(Target {
            uid: uid.to_owned(),
            path: container::cgroup_path(&self.cx, &sandbox, &object),
            pid: object.status.pid,
            upper: upper(&self.cx, &object),
        })
    }

    fn pod(&self, uid: &str) -> Option<Pod> {
        let object = self.cx.store.get::<SandboxKind>(uid)?;
        if object.status.phase != SandboxPhase::Ready {
            return None;
        }
        let containers = self.cx.store.owned::<ContainerKind>(uid);
        let own = sandbox::cgroup_path(&self.cx, &object, uid);
        let around = around(&object, &own);
        let running: Vec<_> = containers.iter().filter(|c| running(c).is_some()).collect();
        let mut parts = vec![own];
        parts.extend(running.iter().map(|c| container::cgroup_path(&self.cx, &object, c)));
        Some(Pod {
            uid: uid.to_owned(),
            around,
            parts,
            netns: Some(PathBuf::from(&object.status.netns)).filter(|pin| !pin.as_os_str().is_empty()),
            pids: std::iter::once(object.status.pid)
                .chain(running.iter().map(|c| c.status.pid))
                .collect(),
        })
    }

    /// Reads what is asked; blocking.
    fn read(&self, containers: &[Target], pods: &[Pod], detail: bool) -> Answer {
        self.forget();
        let mut answer = Answer {
            able: self.able,
            ..Answer::default()
        };
        for target in containers {
            let Some(cgroup) = self.cgroup(&target.path) else {
                continue;
            };
            let detail = detail
                .then(|| usage::detail(&self.node, &target.path, target.pid, &target.upper))
                .flatten();
            let usage = ContainerUsage {
                cgroup,
                layer: None,
                detail: detail.map(Arc::new),
            };
            answer.containers.insert(target.uid.clone(), usage);
        }
        for pod in pods {
            answer.sandboxes.insert(pod.uid.clone(), self.sandbox(pod));
        }
        answer
    }

    fn sandbox(&self, pod: &Pod) -> SandboxUsage {
        let now = self.cx.world.clock.now_ns();
        let parts: Vec<CgroupUsage> = pod.parts.iter().filter_map(|path| self.cgroup(path)).collect();
        let whole = match &pod.around {
            Some(path) => self.cgroup(path),
            None => {
                let sum = usage::sum(now, &parts);
                Some(self.keep(&format!("sum of {}", pod.uid), sum))
            }
        };
        let interfaces = |pin: &PathBuf| network::interfaces(pin, pod.pids.iter().copied());
        SandboxUsage {
            cgroup: CgroupUsage {
                // Of the containers alone: the pause is nobody's process.
                tasks: parts.iter().skip(1).map(|part| part.tasks).sum(),
                ..whole.unwrap_or_default()
            },
            network: pod
                .netns
                .as_ref()
                .and_then(interfaces)
                .map(|interfaces| Network { at: now, interfaces }),
        }
    }

    /// A cgroup's sample, not older than [`FRESH`].
    fn cgroup(&self, path: &str) -> Option<CgroupUsage> {
        if let Some(sample) = lock(&self.cgroups).get(path)
            && sample.taken.elapsed() < FRESH
        {
            return Some(sample.usage.clone());
        }
        let usage = usage::cgroup(&self.node, path, self.cx.world.clock.now_ns())?;
        Some(self.keep(path, usage))
    }

    /// Completes a new sample by what the one before tells, and keeps it.
    fn keep(&self, name: &str, mut usage: CgroupUsage) -> CgroupUsage {
        let taken = Instant::now();
        let mut samples = lock(&self.cgroups);
        if let Some(before) = samples.get(name) {
            if taken.duration_since(before.taken) < FRESH {
                return before.usage.clone();
            }
            usage.cpu.rate = rate(before.usage.cpu.usage, usage.cpu.usage, taken - before.taken);
        }
        let kept = usage.clone();
        samples.insert(name.to_owned(), Sample { taken, usage });
        kept
    }

    /// Counts the layers that are due, one after the other; the future ends when this is done.
    fn count(self: Arc<Self>, all: &[(String, PathBuf)]) -> impl Future<Output = ()> + use<> {
        let due: Vec<(String, PathBuf)> = {
            let mut layers = lock(&self.layers);
            let due = all.iter().filter(|(uid, _)| {
                let layer = layers.entry(uid.clone()).or_default();
                let old = layer.counted.is_none_or(|(at, _)| at.elapsed() >= COUNTED);
                let due = old && !layer.counting;
                layer.counting |= due;
                due
            });
            due.cloned().collect()
        };
        let counting = (!due.is_empty()).then(|| {
            tokio::task::spawn_blocking(move || {
                for (uid, upper) in due {
                    self.count_one(&uid, &upper);
                }
            })
        });
        async move {
            if let Some(counting) = counting {
                // A panic in there would leave the layers uncounted, nothing else.
                let _ = counting.await;
            }
        }
    }

    fn count_one(&self, uid: &str, upper: &Path) {
        let count = disk::usage(upper).map(|(bytes, inodes)| DiskUsage {
            at: self.cx.world.clock.now_ns(),
            bytes,
            inodes,
        });
        let mut layers = lock(&self.layers);
        let layer = layers.entry(uid.to_owned()).or_default();
        layer.counting = false;
        if let Some(count) = count {
            layer.counted = Some((Instant::now(), count));
        }
    }

    fn forget(&self) {
        lock(&self.cgroups).retain(|_, sample| sample.taken.elapsed() < FORGOTTEN);
        let recent = |layer: &Layer| layer.counted.is_some_and(|(at, _)| at.elapsed() < FORGOTTEN);
        lock(&self.layers).retain(|_, layer| layer.counting || recent(layer));
    }
}

fn upper(cx: &Context, object: &Container) -> PathBuf {
    container::dir(&cx.world.paths, object).join("upper")
}

fn running(container: &Container) -> Option<()> {
    (container.status.phase == ContainerPhase::Running && container.status.pid > 0).then_some(())
}

/// The pod's cgroup as its caller made it: above the one of ours. What has no parent stands among all other pods.
fn around(sandbox: &PodSandbox, own: &str) -> Option<String> {
    let given = !sandbox.spec.cgroup_parent.trim_matches('/').is_empty();
    let (parent, _) = own.rsplit_once('/')?;
    given.then(|| parent.to_owned())
}

/// ns of processor time a second; `None` if it went back, which a cgroup made anew does.
fn rate(before: u64, now: u64, passed: Duration) -> Option<u64> {
    let used = now.checked_sub(before)?;
    let rate = u128::from(used) * 1_000_000_000 / passed.as_nanos().max(1);
    u64::try_from(rate).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_nanoseconds_a_second() {
        assert_eq!(rate(1_000, 501_000, Duration::from_millis(500)), Some(1_000_000));
        assert_eq!(rate(5, 5, Duration::from_secs(1)), Some(0));
        assert_eq!(rate(6, 5, Duration::from_secs(1)), None);
    }

    #[test]
    fn only_a_given_parent_is_the_pods_own() {
        let mut sandbox = PodSandbox::new(
            state::Meta::default(),
            state::sandbox::SandboxSpec::default(),
            state::sandbox::SandboxStatus::default(),
        );
        assert_eq!(around(&sandbox, "/reconcile-1/uid"), None);
        sandbox.spec.cgroup_parent = "/kubepods/pod1".into();
        assert_eq!(
            around(&sandbox, "/kubepods/pod1/uid").as_deref(),
            Some("/kubepods/pod1")
        );
    }
}
