//! What keeps records over a crash: the database (`durable`), or a simulated one.

use std::time::Duration;

use crate::error::Result;

/// One change of the database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Op {
    /// `Kind/uid`
    pub key: String,
    /// JSON; `None` removes the key.
    pub value: Option<Vec<u8>>,
}

/// What opening found.
pub enum Found {
    /// Nothing: a new root, or one whose database is gone.
    Nothing { gone: bool },
    /// The database was damaged and is set aside; the new one is empty.
    Damaged(String),
    /// Its records by key: the JSON, or why one is unreadable.
    Records(Vec<(String, Result<Vec<u8>, String>)>),
}

/// The records of one root, written by one writer.
pub trait Disk: Send {
    fn root_id(&self) -> &str;
    /// Leaves an unreadable record's key alone for good.
    fn keep(&mut self, key: String);
    /// No longer: its record is thrown away by the next commit. False if it was not kept.
    fn release(&mut self, key: &str) -> bool;
    /// How many are so kept.
    fn kept(&self) -> usize;
    /// May new records be made, or is the rest of the disk kept for removals?
    ///
    /// # Errors
    /// [`crate::Error::Full`].
    fn room(&self) -> Result<()>;
    /// Makes `ops` durable, all or none; `live` is the number of records afterwards. If the database has to be opened
    /// again first, `all` gives every record as it shall be.
    ///
    /// # Errors
    /// If nothing of them is durable.
    fn commit(&mut self, ops: &[Op], live: u64, all: &dyn Fn() -> Vec<Op>) -> Result<()>;
    /// Until when the watermark may stay behind; `None` if it is not.
    fn mark_due(&self) -> Option<Duration>;
    /// Brings the watermark up to date.
    fn mark(&mut self);
}
