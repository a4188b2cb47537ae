//! The pause process: holds a pod's namespaces by being in them, and is init of a shared pid namespace.
//!
//! It is a program of a few dozen instructions, assembled below, wrapped in an ELF header at run time and executed
//! from a memfd: 8 kB of memory, no file on any disk. Its root is an empty read-only file system, so containers that
//! share its pid namespace find nothing behind /proc/1/root.
//!
//! ```text
//! shim ─fork─> maker: cgroup, user, net, ipc, uts ─fork sibling (new pid)─> mounts, capabilities, execveat(memfd)
//! ```

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use shim::api::PauseRequest;
use shim::record::{self, Start};

use crate::r#become::{attribute, fail, message};
use crate::sys::{self, check};
use crate::{cgroup, init};

// Waits for SIGTERM, SIGINT or SIGCHLD, all blocked before execve (a blocked signal reaches even the init of a pid
// namespace); reaps on the last, exits 0 on the others.
#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    ".pushsection .rodata.shim_pause, \"a\", @progbits",
    ".globl shim_pause_start, shim_pause_end",
    "shim_pause_start:",
    "mov edi, 15", // PR_SET_NAME
    "lea rsi, [rip + 4f]",
    "mov eax, 157", // prctl
    "syscall",
    "2: lea rdi, [rip + 5f]",
    "xor esi, esi",
    "xor edx, edx",
    "mov r10d, 8",
    "mov eax, 128", // rt_sigtimedwait
    "syscall",
    "cmp eax, 17", // SIGCHLD
    "je 3f",
    "test eax, eax",
    "js 2b", // interrupted
    "xor edi, edi",
    "mov eax, 231", // exit_group
    "syscall",
    "3: mov edi, -1",
    "xor esi, esi",
    "mov edx, 1", // WNOHANG
    "xor r10d, r10d",
    "mov eax, 61", // wait4
    "syscall",
    "test eax, eax",
    "jg 3b",
    "jmp 2b",
    "4: .asciz \"pause\"",
    ".balign 8",
    "5: .quad 0x14002", // SIGINT 2, SIGTERM 15, SIGCHLD 17, each at its number less one
    "shim_pause_end:",
    ".popsection",
);

#[cfg(target_arch = "aarch64")]
std::arch::global_asm!(
    ".pushsection .rodata.shim_pause, \"a\", @progbits",
    ".globl shim_pause_start, shim_pause_end",
    ".balign 8",
    "shim_pause_start:",
    "mov x0, #15", // PR_SET_NAME
    "adr x1, 4f",
    "mov x8, #167", // prctl
    "svc #0",
    "2: adr x0, 5f",
    "mov x1, #0",
    "mov x2, #0",
    "mov x3, #8",
    "mov x8, #137", // rt_sigtimedwait
    "svc #0",
    "cmp w0, #17", // SIGCHLD
    "b.eq 3f",
    "cmp w0, #0",
    "b.lt 2b", // interrupted
    "mov x0, #0",
    "mov x8, #94", // exit_group
    "svc #0",
    "3: mov x0, #-1",
    "mov x1, #0",
    "mov x2, #1", // WNOHANG
    "mov x3, #0",
    "mov x8, #260", // wait4
    "svc #0",
    "cmp x0, #0",
    "b.gt 3b",
    "b 2b",
    "4: .asciz \"pause\"",
    ".balign 8",
    "5: .quad 0x14002",
    "shim_pause_end:",
    ".popsection",
);

unsafe extern "C" {
    static shim_pause_start: u8;
    static shim_pause_end: u8;
}

/// Where the program is loaded.
const BASE: u64 = 0x40_0000;
/// ELF header and one program header.
const HEADERS: u64 = 64 + 56;

/// The whole program: one read-and-execute segment.
fn program() -> Vec<u8> {
    // SAFETY: both symbols bound one object that the assembler placed, start first.
    let code = unsafe {
        let (start, end) = (&raw const shim_pause_start, &raw const shim_pause_end);
        std::slice::from_raw_parts(start, end as usize - start as usize)
    };
    const MACHINE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
    let size = HEADERS + code.len() as u64;
    let mut elf = Vec::with_capacity(size as usize);
    elf.extend(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    elf.extend([2u16, MACHINE].iter().flat_map(|half| half.to_le_bytes()));
    elf.extend(1u32.to_le_bytes());
    // Entry, program headers, section headers, flags.
    elf.extend([BASE + HEADERS, 64, 0].iter().flat_map(|word| word.to_le_bytes()));
    elf.extend(0u32.to_le_bytes());
    elf.extend([64u16, 56, 1, 0, 0, 0].iter().flat_map(|half| half.to_le_bytes()));
    // PT_LOAD, readable and executable, of the whole file.
    elf.extend([1u32, 5].iter().flat_map(|word| word.to_le_bytes()));
    elf.extend(
        [0, BASE, BASE, size, size, 4096u64]
            .iter()
            .flat_map(|word| word.to_le_bytes()),
    );
    elf.extend(code);
    elf
}

/// In the forked child: makes the pause process as the shim's child, tells the channel, ends.
pub fn run(request: &PauseRequest, channel: &OwnedFd) -> ! {
    match steps(request, channel.as_raw_fd()) {
        Ok(()) => sys::exit(0),
        Err(error) => fail(channel.as_raw_fd(), &error),
    }
}

fn steps(request: &PauseRequest, channel: RawFd) -> Result<(), String> {
    let told = |what: &'static str| move |error: io::Error| format!("{what}: {error}");
    let program = memfd(&program()).map_err(told("make the pause program"))?;
    let held = sys::pipe(0).map_err(told("make a pipe"))?;
    if !request.cgroup.is_empty() {
        cgroup::enter(&request.cgroup).map_err(told("cgroup"))?;
    }
    init::oom_score(-998);
    let joins = [
        ("user", &request.user, libc::CLONE_NEWUSER),
        ("netns", &request.netns, libc::CLONE_NEWNET),
        ("ipc", &request.ipc, libc::CLONE_NEWIPC),
        ("uts", &request.uts, libc::CLONE_NEWUTS),
    ];
    for (name, path, kind) in joins.into_iter().filter(|(_, path, _)| !path.is_empty()) {
        sys::join(path, kind).map_err(|error| format!("{name} {path}: {error}"))?;
    }
    if !request.hostname.is_empty() {
        let name = &request.hostname;
        // SAFETY: pointer and length of a live string.
        check(unsafe { libc::sethostname(name.as_ptr().cast(), name.len()) }).map_err(told("hostname"))?;
    }
    let flags = libc::CLONE_NEWNS | if request.new_pid_ns { libc::CLONE_NEWPID } else { 0 };
    let pid = sys::fork_sibling(flags).map_err(told("fork"))?;
    if pid == 0 {
        drop(held.1);
        match inside(&program, &held.0, request) {
            Ok(never) => match never {},
            Err(error) => fail(channel, &format!("pause: {error}")),
        }
    }
    let start_ticks = sys::start_ticks(pid).ok_or("the pause process is gone already")?;
    let start = Start {
        pid,
        start_ticks,
        boot_id: sys::boot_id(),
        started_at: sys::now(),
    };
    let mut made = vec![message::MADE];
    made.extend(start.pid.to_le_bytes());
    made.extend(start.start_ticks.to_le_bytes());
    made.extend(start.started_at.to_le_bytes());
    sys::send(channel, &made, &[]).map_err(told("tell the shim"))?;
    record::write_start(request.record.as_ref(), &start).map_err(|error| error.to_string())?;
    // Lets it go on.
    File::from(held.1)
        .write_all(b"\n")
        .map_err(told("start the pause process"))
}

fn inside(program: &OwnedFd, held: &OwnedFd, request: &PauseRequest) -> io::Result<std::convert::Infallible> {
    let mut go = [0u8; 1];
    // SAFETY: one byte of room.
    if check(unsafe { libc::read(held.as_raw_fd(), go.as_mut_ptr().cast(), 1) } as i64)? != 1 {
        return Err(io::Error::other("not started"));
    }
    // SAFETY: no pointers. A session of its own.
    unsafe { libc::setsid() };
    if !request.user.is_empty() {
        sys::become_root()?;
    }
    if !request.process_label.is_empty() {
        attribute("exec", &request.process_label)?;
    }
    empty_root(&request.mount_label)?;
    for cap in 0..64 {
        if sys::prctl(libc::PR_CAPBSET_DROP, cap).is_err() {
            break;
        }
    }
    sys::prctl(libc::PR_SET_NO_NEW_PRIVS, 1)?;
    // SAFETY: a zeroed set is valid; these signals exist. What execve keeps: the mask.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGCHLD] {
            libc::sigaddset(&mut set, signal);
        }
        sys::reset_signals();
        libc::sigprocmask(libc::SIG_SETMASK, &set, std::ptr::null_mut());
    }
    let securebits = (libc::SECBIT_NOROOT | libc::SECBIT_NOROOT_LOCKED) as u64;
    // Without it root's execve would grant what the bounding set still had.
    sys::prctl(libc::PR_SET_SECUREBITS, securebits)?;
    let argv = [c"/pause".as_ptr(), std::ptr::null()];
    let env: [*const libc::c_char; 1] = [std::ptr::null()];
    // SAFETY: no pointers. All goes at execve, stdio too: a container could open it through /proc/1/fd.
    unsafe { libc::syscall(libc::SYS_close_range, 0, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    // SAFETY: null-terminated arrays of valid strings, an empty path that means the descriptor itself.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            program.as_raw_fd(),
            c"".as_ptr(),
            argv.as_ptr(),
            env.as_ptr(),
            libc::AT_EMPTY_PATH,
        )
    };
    Err(io::Error::last_os_error())
}

/// An empty, read-only root with a SELinux label, if any; this process has a mount namespace of its own.
fn empty_root(label: &str) -> io::Result<()> {
    let mount =
        |source: Option<&CString>, target: &CString, kind: Option<&CString>, flags: u64, data: Option<&CString>| {
            let pointer = |text: Option<&CString>| text.map_or(std::ptr::null(), |text| text.as_ptr());
            // SAFETY: valid strings or null.
            let done = unsafe {
                libc::mount(
                    pointer(source),
                    target.as_ptr(),
                    pointer(kind),
                    flags,
                    pointer(data).cast(),
                )
            };
            check(done).map(drop)
        };
    let (root, over, tmpfs) = (CString::from(c"/"), CString::from(c"/proc"), CString::from(c"tmpfs"));
    mount(None, &root, None, libc::MS_REC | libc::MS_PRIVATE, None)?;
    let flags = libc::MS_RDONLY | libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    let label = match label {
        "" => String::new(),
        label => format!(",context=\"{label}\""),
    };
    let options = CString::new(format!("mode=0555,size=4k,nr_inodes=1{label}"))?;
    mount(Some(&tmpfs), &over, Some(&tmpfs), flags, Some(&options))?;
    // SAFETY: valid strings. pivot_root(".", ".") stacks the old root on the new one; then it is let go.
    unsafe {
        check(libc::chdir(over.as_ptr()))?;
        check(libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()))?;
        check(libc::umount2(c".".as_ptr(), libc::MNT_DETACH))?;
        check(libc::chdir(root.as_ptr()))?;
    }
    Ok(())
}

fn memfd(bytes: &[u8]) -> io::Result<OwnedFd> {
    let make = |flags: u32| {
        // SAFETY: a valid name.
        check(unsafe { libc::memfd_create(c"pause".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | flags) })
    };
    // Kernels before 6.3 do not know MFD_EXEC and make everything executable.
    let fd = make(libc::MFD_EXEC).or_else(|_| make(0))?;
    // SAFETY: the kernel just gave us this descriptor.
    let mut file = File::from(unsafe { OwnedFd::from_raw_fd(fd as RawFd) });
    file.write_all(bytes)?;
    let seals = libc::F_SEAL_SEAL | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_WRITE;
    // SAFETY: no pointers.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) })?;
    // Writable descriptors make execve fail (ETXTBSY): go on with a read-only one.
    let read_only = File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    Ok(read_only.into())
}
