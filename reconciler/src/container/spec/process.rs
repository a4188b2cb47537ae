//! The first process: arguments, environment, user (CRI `ContainerConfig`, OCI config `process`).

use std::collections::BTreeSet;

use oci_spec::runtime::{PosixRlimit, Process, User};
use serde_json::json;

use super::{Input, Result, SpecError, capability, security};

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

pub fn process(input: &Input) -> Result<Process> {
    let spec = &input.container.spec;
    let mut user = User::default();
    let groups: BTreeSet<u32> = input.user.groups.iter().chain(&input.cdi.groups).copied().collect();
    user.set_uid(input.user.uid)
        .set_gid(input.user.gid)
        .set_additional_gids(Some(groups.into_iter().collect()));
    let adj = i32::try_from(spec.resources.oom_score_adj)
        .ok()
        .filter(|adj| (-1000..=1000).contains(adj));
    let adj = adj.ok_or_else(|| SpecError::invalid("spec.resources.oomScoreAdj", "must be from -1000 to 1000"))?;

    let mut process = Process::default();
    process
        .set_terminal(Some(spec.tty))
        .set_user(user)
        .set_args(Some(args(input)?))
        .set_env(Some(env(input)?))
        .set_cwd(cwd(input)?.into())
        .set_capabilities(Some(capability::sets(&spec.security, input.host.capabilities)?))
        .set_no_new_privileges(Some(spec.security.no_new_privs))
        .set_apparmor_profile(security::apparmor(input)?)
        .set_selinux_label(input.labels.process.clone())
        .set_oom_score_adj(Some(adj))
        .set_rlimits(rlimits(input));
    Ok(process)
}

/// The handler's, then those of all containers. Without any, a container inherits the daemon's, which the unit file
/// sets.
fn rlimits(input: &Input) -> Option<Vec<PosixRlimit>> {
    let of_base = &input.handler.base.rlimits;
    let limits = input.rlimits.iter().filter_map(|(name, wish)| {
        let kind = format!("RLIMIT_{}", name.to_uppercase());
        // Its fields have no setters.
        serde_json::from_value::<PosixRlimit>(json!({ "type": kind, "soft": wish.soft, "hard": wish.hard })).ok()
    });
    let limits = limits.filter(|limit| !of_base.iter().any(|other| other.typ() == limit.typ()));
    Some(limits.chain(of_base.iter().copied()).collect()).filter(|all: &Vec<_>| !all.is_empty())
}

/// The request's command stands for the image's entrypoint, its args for the image's cmd; a new command drops both.
fn args(input: &Input) -> Result<Vec<String>> {
    let spec = &input.container.spec;
    let empty = |list: &[String]| list.is_empty() || matches!(list, [only] if only.is_empty());
    let entrypoint = if empty(&input.image.entrypoint) {
        &[][..]
    } else {
        &input.image.entrypoint[..]
    };
    let (first, rest) = match (spec.command.is_empty(), spec.args.is_empty()) {
        (false, _) => (&spec.command[..], &spec.args[..]),
        (true, false) => (entrypoint, &spec.args[..]),
        (true, true) => (entrypoint, &input.image.cmd[..]),
    };
    let args = [first, rest].concat();
    if args.is_empty() {
        let reason = "no command is given, and the image has neither entrypoint nor cmd";
        return Err(SpecError::invalid("spec.command", reason));
    }
    no_nul("spec.command", &args)?;
    Ok(args)
}

/// The handler's base, defaults, then the image's, then the request's: a later value of a key replaces the earlier
/// one in its place.
fn env(input: &Input) -> Result<Vec<String>> {
    let spec = &input.container.spec;
    let sandbox = &input.sandbox.spec.hostname;
    let hostname = if sandbox.is_empty() {
        &input.host.hostname
    } else {
        sandbox
    };
    let mut all = Vec::new();
    let add = |all: &mut Vec<String>, pair: &str| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        set(all, key, value);
    };
    input.handler.base.env.iter().for_each(|pair| add(&mut all, pair));
    set(&mut all, "PATH", PATH);
    if spec.tty {
        set(&mut all, "TERM", "xterm");
    }
    set(&mut all, "HOSTNAME", hostname);
    input.image.env.iter().for_each(|pair| add(&mut all, pair));
    for (i, var) in spec.env.iter().enumerate() {
        if var.name.is_empty() || var.name.contains('=') {
            return Err(SpecError::invalid(
                format!("spec.env[{i}].name"),
                "must be set and must not contain `=`",
            ));
        }
        set(&mut all, &var.name, &var.value);
    }
    input.cdi.env.iter().for_each(|pair| add(&mut all, pair));
    if !all.iter().any(|pair| pair.starts_with("HOME=")) {
        set(
            &mut all,
            "HOME",
            if input.user.home.is_empty() {
                "/"
            } else {
                &input.user.home
            },
        );
    }
    no_nul("spec.env", &all)?;
    Ok(all)
}

fn set(all: &mut Vec<String>, key: &str, value: &str) {
    let pair = format!("{key}={value}");
    match all
        .iter_mut()
        .find(|old| old.split_once('=').is_some_and(|(name, _)| name == key))
    {
        Some(old) => *old = pair,
        None => all.push(pair),
    }
}

fn cwd(input: &Input) -> Result<String> {
    let own = &input.container.spec.working_dir;
    let (field, wish) = match (own.as_str(), input.image.working_dir.as_str()) {
        ("", "") => return Ok(input.handler.base.cwd.clone().unwrap_or_else(|| "/".into())),
        ("", image) => ("image configuration: WorkingDir", image),
        (own, _) => ("spec.workingDir", own),
    };
    no_nul(field, std::slice::from_ref(own))?;
    // Images with a relative one exist; it can only be meant from the root.
    if wish.starts_with('/') {
        Ok(wish.into())
    } else if field == "spec.workingDir" {
        Err(SpecError::invalid(field, "must be an absolute path"))
    } else {
        Ok(format!("/{wish}"))
    }
}

fn no_nul(field: &str, texts: &[String]) -> Result<()> {
    match texts.iter().any(|text| text.contains('\0')) {
        true => Err(SpecError::invalid(field, "contains a NUL byte")),
        false => Ok(()),
    }
}
