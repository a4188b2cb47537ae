//! Proto to wishes and statuses to proto: pure functions, nothing is looked up and nothing is written.
//!
//! Errors name the field by its path in the proto's spelling, e.g. `config.linux.security_context.run_as_group`.

pub mod container;
pub(crate) mod image;
pub(crate) mod metrics;
mod mount;
pub(crate) mod resources;
pub mod sandbox;
pub(crate) mod security;
pub(crate) mod signal;
pub(crate) mod stats;

use crate::error::{Error, Result};

/// Bytes of a path at most (`PATH_MAX` of Linux).
const TEXT_MAX: usize = 4096;

/// A value of an enum, which a newer or wrong client may send out of range.
pub(crate) fn known<E: TryFrom<i32>>(field: &str, value: i32) -> Result<E> {
    E::try_from(value).map_err(|_| Error::invalid(field, format!("{value} is no known value")))
}

/// A message that must be there.
pub(crate) fn present<'a, T>(field: &str, value: &'a Option<T>) -> Result<&'a T> {
    value.as_ref().ok_or_else(|| Error::invalid(field, "must be set"))
}

/// Bytes of a part of a name at most, as Kubernetes has it; four of them fit into a record's name.
const NAME_MAX: usize = 253;

/// Text that becomes part of a name: not empty, bounded, without control characters.
fn name(field: &str, value: &str) -> Result<()> {
    if value.is_empty() {
        return Err(Error::invalid(field, "must not be empty"));
    }
    if value.len() > NAME_MAX {
        return Err(Error::invalid(field, format!("is longer than {NAME_MAX} bytes")));
    }
    if value.chars().any(char::is_control) {
        return Err(Error::invalid(field, "must not contain control characters"));
    }
    Ok(())
}

/// Text that becomes a path or a name somewhere.
fn text(field: &str, value: &str) -> Result<()> {
    if value.len() > TEXT_MAX {
        return Err(Error::invalid(field, format!("is longer than {TEXT_MAX} bytes")));
    }
    no_nul(field, value)
}

/// Text that is handed to the kernel, which ends it at the first NUL.
pub(crate) fn no_nul(field: &str, value: &str) -> Result<()> {
    if value.contains('\0') {
        return Err(Error::invalid(field, "must not contain a NUL byte"));
    }
    Ok(())
}

/// An absolute path.
pub(crate) fn absolute(field: &str, value: &str) -> Result<()> {
    text(field, value)?;
    if !value.starts_with('/') {
        return Err(Error::invalid(field, format!("{value:?} is not an absolute path")));
    }
    Ok(())
}
