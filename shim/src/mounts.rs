//! A container's bind mounts, and what is made read-only or hidden at last.
//!
//! libcontainer binds without propagation, id mappings or anything at `/dev`. So the sources are cloned here, in the
//! host's mount namespace and with the host's rights (open_tree(2)), get their attributes while they are attached
//! nowhere, and are put in place by the container's first process, once the root is its own. There links of the image
//! can lead nowhere else, and in a user namespace no directory of the host must let its root through.
//!
//! ```text
//! maker: open_tree, mount_setattr ──fork──> init: namespaces, base mounts, pivot_root (libcontainer)
//!                                             └─> move_mount each · working directory · root, paths read-only · masks
//! ```

use std::ffi::CStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use oci_spec::runtime::{Linux, LinuxIdMapping, LinuxNamespaceType, Mount, Spec};

use shim::PROC_FILES;

use crate::inside::Root;
use crate::sys::{self, check};

const MOVE_MOUNT_F_EMPTY_PATH: libc::c_uint = 0x04;
const MOVE_MOUNT_T_EMPTY_PATH: libc::c_uint = 0x40;
const FSCONFIG_CMD_CREATE: libc::c_uint = 6;

/// Attributes by their option's name: what it sets, what it clears. `rw` and `async` undo nothing: a bind never gets
/// more than its source had, unless it is asked for by name.
const OPTIONS: [(&str, u64, u64); 14] = [
    ("ro", libc::MOUNT_ATTR_RDONLY, 0),
    ("nosuid", libc::MOUNT_ATTR_NOSUID, 0),
    ("suid", 0, libc::MOUNT_ATTR_NOSUID),
    ("nodev", libc::MOUNT_ATTR_NODEV, 0),
    ("dev", 0, libc::MOUNT_ATTR_NODEV),
    ("noexec", libc::MOUNT_ATTR_NOEXEC, 0),
    ("exec", 0, libc::MOUNT_ATTR_NOEXEC),
    ("nodiratime", libc::MOUNT_ATTR_NODIRATIME, 0),
    ("diratime", 0, libc::MOUNT_ATTR_NODIRATIME),
    ("noatime", libc::MOUNT_ATTR_NOATIME, libc::MOUNT_ATTR__ATIME),
    ("strictatime", libc::MOUNT_ATTR_STRICTATIME, libc::MOUNT_ATTR__ATIME),
    ("relatime", libc::MOUNT_ATTR_RELATIME, libc::MOUNT_ATTR__ATIME),
    ("nostrictatime", libc::MOUNT_ATTR_RELATIME, libc::MOUNT_ATTR__ATIME),
    ("nosymfollow", libc::MOUNT_ATTR_NOSYMFOLLOW, 0),
];

/// A mount that is put in place by the container's first process.
struct Late {
    destination: PathBuf,
    /// `None`: libcontainer made it, but a mount above it comes later; so it is taken up and put on top again.
    tree: Option<OwnedFd>,
}

/// What is left to do when the root is the container's own.
pub struct Mounts {
    late: Vec<Late>,
    /// Is /dev someone else's, so that nothing must be made in it?
    pub own_dev: bool,
    readonly: bool,
    shared: bool,
    readonly_paths: Vec<String>,
    masked_paths: Vec<String>,
}

type Step<T = ()> = Result<T, String>;

fn told<E: std::fmt::Display>(what: impl std::fmt::Display) -> impl FnOnce(E) -> String {
    move |error| format!("{what}: {error}")
}

/// Is this mount ours to make? All binds are, unless a hook of the container's creation must find them there already.
fn is_late(spec: &Spec, mount: &Mount) -> bool {
    let options = mount.options().as_deref().unwrap_or_default();
    let has = |names: &[&str]| options.iter().any(|option| names.contains(&option.as_str()));
    if mount.typ().as_deref() != Some("bind") && !has(&["bind", "rbind"]) {
        return false;
    }
    let hooks = spec.hooks().as_ref();
    let hooked = hooks.is_some_and(|hooks| hooks.create_container().as_ref().is_some_and(|list| !list.is_empty()));
    !hooked
        || mount.destination().starts_with("/dev")
        || mount.uid_mappings().is_some()
        || has(&["shared", "rshared", "slave", "rslave"])
}

/// The mounts that libcontainer makes.
pub fn early(spec: &Spec) -> Vec<Mount> {
    let all = spec.mounts().as_deref().unwrap_or_default();
    let mut early: Vec<Mount> = all.iter().filter(|mount| !is_late(spec, mount)).cloned().collect();
    if !early.iter().any(|mount| mount.destination() == Path::new("/dev")) {
        // It makes devices in /dev, whatever will be there later: not in the image.
        let mut dev = Mount::default();
        dev.set_destination("/dev".into())
            .set_typ(Some("tmpfs".into()))
            .set_source(Some("tmpfs".into()))
            .set_options(Some(["nosuid", "mode=755", "size=64k"].map(String::from).into()));
        early.insert(0, dev);
    }
    let label = spec.linux().as_ref().and_then(|linux| linux.mount_label().clone());
    if let Some(label) = label.filter(|label| !label.is_empty()) {
        early.iter_mut().for_each(|mount| add_label(mount, &label));
    }
    early
}

/// The SELinux label of the files in it. Other kinds than these have labels of their own, or are shared with others.
fn add_label(mount: &mut Mount, label: &str) {
    if matches!(mount.typ().as_deref(), Some("tmpfs" | "devpts")) {
        let mut options = mount.options().clone().unwrap_or_default();
        // Not quoted, though it may hold commas: each option is handed over by itself (fsconfig(2)).
        options.push(format!("context={label}"));
        mount.set_options(Some(options));
    }
}

impl Mounts {
    /// Clones all sources. In the host's mount namespace, with the host's rights.
    pub fn open(spec: &Spec) -> Step<Mounts> {
        let linux = spec.linux().as_ref().ok_or("config.json: linux: missing")?;
        let all = spec.mounts().as_deref().unwrap_or_default();
        let mut users = Users {
            linux,
            made: Vec::new(),
        };
        let mut late: Vec<Late> = Vec::new();
        for mount in all {
            let destination = mount.destination().clone();
            let is_covered = || late.iter().any(|above| destination.starts_with(&above.destination));
            if is_late(spec, mount) {
                let tree = source(mount, linux, &mut users).map_err(told(format_args!(
                    "mount {} at {}",
                    mount.source().as_deref().unwrap_or(Path::new("")).display(),
                    destination.display()
                )))?;
                late.push(Late {
                    destination,
                    tree: Some(tree),
                });
            } else if is_covered() {
                late.push(Late {
                    destination,
                    tree: None,
                });
            }
        }
        let paths = |paths: &Option<Vec<String>>| paths.clone().unwrap_or_default();
        Ok(Mounts {
            own_dev: !late.iter().any(|mount| mount.destination == Path::new("/dev")),
            late,
            readonly: spec.root().as_ref().is_some_and(|root| root.readonly() == Some(true)),
            shared: linux
                .rootfs_propagation()
                .as_deref()
                .is_some_and(|kind| kind.ends_with("shared")),
            readonly_paths: paths(linux.readonly_paths()),
            masked_paths: paths(linux.masked_paths()),
        })
    }

    /// Puts them in place, parents first. In the container's first process.
    pub fn attach(&self, root: &Root) -> Step {
        let mut trees = Vec::new();
        for mount in &self.late {
            let again = || {
                let at = root.find(&mount.destination)?;
                clone(at.as_fd(), c"", true)
            };
            let tree = match &mount.tree {
                Some(tree) => tree.as_fd().try_clone_to_owned(),
                None => again(),
            };
            trees.push(tree.map_err(told(mount.destination.display()))?);
        }
        for (mount, tree) in self.late.iter().zip(&trees) {
            put(root, &mount.destination, tree)
                .map_err(told(format_args!("mount at {}", mount.destination.display())))?;
        }
        Ok(())
    }

    /// Nothing is made after this: read-only root and paths, masks.
    pub fn seal(&self, root: &Root) -> Step {
        if self.shared {
            let attributes = attributes(0, 0, libc::MS_SHARED);
            set(&open_root()?, &attributes, false).map_err(told("share the root"))?;
        }
        if self.readonly {
            let attributes = attributes(libc::MOUNT_ATTR_RDONLY, 0, 0);
            set(&open_root()?, &attributes, false).map_err(told("make the root read-only"))?;
        }
        for path in &self.readonly_paths {
            absent_is_fine(read_only(root, Path::new(path))).map_err(told(format_args!("make {path} read-only")))?;
        }
        for path in &self.masked_paths {
            absent_is_fine(mask(root, Path::new(path))).map_err(told(format_args!("mask {path}")))?;
        }
        Ok(())
    }
}

/// As seen now: a descriptor from before something was mounted on the root would be of what is below.
fn open_root() -> Step<OwnedFd> {
    File::open("/").map(OwnedFd::from).map_err(told("open /"))
}

fn absent_is_fine(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => Ok(()),
        other => other,
    }
}

fn put(root: &Root, destination: &Path, tree: &OwnedFd) -> io::Result<()> {
    let is_dir = is_dir(tree)?;
    let target = if is_dir {
        root.make_dir(destination)?
    } else {
        root.make_file(destination)?
    };
    if self::is_dir(&target)? != is_dir {
        let (source, there) = if is_dir {
            ("a directory", "not one")
        } else {
            ("a file", "a directory")
        };
        return Err(io::Error::other(format!(
            "the source is {source}, what is there is {there}"
        )));
    }
    let is_allowed = destination == Path::new("/proc") || PROC_FILES.iter().any(|file| destination == Path::new(file));
    if !is_allowed && sys::fs_type(target.as_fd())? == libc::PROC_SUPER_MAGIC {
        return Err(io::Error::other("it leads into /proc, which is the kernel's"));
    }
    move_to(tree, &target)
}

fn is_dir(fd: &OwnedFd) -> io::Result<bool> {
    Ok(File::from(fd.try_clone()?).metadata()?.is_dir())
}

fn read_only(root: &Root, path: &Path) -> io::Result<()> {
    let at = root.find(path)?;
    let tree = clone(at.as_fd(), c"", true)?;
    set(&tree, &attributes(libc::MOUNT_ATTR_RDONLY, 0, libc::MS_PRIVATE), true)?;
    move_to(&tree, &at)
}

/// A file becomes /dev/null, a directory an empty one.
fn mask(root: &Root, path: &Path) -> io::Result<()> {
    let at = root.find(path)?;
    if is_dir(&at)? {
        return move_to(&empty()?, &at);
    }
    let null = root.find(Path::new("/dev/null"))?;
    let meta = File::from(null.try_clone()?).metadata()?;
    if meta.rdev() != libc::makedev(1, 3) || meta.mode() & libc::S_IFMT != libc::S_IFCHR {
        return Err(io::Error::other("/dev/null is not the null device"));
    }
    let tree = clone(null.as_fd(), c"", false)?;
    set(&tree, &attributes(0, 0, libc::MS_PRIVATE), false)?;
    move_to(&tree, &at)
}

/// An empty, read-only file system attached nowhere.
fn empty() -> io::Result<OwnedFd> {
    let attributes =
        libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC;
    // SAFETY: a valid name, null for what the command does not take, else numbers; the descriptors are new and ours.
    unsafe {
        let context = check(libc::syscall(libc::SYS_fsopen, c"tmpfs".as_ptr(), 1))?;
        let context = OwnedFd::from_raw_fd(context as RawFd);
        let raw = context.as_raw_fd();
        check(libc::syscall(
            libc::SYS_fsconfig,
            raw,
            FSCONFIG_CMD_CREATE,
            0usize,
            0usize,
            0,
        ))?;
        let tree = check(libc::syscall(libc::SYS_fsmount, raw, 1, attributes as libc::c_uint))?;
        Ok(OwnedFd::from_raw_fd(tree as RawFd))
    }
}

/// The prepared clone of a mount's source.
fn source(mount: &Mount, linux: &Linux, users: &mut Users) -> io::Result<OwnedFd> {
    let path = mount.source().as_deref().ok_or_else(|| io::Error::other("no source"))?;
    let own_cgroup = linux
        .cgroups_path()
        .as_deref()
        .and_then(|path| path.strip_prefix("/").ok());
    if own_cgroup.is_some_and(|own| !own.as_os_str().is_empty() && path.ends_with(own)) && !path.exists() {
        // The container's own cgroup, which libcontainer makes a moment later.
        fs::create_dir_all(path)?;
    }
    let options = mount.options().as_deref().unwrap_or_default();
    let has = |name: &str| options.iter().any(|option| option == name);
    // SAFETY: AT_FDCWD is no descriptor to be closed, and lives for ever.
    let here = unsafe { BorrowedFd::borrow_raw(libc::AT_FDCWD) };
    let tree = clone(here, &sys::cpath(path)?, has("rbind"))?;
    let (mut top, mut below) = (attributes(0, 0, 0), attributes(0, 0, 0));
    for option in options {
        for (name, sets, clears) in OPTIONS {
            let to = if option == name {
                &mut top
            } else if option.strip_prefix('r') == Some(name) {
                &mut below
            } else {
                continue;
            };
            to.attr_set = (to.attr_set & !clears) | sets;
            to.attr_clr |= clears & !sets | (clears & libc::MOUNT_ATTR__ATIME);
        }
        match option.as_str() {
            "private" => top.propagation = libc::MS_PRIVATE,
            "rprivate" => below.propagation = libc::MS_PRIVATE,
            "slave" => top.propagation = libc::MS_SLAVE,
            "rslave" => below.propagation = libc::MS_SLAVE,
            "shared" => top.propagation = libc::MS_SHARED,
            "rshared" => below.propagation = libc::MS_SHARED,
            _ => {}
        }
    }
    set(&tree, &below, true)?;
    let namespace = users.of(mount)?;
    if let Some(namespace) = &namespace {
        let to = if has("ridmap") { &mut below } else { &mut top };
        to.attr_set |= libc::MOUNT_ATTR_IDMAP;
        to.userns_fd = namespace.as_raw_fd() as u64;
        if has("ridmap") {
            set(&tree, &below, true).map_err(unmapped)?;
        }
    }
    match set(&tree, &top, false) {
        Err(_) if namespace.is_some() && belongs(path, mount) => {
            top.attr_set &= !libc::MOUNT_ATTR_IDMAP;
            set(&tree, &top, false)?;
        }
        other => other.map_err(|error| if namespace.is_some() { unmapped(error) } else { error })?,
    }
    Ok(tree)
}

/// Whether a source is the mapping's root's already: where the file system maps no owners, the daemon gives its own
/// files away.
fn belongs(path: &Path, mount: &Mount) -> bool {
    let root = |maps: &Option<Vec<LinuxIdMapping>>| {
        let maps = maps.as_deref().unwrap_or_default();
        maps.iter()
            .find(|map| map.container_id() == 0)
            .map(LinuxIdMapping::host_id)
    };
    let owner = std::fs::symlink_metadata(path).map(|meta| (Some(meta.uid()), Some(meta.gid())));
    owner.is_ok_and(|owner| owner == (root(mount.uid_mappings()), root(mount.gid_mappings())) && owner.0 != Some(0))
}

fn unmapped(error: io::Error) -> io::Error {
    io::Error::new(
        error.kind(),
        format!("{error} (its file system may not support id-mapped mounts, see mount_setattr(2))"),
    )
}

/// Mappings of users and of groups.
type Maps = (Vec<LinuxIdMapping>, Vec<LinuxIdMapping>);

/// User namespaces that give id-mapped mounts their mapping.
struct Users<'a> {
    linux: &'a Linux,
    made: Vec<(Maps, OwnedFd)>,
}

impl Users<'_> {
    fn of(&mut self, mount: &Mount) -> io::Result<Option<OwnedFd>> {
        let (Some(uids), Some(gids)) = (mount.uid_mappings(), mount.gid_mappings()) else {
            return Ok(None);
        };
        let wanted = (uids.clone(), gids.clone());
        if let Some((_, fd)) = self.made.iter().find(|(maps, _)| *maps == wanted) {
            return fd.try_clone().map(Some);
        }
        let fd = match self.pods(&wanted) {
            Some(path) => File::open(path)?.into(),
            None => user_namespace(&wanted.0, &wanted.1)?,
        };
        let answer = fd.try_clone()?;
        self.made.push((wanted, fd));
        Ok(Some(answer))
    }

    /// The pod's own namespace, if it has this mapping.
    fn pods(&self, wanted: &Maps) -> Option<PathBuf> {
        let same = self.linux.uid_mappings().as_ref() == Some(&wanted.0)
            && self.linux.gid_mappings().as_ref() == Some(&wanted.1);
        let all = self.linux.namespaces().as_deref().unwrap_or_default();
        let user = all
            .iter()
            .find(|namespace| namespace.typ() == LinuxNamespaceType::User)?;
        user.path().clone().filter(|_| same)
    }
}

/// A user namespace with these mappings, kept by its descriptor alone.
fn user_namespace(uids: &[LinuxIdMapping], gids: &[LinuxIdMapping]) -> io::Result<OwnedFd> {
    let (made, tell) = sys::pipe(0)?;
    let (held, hold) = sys::pipe(0)?;
    let pid = sys::fork()?;
    if pid == 0 {
        drop((made, hold));
        // SAFETY: no pointers.
        let done = check(unsafe { libc::unshare(libc::CLONE_NEWUSER) });
        let _ = File::from(tell).write_all(&[u8::from(done.is_ok())]);
        let _ = File::from(held).read(&mut [0]);
        sys::exit(0);
    }
    drop((tell, held));
    let mut ok = [0];
    let told = File::from(made).read(&mut ok);
    let namespace = (|| {
        if told? != 1 || ok[0] != 1 {
            return Err(io::Error::other(
                "no user namespace could be made; see user.max_user_namespaces",
            ));
        }
        for (file, maps) in [("uid_map", uids), ("gid_map", gids)] {
            let line = |map: &LinuxIdMapping| format!("{} {} {}\n", map.container_id(), map.host_id(), map.size());
            let text: String = maps.iter().map(line).collect();
            let file = OpenOptions::new().write(true).open(format!("/proc/{pid}/{file}"));
            file.and_then(|mut file| file.write_all(text.as_bytes()))?;
        }
        File::open(format!("/proc/{pid}/ns/user")).map(OwnedFd::from)
    })();
    drop(hold);
    // SAFETY: our own child, no pointer but null.
    unsafe { libc::waitpid(pid as libc::pid_t, std::ptr::null_mut(), 0) };
    namespace
}

fn clone(at: BorrowedFd, path: &CStr, recursive: bool) -> io::Result<OwnedFd> {
    let mut flags =
        libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC as libc::c_uint | libc::AT_EMPTY_PATH as libc::c_uint;
    if recursive {
        flags |= libc::AT_RECURSIVE as libc::c_uint;
    }
    // SAFETY: a live directory (or AT_FDCWD), a valid path, a number.
    let fd = check(unsafe { libc::syscall(libc::SYS_open_tree, at.as_raw_fd(), path.as_ptr(), flags) })?;
    // SAFETY: the kernel just gave us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

fn attributes(attr_set: u64, attr_clr: u64, propagation: libc::c_ulong) -> libc::mount_attr {
    libc::mount_attr {
        attr_set,
        attr_clr,
        propagation: propagation as _,
        userns_fd: 0,
    }
}

fn set(tree: &OwnedFd, attributes: &libc::mount_attr, recursive: bool) -> io::Result<()> {
    if attributes.attr_set == 0 && attributes.attr_clr == 0 && attributes.propagation == 0 {
        return Ok(());
    }
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: a live descriptor, an empty path that means it, the structure with its size.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            flags,
            attributes as *const libc::mount_attr,
            size_of_val(attributes),
        )
    })
    .map(drop)
}

fn move_to(tree: &OwnedFd, target: &OwnedFd) -> io::Result<()> {
    let flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH;
    let empty = c"".as_ptr();
    let (tree, target) = (tree.as_raw_fd(), target.as_raw_fd());
    // SAFETY: two live descriptors, and empty paths that mean them.
    check(unsafe { libc::syscall(libc::SYS_move_mount, tree, empty, target, empty, flags) }).map(drop)
}
