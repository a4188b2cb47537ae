//! Stage `bundle`: the OCI configuration, the seccomp filter and the writable layer's directories.
//!
//! Made once and never compared by its text, so that an upgrade changes nothing that runs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use oci_spec::runtime::Spec;
use serde::Deserialize;
use state::container::{ContainerKind, ContainerStatus, ContainerUser};
use state::sandbox::Profile;
use state::{Container, PodSandbox};

use super::spec::{self, HostFacts, Input, SandboxFiles, SpecError};
use super::{Stand, cgroup_path, dir, image_volumes, seccomp, selinux, volumes};
use crate::config::handlers::{Program, Ready};
use crate::engine::Context;
use crate::engine::stage::{Stage, Step, Undone, Why};
use crate::error::{Error, Result};
use crate::sandbox;
use crate::world::linux::apparmor;
use crate::world::linux::passwd::UserRequest;
use crate::world::paths::DIR_MODE;
use crate::world::{Paths, World};

pub struct Bundle;

/// Key under which the effective stop signal stands among the annotations (OCI image-spec's name for it).
const STOP_SIGNAL: &str = "org.opencontainers.image.stopSignal";
/// File that names the program which makes the container, if it is not the shim's own executor.
const RUNTIME: &str = "runtime.json";

pub fn path(paths: &Paths, object: &Container) -> PathBuf {
    dir(paths, object).join("bundle")
}

/// What of `config.json` the daemon needs again.
#[derive(Deserialize)]
pub struct Have {
    process: Process,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
    #[serde(skip)]
    path: PathBuf,
    #[serde(skip)]
    text: String,
}

#[derive(Deserialize)]
struct Process {
    user: User,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct User {
    uid: u32,
    gid: u32,
    #[serde(default)]
    additional_gids: Vec<u32>,
}

impl Have {
    /// `None` before the stage has run.
    pub fn read(world: &World, object: &Container) -> Result<Option<Have>> {
        let path = path(&world.paths, object).join("config.json");
        let Some(text) = world.files.read(&path)? else {
            return Ok(None);
        };
        // It is not flushed: a power cut may leave it empty, and then it is made again.
        let unreadable = |e: &serde_json::Error| tracing::warn!(path = %path.display(), "unreadable: {e}");
        let Ok(have) = serde_json::from_slice::<Have>(&text).inspect_err(unreadable) else {
            return Ok(None);
        };
        Ok(Some(Have {
            path,
            text: String::from_utf8_lossy(&text).into_owned(),
            ..have
        }))
    }

    /// Effective stop signal, e.g. `SIGTERM`.
    pub fn stop_signal(&self) -> &str {
        self.annotations.get(STOP_SIGNAL).map_or("SIGTERM", String::as_str)
    }
}

impl Stage<ContainerKind> for Bundle {
    type Have = Option<Have>;
    const NAME: &'static str = "bundle";

    async fn observe(cx: &Context, object: &Container) -> Result<Option<Have>> {
        Have::read(&cx.world, object)
    }

    fn diff(_: &Container, have: &Option<Have>) -> Step {
        match have {
            Some(_) => Step::Keep,
            None => Step::Make(Why::new("Absent", "")),
        }
    }

    fn present(have: &Option<Have>) -> bool {
        have.is_some()
    }

    fn report(have: &Option<Have>, status: &mut ContainerStatus) {
        let Some(have) = have else { return };
        let user = &have.process.user;
        let mut groups = user.additional_gids.clone();
        groups.push(user.gid);
        groups.sort_unstable();
        groups.dedup();
        status.user = Some(ContainerUser {
            uid: user.uid,
            gid: user.gid,
            groups,
        });
        status.stop_signal = have.stop_signal().to_owned();
        status.bundle = have.path.display().to_string();
        status.runtime_spec = Some(have.text.as_str().into());
    }

    async fn act(cx: &Context, object: &Container, _: &Step) -> Result<()> {
        let sandbox = sandbox::of(cx, object)?;
        let stand = Stand::of(cx, object)?;
        let host = host(object).await?;
        // Settled here: what was made for one runtime is not run by another, however the configuration changes.
        let live = cx.live();
        let handler = sandbox::handler(&live, &sandbox)?;
        let (spec, filter) = configure(cx, &sandbox, object, &stand, &host, handler).await?;
        let dir = path(&cx.world.paths, object);
        let files = &cx.world.files;
        files.make_dir(&dir, DIR_MODE)?;
        for name in ["upper", "work"] {
            make_layer_dir(&cx.world, &super::dir(&cx.world.paths, object).join(name))?;
        }
        match filter {
            Some(filter) => files.replace(&dir.join("seccomp.bpf"), &filter)?,
            None => files.unlink(&dir.join("seccomp.bpf"))?,
        }
        match &handler.program {
            Some(program) => {
                let text = serde_json::to_vec(program).map_err(std::io::Error::other);
                files.replace(&dir.join(RUNTIME), &text.map_err(Error::io("write", &dir))?)?;
            }
            None => files.unlink(&dir.join(RUNTIME))?,
        }
        // Last: it says that the bundle is whole.
        let text = serde_json::to_vec(&spec).map_err(std::io::Error::other);
        files.replace(&dir.join("config.json"), &text.map_err(Error::io("write", &dir))?)?;
        cx.world.runs.add(&super::dir(&cx.world.paths, object))
    }

    async fn undo(cx: &Context, object: &Container) -> Result<Undone> {
        cx.world
            .files
            .unlink(&path(&cx.world.paths, object).join("config.json"))?;
        Ok(Undone::Done)
    }
}

/// The program that the bundle was made for; `None` is the executor within the shim.
pub fn program(world: &World, object: &Container) -> Result<Option<Program>> {
    let path = path(&world.paths, object).join(RUNTIME);
    let Some(text) = world.files.read(&path)? else {
        return Ok(None);
    };
    let read = serde_json::from_slice(&text).map_err(std::io::Error::other);
    read.map(Some).map_err(Error::io("read", &path))
}

/// Annotations of the pod and the container that the handler lets through; the container's own win.
fn annotations(handler: &Ready, sandbox: &PodSandbox, object: &Container) -> BTreeMap<String, String> {
    let all = sandbox.meta.annotations.iter().chain(&object.meta.annotations);
    let let_through = |key: &str| handler.annotations.iter().any(|glob| glob.matches(key));
    all.filter(|(key, _)| let_through(key))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect()
}

/// What must be known of the host; sees to it that the default AppArmor profile is there if it is needed.
async fn host(object: &Container) -> Result<HostFacts> {
    let host = HostFacts::read().map_err(refused)?;
    let security = &object.spec.security;
    let default = !security.privileged && matches!(security.apparmor, None | Some(Profile::RuntimeDefault));
    let loaded = |names: &Vec<String>| names.iter().any(|name| name == apparmor::DEFAULT);
    if !default || host.apparmor.as_ref().is_none_or(loaded) {
        return Ok(host);
    }
    let done = tokio::task::spawn_blocking(apparmor::load_default).await;
    match done.map_err(|source| Error::Task {
        op: "load AppArmor profile",
        source,
    })? {
        Ok(()) => HostFacts::read().map_err(refused),
        // Whether it goes on without is for the configuration to say.
        Err(_) => Ok(host),
    }
}

/// The root of the writable layer is the container's `/`: its mode must let every user in.
fn make_layer_dir(world: &World, path: &Path) -> Result<()> {
    world.files.make_dir(path, DIR_MODE)?;
    world.files.set_mode(path, 0o755)
}

async fn configure(
    cx: &Context,
    sandbox: &PodSandbox,
    object: &Container,
    stand: &Stand,
    host: &HostFacts,
    handler: &Ready,
) -> Result<(Spec, Option<Vec<u8>>)> {
    let paths = &cx.world.paths;
    let user = look_up_user(cx, object, stand).await?;
    let pins = sandbox::pins(paths, sandbox);
    let files = sandbox::files(paths, sandbox);
    let path_of = |path: Option<PathBuf>| path.filter(|p| cx.world.netns.observe(p).is_ok());
    let stop_signal = spec::signal::stop_signal(&object.spec, &stand.config).map_err(refused)?;
    let cdi = spec::cdi::names(&object.spec.cdi_devices, &object.meta.annotations);
    let labels = selinux::labels(cx, sandbox, object)?;
    let label = labels.mount.as_deref();
    let images = image_volumes::ensure(cx, sandbox, object, stand, label).await?;
    let (mounts, devices) = sources(object, images, host, label).await?;
    let live = cx.live();
    let seccomp = seccomp_context(object, host)?;
    let wish = object.spec.security.seccomp.as_ref().or(Some(&live.seccomp));
    let privileged = object.spec.security.privileged;
    let told = |e: seccomp::SeccompError| Error::Refused(e.to_string());
    let foreign = match &handler.program {
        Some(_) => Some(spec::Foreign {
            features: handler.features,
            seccomp: seccomp::oci(wish, privileged, &seccomp).map_err(told)?,
        }),
        None => None,
    };
    let mut through = annotations(handler, sandbox, object);
    through.insert(STOP_SIGNAL.to_owned(), spec::signal::name(stop_signal));
    let input = Input {
        sandbox,
        container: object,
        image: &stand.config,
        image_ref: &object.spec.image.requested,
        user: &user,
        rootfs: paths.rootfs(sandbox.uid(), object.uid()),
        cgroup_path: cgroup_path(cx, sandbox, object),
        netns: path_of(pins.net),
        ipc: path_of(pins.ipc),
        uts: path_of(pins.uts),
        userns: path_of(pins.user.map(|user| user.path)),
        files: SandboxFiles {
            hostname: files.hostname,
            hosts: files.hosts,
            resolv_conf: files.resolv_conf,
            shm: files.shm,
        },
        mounts,
        devices,
        cdi: spec::cdi::resolve(&cdi, &spec::cdi::DIRECTORIES).map_err(refused)?,
        volumes: volumes::ensure(cx, object, stand, label).await?,
        annotations: through,
        handler: spec::Handler {
            privileged_without_host_devices: handler.privileged_without_host_devices,
            cgroup_writable: handler.cgroup_writable,
            base: handler.base.clone(),
            foreign,
        },
        rlimits: live.rlimits.clone(),
        labels,
        host,
    };
    let spec = spec::build(&input).map_err(refused)?;
    // The shim's execs load it whoever made the container.
    let filter = seccomp::filter(wish, privileged, &seccomp).map_err(told)?;
    Ok((spec, filter.map(|bytes| bytes.to_vec())))
}

/// What the host has at the paths that the record names; the mounts that ask for it get the label. In a thread
/// of its own: the file system there may hang.
async fn sources(
    object: &Container,
    images: BTreeMap<usize, PathBuf>,
    host: &HostFacts,
    label: Option<&str>,
) -> Result<(Vec<spec::ResolvedMount>, Vec<spec::ResolvedDevice>)> {
    if object.spec.mounts.is_empty() && object.spec.devices.is_empty() {
        return Ok((Vec::new(), Vec::new()));
    }
    let (wishes, devices, host) = (object.spec.mounts.clone(), object.spec.devices.clone(), host.clone());
    let label = label.map(str::to_owned);
    let found = tokio::task::spawn_blocking(move || {
        let mounts = spec::resolve_mounts(&wishes, &images, &host)?;
        let devices = spec::resolve_devices(&devices)?;
        if let Some(label) = label {
            selinux::relabel(&wishes, &mounts, &label)?;
        }
        Ok((mounts, devices))
    });
    let found = found.await.map_err(|source| Error::Task {
        op: "look at mount sources",
        source,
    })?;
    found.map_err(refused)
}

async fn look_up_user(cx: &Context, object: &Container, stand: &Stand) -> Result<spec::ResolvedUser> {
    let security = &object.spec.security;
    let request = UserRequest {
        run_as_username: security.run_as_username.clone(),
        run_as_user: security.run_as_user,
        run_as_group: security.run_as_group,
        image_user: stand.config.user.clone(),
        supplemental_groups: security.supplemental_groups.clone(),
        groups_policy: security.groups_policy,
    };
    let image = &object.spec.image.requested;
    let user = cx.world.images.user(image, &stand.chain_ids, request).await?;
    Ok(spec::ResolvedUser {
        uid: user.uid,
        gid: user.gid,
        groups: user.groups,
        home: user.home.unwrap_or_default(),
    })
}

/// What a seccomp profile's conditions are asked about.
fn seccomp_context(object: &Container, host: &HostFacts) -> Result<seccomp::Context> {
    let capabilities = spec::capability::bounding(&object.spec.security, host.capabilities).map_err(refused)?;
    Ok(seccomp::Context {
        capabilities,
        kernel: host.kernel,
        arch: seccomp::Arch::NATIVE,
        deny_socketcall: false,
    })
}

fn refused(e: SpecError) -> Error {
    match e {
        SpecError::Host { doing, path, source } => Error::Io {
            op: doing,
            path,
            source,
        },
        e => Error::Refused(e.to_string()),
    }
}
