//! The last step of a container's first process and of every exec: from root with everything to the user, groups,
//! capabilities, seccomp filter and program that the OCI process names. Both take the same road, so an exec can never
//! have more than the container.
//!
//! ```text
//! mounts, terminal, cwd made, root sealed → keyring, labels, umask → seccomp (if privileges may be gained later) →
//! bounding set → groups, gid, uid → capabilities → no_new_privs → cwd entered → program found → seccomp (if not) →
//! execve
//! ```

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libcontainer::workload::{Executor, ExecutorError, ExecutorSetEnvsError, ExecutorValidationError};
use oci_spec::runtime::{Capabilities, Process, Spec};

use crate::inside::Root;
use crate::mounts::Mounts;
use crate::sys::{self, check};

/// Longest `/etc/passwd` looked at for a home directory, bytes.
const PASSWD: u64 = 1 << 20;

/// What a process is to become.
#[derive(Clone)]
pub struct Become {
    pub process: Process,
    /// An array of sock_filter.
    pub seccomp: Option<Vec<u8>>,
    /// Close-on-exec packet socket that hears of a failure, and gets the terminal.
    pub channel: RawFd,
    /// The container's first process: its mounts are still to be put in place, and its terminal is /dev/console too.
    pub first: Option<Arc<Mounts>>,
}

/// Messages on the channel between the shim and the processes it makes.
pub mod message {
    /// The process exists: pid u32, start ticks u64, time i64, little-endian.
    pub const MADE: u8 = b'P';
    /// It failed; the text says why.
    pub const ERROR: u8 = b'E';
    /// Comes with the controlling end of its terminal.
    pub const TERMINAL: u8 = b'T';
    /// An OCI runtime's program has started it; the built-in way closes the channel at execve instead.
    pub const STARTED: u8 = b'S';
}

type Step<T = ()> = Result<T, String>;

/// Says what was being done.
fn told<E: std::fmt::Display>(what: impl std::fmt::Display) -> impl FnOnce(E) -> String {
    move |error| format!("{what}: {error}")
}

impl Executor for Become {
    fn exec(&self, _: &Spec) -> Result<(), ExecutorError> {
        self.run()
    }

    fn validate(&self, _: &Spec) -> Result<(), ExecutorValidationError> {
        Ok(())
    }

    fn setup_envs(&self, _: std::collections::HashMap<String, String>) -> Result<(), ExecutorSetEnvsError> {
        Ok(())
    }
}

impl Become {
    /// Becomes the program; on failure tells the channel and ends this process.
    pub fn run(&self) -> ! {
        let error = self.steps().err().unwrap_or_default();
        fail(self.channel, &error)
    }

    fn steps(&self) -> Step {
        let root = Root::open(Path::new("/")).map_err(told("open /"))?;
        if let Some(mounts) = &self.first {
            mounts.attach(&root)?;
        }
        if self.process.terminal().unwrap_or(false) {
            self.terminal().map_err(told("terminal"))?;
        }
        let cwd = self.process.cwd();
        if root.find(cwd).is_err() {
            root.make_dir(cwd)
                .map_err(told(format_args!("make working directory {}", cwd.display())))?;
        }
        if let Some(mounts) = &self.first {
            mounts.seal(&root)?;
        }
        drop(root);
        // SAFETY: asks for a new anonymous session keyring; no pointer but the null name.
        unsafe { libc::syscall(libc::SYS_keyctl, libc::KEYCTL_JOIN_SESSION_KEYRING, 0usize) };
        self.labels()?;
        let user = self.process.user();
        // SAFETY: no pointers.
        unsafe { libc::umask(user.umask().unwrap_or(0o022) as libc::mode_t) };
        let sealed = self.process.no_new_privileges().unwrap_or(false);
        if !sealed {
            self.filter()?;
        }
        self.bounding()?;
        self.identity()?;
        self.capabilities()?;
        if sealed {
            sys::prctl(libc::PR_SET_NO_NEW_PRIVS, 1).map_err(told("no_new_privs"))?;
        }
        std::env::set_current_dir(cwd).map_err(told(format_args!("enter working directory {}", cwd.display())))?;
        // A directory outside of the root shows as "(unreachable)...".
        if std::env::current_dir().is_ok_and(|dir| !dir.is_absolute()) {
            return Err(format!(
                "working directory {} is outside of the container",
                cwd.display()
            ));
        }
        self.execute(sealed)
    }

    fn execute(&self, sealed: bool) -> Step {
        let env = self.environment();
        let args = self.process.args().as_deref().unwrap_or_default();
        let name = args.first().ok_or("process.args: empty")?;
        let program = find(name, &env)?;
        let path = sys::cpath(&program).map_err(told("process.args"))?;
        let args = strings(args).map_err(told("process.args"))?;
        let env = strings(&env).map_err(told("process.env"))?;
        let (args, env) = (pointers(&args), pointers(&env));
        sys::reset_signals();
        // SAFETY: no pointers. Everything but stdio goes at execve, the channel too: that is its success.
        unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
        if sealed {
            self.filter()?;
        }
        // SAFETY: both arrays end in null and point into strings that live until the end of this function.
        unsafe { libc::execve(path.as_ptr(), args.as_ptr(), env.as_ptr()) };
        let error = io::Error::last_os_error();
        let hint = match error.raw_os_error() {
            Some(libc::ENOENT) => " (the file is there, its interpreter or loader is not)",
            Some(libc::ENOEXEC) => " (not a program for this machine, or a script without #!)",
            _ => "",
        };
        Err(format!("exec {}: {error}{hint}", program.display()))
    }

    /// The environment, with HOME as login(1) would set it unless it is given.
    fn environment(&self) -> Vec<String> {
        let mut env = self.process.env().clone().unwrap_or_default();
        if !env.iter().any(|entry| entry.starts_with("HOME=")) {
            env.push(format!(
                "HOME={}",
                home(self.process.user().uid()).unwrap_or_else(|| "/".into())
            ));
        }
        env
    }

    /// AppArmor and SELinux take effect at execve.
    fn labels(&self) -> Step {
        if let Some(profile) = self
            .process
            .apparmor_profile()
            .as_deref()
            .filter(|profile| !profile.is_empty())
        {
            let text = format!("exec {profile}");
            attribute("apparmor/exec", &text)
                .or_else(|_| attribute("exec", &text))
                .map_err(told(format_args!("apparmor profile {profile}")))?;
        }
        if let Some(label) = self
            .process
            .selinux_label()
            .as_deref()
            .filter(|label| !label.is_empty())
        {
            attribute("exec", label).map_err(told(format_args!("selinux label {label}")))?;
        }
        Ok(())
    }

    fn filter(&self) -> Step {
        let Some(bytes) = &self.seccomp else {
            return Ok(());
        };
        // The kernel wants 8-byte units, a Vec<u8> is not aligned for it.
        let program: Vec<u64> = bytes
            .chunks_exact(8)
            .map(|unit| u64::from_ne_bytes([unit[0], unit[1], unit[2], unit[3], unit[4], unit[5], unit[6], unit[7]]))
            .collect();
        if program.len() * 8 != bytes.len() {
            return Err(format!("seccomp.bpf: {} bytes are no whole instructions", bytes.len()));
        }
        let len = u16::try_from(program.len()).map_err(told("seccomp.bpf"))?;
        let filter = libc::sock_fprog {
            len,
            filter: program.as_ptr() as *mut libc::sock_filter,
        };
        // SAFETY: `filter` describes `program`, which outlives the call.
        check(unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &filter) })
            .map(drop)
            .map_err(told("load seccomp filter"))
    }

    fn bounding(&self) -> Step {
        let keep = bits(
            self.process
                .capabilities()
                .as_ref()
                .and_then(|sets| sets.bounding().as_ref()),
        );
        for cap in (0..64).filter(|cap| keep & (1 << cap) == 0) {
            match sys::prctl(libc::PR_CAPBSET_DROP, cap) {
                // The first number that the kernel has no capability for.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => break,
                result => result.map_err(told(format_args!("drop capability {cap} from the bounding set")))?,
            }
        }
        Ok(())
    }

    fn identity(&self) -> Step {
        let user = self.process.user();
        let groups = user.additional_gids().clone().unwrap_or_default();
        sys::prctl(libc::PR_SET_KEEPCAPS, 1).map_err(told("keep capabilities"))?;
        // SAFETY: the pointer and length are those of a live vector of gid_t.
        let set = check(unsafe { libc::setgroups(groups.len(), groups.as_ptr()) });
        // A user namespace may forbid setgroups; with none asked for nothing is lost.
        set.or_else(|error| if groups.is_empty() { Ok(0) } else { Err(error) })
            .map_err(told(format_args!("process.user.additionalGids {groups:?}")))?;
        let (uid, gid) = (user.uid(), user.gid());
        // SAFETY: no pointers.
        check(unsafe { libc::setresgid(gid, gid, gid) }).map_err(told(format_args!("process.user.gid {gid}")))?;
        // SAFETY: no pointers.
        check(unsafe { libc::setresuid(uid, uid, uid) }).map_err(told(format_args!("process.user.uid {uid}")))?;
        sys::prctl(libc::PR_SET_KEEPCAPS, 0).map_err(told("keep capabilities"))
    }

    fn capabilities(&self) -> Step {
        let sets = self.process.capabilities().as_ref();
        // What this machine's root does not have itself, nobody gets.
        let held = held().map_err(told("read capabilities"))?;
        let permitted = held & bits(sets.and_then(|sets| sets.permitted().as_ref()));
        let effective = permitted & bits(sets.and_then(|sets| sets.effective().as_ref()));
        let inheritable = permitted & bits(sets.and_then(|sets| sets.inheritable().as_ref()));
        let ambient = inheritable & bits(sets.and_then(|sets| sets.ambient().as_ref()));
        let mut data = [CapData::default(); 2];
        for (half, data) in data.iter_mut().enumerate() {
            let part = |set: u64| (set >> (32 * half)) as u32;
            *data = CapData {
                effective: part(effective),
                permitted: part(permitted),
                inheritable: part(inheritable),
            };
        }
        // SAFETY: the version 3 header goes with two data elements.
        check(unsafe { libc::syscall(libc::SYS_capset, &CAP_HEADER, &data) }).map_err(told("set capabilities"))?;
        let ambient_call = |what: i32, cap: u64| {
            // SAFETY: no pointers.
            check(unsafe { libc::prctl(libc::PR_CAP_AMBIENT, what as libc::c_ulong, cap, 0, 0) })
        };
        ambient_call(libc::PR_CAP_AMBIENT_CLEAR_ALL, 0).map_err(told("clear ambient capabilities"))?;
        for cap in (0..64).filter(|cap| ambient & (1 << cap) != 0) {
            ambient_call(libc::PR_CAP_AMBIENT_RAISE, cap).map_err(told(format_args!("ambient capability {cap}")))?;
        }
        Ok(())
    }

    /// A terminal of the container's own devpts, as stdio; its controlling end goes to the shim.
    fn terminal(&self) -> io::Result<()> {
        let flags = libc::O_NOCTTY | libc::O_CLOEXEC;
        let ours = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(flags)
            .open("/dev/ptmx")?;
        let meta = ours.metadata()?;
        if !meta.file_type().is_char_device() || meta.rdev() != libc::makedev(5, 2) {
            return Err(io::Error::other("/dev/ptmx is not the terminal multiplexer"));
        }
        let (mut number, unlock) = (0u32, 0i32);
        let raw = ours.as_raw_fd();
        // SAFETY: each request gets what it takes: an int to read, an unsigned to write, open flags.
        let theirs = unsafe {
            check(libc::ioctl(raw, libc::TIOCSPTLCK, &unlock))?;
            check(libc::ioctl(raw, libc::TIOCGPTN, &mut number))?;
            let fd = check(libc::ioctl(raw, libc::TIOCGPTPEER, libc::O_RDWR | flags))?;
            OwnedFd::from_raw_fd(fd as RawFd)
        };
        let theirs = File::from(theirs);
        if let Some(size) = self.process.console_size() {
            let cells = |n: u64| u16::try_from(n).unwrap_or(u16::MAX);
            let size = libc::winsize {
                ws_row: cells(size.height()),
                ws_col: cells(size.width()),
                ws_xpixel: 0,
                ws_ypixel: 0,
            };
            // SAFETY: the request takes a winsize.
            check(unsafe { libc::ioctl(raw, libc::TIOCSWINSZ, &size) })?;
        }
        std::os::unix::fs::fchown(&theirs, Some(self.process.user().uid()), None)?;
        if self.first.as_ref().is_some_and(|mounts| mounts.own_dev) {
            console(number)?;
        }
        // SAFETY: no pointers. setsid fails for the leader of a session, which is as well.
        unsafe {
            libc::setsid();
            check(libc::ioctl(theirs.as_raw_fd(), libc::TIOCSCTTY, 0))?;
            for fd in 0..3 {
                check(libc::dup2(theirs.as_raw_fd(), fd))?;
            }
        }
        sys::send(self.channel, &[message::TERMINAL], &[raw]).map(drop)
    }
}

/// Tells the channel and ends this process.
pub fn fail(channel: RawFd, error: &str) -> ! {
    let mut text = vec![message::ERROR];
    text.extend_from_slice(&error.as_bytes()[..error.len().min(4000)]);
    let _ = sys::send(channel, &text, &[]);
    sys::exit(1)
}

/// Binds the terminal to /dev/console.
fn console(number: u32) -> io::Result<()> {
    let flags = libc::O_NOFOLLOW | libc::O_CLOEXEC;
    let made = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(flags)
        .open("/dev/console");
    match made {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let source = CString::new(format!("/dev/pts/{number}"))?;
    let null = std::ptr::null();
    // SAFETY: two valid strings; a bind mount needs neither type nor data.
    check(unsafe {
        libc::mount(
            source.as_ptr(),
            c"/dev/console".as_ptr(),
            null,
            libc::MS_BIND,
            null.cast(),
        )
    })
    .map(drop)
}

/// Writes a file of /proc/self/attr, making sure that it is procfs's.
pub fn attribute(name: &str, text: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).open(format!("/proc/self/attr/{name}"))?;
    if sys::fs_type(file.as_fd())? != libc::PROC_SUPER_MAGIC {
        return Err(io::Error::other("/proc is not procfs"));
    }
    file.write_all(text.as_bytes())
}

/// Where the program is.
fn find(name: &str, env: &[String]) -> Step<PathBuf> {
    if name.contains('/') {
        return executable(Path::new(name))
            .map(|()| name.into())
            .map_err(told(format_args!("exec {name:?}")));
    }
    let path = env.iter().rev().find_map(|entry| entry.strip_prefix("PATH="));
    let path = path.ok_or_else(|| format!("exec {name:?}: it has no / and PATH is not set"))?;
    let mut refused = None;
    for dir in path.split(':') {
        let candidate = Path::new(if dir.is_empty() { "." } else { dir }).join(name);
        match executable(&candidate) {
            Ok(()) => return Ok(candidate),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => refused = refused.or(Some(format!("{}: {error}", candidate.display()))),
        }
    }
    let refused = refused.map(|refused| format!("; {refused}")).unwrap_or_default();
    Err(format!(
        "exec {name:?}: executable file not found in $PATH ({path}){refused}"
    ))
}

fn executable(path: &Path) -> io::Result<()> {
    let meta = fs::metadata(path)?;
    if meta.is_dir() {
        return Err(io::Error::from_raw_os_error(libc::EISDIR));
    }
    // SAFETY: a valid string. The effective ids count, as they will for execve.
    let allowed = unsafe { libc::faccessat(libc::AT_FDCWD, sys::cpath(path)?.as_ptr(), libc::X_OK, libc::AT_EACCESS) };
    if allowed != 0 || meta.permissions().mode() & 0o111 == 0 {
        return Err(io::Error::from_raw_os_error(libc::EACCES));
    }
    Ok(())
}

/// A user's home directory, by the container's own /etc/passwd.
fn home(uid: u32) -> Option<String> {
    let mut text = String::new();
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/etc/passwd")
        .ok()?;
    file.take(PASSWD).read_to_string(&mut text).ok()?;
    let entry = |line: &str| {
        let fields: Vec<&str> = line.split(':').collect();
        let ours = fields.get(2)?.parse() == Ok(uid);
        fields
            .get(5)
            .filter(|home| ours && home.starts_with('/'))
            .map(|home| (*home).to_owned())
    };
    text.lines().find_map(entry)
}

fn strings(list: &[String]) -> Result<Vec<CString>, std::ffi::NulError> {
    list.iter().map(|text| CString::new(text.as_str())).collect()
}

fn pointers(list: &[CString]) -> Vec<*const libc::c_char> {
    list.iter()
        .map(|text| text.as_ptr())
        .chain([std::ptr::null()])
        .collect()
}

#[repr(C)]
struct CapHeader {
    version: u32,
    pid: i32,
}

/// _LINUX_CAPABILITY_VERSION_3, this process.
const CAP_HEADER: CapHeader = CapHeader {
    version: 0x2008_0522,
    pid: 0,
};

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CapData {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Permitted capabilities of this process.
fn held() -> io::Result<u64> {
    let mut data = [CapData::default(); 2];
    // SAFETY: the version 3 header goes with two data elements.
    check(unsafe { libc::syscall(libc::SYS_capget, &CAP_HEADER, &mut data) })?;
    Ok(u64::from(data[0].permitted) | u64::from(data[1].permitted) << 32)
}

/// A set as the kernel numbers it.
pub fn bits(set: Option<&Capabilities>) -> u64 {
    set.into_iter()
        .flatten()
        .map(|cap| 1 << number(*cap))
        .fold(0, |all, bit: u64| all | bit)
}

fn number(cap: oci_spec::runtime::Capability) -> u32 {
    use oci_spec::runtime::Capability::*;
    match cap {
        Chown => 0,
        DacOverride => 1,
        DacReadSearch => 2,
        Fowner => 3,
        Fsetid => 4,
        Kill => 5,
        Setgid => 6,
        Setuid => 7,
        Setpcap => 8,
        LinuxImmutable => 9,
        NetBindService => 10,
        NetBroadcast => 11,
        NetAdmin => 12,
        NetRaw => 13,
        IpcLock => 14,
        IpcOwner => 15,
        SysModule => 16,
        SysRawio => 17,
        SysChroot => 18,
        SysPtrace => 19,
        SysPacct => 20,
        SysAdmin => 21,
        SysBoot => 22,
        SysNice => 23,
        SysResource => 24,
        SysTime => 25,
        SysTtyConfig => 26,
        Mknod => 27,
        Lease => 28,
        AuditWrite => 29,
        AuditControl => 30,
        Setfcap => 31,
        MacOverride => 32,
        MacAdmin => 33,
        Syslog => 34,
        WakeAlarm => 35,
        BlockSuspend => 36,
        AuditRead => 37,
        Perfmon => 38,
        Bpf => 39,
        CheckpointRestore => 40,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_or_the_places_named() {
        let env = ["PATH=/nowhere:/bin:/usr/bin".to_owned()];
        assert!(find("sh", &env).unwrap().ends_with("bin/sh"));
        let error = find("no-such", &env).unwrap_err();
        assert!(
            error.contains("\"no-such\"") && error.contains("/nowhere:/bin:/usr/bin"),
            "{error}"
        );
        assert!(find("/etc", &env).unwrap_err().contains("directory"));
        assert!(find("/etc/passwd", &env).unwrap_err().contains("denied"));
    }

    #[test]
    fn capabilities_have_the_kernels_numbers() {
        use oci_spec::runtime::Capability::*;
        let set = [Chown, SysAdmin, CheckpointRestore].into_iter().collect();
        assert_eq!(bits(Some(&set)), 1 | 1 << 21 | 1 << 40);
        assert_eq!(bits(None), 0);
    }
}
