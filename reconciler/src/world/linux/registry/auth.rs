//! Answers to challenges: Basic, and Bearer tokens fetched from a realm (Docker's token specification and its OAuth2
//! form). What worked is remembered for (endpoint, repository and action, credentials in hand), in memory alone.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use reqwest::{Method, Request, Response, StatusCode, Url};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::ask::{Kind, retry_after};
use super::challenge::Challenge;
use super::credentials::{Credential, CredentialKind};
use super::hosts::{Endpoint, authority, is_loopback};
use super::transport::{Failure, Transport};

/// Bytes of a token answer.
const ANSWER_LIMIT: usize = 1 << 20;
/// Of a token that does not say.
const LIFETIME: u64 = 60;
/// Before its end a token is not used any more, for requests that take a while to arrive.
const MARGIN: Duration = Duration::from_secs(5);
/// A Basic header is looked at anew after this.
const BASIC_LIFETIME: Duration = Duration::from_secs(300);
/// Grants that are kept.
const GRANTS: usize = 1024;

/// For whom a header is good. Two callers with other credentials never share one.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct GrantKey {
    origin: String,
    scope: String,
    identity: [u8; 32],
}

impl GrantKey {
    pub fn new(endpoint: &Endpoint, scope: &str, credentials: &[&Credential]) -> GrantKey {
        let mut hasher = Sha256::new();
        let mut field = |text: &str| {
            hasher.update((text.len() as u64).to_le_bytes());
            hasher.update(text);
        };
        for credential in credentials {
            match &credential.kind {
                CredentialKind::Anonymous => field("anonymous"),
                CredentialKind::Basic { username, password } => {
                    field("basic");
                    field(username);
                    field(password);
                }
                CredentialKind::IdentityToken(token) => {
                    field("identity");
                    field(token);
                }
                CredentialKind::RegistryToken(token) => {
                    field("registry");
                    field(token);
                }
            }
        }
        GrantKey {
            origin: endpoint.url.to_string(),
            scope: scope.to_owned(),
            identity: hasher.finalize().into(),
        }
    }
}

/// A header that was let in.
#[derive(Clone)]
pub struct Grant {
    pub header: HeaderValue,
    /// Whose credential it came from.
    pub source: Option<String>,
    pub expires: Instant,
}

#[derive(Default)]
pub struct Grants {
    known: Mutex<HashMap<GrantKey, Grant>>,
}

impl Grants {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<GrantKey, Grant>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn get(&self, key: &GrantKey) -> Option<Grant> {
        let mut known = self.lock();
        let grant = known.get(key)?;
        if grant.expires > Instant::now() {
            return Some(grant.clone());
        }
        known.remove(key);
        None
    }

    pub fn put(&self, key: GrantKey, grant: Grant) {
        let mut known = self.lock();
        if known.len() >= GRANTS {
            let now = Instant::now();
            known.retain(|_, grant| grant.expires > now);
        }
        if known.len() < GRANTS {
            known.insert(key, grant);
        }
    }

    pub fn forget(&self, key: &GrantKey) {
        self.lock().remove(key);
    }
}

/// `Bearer …` or `Basic …`, marked so that no log shows it.
fn header(text: String) -> Result<HeaderValue, String> {
    let mut value =
        HeaderValue::from_str(&text).map_err(|_| "the credential holds characters no header may have".to_owned())?;
    value.set_sensitive(true);
    Ok(value)
}

pub fn bearer(token: &str) -> Result<HeaderValue, String> {
    header(format!("Bearer {token}"))
}

fn basic(username: &str, password: &str) -> Result<HeaderValue, String> {
    header(format!("Basic {}", STANDARD.encode(format!("{username}:{password}"))))
}

/// Why there is no header.
pub struct Unanswered {
    /// `Refused`, if it is not for want of a server of tokens that works.
    pub kind: Kind,
    /// For people.
    pub said: String,
}

impl Unanswered {
    fn refused(said: impl Into<String>) -> Unanswered {
        let (kind, said) = (Kind::Refused, said.into());
        Unanswered { kind, said }
    }
}

impl From<String> for Unanswered {
    fn from(said: String) -> Unanswered {
        Unanswered::refused(said)
    }
}

/// Makes the header for a challenge, or says why there is none.
pub async fn answer(
    transport: &Transport,
    endpoint: &Endpoint,
    challenges: &[Challenge],
    credential: &Credential,
    scope: &str,
    window: Duration,
) -> Result<Grant, Unanswered> {
    let source = match &credential.kind {
        CredentialKind::Anonymous => None,
        _ => Some(credential.source.clone()),
    };
    let grant = |header, lifetime| Grant {
        header,
        source,
        expires: Instant::now() + lifetime,
    };
    if let CredentialKind::RegistryToken(token) = &credential.kind {
        return Ok(grant(bearer(token)?, BASIC_LIFETIME));
    }
    let mut problem = Unanswered::refused("401 Unauthorized, and no way to sign in that is known here");
    for challenge in challenges {
        let answered = match (challenge, &credential.kind) {
            (Challenge::Basic, CredentialKind::Basic { username, password }) => basic(username, password)
                .map(|header| (header, BASIC_LIFETIME))
                .map_err(Unanswered::from),
            (Challenge::Basic, CredentialKind::Anonymous) => {
                Err(Unanswered::refused("401 Unauthorized: it asks for a password"))
            }
            (Challenge::Basic, _) => Err(Unanswered::refused(
                "401 Unauthorized: it asks for a password, not a token",
            )),
            (
                Challenge::Bearer {
                    realm,
                    service,
                    scope: named,
                },
                _,
            ) => {
                let asked = Asked {
                    transport,
                    endpoint,
                    realm,
                    service,
                    scope: if named.is_empty() { scope } else { named },
                    window,
                };
                asked.token(credential).await
            }
        };
        match answered {
            Ok((header, lifetime)) => return Ok(grant(header, lifetime)),
            Err(why) => problem = why,
        }
    }
    Err(problem)
}

#[derive(Deserialize)]
struct Token {
    #[serde(default)]
    token: Option<String>,
    #[serde(default)]
    access_token: Option<String>,
    #[serde(default)]
    expires_in: Option<u64>,
}

/// A token that is asked for.
struct Asked<'a> {
    transport: &'a Transport,
    endpoint: &'a Endpoint,
    realm: &'a str,
    service: &'a str,
    scope: &'a str,
    window: Duration,
}

impl Asked<'_> {
    async fn token(&self, credential: &Credential) -> Result<(HeaderValue, Duration), Unanswered> {
        let realm = self.realm(credential)?;
        let (username, secret) = match &credential.kind {
            CredentialKind::Basic { username, password } => (username.as_str(), password.as_str()),
            CredentialKind::IdentityToken(token) => ("", token.as_str()),
            CredentialKind::Anonymous | CredentialKind::RegistryToken(_) => return self.get(&realm, None).await,
        };
        let mut form = vec![("service", self.service), ("client_id", "reconcile")];
        form.extend(
            self.scope
                .split(' ')
                .filter(|s| !s.is_empty())
                .map(|scope| ("scope", scope)),
        );
        form.extend(if username.is_empty() {
            vec![("grant_type", "refresh_token"), ("refresh_token", secret)]
        } else {
            vec![("grant_type", "password"), ("username", username), ("password", secret)]
        });
        let mut request = Request::new(Method::POST, realm.clone());
        request.headers_mut().insert(
            CONTENT_TYPE,
            HeaderValue::from_static("application/x-www-form-urlencoded"),
        );
        *request.body_mut() = Some(encoded(&form).into());
        let response = self.send(request).await?;
        // Servers of the older form answer so; 405 means it only where a GET could bear the credential.
        let older = match response.status() {
            StatusCode::BAD_REQUEST | StatusCode::UNAUTHORIZED | StatusCode::NOT_FOUND => true,
            StatusCode::METHOD_NOT_ALLOWED => !username.is_empty(),
            _ => false,
        };
        if older {
            return self.get(&realm, Some(basic(username, secret)?)).await;
        }
        self.read(response).await
    }

    /// The realm, if a secret may go there: never from https to plain http, but on this machine.
    fn realm(&self, credential: &Credential) -> Result<Url, String> {
        let realm = Url::parse(self.realm).map_err(|e| format!("its token realm is no URL: {e}"))?;
        if !matches!(realm.scheme(), "http" | "https") {
            return Err(format!("its token realm has the scheme {}", realm.scheme()));
        }
        let secret = !matches!(credential.kind, CredentialKind::Anonymous);
        let downgrade = realm.scheme() == "http" && self.endpoint.url.scheme() == "https";
        if secret && downgrade && !is_loopback(&authority(&realm)) {
            return Err(format!(
                "its token realm {} is plain http; the credential was not sent",
                authority(&realm)
            ));
        }
        Ok(realm)
    }

    async fn get(
        &self,
        realm: &Url,
        authorization: Option<HeaderValue>,
    ) -> Result<(HeaderValue, Duration), Unanswered> {
        let mut url = realm.clone();
        {
            let mut query = url.query_pairs_mut();
            if !self.service.is_empty() {
                query.append_pair("service", self.service);
            }
            for scope in self.scope.split(' ').filter(|s| !s.is_empty()) {
                query.append_pair("scope", scope);
            }
        }
        let mut request = Request::new(Method::GET, url);
        if let Some(value) = authorization {
            request.headers_mut().insert(AUTHORIZATION, value);
        }
        let response = self.send(request).await?;
        self.read(response).await
    }

    async fn send(&self, request: Request) -> Result<Response, Unanswered> {
        let place = authority(request.url());
        let failed = |failure: Failure| Unanswered {
            kind: match failure {
                Failure::Transport(_) => Kind::Token(None),
                Failure::Setup(_) => Kind::Setup,
            },
            said: format!("token from {place}: {}", failure.text()),
        };
        let connector = self
            .transport
            .client_for(self.endpoint, request.url())
            .await
            .map_err(failed)?;
        match tokio::time::timeout(self.window, connector.execute(request)).await {
            Ok(answer) => answer.map_err(failed),
            Err(_) => Err(Unanswered {
                kind: Kind::Token(None),
                said: format!("token from {place}: no answer within {} s", self.window.as_secs()),
            }),
        }
    }

    async fn read(&self, response: Response) -> Result<(HeaderValue, Duration), Unanswered> {
        let place = authority(response.url());
        let status = response.status();
        if !status.is_success() {
            let kind = match status.as_u16() {
                408 | 429 | 500.. => Kind::Token(retry_after(response.headers())),
                _ => Kind::Refused,
            };
            let said = format!("token from {place}: {}", told(response, self.window).await);
            return Err(Unanswered { kind, said });
        }
        let body = bounded(response, ANSWER_LIMIT, self.window).await;
        let useless = |problem: &str| Unanswered {
            kind: Kind::Token(None),
            said: format!("token from {place}: {problem}"),
        };
        // The parser's message could quote the token.
        let token: Option<Token> = body.and_then(|body| serde_json::from_slice(&body).ok());
        let token = token.ok_or_else(|| useless("the answer is no token"))?;
        let text = token.token.or(token.access_token).filter(|text| !text.is_empty());
        let text = text.ok_or_else(|| useless("the answer holds no token"))?;
        let lifetime = Duration::from_secs(token.expires_in.filter(|s| *s > 0).unwrap_or(LIFETIME).min(24 * 3600));
        Ok((bearer(&text)?, lifetime.saturating_sub(MARGIN).max(lifetime / 2)))
    }
}

fn encoded(pairs: &[(&str, &str)]) -> String {
    reqwest::Url::parse_with_params("form:", pairs)
        .ok()
        .and_then(|url| url.query().map(str::to_owned))
        .unwrap_or_default()
}

/// A body of at most `limit` bytes; `None` if it is bigger, broken or slow.
pub async fn bounded(mut response: Response, limit: usize, window: Duration) -> Option<Vec<u8>> {
    let read = async {
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.ok()? {
            if body.len() + chunk.len() > limit {
                return None;
            }
            body.extend_from_slice(&chunk);
        }
        Some(body)
    };
    tokio::time::timeout(window, read).await.ok().flatten()
}

/// `403 Forbidden: DENIED: requested access is denied`: status, and what an error body of the specification says, as it
/// came: it may echo a credential, and control a terminal.
pub async fn told(response: Response, window: Duration) -> String {
    #[derive(Deserialize)]
    struct Body {
        #[serde(default)]
        errors: Vec<One>,
        #[serde(default)]
        details: String,
    }
    #[derive(Deserialize)]
    struct One {
        #[serde(default)]
        code: String,
        #[serde(default)]
        message: String,
    }
    let status = response.status();
    let mut text = format!("{} {}", status.as_u16(), status.canonical_reason().unwrap_or("unknown"));
    let body = bounded(response, 16 << 10, window.min(Duration::from_secs(5))).await;
    let body: Option<Body> = body.and_then(|body| serde_json::from_slice(&body).ok());
    if let Some(body) = body {
        let mut said: Vec<_> = body
            .errors
            .iter()
            .take(2)
            .map(|one| format!("{}: {}", one.code, one.message))
            .collect();
        if said.is_empty() && !body.details.is_empty() {
            said.push(body.details);
        }
        if !said.is_empty() {
            text.push_str(": ");
            text.push_str(&said.join(", "));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_escaped() {
        assert_eq!(encoded(&[("password", "a&b=c d+é")]), "password=a%26b%3Dc+d%2B%C3%A9");
    }

    #[test]
    fn headers_are_hidden() {
        let value = basic("user", "secret").unwrap();
        assert_eq!(format!("{value:?}"), "Sensitive");
        assert!(bearer("a\nb").is_err());
    }
}
