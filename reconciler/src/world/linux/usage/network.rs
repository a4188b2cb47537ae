//! Traffic of a network namespace, through a process that lives in it: no thread has to enter it.

use std::path::{Path, PathBuf};

use state::usage::{Interface, Traffic};

use super::text;
use crate::world::linux::netns::{self, Kind, Pin};

/// All interfaces but `lo` of the namespace that is pinned at `pin`, seen by the first of `pids` that lives in it.
pub fn interfaces(pin: &Path, pids: impl IntoIterator<Item = i32>) -> Option<Vec<Interface>> {
    let Ok(Pin::Ns { inode }) = netns::observe(pin) else {
        return None;
    };
    let inside = |pid: &i32| u32::try_from(*pid).is_ok_and(|pid| netns::inode_of(Kind::Net, pid).ok() == Some(inode));
    let pid = pids.into_iter().filter(|pid| *pid > 0).find(inside)?;
    let text = text::read(&PathBuf::from(format!("/proc/{pid}/net/dev")))?;
    // Read in the right namespace only if the process is still the same one.
    inside(&pid).then(|| parse(&text))
}

/// `/proc/net/dev` (proc_pid_net(5)): eight numbers received, eight sent.
fn parse(text: &str) -> Vec<Interface> {
    let line = |line: &str| {
        let (name, numbers) = line.split_once(':')?;
        let name = name.trim();
        let n: Vec<u64> = numbers.split_whitespace().filter_map(|n| n.parse().ok()).collect();
        let traffic = |at: usize| Traffic {
            bytes: n[at],
            packets: n[at + 1],
            errors: n[at + 2],
            dropped: n[at + 3],
        };
        (n.len() >= 12 && name != "lo").then(|| Interface {
            name: name.to_owned(),
            received: traffic(0),
            sent: traffic(8),
        })
    };
    text.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_every_interface_but_lo() {
        let text = "Inter-|   Receive         |  Transmit\n face |bytes    packets errs drop|bytes packets\n    \
                    lo:   30410     340 0 0 0 0 0 0    30410     340 0 0 0 0 0 0\n  \
                    eth0: 522 20 1 2 0 0 0 0 134 13 3 4 0 0 0 0\n";
        let found = parse(text);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].name, "eth0");
        let of = |t: &Traffic| (t.bytes, t.packets, t.errors, t.dropped);
        assert_eq!(
            (of(&found[0].received), of(&found[0].sent)),
            ((522, 20, 1, 2), (134, 13, 3, 4))
        );
        assert!(parse("eth0: 1 2\nnonsense\n").is_empty());
    }
}
