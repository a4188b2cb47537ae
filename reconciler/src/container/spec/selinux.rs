//! SELinux labels of a container (CRI `SELinuxOption`, OCI `process.selinuxLabel` and `linux.mountLabel`).
//!
//! A process may touch the files of its own level alone. Each sandbox has a level of its own, which no other has,
//! unless one is asked for; so a container that breaks out finds its neighbours' files closed.

use state::container::Container;
use state::sandbox::{PodSandbox, SeLinux};

use super::{Result, SpecError};

/// Both `None` where SELinux is off.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels {
    /// Of its processes.
    pub process: Option<String>,
    /// Of the files that it may touch: its root file system and what is mounted for it.
    pub mount: Option<String>,
}

/// The labels that a container shall have: its own wish's, else its sandbox's; `own` is the level that the sandbox was
/// given, `None` where SELinux is off. A privileged container may touch everything, whatever it asks for.
///
/// A wish is checked on every node. Where SELinux is off it has no effect: pods name labels for the nodes that have it.
pub fn labels(sandbox: &PodSandbox, container: &Container, own: Option<&str>) -> Result<Labels> {
    let security = &container.spec.security;
    match &security.selinux {
        Some(wish) => of(wish, "spec.security.selinux.level", security.privileged, own),
        None => of_sandbox(sandbox, security.privileged, own),
    }
}

/// The labels of a sandbox's own process and files.
pub fn sandbox_labels(sandbox: &PodSandbox, own: Option<&str>) -> Result<Labels> {
    of_sandbox(sandbox, sandbox.spec.security.privileged, own)
}

fn of_sandbox(sandbox: &PodSandbox, privileged: bool, own: Option<&str>) -> Result<Labels> {
    let wish = sandbox.spec.security.selinux.clone().unwrap_or_default();
    of(&wish, "sandbox: spec.security.selinux.level", privileged, own)
}

fn of(wish: &SeLinux, field: &str, privileged: bool, own: Option<&str>) -> Result<Labels> {
    if !valid_level(&wish.level) {
        let reason = format!("`{}` is not a level such as s0, s0:c1,c2 or s0-s0:c0.c1023", wish.level);
        return Err(SpecError::invalid(field, reason));
    }
    let Some(own) = own else {
        return Ok(Labels::default());
    };
    let process = match privileged {
        true => "system_u:system_r:spc_t:s0".to_owned(),
        false => context(wish, &wish.role, "system_r", &wish.kind, "container_t", own),
    };
    Ok(Labels {
        process: Some(process),
        mount: Some(context(wish, "", "object_r", "", "container_file_t", own)),
    })
}

fn context(wish: &SeLinux, role: &str, usual_role: &str, kind: &str, usual_kind: &str, own: &str) -> String {
    let or = |wish: &str, usual: &str| if wish.is_empty() { usual } else { wish }.to_owned();
    [
        or(&wish.user, "system_u"),
        or(role, usual_role),
        or(kind, usual_kind),
        or(&wish.level, own),
    ]
    .join(":")
}

/// `s0`, `s0-s0`, `s0:c1,c2`, `s0:c0.c3`; empty is the default.
fn valid_level(level: &str) -> bool {
    let number = |text: &str, letter: char, max: u32| {
        let digits = text
            .strip_prefix(letter)
            .filter(|d| d.bytes().all(|b| b.is_ascii_digit()));
        digits.and_then(|d| d.parse::<u32>().ok()).is_some_and(|n| n <= max)
    };
    let range = |text: &str| text.splitn(2, '.').all(|one| number(one, 'c', 1023));
    let one = |text: &str| match text.split_once(':') {
        None => number(text, 's', 15),
        Some((level, categories)) => number(level, 's', 15) && categories.split(',').all(range),
    };
    level.is_empty() || level.splitn(2, '-').all(one)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels() {
        for good in [
            "",
            "s0",
            "s0-s0",
            "s0:c1",
            "s0:c1,c2",
            "s0-s0:c0.c1023",
            "s0:c1.c3,c7",
            "s15:c1",
        ] {
            assert!(valid_level(good), "{good}");
        }
        for bad in [
            "s",
            "c1",
            "s0:",
            "s0:c",
            "s0:c1024",
            "s0:c1,",
            "s0-",
            "s0 ",
            "s0:x1",
            "s16",
            "s0:c1.c2.c3",
        ] {
            assert!(!valid_level(bad), "{bad}");
        }
    }
}
