//! The programs are checked thrice: against a plain reading of the rules, by a table derived by hand from the default
//! profile, and in the kernel.

use oci_spec::runtime::Capability;
use state::sandbox::Profile as Wish;

use super::assembler::*;
use super::names::{Arch, X32_BIT};
use super::profile::{Cond, Context, Op, Profile, Rule, parse, runtime_default};
use super::{SeccompError, compile, filter};
use crate::container::spec::capability::CapabilitySet;

const EPERM: u32 = ERRNO | 1;
const ENOSYS: u32 = ERRNO | 38;
const ARCHS: [Arch; 5] = [Arch::X86_64, Arch::X86, Arch::X32, Arch::Aarch64, Arch::Arm];

fn context(arch: Arch, capabilities: &[Capability]) -> Context {
    let capabilities = CapabilitySet::of(capabilities.iter().copied());
    Context {
        capabilities,
        kernel: (6, 1),
        arch,
        deny_socketcall: false,
    }
}

/// What the kernel would do with the program.
fn run(program: &[Insn], audit: u32, number: u32, args: [u64; 6]) -> u32 {
    let mut data = [number.to_le_bytes(), audit.to_le_bytes(), [0; 4], [0; 4]].concat();
    data.extend(args.iter().flat_map(|arg| arg.to_le_bytes()));
    let (mut at, mut a) = (0usize, 0u32);
    loop {
        let Insn { code, jt, jf, k } = program[at];
        at += 1;
        let mut jump = |holds: bool| at += usize::from(if holds { jt } else { jf });
        match code {
            LD => a = u32::from_le_bytes(data[k as usize..][..4].try_into().unwrap()),
            AND => a &= k,
            JA => at += k as usize,
            JEQ => jump(a == k),
            JGT => jump(a > k),
            JGE => jump(a >= k),
            RET => return k,
            other => panic!("instruction {other:#x}"),
        }
    }
}

fn holds(cond: &Cond, args: [u64; 6]) -> bool {
    let arg = args[usize::from(cond.arg)];
    match cond.op {
        Op::Eq => arg == cond.value,
        Op::Ne => arg != cond.value,
        Op::Lt => arg < cond.value,
        Op::Le => arg <= cond.value,
        Op::Gt => arg > cond.value,
        Op::Ge => arg >= cond.value,
        Op::Masked(mask) => arg & mask == cond.value,
    }
}

/// A plain reading of the rules.
fn expected(profile: &Profile, arch: Arch, number: u32, args: [u64; 6]) -> u32 {
    if !profile.archs.contains(&arch) {
        return KILL_PROCESS;
    }
    let names = |rule: &&Rule| rule.names.iter().any(|name| arch.number(name) == Some(number));
    let named: Vec<_> = profile.rules.iter().filter(names).collect();
    let first = named
        .iter()
        .filter(|r| !r.conds.is_empty())
        .find(|r| r.conds.iter().all(|c| holds(c, args)));
    if let Some(rule) = first.or(named.iter().find(|rule| rule.conds.is_empty())) {
        return rule.action;
    }
    let highest = profile
        .rules
        .iter()
        .flat_map(|r| &r.names)
        .filter_map(|name| arch.number(name))
        .max();
    match profile.default {
        ALLOW | LOG => profile.default,
        action if action & 0xffff_0000 == TRACE => action,
        action => {
            if highest.is_none_or(|highest| number > highest) {
                ENOSYS
            } else {
                action
            }
        }
    }
}

fn interesting_args() -> Vec<[u64; 6]> {
    let values = [
        0,
        1,
        8,
        37,
        38,
        39,
        40,
        41,
        0x20000,
        0x20008,
        0xffff_ffff,
        1 << 32,
        1 << 32 | 38,
        1 << 32 | 40,
    ];
    let more = [
        0x7e02_0000,
        0x0002_0000,
        0x1000_0000,
        0x0000_0080,
        u64::MAX,
        u64::MAX - 1,
        1 << 63,
    ];
    values
        .into_iter()
        .chain(more)
        .map(|v| [v, v >> 1, !v, v.rotate_left(32), 5, 6])
        .collect()
}

fn compare(profile: &Profile) -> usize {
    let program = assemble(profile).unwrap();
    let args = interesting_args();
    let mut cases = 0;
    for arch in ARCHS {
        let base = if arch == Arch::X32 { X32_BIT } else { 0 };
        for number in (0..560).chain([0xf0001, 0xf0002, 0xf0004, 0xf0005, 0xf0006, 0x3fff_ffff]) {
            let number = base + number;
            for args in &args {
                let got = run(&program, arch.audit(), number, *args);
                let want = expected(profile, arch, number, *args);
                assert_eq!(got, want, "{arch:?} {number:#x} {args:x?}");
                cases += 1;
            }
        }
    }
    assert_eq!(run(&program, 0x1234, 0, [0; 6]), KILL_PROCESS);
    cases
}

#[test]
fn the_default_profile_means_what_its_rules_say() {
    for arch in [Arch::X86_64, Arch::Aarch64] {
        for capabilities in [
            &[][..],
            &[Capability::SysAdmin, Capability::SysChroot][..],
            &[Capability::SysPtrace][..],
        ] {
            let profile = runtime_default(&context(arch, capabilities));
            assert!(compare(&profile) > 50_000);
            let length = assemble(&profile).unwrap().len();
            assert!(length < 800, "{length} instructions");
        }
    }
}

/// By hand, from the profile's description.
#[test]
fn the_default_profile_by_hand() {
    let plain = context(Arch::X86_64, &[]);
    let check = |cx: &Context, arch: Arch, name: &str, arg: u64, want: u32| {
        let program = assemble(&runtime_default(cx)).unwrap();
        let number = arch.number(name).unwrap();
        let got = run(&program, arch.audit(), number, [arg, 0, 0, 0, 0, 0]);
        assert_eq!(got, want, "{arch:?} {name}({arg:#x})");
    };
    for (name, arg, want) in [
        ("read", 0, ALLOW),
        ("openat2", 0, ALLOW),
        ("mseal", 0, ALLOW),
        ("mount", 0, EPERM),
        ("bpf", 0, EPERM),
        ("io_uring_setup", 0, EPERM),
        ("keyctl", 0, EPERM),
        ("unshare", 0, EPERM),
        ("chroot", 0, EPERM),
        ("clone3", 0, ENOSYS),
        ("clone", 0x11, ALLOW),
        ("clone", 0x1000_0011, EPERM),
        ("clone", 0x0200_0000, EPERM),
        ("socket", 2, ALLOW),
        ("socket", 39, ALLOW),
        ("socket", 45, ALLOW),
        ("socket", 38, EPERM),
        ("socket", 40, EPERM),
        ("socket", 1 << 32 | 40, EPERM),
        ("socket", 1 << 32 | 38, EPERM),
        ("personality", 0, ALLOW),
        ("personality", 0xffff_ffff, ALLOW),
        ("personality", 0x40000, EPERM),
        ("personality", 1 << 32, EPERM),
        ("ptrace", 0, ALLOW),
        ("arch_prctl", 0, ALLOW),
    ] {
        check(&plain, Arch::X86_64, name, arg, want);
    }
    for (arch, name, arg, want) in [
        (Arch::X86, "mount", 0, EPERM),
        (Arch::X86, "clone3", 0, ENOSYS),
        (Arch::X86, "socketcall", 1, ALLOW),
        (Arch::X86, "socket", 40, EPERM),
        (Arch::X32, "ioctl", 0, ALLOW),
        (Arch::X32, "mount", 0, EPERM),
        (Arch::X32, "socket", 40, EPERM),
    ] {
        check(&plain, arch, name, arg, want);
    }
    let old = Context {
        kernel: (4, 7),
        ..plain
    };
    check(&old, Arch::X86_64, "ptrace", 0, EPERM);
    let closed = Context {
        deny_socketcall: true,
        ..plain
    };
    for (call, want) in [(1, EPERM), (8, EPERM), (3, ALLOW), (1 << 32 | 1, EPERM)] {
        check(&closed, Arch::X86, "socketcall", call, want);
    }
    for (capability, name) in [
        (Capability::DacReadSearch, "open_by_handle_at"),
        (Capability::SysAdmin, "mount"),
        (Capability::SysAdmin, "clone3"),
        (Capability::SysBoot, "reboot"),
        (Capability::SysChroot, "chroot"),
        (Capability::SysModule, "finit_module"),
        (Capability::SysPacct, "acct"),
        (Capability::SysPtrace, "pidfd_getfd"),
        (Capability::SysRawio, "iopl"),
        (Capability::SysTime, "clock_settime"),
        (Capability::SysTtyConfig, "vhangup"),
        (Capability::SysNice, "mbind"),
        (Capability::Syslog, "syslog"),
        (Capability::Bpf, "bpf"),
        (Capability::Perfmon, "perf_event_open"),
    ] {
        check(&context(Arch::X86_64, &[capability]), Arch::X86_64, name, 0, ALLOW);
    }
    check(
        &context(Arch::X86_64, &[Capability::SysAdmin]),
        Arch::X86_64,
        "clone",
        0x1000_0000,
        ALLOW,
    );
    // Younger than the profile, and a gap below.
    let program = assemble(&runtime_default(&plain)).unwrap();
    assert_eq!(run(&program, Arch::X86_64.audit(), 500, [0; 6]), ENOSYS);
    assert_eq!(run(&program, Arch::X86_64.audit(), 400, [0; 6]), EPERM);
    assert_eq!(run(&program, Arch::X86_64.audit(), u32::MAX, [0; 6]), ENOSYS);
}

/// Every comparison against arguments around its value, alone and in chains, with trees of every size.
#[test]
fn random_profiles_mean_what_their_rules_say() {
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = |below: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed % below
    };
    let actions = [ALLOW, EPERM, ENOSYS, LOG, TRAP, KILL_PROCESS, TRACE | 7];
    let names = [
        "read",
        "write",
        "socket",
        "mount",
        "ioctl",
        "clone",
        "mq_notify",
        "openat",
        "getpid",
        "bpf",
    ];
    for _ in 0..12 {
        let archs = [
            &[Arch::X86_64][..],
            &[Arch::X86_64, Arch::X32],
            &[Arch::X86_64, Arch::X86, Arch::X32],
        ];
        let rules = (0..next(30)).map(|_| {
            let conds = (0..next(4)).map(|arg| {
                let value = [0, 38, 1 << 32, 0xffff_ffff, u64::MAX, 0x1_0000_0028][next(6) as usize];
                let mask = [0xff, 0xffff_ffff, u64::MAX, 0xff << 32][next(4) as usize];
                let op = [Op::Eq, Op::Ne, Op::Lt, Op::Le, Op::Gt, Op::Ge, Op::Masked(mask)][next(7) as usize];
                Cond {
                    arg: arg as u8,
                    op,
                    value,
                }
            });
            let conds: Vec<_> = conds.collect();
            let names = (0..1 + next(3)).map(|_| names[next(10) as usize].to_string()).collect();
            Rule {
                names,
                action: actions[next(7) as usize],
                conds,
            }
        });
        let rules = rules.collect();
        let profile = Profile {
            default: actions[next(7) as usize],
            rules,
            archs: archs[next(3) as usize].to_vec(),
        };
        compare(&profile);
    }
}

#[test]
fn a_profile_without_x32_kills_it() {
    let json = br#"{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["mount"],"action":"SCMP_ACT_ERRNO"}]}"#;
    let profile = parse(json, &context(Arch::X86_64, &[])).unwrap();
    let program = assemble(&profile).unwrap();
    let call = |number| run(&program, Arch::X86_64.audit(), number, [0; 6]);
    assert_eq!(
        (call(0), call(165), call(X32_BIT | 165), call(9999)),
        (ALLOW, EPERM, KILL_PROCESS, ALLOW)
    );
    assert_eq!(run(&program, Arch::X86.audit(), 0, [0; 6]), KILL_PROCESS);
}

#[test]
fn profile_files() {
    let json = br#"{
      "defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 38,
      "archMap": [
        {"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86", "SCMP_ARCH_X32"]},
        {"architecture": "SCMP_ARCH_AARCH64", "subArchitectures": ["SCMP_ARCH_ARM"]}
      ],
      "syscalls": [
        {"names": ["read", "no_such_call"], "action": "SCMP_ACT_ALLOW", "comment": "x"},
        {"name": "mount", "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_ADMIN"]}},
        {"names": ["bpf"], "action": "SCMP_ACT_ALLOW", "excludes": {"caps": ["CAP_SYS_ADMIN"]}},
        {"names": ["ptrace"], "action": "SCMP_ACT_ALLOW", "includes": {"minKernel": "6.2"}},
        {"names": ["kcmp"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["arm64"]}},
        {"names": ["acct"], "action": "SCMP_ACT_ERRNO", "errnoRet": 22},
        {"names": ["clone"], "action": "SCMP_ACT_ALLOW",
         "args": [{"index": 0, "value": 2114060288, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}]},
        {"names": ["socket"], "action": "SCMP_ACT_ALLOW",
         "args": [{"index": 0, "value": 1, "op": "SCMP_CMP_EQ"}, {"index": 0, "value": 2, "op": "SCMP_CMP_EQ"}]},
        {"names": ["kill"], "action": "SCMP_ACT_ALLOW",
         "args": [{"index": 0, "value": 1, "op": "SCMP_CMP_GT"}, {"index": 1, "value": 9, "op": "SCMP_CMP_NE"}]}
      ]
    }"#;
    let profile = parse(json, &context(Arch::X86_64, &[Capability::SysAdmin])).unwrap();
    assert_eq!(profile.archs, [Arch::X86_64, Arch::X86, Arch::X32]);
    compare(&profile);
    let program = assemble(&profile).unwrap();
    for (name, args, want) in [
        ("read", [0, 0], ALLOW),
        ("mount", [0, 0], ALLOW),
        ("bpf", [0, 0], ENOSYS),
        ("ptrace", [0, 0], ENOSYS),
        ("kcmp", [0, 0], ENOSYS),
        ("acct", [0, 0], ERRNO | 22),
        ("clone", [0x11, 0], ALLOW),
        ("clone", [0x1000_0000, 0], ENOSYS),
        ("socket", [1, 0], ALLOW),
        ("socket", [2, 0], ALLOW),
        ("socket", [3, 0], ENOSYS),
        ("kill", [2, 15], ALLOW),
        ("kill", [2, 9], ENOSYS),
        ("kill", [1, 15], ENOSYS),
    ] {
        let number = Arch::X86_64.number(name).unwrap();
        let got = run(&program, Arch::X86_64.audit(), number, [args[0], args[1], 0, 0, 0, 0]);
        assert_eq!(got, want, "{name} {args:?}");
    }
}

#[test]
fn bad_profile_files_are_refused_with_the_field() {
    let cx = context(Arch::X86_64, &[]);
    let call = |call: &str| format!(r#"{{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{call}]}}"#);
    for (json, text) in [
        ("{".into(), "profile: EOF"),
        ("{}".into(), "missing field `defaultAction`"),
        (
            r#"{"defaultAction":"SCMP_ACT_MAYBE"}"#.into(),
            "defaultAction: `SCMP_ACT_MAYBE`",
        ),
        (
            r#"{"defaultAction":"SCMP_ACT_ERRNO","defaultErrnoRet":5000}"#.into(),
            "defaultAction: errno 5000",
        ),
        (
            r#"{"defaultAction":"SCMP_ACT_ALLOW","listenerPath":"/x"}"#.into(),
            "listenerPath: ",
        ),
        (
            call(r#"{"names":["read"],"action":"SCMP_ACT_NOTIFY"}"#),
            "syscalls[0].action: SCMP_ACT_NOTIFY",
        ),
        (
            call(r#"{"name":"read","names":["read"],"action":"SCMP_ACT_LOG"}"#),
            "syscalls[0].name: only one",
        ),
        (
            call(r#"{"names":["read"],"action":"SCMP_ACT_LOG","args":[{"index":6,"value":0,"op":"SCMP_CMP_EQ"}]}"#),
            "syscalls[0].args: index 6",
        ),
        (
            call(r#"{"names":["read"],"action":"SCMP_ACT_LOG","args":[{"index":0,"value":0,"op":"EQ"}]}"#),
            "syscalls[0].args: `EQ`",
        ),
        (
            call(r#"{"names":["read"],"action":"SCMP_ACT_LOG","includes":{"minKernel":"new"}}"#),
            "syscalls[0].includes.minKernel: `new`",
        ),
    ] {
        let error = parse(json.as_bytes(), &cx).unwrap_err().to_string();
        assert!(error.contains(text), "{error} / {text}");
    }
    let huge = vec![b' '; super::profile::MAX_BYTES + 1];
    assert!(matches!(parse(&huge, &cx), Err(SeccompError::TooManyBytes { .. })));
    let arg = |n: u32| format!(r#"[{{"index":0,"value":{n},"op":"SCMP_CMP_EQ"}}]"#);
    let one = |n: u32| format!(r#"{{"names":["read"],"action":"SCMP_ACT_ALLOW","args":{}}}"#, arg(n));
    let many: Vec<_> = (0..2000).map(one).collect();
    let json = format!(
        r#"{{"defaultAction":"SCMP_ACT_ERRNO","syscalls":[{}]}}"#,
        many.join(",")
    );
    assert!(matches!(
        compile(&parse(json.as_bytes(), &cx).unwrap()),
        Err(SeccompError::TooLarge { .. })
    ));
}

#[test]
fn which_filter_a_container_gets() {
    let cx = context(Arch::NATIVE, &[]);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), r#"{"defaultAction":"SCMP_ACT_ALLOW"}"#).unwrap();
    let localhost = |path: &str| Wish::Localhost { reference: path.into() };
    let own = localhost(file.path().to_str().unwrap());
    assert!(filter(None, false, &cx).unwrap().is_none());
    assert!(filter(Some(&Wish::Unconfined), false, &cx).unwrap().is_none());
    assert!(filter(Some(&Wish::RuntimeDefault), true, &cx).unwrap().is_none());
    let first = filter(Some(&Wish::RuntimeDefault), false, &cx).unwrap().unwrap();
    let again = filter(Some(&Wish::RuntimeDefault), false, &cx).unwrap().unwrap();
    assert!(std::sync::Arc::ptr_eq(&first, &again) && first.len().is_multiple_of(8));
    let more = context(Arch::NATIVE, &[Capability::SysAdmin]);
    assert_ne!(
        first,
        filter(Some(&Wish::RuntimeDefault), false, &more).unwrap().unwrap()
    );
    let small = filter(Some(&own), false, &cx).unwrap().unwrap();
    std::fs::write(file.path(), r#"{"defaultAction":"SCMP_ACT_LOG"}"#).unwrap();
    assert_ne!(
        small,
        filter(Some(&own), false, &cx).unwrap().unwrap(),
        "a changed file is read anew"
    );
    for path in ["relative.json", "/no/such/profile.json", "/tmp"] {
        assert!(filter(Some(&localhost(path)), false, &cx).is_err(), "{path}");
    }
}

/// The kernel's own answers, in a child that loads the filter.
#[cfg(target_arch = "x86_64")]
#[test]
fn the_kernel_obeys_the_default_profile() {
    let cx = Context {
        kernel: (6, 1),
        ..context(Arch::X86_64, &[])
    };
    let program = compile(&runtime_default(&cx)).unwrap();
    let answers = in_child(&program, || {
        // SAFETY: calls with plain numbers as arguments; what is denied is never carried out.
        unsafe {
            [
                call(libc::SYS_socket, [libc::AF_INET as i64, libc::SOCK_STREAM as i64]),
                call(libc::SYS_socket, [38, libc::SOCK_SEQPACKET as i64]),
                call(libc::SYS_socket, [40, libc::SOCK_STREAM as i64]),
                call(libc::SYS_socket, [1 << 32 | 40, libc::SOCK_STREAM as i64]),
                call(libc::SYS_clone3, [0, 0]),
                call(libc::SYS_clone, [libc::CLONE_NEWUSER as i64, 0]),
                call(libc::SYS_mount, [0, 0]),
                call(libc::SYS_io_uring_setup, [0, 0]),
                call(libc::SYS_personality, [0xffff_ffff, 0]),
                call(libc::SYS_personality, [0x40000, 0]),
                call(9999, [0, 0]),
                int80(20),
                int80(21),
                int80(435),
            ]
        }
    });
    let zero_or_more = |n: i64| if n >= 0 { 0 } else { n };
    let got = answers.map(zero_or_more);
    let (eperm, enosys) = (-1, -38);
    let want = [
        0, eperm, eperm, eperm, enosys, eperm, eperm, eperm, 0, eperm, enosys, 0, eperm, enosys,
    ];
    assert_eq!(got, want, "{answers:?}");
}

#[cfg(target_arch = "x86_64")]
unsafe fn call(number: i64, args: [i64; 2]) -> i64 {
    // SAFETY: the caller's; a negated errno as the kernel gives it.
    unsafe {
        match libc::syscall(number, args[0], args[1], 0, 0, 0) {
            -1 => -i64::from(*libc::__errno_location()),
            n => n,
        }
    }
}

/// A call by the i386 entry, with whatever is in its argument registers.
#[cfg(target_arch = "x86_64")]
unsafe fn int80(number: i64) -> i64 {
    let mut answer = number;
    // SAFETY: the filter answers, or it is getpid.
    unsafe {
        std::arch::asm!("int 0x80", inlateout("rax") answer, out("r8") _, out("r9") _, out("r10") _, out("r11") _);
    }
    i64::from(answer as i32)
}

#[cfg(target_arch = "x86_64")]
fn in_child<const N: usize>(program: &[u8], calls: impl Fn() -> [i64; N]) -> [i64; N] {
    use std::io::Read;
    use std::os::fd::{AsRawFd, FromRawFd};
    let mut ends = [0; 2];
    // SAFETY: an array of two.
    assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
    // SAFETY: just opened, ours alone.
    let (mut reader, writer) = unsafe { (std::fs::File::from_raw_fd(ends[0]), std::fs::File::from_raw_fd(ends[1])) };
    let fprog = libc::sock_fprog {
        len: (program.len() / 8) as u16,
        filter: program.as_ptr() as *mut libc::sock_filter,
    };
    // SAFETY: the child makes system calls only, touches no lock and ends by _exit.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: as above; `fprog` points to the parent's bytes, copied by the fork.
        unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
            if libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &fprog) != 0 {
                libc::_exit(1);
            }
            let answers = calls();
            libc::write(writer.as_raw_fd(), answers.as_ptr().cast(), size_of_val(&answers));
            libc::_exit(0);
        }
    }
    assert!(pid > 0);
    drop(writer);
    let mut bytes = Vec::new();
    reader.read_to_end(&mut bytes).unwrap();
    let mut status = 0;
    // SAFETY: our own child.
    unsafe { libc::waitpid(pid, &mut status, 0) };
    assert_eq!(status, 0, "the child's wait status");
    let words: Vec<_> = bytes
        .chunks(8)
        .map(|word| i64::from_ne_bytes(word.try_into().unwrap()))
        .collect();
    words.try_into().unwrap()
}
