//! Matching of list filters: ids by unique prefix, labels by equality. All given parts have to match.

use std::collections::BTreeMap;

/// The id that a filter means among `ids`: itself, or the only one that it is the beginning of. `None`: no id at all,
/// which is an empty list and no error.
pub(crate) fn meant<'a>(filter: &str, ids: impl Iterator<Item = &'a str>) -> Option<String> {
    let mut found = None;
    let mut ambiguous = false;
    for id in ids.filter(|id| id.starts_with(filter)) {
        if id == filter {
            return Some(id.to_owned());
        }
        ambiguous |= found.is_some_and(|other| other != id);
        found = Some(id);
    }
    found.filter(|_| !ambiguous).map(str::to_owned)
}

/// Does `labels` hold every pair of `selector`?
pub(crate) fn selects(selector: &BTreeMap<String, String>, labels: &BTreeMap<String, String>) -> bool {
    selector.iter().all(|(key, value)| labels.get(key) == Some(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes() {
        let ids = ["ab1", "ab2", "b", "bc"];
        let meant = |filter| meant(filter, ids.into_iter());
        assert_eq!(meant("ab1").as_deref(), Some("ab1"));
        assert_eq!(meant("ab"), None);
        assert_eq!(meant("b").as_deref(), Some("b"));
        assert_eq!(meant("bc").as_deref(), Some("bc"));
        assert_eq!(meant("c"), None);
    }

    #[test]
    fn labels() {
        let map = |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let labels = map(&[("a", "1"), ("b", "2")]);
        assert!(selects(&map(&[]), &labels));
        assert!(selects(&map(&[("a", "1")]), &labels));
        assert!(!selects(&map(&[("a", "2")]), &labels));
        assert!(!selects(&map(&[("a", "1"), ("c", "")]), &labels));
    }
}
