//! One-shot wishes, done at most once.

pub mod execsync;
