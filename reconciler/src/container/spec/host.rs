//! What must be known of the host: the only part here that looks at it.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::sys::stat::{major, minor};
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};
use state::container::{Device, Mount, Propagation};

use super::capability::CapabilitySet;
use super::{Result, SpecError};

/// Not given to a privileged container: they are its own, or belong to whoever runs on the host's console.
const SKIPPED_DEVICES: [&str; 9] = [
    "pts",
    "shm",
    "fd",
    "mqueue",
    "console",
    "ptmx",
    ".lxc",
    ".lxd-mounts",
    ".udev",
];
/// A directory of devices with more nodes than this is a mistake.
const MAX_DEVICES: usize = 4096;

/// Facts of the node that shape configurations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostFacts {
    pub hostname: String,
    /// What the daemon holds: the meaning of `ALL` and of privileged.
    pub capabilities: CapabilitySet,
    /// Major and minor version of the kernel.
    pub kernel: (u32, u32),
    /// Unified hierarchy only; hybrid layouts count as v1.
    pub cgroup_v2: bool,
    /// v1: mount points of the controllers.
    pub cgroup_v1: Vec<PathBuf>,
    /// Can swap be limited?
    pub swap_accounting: bool,
    /// Page sizes such as `2MB` that can be limited; empty without the hugetlb controller.
    pub hugepages: Vec<String>,
    /// Nodes below `/dev`, for privileged containers.
    pub devices: Vec<DeviceNode>,
    /// Loaded AppArmor profiles; `None` where AppArmor is off.
    pub apparmor: Option<Vec<String>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceNode {
    /// On the host.
    pub path: PathBuf,
    pub kind: DeviceKind,
    pub major: u64,
    pub minor: u64,
    /// Permission bits.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    Char,
    Block,
}

/// A device of the request (CRI `Device`), looked up on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedDevice {
    pub node: DeviceNode,
    pub container_path: PathBuf,
    /// Any of `r`, `w`, `m`.
    pub permissions: String,
}

/// A mount of the request (CRI `Mount`), looked up on the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResolvedMount {
    /// No symlinks in it. For an image volume: its mounted root, or the sub path in it.
    pub source: PathBuf,
}

impl HostFacts {
    /// Looks at the node. Cheap enough (under a millisecond) for each bundle, so that nothing of it grows stale.
    pub fn read() -> Result<Self> {
        let names = nix::sys::utsname::uname()
            .map_err(|e| SpecError::host("asking the kernel for its name", "", io::Error::from(e)))?;
        let root = Path::new("/sys/fs/cgroup");
        let cgroup_v2 = statfs(root).is_ok_and(|s| s.filesystem_type() == CGROUP2_SUPER_MAGIC);
        let cgroup_v1 = if cgroup_v2 { Vec::new() } else { v1_controllers()? };
        Ok(Self {
            hostname: names.nodename().to_string_lossy().into_owned(),
            capabilities: CapabilitySet(own_capabilities()?),
            kernel: kernel_version(&names.release().to_string_lossy()),
            swap_accounting: if cgroup_v2 { v2_swap(root) } else { v1_swap(&cgroup_v1) },
            hugepages: hugepages(root, &cgroup_v1),
            cgroup_v2,
            cgroup_v1,
            devices: nodes_below(Path::new("/dev"), &SKIPPED_DEVICES)?,
            apparmor: apparmor(),
        })
    }

    /// mount_setattr(2) with AT_RECURSIVE: Linux 5.12.
    pub fn recursive_read_only(&self) -> bool {
        self.kernel >= (5, 12)
    }
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(path).map_err(|e| SpecError::host("reading", path, e))
}

fn own_capabilities() -> Result<u64> {
    let status = read("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("CapPrm:"));
    line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .ok_or_else(|| SpecError::host("finding CapPrm in", "/proc/self/status", ErrorKind::InvalidData.into()))
}

fn kernel_version(release: &str) -> (u32, u32) {
    let mut parts = release
        .split(|c: char| !c.is_ascii_digit())
        .map(|n| n.parse().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

fn v1_controllers() -> Result<Vec<PathBuf>> {
    let mounts = read("/proc/self/mountinfo")?;
    let known = |mount: &MountLine| {
        let name = mount.point.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        mount.kind == "cgroup"
            && mount.point.starts_with("/sys/fs/cgroup")
            && name.split(',').any(|one| shim::V1_CONTROLLERS.contains(&one))
    };
    let mut points: Vec<_> = mounts
        .lines()
        .filter_map(MountLine::parse)
        .filter(known)
        .map(|m| m.point)
        .collect();
    points.dedup();
    Ok(points)
}

fn v1_swap(controllers: &[PathBuf]) -> bool {
    controllers
        .iter()
        .any(|point| point.join("memory.memsw.limit_in_bytes").exists())
}

/// The root has no `memory.swap.max`; any cgroup below it with the memory controller tells.
fn v2_swap(root: &Path) -> bool {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = own
        .lines()
        .find_map(|line| line.strip_prefix("0::/"))
        .unwrap_or_default();
    let children = fs::read_dir(root)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    std::iter::once(root.join(own))
        .chain(children)
        .any(|dir| dir.join("memory.swap.max").exists())
}

fn hugepages(root: &Path, v1: &[PathBuf]) -> Vec<String> {
    let unified = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
    let limited = unified.split_whitespace().any(|name| name == "hugetlb") || v1.iter().any(|p| p.ends_with("hugetlb"));
    if !limited {
        return Vec::new();
    }
    let sizes = fs::read_dir("/sys/kernel/mm/hugepages").into_iter().flatten().flatten();
    let mut sizes: Vec<_> = sizes
        .filter_map(|entry| page_size(entry.file_name().to_str()?))
        .collect();
    sizes.sort();
    sizes
}

/// `hugepages-2048kB` as the cgroup files spell it: `2MB`.
fn page_size(directory: &str) -> Option<String> {
    let kb: u64 = directory.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
    Some(match kb {
        kb if kb % (1 << 20) == 0 => format!("{}GB", kb >> 20),
        kb if kb % (1 << 10) == 0 => format!("{}MB", kb >> 10),
        kb => format!("{kb}KB"),
    })
}

fn apparmor() -> Option<Vec<String>> {
    let enabled = fs::read_to_string("/sys/module/apparmor/parameters/enabled").ok()?;
    if !enabled.starts_with('Y') {
        return None;
    }
    // One line each: `name (mode)`. Unreadable: nothing can be said to be loaded.
    let loaded = fs::read_to_string("/sys/kernel/security/apparmor/profiles").unwrap_or_default();
    Some(
        loaded
            .lines()
            .filter_map(|line| Some(line.rsplit_once(" (")?.0.to_string()))
            .collect(),
    )
}

fn node(path: &Path, meta: &fs::Metadata) -> Option<DeviceNode> {
    let kind = match meta.file_type() {
        t if t.is_char_device() => DeviceKind::Char,
        t if t.is_block_device() => DeviceKind::Block,
        _ => return None,
    };
    Some(DeviceNode {
        path: path.into(),
        kind,
        major: major(meta.rdev()),
        minor: minor(meta.rdev()),
        mode: meta.mode() & 0o7777,
        uid: meta.uid(),
        gid: meta.gid(),
    })
}

/// The device node at a path, symlinks followed.
pub(super) fn resolve_node(path: &Path) -> io::Result<DeviceNode> {
    let host = fs::canonicalize(path)?;
    let meta = fs::metadata(&host)?;
    node(&host, &meta).ok_or_else(|| io::Error::other("is not a device node"))
}

/// Every device node below a directory; symlinks are not followed, what vanishes meanwhile is left out.
fn nodes_below(root: &Path, skipped: &[&str]) -> Result<Vec<DeviceNode>> {
    let mut nodes = Vec::new();
    let mut open = vec![root.to_path_buf()];
    while let Some(directory) = open.pop() {
        let entries = match fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(e) if e.kind() == ErrorKind::NotFound && directory != root => continue,
            Err(e) => return Err(SpecError::host("listing devices in", directory, e)),
        };
        for entry in entries.flatten() {
            let Ok(meta) = entry.metadata() else { continue };
            let top = directory == root && entry.file_name().to_str().is_some_and(|name| skipped.contains(&name));
            if top {
                continue;
            }
            if meta.is_dir() {
                open.push(entry.path());
            } else if let Some(node) = node(&entry.path(), &meta) {
                nodes.push(node);
            }
            if nodes.len() > MAX_DEVICES {
                let error = io::Error::other(format!("more than {MAX_DEVICES} device nodes"));
                return Err(SpecError::host("listing devices in", root, error));
            }
        }
    }
    nodes.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(nodes)
}

/// Looks up the devices of a request. A directory means every node below it (CRI `Device.host_path`).
pub fn resolve_devices(devices: &[Device]) -> Result<Vec<ResolvedDevice>> {
    let mut all = Vec::new();
    for (i, device) in devices.iter().enumerate() {
        let field = |name: &str| format!("spec.devices[{i}].{name}");
        let permissions = match device.permissions.as_str() {
            "" => "rwm",
            given if given.bytes().all(|b| b"rwm".contains(&b)) => given,
            given => {
                return Err(SpecError::invalid(
                    field("permissions"),
                    format!("`{given}` is not made of r, w, m"),
                ));
            }
        };
        let wrong = |e: io::Error| SpecError::invalid(field("hostPath"), format!("{}: {e}", device.host_path));
        let host = fs::canonicalize(&device.host_path).map_err(wrong)?;
        let meta = fs::metadata(&host).map_err(wrong)?;
        let nodes = match node(&host, &meta) {
            Some(node) => vec![node],
            None if meta.is_dir() => nodes_below(&host, &[])?,
            None => Vec::new(),
        };
        if nodes.is_empty() {
            return Err(SpecError::invalid(
                field("hostPath"),
                format!(
                    "{} is neither a device node nor a directory with some",
                    device.host_path
                ),
            ));
        }
        all.extend(nodes.into_iter().map(|node| {
            let below = node.path.strip_prefix(&host).unwrap_or(Path::new(""));
            let mut container_path = PathBuf::from(&device.container_path);
            if !below.as_os_str().is_empty() {
                container_path.push(below);
            }
            ResolvedDevice {
                container_path,
                permissions: permissions.into(),
                node,
            }
        }));
    }
    Ok(all)
}

/// Looks up the sources of a request's mounts, and whether they can be given as asked.
///
/// Makes a missing host directory (0755), as both references do. `images` has the mounted source of each image
/// volume by its index in the list.
///
/// # Errors
/// For a propagation that the host's mount does not have (the text names the mount), and for a recursive read-only
/// mount on an old kernel (the text contains `RROUnsupported`, which callers look for).
pub fn resolve_mounts(
    mounts: &[Mount],
    images: &BTreeMap<usize, PathBuf>,
    host: &HostFacts,
) -> Result<Vec<ResolvedMount>> {
    let mut resolved = Vec::with_capacity(mounts.len());
    for (i, mount) in mounts.iter().enumerate() {
        if mount.recursive_read_only && !host.recursive_read_only() {
            return Err(SpecError::unsupported(
                format!("spec.mounts[{i}].recursiveReadOnly"),
                "RROUnsupported: recursive read-only mounts need Linux 5.12",
            ));
        }
        let source = if mount.image.is_some() {
            images.get(&i).cloned().ok_or_else(|| {
                SpecError::invalid(
                    format!("spec.mounts[{i}].image"),
                    "ImageVolumeMountFailed: the image is not mounted; pull it first",
                )
            })?
        } else {
            let source = host_source(&mount.host_path)?;
            if mount.propagation != Propagation::Private {
                check_propagation(i, mount.propagation, &source)?;
            }
            source
        };
        resolved.push(ResolvedMount { source });
    }
    Ok(resolved)
}

fn host_source(path: &str) -> Result<PathBuf> {
    match fs::canonicalize(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => {
            let made = fs::DirBuilder::new().recursive(true).mode(0o755).create(path);
            made.and_then(|()| fs::canonicalize(path))
                .map_err(|e| SpecError::host("making the mount source", path, e))
        }
        other => other.map_err(|e| SpecError::host("resolving the mount source", path, e)),
    }
}

/// mount_namespaces(7): slave propagation needs a shared or slave source mount, shared propagation a shared one.
fn check_propagation(index: usize, wish: Propagation, source: &Path) -> Result<()> {
    let mount = mount_of(source)?;
    let fits = match wish {
        Propagation::Private => true,
        Propagation::HostToContainer => mount.shared || mount.slave,
        Propagation::Bidirectional => mount.shared,
    };
    if fits {
        return Ok(());
    }
    let needed = if wish == Propagation::Bidirectional {
        "shared"
    } else {
        "shared or slave"
    };
    Err(SpecError::invalid(
        format!("spec.mounts[{index}].propagation"),
        format!(
            "{} lies on the mount {}, which is not {needed}; try `mount --make-rshared {}`",
            source.display(),
            mount.point.display(),
            mount.point.display(),
        ),
    ))
}

struct MountLine {
    id: u64,
    point: PathBuf,
    kind: String,
    shared: bool,
    slave: bool,
}

impl MountLine {
    /// `36 35 98:0 /root /point rw,noatime master:1 - ext3 /dev/root rw` (proc_pid_mountinfo(5)).
    fn parse(line: &str) -> Option<Self> {
        let (front, back) = line.split_once(" - ")?;
        let fields: Vec<_> = front.split(' ').collect();
        let tags = fields.get(6..).unwrap_or_default();
        Some(Self {
            id: fields.first()?.parse().ok()?,
            point: PathBuf::from(unescape(fields.get(4)?)),
            kind: back.split(' ').next()?.into(),
            shared: tags.iter().any(|tag| tag.starts_with("shared:")),
            slave: tags.iter().any(|tag| tag.starts_with("master:")),
        })
    }
}

/// Space, tab, newline and backslash are written as three octal digits.
fn unescape(text: &str) -> String {
    [(r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")]
        .iter()
        .fold(text.to_string(), |text, (code, plain)| text.replace(code, plain))
}

/// The mount that holds a path, by the id that the kernel gives an open descriptor of it.
fn mount_of(path: &Path) -> Result<MountLine> {
    let opened = fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_PATH | libc::O_CLOEXEC)
        .open(path);
    let file = opened.map_err(|e| SpecError::host("opening the mount source", path, e))?;
    let info = read(&format!("/proc/self/fdinfo/{}", file.as_raw_fd()))?;
    let id = info
        .lines()
        .find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse::<u64>().ok());
    let mounts = read("/proc/self/mountinfo")?;
    let mut mounts = mounts.lines().filter_map(MountLine::parse);
    mounts
        .find(|mount| Some(mount.id) == id)
        .ok_or_else(|| SpecError::host("finding the mount of", path, ErrorKind::NotFound.into()))
}

#[cfg(test)]
mod tests {
    use nix::mount::MsFlags;

    use super::*;

    #[test]
    fn facts_of_this_host() {
        let facts = HostFacts::read().unwrap();
        assert!(facts.kernel >= (4, 0) && !facts.hostname.is_empty());
        assert!(facts.capabilities.contains(oci_spec::runtime::Capability::Chown));
        assert!(facts.cgroup_v2 == facts.cgroup_v1.is_empty());
        assert!(
            facts
                .devices
                .iter()
                .any(|d| (d.kind, d.major, d.minor) == (DeviceKind::Char, 1, 3))
        );
        assert!(!facts.devices.iter().any(|d| d.path.starts_with("/dev/pts")));
    }

    #[test]
    fn small_parsers() {
        assert_eq!(kernel_version("6.18.44-x"), (6, 18));
        assert_eq!(kernel_version("5.4"), (5, 4));
        assert_eq!(page_size("hugepages-2048kB").as_deref(), Some("2MB"));
        assert_eq!(page_size("hugepages-1048576kB").as_deref(), Some("1GB"));
        assert_eq!(page_size("hugepages-64kB").as_deref(), Some("64KB"));
        let line = r"36 35 98:0 / /mnt/a\040b rw,noatime shared:3 master:1 - ext3 /dev/root rw";
        let mount = MountLine::parse(line).unwrap();
        assert_eq!(
            (mount.id, mount.point.to_str(), mount.kind.as_str()),
            (36, Some("/mnt/a b"), "ext3")
        );
        assert!(mount.shared && mount.slave);
    }

    #[test]
    fn devices_are_looked_up() {
        let device = |host: &str, permissions: &str| Device {
            host_path: host.into(),
            container_path: "/dev/x".into(),
            permissions: permissions.into(),
        };
        let found = resolve_devices(&[device("/dev/null", "rw")]).unwrap();
        assert_eq!((found[0].node.major, found[0].node.minor), (1, 3));
        assert_eq!(
            (found[0].permissions.as_str(), found[0].container_path.to_str()),
            ("rw", Some("/dev/x"))
        );

        let directory = tempfile::tempdir().unwrap();
        let name = directory.path().to_str().unwrap();
        std::os::unix::fs::symlink("/dev/zero", directory.path().join("link")).unwrap();
        let through = resolve_devices(&[device(&format!("{name}/link"), "")]).unwrap();
        assert_eq!((through[0].node.minor, through[0].permissions.as_str()), (5, "rwm"));
        for (host, permissions, field) in [
            (name, "r", "hostPath"),
            ("/dev/no-such-node", "r", "hostPath"),
            ("/etc/passwd", "r", "hostPath"),
            ("/dev/null", "x", "permissions"),
        ] {
            let error = resolve_devices(&[device(host, permissions)]).unwrap_err().to_string();
            assert!(error.starts_with(&format!("spec.devices[0].{field}: ")), "{error}");
        }
    }

    #[test]
    fn mount_sources_are_made_and_links_resolved() {
        let directory = tempfile::tempdir().unwrap();
        let real = fs::canonicalize(directory.path()).unwrap();
        let facts = HostFacts {
            kernel: (6, 1),
            ..Default::default()
        };
        let mount = |path: &str| Mount {
            host_path: real.join(path).to_str().unwrap().into(),
            container_path: "/x".into(),
            ..Default::default()
        };
        std::os::unix::fs::symlink(real.join("new/deep"), real.join("link")).unwrap();
        let got = resolve_mounts(&[mount("new/deep"), mount("link")], &BTreeMap::new(), &facts).unwrap();
        assert!(got.iter().all(|m| m.source == real.join("new/deep")), "{got:?}");
        assert_eq!(fs::metadata(real.join("new")).unwrap().mode() & 0o777, 0o755);

        let old = HostFacts {
            kernel: (5, 10),
            ..Default::default()
        };
        let rro = Mount {
            recursive_read_only: true,
            ..mount("new")
        };
        let error = resolve_mounts(&[rro], &BTreeMap::new(), &old).unwrap_err().to_string();
        assert!(error.contains("RROUnsupported"), "{error}");
    }

    /// A bind mount of a directory on itself, undone at the end.
    struct Bound(tempfile::TempDir);

    impl Bound {
        fn new() -> Self {
            let bound = Self(tempfile::tempdir().unwrap());
            bound.mount(MsFlags::MS_BIND);
            bound
        }

        fn mount(&self, flags: MsFlags) {
            let source = Some(self.0.path()).filter(|_| flags.contains(MsFlags::MS_BIND));
            nix::mount::mount(source, self.0.path(), None::<&str>, flags, None::<&str>).unwrap();
        }
    }

    impl Drop for Bound {
        fn drop(&mut self) {
            let _ = nix::mount::umount2(self.0.path(), nix::mount::MntFlags::MNT_DETACH);
        }
    }

    #[test]
    fn the_hosts_mount_must_propagate_what_is_asked_for() {
        let facts = HostFacts {
            kernel: (6, 1),
            ..Default::default()
        };
        let bound = Bound::new();
        let resolve = |propagation| {
            let host_path = bound.0.path().join("below").to_str().unwrap().into();
            let mount = Mount {
                host_path,
                container_path: "/x".into(),
                propagation,
                ..Default::default()
            };
            resolve_mounts(&[mount], &BTreeMap::new(), &facts)
                .map(drop)
                .map_err(|e| e.to_string())
        };
        bound.mount(MsFlags::MS_PRIVATE);
        assert_eq!(resolve(Propagation::Private), Ok(()));
        for wish in [Propagation::HostToContainer, Propagation::Bidirectional] {
            let error = resolve(wish).unwrap_err();
            let name = fs::canonicalize(bound.0.path()).unwrap();
            let text = format!("lies on the mount {}, which is not shared", name.display());
            assert!(
                error.starts_with("spec.mounts[0].propagation: ") && error.contains(&text),
                "{error}"
            );
        }
        bound.mount(MsFlags::MS_SHARED);
        assert_eq!(resolve(Propagation::HostToContainer), Ok(()));
        assert_eq!(resolve(Propagation::Bidirectional), Ok(()));
    }
}
