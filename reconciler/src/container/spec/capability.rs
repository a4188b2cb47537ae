//! Which capabilities a container holds (CRI `Capability`, capabilities(7)).

use std::collections::BTreeSet;

use oci_spec::runtime::{Capabilities, Capability, LinuxCapabilities};
use state::container::ContainerSecurity;

use super::{Result, SpecError};

/// In the order of their kernel numbers.
const ALL: [Capability; 41] = {
    use Capability::*;
    [
        Chown,
        DacOverride,
        DacReadSearch,
        Fowner,
        Fsetid,
        Kill,
        Setgid,
        Setuid,
        Setpcap,
        LinuxImmutable,
        NetBindService,
        NetBroadcast,
        NetAdmin,
        NetRaw,
        IpcLock,
        IpcOwner,
        SysModule,
        SysRawio,
        SysChroot,
        SysPtrace,
        SysPacct,
        SysAdmin,
        SysBoot,
        SysNice,
        SysResource,
        SysTime,
        SysTtyConfig,
        Mknod,
        Lease,
        AuditWrite,
        AuditControl,
        Setfcap,
        MacOverride,
        MacAdmin,
        Syslog,
        WakeAlarm,
        BlockSuspend,
        AuditRead,
        Perfmon,
        Bpf,
        CheckpointRestore,
    ]
};

/// What a container has when nothing is said.
const DEFAULT: [Capability; 14] = {
    use Capability::*;
    [
        Chown,
        DacOverride,
        Fsetid,
        Fowner,
        Mknod,
        NetRaw,
        Setgid,
        Setuid,
        Setfcap,
        Setpcap,
        NetBindService,
        SysChroot,
        Kill,
        AuditWrite,
    ]
};

/// A set of capabilities as the kernel writes it: bit n is capability n.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CapabilitySet(pub u64);

impl CapabilitySet {
    pub fn of(list: impl IntoIterator<Item = Capability>) -> Self {
        list.into_iter().fold(Self(0), |set, one| set.with(one))
    }

    pub fn contains(self, one: Capability) -> bool {
        self.0 & bit(one) != 0
    }

    pub fn with(self, one: Capability) -> Self {
        Self(self.0 | bit(one))
    }

    pub fn without(self, one: Capability) -> Self {
        Self(self.0 & !bit(one))
    }

    pub fn iter(self) -> impl Iterator<Item = Capability> {
        ALL.into_iter().filter(move |one| self.contains(*one))
    }

    fn oci(self) -> Capabilities {
        self.iter().collect()
    }
}

fn bit(one: Capability) -> u64 {
    ALL.iter().position(|other| *other == one).map_or(0, |n| 1 << n)
}

/// `NET_ADMIN`, in any case, with or without `CAP_`.
pub fn parse(name: &str) -> Option<Capability> {
    let upper = name.to_ascii_uppercase();
    upper.strip_prefix("CAP_").unwrap_or(&upper).parse().ok()
}

/// The bounding set of a container: the default, changed by add and drop in the CRI's order (`ALL` first, drop last).
///
/// `known` is what the daemon itself holds, the meaning of `ALL` and the whole set of a privileged container.
pub fn bounding(security: &ContainerSecurity, known: CapabilitySet) -> Result<CapabilitySet> {
    if security.privileged {
        return Ok(known);
    }
    let (add_all, add) = list("spec.security.addCapabilities", &security.add_capabilities)?;
    let (drop_all, drop) = list("spec.security.dropCapabilities", &security.drop_capabilities)?;
    let (_, ambient) = list(
        "spec.security.addAmbientCapabilities",
        &security.add_ambient_capabilities,
    )?;
    let mut set = CapabilitySet::of(DEFAULT);
    if add_all {
        set = known;
    }
    if drop_all {
        set = CapabilitySet::default();
    }
    set = add.into_iter().chain(ambient).fold(set, CapabilitySet::with);
    Ok(drop.into_iter().fold(set, CapabilitySet::without))
}

/// The five sets of the first process. Inheritable and ambient are empty but for `addAmbientCapabilities`.
pub fn sets(security: &ContainerSecurity, known: CapabilitySet) -> Result<LinuxCapabilities> {
    let all = bounding(security, known)?;
    let (ambient_all, ambient) = list(
        "spec.security.addAmbientCapabilities",
        &security.add_ambient_capabilities,
    )?;
    let ambient = if ambient_all {
        all
    } else {
        CapabilitySet(CapabilitySet::of(ambient).0 & all.0)
    };
    let mut sets = LinuxCapabilities::default();
    sets.set_bounding(Some(all.oci()))
        .set_permitted(Some(all.oci()))
        .set_effective(Some(all.oci()))
        .set_inheritable(Some(ambient.oci()))
        .set_ambient(Some(ambient.oci()));
    Ok(sets)
}

/// Is `ALL` in the list, and which others are?
fn list(field: &str, names: &[String]) -> Result<(bool, Vec<Capability>)> {
    let mut all = false;
    let mut others = BTreeSet::new();
    for (i, name) in names.iter().enumerate() {
        if name.eq_ignore_ascii_case("ALL") || name.eq_ignore_ascii_case("CAP_ALL") {
            all = true;
            continue;
        }
        let one = parse(name).ok_or_else(|| {
            SpecError::invalid(
                format!("{field}[{i}]"),
                format!("`{name}` is not a capability; see capabilities(7)"),
            )
        })?;
        others.insert(bit(one));
    }
    Ok((all, ALL.into_iter().filter(|one| others.contains(&bit(*one))).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known() -> CapabilitySet {
        CapabilitySet::of(ALL)
    }

    fn security(add: &[&str], drop: &[&str]) -> ContainerSecurity {
        let owned = |list: &[&str]| list.iter().map(|s| s.to_string()).collect();
        ContainerSecurity {
            add_capabilities: owned(add),
            drop_capabilities: owned(drop),
            ..Default::default()
        }
    }

    #[test]
    fn numbers_are_the_kernels() {
        assert_eq!(bit(Capability::Chown), 1);
        assert_eq!(bit(Capability::SysAdmin), 1 << 21);
        assert_eq!(bit(Capability::Syslog), 1 << 34);
        assert_eq!(bit(Capability::CheckpointRestore), 1 << 40);
    }

    #[test]
    fn add_and_drop_in_the_order_of_the_cri() {
        use Capability::*;
        let of = |add: &[&str], drop: &[&str]| bounding(&security(add, drop), known()).unwrap();
        let default = CapabilitySet::of(DEFAULT);
        for (add, drop, want) in [
            (&[][..], &[][..], default),
            (&["NET_ADMIN"][..], &[][..], default.with(NetAdmin)),
            (&["cap_net_admin"][..], &["ALL"][..], CapabilitySet::of([NetAdmin])),
            (&["ALL"][..], &[][..], known()),
            (&["all"][..], &["CHOWN"][..], known().without(Chown)),
            (&["ALL", "BPF"][..], &["all"][..], CapabilitySet::of([Bpf])),
            (&["KILL"][..], &["KILL"][..], default.without(Kill)),
        ] {
            assert_eq!(of(add, drop), want, "{add:?} {drop:?}");
        }
        let few = CapabilitySet::of([Chown, Kill]);
        assert_eq!(bounding(&security(&["ALL"], &[]), few).unwrap(), few);
        let error = bounding(&security(&["KILL", "FLY"], &[]), known())
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("spec.security.addCapabilities[1]: `FLY`"), "{error}");
    }

    #[test]
    fn ambient_ones_are_in_all_five_sets() {
        let mut wish = security(&[], &["ALL"]);
        wish.add_ambient_capabilities = vec!["NET_BIND_SERVICE".into()];
        let sets = sets(&wish, known()).unwrap();
        let want: Capabilities = [Capability::NetBindService].into();
        for set in [
            sets.bounding(),
            sets.permitted(),
            sets.effective(),
            sets.inheritable(),
            sets.ambient(),
        ] {
            assert_eq!(set.as_ref(), Some(&want));
        }
        let none = super::sets(&security(&[], &[]), known()).unwrap();
        assert!(none.ambient().as_ref().unwrap().is_empty() && none.inheritable().as_ref().unwrap().is_empty());
    }
}
