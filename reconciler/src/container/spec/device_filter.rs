//! The device rules as cgroup v2 has them: an eBPF program attached to the container's cgroup.
//!
//! cgroup v1 has a device controller with files; on v2 only a program of type BPF_PROG_TYPE_CGROUP_DEVICE can refuse
//! a device, and the runtime brings none along. Without it a container with MKNOD (a default capability) could make
//! and open the host's disks.
//!
//! [`program`] is pure; [`attach`] is to be called on the container's own cgroup before its first
//! process starts, and may be repeated: it leaves exactly the new program.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use oci_spec::runtime::{LinuxDeviceCgroup, LinuxDeviceType};

/// Opcodes of `struct bpf_insn` (linux/bpf.h).
const LDX_W: u8 = 0x61;
const MOV32_REG: u8 = 0xbc;
const MOV64: u8 = 0xb7;
const RSH32: u8 = 0x74;
const AND32: u8 = 0x54;
const JEQ: u8 = 0x15;
const JNE: u8 = 0x55;
const EXIT: u8 = 0x95;

/// BPF_DEVCG_DEV_* and BPF_DEVCG_ACC_*.
const BLOCK: i32 = 1;
const CHAR: i32 = 2;
const ALL_ACCESS: i32 = 1 | 2 | 4;

/// Registers: the answer, the context, then what was asked for.
const ANSWER: u8 = 0;
const CONTEXT: u8 = 1;
const KIND: u8 = 2;
const ACCESS: u8 = 3;
const MAJOR: u8 = 4;
const MINOR: u8 = 5;

fn insn(code: u8, to: u8, from: u8, offset: i16, value: i32) -> [u8; 8] {
    let (offset, value) = (offset.to_ne_bytes(), value.to_ne_bytes());
    [
        code,
        to | from << 4,
        offset[0],
        offset[1],
        value[0],
        value[1],
        value[2],
        value[3],
    ]
}

/// The program for rules of which the last that fits decides; what none fits is refused.
pub fn program(rules: &[LinuxDeviceCgroup]) -> Vec<u8> {
    let mut program = vec![
        // access_type: what is done in the upper half, the kind of device in the lower.
        insn(LDX_W, KIND, CONTEXT, 0, 0),
        insn(MOV32_REG, ACCESS, KIND, 0, 0),
        insn(RSH32, ACCESS, 0, 0, 16),
        insn(AND32, KIND, 0, 0, 0xffff),
        insn(LDX_W, MAJOR, CONTEXT, 4, 0),
        insn(LDX_W, MINOR, CONTEXT, 8, 0),
    ];
    let mut open = true;
    for rule in rules.iter().rev() {
        let tests = tests(rule);
        // Nothing gets past a rule that fits all; the kernel refuses programs with dead code.
        open = !tests.is_empty();
        program.extend(tests);
        program.extend(answer(rule.allow()));
        if !open {
            break;
        }
    }
    if open {
        program.extend(answer(false));
    }
    program.concat()
}

fn answer(allow: bool) -> [[u8; 8]; 2] {
    [insn(MOV64, ANSWER, 0, 0, allow.into()), insn(EXIT, 0, 0, 0, 0)]
}

/// Jumps past the rule's answer if it does not fit.
fn tests(rule: &LinuxDeviceCgroup) -> Vec<[u8; 8]> {
    let mut tests = Vec::new();
    let kind = match rule.typ() {
        Some(LinuxDeviceType::B) => Some(BLOCK),
        Some(LinuxDeviceType::C | LinuxDeviceType::U) => Some(CHAR),
        _ => None,
    };
    let number = |n: Option<i64>| n.and_then(|n| i32::try_from(n).ok()).filter(|n| *n >= 0);
    for (register, wanted) in [
        (KIND, kind),
        (MAJOR, number(rule.major())),
        (MINOR, number(rule.minor())),
    ] {
        tests.extend(wanted.map(|wanted| insn(JNE, register, 0, 0, wanted)));
    }
    let letters = rule.access().as_deref().unwrap_or_default();
    let access: i32 = [('m', 1), ('r', 2), ('w', 4)]
        .iter()
        .filter(|(c, _)| letters.contains(*c))
        .map(|(_, bit)| bit)
        .sum();
    if access != ALL_ACCESS {
        tests.push(insn(MOV32_REG, ANSWER, ACCESS, 0, 0));
        // All that is asked for must be allowed; any of it may be refused.
        if rule.allow() {
            tests.extend([
                insn(AND32, ANSWER, 0, 0, ALL_ACCESS & !access),
                insn(JNE, ANSWER, 0, 0, 0),
            ]);
        } else {
            tests.extend([insn(AND32, ANSWER, 0, 0, access), insn(JEQ, ANSWER, 0, 0, 0)]);
        }
    }
    let end = tests.len() + 2;
    for (i, test) in tests
        .iter_mut()
        .enumerate()
        .filter(|(_, test)| matches!(test[0], JNE | JEQ))
    {
        test[2..4].copy_from_slice(&((end - i - 1) as i16).to_ne_bytes());
    }
    tests
}

/// Commands and constants of bpf(2).
const PROG_LOAD: i64 = 5;
const PROG_ATTACH: i64 = 8;
const PROG_DETACH: i64 = 9;
const PROG_GET_FD_BY_ID: i64 = 13;
const PROG_QUERY: i64 = 16;
const TYPE_CGROUP_DEVICE: u32 = 15;
const ATTACH_CGROUP_DEVICE: u32 = 6;
const ALLOW_MULTI: u32 = 2;
/// Programs of a cgroup that are looked for: one, or two after a crash between the steps below.
const MAX_ATTACHED: usize = 64;

#[repr(C)]
#[derive(Default)]
struct Load {
    prog_type: u32,
    insn_count: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
}

#[repr(C)]
struct Attach {
    target: u32,
    program: u32,
    attach_type: u32,
    flags: u32,
}

#[repr(C)]
struct Query {
    target: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    ids: u64,
    count: u32,
    padding: u32,
}

/// Puts the program on a cgroup of the unified hierarchy, in place of what was there.
///
/// The programs of the cgroups above stay in force. Needs CAP_BPF or CAP_SYS_ADMIN.
pub fn attach(cgroup: &Path, program: &[u8]) -> io::Result<()> {
    let directory = File::open(cgroup)?;
    let target = directory.as_raw_fd() as u32;
    let old = attached(target)?;
    let new = load(program)?;
    let attach = |program: u32, flags| Attach {
        target,
        program,
        attach_type: ATTACH_CGROUP_DEVICE,
        flags,
    };
    bpf(PROG_ATTACH, &mut attach(new.as_raw_fd() as u32, ALLOW_MULTI))?;
    for id in old {
        let fd = bpf(PROG_GET_FD_BY_ID, &mut [id, 0, 0])?;
        // SAFETY: just opened by the kernel for us alone.
        let program = unsafe { OwnedFd::from_raw_fd(fd) };
        bpf(PROG_DETACH, &mut attach(program.as_raw_fd() as u32, 0))?;
    }
    Ok(())
}

fn load(program: &[u8]) -> io::Result<OwnedFd> {
    let license = c"Apache-2.0";
    let mut load = Load {
        prog_type: TYPE_CGROUP_DEVICE,
        insn_count: (program.len() / 8) as u32,
        insns: program.as_ptr() as u64,
        license: license.as_ptr() as u64,
        ..Default::default()
    };
    let fd = bpf(PROG_LOAD, &mut load)?;
    // SAFETY: just opened by the kernel for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Ids of the cgroup's own device programs.
fn attached(target: u32) -> io::Result<Vec<u32>> {
    let mut ids = [0u32; MAX_ATTACHED];
    let mut query = Query {
        target,
        attach_type: ATTACH_CGROUP_DEVICE,
        query_flags: 0,
        attach_flags: 0,
        ids: ids.as_mut_ptr() as u64,
        count: MAX_ATTACHED as u32,
        padding: 0,
    };
    bpf(PROG_QUERY, &mut query)?;
    Ok(ids[..(query.count as usize).min(MAX_ATTACHED)].to_vec())
}

fn bpf<T>(command: i64, attributes: &mut T) -> io::Result<i32> {
    // SAFETY: `attributes` is the start of the kernel's `union bpf_attr` for this command, and its size is told; what
    // it points to outlives the call.
    let answer = unsafe { libc::syscall(libc::SYS_bpf, command, attributes as *mut T, size_of::<T>()) };
    if answer < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(answer as i32)
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::process::Command;

    use super::*;

    fn rule(allow: bool, typ: Option<LinuxDeviceType>, numbers: [Option<i64>; 2], access: &str) -> LinuxDeviceCgroup {
        let mut rule = LinuxDeviceCgroup::default();
        rule.set_allow(allow)
            .set_typ(typ)
            .set_major(numbers[0])
            .set_minor(numbers[1]);
        rule.set_access(Some(access.into()));
        rule
    }

    /// A cgroup of our own in the unified hierarchy, wherever it is mounted.
    struct Cgroup(PathBuf);

    impl Cgroup {
        fn new() -> Self {
            let roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new);
            let root = roots.into_iter().find(|root| root.join("cgroup.controllers").exists());
            let path = root
                .expect("a cgroup2 mount")
                .join(format!("device-filter-{}", std::process::id()));
            std::fs::create_dir(&path).unwrap();
            Self(path)
        }

        fn run(&self, script: &str) -> String {
            let script = format!("echo $$ > {}/cgroup.procs || exit 1\n{script}", self.0.display());
            let output = Command::new("sh").args(["-c", &script]).output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        }
    }

    impl Drop for Cgroup {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir(&self.0);
        }
    }

    #[test]
    fn the_kernel_obeys() {
        let cgroup = Cgroup::new();
        let nodes = tempfile::tempdir().unwrap();
        let script = format!(
            "try() {{ if $1 2>/dev/null; then echo $2; fi; }}
            r() {{ true < $1; }}; w() {{ true > $1; }}; rw() {{ true <> $1; }}
            for d in null zero full random; do for m in r w rw; do try \"$m /dev/$d\" $d-$m; done; done
            try 'mknod {0}/c c 1 3' mknod-c; try 'mknod {0}/b b 7 0' mknod-b; rm -f {0}/*",
            nodes.path().display()
        );
        let (char, block) = (Some(LinuxDeviceType::C), Some(LinuxDeviceType::B));
        let deny = rule(false, None, [None; 2], "rwm");
        let cases = [
            (vec![rule(true, None, [None; 2], "rwm")], None),
            (vec![deny.clone()], Some("")),
            (vec![], Some("")),
            (
                vec![
                    deny.clone(),
                    rule(true, block, [None; 2], "m"),
                    rule(true, char, [Some(1), Some(3)], "rwm"),
                    rule(true, char, [Some(1), Some(5)], "r"),
                    rule(true, char, [Some(2), Some(7)], "rwm"),
                    rule(true, block, [Some(1), Some(7)], "rwm"),
                ],
                Some("null-r null-w null-rw zero-r mknod-c mknod-b"),
            ),
            (
                vec![
                    rule(true, None, [None; 2], "rwm"),
                    rule(false, char, [Some(1), Some(7)], "w"),
                    rule(false, char, [None; 2], "m"),
                ],
                Some("null-r null-w null-rw zero-r zero-w zero-rw full-r random-r random-w random-rw mknod-b"),
            ),
        ];
        let all = cgroup.run(&script);
        assert_eq!(all.lines().count(), 14, "without a filter: {all}");
        for (rules, want) in cases {
            attach(&cgroup.0, &program(&rules)).unwrap();
            let got = cgroup.run(&script).lines().collect::<Vec<_>>().join(" ");
            let want = want.map_or_else(|| all.lines().collect::<Vec<_>>().join(" "), String::from);
            assert_eq!(got, want, "{rules:?}");
            let target = File::open(&cgroup.0).unwrap();
            assert_eq!(
                attached(target.as_raw_fd() as u32).unwrap().len(),
                1,
                "only the new one stays"
            );
        }
    }
}
