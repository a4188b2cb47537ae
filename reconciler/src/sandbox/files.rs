//! Stage `files`: hostname, hosts, resolv.conf, /dev/shm and SELinux level (CRI contract, sandbox files). Its undo
//! takes down the images that containers had as volumes too.

use std::path::{Path, PathBuf};

use state::PodSandbox;
use state::sandbox::{Dns, NamespaceMode, SandboxKind};

use super::selinux;
use crate::engine::Context;
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::error::Result;
use crate::world::Paths;
use crate::world::linux::mounts::UserFiles;
use crate::world::paths::DIR_MODE;

pub struct Files;

/// Size of a pod's /dev/shm, fixed by the CRI contract; the kubelet mounts a bigger volume itself where it is wanted.
const SHM_BYTES: u64 = 64 << 20;

/// Where a sandbox's files are.
pub struct SandboxFiles {
    pub hostname: PathBuf,
    pub hosts: PathBuf,
    pub resolv_conf: PathBuf,
    /// The host's with host ipc.
    pub shm: PathBuf,
}

pub fn paths(paths: &Paths, object: &PodSandbox) -> SandboxFiles {
    let dir = paths.pod(object.uid());
    SandboxFiles {
        hostname: dir.join("hostname"),
        hosts: dir.join("hosts"),
        resolv_conf: dir.join("resolv.conf"),
        shm: if own_shm(object) {
            paths.shm(object.uid())
        } else {
            "/dev/shm".into()
        },
    }
}

fn own_shm(object: &PodSandbox) -> bool {
    object.spec.namespaces.ipc != NamespaceMode::Node
}

pub struct Have {
    missing: Option<&'static str>,
    /// The pod's shared memory, or an image that is a volume.
    mounted: bool,
}

impl Stage<SandboxKind> for Files {
    type Have = Have;
    const NAME: &'static str = "files";

    async fn observe(cx: &Context, object: &PodSandbox) -> Result<Have> {
        let files = paths(&cx.world.paths, object);
        let all = [
            ("hostname", &files.hostname),
            ("hosts", &files.hosts),
            ("resolv.conf", &files.resolv_conf),
        ];
        let shm = own_shm(object) && cx.world.mounts.is_mounted(&files.shm)?;
        let mut missing = all
            .into_iter()
            .find(|(_, path)| !cx.world.files.exists(path))
            .map(|(name, _)| name);
        if own_shm(object) && !shm {
            missing = missing.or(Some("shm"));
        }
        if cx.world.selinux && selinux::level(&cx.world, object)?.is_none() {
            missing = missing.or(Some("the SELinux level"));
        }
        let images = cx.world.files.exists(&cx.world.paths.image_volumes(object.uid()));
        let mounted = shm || images;
        Ok(Have { missing, mounted })
    }

    fn diff(object: &PodSandbox, have: &Have) -> Step {
        match have.missing {
            None => Step::Keep,
            Some(name) if object.status.pid > 0 => Step::Remake(Why::new("Missing", format!("{name} is gone"))),
            Some(_) => Step::Make(Why::new("Absent", "")),
        }
    }

    /// The files lie in the object's directory and go with it; only the mount must be undone.
    fn present(have: &Have) -> bool {
        have.mounted
    }

    async fn act(cx: &Context, object: &PodSandbox, _: &Step) -> Result<()> {
        let files = paths(&cx.world.paths, object);
        selinux::choose_level(cx, object)?;
        let label = selinux::labels(&cx.world, object)?.mount;
        let label = label.as_deref();
        let name = match object.spec.hostname.as_str() {
            "" => host_name(cx)?,
            name => name.to_owned(),
        };
        let owner = match crate::sandbox::pins(&cx.world.paths, object).user {
            // Elsewhere the mounts show root's files as the namespace's root's.
            Some(user) if cx.world.mounts.user_files().await == UserFiles::Copied => user.root(),
            _ => (0, 0),
        };
        let owner = (owner, label);
        make(cx, &files.hostname, owner, || Ok(format!("{name}\n").into_bytes()))?;
        make(cx, &files.hosts, owner, || host_file(cx, "/etc/hosts"))?;
        make(cx, &files.resolv_conf, owner, || match &object.spec.dns {
            None => host_file(cx, "/etc/resolv.conf"),
            Some(dns) => Ok(resolv_conf(dns).into_bytes()),
        })?;
        if own_shm(object) {
            cx.world.files.make_dir(&files.shm, DIR_MODE)?;
            cx.world.mounts.shm(&files.shm, SHM_BYTES, label)?;
        }
        Ok(())
    }

    async fn undo(cx: &Context, object: &PodSandbox) -> Result<Undone> {
        let (files, mounts) = (&cx.world.files, &cx.world.mounts);
        mounts.unmount(&cx.world.paths.shm(object.uid()))?;
        let volumes = cx.world.paths.image_volumes(object.uid());
        mounts.clear_scratch(&volumes.join("mapped"))?;
        for entry in files.list(&volumes)? {
            mounts.unmount(&volumes.join(entry.name))?;
        }
        files.remove_dir(&volumes)?;
        Ok(Undone::Done)
    }
}

/// Makes a file that is not there, for its owner and with its SELinux label.
fn make(
    cx: &Context,
    path: &Path,
    (owner, label): ((u32, u32), Option<&str>),
    text: impl FnOnce() -> Result<Vec<u8>>,
) -> Result<()> {
    if cx.world.files.exists(path) {
        return Ok(());
    }
    cx.world.files.replace_for(path, &text()?, owner, label)
}

fn host_name(cx: &Context) -> Result<String> {
    let text = host_file(cx, "/proc/sys/kernel/hostname")?;
    Ok(String::from_utf8_lossy(&text).trim().to_owned())
}

/// A host file, or nothing where the host has none.
fn host_file(cx: &Context, path: &str) -> Result<Vec<u8>> {
    Ok(cx.world.files.read(Path::new(path))?.unwrap_or_default())
}

/// One `search` line, a `nameserver` line each, one `options` line; an empty configuration is an empty file.
fn resolv_conf(dns: &Dns) -> String {
    let mut text = String::new();
    if !dns.searches.is_empty() {
        text += &format!("search {}\n", dns.searches.join(" "));
    }
    for server in &dns.servers {
        text += &format!("nameserver {server}\n");
    }
    if !dns.options.is_empty() {
        text += &format!("options {}\n", dns.options.join(" "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolv_conf_has_the_order_that_cri_asks_for() {
        let list = |words: &[&str]| words.iter().map(|w| (*w).to_owned()).collect();
        let dns = Dns {
            servers: list(&["10.0.0.1", "10.0.0.2"]),
            searches: list(&["a", "b"]),
            options: list(&["x"]),
        };
        assert_eq!(
            resolv_conf(&dns),
            "search a b\nnameserver 10.0.0.1\nnameserver 10.0.0.2\noptions x\n"
        );
        assert_eq!(resolv_conf(&Dns::default()), "");
    }
}
