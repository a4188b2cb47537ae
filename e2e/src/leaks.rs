//! Census: what bears the mark of an instance on this node, read from the kernel alone.
//!
//! [`Census::of`] counts what belongs to one instance and must be empty once its records are gone;
//! [`Census::node`] counts the whole node and must be equal before and after a run of tests.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::socket::{self, AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType};

/// What makes a thing an instance's own.
#[derive(Clone, Debug, Default)]
pub struct Mark {
    /// The instance's name in netns files, link aliases, nft tables and its default cgroup; empty until known.
    pub instance: String,
    /// Its root and state directories: in command lines, mounts, overlay options.
    pub dirs: Vec<PathBuf>,
    /// Names of cgroups the test gave as `cgroup_parent`; what is *below* them is counted, they themselves are not.
    pub parents: Vec<String>,
}

/// Things found, by kind. Two censuses compare by value; [`Census::diff`] says what differs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Census {
    found: BTreeMap<&'static str, BTreeSet<String>>,
}

impl Census {
    /// Everything that bears `mark`.
    pub fn of(mark: &Mark) -> Result<Census> {
        let mut census = Census::default();
        let netns = netns_files()?;
        let ours = |name: &str| !mark.instance.is_empty() && name.contains(&mark.instance);
        let pins: BTreeSet<u64> = netns
            .iter()
            .filter(|(name, _)| ours(name))
            .map(|(_, inode)| *inode)
            .collect();
        for process in processes()? {
            if process.marked(mark, &pins) {
                census.add("process", process.line());
            }
        }
        netns
            .iter()
            .filter(|(name, _)| ours(name))
            .for_each(|(name, _)| census.add("netns", name.clone()));
        for mount in mounts(Path::new("/proc/self/mountinfo"))? {
            if ours(&mount) || mark.dirs.iter().any(|dir| mount.contains(&*dir.to_string_lossy())) {
                census.add("mount", mount);
            }
        }
        for cgroup in cgroups()? {
            let below = |parent: &String| cgroup.split_once(&format!("/{parent}/")).is_some();
            if ours(&cgroup) || mark.parents.iter().any(below) {
                census.add("cgroup", cgroup);
            }
        }
        links()?
            .into_iter()
            .filter(|link| ours(link))
            .for_each(|link| census.add("link", link));
        nft_tables()?
            .into_iter()
            .filter(|table| ours(table))
            .for_each(|table| census.add("nft table", table));
        for dir in &mark.dirs {
            for kind in ["pods", "trash"] {
                children(&dir.join(kind))?
                    .into_iter()
                    .for_each(|path| census.add("directory", path));
            }
            special_files(dir, &mut census)?;
        }
        Ok(census)
    }

    /// The whole node: everything of every instance, and all mounts, cgroups, links, addresses, routes, nft tables.
    pub fn node() -> Result<Census> {
        let mut census = Census::default();
        for process in processes()? {
            if process.is_runtime() {
                census.add("process", process.line());
            }
        }
        netns_files()?
            .into_iter()
            .for_each(|(name, _)| census.add("netns", name));
        // ip(8) mounts the directory of its namespaces upon itself, once and for all.
        mounts(Path::new("/proc/self/mountinfo"))?
            .into_iter()
            .filter(|mount| !mount.starts_with("/run/netns "))
            .for_each(|mount| census.add("mount", mount));
        let managed = |path: &String| path.contains(".slice") || path.contains(".scope") || path.contains(".service");
        cgroups()?
            .into_iter()
            .filter(|c| !managed(c))
            .for_each(|cgroup| census.add("cgroup", cgroup));
        links()?.into_iter().for_each(|link| census.add("link", link));
        addresses()?
            .into_iter()
            .for_each(|address| census.add("address", address));
        routes()?.into_iter().for_each(|route| census.add("route", route));
        nft_tables()?
            .into_iter()
            .for_each(|table| census.add("nft table", table));
        Ok(census)
    }

    /// Adds one thing. The second of a name (two mounts on one point) is a thing of its own.
    fn add(&mut self, kind: &'static str, what: String) {
        let found = self.found.entry(kind).or_default();
        let mut name = what.clone();
        let mut times = 1;
        while !found.insert(name) {
            times += 1;
            name = format!("{what} (for the {times}th time)");
        }
    }

    /// All things of a kind: `process`, `netns`, `mount`, `cgroup`, `link`, `nft table`, `directory`, `socket`, `fifo`.
    pub fn kind(&self, kind: &str) -> impl Iterator<Item = &str> {
        self.found.get(kind).into_iter().flatten().map(String::as_str)
    }

    /// True if nothing was found.
    pub fn is_empty(&self) -> bool {
        self.found.values().all(BTreeSet::is_empty)
    }

    /// One line a difference: `- ` for what only `self` has, `+ ` for what only `after` has. Empty if equal.
    pub fn diff(&self, after: &Census) -> String {
        let kinds: BTreeSet<_> = self.found.keys().chain(after.found.keys()).collect();
        let none = BTreeSet::new();
        let mut out = String::new();
        for kind in kinds {
            let (old, new) = (
                self.found.get(kind).unwrap_or(&none),
                after.found.get(kind).unwrap_or(&none),
            );
            old.difference(new)
                .for_each(|gone| out += &format!("- {kind}: {gone}\n"));
            new.difference(old)
                .for_each(|left| out += &format!("+ {kind}: {left}\n"));
        }
        out
    }
}

impl fmt::Display for Census {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (kind, things) in &self.found {
            for thing in things {
                writeln!(f, "{kind}: {thing}")?;
            }
        }
        Ok(())
    }
}

/// One process, as `/proc` shows it.
#[derive(Clone, Debug)]
pub struct Process {
    pub pid: i32,
    pub parent: i32,
    /// Arguments joined by spaces; the command's name in brackets for a kernel thread or a zombie.
    pub command: String,
    /// `Z` for a zombie; see proc(5).
    pub state: char,
    cgroups: String,
    netns: u64,
    root: String,
}

impl Process {
    /// Reads one process; `None` if it is gone.
    pub fn read(pid: i32) -> Option<Process> {
        let dir = PathBuf::from(format!("/proc/{pid}"));
        let stat = fs::read_to_string(dir.join("stat")).ok()?;
        let (head, tail) = stat.rsplit_once(')')?;
        let mut fields = tail.split_whitespace();
        let state = fields.next()?.chars().next()?;
        let parent = fields.next()?.parse().ok()?;
        let bytes = fs::read(dir.join("cmdline")).unwrap_or_default();
        let mut command = String::from_utf8_lossy(&bytes).replace('\0', " ").trim_end().to_owned();
        if command.is_empty() {
            command = format!("[{}]", head.split_once('(').map_or("?", |(_, name)| name));
        }
        let cgroups = fs::read_to_string(dir.join("cgroup")).unwrap_or_default();
        let netns = fs::metadata(dir.join("ns/net")).map_or(0, |meta| meta.ino());
        let table = fs::read_to_string(dir.join("mountinfo")).unwrap_or_default();
        let root = table
            .lines()
            .find(|line| line.split(' ').nth(4) == Some("/"))
            .unwrap_or_default()
            .to_owned();
        Some(Process {
            pid,
            parent,
            command,
            state,
            cgroups,
            netns,
            root,
        })
    }

    /// Start time in clock ticks since boot: with the pid it names one process for ever.
    pub fn start_time(pid: i32) -> Option<u64> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
    }

    fn line(&self) -> String {
        format!("{} (parent {}, {}) {}", self.pid, self.parent, self.state, self.command)
    }

    fn marked(&self, mark: &Mark, pins: &BTreeSet<u64>) -> bool {
        if self.pid == std::process::id() as i32 || (self.state == 'Z' && self.parent == 1) {
            return false;
        }
        let named = |text: &str| mark.dirs.iter().any(|dir| text.contains(&*dir.to_string_lossy()));
        let instance = !mark.instance.is_empty() && self.cgroups.contains(&mark.instance);
        let parent = mark
            .parents
            .iter()
            .any(|parent| self.cgroups.contains(&format!("/{parent}/")));
        named(&self.command) || named(&self.root) || instance || parent || pins.contains(&self.netns)
    }

    fn is_runtime(&self) -> bool {
        let program = self.command.split(' ').next().unwrap_or_default();
        let name = program.rsplit('/').next().unwrap_or_default();
        matches!(name, "reconcile" | "reconcile-shim") || self.cgroups.contains("/reconcile-")
    }
}

/// All processes, threads not counted.
pub fn processes() -> Result<Vec<Process>> {
    let mut all = Vec::new();
    for entry in fs::read_dir("/proc").context("read /proc")?.flatten() {
        if let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) {
            all.extend(Process::read(pid));
        }
    }
    Ok(all)
}

/// Files under `/run/netns` with their inodes.
fn netns_files() -> Result<Vec<(String, u64)>> {
    let mut all = Vec::new();
    for path in children(Path::new("/run/netns"))? {
        let inode = fs::metadata(&path).map_or(0, |meta| meta.ino());
        all.push((path, inode));
    }
    Ok(all)
}

/// A mount table without what changes by itself: `point type source options-of-the-filesystem`.
pub fn mounts(table: &Path) -> Result<Vec<String>> {
    let text = fs::read_to_string(table).with_context(|| format!("read {}", table.display()))?;
    let brief = |line: &str| {
        let (mount, fs) = line.split_once(" - ")?;
        Some(format!("{} {fs}", mount.split(' ').nth(4)?))
    };
    Ok(text.lines().filter_map(brief).collect())
}

/// The mount of one cgroup hierarchy: v1's `pids` where there is one, else v2.
pub fn hierarchy() -> PathBuf {
    let v1 = PathBuf::from("/sys/fs/cgroup/pids");
    if v1.exists() { v1 } else { "/sys/fs/cgroup".into() }
}

/// Every cgroup directory of every hierarchy (v1 controllers and v2).
pub fn cgroups() -> Result<Vec<String>> {
    let table = fs::read_to_string("/proc/self/mountinfo").context("read the mount table")?;
    let mut all = Vec::new();
    for line in table.lines() {
        let Some((mount, fs)) = line.split_once(" - ") else {
            continue;
        };
        if fs.starts_with("cgroup ") || fs.starts_with("cgroup2 ") {
            let point = mount.split(' ').nth(4).context("mount table without a mount point")?;
            directories(Path::new(point), &mut all);
        }
    }
    Ok(all)
}

/// Directories below `dir`. One that vanishes while we look is not there.
fn directories(dir: &Path, all: &mut Vec<String>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            all.push(entry.path().display().to_string());
            directories(&entry.path(), all);
        }
    }
}

/// `name alias` of every link in this network namespace.
pub fn links() -> Result<Vec<String>> {
    let mut all = Vec::new();
    for path in children(Path::new("/sys/class/net"))? {
        let alias = fs::read_to_string(Path::new(&path).join("ifalias")).unwrap_or_default();
        let name = path.rsplit('/').next().unwrap_or_default();
        all.push(format!("{name} {}", alias.trim_end()).trim_end().to_owned());
    }
    Ok(all)
}

/// `link address` of every IP address in this network namespace.
fn addresses() -> Result<Vec<String>> {
    let all = nix::ifaddrs::getifaddrs().context("list addresses")?;
    let ip = |a: nix::ifaddrs::InterfaceAddress| {
        let address = a.address?;
        let v4 = address.as_sockaddr_in().map(|v4| v4.ip().to_string());
        let v6 = address.as_sockaddr_in6().map(|v6| v6.ip().to_string());
        Some(format!("{} {}", a.interface_name, v4.or(v6)?))
    };
    Ok(all.filter_map(ip).collect())
}

/// Destination, prefix and link of every route, in the kernel's hexadecimal.
fn routes() -> Result<Vec<String>> {
    let mut all = Vec::new();
    let v4 = fs::read_to_string("/proc/net/route").unwrap_or_default();
    for line in v4.lines().skip(1) {
        let f: Vec<_> = line.split_whitespace().collect();
        ensure!(f.len() >= 8, "/proc/net/route: {line:?}");
        all.push(format!("{}/{} {}", f[1], f[7], f[0]));
    }
    let v6 = fs::read_to_string("/proc/net/ipv6_route").unwrap_or_default();
    for line in v6.lines() {
        let f: Vec<_> = line.split_whitespace().collect();
        ensure!(f.len() == 10, "/proc/net/ipv6_route: {line:?}");
        let flags = u32::from_str_radix(f[8], 16).with_context(|| format!("/proc/net/ipv6_route: {line:?}"))?;
        // Anycast: what the kernel gives every interface once the node forwards.
        if flags & 0x0010_0000 != 0 {
            continue;
        }
        all.push(format!("{}/{} {}", f[0], f[1], f[9]));
    }
    Ok(all)
}

/// Names of all nftables tables (nf_tables netlink, NFT_MSG_GETTABLE as a dump).
pub fn nft_tables() -> Result<Vec<String>> {
    const NAME: u16 = 1; // NFTA_TABLE_NAME
    const DONE: u16 = 3; // NLMSG_DONE
    const ERROR: u16 = 2; // NLMSG_ERROR
    let kind = SockType::Raw;
    let netlink = socket::socket(
        AddressFamily::Netlink,
        kind,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkNetFilter,
    )
    .context("open nf_tables netlink")?;
    use std::os::fd::AsRawFd;
    let mut ask = Vec::new();
    ask.extend(20u32.to_ne_bytes()); // nlmsg_len
    ask.extend((10u16 << 8 | 1).to_ne_bytes()); // NFNL_SUBSYS_NFTABLES, NFT_MSG_GETTABLE
    ask.extend(0x301u16.to_ne_bytes()); // REQUEST | DUMP
    ask.extend([0; 12]); // sequence, port, nfgenmsg (any family)
    socket::send(netlink.as_raw_fd(), &ask, MsgFlags::empty()).context("ask for nft tables")?;
    let mut names = Vec::new();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let len = socket::recv(netlink.as_raw_fd(), &mut buffer, MsgFlags::empty()).context("read nft tables")?;
        let mut rest = &buffer[..len];
        while rest.len() >= 16 {
            let size = u32::from_ne_bytes(rest[..4].try_into()?) as usize;
            ensure!(
                (16..=rest.len()).contains(&size),
                "nf_tables netlink: message of {size} bytes"
            );
            match u16::from_ne_bytes(rest[4..6].try_into()?) {
                DONE => return Ok(names),
                ERROR => bail!(
                    "nf_tables netlink: error {}",
                    i32::from_ne_bytes(rest[16..20].try_into()?)
                ),
                _ => names.extend(attribute(&rest[20..size], NAME)),
            }
            rest = &rest[size.next_multiple_of(4).min(rest.len())..];
        }
    }
}

/// A string attribute of a netlink message.
fn attribute(mut rest: &[u8], wanted: u16) -> Option<String> {
    while rest.len() >= 4 {
        let size = u16::from_ne_bytes(rest[..2].try_into().ok()?) as usize;
        let kind = u16::from_ne_bytes(rest[2..4].try_into().ok()?) & 0x3fff;
        let value = rest.get(4..size)?;
        if kind == wanted {
            return Some(String::from_utf8_lossy(value).trim_end_matches('\0').to_owned());
        }
        rest = rest.get(size.next_multiple_of(4)..)?;
    }
    None
}

/// Paths of a directory's entries; none if it does not exist.
fn children(dir: &Path) -> Result<Vec<String>> {
    match fs::read_dir(dir) {
        Ok(entries) => Ok(entries
            .flatten()
            .map(|entry| entry.path().display().to_string())
            .collect()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("list {}", dir.display())),
    }
}

/// Sockets and FIFOs below `dir`; image content (`layers`) is not ours to judge.
fn special_files(dir: &Path, census: &mut Census) -> Result<()> {
    for path in children(dir)? {
        let Ok(meta) = fs::symlink_metadata(&path) else {
            continue;
        };
        let kind = meta.file_type();
        if kind.is_dir() && !path.ends_with("/layers") {
            special_files(Path::new(&path), census)?;
        } else if kind.is_fifo() {
            census.add("fifo", path);
        } else if kind.is_socket() {
            census.add("socket", path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_planted_process_netns_and_cgroup_are_seen_and_then_gone() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let name = format!("leaks{}", std::process::id());
        let mark = Mark {
            instance: name.clone(),
            dirs: vec![dir.path().into()],
            parents: Vec::new(),
        };
        assert!(Census::of(&mark).unwrap().is_empty());

        let mut child = Command::new("sh")
            .args(["-c", "read x; :", dir.path().to_str().unwrap()])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let hierarchy = hierarchy();
        let cgroup = hierarchy.join(format!("reconcile-{name}"));
        fs::create_dir(&cgroup).unwrap();
        assert!(
            Command::new("ip")
                .args(["netns", "add", &format!("rc-{name}-1")])
                .status()
                .unwrap()
                .success()
        );
        fs::create_dir_all(dir.path().join("pods/abc")).unwrap();
        nix::unistd::mkfifo(&dir.path().join("pods/abc/out"), nix::sys::stat::Mode::S_IRWXU).unwrap();

        let census = Census::of(&mark).unwrap();
        for kind in ["process", "netns", "cgroup", "directory", "fifo"] {
            assert_eq!(census.kind(kind).count(), 1, "{kind}: {census}");
        }
        assert_eq!(census.kind("mount").count(), 1, "{census}");
        assert!(Census::default().diff(&census).contains("+ netns: /run/netns/rc-leaks"));

        child.kill().unwrap();
        child.wait().unwrap();
        crate::scrub::scrub(&mark).unwrap();
        let left = Census::of(&mark).unwrap();
        assert!(
            left.kind("process").count() + left.kind("netns").count() + left.kind("cgroup").count() == 0,
            "{left}"
        );
    }

    #[test]
    fn nft_tables_are_listed_as_the_nft_program_lists_them() {
        let Ok(out) = Command::new("nft").args(["list", "tables"]).output() else {
            return eprintln!("SKIPPED: the nft program is not installed");
        };
        let name = format!("leaks{}", std::process::id());
        assert!(
            Command::new("nft")
                .args(["add", "table", "inet", &name])
                .status()
                .unwrap()
                .success()
        );
        let tables = nft_tables().unwrap();
        assert!(
            Command::new("nft")
                .args(["delete", "table", "inet", &name])
                .status()
                .unwrap()
                .success()
        );
        assert!(tables.contains(&name), "{tables:?}");
        assert!(!nft_tables().unwrap().contains(&name));
        assert!(out.status.success());
    }
}
