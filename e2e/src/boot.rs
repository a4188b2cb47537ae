//! Reboots: a boot is a mount namespace in which the kernel's boot id reads as ours. What a reboot ends (processes,
//! mounts, namespaces, links, rules, cgroups, the state directory) is ended; the root stays.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::node::Node;
use crate::scrub;

/// One boot of a node; its daemons run in its mount namespace.
pub struct Boot {
    /// Holds the namespace until its stdin ends.
    holder: Child,
}

impl Boot {
    /// Has the node's next daemons run in a boot of their own.
    pub fn first(node: &mut Node) -> Result<Boot> {
        let file = node.path("boot-id");
        let id = fs::read_to_string("/proc/sys/kernel/random/uuid").context("a boot id")?;
        fs::write(&file, id)?;
        // Pins stay shared with the host, where the census looks for them.
        let script = "mount --bind \"$0\" /proc/sys/kernel/random/boot_id && echo ready && read end";
        let mut holder = Command::new("unshare")
            .args(["--mount", "--propagation", "unchanged", "sh", "-c", script])
            .arg(&file)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("unshare: install the Debian package util-linux")?;
        let mut line = String::new();
        BufReader::new(holder.stdout.take().context("its output")?).read_line(&mut line)?;
        ensure!(line == "ready\n", "no mount namespace with a boot id of its own");
        let namespace = format!("--mount=/proc/{}/ns/mnt", holder.id());
        node.options.wrapper = vec!["nsenter".into(), namespace, "--".into()];
        Ok(Boot { holder })
    }

    /// SIGKILL to everything, then the next boot with its daemon.
    pub async fn again(&mut self, node: &mut Node) -> Result<()> {
        if !node.has_ended()? {
            node.kill9().await?;
        }
        scrub::scrub(&node.mark())?;
        for entry in fs::read_dir(node.state())?.flatten() {
            let path = entry.path();
            if path.is_dir() {
                // The mounts in it went with their namespace.
                fs::remove_dir_all(&path)?;
            } else {
                fs::remove_file(&path)?;
            }
        }
        let next = Boot::first(node)?;
        *self = next;
        node.serve().await
    }
}

impl Drop for Boot {
    fn drop(&mut self) {
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}
