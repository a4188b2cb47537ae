//! `WWW-Authenticate`, read (RFC 9110, 11.6.1): several challenges may stand in one header.

use reqwest::header::{HeaderMap, WWW_AUTHENTICATE};

/// One way in that the other side offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Challenge {
    Basic,
    /// A token from `realm`, for `service` and `scope`.
    Bearer {
        realm: String,
        service: String,
        scope: String,
    },
}

/// Those that we can answer, Bearer first.
pub fn challenges(headers: &HeaderMap) -> Vec<Challenge> {
    let mut all = Vec::new();
    for value in headers.get_all(WWW_AUTHENTICATE).iter().take(8) {
        let text = String::from_utf8_lossy(value.as_bytes());
        all.extend(split(&text).into_iter().filter_map(|(scheme, parameters)| {
            let get = |name: &str| {
                let found = parameters.iter().find(|(key, _)| key == name);
                found.map(|(_, value)| value.clone()).unwrap_or_default()
            };
            match scheme.as_str() {
                "basic" => Some(Challenge::Basic),
                "bearer" if !get("realm").is_empty() => Some(Challenge::Bearer {
                    realm: get("realm"),
                    service: get("service"),
                    scope: get("scope"),
                }),
                _ => None,
            }
        }));
    }
    all.sort_by_key(|challenge| *challenge == Challenge::Basic);
    all.dedup();
    all
}

/// Schemes with their parameters, names in lower case.
fn split(text: &str) -> Vec<(String, Vec<(String, String)>)> {
    let mut found: Vec<(String, Vec<(String, String)>)> = Vec::new();
    let mut rest = text;
    loop {
        rest = rest.trim_start_matches(|c: char| c == ',' || c.is_whitespace());
        let end = rest
            .find(|c: char| c == '=' || c == ',' || c.is_whitespace())
            .unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        let word = word.to_ascii_lowercase();
        if word.is_empty() && !after.starts_with('=') {
            return found;
        }
        match after.trim_start().strip_prefix('=') {
            Some(after) => {
                let (value, after) = value(after.trim_start());
                if let Some((_, parameters)) = found.last_mut() {
                    parameters.push((word, value));
                }
                rest = after;
            }
            None => {
                found.push((word, Vec::new()));
                rest = after;
            }
        }
    }
}

/// A token or a quoted string, and what follows.
fn value(text: &str) -> (String, &str) {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find(|c: char| c == ',' || c.is_whitespace()).unwrap_or(text.len());
        return (text[..end].to_owned(), &text[end..]);
    };
    let mut value = String::new();
    let mut chars = quoted.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return (value, &quoted[at + 1..]),
            '\\' => value.extend(chars.next().map(|(_, c)| c)),
            c => value.push(c),
        }
    }
    (value, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(values: &[&str]) -> Vec<Challenge> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(WWW_AUTHENTICATE, value.parse().unwrap());
        }
        challenges(&headers)
    }

    fn bearer(realm: &str, service: &str, scope: &str) -> Challenge {
        Challenge::Bearer {
            realm: realm.into(),
            service: service.into(),
            scope: scope.into(),
        }
    }

    #[test]
    fn reads_what_registries_send() {
        assert_eq!(
            read(&[r#"Bearer realm="https://a.example/t",service="r.example",scope="repository:a/b:pull,push""#]),
            [bearer("https://a.example/t", "r.example", "repository:a/b:pull,push")]
        );
        assert_eq!(read(&[r#"Basic realm="Registry Realm""#]), [Challenge::Basic]);
        assert_eq!(read(&["basic"]), [Challenge::Basic]);
        assert_eq!(
            read(&[r#"Basic realm="a, b", bearer realm=https://x/t , service = "s\"q""#]),
            [bearer("https://x/t", "s\"q", ""), Challenge::Basic]
        );
        assert_eq!(
            read(&["Basic realm=x", r#"Negotiate abc==, Bearer realm="r""#]),
            [bearer("r", "", ""), Challenge::Basic]
        );
    }

    #[test]
    fn nonsense_is_nothing() {
        for text in [
            "",
            ",",
            "=",
            "Bearer",
            "Bearer realm=",
            "Digest realm=\"x",
            "\"",
            "Bearer =",
            "====",
            ", , =",
        ] {
            assert_eq!(read(&[text]), [], "{text:?}");
        }
    }
}
