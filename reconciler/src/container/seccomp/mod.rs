//! Seccomp filters: a profile and a container's capabilities in, the kernel's bytes out. No C library, no second
//! process; pure but for [`filter`], which reads a Localhost profile.
//!
//! ```text
//! RuntimeDefault ─┐
//!                 ├─ profile: rules ── assembler: tree ── bytes (struct sock_filter, 8 each) ── the bundle
//! Localhost file ─┘            names: numbers by architecture
//! ```
//!
//! For a runtime that compiles profiles itself there is the OCI's form (`oci`).
//!
//! The bytes are loaded by the container's last step before execve, and by each exec.

pub mod assembler;
pub mod names;
pub mod oci;
pub mod profile;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use oci_spec::runtime::LinuxSeccomp;
use sha2::{Digest, Sha256};
use state::sandbox::Profile as Wish;

pub use names::Arch;
pub use profile::{Context, Profile};

/// Why there is no filter.
#[derive(Debug, thiserror::Error)]
pub enum SeccompError {
    #[error("seccomp profile: {field}: {reason}")]
    Invalid { field: String, reason: String },
    #[error("seccomp profile of {bytes} bytes: at most {} are read", profile::MAX_BYTES)]
    TooManyBytes { bytes: usize },
    #[error(
        "seccomp profile: {instructions} instructions, the kernel takes {}",
        assembler::MAX_INSTRUCTIONS
    )]
    TooLarge { instructions: usize },
    #[error("reading the seccomp profile {path}: {source}")]
    Read { path: String, source: std::io::Error },
}

impl SeccompError {
    fn invalid(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Invalid {
            field: field.into(),
            reason: reason.into(),
        }
    }
}

pub type Result<T> = std::result::Result<T, SeccompError>;

/// A compiled filter: `struct sock_filter` after `struct sock_filter`, in the node's byte order.
pub type Filter = Arc<[u8]>;

/// Assembles a profile.
pub fn compile(profile: &Profile) -> Result<Vec<u8>> {
    Ok(assembler::bytes(&assembler::assemble(profile)?))
}

/// The filter that a container asked for; `None` is unconfined.
///
/// A privileged container has none whatever it asks for, and one that asks for nothing neither.
///
/// # Errors
/// If a Localhost profile is missing or is none.
pub fn filter(wish: Option<&Wish>, privileged: bool, cx: &Context) -> Result<Option<Filter>> {
    match wish {
        _ if privileged => Ok(None),
        None | Some(Wish::Unconfined) => Ok(None),
        Some(Wish::RuntimeDefault) => cached([0; 32], cx, || Ok(profile::runtime_default(cx))).map(Some),
        Some(Wish::Localhost { reference }) => {
            let json = read(reference)?;
            cached(Sha256::digest(&json).into(), cx, || profile::parse(&json, cx)).map(Some)
        }
    }
}

/// The same in the OCI's form, for a runtime that compiles it itself.
///
/// # Errors
/// As [`filter`].
pub fn oci(wish: Option<&Wish>, privileged: bool, cx: &Context) -> Result<Option<LinuxSeccomp>> {
    match wish {
        _ if privileged => Ok(None),
        None | Some(Wish::Unconfined) => Ok(None),
        Some(Wish::RuntimeDefault) => oci::runtime_default(&profile::runtime_default(cx)).map(Some),
        Some(Wish::Localhost { reference }) => oci::from(&profile::parse(&read(reference)?, cx)?).map(Some),
    }
}

fn read(path: &str) -> Result<Vec<u8>> {
    let wrong = |source| SeccompError::Read {
        path: path.into(),
        source,
    };
    if !Path::new(path).is_absolute() {
        return Err(SeccompError::invalid(
            "localhostRef",
            format!("`{path}` is not an absolute path"),
        ));
    }
    // Without O_NONBLOCK a FIFO of that name would hold us up for ever.
    let mut options = File::options();
    let file = options
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .map_err(wrong)?;
    if !file.metadata().map_err(wrong)?.is_file() {
        return Err(SeccompError::invalid(
            "localhostRef",
            format!("`{path}` is not a regular file"),
        ));
    }
    let mut json = Vec::new();
    file.take(profile::MAX_BYTES as u64 + 1)
        .read_to_end(&mut json)
        .map_err(wrong)?;
    Ok(json)
}

type Key = ([u8; 32], Context);

/// Few profiles serve many containers; beyond this many all are forgotten.
const CACHED: usize = 64;

fn cached(hash: [u8; 32], cx: &Context, make: impl FnOnce() -> Result<Profile>) -> Result<Filter> {
    static CACHE: Mutex<Option<HashMap<Key, Filter>>> = Mutex::new(None);
    let key = (hash, *cx);
    let lock = || CACHE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(filter) = lock().as_ref().and_then(|cache| cache.get(&key)) {
        return Ok(filter.clone());
    }
    let filter: Filter = compile(&make()?)?.into();
    let mut cache = lock();
    let cache = cache.get_or_insert_default();
    if cache.len() >= CACHED {
        cache.clear();
    }
    cache.insert(key, filter.clone());
    Ok(filter)
}
