//! The mount table, mountinfo.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use super::{Error, Result};

/// Every mount of this process's namespace, read once.
#[derive(Clone, Debug, Default)]
pub struct MountTable {
    mounts: Vec<Mount>,
}

/// A line of mountinfo (proc_pid_mountinfo(5)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    pub id: u64,
    pub parent: u64,
    pub target: PathBuf,
    pub fs_type: String,
}

impl MountTable {
    pub fn read() -> Result<MountTable> {
        let path = "/proc/thread-self/mountinfo";
        let text = fs::read(path).map_err(Error::io("read", path))?;
        Ok(MountTable {
            mounts: text.split(|b| *b == b'\n').filter_map(Mount::parse).collect(),
        })
    }

    /// The topmost mount at `target`.
    pub fn get(&self, target: &Path) -> Option<&Mount> {
        self.mounts.iter().rev().find(|m| m.target == target)
    }

    /// Mounts at or below one of `prefixes`, latest first: the order to unmount them in.
    pub fn ours<'a>(&'a self, prefixes: &'a [PathBuf]) -> impl Iterator<Item = &'a Mount> {
        self.mounts
            .iter()
            .rev()
            .filter(|m| prefixes.iter().any(|p| m.target.starts_with(p)))
    }
}

impl Mount {
    fn parse(line: &[u8]) -> Option<Mount> {
        let mut fields = line.split(|b| *b == b' ');
        let mut number = || std::str::from_utf8(fields.next()?).ok()?.parse().ok();
        let (id, parent) = (number()?, number()?);
        let target = unescape(fields.nth(2)?);
        let fs_type = fields.skip_while(|f| *f != b"-").nth(1)?;
        Some(Mount {
            id,
            parent,
            target,
            fs_type: String::from_utf8_lossy(fs_type).into_owned(),
        })
    }
}

/// Space, tab, newline and backslash are written as three octal digits.
fn unescape(field: &[u8]) -> PathBuf {
    let mut path = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        let octal = (byte == b'\\').then(|| tail.get(..3)).flatten();
        match octal
            .and_then(|d| std::str::from_utf8(d).ok())
            .and_then(|d| u8::from_str_radix(d, 8).ok())
        {
            Some(value) => {
                path.push(value);
                rest = &tail[3..];
            }
            None => path.push(byte),
        }
    }
    OsString::from_vec(path).into()
}

#[cfg(test)]
mod tests {
    use super::Mount;

    #[test]
    fn table_lines() {
        let line = br"36 35 98:0 /mnt1 /mnt\0402\134 rw,noatime master:1 - ext3 /dev/root rw";
        let mount = Mount::parse(line).unwrap();
        assert_eq!(
            mount,
            Mount {
                id: 36,
                parent: 35,
                target: "/mnt 2\\".into(),
                fs_type: "ext3".into()
            }
        );
        assert_eq!(Mount::parse(b""), None);
    }
}
