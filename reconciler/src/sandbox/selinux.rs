//! SELinux labels of a sandbox, as far as the node's policy knows them, and its level: a pair of categories that no
//! other sandbox has. It stands in a file of the sandbox's directory and is free again when that goes.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use state::PodSandbox;
use state::sandbox::SeLinux;

use crate::container::spec::{self, Labels};
use crate::engine::Context;
use crate::error::{Error, Result};
use crate::world::linux::selinux;
use crate::world::{Paths, World};

/// Categories of a policy (`c0` to `c1023`).
const CATEGORIES: u64 = 1024;
/// Pairs of two different ones.
const PAIRS: u64 = CATEGORIES * (CATEGORIES - 1) / 2;

fn path(paths: &Paths, uid: &str) -> PathBuf {
    paths.pod(uid).join("selinux-level")
}

fn read(world: &World, uid: &str) -> Result<Option<String>> {
    let text = world.files.read(&path(&world.paths, uid))?;
    // A power cut may leave it empty; then nothing runs with it, and another one is chosen.
    let text = text.map(|text| String::from_utf8_lossy(&text).into_owned());
    Ok(text.filter(|text| !text.is_empty()))
}

/// The level that a sandbox was given, such as `s0:c1,c2`; `None` where SELinux is off.
pub fn level(world: &World, object: &PodSandbox) -> Result<Option<String>> {
    match world.selinux {
        true => read(world, object.uid()),
        false => Ok(None),
    }
}

/// The labels of a sandbox's own process and files.
pub fn labels(world: &World, object: &PodSandbox) -> Result<Labels> {
    let own = level(world, object)?;
    let labels = spec::selinux::sandbox_labels(object, own.as_deref()).map_err(|e| Error::Refused(e.to_string()))?;
    let security = &object.spec.security;
    known(labels, asked(security.selinux.as_ref(), security.privileged))
}

/// Was a label asked for? That of a privileged one's process is not its wish's.
pub fn asked(wish: Option<&SeLinux>, privileged: bool) -> Asked {
    Asked {
        process: wish.is_some() && !privileged,
        mount: wish.is_some(),
    }
}

/// Which labels somebody named.
pub struct Asked {
    process: bool,
    mount: bool,
}

/// Those labels that the node's policy knows. One that was asked for must be; a policy without the usual ones has no
/// rules for containers, and then they have none.
pub fn known(labels: Labels, asked: Asked) -> Result<Labels> {
    let known = |label: Option<String>, asked: bool| match label {
        Some(label) if !selinux::knows(&label).map_err(Error::io("ask SELinux about", &label))? => match asked {
            true => Err(Error::Refused(format!(
                "spec.security.selinux: this node's policy does not know {label}; `semodule -l` lists its modules"
            ))),
            false => Ok(None),
        },
        label => Ok(label),
    };
    Ok(Labels {
        process: known(labels.process, asked.process)?,
        mount: known(labels.mount, asked.mount)?,
    })
}

/// Gives a sandbox its level, unless it has one or SELinux is off.
pub fn choose_level(cx: &Context, object: &PodSandbox) -> Result<()> {
    static CHOOSING: Mutex<()> = Mutex::new(());
    if !cx.world.selinux {
        return Ok(());
    }
    // Two that choose at once must not choose the same.
    let _choosing = CHOOSING.lock().unwrap_or_else(PoisonError::into_inner);
    if read(&cx.world, object.uid())?.is_some() {
        return Ok(());
    }
    let mut taken = HashSet::new();
    for other in cx.world.files.list(&cx.world.paths.pods())? {
        taken.extend(read(&cx.world, &other.name)?);
    }
    let level =
        free(object.uid(), &taken).ok_or_else(|| Error::Pending(format!("all {PAIRS} SELinux levels are taken")))?;
    cx.world
        .files
        .replace(&path(&cx.world.paths, object.uid()), level.as_bytes())
}

/// The first level that is not taken, from one on that the uid tells.
fn free(uid: &str, taken: &HashSet<String>) -> Option<String> {
    let first = uid.get(..16).and_then(|hex| u64::from_str_radix(hex, 16).ok());
    let first = first.unwrap_or_default() % PAIRS;
    let levels = (0..PAIRS).map(|n| pair((first + n) % PAIRS));
    levels
        .map(|(a, b)| format!("s0:c{a},c{b}"))
        .find(|level| !taken.contains(level))
}

/// The `n`th of all pairs, the smaller one first.
fn pair(n: u64) -> (u64, u64) {
    let (mut small, mut left, mut row) = (0, n, CATEGORIES - 1);
    while left >= row {
        (small, left, row) = (small + 1, left - row, row - 1);
    }
    (small, small + 1 + left)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_differ_and_are_all_there() {
        let all: HashSet<_> = (0..PAIRS).map(pair).collect();
        assert_eq!(all.len() as u64, PAIRS);
        assert!(all.iter().all(|(a, b)| a < b && *b < CATEGORIES));
    }

    #[test]
    fn a_taken_level_is_passed_over() {
        let uid = "ff".repeat(32);
        let first = free(&uid, &HashSet::new()).unwrap();
        let second = free(&uid, &HashSet::from([first.clone()])).unwrap();
        assert_ne!(first, second);
        assert!(first.starts_with("s0:c") && second.starts_with("s0:c"));
    }
}
