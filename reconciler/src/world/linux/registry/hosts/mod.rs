//! Which endpoints serve a registry, in which order and how each is spoken to: `certs.d` directories with `hosts.toml`,
//! as containerd has them, or certificates alone, as Docker has them; else the registry itself.
//!
//! For a host with a port `host_port_`, `host:port` and `_default` are looked for in each root; the first directory
//! that is there decides alone.

pub(super) mod file;
#[cfg(test)]
mod tests;

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use reqwest::Url;
use reqwest::header::{HeaderName, HeaderValue};
use serde::Serialize;
use state::Reference;

use self::file::{Fields, HostsFile};

/// Bytes of a `hosts.toml` that are read.
const FILE_LIMIT: u64 = 1 << 20;
/// Until a connection stands, when nobody says otherwise.
const DIAL: Duration = Duration::from_secs(30);
/// The same where https is only a guess.
const DIAL_GUESS: Duration = Duration::from_secs(5);
/// Where no setting was made.
const BUILT_IN: &str = "default";

/// What an endpoint may be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Blobs, and manifests by digest.
    pub pull: bool,
    /// Manifests by tag.
    pub resolve: bool,
    pub push: bool,
}

impl Capabilities {
    pub const ALL: Capabilities = Capabilities {
        pull: true,
        resolve: true,
        push: true,
    };

    fn names(self) -> String {
        let all = [(self.pull, "pull"), (self.resolve, "resolve"), (self.push, "push")];
        let held: Vec<_> = all.iter().filter(|(held, _)| *held).map(|(_, name)| *name).collect();
        held.join(", ")
    }
}

/// How TLS is spoken.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tls {
    /// PEM files, trusted beside the system's roots.
    pub ca: Vec<PathBuf>,
    /// PEM files of certificates and keys; without the second both are in the first. The first one that an authority of
    /// the server's has issued is shown, else the first.
    pub client: Vec<(PathBuf, Option<PathBuf>)>,
    pub skip_verify: bool,
}

/// Why an endpoint is in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Role {
    /// A `[host."…"]` table.
    Mirror,
    /// The `server` of the file.
    Server,
    /// The registry that the reference names.
    Registry,
    /// A URL that the descriptor of a layer names.
    Foreign,
}

/// One setting and where it was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Setting {
    pub name: &'static str,
    pub value: String,
    /// `file:line`, a directory, or `default`.
    pub origin: String,
}

/// One way to a registry.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// Up to and with `/v2`, no slash at the end.
    pub url: Url,
    pub role: Role,
    pub capabilities: Capabilities,
    pub tls: Tls,
    /// That https is tried, unverified, or http after it, is a guess: nobody said so.
    pub guess: bool,
    /// Not verified only because it is this machine; nobody asked for `skip_verify`.
    pub lax: bool,
    pub headers: Vec<(HeaderName, HeaderValue)>,
    pub dial_timeout: Duration,
    /// The registry's name, told to hosts that serve it under another.
    pub ns: Option<String>,
    pub settings: Vec<Setting>,
}

impl Endpoint {
    /// `host[:port]`.
    pub fn host(&self) -> String {
        authority(&self.url)
    }
}

/// Something in a file that is not used, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Ignored {
    pub file: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<usize>,
    pub problem: String,
}

impl std::fmt::Display for Ignored {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}: {}", self.file.display(), self.problem),
            None => write!(f, "{}: {}", self.file.display(), self.problem),
        }
    }
}

/// The endpoints of a registry in the order in which they are asked.
#[derive(Clone, Debug, Default)]
pub struct Hosts {
    pub endpoints: Vec<Endpoint>,
    /// The directory that decided.
    pub directory: Option<PathBuf>,
    pub ignored: Vec<Ignored>,
}

/// Looks a registry up. `alias` is the host that serves it if its name is not that of a host; `plain_first`, that it
/// was seen to speak http.
pub fn look_up(roots: &[PathBuf], reference: &Reference, alias: Option<&str>, plain_first: bool) -> Hosts {
    let name = reference.host();
    let mut hosts = Hosts::default();
    for dir in roots.iter().flat_map(|root| directories(root, name)) {
        if !dir.is_dir() {
            continue;
        }
        match &hosts.directory {
            None => hosts.directory = Some(dir),
            Some(first) => hosts.ignored.push(Ignored {
                problem: format!("not used, since {} comes before it", first.display()),
                file: dir,
                line: None,
            }),
        }
    }
    let mut file = HostsFile::default();
    if let Some(dir) = hosts.directory.clone() {
        file = read(&dir, &mut hosts.ignored);
    }
    let builder = Builder {
        name,
        alias,
        file: &file,
    };
    for table in &file.hosts {
        match builder.mirror(table) {
            Ok(endpoint) => hosts.endpoints.push(endpoint),
            Err(problem) => hosts.ignored.push(file.ignored(table.line, problem)),
        }
    }
    match builder.server() {
        Some(Ok(endpoint)) => hosts.endpoints.push(endpoint),
        other => {
            if let (Some(Err(problem)), Some(server)) = (other, &file.server) {
                hosts.ignored.push(file.ignored(server.line, problem));
            }
            match builder.registry(plain_first) {
                Ok(endpoints) => hosts.endpoints.extend(endpoints),
                Err(problem) => hosts.ignored.push(file.ignored(0, problem)),
            }
        }
    }
    // As a reader goes through the file.
    hosts.ignored.sort_by_key(|one| one.line);
    hosts
}

fn directories(root: &Path, host: &str) -> Vec<PathBuf> {
    let mut names = Vec::new();
    if let Some((name, port)) = split_port(host) {
        names.push(format!("{name}_{port}_"));
    }
    names.push(host.to_owned());
    names.push("_default".to_owned());
    names.into_iter().map(|name| root.join(name)).collect()
}

fn split_port(host: &str) -> Option<(&str, &str)> {
    host.rsplit_once(':').filter(|(_, port)| !port.ends_with(']'))
}

/// `hosts.toml` of a directory; without one, or where Docker keeps its own, the certificates that lie there.
fn read(dir: &Path, ignored: &mut Vec<Ignored>) -> HostsFile {
    let path = dir.join("hosts.toml");
    let dockers = dir.parent().is_some_and(|root| root.ends_with("docker/certs.d"));
    let mut text = String::new();
    let opened = File::open(&path).and_then(|file| file.take(FILE_LIMIT).read_to_string(&mut text));
    let problem = match opened {
        Ok(_) if !dockers => return file::parse(&path, &text, ignored),
        Ok(_) => "only certificates are read here".to_owned(),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return certificates(dir, ignored),
        Err(e) => e.to_string(),
    };
    ignored.push(Ignored {
        file: path,
        line: None,
        problem,
    });
    certificates(dir, ignored)
}

/// Docker's way: `*.crt` are authorities, `X.cert` and `X.key` are ours.
fn certificates(dir: &Path, ignored: &mut Vec<Ignored>) -> HostsFile {
    let mut file = HostsFile {
        path: dir.to_owned(),
        ..HostsFile::default()
    };
    let mut paths: Vec<PathBuf> = match fs::read_dir(dir) {
        Ok(entries) => entries.flatten().map(|entry| entry.path()).collect(),
        Err(e) => {
            ignored.push(file.ignored(0, e.to_string()));
            return file;
        }
    };
    paths.sort();
    let ending = |path: &Path, ending: &str| path.extension().is_some_and(|found| found == ending);
    let authorities: Vec<_> = paths.iter().filter(|path| ending(path, "crt")).cloned().collect();
    if !authorities.is_empty() {
        file.top.ca = Some(file::At::file(authorities));
    }
    let mut pairs = Vec::new();
    for cert in paths.iter().filter(|path| ending(path, "cert")) {
        let key = cert.with_extension("key");
        if key.is_file() {
            pairs.push((cert.clone(), Some(key)));
            continue;
        }
        ignored.push(Ignored {
            file: cert.clone(),
            line: None,
            problem: format!("its key {} is not there", key.display()),
        });
    }
    if !pairs.is_empty() {
        file.top.client = Some(file::At::file(pairs));
    }
    file
}

/// Makes endpoints out of what a file says.
struct Builder<'a> {
    name: &'a str,
    alias: Option<&'a str>,
    file: &'a HostsFile,
}

impl Builder<'_> {
    fn mirror(&self, table: &file::Table) -> Result<Endpoint, String> {
        let mut endpoint = self.endpoint(&table.url, Role::Mirror, &table.fields)?;
        endpoint.settings.insert(0, self.place(&endpoint, table.line));
        Ok(endpoint)
    }

    fn server(&self) -> Option<Result<Endpoint, String>> {
        let server = self.file.server.as_ref()?;
        let endpoint = self.endpoint(&server.value, Role::Server, &self.file.top);
        Some(endpoint.map(|mut endpoint| {
            endpoint.settings.insert(0, self.place(&endpoint, server.line));
            endpoint
        }))
    }

    /// The registry by its own name: https; on loopback unverified, and http where the port does not decide.
    fn registry(&self, plain_first: bool) -> Result<Vec<Endpoint>, String> {
        let host = self.alias.unwrap_or(self.name);
        let port = split_port(host).map(|(_, port)| port);
        let loopback = is_loopback(host);
        let schemes: &[&str] = match (loopback, port) {
            (false, _) | (true, None | Some("443")) => &["https"],
            (true, Some("80")) => &["http"],
            (true, Some(_)) if plain_first => &["http", "https"],
            (true, Some(_)) => &["https", "http"],
        };
        let guess = schemes.len() > 1;
        let mut endpoints = Vec::new();
        for scheme in schemes {
            let mut endpoint = self.endpoint(&format!("{scheme}://{host}"), Role::Registry, &self.file.top)?;
            endpoint.guess = guess;
            if loopback && *scheme == "https" && self.file.top.ca.is_none() && self.file.top.skip_verify.is_none() {
                endpoint.tls.skip_verify = true;
                endpoint.lax = true;
                endpoint.settings.push(Setting {
                    name: "skip_verify",
                    value: "true".into(),
                    origin: "default for loopback".into(),
                });
            }
            if guess && self.file.top.dial_timeout.is_none() {
                endpoint.dial_timeout = DIAL_GUESS;
            }
            let origin = match self.alias {
                Some(_) => format!("built-in endpoint of {}", self.name),
                None => "the reference".to_owned(),
            };
            endpoint.settings.insert(
                0,
                Setting {
                    name: "url",
                    value: endpoint.url.to_string(),
                    origin,
                },
            );
            endpoints.push(endpoint);
        }
        Ok(endpoints)
    }

    fn place(&self, endpoint: &Endpoint, line: usize) -> Setting {
        Setting {
            name: "url",
            value: endpoint.url.to_string(),
            origin: self.file.origin(line),
        }
    }

    fn endpoint(&self, text: &str, role: Role, fields: &Fields) -> Result<Endpoint, String> {
        let mut settings = Vec::new();
        let override_path = pick(&fields.override_path, false, self.file, "override_path", &mut settings);
        let url = endpoint_url(text, override_path)?;
        let host = authority(&url);
        let capabilities = match &fields.capabilities {
            Some(at) => at.value,
            None => Capabilities::ALL,
        };
        settings.push(Setting {
            name: "capabilities",
            value: capabilities.names(),
            origin: self.origin(&fields.capabilities),
        });
        let ca = pick_paths(&fields.ca, self.file, "ca", &mut settings);
        let client = fields.client.as_ref().map(|at| {
            settings.extend(at.value.iter().map(|(cert, key)| {
                let key = key.as_ref().map(|key| format!(", {}", key.display()));
                Setting {
                    name: "client",
                    value: format!("{}{}", cert.display(), key.unwrap_or_default()),
                    origin: self.file.origin(at.line),
                }
            }));
            at.value.clone()
        });
        let skip_verify = pick(&fields.skip_verify, false, self.file, "skip_verify", &mut settings);
        let dial_timeout = fields.dial_timeout.as_ref().map_or(DIAL, |at| at.value);
        settings.push(Setting {
            name: "dial_timeout",
            value: format!("{dial_timeout:?}"),
            origin: self.origin(&fields.dial_timeout),
        });
        let headers = fields.headers.iter().map(|at| at.value.clone()).collect();
        // Values may be secrets.
        settings.extend(fields.headers.iter().map(|at| Setting {
            name: "header",
            value: format!("{}: (not shown)", at.value.0),
            origin: self.file.origin(at.line),
        }));
        Ok(Endpoint {
            ns: (host != self.name && Some(host.as_str()) != self.alias).then(|| self.name.to_owned()),
            url,
            role,
            capabilities,
            tls: Tls {
                ca,
                client: client.unwrap_or_default(),
                skip_verify,
            },
            guess: false,
            lax: false,
            headers,
            dial_timeout,
            settings,
        })
    }

    fn origin<T>(&self, at: &Option<file::At<T>>) -> String {
        at.as_ref()
            .map_or_else(|| BUILT_IN.to_owned(), |at| self.file.origin(at.line))
    }
}

/// A switch, with where it was set; one that nobody set is not worth a line.
fn pick(
    at: &Option<file::At<bool>>,
    default: bool,
    file: &HostsFile,
    name: &'static str,
    settings: &mut Vec<Setting>,
) -> bool {
    let Some(at) = at else { return default };
    settings.push(Setting {
        name,
        value: at.value.to_string(),
        origin: file.origin(at.line),
    });
    at.value
}

fn pick_paths(
    at: &Option<file::At<Vec<PathBuf>>>,
    file: &HostsFile,
    name: &'static str,
    settings: &mut Vec<Setting>,
) -> Vec<PathBuf> {
    let Some(at) = at else { return Vec::new() };
    settings.extend(at.value.iter().map(|path| Setting {
        name,
        value: path.display().to_string(),
        origin: file.origin(at.line),
    }));
    at.value.clone()
}

/// A host as files state it, scheme https unless it has one; `/v2` goes to the end unless the path is to stay.
fn endpoint_url(text: &str, override_path: bool) -> Result<Url, String> {
    let full = if text.contains("://") {
        text.to_owned()
    } else {
        format!("https://{text}")
    };
    let mut url = Url::parse(&full).map_err(|e| format!("{text:?} is no URL: {e}"))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(format!("{text:?}: only http and https are spoken"));
    }
    if url.host_str().is_none_or(str::is_empty) {
        return Err(format!("{text:?} names no host"));
    }
    if !url.username().is_empty() || url.password().is_some() || url.query().is_some() || url.fragment().is_some() {
        return Err(format!(
            "{:?} may have a scheme, a host, a port and a path only",
            authority(&url)
        ));
    }
    let path = url.path().trim_end_matches('/').to_owned();
    let path = if override_path || path.ends_with("/v2") {
        path
    } else {
        format!("{path}/v2")
    };
    url.set_path(&path);
    Ok(url)
}

/// `host[:port]` as references have it.
pub fn authority(url: &Url) -> String {
    let host = url.host_str().unwrap_or_default();
    match url.port() {
        Some(port) => format!("{host}:{port}"),
        None => host.to_owned(),
    }
}

/// `localhost`, 127.0.0.0/8 or ::1, with or without a port.
pub fn is_loopback(host: &str) -> bool {
    let name = split_port(host).map_or(host, |(name, _)| name);
    let bare = name.trim_start_matches('[').trim_end_matches(']');
    name == "localhost" || bare.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}
