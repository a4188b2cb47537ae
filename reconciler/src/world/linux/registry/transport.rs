//! Connections: a client per way of speaking (certificates, verification, proxy), and one request with its redirects.
//!
//! Redirects are followed here, not by the library: across hosts nothing goes along but what the wish itself is made
//! of, neither an Authorization nor the headers of `hosts.toml` nor the client certificate.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue, LOCATION};
use reqwest::{Client, Method, Request, Response, Url};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

use super::error::plain;
use super::hosts::{Endpoint, Tls, authority, is_loopback};
use super::identity::Identities;

/// Redirects of one request.
const REDIRECTS: usize = 10;
/// Clients that are kept.
const CLIENTS: usize = 64;
/// Bytes of a PEM file.
const PEM_LIMIT: u64 = 4 << 20;

/// Why there is no answer.
#[derive(Clone, Debug)]
pub enum Failure {
    /// No connection, or it broke.
    Transport(String),
    /// Something of this node's configuration.
    Setup(String),
}

impl Failure {
    pub fn text(&self) -> &str {
        match self {
            Failure::Transport(text) | Failure::Setup(text) => text,
        }
    }

    /// The innermost cause, without the URL, which may bear a signature.
    pub fn of(error: reqwest::Error) -> Failure {
        if error.is_timeout() {
            return Failure::Transport("timed out".into());
        }
        let error = error.without_url();
        let mut cause: &dyn std::error::Error = &error;
        while let Some(inner) = cause.source() {
            cause = inner;
        }
        let mut text = plain(&cause.to_string());
        if text.contains("UnknownIssuer") {
            text.push_str(" (name its authority as `ca` in the registry's hosts.toml)");
        }
        Failure::Transport(text)
    }
}

/// What is sent, but for the credential.
#[derive(Clone, Debug)]
pub struct Message {
    pub method: Method,
    pub url: Url,
    pub headers: HeaderMap,
    pub body: Body,
}

#[derive(Clone, Debug, Default)]
pub enum Body {
    #[default]
    Empty,
    Bytes(bytes::Bytes),
    /// A file of this many bytes.
    File(Arc<PathBuf>, u64),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    host: String,
    tls: Tls,
    /// Of the files: modification time, inode, size.
    stamps: Vec<(i64, i64, u64, u64)>,
    dial_timeout: Duration,
    /// Proxies are never asked for loopback.
    direct: bool,
    /// http alone: no roots are needed.
    plain: bool,
}

/// The clients, made when they are first needed.
#[derive(Default)]
pub struct Transport {
    clients: Mutex<HashMap<Key, Connector>>,
}

/// A client, and what its handshakes tell of a server.
#[derive(Clone)]
pub struct Connector {
    client: Client,
    /// Set when a server asked for a certificate and had none. Over HTTP/2 its refusal is but a closed connection.
    uncertified: Arc<AtomicBool>,
}

impl Connector {
    pub async fn execute(&self, request: Request) -> Result<Response, Failure> {
        self.client.execute(request).await.map_err(|e| match Failure::of(e) {
            Failure::Transport(text) if self.uncertified.load(Ordering::Relaxed) => Failure::Transport(format!(
                "{text} (it asks for a client certificate: name one as `client` in the registry's hosts.toml)"
            )),
            other => other,
        })
    }
}

impl Transport {
    /// Sends a message to an endpoint and follows redirects of GET and HEAD. `window` bounds the wait for an answer.
    pub async fn send(
        &self,
        endpoint: &Endpoint,
        message: Message,
        authorization: Option<&HeaderValue>,
        window: Duration,
    ) -> Result<Response, Failure> {
        let follow = message.method == Method::GET || message.method == Method::HEAD;
        let mut url = message.url.clone();
        for _ in 0..REDIRECTS {
            let at_home = url.origin() == endpoint.url.origin();
            let mut headers = message.headers.clone();
            if at_home {
                for (name, value) in &endpoint.headers {
                    headers.append(name, value.clone());
                }
                if let Some(value) = authorization {
                    headers.insert(AUTHORIZATION, value.clone());
                }
            }
            let connector = self.client_for(endpoint, &url).await?;
            let response = self.one(&connector, &message, url.clone(), headers, window).await?;
            if !follow || !response.status().is_redirection() {
                return Ok(response);
            }
            url = redirected(&url, response.headers())?;
        }
        Err(Failure::Transport(format!("more than {REDIRECTS} redirects")))
    }

    async fn one(
        &self,
        connector: &Connector,
        message: &Message,
        url: Url,
        headers: HeaderMap,
        window: Duration,
    ) -> Result<Response, Failure> {
        let mut request = Request::new(message.method.clone(), url);
        *request.headers_mut() = headers;
        match &message.body {
            Body::Empty => return waited(connector.execute(request), window).await,
            Body::Bytes(bytes) => *request.body_mut() = Some(bytes.clone().into()),
            Body::File(path, size) => {
                let file = tokio::fs::File::open(path.as_ref()).await;
                let file = file.map_err(|e| Failure::Setup(format!("open {}: {e}", path.display())))?;
                request
                    .headers_mut()
                    .insert(reqwest::header::CONTENT_LENGTH, HeaderValue::from(*size));
                *request.body_mut() = Some(file.into());
                // As long as it takes to send the file: the kernel's own time-outs watch the connection.
                return connector.execute(request).await;
            }
        }
        waited(connector.execute(request), window).await
    }

    /// The client to reach `url` with on behalf of an endpoint. Elsewhere the endpoint's authorities are trusted too,
    /// but no certificate is shown, and what was left unverified only for being on this machine is verified.
    pub async fn client_for(&self, endpoint: &Endpoint, url: &Url) -> Result<Connector, Failure> {
        let host = authority(url);
        let mut tls = endpoint.tls.clone();
        if url.origin() != endpoint.url.origin() {
            tls.client.clear();
            tls.skip_verify = tls.skip_verify && (!endpoint.lax || is_loopback(&host));
        }
        let key = Key {
            stamps: stamps(&tls),
            tls,
            dial_timeout: endpoint.dial_timeout,
            direct: is_loopback(&host),
            plain: url.scheme() == "http",
            host,
        };
        let lock = || self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(connector) = lock().get(&key) {
            return Ok(connector.clone());
        }
        // Reading the system's roots takes milliseconds.
        let built = tokio::task::spawn_blocking({
            let key = key.clone();
            move || build(&key)
        });
        let connector = built.await.map_err(|e| Failure::Setup(e.to_string()))??;
        let mut clients = lock();
        if clients.len() >= CLIENTS {
            clients.clear();
        }
        Ok(clients.entry(key).or_insert(connector).clone())
    }
}

async fn waited(
    answer: impl Future<Output = Result<Response, Failure>>,
    window: Duration,
) -> Result<Response, Failure> {
    match tokio::time::timeout(window, answer).await {
        Ok(answer) => answer,
        Err(_) => Err(Failure::Transport(format!("no answer within {} s", window.as_secs()))),
    }
}

/// Where a redirect leads; never with a user and a password that the other side chose.
fn redirected(from: &Url, headers: &HeaderMap) -> Result<Url, Failure> {
    let location = headers.get(LOCATION).and_then(|value| value.to_str().ok());
    let location = location.ok_or_else(|| Failure::Transport("a redirect that leads nowhere".into()))?;
    resolve(from, location)
}

/// A `Location` against the URL that it was sent for.
pub fn resolve(from: &Url, location: &str) -> Result<Url, Failure> {
    let mut url = from
        .join(location)
        .map_err(|e| Failure::Transport(format!("a Location that is no URL: {e}")))?;
    if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
        return Err(Failure::Transport(format!(
            "a Location with the scheme {}",
            url.scheme()
        )));
    }
    // They fail only for URLs without a host.
    let _ = url.set_username("");
    let _ = url.set_password(None);
    Ok(url)
}

fn stamps(tls: &Tls) -> Vec<(i64, i64, u64, u64)> {
    let client = tls
        .client
        .iter()
        .flat_map(|(cert, key)| [Some(cert), key.as_ref()])
        .flatten();
    let stamp = |path: &PathBuf| match fs::metadata(path) {
        Ok(meta) => (meta.mtime(), meta.mtime_nsec(), meta.ino(), meta.len()),
        Err(_) => (0, 0, 0, 0),
    };
    tls.ca.iter().chain(client).map(stamp).collect()
}

fn build(key: &Key) -> Result<Connector, Failure> {
    let setup = |e: &dyn std::fmt::Display| Failure::Setup(e.to_string());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|e| setup(&e))?;
    let config = if key.tls.skip_verify {
        config
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Unverified(provider.clone())))
    } else {
        config.with_root_certificates(roots(key)?)
    };
    let uncertified = Arc::new(AtomicBool::new(false));
    let identities = Identities::read(&key.tls.client, &provider, uncertified.clone())?;
    let mut config = config.with_client_cert_resolver(Arc::new(identities));
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let mut builder = Client::builder()
        .tls_backend_preconfigured(config)
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(key.dial_timeout)
        .tcp_keepalive(Duration::from_secs(30))
        .pool_idle_timeout(Duration::from_secs(60))
        .pool_max_idle_per_host(4)
        .referer(false)
        .user_agent(concat!("reconcile/", env!("CARGO_PKG_VERSION")));
    if key.direct {
        builder = builder.no_proxy();
    }
    let client = builder.build();
    let client = client.map_err(|e| Failure::Setup(Failure::of(e).text().to_owned()))?;
    Ok(Connector { client, uncertified })
}

/// The system's authorities, and those of the endpoint.
fn roots(key: &Key) -> Result<RootCertStore, Failure> {
    let mut store = RootCertStore::empty();
    if !key.plain {
        let found = rustls_native_certs::load_native_certs();
        store.add_parsable_certificates(found.certs);
    }
    for path in &key.tls.ca {
        for certificate in certificates(path)? {
            store
                .add(certificate)
                .map_err(|e| Failure::Setup(format!("{}: {e}", path.display())))?;
        }
    }
    Ok(store)
}

pub(super) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Failure> {
    let parsed: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem(path)?).collect();
    match parsed {
        Ok(all) if !all.is_empty() => Ok(all),
        Ok(_) => Err(Failure::Setup(format!("{}: no certificate in it", path.display()))),
        Err(e) => Err(Failure::Setup(format!("{}: {e}", path.display()))),
    }
}

pub(super) fn pem(path: &Path) -> Result<Vec<u8>, Failure> {
    use std::io::Read;
    let mut bytes = Vec::new();
    let read = fs::File::open(path).and_then(|file| file.take(PEM_LIMIT).read_to_end(&mut bytes));
    read.map_err(|e| Failure::Setup(format!("read {}: {e}", path.display())))?;
    Ok(bytes)
}

/// Takes any certificate: `skip_verify`, and registries on loopback.
#[derive(Debug)]
struct Unverified(Arc<CryptoProvider>);

impl ServerCertVerifier for Unverified {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, signature, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
