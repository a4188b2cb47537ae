//! Blobs, streamed. A connection that breaks is made anew from where it broke; one that stalls or trickles is left for
//! the next host, or ends the transfer.

use std::time::{Duration, Instant};

use bytes::Bytes;
use oci_spec::image::Descriptor;
use reqwest::header::{CONTENT_RANGE, HeaderValue, RANGE};
use reqwest::{Method, Response, StatusCode, Url};

use super::ask::{Need, Target, Wish};
use super::error::{Answer, Error, Result};
use super::hosts::{Capabilities, Endpoint, Role, Tls, authority};
use super::meter::Meter;
use super::transport::Failure;
use super::{Access, Registry};

/// New connections in a row that bring less than the rate floor asks for, the time of their making included.
const BARREN: u32 = 3;
/// Answers that are kept for the error's story.
const STORY: usize = 16;
/// How long an end is waited for once every byte is here.
const FAREWELL: Duration = Duration::from_secs(1);
/// URLs of a foreign layer that are tried.
const FOREIGN: usize = 8;

/// A blob on its way. Dropping it closes the connection.
pub struct Blob {
    registry: Registry,
    access: Access,
    descriptor: Descriptor,
    targets: Vec<Target>,
    /// Which target sends, or is to be asked next.
    at: usize,
    response: Option<Response>,
    /// Bytes that are here.
    offset: u64,
    /// Bytes that come first and are here already: the server ignores `Range`.
    skip: u64,
    /// The server knows no `Range` at all.
    whole: bool,
    /// When the connection was begun, and how many bytes were here then.
    begun: (Instant, u64),
    barren: u32,
    meter: Meter,
    answers: Vec<Answer>,
}

impl Registry {
    /// A blob from `offset` on. Reconnects and resumes inside; hashing is the caller's.
    pub async fn blob(&self, access: &Access, descriptor: &Descriptor, offset: u64) -> Result<Blob> {
        let digest = descriptor.digest();
        let object = format!("blob {}@{digest}", access.reference.repository());
        if offset > descriptor.size() {
            let problem = format!("{offset} bytes are here, more than its {}", descriptor.size());
            return Err(Error::setup(object, problem));
        }
        let mut targets = self.targets(access, Need::Pull, &format!("blobs/{digest}")).await?;
        targets.extend(foreign(descriptor));
        let config = self.config();
        let mut blob = Blob {
            registry: self.clone(),
            access: access.clone(),
            descriptor: descriptor.clone(),
            targets,
            at: 0,
            response: None,
            offset,
            skip: 0,
            whole: false,
            begun: (Instant::now(), offset),
            barren: 0,
            meter: Meter::new(config.rate_floor, config.window),
            answers: Vec::new(),
        };
        if offset < descriptor.size() {
            blob.connect().await?;
        }
        Ok(blob)
    }
}

/// The URLs that a non-distributable layer may be had from (image-spec, descriptor `urls`), asked without credentials.
fn foreign(descriptor: &Descriptor) -> Vec<Target> {
    let media_type = descriptor.media_type().to_string();
    let listed = media_type.contains("nondistributable") || media_type.contains(".foreign.");
    let urls = descriptor.urls().iter().flatten().filter(|_| listed).take(FOREIGN);
    let urls = urls.filter_map(|text| Url::parse(text).ok());
    urls.filter(|url| matches!(url.scheme(), "http" | "https") && url.host_str().is_some())
        .map(|mut url| {
            // They fail only for URLs without a host.
            let _ = url.set_username("");
            let _ = url.set_password(None);
            Target {
                endpoint: Endpoint {
                    url: url.clone(),
                    role: Role::Foreign,
                    capabilities: Capabilities::ALL,
                    tls: Tls::default(),
                    guess: false,
                    lax: false,
                    headers: Vec::new(),
                    dial_timeout: Duration::from_secs(30),
                    ns: None,
                    settings: Vec::new(),
                },
                url,
            }
        })
        .collect()
}

impl Blob {
    /// The next bytes; `None` at the end, which comes only after exactly the descriptor's size.
    pub async fn next(&mut self) -> Result<Option<Bytes>> {
        loop {
            if self.offset == self.total() {
                return self.farewell().await.map(|()| None);
            }
            let Some(response) = &mut self.response else {
                self.connect().await?;
                continue;
            };
            match self.meter.wait(response.chunk()).await {
                Ok(Ok(Some(chunk))) => {
                    self.meter.count(chunk.len() as u64);
                    if let Some(fresh) = self.fresh(chunk)? {
                        return Ok(Some(fresh));
                    }
                }
                Ok(Ok(None)) => self.broken("the body ended early")?,
                Ok(Err(e)) => {
                    let failure = Failure::of(e);
                    self.broken(failure.text())?;
                }
                Err(_) => self.stalled()?,
            }
        }
    }

    /// `host[:port]` that sends now, for messages.
    pub fn host(&self) -> String {
        self.targets
            .get(self.at)
            .map(|target| target.endpoint.host())
            .unwrap_or_default()
    }

    /// Bytes that are here, those before the first [`Blob::next`] included.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    fn total(&self) -> u64 {
        self.descriptor.size()
    }

    fn object(&self) -> String {
        format!(
            "blob {}@{}",
            self.access.reference.repository(),
            self.descriptor.digest()
        )
    }

    /// Opens a body that continues at `offset`.
    async fn connect(&mut self) -> Result<()> {
        let mut wish = Wish::new(self.object(), Method::GET, Need::Pull);
        // A range that it cannot serve: the whole is asked for instead.
        wish.also = &[416];
        self.begun = (Instant::now(), self.offset);
        loop {
            wish.headers.remove(RANGE);
            if self.offset > 0 && !self.whole {
                let range = HeaderValue::from_str(&format!("bytes={}-", self.offset));
                wish.headers.extend(range.ok().map(|range| (RANGE, range)));
            }
            let asked = self.registry.ask(&self.access, &self.targets, self.at, &wish).await;
            // What the hosts before it said belongs to the story.
            let reply = asked.map_err(|e| e.after(&self.answers))?;
            self.at = reply.index;
            match self.begins_at(&reply.response) {
                Ok(start) => {
                    self.skip = self.offset - start;
                    self.response = Some(reply.response);
                    return Ok(());
                }
                Err(_) if reply.response.status() == StatusCode::RANGE_NOT_SATISFIABLE && !self.whole => {
                    self.whole = true;
                }
                Err(problem) => {
                    let host = authority(reply.response.url());
                    self.next_target(Error::bad(host, self.object(), problem))?;
                }
            }
        }
    }

    /// Where the body of an answer starts, its length checked.
    fn begins_at(&self, response: &Response) -> Result<u64, String> {
        let total = self.total();
        let length = response.content_length();
        if response.status() != StatusCode::PARTIAL_CONTENT {
            if response.status() != StatusCode::OK {
                return Err(format!("an answer of status {}", response.status().as_u16()));
            }
            return match length {
                Some(length) if length != total => Err(format!("it has {length} bytes, its descriptor says {total}")),
                _ => Ok(0),
            };
        }
        let text = response
            .headers()
            .get(CONTENT_RANGE)
            .and_then(|value| value.to_str().ok());
        let range = text
            .and_then(content_range)
            .ok_or("an answer without a Content-Range")?;
        if range.total.is_some_and(|found| found != total) {
            return Err(format!(
                "it has {} bytes, its descriptor says {total}",
                range.total.unwrap_or(0)
            ));
        }
        if range.first > self.offset || range.last < range.first || range.last >= total {
            return Err(format!(
                "asked for bytes from {} on, got {} to {}",
                self.offset, range.first, range.last
            ));
        }
        Ok(range.first)
    }

    /// What is new in a chunk.
    fn fresh(&mut self, mut chunk: Bytes) -> Result<Option<Bytes>> {
        let known = self.skip.min(chunk.len() as u64);
        self.skip -= known;
        let fresh = chunk.split_off(usize::try_from(known).unwrap_or(chunk.len()));
        if fresh.is_empty() {
            return Ok(None);
        }
        let after = self.offset + fresh.len() as u64;
        if after > self.total() {
            return Err(self.too_long());
        }
        self.offset = after;
        Ok(Some(fresh))
    }

    fn too_long(&self) -> Error {
        let problem = format!("it goes on after the {} bytes of its descriptor", self.total());
        Error::bad(self.host(), self.object(), problem)
    }

    /// All bytes are here. Reading the end gives the connection back, and shows a body that is too long.
    async fn farewell(&mut self) -> Result<()> {
        let Some(mut response) = self.response.take() else {
            return Ok(());
        };
        match tokio::time::timeout(FAREWELL, response.chunk()).await {
            Ok(Ok(Some(more))) if !more.is_empty() => Err(self.too_long()),
            _ => Ok(()),
        }
    }

    /// The connection is gone: again, unless that has brought too little several times.
    fn broken(&mut self, said: &str) -> Result<()> {
        self.response = None;
        let (when, offset) = self.begun;
        let least = u128::from(self.registry.config().rate_floor) * when.elapsed().as_millis() / 1000;
        let enough = u128::from(self.offset - offset) >= least.max(1);
        self.barren = if enough { 0 } else { self.barren + 1 };
        self.note(format!("{said} ({} of {} bytes)", self.offset, self.total()));
        if self.barren <= BARREN {
            return Ok(());
        }
        let failure = Error::Unreachable {
            object: self.object(),
            answers: self.answers.clone(),
        };
        self.next_target(failure)
    }

    fn note(&mut self, said: String) {
        if self.answers.len() == STORY {
            self.answers.remove(0);
        }
        let (host, source) = (self.host(), None);
        self.answers.push(Answer { host, source, said });
    }

    /// Nothing comes: this host has had its time.
    fn stalled(&mut self) -> Result<()> {
        self.response = None;
        let config = self.registry.config();
        let failure = Error::Slow {
            host: self.host(),
            digest: self.descriptor.digest().clone(),
            done: self.offset,
            total: self.total(),
            floor: config.rate_floor,
            window: config.window,
        };
        self.next_target(failure)
    }

    /// Leaves a host; without another one, `failure` is the end.
    fn next_target(&mut self, failure: Error) -> Result<()> {
        if self.at + 1 >= self.targets.len() {
            return Err(failure);
        }
        tracing::debug!(error = %failure, "another host is asked for the rest of a blob");
        self.note(failure.to_string());
        self.at += 1;
        self.barren = 0;
        self.whole = false;
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    first: u64,
    last: u64,
    total: Option<u64>,
}

/// `bytes 5-9/10` or `bytes 5-9/*` (RFC 9110, 14.4).
fn content_range(text: &str) -> Option<Range> {
    let (range, total) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    Some(Range {
        first: first.trim().parse().ok()?,
        last: last.trim().parse().ok()?,
        total: match total.trim() {
            "*" => None,
            total => Some(total.parse().ok()?),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ranges() {
        let range = |total| Range {
            first: 5,
            last: 9,
            total,
        };
        assert_eq!(content_range("bytes 5-9/10"), Some(range(Some(10))));
        assert_eq!(content_range("bytes 5-9/*"), Some(range(None)));
        for text in [
            "",
            "bytes",
            "bytes */10",
            "bytes 5-/10",
            "bytes 5-9",
            "items 5-9/10",
            "bytes -1-9/10",
        ] {
            assert_eq!(content_range(text), None, "{text:?}");
        }
    }
}
