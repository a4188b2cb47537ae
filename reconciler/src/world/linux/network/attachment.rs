//! The receipt of a sandbox's network: what it was given and how to take it back.
//!
//! `<sandbox directory>/attachment.json`, written before the first side effect and again with the result. Fields only
//! grow; unknown ones are kept.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use shim::fault;

use super::error::{Error, Result, system};
use super::{Cidr, PortMapping};

/// The file in the sandbox's directory.
pub const FILE: &str = "attachment.json";
/// A conflist and its result are small; more is damage.
const MAX_BYTES: u64 = 8 << 20;

/// What a sandbox's network is made of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Attachment {
    /// Of the format, 1.
    pub version: u32,
    /// The sandbox.
    pub uid: String,
    pub namespace: String,
    pub name: String,
    pub pod_uid: String,
    pub kind: Kind,
    /// The network is whole; false between the write before ADD and the one after.
    pub complete: bool,
    /// `/proc/sys/kernel/random/boot_id` when it was made: links and rules of another boot are gone.
    pub boot_id: String,
    pub netns: PathBuf,
    pub ifname: String,
    /// The addresses of `ifname`.
    #[serde(default)]
    pub addresses: Vec<Cidr>,
    /// Of the default routes.
    #[serde(default)]
    pub gateways: Vec<IpAddr>,
    /// The mapped host ports.
    #[serde(default)]
    pub ports: Vec<PortMapping>,
    /// Only with [`Kind::Cni`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cni: Option<Cni>,
    #[serde(flatten)]
    pub unknown: Map<String, Value>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    Cni,
    Builtin,
}

/// What DEL needs, whatever the configuration says by then.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Cni {
    /// The directory of the runtime handler's own that the list was read from; absent: the node's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conf_dir: Option<PathBuf>,
    /// The whole network configuration list.
    pub conflist: Value,
    /// `CNI_ARGS`.
    pub args: String,
    /// `runtimeConfig` by capability; each plugin gets those it declares.
    pub capabilities: Map<String, Value>,
    /// The result of the last ADD.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<Value>,
    #[serde(flatten)]
    pub unknown: Map<String, Value>,
}

impl Attachment {
    /// Reads the attachment in a sandbox's directory; `None` if there is none.
    pub fn read(dir: &Path) -> Result<Option<Attachment>> {
        let path = dir.join(FILE);
        let fail = |why: String| Error::Attachment {
            path: path.clone(),
            why,
        };
        let file = match OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(fail(e.to_string())),
        };
        let mut text = Vec::new();
        file.take(MAX_BYTES + 1)
            .read_to_end(&mut text)
            .map_err(|e| fail(e.to_string()))?;
        if text.len() as u64 > MAX_BYTES {
            return Err(fail(format!("longer than {MAX_BYTES} bytes")));
        }
        let value = serde_json::from_slice(&text).map_err(|e| fail(e.to_string()))?;
        parse(value, &path).map(Some)
    }

    /// From a debt.
    pub fn of_value(value: Value) -> Result<Attachment> {
        parse(value, Path::new("(owed)"))
    }

    /// Writes it: temporary name, then rename. CNI's is made durable, since plugins keep leases over a reboot; of the
    /// bridge nothing outlives the boot, so the page cache is enough.
    pub fn write(&self, dir: &Path) -> Result<()> {
        let (path, temp) = (dir.join(FILE), dir.join(".attachment.json.new"));
        let text = serde_json::to_vec(self).map_err(|e| Error::Attachment {
            path: path.clone(),
            why: e.to_string(),
        })?;
        let write = || {
            fault::check("attachment.write.before")?;
            let mut file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&temp)?;
            file.write_all(&text)?;
            if self.kind == Kind::Cni {
                file.sync_data()?;
            }
            fault::check("attachment.write.torn")?;
            fs::rename(&temp, &path)?;
            if self.kind == Kind::Cni {
                File::open(dir)?.sync_all()?;
            }
            fault::check("attachment.write.after")
        };
        write().map_err(system("write", path.display()))
    }

    /// Unlinks it; absent is success. Not durable: DEL of what comes back after a power cut is harmless.
    pub fn remove(dir: &Path) -> Result<()> {
        fault::point("attachment.remove.before");
        match fs::remove_file(dir.join(FILE)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(system("remove", dir.join(FILE).display())(e)),
            _ => Ok(()),
        }
    }

    /// The sandbox's addresses: the primary (the first IPv4, else the first), and the rest in order.
    pub fn ips(&self) -> (Option<IpAddr>, Vec<IpAddr>) {
        let mut all: Vec<IpAddr> = self.addresses.iter().map(|a| a.ip).collect();
        if all.is_empty() {
            return (None, all);
        }
        let primary = all.remove(all.iter().position(IpAddr::is_ipv4).unwrap_or(0));
        (Some(primary), all)
    }

    /// Whether it was made since the machine started.
    pub fn of_this_boot(&self) -> bool {
        boot_id().is_ok_and(|id| id == self.boot_id)
    }
}

/// This boot's id, random(4).
pub fn boot_id() -> Result<String> {
    let path = "/proc/sys/kernel/random/boot_id";
    Ok(fs::read_to_string(path)
        .map_err(system("read", path))?
        .trim()
        .to_string())
}

/// The version first: the rest of a newer one may not be readable at all.
fn parse(value: Value, path: &Path) -> Result<Attachment> {
    let path = path.to_owned();
    match value.get("version").and_then(Value::as_u64) {
        Some(version) if version > 1 => Err(Error::NewerAttachment { path, version }),
        _ => serde_json::from_value(value).map_err(|e| Error::Attachment {
            path,
            why: e.to_string(),
        }),
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn example() -> Attachment {
        Attachment {
            version: 1,
            uid: "e".repeat(64),
            namespace: "default".into(),
            name: "web".into(),
            pod_uid: "u".into(),
            kind: Kind::Builtin,
            complete: true,
            boot_id: boot_id().unwrap(),
            netns: "/run/netns/x".into(),
            ifname: "eth0".into(),
            addresses: Vec::new(),
            gateways: Vec::new(),
            ports: Vec::new(),
            cni: None,
            unknown: Map::new(),
        }
    }

    /// As version 0.1.0 wrote them.
    #[test]
    fn attachments_of_the_first_version_stay_readable() {
        let dir = tempfile::tempdir().unwrap();
        let builtin = include_str!("tests/golden-builtin.json");
        let cni = r#"{"version":1,"uid":"e1","namespace":"d","name":"web","podUid":"u","kind":"cni","complete":true,
            "bootId":"5a3c","netns":"/run/netns/x","ifname":"eth0","addresses":["192.0.2.9/32"],"gateways":[],
            "ports":[{"protocol":"udp","containerPort":53,"hostPort":5353,"hostIp":"127.0.0.1"}],
            "cni":{"conflist":{"name":"n","plugins":[{"type":"fake"}]},"args":"K8S_POD_NAME=web",
            "capabilities":{"portMappings":[]},"result":{"ips":[]}}}"#;
        for golden in [builtin, cni] {
            fs::write(dir.path().join(FILE), golden).unwrap();
            let read = Attachment::read(dir.path()).unwrap().unwrap();
            assert!(read.unknown.is_empty(), "{:?}", read.unknown);
            read.write(dir.path()).unwrap();
            let text = fs::read(dir.path().join(FILE)).unwrap();
            let (old, new): (Value, Value) = (
                serde_json::from_str(golden).unwrap(),
                serde_json::from_slice(&text).unwrap(),
            );
            assert_eq!(old, new);
        }
    }

    #[test]
    fn a_newer_attachment_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FILE), r#"{"version": 2, "else": []}"#).unwrap();
        let error = Attachment::read(dir.path()).unwrap_err();
        assert!(matches!(error, Error::NewerAttachment { version: 2, .. }), "{error}");
        assert!(Attachment::of_value(serde_json::json!({"version": 3})).is_err());
    }

    #[test]
    fn unknown_fields_survive_a_rewrite() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Attachment::read(dir.path()).unwrap(), None);
        let mut value = serde_json::to_value(example()).unwrap();
        value["later"] = "kept".into();
        fs::write(dir.path().join(FILE), value.to_string()).unwrap();
        let read = Attachment::read(dir.path()).unwrap().unwrap();
        read.write(dir.path()).unwrap();
        let again: Value = serde_json::from_slice(&fs::read(dir.path().join(FILE)).unwrap()).unwrap();
        assert_eq!(again["later"], "kept");
        Attachment::remove(dir.path()).unwrap();
        Attachment::remove(dir.path()).unwrap();
    }

    #[test]
    fn damage_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FILE), "").unwrap();
        let error = Attachment::read(dir.path()).unwrap_err().to_string();
        assert!(error.contains(FILE), "{error}");
    }

    #[test]
    fn the_first_ipv4_is_primary() {
        let mut attachment = example();
        assert_eq!(attachment.ips(), (None, Vec::new()));
        attachment.addresses = ["fd00::2/64", "10.0.0.2/8", "10.0.0.3/8"]
            .map(|a| a.parse().unwrap())
            .into();
        let (primary, rest) = attachment.ips();
        assert_eq!(primary.unwrap().to_string(), "10.0.0.2");
        assert_eq!(
            rest.iter().map(IpAddr::to_string).collect::<Vec<_>>(),
            ["fd00::2", "10.0.0.3"]
        );
    }
}
