//! GetContainerEvents: one feed of phase changes for all subscribers, in the order in which they were published.
//!
//! ```text
//!   sandboxes, containers -- one queue --> Follower -- Happening --> subscribers, each a bounded queue
//!                                          (who stood where)         one that falls behind is cut off
//! ```
//!
//! The feed begins with its first subscriber, so that nothing is done where nobody ever asks. A phase that was passed
//! too fast to be seen is told all the same. While nobody is subscribed what happens is kept for five minutes.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures::{Stream, StreamExt};
use state::container::{Container, ContainerKind, ContainerPhase};
use state::sandbox::{PodSandbox, SandboxKind, SandboxPhase};
use state::store::Event;
use tokio::sync::{broadcast, mpsc};
use tonic::Status;

use super::v1;
use crate::answer::Answers;
use crate::images::Catalog;
use crate::services::{Services, container_visible, sandbox_visible};
use crate::translate;

/// Events that a subscriber may leave unread.
const UNREAD: usize = 1024;
/// How long what nobody was there for is kept.
const KEPT: Duration = Duration::from_secs(300);

/// An event, and the records as they stood: what is sent is made of them only where somebody reads it.
#[derive(Debug)]
struct Happening {
    kind: v1::ContainerEventType,
    id: String,
    /// ns since the epoch, strictly rising.
    at: i64,
    sandbox: Arc<PodSandbox>,
    containers: Vec<Arc<Container>>,
}

/// Spreads what happens.
#[derive(Default)]
pub(crate) struct Feed(Mutex<Spread>);

#[derive(Default)]
struct Spread {
    /// `None` until the first subscriber.
    sender: Option<broadcast::Sender<Arc<Happening>>>,
    unread: VecDeque<(Instant, Arc<Happening>)>,
}

impl Feed {
    fn lock(&self) -> MutexGuard<'_, Spread> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, happening: Happening) {
        let mut spread = self.lock();
        let happening = Arc::new(happening);
        let told = spread
            .sender
            .as_ref()
            .is_some_and(|sender| sender.send(happening.clone()).is_ok());
        if !told {
            spread.unread.push_back((Instant::now(), happening));
        }
        let over = |(at, _): &(Instant, Arc<Happening>)| at.elapsed() > KEPT;
        while spread.unread.len() > UNREAD || spread.unread.front().is_some_and(over) {
            spread.unread.pop_front();
        }
    }
}

/// A stream of what happens from now on, and of what nobody was there for.
pub(super) fn subscribe(services: &Services) -> Answers<v1::ContainerEventResponse> {
    let (before, receiver) = {
        let mut spread = services.feed.lock();
        let receiver = match &spread.sender {
            Some(sender) => sender.subscribe(),
            None => {
                let (sender, receiver) = broadcast::channel(UNREAD);
                spread.sender = Some(sender);
                follow(services);
                receiver
            }
        };
        let fresh = |(at, _): &(Instant, Arc<Happening>)| at.elapsed() <= KEPT;
        let before: Vec<_> = spread
            .unread
            .drain(..)
            .filter(fresh)
            .map(|(_, happening)| happening)
            .collect();
        (before, receiver)
    };
    let (rest, closing) = (services.clone(), services.clone());
    let all = futures::stream::iter(before).map(Ok).chain(received(receiver));
    let all = all.map(move |next| next.map(|happening| response(&rest, &happening)));
    Box::pin(all.take_until(async move { closing.closed().await }))
}

/// Ends with an error once the subscriber has fallen behind: it lists, and subscribes again.
fn received(receiver: broadcast::Receiver<Arc<Happening>>) -> impl Stream<Item = Result<Arc<Happening>, Status>> {
    futures::stream::unfold(Some(receiver), async |receiver| {
        let mut receiver = receiver?;
        match receiver.recv().await {
            Ok(happening) => Some((Ok(happening), Some(receiver))),
            Err(broadcast::error::RecvError::Lagged(missed)) => {
                let text = format!("the subscriber fell behind by {missed} events; list, then subscribe again");
                Some((Err(Status::aborted(text)), None))
            }
            Err(broadcast::error::RecvError::Closed) => None,
        }
    })
}

fn response(services: &Services, happening: &Happening) -> v1::ContainerEventResponse {
    let catalog = Catalog::read(&services.store);
    let status = |container: &Arc<Container>| {
        let names = catalog.names(&container.spec.image.id);
        translate::container::status(container, &names, Some(&happening.sandbox))
    };
    v1::ContainerEventResponse {
        container_id: happening.id.clone(),
        container_event_type: happening.kind.into(),
        created_at: happening.at,
        pod_sandbox_status: Some(translate::sandbox::status(&happening.sandbox)),
        containers_statuses: happening.containers.iter().map(status).collect(),
    }
}

/// A change of either kind.
enum Change {
    Sandbox(Event<SandboxKind>),
    Container(Event<ContainerKind>),
}

/// Begins to follow the records; what is there now is known and no event. Ends with the server.
fn follow(services: &Services) {
    // The follower always reads, so that this queue needs no bound.
    let (sender, mut changes) = mpsc::unbounded_channel();
    let containers = sender.clone();
    services
        .store
        .watch_with::<SandboxKind>(move |event| sender.send(Change::Sandbox(event)).is_ok());
    services
        .store
        .watch_with::<ContainerKind>(move |event| containers.send(Change::Container(event)).is_ok());
    let mut follower = Follower::default();
    while let Ok(change) = changes.try_recv() {
        follower.take(change);
    }
    follower.happened.clear();
    let (feed, services) = (services.feed.clone(), services.clone());
    tokio::spawn(async move {
        loop {
            let change = tokio::select! {
                change = changes.recv() => change,
                () = services.closed() => None,
            };
            let Some(change) = change else { break };
            follower.take(change);
            follower.happened.drain(..).for_each(|happening| feed.tell(happening));
        }
        // Whoever is subscribed is told the end.
        feed.lock().sender = None;
    });
}

/// How far an object's life was told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Told {
    #[default]
    Nothing,
    Created,
    Started,
    Stopped,
}

/// The records as of the change read last, and how far each one's life was told.
#[derive(Default)]
struct Follower {
    sandboxes: HashMap<String, (Arc<PodSandbox>, Told)>,
    /// By sandbox, then by uid.
    containers: HashMap<String, BTreeMap<String, (Arc<Container>, Told)>>,
    last: i64,
    happened: Vec<Happening>,
}

impl Follower {
    fn take(&mut self, change: Change) {
        match change {
            Change::Sandbox(Event::Applied(sandbox)) => {
                let uid = sandbox.meta.uid.clone();
                let told = self.sandboxes.get(&uid).map_or(Told::Nothing, |(_, told)| *told);
                let (now, started) = sandbox_life(&sandbox, told);
                self.sandboxes.insert(uid.clone(), (sandbox.clone(), now));
                self.tell(&sandbox, &uid, told, now, started);
            }
            Change::Sandbox(Event::Erased(sandbox)) => {
                let uid = sandbox.meta.uid.clone();
                if let Some((_, told)) = self.sandboxes.remove(&uid) {
                    self.end(&sandbox, &uid, told);
                }
                self.containers.remove(&uid);
            }
            Change::Container(Event::Applied(container)) => {
                let uid = container.meta.uid.clone();
                let of_pod = self.containers.entry(container.spec.sandbox.clone()).or_default();
                let told = of_pod.get(&uid).map_or(Told::Nothing, |(_, told)| *told);
                let (now, started) = container_life(&container, told);
                of_pod.insert(uid.clone(), (container.clone(), now));
                if let Some((sandbox, _)) = self.sandboxes.get(&container.spec.sandbox).cloned() {
                    self.tell(&sandbox, &uid, told, now, started);
                }
            }
            Change::Container(Event::Erased(container)) => {
                let of_pod = self.containers.get_mut(&container.spec.sandbox);
                let known = of_pod.and_then(|of_pod| of_pod.remove(container.uid()));
                let sandbox = self.sandboxes.get(&container.spec.sandbox).cloned();
                if let (Some((_, told)), Some((sandbox, _))) = (known, sandbox) {
                    self.end(&sandbox, container.uid(), told);
                }
            }
        }
    }

    /// Tells every step of a life between `before` and `now`; `started` is false of what ended without having begun.
    fn tell(&mut self, sandbox: &Arc<PodSandbox>, id: &str, before: Told, now: Told, started: bool) {
        use v1::ContainerEventType::{ContainerCreatedEvent, ContainerStartedEvent, ContainerStoppedEvent};
        for (step, kind) in [
            (Told::Created, ContainerCreatedEvent),
            (Told::Started, ContainerStartedEvent),
            (Told::Stopped, ContainerStoppedEvent),
        ] {
            if before < step && step <= now && (started || step != Told::Started) {
                self.happen(sandbox, id, kind);
            }
        }
    }

    /// The end of what was told of; it had stopped before it was removed, if it had begun.
    fn end(&mut self, sandbox: &Arc<PodSandbox>, id: &str, told: Told) {
        if told == Told::Started {
            self.happen(sandbox, id, v1::ContainerEventType::ContainerStoppedEvent);
        }
        if told > Told::Nothing {
            self.happen(sandbox, id, v1::ContainerEventType::ContainerDeletedEvent);
        }
    }

    fn happen(&mut self, sandbox: &Arc<PodSandbox>, id: &str, kind: v1::ContainerEventType) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.last = i64::try_from(now.as_nanos()).unwrap_or(i64::MAX).max(self.last + 1);
        let of_pod = self.containers.get(sandbox.uid()).into_iter().flatten();
        let visible = of_pod.filter(|(_, (container, _))| container_visible(container));
        self.happened.push(Happening {
            kind,
            id: id.to_owned(),
            at: self.last,
            sandbox: sandbox.clone(),
            containers: visible.map(|(_, (container, _))| container.clone()).collect(),
        });
    }
}

/// Where a sandbox stands; what is not known yet, or hidden, stands where it stood. And whether it had begun.
fn sandbox_life(sandbox: &PodSandbox, told: Told) -> (Told, bool) {
    let now = match sandbox.status.phase {
        _ if !sandbox_visible(sandbox) => told,
        SandboxPhase::Unknown | SandboxPhase::Pending => told,
        SandboxPhase::Ready => Told::Started,
        SandboxPhase::NotReady => Told::Stopped,
    };
    (now.max(told), true)
}

fn container_life(container: &Container, told: Told) -> (Told, bool) {
    let now = match container.status.phase {
        _ if !container_visible(container) => told,
        ContainerPhase::Unknown | ContainerPhase::Pending => told,
        ContainerPhase::Created => Told::Created,
        ContainerPhase::Running => Told::Started,
        ContainerPhase::Exited => Told::Stopped,
    };
    (now.max(told), container.status.started_at > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use state::Meta;
    use v1::ContainerEventType::{self, *};

    fn pod(phase: SandboxPhase) -> Arc<PodSandbox> {
        let meta = Meta {
            uid: "p".into(),
            ..Meta::default()
        };
        let mut pod = PodSandbox::new(meta, Default::default(), Default::default());
        pod.status.phase = phase;
        Arc::new(pod)
    }

    fn container(uid: &str, phase: ContainerPhase, started_at: i64) -> Arc<Container> {
        let meta = Meta {
            uid: uid.into(),
            ..Meta::default()
        };
        let mut container = Container::new(meta, Default::default(), Default::default());
        container.spec.sandbox = "p".into();
        container.status.phase = phase;
        container.status.started_at = started_at;
        Arc::new(container)
    }

    fn told(follower: &mut Follower) -> Vec<(String, ContainerEventType)> {
        follower.happened.drain(..).map(|h| (h.id, h.kind)).collect()
    }

    fn ready() -> Follower {
        let mut follower = Follower::default();
        follower.take(Change::Sandbox(Event::Applied(pod(SandboxPhase::Ready))));
        follower.happened.clear();
        follower
    }

    #[test]
    fn skipped_phases_are_told() {
        let mut follower = ready();
        let ended = container("c", ContainerPhase::Exited, 5);
        follower.take(Change::Container(Event::Applied(ended.clone())));
        follower.take(Change::Container(Event::Applied(ended.clone())));
        let expected = [ContainerCreatedEvent, ContainerStartedEvent, ContainerStoppedEvent];
        assert_eq!(told(&mut follower), expected.map(|kind| ("c".to_owned(), kind)));
        follower.take(Change::Container(Event::Erased(ended)));
        assert_eq!(told(&mut follower), [("c".to_owned(), ContainerDeletedEvent)]);
    }

    #[test]
    fn what_never_began_was_not_started() {
        let mut follower = ready();
        follower.take(Change::Container(Event::Applied(container(
            "c",
            ContainerPhase::Created,
            0,
        ))));
        follower.take(Change::Container(Event::Applied(container(
            "c",
            ContainerPhase::Exited,
            0,
        ))));
        let expected = [ContainerCreatedEvent, ContainerStoppedEvent];
        assert_eq!(told(&mut follower), expected.map(|kind| ("c".to_owned(), kind)));
    }

    #[test]
    fn a_trial_is_hidden_and_an_unknown_phase_is_no_step_back() {
        let mut follower = ready();
        let mut trial = container("c", ContainerPhase::Pending, 0);
        Arc::make_mut(&mut trial).meta.ready_by = Some(1);
        follower.take(Change::Container(Event::Applied(trial)));
        follower.take(Change::Container(Event::Applied(container(
            "d",
            ContainerPhase::Running,
            3,
        ))));
        follower.take(Change::Container(Event::Applied(container(
            "d",
            ContainerPhase::Unknown,
            3,
        ))));
        follower.take(Change::Container(Event::Applied(container(
            "d",
            ContainerPhase::Running,
            3,
        ))));
        let events: Vec<_> = follower.happened.iter().map(|h| (h.kind, h.containers.len())).collect();
        assert_eq!(events, [(ContainerCreatedEvent, 1), (ContainerStartedEvent, 1)]);
        assert!(follower.happened.windows(2).all(|pair| pair[0].at < pair[1].at));
    }

    #[test]
    fn a_sandbox_that_goes_while_it_runs_has_stopped_before_and_keeps_its_status() {
        let mut follower = ready();
        follower.take(Change::Sandbox(Event::Erased(pod(SandboxPhase::NotReady))));
        assert_eq!(follower.happened[1].sandbox.status.phase, SandboxPhase::NotReady);
        let expected = [ContainerStoppedEvent, ContainerDeletedEvent];
        assert_eq!(told(&mut follower), expected.map(|kind| ("p".to_owned(), kind)));
        assert!(follower.sandboxes.is_empty());
    }

    #[tokio::test]
    async fn a_slow_subscriber_is_cut_off_and_what_nobody_reads_is_kept() {
        let happening = || Happening {
            kind: ContainerStartedEvent,
            id: "c".into(),
            at: 1,
            sandbox: pod(SandboxPhase::Ready),
            containers: Vec::new(),
        };
        let feed = Feed::default();
        let (sender, receiver) = broadcast::channel(UNREAD);
        feed.lock().sender = Some(sender);
        let mut slow = Box::pin(received(receiver));
        (0..UNREAD * 2).for_each(|_| feed.tell(happening()));
        let error = slow.next().await.unwrap().unwrap_err();
        assert_eq!(error.code(), tonic::Code::Aborted);
        assert!(slow.next().await.is_none());
        drop(slow);
        (0..UNREAD + 5).for_each(|_| feed.tell(happening()));
        assert_eq!(feed.lock().unread.len(), UNREAD);
    }
}
