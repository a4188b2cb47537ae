//! System calls by name, for each architecture that a process of this node may speak.

use std::collections::HashMap;
use std::sync::OnceLock;

/// An ABI in the sense of seccomp profiles. X32 shares its audit number with X86_64 and is told by bit 30.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Arch {
    X86_64,
    X86,
    X32,
    Aarch64,
    Arm,
}

pub const X32_BIT: u32 = 0x4000_0000;

/// The x32 calls that take another number than x86_64's plus the bit (asm/unistd_x32.h).
const X32_OWN: [&str; 36] = [
    "rt_sigaction",
    "rt_sigreturn",
    "ioctl",
    "readv",
    "writev",
    "recvfrom",
    "sendmsg",
    "recvmsg",
    "execve",
    "ptrace",
    "rt_sigpending",
    "rt_sigtimedwait",
    "rt_sigqueueinfo",
    "sigaltstack",
    "timer_create",
    "mq_notify",
    "kexec_load",
    "waitid",
    "set_robust_list",
    "get_robust_list",
    "vmsplice",
    "move_pages",
    "preadv",
    "pwritev",
    "rt_tgsigqueueinfo",
    "recvmmsg",
    "sendmmsg",
    "process_vm_readv",
    "process_vm_writev",
    "setsockopt",
    "getsockopt",
    "io_setup",
    "io_submit",
    "execveat",
    "preadv2",
    "pwritev2",
];
const X32_OWN_FIRST: u32 = 512;

/// arm's private calls (asm/unistd.h, `__ARM_NR_`).
const ARM_PRIVATE: [(&str, u32); 3] = [("breakpoint", 0xf0001), ("cacheflush", 0xf0002), ("set_tls", 0xf0005)];

impl Arch {
    /// The architecture of this program.
    pub const NATIVE: Arch = if cfg!(target_arch = "aarch64") {
        Arch::Aarch64
    } else {
        Arch::X86_64
    };

    /// Itself first, then those that the same kernel also runs.
    pub fn family(self) -> &'static [Arch] {
        match self {
            Arch::X86_64 | Arch::X86 | Arch::X32 => &[Arch::X86_64, Arch::X86, Arch::X32],
            Arch::Aarch64 | Arch::Arm => &[Arch::Aarch64, Arch::Arm],
        }
    }

    /// `AUDIT_ARCH_*` (linux/audit.h).
    pub fn audit(self) -> u32 {
        match self {
            Arch::X86_64 | Arch::X32 => 0xc000_003e,
            Arch::X86 => 0x4000_0003,
            Arch::Aarch64 => 0xc000_00b7,
            Arch::Arm => 0x4000_0028,
        }
    }

    /// `SCMP_ARCH_X86_64`; `None` for one that this node cannot run.
    pub fn from_oci(name: &str) -> Option<Arch> {
        Some(match name {
            "SCMP_ARCH_X86_64" => Arch::X86_64,
            "SCMP_ARCH_X86" => Arch::X86,
            "SCMP_ARCH_X32" => Arch::X32,
            "SCMP_ARCH_AARCH64" => Arch::Aarch64,
            "SCMP_ARCH_ARM" => Arch::Arm,
            _ => return None,
        })
    }

    /// What [`from_oci`](Arch::from_oci) reads.
    pub fn oci_name(self) -> &'static str {
        match self {
            Arch::X86_64 => "SCMP_ARCH_X86_64",
            Arch::X86 => "SCMP_ARCH_X86",
            Arch::X32 => "SCMP_ARCH_X32",
            Arch::Aarch64 => "SCMP_ARCH_AARCH64",
            Arch::Arm => "SCMP_ARCH_ARM",
        }
    }

    /// As `includes.arches` of a profile spells it.
    pub fn go_name(self) -> &'static str {
        match self {
            Arch::X86_64 => "amd64",
            Arch::X86 => "x86",
            Arch::X32 => "x32",
            Arch::Aarch64 => "arm64",
            Arch::Arm => "arm",
        }
    }

    /// The number of a call, with the x32 bit where it belongs; `None` if this architecture has no such call.
    pub fn number(self, name: &str) -> Option<u32> {
        match self {
            Arch::X32 => {
                let own = X32_OWN.iter().position(|other| *other == name);
                let number = own
                    .map(|n| X32_OWN_FIRST + n as u32)
                    .or_else(|| Arch::X86_64.number(name))?;
                Some(X32_BIT | number)
            }
            _ => self.table().get(name).copied(),
        }
    }

    fn table(self) -> &'static HashMap<&'static str, u32> {
        static TABLES: [OnceLock<HashMap<&'static str, u32>>; 4] = [const { OnceLock::new() }; 4];
        macro_rules! table {
            ($module:ident) => {{
                use syscalls::$module::Sysno;
                // `iter` of this crate leaves out the last one.
                let all = Sysno::iter().chain([Sysno::last()]);
                all.map(|call| (call.name(), call.id() as u32)).collect()
            }};
        }
        match self {
            Arch::X86_64 | Arch::X32 => TABLES[0].get_or_init(|| table!(x86_64)),
            Arch::X86 => TABLES[1].get_or_init(|| table!(x86)),
            Arch::Aarch64 => TABLES[2].get_or_init(|| table!(aarch64)),
            Arch::Arm => TABLES[3].get_or_init(|| {
                let mut table: HashMap<_, _> = table!(arm);
                table.extend(ARM_PRIVATE);
                table
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_the_kernels_headers() {
        for (arch, name, number) in [
            (Arch::X86_64, "read", Some(0)),
            (Arch::X86_64, "socket", Some(41)),
            (Arch::X86_64, "clone3", Some(435)),
            (Arch::X86_64, "mseal", Some(462)),
            (Arch::X86_64, "socketcall", None),
            (Arch::X86, "socketcall", Some(102)),
            (Arch::X86, "socket", Some(359)),
            (Arch::X32, "read", Some(X32_BIT)),
            (Arch::X32, "ioctl", Some(X32_BIT | 514)),
            (Arch::X32, "pwritev2", Some(X32_BIT | 547)),
            (Arch::Aarch64, "openat", Some(56)),
            (Arch::Aarch64, "open", None),
            (Arch::Arm, "send", Some(289)),
            (Arch::Arm, "set_tls", Some(0xf0005)),
        ] {
            assert_eq!(arch.number(name), number, "{arch:?} {name}");
        }
    }

    #[test]
    fn the_build_agrees_with_libc() {
        for (name, number) in [
            ("mount", libc::SYS_mount),
            ("clone", libc::SYS_clone),
            ("bpf", libc::SYS_bpf),
        ] {
            assert_eq!(Arch::NATIVE.number(name), Some(number as u32), "{name}");
        }
    }
}
