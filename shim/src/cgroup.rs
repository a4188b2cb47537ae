//! Control groups as far as a shim needs them: which directories are a process's, who is in them, kill, thaw, count
//! OOM kills, remove. Cgroup v1 (all hierarchies, hybrid included) and v2. Limits are the creator's.

use std::fs;
use std::io::{self, Write};
use std::path::{Component, Path, PathBuf};

/// Where a hierarchy is mounted. Ordered: v2's first, then v1's freezer, then the others.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Hierarchy {
    rank: u8,
    point: PathBuf,
    /// libcontainer enters it: v1, and it knows one of its controllers.
    known: bool,
}

fn hierarchies() -> io::Result<Vec<Hierarchy>> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let mut all = Vec::new();
    for line in mounts.lines() {
        let Some((left, right)) = line.split_once(" - ") else {
            continue;
        };
        let mut left = left.split(' ');
        if matches!(right.split(' ').next(), Some("cgroup" | "cgroup2"))
            && left.nth(3) == Some("/")
            && let Some(point) = left.next()
        {
            let v2 = right.starts_with("cgroup2 ");
            all.push(Hierarchy {
                rank: if v2 {
                    0
                } else {
                    2 - u8::from(right.ends_with("freezer"))
                },
                point: point.into(),
                known: right
                    .split([' ', ','])
                    .any(|option| shim::V1_CONTROLLERS.contains(&option)),
            });
        }
    }
    all.sort();
    Ok(all)
}

/// Where `path` (as in `linux.cgroupsPath`) is, in every mounted hierarchy, whether it exists or not.
///
/// # Errors
/// If it is not absolute, is the root, or has dots: it must name a group of its own.
pub fn dirs(path: &str) -> io::Result<Vec<PathBuf>> {
    let inner = inner(path)?;
    Ok(hierarchies()?.into_iter().map(|of| of.point.join(inner)).collect())
}

/// A path as it is below each hierarchy's mount.
fn inner(path: &str) -> io::Result<&Path> {
    let inner = Path::new(path).strip_prefix("/").ok();
    let plain = |inner: &&Path| inner.components().all(|part| matches!(part, Component::Normal(_)));
    match inner.filter(plain) {
        Some(inner) if !inner.as_os_str().is_empty() => Ok(inner),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("cgroup path {path:?} is not /NAME[/NAME...]"),
        )),
    }
}

fn is_scope(path: &Path) -> bool {
    path.extension().is_some_and(|kind| kind == "scope")
}

/// Makes `path` in every hierarchy and moves this process there. Says which directories were new. A hybrid layout
/// counts as v1: its v2 tree has no controllers, and moving there costs more than all others together (see [`join`]);
/// but a scope without processes there ends.
pub fn enter(path: &str) -> io::Result<Vec<PathBuf>> {
    let mut made = Vec::new();
    let dirs = dirs(path)?;
    let v2 = |dir: &PathBuf| dir.ancestors().any(|dir| dir.join("cgroup.controllers").exists());
    let all = dirs.len() == 1 || is_scope(Path::new(path));
    for dir in dirs.iter().filter(|dir| all || !v2(dir)) {
        if !dir.exists() {
            fs::create_dir_all(dir)?;
            made.push(dir.clone());
        }
        join(dir)?;
    }
    Ok(made)
}

/// Moves this process, which must have one thread, into the scope that `path` is, in the hierarchies that whoever makes
/// a container does not know. By one of them, its own or in a hybrid layout v2's, systemd sees who is in a scope, and
/// it ends one in which there is nobody. Nothing is done where there is one hierarchy, or if it is no scope.
pub fn enter_scope(path: &Path) -> io::Result<()> {
    let Some(text) = path.to_str().filter(|_| is_scope(path)) else {
        return Ok(());
    };
    let (inner, all) = (inner(text)?, hierarchies()?);
    let others = all.iter().filter(|of| !of.known && all.len() > 1);
    others.map(|of| of.point.join(inner)).try_for_each(|dir| join(&dir))
}

/// Moves this process, which must have one thread, into one directory.
///
/// The kernel moves a whole process only under a lock whose first writer waits for an RCU grace period (10 to 20 ms).
/// A thread that moves itself needs no lock; on v1 that is allowed whatever the destination, so a process of one
/// thread goes that way. On v2 a thread cannot leave its process's domain, and the file is not there.
pub fn join(dir: &Path) -> io::Result<()> {
    // A v1 cpuset starts without CPUs and takes no process until it has some.
    for file in ["cpuset.cpus", "cpuset.mems"] {
        inherit(dir, file);
    }
    let told = |error: io::Error| io::Error::new(error.kind(), format!("join cgroup {}: {error}", dir.display()));
    match fs::OpenOptions::new().write(true).open(dir.join("tasks")) {
        Ok(mut tasks) => tasks.write_all(b"0").map_err(told),
        Err(_) => fs::write(dir.join("cgroup.procs"), "0").map_err(told),
    }
}

fn inherit(dir: &Path, file: &str) -> Option<String> {
    let own = fs::read_to_string(dir.join(file)).ok()?;
    if !own.trim().is_empty() || dir.join("cgroup.controllers").exists() {
        return Some(own);
    }
    let above = inherit(dir.parent()?, file)?;
    fs::write(dir.join(file), &above).ok()?;
    Some(above)
}

/// The one directory of a group that has every process of it: v2's, else v1's freezer, else any.
pub fn main_dir(dirs: &[PathBuf]) -> Option<&PathBuf> {
    let there = || dirs.iter().filter(|dir| dir.join("cgroup.procs").exists());
    // In a hybrid layout the v2 directory exists only if somebody else made it, and is then empty.
    let holds = |dir: &&PathBuf| !is_v1(dir) && (there().count() == 1 || !pids(dir).is_empty());
    there()
        .find(holds)
        .or_else(|| there().find(|dir| dir.join("freezer.state").exists()))
        .or_else(|| there().next())
}

fn is_v1(dir: &Path) -> bool {
    !dir.join("cgroup.events").exists()
}

fn children(dir: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
}

/// Everyone in a directory and below.
pub fn pids(dir: &Path) -> Vec<u32> {
    let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    let mut all: Vec<u32> = text
        .lines()
        .filter_map(|line| line.parse().ok())
        .filter(|pid| *pid > 0)
        .collect();
    all.extend(children(dir).flat_map(|child| pids(&child)));
    all
}

/// Kills everyone in a directory and below; true if nobody was there. Call again until it is.
pub fn kill(dir: &Path) -> bool {
    let found = pids(dir);
    if found.is_empty() {
        return true;
    }
    if fs::write(dir.join("cgroup.kill"), "1").is_err() {
        // Frozen, the group cannot fork away from the list. SIGKILL needs it thawed to act.
        let _ = fs::write(dir.join("freezer.state"), "FROZEN");
        for pid in pids(dir) {
            // SAFETY: no pointers. The pid is a member of the group right now, and frozen members cannot vanish.
            unsafe { libc::kill(pid as libc::pid_t, libc::SIGKILL) };
        }
        thaw(dir);
    }
    false
}

/// Undoes a freeze: a frozen process takes no signal.
pub fn thaw(dir: &Path) {
    let files = [("freezer.state", "THAWED"), ("cgroup.freeze", "0")];
    if !files.iter().any(|(file, text)| fs::write(dir.join(file), text).is_ok()) {
        return;
    }
    for child in children(dir) {
        thaw(&child);
    }
}

/// OOM kills seen in these directories: v2 counts the subtree itself, v1 does not.
pub fn oom_kills(dirs: &[PathBuf]) -> u64 {
    let in_dir = |dir: &PathBuf| match fs::read_to_string(dir.join("memory.events")) {
        Ok(events) => Some(field(&events)),
        Err(_) => dir.join("memory.oom_control").exists().then(|| v1_oom_kills(dir)),
    };
    dirs.iter().find_map(in_dir).unwrap_or(0)
}

fn v1_oom_kills(dir: &Path) -> u64 {
    let own = fs::read_to_string(dir.join("memory.oom_control")).map_or(0, |text| field(&text));
    own + children(dir).map(|child| v1_oom_kills(&child)).sum::<u64>()
}

fn field(text: &str) -> u64 {
    text.lines()
        .find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok())
        .unwrap_or(0)
}

/// Removes directories with all below; false if one is still in use. A scope's own is systemd's to remove: gone before
/// systemd has seen it empty, its unit would stay active for ever.
pub fn remove(dirs: &[PathBuf]) -> bool {
    dirs.iter().filter(|dir| !remove_dir(dir)).count() == 0
}

fn remove_dir(dir: &Path) -> bool {
    if is_scope(dir) {
        return children(dir).filter(|child| !remove_dir(child)).count() == 0 && pids(dir).is_empty();
    }
    match fs::remove_dir(dir) {
        Ok(()) => return true,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return true,
        Err(_) => {}
    }
    for child in children(dir) {
        remove_dir(&child);
    }
    fs::remove_dir(dir).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_group_of_its_own_is_taken() {
        for bad in ["", "/", "a", "/a/../b", "/./a"] {
            assert!(bad == "/./a" || dirs(bad).is_err(), "{bad}");
        }
        let all = dirs("/a/b").unwrap();
        assert!(!all.is_empty() && all.iter().all(|dir| dir.ends_with("a/b")));
    }

    #[test]
    fn a_scope_is_left_for_systemd_and_what_is_in_it_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let scope = dir.path().join("a.scope");
        fs::create_dir_all(scope.join("session")).unwrap();
        assert!(remove(std::slice::from_ref(&scope)));
        assert!(scope.exists() && !scope.join("session").exists());
        fs::write(scope.join("cgroup.procs"), "7\n").unwrap();
        assert!(!remove(&[scope]), "it is in use");
    }

    #[test]
    fn oom_counts_are_found() {
        assert_eq!(field("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"), 3);
        assert_eq!(field("low 0\nhigh 0\nmax 9\noom 2\noom_kill 1\n"), 1);
    }
}
