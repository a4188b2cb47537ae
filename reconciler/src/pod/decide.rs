//! What a pod wants next, from its records alone: pure, so that every case is a table test.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use state::container::{ContainerGoal, ContainerPhase};
use state::pod::{PodContainer, PodContainerStatus, PodPhase, PodStatus, RestartPolicy};
use state::sandbox::{SandboxGoal, SandboxPhase};
use state::secret::PullSecret;
use state::{Container, Image, Pod, PodSandbox, Pull};

use super::build::is_current;
use super::pulls::{self, Stand};

/// A restart waits 10 s after the end, doubled for each further one, at most 5 minutes, as the kubelet does it.
const RESTART_FIRST: Duration = Duration::from_secs(10);
const RESTART_LAST: Duration = Duration::from_secs(300);

/// One record to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wish {
    Sandbox {
        attempt: u32,
    },
    /// Create a container of this name, to run at once.
    Container {
        name: String,
        attempt: u32,
    },
    /// Pull an image for this attempt of a container; `tries` have failed before.
    Pull {
        container: String,
        attempt: u32,
        image: String,
        tries: u32,
    },
    /// Only a changed pod, or an import, can help.
    Refuse {
        why: String,
    },
    StopContainer {
        uid: String,
    },
    StopSandbox {
        uid: String,
    },
    /// An ended attempt that a newer one replaced, or a sandbox that ended.
    Delete {
        kind: Child,
        uid: String,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Child {
    Sandbox,
    Container,
}

/// What to do, how things stand, and when to look again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision {
    pub wishes: Vec<Wish>,
    pub status: PodStatus,
    pub again: Option<Duration>,
    /// What the pod waits for while `wishes` is empty.
    pub waiting: Option<String>,
}

/// Everything that a decision looks at.
pub struct View {
    /// Newest first, deleted ones included.
    pub sandboxes: Vec<Arc<PodSandbox>>,
    /// Containers of all the sandboxes, newest first.
    pub containers: Vec<Arc<Container>>,
    /// The records of the containers' images, by what the pod calls them.
    pub images: HashMap<String, Arc<Image>>,
    /// Pulls for this pod.
    pub pulls: Vec<Arc<Pull>>,
    /// What it names as `imagePullSecrets`.
    pub secrets: Vec<PullSecret>,
    /// ns since the epoch
    pub now: i64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Init,
    Sidecar,
    Main,
}

pub(super) struct Member<'a> {
    pub(super) spec: &'a PodContainer,
    role: Role,
    newest: Option<&'a Arc<Container>>,
    pub(super) attempts: u32,
    /// The pull for the next attempt.
    pub(super) pull: Option<&'a Arc<Pull>>,
}

impl Member<'_> {
    fn phase(&self) -> Option<ContainerPhase> {
        self.newest.map(|c| c.status.phase)
    }

    fn exited(&self) -> Option<i32> {
        self.newest
            .filter(|c| c.status.phase == ContainerPhase::Exited)
            .map(|c| c.status.exit_code)
    }

    fn policy(&self, pod: RestartPolicy) -> RestartPolicy {
        match (self.role, pod) {
            (Role::Sidecar, _) => RestartPolicy::Always,
            // An init container that ended well has done its work.
            (Role::Init, RestartPolicy::Always) => RestartPolicy::OnFailure,
            (_, policy) => policy,
        }
    }

    /// Ended, and never to be started again.
    fn over(&self, pod: RestartPolicy) -> bool {
        match (self.exited(), self.policy(pod)) {
            (None, _) | (Some(_), RestartPolicy::Always) => false,
            (Some(code), RestartPolicy::OnFailure) => code == 0,
            (Some(_), RestartPolicy::Never) => true,
        }
    }
}

/// Decides for one pod.
pub fn decide(pod: &Pod, view: &View) -> Decision {
    let spec = &pod.spec;
    let (current, old): (Vec<_>, Vec<_>) = view.sandboxes.iter().cloned().partition(|s| is_current(pod, s));
    if !old.is_empty() {
        return replace(pod, &old);
    }
    let members = members(pod, view);
    let mut decision = Decision {
        status: status(&members),
        ..Decision::default()
    };
    let live: Vec<_> = current.iter().filter(|s| !s.meta.deleted()).collect();
    let newest = live.first().copied();
    if let Some(sandbox) = newest {
        decision.status.ip = sandbox.status.ip.clone();
        decision.status.sandbox = sandbox.uid().to_owned();
    }
    let failed_init = members
        .iter()
        .any(|m| m.role == Role::Init && m.over(spec.restart_policy) && m.exited() != Some(0));
    let mains = || members.iter().filter(|m| m.role == Role::Main);
    let done = failed_init || mains().all(|m| m.over(spec.restart_policy));
    if done {
        finish(&mut decision, &members, newest, failed_init);
        return decision;
    }
    match newest {
        None => decision.wishes.push(Wish::Sandbox {
            attempt: next_attempt(view),
        }),
        Some(s) if s.status.phase == SandboxPhase::NotReady && s.spec.goal == SandboxGoal::Ready => {
            decision.wishes.push(Wish::Sandbox {
                attempt: next_attempt(view),
            });
        }
        Some(s) if s.spec.goal == SandboxGoal::Stopped => {
            decision.wishes.push(Wish::Sandbox {
                attempt: next_attempt(view),
            });
        }
        Some(s) if s.status.phase == SandboxPhase::Ready => {
            retire(&mut decision, view, s);
            start_members(&mut decision, pod, view, s, &members);
        }
        Some(_) => decision.waiting = Some("the sandbox is being made".to_owned()),
    }
    decision
}

/// The pod was changed: what was made from the older wish goes first, since the new one may need its ports and names.
fn replace(pod: &Pod, old: &[Arc<PodSandbox>]) -> Decision {
    let mut decision = Decision {
        status: pod.status.clone(),
        ..Decision::default()
    };
    decision.status.phase = PodPhase::Pending;
    let live = old.iter().filter(|s| !s.meta.deleted());
    decision.wishes = live
        .map(|s| Wish::Delete {
            kind: Child::Sandbox,
            uid: s.uid().to_owned(),
        })
        .collect();
    decision.waiting = Some("the sandbox of the pod's older wish is being removed".to_owned());
    decision
}

fn next_attempt(view: &View) -> u32 {
    view.sandboxes.iter().map(|s| s.spec.pod.attempt + 1).max().unwrap_or(0)
}

fn members<'a>(pod: &'a Pod, view: &'a View) -> Vec<Member<'a>> {
    let member = |spec: &'a PodContainer, role| {
        let mut own = view
            .containers
            .iter()
            .filter(|c| c.spec.name == spec.name && !c.meta.deleted());
        let newest = own.next();
        let attempts = newest.map_or(0, |c| c.spec.attempt + 1);
        Member {
            spec,
            role,
            newest,
            attempts,
            pull: pulls::find(&view.pulls, spec, attempts),
        }
    };
    let init = pod.spec.init_containers.iter().map(|spec| match spec.restart_policy {
        Some(RestartPolicy::Always) => member(spec, Role::Sidecar),
        _ => member(spec, Role::Init),
    });
    init.chain(pod.spec.containers.iter().map(|spec| member(spec, Role::Main)))
        .collect()
}

fn status(members: &[Member]) -> PodStatus {
    let containers = members.iter().map(|m| PodContainerStatus {
        name: m.spec.name.clone(),
        init: m.role != Role::Main,
        uid: m.newest.map(|c| c.uid().to_owned()).unwrap_or_default(),
        restarts: m.attempts.saturating_sub(1),
        running: m.phase() == Some(ContainerPhase::Running),
        exit_code: m.exited(),
        reason: pulls::reason(m).unwrap_or_else(|| m.newest.map(|c| reason(c)).unwrap_or_default()),
        message: pulls::message(m).unwrap_or_else(|| m.newest.map(|c| message(c)).unwrap_or_default()),
    });
    let containers: Vec<_> = containers.collect();
    let mut mains = members.iter().filter(|m| m.role == Role::Main);
    let running = mains.all(|m| matches!(m.phase(), Some(ContainerPhase::Running | ContainerPhase::Exited)));
    let phase = if running { PodPhase::Running } else { PodPhase::Pending };
    PodStatus {
        phase,
        containers,
        ..PodStatus::default()
    }
}

fn reason(c: &Container) -> String {
    match c.status.phase {
        ContainerPhase::Exited => c.status.reason.clone(),
        _ => failure(c).map(|f| f.reason.clone()).unwrap_or_default(),
    }
}

fn message(c: &Container) -> String {
    match c.status.phase {
        ContainerPhase::Exited => c.status.message.clone(),
        _ => failure(c)
            .map(|f| format!("{}: {}", f.stage, f.message))
            .unwrap_or_default(),
    }
}

fn failure(c: &Container) -> Option<&state::Condition> {
    c.status
        .conditions
        .iter()
        .find(|c| c.stage != "Ready" && c.status == state::Truth::False)
}

/// The pod is over: sidecars stop, then the sandbox.
fn finish(decision: &mut Decision, members: &[Member], newest: Option<&Arc<PodSandbox>>, failed_init: bool) {
    let failed = failed_init || members.iter().any(|m| m.role == Role::Main && m.exited() != Some(0));
    decision.status.phase = if failed { PodPhase::Failed } else { PodPhase::Succeeded };
    let up = |m: &&Member| matches!(m.phase(), Some(p) if p != ContainerPhase::Exited);
    let mut running = false;
    for member in members.iter().filter(up).filter_map(|m| m.newest) {
        running |= member.status.phase != ContainerPhase::Created;
        if member.spec.goal != ContainerGoal::Stopped {
            decision.wishes.push(Wish::StopContainer {
                uid: member.uid().to_owned(),
            });
        }
    }
    match newest {
        Some(s) if !running && s.spec.goal != SandboxGoal::Stopped => {
            decision.wishes.push(Wish::StopSandbox {
                uid: s.uid().to_owned(),
            });
        }
        Some(s) if !s.status.torn_down => decision.waiting = Some("the sandbox is being stopped".to_owned()),
        _ => {}
    }
}

/// Removes what a newer attempt replaced: older sandboxes, and ended containers but the newest of each name.
fn retire(decision: &mut Decision, view: &View, current: &PodSandbox) {
    for sandbox in view
        .sandboxes
        .iter()
        .filter(|s| s.uid() != current.uid() && !s.meta.deleted())
    {
        decision.wishes.push(Wish::Delete {
            kind: Child::Sandbox,
            uid: sandbox.uid().to_owned(),
        });
    }
    let mut seen: Vec<&str> = Vec::new();
    for container in view
        .containers
        .iter()
        .filter(|c| c.spec.sandbox == current.uid() && !c.meta.deleted())
    {
        if seen.contains(&container.spec.name.as_str()) {
            decision.wishes.push(Wish::Delete {
                kind: Child::Container,
                uid: container.uid().to_owned(),
            });
        }
        seen.push(&container.spec.name);
    }
}

fn start_members(decision: &mut Decision, pod: &Pod, view: &View, sandbox: &PodSandbox, members: &[Member]) {
    for member in members {
        let here = member.newest.filter(|c| c.spec.sandbox == sandbox.uid());
        let start = match (here.map(|c| c.status.phase), member.exited()) {
            (None, _) if member.over(pod.spec.restart_policy) => false,
            (None, _) => true,
            (Some(ContainerPhase::Exited), Some(_)) if !member.over(pod.spec.restart_policy) => {
                let wait = restart_wait(member, view.now);
                if let Some(wait) = wait {
                    decision.again = Some(decision.again.map_or(wait, |other| other.min(wait)));
                    decision.waiting = Some(format!("back-off before {} restarts", member.spec.name));
                }
                wait.is_none()
            }
            _ => false,
        };
        if start {
            match pulls::image(member, view) {
                Stand::Here => decision.wishes.push(Wish::Container {
                    name: member.spec.name.clone(),
                    attempt: member.attempts,
                }),
                Stand::Do(wish) => decision.wishes.push(wish),
                Stand::Wait(why, wait) => {
                    decision.again = [decision.again, wait].into_iter().flatten().min();
                    decision.waiting.get_or_insert(why);
                }
            }
        }
        let done = match member.role {
            Role::Init => member.exited() == Some(0),
            Role::Sidecar => here.is_some_and(|c| c.status.phase == ContainerPhase::Running),
            Role::Main => true,
        };
        if !done {
            decision
                .waiting
                .get_or_insert_with(|| format!("init container {} is not done", member.spec.name));
            return;
        }
    }
    let pending = members
        .iter()
        .find(|m| !matches!(m.phase(), Some(ContainerPhase::Running | ContainerPhase::Exited)));
    if let Some(member) = pending {
        let why = member
            .newest
            .and_then(|c| failure(c))
            .map(|f| format!(": {}", f.message))
            .unwrap_or_default();
        decision
            .waiting
            .get_or_insert_with(|| format!("container {} is not running yet{why}", member.spec.name));
    }
}

/// How long until an ended member may start again; `None`: now.
fn restart_wait(member: &Member, now: i64) -> Option<Duration> {
    let ended = member.newest.map_or(0, |c| c.status.finished_at);
    // The first restart comes at once.
    let restarts = member.attempts.saturating_sub(1);
    if restarts == 0 {
        return None;
    }
    let delay = RESTART_FIRST
        .saturating_mul(1 << (restarts - 1).min(5))
        .min(RESTART_LAST);
    let passed = Duration::from_nanos(u64::try_from(now.saturating_sub(ended)).unwrap_or(0));
    delay.checked_sub(passed).filter(|left| !left.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;
    use state::Meta;
    use state::container::{ContainerSpec, ContainerStatus};
    use state::image::{ImagePhase, ImageSource, ImageSpec, ImageStatus};
    use state::pod::PodSpec;
    use state::sandbox::{SandboxSpec, SandboxStatus};

    fn named(name: &str) -> PodContainer {
        PodContainer {
            name: name.to_owned(),
            image: "localhost/hello".to_owned(),
            ..PodContainer::default()
        }
    }

    fn pod(restart_policy: RestartPolicy, init: &[PodContainer], main: &[&str]) -> Pod {
        let containers = main.iter().map(|name| named(name)).collect();
        let spec = PodSpec {
            restart_policy,
            init_containers: init.to_vec(),
            containers,
            ..PodSpec::default()
        };
        Pod::new(
            Meta {
                uid: "p".to_owned(),
                ..Meta::default()
            },
            spec,
            PodStatus::default(),
        )
    }

    fn sandbox(attempt: u32, phase: SandboxPhase) -> Arc<PodSandbox> {
        let mut spec = SandboxSpec::default();
        spec.pod.attempt = attempt;
        let meta = Meta {
            uid: format!("s{attempt}"),
            ..Meta::default()
        };
        Arc::new(PodSandbox::new(
            meta,
            spec,
            SandboxStatus {
                phase,
                ..SandboxStatus::default()
            },
        ))
    }

    fn container(name: &str, attempt: u32, phase: ContainerPhase, exit_code: i32) -> Arc<Container> {
        let spec = ContainerSpec {
            name: name.to_owned(),
            attempt,
            sandbox: "s0".to_owned(),
            ..Default::default()
        };
        let meta = Meta {
            uid: format!("{name}{attempt}"),
            ..Meta::default()
        };
        let status = ContainerStatus {
            phase,
            exit_code,
            finished_at: 1_000_000_000,
            ..Default::default()
        };
        Arc::new(Container::new(meta, spec, status))
    }

    /// Nothing but the image that all the containers want.
    fn hello() -> View {
        let spec = ImageSpec {
            source: ImageSource::BuiltIn,
            ..ImageSpec::default()
        };
        let status = ImageStatus {
            phase: ImagePhase::Ready,
            ..ImageStatus::default()
        };
        let image = Arc::new(Image::new(Meta::default(), spec, status));
        View {
            sandboxes: vec![],
            containers: vec![],
            images: HashMap::from([("localhost/hello".to_owned(), image)]),
            pulls: vec![],
            secrets: vec![],
            now: 0,
        }
    }

    fn ready(containers: Vec<Arc<Container>>) -> View {
        View {
            sandboxes: vec![sandbox(0, SandboxPhase::Ready)],
            containers,
            now: 2_000_000_000,
            ..hello()
        }
    }

    fn start(name: &str, attempt: u32) -> Wish {
        Wish::Container {
            name: name.to_owned(),
            attempt,
        }
    }

    #[test]
    fn a_new_pod_gets_a_sandbox_then_its_containers_at_once() {
        let pod = pod(RestartPolicy::Always, &[], &["a", "b"]);
        let none = View {
            sandboxes: vec![],
            containers: vec![],
            ..hello()
        };
        assert_eq!(decide(&pod, &none).wishes, [Wish::Sandbox { attempt: 0 }]);
        assert_eq!(decide(&pod, &ready(vec![])).wishes, [start("a", 0), start("b", 0)]);
    }

    #[test]
    fn a_lost_sandbox_is_replaced_by_the_next_attempt_and_then_removed() {
        let pod = pod(RestartPolicy::Always, &[], &["a"]);
        let lost = View {
            sandboxes: vec![sandbox(0, SandboxPhase::NotReady)],
            containers: vec![],
            ..hello()
        };
        assert_eq!(decide(&pod, &lost).wishes, [Wish::Sandbox { attempt: 1 }]);
        let both = vec![sandbox(1, SandboxPhase::Ready), sandbox(0, SandboxPhase::NotReady)];
        let wishes = decide(
            &pod,
            &View {
                sandboxes: both,
                containers: vec![],
                ..hello()
            },
        )
        .wishes;
        assert_eq!(
            wishes,
            [
                Wish::Delete {
                    kind: Child::Sandbox,
                    uid: "s0".to_owned()
                },
                start("a", 0)
            ]
        );
    }

    #[test]
    fn a_changed_pod_loses_its_old_sandbox_first() {
        let pod = pod(RestartPolicy::Always, &[], &["a"]);
        let mut old = (*sandbox(0, SandboxPhase::Ready)).clone();
        old.meta
            .annotations
            .insert(super::super::build::GENERATION.to_owned(), "7".to_owned());
        let view = |old| View {
            sandboxes: vec![Arc::new(old)],
            containers: vec![],
            ..hello()
        };
        let wishes = decide(&pod, &view(old.clone())).wishes;
        assert_eq!(
            wishes,
            [Wish::Delete {
                kind: Child::Sandbox,
                uid: "s0".to_owned()
            }]
        );
        old.meta.deletion = Some(1);
        let decision = decide(&pod, &view(old));
        assert!(decision.wishes.is_empty() && decision.waiting.is_some(), "{decision:?}");
    }

    #[test]
    fn init_containers_run_one_after_another_and_a_sidecar_beside_them() {
        let sidecar = PodContainer {
            restart_policy: Some(RestartPolicy::Always),
            ..named("side")
        };
        let pod = pod(RestartPolicy::Never, &[named("i"), sidecar], &["a"]);
        assert_eq!(decide(&pod, &ready(vec![])).wishes, [start("i", 0)]);
        let running = container("i", 0, ContainerPhase::Running, 0);
        assert_eq!(decide(&pod, &ready(vec![running])).wishes, []);
        let done = container("i", 0, ContainerPhase::Exited, 0);
        assert_eq!(decide(&pod, &ready(vec![done.clone()])).wishes, [start("side", 0)]);
        let side = container("side", 0, ContainerPhase::Running, 0);
        assert_eq!(decide(&pod, &ready(vec![done, side])).wishes, [start("a", 0)]);
    }

    #[test]
    fn a_failed_init_container_fails_the_pod_where_nothing_restarts() {
        let pod = pod(RestartPolicy::Never, &[named("i")], &["a"]);
        let decision = decide(&pod, &ready(vec![container("i", 0, ContainerPhase::Exited, 3)]));
        assert_eq!(decision.status.phase, PodPhase::Failed);
        assert_eq!(decision.wishes, [Wish::StopSandbox { uid: "s0".to_owned() }]);
    }

    #[test]
    fn a_finished_pod_stops_its_sidecar_then_its_sandbox() {
        let sidecar = PodContainer {
            restart_policy: Some(RestartPolicy::Always),
            ..named("side")
        };
        let pod = pod(RestartPolicy::OnFailure, &[sidecar], &["a"]);
        let side = container("side", 0, ContainerPhase::Running, 0);
        let done = container("a", 0, ContainerPhase::Exited, 0);
        let decision = decide(&pod, &ready(vec![done.clone(), side]));
        assert_eq!(decision.status.phase, PodPhase::Succeeded);
        assert_eq!(
            decision.wishes,
            [Wish::StopContainer {
                uid: "side0".to_owned()
            }]
        );
        let side = container("side", 0, ContainerPhase::Exited, 143);
        assert_eq!(
            decide(&pod, &ready(vec![done, side])).wishes,
            [Wish::StopSandbox { uid: "s0".to_owned() }]
        );
    }

    #[test]
    fn restarts_come_at_once_first_and_then_after_a_growing_wait() {
        let pod = pod(RestartPolicy::Always, &[], &["a"]);
        let first = decide(&pod, &ready(vec![container("a", 0, ContainerPhase::Exited, 1)]));
        assert_eq!(first.wishes, [start("a", 1)]);
        let old = container("a", 0, ContainerPhase::Exited, 1);
        let second = decide(&pod, &ready(vec![container("a", 1, ContainerPhase::Exited, 1), old]));
        assert_eq!(
            second.wishes,
            [Wish::Delete {
                kind: Child::Container,
                uid: "a0".to_owned()
            }]
        );
        assert_eq!(second.again, Some(Duration::from_secs(9)));
    }
}
