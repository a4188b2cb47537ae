//! The node, as the loop sees it.
pub mod linux;
