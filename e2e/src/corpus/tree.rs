//! What the kernel says of a tree, as text that can be compared.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::images::digest;

/// Path to type, mode, owner, size, mtime, target, device, attributes, hash and the group of hard links (its first
/// path). The root itself is not in it: every runtime on overlay shows the container's own directory there.
pub fn read(root: &Path) -> Result<BTreeMap<String, String>> {
    let mut lines = BTreeMap::new();
    let mut groups: HashMap<(u64, u64), String> = HashMap::new();
    let mut todo = vec![root.to_owned()];
    let mut seen = Vec::new();
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(&dir).with_context(|| format!("list {}", dir.display()))? {
            let path = entry?.path();
            let meta = fs::symlink_metadata(&path).with_context(|| format!("look at {path:?}"))?;
            if meta.is_dir() {
                todo.push(path.clone());
            }
            seen.push(path);
        }
    }
    seen.sort();
    for path in seen {
        let short = path
            .strip_prefix(root)?
            .as_os_str()
            .as_bytes()
            .escape_ascii()
            .to_string();
        let line = line(&path, &short, &mut groups).with_context(|| format!("look at {}", path.display()))?;
        lines.insert(short, line);
    }
    Ok(lines)
}

fn line(path: &Path, short: &str, groups: &mut HashMap<(u64, u64), String>) -> Result<String> {
    let meta = fs::symlink_metadata(path)?;
    let kind = meta.file_type();
    let what = if kind.is_dir() {
        "dir".to_owned()
    } else if kind.is_file() {
        format!("file {} {}", meta.len(), &digest(&fs::read(path)?)[..20])
    } else if kind.is_symlink() {
        format!("-> {:?}", fs::read_link(path)?)
    } else if kind.is_fifo() {
        "fifo".to_owned()
    } else if kind.is_socket() {
        "socket".to_owned()
    } else {
        let letter = if kind.is_block_device() { 'b' } else { 'c' };
        format!("{letter} {:x}", meta.rdev())
    };
    let group = if kind.is_dir() {
        String::new()
    } else {
        let first = groups
            .entry((meta.dev(), meta.ino()))
            .or_insert_with(|| short.to_owned());
        format!(" = {first}")
    };
    Ok(format!(
        "{what} {:o} {}:{} {}.{:09}{group} {}",
        meta.mode() & 0o7777,
        meta.uid(),
        meta.gid(),
        meta.mtime(),
        meta.mtime_nsec(),
        xattrs(path)?
    ))
}

/// All but overlay's own.
fn xattrs(path: &Path) -> Result<String> {
    let mut names = vec![0; 64 << 10];
    let length = match rustix::fs::llistxattr(path, &mut names[..]) {
        Err(rustix::io::Errno::NOTSUP) => 0,
        other => other?,
    };
    let mut all = BTreeMap::new();
    for name in names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        if !name.starts_with(b"trusted.overlay.") {
            let mut value = vec![0; 64 << 10];
            let length = rustix::fs::lgetxattr(path, &OsString::from_vec(name.to_vec()), &mut value[..])?;
            all.insert(
                name.escape_ascii().to_string(),
                value[..length].escape_ascii().to_string(),
            );
        }
    }
    Ok(if all.is_empty() {
        String::new()
    } else {
        format!("{all:?}")
    })
}

/// `theirs`, where umoci could not know better: of `implied` directories only the type counts, and a directory's time is
/// ours if umoci's own clock made it (after `start`, seconds), which ours must not.
pub fn lenient(ours: &BTreeMap<String, String>, theirs: &mut BTreeMap<String, String>, implied: &[String], start: i64) {
    for (path, line) in theirs.iter_mut().filter(|(_, line)| line.starts_with("dir ")) {
        let Some(ours) = ours.get(path).filter(|line| line.starts_with("dir ")) else {
            continue;
        };
        let made = |line: &str| {
            let time = line.split(' ').nth(3)?;
            let seconds: i64 = time.split('.').next()?.parse().ok()?;
            (start..start + 3600).contains(&seconds).then(|| time.to_owned())
        };
        match (made(line), made(ours)) {
            (_, Some(_)) => {}
            (_, None) if implied.contains(path) => *line = ours.clone(),
            (Some(now), None) => {
                let kept = ours.split(' ').nth(3).unwrap_or_default();
                *line = line.replace(&now, kept);
            }
            (None, None) => {}
        }
    }
}

/// Fails with every path that differs.
pub fn same(ours: &BTreeMap<String, String>, theirs: &BTreeMap<String, String>, who: &str) -> Result<()> {
    let mut paths: Vec<_> = ours.keys().chain(theirs.keys()).collect();
    paths.sort();
    paths.dedup();
    paths.retain(|path| ours.get(*path) != theirs.get(*path));
    let nothing = "(nothing)".to_owned();
    let shown = |path: &&String| {
        let (a, b) = (
            ours.get(*path).unwrap_or(&nothing),
            theirs.get(*path).unwrap_or(&nothing),
        );
        format!("{path}\n  ours  {a}\n  {who:5} {b}")
    };
    let text: Vec<_> = paths.iter().map(shown).collect();
    ensure!(
        paths.is_empty(),
        "{} of {} paths differ:\n{}",
        paths.len(),
        ours.len(),
        text.join("\n")
    );
    Ok(())
}
