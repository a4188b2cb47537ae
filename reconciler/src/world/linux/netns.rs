//! The pinned namespaces of a sandbox: net, ipc and uts, and the user namespace that owns them, if there is one.
//!
//! A pin is an empty file with a namespace bind-mounted on it, so the namespace lives without any process in it.
//! One thread makes all kinds of one sandbox, prepares them (hostname, `lo`, sysctls) and pins them last; so a pin is
//! always a finished namespace, and a set that lacks one was cut short.
//!
//! ```text
//! /run/netns/rc-<instance>-<uid>      net, where `ip netns exec` finds it too
//! <directory of the sandbox>/ipc, uts, user
//! ```
//!
//! A thread cannot make a user namespace: a child does, together with the others, and the thread joins those.
//!
//! Must not: know addresses or links other than `lo` (that is `network`).

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::statfs::{FsType, fstatfs};

use shim::fault;

use super::network::Class;

/// Where net pins live, as `ip netns` has it.
pub const NETNS_DIR: &str = "/run/netns";

/// `NSFS_MAGIC` of linux/magic.h.
const NSFS: FsType = FsType(0x6e73_6673);

/// What a sandbox wants pinned; `None` means the host's namespace is used.
#[derive(Debug, Clone, Default)]
pub struct Pins {
    pub net: Option<PathBuf>,
    pub ipc: Option<PathBuf>,
    pub uts: Option<PathBuf>,
    /// Set in the uts namespace when that is ours; empty leaves the host's name.
    pub hostname: String,
    /// CRI `linux.sysctls`: `net.*`, `kernel.shm*`, `kernel.msg*`, `kernel.sem`, `fs.mqueue.*`.
    pub sysctls: BTreeMap<String, String>,
    /// A user namespace that owns the others.
    pub user: Option<UserPin>,
}

/// A wished user namespace: where it is pinned, and its maps as (inside, host, length).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UserPin {
    pub path: PathBuf,
    pub uids: Vec<(u32, u32, u32)>,
    pub gids: Vec<(u32, u32, u32)>,
}

impl UserPin {
    /// The host's ids of the namespace's root.
    pub fn root(&self) -> (u32, u32) {
        let root = |maps: &[(u32, u32, u32)]| maps.first().map_or(0, |(_, host, _)| *host);
        (root(&self.uids), root(&self.gids))
    }
}

/// What is at the path of a pin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pin {
    Absent,
    /// A file without a namespace on it: cut short, or unmounted by someone.
    NotNsfs,
    /// `inode` is the namespace's identity, the number in `net:[…]`.
    Ns {
        inode: u64,
    },
}

/// Why a namespace could not be made, pinned or removed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("linux.sysctls[{key}]: {why}")]
    Sysctl { key: String, why: String },
    #[error(transparent)]
    Child(#[from] shim::Error),
    #[error("could not {doing} {object}: {source}")]
    System {
        doing: &'static str,
        object: String,
        source: io::Error,
    },
}

impl Error {
    pub fn class(&self) -> Class {
        match self {
            Error::Sysctl { .. } => Class::Permanent,
            Error::System { .. } | Error::Child(_) => Class::Transient,
        }
    }
}

type Result<T> = std::result::Result<T, Error>;

fn system(doing: &'static str, object: impl ToString) -> impl FnOnce(io::Error) -> Error {
    let object = object.to_string();
    move |source| Error::System { doing, object, source }
}

/// The pins of this instance.
pub struct Namespaces {
    pub instance: String,
    /// The program whose child makes a user namespace.
    pub shim: PathBuf,
}

#[async_trait]
impl crate::world::Netns for Namespaces {
    fn list(&self) -> crate::Result<Vec<String>> {
        list(&self.instance).map_err(failed)
    }

    fn observe(&self, pin: &Path) -> crate::Result<Pin> {
        observe(pin).map_err(failed)
    }

    async fn ensure(&self, want: Pins) -> crate::Result<()> {
        let shim = self.shim.clone();
        // Its own thread: a thread keeps the namespaces that it made.
        let made = tokio::task::spawn_blocking(move || ensure(&want, &shim)).await;
        let made = made.map_err(|source| crate::Error::Task {
            op: "make namespaces",
            source,
        })?;
        made.map_err(failed)
    }

    fn rebind(&self, pin: &Path, kind: Kind, pid: u32) -> crate::Result<()> {
        rebind(pin, kind, pid).map_err(failed)
    }

    fn remove(&self, pin: &Path) -> crate::Result<()> {
        remove(pin).map_err(failed)
    }
}

fn failed(e: Error) -> crate::Error {
    match e.class() {
        Class::Permanent => crate::Error::Refused(e.to_string()),
        Class::Transient => crate::Error::Io {
            op: "pin namespaces:",
            path: PathBuf::new(),
            source: io::Error::other(e),
        },
    }
}

/// The net pin of a sandbox.
pub fn net_path(instance: &str, uid: &str) -> PathBuf {
    Path::new(NETNS_DIR).join(format!("rc-{instance}-{uid}"))
}

/// Makes the pins if they are not all there. Call it only while no process of the sandbox lives: a set of which some
/// are missing was cut short, and is made anew. (For a pin lost under a live sandbox see [`rebind`].) `shim` is the
/// program whose child makes a user namespace.
pub fn ensure(want: &Pins, shim: &Path) -> Result<()> {
    let sysctls = sysctls(want)?;
    let pins = want.list();
    let mut whole = true;
    for (_, path) in &pins {
        whole &= matches!(observe(path)?, Pin::Ns { .. });
    }
    if whole {
        return Ok(());
    }
    fault::point("netns.ensure.before");
    for (_, path) in &pins {
        remove(path)?;
        prepare_file(path)?;
    }
    fault::point("netns.ensure.prepared");
    let held = want.user.as_ref().map(|user| hold(user, &pins, shim)).transpose()?;
    let want = want.clone();
    // The thread dies with its namespaces; only the pins keep them.
    let made = std::thread::Builder::new()
        .name("netns".into())
        .spawn(move || make(&want, &pins, &sysctls, held.as_ref()));
    match made.map_err(system("start a thread for", "the namespaces"))?.join() {
        Ok(result) => result,
        Err(_) => Err(system("make", "the namespaces")(io::Error::other(
            "the thread panicked",
        ))),
    }
}

impl Pins {
    fn list(&self) -> Vec<(&'static str, PathBuf)> {
        let user = self.user.as_ref().map(|user| user.path.clone());
        let all = [
            ("net", &self.net),
            ("ipc", &self.ipc),
            ("uts", &self.uts),
            ("user", &user),
        ];
        all.into_iter()
            .filter_map(|(kind, path)| Some((kind, path.clone()?)))
            .collect()
    }
}

/// A child in all of these namespaces, mapped.
fn hold(user: &UserPin, pins: &[(&'static str, PathBuf)], shim: &Path) -> Result<shim::Held> {
    let kinds: Vec<&str> = pins.iter().map(|(kind, _)| *kind).collect();
    let held = shim::Held::make(shim, &kinds)?;
    held.map(&user.uids, &user.gids)?;
    Ok(held)
}

/// Gives this thread the namespaces: new ones, or those that a child made.
fn enter(pins: &[(&'static str, PathBuf)], held: Option<&shim::Held>) -> Result<()> {
    let mut flags = CloneFlags::empty();
    for (kind, _) in pins {
        let flag = match *kind {
            "net" => CloneFlags::CLONE_NEWNET,
            "ipc" => CloneFlags::CLONE_NEWIPC,
            "uts" => CloneFlags::CLONE_NEWUTS,
            _ => continue,
        };
        match held {
            None => flags |= flag,
            Some(held) => {
                let path = held.namespace(kind);
                let file = File::open(&path).map_err(system("open", path.display()))?;
                nix::sched::setns(file, flag).map_err(|e| system("enter", path.display())(e.into()))?;
            }
        }
    }
    if flags.is_empty() {
        return Ok(());
    }
    unshare(flags).map_err(|e| system("unshare", format!("{flags:?}"))(e.into()))
}

/// Runs in a thread of its own.
fn make(
    want: &Pins,
    pins: &[(&'static str, PathBuf)],
    sysctls: &[(String, String)],
    held: Option<&shim::Held>,
) -> Result<()> {
    enter(pins, held)?;
    if want.uts.is_some() && !want.hostname.is_empty() {
        nix::unistd::sethostname(&want.hostname).map_err(|e| system("set hostname", &want.hostname)(e.into()))?;
    }
    if want.net.is_some() {
        loopback_up().map_err(system("bring up", "lo"))?;
    }
    for (key, value) in sysctls {
        let path = Path::new("/proc/sys").join(key.replace('.', "/"));
        let written = OpenOptions::new()
            .write(true)
            .open(&path)
            .and_then(|mut f| io::Write::write_all(&mut f, value.as_bytes()));
        written.map_err(|e| Error::Sysctl {
            key: key.clone(),
            why: format!("the kernel refused {value:?}: {e}"),
        })?;
    }
    for (kind, path) in pins {
        match held {
            Some(held) => bind(&held.namespace(kind), path)?,
            None => bind(Path::new(&format!("/proc/thread-self/ns/{kind}")), path)?,
        }
        fault::point("netns.ensure.torn");
    }
    Ok(())
}

/// Checks the wished sysctls and adds the defaults (CRI contract; containerd has the same).
fn sysctls(want: &Pins) -> Result<Vec<(String, String)>> {
    let mut all = Vec::new();
    if want.net.is_some() {
        for (key, value) in [
            ("net.ipv4.ip_unprivileged_port_start", "0"),
            ("net.ipv4.ping_group_range", "0 2147483647"),
        ] {
            // A user namespace rarely maps all those groups.
            let mapped = want.user.is_none() || !key.ends_with("group_range");
            if mapped && !want.sysctls.contains_key(key) {
                all.push((key.to_string(), value.to_string()));
            }
        }
    }
    for (key, value) in &want.sysctls {
        let fail = |why: &str| {
            Err(Error::Sysctl {
                key: key.clone(),
                why: why.to_string(),
            })
        };
        let net = key.starts_with("net.");
        let ipc = ["kernel.shm", "kernel.msg", "fs.mqueue."]
            .iter()
            .any(|p| key.starts_with(p))
            || key == "kernel.sem";
        if !net && !ipc {
            return fail(
                "not a namespaced sysctl; allowed are net.*, kernel.shm*, kernel.msg*, kernel.sem, fs.mqueue.*",
            );
        }
        // Dots become slashes, so an interface name with a dot is written with a slash, as sysctl(8) has it.
        if key.split(['.', '/']).any(|part| part.is_empty()) || key.bytes().any(|b| b.is_ascii_control()) {
            return fail("not a sysctl name");
        }
        if net && want.net.is_none() {
            return fail("not allowed with the host's network");
        }
        if ipc && want.ipc.is_none() {
            return fail("not allowed with the host's ipc namespace");
        }
        all.push((key.clone(), value.clone()));
    }
    Ok(all)
}

/// Sets IFF_UP on `lo` of the calling thread's net namespace, netdevice(7).
fn loopback_up() -> io::Result<()> {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
    let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    // SAFETY: ifreq is plain data, all zeroes is a valid value of it.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: the descriptor is open, and SIOCSIFFLAGS reads one ifreq.
    match unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &request) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes the empty file a namespace is mounted on, and its directory.
fn prepare_file(path: &Path) -> Result<()> {
    if let Some(dir) = path.parent() {
        if dir == Path::new(NETNS_DIR) {
            prepare_netns_dir()?;
        } else {
            fs::create_dir_all(dir).map_err(system("make directory", dir.display()))?;
        }
    }
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o000)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path);
    file.map(drop).map_err(system("make", path.display()))
}

/// Makes `/run/netns` a shared mount of its own, as `ip netns add` does (ip-netns(8)), so that both may come first and
/// an unmount reaches the copies in other mount namespaces.
fn prepare_netns_dir() -> Result<()> {
    fs::create_dir_all(NETNS_DIR).map_err(system("make directory", NETNS_DIR))?;
    // Two at once would stack two mounts; iproute2 takes the same lock.
    let dir = File::open(NETNS_DIR).map_err(system("open", NETNS_DIR))?;
    let _lock = nix::fcntl::Flock::lock(dir, nix::fcntl::FlockArg::LockExclusive)
        .map_err(|(_, e)| system("lock", NETNS_DIR)(e.into()))?;
    let share = || {
        mount(
            None::<&str>,
            NETNS_DIR,
            None::<&str>,
            MsFlags::MS_SHARED | MsFlags::MS_REC,
            None::<&str>,
        )
    };
    match share() {
        Err(nix::Error::EINVAL) => {
            let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
            mount(Some(NETNS_DIR), NETNS_DIR, None::<&str>, flags, None::<&str>)
                .and_then(|()| share())
                .map_err(|e| system("mount", NETNS_DIR)(e.into()))
        }
        other => other.map_err(|e| system("make shared", NETNS_DIR)(e.into())),
    }
}

fn bind(ns: &Path, path: &Path) -> Result<()> {
    mount(Some(ns), path, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .map_err(|e| system("pin a namespace on", path.display())(e.into()))
}

/// What is at a pin's path. Reads only; never follows a symlink.
pub fn observe(path: &Path) -> Result<Pin> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_PATH | libc::O_NOFOLLOW)
        .open(path);
    let file = match file {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Pin::Absent),
        Err(e) => return Err(system("open", path.display())(e)),
    };
    let fs = fstatfs(&file).map_err(|e| system("look at", path.display())(e.into()))?;
    if fs.filesystem_type() != NSFS {
        return Ok(Pin::NotNsfs);
    }
    let inode = file.metadata().map_err(system("look at", path.display()))?.ino();
    Ok(Pin::Ns { inode })
}

/// Takes a pin away: unmount (lazily) and unlink. Absent is success.
pub fn remove(path: &Path) -> Result<()> {
    fault::point("netns.remove.before");
    // More than one layer if two daemons raced; EINVAL is "nothing mounted".
    loop {
        match umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) => continue,
            Err(nix::Error::EINVAL) => break,
            Err(nix::Error::ENOENT) => return Ok(()),
            Err(e) => return Err(system("unmount", path.display())(e.into())),
        }
    }
    fault::point("netns.remove.torn");
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(system("remove", path.display())(e)),
        _ => Ok(()),
    }
}

/// The sandboxes of this instance that have a net pin, or what is left of one.
pub fn list(instance: &str) -> Result<Vec<String>> {
    let prefix = format!("rc-{instance}-");
    let dir = match fs::read_dir(NETNS_DIR) {
        Ok(dir) => dir,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(system("list", NETNS_DIR)(e)),
    };
    let mut uids = Vec::new();
    for entry in dir {
        let name = entry.map_err(system("list", NETNS_DIR))?.file_name();
        uids.extend(name.to_str().and_then(|n| n.strip_prefix(&prefix)).map(str::to_string));
    }
    Ok(uids)
}

/// The kinds of namespace a pin can hold, as named in `/proc/<pid>/ns`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Net,
    Ipc,
    Uts,
    User,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::Net => "net",
            Kind::Ipc => "ipc",
            Kind::Uts => "uts",
            Kind::User => "user",
        }
    }
}

/// Pins the namespace of a live process of the sandbox on a path that lost its own. The caller holds a pidfd of the
/// process and checks it afterwards, for a pid may be used again.
pub fn rebind(path: &Path, kind: Kind, pid: u32) -> Result<()> {
    let ns = PathBuf::from(format!("/proc/{pid}/ns/{}", kind.name()));
    fs::metadata(&ns).map_err(system("find", ns.display()))?;
    remove(path)?;
    prepare_file(path)?;
    bind(&ns, path)
}

/// The inode of a process's namespace, to compare with [`Pin::Ns`].
pub fn inode_of(kind: Kind, pid: u32) -> Result<u64> {
    let ns = format!("/proc/{pid}/ns/{}", kind.name());
    Ok(fs::metadata(&ns).map_err(system("look at", &ns))?.ino())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// Pins in a directory of the test's own, and a net pin where it belongs.
    struct Set {
        dir: tempfile::TempDir,
        instance: String,
    }

    impl Set {
        fn new() -> Set {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let instance = format!("t{:x}x{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
            Set {
                dir: tempfile::tempdir().unwrap(),
                instance,
            }
        }

        fn pins(&self) -> Pins {
            Pins {
                net: Some(net_path(&self.instance, "uid")),
                ipc: Some(self.dir.path().join("ns/ipc")),
                uts: Some(self.dir.path().join("ns/uts")),
                hostname: "web-0".into(),
                ..Pins::default()
            }
        }
    }

    impl Drop for Set {
        fn drop(&mut self) {
            for (_, path) in self.pins().list() {
                remove(&path).unwrap();
            }
        }
    }

    /// Runs something in pinned namespaces.
    fn inside<T: Send + 'static>(pins: &Pins, work: impl FnOnce() -> T + Send + 'static) -> T {
        let paths = pins.list();
        let run = move || {
            for (_, path) in paths {
                nix::sched::setns(File::open(path).unwrap(), CloneFlags::empty()).unwrap();
            }
            work()
        };
        std::thread::spawn(run).join().unwrap()
    }

    fn sysctl(name: &str) -> String {
        fs::read_to_string(Path::new("/proc/sys").join(name))
            .unwrap()
            .trim()
            .replace('\t', " ")
    }

    #[test]
    fn namespaces_are_prepared_and_outlive_their_thread() {
        let set = Set::new();
        let mut pins = set.pins();
        pins.sysctls = [
            ("kernel.shmmni", "123"),
            ("net.ipv4.tcp_fin_timeout", "33"),
            ("fs.mqueue.msg_max", "20"),
        ]
        .map(|(k, v)| (k.to_string(), v.to_string()))
        .into();
        ensure(&pins, Path::new("")).unwrap();
        let begun = std::time::Instant::now();
        ensure(&pins, Path::new("")).unwrap();
        println!("again: {:?}", begun.elapsed());
        let (hostname, up, sysctls) = inside(&pins, || {
            let up = fs::read_to_string("/proc/thread-self/net/if_inet6").unwrap();
            let all = [
                "kernel/shmmni",
                "net/ipv4/tcp_fin_timeout",
                "fs/mqueue/msg_max",
                "net/ipv4/ip_unprivileged_port_start",
                "net/ipv4/ping_group_range",
            ];
            (nix::unistd::gethostname().unwrap(), up, all.map(sysctl))
        });
        assert_eq!(hostname, "web-0");
        assert!(up.contains("lo"), "{up}");
        assert_eq!(sysctls, ["123", "33", "20", "0", "0 2147483647"]);
        assert_ne!(sysctl("kernel/shmmni"), "123", "the host's own is untouched");
        assert_ne!(nix::unistd::gethostname().unwrap(), "web-0");
        assert_eq!(list(&set.instance).unwrap(), ["uid"]);
        for (_, path) in pins.list() {
            remove(&path).unwrap();
            remove(&path).unwrap();
            assert_eq!(observe(&path).unwrap(), Pin::Absent);
        }
        assert!(list(&set.instance).unwrap().is_empty());
    }

    #[test]
    fn a_part_of_a_set_is_made_anew() {
        let set = Set::new();
        let pins = set.pins();
        let inodes = || pins.list().iter().map(|(_, p)| observe(p).unwrap()).collect::<Vec<_>>();
        ensure(&pins, Path::new("")).unwrap();
        let first = inodes();
        // Cut short before the last pin: an empty file.
        umount2(pins.uts.as_ref().unwrap(), MntFlags::MNT_DETACH).unwrap();
        assert_eq!(observe(pins.uts.as_ref().unwrap()).unwrap(), Pin::NotNsfs);
        ensure(&pins, Path::new("")).unwrap();
        let second = inodes();
        assert!(second.iter().all(|p| matches!(p, Pin::Ns { .. })));
        assert_ne!(first, second);
        ensure(&pins, Path::new("")).unwrap();
        assert_eq!(inodes(), second);
    }

    #[test]
    fn a_lost_pin_is_bound_again_from_a_process() {
        let set = Set::new();
        let pins = set.pins();
        ensure(&pins, Path::new("")).unwrap();
        let path = pins.net.clone().unwrap();
        let before = observe(&path).unwrap();
        // A process of the pod.
        let mut child = inside(&pins, || {
            std::process::Command::new("sleep").arg("1000").spawn().unwrap()
        });
        remove(&path).unwrap();
        rebind(&path, Kind::Net, child.id()).unwrap();
        assert_eq!(observe(&path).unwrap(), before);
        assert_eq!(
            before,
            Pin::Ns {
                inode: inode_of(Kind::Net, child.id()).unwrap()
            }
        );
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(rebind(&path, Kind::Net, child.id()).is_err());
        assert_eq!(observe(&path).unwrap(), before, "a dead process changes nothing");
    }

    #[test]
    fn bad_sysctls_are_named_before_anything_is_made() {
        let set = Set::new();
        let with = |pins: Pins, key: &str| Pins {
            sysctls: [(key.to_string(), "1".to_string())].into(),
            ..pins
        };
        for key in [
            "kernel.panic",
            "vm.swappiness",
            "kernel.shm..x",
            "net..x",
            "net./etc",
            "user.max_net_namespaces",
        ] {
            let error = ensure(&with(set.pins(), key), Path::new("")).unwrap_err();
            assert!(error.to_string().contains(key), "{error}");
            assert_eq!(error.class(), Class::Permanent);
        }
        let host_net = Pins {
            net: None,
            ..set.pins()
        };
        assert!(ensure(&with(host_net, "net.ipv4.ip_forward"), Path::new("")).is_err());
        let host_ipc = Pins {
            ipc: None,
            ..set.pins()
        };
        assert!(ensure(&with(host_ipc, "kernel.shmmax"), Path::new("")).is_err());
        let no_shim = Pins {
            user: Some(UserPin::default()),
            ..set.pins()
        };
        assert!(ensure(&no_shim, Path::new("/nonexistent")).is_err());
        remove(set.pins().net.as_ref().unwrap()).unwrap();
        assert_eq!(observe(set.pins().net.as_ref().unwrap()).unwrap(), Pin::Absent);
        // Refused by the kernel: no pin is left that looks whole.
        assert!(ensure(&with(set.pins(), "net.ipv4.nonsense"), Path::new("")).is_err());
        assert_eq!(observe(set.pins().net.as_ref().unwrap()).unwrap(), Pin::NotNsfs);
    }

    #[test]
    fn many_at_once() {
        let sets: Vec<Set> = (0..20).map(|_| Set::new()).collect();
        let begun = std::time::Instant::now();
        std::thread::scope(|scope| {
            for set in &sets {
                scope.spawn(|| ensure(&set.pins(), Path::new("")).unwrap());
            }
        });
        println!("20 sets at once: {:?}", begun.elapsed());
    }
}
