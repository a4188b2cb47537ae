//! Usage: what pods and containers take of the node. A question in the memory tier, answered by the reconciler at once,
//! past its queues; nothing is sampled while nobody asks.
//!
//! ```text
//!   cri -- Store::ask(Ask) --> [ mailbox ] --> Store::questions -- reconciler
//!    ^                                                                |
//!    +----------------------------- Answer ---------------------------+
//! ```

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{mpsc, oneshot};

use crate::error::{Error, Result};

/// Whose usage is asked for, by uid. What does not run, or is not known, is left out of the answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ask {
    pub sandboxes: Vec<String>,
    pub containers: Vec<String>,
    /// Also what only metrics show: [`Detail`] and the packets of the network.
    pub detail: bool,
    /// Also the writable layers of all containers together, those that do not run included.
    pub writable: bool,
}

/// What was found.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    pub sandboxes: HashMap<String, SandboxUsage>,
    pub containers: HashMap<String, ContainerUsage>,
    pub able: Able,
    /// Only if asked for.
    pub writable: Option<DiskUsage>,
}

/// What this node's kernel can tell at all; the same for as long as the process lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Able {
    /// Pressure stall information by cgroup.
    pub pressure: bool,
}

/// One cgroup, read at one time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CgroupUsage {
    /// ns since the epoch.
    pub at: i64,
    pub cpu: Cpu,
    pub memory: Memory,
    pub swap: Option<Swap>,
    /// Processes and threads.
    pub tasks: u64,
    pub io_pressure: Option<Pressure>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cpu {
    /// ns of all cores together.
    pub usage: u64,
    /// ns a second since the sample before; absent at the first.
    pub rate: Option<u64>,
    pub pressure: Option<Pressure>,
}

/// Bytes, but for the faults.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Memory {
    pub usage: u64,
    /// `usage` without the page cache that can be dropped at once.
    pub working_set: u64,
    /// Up to the limit; 0 where there is none.
    pub available: u64,
    pub rss: u64,
    pub page_faults: u64,
    pub major_page_faults: u64,
    pub pressure: Option<Pressure>,
}

/// Bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swap {
    pub usage: u64,
    /// Up to the limit; absent where there is none.
    pub available: Option<u64>,
}

/// Pressure stall information of one resource.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pressure {
    pub some: Stall,
    pub full: Stall,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stall {
    /// ns.
    pub total: u64,
    /// Percent of the last 10, 60 and 300 s.
    pub avg10: f64,
    pub avg60: f64,
    pub avg300: f64,
}

/// What a container's own layer takes of the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskUsage {
    /// When it was counted, ns since the epoch.
    pub at: i64,
    pub bytes: u64,
    pub inodes: u64,
}

#[derive(Clone, Debug, Default)]
pub struct ContainerUsage {
    pub cgroup: CgroupUsage,
    /// Absent while it is counted for the first time.
    pub layer: Option<DiskUsage>,
    pub detail: Option<Arc<Detail>>,
}

#[derive(Clone, Debug, Default)]
pub struct SandboxUsage {
    /// Of the pod as a whole: the caller's cgroup (`cgroupParent`), else the sum of the pod's own.
    pub cgroup: CgroupUsage,
    /// Absent on the host's network, and while no process of the pod can be found.
    pub network: Option<Network>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Network {
    /// ns since the epoch.
    pub at: i64,
    /// All but `lo`, in the kernel's order.
    pub interfaces: Vec<Interface>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interface {
    pub name: String,
    pub received: Traffic,
    pub sent: Traffic,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    pub bytes: u64,
    pub packets: u64,
    pub errors: u64,
    pub dropped: u64,
}

/// What only metrics show of a container.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Detail {
    /// Path of the cgroup within its hierarchy.
    pub path: String,
    /// ns.
    pub cpu_user: u64,
    pub cpu_system: u64,
    pub cfs: Throttling,
    pub memory: MemoryDetail,
    pub processes: u64,
    pub files: u64,
    pub sockets: u64,
    /// Threads allowed; absent without a limit.
    pub tasks_limit: Option<u64>,
    /// Open files that the first process may have.
    pub max_open_files: Option<u64>,
    pub disks: Vec<Disk>,
    pub file_system: FileSystem,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Throttling {
    pub periods: u64,
    pub throttled_periods: u64,
    /// ns.
    pub throttled: u64,
}

/// Bytes, but for the counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryDetail {
    pub cache: u64,
    pub kernel: u64,
    pub mapped_file: u64,
    pub max_usage: u64,
    /// How often the limit was met.
    pub failures: u64,
    /// Processes killed for want of memory.
    pub oom_kills: u64,
    /// Page faults, minor and major, of the cgroup without those below it.
    pub own_page_faults: u64,
    pub own_major_page_faults: u64,
}

/// Input and output of one block device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Disk {
    pub major: u32,
    pub minor: u32,
    /// `/dev/…`, or `major:minor` if it has no name.
    pub device: String,
    pub reads: u64,
    pub writes: u64,
    pub read_bytes: u64,
    pub write_bytes: u64,
}

/// The file system that holds the writable layers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileSystem {
    pub device: String,
    pub bytes: u64,
    pub inodes: u64,
    pub inodes_free: u64,
}

/// A question and where its answer goes.
pub type Question = (Ask, oneshot::Sender<Answer>);

/// Takes questions to whoever answers them.
#[derive(Default)]
pub(crate) struct Mailbox(Mutex<Option<mpsc::UnboundedSender<Question>>>);

impl Mailbox {
    /// The questions from now on; an earlier reader gets none any more.
    pub fn open(&self) -> mpsc::UnboundedReceiver<Question> {
        let (sender, receiver) = mpsc::unbounded_channel();
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(sender);
        receiver
    }

    pub async fn ask(&self, ask: Ask) -> Result<Answer> {
        let (sender, answer) = oneshot::channel();
        let sent = {
            let mailbox = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            mailbox.as_ref().is_some_and(|to| to.send((ask, sender)).is_ok())
        };
        if !sent {
            return Err(Error::Unanswered);
        }
        answer.await.map_err(|_| Error::Unanswered)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_question_without_a_reader_is_told_so() {
        let mailbox = Mailbox::default();
        assert!(matches!(mailbox.ask(Ask::default()).await, Err(Error::Unanswered)));
        let mut questions = mailbox.open();
        let (answer, ()) = tokio::join!(mailbox.ask(Ask::default()), async {
            let (_, reply) = questions.recv().await.unwrap();
            let able = Able { pressure: true };
            reply
                .send(Answer {
                    able,
                    ..Answer::default()
                })
                .unwrap();
        });
        assert!(answer.unwrap().able.pressure);
        drop(questions);
        assert!(matches!(mailbox.ask(Ask::default()).await, Err(Error::Unanswered)));
    }
}
