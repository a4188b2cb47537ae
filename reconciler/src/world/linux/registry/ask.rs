//! One wish, every way to it: endpoint after endpoint, at each of them credential after credential and then none, with
//! the retries that a status deserves. What all of them said becomes one error.

use std::time::{Duration, SystemTime};

use reqwest::header::{DATE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use reqwest::{Method, Response, StatusCode, Url};

use super::auth::{self, Grant, GrantKey, Unanswered};
use super::challenge::{Challenge, challenges};
use super::credentials::{Credential, CredentialKind};
use super::error::{Answer, Error, Result, plain};
use super::hosts::{self, Endpoint, Hosts, Role};
use super::transport::{Body, Failure, Message};
use super::{Access, Registry};

/// Tries of one endpoint.
const ATTEMPTS: u32 = 5;
/// The longest that a `Retry-After` is honoured for.
const PATIENCE: Duration = Duration::from_secs(60);

/// What an endpoint must be allowed to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    Pull,
    Resolve,
    Push,
}

/// An endpoint and the URL there.
#[derive(Clone, Debug)]
pub struct Target {
    pub endpoint: Endpoint,
    pub url: Url,
}

/// What is asked, wherever it is asked.
#[derive(Clone, Debug)]
pub struct Wish {
    /// For messages: `manifest r.example/a/b:tag`.
    pub object: String,
    pub method: Method,
    pub headers: HeaderMap,
    pub body: Body,
    pub need: Need,
    /// Statuses beside success that the caller wants to see.
    pub also: &'static [u16],
    /// Not to be repeated as it is.
    pub once: bool,
}

impl Wish {
    pub fn new(object: String, method: Method, need: Need) -> Wish {
        Wish {
            object,
            method,
            headers: HeaderMap::new(),
            body: Body::Empty,
            need,
            also: &[],
            once: false,
        }
    }
}

/// An answer, and which target gave it.
#[derive(Debug)]
pub struct Reply {
    pub index: usize,
    pub response: Response,
}

/// Why an endpoint was of no use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Setup,
    Transport,
    /// 408 or 429, with its `Retry-After`.
    Busy(Option<Duration>),
    /// 5xx.
    Server(u16),
    Absent,
    Refused,
    /// The server of its tokens is busy, broken or out of reach, with its `Retry-After`: nobody has refused anything.
    Token(Option<Duration>),
    Other,
}

/// Whether another endpoint is left to be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Last {
    Yes,
    /// The same host by another scheme, of use only if this one is not spoken.
    IfItAnswers,
    No,
}

struct Miss {
    kind: Kind,
    answers: Vec<Answer>,
    /// The endpoint was a guess that was wrong.
    guess: bool,
}

impl Registry {
    /// The endpoints of a reference that may do it, each with the URL of `tail` (`manifests/…`) there.
    pub(super) async fn targets(&self, access: &Access, need: Need, tail: &str) -> Result<Vec<Target>> {
        let hosts = self.hosts_of(access).await?;
        let able = |endpoint: &Endpoint| match need {
            Need::Pull => endpoint.capabilities.pull,
            Need::Resolve => endpoint.capabilities.resolve,
            Need::Push => endpoint.capabilities.push,
        };
        let targets: Vec<_> = hosts
            .endpoints
            .into_iter()
            .filter(able)
            .map(|endpoint| Target {
                url: url_at(&endpoint, access, tail),
                endpoint,
            })
            .collect();
        if targets.is_empty() {
            let place = hosts.directory.map(|dir| format!(" in {}", dir.display()));
            let problem = format!("no host{} may {need:?} it", place.unwrap_or_default());
            return Err(Error::setup(&access.reference, problem.to_lowercase()));
        }
        Ok(targets)
    }

    async fn hosts_of(&self, access: &Access) -> Result<Hosts> {
        let registry = self.clone();
        let reference = access.reference.clone();
        let looked = tokio::task::spawn_blocking(move || registry.look_up(&reference));
        let hosts = looked.await.map_err(|e| Error::setup(&access.reference, e))?;
        for ignored in &hosts.ignored {
            let text = ignored.to_string();
            if self.reported(&text) {
                tracing::warn!("{text}");
            }
        }
        Ok(hosts)
    }

    /// Asks the targets from the given one on until one answers.
    pub(super) async fn ask(&self, access: &Access, targets: &[Target], from: usize, wish: &Wish) -> Result<Reply> {
        let mut misses: Vec<Miss> = Vec::new();
        // The one whose scheme was guessed, and guessed right: its other scheme need not be tried.
        let mut settled: Option<&Endpoint> = None;
        for (index, target) in targets.iter().enumerate().skip(from) {
            let twin =
                |other: &Endpoint| other.guess && target.endpoint.guess && other.host() == target.endpoint.host();
            if settled.is_some_and(twin) {
                continue;
            }
            let rest = &targets[index + 1..];
            let last = if rest.is_empty() {
                Last::Yes
            } else if rest.iter().all(|other| twin(&other.endpoint)) {
                Last::IfItAnswers
            } else {
                Last::No
            };
            match self.insist(access, target, wish, last).await {
                Ok(response) => return Ok(Reply { index, response }),
                Err(miss) => {
                    settled = (miss.kind != Kind::Transport).then_some(&target.endpoint);
                    misses.push(miss);
                }
            }
        }
        Err(verdict(&wish.object, misses))
    }

    /// One endpoint, as often as its answers are worth it.
    async fn insist(&self, access: &Access, target: &Target, wish: &Wish, last: Last) -> Result<Response, Miss> {
        let mut before = None;
        for attempt in 1.. {
            let miss = match self.every_credential(access, target, wish).await {
                Ok(response) => return Ok(response),
                Err(miss) => miss,
            };
            let back_off = Duration::from_millis(250) * 2_u32.pow(attempt);
            let pause = match miss.kind {
                _ if wish.once => return Err(miss),
                Kind::Busy(after) if attempt < ATTEMPTS => after.unwrap_or(back_off).min(PATIENCE),
                // The same status twice will come a third time.
                Kind::Server(status) if last != Last::No && attempt < ATTEMPTS && before != Some(status) => {
                    before = Some(status);
                    back_off
                }
                Kind::Transport if last == Last::Yes && attempt < 3 => Duration::from_millis(50),
                Kind::Token(after) if last != Last::No && attempt < 3 => after.unwrap_or(back_off).min(PATIENCE),
                _ => return Err(miss),
            };
            tokio::time::sleep(pause).await;
        }
        unreachable!("the attempts have an end")
    }

    /// One endpoint: with what worked before; else bare, to hear its challenge; then each credential, then none.
    async fn every_credential(&self, access: &Access, target: &Target, wish: &Wish) -> Result<Response, Miss> {
        let held = held_for(access, &target.endpoint);
        let scope = scope(access, wish.need);
        let key = GrantKey::new(&target.endpoint, &scope, &held);
        let known = self.inner.grants.get(&key);
        let header = known.as_ref().map(|grant| &grant.header);
        let source = known.as_ref().and_then(|grant| grant.source.clone());
        let first = self.send(target, wish, header).await?;
        // Where a redirect (or an upload's Location) led asks for credentials that are not meant for it.
        if first.status() != StatusCode::UNAUTHORIZED || away(target, &first) {
            return self.judge(target, wish, first, source, &held).await;
        }
        self.inner.grants.forget(&key);
        let challenges = challenges(first.headers());
        let mut answers = Vec::new();
        let mut absent = false;
        let mut trouble = None;
        let anonymous = Credential::default();
        for credential in held.iter().copied().chain([&anonymous]) {
            let nameless = matches!(credential.kind, CredentialKind::Anonymous);
            // Whoever let a credential in knows better than one who lets nobody in.
            if nameless && absent {
                continue;
            }
            match self.with(target, wish, &challenges, credential, &scope, &held).await {
                Ok((response, grant)) => {
                    self.inner.grants.put(key, grant);
                    return Ok(response);
                }
                Err(miss) if matches!(miss.kind, Kind::Absent | Kind::Refused | Kind::Token(_)) => {
                    absent |= miss.kind == Kind::Absent;
                    answers.extend(miss.answers);
                    trouble = trouble.or(matches!(miss.kind, Kind::Token(_)).then_some(miss.kind));
                }
                Err(miss) => {
                    answers.extend(miss.answers);
                    let kind = miss.kind;
                    return Err(Miss {
                        kind,
                        answers,
                        guess: false,
                    });
                }
            }
        }
        // A credential that could not be tried may be the right one.
        let kind = trouble.unwrap_or(if absent { Kind::Absent } else { Kind::Refused });
        Err(Miss {
            kind,
            answers,
            guess: false,
        })
    }

    /// One endpoint, one credential.
    async fn with(
        &self,
        target: &Target,
        wish: &Wish,
        challenges: &[Challenge],
        credential: &Credential,
        scope: &str,
        held: &[&Credential],
    ) -> Result<(Response, Grant), Miss> {
        let inner = &self.inner;
        let window = self.config().window;
        let answer = auth::answer(
            &inner.transport,
            &target.endpoint,
            challenges,
            credential,
            scope,
            window,
        )
        .await;
        let source = match credential.kind {
            CredentialKind::Anonymous => None,
            _ => Some(credential.source.clone()),
        };
        match answer {
            Ok(grant) => {
                let response = self.send(target, wish, Some(&grant.header)).await?;
                let response = self.judge(target, wish, response, source, held).await?;
                Ok((response, grant))
            }
            Err(Unanswered { kind, said }) => Err(Miss {
                kind,
                answers: vec![answer_of(target, source, said, held)],
                guess: false,
            }),
        }
    }

    async fn send(&self, target: &Target, wish: &Wish, header: Option<&HeaderValue>) -> Result<Response, Miss> {
        let message = Message {
            method: wish.method.clone(),
            url: target.url.clone(),
            headers: wish.headers.clone(),
            body: wish.body.clone(),
        };
        let endpoint = &target.endpoint;
        let window = self.config().window;
        let sent = self.inner.transport.send(endpoint, message, header, window).await;
        if endpoint.guess {
            self.learn(endpoint, sent.is_ok());
        }
        sent.map_err(|failure| Miss {
            kind: match failure {
                Failure::Transport(_) => Kind::Transport,
                Failure::Setup(_) => Kind::Setup,
            },
            answers: vec![answer_of(target, None, failure.text().to_owned(), &[])],
            guess: endpoint.guess && endpoint.url.scheme() == "https",
        })
    }

    /// An answer that the caller wants, or why it is none.
    async fn judge(
        &self,
        target: &Target,
        wish: &Wish,
        response: Response,
        source: Option<String>,
        held: &[&Credential],
    ) -> Result<Response, Miss> {
        let status = response.status();
        if status.is_success() || wish.also.contains(&status.as_u16()) {
            return Ok(response);
        }
        let elsewhere = away(target, &response).then(|| hosts::authority(response.url()));
        let kind = match status.as_u16() {
            401 | 403 => Kind::Refused,
            404 => Kind::Absent,
            408 | 429 => Kind::Busy(retry_after(response.headers())),
            status @ 500.. => Kind::Server(status),
            _ => Kind::Other,
        };
        let mut said = auth::told(response, self.config().window).await;
        if let Some(host) = elsewhere {
            said = format!("it leads to {host}: {said}");
        }
        Err(Miss {
            kind,
            answers: vec![answer_of(target, source, said, held)],
            guess: false,
        })
    }
}

/// Whether an answer came from another host than the endpoint.
fn away(target: &Target, response: &Response) -> bool {
    response.url().origin() != target.endpoint.url.origin()
}

/// Seconds, or a date (RFC 9110, 10.2.3): that is told by the other side's clock, so by its own `Date` if it sends one.
pub(super) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = |name: HeaderName| Some(headers.get(name)?.to_str().ok()?.trim());
    let after = text(RETRY_AFTER)?;
    if let Ok(seconds) = after.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let at = httpdate::parse_http_date(after).ok()?;
    let now = text(DATE).and_then(|date| httpdate::parse_http_date(date).ok());
    let now = now.unwrap_or_else(SystemTime::now);
    // What is past is now.
    Some(at.duration_since(now).unwrap_or_default())
}

/// `/v2/<path>/<tail>` at an endpoint, with the registry's name where the host has another.
pub(super) fn url_at(endpoint: &Endpoint, access: &Access, tail: &str) -> Url {
    let mut url = endpoint.url.clone();
    let base = url.path().trim_end_matches('/').to_owned();
    url.set_path(&format!("{base}/{}/{tail}", access.reference.path()));
    if let Some(ns) = &endpoint.ns {
        url.query_pairs_mut().append_pair("ns", ns);
    }
    url
}

fn scope(access: &Access, need: Need) -> String {
    let actions = if need == Need::Push { "pull,push" } else { "pull" };
    format!("repository:{}:{actions}", access.reference.path())
}

/// The credentials that may be shown to an endpoint: those for its host; those for no host in particular go to the
/// registry itself, never to a mirror; none go to where a descriptor's `urls` lead.
fn held_for<'a>(access: &'a Access, endpoint: &Endpoint) -> Vec<&'a Credential> {
    if endpoint.role == Role::Foreign {
        return Vec::new();
    }
    let host = canonical(&endpoint.host());
    let own = host == canonical(access.reference.host());
    let meant = |credential: &&Credential| {
        let server = canonical(&credential.server_address);
        if server.is_empty() { own } else { server == host }
    };
    let secret = |credential: &&Credential| !matches!(credential.kind, CredentialKind::Anonymous);
    access.credentials.iter().filter(secret).filter(meant).collect()
}

/// A host as credentials name it (`https://host/v1/`), in one form; the names of the default registry are one.
pub(super) fn canonical(server: &str) -> String {
    let rest = server.split_once("://").map_or(server, |(_, rest)| rest);
    let host = rest.split('/').next().unwrap_or_default().to_ascii_lowercase();
    let host = host.strip_suffix(":443").unwrap_or(&host);
    match host {
        "index.docker.io" | super::DOCKER_ENDPOINT => state::reference::DEFAULT_HOST.to_owned(),
        host => host.to_owned(),
    }
}

fn answer_of(target: &Target, source: Option<String>, said: String, held: &[&Credential]) -> Answer {
    Answer {
        host: hosts::authority(&target.url),
        source,
        said: plain(&held.iter().fold(said, |said, credential| credential.scrub(said))),
    }
}

/// The most telling failure: a refusal over absence over configuration over an unreachable host.
fn verdict(object: &str, mut misses: Vec<Miss>) -> Error {
    // Where plain http only met a complaint (it may be for want of TLS), what https met tells more.
    if misses.iter().any(|miss| !miss.guess && miss.kind != Kind::Other) {
        misses.retain(|miss| !miss.guess);
    }
    let any = |wanted: fn(&Kind) -> bool| misses.iter().any(|miss| wanted(&miss.kind));
    let (refused, other, absent, setup) = (
        any(|kind| *kind == Kind::Refused),
        any(|kind| *kind == Kind::Other),
        any(|kind| *kind == Kind::Absent),
        any(|kind| *kind == Kind::Setup),
    );
    let object = object.to_owned();
    let answers: Vec<Answer> = misses.into_iter().flat_map(|miss| miss.answers).collect();
    let told = || answers.iter().map(Answer::to_string).collect::<Vec<_>>().join("; ");
    match (refused, other, absent, setup) {
        (true, ..) => Error::Refused { object, answers },
        (_, true, ..) => {
            let host = answers.last().map(|answer| answer.host.clone()).unwrap_or_default();
            Error::bad(host, object, told())
        }
        (_, _, true, _) => Error::Absent { object, answers },
        (_, _, _, true) => Error::setup(object, told()),
        _ => Error::Unreachable { object, answers },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let after = |pairs: &[(HeaderName, &str)]| {
            let pairs = pairs
                .iter()
                .map(|(name, value)| (name.clone(), HeaderValue::from_str(value).unwrap()));
            retry_after(&HeaderMap::from_iter(pairs))
        };
        assert_eq!(after(&[(RETRY_AFTER, " 7 ")]), Some(Duration::from_secs(7)));
        let at = (RETRY_AFTER, "Wed, 21 Oct 2015 07:28:30 GMT");
        let date = |text| (DATE, text);
        for (text, seconds) in [
            ("Wed, 21 Oct 2015 07:28:00 GMT", 30),
            ("Wednesday, 21-Oct-15 07:28:00 GMT", 30),
            ("Wed Oct 21 07:28:29 2015", 1),
            ("Wed, 21 Oct 2015 07:30:00 GMT", 0),
        ] {
            assert_eq!(
                after(&[at.clone(), date(text)]),
                Some(Duration::from_secs(seconds)),
                "{text}"
            );
        }
        assert_eq!(after(&[at]), Some(Duration::ZERO), "by our own clock it is long past");
        let later = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(100));
        assert!(after(&[(RETRY_AFTER, &later)]).is_some_and(|wait| (90..=100).contains(&wait.as_secs())));
        for nonsense in ["", "soon", "-3", "Wed, 99 Oct 2015 07:28:30 GMT"] {
            assert_eq!(after(&[(RETRY_AFTER, nonsense)]), None, "{nonsense}");
        }
    }
}
