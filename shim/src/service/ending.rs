//! Processes that ended: whose they were, and with which status.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use shim::api::Phase;
use shim::record::End;

use super::Service;
use crate::sys;

impl Service {
    /// Children that ended: the pod's processes, makers, and orphans that came to this subreaper.
    pub(super) fn reap(&mut self) {
        let mut info = [0u8; 128];
        // SAFETY: a live buffer, as long as a signalfd_siginfo.
        while unsafe { libc::read(self.signals.as_raw_fd(), info.as_mut_ptr().cast(), info.len()) } > 0 {}
        loop {
            let mut status = 0;
            // SAFETY: a live int.
            let pid = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) };
            if pid <= 0 {
                break;
            }
            self.child_ended(pid as u32, status);
        }
        let is_starting = self.procs.iter().any(|proc| proc.channel.is_some())
            || self.execs.iter().any(|exec| exec.channel.is_some());
        if !is_starting {
            self.orphans.clear();
        }
    }

    fn child_ended(&mut self, pid: u32, status: i32) {
        let dir = self.dir.clone();
        if let Some(proc) = self.procs.iter_mut().find(|proc| proc.pid == pid && !proc.is_dead) {
            match proc.phase {
                Phase::Running => proc.ended(&dir, End::from_wait(status, false, sys::now())),
                // Its channel may still hold why.
                Phase::Starting => {
                    proc.is_dead = true;
                    self.orphans.push((pid, status));
                }
                Phase::Stopping => proc.is_dead = true,
            }
        } else if let Some(exec) = self.execs.iter_mut().find(|exec| exec.pid == pid) {
            exec.ended(status);
        } else if let Some(proc) = self.procs.iter_mut().find(|proc| proc.maker == pid) {
            proc.maker = 0; // the kernel may give the number to another
            let key = proc.key;
            self.maker_ended(key, status);
        } else if let Some(proc) = self.procs.iter_mut().find(|proc| proc.is_removed_by(pid)) {
            proc.removed(status);
        } else {
            self.orphans.push((pid, status));
        }
    }

    /// The status of an exec's process that ended before it was known.
    pub fn take_orphan(&mut self, pid: u32) -> Option<i32> {
        let at = self.orphans.iter().position(|(orphan, _)| *orphan == pid)?;
        Some(self.orphans.remove(at).1)
    }

    /// A process taken over ended: it is no child, so the kernel is asked in other ways.
    pub(super) fn adopted_ended(&mut self, key: u32) {
        let dir = self.dir.clone();
        let Some(proc) = self.procs.iter_mut().find(|proc| proc.key == key && !proc.is_dead) else {
            return;
        };
        let Some(pidfd) = &proc.pidfd else { return };
        match crate::adopt::exit_status(proc.pid, proc.started.start_ticks, pidfd) {
            Some(_) | None if proc.phase == Phase::Stopping => proc.is_dead = true,
            Some(status) => {
                let end = crate::adopt::told(proc, End::from_wait(status, false, sys::now()));
                proc.ended(&dir, end)
            }
            // Reaped, and the kernel (before 6.15) does not tell.
            None if sys::start_ticks(proc.pid) != Some(proc.started.start_ticks) => {
                let end = crate::adopt::told(proc, End::lost(sys::now()));
                proc.ended(&dir, end)
            }
            None => {}
        }
    }
}

/// SIGCHLD as a descriptor.
pub(super) fn child_signals() -> io::Result<OwnedFd> {
    // SAFETY: a zeroed set is valid; SIGCHLD exists; the descriptor is the kernel's answer.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&mut set, libc::SIGCHLD);
        sys::check(libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()))?;
        let fd = sys::check(libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK))?;
        Ok(OwnedFd::from_raw_fd(fd as RawFd))
    }
}
