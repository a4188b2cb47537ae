//! A CNI plugin of shell: it keeps a journal of its calls and leases of four addresses, and fails or hangs when told.

use std::fs;

use anyhow::Result;

use crate::node::Node;

/// Its network configuration list.
pub const CHAIN: &str = r#"{"cniVersion":"1.0.0","name":"fake","plugins":[{"type":"fake"}]}"#;

/// Files beside it steer it: `fail-VERB`, `hang-VERB` (until the file is gone, or 60 s).
const PLUGIN: &str = r#"#!/bin/sh
config=$(cat)
cd DIR || exit 1
echo "$CNI_COMMAND $CNI_CONTAINERID ${CNI_NETNS:-none} $CNI_IFNAME" >> journal
if [ -e fail-$CNI_COMMAND ]; then
  echo '{"cniVersion":"1.0.0","code":11,"msg":"told to fail","details":"by the test"}'
  exit 1
fi
n=0
while [ -e hang-$CNI_COMMAND ] && [ $n -lt 600 ]; do n=$((n+1)); sleep 0.1; done
case $CNI_COMMAND in
ADD)
  for n in 9 10 11 12; do
    if (set -C; echo "$CNI_CONTAINERID" > leases/192.0.2.$n) 2>/dev/null; then address=192.0.2.$n; break; fi
  done
  if [ -z "$address" ]; then
    echo '{"cniVersion":"1.0.0","code":12,"msg":"no address is free"}'
    exit 1
  fi
  netns=$(basename "$CNI_NETNS")
  ip link add fh$$ type veth peer name fc$$ && ip link set fh$$ up
  ip link set fc$$ netns "$netns" && ip -n "$netns" link set fc$$ name eth0
  ip -n "$netns" address add $address/32 dev eth0
  ip -n "$netns" link set eth0 up
  echo '{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"'"$CNI_NETNS"'"}],'
  echo '"ips":[{"address":"'$address'/32","interface":0}]}' ;;
DEL)
  for lease in $(grep -lx "$CNI_CONTAINERID" leases/* 2>/dev/null); do rm -f "$lease"; done
  if [ -n "$CNI_NETNS" ]; then ip -n "$(basename "$CNI_NETNS")" link delete eth0 2>/dev/null; fi
  exit 0 ;;
VERSION) echo '{"cniVersion":"1.0.0","supportedVersions":["0.4.0","1.0.0"]}' ;;
esac
"#;

/// Installs it with its configuration in a node's directory; the node's network must be `auto` or `cni`.
pub fn install(node: &Node) -> Result<()> {
    for dir in ["etc", "net.d", "bin", "leases"] {
        fs::create_dir_all(node.path(dir))?;
    }
    restore(node)?;
    let config = format!(
        "network:\n  cniConfDir: {}\n  cniBinDirs: [{}]\n",
        node.path("net.d").display(),
        node.path("bin").display()
    );
    node.file("etc/config.yaml", config)?;
    Ok(())
}

/// Puts the plugin and its configuration where they were.
pub fn restore(node: &Node) -> Result<()> {
    plugin(node, "fake", PLUGIN)?;
    node.file("net.d/10-test.conflist", CHAIN)?;
    Ok(())
}

/// Installs another plugin of the same kind: its addresses are 198.51.100.9 and the next three, its journal is
/// `journal-NAME`. Answers its network configuration list.
pub fn other(node: &Node, name: &str) -> Result<String> {
    let text = PLUGIN
        .replace("192.0.2.", "198.51.100.")
        .replace("journal", &format!("journal-{name}"));
    plugin(node, name, &text)?;
    Ok(CHAIN.replace("fake", name))
}

fn plugin(node: &Node, name: &str, text: &str) -> Result<()> {
    let text = text.replace("DIR", &node.path("").display().to_string());
    node.program(&format!("bin/{name}"), text).map(drop)
}

/// The calls so far, `VERB SANDBOX NETNS IFNAME` each; ADD and DEL only.
pub fn journal(node: &Node) -> Vec<String> {
    let text = fs::read_to_string(node.path("journal")).unwrap_or_default();
    let calls = text
        .lines()
        .filter(|line| line.starts_with("ADD") || line.starts_with("DEL"));
    calls.map(str::to_owned).collect()
}

/// Addresses in use, by the plugin's own files.
pub fn leases(node: &Node) -> usize {
    fs::read_dir(node.path("leases")).into_iter().flatten().count()
}
