//! One call's time limits and subject.

use std::time::{Duration, Instant};

use tonic::metadata::MetadataMap;

use crate::subject::{Subject, Wish};

/// Limit of a mutating call whose client gave none.
const DEFAULT_LIMIT: Duration = Duration::from_secs(240);
/// Longest limit taken seriously; a longer one is cut.
const LONGEST_LIMIT: Duration = Duration::from_secs(24 * 3600);
/// For so long after its call's end a create may be joined by a retry before it is torn down.
const TRIAL: Duration = Duration::from_secs(60);

/// A request's frame: when it came, when its client gives up, what it is about.
#[derive(Clone)]
pub(crate) struct Call {
    pub(crate) started: Instant,
    limit: Option<Duration>,
    subject: Subject,
}

impl Call {
    /// Begins a mutating call, and says so in the log.
    pub(crate) fn open<T: Wish>(request: tonic::Request<T>) -> (Call, T) {
        let subject = request.extensions().get::<Subject>().cloned().unwrap_or_default();
        let call = Call {
            started: now(),
            limit: limit(request.metadata()),
            subject,
        };
        let request = request.into_inner();
        call.subject.begin(&request);
        (call, request)
    }

    /// Records the pod (`namespace/name`) and id that the call turned out to be about.
    pub(crate) fn about(&self, pod: impl Into<String>, id: &str) {
        self.subject.set(pod.into(), id);
    }

    /// When to answer at the latest: a little before the client gives up, so that it reads what the work waits for.
    pub(crate) fn answer_by(&self) -> Instant {
        self.client_answer_by().unwrap_or(self.started + DEFAULT_LIMIT)
    }

    /// [`Call::answer_by`] of a call that may last for ever if its client sets no limit.
    pub(crate) fn client_answer_by(&self) -> Option<Instant> {
        self.limit.map(|limit| self.started + limit - margin(limit))
    }

    /// CLOCK_BOOTTIME in ns until which an undelivered create stays joinable.
    pub(crate) fn ready_by(&self) -> u64 {
        boottime_at(self.started + self.limit.unwrap_or(DEFAULT_LIMIT) + TRIAL)
    }

    /// CLOCK_BOOTTIME in ns after which a start must not begin: nobody would be told of it.
    pub(crate) fn start_by(&self) -> u64 {
        boottime_at(self.answer_by())
    }
}

fn margin(limit: Duration) -> Duration {
    (limit / 20).min(Duration::from_millis(500))
}

/// As tokio has it, whose clock waits follow.
pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

fn boottime_at(at: Instant) -> u64 {
    let ahead = at.saturating_duration_since(now()).as_nanos();
    state::store::boottime_ns().saturating_add(u64::try_from(ahead).unwrap_or(u64::MAX))
}

/// The client's limit: gRPC's `grpc-timeout` header, at most eight digits and a unit.
fn limit(metadata: &MetadataMap) -> Option<Duration> {
    let text = metadata.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    let limit = match unit {
        "H" => Duration::from_secs(count.saturating_mul(3600)),
        "M" => Duration::from_secs(count.saturating_mul(60)),
        "S" => Duration::from_secs(count),
        "m" => Duration::from_millis(count),
        "u" => Duration::from_micros(count),
        "n" => Duration::from_nanos(count),
        _ => return None,
    };
    Some(limit.min(LONGEST_LIMIT))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(timeout: &str) -> Call {
        let mut request = tonic::Request::new(());
        request.metadata_mut().insert("grpc-timeout", timeout.parse().unwrap());
        Call::open(request).0
    }

    #[test]
    fn reads_the_header() {
        for (text, limit) in [
            ("2S", Some(Duration::from_secs(2))),
            ("120000m", Some(Duration::from_secs(120))),
            ("99999999H", Some(LONGEST_LIMIT)),
            ("1n", Some(Duration::from_nanos(1))),
            ("", None),
            ("S", None),
            ("-1S", None),
            ("123456789S", None),
            ("5x", None),
        ] {
            assert_eq!(call(text).limit, limit, "{text:?}");
        }
    }

    #[test]
    fn answers_before_the_client_gives_up() {
        let call = call("2S");
        assert_eq!(call.answer_by() - call.started, Duration::from_millis(1900));
        assert!(call.ready_by() > state::store::boottime_ns() + 61_000_000_000);
        assert!(call.start_by() <= state::store::boottime_ns() + 1_900_000_000);
    }
}
