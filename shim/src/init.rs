//! Making a container: in a forked child that calls libcontainer and exits, so that its heap does not stay and
//! nothing runs under threads. The container's first process becomes the *shim's* child (CLONE_PARENT).
//!
//! libcontainer gets a spec without user, capabilities, filter, labels, limits and bind mounts: it makes namespaces,
//! the base mounts and the cgroup, then calls [`Become`], which does the rest itself. An OCI runtime's program, if one
//! is asked for, gets the whole spec instead (see [`runtime`]).

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libcontainer::container::builder::ContainerBuilder;
use libcontainer::syscall::syscall::SyscallType;
use oci_spec::runtime::{
    Linux, LinuxNamespace, LinuxNamespaceBuilder, LinuxNamespaceType, PosixRlimit, PosixRlimitType, Process, Spec,
};

use crate::r#become::{Become, message};
use crate::mounts::{self, Mounts};
use crate::runtime::{self, Runtime};
use crate::{cgroup, sys};
use shim::fault;
use shim::record::{self, Start};

/// Largest config.json and filter taken, bytes.
const CONFIG: u64 = 16 << 20;
const FILTER: u64 = 8 * 4096;

/// Which pid namespace a container gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PidNs {
    Own,
    Host,
    /// That of a living process.
    Of(u32),
}

/// All that making a container takes.
pub struct Plan {
    pub id: String,
    /// The shim's directory.
    pub dir: PathBuf,
    pub spec: Spec,
    pub pid: PidNs,
    pub record: PathBuf,
    /// CLOCK_BOOTTIME ns, 0 = never.
    pub start_by: u64,
    pub seccomp: Option<Vec<u8>>,
    /// stdin, stdout, stderr; taken by who makes the container.
    pub stdio: Option<[OwnedFd; 3]>,
    /// `None`: libcontainer makes it.
    pub runtime: Option<Runtime>,
}

/// Reads a bundle: its spec and its filter.
pub fn load(bundle: &Path) -> Result<(Spec, Option<Vec<u8>>), String> {
    let read = |name: &str, limit: u64| {
        let path = bundle.join(name);
        let told = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        match fs::metadata(&path).map_err(|error| told(&error))?.len() {
            len if len > limit => Err(told(&format_args!("{len} bytes, at most {limit} are taken"))),
            _ => fs::read(&path).map_err(|error| told(&error)),
        }
    };
    let config = read("config.json", CONFIG)?;
    let spec = serde_json::from_slice(&config)
        .map_err(|error| format!("{}: {error}", bundle.join("config.json").display()))?;
    let filter = bundle
        .join("seccomp.bpf")
        .exists()
        .then(|| read("seccomp.bpf", FILTER))
        .transpose()?;
    Ok((spec, filter))
}

/// Where libcontainer, or an OCI runtime's program, keeps its state of a container, and the derived bundle.
pub fn state_dirs(dir: &Path, id: &str) -> (PathBuf, PathBuf) {
    (dir.join("c"), dir.join("b").join(id))
}

/// Removes what either left.
pub fn forget(dir: &Path, id: &str) {
    let (root, bundle) = state_dirs(dir, id);
    for gone in [root.join(id), bundle] {
        if let Err(error) = fs::remove_dir_all(&gone)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            crate::note!("remove {}: {error}", gone.display());
        }
    }
}

impl Plan {
    /// In the forked child: makes and starts the container, tells the channel, ends.
    pub fn run(self, channel: &OwnedFd) -> ! {
        match self.steps(channel.as_raw_fd()) {
            Ok(()) => sys::exit(0),
            Err(error) => crate::r#become::fail(channel.as_raw_fd(), &error),
        }
    }

    fn steps(mut self, channel: RawFd) -> Result<(), String> {
        self.in_time()?;
        let process = self.spec.process().clone().ok_or("config.json: process: missing")?;
        if let Some(score) = process.oom_score_adj() {
            oom_score(score);
        }
        let (root, bundle) = state_dirs(&self.dir, &self.id);
        for dir in [&root, &bundle] {
            fs::create_dir_all(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
        }
        if let Some(runtime) = self.runtime.take() {
            return runtime::make(self, &runtime, channel);
        }
        if let Some(path) = self
            .spec
            .linux()
            .as_ref()
            .and_then(|linux| linux.cgroups_path().as_ref())
        {
            cgroup::enter_scope(path).map_err(|error| error.to_string())?;
        }
        let spec = serde_json::to_vec(&derive(&self.spec, &self.pid)?).map_err(|error| error.to_string())?;
        fault::point("shim.maker.derived");
        fs::write(bundle.join("config.json"), spec).map_err(|error| format!("{}: {error}", bundle.display()))?;
        let executor = Become {
            process: process.clone(),
            seccomp: self.seccomp.clone(),
            channel,
            first: Some(Arc::new(Mounts::open(&self.spec)?)),
        };
        let [stdin, stdout, stderr] = self.stdio.take().ok_or("no stdio")?;
        let mut container = ContainerBuilder::new(self.id.clone(), SyscallType::default())
            .with_executor(executor)
            .with_root_path(&root)
            .map_err(chain)?
            .with_stdin(stdin)
            .with_stdout(stdout)
            .with_stderr(stderr)
            .as_init(&bundle)
            .with_systemd(false)
            .with_detach(true)
            .as_sibling(true)
            .build()
            .map_err(chain)?;
        let pid = container.pid().ok_or("libcontainer made no process")?.as_raw() as u32;
        let start = made(pid, channel)?;
        for limit in process.rlimits().iter().flatten() {
            set_limit(pid, limit)?;
        }
        self.begin(&start)?;
        container.start().map_err(chain)?;
        fault::point("shim.maker.after");
        Ok(())
    }

    /// Records the start, if it is still wanted. After this the program may run.
    pub fn begin(&self, start: &Start) -> Result<(), String> {
        record::write_start(&self.record, start).map_err(|error| error.to_string())?;
        self.in_time()?;
        fault::point("shim.maker.recorded");
        Ok(())
    }

    fn in_time(&self) -> Result<(), String> {
        if self.start_by != 0 && sys::boot() >= self.start_by {
            Err(late())
        } else {
            Ok(())
        }
    }
}

/// Tells the shim of the container's first process.
pub fn made(pid: u32, channel: RawFd) -> Result<Start, String> {
    let start = Start {
        pid,
        start_ticks: sys::start_ticks(pid).ok_or("the container's first process is gone already")?,
        boot_id: sys::boot_id(),
        started_at: sys::now(),
    };
    fault::point("shim.maker.built");
    let mut made = vec![message::MADE];
    made.extend(start.pid.to_le_bytes());
    made.extend(start.start_ticks.to_le_bytes());
    made.extend(start.started_at.to_le_bytes());
    sys::send(channel, &made, &[]).map_err(|error| format!("tell the shim: {error}"))?;
    Ok(start)
}

fn late() -> String {
    "its call's deadline had passed before the program could begin".into()
}

/// An error with its causes, each once.
fn chain(error: impl std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}

/// The spec that libcontainer gets.
pub fn derive(spec: &Spec, pid: &PidNs) -> Result<Spec, String> {
    let mut spec = spec.clone();
    let mut process = Process::default();
    if let Some(given) = spec.process() {
        process.set_args(given.args().clone());
    }
    // With HOME set libcontainer does not call getpwuid, which in a static program would load the *container's* NSS
    // modules, as root.
    process
        .set_env(Some(vec!["HOME=/".into()]))
        .set_cwd("/".into())
        .set_capabilities(None)
        .set_rlimits(None)
        .set_no_new_privileges(None);
    process.set_terminal(Some(false)).set_oom_score_adj(None);
    spec.set_process(Some(process));
    let mut linux = spec.linux().clone().ok_or("config.json: linux: missing")?;
    linux
        .set_seccomp(None)
        .set_rootfs_propagation(Some("private".into()))
        // Those mounts that shall have it have it as an option: libcontainer gives it to cgroups and queues too.
        .set_mount_label(None)
        .set_masked_paths(None)
        .set_readonly_paths(None);
    spec.set_mounts(Some(mounts::early(&spec)));
    if let Some(root) = spec.root_mut() {
        root.set_readonly(Some(false));
    }
    linux.set_namespaces(Some(namespaces(&linux, pid)?));
    spec.set_linux(Some(linux));
    Ok(spec)
}

/// The namespaces with the pid namespace that is known only now.
pub fn namespaces(linux: &Linux, pid: &PidNs) -> Result<Vec<LinuxNamespace>, String> {
    let mut namespaces = linux.namespaces().clone().unwrap_or_default();
    namespaces.retain(|namespace| namespace.typ() != LinuxNamespaceType::Pid);
    let builder = LinuxNamespaceBuilder::default().typ(LinuxNamespaceType::Pid);
    match pid {
        PidNs::Host => {}
        PidNs::Own => namespaces.push(builder.build().map_err(|error| error.to_string())?),
        PidNs::Of(pid) => {
            let path = PathBuf::from(format!("/proc/{pid}/ns/pid"));
            namespaces.push(builder.path(path).build().map_err(|error| error.to_string())?);
        }
    }
    Ok(namespaces)
}

/// Sets this process's OOM score for its children to inherit. Refused without CAP_SYS_RESOURCE when lower: then it
/// stays what it is, for a container that can run is worth more than its rank.
pub fn oom_score(score: i32) {
    let file = OpenOptions::new().write(true).open("/proc/self/oom_score_adj");
    if let Err(error) = file.and_then(|mut file| file.write_all(score.to_string().as_bytes())) {
        crate::note!("oom_score_adj {score}: {error}; left as it is");
    }
}

/// Sets a limit of a process, as far as allowed: without CAP_SYS_RESOURCE a hard limit cannot rise.
pub fn set_limit(pid: u32, limit: &PosixRlimit) -> Result<(), String> {
    let kind = resource(limit.typ());
    let pid = pid as libc::pid_t;
    let wanted = libc::rlimit {
        rlim_cur: limit.soft().min(limit.hard()),
        rlim_max: limit.hard(),
    };
    let mut old = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    let told = |error| format!("process.rlimits {:?}: {error}", limit.typ());
    // SAFETY: the pointers are those of live rlimits, which are rlimit64s on 64-bit machines.
    unsafe {
        if libc::prlimit(pid, kind, &wanted, std::ptr::null_mut()) == 0 {
            return Ok(());
        }
        sys::check(libc::prlimit(pid, kind, std::ptr::null(), &mut old)).map_err(told)?;
        let rlim_max = wanted.rlim_max.min(old.rlim_max);
        let clamped = libc::rlimit {
            rlim_cur: wanted.rlim_cur.min(rlim_max),
            rlim_max,
        };
        crate::note!("rlimit {:?} {}: clamped to {rlim_max}", limit.typ(), wanted.rlim_max);
        sys::check(libc::prlimit(pid, kind, &clamped, std::ptr::null_mut()))
            .map(drop)
            .map_err(told)
    }
}

/// Makes room for a limit on what this process starts; answers how high its hard limit may be.
pub fn raise_limit(limit: &PosixRlimit) -> Result<u64, String> {
    let kind = resource(limit.typ());
    let mut old = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the pointers are those of live rlimits.
    unsafe {
        let told = |error| format!("process.rlimits {:?}: {error}", limit.typ());
        sys::check(libc::getrlimit(kind, &mut old)).map_err(told)?;
        let raised = libc::rlimit {
            rlim_max: old.rlim_max.max(limit.hard()),
            ..old
        };
        if libc::setrlimit(kind, &raised) == 0 {
            return Ok(raised.rlim_max);
        }
    }
    crate::note!("rlimit {:?} {}: clamped to {}", limit.typ(), limit.hard(), old.rlim_max);
    Ok(old.rlim_max)
}

fn resource(kind: PosixRlimitType) -> libc::__rlimit_resource_t {
    use PosixRlimitType::*;
    match kind {
        RlimitCpu => libc::RLIMIT_CPU,
        RlimitFsize => libc::RLIMIT_FSIZE,
        RlimitData => libc::RLIMIT_DATA,
        RlimitStack => libc::RLIMIT_STACK,
        RlimitCore => libc::RLIMIT_CORE,
        RlimitRss => libc::RLIMIT_RSS,
        RlimitNproc => libc::RLIMIT_NPROC,
        RlimitNofile => libc::RLIMIT_NOFILE,
        RlimitMemlock => libc::RLIMIT_MEMLOCK,
        RlimitAs => libc::RLIMIT_AS,
        RlimitLocks => libc::RLIMIT_LOCKS,
        RlimitSigpending => libc::RLIMIT_SIGPENDING,
        RlimitMsgqueue => libc::RLIMIT_MSGQUEUE,
        RlimitNice => libc::RLIMIT_NICE,
        RlimitRtprio => libc::RLIMIT_RTPRIO,
        RlimitRttime => libc::RLIMIT_RTTIME,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_of_files_is_an_option_of_own_file_systems() {
        let mount = |kind: &str| {
            let mut mount = oci_spec::runtime::Mount::default();
            mount
                .set_typ(Some(kind.into()))
                .set_destination(format!("/{kind}").into());
            mount
        };
        let mut spec = Spec::default();
        let mut linux = spec.linux().clone().unwrap_or_default();
        linux.set_mount_label(Some("u:object_r:t:s0:c1,c2".into()));
        spec.set_mounts(Some(["tmpfs", "proc", "cgroup", "devpts"].map(mount).into()))
            .set_linux(Some(linux));
        let spec = derive(&spec, &PidNs::Own).unwrap();
        assert_eq!(spec.linux().as_ref().unwrap().mount_label(), &None);
        let labelled = |mount: &&oci_spec::runtime::Mount| {
            let options = mount.options().as_deref().unwrap_or_default();
            options.iter().any(|o| o == "context=u:object_r:t:s0:c1,c2")
        };
        let mounts = spec.mounts().as_deref().unwrap();
        let labelled: Vec<_> = mounts
            .iter()
            .filter(labelled)
            .map(|m| m.destination().to_str().unwrap())
            .collect();
        assert_eq!(labelled, ["/dev", "/tmpfs", "/devpts"]);
    }

    #[test]
    fn libcontainer_gets_no_identity() {
        let spec = derive(&Spec::default(), &PidNs::Of(7)).unwrap();
        let process = spec.process().as_ref().unwrap();
        assert_eq!((process.user().uid(), process.cwd().to_str()), (0, Some("/")));
        assert_eq!(process.env().as_deref(), Some(&["HOME=/".to_owned()][..]));
        assert!(process.capabilities().is_none() && process.no_new_privileges().is_none());
        let linux = spec.linux().as_ref().unwrap();
        let pids = |namespace: &&oci_spec::runtime::LinuxNamespace| namespace.typ() == LinuxNamespaceType::Pid;
        let path = linux
            .namespaces()
            .as_ref()
            .unwrap()
            .iter()
            .find(pids)
            .unwrap()
            .path()
            .clone();
        assert_eq!(path.unwrap().to_str(), Some("/proc/7/ns/pid"));
        let host = derive(&Spec::default(), &PidNs::Host).unwrap();
        assert_eq!(
            host.linux()
                .as_ref()
                .unwrap()
                .namespaces()
                .as_ref()
                .unwrap()
                .iter()
                .find(pids),
            None
        );
    }
}
