//! Checks across fields, and the labels of the security modules (CRI `LinuxContainerSecurityContext`).

use state::container::{Mount, Propagation};
use state::sandbox::{IdMapping, NamespaceMode, Profile};

use super::{Input, Result, SpecError};

/// The AppArmor profile that `RuntimeDefault` means.
pub const APPARMOR_DEFAULT: &str = crate::world::linux::apparmor::DEFAULT;

/// What no single field can tell.
pub fn check(input: &Input) -> Result<()> {
    let (spec, sandbox) = (&input.container.spec, &input.sandbox.spec);
    let security = &spec.security;
    if security.privileged && !sandbox.security.privileged {
        let reason = "needs a sandbox with spec.security.privileged";
        return Err(SpecError::invalid("spec.security.privileged", reason));
    }
    if security.run_as_group.is_some() && security.run_as_user.is_none() && security.run_as_username.is_empty() {
        return Err(SpecError::invalid(
            "spec.security.runAsGroup",
            "needs runAsUser or runAsUsername beside it",
        ));
    }
    if input.mounts.len() != spec.mounts.len() {
        return Err(SpecError::invalid(
            "spec.mounts",
            "not every mount was looked up on the host",
        ));
    }
    namespaces(input)?;
    if let Some(device) = spec.cdi_devices.iter().find(|name| !input.cdi.names.contains(*name)) {
        return Err(SpecError::invalid(
            format!("spec.cdiDevices[{device}]"),
            "was not looked up on the host",
        ));
    }
    // What they would do must not be missing without a word.
    let hooks = &input.cdi.hooks;
    let late = |list: &Option<Vec<_>>| list.as_ref().is_some_and(|list| !list.is_empty());
    if input.handler.foreign.is_none() && (late(hooks.poststart()) || late(hooks.poststop())) {
        let reason = "hooks of poststart and poststop are run by handlers of another OCI runtime only";
        return Err(SpecError::unsupported("spec.cdiDevices", reason));
    }
    Ok(())
}

fn namespaces(input: &Input) -> Result<()> {
    let wish = &input.container.spec.security.namespaces;
    let sandbox = &input.sandbox.spec.namespaces;
    let invalid =
        |field: &str, reason: &str| Err(SpecError::invalid(format!("spec.security.namespaces.{field}"), reason));
    if wish.pid == NamespaceMode::Target && wish.target_id.is_empty() {
        return invalid("targetId", "must name a container of the pod when pid is Target");
    }
    let of_pod = |namespaces: &state::sandbox::Namespaces| {
        namespaces.user.clone().filter(|user| user.mode != NamespaceMode::Node)
    };
    let user = of_pod(sandbox);
    if of_pod(wish) != user {
        return invalid("user", "must equal the sandbox's");
    }
    let Some(user) = user else { return Ok(()) };
    if user.mode != NamespaceMode::Pod {
        return invalid("user.mode", "must be Pod or Node");
    }
    if input
        .handler
        .foreign
        .as_ref()
        .is_some_and(|runtime| !runtime.features.id_mapped)
    {
        let reason = "the pod's runtime handler does not know id-mapped mounts (see its `features`)";
        return Err(SpecError::unsupported("spec.security.namespaces.user", reason));
    }
    for (field, list) in [("user.uids", &user.uids), ("user.gids", &user.gids)] {
        match &list[..] {
            [one] if one.length >= 1 && one.container_id == 0 => {}
            [_] => return invalid(field, "must map id 0 of the container and at least one id"),
            _ => return invalid(field, "must be exactly one mapping"),
        }
    }
    if input.userns.is_none() {
        return invalid("user", "the sandbox's user namespace is not there");
    }
    let (who, lists) = (input.user, (&user.uids, &user.gids));
    let unmapped = |list: &[IdMapping], id: u32| !list.iter().any(|map| map.maps(id));
    let group = who.groups.iter().chain([&who.gid]).find(|gid| unmapped(lists.1, **gid));
    if unmapped(lists.0, who.uid) || group.is_some() {
        let reason = format!(
            "user {}, group {} or one of groups {:?} is outside of the pod's user namespace",
            who.uid, who.gid, who.groups
        );
        return invalid("user", &reason);
    }
    // What the container mounts would appear on the host.
    let shared = |mount: &Mount| mount.propagation == Propagation::Bidirectional;
    if let Some(i) = input.container.spec.mounts.iter().position(shared) {
        return Err(SpecError::invalid(
            format!("spec.mounts[{i}].propagation"),
            "Bidirectional needs the host's user namespace",
        ));
    }
    Ok(())
}

/// Masked and read-only paths are the request's own, none for a privileged container.
pub fn listed(input: &Input, paths: &[String]) -> Vec<String> {
    if input.container.spec.security.privileged {
        Vec::new()
    } else {
        paths.to_vec()
    }
}

/// The AppArmor profile to enter.
///
/// Not asked for: the default profile if it is loaded, and none in a privileged container.
pub fn apparmor(input: &Input) -> Result<Option<String>> {
    let security = &input.container.spec.security;
    let field = "spec.security.apparmor";
    let Some(loaded) = &input.host.apparmor else {
        return match security.apparmor {
            None | Some(Profile::Unconfined) => Ok(None),
            Some(_) => Err(SpecError::unsupported(
                field,
                "AppArmor is off on this node; ask for Unconfined or nothing",
            )),
        };
    };
    let has = |name: &str| loaded.iter().any(|other| other == name);
    match &security.apparmor {
        Some(Profile::Unconfined) => Ok(None),
        None | Some(Profile::RuntimeDefault) if security.privileged => Ok(None),
        None => Ok(has(APPARMOR_DEFAULT).then(|| APPARMOR_DEFAULT.into())),
        Some(Profile::RuntimeDefault) if has(APPARMOR_DEFAULT) => Ok(Some(APPARMOR_DEFAULT.into())),
        Some(Profile::RuntimeDefault) => Err(SpecError::unsupported(
            field,
            format!("the profile {APPARMOR_DEFAULT} is not loaded; is apparmor_parser(8) installed?"),
        )),
        Some(Profile::Localhost { reference }) if has(reference) => Ok(Some(reference.clone())),
        Some(Profile::Localhost { reference }) => Err(SpecError::unsupported(
            field,
            format!("the profile `{reference}` is not loaded; see apparmor_parser(8)"),
        )),
    }
}
