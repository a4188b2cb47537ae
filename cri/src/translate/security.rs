//! Namespaces, profiles, labels and users: the parts that sandboxes and containers share.

use state::sandbox::{GroupsPolicy, IdMapping, NamespaceMode, Namespaces, Profile, SeLinux, UserNamespace};

use super::{absolute, known, name};
use crate::error::{Error, Result};
use crate::runtime::v1;

/// Highest user and group id (contract of the OCI process user, and of the kernel's -1 for "unchanged").
const ID_MAX: i64 = i32::MAX as i64;

fn mode(field: &str, value: i32) -> Result<NamespaceMode> {
    Ok(match known::<v1::NamespaceMode>(field, value)? {
        v1::NamespaceMode::Pod => NamespaceMode::Pod,
        v1::NamespaceMode::Container => NamespaceMode::Container,
        v1::NamespaceMode::Node => NamespaceMode::Node,
        v1::NamespaceMode::Target => NamespaceMode::Target,
    })
}

fn mode_to_proto(mode: NamespaceMode) -> i32 {
    match mode {
        NamespaceMode::Pod => v1::NamespaceMode::Pod,
        NamespaceMode::Container => v1::NamespaceMode::Container,
        NamespaceMode::Node => v1::NamespaceMode::Node,
        NamespaceMode::Target => v1::NamespaceMode::Target,
    }
    .into()
}

/// `NamespaceOption`; absent is all defaults. Network and ipc are shared by a pod or with the node, nothing else.
pub(crate) fn namespaces(field: &str, from: Option<&v1::NamespaceOption>) -> Result<Namespaces> {
    let Some(from) = from else {
        return Ok(Namespaces::default());
    };
    let shared = |part: &str, value: i32| {
        let field = format!("{field}.{part}");
        match mode(&field, value)? {
            mode @ (NamespaceMode::Pod | NamespaceMode::Node) => Ok(mode),
            _ => Err(Error::invalid(field, "must be POD or NODE")),
        }
    };
    let pid = mode(&format!("{field}.pid"), from.pid)?;
    if (pid == NamespaceMode::Target) == from.target_id.is_empty() {
        let problem = "names a container exactly if pid is TARGET";
        return Err(Error::invalid(format!("{field}.target_id"), problem));
    }
    Ok(Namespaces {
        network: shared("network", from.network)?,
        pid,
        ipc: shared("ipc", from.ipc)?,
        target_id: from.target_id.clone(),
        user: match &from.userns_options {
            Some(user) => user_namespace(&format!("{field}.userns_options"), user)?,
            None => None,
        },
    })
}

/// POD: one mapping each, which maps the container's root. NODE: no mapping; it means the same as absence but is kept.
fn user_namespace(field: &str, from: &v1::UserNamespace) -> Result<Option<UserNamespace>> {
    let mode = mode(&format!("{field}.mode"), from.mode)?;
    for (part, mappings) in [("uids", &from.uids), ("gids", &from.gids)] {
        let field = format!("{field}.{part}");
        match (mode, mappings.as_slice()) {
            (NamespaceMode::Node, []) => {}
            (NamespaceMode::Node, _) => return Err(Error::invalid(field, "must be empty if mode is NODE")),
            (NamespaceMode::Pod, [one]) => mapping(&field, one)?,
            (NamespaceMode::Pod, all) => {
                let problem = format!("needs exactly one mapping, {} were given", all.len());
                return Err(Error::invalid(field, problem));
            }
            _ => break,
        }
    }
    if !matches!(mode, NamespaceMode::Pod | NamespaceMode::Node) {
        return Err(Error::invalid(format!("{field}.mode"), "must be POD or NODE"));
    }
    Ok(Some(UserNamespace {
        mode,
        uids: id_mappings(&from.uids),
        gids: id_mappings(&from.gids),
    }))
}

fn mapping(field: &str, from: &v1::IdMapping) -> Result<()> {
    if from.length == 0 {
        return Err(Error::invalid(format!("{field}[0].length"), "must be at least 1"));
    }
    if from.container_id != 0 {
        return Err(Error::invalid(
            format!("{field}[0].container_id"),
            "must be 0: root has to be mapped",
        ));
    }
    if from.host_id.checked_add(from.length).is_none() {
        return Err(Error::invalid(
            format!("{field}[0].length"),
            "reaches past the highest id",
        ));
    }
    Ok(())
}

pub(crate) fn namespaces_to_proto(from: &Namespaces) -> v1::NamespaceOption {
    v1::NamespaceOption {
        network: mode_to_proto(from.network),
        pid: mode_to_proto(from.pid),
        ipc: mode_to_proto(from.ipc),
        target_id: from.target_id.clone(),
        userns_options: from.user.as_ref().map(|user| v1::UserNamespace {
            mode: mode_to_proto(user.mode),
            uids: id_mappings_to_proto(&user.uids),
            gids: id_mappings_to_proto(&user.gids),
        }),
    }
}

pub(crate) fn id_mappings(from: &[v1::IdMapping]) -> Vec<IdMapping> {
    let one = |m: &v1::IdMapping| IdMapping {
        host_id: m.host_id,
        container_id: m.container_id,
        length: m.length,
    };
    from.iter().map(one).collect()
}

pub(crate) fn id_mappings_to_proto(from: &[IdMapping]) -> Vec<v1::IdMapping> {
    let one = |m: &IdMapping| v1::IdMapping {
        host_id: m.host_id,
        container_id: m.container_id,
        length: m.length,
    };
    from.iter().map(one).collect()
}

/// Which of the two profile kinds: they differ in what a local reference is and in the deprecated text form.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProfileKind {
    Seccomp,
    AppArmor,
}

/// A security profile: the message if there is one, else the deprecated text (`text_field` names it).
pub(crate) fn profile(
    kind: ProfileKind,
    field: &str,
    from: Option<&v1::SecurityProfile>,
    text_field: &str,
    text: &str,
) -> Result<Option<Profile>> {
    use v1::security_profile::ProfileType;
    let Some(from) = from else {
        return profile_text(kind, text_field, text);
    };
    let reference_field = format!("{field}.localhost_ref");
    let chosen = known::<ProfileType>(&format!("{field}.profile_type"), from.profile_type)?;
    if chosen != ProfileType::Localhost && !from.localhost_ref.is_empty() {
        return Err(Error::invalid(
            reference_field,
            "must be empty unless profile_type is Localhost",
        ));
    }
    Ok(Some(match chosen {
        ProfileType::RuntimeDefault => Profile::RuntimeDefault,
        ProfileType::Unconfined => Profile::Unconfined,
        ProfileType::Localhost => localhost(kind, &reference_field, &from.localhost_ref)?,
    }))
}

fn localhost(kind: ProfileKind, field: &str, reference: &str) -> Result<Profile> {
    let reference = match kind {
        ProfileKind::Seccomp => reference,
        // Clients put the deprecated text's prefix into the message, too; containerd drops it there as well.
        ProfileKind::AppArmor => reference.strip_prefix("localhost/").unwrap_or(reference),
    };
    match kind {
        ProfileKind::Seccomp => absolute(field, reference)?,
        ProfileKind::AppArmor => name(field, reference)?,
    }
    Ok(Profile::Localhost {
        reference: reference.to_owned(),
    })
}

fn profile_text(kind: ProfileKind, field: &str, text: &str) -> Result<Option<Profile>> {
    Ok(match text {
        "" => None,
        "runtime/default" => Some(Profile::RuntimeDefault),
        "docker/default" if kind == ProfileKind::Seccomp => Some(Profile::RuntimeDefault),
        "unconfined" => Some(Profile::Unconfined),
        _ => match text.strip_prefix("localhost/") {
            Some(reference) => Some(localhost(kind, field, reference)?),
            None => {
                let problem = "must be runtime/default, unconfined or localhost/<profile>";
                return Err(Error::invalid(field, problem));
            }
        },
    })
}

pub(crate) fn selinux(from: Option<&v1::SeLinuxOption>) -> Option<SeLinux> {
    from.map(|from| SeLinux {
        user: from.user.clone(),
        role: from.role.clone(),
        kind: from.r#type.clone(),
        level: from.level.clone(),
    })
}

pub(crate) fn groups_policy(field: &str, value: i32) -> Result<GroupsPolicy> {
    Ok(match known::<v1::SupplementalGroupsPolicy>(field, value)? {
        v1::SupplementalGroupsPolicy::Merge => GroupsPolicy::Merge,
        v1::SupplementalGroupsPolicy::Strict => GroupsPolicy::Strict,
    })
}

/// Checks ids against the range that the OCI process user has.
pub(crate) fn ids<'a>(field: &str, values: impl IntoIterator<Item = &'a i64>) -> Result<()> {
    for value in values {
        if !(0..=ID_MAX).contains(value) {
            return Err(Error::invalid(field, format!("{value} is not between 0 and {ID_MAX}")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn userns(mode: v1::NamespaceMode, mappings: &[(u32, u32, u32)]) -> v1::NamespaceOption {
        let list: Vec<_> = mappings
            .iter()
            .map(|&(host_id, container_id, length)| v1::IdMapping {
                host_id,
                container_id,
                length,
            })
            .collect();
        v1::NamespaceOption {
            userns_options: Some(v1::UserNamespace {
                mode: mode.into(),
                uids: list.clone(),
                gids: list,
            }),
            ..v1::NamespaceOption::default()
        }
    }

    #[test]
    fn namespaces_return_unchanged() {
        use v1::NamespaceMode as Mode;
        for from in [
            v1::NamespaceOption::default(),
            v1::NamespaceOption {
                network: Mode::Node.into(),
                pid: Mode::Target.into(),
                ipc: Mode::Node.into(),
                target_id: "abc".into(),
                userns_options: None,
            },
            userns(Mode::Pod, &[(1000, 0, 65536)]),
            userns(Mode::Node, &[]),
        ] {
            assert_eq!(namespaces_to_proto(&namespaces("n", Some(&from)).unwrap()), from);
        }
    }

    #[test]
    fn namespaces_name_the_wrong_field() {
        use v1::NamespaceMode as Mode;
        let plain = v1::NamespaceOption::default;
        for (from, start) in [
            (v1::NamespaceOption { network: 9, ..plain() }, "n.network: 9"),
            (v1::NamespaceOption { network: 1, ..plain() }, "n.network: "),
            (v1::NamespaceOption { ipc: 3, ..plain() }, "n.ipc: "),
            (v1::NamespaceOption { pid: -1, ..plain() }, "n.pid: "),
            (v1::NamespaceOption { pid: 3, ..plain() }, "n.target_id: "),
            (
                v1::NamespaceOption {
                    target_id: "x".into(),
                    ..plain()
                },
                "n.target_id: ",
            ),
            (userns(Mode::Pod, &[]), "n.userns_options.uids: "),
            (userns(Mode::Pod, &[(1, 0, 1), (2, 1, 1)]), "n.userns_options.uids: "),
            (
                userns(Mode::Pod, &[(1, 1, 1)]),
                "n.userns_options.uids[0].container_id: ",
            ),
            (userns(Mode::Pod, &[(1, 0, 0)]), "n.userns_options.uids[0].length: "),
            (
                userns(Mode::Pod, &[(u32::MAX, 0, 2)]),
                "n.userns_options.uids[0].length: ",
            ),
            (userns(Mode::Node, &[(1, 0, 1)]), "n.userns_options.uids: "),
            (userns(Mode::Container, &[(1, 0, 1)]), "n.userns_options.mode: "),
            (userns(Mode::Target, &[]), "n.userns_options.mode: "),
        ] {
            let error = namespaces("n", Some(&from)).unwrap_err().to_string();
            assert!(error.starts_with(start), "{error} does not start with {start}");
        }
    }

    #[test]
    fn profiles() {
        use ProfileKind::{AppArmor, Seccomp};
        let local = |reference: &str| {
            Some(Profile::Localhost {
                reference: reference.into(),
            })
        };
        let text = |kind, text| profile(kind, "p", None, "t", text);
        assert_eq!(text(Seccomp, "").unwrap(), None);
        assert_eq!(text(Seccomp, "docker/default").unwrap(), Some(Profile::RuntimeDefault));
        assert_eq!(text(Seccomp, "localhost//a/b").unwrap(), local("/a/b"));
        assert_eq!(text(AppArmor, "localhost/own").unwrap(), local("own"));
        for (kind, bad) in [
            (Seccomp, "localhost/a"),
            (Seccomp, "x"),
            (AppArmor, "docker/default"),
            (AppArmor, "localhost/"),
        ] {
            let error = text(kind, bad).unwrap_err().to_string();
            assert!(error.starts_with("t: "), "{error}");
        }
        let message = |profile_type, reference: &str| {
            let from = v1::SecurityProfile {
                profile_type,
                localhost_ref: reference.into(),
            };
            profile(Seccomp, "p", Some(&from), "t", "ignored")
        };
        let prefixed = v1::SecurityProfile {
            profile_type: 2,
            localhost_ref: "localhost/own".into(),
        };
        let plain = profile(AppArmor, "p", Some(&prefixed), "t", "");
        assert_eq!(plain.unwrap(), local("own"), "the prefix is no part of the name");
        assert_eq!(message(1, "").unwrap(), Some(Profile::Unconfined));
        assert_eq!(message(2, "/p.json").unwrap(), local("/p.json"));
        for (kind, reference, start) in [
            (1, "/x", "p.localhost_ref: "),
            (2, "x", "p.localhost_ref: "),
            (3, "", "p.profile_type: "),
        ] {
            let error = message(kind, reference).unwrap_err().to_string();
            assert!(error.starts_with(start), "{error}");
        }
    }
}
