//! Builds sandbox and container configs the way kubelet fills them, and reads the logs they leave.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, ensure};

use crate::v1::*;

/// The image that is always there.
pub const HELLO: &str = "localhost/hello";
/// The image that [`crate::node::Node::busybox`] imports.
pub const BUSYBOX: &str = "localhost/busybox:1";

/// A sandbox config with a uid of its own, logging below `logs`.
pub fn sandbox(name: &str, logs: &Path) -> PodSandboxConfig {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let uid = format!("{:08x}-0000-4000-8000-{n:012x}", std::process::id());
    PodSandboxConfig {
        hostname: name.into(),
        log_directory: logs.join(format!("{name}-{n}")).display().to_string(),
        metadata: Some(PodSandboxMetadata {
            name: name.into(),
            namespace: "e2e".into(),
            uid,
            attempt: 0,
        }),
        labels: [("io.kubernetes.pod.name".into(), name.into())].into(),
        linux: Some(LinuxPodSandboxConfig::default()),
        ..Default::default()
    }
}

/// The same on the host's network; the hostname is then the host's.
pub fn host_network(mut config: PodSandboxConfig) -> PodSandboxConfig {
    config.hostname.clear();
    namespaces(&mut config).network = NamespaceMode::Node.into();
    config
}

/// The same with this pid namespace for its containers; a pod's own is shared by all of them unless they say otherwise.
pub fn pid_namespace(mut config: PodSandboxConfig, mode: NamespaceMode) -> PodSandboxConfig {
    namespaces(&mut config).pid = mode.into();
    config
}

fn namespaces(config: &mut PodSandboxConfig) -> &mut NamespaceOption {
    let linux = config.linux.get_or_insert_default();
    let security = linux.security_context.get_or_insert_default();
    security.namespace_options.get_or_insert_default()
}

/// A container that runs `command` (the image's own if empty) and logs to `<name>.log`; pid namespace of its own.
pub fn container(name: &str, image: &str, command: &[&str]) -> ContainerConfig {
    let options = NamespaceOption {
        pid: NamespaceMode::Container.into(),
        ..Default::default()
    };
    let security = LinuxContainerSecurityContext {
        namespace_options: Some(options),
        ..Default::default()
    };
    ContainerConfig {
        metadata: Some(ContainerMetadata {
            name: name.into(),
            attempt: 0,
        }),
        image: Some(ImageSpec {
            image: image.into(),
            ..Default::default()
        }),
        command: command.iter().map(|&word| word.into()).collect(),
        log_path: format!("{name}.log"),
        labels: [("io.kubernetes.container.name".into(), name.into())].into(),
        linux: Some(LinuxContainerConfig {
            security_context: Some(security),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// A container of busybox that runs a shell script.
pub fn shell(name: &str, script: &str) -> ContainerConfig {
    container(name, BUSYBOX, &["/bin/sh", "-c", script])
}

/// One line of a CRI log: `time stream tag text`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogLine {
    pub time: String,
    pub stream: String,
    /// `F` for a full line, `P` for a part.
    pub tag: String,
    pub text: String,
}

/// Reads a CRI log file; fails on a line that is not in the format.
pub fn log_lines(path: impl AsRef<Path>) -> Result<Vec<LogLine>> {
    let path = path.as_ref();
    let bytes = fs::read(path).with_context(|| format!("read the log {}", path.display()))?;
    let text = String::from_utf8_lossy(&bytes);
    let mut lines = Vec::new();
    for line in text.lines() {
        let mut words = line.splitn(4, ' ').map(str::to_owned);
        let mut next = || words.next().unwrap_or_default();
        let line = LogLine {
            time: next(),
            stream: next(),
            tag: next(),
            text: next(),
        };
        let known = ["stdout", "stderr"].contains(&&*line.stream) && ["F", "P"].contains(&&*line.tag);
        ensure!(
            known && line.time.contains('T'),
            "{}: not a CRI log line: {line:?}",
            path.display()
        );
        lines.push(line);
    }
    Ok(lines)
}

/// The texts of a log, one string a line.
pub fn log_texts(path: impl AsRef<Path>) -> Result<Vec<String>> {
    Ok(log_lines(path)?.into_iter().map(|line| line.text).collect())
}
