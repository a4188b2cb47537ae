//! Cgroup directories, v2 and v1 (hybrid counts as v1): made, listed, killed, removed; limits read and written.
//!
//! Paths here are absolute within each hierarchy (`/kubepods/pod1/<uid>`).

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use shim::fault;

use crate::error::{Error, Result};

const MOUNT: &str = "/sys/fs/cgroup";
/// statfs(2) magic of cgroup2.
const CGROUP2_SUPER_MAGIC: i64 = 0x6367_7270;
/// Controllers that a container's limits need (v2: switched on down to the parent).
const V2_CONTROLLERS: [&str; 6] = ["cpuset", "cpu", "io", "memory", "hugetlb", "pids"];

/// The node's hierarchies.
pub struct Cgroups {
    pub v2: bool,
    /// v1: controller name to mount point (several names may share one); v2: the one mount under `""`.
    mounts: BTreeMap<String, PathBuf>,
}

impl Cgroups {
    pub fn detect() -> Result<Cgroups> {
        let stat = nix::sys::statfs::statfs(MOUNT).map_err(Error::sys("look at", MOUNT))?;
        if stat.filesystem_type().0 as i64 == CGROUP2_SUPER_MAGIC {
            return Ok(Cgroups {
                v2: true,
                mounts: BTreeMap::from([(String::new(), MOUNT.into())]),
            });
        }
        let text = fs::read_to_string("/proc/self/mountinfo").map_err(Error::io("read", "/proc/self/mountinfo"))?;
        let mounts = v1_mounts(&text);
        if !mounts.contains_key("memory") {
            return Err(Error::Refused(format!(
                "{MOUNT}: neither cgroup v2 nor v1's memory controller is mounted"
            )));
        }
        Ok(Cgroups { v2: false, mounts })
    }

    /// Controllers that limits need and the node does not have.
    pub fn lacking(&self) -> Vec<&'static str> {
        let needed = ["cpu", "cpuset", "memory", "pids"];
        if self.v2 {
            let there = fs::read_to_string(Path::new(MOUNT).join("cgroup.controllers")).unwrap_or_default();
            return needed
                .into_iter()
                .filter(|c| !there.split_whitespace().any(|t| t == *c))
                .collect();
        }
        needed.into_iter().filter(|c| !self.mounts.contains_key(*c)).collect()
    }

    /// Is there a hierarchy in which systemd keeps its units?
    pub fn of_systemd(&self) -> bool {
        self.v2 || self.mounts.contains_key("name=systemd")
    }

    /// Every distinct hierarchy's directory for `path`.
    pub fn dirs(&self, path: &str) -> Vec<PathBuf> {
        let mut dirs: Vec<PathBuf> = self
            .mounts
            .values()
            .map(|m| m.join(path.trim_start_matches('/')))
            .collect();
        dirs.sort();
        dirs.dedup();
        dirs
    }

    /// The directory of one controller (v2: the only one).
    pub fn dir(&self, controller: &str, path: &str) -> Option<PathBuf> {
        let mount = if self.v2 {
            self.mounts.get("")
        } else {
            self.mounts.get(controller)
        };
        mount.map(|m| m.join(path.trim_start_matches('/')))
    }

    fn file(&self, controller: &str, path: &str, file: &str) -> io::Result<PathBuf> {
        let dir = self.dir(controller, path);
        let dir = dir.ok_or_else(|| io::Error::other(format!("controller {controller} is not mounted")))?;
        if file.contains('/') {
            return Err(io::Error::other("a file name must not hold a slash"));
        }
        Ok(dir.join(file))
    }

    /// v2: switches the controllers on for every level above `path`.
    fn delegate(&self, path: &str) -> Result<()> {
        let mut dir = PathBuf::from(MOUNT);
        let parts: Vec<&str> = path.split('/').filter(|p| !p.is_empty()).collect();
        for part in &parts {
            let available = fs::read_to_string(dir.join("cgroup.controllers")).unwrap_or_default();
            for controller in available.split_whitespace().filter(|c| V2_CONTROLLERS.contains(c)) {
                // One by one: a controller that refuses (a process in the parent) must not keep the others away.
                let _ = fs::write(dir.join("cgroup.subtree_control"), format!("+{controller}"));
            }
            dir.push(part);
            fs::create_dir_all(&dir).map_err(Error::io("make cgroup", &dir))?;
        }
        Ok(())
    }

    /// v1: a cpuset without cpus takes no process; copies the nearest set values down.
    fn inherit_cpuset(&self, path: &str) -> Result<()> {
        let Some(mount) = self.mounts.get("cpuset") else {
            return Ok(());
        };
        let mut dir = mount.clone();
        for part in path.split('/').filter(|p| !p.is_empty()) {
            let parent = dir.clone();
            dir.push(part);
            for file in ["cpuset.cpus", "cpuset.mems"] {
                let own = fs::read_to_string(dir.join(file)).unwrap_or_default();
                if own.trim().is_empty() {
                    let above = fs::read_to_string(parent.join(file)).unwrap_or_default();
                    fs::write(dir.join(file), above.trim()).map_err(Error::io("set", dir.join(file)))?;
                }
            }
        }
        Ok(())
    }

    /// The pids in a cgroup and below it.
    pub fn processes(&self, path: &str) -> Vec<i32> {
        let mut pids = Vec::new();
        for dir in self.dirs(path) {
            collect_pids(&dir, &mut pids, 0);
        }
        pids.sort_unstable();
        pids.dedup();
        pids
    }

    /// Controllers in whose cgroup (or below it) a process should be and is not; of v1 those that limits need.
    pub fn astray(&self, path: &str, pid: i32) -> Vec<&'static str> {
        let controllers: &[&str] = if self.v2 {
            &[""]
        } else {
            &["cpu", "memory", "pids", "freezer"]
        };
        let mut astray = controllers.to_vec();
        astray.retain(|controller| {
            let Some(dir) = self.dir(controller, path).filter(|dir| dir.is_dir()) else {
                return false;
            };
            let mut pids = Vec::new();
            collect_pids(&dir, &mut pids, 0);
            !pids.contains(&pid)
        });
        astray
    }
}

impl crate::world::Cgroups for Cgroups {
    fn v2(&self) -> bool {
        self.v2
    }

    fn observe(&self, path: &str) -> (usize, usize) {
        let dirs = self.dirs(path);
        (dirs.iter().filter(|d| d.is_dir()).count(), dirs.len())
    }

    fn ensure(&self, path: &str) -> Result<()> {
        fault::point("cgroup.ensure.before");
        if self.v2 {
            self.delegate(path)?;
        }
        for dir in self.dirs(path) {
            // A sandbox that goes may take the common parent away between two steps of this: once more then.
            let made = fs::create_dir_all(&dir).or_else(|_| fs::create_dir_all(&dir));
            made.map_err(Error::io("make cgroup", &dir))?;
            fault::point("cgroup.ensure.torn");
        }
        if !self.v2 {
            self.inherit_cpuset(path)?;
        }
        Ok(())
    }

    fn kill(&self, path: &str) -> Result<()> {
        fault::point("cgroup.kill.before");
        if self.v2 {
            let file = Path::new(MOUNT).join(path.trim_start_matches('/')).join("cgroup.kill");
            match fs::write(&file, "1") {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(Error::io("kill", file)(e)),
                _ => return Ok(()),
            }
        }
        if let Some(dir) = self.dir("freezer", path) {
            let _ = fs::write(dir.join("freezer.state"), "THAWED");
        }
        for pid in self.processes(path) {
            // The pid was read from our own cgroup a moment ago; a cgroup's name is never given to two objects.
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
        }
        Ok(())
    }

    fn remove(&self, path: &str) -> Result<()> {
        fault::point("cgroup.remove.before");
        for dir in self.dirs(path) {
            remove_tree(&dir)?;
            fault::point("cgroup.remove.torn");
        }
        if !self.v2 {
            // libcontainer makes its cgroup in a hybrid node's unified hierarchy as well.
            remove_tree(&Path::new(MOUNT).join("unified").join(path.trim_start_matches('/')))?;
        }
        Ok(())
    }

    fn remove_if_empty(&self, path: &str) {
        for dir in self.dirs(path) {
            // Busy or absent are both fine: whoever uses it removes it later.
            let _ = fs::remove_dir(&dir);
        }
    }

    fn children(&self, parent: &str) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for dir in self.dirs(parent) {
            let Ok(entries) = fs::read_dir(&dir) else { continue };
            let dirs = entries.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir()));
            names.extend(dirs.filter_map(|e| e.file_name().into_string().ok()));
        }
        names.sort();
        names.dedup();
        names
    }

    fn get(&self, controller: &str, path: &str, file: &str) -> io::Result<String> {
        fs::read_to_string(self.file(controller, path, file)?)
    }

    fn set(&self, controller: &str, path: &str, file: &str, value: &str) -> io::Result<()> {
        fs::write(self.file(controller, path, file)?, value)
    }

    fn v2_dir(&self, path: &str) -> Option<PathBuf> {
        self.v2.then(|| self.dir("", path)).flatten()
    }
}

fn collect_pids(dir: &Path, pids: &mut Vec<i32>, depth: usize) {
    let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    pids.extend(text.lines().filter_map(|l| l.parse::<i32>().ok()));
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries
        .flatten()
        .filter(|e| depth < 16 && e.file_type().is_ok_and(|t| t.is_dir()))
    {
        collect_pids(&entry.path(), pids, depth + 1);
    }
}

fn remove_tree(dir: &Path) -> Result<()> {
    match fs::remove_dir(dir) {
        Ok(()) => return Ok(()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(_) => {}
    }
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(Error::io("list cgroup", dir)(e)),
    };
    for entry in entries.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir())) {
        remove_tree(&entry.path())?;
    }
    match fs::remove_dir(dir) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io("remove cgroup", dir)(e)),
        _ => Ok(()),
    }
}

/// The v1 hierarchies in a mountinfo text, by controller (proc_pid_mountinfo(5)); named ones such as systemd's too.
fn v1_mounts(mountinfo: &str) -> BTreeMap<String, PathBuf> {
    let mut mounts = BTreeMap::new();
    for line in mountinfo.lines() {
        let Some((left, right)) = line.split_once(" - ") else {
            continue;
        };
        let mut right = right.split(' ');
        if right.next() != Some("cgroup") {
            continue;
        }
        let (Some(point), Some(options)) = (left.split(' ').nth(4), right.nth(1)) else {
            continue;
        };
        for option in options
            .split(',')
            .filter(|o| !matches!(*o, "rw" | "ro" | "xattr" | "clone_children"))
        {
            mounts.entry(option.to_owned()).or_insert_with(|| PathBuf::from(point));
        }
    }
    mounts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::Cgroups as _;

    #[test]
    fn v1_controllers_are_found_by_name() {
        let text = "30 24 0:26 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct\n\
                    31 24 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
                    32 24 0:28 / /sys/fs/cgroup/systemd rw - cgroup systemd rw,xattr,name=systemd\n";
        let mounts = v1_mounts(text);
        assert_eq!(mounts["cpuacct"], Path::new("/sys/fs/cgroup/cpu,cpuacct"));
        assert_eq!(mounts["name=systemd"], Path::new("/sys/fs/cgroup/systemd"));
        assert_eq!(mounts.len(), 3);
    }

    #[test]
    fn a_cgroup_is_made_killed_and_removed() {
        let cgroups = Cgroups::detect().unwrap();
        let path = format!("/reconcile-test-{}/a/b", std::process::id());
        cgroups.ensure(&path).unwrap();
        let (have, want) = cgroups.observe(&path);
        assert_eq!(have, want);
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        for dir in cgroups.dirs(&path) {
            fs::write(dir.join("cgroup.procs"), child.id().to_string()).unwrap();
        }
        assert_eq!(cgroups.processes(&path), [child.id() as i32]);
        cgroups.kill(&path).unwrap();
        child.wait().unwrap();
        let top = format!("/reconcile-test-{}", std::process::id());
        cgroups.remove(&top).unwrap();
        cgroups.remove(&top).unwrap();
        assert_eq!(cgroups.observe(&top).0, 0);
    }
}
