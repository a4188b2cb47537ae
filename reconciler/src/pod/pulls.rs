//! Whether a container's image is here, or what is to be done about it: the kubelet's pull policies and back-off. Pure.

use std::sync::Arc;
use std::time::Duration;

use state::image::{ImagePhase, ImageSource};
use state::pod::{PodContainer, PullPolicy};
use state::pull::PullOutcome;
use state::{Pull, Reference};

use super::decide::{Member, View, Wish};

/// A failed pull waits 10 s, doubled for each further one, at most 5 minutes, as the kubelet does it.
const BACKOFF_FIRST: Duration = Duration::from_secs(10);
const BACKOFF_LAST: Duration = Duration::from_secs(300);

/// How a container's image stands.
#[derive(Debug, PartialEq, Eq)]
pub enum Stand {
    Here,
    Do(Wish),
    /// For what, and how long at the least.
    Wait(String, Option<Duration>),
}

/// Name of the pull for one attempt of a container.
pub fn name(container: &str, attempt: u32) -> String {
    format!("{container}-{attempt}")
}

pub fn find<'a>(pulls: &'a [Arc<Pull>], spec: &PodContainer, attempt: u32) -> Option<&'a Arc<Pull>> {
    let (name, image) = (name(&spec.name, attempt), full(&spec.image));
    pulls
        .iter()
        .find(|pull| pull.meta.name == name && !pull.meta.deleted() && pull.spec.image == image)
}

/// As Image records are named; what is no reference stays as it is, and its pull says so.
fn full(image: &str) -> String {
    Reference::parse(image, "image").map_or_else(|_| image.to_owned(), |reference| reference.to_string())
}

pub fn image(member: &Member, view: &View) -> Stand {
    let spec = member.spec;
    let image = full(&spec.image);
    let present = view.images.get(&spec.image);
    let policy = spec.image_pull_policy.unwrap_or(match image.ends_with(":latest") {
        true => PullPolicy::Always,
        false => PullPolicy::IfNotPresent,
    });
    let refuse = |why: String| Stand::Do(Wish::Refuse { why });
    if let Some(record) = present {
        let local = record.spec.source != ImageSource::Registry;
        match record.status.phase {
            // What came by another way has no registry to ask.
            ImagePhase::Ready if local || policy != PullPolicy::Always => return Stand::Here,
            ImagePhase::Failed if local => {
                let why = record.status.conditions.first().map(|c| c.message.clone());
                return refuse(format!("image {image}: {}", why.unwrap_or_default()));
            }
            ImagePhase::Unknown | ImagePhase::Pending if local || policy == PullPolicy::Never => {
                return Stand::Wait(format!("image {image} is being made ready"), None);
            }
            _ => {}
        }
    }
    if policy == PullPolicy::Never {
        let advice = "imagePullPolicy is Never: import or pull it by hand";
        return refuse(format!("ErrImageNeverPull: image {image} is not here; {advice}"));
    }
    if image.starts_with("localhost/") {
        let how = "docker save IMAGE | reconcile images import -";
        return refuse(format!(
            "image {image} is not here, and localhost is no registry; import it: {how}"
        ));
    }
    pulled(
        member,
        view,
        image,
        present.is_some_and(|i| i.status.phase == ImagePhase::Ready),
    )
}

fn pulled(member: &Member, view: &View, image: String, ready: bool) -> Stand {
    let start = |image: String, tries| {
        Stand::Do(Wish::Pull {
            container: member.spec.name.clone(),
            attempt: member.attempts,
            image,
            tries,
        })
    };
    let Some(pull) = member.pull else {
        return start(image, 0);
    };
    match &pull.status.outcome {
        None => Stand::Wait(format!("image {image} is being pulled"), None),
        Some(PullOutcome::Done { .. }) if ready => Stand::Here,
        // Removed since.
        Some(PullOutcome::Done { .. }) => start(image, 0),
        // Somebody gave, changed or took back a secret since: that may be the cure.
        Some(PullOutcome::Failed { .. }) if pull.spec.secrets != view.secrets => start(image, 0),
        Some(PullOutcome::Failed { message, .. }) => {
            let delay = backoff(pull.spec.tries);
            let past = u64::try_from(view.now.saturating_sub(pull.status.finished_at)).unwrap_or(0);
            match delay
                .checked_sub(Duration::from_nanos(past))
                .filter(|left| !left.is_zero())
            {
                None => start(image, pull.spec.tries + 1),
                Some(left) => {
                    let seconds = delay.as_secs();
                    let why = format!("ImagePullBackOff: back-off {seconds} s pulling image {image}: {message}");
                    Stand::Wait(why, Some(left))
                }
            }
        }
    }
}

fn backoff(tries: u32) -> Duration {
    BACKOFF_FIRST.saturating_mul(1 << tries.min(5)).min(BACKOFF_LAST)
}

/// What the kubelet calls a container whose image cannot be had.
pub fn reason(member: &Member) -> Option<String> {
    failure(member).map(|_| "ImagePullBackOff".to_owned())
}

pub fn message(member: &Member) -> Option<String> {
    failure(member).map(|message| format!("ErrImagePull: {message}"))
}

fn failure<'a>(member: &Member<'a>) -> Option<&'a String> {
    match member.pull?.status.outcome.as_ref()? {
        PullOutcome::Failed { message, .. } => Some(message),
        PullOutcome::Done { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use state::image::{ImageSpec, ImageStatus};
    use state::pod::PodStatus;
    use state::pull::{PullFailure, PullSpec, PullStatus};
    use state::{Image, Meta, Pod};

    use super::super::decide::decide;
    use super::*;
    use state::pod::PodSpec;
    use state::sandbox::{SandboxPhase, SandboxSpec, SandboxStatus};

    const S: i64 = 1_000_000_000;

    fn record(source: ImageSource, phase: ImagePhase) -> Arc<Image> {
        let spec = ImageSpec {
            source,
            ..ImageSpec::default()
        };
        let status = ImageStatus {
            phase,
            ..ImageStatus::default()
        };
        Arc::new(Image::new(Meta::default(), spec, status))
    }

    fn pull(image: &str, tries: u32, outcome: Option<PullOutcome>) -> Arc<Pull> {
        let meta = Meta {
            name: "a-0".to_owned(),
            ..Meta::default()
        };
        let spec = PullSpec {
            image: image.to_owned(),
            tries,
            ..PullSpec::default()
        };
        let status = PullStatus {
            claimed: true,
            outcome,
            finished_at: S,
            ..PullStatus::default()
        };
        Arc::new(Pull::new(meta, spec, status))
    }

    /// The first wish, or what is waited for.
    fn wish(image: &str, policy: Option<PullPolicy>, record: Option<Arc<Image>>, pulls: Vec<Arc<Pull>>) -> String {
        let container = PodContainer {
            name: "a".to_owned(),
            image: image.to_owned(),
            image_pull_policy: policy,
            ..PodContainer::default()
        };
        let spec = PodSpec {
            containers: vec![container],
            ..PodSpec::default()
        };
        let status = SandboxStatus {
            phase: SandboxPhase::Ready,
            ..SandboxStatus::default()
        };
        let view = View {
            sandboxes: vec![Arc::new(state::PodSandbox::new(
                Meta::default(),
                SandboxSpec::default(),
                status,
            ))],
            containers: vec![],
            images: record
                .map(|record| (image.to_owned(), record))
                .into_iter()
                .collect::<HashMap<_, _>>(),
            pulls,
            secrets: vec![],
            now: 5 * S,
        };
        let decision = decide(&Pod::new(Meta::default(), spec, PodStatus::default()), &view);
        match decision.wishes.first() {
            Some(Wish::Container { .. }) => "start".to_owned(),
            Some(Wish::Pull { tries, .. }) => format!("pull {tries}"),
            Some(Wish::Refuse { why }) => format!("refuse {why}"),
            other => format!(
                "{other:?} {} {:?}",
                decision.waiting.unwrap_or_default(),
                decision.again
            ),
        }
    }

    #[test]
    fn policies_of_the_kubelet() {
        use ImagePhase::Ready;
        let registry = || Some(record(ImageSource::Registry, Ready));
        let always = Some(PullPolicy::Always);
        let present = Some(PullPolicy::IfNotPresent);
        let never = Some(PullPolicy::Never);
        for (image, policy, record, outcome) in [
            ("r.example/a:1", None, None, "pull 0"),
            ("r.example/a:1", None, registry(), "start"),
            ("r.example/a", None, registry(), "pull 0"),
            ("r.example/a", present, registry(), "start"),
            ("r.example/a:1", always, registry(), "pull 0"),
            ("r.example/a:1", never, registry(), "start"),
            ("localhost/a", None, Some(record(ImageSource::BuiltIn, Ready)), "start"),
        ] {
            assert_eq!(wish(image, policy, record, vec![]), outcome, "{image} {policy:?}");
        }
        assert!(wish("r.example/a:1", never, None, vec![]).starts_with("refuse ErrImageNeverPull"));
        assert!(wish("localhost/a", None, None, vec![]).contains("images import"));
    }

    #[test]
    fn pulls_are_awaited_and_failures_wait_longer_each_time() {
        let name = "r.example/a:1";
        let failed = PullOutcome::Failed {
            why: PullFailure::NotFound,
            message: "no such thing".to_owned(),
        };
        let done = PullOutcome::Done {
            id: String::new(),
            digest: String::new(),
        };
        let with = |tries, outcome| wish(name, None, None, vec![pull(name, tries, outcome)]);
        assert!(with(0, None).contains("is being pulled"));
        let first = with(0, Some(failed.clone()));
        assert!(
            first.contains("ImagePullBackOff: back-off 10 s") && first.contains("no such thing"),
            "{first}"
        );
        assert!(first.ends_with("Some(6s)"), "{first}");
        assert!(with(3, Some(failed)).contains("back-off 80 s"));
        let ready = Some(record(ImageSource::Registry, ImagePhase::Ready));
        let always = Some(PullPolicy::Always);
        assert_eq!(wish(name, always, ready, vec![pull(name, 0, Some(done))]), "start");
        assert_eq!(backoff(9), BACKOFF_LAST);
    }
}
