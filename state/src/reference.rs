//! Image references: `[host[:port]/]path[:tag][@algorithm:hex]`, parsed, checked and brought into one full form.
//!
//! The grammar is that of the OCI distribution specification with the customary defaults: a first component is a host
//! only if it has a `.`, a `:` or an upper-case letter, or is `localhost`; the default host and, for one-component
//! paths on it, `library/` are filled in; without a tag and a digest the tag is `latest`; a tag beside a digest is
//! dropped, since the digest alone decides.

use std::fmt;

use crate::error::{Error, Result};

/// Host of a reference that names none. It is a name: which endpoint serves it is the registry client's matter.
pub const DEFAULT_HOST: &str = "docker.io";
/// What the default host was called once.
const LEGACY_HOST: &str = "index.docker.io";
/// Namespace of one-component paths on the default host.
const DEFAULT_NAMESPACE: &str = "library/";
/// Tag of a reference with neither tag nor digest.
const DEFAULT_TAG: &str = "latest";
/// Bytes of `host/path`.
const NAME_MAX: usize = 255;
/// Bytes of any reference: name, tag and the longest digest.
const REFERENCE_MAX: usize = 1024;

/// A full reference; [`fmt::Display`] gives the form that names an Image record.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reference {
    host: String,
    path: String,
    version: Version,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Version {
    Tag(String),
    Digest(String),
}

impl Reference {
    /// Parses and normalises what a user wrote. The error's field is `field`, e.g. `spec.containers[0].image`.
    pub fn parse(text: &str, field: &str) -> Result<Reference> {
        parse(text).map_err(|problem| Error::invalid(field, format!("{text:.80?} is no image reference: {problem}")))
    }

    /// `host` or `host:port`.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Path on the host, e.g. `library/hello`.
    pub fn path(&self) -> &str {
        &self.path
    }

    pub fn tag(&self) -> Option<&str> {
        match &self.version {
            Version::Tag(tag) => Some(tag),
            Version::Digest(_) => None,
        }
    }

    /// `sha256:…`, of a manifest or index.
    pub fn digest(&self) -> Option<&str> {
        match &self.version {
            Version::Tag(_) => None,
            Version::Digest(digest) => Some(digest),
        }
    }

    /// `host/path`.
    pub fn repository(&self) -> String {
        format!("{}/{}", self.host, self.path)
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.version {
            Version::Tag(tag) => write!(f, "{}/{}:{tag}", self.host, self.path),
            Version::Digest(digest) => write!(f, "{}/{}@{digest}", self.host, self.path),
        }
    }
}

/// Is this `algorithm:hex` with the right number of lower-case digits?
pub fn is_digest(text: &str) -> bool {
    let Some((algorithm, hex)) = text.split_once(':') else {
        return false;
    };
    let length = match algorithm {
        "sha256" => 64,
        "sha384" => 96,
        "sha512" => 128,
        _ => return false,
    };
    hex.len() == length && is_hex(hex)
}

/// Lower-case hex digits only, at least one.
pub fn is_hex(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

fn parse(text: &str) -> Result<Reference, &'static str> {
    if text.is_empty() {
        return Err("it is empty");
    }
    if text.len() > REFERENCE_MAX {
        return Err("it is too long");
    }
    if text.len() == 64 && is_hex(text) {
        return Err("64 hex digits are an image id");
    }
    let (rest, digest) = match text.split_once('@') {
        Some((_, digest)) if !is_digest(digest) => {
            return Err("after the @ a digest such as sha256:<64 lower-case hex digits> must follow");
        }
        Some((rest, digest)) => (rest, Some(digest)),
        None => (text, None),
    };
    // A colon after the last slash starts a tag; one before it, a port.
    let (name, tag) = match rest.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
        _ => (rest, None),
    };
    if tag.is_some_and(|tag| !is_tag(tag)) {
        return Err("a tag is 1 to 128 letters, digits, underscores, dots and dashes, not opened by a dot or dash");
    }
    let (host, path) = match name.split_once('/') {
        Some((host, path)) if looks_like_host(host) => (host, path),
        _ => (DEFAULT_HOST, name),
    };
    let host = if host == LEGACY_HOST { DEFAULT_HOST } else { host };
    if !is_host(host) {
        return Err("the host is malformed");
    }
    if path.bytes().any(|b| b.is_ascii_uppercase()) {
        return Err("the path must be lower-case");
    }
    if !path.split('/').all(is_component) {
        return Err("a path component is lower-case letters and digits, parted by single . _ or by __ or dashes");
    }
    let namespace = if host == DEFAULT_HOST && !path.contains('/') {
        DEFAULT_NAMESPACE
    } else {
        ""
    };
    if host.len() + 1 + namespace.len() + path.len() > NAME_MAX {
        return Err("host and path are longer than 255 bytes");
    }
    let version = match digest {
        Some(digest) => Version::Digest(digest.to_owned()),
        None => Version::Tag(tag.unwrap_or(DEFAULT_TAG).to_owned()),
    };
    Ok(Reference {
        host: host.to_owned(),
        path: format!("{namespace}{path}"),
        version,
    })
}

fn looks_like_host(first: &str) -> bool {
    first == "localhost" || first.bytes().any(|b| b == b'.' || b == b':' || b.is_ascii_uppercase())
}

fn is_tag(tag: &str) -> bool {
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    (1..=128).contains(&tag.len())
        && tag.bytes().next().is_some_and(word)
        && tag.bytes().all(|b| word(b) || b == b'.' || b == b'-')
}

fn is_host(host: &str) -> bool {
    let (name, port) = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, "")) => return address.parse::<std::net::Ipv6Addr>().is_ok(),
        Some((address, port)) => match (address.parse::<std::net::Ipv6Addr>(), port.strip_prefix(':')) {
            (Ok(_), Some(port)) => return is_port(port),
            _ => return false,
        },
        None => match host.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (host, None),
        },
    };
    let label = |label: &str| {
        let inner = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
        !label.is_empty() && !label.starts_with('-') && !label.ends_with('-') && label.bytes().all(inner)
    };
    name.split('.').all(label) && port.is_none_or(is_port)
}

fn is_port(port: &str) -> bool {
    port.bytes().all(|b| b.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|p| p > 0)
}

/// `[a-z0-9]+` parted by one `.`, `_`, `__` or any number of dashes.
fn is_component(component: &str) -> bool {
    let mut separator = String::new();
    let mut alphanumeric = false;
    for c in component.chars() {
        if c.is_ascii_lowercase() || c.is_ascii_digit() {
            let joined = matches!(separator.as_str(), "" | "." | "_" | "__") || separator.bytes().all(|b| b == b'-');
            if !joined || (!separator.is_empty() && !alphanumeric) {
                return false;
            }
            separator.clear();
            alphanumeric = true;
        } else if matches!(c, '.' | '_' | '-') {
            separator.push(c);
        } else {
            return false;
        }
    }
    alphanumeric && separator.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEX: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[test]
    fn normalises() {
        let with_digest = format!("a/b:t@sha256:{HEX}");
        let digested = format!("docker.io/a/b@sha256:{HEX}");
        for (text, full) in [
            ("hello", "docker.io/library/hello:latest"),
            ("a/b", "docker.io/a/b:latest"),
            ("index.docker.io/x:1", "docker.io/library/x:1"),
            ("docker.io/x", "docker.io/library/x:latest"),
            ("localhost/hello", "localhost/hello:latest"),
            ("localhost:5000/a/b:v1.2", "localhost:5000/a/b:v1.2"),
            ("Host/a", "Host/a:latest"),
            ("r.example/a__b/c--d.e_f:T", "r.example/a__b/c--d.e_f:T"),
            ("[::1]:5000/a", "[::1]:5000/a:latest"),
            ("r.example:80/a", "r.example:80/a:latest"),
            (with_digest.as_str(), digested.as_str()),
        ] {
            let reference = parse(text).unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(reference.to_string(), full, "{text}");
        }
    }

    #[test]
    fn refuses() {
        let upper = HEX.to_uppercase();
        let long = "a".repeat(250);
        for text in [
            "",
            " ",
            "a ",
            "A",
            "a/B",
            "a:",
            "a:-x",
            "a@",
            "a@sha256:12",
            "a//b",
            "/a",
            "a/",
            "a..b",
            "a___b",
            "-a",
            "a-",
            "_a",
            "a._b",
            "a:b:c",
            "a@sha256:x@y",
            "r.example:x/a",
            "r.example:70000/a",
            "-r.example/a",
            "r..example/a",
            "[::1/a",
            "[::g]/a",
            "ä",
            "a\0b",
            "a\n",
            "../x",
            HEX,
            &format!("a@sha256:{upper}"),
            &format!("a@md5:{HEX}"),
            &format!("a:{}", "t".repeat(129)),
            &long,
        ] {
            assert!(parse(text).is_err(), "{text:?} was taken for a reference");
        }
    }

    #[test]
    fn error_names_field_and_text() {
        let error = Reference::parse("A B", "spec.containers[0].image")
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("spec.containers[0].image: \"A B\" is no image reference"),
            "{error}"
        );
    }

    /// Whatever parses has a full form that parses to itself; nothing panics.
    #[test]
    fn full_form_is_a_fixed_point() {
        let alphabet: Vec<char> = "ab0.:/@-_AZ[] é\0".chars().collect();
        let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
        let mut parsed = 0;
        for _ in 0..200_000 {
            let mut text = String::new();
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let mut bits = seed >> 8;
            for _ in 0..(seed >> 60) {
                text.push(alphabet[(bits % alphabet.len() as u64) as usize]);
                bits /= alphabet.len() as u64;
            }
            if let Ok(reference) = parse(&text) {
                parsed += 1;
                assert_eq!(parse(&reference.to_string()).as_ref(), Ok(&reference), "{text:?}");
            }
        }
        assert!(
            parsed > 1000,
            "only {parsed} texts were references: the test proves nothing"
        );
    }
}
