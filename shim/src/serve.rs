//! Becoming a shim: out of the caller's session and into one's own, with the directory's lock, before the caller is
//! told that it may connect.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use shim::{EXIT_ALREADY_SERVED, Identity, LOCK, LOG, fault};

use crate::service::Service;
use crate::{cgroup, init, sys};

/// Longest log of a shim, bytes.
const LOG_LIMIT: usize = 256 << 10;

static LOGGED: AtomicUsize = AtomicUsize::new(0);

/// See the macro `note!`.
pub fn note(text: std::fmt::Arguments) {
    if LOGGED.fetch_add(128, Ordering::Relaxed) < LOG_LIMIT {
        // One write a line: children share the file.
        let line = format!("{} {text}\n", sys::now() / 1_000_000);
        let _ = io::stderr().write_all(line.as_bytes());
    }
}

struct Options {
    identity: Identity,
    dir: PathBuf,
    cgroup: Option<String>,
    oom_score: Option<i32>,
}

fn options(args: &[String]) -> Result<Options, String> {
    let (mut namespace, mut name, mut uid, mut dir, mut cgroup) = (None, None, None, None, None);
    let mut score: Option<String> = None;
    let mut words = args.iter();
    while let Some(word) = words.next() {
        let slot = match word.as_str() {
            "--namespace" => &mut namespace,
            "--name" | "--pod" => &mut name,
            "--id" => &mut uid,
            "--dir" => &mut dir,
            "--cgroup" => &mut cgroup,
            "--oom-score" => &mut score,
            other => return Err(format!("{other}: unknown option")),
        };
        *slot = Some(words.next().ok_or_else(|| format!("{word}: needs a value"))?.clone());
    }
    let dir = PathBuf::from(dir.ok_or("--dir: missing")?);
    if !dir.is_absolute() {
        return Err(format!("--dir: {} is not absolute", dir.display()));
    }
    let identity = Identity {
        namespace: namespace.unwrap_or_default(),
        name: name.unwrap_or_default(),
        uid: uid.unwrap_or_default(),
    };
    let wrong = |_| "--oom-score: not a number".to_owned();
    Ok(Options {
        identity,
        dir,
        cgroup,
        oom_score: score.map(|text| text.parse().map_err(wrong)).transpose()?,
    })
}

/// Forks the shim and returns once it listens (0), or could not.
pub fn run(args: &[String]) -> i32 {
    let options = match options(args) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("{error}");
            return 2;
        }
    };
    if let Err(error) = seal() {
        eprintln!("{error}; the shim runs from a writable file");
    }
    match detach(options) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("{error}");
            1
        }
    }
}

/// Executes this program again from a read-only mount of its own. A container that executes /proc/self/exe runs the
/// shim's file, and could else open that for writing and so become root on the host (CVE-2019-5736).
fn seal() -> io::Result<()> {
    let exe = Path::new("/proc/self/exe");
    if nix::sys::statvfs::statvfs(exe)?
        .flags()
        .contains(nix::sys::statvfs::FsFlags::ST_RDONLY)
    {
        return sys::prctl_name(c"reconcile-shim");
    }
    let args: Vec<CString> = std::env::args_os()
        .map(|arg| CString::new(arg.into_vec()))
        .collect::<Result<_, _>>()?;
    let argv: Vec<_> = args.iter().map(|arg| arg.as_ptr()).chain([std::ptr::null()]).collect();
    let fault = fault::value().map(|value| [fault::VARIABLE.as_bytes(), b"=", value.as_bytes()].concat());
    let fault = fault.map(CString::new).transpose()?;
    let env: Vec<_> = fault
        .iter()
        .map(|pair| pair.as_ptr())
        .chain([std::ptr::null()])
        .collect();
    // SAFETY: valid strings, a live mount_attr with its size, null-terminated arrays; the descriptor is the kernel's.
    unsafe {
        let flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC;
        let fd = sys::check(libc::syscall(
            libc::SYS_open_tree,
            libc::AT_FDCWD,
            sys::cpath(exe)?.as_ptr(),
            flags,
        ))?;
        let tree = OwnedFd::from_raw_fd(fd as i32);
        let mut attr: libc::mount_attr = std::mem::zeroed();
        attr.attr_set = libc::MOUNT_ATTR_RDONLY;
        let (fd, here, size) = (tree.as_raw_fd(), c"".as_ptr(), size_of_val(&attr));
        sys::check(libc::syscall(
            libc::SYS_mount_setattr,
            fd,
            here,
            libc::AT_EMPTY_PATH,
            &attr,
            size,
        ))?;
        libc::syscall(
            libc::SYS_execveat,
            fd,
            here,
            argv.as_ptr(),
            env.as_ptr(),
            libc::AT_EMPTY_PATH,
        );
    }
    Err(io::Error::last_os_error())
}

/// Twice forked: init is its parent, no terminal can become its own.
fn detach(options: Options) -> io::Result<i32> {
    let (ready, tell) = sys::pipe(0)?;
    if sys::fork()? == 0 {
        drop(ready);
        // SAFETY: no pointers.
        unsafe { libc::setsid() };
        if sys::fork()? != 0 {
            sys::exit(0);
        }
        let mut tell = Some(File::from(tell));
        let code = match serve(options, &mut tell) {
            Ok(code) => code,
            Err(error) => {
                note(format_args!("{error}"));
                1
            }
        };
        if let Some(mut tell) = tell {
            let _ = tell.write_all(&[code as u8]);
        }
        sys::exit(code);
    }
    drop(tell);
    let mut code = [1];
    // No byte: it died.
    let _ = File::from(ready).read_exact(&mut code);
    Ok(i32::from(code[0]))
}

fn serve(options: Options, tell: &mut Option<File>) -> io::Result<i32> {
    let dir = &options.dir;
    fs::create_dir_all(dir)?;
    // Held as a POSIX lock, which children do not inherit: a maker that outlives a shim must not seem to be one.
    let lock = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(dir.join(LOCK))?;
    // SAFETY: all zero is a valid flock; the kernel only reads it.
    let taken = unsafe {
        let mut whole: libc::flock = std::mem::zeroed();
        whole.l_type = libc::F_WRLCK as _;
        libc::fcntl(lock.as_raw_fd(), libc::F_SETLK, &whole)
    };
    if taken != 0 {
        return Ok(EXIT_ALREADY_SERVED);
    }
    stdio(dir)?;
    die_on_panic();
    ignore_signals();
    sys::prctl(libc::PR_SET_CHILD_SUBREAPER, 1)?;
    // Pages of the allocator go back to the system as soon as they are free.
    // SAFETY: plain numbers.
    unsafe {
        libc::umask(0o022);
        #[cfg(target_env = "gnu")]
        libc::mallopt(libc::M_MMAP_THRESHOLD, 64 << 10);
        #[cfg(target_env = "gnu")]
        libc::mallopt(libc::M_TRIM_THRESHOLD, 16 << 10);
    }
    if let Some(cgroup) = &options.cgroup {
        cgroup::enter(cgroup)?;
    }
    if let Some(score) = options.oom_score {
        init::oom_score(score);
    }
    std::env::set_current_dir("/")?;
    let mut service = Service::new(dir, options.identity.clone())?;
    service.adopt()?;
    if let Some(mut tell) = tell.take() {
        let _ = tell.write_all(&[0]);
    }
    service.run()?;
    Ok(0)
}

/// Nothing to read, nowhere to print, errors into the log.
fn stdio(dir: &Path) -> io::Result<()> {
    let log = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(dir.join(LOG))?;
    if log.metadata()?.len() > LOG_LIMIT as u64 {
        log.set_len(0)?;
    }
    let null = OpenOptions::new().read(true).write(true).open("/dev/null")?;
    for (from, to) in [(&null, 0), (&null, 1), (&log, 2)] {
        // SAFETY: live descriptors.
        sys::check(unsafe { libc::dup2(from.as_raw_fd(), to) })?;
    }
    Ok(())
}

/// A forked maker that panics must not unwind into the shim's loop.
fn die_on_panic() {
    std::panic::set_hook(Box::new(|panic| {
        note(format_args!("{panic}"));
        sys::exit(101);
    }));
}

/// Only SIGKILL and the daemon end a shim: the pod outlives whoever sends the rest.
fn ignore_signals() {
    for signal in [
        libc::SIGPIPE,
        libc::SIGTERM,
        libc::SIGINT,
        libc::SIGHUP,
        libc::SIGQUIT,
        libc::SIGUSR1,
        libc::SIGUSR2,
    ] {
        // SAFETY: SIG_IGN is a valid handler.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}
