//! The mount table (CRI `Mount`, OCI config `mounts`): ours, the sandbox's files, volumes, the request's, and more of
//! the handler's base.

use std::path::{Component, Path, PathBuf};

use oci_spec::runtime::Mount;
use shim::PROC_FILES;
use state::container::{Mount as Wish, Propagation};
use state::sandbox::NamespaceMode;

use super::devices::below_dev;
use super::namespaces::oci;
use super::{Input, Result, SpecError};

/// Options that a request may add to a mount, each also with `r` before it for "and everything below".
const EXTRA: [&str; 14] = [
    "suid",
    "nosuid",
    "dev",
    "nodev",
    "exec",
    "noexec",
    "atime",
    "noatime",
    "diratime",
    "nodiratime",
    "relatime",
    "norelatime",
    "strictatime",
    "nostrictatime",
];

/// All mounts, parents before what lies below them. `devices` are nodes that are bound, not made.
pub fn mounts(input: &Input, devices: Vec<Mount>) -> Result<Vec<Mount>> {
    let mut wished = wished(input)?;
    let free = |mount: &Mount| !wished.iter().any(|other| other.destination() == mount.destination());
    let of_devices: Vec<_> = input.cdi.mounts.iter().filter(|mount| free(mount)).cloned().collect();
    wished.extend(of_devices);
    let taken = |path: &Path| wished.iter().any(|mount| mount.destination() == path);
    let own_dev = !taken(Path::new("/dev"));
    let own_cgroup = !taken(Path::new("/sys/fs/cgroup"));

    let fits = |path: &Path| {
        (own_dev || !below_dev(path)) && (own_cgroup || !path.starts_with("/sys/fs/cgroup")) && !taken(path)
    };
    let mut all = ours(input);
    all.retain(|mount| fits(mount.destination()));
    all.extend(
        of_sandbox(input)
            .into_iter()
            .chain(volumes(input))
            .filter(|mount| !taken(mount.destination())),
    );
    all.extend(devices.into_iter().filter(|mount| !taken(mount.destination())));
    let here = |mount: &&Mount| all.iter().any(|other| other.destination() == mount.destination());
    let more = input.handler.base.mounts.iter();
    let more: Vec<_> = more
        .filter(|mount| fits(mount.destination()) && !here(mount))
        .cloned()
        .collect();
    all.extend(more);
    all.extend(wished);
    all.sort_by_key(|mount| mount.destination().components().count());
    Ok(all)
}

/// The loosest propagation that any mount needs. (`slave` and `shared` stand for the recursive forms, which only other
/// runtimes know.)
pub fn rootfs_propagation(input: &Input) -> String {
    let any = |wish| {
        input
            .container
            .spec
            .mounts
            .iter()
            .any(|mount| mount.propagation == wish)
    };
    let recursive = if input.handler.foreign.is_some() { "r" } else { "" };
    let loosest = if any(Propagation::Bidirectional) {
        "shared"
    } else if any(Propagation::HostToContainer) {
        "slave"
    } else {
        "private"
    };
    format!("{recursive}{loosest}")
}

fn mount<const N: usize>(path: &str, typ: &str, source: &str, options: [&str; N]) -> Mount {
    let mut mount = Mount::default();
    mount
        .set_destination(path.into())
        .set_typ(Some(typ.into()))
        .set_source(Some(source.into()))
        .set_options(Some(options.map(String::from).into()));
    mount
}

pub fn bind<const N: usize>(path: &Path, source: &Path, options: [&str; N]) -> Mount {
    let mut mount = Mount::default();
    mount
        .set_destination(path.into())
        .set_typ(Some("bind".into()))
        .set_source(Some(source.into()))
        .set_options(Some(options.map(String::from).into()));
    mount
}

fn ours(input: &Input) -> Vec<Mount> {
    let access = if input.container.spec.security.privileged {
        "rw"
    } else {
        "ro"
    };
    let mut all = vec![
        mount("/proc", "proc", "proc", ["nosuid", "noexec", "nodev"]),
        mount(
            "/dev",
            "tmpfs",
            "tmpfs",
            ["nosuid", "strictatime", "mode=755", "size=65536k"],
        ),
        mount(
            "/dev/pts",
            "devpts",
            "devpts",
            ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"],
        ),
        mount("/dev/mqueue", "mqueue", "mqueue", ["nosuid", "noexec", "nodev"]),
    ];
    // The group of terminals must exist in the user namespace.
    if !maps_group(input, 5)
        && let Some(options) = all[2].options_mut()
    {
        options.retain(|option| option != "gid=5");
    }
    // A new sysfs shows the network namespace, and needs rights over it that a user namespace on the host's lacks.
    if input.userns.is_some() && input.sandbox.spec.namespaces.network == NamespaceMode::Node {
        let recursive = if access == "ro" { "rro" } else { "rw" };
        all.push(bind(
            Path::new("/sys"),
            Path::new("/sys"),
            ["rbind", "rprivate", "nosuid", "noexec", "nodev", recursive],
        ));
    } else {
        all.push(mount("/sys", "sysfs", "sysfs", ["nosuid", "noexec", "nodev", access]));
    }
    let writable = input.handler.cgroup_writable && input.host.cgroup_v2;
    all.extend(cgroup(input, if writable { "rw" } else { access }));
    all
}

fn maps_group(input: &Input, id: u32) -> bool {
    let user = input.sandbox.spec.namespaces.user.as_ref();
    user.is_none_or(|user| user.gids.is_empty() || user.gids.iter().any(|map| map.maps(id)))
}

/// Shows the files that the daemon made, root's on the host, as root's of the pod's user namespace.
fn mapped(input: &Input, mut mount: Mount) -> Mount {
    if let (Some(uids), Some(gids)) = super::namespaces::mappings(input) {
        mount.set_uid_mappings(Some(uids)).set_gid_mappings(Some(gids));
    }
    mount
}

fn cgroup(input: &Input, access: &str) -> Vec<Mount> {
    if input.host.cgroup_v2 || input.handler.foreign.is_some() {
        let options = ["nosuid", "noexec", "nodev", "relatime", access];
        return vec![mount("/sys/fs/cgroup", "cgroup", "cgroup", options)];
    }
    // The runtime's own way on v1 leaves the limits writable: so each controller by hand, the container's part only.
    let options = ["nosuid", "noexec", "nodev", "mode=755", "size=64k"];
    let mut all = vec![mount("/sys/fs/cgroup", "tmpfs", "tmpfs", options)];
    let own = input.cgroup_path.trim_start_matches('/');
    all.extend(input.host.cgroup_v1.iter().map(|controller| {
        bind(
            controller,
            &controller.join(own),
            ["rbind", "rprivate", "nosuid", "noexec", "nodev", access],
        )
    }));
    all
}

fn of_sandbox(input: &Input) -> Vec<Mount> {
    let access = if input.container.spec.security.readonly_rootfs {
        "ro"
    } else {
        "rw"
    };
    let files = &input.files;
    [
        ("/etc/hostname", &files.hostname, access),
        ("/etc/hosts", &files.hosts, access),
        ("/etc/resolv.conf", &files.resolv_conf, access),
        ("/dev/shm", &files.shm, "rw"),
    ]
    .into_iter()
    .filter(|(_, source, _)| !source.as_os_str().is_empty())
    .map(|(path, source, access)| {
        let mount = bind(Path::new(path), source, ["rbind", "rprivate", access]);
        // A tmpfs that everyone may write, with owners of its own.
        let shm = path == "/dev/shm";
        if shm { mount } else { mapped(input, mount) }
    })
    .collect()
}

fn volumes(input: &Input) -> impl Iterator<Item = Mount> {
    input.volumes.iter().map(|(path, source)| {
        let mount = bind(&clean(Path::new(path)), source, ["rbind", "rprivate", "rw"]);
        mapped(input, mount)
    })
}

fn wished(input: &Input) -> Result<Vec<Mount>> {
    let pairs = input.container.spec.mounts.iter().zip(&input.mounts);
    pairs
        .enumerate()
        .map(|(i, (wish, found))| one(input, i, wish, &found.source))
        .collect()
}

fn one(input: &Input, index: usize, wish: &Wish, source: &Path) -> Result<Mount> {
    let field = |name: &str| format!("spec.mounts[{index}].{name}");
    let path = clean(Path::new(&wish.container_path));
    if !wish.container_path.starts_with('/') || path == Path::new("/") {
        return Err(SpecError::invalid(
            field("containerPath"),
            "must be an absolute path below the root",
        ));
    }
    check_proc(&path, source).map_err(|reason| SpecError::invalid(field("containerPath"), reason))?;
    check_image(wish).map_err(|(name, reason)| SpecError::invalid(field(name), reason))?;
    let mut options = vec!["rbind".to_string(), propagation(wish.propagation).into()];
    if wish.recursive_read_only && (!wish.readonly || wish.propagation != Propagation::Private) {
        return Err(SpecError::invalid(
            field("recursiveReadOnly"),
            "needs readonly and private propagation",
        ));
    }
    let foreign = input.handler.foreign.as_ref();
    if wish.recursive_read_only && foreign.is_some_and(|runtime| !runtime.features.recursive_read_only) {
        let reason = "RROUnsupported: the pod's runtime handler does not know the mount option rro";
        return Err(SpecError::unsupported(field("recursiveReadOnly"), reason));
    }
    options.push(
        if wish.recursive_read_only {
            "rro"
        } else if wish.readonly {
            "ro"
        } else {
            "rw"
        }
        .into(),
    );
    for (i, option) in wish.options.iter().enumerate() {
        let known = |option: &str| EXTRA.contains(&option);
        if !known(option) && !option.strip_prefix('r').is_some_and(known) {
            let reason = format!("`{option}` is not one of {}", EXTRA.join(", "));
            return Err(SpecError::invalid(field(&format!("options[{i}]")), reason));
        }
        options.push(option.clone());
    }
    let mut mount = bind(&path, source, []);
    mount.set_options(Some(options));
    // An image is mounted with its owners mapped already.
    let asked = !wish.uid_mappings.is_empty() || !wish.gid_mappings.is_empty();
    if asked && wish.image.is_none() {
        mount
            .set_uid_mappings(Some(oci(&wish.uid_mappings)))
            .set_gid_mappings(Some(oci(&wish.gid_mappings)));
    }
    Ok(mount)
}

fn propagation(wish: Propagation) -> &'static str {
    match wish {
        Propagation::Private => "rprivate",
        Propagation::HostToContainer => "rslave",
        Propagation::Bidirectional => "rshared",
    }
}

fn check_image(wish: &Wish) -> std::result::Result<(), (&'static str, &'static str)> {
    if wish.image.is_none() {
        return match wish.image_sub_path.is_empty() {
            true => Ok(()),
            false => Err(("imageSubPath", "needs an image")),
        };
    }
    if !wish.host_path.is_empty() {
        return Err(("hostPath", "must be empty beside an image"));
    }
    if !wish.readonly {
        return Err(("readonly", "must be true for an image"));
    }
    match wish.propagation {
        Propagation::Private => Ok(()),
        _ => Err(("propagation", "must be Private for an image")),
    }
}

/// Whether something may be mounted at a path of `/proc`.
///
/// # Errors
/// Why not.
pub fn check_proc(path: &Path, source: &Path) -> std::result::Result<(), String> {
    if !path.starts_with("/proc") || PROC_FILES.iter().any(|file| path == Path::new(file)) {
        return Ok(());
    }
    if path == Path::new("/proc") && source == Path::new("/proc") {
        return Ok(());
    }
    Err(format!("{} must not be replaced: it is the kernel's", path.display()))
}

/// Without `.`, `..`, doubled and trailing slashes; as text, so that destinations can be compared.
pub fn clean(path: &Path) -> PathBuf {
    let mut clean = PathBuf::from("/");
    for part in path.components() {
        match part {
            Component::Normal(name) => clean.push(name),
            Component::ParentDir => drop(clean.pop()),
            _ => {}
        }
    }
    clean
}
