//! Credentials: what they are, and where they are looked for.
//!
//! The files are Docker's: `auths` by host or host and path, `credHelpers` and `credsStore` with programs of the form
//! `docker-credential-NAME`. Nothing that is read here is kept or shown; an error about a file names a line, never what
//! stands on it.

mod helper;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::GeneralPurpose;
use base64::engine::general_purpose::{GeneralPurposeConfig, STANDARD};
use nix::unistd::{Uid, User};
use serde::Deserialize;
use state::Reference;

use super::ask::canonical;
use super::error::{Error, Result};

/// Bytes of a file with credentials.
const FILE_LIMIT: u64 = 1 << 20;
/// The node's own file.
pub const NODE_FILE: &str = "/etc/reconcile/auth.json";
/// Padding is forgotten here and there.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(base64::engine::DecodePaddingMode::Indifferent),
);
/// What tokens shorter than this are scrubbed from would not be text any more.
const SCRUB_LEAST: usize = 4;

/// One credential and where it came from. Its `Debug` shows no secret.
#[derive(Clone, Default)]
pub struct Credential {
    /// For messages: `imagePullSecrets default/regcred`, `/etc/reconcile/auth.json`, `the request`.
    pub source: String,
    /// Host it is for, `host[:port]` or a URL; empty: the registry of the reference.
    pub server_address: String,
    pub kind: CredentialKind,
}

/// The secret itself.
#[derive(Clone, Default)]
pub enum CredentialKind {
    /// Nothing to show.
    #[default]
    Anonymous,
    Basic {
        username: String,
        password: String,
    },
    /// A refresh token, changed for an access token at the realm.
    IdentityToken(String),
    /// An access token, sent as it is.
    RegistryToken(String),
}

/// The fields of the CRI's `AuthConfig`, and of an entry in a Docker file.
#[derive(Clone, Default, Deserialize)]
#[serde(default)]
pub struct AuthConfig {
    pub username: String,
    pub password: String,
    /// Base64 of `username:password`.
    pub auth: String,
    #[serde(rename = "serveraddress")]
    pub server_address: String,
    #[serde(rename = "identitytoken")]
    pub identity_token: String,
    #[serde(rename = "registrytoken")]
    pub registry_token: String,
}

impl fmt::Debug for AuthConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AuthConfig").finish_non_exhaustive()
    }
}

impl Credential {
    /// Out of a CRI `AuthConfig`: user and password before identity token before `auth` before registry token. `None`
    /// if all of them are empty; an error if `auth` is not what it should be.
    pub fn from_auth_config(source: &str, config: &AuthConfig) -> Result<Option<Credential>> {
        let kind = if !config.username.is_empty() {
            CredentialKind::Basic {
                username: config.username.clone(),
                password: config.password.clone(),
            }
        } else if !config.identity_token.is_empty() {
            CredentialKind::IdentityToken(config.identity_token.clone())
        } else if !config.auth.is_empty() {
            decoded(&config.auth).ok_or_else(|| Error::setup(source, "auth is not base64 of user:password"))?
        } else if !config.registry_token.is_empty() {
            CredentialKind::RegistryToken(config.registry_token.clone())
        } else {
            return Ok(None);
        };
        Ok(Some(Credential {
            source: source.to_owned(),
            server_address: config.server_address.clone(),
            kind,
        }))
    }

    /// Takes the secret out of a text that a server may have put it into.
    pub(super) fn scrub(&self, text: String) -> String {
        let secrets = match &self.kind {
            CredentialKind::Anonymous => return text,
            CredentialKind::Basic { username, password } => {
                vec![password.clone(), STANDARD.encode(format!("{username}:{password}"))]
            }
            CredentialKind::IdentityToken(token) | CredentialKind::RegistryToken(token) => vec![token.clone()],
        };
        let long = secrets.iter().filter(|secret| secret.len() >= SCRUB_LEAST);
        long.fold(text, |text, secret| text.replace(secret.as_str(), "***"))
    }
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credential")
            .field("source", &self.source)
            .finish_non_exhaustive()
    }
}

fn decoded(auth: &str) -> Option<CredentialKind> {
    let text = String::from_utf8(LENIENT.decode(auth.trim()).ok()?).ok()?;
    // Docker pads some with NUL.
    let (username, password) = text.trim_matches('\0').split_once(':')?;
    Some(CredentialKind::Basic {
        username: username.to_owned(),
        password: password.to_owned(),
    })
}

/// The user's home as passwd(5) has it: a service manager sets no HOME for root's services.
fn home() -> Option<PathBuf> {
    let user = User::from_uid(Uid::effective()).ok().flatten();
    user.map(|user| user.dir).filter(|dir| dir.is_absolute())
}

/// Places where credentials are looked for.
#[derive(Clone, Default)]
pub struct Keyring {
    /// Docker configurations (`.dockerconfigjson` or the older `.dockercfg`) with their names, e.g.
    /// `imagePullSecrets default/regcred`. They may not name programs.
    pub secrets: Vec<(String, Vec<u8>)>,
    /// Files of the same form, in order; those that are not there are passed over.
    pub files: Vec<PathBuf>,
}

impl Keyring {
    /// `/etc/reconcile/auth.json`, then the files of the user that this process runs as: Docker's, then Podman's.
    pub fn of_user(secrets: Vec<(String, Vec<u8>)>) -> Keyring {
        let var = |name: &str| {
            std::env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let home = var("HOME").or_else(home);
        let docker = var("DOCKER_CONFIG").or_else(|| home.as_ref().map(|home| home.join(".docker")));
        let runtime = var("XDG_RUNTIME_DIR").map(|dir| dir.join("containers/auth.json"));
        let config = var("XDG_CONFIG_HOME").or_else(|| home.map(|home| home.join(".config")));
        let mut files = vec![PathBuf::from(NODE_FILE)];
        files.extend(docker.map(|dir| dir.join("config.json")));
        files.extend(runtime);
        files.extend(config.map(|dir| dir.join("containers/auth.json")));
        Keyring { secrets, files }
    }

    /// Credentials for the reference: secrets together, then file by file, the longest matching path first. The second
    /// half says what could not be read.
    pub async fn matching(&self, reference: &Reference) -> (Vec<Credential>, Vec<String>) {
        let (mut found, mut notes) = (Vec::new(), Vec::new());
        let mut entries = Vec::new();
        for (name, bytes) in &self.secrets {
            match DockerConfig::parse(bytes) {
                Ok(config) => entries.extend(config.entries(name, reference, &mut notes)),
                Err(problem) => notes.push(format!("{name}: {problem}")),
            }
        }
        found.extend(most_particular_first(entries));
        for path in &self.files {
            let name = path.display().to_string();
            let config = match read(path).await {
                Ok(None) => continue,
                Ok(Some(bytes)) => DockerConfig::parse(&bytes),
                Err(e) => Err(e.to_string()),
            };
            match config {
                Ok(config) => {
                    config.helped(&name, reference, &mut found, &mut notes).await;
                    found.extend(most_particular_first(config.entries(&name, reference, &mut notes)));
                }
                Err(problem) => notes.push(format!("{name}: {problem}")),
            }
        }
        (found, notes)
    }
}

async fn read(path: &Path) -> std::io::Result<Option<Vec<u8>>> {
    use tokio::io::AsyncReadExt;
    let file = match tokio::fs::File::open(path).await {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    let mut bytes = Vec::new();
    file.take(FILE_LIMIT + 1).read_to_end(&mut bytes).await?;
    if bytes.len() as u64 > FILE_LIMIT {
        return Err(std::io::Error::other(format!("it is larger than {FILE_LIMIT} bytes")));
    }
    Ok(Some(bytes))
}

/// Docker's `config.json`, as far as it concerns us.
#[derive(Default, Deserialize)]
#[serde(default)]
struct DockerConfig {
    auths: BTreeMap<String, AuthConfig>,
    #[serde(rename = "credHelpers")]
    cred_helpers: BTreeMap<String, String>,
    #[serde(rename = "credsStore")]
    creds_store: String,
}

impl DockerConfig {
    fn parse(bytes: &[u8]) -> Result<DockerConfig, String> {
        // The library's own message may quote a value.
        let told = |e: serde_json::Error| format!("no Docker configuration (line {}, column {})", e.line(), e.column());
        let value: serde_json::Value = serde_json::from_slice(bytes).map_err(told)?;
        let fields = value.as_object().ok_or("no Docker configuration: not an object")?;
        let known = ["auths", "credHelpers", "credsStore", "HttpHeaders"];
        if fields.is_empty() || known.iter().any(|field| fields.contains_key(*field)) {
            return serde_json::from_slice(bytes).map_err(told);
        }
        // `.dockercfg`: the entries alone. Whatever else a newer file may hold is no entry.
        let entry = |(host, value): (&String, &serde_json::Value)| {
            let entry = serde_json::from_value(value.clone()).ok()?;
            Some((host.clone(), entry))
        };
        Ok(DockerConfig {
            auths: fields.iter().filter_map(entry).collect(),
            ..DockerConfig::default()
        })
    }

    /// Entries that match.
    fn entries(&self, name: &str, reference: &Reference, notes: &mut Vec<String>) -> Vec<(Weight, Credential)> {
        let mut found = Vec::new();
        for (key, config) in &self.auths {
            let Some(weight) = weight(key, reference) else { continue };
            match Credential::from_auth_config(name, config) {
                Ok(Some(credential)) => found.push((
                    weight,
                    Credential {
                        source: format!("{name} ({key})"),
                        server_address: reference.host().to_owned(),
                        ..credential
                    },
                )),
                Ok(None) => {}
                Err(_) => notes.push(format!(
                    "{name}: the entry {key:?} has an auth that is not base64 of user:password"
                )),
            }
        }
        found
    }

    /// What the programs say that are named for the host.
    async fn helped(&self, name: &str, reference: &Reference, found: &mut Vec<Credential>, notes: &mut Vec<String>) {
        let host = reference.host();
        let special = self
            .cred_helpers
            .iter()
            .find(|(key, _)| canonical(key) == canonical(host));
        let program = special.map_or(self.creds_store.as_str(), |(_, program)| program.as_str());
        if program.is_empty() {
            return;
        }
        let server = match special {
            Some((key, _)) => key.as_str(),
            None if host == state::reference::DEFAULT_HOST => "https://index.docker.io/v1/",
            None => host,
        };
        match helper::get(program, server).await {
            Ok(Some(kind)) => found.push(Credential {
                source: format!("{name} (docker-credential-{program})"),
                server_address: host.to_owned(),
                kind,
            }),
            Ok(None) => {}
            Err(problem) => notes.push(format!("{name}: docker-credential-{program}: {problem}")),
        }
    }
}

/// How particular an entry is.
type Weight = (usize, bool, usize);

/// Those of equal weight stay in their order.
fn most_particular_first(mut entries: Vec<(Weight, Credential)>) -> impl Iterator<Item = Credential> {
    entries.sort_by_key(|(weight, _)| std::cmp::Reverse(*weight));
    entries.into_iter().map(|(_, credential)| credential)
}

/// How particular a key is to the reference: components of its path, then of its host; `None` if it does not match. A
/// `*` stands for a part of the host, as the kubelet has it.
fn weight(key: &str, reference: &Reference) -> Option<Weight> {
    let rest = key.split_once("://").map_or(key, |(_, rest)| rest);
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let host = canonical(host);
    let wanted = canonical(reference.host());
    // The version of an API is no path of an image.
    let path = path.trim_matches('/');
    let path = if matches!(path, "v1" | "v2") { "" } else { path };
    let (pattern, port) = split_port(&host);
    let (name, wanted_port) = split_port(&wanted);
    let parts: Vec<_> = pattern.split('.').collect();
    let labels: Vec<_> = name.split('.').collect();
    let fits = parts.len() == labels.len() && parts.iter().zip(&labels).all(|(part, label)| glob(part, label));
    if !fits || port != wanted_port {
        return None;
    }
    let mut components = reference.path().split('/');
    let mut depth = 0;
    for component in path.split('/').filter(|component| !component.is_empty()) {
        if components.next() != Some(component) {
            return None;
        }
        depth += 1;
    }
    Some((depth, !host.contains('*'), host.len()))
}

fn split_port(host: &str) -> (&str, Option<&str>) {
    match host.rsplit_once(':') {
        Some((name, port)) if !port.ends_with(']') => (name, Some(port)),
        _ => (host, None),
    }
}

/// `*` is any run of characters.
fn glob(pattern: &str, text: &str) -> bool {
    let Some((before, after)) = pattern.split_once('*') else {
        return pattern == text;
    };
    let Some(rest) = text.strip_prefix(before) else {
        return false;
    };
    (0..=rest.len()).any(|at| rest.get(at..).is_some_and(|rest| glob(after, rest)))
}
