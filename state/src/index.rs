//! One kind's records in memory, found by uid, age, name and owner.

use std::any::{Any, TypeId};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;
use std::sync::Arc;

use crate::resource::{Kind, Meta, Object};

type Age = (i64, String);

/// Records of one kind. It holds no lock and tells nobody.
pub(crate) struct Index<K: Kind> {
    by_uid: BTreeMap<String, Arc<Object<K>>>,
    by_age: BTreeMap<Age, Arc<Object<K>>>,
    /// uids of the records that hold a name: those not marked deleted.
    by_name: HashMap<String, Vec<String>>,
    by_owner: HashMap<String, BTreeSet<Age>>,
}

impl<K: Kind> Default for Index<K> {
    fn default() -> Self {
        Index {
            by_uid: BTreeMap::new(),
            by_age: BTreeMap::new(),
            by_name: HashMap::new(),
            by_owner: HashMap::new(),
        }
    }
}

fn age(meta: &Meta) -> Age {
    (meta.created, meta.uid.clone())
}

impl<K: Kind> Index<K> {
    pub fn get(&self, uid: &str) -> Option<&Arc<Object<K>>> {
        self.by_uid.get(uid)
    }

    pub fn len(&self) -> usize {
        self.by_uid.len()
    }

    /// Adds or replaces a record; the one that it replaced.
    pub fn put(&mut self, object: Arc<Object<K>>) -> Option<Arc<Object<K>>> {
        let before = self.remove(&object.meta.uid.clone());
        let meta = &object.meta;
        if !meta.deleted() {
            self.by_name
                .entry(meta.name.clone())
                .or_default()
                .push(meta.uid.clone());
        }
        if let Some(owner) = &meta.owner {
            self.by_owner.entry(owner.uid.clone()).or_default().insert(age(meta));
        }
        self.by_age.insert(age(meta), object.clone());
        self.by_uid.insert(meta.uid.clone(), object);
        before
    }

    pub fn remove(&mut self, uid: &str) -> Option<Arc<Object<K>>> {
        let object = self.by_uid.remove(uid)?;
        let meta = &object.meta;
        self.by_age.remove(&age(meta));
        if let Some(holders) = self.by_name.get_mut(&meta.name) {
            holders.retain(|holder| holder != uid);
            if holders.is_empty() {
                self.by_name.remove(&meta.name);
            }
        }
        if let Some(owner) = &meta.owner
            && let Some(children) = self.by_owner.get_mut(&owner.uid)
        {
            children.remove(&age(meta));
            if children.is_empty() {
                self.by_owner.remove(&owner.uid);
            }
        }
        Some(object)
    }

    /// The record that stands in the way of a new one with this identity: same name, namespace and owner.
    pub fn holder(&self, meta: &Meta) -> Option<&Arc<Object<K>>> {
        let mut holders = self
            .by_name
            .get(&meta.name)?
            .iter()
            .filter_map(|uid| self.by_uid.get(uid));
        holders.find(|o| o.meta.namespace == meta.namespace && o.meta.owner == meta.owner && o.meta.uid != meta.uid)
    }

    /// `name`, or `namespace/name`. Of several holders of a bare name the one in namespace `default` or in none is
    /// meant, else the newest.
    pub fn by_name(&self, name: &str) -> Option<&Arc<Object<K>>> {
        let holders = |name: &str| {
            self.by_name
                .get(name)
                .into_iter()
                .flatten()
                .filter_map(|uid| self.by_uid.get(uid))
        };
        let home = |o: &Object<K>| o.meta.namespace.is_empty() || o.meta.namespace == "default";
        holders(name).max_by_key(|o| (home(o), o.meta.created)).or_else(|| {
            let (namespace, name) = name.split_once('/')?;
            holders(name)
                .filter(|o| o.meta.namespace == namespace)
                .max_by_key(|o| o.meta.created)
        })
    }

    /// Newest first.
    pub fn list(&self) -> impl Iterator<Item = &Arc<Object<K>>> {
        self.by_age.values().rev()
    }

    /// Newest first.
    pub fn owned(&self, owner: &str) -> impl Iterator<Item = &Arc<Object<K>>> {
        let ages = self.by_owner.get(owner).into_iter().flatten().rev();
        ages.filter_map(|age| self.by_age.get(age))
    }

    /// Records whose uid begins with `prefix`.
    pub fn with_prefix<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = &'a Arc<Object<K>>> {
        let range = self.by_uid.range::<str, _>((Bound::Included(prefix), Bound::Unbounded));
        range
            .take_while(move |(uid, _)| uid.starts_with(prefix))
            .map(|(_, object)| object)
    }
}

/// An [`Index`] a kind.
#[derive(Default)]
pub(crate) struct Tables(HashMap<TypeId, Box<dyn Any + Send>>);

impl Tables {
    pub fn of<K: Kind>(&mut self) -> &mut Index<K> {
        let table = self
            .0
            .entry(TypeId::of::<K>())
            .or_insert_with(|| Box::new(Index::<K>::default()));
        table.downcast_mut().expect("a table is keyed by its type")
    }
}
