//! The shim: the process that owns a pod's containers, their output and their run records.
//!
//! This library is the half that the daemon uses: starting a shim, talking to it (feature `client`), and the run
//! record, which both sides read. The binary `reconcile-shim` is the other half. Neither knows the daemon's records,
//! images, networks or mounts, and neither decides anything: what to run and when to stop is the caller's.
//!
//! ```text
//!  daemon ── ttrpc frames over DIR/sock ──> shim (one per pod, child of init, one thread)
//!    │  <── stdio of an exec, pipes that follow a container: descriptors beside a frame
//!    │                                       ├── pause            holds or is init of the pod's pid namespace
//!    │  inotify                              ├── container ... stdout, stderr FIFOs ──> CRI log
//!    └──── run record <── start, stop, end ──┘     └── exec       dies with its connection
//! ```
//!
//! Files: `DIR/sock`, `DIR/lock` (held while a shim lives), `DIR/shim.log`, and per process `DIR/ID.task` (what a shim
//! must know to take the process over), `DIR/ID.mark` (which output is in the log), `DIR/ID.making` (locked while it is
//! being made), `DIR/b/ID` (the bundle that libcontainer or an OCI runtime reads); `DIR/c` is that one's own state.
//! DIR is on tmpfs; run records are where the caller says, on a durable disk.

pub mod api;
#[cfg(feature = "client")]
mod client;
mod error;
pub mod fault;
pub mod frame;
mod hold;
pub mod record;
mod spawn;
#[cfg(feature = "client")]
mod streams;

#[cfg(feature = "client")]
pub use client::Client;
pub use error::{Code, Error, Result};
pub use hold::{Held, READY};
pub use spawn::{Identity, Place, spawn};
#[cfg(feature = "client")]
pub use streams::{Live, Pipe, Streams};

/// The protocol's service name.
pub const SERVICE: &str = "shim.v1.Shim";
/// Socket in a shim's directory. Reach it through the directory's descriptor: paths end at 108 bytes.
pub const SOCKET: &str = "sock";
/// Lock file in a shim's directory, held with `flock` while the shim lives.
pub const LOCK: &str = "lock";
/// What the shim has to say, bounded.
pub const LOG: &str = "shim.log";
/// Exit code of `serve` when a shim already serves the directory.
pub const EXIT_ALREADY_SERVED: i32 = 3;
/// Files of procfs that tools replace. Over anything else below /proc nothing is mounted, whatever a request says and
/// wherever the image's links lead: it would blind or fool the checks that rely on it.
pub const PROC_FILES: [&str; 10] = [
    "/proc/cpuinfo",
    "/proc/diskstats",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/swaps",
    "/proc/uptime",
    "/proc/loadavg",
    "/proc/slabinfo",
    "/proc/sys/kernel/ns_last_pid",
    "/proc/sys/crypto/fips_enabled",
];
/// The v1 controllers that libcontainer knows, in which a container so gets a cgroup of its own.
pub const V1_CONTROLLERS: [&str; 12] = [
    "cpu",
    "cpuacct",
    "cpuset",
    "devices",
    "freezer",
    "hugetlb",
    "memory",
    "net_cls",
    "net_prio",
    "perf_event",
    "pids",
    "blkio",
];
/// Id of the pause process in every call that takes an id.
pub const PAUSE: &str = "pause";
/// Most bytes that one exec returns: 16 MiB, the CRI client's message limit, less room for the envelope.
pub const EXEC_OUTPUT_LIMIT: u64 = (16 << 20) - (64 << 10);
