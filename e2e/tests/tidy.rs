//! Rules of the repository that a compiler does not check.

use std::fs;
use std::path::{Path, PathBuf};

fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the workspace")
        .to_owned()
}

/// Source files of the workspace with these endings, by path from its top.
fn sources(endings: &[&str]) -> Vec<(String, String)> {
    let mut all = Vec::new();
    let mut dirs = vec![top()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).expect("list a directory").flatten() {
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            if path.is_dir() && name != "target" && name != ".git" && name != "corpus" {
                dirs.push(path);
            } else if endings.iter().any(|ending| name.ends_with(ending)) {
                let short = path.strip_prefix(top()).expect("below the top").display().to_string();
                all.push((short, fs::read_to_string(&path).unwrap_or_default()));
            }
        }
    }
    all.sort();
    assert!(!all.is_empty());
    all
}

/// The part of a Rust file before its test module.
fn without_tests(text: &str) -> &str {
    let is_module = |at: &usize| {
        text[*at..]
            .lines()
            .nth(1)
            .is_some_and(|line| line.contains("mod ") && line.ends_with('{'))
    };
    let tests = text.match_indices("#[cfg(test)]\n").map(|(at, _)| at).find(is_module);
    tests.map_or(text, |at| &text[..at])
}

fn is_test(path: &str) -> bool {
    path.starts_with("e2e/") || path.contains("/tests/") || path.ends_with("tests.rs") || path.ends_with("build.rs")
}

fn report(rule: &str, broken: Vec<String>) {
    assert!(broken.is_empty(), "{rule}:\n  {}", broken.join("\n  "));
}

#[test]
fn files_are_short() {
    let length = |(path, text): (String, String)| {
        let (text, limit) = if is_test(&path) {
            (text.as_str(), 900)
        } else {
            (without_tests(&text), 700)
        };
        (text.lines().count(), limit, path)
    };
    let all: Vec<_> = sources(&[".rs"]).into_iter().map(length).collect();
    let long = all.iter().filter(|(lines, limit, _)| lines > limit);
    report(
        "no file over 700 lines, its tests not counted",
        long.map(|(n, _, path)| format!("{path}: {n}")).collect(),
    );
    let seldom: Vec<_> = all
        .iter()
        .filter(|(lines, _, path)| *lines > 500 && !is_test(path))
        .collect();
    assert!(
        seldom.len() * 10 <= all.len(),
        "over 500 lines is for the few: {seldom:?}"
    );
}

#[test]
fn lines_are_short() {
    let mut broken = Vec::new();
    for (path, text) in sources(&[".rs", ".proto", ".yaml"]) {
        let long = text.lines().enumerate().filter(|(_, line)| line.chars().count() > 120);
        broken.extend(long.map(|(n, line)| format!("{path}:{}: {} columns", n + 1, line.chars().count())));
    }
    report("no line over 120 columns", broken);
}

#[test]
fn no_marks_of_work_left_undone() {
    let marks = [
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
        concat!("XX", "X:"),
        concat!("todo", "!("),
        concat!("dbg", "!("),
    ];
    let mut broken = Vec::new();
    for (path, text) in sources(&[".rs", ".toml", ".proto", ".yaml", ".md", "run"]) {
        for (n, line) in text.lines().enumerate() {
            broken.extend(
                marks
                    .iter()
                    .filter(|mark| line.contains(**mark))
                    .map(|mark| format!("{path}:{}: {mark}", n + 1)),
            );
        }
    }
    report("no marks of work left undone", broken);
}

#[test]
fn nothing_from_outside_can_panic() {
    let mut broken = Vec::new();
    for (path, text) in sources(&[".rs"]).into_iter().filter(|(path, _)| !is_test(path)) {
        for (n, line) in without_tests(&text).lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            let found = [".unwrap()", "panic!(", "unimplemented!("]
                .into_iter()
                .find(|call| code.contains(call));
            broken.extend(found.map(|call| format!("{path}:{}: {call}", n + 1)));
        }
    }
    report("no unwrap or panic outside tests", broken);
}

#[test]
fn unsafe_stands_where_it_may_with_its_reason() {
    // `bpf(2)` for device rules is the one call of the kernel's that the pure half makes.
    let allowed = [
        "shim/src/",
        "reconciler/src/world/linux/",
        "reconciler/src/container/spec/device_filter.rs",
    ];
    let mut broken = Vec::new();
    for (path, text) in sources(&[".rs"]).into_iter().filter(|(path, _)| !is_test(path)) {
        let lines: Vec<_> = without_tests(&text).lines().collect();
        for (n, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            if !code.contains("unsafe {") && !code.contains("unsafe fn") && !code.contains("unsafe impl") {
                continue;
            }
            if !allowed.iter().any(|dir| path.starts_with(dir)) {
                broken.push(format!("{path}:{}: unsafe outside of {allowed:?}", n + 1));
            }
            if !lines[n.saturating_sub(8)..=n]
                .iter()
                .any(|line| line.contains("SAFETY"))
            {
                broken.push(format!("{path}:{}: unsafe without a SAFETY line", n + 1));
            }
        }
    }
    report("unsafe", broken);
}

#[test]
fn every_crate_opens_with_its_purpose() {
    for name in ["state", "cri", "shim", "reconciler", "e2e"] {
        let text = fs::read_to_string(top().join(name).join("src/lib.rs")).expect("lib.rs");
        assert!(text.starts_with("//! "), "{name}/src/lib.rs opens with `//!`");
        assert!(text.contains("//! ```text"), "{name}/src/lib.rs has a picture");
    }
    let silent = sources(&[".rs"])
        .into_iter()
        .filter(|(_, text)| !text.is_empty() && !text.starts_with("//!"));
    let silent = silent.filter(|(path, _)| path.contains("/src/") && !path.ends_with("/mod.rs"));
    report(
        "every module says what it is for",
        silent.map(|(path, _)| path).collect(),
    );
}

#[test]
fn the_top_holds_nothing_else() {
    let allowed = [
        "Cargo.toml",
        "Cargo.lock",
        "README.md",
        "LICENSE",
        "rust-toolchain.toml",
        "deny.toml",
        "rustfmt.toml",
        "state",
        "cri",
        "shim",
        "reconciler",
        "examples",
        "e2e",
        "target",
    ];
    let other = fs::read_dir(top())
        .expect("list the top")
        .flatten()
        .map(|entry| entry.file_name());
    let other = other
        .map(|name| name.to_string_lossy().into_owned())
        .filter(|name| !name.starts_with('.'));
    report(
        "top-level entries",
        other.filter(|name| !allowed.contains(&name.as_str())).collect(),
    );
}

/// The direction of dependencies that Cargo cannot refuse because the binary shares a package with its library.
#[test]
fn who_may_name_whom() {
    let rules = [
        ("state/src/", &["cri::", "reconciler::", "shim::"][..]),
        ("shim/src/", &["cri::", "reconciler::", "state::"][..]),
        ("cri/src/", &["reconciler::", "shim::"][..]),
        ("reconciler/src/", &["cri::"][..]),
    ];
    let mut broken = Vec::new();
    for (path, text) in sources(&[".rs"]) {
        for (dir, forbidden) in rules {
            if !path.starts_with(dir) || path.starts_with("reconciler/src/bin/") {
                continue;
            }
            for (n, line) in text.lines().enumerate() {
                let code = line.split("//").next().unwrap_or_default().trim_start();
                let names =
                    |krate: &&&str| code.starts_with(&format!("use {krate}")) || code.contains(&format!(" ::{krate}"));
                broken.extend(
                    forbidden
                        .iter()
                        .filter(names)
                        .map(|krate| format!("{path}:{}: {krate}", n + 1)),
                );
            }
        }
    }
    report("cri -> state <- reconciler -> shim", broken);
}

#[test]
fn the_shim_is_static() {
    let Ok(shim) = e2e::tools::built("reconcile-shim") else {
        panic!("build it first: cargo build --release")
    };
    let out = std::process::Command::new("readelf").arg("-lW").arg(&shim).output();
    let Ok(out) = out else {
        panic!("readelf is part of binutils, which the Rust toolchain needs to link")
    };
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(text.contains("LOAD") && !text.contains("INTERP"), "{text}");
}
