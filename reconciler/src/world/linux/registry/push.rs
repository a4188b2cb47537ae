//! The way out: blobs and manifests to the first host that may be pushed to (distribution-spec, "Pushing").

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use oci_spec::image::Descriptor;
use reqwest::header::{CONTENT_TYPE, HeaderValue, LOCATION};
use reqwest::{Method, StatusCode};
use sha2::{Digest as _, Sha256};

use super::ask::{Need, Target, Wish, url_at};
use super::error::{Error, Result};
use super::transport::{Body, resolve};
use super::{Access, Registry};
use crate::world::linux::content::digest_of;

/// Uploads of one blob that may break.
const ATTEMPTS: u32 = 3;

impl Registry {
    /// Sends a blob from a file of the descriptor's size, unless the registry has it. True: it was sent.
    pub async fn upload_blob(&self, access: &Access, descriptor: &Descriptor, file: &Path) -> Result<bool> {
        let digest = descriptor.digest();
        let object = format!("blob {}@{digest}", access.reference.repository());
        let targets = self.push_targets(access, &format!("blobs/{digest}")).await?;
        let mut head = Wish::new(object.clone(), Method::HEAD, Need::Push);
        head.also = &[404];
        let reply = self.ask(access, &targets, 0, &head).await?;
        if reply.response.status() != StatusCode::NOT_FOUND {
            return Ok(false);
        }
        let body = Body::File(Arc::new(file.to_owned()), descriptor.size());
        let endpoint = targets[reply.index].endpoint.clone();
        let upload = Target {
            url: url_at(&endpoint, access, "blobs/uploads/"),
            endpoint,
        };
        for attempt in 1.. {
            match self.upload(access, &upload, &object, descriptor, body.clone()).await {
                Err(Error::Unreachable { .. }) if attempt < ATTEMPTS => {}
                other => return other.map(|()| true),
            }
        }
        unreachable!("the attempts have an end")
    }

    /// One upload session: POST for a place, PUT there.
    async fn upload(
        &self,
        access: &Access,
        target: &Target,
        object: &str,
        descriptor: &Descriptor,
        body: Body,
    ) -> Result<()> {
        let post = Wish::new(object.to_owned(), Method::POST, Need::Push);
        let reply = self.ask(access, std::slice::from_ref(target), 0, &post).await?;
        let bad = |problem: String| Error::bad(target.endpoint.host(), object, problem);
        let location = reply
            .response
            .headers()
            .get(LOCATION)
            .and_then(|value| value.to_str().ok());
        let location = location.ok_or_else(|| bad("it names no place for the upload".into()))?;
        let mut url = resolve(reply.response.url(), location).map_err(|e| bad(e.text().to_owned()))?;
        url.query_pairs_mut()
            .append_pair("digest", descriptor.digest().as_ref());
        let mut put = Wish::new(object.to_owned(), Method::PUT, Need::Push);
        put.headers
            .insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
        put.body = body;
        put.once = true;
        let place = Target {
            endpoint: target.endpoint.clone(),
            url,
        };
        self.ask(access, &[place], 0, &put).await.map(|_| ())
    }

    /// Puts a manifest or index under the reference's tag or digest. What it names must be there before it.
    pub async fn put_manifest(&self, access: &Access, media_type: &str, body: Bytes) -> Result<()> {
        let digest = digest_of(Sha256::new_with_prefix(&body));
        let object = format!("manifest {}", access.reference);
        let version = access.reference.digest().or(access.reference.tag()).unwrap_or_default();
        if access
            .reference
            .digest()
            .is_some_and(|wanted| wanted != digest.as_ref())
        {
            return Err(Error::setup(object, format!("the manifest has digest {digest}")));
        }
        let targets = self.push_targets(access, &format!("manifests/{version}")).await?;
        let mut put = Wish::new(object.clone(), Method::PUT, Need::Push);
        let value = HeaderValue::from_str(media_type).map_err(|_| Error::setup(&object, "a malformed media type"))?;
        put.headers.insert(CONTENT_TYPE, value);
        put.body = Body::Bytes(body);
        let reply = self.ask(access, &targets, 0, &put).await?;
        let told = super::manifest::header_digest(reply.response.headers());
        match told {
            Some(told) if told != digest => {
                let problem = format!("it took the manifest for {told}, sent was {digest}");
                Err(Error::bad(targets[reply.index].endpoint.host(), object, problem))
            }
            _ => Ok(()),
        }
    }

    /// Only the first host that may be pushed to; it may have two endpoints, if its scheme is a guess.
    async fn push_targets(&self, access: &Access, tail: &str) -> Result<Vec<Target>> {
        let mut targets = self.targets(access, Need::Push, tail).await?;
        let host = targets.first().map(|target| target.endpoint.host()).unwrap_or_default();
        targets.retain(|target| target.endpoint.host() == host);
        Ok(targets)
    }
}
