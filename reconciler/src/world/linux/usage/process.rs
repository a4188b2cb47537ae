//! What processes hold open (proc_pid_fd(5), proc_pid_limits(5)).

use std::fs;
use std::path::PathBuf;

use super::text;

/// Descriptors looked at in one container; one with more is told as this many.
const MOST: u64 = 100_000;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Open {
    pub files: u64,
    /// Of them.
    pub sockets: u64,
}

/// Descriptors of processes; of those that went meanwhile, none.
pub fn open(pids: &[i32]) -> Open {
    let mut open = Open::default();
    for pid in pids {
        let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else {
            continue;
        };
        for entry in entries.flatten() {
            if open.files == MOST {
                return open;
            }
            open.files += 1;
            let target = fs::read_link(entry.path()).unwrap_or_default();
            open.sockets += u64::from(target.as_os_str().as_encoded_bytes().starts_with(b"socket:"));
        }
    }
    open
}

/// The soft limit on open files; `None` without a limit, or without the process.
pub fn max_open_files(pid: i32) -> Option<u64> {
    let text = text::read(&PathBuf::from(format!("/proc/{pid}/limits")))?;
    let line = text.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn counts_sockets_of_a_process() {
        let (one, _two) = UnixStream::pair().unwrap();
        let mut child = std::process::Command::new("sleep")
            .arg("1000")
            .stdin(std::process::Stdio::from(std::os::fd::OwnedFd::from(one)))
            .spawn()
            .unwrap();
        let pid = child.id() as i32;
        let counted = open(&[pid, i32::MAX]);
        let limit = max_open_files(pid);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(counted.files >= 3 && counted.sockets >= 1, "{counted:?}");
        assert!(limit.is_some_and(|limit| limit > 0));
        assert_eq!(max_open_files(i32::MAX), None);
    }
}
