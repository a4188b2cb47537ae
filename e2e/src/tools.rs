//! Programs of the node that tests call: run, check, show what they said.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;

use anyhow::{Context, Result, anyhow, ensure};
use sha2::{Digest, Sha256};

/// Runs a command to its end; fails with its output if it does.
pub fn check(command: &mut Command) -> Result<Output> {
    let shown = format!("{command:?}");
    let out = command.output().with_context(|| format!("run {shown}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    ensure!(
        out.status.success(),
        "{shown}: {}\n{}{}",
        out.status,
        text(&out.stdout),
        text(&out.stderr)
    );
    Ok(out)
}

/// True if the program can be run. A test that goes on without it prints SKIPPED, which `.ci/run` counts as a failure.
pub fn installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|dir| dir.join(program).is_file());
    if !found {
        eprintln!("SKIPPED: the program {program} is not installed");
    }
    found
}

/// A program built beside this test, `target/release/<name>`; or below `$RECONCILE_BIN_DIR`, to test an installed one.
pub fn built(name: &str) -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os("RECONCILE_BIN_DIR") {
        return Ok(PathBuf::from(dir).join(name));
    }
    let exe = std::env::current_exe().context("the test's own path")?;
    let dirs = exe.ancestors().skip(1).take(3).map(|dir| dir.join(name));
    let mut dirs = dirs.filter(|path| path.is_file());
    dirs.next()
        .with_context(|| format!("{name} is not built: run `cargo build --release` first"))
}

/// A Go program of the module `conformance`, built into the user's cache if the module is newer. Without Go the test
/// prints SKIPPED.
pub fn go_program(name: &str, package: &str) -> Result<Option<PathBuf>> {
    go(name, package, &["build"])
}

/// The same of a package that is a suite of tests.
pub fn go_suite(name: &str, package: &str) -> Result<Option<PathBuf>> {
    go(name, package, &["test", "-c"])
}

fn go(name: &str, package: &str, verb: &[&str]) -> Result<Option<PathBuf>> {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock();
    if !installed("go") {
        return Ok(None);
    }
    let module = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("conformance");
    let program = cache()?.join(name);
    let changed = |path: &Path| std::fs::metadata(path).and_then(|meta| meta.modified()).ok();
    let source = module.join(package).join("main.go");
    let newest = [changed(&module.join("go.sum")), changed(&source)]
        .into_iter()
        .max()
        .flatten();
    if changed(&program).is_none_or(|built| Some(built) < newest) {
        compile(&module, package, verb, &program)?;
    }
    Ok(Some(program))
}

/// Kubernetes' kubelet, of the module `kubelet`. It takes minutes to build, so its name in the user's cache bears a
/// digest of what it is made from, and a new clone takes the one that is there. Without Go the test prints SKIPPED.
pub fn kubelet() -> Result<Option<PathBuf>> {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock();
    if !installed("go") {
        return Ok(None);
    }
    let module = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("kubelet");
    let mut hash = Sha256::new();
    for file in ["go.sum", "main.go"] {
        hash.update(std::fs::read(module.join(file)).with_context(|| format!("read {file} of the module kubelet"))?);
    }
    let digest: String = hash
        .finalize()
        .iter()
        .take(6)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let program = cache()?.join(format!("kubelet-{digest}"));
    if !program.is_file() {
        compile(&module, ".", &["build", "-p", "2", "-ldflags", "-s -w"], &program)?;
    }
    Ok(Some(program))
}

/// Where programs that tests build are kept.
fn cache() -> Result<PathBuf> {
    let home = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = home
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))
        .context("no HOME")?;
    Ok(home.join("reconcile-ci"))
}

fn compile(module: &Path, package: &str, verb: &[&str], program: &Path) -> Result<()> {
    std::fs::create_dir_all(program.parent().context("cache directory")?)?;
    // A test of another process may be running the old one.
    let new = program.with_extension(std::process::id().to_string());
    let mut go = Command::new("go");
    // Static: some run in images that have no libraries.
    go.env("CGO_ENABLED", "0");
    go.current_dir(module).args(verb).arg("-o").arg(&new).arg(package);
    check(&mut go).with_context(|| format!("build {}", program.display()))?;
    std::fs::rename(&new, program)?;
    Ok(())
}

/// Makes a certificate of this name, signed by itself, and its key, both in PEM.
pub fn certificate(cert: &Path, key: &Path, name: &str) -> Result<()> {
    let mut command = Command::new("openssl");
    command.args("req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2".split(' '));
    command.args(["-subj", &format!("/CN={name}"), "-keyout"]).arg(key);
    check(command.arg("-out").arg(cert)).map(drop)
}

/// Runs `work` on a thread inside a network namespace. A socket it returns stays there, and holds the namespace.
pub fn in_netns<T: Send + 'static>(
    netns: impl AsRef<Path>,
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> Result<T> {
    let netns = netns.as_ref().to_owned();
    let inside = move || -> Result<T> {
        let file = File::open(&netns).with_context(|| netns.display().to_string())?;
        nix::sched::setns(file, nix::sched::CloneFlags::CLONE_NEWNET).context("enter the network namespace")?;
        Ok(work()?)
    };
    std::thread::spawn(inside)
        .join()
        .map_err(|_| anyhow!("the thread in the network namespace panicked"))?
}

/// The environment under which a program's wall clock is moved: `+2h`, `-365d`. Clocks that never jump stay.
pub fn clock(shift: &str) -> Result<Vec<(&'static str, String)>> {
    let library = format!(
        "/usr/lib/{}-linux-gnu/faketime/libfaketimeMT.so.1",
        std::env::consts::ARCH
    );
    ensure!(Path::new(&library).exists(), "install the Debian package libfaketime");
    Ok(vec![
        ("LD_PRELOAD", library),
        ("FAKETIME", shift.to_owned()),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
    ])
}
