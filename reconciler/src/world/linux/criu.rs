//! CRIU (criu(8)): finding it, asking whether it works on this kernel, and having it write the processes of a container
//! into image files. It is a program of the administrator's; what it prints is bounded all the same.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;
use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, makedev, statx};
use tokio::sync::oneshot;

use super::stop::Stop;

/// Directory of the image files, below the work directory.
pub const IMAGES: &str = "checkpoint";
/// CRIU's log, in the work directory.
pub const LOG: &str = "dump.log";
/// What it prints before it has a log, in the work directory.
const PRINTED: &str = "criu.err";
/// Of a text of the container's kernel view, at most.
const TEXT: u64 = 4 << 20;
/// Of a log, its end.
const END: u64 = 64 << 10;
/// Characters of a reason.
const REASON: usize = 300;

/// The program.
#[derive(Clone, Debug)]
pub struct Criu(PathBuf);

/// What shall be dumped.
#[derive(Clone, Debug)]
pub struct Dump {
    /// The container's first process, in our pid namespace.
    pub pid: i32,
    /// Empty, for [`IMAGES`], [`LOG`] and `stats-dump`.
    pub dir: PathBuf,
    /// The container's root as the host sees it.
    pub root: PathBuf,
    /// Its directory in the freezer's hierarchy.
    pub freezer: PathBuf,
    /// Mount points inside of what comes from outside.
    pub binds: Vec<String>,
    /// Paths inside that are hidden (OCI `linux.maskedPaths`).
    pub masked: Vec<String>,
    pub terminal: bool,
}

impl Criu {
    /// The first `criu` in `path`, the text of `PATH`.
    pub fn find(path: &OsStr) -> Option<Criu> {
        let runs = |program: &PathBuf| {
            let meta = program.metadata();
            meta.is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
        };
        let absolute = std::env::split_paths(path).filter(|dir| dir.is_absolute());
        absolute.map(|dir| dir.join("criu")).find(runs).map(Criu)
    }

    /// `criu check`: why it does not work on this kernel, if it does not. `dir` is for what it prints.
    pub async fn check(&self, dir: &Path, stop: &Stop) -> io::Result<Option<String>> {
        let status = self.run(&["check".into()], dir, stop).await?;
        Ok(complaint(status, &[dir.join(PRINTED)]))
    }

    /// Writes the images; the processes stay as they were, frozen if they were. Why CRIU failed, if it did.
    pub async fn dump(&self, dump: &Dump, stop: &Stop) -> io::Result<Option<String>> {
        fs::create_dir(dump.dir.join(IMAGES))?;
        // What a container has open may lie on a file system that hangs.
        let of = dump.clone();
        let arguments = tokio::task::spawn_blocking(move || arguments(&of)).await;
        let status = self
            .run(&arguments.map_err(io::Error::other)??, &dump.dir, stop)
            .await?;
        Ok(complaint(status, &[dump.dir.join(LOG), dump.dir.join(PRINTED)]))
    }

    async fn run(&self, arguments: &[OsString], dir: &Path, stop: &Stop) -> io::Result<ExitStatus> {
        let mut command = Command::new(&self.0);
        command.args(arguments).current_dir(dir).env_clear();
        command.envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(File::create(dir.join(PRINTED))?).process_group(0);
        finish(command, stop).await
    }
}

/// A child that may have to be killed, with its process group, while another thread waits for it.
#[derive(Default)]
struct Group {
    leader: Option<Pid>,
    cut: bool,
}

/// Runs a command to its end, or kills it when `stop` is told; it is gone either way. It dies with us too, lest it
/// freezes the container again when nobody is there to thaw it.
async fn finish(mut command: Command, stop: &Stop) -> io::Result<ExitStatus> {
    let us = std::process::id();
    let die_with_us = move || {
        // SAFETY: no pointers.
        if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong) } != 0 {
            return Err(io::Error::last_os_error());
        }
        match std::os::unix::process::parent_id() == us {
            true => Ok(()),
            false => Err(io::ErrorKind::BrokenPipe.into()),
        }
    };
    // SAFETY: two system calls, which are safe between fork and exec; nothing is allocated.
    unsafe { command.pre_exec(die_with_us) };
    let (tell, mut told) = oneshot::channel();
    let group = Arc::new(Mutex::new(Group::default()));
    let shared = group.clone();
    // PR_SET_PDEATHSIG means the thread that forked: a thread of the runtime's may end before the child does.
    let thread = std::thread::Builder::new().name("criu".to_owned());
    thread.spawn(move || tell.send(wait(command, &shared)))?;
    tokio::select! {
        ended = &mut told => return ended.map_err(io::Error::other)?,
        () = stop.wait() => {}
    }
    {
        let mut group = group.lock().unwrap_or_else(PoisonError::into_inner);
        group.cut = true;
        if let Some(leader) = group.leader {
            // It is not reaped while its pid stands here, so the id is still its own.
            let _ = killpg(leader, Signal::SIGKILL);
        }
    }
    let _ = told.await;
    Err(Stop::error())
}

fn wait(mut command: Command, group: &Mutex<Group>) -> io::Result<ExitStatus> {
    let lock = || group.lock().unwrap_or_else(PoisonError::into_inner);
    let mut child = {
        let mut group = lock();
        if group.cut {
            return Err(Stop::error());
        }
        let child = command.spawn()?;
        group.leader = i32::try_from(child.id()).ok().map(Pid::from_raw);
        child
    };
    let leader = lock().leader;
    if let Some(leader) = leader {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
        while waitid(Id::Pid(leader), flags) == Err(nix::errno::Errno::EINTR) {}
    }
    lock().leader = None;
    child.wait()
}

/// Why it failed, in its own words: the first error at the end of one of its logs.
fn complaint(status: ExitStatus, logs: &[PathBuf]) -> Option<String> {
    if status.success() {
        return None;
    }
    let told = logs.iter().find_map(|log| first_error(&end(log).unwrap_or_default()));
    Some(told.unwrap_or_else(|| status.to_string()))
}

fn end(log: &Path) -> io::Result<String> {
    let mut file = File::open(log)?;
    let start = file.metadata()?.len().saturating_sub(END);
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(END).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Lines are `(00.033417) Error (criu/vdso.c:381): vdso: …`. What follows the first error is its consequence.
fn first_error(log: &str) -> Option<String> {
    let errors = log.lines().filter_map(|line| Some(line.split_once("Error (")?.1));
    let words = errors.filter_map(|error| Some(error.split_once("): ")?.1.trim()));
    let printable = |word: &str| {
        word.replace(|c: char| c.is_control(), " ")
            .chars()
            .take(REASON)
            .collect()
    };
    words.filter(|word| !word.is_empty()).map(printable).next()
}

fn arguments(dump: &Dump) -> io::Result<Vec<OsString>> {
    let mut all: Vec<OsString> = Vec::new();
    let mut add = |words: &[&OsStr]| all.extend(words.iter().map(|word| word.to_os_string()));
    let images = dump.dir.join(IMAGES);
    add(&["dump".as_ref(), "--tree".as_ref(), dump.pid.to_string().as_ref()]);
    add(&[
        "--images-dir".as_ref(),
        images.as_ref(),
        "--work-dir".as_ref(),
        dump.dir.as_ref(),
    ]);
    add(&[
        "--log-file".as_ref(),
        LOG.as_ref(),
        "-v4".as_ref(),
        "--leave-running".as_ref(),
    ]);
    add(&[
        "--root".as_ref(),
        dump.root.as_ref(),
        "--freeze-cgroup".as_ref(),
        dump.freezer.as_ref(),
    ]);
    add(&["--manage-cgroups=ignore", "--tcp-established", "--file-locks"].map(OsStr::new));
    if dump.terminal {
        add(&["--shell-job".as_ref()]);
    }
    for resource in external(dump)? {
        add(&["--external".as_ref(), resource.as_ref()]);
    }
    // Whatever else is bound from outside.
    add(&["--external".as_ref(), "mnt[]:sm".as_ref()]);
    Ok(all)
}

/// What belongs to the container and not to its image or memory: given again by whoever restores it.
fn external(dump: &Dump) -> io::Result<Vec<String>> {
    let proc = PathBuf::from(format!("/proc/{}", dump.pid));
    let namespace = |of: &Path, name: &str| Ok::<_, io::Error>(of.join("ns").join(name).metadata()?.ino());
    let mut all = Vec::new();
    let net = namespace(&proc, "net")?;
    if net != namespace(Path::new("/proc/self"), "net")? {
        all.push(format!("net[{net}]:extRootNetNS"));
    }
    let pid = namespace(&proc, "pid")?;
    let shared = !is_first(&text(&proc.join("status"))?);
    if shared && pid != namespace(Path::new("/proc/self"), "pid")? {
        all.push(format!("pid[{pid}]:extRootPidNS"));
    }
    let table = text(&proc.join("mountinfo"))?;
    all.extend(mounts(&table, &dump.binds, &dump.masked));
    for pid in processes(dump)? {
        all.extend(streams(Path::new(&format!("/proc/{pid}")), &table)?);
    }
    all.sort();
    all.dedup();
    Ok(all)
}

/// Those in the frozen cgroup: nobody comes or goes.
fn processes(dump: &Dump) -> io::Result<Vec<i32>> {
    let listed = text(&dump.freezer.join("cgroup.procs"))?;
    let mut all: Vec<i32> = listed.lines().filter_map(|line| line.parse().ok()).collect();
    // 0 is who is in no pid namespace that we see.
    all.retain(|pid| *pid > 0);
    if !all.contains(&dump.pid) {
        all.push(dump.pid);
    }
    Ok(all)
}

/// FIFOs and terminals of the shim's that a process has open. Under any number: a shell that sends a command's output
/// elsewhere keeps its own at 10 meanwhile.
fn streams(proc: &Path, table: &str) -> io::Result<Vec<String>> {
    let mut all = Vec::new();
    for fd in fs::read_dir(proc.join("fd"))? {
        let fd = fd?;
        let link = fd.path();
        // Never asks the file system, which may hang: what is known here is enough.
        let quiet = AtFlags::STATX_DONT_SYNC;
        let Ok(meta) = statx(CWD, &link, quiet, StatxFlags::TYPE | StatxFlags::INO) else {
            continue;
        };
        let kind = FileType::from_raw_mode(meta.stx_mode.into());
        if !matches!(kind, FileType::Fifo | FileType::CharacterDevice) {
            continue;
        }
        let info = text(&proc.join("fdinfo").join(fd.file_name()))?;
        let mount = info
            .lines()
            .find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
        let Some(mount) = mount else { continue };
        let device = makedev(meta.stx_rdev_major, meta.stx_rdev_minor);
        if kind == FileType::CharacterDevice && is_terminal(device) {
            let holder = makedev(meta.stx_dev_major, meta.stx_dev_minor);
            all.push(format!("tty[{device:x}:{holder:x}]"));
        } else if !has_mount(table, mount) {
            all.push(format!("file[{mount:x}:{:x}]", meta.stx_ino));
        }
    }
    Ok(all)
}

fn text(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(TEXT).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Is it process 1 of its pid namespace (proc_pid_status(5), `NSpid`)?
fn is_first(status: &str) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    line.and_then(|pids| pids.split_whitespace().next_back()) == Some("1")
}

/// A pseudo-terminal's slave: majors 136 to 143.
fn is_terminal(device: u64) -> bool {
    (136..=143).contains(&nix::sys::stat::major(device))
}

fn has_mount(mountinfo: &str, id: u64) -> bool {
    let id = id.to_string();
    mountinfo
        .lines()
        .any(|line| line.split(' ').next() == Some(id.as_str()))
}

/// The mounts that come from outside, as runtimes name them to CRIU: by their place inside.
fn mounts(mountinfo: &str, binds: &[String], masked: &[String]) -> Vec<String> {
    let mut all = Vec::new();
    for line in mountinfo.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let kind = fields
            .iter()
            .position(|field| *field == "-")
            .and_then(|at| fields.get(at + 1));
        let (Some(root), Some(point), Some(kind)) = (fields.get(3), fields.get(4), kind) else {
            continue;
        };
        let point = unescaped(point);
        if binds.contains(&point) || kind.starts_with("cgroup") {
            all.push(format!("mnt[{point}]:{point}"));
        } else if masked.contains(&point) && *root != "/" {
            all.push(format!("mnt[{point}]:/dev/null"));
        }
    }
    all
}

/// Space, tab, newline and backslash are octal in mountinfo.
fn unescaped(point: &str) -> String {
    let mut plain = point.to_owned();
    for (octal, character) in [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")] {
        plain = plain.replace(octal, character);
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn the_first_error_is_the_reason() {
        let log = "(00.1) Warn  (criu/a.c:1): x\n(00.2) Error (criu/vdso.c:381): vdso: Unexpected\tbounds\n\
                   (00.3) Error (criu/b.c:2): failed\n";
        assert_eq!(first_error(log).unwrap(), "vdso: Unexpected bounds");
        assert_eq!(first_error("Error (criu/a.c:1): \nError (x): y").unwrap(), "y");
        assert_eq!(first_error("all is well"), None);
    }

    #[test]
    fn mounts_from_outside_are_external() {
        let table = "30 29 0:26 / / rw - overlay overlay rw\n\
                     31 30 0:5 / /proc rw - proc proc rw\n\
                     32 31 0:6 /null /proc/kcore rw - tmpfs tmpfs rw\n\
                     33 31 0:7 / /proc/acpi ro - tmpfs tmpfs ro\n\
                     34 30 8:1 /hosts /etc/hosts rw master:1 - ext4 /dev/sda1 rw\n\
                     35 30 8:1 /v /a\\040b rw shared:2 master:1 - ext4 /dev/sda1 rw\n\
                     36 30 0:8 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        let binds = ["/etc/hosts", "/a b"].map(str::to_owned);
        let masked = ["/proc/kcore", "/proc/acpi"].map(str::to_owned);
        let want = [
            "mnt[/proc/kcore]:/dev/null",
            "mnt[/etc/hosts]:/etc/hosts",
            "mnt[/a b]:/a b",
            "mnt[/sys/fs/cgroup]:/sys/fs/cgroup",
        ];
        assert_eq!(mounts(table, &binds, &masked), want);
        assert!(has_mount(table, 36) && !has_mount(table, 3));
    }

    #[test]
    fn process_1_of_a_namespace_is_known() {
        assert!(is_first("Name:\tsh\nNSpid:\t4242\t1\n"));
        assert!(!is_first("NSpid:\t4242\t17\n"));
        assert!(!is_first("NSpid:\t4242\n"));
    }

    #[test]
    fn only_what_can_be_run_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("criu");
        fs::write(&program, "").unwrap();
        assert!(Criu::find(dir.path().as_os_str()).is_none());
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(Criu::find(dir.path().as_os_str()).unwrap().0, program);
        assert!(Criu::find(OsStr::new("")).is_none());
    }

    #[tokio::test]
    async fn what_is_stopped_is_gone_with_its_group() {
        let (teller, stop) = Stop::new();
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 1000 & wait"]).process_group(0);
        let started = Instant::now();
        let run = tokio::spawn(async move { finish(command, &stop).await });
        tokio::time::sleep(Duration::from_millis(50)).await;
        teller.send(true).unwrap();
        assert!(run.await.unwrap().is_err());
        assert!(started.elapsed() < Duration::from_secs(5));
        let (_teller, stop) = Stop::new();
        let mut command = Command::new("sh");
        command.args(["-c", "exit 3"]);
        assert_eq!(finish(command, &stop).await.unwrap().code(), Some(3));
    }
}
