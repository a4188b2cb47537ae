//! Devices by name (Container Device Interface, CDI): what a vendor's files say must be added for `vendor/class=name`.
//!
//! ```text
//! /etc/cdi/*.json, *.yaml ─┐
//!                          ├─ resolve (reads files) ── Edits: env, nodes, mounts, hooks, groups ── build
//! /var/run/cdi/… (wins)   ─┘
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use oci_spec::runtime::{Hook, Hooks, Mount};
use serde::Deserialize;

use super::host::{DeviceKind, DeviceNode, ResolvedDevice, resolve_node};
use super::{Result, SpecError, mounts};

/// Where specifications lie; a later directory wins.
pub const DIRECTORIES: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];
/// Older clients name devices in annotations of this prefix; their values are lists with commas.
const ANNOTATION: &str = "cdi.k8s.io/";
const MAX_BYTES: u64 = 4 << 20;

/// What to add to a container for its devices.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Edits {
    /// The names that were resolved.
    pub names: BTreeSet<String>,
    /// `KEY=value`; replaces what the image and the request say.
    pub env: Vec<String>,
    pub devices: Vec<ResolvedDevice>,
    pub mounts: Vec<Mount>,
    pub hooks: Hooks,
    /// Further supplementary groups of the first process.
    pub groups: Vec<u32>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    kind: String,
    #[serde(default)]
    container_edits: Changes,
    #[serde(default)]
    devices: Vec<Named>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Named {
    name: String,
    #[serde(default)]
    container_edits: Changes,
}

#[derive(Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Changes {
    env: Vec<String>,
    device_nodes: Vec<Node>,
    mounts: Vec<Bind>,
    hooks: Vec<NamedHook>,
    #[serde(rename = "additionalGids", alias = "additionalGIDs")]
    additional_gids: Vec<u32>,
}

#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Node {
    path: PathBuf,
    host_path: Option<PathBuf>,
    #[serde(rename = "type", default)]
    kind: String,
    major: Option<u64>,
    minor: Option<u64>,
    file_mode: Option<u32>,
    #[serde(default)]
    permissions: String,
    uid: Option<u32>,
    gid: Option<u32>,
}

#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Bind {
    host_path: PathBuf,
    container_path: PathBuf,
    #[serde(default)]
    options: Vec<String>,
    #[serde(rename = "type")]
    kind: Option<String>,
}

#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct NamedHook {
    hook_name: String,
    path: PathBuf,
    args: Option<Vec<String>>,
    env: Option<Vec<String>>,
    timeout: Option<i64>,
}

/// The names that a request asks for, each once: its list, then what annotations of `cdi.k8s.io/` say.
pub fn names(devices: &[String], annotations: &BTreeMap<String, String>) -> Vec<String> {
    let annotated = annotations.iter().filter(|(key, _)| key.starts_with(ANNOTATION));
    let annotated = annotated
        .flat_map(|(_, value)| value.split(','))
        .map(str::trim)
        .filter(|name| !name.is_empty());
    let mut all: Vec<String> = Vec::new();
    for name in devices.iter().map(String::as_str).chain(annotated) {
        if !all.iter().any(|other| other == name) {
            all.push(name.into());
        }
    }
    all
}

/// Reads the specifications and collects what the named devices need.
///
/// # Errors
/// For a name that no file has (files that could not be read are then named), and for one that a directory has twice.
pub fn resolve(names: &[String], directories: &[impl AsRef<Path>]) -> Result<Edits> {
    let mut edits = Edits::default();
    if names.is_empty() {
        return Ok(edits);
    }
    let (known, broken) = known(directories);
    let mut files = BTreeSet::new();
    for name in names {
        let field = format!("spec.cdiDevices[{name}]");
        let device = known.get(name).ok_or_else(|| {
            let seen = if broken.is_empty() {
                String::new()
            } else {
                format!("; not readable: {}", broken.join(", "))
            };
            SpecError::unsupported(
                &field,
                format!("no CDI device of that name is known on this node{seen}"),
            )
        })?;
        if device.twice {
            let reason = format!("defined twice, the second time in {}", device.file.display());
            return Err(SpecError::unsupported(field, reason));
        }
        // What a file says of all its devices is done once.
        if files.insert(&device.file) {
            edits.add(&field, &device.common)?;
        }
        edits.add(&field, &device.own)?;
        edits.names.insert(name.clone());
    }
    Ok(edits)
}

struct Known {
    file: PathBuf,
    directory: usize,
    twice: bool,
    common: Changes,
    own: Changes,
}

fn known(directories: &[impl AsRef<Path>]) -> (BTreeMap<String, Known>, Vec<String>) {
    let (mut known, mut broken) = (BTreeMap::<String, Known>::new(), Vec::new());
    for (directory, path) in directories.iter().enumerate() {
        let entries = fs::read_dir(path.as_ref()).into_iter().flatten().flatten();
        let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
        paths.retain(|path| {
            path.extension()
                .is_some_and(|e| e == "json" || e == "yaml" || e == "yml")
        });
        paths.sort();
        for path in paths {
            let file = match read(&path) {
                Ok(file) => file,
                Err(reason) => {
                    broken.push(format!("{}: {reason}", path.display()));
                    continue;
                }
            };
            for device in file.devices {
                let name = format!("{}={}", file.kind, device.name);
                let twice = known.get(&name).is_some_and(|other| other.directory == directory);
                let (common, own) = (file.container_edits.clone(), device.container_edits);
                known.insert(
                    name,
                    Known {
                        file: path.clone(),
                        directory,
                        twice,
                        common,
                        own,
                    },
                );
            }
        }
    }
    (known, broken)
}

fn read(path: &Path) -> std::result::Result<File, String> {
    let meta = fs::metadata(path).map_err(|e| e.to_string())?;
    if !meta.is_file() || meta.len() > MAX_BYTES {
        return Err(format!("not a regular file of at most {MAX_BYTES} bytes"));
    }
    let text = fs::read_to_string(path).map_err(|e| e.to_string())?;
    // JSON is YAML too.
    serde_yaml::from_str(&text).map_err(|e| e.to_string())
}

impl Edits {
    fn add(&mut self, field: &str, changes: &Changes) -> Result<()> {
        self.env.extend(changes.env.iter().cloned());
        self.groups.extend(&changes.additional_gids);
        for node in &changes.device_nodes {
            self.devices.push(node.resolve(field)?);
        }
        for bind in &changes.mounts {
            let options = if bind.options.is_empty() {
                &["rbind".into(), "ro".into()][..]
            } else {
                &bind.options
            };
            let mut mount = Mount::default();
            mount
                .set_destination(mounts::clean(&bind.container_path))
                .set_source(Some(bind.host_path.clone()))
                .set_typ(Some(bind.kind.clone().unwrap_or_else(|| "bind".into())))
                .set_options(Some(options.to_vec()));
            self.mounts.push(mount);
        }
        changes.hooks.iter().try_for_each(|hook| self.hook(field, hook))
    }

    #[allow(deprecated, reason = "CDI files of today name prestart")]
    fn hook(&mut self, field: &str, named: &NamedHook) -> Result<()> {
        let list = match named.hook_name.as_str() {
            "prestart" => self.hooks.prestart_mut(),
            "createRuntime" => self.hooks.create_runtime_mut(),
            "createContainer" => self.hooks.create_container_mut(),
            "startContainer" => self.hooks.start_container_mut(),
            "poststart" => self.hooks.poststart_mut(),
            "poststop" => self.hooks.poststop_mut(),
            other => return Err(SpecError::unsupported(field, format!("`{other}` is not a hook"))),
        };
        let mut hook = Hook::default();
        hook.set_path(named.path.clone())
            .set_args(named.args.clone())
            .set_env(named.env.clone())
            .set_timeout(named.timeout);
        list.get_or_insert_default().push(hook);
        Ok(())
    }
}

impl Node {
    /// The node on the host says what the file leaves out.
    fn resolve(&self, field: &str) -> Result<ResolvedDevice> {
        let path = self.host_path.as_ref().unwrap_or(&self.path);
        let host = resolve_node(path);
        let kind = match (self.kind.as_str(), &host) {
            ("c" | "u", _) => DeviceKind::Char,
            ("b", _) => DeviceKind::Block,
            ("", Ok(node)) => node.kind,
            ("", Err(e)) => return Err(SpecError::unsupported(field, format!("device {}: {e}", path.display()))),
            (other, _) => {
                return Err(SpecError::unsupported(
                    field,
                    format!("`{other}` is not a type of device"),
                ));
            }
        };
        let (major, minor) = match (self.major, self.minor, &host) {
            (Some(major), minor, _) => (major, minor.unwrap_or_default()),
            (None, _, Ok(node)) => (node.major, node.minor),
            (None, _, Err(e)) => {
                return Err(SpecError::unsupported(field, format!("device {}: {e}", path.display())));
            }
        };
        let host = host.ok();
        let node = DeviceNode {
            path: path.clone(),
            kind,
            major,
            minor,
            mode: self.file_mode.or(host.as_ref().map(|node| node.mode)).unwrap_or(0o666) & 0o7777,
            uid: self.uid.or(host.as_ref().map(|node| node.uid)).unwrap_or(0),
            gid: self.gid.or(host.as_ref().map(|node| node.gid)).unwrap_or(0),
        };
        let permissions = match self.permissions.as_str() {
            "" => "rwm",
            given if given.bytes().all(|b| b"rwm".contains(&b)) => given,
            given => {
                return Err(SpecError::unsupported(
                    field,
                    format!("permissions `{given}` are not made of r, w, m"),
                ));
            }
        };
        Ok(ResolvedDevice {
            node,
            container_path: self.path.clone(),
            permissions: permissions.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(files: &[(&str, &str)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(directory.path().join(name), text).unwrap();
        }
        directory
    }

    const VENDOR: &str = r#"{
      "cdiVersion": "0.6.0", "kind": "vendor.test/gpu",
      "containerEdits": {
        "env": ["ALL=1"], "hooks": [{"hookName": "createContainer", "path": "/bin/hook", "args": ["h"]}]
      },
      "devices": [
        {"name": "0", "containerEdits": {
          "env": ["GPU=0"],
          "deviceNodes": [{"path": "/dev/gpu0", "hostPath": "/dev/zero", "permissions": "rw", "gid": 44}],
          "mounts": [{"hostPath": "/usr/lib/gpu", "containerPath": "/usr/lib/gpu/", "options": ["ro", "bind"]}]
        }},
        {"name": "1", "containerEdits": {"deviceNodes": [{"path": "/dev/none", "type": "b", "major": 9, "minor": 1}]}}
      ]}"#;

    #[test]
    fn devices_are_found_and_what_is_common_is_done_once() {
        let one = directory(&[("a.json", VENDOR), ("broken.yaml", "{"), ("note.txt", "x")]);
        let wanted = names(
            &["vendor.test/gpu=0".into()],
            &[(
                "cdi.k8s.io/x".to_string(),
                "vendor.test/gpu=1, vendor.test/gpu=0".to_string(),
            )]
            .into(),
        );
        assert_eq!(wanted, ["vendor.test/gpu=0", "vendor.test/gpu=1"]);
        let edits = resolve(&wanted, &[one.path()]).unwrap();
        assert_eq!(edits.env, ["ALL=1", "GPU=0"]);
        assert_eq!(edits.hooks.create_container().as_ref().unwrap().len(), 1);
        let node = &edits.devices[0];
        assert_eq!(
            (
                node.node.major,
                node.node.minor,
                node.node.gid,
                node.permissions.as_str()
            ),
            (1, 5, 44, "rw")
        );
        assert_eq!(node.container_path, Path::new("/dev/gpu0"));
        assert_eq!(
            (edits.devices[1].node.kind, edits.devices[1].node.major),
            (DeviceKind::Block, 9)
        );
        assert_eq!(edits.mounts[0].destination(), Path::new("/usr/lib/gpu"));
    }

    #[test]
    fn a_later_directory_wins_and_doubles_are_refused() {
        let yaml = "kind: vendor.test/gpu\ndevices:\n- name: \"0\"\n  containerEdits:\n    env: [GPU=late]\n";
        let (etc, run) = (directory(&[("a.json", VENDOR)]), directory(&[("b.yaml", yaml)]));
        let wanted = ["vendor.test/gpu=0".to_string()];
        assert_eq!(resolve(&wanted, &[etc.path(), run.path()]).unwrap().env, ["GPU=late"]);
        let both = directory(&[("a.json", VENDOR), ("b.yaml", yaml)]);
        let error = resolve(&wanted, &[both.path()]).unwrap_err().to_string();
        assert!(error.contains("defined twice"), "{error}");
        let broken = directory(&[("b.yaml", "kind: [")]);
        let error = resolve(&wanted, &[broken.path()]).unwrap_err().to_string();
        assert!(
            error.contains("cdiDevices[vendor.test/gpu=0]: no CDI device") && error.contains("b.yaml"),
            "{error}"
        );
        assert_eq!(resolve(&[], &[broken.path()]).unwrap(), Edits::default());
    }
}
