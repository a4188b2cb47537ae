//! What a filter shall say: the default profile, and profiles from files (OCI config-linux `seccomp`, with the
//! conditions and `archMap` of the docker form).

use oci_spec::runtime::Capability;
use serde::Deserialize;

use super::assembler::{ALLOW, ERRNO, KILL_PROCESS, KILL_THREAD, LOG, TRACE, TRAP};
use super::names::Arch;
use super::{Result, SeccompError};
use crate::container::spec::capability::{self, CapabilitySet};

/// A profile file may have this many bytes.
pub const MAX_BYTES: usize = 1 << 20;
/// The kernel cuts an errno to this (`MAX_ERRNO`).
const MAX_ERRNO: u32 = 4095;

/// What a profile's conditions are asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Context {
    /// The container's bounding set.
    pub capabilities: CapabilitySet,
    /// Major and minor version.
    pub kernel: (u32, u32),
    pub arch: Arch,
    /// In the default profile, refuse i386 `socketcall` for sockets: a filter cannot see which family it asks for.
    pub deny_socketcall: bool,
}

/// Rules in the order in which they are asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// Kernel action (`SECCOMP_RET_*` with data) for what no rule names.
    pub default: u32,
    pub rules: Vec<Rule>,
    /// The native one first.
    pub archs: Vec<Arch>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pub names: Vec<String>,
    pub action: u32,
    /// All must hold. A rule without any answers what those with some left open.
    pub conds: Vec<Cond>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cond {
    /// 0 to 5.
    pub arg: u8,
    pub op: Op,
    pub value: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Ne,
    Lt,
    Le,
    Eq,
    Ge,
    Gt,
    /// (argument & mask) == value
    Masked(u64),
}

fn rule(names: &str, action: u32, conds: &[Cond]) -> Rule {
    Rule {
        names: names.split_whitespace().map(String::from).collect(),
        action,
        conds: conds.to_vec(),
    }
}

fn cond(arg: u8, op: Op, value: u64) -> Cond {
    Cond { arg, op, value }
}

/// The profile of `RuntimeDefault`.
pub fn runtime_default(cx: &Context) -> Profile {
    let eperm = ERRNO | libc::EPERM as u32;
    let mut rules = vec![rule(ALWAYS, ALLOW, &[])];
    // AF_ALG and AF_VSOCK. The kernel reads an int, so only 32 bits are compared: `1 << 32 | 40` is 40 too.
    for family in [38, 40] {
        rules.push(rule("socket", eperm, &[cond(0, Op::Masked(0xffff_ffff), family)]));
    }
    rules.push(rule("socket", ALLOW, &[]));
    for persona in [0, 0x8, 0x20000, 0x20008, 0xffff_ffff] {
        rules.push(rule("personality", ALLOW, &[cond(0, Op::Eq, persona)]));
    }
    if cx.kernel >= (4, 8) {
        rules.push(rule("process_vm_readv process_vm_writev ptrace", ALLOW, &[]));
    }
    rules.push(match cx.arch {
        Arch::X86_64 | Arch::X86 | Arch::X32 => rule("arch_prctl modify_ldt", ALLOW, &[]),
        Arch::Aarch64 | Arch::Arm => rule(ARM, ALLOW, &[]),
    });
    let granted = BY_CAPABILITY.iter().filter(|(one, _)| cx.capabilities.contains(*one));
    rules.extend(granted.map(|(_, names)| rule(names, ALLOW, &[])));
    if !cx.capabilities.contains(Capability::SysAdmin) {
        // No new namespaces. clone3 hides its flags behind a pointer: libc falls back to clone on ENOSYS.
        rules.push(rule("clone", ALLOW, &[cond(0, Op::Masked(0x7e02_0000), 0)]));
        rules.push(rule("clone3", ERRNO | libc::ENOSYS as u32, &[]));
    }
    if cx.deny_socketcall {
        for call in [1, 8] {
            rules.insert(0, rule("socketcall", eperm, &[cond(0, Op::Masked(0xffff_ffff), call)]));
        }
    }
    Profile {
        default: eperm,
        rules,
        archs: cx.arch.family().to_vec(),
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    default_action: String,
    default_errno_ret: Option<u32>,
    #[serde(default)]
    architectures: Vec<String>,
    #[serde(default)]
    arch_map: Vec<ArchMap>,
    #[serde(default)]
    listener_path: String,
    #[serde(default)]
    syscalls: Vec<Syscall>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ArchMap {
    architecture: String,
    #[serde(default)]
    sub_architectures: Option<Vec<String>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Syscall {
    #[serde(default)]
    name: String,
    #[serde(default)]
    names: Vec<String>,
    action: String,
    errno_ret: Option<u32>,
    #[serde(default)]
    args: Option<Vec<Arg>>,
    #[serde(default)]
    includes: Option<Filter>,
    #[serde(default)]
    excludes: Option<Filter>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Arg {
    index: u8,
    value: u64,
    #[serde(default)]
    value_two: u64,
    op: String,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase")]
struct Filter {
    #[serde(default)]
    caps: Vec<String>,
    #[serde(default)]
    arches: Vec<String>,
    #[serde(default)]
    min_kernel: String,
}

/// Reads a profile file. Calls of unknown names are left out, as other runtimes do: a profile is for many kernels.
///
/// # Errors
/// For what is no profile, and for what cannot be kept: `SCMP_ACT_NOTIFY` needs a listener that this runtime has not.
pub fn parse(json: &[u8], cx: &Context) -> Result<Profile> {
    if json.len() > MAX_BYTES {
        return Err(SeccompError::TooManyBytes { bytes: json.len() });
    }
    let file: File = serde_json::from_slice(json).map_err(|e| SeccompError::invalid("profile", e.to_string()))?;
    if !file.listener_path.is_empty() {
        return Err(SeccompError::invalid(
            "listenerPath",
            "a listener for notifications is not supported",
        ));
    }
    let mut rules = Vec::new();
    for (i, call) in file.syscalls.into_iter().enumerate() {
        call.rules(i, cx, &mut rules)?;
    }
    Ok(Profile {
        default: action("defaultAction", &file.default_action, file.default_errno_ret)?,
        rules,
        archs: archs(&file.architectures, &file.arch_map, cx)?,
    })
}

/// The native architecture always, then what the profile adds. Those of other machines are left out.
fn archs(list: &[String], map: &[ArchMap], cx: &Context) -> Result<Vec<Arch>> {
    if !list.is_empty() && !map.is_empty() {
        return Err(SeccompError::invalid(
            "architectures",
            "only one of architectures and archMap may be given",
        ));
    }
    let own = map
        .iter()
        .filter(|entry| Arch::from_oci(&entry.architecture) == Some(cx.arch));
    let subs = own.flat_map(|entry| entry.sub_architectures.iter().flatten());
    let mut archs = vec![cx.arch];
    for arch in list.iter().chain(subs).filter_map(|name| Arch::from_oci(name)) {
        if cx.arch.family().contains(&arch) && !archs.contains(&arch) {
            archs.push(arch);
        }
    }
    Ok(archs)
}

impl Syscall {
    fn rules(self, index: usize, cx: &Context, rules: &mut Vec<Rule>) -> Result<()> {
        let field = |name: &str| format!("syscalls[{index}].{name}");
        let includes = self.includes.unwrap_or_default();
        let excludes = self.excludes.unwrap_or_default();
        let action = action(&field("action"), &self.action, self.errno_ret)?;
        let names = match (self.name.is_empty(), self.names.is_empty()) {
            (false, false) => {
                return Err(SeccompError::invalid(
                    field("name"),
                    "only one of name and names may be given",
                ));
            }
            (false, true) => vec![self.name],
            _ => self.names,
        };
        let conds = self
            .args
            .unwrap_or_default()
            .iter()
            .map(|arg| arg.cond(&field("args")))
            .collect::<Result<Vec<_>>>()?;
        if !includes.all_hold(&field("includes"), cx)? || excludes.any_holds(&field("excludes"), cx)? {
            return Ok(());
        }
        // Two comparisons of one argument are alternatives, as every runtime reads them.
        let twice = conds
            .iter()
            .enumerate()
            .any(|(i, a)| conds[..i].iter().any(|b| a.arg == b.arg));
        if twice {
            rules.extend(conds.into_iter().map(|one| Rule {
                names: names.clone(),
                action,
                conds: vec![one],
            }));
        } else {
            rules.push(Rule { names, action, conds });
        }
        Ok(())
    }
}

impl Arg {
    fn cond(&self, field: &str) -> Result<Cond> {
        if self.index > 5 {
            return Err(SeccompError::invalid(
                field,
                format!("index {} is not from 0 to 5", self.index),
            ));
        }
        let (op, value) = match self.op.as_str() {
            "SCMP_CMP_NE" => (Op::Ne, self.value),
            "SCMP_CMP_LT" => (Op::Lt, self.value),
            "SCMP_CMP_LE" => (Op::Le, self.value),
            "SCMP_CMP_EQ" => (Op::Eq, self.value),
            "SCMP_CMP_GE" => (Op::Ge, self.value),
            "SCMP_CMP_GT" => (Op::Gt, self.value),
            "SCMP_CMP_MASKED_EQ" => (Op::Masked(self.value), self.value_two),
            other => return Err(SeccompError::invalid(field, format!("`{other}` is not a comparison"))),
        };
        Ok(cond(self.index, op, value))
    }
}

impl Filter {
    fn all_hold(&self, field: &str, cx: &Context) -> Result<bool> {
        let capabilities = self.caps.iter().all(|name| holds(name, cx));
        let arches = self.arches.is_empty() || self.arches.iter().any(|name| name == cx.arch.go_name());
        Ok(capabilities && arches && self.kernel(field)?.is_none_or(|min| cx.kernel >= min))
    }

    fn any_holds(&self, field: &str, cx: &Context) -> Result<bool> {
        let capabilities = self.caps.iter().any(|name| holds(name, cx));
        let arches = self.arches.iter().any(|name| name == cx.arch.go_name());
        Ok(capabilities || arches || self.kernel(field)?.is_some_and(|min| cx.kernel >= min))
    }

    fn kernel(&self, field: &str) -> Result<Option<(u32, u32)>> {
        if self.min_kernel.is_empty() {
            return Ok(None);
        }
        let parts = self
            .min_kernel
            .split_once('.')
            .and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
        let wrong = || {
            SeccompError::invalid(
                format!("{field}.minKernel"),
                format!("`{}`: not as 4.8", self.min_kernel),
            )
        };
        parts.ok_or_else(wrong).map(Some)
    }
}

/// An unknown capability is held by nobody.
fn holds(name: &str, cx: &Context) -> bool {
    capability::parse(name).is_some_and(|one| cx.capabilities.contains(one))
}

fn action(field: &str, name: &str, errno: Option<u32>) -> Result<u32> {
    let data = errno.unwrap_or(libc::EPERM as u32);
    if data > MAX_ERRNO {
        return Err(SeccompError::invalid(
            field,
            format!("errno {data} is above {MAX_ERRNO}"),
        ));
    }
    Ok(match name {
        "SCMP_ACT_KILL" | "SCMP_ACT_KILL_THREAD" => KILL_THREAD,
        "SCMP_ACT_KILL_PROCESS" => KILL_PROCESS,
        "SCMP_ACT_TRAP" => TRAP,
        "SCMP_ACT_ERRNO" => ERRNO | data,
        "SCMP_ACT_TRACE" => TRACE | data,
        "SCMP_ACT_LOG" => LOG,
        "SCMP_ACT_ALLOW" => ALLOW,
        "SCMP_ACT_NOTIFY" => {
            return Err(SeccompError::invalid(
                field,
                "SCMP_ACT_NOTIFY is not supported: no listener",
            ));
        }
        other => return Err(SeccompError::invalid(field, format!("`{other}` is not an action"))),
    })
}

const ARM: &str = "arm_fadvise64_64 arm_sync_file_range sync_file_range2 breakpoint cacheflush set_tls";

const BY_CAPABILITY: [(Capability, &str); 14] = [
    (Capability::DacReadSearch, "open_by_handle_at"),
    (
        Capability::SysAdmin,
        "bpf clone clone3 fanotify_init fsconfig fsmount fsopen fspick lookup_dcookie mount mount_setattr move_mount \
         open_tree perf_event_open quotactl quotactl_fd setdomainname sethostname setns syslog umount umount2 unshare",
    ),
    (Capability::SysBoot, "reboot"),
    (Capability::SysChroot, "chroot"),
    (Capability::SysModule, "delete_module init_module finit_module"),
    (Capability::SysPacct, "acct"),
    (
        Capability::SysPtrace,
        "kcmp pidfd_getfd process_madvise process_vm_readv process_vm_writev ptrace",
    ),
    (Capability::SysRawio, "iopl ioperm"),
    (Capability::SysTime, "settimeofday stime clock_settime clock_settime64"),
    (Capability::SysTtyConfig, "vhangup"),
    (
        Capability::SysNice,
        "get_mempolicy mbind set_mempolicy set_mempolicy_home_node",
    ),
    (Capability::Syslog, "syslog"),
    (Capability::Bpf, "bpf"),
    (Capability::Perfmon, "perf_event_open"),
];

const ALWAYS: &str = "
    accept accept4 access adjtimex alarm bind brk cachestat capget capset chdir chmod chown chown32 clock_adjtime
    clock_adjtime64 clock_getres clock_getres_time64 clock_gettime clock_gettime64 clock_nanosleep
    clock_nanosleep_time64 close close_range connect copy_file_range creat dup dup2 dup3 epoll_create epoll_create1
    epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2 execve execveat exit
    exit_group faccessat faccessat2 fadvise64 fadvise64_64 fallocate fanotify_mark fchdir fchmod fchmodat fchmodat2
    fchown fchown32 fchownat fcntl fcntl64 fdatasync fgetxattr flistxattr flock fork fremovexattr fsetxattr fstat
    fstat64 fstatat64 fstatfs fstatfs64 fsync ftruncate ftruncate64 futex futex_requeue futex_time64 futex_wait
    futex_waitv futex_wake futimesat getcpu getcwd getdents getdents64 getegid getegid32 geteuid geteuid32 getgid
    getgid32 getgroups getgroups32 getitimer getpeername getpgid getpgrp getpid getppid getpriority getrandom
    getresgid getresgid32 getresuid getresuid32 getrlimit get_robust_list getrusage getsid getsockname getsockopt
    get_thread_area gettid gettimeofday getuid getuid32 getxattr getxattrat inotify_add_watch inotify_init
    inotify_init1 inotify_rm_watch io_cancel ioctl io_destroy io_getevents io_pgetevents io_pgetevents_time64
    ioprio_get ioprio_set io_setup io_submit ipc kill landlock_add_rule landlock_create_ruleset
    landlock_restrict_self lchown lchown32 lgetxattr link linkat listen listmount listxattr listxattrat llistxattr
    _llseek lremovexattr lseek lsetxattr lsm_get_self_attr lsm_list_modules lsm_set_self_attr lstat lstat64 madvise
    map_shadow_stack membarrier memfd_create memfd_secret mincore mkdir mkdirat mknod mknodat mlock mlock2 mlockall
    mmap mmap2 mprotect mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedreceive_time64 mq_timedsend
    mq_timedsend_time64 mq_unlink mremap mseal msgctl msgget msgrcv msgsnd msync munlock munlockall munmap
    name_to_handle_at nanosleep newfstatat _newselect open openat openat2 pause pidfd_open pidfd_send_signal pipe
    pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll ppoll_time64 prctl pread64 preadv preadv2 prlimit64
    process_mrelease pselect6 pselect6_time64 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv
    recv recvfrom recvmmsg recvmmsg_time64 recvmsg remap_file_pages removexattr removexattrat rename renameat
    renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn
    rt_sigsuspend rt_sigtimedwait rt_sigtimedwait_time64 rt_tgsigqueueinfo sched_getaffinity sched_getattr
    sched_getparam sched_get_priority_max sched_get_priority_min sched_getscheduler sched_rr_get_interval
    sched_rr_get_interval_time64 sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield
    seccomp select semctl semget semop semtimedop semtimedop_time64 send sendfile sendfile64 sendmmsg sendmsg sendto
    setfsgid setfsgid32 setfsuid setfsuid32 setgid setgid32 setgroups setgroups32 setitimer setpgid setpriority
    setregid setregid32 setresgid setresgid32 setresuid setresuid32 setreuid setreuid32 setrlimit set_robust_list
    setsid setsockopt set_thread_area set_tid_address setuid setuid32 setxattr setxattrat shmat shmctl shmdt shmget
    shutdown sigaltstack signalfd signalfd4 sigprocmask sigreturn socketcall socketpair splice stat stat64 statfs
    statfs64 statmount statx symlink symlinkat sync sync_file_range syncfs sysinfo tee tgkill time timer_create
    timer_delete timer_getoverrun timer_gettime timer_gettime64 timer_settime timer_settime64 timerfd_create
    timerfd_gettime timerfd_gettime64 timerfd_settime timerfd_settime64 times tkill truncate truncate64 ugetrlimit
    umask uname unlink unlinkat uretprobe utime utimensat utimensat_time64 utimes vfork vmsplice wait4 waitid
    waitpid write writev";
