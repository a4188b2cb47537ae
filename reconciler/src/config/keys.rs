//! Every key, once: what it means, its type and default, when a change of it counts. All that shows or checks a
//! configuration goes by this table.

use serde::de::DeserializeOwned;
use serde_yaml::Value;

use super::handlers::Handler;
use super::values::*;

/// When a reload makes a changed key count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// At once.
    Now,
    /// For containers (or pods) that are made or started from then on.
    Next,
    /// The daemon must be started anew.
    Restart,
}

pub struct Key {
    /// Sections and name, joined by dots. A name `*` stands for each of a set of names.
    pub path: &'static str,
    /// The type in words, with the unit.
    pub kind: &'static str,
    /// In YAML; empty if there is none.
    pub default: &'static str,
    /// What to write, where there is no default.
    pub example: &'static str,
    pub when: When,
    /// `--FLAG`, without its dashes; the environment variable is made from it.
    pub flag: Option<&'static str>,
    pub meaning: &'static str,
    /// Whether a value can be this key's.
    pub check: fn(&Value) -> Result<(), String>,
}

/// A key that had another name in files without an `apiVersion`, or of that version and older ones.
pub struct Moved {
    pub until: &'static str,
    pub from: &'static str,
    pub to: &'static str,
}

/// What `apiVersion` may be, oldest first; the last one is written.
pub const VERSIONS: [&str; 2] = ["reconcile/v1alpha1", "reconcile/v1"];
pub const KIND: &str = "Config";

pub const MOVED: [Moved; 1] = [Moved {
    until: "reconcile/v1alpha1",
    from: "registry.window",
    to: "registry.windowSeconds",
}];

fn of<T: DeserializeOwned>(value: &Value) -> Result<(), String> {
    serde_yaml::from_value::<T>(value.clone())
        .map(drop)
        .map_err(|e| e.to_string())
}

/// A key that a restart applies and that no flag sets; the table below says what differs.
const KEY: Key = Key {
    path: "",
    kind: "",
    default: "",
    example: "",
    when: When::Restart,
    flag: None,
    meaning: "",
    check: |_| Ok(()),
};

pub static KEYS: &[Key] = &[
    Key {
        path: "root",
        kind: "absolute path",
        default: "/var/lib/reconcile",
        flag: Some("root"),
        meaning: "Durable directory: records, images, object directories.",
        check: of::<Place>,
        ..KEY
    },
    Key {
        path: "state",
        kind: "absolute path",
        default: "/run/reconcile",
        flag: Some("state"),
        meaning: "Volatile directory, on a tmpfs: pins, sockets, mount points.",
        check: of::<Place>,
        ..KEY
    },
    Key {
        path: "socket",
        kind: "unix:///PATH",
        example: "unix:///run/reconcile/reconcile.sock",
        flag: Some("socket"),
        meaning: "Socket of the CRI and of this program; without it, reconcile.sock in the state directory.",
        check: of::<Socket>,
        ..KEY
    },
    Key {
        path: "logLevel",
        kind: "error, warn, info, debug, trace, off, or a filter such as reconciler=debug",
        example: "info",
        when: When::Now,
        flag: Some("log-level"),
        meaning: "What is logged to stderr; without it, info for the daemon and warn for other commands.",
        check: of::<LogLevel>,
        ..KEY
    },
    Key {
        path: "metrics",
        kind: "loopback ADDRESS:PORT or unix:///PATH",
        example: "127.0.0.1:9180",
        flag: Some("metrics"),
        meaning: "Where metrics are served for Prometheus; nowhere without it.",
        check: of::<Address>,
        ..KEY
    },
    Key {
        path: "cgroup.driver",
        kind: "auto, cgroupfs or systemd",
        default: "cgroupfs",
        meaning: "Who makes cgroups: we, or systemd (scopes in slices); auto: systemd where it can. A \
                  kubelet asks for it, older ones must be told the same (cgroupDriver). Change it only while there \
                  are no pods.",
        check: of::<CgroupDriver>,
        ..KEY
    },
    Key {
        path: "cgroup.shims",
        kind: "a cgroup's path from the hierarchy's root, made if absent",
        example: "/system.slice",
        meaning: "The cgroup below which the shims' own is, INSTANCE, outside any pod's limits. Without it, theirs is \
                  /reconcile-INSTANCE-shims. Shims that run stay where they are.",
        check: of::<CgroupPath>,
        ..KEY
    },
    Key {
        path: "network.mode",
        kind: "auto, cni or builtin",
        default: "auto",
        flag: Some("network"),
        meaning: "Who gives pods their network. auto: pods from the CRI need CNI; pods from YAML take CNI where it is \
                  configured, else the built-in bridge.",
        check: of::<Network>,
        ..KEY
    },
    Key {
        path: "network.cniConfDir",
        kind: "absolute path",
        default: "/etc/cni/net.d",
        meaning: "Where CNI configurations lie; the first by name counts.",
        check: of::<Place>,
        ..KEY
    },
    Key {
        path: "network.cniBinDirs",
        kind: "list of absolute paths",
        default: "[/opt/cni/bin, /usr/lib/cni]",
        meaning: "Where CNI plugins lie, in the order of search.",
        check: of::<Vec<Place>>,
        ..KEY
    },
    Key {
        path: "network.cniTemplate",
        kind: "absolute path",
        example: "/etc/reconcile/cni.template",
        meaning: "Filled with the node's pod CIDRs and written to cniConfDir where no configuration exists.",
        check: of::<Place>,
        ..KEY
    },
    Key {
        path: "network.podCIDR",
        kind: "a network, or one of each family, comma-separated",
        example: "10.88.0.0/16",
        meaning: "Networks of the built-in bridge; without it, those that the kubelet tells, else the first free one.",
        check: of::<Cidrs>,
        ..KEY
    },
    Key {
        path: "registry.certsDirs",
        kind: "list of absolute paths",
        default: "[/etc/reconcile/certs.d, /etc/containerd/certs.d, /etc/docker/certs.d]",
        when: When::Now,
        meaning: "Where HOST/hosts.toml and certificates of registries lie, in the order of search.",
        check: of::<Vec<Place>>,
        ..KEY
    },
    Key {
        path: "registry.rateFloor",
        kind: "integer, bytes a second",
        default: "1024",
        when: When::Now,
        meaning: "A transfer that is slower over a whole window has failed.",
        check: of::<u64>,
        ..KEY
    },
    Key {
        path: "registry.windowSeconds",
        kind: "integer, seconds",
        default: "60",
        when: When::Now,
        meaning: "The window of rateFloor; also how long the first bytes of an answer are waited for.",
        check: of::<Seconds>,
        ..KEY
    },
    Key {
        path: "images.pinned",
        kind: "list of image names",
        default: "[]",
        when: When::Now,
        meaning: "Images that the kubelet's garbage collection and `images prune` leave alone.",
        check: of::<Vec<ImageName>>,
        ..KEY
    },
    Key {
        path: "images.sandboxImage",
        kind: "image name",
        default: "localhost/reconcile/pause:builtin",
        when: When::Now,
        meaning: "What tools (kubeadm, crictl) are told that sandboxes are made from; it is pinned too. Nothing is \
                  pulled: the pause process is built in.",
        check: of::<ImageName>,
        ..KEY
    },
    Key {
        path: "images.gcGraceSeconds",
        kind: "integer, seconds, 60 or more",
        default: "600",
        when: When::Now,
        meaning: "Blobs and layers that nothing needs go when they are this old. Those of a removed image go at once.",
        check: of::<Grace>,
        ..KEY
    },
    Key {
        path: "images.gcHighPercent",
        kind: "integer, percent, 1 to 100",
        default: "85",
        when: When::Now,
        meaning: "Where the images' file system is fuller than this, what nothing needs goes after three minutes, if \
                  images.gcGraceSeconds is longer.",
        check: of::<Percent>,
        ..KEY
    },
    Key {
        path: "containers.seccomp",
        kind: "RuntimeDefault, Unconfined, or the absolute path of a profile",
        default: "Unconfined",
        when: When::Next,
        meaning: "The profile of a container from the CRI that asks for none. Pods from YAML get RuntimeDefault, \
                  privileged containers none.",
        check: of::<Seccomp>,
        ..KEY
    },
    Key {
        path: "containers.rlimits.*",
        kind: "a number, SOFT:HARD, or unlimited",
        example: "nofile: 1024:524288",
        when: When::Next,
        meaning: "Resource limits of every container's processes, by the names of getrlimit(2): as, core, cpu, data, \
                  fsize, locks, memlock, msgqueue, nice, nofile, nproc, rss, rtprio, rttime, sigpending, stack. What \
                  is not named here is as the daemon has it.",
        check: of::<Rlimit>,
        ..KEY
    },
    Key {
        path: "handlers.*",
        kind: "a map: binary, options, privilegedWithoutHostDevices, cgroupWritable, annotations, baseSpec, cniConfDir",
        example: "runc: {binary: runc, annotations: [io.example.*]}",
        when: When::Next,
        meaning: "What makes a pod's containers, by the name that a RuntimeClass has for it. binary: an OCI runtime's \
                  absolute path, or its name in PATH, or builtin, the executor within the shim; options: its global \
                  arguments; privilegedWithoutHostDevices: a privileged container gets no device nodes of the host; \
                  cgroupWritable: on cgroup v2, a container may write in its own cgroup; annotations: patterns (* and \
                  ?) of those of pods and containers that the OCI configuration gets; baseSpec: the absolute path of \
                  an OCI config.json, which decides what a request leaves open (environment, working directory, \
                  rlimits, more mounts, hooks, annotations, sysctls, devices, limits), read at start and reload; \
                  cniConfDir: the absolute path of a directory with the CNI configuration of its pods, instead of \
                  network.cniConfDir.",
        check: of::<Handler>,
        ..KEY
    },
    Key {
        path: "defaultHandler",
        kind: "a handler's name",
        default: "builtin",
        when: When::Next,
        meaning: "The handler of pods that ask for none.",
        check: of::<String>,
        ..KEY
    },
    Key {
        path: "logs.maxLineBytes",
        kind: "integer, bytes, 256 to 32768",
        default: "16384",
        when: When::Next,
        meaning: "A longer line of a container's output becomes several log entries, all but the last marked partial.",
        check: of::<LineBytes>,
        ..KEY
    },
    Key {
        path: "streaming.address",
        kind: "ADDRESS:PORT",
        default: "\"127.0.0.1:0\"",
        meaning: "Where exec, attach and port-forward are served; port 0 takes a free one.",
        check: of::<Listen>,
        ..KEY
    },
    Key {
        path: "streaming.idleSeconds",
        kind: "integer, seconds",
        default: "14400",
        meaning: "A session without any traffic for so long is ended.",
        check: of::<Seconds>,
        ..KEY
    },
    Key {
        path: "streaming.tls.cert",
        kind: "absolute path",
        example: "/etc/reconcile/streaming.crt",
        meaning: "The streaming server's certificate and its chain, in PEM; then it speaks TLS only. A reload reads a \
                  renewed file.",
        check: of::<Place>,
        ..KEY
    },
    Key {
        path: "streaming.tls.key",
        kind: "absolute path",
        example: "/etc/reconcile/streaming.key",
        meaning: "The private key of streaming.tls.cert, in PEM.",
        check: of::<Place>,
        ..KEY
    },
    Key {
        path: "oomScore.daemon",
        kind: "integer, -1000 to 1000",
        example: "-999",
        when: When::Now,
        meaning: "The daemon's oom_score_adj: the lower, the later it is killed for want of memory. Without it, what \
                  the daemon was started with.",
        check: of::<OomScore>,
        ..KEY
    },
    Key {
        path: "oomScore.shims",
        kind: "integer, -1000 to 1000",
        example: "-998",
        when: When::Next,
        meaning: "The oom_score_adj of shims that are started from now on. Without it, the daemon's. A container's is \
                  what its pod asks for.",
        check: of::<OomScore>,
        ..KEY
    },
];

impl Key {
    /// The environment variable that says the same as the flag.
    pub fn variable(&self) -> Option<String> {
        let flag = self.flag?;
        Some(format!("RECONCILE_{}", flag.to_uppercase().replace('-', "_")))
    }

    /// The default as a value.
    pub fn default_value(&self) -> Option<Value> {
        match self.default {
            "" => None,
            text => serde_yaml::from_str(text).ok(),
        }
    }
}

/// The key of a path such as `network.mode` or `containers.rlimits.nofile`.
pub fn find(path: &str) -> Option<&'static Key> {
    position(path).and_then(|at| KEYS.get(at))
}

/// Where its key stands in the table.
pub fn position(path: &str) -> Option<usize> {
    KEYS.iter().position(|key| match key.path.strip_suffix('*') {
        Some(section) => path.strip_prefix(section).is_some_and(|name| is_one_of(section, name)),
        None => key.path == path,
    })
}

/// Whether a name may stand in a section of names. Those of handlers are free; what they may not be is told by who
/// reads the whole.
fn is_one_of(section: &str, name: &str) -> bool {
    match section {
        "handlers." => !name.is_empty(),
        _ => RLIMITS.contains(&name),
    }
}

/// Whether keys lie below a path.
pub fn is_section(path: &str) -> bool {
    KEYS.iter()
        .any(|key| key.path.strip_prefix(path).is_some_and(|rest| rest.starts_with('.')))
}

/// Whether a key, or one of a section's, is meant by `path`; what `explain` is asked for.
pub fn within(path: &str) -> impl Iterator<Item = &'static Key> {
    let section = path.to_owned();
    KEYS.iter().filter(move |key| {
        section.is_empty() || key.path == section || key.path.strip_prefix(&section).is_some_and(|r| r.starts_with('.'))
    })
}

/// The known key or section that is most like an unknown path, if any is like it at all.
pub fn nearest(path: &str) -> Option<String> {
    let (parent, name) = path.rsplit_once('.').unwrap_or(("", path));
    let score = |known: &str| {
        let (section, last) = known.rsplit_once('.').unwrap_or(("", known));
        let elsewhere = usize::from(section != parent);
        distance(name, last) + elsewhere
    };
    let best = names().into_iter().map(|known| (score(&known), known)).min()?;
    (best.0 <= 1.max(name.chars().count() / 3)).then_some(best.1)
}

/// Every path that may be written, sections too.
fn names() -> Vec<String> {
    let mut all = vec!["apiVersion".to_owned(), "kind".to_owned()];
    for key in KEYS {
        match key.path.strip_suffix('*') {
            Some(section) => {
                let known = RLIMITS
                    .iter()
                    .filter(|name| section != "handlers." && is_one_of(section, name));
                all.extend(known.map(|name| format!("{section}{name}")));
            }
            None => all.push(key.path.to_owned()),
        }
        let dots = key.path.match_indices('.').map(|(at, _)| key.path[..at].to_owned());
        all.extend(dots.collect::<Vec<_>>());
    }
    all.dedup();
    all
}

/// Insertions, deletions, replacements and swaps of neighbours that make one name of the other, whatever the case.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.to_lowercase().chars().collect(), b.to_lowercase().chars().collect());
    // A key of a hostile length is like nothing.
    if a.len() > 64 {
        return usize::MAX / 2;
    }
    let mut rows = vec![(0..=b.len()).collect::<Vec<usize>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_default_and_example_can_be_read() {
        for key in KEYS {
            assert!(!key.meaning.is_empty() && key.meaning.ends_with('.'), "{}", key.path);
            assert_ne!(key.default.is_empty(), key.example.is_empty(), "{}", key.path);
            let text = if key.default.is_empty() {
                key.example
            } else {
                key.default
            };
            let mut value: Value = serde_yaml::from_str(text).unwrap();
            if key.path.ends_with('*') {
                value = value.as_mapping().unwrap().values().next().unwrap().clone();
            }
            assert_eq!((key.check)(&value), Ok(()), "{}: {text}", key.path);
        }
    }

    #[test]
    fn a_moved_key_leads_to_a_known_one() {
        for moved in &MOVED {
            assert!(find(moved.from).is_none() && find(moved.to).is_some(), "{}", moved.from);
            assert!(VERSIONS[..VERSIONS.len() - 1].contains(&moved.until));
        }
    }

    #[test]
    fn the_nearest_is_what_was_meant() {
        for (wrong, meant) in [
            ("rot", Some("root")),
            ("loglevel", Some("logLevel")),
            ("cniConfDir", Some("network.cniConfDir")),
            ("network.cniBinDir", Some("network.cniBinDirs")),
            ("registry.certDirs", Some("registry.certsDirs")),
            ("containers.rlimits.nofiles", Some("containers.rlimits.nofile")),
            ("netwrok", Some("network")),
            ("apiversion", Some("apiVersion")),
            ("plugins", None),
            ("x", None),
        ] {
            assert_eq!(nearest(wrong).as_deref(), meant, "{wrong}");
        }
        assert_eq!(nearest(&"n".repeat(100_000)), None);
    }

    #[test]
    fn sections_and_variables() {
        assert!(is_section("network") && is_section("containers.rlimits") && !is_section("net") && !is_section("root"));
        assert_eq!(within("oomScore").count(), 2);
        let variable = find("logLevel").and_then(Key::variable);
        assert_eq!(variable.as_deref(), Some("RECONCILE_LOG_LEVEL"));
    }
}
