//! What the reconciler may do to a node.

pub mod linux;
