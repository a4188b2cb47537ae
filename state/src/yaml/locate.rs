//! Where in the text a path is.
//!
//! The parser tells positions only with errors, so the document is read once more, along the path, and an error is
//! raised on arrival.

use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Line and column from 1; 0 if unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spot {
    pub line: usize,
    pub column: usize,
}

/// Which end of an entry is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    Key,
    Value,
}

/// The place of `path` in a document, or of its nearest parent that is there, and which of them it is.
pub fn find(text: &str, document: usize, path: &str, at: At) -> Option<(String, Spot)> {
    let mut path = path;
    let mut at = at;
    loop {
        let seed = Step { rest: path, at };
        if let Some(spot) = run(text, document, seed) {
            return Some((path.to_owned(), spot));
        }
        let cut = path.rfind(['.', '[']).unwrap_or(0);
        if path.is_empty() {
            return None;
        }
        path = &path[..cut];
        // Where a field is missing the key of the map that lacks it tells more than the map's first entry.
        at = if path.ends_with(']') || path.is_empty() {
            At::Value
        } else {
            At::Key
        };
    }
}

fn run<'de>(text: &'de str, document: usize, seed: impl DeserializeSeed<'de>) -> Option<Spot> {
    let yaml = serde_yaml::Deserializer::from_str(text).nth(document)?;
    let error = seed.deserialize(yaml).err().filter(|e| e.to_string().contains(HERE))?;
    error.location().map(|l| Spot {
        line: l.line(),
        column: l.column(),
    })
}

/// The message of the errors raised here.
const HERE: &str = "\u{1}arrived\u{1}";

struct Step<'a> {
    rest: &'a str,
    at: At,
}

impl<'de> DeserializeSeed<'de> for Step<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

/// Implements the scalar methods of a visitor by one function of the error type.
macro_rules! scalars {
    ($self:ident => $end:expr) => {
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("anything")
        }
        fn visit_bool<E: Error>($self, _: bool) -> Result<(), E> {
            $end
        }
        fn visit_i64<E: Error>($self, _: i64) -> Result<(), E> {
            $end
        }
        fn visit_u64<E: Error>($self, _: u64) -> Result<(), E> {
            $end
        }
        fn visit_f64<E: Error>($self, _: f64) -> Result<(), E> {
            $end
        }
        fn visit_str<E: Error>($self, _: &str) -> Result<(), E> {
            $end
        }
        fn visit_unit<E: Error>($self) -> Result<(), E> {
            $end
        }
        fn visit_none<E: Error>($self) -> Result<(), E> {
            $end
        }
    };
}

impl Step<'_> {
    fn end<E: Error>(&self) -> Result<(), E> {
        if self.rest.is_empty() {
            Err(E::custom(HERE))
        } else {
            Ok(())
        }
    }
}

impl<'de> Visitor<'de> for Step<'_> {
    type Value = ();
    scalars!(self => self.end());

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        self.end()?;
        while let Some(inside) = map.next_key_seed(Key(&self))? {
            match inside {
                Some(rest) => map.next_value_seed(Step { rest, at: self.at })?,
                None => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        self.end()?;
        let wanted = self.rest.strip_prefix('[').and_then(|rest| rest.split_once(']'));
        let Some((Ok(wanted), rest)) = wanted.map(|(n, rest)| (n.parse::<usize>(), rest)) else {
            return while_some(|| seq.next_element::<IgnoredAny>());
        };
        for _ in 0..wanted {
            if seq.next_element::<IgnoredAny>()?.is_none() {
                return Ok(());
            }
        }
        let rest = rest.strip_prefix('.').unwrap_or(rest);
        if seq.next_element_seed(Step { rest, at: self.at })?.is_none() {
            return Ok(());
        }
        while_some(|| seq.next_element::<IgnoredAny>())
    }
}

fn while_some<T, E>(mut next: impl FnMut() -> Result<Option<T>, E>) -> Result<(), E> {
    while next()?.is_some() {}
    Ok(())
}

/// A key of the map at hand: what remains of the path behind it, if it is on the path.
struct Key<'a, 'b>(&'b Step<'a>);

impl<'de, 'a> DeserializeSeed<'de> for Key<'a, '_> {
    type Value = Option<&'a str>;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'a> Visitor<'_> for Key<'a, '_> {
    type Value = Option<&'a str>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }
    fn visit_str<E: Error>(self, key: &str) -> Result<Self::Value, E> {
        let Some(rest) = self.0.rest.strip_prefix(key).filter(|_| !key.is_empty()) else {
            return Ok(None);
        };
        match rest.chars().next() {
            None if self.0.at == At::Key => Err(E::custom(HERE)),
            Some('.') => Ok(Some(&rest[1..])),
            None | Some('[') => Ok(Some(rest)),
            Some(_) => Ok(None),
        }
    }
}

/// The first key that a map of the document has twice: the map's path, the key, its second place.
pub fn duplicate(text: &str, document: usize) -> Option<(String, String, Spot)> {
    let found = RefCell::new(None);
    let spot = run(
        text,
        document,
        Walk {
            path: String::new(),
            found: &found,
        },
    )?;
    let (path, key) = found.into_inner()?;
    Some((path, key, spot))
}

/// Walks the whole document.
struct Walk<'a> {
    path: String,
    found: &'a RefCell<Option<(String, String)>>,
}

impl<'de> DeserializeSeed<'de> for Walk<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Walk<'_> {
    type Value = ();
    scalars!(self => Ok(()));

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut seen = HashSet::new();
        while let Some(key) = map.next_key_seed(Once {
            walk: &self,
            seen: &seen,
        })? {
            let path = if self.path.is_empty() {
                key.clone()
            } else {
                format!("{}.{key}", self.path)
            };
            let found = self.found;
            map.next_value_seed(Walk { path, found })?;
            seen.insert(key);
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let mut n = 0;
        loop {
            let path = format!("{}[{n}]", self.path);
            let found = self.found;
            if seq.next_element_seed(Walk { path, found })?.is_none() {
                return Ok(());
            }
            n += 1;
        }
    }
}

/// A key that was not there before.
struct Once<'a, 'b> {
    walk: &'b Walk<'a>,
    seen: &'b HashSet<String>,
}

impl<'de> DeserializeSeed<'de> for Once<'_, '_> {
    type Value = String;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Once<'_, '_> {
    type Value = String;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }
    fn visit_str<E: Error>(self, key: &str) -> Result<String, E> {
        if self.seen.contains(key) {
            *self.walk.found.borrow_mut() = Some((self.walk.path.clone(), key.to_owned()));
            return Err(E::custom(HERE));
        }
        Ok(key.to_owned())
    }
}
