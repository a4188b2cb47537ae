//! A profile in the OCI's own form (config-linux `seccomp`), for runtimes that compile it themselves.

use oci_spec::runtime::LinuxSeccomp;
use serde_json::{Value, json};

use super::assembler::{ALLOW, ERRNO, KILL_PROCESS, KILL_THREAD, LOG, TRACE, TRAP};
use super::profile::{Cond, Op, Profile, Rule};
use super::{Result, SeccompError};

/// Address families in blocks of equal bits, (mask, value): all below 64 but AF_ALG (38) and AF_VSOCK (40).
const FAMILIES: [(u32, u64); 8] = [
    (!31, 0),
    (!3, 32),
    (!1, 36),
    (!0, 39),
    (!0, 41),
    (!1, 42),
    (!3, 44),
    (!15, 48),
];

/// The default profile as its rules are meant. The OCI's rules have no order, so none may be the exception of another.
pub fn runtime_default(profile: &Profile) -> Result<LinuxSeccomp> {
    let mut profile = profile.clone();
    profile.rules.retain(|rule| rule.names != ["socket"]);
    let allow = |(mask, value): &(u32, u64)| Rule {
        names: vec!["socket".to_owned()],
        action: ALLOW,
        // The kernel reads an int: what stands above it must not tell one family from another.
        conds: vec![Cond {
            arg: 0,
            op: Op::Masked(u64::from(*mask)),
            value: *value,
        }],
    };
    profile.rules.extend(FAMILIES.iter().map(allow));
    from(&profile)
}

/// A profile that was read from a file, whose rules have no order either.
pub fn from(profile: &Profile) -> Result<LinuxSeccomp> {
    let rules: Vec<Value> = profile.rules.iter().map(rule).collect();
    let archs: Vec<&str> = profile.archs.iter().map(|arch| arch.oci_name()).collect();
    let (action, errno) = action(profile.default);
    let whole = json!({
        "defaultAction": action,
        "defaultErrnoRet": errno,
        "architectures": archs,
        "syscalls": rules,
    });
    serde_json::from_value(whole).map_err(|e| SeccompError::invalid("profile", e.to_string()))
}

fn rule(rule: &Rule) -> Value {
    let (action, errno) = action(rule.action);
    let args: Vec<Value> = rule.conds.iter().map(arg).collect();
    json!({
        "names": rule.names,
        "action": action,
        "errnoRet": errno,
        "args": (!args.is_empty()).then_some(args),
    })
}

fn arg(cond: &Cond) -> Value {
    let (op, value, second) = match cond.op {
        Op::Ne => ("SCMP_CMP_NE", cond.value, None),
        Op::Lt => ("SCMP_CMP_LT", cond.value, None),
        Op::Le => ("SCMP_CMP_LE", cond.value, None),
        Op::Eq => ("SCMP_CMP_EQ", cond.value, None),
        Op::Ge => ("SCMP_CMP_GE", cond.value, None),
        Op::Gt => ("SCMP_CMP_GT", cond.value, None),
        Op::Masked(mask) => ("SCMP_CMP_MASKED_EQ", mask, Some(cond.value)),
    };
    json!({ "index": cond.arg, "value": value, "valueTwo": second, "op": op })
}

/// The action's name, and its errno if it has one.
fn action(action: u32) -> (&'static str, Option<u32>) {
    let data = action & 0xffff;
    match action & !0xffff {
        ALLOW => ("SCMP_ACT_ALLOW", None),
        LOG => ("SCMP_ACT_LOG", None),
        TRACE => ("SCMP_ACT_TRACE", Some(data)),
        ERRNO => ("SCMP_ACT_ERRNO", Some(data)),
        TRAP => ("SCMP_ACT_TRAP", None),
        KILL_PROCESS => ("SCMP_ACT_KILL_PROCESS", None),
        KILL_THREAD => ("SCMP_ACT_KILL", None),
        // There is no other; what is unknown is not let through.
        _ => ("SCMP_ACT_KILL_PROCESS", None),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Arch;
    use super::super::profile::{self, Context};
    use super::*;
    use crate::container::spec::capability::CapabilitySet;

    fn cx() -> Context {
        Context {
            capabilities: CapabilitySet::default(),
            kernel: (6, 0),
            arch: Arch::X86_64,
            deny_socketcall: false,
        }
    }

    #[test]
    fn the_default_profile_allows_every_family_but_two() {
        let profile = serde_json::to_value(runtime_default(&profile::runtime_default(&cx())).unwrap()).unwrap();
        assert_eq!(profile["defaultAction"], "SCMP_ACT_ERRNO");
        assert_eq!(profile["defaultErrnoRet"], 1);
        assert_eq!(
            profile["architectures"],
            json!(["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"])
        );
        let rules = profile["syscalls"].as_array().unwrap();
        let of = |name: &str| rules.iter().filter(|rule| rule["names"][0] == name).collect::<Vec<_>>();
        let allowed = |family: u64| {
            of("socket").iter().any(|rule| {
                let arg = &rule["args"][0];
                assert_eq!(
                    (&rule["action"], &arg["op"]),
                    (&json!("SCMP_ACT_ALLOW"), &json!("SCMP_CMP_MASKED_EQ"))
                );
                family & arg["value"].as_u64().unwrap() == arg["valueTwo"].as_u64().unwrap()
            })
        };
        for family in 0..64 {
            for high in [0, 1 << 32] {
                assert_eq!(allowed(high | family), ![38, 40].contains(&family), "{family}");
            }
        }
        assert!(!allowed(64));
        assert_eq!(of("clone3")[0]["errnoRet"], 38);
        assert_eq!(of("clone")[0]["args"][0]["value"], 0x7e02_0000);
    }

    #[test]
    fn a_file_says_the_same_again() {
        let text = json!({
            "defaultAction": "SCMP_ACT_ALLOW",
            "syscalls": [
                { "names": ["mkdir"], "action": "SCMP_ACT_ERRNO", "errnoRet": 13 },
                { "names": ["kill"], "action": "SCMP_ACT_KILL_PROCESS",
                  "args": [{ "index": 1, "value": 9, "op": "SCMP_CMP_EQ" }] },
            ],
        });
        let read = profile::parse(text.to_string().as_bytes(), &cx()).unwrap();
        let again = serde_json::to_value(from(&read).unwrap()).unwrap();
        assert_eq!(again["defaultAction"], "SCMP_ACT_ALLOW");
        assert_eq!(again["syscalls"][0]["errnoRet"], 13);
        assert_eq!(again["syscalls"][1]["action"], "SCMP_ACT_KILL_PROCESS");
        assert_eq!(again["syscalls"][1]["args"][0]["value"], 9);
        assert_eq!(profile::parse(again.to_string().as_bytes(), &cx()).unwrap(), read);
    }
}
