//! The memory tier: kinds that never touch the disk (sessions). Decided and published under one lock.

use std::sync::Arc;

use crate::clock::now_ns;
use crate::error::Result;
use crate::resource::{Kind, Meta, Object};
use crate::store::{Event, Holder, New, Put, changed, judge, not_found};
use crate::watch::Live;
use crate::writer::newborn;

pub(crate) fn create<K: Kind>(live: &Live<K>, new: New<K>, boot_id: &str) -> Result<Put<K>> {
    let mut index = live.write();
    let (object, joined) = match judge(index.holder(&new.meta), &new)? {
        Holder::Join(present, renewed) => (renewed.map_or(present, Arc::from), true),
        judged => {
            if let Holder::Replace(old) = judged {
                index.put(Arc::new(marked(&old)));
            }
            let mut meta = new.meta;
            newborn(&mut meta, boot_id)?;
            meta.created = index
                .list()
                .next()
                .map_or(0, |newest| newest.meta.created + 1)
                .max(now_ns());
            (Arc::new(Object::new(meta, new.spec, K::Status::default())), false)
        }
    };
    index.put(object.clone());
    live.tell(index, Event::Applied(object.clone()));
    Ok(if joined {
        Put::Joined(object)
    } else {
        Put::Created(object)
    })
}

pub(crate) fn update<K: Kind>(
    live: &Live<K>,
    uid: &str,
    change: impl FnOnce(&mut Meta, &mut K::Spec) -> Result<()>,
) -> Result<Arc<Object<K>>> {
    let mut index = live.write();
    let old = index.get(uid).cloned().ok_or_else(|| not_found::<K>(uid))?;
    let Some(object) = changed(&old, change)? else {
        return Ok(old);
    };
    let object = Arc::new(object);
    index.put(object.clone());
    live.tell(index, Event::Applied(object.clone()));
    Ok(object)
}

pub(crate) fn delete<K: Kind>(live: &Live<K>, uid: &str) -> Option<Arc<Object<K>>> {
    let mut index = live.write();
    let old = index.get(uid).cloned()?;
    if old.meta.deleted() {
        return Some(old);
    }
    let object = Arc::new(marked(&old));
    index.put(object.clone());
    live.tell(index, Event::Applied(object.clone()));
    Some(object)
}

fn marked<K: Kind>(old: &Object<K>) -> Object<K> {
    let meta = Meta {
        deletion: Some(now_ns()),
        ..old.meta.clone()
    };
    Object::new(meta, old.spec.clone(), old.status.clone())
}
