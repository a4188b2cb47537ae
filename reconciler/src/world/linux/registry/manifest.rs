//! Manifests and indexes: what a reference stands for, and the documents by digest.

use bytes::{Bytes, BytesMut};
use oci_spec::image::{Digest, DigestAlgorithm};
use reqwest::header::{ACCEPT, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderValue};
use reqwest::{Method, Response};
use sha2::{Digest as _, Sha256};

use super::ask::{Need, Reply, Wish};
use super::error::{Error, Result, plain};
use super::hosts::authority;
use super::meter::Meter;
use super::transport::Failure;
use super::{Access, Registry, Resolved};
use crate::world::linux::content::{DOCUMENT_LIMIT, digest_of};

/// Both families, and whatever else there may be.
const ACCEPTED: &str = "application/vnd.docker.distribution.manifest.v2+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, \
    application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json, */*";
/// The beginning of the media types of Docker's first schema.
const SCHEMA_1: &str = "application/vnd.docker.distribution.manifest.v1+";
const CONTENT_DIGEST: &str = "docker-content-digest";

impl Registry {
    /// Tag or digest to descriptor, by one HEAD where the registry allows it.
    pub async fn resolve(&self, access: &Access) -> Result<Resolved> {
        let wanted = access.reference.digest().map(digest).transpose()?;
        let version = access.reference.digest().or(access.reference.tag()).unwrap_or_default();
        let need = if wanted.is_some() { Need::Pull } else { Need::Resolve };
        let targets = self.targets(access, need, &format!("manifests/{version}")).await?;
        let mut wish = Wish::new(format!("image {}", access.reference), Method::HEAD, need);
        wish.headers.insert(ACCEPT, HeaderValue::from_static(ACCEPTED));
        // Registries without HEAD.
        wish.also = &[405, 501];
        let mut from = 0;
        let mut failure = None;
        while from < targets.len() {
            let reply = match self.ask(access, &targets, from, &wish).await {
                Ok(reply) => reply,
                Err(e) => return Err(failure.unwrap_or(e)),
            };
            from = reply.index + 1;
            let tried = match by_head(&reply, wanted.as_ref(), &wish.object) {
                Ok(Some(resolved)) => Ok(resolved),
                Ok(None) => {
                    let mut get = wish.clone();
                    get.method = Method::GET;
                    get.also = &[];
                    let only = &targets[reply.index..=reply.index];
                    match self.ask(access, only, 0, &get).await {
                        Ok(reply) => self.by_body(reply, wanted.as_ref(), &wish.object).await,
                        Err(e) => Err(e),
                    }
                }
                Err(e) => Err(e),
            };
            match tried {
                Ok(resolved) => return Ok(resolved),
                // The first complaint tells most; the next host may do better.
                Err(e) => failure = failure.or(Some(e)),
            }
        }
        Err(failure.unwrap_or_else(|| Error::setup(&wish.object, "no host was asked")))
    }

    /// A manifest, index or the like of at most 8 MiB, its digest (and `size`) verified.
    pub async fn manifest(&self, access: &Access, digest: &Digest, size: Option<u64>) -> Result<Bytes> {
        let targets = self.targets(access, Need::Pull, &format!("manifests/{digest}")).await?;
        let object = format!("manifest {}@{digest}", access.reference.repository());
        let mut wish = Wish::new(object, Method::GET, Need::Pull);
        wish.headers.insert(ACCEPT, HeaderValue::from_static(ACCEPTED));
        let mut from = 0;
        let mut failure = None;
        while from < targets.len() {
            let reply = match self.ask(access, &targets, from, &wish).await {
                Ok(reply) => reply,
                Err(e) => return Err(failure.unwrap_or(e)),
            };
            from = reply.index + 1;
            match self.by_body(reply, Some(digest), &wish.object).await {
                Ok(got) if size.is_some_and(|size| size != got.size) => {
                    let problem = format!("it has {} bytes, its descriptor says otherwise", got.size);
                    failure = failure.or(Some(Error::bad(got.host, &wish.object, problem)));
                }
                Ok(got) => return Ok(got.body.unwrap_or_default()),
                Err(e) => failure = failure.or(Some(e)),
            }
        }
        Err(failure.unwrap_or_else(|| Error::setup(&wish.object, "no host was asked")))
    }

    async fn by_body(&self, reply: Reply, wanted: Option<&Digest>, object: &str) -> Result<Resolved> {
        let host = authority(reply.response.url());
        let media_type = media_type(reply.response.headers());
        let told = header_digest(reply.response.headers());
        let body = self.document(reply.response, object).await?;
        let digest = digest_of(Sha256::new_with_prefix(&body));
        if let Some(wanted) = wanted.or(told.as_ref())
            && *wanted != digest
        {
            let problem = format!("the document has digest {digest}, expected {wanted}");
            return Err(Error::bad(host, object, problem));
        }
        let media_type = match media_type {
            Some(found) if !is_vague(&found) => found,
            other => inner_media_type(&body).or(other).unwrap_or_default(),
        };
        refuse_schema_1(&media_type, &host, object)?;
        Ok(Resolved {
            digest,
            media_type,
            size: body.len() as u64,
            body: Some(body),
            host,
        })
    }

    /// The whole of a small body.
    async fn document(&self, mut response: Response, object: &str) -> Result<Bytes> {
        let host = authority(response.url());
        let too_big = || {
            Error::bad(
                &host,
                object,
                format!("it is larger than the {DOCUMENT_LIMIT} bytes allowed"),
            )
        };
        if response.content_length().is_some_and(|length| length > DOCUMENT_LIMIT) {
            return Err(too_big());
        }
        let config = self.config();
        let mut meter = Meter::new(config.rate_floor, config.window);
        let mut body = BytesMut::new();
        loop {
            match meter.wait(response.chunk()).await {
                Ok(Ok(Some(chunk))) => {
                    meter.count(chunk.len() as u64);
                    body.extend_from_slice(&chunk);
                    if body.len() as u64 > DOCUMENT_LIMIT {
                        return Err(too_big());
                    }
                }
                Ok(Ok(None)) => return Ok(body.freeze()),
                Ok(Err(e)) => return Err(unreachable(object, &host, Failure::of(e).text())),
                Err(_) => {
                    let said = format!("the answer stalled for {} s", config.window.as_secs());
                    return Err(unreachable(object, &host, &said));
                }
            }
        }
    }
}

fn unreachable(object: &str, host: &str, said: &str) -> Error {
    Error::Unreachable {
        object: object.to_owned(),
        answers: vec![super::Answer {
            host: host.to_owned(),
            source: None,
            said: said.to_owned(),
        }],
    }
}

/// A digest of the user's; only SHA-256 names content here.
fn digest(text: &str) -> Result<Digest> {
    match text.parse::<Digest>() {
        Ok(digest) if *digest.algorithm() == DigestAlgorithm::Sha256 => Ok(digest),
        _ => Err(Error::setup(text, "only sha256 digests are supported")),
    }
}

/// What a HEAD says, if it says enough.
fn by_head(reply: &Reply, wanted: Option<&Digest>, object: &str) -> Result<Option<Resolved>> {
    let response = &reply.response;
    if !response.status().is_success() {
        return Ok(None);
    }
    let host = authority(response.url());
    let headers = response.headers();
    // Of a HEAD the client knows no body length; the header does.
    let size = headers
        .get(CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    let (Some(digest), Some(media_type), Some(size @ 1..)) = (header_digest(headers), media_type(headers), size) else {
        return Ok(None);
    };
    if is_vague(&media_type) {
        return Ok(None);
    }
    if let Some(wanted) = wanted
        && *wanted != digest
    {
        return Err(Error::bad(
            host,
            object,
            format!("it answers for {digest}, asked for {wanted}"),
        ));
    }
    refuse_schema_1(&media_type, &host, object)?;
    if size > DOCUMENT_LIMIT {
        let problem = format!("it has {size} bytes, {DOCUMENT_LIMIT} are allowed");
        return Err(Error::bad(host, object, problem));
    }
    Ok(Some(Resolved {
        digest,
        media_type,
        size,
        body: None,
        host,
    }))
}

pub(super) fn header_digest(headers: &HeaderMap) -> Option<Digest> {
    digest(headers.get(CONTENT_DIGEST)?.to_str().ok()?).ok()
}

/// Without parameters.
fn media_type(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(CONTENT_TYPE)?.to_str().ok()?;
    let bare = value.split(';').next().unwrap_or_default().trim();
    Some(plain(bare)).filter(|text| !text.is_empty())
}

/// A media type that says nothing, of servers that hand out files.
fn is_vague(media_type: &str) -> bool {
    matches!(
        media_type,
        "application/json" | "application/octet-stream" | "text/plain"
    )
}

/// What a document says of itself, or is by its fields (image-spec, `mediaType`).
fn inner_media_type(body: &[u8]) -> Option<String> {
    let document: serde_json::Value = serde_json::from_slice(body).ok()?;
    if let Some(named) = document["mediaType"].as_str() {
        return Some(plain(named));
    }
    let of = |name: &str| Some(format!("application/vnd.oci.image.{name}.v1+json"));
    if document["schemaVersion"] == 1 {
        return Some(format!("{SCHEMA_1}json"));
    }
    if document["manifests"].is_array() {
        return of("index");
    }
    document["layers"].is_array().then(|| of("manifest")).flatten()
}

fn refuse_schema_1(media_type: &str, host: &str, object: &str) -> Result<()> {
    if !media_type.starts_with(SCHEMA_1) {
        return Ok(());
    }
    let problem = "it is of Docker's schema 1, which is not supported; push it again with a current tool";
    Err(Error::bad(host, object, problem))
}
