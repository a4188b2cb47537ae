//! CNI network configuration: which file counts, what is in it, and when it changes.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use serde_json::{Map, Value, json};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;

use super::error::{Result, system};

const MAX_BYTES: u64 = 1 << 20;
/// The versions of the specification whose results are understood.
const VERSIONS: [&str; 5] = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// A network configuration list.
#[derive(Debug, Clone, PartialEq)]
pub struct Conflist {
    pub name: String,
    pub version: String,
    pub plugins: Vec<Plugin>,
    /// The whole list, as it is kept in attachments.
    pub raw: Value,
}

/// One plugin of a list.
#[derive(Debug, Clone, PartialEq)]
pub struct Plugin {
    /// Its program's name.
    pub kind: String,
    /// The capabilities it declares as true.
    pub capabilities: BTreeSet<String>,
    pub raw: Map<String, Value>,
}

impl Conflist {
    /// Reads a list, or a single plugin's configuration, which is a list of one.
    pub fn parse(raw: Value) -> std::result::Result<Conflist, String> {
        let Value::Object(object) = &raw else {
            return Err("not a JSON object".into());
        };
        let name = text(object, "name")?;
        let first = name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
        if !first || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b)) {
            return Err(format!(
                "name: {name:?} is not a network name (letters, digits, '_', '.', '-')"
            ));
        }
        let version = text(object, "cniVersion")?;
        if !VERSIONS.contains(&version.as_str()) {
            return Err(format!("cniVersion: {version:?} is not one of {}", VERSIONS.join(", ")));
        }
        let Some(plugins) = object.get("plugins") else {
            let list = json!({"cniVersion": version, "name": name, "plugins": [object]});
            return Conflist::parse(list);
        };
        let plugins = plugins.as_array().ok_or("plugins: not a list")?;
        if plugins.is_empty() {
            return Err("plugins: empty".into());
        }
        let plugins = plugins
            .iter()
            .enumerate()
            .map(|(n, p)| Plugin::parse(p).map_err(|e| format!("plugins[{n}]: {e}")));
        let plugins = plugins.collect::<std::result::Result<_, _>>()?;
        Ok(Conflist {
            name,
            version,
            plugins,
            raw,
        })
    }

    /// Whether the version is at least this.
    pub fn at_least(&self, version: &str) -> bool {
        let place = |v: &str| VERSIONS.iter().position(|known| *known == v);
        place(&self.version) >= place(version)
    }
}

impl Plugin {
    fn parse(raw: &Value) -> std::result::Result<Plugin, String> {
        let raw = raw.as_object().ok_or("not a JSON object")?.clone();
        let kind = text(&raw, "type")?;
        if kind.is_empty() || kind.starts_with('.') || kind.contains('/') || kind.bytes().any(|b| b.is_ascii_control())
        {
            return Err(format!("type: {kind:?} is not the name of a program"));
        }
        let capabilities = raw.get("capabilities").and_then(Value::as_object);
        let capabilities = capabilities
            .into_iter()
            .flatten()
            .filter(|(_, v)| **v == Value::Bool(true));
        Ok(Plugin {
            kind,
            capabilities: capabilities.map(|(k, _)| k.clone()).collect(),
            raw,
        })
    }
}

fn text(object: &Map<String, Value>, field: &str) -> std::result::Result<String, String> {
    let value = object.get(field).and_then(Value::as_str).map(str::to_string);
    value.ok_or_else(|| format!("{field}: missing, or not a string"))
}

fn is_one(file: &Path) -> bool {
    file.extension()
        .is_some_and(|e| e == "conf" || e == "conflist" || e == "json")
}

/// Whether a directory has any file that would count.
pub fn has_files(dir: &Path) -> bool {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).any(|file| is_one(&file))
}

/// Loads the first configuration of a directory, by name. A broken first file is an error: to pass over it would give
/// pods another network than the administrator meant.
pub fn load(dir: &Path) -> std::result::Result<Conflist, String> {
    let entries = fs::read_dir(dir).map_err(|e| format!("no CNI configuration: cannot list {}: {e}", dir.display()))?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|e| e.path()).filter(|f| is_one(f)).collect();
    files.sort();
    let Some(file) = files.first() else {
        return Err(format!(
            "no CNI configuration (*.conf, *.conflist, *.json) in {}",
            dir.display()
        ));
    };
    read(file).map_err(|why| format!("CNI configuration {}: {why}", file.display()))
}

fn read(file: &Path) -> std::result::Result<Conflist, String> {
    // Non-blocking, for it may be a FIFO.
    let open = fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(file);
    let mut bytes = Vec::new();
    let read = open
        .and_then(|f| f.take(MAX_BYTES + 1).read_to_end(&mut bytes))
        .map_err(|e| e.to_string())?;
    if read as u64 > MAX_BYTES {
        return Err(format!("longer than {MAX_BYTES} bytes"));
    }
    Conflist::parse(serde_json::from_slice(&bytes).map_err(|e| e.to_string())?)
}

/// A configuration, or why there is none.
pub type Loaded = std::result::Result<Arc<Conflist>, String>;

/// inotify as tokio takes it.
struct Watch(Inotify);

impl AsRawFd for Watch {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// The configuration as it is now, kept so by a watch on its directory.
pub struct Watched {
    loaded: Arc<RwLock<Loaded>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Watched {
    /// Loads it, and again on each change, which is told by raising `changes`. Must run within the runtime.
    pub fn new(dir: PathBuf, changes: watch::Sender<u64>) -> Result<Watched> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK);
        let inotify = inotify.map_err(|e| system("watch", dir.display())(e.into()))?;
        // SAFETY: the descriptor is the inotify's own, open until the AsyncFd drops both.
        let inotify = unsafe { AsyncFd::register_with_interest(Watch(inotify), Interest::READABLE) };
        let inotify = inotify.map_err(|e| system("watch", dir.display())(e.into()))?;
        arm(inotify.get_ref(), &dir);
        let loaded = Arc::new(RwLock::new(load(&dir).map(Arc::new)));
        let task = tokio::spawn(follow(inotify, dir, loaded.clone(), changes));
        Ok(Watched { loaded, task })
    }

    pub fn get(&self) -> Loaded {
        self.loaded.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

async fn follow(inotify: AsyncFd<Watch>, dir: PathBuf, loaded: Arc<RwLock<Loaded>>, changes: watch::Sender<u64>) {
    loop {
        match inotify.readable().await {
            Ok(mut guard) => {
                // The events say only: look again.
                while inotify.get_ref().0.read_events().is_ok_and(|events| !events.is_empty()) {}
                guard.clear_ready();
            }
            Err(error) => {
                return tracing::warn!(%error, "the CNI configuration is no longer watched");
            }
        }
        arm(inotify.get_ref(), &dir);
        let new = load(&dir).map(Arc::new);
        let mut old = loaded.write().unwrap_or_else(PoisonError::into_inner);
        if *old != new {
            match &new {
                Ok(list) => tracing::info!(network = list.name, dir = %dir.display(), "CNI configuration loaded"),
                Err(why) => tracing::warn!(why, "no CNI configuration"),
            }
            *old = new;
            changes.send_modify(|n| *n += 1);
        }
    }
}

/// Watches the directory, or while it is missing those above it: from the top, so that one made meanwhile is seen by
/// the watch on its parent.
fn arm(inotify: &Watch, dir: &Path) {
    let above = AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO | AddWatchFlags::IN_ONLYDIR;
    let inside = above
        | AddWatchFlags::IN_CLOSE_WRITE
        | AddWatchFlags::IN_DELETE
        | AddWatchFlags::IN_MOVED_FROM
        | AddWatchFlags::IN_DELETE_SELF
        | AddWatchFlags::IN_MOVE_SELF;
    if inotify.0.add_watch(dir, inside).is_ok() {
        return;
    }
    let mut path: Vec<&Path> = dir.ancestors().collect();
    path.reverse();
    for at in path {
        if inotify.0.add_watch(at, if at == dir { inside } else { above }).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> std::result::Result<Conflist, String> {
        Conflist::parse(serde_json::from_str(text).unwrap())
    }

    #[test]
    fn a_single_plugin_is_a_list_of_one() {
        let list = parse(r#"{"cniVersion":"1.0.0","name":"n","type":"bridge","capabilities":{"dns":true,"x":false}}"#);
        let list = list.unwrap();
        assert_eq!(list.plugins.len(), 1);
        assert_eq!(list.plugins[0].capabilities.iter().collect::<Vec<_>>(), ["dns"]);
        assert_eq!(
            Conflist::parse(list.raw.clone()).unwrap(),
            list,
            "kept in an attachment, it reads the same"
        );
        assert!(list.at_least("0.4.0") && list.at_least("1.0.0") && !list.at_least("1.1.0"));
    }

    #[test]
    fn errors_name_the_field() {
        for (bad, field) in [
            (r#"[]"#, "object"),
            (r#"{"cniVersion":"1.0.0","plugins":[]}"#, "name"),
            (r#"{"cniVersion":"1.0.0","name":"../x","plugins":[]}"#, "name"),
            (r#"{"cniVersion":"0.2.0","name":"n","plugins":[]}"#, "cniVersion"),
            (r#"{"cniVersion":"1.0.0","name":"n","plugins":[]}"#, "plugins"),
            (
                r#"{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"a"},{"type":"../b"}]}"#,
                "plugins[1]: type",
            ),
            (r#"{"cniVersion":"1.0.0","name":"n"}"#, "type"),
        ] {
            let error = parse(bad).unwrap_err();
            assert!(error.contains(field), "{bad}: {error}");
        }
    }

    #[test]
    fn the_first_file_counts_even_if_broken() {
        let dir = tempfile::tempdir().unwrap();
        assert!(load(dir.path()).unwrap_err().contains("no CNI configuration"));
        fs::write(
            dir.path().join("20-b.conf"),
            r#"{"cniVersion":"1.0.0","name":"b","type":"x"}"#,
        )
        .unwrap();
        fs::write(dir.path().join("00-ignored.txt"), "").unwrap();
        assert_eq!(load(dir.path()).unwrap().name, "b");
        fs::write(dir.path().join("10-a.conflist"), "{").unwrap();
        assert!(load(dir.path()).unwrap_err().contains("10-a.conflist"));
    }

    #[tokio::test]
    async fn changes_are_seen_also_of_a_directory_made_later() {
        let top = tempfile::tempdir().unwrap();
        let dir = top.path().join("a/b");
        let (send, mut changes) = watch::channel(0);
        let watched = Watched::new(dir.clone(), send).unwrap();
        assert!(watched.get().is_err());
        fs::create_dir_all(&dir).unwrap();
        let conf = r#"{"cniVersion":"1.0.0","name":"n","type":"x"}"#;
        fs::write(dir.join("new"), conf).unwrap();
        fs::rename(dir.join("new"), dir.join("1.conf")).unwrap();
        changes.wait_for(|_| watched.get().is_ok()).await.unwrap();
        fs::remove_file(dir.join("1.conf")).unwrap();
        changes.wait_for(|_| watched.get().is_err()).await.unwrap();
        fs::remove_dir_all(top.path().join("a")).unwrap();
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("2.conf"), conf).unwrap();
        changes.wait_for(|_| watched.get().is_ok()).await.unwrap();
    }
}
