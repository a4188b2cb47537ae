//! Exec: a forked child joins a container's cgroup, namespaces and root, and forks the process that then becomes the
//! program, by the same last step as the container's own.
//!
//! The exec gets a cgroup of its own below the container's, so that all it started can be killed, whatever session or
//! process group it went to. On cgroup v1 that is in one hierarchy; limits count in the container's own groups.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use oci_spec::runtime::Process;

use crate::r#become::{Become, fail, message};
use crate::{cgroup, init, sys};

/// All namespaces a container may have but the user's.
const KINDS: [(&str, i32); 7] = [
    ("cgroup", libc::CLONE_NEWCGROUP),
    ("ipc", libc::CLONE_NEWIPC),
    ("uts", libc::CLONE_NEWUTS),
    ("net", libc::CLONE_NEWNET),
    ("pid", libc::CLONE_NEWPID),
    ("time", libc::CLONE_NEWTIME),
    ("mnt", libc::CLONE_NEWNS),
];

/// All that an exec takes.
pub struct Plan {
    /// The container's first process, alive.
    pub pid: u32,
    pub pidfd: OwnedFd,
    /// The container's cgroup directories and the exec's own.
    pub cgroups: Vec<PathBuf>,
    pub session: Option<PathBuf>,
    pub process: Process,
    pub seccomp: Option<Vec<u8>>,
    /// stdin, stdout, stderr.
    pub stdio: [OwnedFd; 3],
    /// The host's uid and gid of the program's user.
    pub owner: (u32, u32),
}

/// Makes the cgroup of exec number `n`; `None` if the container's has no room for one.
pub fn session(cgroups: &[PathBuf], n: u64) -> Option<PathBuf> {
    let dir = cgroup::main_dir(cgroups)?.join(format!("exec-{n}"));
    match fs::create_dir(&dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => None,
        _ => Some(dir),
    }
}

impl Plan {
    /// In the forked child: joins, forks the exec as the shim's child, tells the channel, ends.
    pub fn run(self, channel: &OwnedFd) -> ! {
        match self.steps(channel.as_raw_fd()) {
            Ok(()) => sys::exit(0),
            Err(error) => fail(channel.as_raw_fd(), &error),
        }
    }

    fn steps(self, channel: RawFd) -> Result<(), String> {
        // A process of the container must not look into this one while it is half inside.
        sys::prctl(libc::PR_SET_DUMPABLE, 0).map_err(|error| format!("set undumpable: {error}"))?;
        if let Some(score) = self.process.oom_score_adj() {
            init::oom_score(score);
        }
        for limit in self.process.rlimits().iter().flatten() {
            init::set_limit(0, limit)?;
        }
        self.own_stdio();
        self.join_cgroups()?;
        self.join_namespaces()
            .map_err(|error| format!("join the container: {error}"))?;
        let pid = sys::fork_sibling(0).map_err(|error| format!("fork: {error}"))?;
        if pid == 0 {
            for (to, from) in self.stdio.iter().enumerate() {
                // SAFETY: live descriptors.
                unsafe { libc::dup2(from.as_raw_fd(), to as RawFd) };
            }
            // SAFETY: no pointers.
            unsafe { libc::setsid() };
            Become {
                process: self.process,
                seccomp: self.seccomp,
                channel,
                first: None,
            }
            .run();
        }
        let mut made = vec![message::MADE];
        made.extend(pid.to_le_bytes());
        made.extend([0; 16]);
        sys::send(channel, &made, &[])
            .map(drop)
            .map_err(|error| format!("tell the shim: {error}"))
    }

    /// The program's user may open /dev/stdout and its like anew, as with the container's own.
    fn own_stdio(&self) {
        for fd in &self.stdio {
            // SAFETY: all zero is a valid stat for the call to fill; the descriptor is live.
            unsafe {
                let mut meta: libc::stat = std::mem::zeroed();
                if libc::fstat(fd.as_raw_fd(), &mut meta) == 0 && meta.st_mode & libc::S_IFMT == libc::S_IFIFO {
                    libc::fchown(fd.as_raw_fd(), self.owner.0, self.owner.1);
                }
            }
        }
    }

    fn join_cgroups(&self) -> Result<(), String> {
        let parent = self.session.as_deref().and_then(Path::parent);
        for dir in self.cgroups.iter().filter(|dir| dir.join("cgroup.procs").exists()) {
            let dir = match &self.session {
                Some(session) if parent == Some(dir) => session,
                _ => dir,
            };
            cgroup::join(dir).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn join_namespaces(&self) -> io::Result<()> {
        let differs = |name: &str| {
            let inode = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{name}")).ok();
            inode(&self.pid.to_string()) != inode("self")
        };
        let kinds = KINDS
            .iter()
            .filter(|(name, _)| differs(name))
            .fold(0, |all, (_, kind)| all | kind);
        // The user namespace first: its owner's rights are what the others are joined with.
        if differs("user") {
            sys::setns(self.pidfd.as_fd(), libc::CLONE_NEWUSER)?;
            sys::become_root()?;
        }
        if kinds != 0 {
            sys::setns(self.pidfd.as_fd(), kinds)?;
        }
        Ok(())
    }
}
