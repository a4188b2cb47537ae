//! The services over a real store and a real socket, with a stand-in for the reconciler that only sets statuses.

mod calls;
mod common;
mod reads;
mod records;
