//! containerd's `config.toml` (versions 2 to 4), as far as it has a counterpart here.
//!
//! ```text
//!  [plugins.'io.containerd.grpc.v1.cri']    2 ─┐
//!  [plugins.'io.containerd.cri.v1.runtime'] 3 ─┼─> cri.NAME ──(RULES)──> our key, checked by the table
//!  [plugins.'io.containerd.cri.v1.images']  3 ─┘       └────(REASONS)──> left, with why
//!  [plugins.'io.containerd.server.v1.PART'] 4 ───> PART.NAME, which is top-level before 4
//! ```

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use serde_yaml::{Mapping, Value};
use toml::Value as Toml;

use super::keys::{self, KIND, VERSIONS};
use super::{Origin, Setting, Settings, show};

/// What became of a file.
#[derive(Debug)]
pub struct Import {
    /// A configuration of ours.
    pub yaml: String,
    /// Lines `KEY = VALUE: why it has no counterpart`.
    pub left: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("reading it: {0}")]
    Read(#[from] std::io::Error),
    #[error("it is larger than {LIMIT} bytes")]
    TooLarge,
    #[error("it is no TOML: {0}")]
    Toml(#[from] toml::de::Error),
    #[error("version {0}: versions 2, 3 and 4 are read; `containerd config migrate` makes a newer one of an older one")]
    Version(String),
}

type Result<T> = std::result::Result<T, Error>;

/// Bytes of a file.
const LIMIT: u64 = 1 << 20;

/// What a value becomes; an error says why it has no counterpart.
type Convert = fn(&Toml) -> std::result::Result<Value, String>;

/// Their key, ours, and how the value is written here. A name `*` is any.
const RULES: &[(&str, &str, Convert)] = &[
    ("oom_score", "oomScore.daemon", same),
    ("debug.level", "logLevel", level),
    ("metrics.address", "metrics", same),
    ("cri.sandbox_image", "images.sandboxImage", same),
    ("cri.pinned_images.sandbox", "images.sandboxImage", same),
    ("cri.pinned_images.*", "images.pinned", list),
    ("cri.image_pull_progress_timeout", "registry.windowSeconds", seconds),
    ("cri.registry.config_path", "registry.certsDirs", paths),
    ("cri.max_container_log_line_size", "logs.maxLineBytes", same),
    ("cri.unset_seccomp_profile", "containers.seccomp", seccomp),
    ("cri.cni.bin_dir", "network.cniBinDirs", list),
    ("cri.cni.bin_dirs", "network.cniBinDirs", same),
    ("cri.cni.conf_dir", "network.cniConfDir", same),
    ("cri.cni.conf_template", "network.cniTemplate", same),
    ("cri.stream_idle_timeout", "streaming.idleSeconds", seconds),
    ("cri.x509_key_pair_streaming.tls_cert_file", "streaming.tls.cert", same),
    ("cri.x509_key_pair_streaming.tls_key_file", "streaming.tls.key", same),
    ("cri.containerd.runtimes.*.options.ShimCgroup", "cgroup.shims", same),
    (
        "cri.containerd.runtimes.*.options.SystemdCgroup",
        "cgroup.driver",
        driver,
    ),
    ("cri.systemd_cgroup", "cgroup.driver", driver),
    ("cri.containerd.default_runtime_name", "defaultHandler", same),
];

/// The runtime type whose programs are called as the OCI says, and that stands for if none is named.
const RUNC: &str = "io.containerd.runc.v2";

/// Why well-known keys are left; of any other there is none to tell.
const REASONS: &[(&str, &str)] = &[
    (
        "root",
        "its data is not readable here; root is this program's own directory",
    ),
    ("state", "it is that program's own; state is this one's"),
    (
        "cri.enable_tls_streaming",
        "no certificate is named, and none is made here: set streaming.tls.cert and key",
    ),
    ("imports", "those files were not read: import each"),
    (
        "grpc.address",
        "both may run side by side; to take its place, set socket to unix://ADDRESS",
    ),
    (
        "cri.containerd.runtimes.*.runtime_type",
        "a handler is a program with the OCI's command line, not a shim",
    ),
    (
        "cri.registry.mirrors.*",
        "write it as HOST/hosts.toml in a directory of registry.certsDirs",
    ),
    (
        "cri.registry.mirrors.*.*",
        "write it as HOST/hosts.toml in a directory of registry.certsDirs",
    ),
    (
        "cri.registry.configs.*.tls.*",
        "write it as HOST/hosts.toml in a directory of registry.certsDirs",
    ),
    (
        "cri.registry.configs.*.auth.*",
        "credentials are read from auth.json and never stored",
    ),
];

/// Reads and translates a file.
pub fn read(path: &Path) -> Result<Import> {
    let mut text = String::new();
    std::fs::File::open(path)?.take(LIMIT + 1).read_to_string(&mut text)?;
    match text.len() as u64 > LIMIT {
        true => Err(Error::TooLarge),
        false => translate(&text),
    }
}

/// Translates a file's text.
///
/// # Errors
/// If it is no TOML, or of a version that is not known.
pub fn translate(text: &str) -> Result<Import> {
    let file: toml::Table = toml::from_str(text)?;
    match file.get("version") {
        Some(Toml::Integer(2..=4)) => {}
        None => return Err(Error::Version("1 (none is written)".to_owned())),
        Some(other) => return Err(Error::Version(short(other))),
    }
    let mut all = Vec::new();
    flatten(&file, &mut Vec::new(), &mut all);
    let (mut settings, mut left) = (Settings::default(), Vec::new());
    let mut off = 0;
    let on = |key: &str| all.iter().any(|(path, value)| normal(path) == key && !is_off(value));
    let secure = on("cri.enable_tls_streaming");
    let certified = on("cri.x509_key_pair_streaming.tls_cert_file");
    let listen = listen(&all);
    let mut handlers = Handlers::new();
    for (path, value) in &all {
        let name = normal(path);
        if handler(&all, path, value, &mut handlers) {
            continue;
        }
        if name == "version" || (listen.is_some() && name.starts_with("cri.stream_server_")) {
            continue;
        }
        let files = name.starts_with("cri.x509_key_pair_streaming.");
        if name == "cri.enable_tls_streaming" && secure && certified {
            continue;
        }
        if is_off(value) || (files && !secure) {
            off += 1;
            continue;
        }
        let rule = RULES.iter().find(|(pattern, ..)| matches(pattern, &name));
        let taken = match rule {
            Some((_, key, convert)) => convert(value).and_then(|value| put(&mut settings, key, value)),
            None => Err(reason(&name).to_owned()),
        };
        if let Err(why) = taken {
            left.push(format!("{} = {}: {why}", shown(path), short(value)));
        }
    }
    for (name, map) in handlers {
        if let Err(why) = put(&mut settings, &format!("handlers.{name}"), Value::Mapping(map)) {
            left.push(format!("runtimes.{name}: {why}"));
        }
    }
    if let Some(address) = listen
        && let Err(why) = put(&mut settings, "streaming.address", Value::String(address.clone()))
    {
        left.push(format!("stream_server_address {address}: {why}"));
    }
    if off > 0 {
        left.push(format!(
            "{off} more keys are empty, zero or false there, and were left out"
        ));
    }
    let version = VERSIONS[VERSIONS.len() - 1];
    let yaml = format!(
        "apiVersion: {version}\nkind: {KIND}\n{}",
        show::yaml(&settings.set_ones(), false)
    );
    Ok(Import { yaml, left })
}

/// Rows of our table, by name.
type Handlers = BTreeMap<String, Mapping>;

/// Takes a key of their table of runtimes, if ours has it.
fn handler(all: &[(Vec<String>, Toml)], path: &[String], value: &Toml, handlers: &mut Handlers) -> bool {
    let Some(at) = path.windows(2).position(|two| two == ["containerd", "runtimes"]) else {
        return false;
    };
    let (head, rest) = path.split_at(at + 2);
    let [name, key @ ..] = rest else { return false };
    let head: Vec<&String> = head.iter().chain([name]).collect();
    let kind = all.iter().find(|(path, _)| {
        path.len() == head.len() + 1
            && path.iter().zip(&head).all(|(a, b)| a == *b)
            && path.ends_with(&["runtime_type".to_owned()])
    });
    // A name with a dot would be another key.
    if kind.is_none_or(|(_, kind)| kind.as_str() != Some(RUNC)) || name.is_empty() || name.contains('.') {
        return false;
    }
    let key: Vec<&str> = key.iter().map(String::as_str).collect();
    let ours = match key.as_slice() {
        ["runtime_type" | "options", ..] => "binary",
        ["privileged_without_host_devices"] => "privilegedWithoutHostDevices",
        ["cgroup_writable"] => "cgroupWritable",
        ["pod_annotations" | "container_annotations"] => "annotations",
        ["base_runtime_spec"] => "baseSpec",
        ["cni_conf_dir"] => "cniConfDir",
        _ => return false,
    };
    if key[0] == "options" && key != ["options", "BinaryName"] {
        return false;
    }
    let row = handlers.entry(name.clone()).or_default();
    row.entry("binary".into()).or_insert_with(|| "runc".into());
    if key == ["runtime_type"] || is_off(value) {
        return true;
    }
    let value = serde_yaml::to_value(value).unwrap_or_default();
    match (row.get_mut(ours), value) {
        (Some(Value::Sequence(old)), Value::Sequence(new)) => {
            let more: Vec<_> = new.into_iter().filter(|one| !old.contains(one)).collect();
            old.extend(more);
        }
        (_, value) => drop(row.insert(ours.into(), value)),
    }
    true
}

/// All values that are no tables, by path.
fn flatten<'a>(table: &'a toml::Table, path: &mut Vec<&'a str>, all: &mut Vec<(Vec<String>, Toml)>) {
    for (name, value) in table {
        path.push(name);
        match value {
            Toml::Table(below) => flatten(below, path, all),
            value => all.push((path.iter().map(|part| (*part).to_owned()).collect(), value.clone())),
        }
        path.pop();
    }
}

/// A path without what differs between the versions.
fn normal(path: &[String]) -> String {
    let parts: Vec<&str> = path.iter().map(String::as_str).collect();
    match parts.as_slice() {
        [
            "plugins",
            "io.containerd.grpc.v1.cri" | "io.containerd.cri.v1.runtime" | "io.containerd.cri.v1.images",
            rest @ ..,
        ] => format!("cri.{}", rest.join(".")),
        ["plugins", plugin, rest @ ..] if plugin.starts_with("io.containerd.server.v1.") => {
            format!("{}.{}", &plugin["io.containerd.server.v1.".len()..], rest.join("."))
        }
        parts => parts.join("."),
    }
}

fn matches(pattern: &str, name: &str) -> bool {
    // Names of registries have dots; then a pattern's star takes several parts, and this only leads to a reason.
    if pattern == name {
        return true;
    }
    match pattern.split_once('*') {
        None => false,
        Some((head, tail)) => {
            let rest = name.strip_prefix(head).filter(|rest| !rest.is_empty());
            match tail.rsplit('*').next() {
                Some(tail) => rest.is_some_and(|rest| rest.ends_with(tail) && rest.len() > tail.len()),
                None => rest.is_some(),
            }
        }
    }
}

fn reason(name: &str) -> &'static str {
    let found = REASONS.iter().find(|(pattern, _)| matches(pattern, name));
    found.map_or("no counterpart", |(_, why)| why)
}

/// Address and port are two keys there.
fn listen(all: &[(Vec<String>, Toml)]) -> Option<String> {
    let text = |key: &str| {
        let found = all.iter().find(|(path, _)| normal(path) == key);
        match &found?.1 {
            Toml::String(text) if !text.is_empty() => Some(text.clone()),
            Toml::Integer(n) => Some(n.to_string()),
            _ => None,
        }
    };
    let (address, port) = (text("cri.stream_server_address"), text("cri.stream_server_port"));
    if address.is_none() && port.is_none() {
        return None;
    }
    let address = address.unwrap_or_else(|| "127.0.0.1".to_owned());
    let address = if address.contains(':') {
        format!("[{address}]")
    } else {
        address
    };
    Some(format!("{address}:{}", port.unwrap_or_else(|| "0".to_owned())))
}

/// Sets a key of ours; a list that is there already grows.
fn put(settings: &mut Settings, key: &str, value: Value) -> std::result::Result<(), String> {
    let value = match (settings.set.get(key).map(|old| old.value.clone()), value) {
        (Some(Value::Sequence(mut old)), Value::Sequence(new)) => {
            old.extend(new);
            Value::Sequence(old)
        }
        (_, value) => value,
    };
    if let Some(found) = keys::find(key) {
        (found.check)(&value).map_err(|e| format!("not for {key}: {e}"))?;
    }
    let origin = Origin::Default;
    settings.put(key.to_owned(), Setting { value, origin });
    Ok(())
}

fn is_off(value: &Toml) -> bool {
    match value {
        Toml::String(text) => text.is_empty() || matches!(text.as_str(), "0s" | "0"),
        Toml::Integer(n) => *n == 0,
        Toml::Float(n) => *n == 0.0,
        Toml::Boolean(on) => !on,
        Toml::Array(all) => all.is_empty(),
        Toml::Table(all) => all.is_empty(),
        Toml::Datetime(_) => false,
    }
}

/// As it is written there.
fn shown(path: &[String]) -> String {
    let bare = |part: &str| part.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    let parts = path.iter().map(|part| match bare(part) {
        true => part.clone(),
        false => format!("{part:?}"),
    });
    parts.collect::<Vec<_>>().join(".")
}

fn short(value: &Toml) -> String {
    let text = serde_json::to_string(value).unwrap_or_default();
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

fn same(value: &Toml) -> std::result::Result<Value, String> {
    serde_yaml::to_value(value).map_err(|e| e.to_string())
}

fn list(value: &Toml) -> std::result::Result<Value, String> {
    Ok(Value::Sequence(vec![same(value)?]))
}

fn driver(value: &Toml) -> std::result::Result<Value, String> {
    match value.as_bool() {
        Some(true) => Ok("systemd".into()),
        Some(false) => Ok("cgroupfs".into()),
        None => Err("it is neither true nor false".to_owned()),
    }
}

fn text(value: &Toml) -> std::result::Result<&str, String> {
    value.as_str().ok_or_else(|| "it is no text".to_owned())
}

fn paths(value: &Toml) -> std::result::Result<Value, String> {
    let parts = text(value)?.split(':').filter(|part| !part.is_empty());
    Ok(Value::Sequence(parts.map(Value::from).collect()))
}

fn level(value: &Toml) -> std::result::Result<Value, String> {
    Ok(match text(value)? {
        "fatal" | "panic" => "error",
        "warning" => "warn",
        other => other,
    }
    .into())
}

fn seccomp(value: &Toml) -> std::result::Result<Value, String> {
    Ok(match text(value)? {
        "unconfined" => "Unconfined",
        "runtime/default" | "docker/default" => "RuntimeDefault",
        other => other.strip_prefix("localhost/").unwrap_or(other),
    }
    .into())
}

/// A duration as Go prints it (`4h0m0s`), in whole seconds, never less than it says.
fn seconds(value: &Toml) -> std::result::Result<Value, String> {
    let wrong = || format!("{} is no duration such as 4h0m0s", short(value));
    let (mut rest, mut total) = (text(value)?, 0.0);
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
        let number: f64 = rest[..digits].parse().map_err(|_| wrong())?;
        let after = &rest[digits..];
        let unit = after.find(|c: char| c.is_ascii_digit()).unwrap_or(after.len());
        total += number
            * match &after[..unit] {
                "h" => 3600.0,
                "m" => 60.0,
                "s" => 1.0,
                "ms" => 1e-3,
                "us" | "µs" => 1e-6,
                "ns" => 1e-9,
                _ => return Err(wrong()),
            };
        rest = &after[unit..];
    }
    match total.ceil() {
        seconds if (1.0..1e12).contains(&seconds) => Ok((seconds as u64).into()),
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERSION_2: &str = r#"
        version = 2
        root = "/var/lib/containerd"
        oom_score = -999
        imports = ["/etc/containerd/conf.d/*.toml"]
        [debug]
          level = "warning"
        [metrics]
          address = "127.0.0.1:1338"
        [grpc]
          address = "/run/containerd/containerd.sock"
          max_recv_message_size = 16777216
        [plugins."io.containerd.grpc.v1.cri"]
          sandbox_image = "registry.k8s.io/pause:3.10"
          stream_server_address = "127.0.0.1"
          stream_server_port = "10010"
          stream_idle_timeout = "1h30m0s"
          max_container_log_line_size = 8192
          unset_seccomp_profile = "runtime/default"
          enable_selinux = true
          [plugins."io.containerd.grpc.v1.cri".cni]
            bin_dir = "/opt/cni/bin"
            conf_dir = "/etc/cni/net.d"
          [plugins."io.containerd.grpc.v1.cri".registry]
            config_path = "/etc/containerd/certs.d:/etc/docker/certs.d"
            [plugins."io.containerd.grpc.v1.cri".registry.mirrors."docker.io"]
              endpoint = ["https://mirror.example"]
          [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
            runtime_type = "io.containerd.runc.v2"
            [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
              SystemdCgroup = true
              ShimCgroup = "/system.slice"
    "#;

    const VERSION_3: &str = r#"
        version = 3
        [plugins.'io.containerd.cri.v1.images']
          image_pull_progress_timeout = '5m0s'
          [plugins.'io.containerd.cri.v1.images'.pinned_images]
            sandbox = 'registry.k8s.io/pause:3.10'
            agent = 'example.com/agent:1'
            other = 'example.com/other:1'
          [plugins.'io.containerd.cri.v1.images'.registry]
            config_path = '/etc/containerd/certs.d'
        [plugins.'io.containerd.cri.v1.runtime']
          max_container_log_line_size = -1
          [plugins.'io.containerd.cri.v1.runtime'.cni]
            bin_dirs = ['/a', '/b']
        [plugins.'io.containerd.grpc.v1.cri']
          stream_server_address = '::1'
    "#;

    const VERSION_4: &str = r#"
        version = 4
        [plugins.'io.containerd.server.v1.metrics']
          address = '0.0.0.0:1338'
        [plugins.'io.containerd.server.v1.debug']
          level = 'debug'
        [plugins.'io.containerd.server.v1.grpc']
          address = '/run/x.sock'
    "#;

    /// The translation, which must be a configuration that holds.
    fn import(text: &str) -> Import {
        let import = translate(text).unwrap();
        let found = super::super::file::parse(&import.yaml, Path::new("imported.yaml"));
        assert_eq!(found.problems, [], "{}", import.yaml);
        import
    }

    #[test]
    fn version_2() {
        let import = import(VERSION_2);
        assert_eq!(
            import.yaml,
            "apiVersion: reconcile/v1\nkind: Config\nlogLevel: warn\nmetrics: 127.0.0.1:1338\ncgroup:\n  driver: \
             systemd\n  shims: /system.slice\nnetwork:\n  cniConfDir: /etc/cni/net.d\n  cniBinDirs: \
             [/opt/cni/bin]\nregistry:\n  certsDirs: [/etc/containerd/certs.d, /etc/docker/certs.d]\nimages:\n  \
             sandboxImage: registry.k8s.io/pause:3.10\ncontainers:\n  seccomp: RuntimeDefault\nhandlers:\n  \
             runc: {binary: runc}\nlogs:\n  maxLineBytes: 8192\nstreaming:\n  address: 127.0.0.1:10010\n  \
             idleSeconds: 5400\noomScore:\n  daemon: -999\n"
        );
        let left = import.left.join("\n");
        for line in [
            "root = \"/var/lib/containerd\": its data",
            "imports = [\"/etc/containerd/conf.d/*.toml\"]: those files",
            "grpc.address = \"/run/containerd/containerd.sock\": both may",
            "grpc.max_recv_message_size = 16777216: no counterpart",
            "plugins.\"io.containerd.grpc.v1.cri\".enable_selinux = true: no counterpart",
            "plugins.\"io.containerd.grpc.v1.cri\".registry.mirrors.\"docker.io\".endpoint = \
             [\"https://mirror.example\"]: write it as",
        ] {
            assert!(left.contains(line), "{line}\n---\n{left}");
        }
        assert_eq!(import.left.len(), 6, "{left}");
    }

    #[test]
    fn runtimes_become_handlers() {
        let import = import(
            r#"
            version = 3
            [plugins.'io.containerd.cri.v1.runtime'.containerd]
              default_runtime_name = 'crun'
            [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.crun]
              runtime_type = 'io.containerd.runc.v2'
              pod_annotations = ['a.*', 'b']
              container_annotations = ['b', 'c']
              privileged_without_host_devices = true
              base_runtime_spec = '/etc/base.json'
              cni_conf_dir = '/etc/cni/crun.d'
              cni_max_conf_num = 2
              sandboxer = ''
              [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.crun.options]
                BinaryName = '/usr/bin/crun'
                NoPivotRoot = true
            [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
              runtime_type = 'io.containerd.runc.v2'
              [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
                BinaryName = ''
            [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.kata]
              runtime_type = 'io.containerd.kata.v2'
            "#,
        );
        assert_eq!(
            import.yaml,
            "apiVersion: reconcile/v1\nkind: Config\nhandlers:\n  crun: {binary: /usr/bin/crun, \
             baseSpec: /etc/base.json, cniConfDir: /etc/cni/crun.d, annotations: [b, c, \"a.*\"], \
             privilegedWithoutHostDevices: true}\n  runc: {binary: runc}\ndefaultHandler: crun\n"
        );
        let left = import.left.join("\n");
        for line in [
            "crun.cni_max_conf_num = 2: no counterpart",
            "crun.options.NoPivotRoot = true: no counterpart",
            "kata.runtime_type = \"io.containerd.kata.v2\": a handler is a program",
        ] {
            assert!(left.contains(line), "{line}\n---\n{left}");
        }
        assert_eq!(import.left.len(), 4, "{left}");
    }

    #[test]
    fn a_base_and_a_cni_directory_in_every_version() {
        for (version, plugin) in [
            (2, "io.containerd.grpc.v1.cri"),
            (3, "io.containerd.cri.v1.runtime"),
            (4, "io.containerd.cri.v1.runtime"),
        ] {
            let import = import(&format!(
                "version = {version}\n[plugins.'{plugin}'.containerd.runtimes.a]\n\
                 runtime_type = 'io.containerd.runc.v2'\nbase_runtime_spec = '/b.json'\ncni_conf_dir = '/c'\n\
                 [plugins.'{plugin}'.containerd.runtimes.b]\nruntime_type = 'io.containerd.runc.v2'\n\
                 base_runtime_spec = ''\ncni_conf_dir = ''\n[plugins.'{plugin}'.containerd.runtimes.c]\n\
                 runtime_type = 'io.containerd.runc.v2'\nbase_runtime_spec = 'b.json'\n"
            ));
            let table = "handlers:\n  a: {binary: runc, baseSpec: /b.json, cniConfDir: /c}\n  b: {binary: runc}\n";
            assert!(import.yaml.ends_with(table), "{}", import.yaml);
            // A path that is not absolute is the handler's fault, which is told, not taken.
            let left = import.left.join("\n");
            assert!(
                left.starts_with("runtimes.c: not for handlers.c: ") && left.contains("absolute"),
                "{left}"
            );
        }
    }

    #[test]
    fn version_3_and_4() {
        let three = import(VERSION_3);
        for line in [
            "windowSeconds: 300",
            "sandboxImage: registry.k8s.io/pause:3.10",
            "pinned: [example.com/agent:1, example.com/other:1]",
            "cniBinDirs: [/a, /b]",
            "address: \"[::1]:0\"",
        ] {
            assert!(three.yaml.contains(line), "{line}\n{}", three.yaml);
        }
        assert_eq!(three.left.len(), 1);
        assert!(
            three.left[0].contains("max_container_log_line_size = -1: not for logs.maxLineBytes: must be from 256")
        );
        let four = import(VERSION_4);
        assert!(four.yaml.ends_with("Config\nlogLevel: debug\n"), "{}", four.yaml);
        assert!(
            four.left
                .iter()
                .any(|line| line.contains("metrics") && line.contains("loopback"))
        );
        assert!(four.left.iter().any(|line| line.contains("both may run side by side")));
    }

    #[test]
    fn tls_of_the_streams_counts_if_it_is_on() {
        let with = |on: bool, files: bool| {
            let mut text = format!("version = 2\n[plugins.'io.containerd.grpc.v1.cri']\nenable_tls_streaming = {on}\n");
            if files {
                text += "[plugins.'io.containerd.grpc.v1.cri'.x509_key_pair_streaming]\ntls_cert_file = '/c'\n\
                         tls_key_file = '/k'\n";
            }
            import(&text)
        };
        let tls = "streaming:\n  tls:\n    cert: /c\n    key: /k\n";
        assert!(with(true, true).yaml.ends_with(tls) && with(true, true).left.is_empty());
        assert!(!with(false, true).yaml.contains("tls"));
        let left = with(true, false).left.join("");
        assert!(
            left.contains("enable_tls_streaming = true: no certificate is named"),
            "{left}"
        );
    }

    #[test]
    fn what_is_not_read_is_refused() {
        for (text, why) in [
            ("", "version 1"),
            ("version = 1\n", "version 1:"),
            ("version = 5\n", "version 5:"),
            ("version = \"2\"\n", "versions 2, 3 and 4"),
            ("version = [\n", "no TOML"),
        ] {
            let error = translate(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text:?}: {error}");
        }
    }

    #[test]
    fn durations() {
        let read = |text: &str| seconds(&Toml::String(text.to_owned())).map(|value| value.as_u64());
        assert_eq!(read("4h0m0s"), Ok(Some(14_400)));
        assert_eq!(read("1.5m"), Ok(Some(90)));
        assert_eq!(read("100ms"), Ok(Some(1)));
        for bad in ["4", "h", "4x", "-1s", "1e9h", "."] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
