//! The few system calls and kernel files that neither std nor nix has, and time.

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Turns -1 into the error it stands for.
pub fn check(result: impl Into<i64>) -> io::Result<i64> {
    match result.into() {
        -1 => Err(io::Error::last_os_error()),
        value => Ok(value),
    }
}

/// CLOCK_REALTIME, ns.
pub fn now() -> i64 {
    clock(libc::CLOCK_REALTIME)
}

/// CLOCK_BOOTTIME, ns: what deadlines are in, for it goes on during suspend and never jumps.
pub fn boot() -> u64 {
    clock(libc::CLOCK_BOOTTIME) as u64
}

fn clock(which: libc::clockid_t) -> i64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid timespec for the call to fill; both clocks exist on every Linux served.
    unsafe { libc::clock_gettime(which, &mut time) };
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

/// Identity of this boot of the machine.
pub fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .unwrap_or_default()
        .trim()
        .to_owned()
}

/// A field of `/proc/PID/stat`, counted from 1 as proc(5) does (3 and above).
pub fn stat_field(pid: u32, field: usize) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program's name, in brackets, may hold anything.
    stat.rsplit_once(") ")?
        .1
        .split(' ')
        .nth(field.checked_sub(3)?)?
        .trim()
        .parse()
        .ok()
}

/// Start time of a process in ticks since boot: with the pid and boot id, its identity.
pub fn start_ticks(pid: u32) -> Option<u64> {
    stat_field(pid, 22)
}

/// pidfd_open(2).
pub fn pidfd(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: no pointers; the result is a new descriptor or -1.
    let fd = check(unsafe { libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0) })?;
    // SAFETY: the kernel just gave us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Sends a signal through a pidfd, so that it cannot reach a later process of the same number.
pub fn pidfd_signal(fd: BorrowedFd, signal: i32) -> io::Result<()> {
    // SAFETY: a null siginfo is allowed.
    let done = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd.as_raw_fd(), signal, 0usize, 0) };
    check(done).map(drop)
}

/// How a process that is not our child ended (Linux 6.15); the wait status, if the kernel still knows.
pub fn pidfd_exit(fd: BorrowedFd) -> Option<i32> {
    const EXIT: u64 = libc::PIDFD_INFO_EXIT as u64;
    // SAFETY: all zero is a valid pidfd_info.
    let mut info: libc::pidfd_info = unsafe { std::mem::zeroed() };
    info.mask = EXIT;
    // SAFETY: the request takes a pidfd_info, which `info` is.
    let done = unsafe { libc::ioctl(fd.as_raw_fd(), libc::PIDFD_GET_INFO as _, &mut info) };
    (done == 0 && info.mask & EXIT != 0).then_some(info.exit_code)
}

/// A pair of connected packet sockets, close-on-exec.
pub fn channel() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    // SAFETY: `fds` has room for the two descriptors.
    check(unsafe {
        libc::socketpair(
            libc::AF_UNIX,
            libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC,
            0,
            fds.as_mut_ptr(),
        )
    })?;
    // SAFETY: the kernel just gave us these.
    Ok(unsafe { (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])) })
}

/// A pipe, close-on-exec, plus `flags`.
pub fn pipe(flags: i32) -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    // SAFETY: `fds` has room for the two descriptors.
    check(unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC | flags) })?;
    // SAFETY: the kernel just gave us these.
    Ok(unsafe { (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])) })
}

/// Most descriptors that go along with one message.
pub const DESCRIPTORS: usize = 4;

/// Sends one message, with descriptors if given, [`DESCRIPTORS`] at most.
pub fn send(to: RawFd, bytes: &[u8], fds: &[RawFd]) -> io::Result<usize> {
    if fds.len() > DESCRIPTORS {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut part = libc::iovec {
        iov_base: bytes.as_ptr() as *mut _,
        iov_len: bytes.len(),
    };
    let mut control = [0u64; 4];
    let size = size_of_val(fds) as u32;
    // SAFETY: all zero is a valid msghdr; what it points to outlives the call, and the one control message (16 bytes
    // and four descriptors at most) fits the 32 aligned bytes.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &mut part;
        message.msg_iovlen = 1;
        if !fds.is_empty() {
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(size) as _;
            let head = libc::CMSG_FIRSTHDR(&message);
            (*head).cmsg_level = libc::SOL_SOCKET;
            (*head).cmsg_type = libc::SCM_RIGHTS;
            (*head).cmsg_len = libc::CMSG_LEN(size) as _;
            std::ptr::copy_nonoverlapping(fds.as_ptr().cast::<u8>(), libc::CMSG_DATA(head), size as usize);
        }
        check(libc::sendmsg(to, &message, libc::MSG_NOSIGNAL) as i64).map(|sent| sent as usize)
    }
}

/// Receives one message without waiting: (length, a descriptor that came along). Length 0: the peers are gone.
pub fn receive(from: RawFd, bytes: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut part = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    let mut control = [0u64; 4];
    // SAFETY: as in `send`; a descriptor is taken only from a control message the kernel filled in.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(4) as _;
        let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
        let len = check(libc::recvmsg(from, &mut message, flags) as i64)? as usize;
        let head = libc::CMSG_FIRSTHDR(&message);
        let fd = (!head.is_null() && (*head).cmsg_type == libc::SCM_RIGHTS)
            .then(|| OwnedFd::from_raw_fd(libc::CMSG_DATA(head).cast::<RawFd>().read_unaligned()));
        Ok((len, fd))
    }
}

/// A forked process: the child gets 0.
pub fn fork() -> io::Result<u32> {
    // SAFETY: the shim has one thread, so the child may go on as the parent could.
    check(unsafe { libc::fork() }).map(|pid| pid as u32)
}

/// Forks a *sibling*: the new process is a child of our parent. The child gets 0. `flags` are CLONE_NEW*.
pub fn fork_sibling(flags: i32) -> io::Result<u32> {
    let args = libc::clone_args {
        flags: (libc::CLONE_PARENT | flags) as u64,
        ..clone_args()
    };
    // SAFETY: no stack and no CLONE_VM: the call behaves as fork in a process of one thread.
    let pid = check(unsafe { libc::syscall(libc::SYS_clone3, &args, size_of_val(&args)) })?;
    Ok(pid as u32)
}

fn clone_args() -> libc::clone_args {
    // SAFETY: all zero is valid: plain integers.
    unsafe { std::mem::zeroed() }
}

/// Ends this process at once, running nothing.
pub fn exit(code: i32) -> ! {
    // SAFETY: _exit has no preconditions.
    unsafe { libc::_exit(code) }
}

/// Closes every descriptor but stdio and these. A forked maker must not hold the shim's sockets: while one is open
/// the other side does not see that the shim died.
pub fn keep_only(keep: &[RawFd]) {
    let mut keep: Vec<u32> = keep.iter().filter_map(|fd| u32::try_from(*fd).ok()).collect();
    keep.sort_unstable();
    let mut from = 3;
    for fd in keep.into_iter().chain([u32::MAX]) {
        if fd > from {
            // SAFETY: no pointers. What owned these descriptors is never touched again: the caller does not return.
            unsafe { libc::syscall(libc::SYS_close_range, from, fd - 1, 0) };
        }
        from = from.max(fd.saturating_add(1));
    }
}

/// setns(2).
pub fn setns(fd: BorrowedFd, kinds: i32) -> io::Result<()> {
    // SAFETY: no pointers.
    check(unsafe { libc::setns(fd.as_raw_fd(), kinds) }).map(drop)
}

/// Joins the namespace at `path` of the one kind given.
pub fn join(path: &str, kind: i32) -> io::Result<()> {
    setns(File::open(path)?.as_fd(), kind)
}

/// The kind of file system a descriptor is on: `f_type` of statfs(2).
pub fn fs_type(fd: BorrowedFd) -> io::Result<libc::__fsword_t> {
    // SAFETY: all zero is a valid statfs for the call to fill.
    unsafe {
        let mut info: libc::statfs = std::mem::zeroed();
        check(libc::fstatfs(fd.as_raw_fd(), &mut info))?;
        Ok(info.f_type)
    }
}

/// Becomes root of the user namespace that was just joined.
pub fn become_root() -> io::Result<()> {
    // SAFETY: no pointers but null with a length of zero. setgroups may be denied there.
    unsafe {
        libc::setgroups(0, std::ptr::null());
        check(libc::setresgid(0, 0, 0))?;
        check(libc::setresuid(0, 0, 0)).map(drop)
    }
}

/// prctl(2) with one argument.
pub fn prctl(what: i32, value: u64) -> io::Result<()> {
    // SAFETY: used only with options whose argument is a plain number.
    check(unsafe { libc::prctl(what, value, 0, 0, 0) }).map(drop)
}

/// Names this process in the process list, 15 bytes at most.
pub fn prctl_name(name: &std::ffi::CStr) -> io::Result<()> {
    // SAFETY: a valid string.
    check(unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) }).map(drop)
}

/// A path for the kernel.
pub fn cpath(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)
}

/// Makes this process ready to become another program: no signal blocked, none ignored.
pub fn reset_signals() {
    // SAFETY: SIG_DFL is a valid handler and an all-zero set a valid mask; errors (SIGKILL, SIGSTOP) do not matter.
    unsafe {
        for signal in 1..=64 {
            libc::signal(signal, libc::SIG_DFL);
        }
        let none: libc::sigset_t = std::mem::zeroed();
        libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
    }
}

/// The number of a real (host) user or group for `id` inside a user namespace with these (inside, host, length) maps.
pub fn map_id(id: u32, maps: &[(u32, u32, u32)]) -> u32 {
    let found = maps
        .iter()
        .find(|(inside, _, len)| id.checked_sub(*inside).is_some_and(|at| at < *len));
    found.map_or(id, |(inside, host, _)| host.saturating_add(id - inside))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stat_of_this_process() {
        assert_eq!(
            stat_field(std::process::id(), 4),
            Some(u64::from(std::os::unix::process::parent_id()))
        );
        assert!(start_ticks(std::process::id()).unwrap() > 0);
        assert_eq!(start_ticks(0), None);
    }

    #[test]
    fn descriptors_travel() {
        let (a, b) = channel().unwrap();
        send(a.as_raw_fd(), b"x", &[a.as_raw_fd()]).unwrap();
        let mut bytes = [0; 8];
        let (len, fd) = receive(b.as_raw_fd(), &mut bytes).unwrap();
        assert_eq!((len, fd.is_some()), (1, true));
        drop((a, fd));
        assert_eq!(receive(b.as_raw_fd(), &mut bytes).unwrap().0, 0);
    }

    #[test]
    fn ids_map() {
        let maps = [(0, 100_000, 65_536)];
        assert_eq!(
            (map_id(0, &maps), map_id(1000, &maps), map_id(70_000, &maps)),
            (100_000, 101_000, 70_000)
        );
    }
}
