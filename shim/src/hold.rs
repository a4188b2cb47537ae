//! Namespaces made by a child: a thread can make neither a user namespace nor what belongs to one.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::{Error, Result};

/// A child that stands in new namespaces until this is dropped. It never touches anything else.
pub struct Held {
    child: Child,
}

impl Held {
    /// Has `exe` (the shim) make namespaces: `user` first, and any of `net`, `ipc`, `uts`. Blocks for some
    /// milliseconds.
    pub fn make(exe: &Path, kinds: &[&str]) -> Result<Held> {
        let told = Error::io("run shim", exe);
        let child = Command::new(exe)
            .arg("hold")
            .args(kinds)
            .env_clear()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(told)?;
        let mut held = Held { child };
        let mut answer = String::new();
        if let Some(mut out) = held.child.stdout.take() {
            let mut byte = [0];
            while out.read(&mut byte).is_ok_and(|n| n == 1) && byte[0] != b'\n' && answer.len() < 512 {
                answer.push(char::from(byte[0]));
            }
        }
        match answer.as_str() {
            READY => Ok(held),
            why => Err(Error::Namespaces { reason: why.to_owned() }),
        }
    }

    /// Writes the user namespace's maps, each (inside, host, length); then its root is that host's user.
    pub fn map(&self, uids: &[(u32, u32, u32)], gids: &[(u32, u32, u32)]) -> Result<()> {
        for (name, maps) in [("uid_map", uids), ("gid_map", gids)] {
            let path = self.file(name);
            let line = |(inside, host, length): &(u32, u32, u32)| format!("{inside} {host} {length}\n");
            let text: String = maps.iter().map(line).collect();
            let file = std::fs::OpenOptions::new().write(true).open(&path);
            let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
            written.map_err(Error::io("write", &path))?;
        }
        Ok(())
    }

    /// The file that a namespace is known by.
    pub fn namespace(&self, kind: &str) -> PathBuf {
        self.file("ns").join(kind)
    }

    fn file(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{name}", self.child.id()))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        // Ours and not waited for yet: the pid is still its own.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the child says when the namespaces are there.
pub const READY: &str = "ready";
