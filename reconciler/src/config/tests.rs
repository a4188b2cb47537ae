//! Files in, settings or mistakes out.

use super::*;

/// An OCI configuration that says little.
const BASE: &str = r#"{"ociVersion": "1.0.2", "process": {"env": ["A=1"]}}"#;

/// Loads files of these names and texts, in this order, below a directory that stands as DIR in the texts.
fn load_all(files: &[(&str, &str)], overrides: &[Override]) -> (Result<Loaded, String>, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let write = |(name, text): &(&str, &str)| {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        path
    };
    let paths: Vec<PathBuf> = files.iter().map(write).collect();
    let loaded = load(&paths, overrides).map_err(|e| e.to_string());
    (loaded, dir.path().to_owned())
}

fn one(text: &str) -> Result<Loaded, String> {
    let (loaded, dir) = load_all(&[("c.yaml", text)], &[]);
    loaded.map_err(|e| e.replace(&format!("{}/", dir.display()), ""))
}

#[test]
fn every_key_is_the_table_s_and_the_struct_s() {
    let base = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(base.path(), BASE).unwrap();
    let handler = format!(
        "{{binary: builtin, cniConfDir: /c, baseSpec: {}}}",
        base.path().display()
    );
    let handler = serde_yaml::from_str::<Value>(&handler).unwrap();
    let mut settings = Settings::default();
    for key in keys::KEYS {
        let example = serde_yaml::from_str::<Value>(key.example).unwrap();
        // Checked by its content below.
        if ["streaming.tls.cert", "streaming.tls.key"].contains(&key.path) {
            continue;
        }
        let (path, value) = match key.path.strip_suffix('*') {
            Some(section) => {
                let (name, value) = example.as_mapping().unwrap().iter().next().unwrap();
                let value = match section {
                    // The program need not be here.
                    "handlers." => handler.clone(),
                    _ => value.clone(),
                };
                (format!("{section}{}", name.as_str().unwrap()), value)
            }
            None if key.default.is_empty() => (key.path.to_owned(), example),
            None => continue,
        };
        let origin = Origin::Default;
        settings.put(path, Setting { value, origin });
    }
    // Unknown fields are refused by it, and so are missing ones, but for options.
    let (config, _) = typed::build(&settings).unwrap();
    let debug = format!("{config:?}").replace("Tls { cert: None, key: None }", "");
    // What is an option there has no default here and was given its example above.
    assert!(!debug.contains("None"), "a field without a key: {debug}");
}

#[test]
fn nothing_at_all_is_the_defaults() {
    for text in [
        "",
        "# only this\n",
        "---\n",
        "apiVersion: reconcile/v1\nkind: Config\n",
        "network:\nregistry: {}\n",
    ] {
        let loaded = one(text).unwrap();
        assert_eq!(loaded.settings, Settings::default(), "{text:?}");
        assert_eq!(loaded.config.root.0, Path::new("/var/lib/reconcile"));
        assert_eq!(loaded.config.socket(), Path::new("/run/reconcile/reconcile.sock"));
        // Without a configuration, as in simulations, no garbage is taken early.
        let live = Live {
            gc_high: 85,
            ..Live::default()
        };
        assert_eq!(loaded.config.live(handlers::Handlers::default()), live);
    }
}

#[test]
fn what_default_prints_changes_nothing() {
    let loaded = one(&show::defaults()).unwrap();
    assert_eq!(Settings::default().changes(&loaded.settings), []);
    let long = show::defaults()
        .lines()
        .find(|line| line.chars().count() > 104)
        .map(str::to_owned);
    assert_eq!(long, None);
    // Every example holds, once its mark is taken away.
    let mut text = show::defaults()
        .replace("# oomScore:", "oomScore:")
        .replace("# rlimits:", "rlimits:")
        .replace("# handlers:", "handlers:")
        .replace("# tls:", "tls:");
    for key in keys::KEYS.iter().filter(|key| !key.example.is_empty()) {
        let line = match key.path.rsplit('.').next().unwrap() {
            "*" => key.example.to_owned(),
            name => format!("{name}: {}", key.example),
        };
        let marked = format!("# {line}\n");
        assert!(text.contains(&marked), "{marked}");
        text = text.replace(&marked, &format!("{line}\n"));
    }
    // But for files that are not there, and are asked for; the handler's program need not be.
    text = text.replace("binary: runc,", "binary: builtin,");
    let error = one(&text).unwrap_err();
    assert!(
        error.contains("streaming.tls.cert: reading /etc/reconcile/streaming.crt"),
        "{error}"
    );
    let text = text
        .replace("  cert: ", "  # ")
        .replace("  key: ", "  # ")
        .replace("  tls:\n", "");
    let examples = one(&text).unwrap().settings;
    assert_eq!(examples.all().len() + 2, keys::KEYS.len(), "{text}");
}

#[test]
fn later_files_win_key_by_key_and_flags_over_all() {
    let files = [
        (
            "config.yaml",
            "logLevel: warn\nregistry: {rateFloor: 5, windowSeconds: 9, certsDirs: [/a, /b]}\n",
        ),
        (
            "config.d/10.yaml",
            "registry: {rateFloor: 6, certsDirs: [/c]}\ncontainers: {rlimits: {nofile: 5, core: 0}}\nstate: /s\n",
        ),
        (
            "config.d/20.yaml",
            "containers:\n  rlimits:\n    nofile: '6:7'\nlogLevel: null\n",
        ),
    ];
    let over = Override {
        key: "state",
        text: "/flag".into(),
        origin: Origin::Flag("state".into()),
    };
    let (loaded, dir) = load_all(&files, &[over]);
    let Loaded { config, settings, .. } = loaded.unwrap();
    assert_eq!(
        (config.registry.rate_floor, config.registries().window.as_secs()),
        (6, 9)
    );
    assert_eq!(config.registries().hosts_roots, [Path::new("/c")]);
    assert_eq!(config.log_level, None);
    assert_eq!(config.state.0, Path::new("/flag"));
    assert_eq!(config.containers.rlimits["nofile"], values::Rlimit { soft: 6, hard: 7 });
    assert_eq!(config.containers.rlimits["core"], values::Rlimit { soft: 0, hard: 0 });
    let shown = show::yaml(&settings.all(), true);
    let dir = dir.display();
    for line in [
        "root: /var/lib/reconcile  # default\n".to_owned(),
        "state: /flag  # flag --state\n".to_owned(),
        format!("  windowSeconds: 9  # {dir}/config.yaml:2\n"),
        format!("  certsDirs: [/c]  # {dir}/config.d/10.yaml:1\n"),
        format!("    nofile: 6:7  # {dir}/config.d/20.yaml:3\n"),
    ] {
        assert!(shown.contains(&line), "{line}\n{shown}");
    }
    let again: Value = serde_yaml::from_str(&show::yaml(&settings.all(), false)).unwrap();
    assert_eq!(again, settings.tree());
    assert_eq!(show::json(&settings, true)["state"]["origin"], "flag --state");
    assert_eq!(show::json(&settings, false)["registry"]["rateFloor"], 6);
}

#[test]
fn files_are_the_one_and_the_directory_beside_it_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    assert_eq!(files(dir.path()), Ok(vec![]));
    assert_eq!(files(&path("absent")), Ok(vec![]));
    assert_eq!(files(&path("absent.yaml")), Ok(vec![path("absent.yaml")]));
    std::fs::create_dir(path("config.d")).unwrap();
    for name in [
        "config.d/b.yaml",
        "config.d/a.yaml",
        "config.d/.c.yaml",
        "config.d/d.yml",
        "config.yaml",
        "x.yaml",
    ] {
        std::fs::write(path(name), "").unwrap();
    }
    let drop_ins = [path("config.d/a.yaml"), path("config.d/b.yaml")];
    for (asked, main) in [
        ("", "config.yaml"),
        ("config.yaml", "config.yaml"),
        ("x.yaml", "x.yaml"),
    ] {
        let all = files(&path(asked)).unwrap();
        assert_eq!(all[0], path(main));
        assert_eq!(all[1..], drop_ins);
    }
    let error = load(&[path("absent.yaml")], &[]).unwrap_err().to_string();
    assert!(error.contains("absent.yaml: cannot be read: No such file"), "{error}");
    std::fs::write(path("x.yaml"), "# ".repeat(LIMIT as usize)).unwrap();
    let error = load(&[path("x.yaml")], &[]).unwrap_err().to_string();
    assert!(error.contains("larger than"), "{error}");
}

#[test]
fn a_mistake_is_told_with_its_place_and_what_was_meant() {
    for (text, words) in [
        (
            "root: /r\nrot: /x\n",
            "c.yaml:2:1: rot: unknown key; did you mean `root`?",
        ),
        (
            "network:\n  cniBinDir: []\n",
            "c.yaml:2:3: network.cniBinDir: unknown key; did you mean `network.cniBinDirs`?",
        ),
        (
            "plugins: 1\n",
            "c.yaml:1:1: plugins: unknown key; `reconcile config explain` lists all",
        ),
        (
            "network:\n  mode: none\n",
            "c.yaml:2:9: network.mode: unknown variant `none`",
        ),
        ("network: {podCIDR: ten}\n", "\"ten\" is not a CIDR"),
        (
            "network: {podCIDR: '10.1.0.0/16,10.2.0.0/16'}\n",
            "one network of each family",
        ),
        ("network: yes\n", "c.yaml:1:10: network: must be a map of keys"),
        (
            "metrics: 0.0.0.0:1\n",
            "c.yaml:1:10: metrics: \"0.0.0.0:1\": metrics are served on a loopback",
        ),
        ("root: [\n", "c.yaml:"),
        ("- a\n", "c.yaml:1:1: must be a map of keys"),
        ("root: a/b\n", "c.yaml:1:7: root: \"a/b\" is not an absolute path"),
        (
            "root: 1\n",
            "root: invalid type: integer `1`, expected a string (expected: absolute path)",
        ),
        ("registry: {rateFloor: fast}\n", "invalid type: string \"fast\""),
        (
            "registry:\n  windowSeconds: 0\n",
            "c.yaml:2:18: registry.windowSeconds: ",
        ),
        ("logLevel: loud\n", "none of error, warn"),
        (
            "cgroup: {driver: elogind}\n",
            "cgroup.driver: \"elogind\" is none of auto, cgroupfs, systemd",
        ),
        ("images: {pinned: ['UPPER:1']}\n", "images.pinned: "),
        ("images: {gcHighPercent: 0}\n", "must be from 1 to 100"),
        (
            "containers: {rlimits: {nofiles: 1}}\n",
            "did you mean `containers.rlimits.nofile`?",
        ),
        ("containers: {rlimits: {nofile: '2:1'}}\n", "above the hard one"),
        (
            "containers:\n  seccomp: /absent/profile\n",
            "c.yaml:2:3: containers.seccomp: reading the seccomp profile",
        ),
        ("oomScore: {daemon: -1001}\n", "must be from -1000 to 1000"),
        (
            "streaming: {tls: {key: /k}}\n",
            "c.yaml:1:19: streaming.tls.key: needs streaming.tls.cert beside it",
        ),
        ("logs: {maxLineBytes: 1}\n", "must be from 256"),
        (
            "handlers:\n  kata:\n    binary: no-such-runtime\n",
            "c.yaml:2:3: handlers.kata: binary \"no-such-runtime\": no such program in PATH",
        ),
        (
            "handlers:\n  kata: {binary: /absent/runtime}\n",
            "c.yaml:2:3: handlers.kata: binary /absent/runtime: No such file",
        ),
        (
            "handlers: {kata: {}}\n",
            "c.yaml:1:18: handlers.kata: missing field `binary`",
        ),
        (
            "handlers: {kata: {binary: builtin, path: /x}}\n",
            "unknown field `path`",
        ),
        (
            "handlers: {Kata: {binary: builtin}}\n",
            "handlers.Kata: a handler's name is",
        ),
        (
            "handlers: {kata: {binary: builtin, options: [-v]}}\n",
            "options: builtin takes none",
        ),
        (
            "handlers: {kata: {binary: builtin, annotations: ['[']}}\n",
            "a pattern is text",
        ),
        (
            "handlers:\n  kata: {binary: builtin, baseSpec: /absent/base.json}\n",
            "c.yaml:2:3: handlers.kata: baseSpec /absent/base.json: No such file",
        ),
        (
            "handlers: {kata: {binary: builtin, baseSpec: base.json}}\n",
            "handlers.kata: \"base.json\" is not an absolute path",
        ),
        (
            "handlers: {kata: {binary: builtin, cniConfDir: net.d}}\n",
            "handlers.kata: \"net.d\" is not an absolute path",
        ),
        (
            "defaultHandler: kata\n",
            "c.yaml:1:1: defaultHandler: \"kata\" is not among handlers",
        ),
        ("a: 1\na: 2\n", "c.yaml:2:1: the key `a` is here twice"),
        ("1: 2\n", "has a key that is not text"),
        ("'network.mode': cni\n", "network.mode: unknown key"),
        (
            "apiVersion: reconcile/v2\n",
            "c.yaml:1:13: apiVersion: \"reconcile/v2\" is not known here",
        ),
        ("apiVersion: v1\n", "must be reconcile/v1, not \"v1\""),
        ("kind: Pod\n", "kind: must be Config"),
        (
            "root: /a\nstate: /a\n",
            "c.yaml:2:1: state: root and state must be different",
        ),
    ] {
        let error = one(text).unwrap_err();
        assert!(error.contains(words), "{text:?}: {error}");
    }
}

#[test]
fn a_base_is_read_with_the_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("base.json");
    let read = |base: &str, binary: &str| {
        std::fs::write(&path, base).unwrap();
        one(&format!(
            "handlers:\n  kata:\n    binary: {binary}\n    baseSpec: {}\n",
            path.display()
        ))
    };
    assert_eq!(read(BASE, "builtin").unwrap().warnings, [] as [String; 0]);
    let error = read("{}", "builtin").unwrap_err();
    let why = format!(
        "c.yaml:2:3: handlers.kata: baseSpec {}: it is not an OCI",
        path.display()
    );
    assert!(error.contains(&why), "{error}");
    let late = r#"{"ociVersion": "1.0.2", "hooks": {"poststop": [{"path": "/x"}]}}"#;
    assert!(
        read(late, "builtin")
            .unwrap_err()
            .contains("none of poststart and poststop")
    );
    assert!(read(late, "/bin/true").is_ok());
    let seccomp = r#"{"ociVersion": "1.0.2", "linux": {"seccomp": {"defaultAction": "SCMP_ACT_ERRNO"}}}"#;
    let warnings = read(seccomp, "builtin").unwrap().warnings.join("");
    assert!(
        warnings.ends_with("c.yaml:2:3: handlers.kata: baseSpec: linux.seccomp: not taken from a base"),
        "{warnings}"
    );
    // What it says is kept with the handler.
    let loaded = read(BASE, "builtin").unwrap();
    let handlers = handlers::probe(&loaded.config, &loaded.settings).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(handlers.of("kata").unwrap().base.env, ["A=1"]);
    let gone = handlers::probe(&loaded.config, &loaded.settings).unwrap_err();
    assert!(gone.to_string().contains("No such file"), "{gone}");
}

#[test]
fn all_mistakes_are_told_at_once() {
    let files = [("a.yaml", "rot: 1\nmetrics: x\n"), ("b.yaml", "logs: 5\n")];
    let over = Override {
        key: "logLevel",
        text: "loud".into(),
        origin: Origin::Env("RECONCILE_LOG_LEVEL".into()),
    };
    let error = load_all(&files, &[over]).0.unwrap_err();
    let lines: Vec<&str> = error.lines().collect();
    assert_eq!(lines.len(), 4, "{error}");
    assert!(lines[1].contains("a.yaml:2:10: metrics: "), "{error}");
    assert!(lines[3].starts_with("RECONCILE_LOG_LEVEL: \"loud\""), "{error}");
}

#[test]
fn an_old_name_counts_with_a_warning_where_the_file_may_be_old() {
    for head in ["", "apiVersion: reconcile/v1alpha1\n"] {
        let loaded = one(&format!("{head}registry:\n  window: 7\n")).unwrap();
        assert_eq!(loaded.config.registries().window.as_secs(), 7);
        assert_eq!(loaded.warnings.len(), 1);
        let warning = &loaded.warnings[0];
        assert!(
            warning.contains("`registry.window` is called `registry.windowSeconds` now"),
            "{warning}"
        );
        let line = head.lines().count() + 2;
        assert!(warning.contains(&format!("c.yaml:{line}: ")), "{warning}");
    }
    for (text, why) in [
        (
            "apiVersion: reconcile/v1\nregistry: {window: 7}\n",
            "registry.window: is called `registry.windowSeconds` now",
        ),
        ("registry: {window: 7, windowSeconds: 8}\n", "under both of its names"),
        ("registry: {windowSeconds: 8, window: 7}\n", "under both of its names"),
    ] {
        let error = one(text).unwrap_err();
        assert!(error.contains(why), "{text:?}: {error}");
    }
}

#[test]
fn a_reload_knows_what_changed_and_what_it_cannot_change() {
    let old = one("root: /a\nlogLevel: warn\ncontainers: {rlimits: {core: 1}}\n")
        .unwrap()
        .settings;
    let new = one("root: /b\nimages: {pinned: [a/b:1]}\ncontainers: {rlimits: {nofile: 1}}\n")
        .unwrap()
        .settings;
    let changes = old.changes(&new);
    let told: Vec<_> = changes
        .iter()
        .map(|c| (c.key.as_str(), c.when, c.from.as_str(), c.to.as_str()))
        .collect();
    use keys::When::{Next, Now, Restart};
    assert_eq!(
        told,
        [
            ("root", Restart, "/a", "/b"),
            ("logLevel", Now, "warn", ""),
            ("images.pinned", Now, "[]", "[a/b:1]"),
            ("containers.rlimits.core", Next, "1", ""),
            ("containers.rlimits.nofile", Next, "", "1"),
        ]
    );
    let kept = new.keep_what_needs_a_restart(&old);
    let still: Vec<_> = kept.changes(&new).into_iter().map(|c| c.key).collect();
    assert_eq!(still, ["root"]);
}
